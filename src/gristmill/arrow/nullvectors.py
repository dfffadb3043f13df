"""Rows in which a vector of fixed length is missing, at any depth: Parquet files of them are not for every pyarrow.

Before 26, pyarrow writes some that it cannot read back ("Expected all lists to be of size=3"), and refuses to write
others ("Lists with non-zero length null components are not supported"); seen with 19.0.1 to 25.0.1.
"""

from __future__ import annotations

from functools import reduce
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

READS_BACK = int(pa.__version__.partition(".")[0]) >= 26


def missing(column: pa.ChunkedArray) -> np.ndarray | None:
    """One bool a row, True where a vector is missing in it; None for a type without vectors."""
    if not _vectors(column.type):
        return None
    parts = [_missing(chunk) for chunk in column.chunks]
    return np.concatenate(parts) if parts else np.zeros(0, dtype=bool)


def _vectors(kind: Any) -> bool:
    if isinstance(kind, pa.BaseExtensionType):
        return _vectors(kind.storage_type)
    inner = [kind.field(i).type for i in range(kind.num_fields)]
    return pa.types.is_fixed_size_list(kind) or any(map(_vectors, inner))


def _missing(array: Any) -> np.ndarray:
    if isinstance(array, pa.ExtensionArray):
        return _missing(array.storage)
    none = np.zeros(len(array), dtype=bool)
    if not _vectors(array.type):
        return none
    gone = np.asarray(array.is_null(), dtype=bool)
    if pa.types.is_fixed_size_list(array.type):
        size = array.type.list_size
        inner = _missing(array.values.slice(array.offset * size, len(array) * size))
        return gone | inner.reshape(len(array), size).any(axis=1) if size else gone
    if pa.types.is_struct(array.type):
        fields = [_missing(field) for field in map(array.field, range(array.type.num_fields))]
        return reduce(np.logical_or, fields, gone)
    if pa.types.is_map(array.type):
        array = pa.ListArray.from_arrays(
            array.offsets, pa.StructArray.from_arrays([array.keys, array.items], ["k", "v"])
        )
    inner, of = _missing(array.flatten()), np.asarray(pc.list_parent_indices(array), dtype=np.int64)
    none[of[inner]] = True
    return none
