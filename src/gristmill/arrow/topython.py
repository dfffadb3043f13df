"""Arrow columns as plain Python values, and these back as columns of a known type: exact for every value."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, islice
from typing import Any

import numpy as np
import pyarrow as pa

from gristmill.arrow.casts import Lossy, contents, entries, is_list, lengths_of, lossless
from gristmill.arrow.frompython import from_python
from gristmill.arrow.rows import picked

__all__ = ["from_plain", "not_text", "to_plain", "to_rows"]

_NANOSECONDS = {"ns": 1, "us": 10**3, "ms": 10**6, "s": 10**9, "m": 60 * 10**9, "h": 3600 * 10**9, "D": 86_400 * 10**9}
_EPOCH = datetime.datetime(1970, 1, 1)
_MICROSECOND = datetime.timedelta(microseconds=1)


def to_rows(table: pa.Table) -> list[dict[str, Any]]:
    """Rows as dicts of `to_plain` values."""
    if not any(map(_cuts, table.schema.types)):
        try:
            return table.to_pylist()  # type: ignore[no-any-return]
        except Exception:  # as in to_plain: each column is tried alone
            pass
    names = table.column_names
    return [dict(zip(names, row, strict=True)) for row in zip(*map(to_plain, table.columns), strict=True)]


def to_plain(column: pa.Array | pa.ChunkedArray) -> list[Any]:
    """Values as Python's own: lists, dicts, pairs for maps, None for null.

    What Python cannot hold is a numpy scalar: datetime64 for times and days beyond year 9999 (in UTC if there is a
    zone) and, without pandas, for nanoseconds; timedelta64 for long durations, and since midnight for a time of day
    with nanoseconds. Text that is not UTF-8 becomes bytes. The form of a value never depends on other values.
    """
    if not _cuts(column.type):
        try:
            return column.to_pylist()  # type: ignore[no-any-return]
        except Exception:  # Overflow, Value, Unicode, Arrow's own: each value is tried alone
            pass
    return list(chain.from_iterable(_each(c) for c in getattr(column, "chunks", [column])))


def _cuts(kind: pa.DataType) -> bool:
    """Whether Arrow silently drops nanoseconds when it makes Python values."""
    return kind == pa.time64("ns") or any(_cuts(kind.field(i).type) for i in range(kind.num_fields))


def _each(array: pa.Array) -> list[Any]:
    kind = array.type
    if isinstance(array, pa.ExtensionArray):
        return _each(array.storage)
    if pa.types.is_dictionary(kind):
        return _each(array.dictionary_decode())
    valid = array.is_valid().to_pylist()
    if pa.types.is_map(kind):
        array = entries(array)
    if is_list(array.type):
        inner = iter(_each(contents(array)))
        if pa.types.is_map(kind):
            inner = iter([tuple(pair.values()) for pair in inner])
        return [list(islice(inner, n)) if v else None for n, v in zip(lengths_of(array).tolist(), valid, strict=True)]
    if pa.types.is_struct(kind):
        fields = [_each(child) for child in array.flatten()]
        names = [f.name for f in kind]
        rows: Iterable[Any] = zip(*fields, strict=True) if fields else ([] for _ in valid)
        return [dict(zip(names, row, strict=True)) if v else None for row, v in zip(rows, valid, strict=True)]
    return [_single(value) if v else None for value, v in zip(array, valid, strict=True)]


def _single(value: pa.Scalar) -> Any:
    kind, t = value.type, pa.types
    if kind == pa.time64("ns") and value.value % 1000:
        return np.timedelta64(value.value, "ns")
    try:
        return value.as_py()
    except Exception:
        if t.is_timestamp(kind):
            return np.datetime64(value.value, kind.unit)
        if t.is_date(kind):
            return np.datetime64(value.value, "D" if t.is_date32(kind) else "ms")
        if t.is_duration(kind):
            return np.timedelta64(value.value, kind.unit)
        if t.is_string(kind) or t.is_large_string(kind) or t.is_string_view(kind):
            return value.as_buffer().to_pybytes()
        raise


# ---------------------------------------------------------------- and back


def from_plain(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Values such as `to_plain` gives for a column of type `kind`, as that type. Raises Lossy for any other value."""
    t = pa.types
    if is_list(kind):
        return lossless(_lists(values, kind.value_type), kind)
    if t.is_map(kind):
        pair = pa.struct([("key", kind.key_type), ("value", kind.item_type)])
        pairs = [None if v is None else list(v.items() if isinstance(v, Mapping) else v) for v in values]
        return lossless(_lists([v and [_pair(p) for p in v] for v in pairs], pair), kind)
    if t.is_struct(kind):
        names = {f.name for f in kind}
        if any(v is not None and not (isinstance(v, Mapping) and names >= set(v)) for v in values):
            raise Lossy(f"not every value is a dict of the fields of {kind}")
        children = [from_plain([None if v is None else v.get(f.name) for v in values], f.type) for f in kind]
        return pa.StructArray.from_arrays(
            children, fields=list(kind), mask=pa.array([v is None for v in values], pa.bool_())
        )
    try:
        if t.is_temporal(kind) and not t.is_interval(kind):
            return _counted([None if v is None else _nanoseconds(v, kind) for v in values], kind)
        if t.is_integer(kind) and all(map(_whole, values)):
            return pa.array(values, kind)
        return lossless(from_python(values), kind)
    except (pa.ArrowException, OverflowError) as e:
        raise Lossy(f"not every value is one of {kind}: {e}") from e


