"""Values of any type as bytes that no other value of the type has, however Arrow lays the column out: of lists, structs
and maps, too, whose Python values would not tell all of them apart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from gristmill.arrow.casts import contents, entries, is_list, lengths_of
from gristmill.arrow.rows import picked
from gristmill.values import dataclass

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["Laid", "binary", "laid_out", "value_bytes"]


@dataclass(frozen=True)
class Laid:
    """The values of a column: the length of each (int64 [n], -1 for null), and their bytes, of one `width` (uint8
    [n, width]) or of any (large_binary).
    """

    lengths: np.ndarray
    fixed: np.ndarray | None = None
    loose: pa.Array | None = None


def laid_out(column: pa.Array) -> Laid:
    """Each value as bytes that with their length are no other value's."""
    import pyarrow as pa
    import pyarrow.compute as pc

    t, kind, rows = pa.types, column.type, len(column)
    if hasattr(column, "storage"):  # of an extension type
        return laid_out(column.storage)
    if (at := _places(column)) is not None:
        held = column.dictionary if t.is_dictionary(kind) else column.values
        return _picked(laid_out(held), at)
    if t.is_dictionary(kind):
        return laid_out(column.dictionary_decode())
    valid = np.asarray(column.is_valid().to_numpy(zero_copy_only=False), dtype=bool)
    if t.is_null(kind):
        return Laid(np.full(rows, -1, np.int64))
    if _of_one_width(kind):
        values = _bytes_of_one_width(column)
        return Laid(np.where(valid, values.shape[1], -1), values)
    loose = _contents(column) if is_list(kind) or t.is_map(kind) else _as_binary(column)
    loose = value_bytes(column) if loose is None else loose
    if not valid.all():
        loose = pc.if_else(column.is_valid(), loose, b"")
    return Laid(np.where(valid, np.diff(_edges(loose)), -1), None, loose)


def value_bytes(column: pa.Array) -> pa.Array:
    """Each value as large_binary, a null as bytes of its own. Where one ends is told by these bytes alone, so that of
    several in a row it is known which they are: whether it is there, and bytes of the type's width; or its length, and
    its bytes or values; or whether it is there, and its fields.
    """
    import pyarrow as pa

    t, kind = pa.types, column.type
    if hasattr(column, "storage"):
        return value_bytes(column.storage)
    if (at := _places(column)) is not None:
        held = column.dictionary if t.is_dictionary(kind) else column.values
        return picked(pa.concat_arrays([value_bytes(held), value_bytes(pa.nulls(1, held.type))]), at)
    if t.is_dictionary(kind):
        return value_bytes(column.dictionary_decode())
    if t.is_union(kind):
        return _chosen(column)
    there = np.asarray(column.is_valid().to_numpy(zero_copy_only=False), np.uint8)[:, None]
    if t.is_null(kind):
        return _of_width(there)
    if _of_one_width(kind):
        return _of_width(np.concatenate([there, _bytes_of_one_width(column)], axis=1))
    if t.is_struct(kind):
        return _joined(_of_width(there), *map(value_bytes, column.flatten()))
    laid = laid_out(column)
    return _joined(_of_width(laid.lengths.astype("<i8").view(np.uint8).reshape(len(column), 8)), laid.loose)


def _of_one_width(kind: pa.DataType) -> bool:
    import pyarrow as pa

    t = pa.types
    return bool(t.is_primitive(kind) or t.is_decimal(kind) or t.is_fixed_size_binary(kind))


def _places(column: pa.Array) -> np.ndarray | None:
    """Where the values of a dictionary or of runs are, a null after the last of them; None for columns of other kinds,
    and for dictionaries that Arrow decodes itself: it takes no rows of views, nor of what holds some.
    """
    import pyarrow as pa

    t, kind, rows = pa.types, column.type, len(column)
    if t.is_run_end_encoded(kind):
        return np.searchsorted(column.run_ends.to_numpy(), np.arange(column.offset, column.offset + rows), side="right")
    if not t.is_dictionary(kind) or _of_one_width(kind.value_type) or t.is_string(kind.value_type):
        return None
    return np.asarray(column.indices.cast(pa.int64()).fill_null(len(column.dictionary)).to_numpy())


