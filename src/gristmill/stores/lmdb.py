"""LMDB files: a key-value store without a server. A result becomes a new file, sorted and never changed again, which is
given the name of the old one. Readers keep the file that they have open, and look whether there is another.

Keys are the texts of the key column; values are rows as MessagePack maps (packing.py); `\\0gristmill` has the marks.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.compute as pc

from gristmill.commit.generation import decode_schema
from gristmill.errors import BadJob, BadSource, RunFailed
from gristmill.files.disk import LOCAL
from gristmill.process.extras import require
from gristmill.process.startup import imported
from gristmill.stores.contract import (
    Load,
    Mark,
    Mode,
    Part,
    Place,
    Reader,
    Store,
    StoreKind,
    StoreUnavailable,
    is_there,
)
from gristmill.stores.gate import Gate
from gristmill.stores.lookup import keyed
from gristmill.stores.packing import check_packed, key_bytes, packed_keys, packed_rows, slices, unpacking

PATIENCE = 20.0  # seconds to wait for another deliverer's last step
MARKS = b"\0gristmill"
MOST = 1 << 40  # bytes of address space; the file has only those that are used
LONGEST = 511  # bytes of a key, as LMDB is built
COMMITTED = 65_536  # rows a transaction
SORT_MEMORY = "512MB"  # for sorting rows by key; more are sorted on disk
_RUN = pa.schema([("k", pa.binary()), ("v", pa.binary())])


class Lmdb:
    """`lmdb:///FILE`, or `lmdb://FILE` for a path relative to the current folder."""

    name: ClassVar[str] = "lmdb"
    modes: ClassVar[tuple[Mode, ...]] = ("replace", "upsert")
    keyed: ClassVar[bool] = True
    embedded: ClassVar[bool] = True

    @staticmethod
    def open(place: Place) -> Store:
        """The file, which is made by the first delivery."""
        _package(place)
        folder = os.path.dirname(place.path)
        if not os.path.isdir(folder):
            raise BadJob(f"{place.shown}: there is no folder {folder}: make it, or give another path")
        if os.path.isdir(place.path):
            raise BadJob(f"{place.shown}: is a folder, and a result is one file: give the path of a file")
        return File(place)

    @staticmethod
    def reader(place: Place, key: tuple[str, ...]) -> Reader:
        """Keeps the file open that is published, as all readers of this process do together."""
        _package(place)
        return FileReader(place, key)


_: type[StoreKind] = Lmdb  # for mypy


def _package(place: Place) -> Any:
    return require("lmdb", "lmdb", place.shown)


class File:
    """An LMDB file as a store. What is staged are files of keys and values, in a hidden folder beside it."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._folder, self._name = os.path.split(place.path)
        self._gate = Gate(place.path, place.shown, PATIENCE)

    # ------------------------------------------------ before

    def check(self, load: Load) -> None:
        check_packed(load.schema, load.key, self._place.shown)

    def live(self, sink: str) -> Mark | None:
        return next((mark for mark in _marks(self._place) if mark.sink == sink), None)

    # ------------------------------------------------ staging

    def _place_of(self, stage: str) -> str:
        return os.path.join(self._folder, f".{self._name}.{stage}")

    def _runs(self, load: Load) -> dict[str, str]:
        """The staged files by the parts' ids."""
        folder = self._place_of(load.stage)
        found = {}
        for name in LOCAL.names(folder):
            if name.endswith(".arrow"):
                with pa.memory_map(os.path.join(folder, name)) as file:
                    found[pa.ipc.open_file(file).schema.metadata[b"part"].decode()] = os.path.join(folder, name)
        return found

    def staged(self, load: Load) -> Mapping[str, int]:
        return {part: _rows(path) for part, path in self._runs(load).items()}

    def stage(self, load: Load, parts: Sequence[Part]) -> None:
        for part in parts:
            self._stage(load, part)

    def _stage(self, load: Load, part: Part) -> None:
        folder = self._place_of(load.stage)
        target = os.path.join(folder, hashlib.sha256(part.id.encode()).hexdigest()[:24] + ".arrow")
        if os.path.exists(target):
            return
        os.makedirs(folder, exist_ok=True)
        about = {"part": part.id}
        with open(f"{target}.tmp", "wb") as out:
            with pa.ipc.new_file(out, _RUN.with_metadata(about)) as writer:
                for batch in part.batches():
                    for piece in slices(batch):
                        writer.write_batch(self._run(piece, load).replace_schema_metadata(about))
            LOCAL.sync(out)
        os.replace(f"{target}.tmp", target)  # a part is whole, or not there
        LOCAL.sync_folder(folder)

    def _run(self, batch: pa.RecordBatch, load: Load) -> pa.RecordBatch:
        keys = packed_keys([batch.column(name) for name in load.key])
        lengths = pc.min_max(pc.binary_length(keys)).as_py()
        if lengths["max"] is not None and (lengths["max"] > LONGEST or lengths["min"] == 0):
            wrong = f"has {lengths['max']} bytes, and at most {LONGEST} are held" if lengths["min"] else "is empty"
            raise RunFailed(
                f"{self._place.shown}: a key ({', '.join(load.key)}) {wrong}: give a shorter key, or a hash"
            )
        return pa.record_batch([keys, packed_rows(batch)], schema=_RUN)

    def count(self, load: Load | None) -> int:
        if load is not None:
            return sum(_rows(path) for path in self._runs(load).values())
        environment = opened(self._place)
        return 0 if environment is None else int(environment.stat()["entries"]) - 1

    # ------------------------------------------------ the atomic step

    def publish(self, load: Load) -> None:
        self._gate.hold()  # of two deliverers, the second looks after the first has renamed
        try:
            if not is_there(self.live(load.mark.sink), load.mark, self._place.shown):
                self._replace(load)
        finally:
            self._gate.release()

    def _replace(self, load: Load) -> None:
        folder = self._place_of(load.stage)
        os.makedirs(folder, exist_ok=True)
        made = os.path.join(folder, "new.lmdb")
        with contextlib.suppress(FileNotFoundError):
            os.remove(made)
        others = [] if _whole(load) else [m for m in _marks(self._place) if m.sink != load.mark.sink]
        marks = json.dumps([json.loads(mark.dump()) for mark in (load.mark, *others)]).encode()
        rows = _built(made, self._sorted(load, folder), marks, self._place)
        if _whole(load) and rows != load.mark.rows:
            raise RunFailed(f"{self._place.shown}: {rows:,} rows were written of {load.mark.rows:,}: run again")
        LOCAL.settle([made])
        os.replace(made, self._place.path)
        LOCAL.sync_folder(self._folder)

    def _sorted(self, load: Load, folder: str) -> Iterator[pa.RecordBatch]:
        """Keys and values of the whole new file, in the order of the keys."""
        runs = list(self._runs(load).values())
        config = {"memory_limit": SORT_MEMORY, "temp_directory": os.path.join(folder, "spilled"), "threads": 2}
        with imported("duckdb").connect(":memory:", config=config) as db:
            db.register("staged", pa.RecordBatchReader.from_batches(_RUN, _read(runs)))
            live = opened(self._place)
            if _whole(load) or live is None:
                yield from db.sql("SELECT k, v FROM staged ORDER BY k").to_arrow_reader(COMMITTED)
                return
            db.execute("CREATE TEMP TABLE new AS SELECT k, v FROM staged")
            db.register("live", pa.RecordBatchReader.from_batches(_RUN, _held(live)))
            kept = "SELECT k, v FROM live ANTI JOIN new USING (k)"
            yield from db.sql(f"SELECT k, v FROM new UNION ALL {kept} ORDER BY k").to_arrow_reader(COMMITTED)

    def drop(self, load: Load, *, this: bool = False) -> None:
        kept = None if this else os.path.basename(self._place_of(load.stage))
        for name in os.listdir(self._folder):
            if name.startswith(f".{self._name}.{load.places}") and name != kept:
                LOCAL.remove_folder(os.path.join(self._folder, name))

    def close(self) -> None:
        self._gate.release()


