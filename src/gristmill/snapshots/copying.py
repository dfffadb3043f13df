"""Rows of a store copied into Parquet files, once for a run, under a name that is a digest of them, in order."""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, wait
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from gristmill.arrow.casts import Lossy, fitted
from gristmill.arrow.schemas import nullable, wider
from gristmill.errors import BadSource
from gristmill.job.job import COPY
from gristmill.process import machine
from gristmill.process.pool import Pool
from gristmill.sinks.parquet import holdable, worth_a_dictionary
from gristmill.snapshots.contract import Piece, Snapshot, Wanted
from gristmill.snapshots.sql import read_of
from gristmill.sources.contract import Block
from gristmill.sources.rowdigests import Content

GROUP_ROWS, GROUP_BYTES = 131_072, 32 << 20


def copied(snapshot: Snapshot, wanted: Wanted, folder: str) -> tuple[str, int]:
    """The name of the folder below `folder` that holds a snapshot's rows, and how many. It is made in one step: it is
    there, and whole, or not. The name is that of the rows, not of a version: a table that is made again has the same
    version with other rows, and rows in another order are another input.
    """
    temporary = os.path.join(folder, f"{secrets.token_hex(8)}.tmp")
    os.makedirs(temporary)
    try:
        content, rows = _written(snapshot, wanted, temporary)
        name = hashlib.sha256(f"{wanted.id} {content}".encode()).hexdigest()[:32] + COPY
        if not os.path.isdir(target := os.path.join(folder, name)):
            os.rename(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return name, rows


def _written(snapshot: Snapshot, wanted: Wanted, folder: str) -> tuple[str, int]:
    """Write the rows; a digest of them, and how many there are."""
    pieces, schema = snapshot.pieces(), snapshot.schema
    if schema is None:
        pieces, schema = _agreed(pieces, wanted, folder)
    if wanted.columns is not None:
        schema = pa.schema([schema.field(name) for name in read_of(wanted, schema.names)])
    schema = nullable(holdable(schema, f"{wanted.shown}: a source"))
    schema = pa.schema([f.remove_metadata() for f in schema])
    stop = threading.Event()
    write = partial(_piece, folder, schema, wanted, stop)
    done, left, begun = list[tuple[str, int]](), wanted.rows, list[Future[tuple[str, int]]]()
    with Pool(machine.cores()) as pool:
        try:
            if left is None:
                begun += [pool.submit(write, number, piece) for number, piece in enumerate(pieces)]
                done = [each.result() for each in begun]
            for number, piece in enumerate(pieces if left else ()):  # one after the other: the next may not be needed
                begun.append(pool.submit(write, number, partial(_first, piece, left or 0)))
                done.append(begun[-1].result())
                left = (left or 0) - done[-1][1]
                if left <= 0:
                    break
        except BaseException:  # a signal, too: what is under way may take long
            stop.set()
            pool.cancel()
            while wait(begun, timeout=0.1).not_done:
                snapshot.cancel()
            raise
    full = [each for each in done if each[1]]
    if not full:
        _piece(folder, schema, wanted, stop, 0, lambda: iter(()), keep=True)
    return f"{schema.to_string(show_field_metadata=False)} {[digest for digest, _ in full]}", sum(n for _, n in full)


def _first(piece: Piece, rows: int) -> Iterator[pa.RecordBatch]:
    for batch in piece():
        yield batch[:rows]
        rows -= batch.num_rows
        if rows <= 0:
            return


def _piece(
    folder: str,
    schema: pa.Schema,
    wanted: Wanted,
    stop: threading.Event,
    number: int,
    piece: Piece,
    *,
    keep: bool = False,
) -> tuple[str, int]:
    """Write one piece as a file, unless it is empty; a digest of its rows, and how many there are."""
    path = os.path.join(folder, f"{number:06d}.table")  # a name that no glob for data matches
    content, count = Content(), 0
    with open(path, "wb") as file:
        dictionaries: Any = worth_a_dictionary(schema)
        with pq.ParquetWriter(file, schema, compression="zstd", use_dictionary=dictionaries) as writer:
            for rows in _grouped(piece()):
                if stop.is_set():
                    return "", 0
                try:
                    rows = fitted(rows, schema)
                except Lossy as e:
                    raise BadSource(f"{wanted.shown}: {e}: cast the column in a query") from e
                content.add(Block(rows, np.arange(count, count + rows.num_rows)))
                count += rows.num_rows
                writer.write_table(rows, row_group_size=GROUP_ROWS)
        file.flush()
        os.fsync(file.fileno())
    if not count and not keep:
        os.remove(path)
        return "", 0
    os.utime(path, (0, 0))  # the folder's name identifies the content: a copy that is made again is the same input
    return content.hexdigest(), count


def _grouped(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Batches joined to about a row group."""
    held: list[pa.RecordBatch] = []
    for batch in batches:
        held.append(batch)
        if sum(b.num_rows for b in held) >= GROUP_ROWS or sum(b.nbytes for b in held) >= GROUP_BYTES:
            yield pa.Table.from_batches(held)
            held = []
    if held:
        yield pa.Table.from_batches(held)


def _agreed(pieces: Iterable[Piece], wanted: Wanted, folder: str) -> tuple[list[Piece], pa.Schema]:
    """Batches with the types of their values, kept on disk until the types that hold all of them are known."""
    paths: list[str] = []
    kinds: dict[str, pa.DataType] = {}
    left = wanted.rows
    for piece in pieces:
        for batch in piece() if left is None else _first(piece, left):
            left = None if left is None else left - batch.num_rows
            for field in batch.schema:
                kinds[field.name] = _both(kinds.get(field.name, pa.null()), field, wanted)
            paths.append(os.path.join(folder, f"{len(paths)}.values"))
            with pa.ipc.new_file(paths[-1], batch.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as file:
                file.write_batch(batch)
    schema = pa.schema([pa.field(n, pa.string() if pa.types.is_null(k) else k) for n, k in kinds.items()])

    def read() -> Iterator[pa.RecordBatch]:
        for path in paths:
            with pa.ipc.open_file(path) as file:
                table = file.read_all()
            os.remove(path)
            yield from fitted(table, schema).to_batches()

    return [read], schema


def _both(kind: pa.DataType, field: pa.Field, wanted: Wanted) -> pa.DataType:
    both = wider(kind, field.type, text=False)
    if both is None:
        raise BadSource(
            f"{wanted.shown}: column {field.name!r} has values of two kinds, {kind} and {field.type}: cast it in a "
            "query"
        )
    return both
