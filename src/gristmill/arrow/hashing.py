"""Digests of single rows, by which a later run tells whether a row is the one it was: 128 bits of BLAKE2b over all of a
row's values, so that nobody who writes rows can make two that are taken for one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from xxhash import xxh3_64_digest

from gristmill.arrow.rows import picked

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["DIGEST", "kinds_of", "rough", "row_digests"]

DIGEST = np.dtype([("hi", "<u8"), ("lo", "<u8")])  # compares as its halves do; `hi` is what an index is sorted by


def row_digests(rows: pa.Table, about: str) -> np.ndarray:
    """The digest of each row (DIGEST), over all columns in order. `about` says what the digests are of: with another
    text the same row has another digest, as it has where a column has another name or type.
    """
    known = hashlib.blake2b(json.dumps([about, kinds_of(rows.schema)]).encode(), digest_size=16).digest()
    blake = hashlib.blake2b
    return _hashed(rows, DIGEST, known, lambda value: blake(value, digest_size=16).digest())


def rough(rows: pa.Table) -> np.ndarray:
    """64 bits of XXH3 for each row (uint64): enough to count equal ones by, not to rest an answer on."""
    return _hashed(rows, np.dtype("<u8"), b"", xxh3_64_digest)


def kinds_of(schema: pa.Schema) -> list[list[str]]:
    """Names and types of columns, without how values are laid out in memory."""
    return [[field.name, str(_plain(field.type))] for field in schema]


def _plain(kind: pa.DataType) -> pa.DataType:
    import pyarrow as pa

    t = pa.types
    if hasattr(kind, "storage_type"):
        return _plain(kind.storage_type)
    if t.is_dictionary(kind):
        return _plain(kind.value_type)
    if t.is_large_string(kind) or t.is_string_view(kind):
        return pa.string()
    return pa.binary() if t.is_large_binary(kind) or t.is_binary_view(kind) else kind


def _hashed(rows: pa.Table, kind: np.dtype[Any], known: bytes, digest: Callable[[Any], bytes]) -> np.ndarray:
    found = [b"".join(map(digest, _told(batch, known))) for batch in rows.to_batches() if batch.num_rows]
    return np.frombuffer(b"".join(found), kind) if found else np.empty(0, kind)


def _told(batch: pa.RecordBatch, known: bytes) -> Iterator[bytes]:
    """Each row as bytes that no other row has: what is known of all, the lengths of its values (-1: null), values of
    fixed width, then the others.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    rows = batch.num_rows
    lengths: list[np.ndarray] = []
    fixed: list[np.ndarray] = []
    loose: list[pa.Array] = []
    for column in batch.columns:
        size, values, free = _laid_out(column)
        lengths.append(size)
        fixed += [] if values is None else [values]
        loose += [] if free is None else [free]
    same = np.broadcast_to(np.frombuffer(known, np.uint8), (rows, len(known)))
    sizes = np.stack(lengths, axis=1).astype("<i8").view(np.uint8).reshape(rows, -1)
    head = np.ascontiguousarray(np.concatenate([same, sizes, *fixed], axis=1))
    joined = _binary(np.arange(rows + 1, dtype=np.int64) * head.shape[1], head)
    if loose:
        joined = pc.binary_join_element_wise(joined, *loose, pa.scalar(b"", pa.large_binary()))
    _, offsets, data = joined.buffers()
    edges = np.frombuffer(offsets, np.int64)[joined.offset : joined.offset + rows + 1].tolist()
    whole = data.to_pybytes()
    return (whole[a:b] for a, b in pairwise(edges))


def _binary(edges: np.ndarray, data: Any) -> pa.Array:
    import pyarrow as pa

    return pa.Array.from_buffers(
        pa.large_binary(), len(edges) - 1, [None, pa.py_buffer(np.ascontiguousarray(edges)), pa.py_buffer(data)]
    )


def _laid_out(column: Any) -> tuple[np.ndarray, np.ndarray | None, pa.Array | None]:
    """A column's lengths (int64), and its values: bytes of one width (uint8 [n, width]), or large_binary."""
    import pyarrow as pa

    t, rows = pa.types, len(column)
    if hasattr(column, "storage"):
        return _laid_out(column.storage)
    kind = column.type
    if t.is_dictionary(kind):
        return _laid_out(column.dictionary_decode())
    valid = np.asarray(column.is_valid().to_numpy(zero_copy_only=False), dtype=bool)
    if t.is_null(kind):
        return np.full(rows, -1, np.int64), None, None
    if t.is_boolean(kind):
        return _laid_out(column.cast(pa.uint8()))
    if t.is_primitive(kind) or t.is_decimal(kind) or t.is_fixed_size_binary(kind):
        width = kind.bit_width // 8
        data = np.frombuffer(column.buffers()[1] or b"", np.uint8)
        values = data[column.offset * width : (column.offset + rows) * width].reshape(rows, width)
        return np.where(valid, width, -1), np.where(valid[:, None], values, np.uint8(0)), None
    loose = _loose(column, valid)
    edges = np.frombuffer(loose.buffers()[1], np.int64)[loose.offset : loose.offset + rows + 1]
    return np.where(valid, np.diff(edges), -1), None, loose


def _loose(column: Any, valid: np.ndarray) -> pa.Array:
    """Values of any width as large_binary, with nothing for a null."""
    import pyarrow as pa

    t, kind = pa.types, column.type
    if any(of(kind) for of in (t.is_string, t.is_large_string, t.is_string_view, t.is_binary, t.is_binary_view)):
        column, kind = column.cast(pa.large_binary()), pa.large_binary()
    if t.is_large_binary(kind):
        return column if valid.all() else column.fill_null(b"")
    lists = t.is_list(kind) or t.is_large_list(kind) or t.is_fixed_size_list(kind)
    if lists and (found := _numbers(column, valid)) is not None:
        return found
    texts = [b"" if value is None else repr(value).encode("utf-8", "surrogatepass") for value in column.to_pylist()]
    return pa.array(texts, pa.large_binary())


def _numbers(column: Any, valid: np.ndarray) -> pa.Array | None:
    """As `_loose`, for lists of numbers, each with whether it is there; None for other lists."""
    import pyarrow as pa

    inner = column.type.value_type
    if not (pa.types.is_integer(inner) or pa.types.is_floating(inner)):
        return None
    counts = np.zeros(len(column), np.int64)
    if not valid.all():
        column = picked(column, np.flatnonzero(valid))
    values = column.flatten()
    counts[valid] = column.value_lengths().to_numpy(zero_copy_only=False)
    width, there = inner.bit_width // 8, np.ones((len(values), 1), np.uint8)
    start = values.offset * width
    data = np.frombuffer(values.buffers()[1] or b"", np.uint8)[start : start + len(values) * width].reshape(-1, width)
    if values.null_count:
        there[:, 0] = values.is_valid().to_numpy(zero_copy_only=False)
        data = data * there
    told = np.ascontiguousarray(np.concatenate([there, data], axis=1))
    return _binary(np.concatenate([[0], np.cumsum(counts)]) * (width + 1), told)
