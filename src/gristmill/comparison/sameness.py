"""Whether values are the same, row by row, for any type: null as null, NaN as NaN, zero as minus zero; lists and
structs by what they hold.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gristmill.arrow.casts import entries, is_list, lengths_of
from gristmill.arrow.rows import picked

__all__ = ["nulls", "same"]


def nulls(values: pa.Array) -> np.ndarray:
    """Which values are null, bool [n]."""
    return np.asarray(values.is_null().to_numpy(zero_copy_only=False))


def same(one: pa.Array, other: pa.Array) -> np.ndarray:
    """Whether value i of `one` is value i of `other`, bool [n]. Both have the same type."""
    if hasattr(one, "storage"):
        return same(one.storage, other.storage)
    if pa.types.is_dictionary(one.type):
        return same(one.dictionary_decode(), other.dictionary_decode())
    if pa.types.is_map(one.type):
        return same(entries(one), entries(other))
    none, none_there = nulls(one), nulls(other)
    found: np.ndarray = none & none_there
    there = np.flatnonzero(~none & ~none_there)
    if len(there):
        found[there] = _alike(picked(one, there), picked(other, there))
    return found


def _alike(one: pa.Array, other: pa.Array) -> np.ndarray:
    """The same for values of which none is null."""
    if is_list(one.type):
        return _lists(one, other)
    if pa.types.is_struct(one.type):
        columns = [same(x, y) for x, y in zip(one.flatten(), other.flatten(), strict=True)]
        return np.logical_and.reduce(columns) if columns else np.ones(len(one), dtype=bool)
    if pa.types.is_floating(one.type):
        x, y = (np.asarray(values.to_numpy(zero_copy_only=False)) for values in (one, other))
        return np.asarray((x == y) | (np.isnan(x) & np.isnan(y)))
    return np.asarray(pc.equal(one, other).to_numpy(zero_copy_only=False))


def _lists(one: pa.Array, other: pa.Array) -> np.ndarray:
    lengths = lengths_of(one)
    found = lengths == lengths_of(other)
    rows = np.flatnonzero(found)
    if len(rows):
        inner = same(picked(one, rows).flatten(), picked(other, rows).flatten())
        wrong = np.concatenate(([0], np.cumsum(~inner)))
        ends = np.cumsum(lengths[rows])
        found[rows] = wrong[ends] == wrong[ends - lengths[rows]]
    return np.asarray(found)
