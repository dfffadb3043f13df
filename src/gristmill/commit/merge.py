"""Merging: the parts of a generation as one file, streamed in plan order, with a receipt of its own."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from gristmill.commit import receipt as receipts
from gristmill.commit.generation import Generation
from gristmill.commit.receipt import Receipt
from gristmill.errors import RunFailed
from gristmill.files.contract import Files
from gristmill.files.disk import join
from gristmill.sinks.contract import SinkFormat, WorkFile


def merge(
    files: Files, generation: Generation, done: Sequence[Receipt], form: SinkFormat, schema: pa.Schema, options: Any
) -> list[Receipt]:
    """The receipts to publish instead of `done`: the same dead letters, and one file `merged.g<N>` with all rows.

    When repeated, it finds its receipt and does nothing. Raises BadJob for formats that cannot be merged.
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
    form: SinkFormat,
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
    given = [WorkFile(join(generation.root, p.work), p.publish, p.rows) for p in parts]
    written = form.merge(files, generation.work, given, stem, nonce, schema, options)
    rows, wanted = sum(f.rows for f in written if f.role == "rows"), sum(p.rows for p in parts)
    if rows != wanted:
        raise RunFailed(f"{generation.root}: merged {rows} of {wanted} rows")
    measured = tuple(receipts.measure(files, f, generation.root) for f in written)
    files.settle([f.path for f in written])
    mine = Receipt(number, nonce, (0,) * 8, measured)
    files.make_folder(folder)
    return receipts.commit(files, folder, mine)


def _without_rows(receipt: Receipt) -> Receipt:
    from dataclasses import replace

    return replace(receipt, parts=tuple(p for p in receipt.parts if p.role == "dead"))
