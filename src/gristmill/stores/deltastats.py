"""What a Delta log says of a data file: its rows, and the nulls and the range of each column, from the file's footer.

Readers leave a file out by the ranges. Trap: deltalake's own reader takes a column without a range for one without
values as soon as the column has one in another file, or another column in this. So each column that has values and can
have a range is given one, however wide.
"""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

LONGEST = 32  # characters of a text; the ends of longer ones are cut
EXACT = 15  # digits of a decimal that a number in JSON holds; with more it is a text
ANY = {"text": ("", "\U0010ffff" * LONGEST), "number": ("-Infinity", "Infinity")}  # where a footer tells no range


def statistics(path: str, schema: pa.Schema) -> dict[str, Any]:
    """The statistics of a Parquet file with these columns, as a Delta log has them."""
    import pyarrow.parquet as pq

    about = pq.read_metadata(path)
    places = {about.schema.column(n).path: n for n in range(len(about.schema))}
    groups = [about.row_group(n) for n in range(about.num_row_groups)]
    leaves = {name: [group.column(n).statistics for group in groups] for name, n in places.items()}
    nulls, low, high = _of(schema, "", leaves)
    return {"numRecords": about.num_rows, "minValues": low, "maxValues": high, "nullCount": nulls}


def _of(fields: Any, above: str, leaves: Mapping[str, list[Any]]) -> tuple[dict[str, Any], ...]:
    """Nulls, lowest and highest values by name, nested as structs are."""
    nulls: dict[str, Any] = {}
    low: dict[str, Any] = {}
    high: dict[str, Any] = {}
    for field in fields:
        path = f"{above}{field.name}"
        if pa.types.is_struct(field.type):
            nulls[field.name], low[field.name], high[field.name] = _of(field.type, f"{path}.", leaves)
        elif not pa.types.is_nested(field.type) and not pa.types.is_binary(field.type):
            found = leaves[path]
            nulls[field.name] = sum(s.null_count for s in found)
            if full := [s for s in found if s.num_values]:
                low[field.name], high[field.name] = _range(full, field.type)
    return nulls, low, high


def _range(found: Sequence[Any], kind: pa.DataType) -> tuple[Any, Any]:
    """The lowest and the highest value, or values beyond them."""
    if any(not s.has_min_max for s in found):  # texts of several kilobytes, or nothing but NaN
        return ANY["text" if pa.types.is_string(kind) else "number"]
    return _least(min(s.min for s in found), kind), _most(max(s.max for s in found), kind)


def _least(value: Any, kind: pa.DataType) -> Any:
    return value[:LONGEST] if isinstance(value, str) else _said(value, kind)


def _most(value: Any, kind: pa.DataType) -> Any:
    if not isinstance(value, str) or len(value) <= LONGEST:
        return _said(value, kind)
    for end in range(LONGEST - 1, -1, -1):  # the least text that is greater than all that begin like this one
        number = ord(value[end]) + 1
        if number <= 0x10FFFF:
            return value[:end] + chr(0xE000 if 0xD800 <= number <= 0xDFFF else number)
    return value


def _said(value: Any, kind: pa.DataType) -> Any:
    """A value in JSON. Times are cut to milliseconds, to which readers add one."""
    if isinstance(value, dt.datetime):
        text = value.replace(tzinfo=None).isoformat(timespec="milliseconds")
        return text if kind.tz is None else f"{text}Z"
    if isinstance(value, dt.date):
        return value.isoformat()
    if pa.types.is_decimal(kind):
        return float(value) if kind.precision <= EXACT else format(value, "f")
    if isinstance(value, float) and math.isinf(value):  # which JSON does not have
        return ANY["number"][value > 0]
    return value
