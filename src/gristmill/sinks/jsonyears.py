"""Dates and times that ISO 8601 cannot write, before any of them is written: it knows the years 1 to 9999."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from gristmill.arrow.casts import entries, lossless
from gristmill.arrow.rows import picked
from gristmill.arrow.schemas import plain

if TYPE_CHECKING:
    import pyarrow as pa

FIRST_DAY, LAST_DAY = -719_162, 2_932_896  # from 1970: the first of the year 1, the last of 9999
_A_DAY = {"s": 86_400, "ms": 86_400_000, "us": 86_400_000_000}  # in nanoseconds no time is beyond 2262

BEYOND = "before the year 1 or after 9999, which JSON Lines cannot hold: use parquet, or change it in a step"


def beyond_calendar(rows: pa.Table) -> list[int]:
    """Rows with a date or time, at any depth, before the year 1 or after 9999."""
    import pyarrow as pa

    beyond, nested = np.zeros(rows.num_rows, np.bool_), []
    for name, kind in zip(rows.column_names, rows.schema.types, strict=True):
        if pa.types.is_date(kind) or pa.types.is_timestamp(kind):
            beyond |= _those_beyond(rows.column(name))
        elif _dated(kind):
            nested.append(name)
    found = np.flatnonzero(beyond).tolist()
    todo = [np.flatnonzero(~beyond)] if nested and not beyond.all() else []
    rows = rows.select(nested)
    while todo:
        index = todo.pop()
        part = rows if len(index) == rows.num_rows else picked(rows, index)
        if not any(is_beyond(chunk) for column in part.columns for chunk in column.chunks):
            continue
        if len(index) == 1:
            found.append(int(index[0]))
        else:
            todo += np.array_split(index, 2)
    return sorted(found)


def is_beyond(values: pa.Array) -> bool:
    """Whether any value is, or holds, such a date or time; what a null hides is none."""
    import pyarrow as pa

    kind, t = values.type, pa.types
    if isinstance(values, pa.ExtensionArray):
        return is_beyond(values.storage)
    if not _dated(kind):
        return False
    if t.is_dictionary(kind):
        inner = values.dictionary
        flat = inner if (bare := plain(inner.type)) == inner.type else lossless(inner, bare)
        return is_beyond(flat.take(values.indices.unique().drop_null()))
    if (bare := plain(kind)) != kind:
        return is_beyond(lossless(values, bare))
    if t.is_date(kind) or t.is_timestamp(kind):
        return bool(_those_beyond(values).any())
    if t.is_map(kind):
        return is_beyond(entries(values))
    if t.is_struct(kind):
        return any(is_beyond(field) for field in values.flatten())
    return is_beyond(values.flatten())  # of any list


def _those_beyond(values: pa.Array | pa.ChunkedArray) -> np.ndarray:
    """Which dates or timestamps are, bool [rows]."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = values.type
    of_a_day = 1 if pa.types.is_date(kind) else _A_DAY.get(kind.unit)
    if of_a_day is None:
        return np.zeros(len(values), np.bool_)
    numbers = values.cast(pa.date32()).cast(pa.int32()) if of_a_day == 1 else values.cast(pa.int64())
    least, most = (v.as_py() for v in pc.min_max(numbers).values())
    if least is None or (FIRST_DAY * of_a_day <= least and most < (LAST_DAY + 1) * of_a_day):
        return np.zeros(len(values), np.bool_)
    days = numbers.fill_null(0).to_numpy() // of_a_day  # rounded down, as days before 1970 are
    return np.asarray((days < FIRST_DAY) | (days > LAST_DAY))


def _dated(kind: pa.DataType) -> bool:
    import pyarrow as pa

    t = pa.types
    if isinstance(kind, pa.BaseExtensionType):
        return _dated(kind.storage_type)
    if t.is_dictionary(kind) or t.is_run_end_encoded(kind):
        return _dated(kind.value_type)
    if t.is_union(kind):
        return False  # no sink of JSON holds one
    return t.is_date(kind) or t.is_timestamp(kind) or any(_dated(kind.field(i).type) for i in range(kind.num_fields))
