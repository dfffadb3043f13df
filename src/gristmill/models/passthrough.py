"""Columns that a function hands back under the names of those it was given: what it left unchanged stays as it was."""

from __future__ import annotations

import functools

import numpy as np
import pyarrow as pa

from gristmill.arrow.casts import Lossy, entries, is_list, lengths_of, lossless, rebuilt
from gristmill.arrow.rows import picked
from gristmill.errors import BadOutput
from gristmill.models.conversion import from_result, to_batch, to_numpy

__all__ = ["handed_back", "same"]


def handed_back(column: pa.ChunkedArray, given: pa.ChunkedArray, batch_format: str) -> pa.ChunkedArray:
    """`given` if `column`, made from what a function returned, has the same values in the form that the batch gave them
    (a list for a fixed-size one), else `column`: if its type differs from the batch's, the function has cast it.
    Numbers in rows are Python's, which have no width: they stay int64 (uint64 for uint64) and double, as do those that
    the function may change in other rows.

    Arrays and frames of floats have NaN for null: NaN in the place of a null becomes that null again, row by row. Times
    that a "numpy" batch has without their zone, in UTC, get it back.
    """
    kind = given.type
    if column is given or len(column) != len(given) or not len(given):
        return column
    if column.type.equals(kind):
        nulls = given.null_count or pa.types.is_fixed_size_list(kind)
        if nulls and batch_format in ("numpy", "pandas") and _holds_nan(kind):
            return _nulls_back(column, given)
        return given if str(column.type) != str(kind) and same(column, given) else column
    if batch_format == "numpy" and pa.types.is_timestamp(kind) and kind.tz and pa.types.is_timestamp(column.type):
        zoned = column if column.type.tz else column.cast(pa.timestamp(column.type.unit, kind.tz))
        if not column.type.equals(_form(given, batch_format)):
            return zoned
        try:
            return lossless(zoned, kind)
        except Lossy:
            return zoned
    form = _form(given, batch_format)
    if batch_format == "rows" and form is not None and not form.equals(kind) and _number(kind):
        return column.cast(form) if pa.types.is_null(column.type) else column  # of one type, changed or not
    if not column.type.equals(form):
        return given if pa.types.is_null(column.type) and given.null_count == len(given) else column
    try:
        found = pa.chunked_array([rebuilt(c, kind, _alike) for c in column.chunks], kind)
    except (Lossy, pa.ArrowException):
        return column
    return given if same(found, given) else column


def _number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def _form(given: pa.ChunkedArray, batch_format: str) -> pa.DataType | None:
    """The type of a column when a function hands it back as its batch has it; None if that is impossible."""
    plain = pa.types.is_integer(given.type) or pa.types.is_floating(given.type) or pa.types.is_boolean(given.type)
    return _form_of(given.type, bool(given.null_count), batch_format) if plain else _handed(given, batch_format)


@functools.lru_cache(maxsize=256)
def _form_of(kind: pa.DataType, nulls: bool, batch_format: str) -> pa.DataType | None:
    return _handed(pa.chunked_array([pa.array([1, None] if nulls else [1]).cast(kind)]), batch_format)


def _handed(given: pa.ChunkedArray, batch_format: str) -> pa.DataType | None:
    table = pa.table({"c": given})
    try:
        return from_result(to_batch(table, batch_format), len(given), "", "c", given=table).schema.field("c").type
    except (BadOutput, UnicodeError):  # half a character, which no column can hold
        return None


def _alike(values: pa.Array, kind: pa.DataType) -> pa.Array:
    """As `lossless`, but a number keeps its sort and a time its zone: 1.0 is another answer than 1."""
    if _sort(values.type) != _sort(kind):
        raise Lossy(f"it is {values.type}, not {kind}")
    return lossless(values, kind)


def _sort(kind: pa.DataType) -> str:
    for name in ("integer", "floating", "decimal", "date", "timestamp"):
        if getattr(pa.types, f"is_{name}")(kind):
            return f"{name} {kind.tz}" if name == "timestamp" else name
    return ""  # lossless turns no other type into another


# ---------------------------------------------------------------- nulls that were NaN


def _holds_nan(kind: pa.DataType) -> bool:
    while pa.types.is_fixed_size_list(kind):
        kind = kind.value_type
    return bool(pa.types.is_floating(kind))


def _nulls_back(column: pa.ChunkedArray, given: pa.ChunkedArray) -> pa.ChunkedArray:
    masks = _masks(_whole(given))
    if not any(m.any() for m in masks) or _masks(whole := _whole(column))[0].any():
        return column
    values, kinds = to_numpy(whole), [given.type]
    while pa.types.is_fixed_size_list(kinds[-1]):
        kinds.append(kinds[-1].value_type)
    lost = np.isnan(values)
    made = pa.array(values.reshape(-1), kinds[-1], mask=(masks[-1] & lost).reshape(-1))
    for depth in reversed(range(len(kinds) - 1)):
        gone = masks[depth] & lost.all(axis=tuple(range(depth + 1, lost.ndim)))
        made = pa.FixedSizeListArray.from_arrays(made, type=kinds[depth], mask=pa.array(gone.reshape(-1)))
    return pa.chunked_array([made])


def _masks(array: pa.Array) -> list[np.ndarray]:
    """Where values are null, bool [rows], and for fixed-size lists where their items are, [rows, n], …"""
    null = np.asarray(array.is_null().to_numpy(zero_copy_only=False), dtype=bool)
    if not pa.types.is_fixed_size_list(array.type):
        return [null]
    masks = [null]
    for inner in _masks(picked(array, np.flatnonzero(~null)).flatten()):
        full = np.zeros((len(array), array.type.list_size, *inner.shape[1:]), dtype=bool)
        full[~null] = inner.reshape(-1, *full.shape[1:])
        masks.append(full)
    return masks


# ---------------------------------------------------------------- equality


def same(one: pa.ChunkedArray, other: pa.ChunkedArray) -> bool:
    """Whether two columns of one type hold the same values: NaN is NaN, -0.0 is not 0.0."""
    return len(one) == len(other) and _equal(_whole(one), _whole(other))


def _whole(column: pa.ChunkedArray) -> pa.Array:
    if column.num_chunks == 1:
        return column.chunk(0)
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)


def _equal(one: pa.Array, other: pa.Array) -> bool:
    if one.null_count != other.null_count or (one.null_count and not one.is_valid().equals(other.is_valid())):
        return False
    kind, t = one.type, pa.types
    if isinstance(one, pa.ExtensionArray):
        return _equal(one.storage, other.storage)
    if t.is_map(kind):
        return _equal(entries(one), entries(other))
    if is_list(kind):
        return np.array_equal(lengths_of(one), lengths_of(other)) and _equal(one.flatten(), other.flatten())
    if t.is_struct(kind):
        return all(_equal(a, b) for a, b in zip(one.flatten(), other.flatten(), strict=True))
    if t.is_floating(kind):
        x, y = (to_numpy(a) for a in (one, other))
        return np.array_equal(x, y, equal_nan=True) and bool((np.signbit(x) == np.signbit(y))[~np.isnan(x)].all())
    return bool(one.equals(other))
