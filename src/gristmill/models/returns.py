"""Column types as text: "float32", "list<float>", "float32[384]"."""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa

from gristmill.errors import BadModel
from gristmill.models.suggest import did_you_mean

# Python's and numpy's names beside Arrow's own.
_ALIASES = {
    "str": "string", "int": "int64", "float": "float32", "double": "float64", "half": "float16", "bytes": "binary",
    "boolean": "bool", "text": "string", "date": "date32", "datetime": "timestamp[us]", "timestamp": "timestamp[us]",
}  # fmt: skip
_NAMES = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64",
    "string", "large_string", "binary", "date32", "timestamp[us]",
)  # fmt: skip


def parse_schema(returns: Mapping[str, str]) -> pa.Schema:
    """The schema that `returns=` describes. Raises BadModel, naming the column and the type."""
    fields = []
    for name, text in returns.items():
        if isinstance(text, pa.DataType):
            fields.append(pa.field(name, text))
            continue
        try:
            fields.append(pa.field(name, parse_type(str(text))))
        except ValueError as e:
            raise BadModel(f"returns gives column {name!r} the type {text!r}: {e}") from e
    return pa.schema(fields)


def parse_type(text: str) -> pa.DataType:
    """An Arrow type from text: a plain name, `list<T>`, `T[n]` or `fixed_size_list<T>[n]`, `struct<name: T, …>`.

    "float" is float32, as in Arrow. Raises ValueError.
    """
    text = text.strip()
    head, _, rest = text.partition("<")
    if rest and text.endswith(">"):
        inner = rest[:-1]
        if head == "list":
            return pa.list_(parse_type(_without_name(inner)))
        if head == "struct":
            return pa.struct([_named(part) for part in _parts(inner)])
    if text.endswith("]") and not text.startswith(("timestamp", "duration", "time32", "time64", "date")):
        inner, _, size = text[:-1].rpartition("[")
        if size.isdigit() and int(size) > 0:
            if inner.startswith("fixed_size_list<") and inner.endswith(">"):
                inner = _without_name(inner[len("fixed_size_list<") : -1])
            return pa.list_(parse_type(inner), int(size))
    try:
        return pa.type_for_alias(_ALIASES.get(text, text))
    except ValueError:
        pass
    hint = did_you_mean(text, [*_NAMES, *_ALIASES])
    raise ValueError(f"no such type{hint}; write for example float32, int64, string, list<float32> or float32[384]")


def _without_name(text: str) -> str:
    # Arrow prints list<item: float>; what it prints can be written back.
    name, colon, rest = text.partition(":")
    return rest if colon and name.strip().isidentifier() and "<" not in name else text


def _parts(text: str) -> list[str]:
    parts, depth, start = [], 0, 0
    for i, c in enumerate(text):
        depth += (c in "<[") - (c in ">]")
        if c == "," and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    return [*parts, text[start:]]


def _named(text: str) -> pa.Field:
    name, colon, kind = text.partition(":")
    if not colon:
        raise ValueError(f"struct member {text.strip()!r} has no type: write struct<name: type, …>")
    return pa.field(name.strip(), parse_type(kind))
