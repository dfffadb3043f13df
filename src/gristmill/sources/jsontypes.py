"""Column types of JSON Lines, inferred from a sample."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from gristmill.arrow.frompython import opened_bytes
from gristmill.arrow.schemas import wider
from gristmill.errors import BadSource
from gristmill.sources.formats import ONE_DOCUMENT
from gristmill.sources.lines import Lines
from gristmill.sources.schema import INFERRED, MIXED

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["infer"]

_MANY_DIGITS = re.compile(rb"(?<![\d.])\d{19,}(?![\d.eE])")


def infer(path: str, sample: Sequence[Lines], types: Mapping[str, pa.DataType], unit: str = "byte") -> pa.Schema:
    """The schema of the sampled lines; `types` overrules it. Lines that are not objects are skipped. `unit` is what
    their positions count.

    int and float make float; null and any type make that type. Text stays text even if it looks like a date, as another
    line may hold other text. A column with values of two kinds is marked with both: reading it raises BadSource, as
    only `types` can settle it; a job that does not read it runs.
    """
    import pyarrow as pa

    if not types and unit == "byte":
        _check_objects(path, sample)
    found: dict[str, pa.DataType] = {}
    mixed: dict[str, str] = {}
    for part in sample:
        for name, kind, where in _types(part, mixed, unit):
            known = found.get(name, kind)
            both = wider(known, kind, text=True)
            if both is None:
                mixed.setdefault(name, f"{known} and {kind} ({where})")
            found[name] = known if both is None else both
    fields = [_field(path, n, k, mixed.get(n)) for n, k in found.items() if n not in types]
    at = {n: i for i, n in enumerate(found)}
    fields += [pa.field(n, k) for n, k in types.items()]
    fields.sort(key=lambda f: at.get(f.name, len(at)))
    return pa.schema(fields, metadata={INFERRED: b"sparse"})


def _field(path: str, name: str, kind: pa.DataType, mixed: str | None) -> pa.Field:
    import pyarrow as pa

    if mixed is None:
        return pa.field(name, kind)
    hint = f"give its type, such as types={{{name!r}: 'string'}} to read it as text"
    return pa.field(name, pa.string(), metadata={MIXED: f"{path}: column {name!r} is {mixed}: {hint}".encode()})


def _types(part: Lines, mixed: dict[str, str], unit: str) -> Iterator[tuple[str, pa.DataType, str]]:
    """Columns, their types and where they were found: from pyarrow if it takes all lines, else line by line."""
    import pyarrow as pa
    import pyarrow.json as pj

    octets = np.frombuffer(part.data, dtype=np.uint8)
    if ((octets[part.start] == ord("{")) & (octets[part.stop - 1] == ord("}"))).all():
        first, last = int(part.start[0]), int(part.stop[-1])
        view = memoryview(part.data)[first:last]
        try:
            table = pj.read_json(opened_bytes(view), read_options=pj.ReadOptions(block_size=last - first + 16))
            # pyarrow reads integers beyond 64 bits as floats, and rounds them.
            if table.num_rows == len(part) and not (_MANY_DIGITS.search(view) and _floats(table.schema)):
                where = f"after {unit} {part.position[0]}"
                yield from ((f.name, _as_text(f.type), where) for f in table.schema)
                return
        except (pa.ArrowException, UnicodeDecodeError):
            pass
    yield from _by_line(part, mixed, unit)


def _floats(kind: pa.Schema | pa.DataType) -> bool:
    import pyarrow as pa

    if isinstance(kind, pa.Schema):
        return any(_floats(f.type) for f in kind)
    return pa.types.is_floating(kind) or any(_floats(kind.field(i).type) for i in range(kind.num_fields))


def _as_text(kind: pa.DataType) -> pa.DataType:
    """The type without the dates that pyarrow sees in text."""
    import pyarrow as pa

    if pa.types.is_timestamp(kind):
        return pa.string()
    if pa.types.is_list(kind):
        return pa.list_(_as_text(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(f.name, _as_text(f.type)) for f in kind])
    return kind


class _Conflict(Exception):
    pass


def _by_line(part: Lines, mixed: dict[str, str], unit: str) -> Iterator[tuple[str, pa.DataType, str]]:
    for i in range(len(part)):
        try:
            row = json.loads(part.line(i))
        except (ValueError, RecursionError):
            continue
        for name, value in row.items() if isinstance(row, dict) else ():
            try:
                yield name, _kind(value), f"{unit} {part.position[i]}"
            except _Conflict as e:
                mixed.setdefault(name, f"{e} ({unit} {part.position[i]})")
                yield name, _nothing(), ""


def _nothing() -> pa.DataType:
    """The type of a column without values."""
    import pyarrow as pa

    return pa.null()


def _kind(value: Any) -> pa.DataType:
    import pyarrow as pa

    if value is None:
        return pa.null()
    if isinstance(value, bool):
        return pa.bool_()
    if isinstance(value, int):
        if -(1 << 63) <= value < 1 << 63:
            return pa.int64()
        if 0 < value < 1 << 64:
            return pa.uint64()
        raise _Conflict(
            f"an integer of {len(str(abs(value)))} digits, beyond 64 bits"
        )  # as a float it would be rounded
    if isinstance(value, float):
        return pa.float64()
    if isinstance(value, str):
        return pa.string()
    if isinstance(value, dict):
        return pa.struct([pa.field(n, _kind(v)) for n, v in value.items()])
    inner = pa.null()
    for kind in map(_kind, value):
        both = wider(inner, kind, text=True)
        if both is None:
            raise _Conflict(f"a list of {inner} and {kind}")
        inner = both
    return pa.list_(inner)


def _check_objects(path: str, sample: Sequence[Lines]) -> None:
    """A whole JSON document is a common mistake, and would come out as nothing but bad rows."""
    if not sample or sample[0].position[0] != 0:
        return
    first, several = sample[0].line(0), len(sample[0]) > 1
    if first in (b"[", b"{") if several else first.startswith(b"[{"):
        raise BadSource(f"{path}: {ONE_DOCUMENT}")
