"""Merging: the parts of a generation as one file, streamed in plan order, with a receipt of its own."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa

from gristmill.commit import receipt as receipts
from gristmill.commit.generation import Generation
from gristmill.commit.receipt import Part, Receipt
from gristmill.commit.store import LocalFiles, sha256_of
from gristmill.errors import BadJob, RunFailed

ROWS = 65_536  # rows held at once while streaming


def merge(
    files: LocalFiles, generation: Generation, done: Sequence[Receipt], form: Any, schema: pa.Schema
) -> list[Receipt]:
    """The receipts to publish instead of `done`: the same dead letters, and one file `merged.g<N>` with all rows.

    Done twice it finds its receipt and does nothing. Raises BadJob for formats that cannot be merged.
    """
    folder = os.path.join(generation.folder, "merged")
    number = len(done)  # after all shards
    standing = receipts.valid(receipts.listed(folder).get(number, []))
    if standing is None:
        standing = _write(files, generation, done, form, schema, folder, number)
    kept = [_without_rows(r) for r in done]
    return [*kept, standing]


def _write(
    files: LocalFiles,
    generation: Generation,
    done: Sequence[Receipt],
    form: Any,
    schema: pa.Schema,
    folder: str,
    number: int,
) -> Receipt:
    parts = [p for r in done for p in r.parts if p.role == "rows"]
    nonce = secrets.token_hex(6)
    writer = form.writer(files, generation.work, f"merged.g{generation.number}", nonce, schema, {})
    try:
        for part in parts:
            for table in _tables(os.path.join(generation.root, part.work), part, form.name):
                writer.write(table)
        written = writer.close()
    except BaseException:
        writer.abort()
        raise
    rows, wanted = sum(f.rows for f in written if f.role == "rows"), sum(p.rows for p in parts)
    if rows != wanted:
        raise RunFailed(f"{generation.root}: merged {rows} of {wanted} rows")
    files.sync_folder(generation.work)
    measured = tuple(receipts.measure(f, generation.root) for f in written)
    mine = Receipt(number, nonce, (0,) * 8, measured)
    files.make_folder(folder)
    return receipts.commit(files, folder, mine)


def _tables(path: str, part: Part, form: str) -> Iterator[pa.Table]:
    if sha256_of(path) != part.sha256:
        raise RunFailed(f"{path}: is not what its receipt says: run again with --restart")
    if form == "parquet":
        import pyarrow.parquet as pq

        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=ROWS):
                yield pa.Table.from_batches([batch])
    elif form == "jsonl":
        import pyarrow.json as pj

        with pj.open_json(path) as reader:
            for batch in reader:
                yield pa.Table.from_batches([batch])
    else:
        raise BadJob(f"merge: a {form} sink cannot be merged; read its manifest instead")


def _without_rows(receipt: Receipt) -> Receipt:
    from dataclasses import replace

    return replace(receipt, parts=tuple(p for p in receipt.parts if p.role == "dead"))