def _whole(value: Any) -> bool:
    return value is None or (isinstance(value, (int, np.integer)) and not isinstance(value, (bool, np.timedelta64)))


def _pair(pair: Any) -> dict[str, Any]:
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise Lossy(f"{pair!r:.40} is not a pair of a key and a value")
    return {"key": pair[0], "value": pair[1]}


def _lists(values: Sequence[Any], inner: pa.DataType) -> pa.Array:
    if any(not isinstance(v, (list, tuple, np.ndarray)) for v in values if v is not None):
        raise Lossy("not every value is a list")
    ends = np.cumsum([0 if v is None else len(v) for v in values], dtype=np.int64)
    flat = from_plain(list(chain.from_iterable(v for v in values if v is not None)), inner)
    offsets = pa.array(np.concatenate(([0], ends)).astype(np.int64))
    mask = pa.array([v is None for v in values], pa.bool_())
    return pa.LargeListArray.from_arrays(offsets, flat, pa.large_list(inner), mask=mask)


def _counted(nanoseconds: list[int | None], kind: pa.DataType) -> pa.Array:
    unit = "D" if pa.types.is_date32(kind) else "ms" if pa.types.is_date64(kind) else kind.unit
    counts = [None if n is None else divmod(n, _NANOSECONDS[unit]) for n in nanoseconds]
    if any(c is not None and c[1] for c in counts):
        raise Lossy(f"a time is finer than {kind}")
    width = pa.int32() if kind.bit_width == 32 else pa.int64()
    return pa.array([None if c is None else c[0] for c in counts], width).view(kind)


def _nanoseconds(value: Any, kind: pa.DataType) -> int:
    """Since 1970 in UTC, since midnight, or of a duration. Raises Lossy for a value of another kind than `kind`."""
    t = pa.types
    for convert in ("to_datetime64", "to_timedelta64"):  # pandas' own, whose nanoseconds are not visible otherwise
        if hasattr(value, convert):
            if (getattr(value, "tzinfo", None) is not None) != (getattr(kind, "tz", None) is not None):
                raise Lossy(f"{value!r:.60} is not a value of {kind}")
            value = getattr(value, convert)()
    if isinstance(value, (np.datetime64, np.timedelta64)) and not np.isnat(value):
        unit, step = np.datetime_data(value.dtype)
        moment = t.is_timestamp(kind) or t.is_date(kind)
        if unit in _NANOSECONDS and moment == isinstance(value, np.datetime64):
            return int(value.astype(np.int64)) * step * _NANOSECONDS[unit]
    elif t.is_timestamp(kind) and isinstance(value, datetime.datetime):
        if (value.tzinfo is not None) == (kind.tz is not None):
            naive = value if value.tzinfo is None else value.astimezone(datetime.timezone.utc).replace(tzinfo=None)
            return (naive - _EPOCH) // _MICROSECOND * 1000
    elif t.is_date(kind) and type(value) is datetime.date:
        return (value.toordinal() - _EPOCH.toordinal()) * _NANOSECONDS["D"]
    elif t.is_time(kind) and isinstance(value, datetime.time) and value.tzinfo is None:
        since = datetime.timedelta(0, value.second, value.microsecond, 0, value.minute, value.hour)
        return since // _MICROSECOND * 1000
    elif t.is_duration(kind) and isinstance(value, datetime.timedelta):
        return value // _MICROSECOND * 1000
    raise Lossy(f"{value!r:.60} is not a value of {kind}")


def not_text(rows: pa.Table) -> list[int]:
    """Rows with text that is not UTF-8, at any depth, which Parquet and Arrow pass on unchecked."""
    todo, found = [np.arange(rows.num_rows)] if rows.num_rows else [], []
    while todo:
        index = todo.pop()
        part = rows if len(index) == rows.num_rows else picked(rows, index)
        try:
            part.validate(full=True)
        except pa.ArrowInvalid:
            if len(index) == 1:
                found.append(int(index[0]))
            else:
                todo += np.array_split(index, 2)
    return sorted(found)
