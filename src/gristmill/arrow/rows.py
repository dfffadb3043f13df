"""Rows by their numbers. For a slice of vectors of vectors (fixed-size lists of fixed-size lists), Arrow's own `take`
and `filter` silently return wrong values (seen up to pyarrow 26): use this module on columns that may hold such
vectors.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

__all__ = ["picked", "run_of"]


def picked(rows: Any, index: Any) -> Any:
    """The rows of a Table, ChunkedArray or Array at `index` (int [n], numpy or Arrow; a null gives a null row).
    Consecutive rows are a slice.
    """
    import numpy as np
    import pyarrow as pa

    if isinstance(index, np.ndarray) and index.dtype.kind == "i":
        where = run_of(index)
        if isinstance(where, slice) and where.stop <= (rows.num_rows if isinstance(rows, pa.Table) else len(rows)):
            return rows.slice(where.start, len(index))
        # Arrow makes an array from an array with pandas, which it imports for that: 0.3 s.
        whole = np.ascontiguousarray(index, dtype=np.int64)
        index = pa.Array.from_buffers(pa.int64(), len(whole), [None, pa.py_buffer(whole)])
    if isinstance(rows, pa.Table):
        for i, field in enumerate(rows.schema):
            if _misread(_stored(field.type)):
                rows = rows.set_column(i, field, _unsliced(rows.column(i)))
    elif _misread(_stored(rows.type)):
        rows = _unsliced(rows)
    return rows.take(index)


def run_of(index: np.ndarray) -> Any:
    """`index` (int [n]) as a slice if its rows are consecutive, so that nothing is copied; else itself."""
    start, count = (int(index[0]), len(index)) if len(index) else (0, 0)
    if start < 0 or (count and int(index[-1]) - start != count - 1) or not bool((index[1:] - index[:-1] == 1).all()):
        return index
    return slice(start, start + count)


def _stored(kind: pa.DataType) -> pa.DataType:
    """The type in memory: an extension type of a user's own class may have no hash to look it up by."""
    return getattr(kind, "storage_type", kind)


@lru_cache(maxsize=1024)
def _misread(kind: pa.DataType) -> bool:
    """Whether the type holds vectors of vectors, at any depth."""
    import pyarrow as pa

    if pa.types.is_dictionary(kind):
        return _misread(kind.value_type)
    inner = [_stored(kind.field(i).type) for i in range(kind.num_fields)]
    if pa.types.is_fixed_size_list(kind):
        return pa.types.is_fixed_size_list(inner[0]) or _misread(inner[0])
    return any(map(_misread, inner))


def _unsliced(column: Any) -> Any:
    """The same values in memory of their own, in which nothing, at any depth, begins in the middle."""
    import pyarrow as pa

    if isinstance(column, pa.Array):
        return pa.concat_arrays([column, column.slice(0, 0)])
    return pa.chunked_array([pa.concat_arrays([c, c.slice(0, 0)]) for c in column.chunks], column.type)
