"""Forms of answers as grammars, which a local model's tokens are held to."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

# JSON without blanks between its parts: small models fall into writing blanks for ever where a grammar lets them.
_PARTS = {
    "boolean": '("true" | "false")',
    "integer": '("-"? ("0" | [1-9] [0-9]{0,17}))',
    "number": '("-"? ("0" | [1-9] [0-9]{0,17}) ("." [0-9]{1,17})?)',
    "string": r'("\"" ([^"\\\x00-\x1f] | "\\" (["\\/bfnrt] | "u" [0-9a-fA-F]{4}))* "\"")',
}


def grammar_of(schema: Mapping[str, Any], choice: str) -> str:
    """A grammar in EBNF for the JSON Schema of an answer, as models.prompt makes them: objects with all their columns
    in order. An object of nothing but `choice` is that text alone, which takes the fewest tokens.
    """
    only = schema.get("properties", {})
    if list(only) == [choice] and "enum" in only[choice]:
        return "root ::= " + " | ".join(_quoted(text) for text in only[choice]["enum"])
    return f"root ::= {_part(schema)}"


def _part(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return "(" + " | ".join(_quoted(json.dumps(text)) for text in schema["enum"]) + ")"
    if schema["type"] == "array":
        item = _part(schema["items"])
        return f'("[" ({item} ("," {item})*)? "]")'
    if schema["type"] == "object":
        columns = [f"{_quoted(json.dumps(name) + ':')} {_part(kind)}" for name, kind in schema["properties"].items()]
        inside = ' "," '.join(columns)
        return f'("{{" {inside} "}}")'
    return _PARTS[schema["type"]]


def _quoted(text: str) -> str:
    """A text as a literal of the grammar, in whose escapes JSON's are contained."""
    return json.dumps(text, ensure_ascii=False)
