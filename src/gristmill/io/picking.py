"""Rows by their numbers. Of a slice of vectors of vectors (fixed-size lists of fixed-size lists), Arrow's own `take`
and `filter` return other values than there are, without a word (seen up to pyarrow 26): on columns that may be such,
use this.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["picked"]


def picked(rows: Any, index: Any) -> Any:
    """The rows of a Table, ChunkedArray or Array at `index` (int [n], numpy or Arrow; a null gives a null row). Those
    that follow each other are a slice.
    """
    import numpy as np
    import pyarrow as pa

    if isinstance(index, np.ndarray) and index.dtype.kind == "i":
        start, count = (int(index[0]), len(index)) if len(index) else (0, 0)
        within = start >= 0 and start + count <= (rows.num_rows if isinstance(rows, pa.Table) else len(rows))
        if within and bool((np.diff(index) == 1).all()):
            return rows.slice(start, count)
        # Arrow makes an array of an array with the help of pandas, which it imports for that: half a second.
        whole = np.ascontiguousarray(index, dtype=np.int64)
        index = pa.Array.from_buffers(pa.int64(), count, [None, pa.py_buffer(whole)])
    if isinstance(rows, pa.Table):
        for i, field in enumerate(rows.schema):
            if _misread(_stored(field.type)):
                rows = rows.set_column(i, field, _unsliced(rows.column(i)))
    elif _misread(_stored(rows.type)):
        rows = _unsliced(rows)
    return rows.take(index)


def _stored(kind: pa.DataType) -> pa.DataType:
    """What lies in memory: an extension type of a class of the user's own may have no hash to be known by."""
    return getattr(kind, "storage_type", kind)


@lru_cache(maxsize=1024)
def _misread(kind: pa.DataType) -> bool:
    """Whether it holds vectors of vectors, at any depth."""
    import pyarrow as pa

    if pa.types.is_dictionary(kind):
        return _misread(kind.value_type)
    inner = [_stored(kind.field(i).type) for i in range(kind.num_fields)]
    if pa.types.is_fixed_size_list(kind):
        return pa.types.is_fixed_size_list(inner[0]) or _misread(inner[0])
    return any(map(_misread, inner))


def _unsliced(column: Any) -> Any:
    """The same values in memory of their own, where nothing, at no depth, begins in the middle."""
    import pyarrow as pa

    if isinstance(column, pa.Array):
        return pa.concat_arrays([column, column.slice(0, 0)])
    return pa.chunked_array([pa.concat_arrays([c, c.slice(0, 0)]) for c in column.chunks], column.type)
