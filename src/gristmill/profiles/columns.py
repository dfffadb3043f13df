"""Profiles of Arrow tables. Counts of nulls cost nothing; values are looked at in the columns asked for, by numpy and
Arrow, a column at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from gristmill.profiles.profile import LONG, MOST, ColumnProfile, Kind, Profile, text_of
from gristmill.profiles.sketch import UNIT, merged, sketched

PEEK = 2048  # values that tell, without a look at the others, that a column has many different ones
BLOCK_ROWS = 1 << 18
BLOCK_BYTES = 8 << 20
SAMPLED = 1 << 17  # rows of a shard from which one of UNIT is looked at: shares err by 0.4 %, less than sketches do
BLOCK = 2048  # vectors that are summed at a time, as float64


def profiled(rows: pa.Table, asked: Collection[str] = (), before: Profile | None = None) -> Profile:
    """The profile of a table, with the values of the columns `asked` for. `before` is that of rows to which these will
    be added: what was many there is not counted again.
    """
    nulls, columns = dict[str, int](), dict[str, ColumnProfile]()
    for name, column in zip(rows.column_names, rows.columns, strict=True):
        nulls[name] = column.null_count
        if name in asked:
            known = None if before is None else before.columns.get(name)
            many = known is not None and known.held > 0 and known.counts is None
            sampled = rows.num_rows + (0 if before is None else before.rows) >= SAMPLED
            columns[name] = _looked_at(column, nulls[name], many, sampled)
    return Profile(rows.num_rows, nulls, columns)


class Profiling:
    """The profile of rows that come a window at a time. Their values are looked at in larger blocks, as every merging
    of sketches costs as much as a look at some thousand numbers.
    """

    def __init__(self, asked: Collection[str]) -> None:
        self._asked = asked
        self._counts = self._values = Profile()
        self._held: list[pa.Table] = []

    def add(self, rows: pa.Table) -> None:
        """Take in some rows. Their columns are held, at most BLOCK_ROWS and BLOCK_BYTES of those that are asked for."""
        self._counts = self._counts + profiled(rows)
        if not self._asked:
            return
        some = rows.select([name for name in rows.column_names if name in self._asked])
        if self._held and not some.schema.equals(self._held[0].schema):
            self._look()
        self._held.append(some)
        rows_held, bytes_held = sum(t.num_rows for t in self._held), sum(t.nbytes for t in self._held)
        if rows_held >= BLOCK_ROWS or bytes_held >= BLOCK_BYTES:
            self._look()

    def profile(self) -> Profile:
        """The profile of all rows so far."""
        self._look()
        return replace(self._counts, columns={n: c for n, c in self._values.columns.items() if n in self._counts.nulls})

    def _look(self) -> None:
        if self._held:
            rows = sum(table.num_rows for table in self._held)  # joined, tables without columns have none
            made = profiled(pa.concat_tables(self._held), self._asked, self._values)
            self._values = self._values + replace(made, rows=rows)
        self._held = []


def kind_of(stored: pa.DataType) -> Kind:
    """What the values of a type are to a profile."""
    t, kind = pa.types, getattr(stored, "storage_type", stored)
    if t.is_dictionary(kind):
        return kind_of(kind.value_type)
    if t.is_boolean(kind):
        return "boolean"
    if t.is_integer(kind) or t.is_temporal(kind):
        return "whole"
    if t.is_floating(kind) or t.is_decimal(kind):
        return "number"
    if t.is_string(kind) or t.is_large_string(kind) or t.is_string_view(kind):
        return "text"
    if t.is_fixed_size_list(kind) or t.is_list(kind) or t.is_large_list(kind):
        inner = kind.value_type
        return "vector" if t.is_floating(inner) or t.is_integer(inner) else "other"
    return "other"


def _looked_at(column: pa.ChunkedArray, nulls: int, many: bool, sampled: bool = False) -> ColumnProfile:
    kind, rows = kind_of(column.type), len(column)
    if kind == "other" or nulls == rows:
        return ColumnProfile(rows, nulls, kind)
    if sampled and kind != "vector" and rows >= PEEK:
        return _sampled(column, nulls, kind, many)
    whole = column.combine_chunks()
    if isinstance(whole, pa.ChunkedArray):  # what one array cannot hold
        parts = [_looked_at(pa.chunked_array([c]), c.null_count, many) for c in whole.chunks]
        return sum(parts[1:], parts[0])
    array = getattr(whole, "storage", whole)
    if kind == "vector":
        return _vectors(array, rows, nulls)
    if kind in ("text", "boolean"):
        return _texts(array, rows, nulls, kind, many)
    return _numbers(array, rows, nulls, kind, many)


def _sampled(column: pa.ChunkedArray, nulls: int, kind: Kind, many: bool) -> ColumnProfile:
    """The profile of many rows by one in UNIT of them, at random among each UNIT; the least and greatest number are
    exact, and so are nulls.
    """
    some = pa.chunked_array([chunk.take(_one_in_each(len(chunk))) for chunk in column.chunks], column.type)
    found = _looked_at(some, some.null_count, many)
    if found.counts is not None:
        counts = {name: count * UNIT for name, count in found.counts.items()}
        return ColumnProfile(len(column), nulls, kind, found.strange * UNIT, counts)
    sketch = {str(int(unit) * UNIT): text for unit, text in found.sketch.items()}
    if kind in ("whole", "number"):
        sketch = dict(merged(sketch, sketched(np.array([end for chunk in column.chunks for end in _ends(chunk)]))))
    return ColumnProfile(len(column), nulls, kind, found.strange * UNIT, sketch=sketch)


@functools.cache
def _chance() -> np.random.Generator:
    """Its own: a function of the user may have seeded the one that all share."""
    return np.random.default_rng()


def _one_in_each(rows: int) -> pa.Array:
    """A number from each UNIT consecutive ones: rows that repeat in a pattern are met in the same shares."""
    start = np.arange(0, rows, UNIT)
    return pa.array(np.minimum(start + _chance().integers(0, UNIT, len(start)), rows - 1))


def _ends(chunk: pa.Array) -> list[float]:
    """The least and the greatest finite number; nothing if there is none. Arrow's own takes ten times as long."""
    values = _as_numpy(getattr(chunk, "storage", chunk))
    if values.dtype.kind == "f" and not (len(values) and np.isfinite(values.min()) and np.isfinite(values.max())):
        values = values[np.isfinite(values)]
    return [float(values.min()), float(values.max())] if len(values) else []


