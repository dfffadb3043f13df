"""Record batches of another size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import pyarrow as pa


def regrouped(batches: Iterable[pa.RecordBatch], rows: int, most: int) -> Iterator[pa.RecordBatch]:
    """The same rows in batches of `rows`, for writers that make a group of each. Rows that take more than `most` bytes
    come in smaller ones, so that no more is copied.
    """
    held: list[pa.RecordBatch] = []
    count = size = 0
    for batch in batches:
        while batch.num_rows:
            some = batch.slice(0, rows - count)
            batch = batch.slice(some.num_rows)
            held.append(some)
            count, size = count + some.num_rows, size + some.nbytes
            if count == rows or size > most:
                yield _together(held)
                held, count, size = [], 0, 0
    if held:
        yield _together(held)


def _together(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    return batches[0] if len(batches) == 1 else pa.Table.from_batches(batches).combine_chunks().to_batches()[0]