def _whole(load: Load) -> bool:
    """Whether the result is all that is to be there."""
    return load.mode == "replace" or load.delete


def _rows(path: str) -> int:
    with pa.memory_map(path) as source:
        reader = pa.ipc.open_file(source)
        return sum(reader.get_batch(n).num_rows for n in range(reader.num_record_batches))


def _read(paths: Sequence[str]) -> Iterator[pa.RecordBatch]:
    for path in paths:
        with pa.memory_map(path) as source:
            reader = pa.ipc.open_file(source)
            for number in range(reader.num_record_batches):
                yield reader.get_batch(number).replace_schema_metadata(None)


def _held(environment: Any) -> Iterator[pa.RecordBatch]:
    """The rows of a file."""
    with environment.begin() as transaction:
        items: list[tuple[bytes, bytes]] = []
        for key, value in transaction.cursor():
            if key != MARKS:
                items.append((key, value))
            if len(items) == COMMITTED:
                yield pa.record_batch([*map(list, zip(*items, strict=True))], schema=_RUN)
                items = []
        if items:
            yield pa.record_batch([*map(list, zip(*items, strict=True))], schema=_RUN)


def _built(path: str, rows: Iterator[pa.RecordBatch], marks: bytes, place: Place) -> int:
    """Write a new file of sorted rows; the number of rows in it."""
    lmdb = _package(place)
    try:
        with lmdb.open(path, subdir=False, lock=False, map_size=MOST, sync=False, metasync=False) as made:
            for batch in rows:
                keys, values = (batch.column(n).to_pylist() for n in ("k", "v"))
                with made.begin(write=True) as transaction:
                    transaction.cursor().putmulti(zip(keys, values, strict=True), append=True)
            with made.begin(write=True) as transaction:
                transaction.put(MARKS, marks)
            made.sync(True)
            return int(made.stat()["entries"]) - 1
    except lmdb.Error as e:
        raise StoreUnavailable(f"{place.shown}: LMDB says: {place.words(e)}") from e


