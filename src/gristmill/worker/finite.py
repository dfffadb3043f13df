"""Which rows of a column hold a NaN or an infinite value, however deep: what `on_nan` decides about."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa

from gristmill.arrow.casts import entries, is_list
from gristmill.models.columns import numbers

Test = Callable[[np.ndarray], np.ndarray]


def not_finite(column: pa.ChunkedArray) -> np.ndarray | None:
    """Rows with NaN or infinity, bool [rows]; None if the type holds no floats. A null is neither."""
    return _rows(column, lambda values: ~np.isfinite(values))


def holds_nan(column: pa.ChunkedArray) -> np.ndarray | None:
    """Rows with NaN."""
    return _rows(column, np.isnan)


def _rows(column: pa.ChunkedArray, test: Test) -> np.ndarray | None:
    if not _floats(column.type):
        return None
    found = [_found(chunk, test) for chunk in column.chunks]
    return np.concatenate([np.empty(0, dtype=bool), *found])


def _floats(kind: pa.DataType) -> bool:
    if isinstance(kind, pa.BaseExtensionType):
        return _floats(kind.storage_type)
    if pa.types.is_dictionary(kind) or is_list(kind):
        return _floats(kind.value_type)
    if pa.types.is_map(kind):
        return _floats(kind.key_type) or _floats(kind.item_type)
    if pa.types.is_struct(kind):
        return any(_floats(f.type) for f in kind)
    return bool(pa.types.is_floating(kind))


def _found(values: pa.Array, test: Test) -> np.ndarray:
    kind = values.type
    if not _floats(kind):
        return np.zeros(len(values), dtype=bool)
    if pa.types.is_floating(kind):
        plain = numbers(values)
        if plain is None:
            plain = values.cast(pa.float64()).fill_null(0.0).to_numpy(zero_copy_only=False)
        return np.asarray(test(plain))
    if isinstance(values, pa.ExtensionArray):
        return _found(values.storage, test)
    if pa.types.is_dictionary(kind):
        return _found(values.dictionary_decode(), test)
    if pa.types.is_struct(kind):
        return np.asarray(np.logical_or.reduce([_found(child, test) for child in values.flatten()]))
    if pa.types.is_map(kind):
        return _found(entries(values), test)
    if pa.types.is_fixed_size_list(kind) and not values.null_count and (flat := numbers(values.flatten())) is not None:
        return _in_vectors(flat.reshape(len(values), kind.list_size), test)
    import pyarrow.compute as pc  # a third of a small job's start, and only lists need it

    lengths = pc.fill_null(pc.list_value_length(values), 0).to_numpy(zero_copy_only=False)
    bad = _found(values.flatten(), test)
    out = np.zeros(len(values), dtype=bool)
    out[np.repeat(np.arange(len(values)), lengths)[bad]] = True
    return out


def _in_vectors(vectors: np.ndarray, test: Test) -> np.ndarray:
    # The sum of a row is not finite if a value is not (or if it overflows): one pass, then a check of those few.
    with np.errstate(invalid="ignore", over="ignore"):
        doubtful = ~np.isfinite(vectors.sum(axis=1))
    if doubtful.any():
        doubtful[doubtful] = test(vectors[doubtful]).any(axis=1)
    return np.asarray(doubtful)
