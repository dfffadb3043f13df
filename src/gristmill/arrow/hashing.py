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

from gristmill.arrow.schemas import plain
from gristmill.arrow.valuebytes import binary, laid_out

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

    t, kind = pa.types, plain(kind)
    if isinstance(kind, pa.BaseExtensionType):
        return _plain(kind.storage_type)
    if t.is_large_string(kind):
        return pa.string()
    return pa.binary() if t.is_large_binary(kind) else kind


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
    columns = [laid_out(column) for column in batch.columns]
    fixed = [column.fixed for column in columns if column.fixed is not None]
    loose = [column.loose for column in columns if column.loose is not None]
    same = np.broadcast_to(np.frombuffer(known, np.uint8), (rows, len(known)))
    sizes = np.stack([column.lengths for column in columns], axis=1).astype("<i8").view(np.uint8).reshape(rows, -1)
    head = np.ascontiguousarray(np.concatenate([same, sizes, *fixed], axis=1))
    joined = binary(np.arange(rows + 1, dtype=np.int64) * head.shape[1], head)
    if loose:
        joined = pc.binary_join_element_wise(joined, *loose, pa.scalar(b"", pa.large_binary()))
    _, offsets, data = joined.buffers()
    edges = np.frombuffer(offsets, np.int64)[joined.offset : joined.offset + rows + 1].tolist()
    whole = data.to_pybytes()
    return (whole[a:b] for a, b in pairwise(edges))
