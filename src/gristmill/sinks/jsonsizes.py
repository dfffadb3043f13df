"""How long rows are as JSON, before any of it is written: Arrow's strings end at 2 GB, and some of its functions do not
notice when they pass that.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from gristmill.arrow.casts import entries, is_list, lossless
from gristmill.arrow.schemas import is_string, plain

if TYPE_CHECKING:
    import pyarrow as pa

MOST = 2_000_000_000  # bytes of a row: what reads it back holds it in one string, with what surrounds it
_NUMBER, _DECIMAL = 40, 90  # bytes of a number, date or time, and the comma after it; decimals have up to 76 digits
_NULL = 5
_LONGEST = 6  # bytes of a control character, which is one in UTF-8


def row_sizes(rows: pa.Table, exact: bool = False) -> np.ndarray:
    """Bytes of each row as a line of JSON, int64 [rows]: no more than these. `exact`: of texts, just as many, which
    takes longer.
    """
    total = np.full(rows.num_rows, 3, dtype=np.int64)
    for name, column in zip(rows.column_names, rows.columns, strict=True):
        sizes = [sizes_of(chunk, exact) for chunk in column.chunks]
        total += np.concatenate([np.empty(0, dtype=np.int64), *sizes]) + _name(name)
    return total


def too_long(rows: pa.Table) -> list[int]:
    """Rows that no line of JSON can hold."""
    found = np.flatnonzero(row_sizes(rows) > MOST).tolist()
    return [row for row in found if row_sizes(rows.slice(row, 1), exact=True)[0] > MOST]


def sizes_of(values: pa.Array, exact: bool = False) -> np.ndarray:
    """Bytes of each value as JSON, and of a comma after it, int64 [values], as in `row_sizes`."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kind, t = values.type, pa.types
    if isinstance(values, pa.ExtensionArray):
        return sizes_of(values.storage, exact)
    if t.is_dictionary(kind):
        index = pc.fill_null(values.indices, 0).to_numpy(zero_copy_only=False)
        return sizes_of(values.dictionary, exact)[index] if len(values.dictionary) else np.full(len(values), _NULL)
    if (bare := plain(kind)) != kind:
        return sizes_of(lossless(values, bare), exact)
    if (size := _same(kind)) is not None:
        return np.full(len(values), size, dtype=np.int64)
    if is_string(kind):
        return _lengths(values, pc.binary_length(values)) * (1 if exact else _LONGEST) + _escapes(values, exact) + 5
    if t.is_binary(kind) or t.is_large_binary(kind) or t.is_fixed_size_binary(kind):
        return _lengths(values, pc.binary_length(values)) * 4 // 3 + 8
    if t.is_map(kind):
        return sizes_of(entries(values), exact)
    if is_list(kind):
        lengths = _lengths(values, pc.list_value_length(values))
        if (size := _same(kind.value_type)) is not None:
            return lengths * size + _NULL
        before = np.concatenate(([0], np.cumsum(sizes_of(values.flatten(), exact))))
        ends = np.cumsum(lengths)
        return np.asarray(before[ends] - before[ends - lengths] + _NULL)
    total = np.full(len(values), _NULL, dtype=np.int64)  # of what no file of JSON holds, which is refused by its type
    for field, child in zip(kind, values.flatten(), strict=True) if t.is_struct(kind) else ():
        total += sizes_of(child, exact) + _name(field.name)
    return total


def _same(kind: pa.DataType) -> int | None:
    """Bytes of any value of a type, if that tells."""
    import pyarrow as pa

    t = pa.types
    if t.is_fixed_size_list(kind):
        each = _same(kind.value_type)
        return None if each is None else each * kind.list_size + _NULL
    if t.is_null(kind):
        return _NULL
    if t.is_decimal(kind):
        return _DECIMAL
    return _NUMBER if t.is_primitive(kind) else None


def _name(name: str) -> int:
    return len(json.dumps(name, ensure_ascii=False).encode("utf-8", "surrogatepass")) + 1


def _lengths(values: pa.Array, lengths: Any) -> np.ndarray:
    import pyarrow.compute as pc

    filled = pc.fill_null(lengths, 0) if values.null_count else lengths
    return np.asarray(filled.to_numpy(zero_copy_only=False), dtype=np.int64)


def _escapes(values: pa.Array, exact: bool) -> np.ndarray | int:
    """Bytes that escaping adds to each text."""
    import pyarrow.compute as pc

    if not exact:
        return 0
    control = _lengths(values, pc.count_substring_regex(values, r"[\x00-\x1f]")) * (_LONGEST - 1)
    for found in "\n\r\t":
        control -= _lengths(values, pc.count_substring(values, found)) * (_LONGEST - 2)
    for found in '\\"':
        control += _lengths(values, pc.count_substring(values, found))
    return control
