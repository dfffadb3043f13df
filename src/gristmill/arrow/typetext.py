"""Column types as text, wherever a person writes one: "float32", "list<float>", "float32[384]", "decimal(12, 2)"."""

from __future__ import annotations

import difflib
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["column_type", "parse_type"]

# Names from Python, numpy and SQL in addition to Arrow's own.
_ALIASES = {
    "str": "string", "int": "int64", "integer": "int64", "float": "float32", "double": "float64", "half": "float16",
    "bytes": "binary", "boolean": "bool", "text": "string", "date": "date32", "datetime": "timestamp[us]",
    "timestamp": "timestamp[us]",
}  # fmt: skip
_NAMES = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64",
    "string", "large_string", "binary", "date32", "timestamp[us]",
)  # fmt: skip
_TIMESTAMP = re.compile(r"timestamp\[(s|ms|us|ns)(?:\s*,\s*(?:tz=)?(?P<zone>[^\]]+))?\]")
_FIXED = re.compile(r"fixed_size_binary\[([1-9]\d*)\]")
_FIELD = re.compile(r"\s+\('[^']*'\)$")  # how Arrow prints a different name of a map's keys or values
_DECIMAL = re.compile(r"decimal(?P<bits>128|256)?\((\d+)(?:\s*,\s*(-?\d+))?\)")


def column_type(given: Any, *, read: bool = False) -> tuple[pa.DataType | None, bool]:
    """The type of a column as `types=`, `takes=` and `returns=` write it, and whether a null is refused. If it is only
    `read` (`takes=`), it may be "any", which is None here, or end in "not null". Raises ValueError.
    """
    import pyarrow as pa

    if isinstance(given, pa.DataType):
        return given, False
    text = " ".join(str(given).split())
    kind = f" {text}".removesuffix(" not null").strip()
    if not read and (kind != text or kind == "any"):
        raise ValueError("only takes= has any and not null: write the type alone")
    return None if read and kind in ("", "any") else parse_type(kind), kind != text


def parse_type(text: str) -> pa.DataType:
    """An Arrow type from text: a plain name, `list<T>`, `T[n]` or `fixed_size_list<T>[n]`, `struct<name: T, …>`,
    `map<K, T>`, `timestamp[us, tz=UTC]`, `decimal(12, 2)`.

    "float" is float32, as in Arrow. Raises ValueError.
    """
    import pyarrow as pa

    text = text.strip()
    head, _, rest = text.partition("<")
    if rest and text.endswith(">"):
        inner = rest[:-1]
        if head in ("list", "large_list"):
            return (pa.list_ if head == "list" else pa.large_list)(parse_type(_without_name(inner)))
        if head == "map":
            pair = [_FIELD.sub("", part.strip()) for part in _parts(inner)]
            ordered = pair[2:] == ["keys_sorted"]
            if len(pair) != 2 + ordered:
                raise ValueError(f"{text!r} is not a map type: write map<string, float32>")
            return pa.map_(parse_type(pair[0]), parse_type(pair[1]), keys_sorted=ordered)
        if head == "struct":
            return pa.struct([_named(part) for part in _parts(inner)])
    if match := _TIMESTAMP.fullmatch(text):
        return pa.timestamp(match[1], tz=(match["zone"] or "").strip() or None)
    if match := _FIXED.fullmatch(text):
        return pa.binary(int(match[1]))
    if match := _DECIMAL.fullmatch(text):
        make = pa.decimal256 if match["bits"] == "256" else pa.decimal128
        return make(int(match[2]), int(match[3] or 0))
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
    near = difflib.get_close_matches(text, [*_NAMES, *_ALIASES], 1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    if "," in text and "=" in text:
        hint = "; each NAME=TYPE is an option of its own: repeat the flag"
    raise ValueError(
        f"no such type{hint}; write for example float32, int64, string, list<float32>, float32[384] "
        "or map<string, int64>"
    )


def _without_name(text: str) -> str:
    # Arrow prints list<item: float>; what it prints can be parsed again.
    name, colon, rest = text.partition(":")
    return rest if colon and name.strip().isidentifier() and "<" not in name else text


def _parts(text: str) -> list[str]:
    parts, depth, start = [], 0, 0
    for i, c in enumerate(text):
        depth += (c in "<[(") - (c in ">])")
        if c == "," and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    return [*parts, text[start:]]


def _named(text: str) -> pa.Field:
    import pyarrow as pa

    name, colon, kind = text.partition(":")
    if not colon:
        raise ValueError(f"struct member {text.strip()!r} has no type: write struct<name: type, …>")
    return pa.field(name.strip(), parse_type(kind))
