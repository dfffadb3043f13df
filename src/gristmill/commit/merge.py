"""Merging: the parts of a generation as one file, streamed in plan order, with a receipt of its own."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from gristmill.commit import receipt as receipts
from gristmill.commit.generation import Generation
from gristmill.commit.receipt import Part, Receipt
from gristmill.commit.store import join
from gristmill.errors import BadJob, RunFailed
from gristmill.plan.contracts import Files, WorkFile, Writer

ROWS = 65_536  # rows held at once while streaming


def merge(
    files: Files, generation: Generation, done: Sequence[Receipt], form: Any, schema: pa.Schema, options: Any
) -> list[Receipt]:
    """The receipts to publish instead of `done`: the same dead letters, and one file `merged.g<N>` with all rows.

    Done twice it finds its receipt and does nothing. Raises BadJob for formats that cannot be merged.
    """
    folder = join(generation.folder, "merged")
    number = len(done)  # after all shards
    standing = receipts.valid(receipts.listed(folder, files).get(number, []), files)
    if standing is not None and receipts.cut(files, generation.work, [standing]):
        receipts.void(files, generation.root, folder, standing)
        standing = None
    if standing is None:
        standing = _write(files, generation, done, form, schema, options, folder, number)
    kept = [_without_rows(r) for r in done]
    return [*kept, standing]


def _write(
    files: Files,
    generation: Generation,
    done: Sequence[Receipt],
    form: Any,
    schema: pa.Schema,
    options: Any,
    folder: str,
    number: int,
) -> Receipt:
    parts = [p for r in done for p in r.parts if p.role == "rows"]
    nonce = secrets.token_hex(6)
    stem = f"merged.g{generation.number}"
    for part in parts:
        path = join(generation.root, part.work)
        if files.digest(path)[1] != part.sha256:
            raise RunFailed(f"{path}: is not what its receipt says: run again with --restart (restart=True)")
    if form.name == "jsonl":
        written = [_joined(files, generation, parts, stem, nonce)]
    elif form.name == "parquet":
        written = _streamed(files, generation, parts, form.writer(files, generation.work, stem, nonce, schema, options))
    else:
        raise BadJob(f"merge: a {form.name} sink cannot be merged; read its manifest instead")
    rows, wanted = sum(f.rows for f in written if f.role == "rows"), sum(p.rows for p in parts)
    if rows != wanted:
        raise RunFailed(f"{generation.root}: merged {rows} of {wanted} rows")
    measured = tuple(receipts.measure(files, f, generation.root) for f in written)
    files.settle([f.path for f in written])
    mine = Receipt(number, nonce, (0,) * 8, measured)
    files.make_folder(folder)
    return receipts.commit(files, folder, mine)


def _streamed(files: Files, generation: Generation, parts: Sequence[Part], writer: Writer) -> list[WorkFile]:
    """Parquet parts through one writer, some rows at a time."""
    import pyarrow.parquet as pq

    try:
        for part in parts:
            with files.local(join(generation.root, part.work)) as path, pq.ParquetFile(path) as file:
                for batch in file.iter_batches(batch_size=ROWS):
                    writer.write(pa.Table.from_batches([batch]))
        return writer.close()
    except BaseException:
        writer.abort()
        raise


def _joined(files: Files, generation: Generation, parts: Sequence[Part], stem: str, nonce: str) -> WorkFile:
    """JSON lines one part after the other: also where they are compressed, as gzip and zstd files may be joined."""
    suffix = parts[0].publish[parts[0].publish.index(".jsonl") :] if parts else ".jsonl"
    path = join(generation.work, f"{stem}{suffix}.{nonce}.tmp")
    with files.create(path) as out:
        for part in parts:
            with files.local(join(generation.root, part.work)) as local, open(local, "rb") as source:
                shutil.copyfileobj(source, out, 1 << 20)
        files.sync(out)
    return WorkFile(path, f"{stem}{suffix}", sum(p.rows for p in parts))


def _without_rows(receipt: Receipt) -> Receipt:
    from dataclasses import replace

    return replace(receipt, parts=tuple(p for p in receipt.parts if p.role == "dead"))
