"""Column types of JSON Lines, inferred from a sample."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from gristmill.errors import BadSource
from gristmill.io.lines import Lines
from gristmill.io.schema import INFERRED, wider

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["infer"]


def infer(path: str, sample: Sequence[Lines], types: Mapping[str, pa.DataType]) -> pa.Schema:
    """The schema of the sampled lines; `types` overrules it. Lines that are no objects are passed over.

    int and float make float, null and anything that. Text stays text, also where it looks like a date, as another line
    may hold other text. Raises BadSource where a column has values of two kinds, with both and the way out.
    """
    import pyarrow as pa

    found: dict[str, pa.DataType] = {}
    for part in sample:
        for name, kind in _types(path, part, types):
            known = found.get(name, kind)
            both = wider(known, kind, text=True)
            if both is None and name not in types:
                raise _conflict(path, name, known, kind)
            found[name] = kind if both is None else both
    if not found and not types:
        _check_objects(path, sample)
    found.update(types)
    return pa.schema([pa.field(n, k) for n, k in found.items()], metadata={INFERRED: b"sparse"})


def _types(path: str, part: Lines, types: Mapping[str, pa.DataType]) -> Iterable[tuple[str, pa.DataType]]:
    """By pyarrow where it takes all lines, else line by line."""
    import pyarrow as pa
    import pyarrow.json as pj

    octets = np.frombuffer(part.data, dtype=np.uint8)
    if ((octets[part.start] == ord("{")) & (octets[part.stop - 1] == ord("}"))).all():
        first, last = int(part.start[0]), int(part.stop[-1])
        view = pa.py_buffer(part.data)[first:last]
        try:
            table = pj.read_json(pa.BufferReader(view), read_options=pj.ReadOptions(block_size=last - first + 16))
            if table.num_rows == len(part):
                return [(f.name, _as_text(f.type)) for f in table.schema]
        except (pa.ArrowException, UnicodeDecodeError):
            pass
    return _by_line(path, part, types).items()


def _as_text(kind: pa.DataType) -> pa.DataType:
    """Without the dates that pyarrow sees in text."""
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


def _by_line(path: str, part: Lines, types: Mapping[str, pa.DataType]) -> dict[str, pa.DataType]:
    import pyarrow as pa

    found: dict[str, pa.DataType] = {}
    where: dict[str, int] = {}
    for i in range(len(part)):
        try:
            row = json.loads(part.line(i))
        except (ValueError, RecursionError):
            continue
        for name, value in row.items() if isinstance(row, dict) else ():
            try:
                kind = _kind(value)
            except _Conflict as e:
                if name in types:
                    continue
                raise BadSource(f"{path}: byte {part.position[i]}: column {name!r}: {e}: {_hint(name)}") from None
            known = found.get(name, pa.null())
            both = wider(known, kind, text=True)
            if both is None and name not in types:
                raise _conflict(path, name, known, kind, (where[name], int(part.position[i])))
            if both is not None and both != known:
                where[name] = int(part.position[i])
            found[name] = known if both is None else both
    return found


def _kind(value: Any) -> pa.DataType:
    import pyarrow as pa

    if value is None:
        return pa.null()
    if isinstance(value, bool):
        return pa.bool_()
    if isinstance(value, int):
        return pa.int64() if -(1 << 63) <= value < 1 << 63 else pa.float64()
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


def _conflict(path: str, name: str, one: Any, other: Any, at: tuple[int, int] | None = None) -> BadSource:
    places = ("", "") if at is None else (f" (byte {at[0]})", f" (byte {at[1]})")
    return BadSource(f"{path}: column {name!r} is {one}{places[0]} and {other}{places[1]}: {_hint(name)}")


def _hint(name: str) -> str:
    return f"say which with types={{{name!r}: 'string'}}, or another type"


def _check_objects(path: str, sample: Sequence[Lines]) -> None:
    """A whole JSON document is a common mistake, and would come out as nothing but bad rows."""
    if sample and sample[0].position[0] == 0 and re.match(rb"\s*(\[|\{\s*$)", sample[0].line(0)):
        raise BadSource(
            f"{path}: looks like one JSON document over several lines, not JSON Lines: write one object a line "
            "(jq -c '.[]' does it)"
        )
