"""Index files: vectors as a library that searches them has them in its own format, and behind that the rows that they
belong to, in one file. The library opens it like any file of its own; `gm.lookup` finds rows by vector and by key.

After the index stand an Arrow file of the rows (key, MessagePack map, vector), the rows' numbers in the order of their
keys' crc32, and a footer. The number of a row is its label in the index: rows without a vector come last.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gristmill.arrow.schemas import storage
from gristmill.arrow.spilling import batches_of, given, spilling_to
from gristmill.errors import BadJob
from gristmill.files.disk import LOCAL
from gristmill.stores.contract import Load, Mark, Mode, Place, Reader, Store
from gristmill.stores.indexread import FORMAT, MAGIC, Engine, File, FileReader, footer, opened
from gristmill.stores.onefile import OneFile, checked, read_runs
from gristmill.stores.packing import check_packed, crc32s, packed_keys, packed_rows
from gristmill.stores.refused import AS_TEXT, refuse_endless, refuse_far
from gristmill.stores.vectors import Indexed, indexed, matrix_of, width_of

ALIGNED = 64  # bytes, as Arrow likes its buffers
JOIN_MEMORY = "512MB"  # for finding which published rows an upsert leaves; more are compared on disk


class IndexFile:
    """What the kinds of stores that are index files have in common. Each names its `engine`."""

    modes: ClassVar[tuple[Mode, ...]] = ("replace", "upsert")
    keyed: ClassVar[bool] = True
    embedded: ClassVar[bool] = True
    in_address: ClassVar[tuple[str, ...] | None] = ()
    in_options: ClassVar[tuple[str, ...] | None] = ()
    engine: ClassVar[Engine]

    @classmethod
    def open(cls, place: Place) -> Store:
        """The file, which is made by the first delivery."""
        cls.engine.require(place.shown)
        checked(place)
        return OneFile(place, Built(place, cls.engine))

    @classmethod
    def reader(cls, place: Place, key: tuple[str, ...]) -> Reader:
        """Keeps the file open that is published, mapped into memory."""
        cls.engine.require(place.shown)
        return FileReader(place, key, cls.engine)


class Built:
    """An index and its rows."""

    def __init__(self, place: Place, engine: Engine) -> None:
        self._place = place
        self._engine = engine

    def check(self, load: Load) -> None:
        about, shown = self._about(load), self._place.shown
        check_packed(load.schema, load.key, shown)
        there = footer(self._place, self._engine)
        if there is None or load.whole:
            return
        if (there.about.column, there.about.width) != (about.column, about.width):
            raise BadJob(
                f"{shown}: has vectors of {there.about.width} numbers in column {there.about.column!r}, to which those "
                f"of {about.column!r} ({about.width}) cannot be added: replace them (mode='replace'), or give another "
                "path"
            )
        if there.about.metric != about.metric and any(mark.sink != load.mark.sink for mark in there.marks):
            raise BadJob(
                f"{shown}: is an index by {there.about.metric} with rows of other sinks, and would become one by "
                f"{about.metric}: deliver with index={{{about.column!r}: {{'metric': {there.about.metric!r}}}}}, "
                "replace them (mode='replace'), or give another path"
            )

    def _about(self, load: Load) -> Indexed:
        return indexed(load, self._place.shown, self._engine.kinds, self._engine.options)

    def staged(self, load: Load) -> pa.Schema:
        return _rows_of(load.schema.field(self._about(load).column).type)

    def kept(self, batch: pa.RecordBatch, load: Load) -> pa.RecordBatch:
        column = self._about(load).column
        at = batch.schema.get_field_index(column)
        vectors = _bare(batch.column(at))
        refuse_endless(batch, column, self._place.shown)
        rest = batch.set_column(at, pa.field(column, pa.null()), pa.nulls(batch.num_rows))
        refuse_far(rest, self._place.shown, AS_TEXT)
        keys = packed_keys([batch.column(name) for name in load.key])
        return pa.record_batch([keys, packed_rows(rest), vectors], schema=_rows_of(vectors.type))

    def published(self) -> tuple[list[Mark], int]:
        there = footer(self._place, self._engine)
        return ([], 0) if there is None else (there.marks, there.count)

    def build(self, path: str, load: Load, runs: Sequence[str], marks: bytes) -> int:
        about, schema = self._about(load), self.staged(load)
        left = None if load.whole else self._left(runs, os.path.dirname(path))

        def rows(with_vector: bool) -> Iterator[pa.RecordBatch]:
            for batch in read_runs(runs):
                yield from _those(batch, with_vector)
            if left is not None:
                there, mask = left
                for start, batch in there.numbered():
                    for some in _those(batch.filter(pa.array(mask[start : start + len(batch)])), with_vector):
                        yield some.cast(schema)

        vectors = sum(batch.num_rows for batch in rows(True))
        self._engine.build(path, about, vectors, (matrix_of(batch["x"], "x")[0] for batch in rows(True)))
        with open(path, "r+b") as out:
            out.seek(0, os.SEEK_END)
            count = _appended(out, schema, [rows(True), rows(False)], about, self._engine.name, vectors, marks)
            LOCAL.sync(out)
        return count

    def _left(self, runs: Sequence[str], folder: str) -> tuple[File, np.ndarray] | None:
        """The published file, and which of its rows stay as none of the staged ones has their key."""
        there = opened(self._place, self._engine, index=False)
        if there is None:
            return None
        keys = pa.schema([("k", pa.binary()), ("n", pa.int64())])
        live = (
            pa.record_batch([batch["k"], pa.array(np.arange(start, start + len(batch)))], schema=keys)
            for start, batch in there.numbered()
        )
        only = pa.schema([("k", pa.binary())])
        staged = (batch.select(["k"]) for batch in read_runs(runs))
        mask = np.zeros(there.footer.count, bool)
        with spilling_to(folder, JOIN_MEMORY, threads=2) as db, given(db, staged=(only, staged), live=(keys, live)):
            for batch in batches_of(db.sql("SELECT n FROM live ANTI JOIN staged USING (k)"), 65_536):
                mask[batch["n"].to_numpy()] = True
        return there, mask


def _rows_of(vector: pa.DataType) -> pa.Schema:
    bare = storage(vector)
    return pa.schema([("k", pa.binary()), ("v", pa.binary()), ("x", pa.list_(bare.value_type, width_of(bare)))])


def _bare(column: pa.Array) -> pa.Array:
    storage = column.storage if isinstance(column, pa.ExtensionArray) else column
    return storage.cast(_rows_of(storage.type).field("x").type)


def _those(batch: pa.RecordBatch, with_vector: bool) -> Iterator[pa.RecordBatch]:
    """The rows of a batch that have a vector, or those that have none."""
    valid = batch["x"].is_valid()
    if batch["x"].null_count not in (0, batch.num_rows):
        yield batch.filter(valid if with_vector else pc.invert(valid))
    elif batch.num_rows and (batch["x"].null_count == 0) == with_vector:
        yield batch


def _appended(
    out: Any,
    schema: pa.Schema,
    rows: Sequence[Iterable[pa.RecordBatch]],
    about: Indexed,
    engine: str,
    vectors: int,
    marks: bytes,
) -> int:
    """Write what stands behind the index; the number of rows."""
    begun = _aligned(out)
    crcs: list[np.ndarray] = [np.zeros(0, np.uint32)]
    with pa.ipc.new_file(pa.PythonFile(out, "w"), schema) as writer:
        for some in rows:
            for batch in some:
                writer.write_batch(batch)
                crcs.append(crc32s(batch["k"]))
    ended, keys = out.tell(), _aligned(out)
    crc = np.concatenate(crcs)
    order = np.argsort(crc, kind="stable")
    out.write(np.ascontiguousarray(order, "<i8"))
    out.write(np.ascontiguousarray(crc[order], "<u4"))
    said = {
        "format": FORMAT,
        "engine": engine,
        "about": dataclasses.asdict(about),
        "count": len(crc),
        "vectors": vectors,
        "rows": [begun, ended - begun],
        "keys": keys,
        "marks": json.loads(marks),
    }
    text = json.dumps(said).encode()
    out.write(text + len(text).to_bytes(8, "little") + MAGIC)
    out.flush()
    return len(crc)


def _aligned(out: Any) -> int:
    out.write(bytes(-out.tell() % ALIGNED))
    return int(out.tell())