# ---------------------------------------------------------------- numbers


def _numbers(array: pa.Array, rows: int, nulls: int, kind: Kind, many: bool) -> ColumnProfile:
    values = _as_numpy(array)
    strange = 0
    if values.dtype.kind == "f":
        finite = np.isfinite(values)
        if not finite.all():
            values, strange = values[finite], int(len(finite) - finite.sum())
    if not many and len(np.unique(values[:PEEK])) <= MOST[kind]:
        found, counts = np.unique(values, return_counts=True)
        if len(found) <= MOST[kind]:
            counted = dict(zip(map(_number, found.tolist()), counts.tolist(), strict=True))
            return ColumnProfile(rows, nulls, kind, strange, counted)
    return ColumnProfile(rows, nulls, kind, strange, sketch=sketched(values))


def _as_numpy(array: pa.Array) -> np.ndarray:
    """Values without nulls; times and dates as whole numbers, decimals as floats."""
    t = pa.types
    if t.is_dictionary(array.type):
        array = array.dictionary_decode()
    array = array.drop_null() if array.null_count else array
    if t.is_temporal(array.type):
        array = array.cast(pa.int32() if array.type.bit_width == 32 else pa.int64())
    elif t.is_decimal(array.type):
        array = array.cast(pa.float64())
    values: np.ndarray = array.to_numpy(zero_copy_only=False)
    return values.astype(np.float32) if values.dtype == np.float16 else values


def _number(value: float) -> str:
    """The text of a number: 1 and 1.0 are the same."""
    if isinstance(value, int):
        return str(value)
    return str(int(value)) if value.is_integer() and abs(value) < 2**53 else repr(value)


# ---------------------------------------------------------------- texts


def _texts(array: pa.Array, rows: int, nulls: int, kind: Kind, many: bool) -> ColumnProfile:
    import pyarrow.compute as pc

    counts = None if many else _categories(array, kind)
    if counts is not None:
        return ColumnProfile(rows, nulls, kind, counts=counts)
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    lengths = pc.binary_length(array.cast(pa.large_string()) if pa.types.is_string_view(array.type) else array)
    return ColumnProfile(rows, nulls, kind, sketch=sketched(_as_numpy(lengths)))


def _categories(array: pa.Array, kind: Kind) -> dict[str, int] | None:
    """How often each text occurs; None if they are too many, or too long."""

    import pyarrow.compute as pc

    head = array.slice(0, PEEK).unique()
    if len(head) - head.null_count > MOST[kind]:
        return None
    found = pc.value_counts(array)
    values, counts = found.field("values"), found.field("counts").to_pylist()
    if len(values) > MOST[kind] + 1:
        return None
    names = [_name(value) for value in _bytes_of(values)]
    if any(name is not None and len(name) > LONG for name in names):
        return None
    made = {str(n, "utf-8", "backslashreplace"): c for n, c in zip(names, counts, strict=True) if n is not None}
    return made if len(made) <= MOST[kind] else None


def _bytes_of(values: pa.Array) -> list[Any]:
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    return list(values.to_pylist() if pa.types.is_boolean(values.type) else values.cast(pa.large_binary()).to_pylist())


def _name(value: bytes | bool | None) -> bytes | None:
    return (b"1" if value else b"0") if isinstance(value, bool) else value


# ---------------------------------------------------------------- vectors


def _vectors(array: pa.Array, rows: int, nulls: int) -> ColumnProfile:
    import pyarrow.compute as pc

    array = array.drop_null() if array.null_count else array
    lengths = pc.list_value_length(array).unique().to_pylist()
    if len(lengths) != 1 or not lengths[0]:
        return ColumnProfile(rows, nulls, "other")
    flat = array.flatten().to_numpy(zero_copy_only=False).reshape(-1, lengths[0])
    total, squares, held, sketch = np.zeros(lengths[0]), 0.0, 0, dict[str, str]()
    for start in range(0, len(flat), BLOCK):
        block = flat[start : start + BLOCK].astype(np.float64)
        norms = np.einsum("ij,ij->i", block, block)
        if not (finite := np.isfinite(norms)).all():
            block, norms = block[finite], norms[finite]
        total += block.sum(axis=0)
        squares += float(norms.sum())
        held += len(norms)
        sketch = dict(merged(sketch, sketched(np.sqrt(norms))))
    strange = len(flat) - held
    return ColumnProfile(rows, nulls, "vector", strange, sketch=sketch, total=text_of(total), squares=squares)
