"""Forms of answers as grammars, which a local model's tokens are held to."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

# JSON without blanks between its parts: small models fall into writing blanks for ever where a grammar lets them.
_PARTS = {
    "null": '"null"',
    "boolean": '("true" | "false")',
    "integer": '("-"? ("0" | [1-9] [0-9]{0,17}))',
    "number": '("-"? ("0" | [1-9] [0-9]{0,17}) ("." [0-9]{1,17})?)',
    "string": r'("\"" ([^"\\\x00-\x1f] | "\\" (["\\/bfnrt] | "u" [0-9a-fA-F]{4}))* "\"")',
}


def grammar_of(schema: Mapping[str, Any], choice: str) -> str:
    """A grammar in EBNF for the JSON Schema of an answer, as answerschema.Node gives it: objects with all their columns
    in order; what else it says of values (lengths, ranges, patterns) is left to whoever checks them. An object of
    nothing but `choice`, if that is given, is that text alone, which takes the fewest tokens.
    """
    only = schema.get("properties", {})
    if choice and list(only) == [choice] and "enum" in only[choice]:
        return "root ::= " + " | ".join(_quoted(text) for text in only[choice]["enum"])
    return f"root ::= {_part(schema)}"


def _part(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return "(" + " | ".join(_quoted(json.dumps(text)) for text in schema["enum"]) + ")"
    if "anyOf" in schema:
        return "(" + " | ".join(_part(part) for part in schema["anyOf"]) + ")"
    if schema["type"] == "array":
        return _array(_part(schema["items"]), schema.get("minItems", 0), schema.get("maxItems"))
    if schema["type"] == "object":
        columns = [f"{_quoted(json.dumps(name) + ':')} {_part(kind)}" for name, kind in schema["properties"].items()]
        inside = ' "," '.join(columns)
        return f'("{{" {inside} "}}")'
    return _PARTS[schema["type"]]


def _array(item: str, least: int, most: int | None) -> str:
    if most is not None and most < max(1, least):
        return '("[" "]")'
    end = "" if most is None else most - 1
    times = "*" if (least <= 1 and most is None) else f"{{{max(0, least - 1)},{end}}}"
    inside = f'{item} ("," {item}){times}'
    return f'("[" {inside} "]")' if least else f'("[" ({inside})? "]")'


def _quoted(text: str) -> str:
    """A text as a literal of the grammar, in whose escapes JSON's are contained."""
    return json.dumps(text, ensure_ascii=False)