def _picked(laid: Laid, at: np.ndarray) -> Laid:
    """The values at these places; null after the last."""
    import pyarrow as pa

    fixed = loose = None
    if laid.fixed is not None:
        fixed = np.concatenate([laid.fixed, np.zeros((1, laid.fixed.shape[1]), np.uint8)])[at]
    if laid.loose is not None:
        last = pa.array([b""], pa.large_binary())
        loose = picked(pa.concat_arrays([laid.loose, last]), at)
    return Laid(np.append(laid.lengths, -1)[at], fixed, loose)


def _contents(column: pa.Array) -> pa.Array:
    """All that each list or map holds, in one."""
    import pyarrow as pa

    lists = entries(column) if pa.types.is_map(column.type) else column
    ends = np.cumsum(lengths_of(lists))
    values = value_bytes(contents(lists))
    return binary(_edges(values)[np.concatenate([[0], ends])], values.buffers()[2] or b"")


def _bytes_of_one_width(column: pa.Array) -> np.ndarray:
    """Values whose type has a width (numbers, times, decimals, truth values, bytes of one length) as uint8 [n, width],
    nulls as zeros.
    """
    import pyarrow as pa

    rows = len(column)
    if pa.types.is_boolean(column.type):
        column = column.cast(pa.uint8())
    width = column.type.bit_width // 8
    data = np.frombuffer(column.buffers()[1] or b"", np.uint8)
    values = data[column.offset * width : (column.offset + rows) * width].reshape(rows, width)
    if not column.null_count:
        return values
    return np.where(column.is_valid().to_numpy(zero_copy_only=False)[:, None], values, np.uint8(0))


def _as_binary(column: pa.Array) -> pa.Array | None:
    """Texts and bytes of any length as large_binary; None for other values."""
    import pyarrow as pa

    t, kind = pa.types, column.type
    tests = (t.is_string, t.is_large_string, t.is_string_view, t.is_binary, t.is_large_binary, t.is_binary_view)
    return column.cast(pa.large_binary()) if any(test(kind) for test in tests) else None


def binary(edges: np.ndarray, data: Any) -> pa.Array:
    """The bytes between these edges (int64 [n + 1]) of `data` as large_binary."""
    import pyarrow as pa

    return pa.Array.from_buffers(
        pa.large_binary(), len(edges) - 1, [None, pa.py_buffer(np.ascontiguousarray(edges)), pa.py_buffer(data)]
    )


def _edges(values: pa.Array) -> np.ndarray:
    if not len(values):
        return np.zeros(1, np.int64)
    return np.frombuffer(values.buffers()[1], np.int64)[values.offset : values.offset + len(values) + 1]


def _of_width(values: np.ndarray) -> pa.Array:
    """uint8 [n, width] as large_binary."""
    return binary(np.arange(len(values) + 1, dtype=np.int64) * values.shape[1], np.ascontiguousarray(values))


def _joined(*columns: pa.Array) -> pa.Array:
    import pyarrow as pa
    import pyarrow.compute as pc

    return pc.binary_join_element_wise(*columns, pa.scalar(b"", pa.large_binary()))


def _chosen(column: pa.Array) -> pa.Array:
    """Values of a union, each after the number of its type."""
    import pyarrow as pa

    kind, here = column.type, slice(column.offset, column.offset + len(column))
    codes = np.frombuffer(column.buffers()[1], np.int8)[here]  # not `type_codes`, which forgets the offset
    fields = [value_bytes(column.field(i)) for i in range(kind.num_fields)]
    firsts = np.concatenate([[0], np.cumsum([len(f) for f in fields])])[:-1]
    number = np.zeros(128, np.int64)
    number[kind.type_codes] = np.arange(kind.num_fields)
    sparse = kind.mode == "sparse"
    at = np.arange(len(column)) if sparse else np.frombuffer(column.buffers()[2], np.int32)[here]
    if not fields:
        return _of_width(np.zeros((len(column), 0), np.uint8))
    return _joined(
        _of_width(codes.astype(np.uint8)[:, None]), picked(pa.concat_arrays(fields), firsts[number[codes]] + at)
    )