# ---------------------------------------------------------------- reading

_open: weakref.WeakValueDictionary[tuple[int, int], Any] = weakref.WeakValueDictionary()  # a process opens a file once
_opening = threading.Lock()


def opened(place: Place) -> Any:
    """The published file, open for reading; None if there is none. All in a process share it."""
    lmdb = _package(place)
    with _opening:
        try:
            about = os.stat(place.path)
        except FileNotFoundError:
            return None
        found = _open.get((about.st_dev, about.st_ino))
        if found is None:
            try:  # no lock: a file that has this name is never changed
                found = lmdb.open(place.path, subdir=False, readonly=True, lock=False, max_readers=1)
            except lmdb.Error as e:
                raise StoreUnavailable(f"{place.shown}: cannot be opened: {place.words(e)}") from e
            _open[about.st_dev, about.st_ino] = found
        return found


def _marks(place: Place) -> list[Mark]:
    environment = opened(place)
    return [] if environment is None else _marks_in(environment, place)


def _marks_in(environment: Any, place: Place) -> list[Mark]:
    with environment.begin() as transaction:
        data = transaction.get(MARKS)
    if data is None:
        raise BadJob(f"{place.shown}: is an LMDB file that gristmill did not write: give another path")
    return [Mark.load(json.dumps(body).encode(), place.shown) for body in json.loads(data)]


@dataclass(frozen=True)
class Open:
    """The file that is read: its inode, the environment, its mark, its key columns, and what makes rows of values."""

    inode: tuple[int, int]
    environment: Any
    mark: Mark
    columns: Mapping[str, pa.DataType]
    unpacked: Callable[[Sequence[bytes | None]], list[dict[str, Any] | None]]


class FileReader:
    """Looks rows up in the file that has the name now."""

    def __init__(self, place: Place, key: tuple[str, ...]) -> None:
        self._place = place
        self._key = key
        self._open: Open | None = None

    def _now(self) -> Open:
        """The published file."""
        found = self._open
        try:
            about = os.stat(self._place.path)
        except FileNotFoundError:
            raise BadSource(f"{self._place.shown}: there is no such file: deliver a result there first") from None
        if found is None or found.inode != (about.st_dev, about.st_ino):
            environment = opened(self._place)
            if environment is None:
                return self._now()
            mark = _marks_in(environment, self._place)[0]
            if self._key and self._key != mark.key:
                raise BadJob(
                    f"{self._place.shown}: rows are found by {', '.join(mark.key)} there, not by {self._key[0]}"
                )
            schema = decode_schema(mark.schema)
            columns = keyed(self._place.shown, mark.key, {f.name: f.type for f in schema})
            inode = about.st_dev, about.st_ino
            found = self._open = Open(inode, environment, mark, columns, unpacking(schema))
        return found

    def find(self, keys: Sequence[tuple[Any, ...]]) -> tuple[Mark | None, list[dict[str, Any] | None]]:
        now = self._now()
        packed = key_bytes(keys, now.columns, self._place.shown)
        with now.environment.begin() as transaction:
            return now.mark, now.unpacked([transaction.get(key) if key else None for key in packed])

    def close(self) -> None:
        self._open = None
