"""LMDB files: a key-value store without a server. A result becomes a new file, sorted and never changed again, which is
given the name of the old one. Readers keep the file that they have open, and look whether there is another.

Keys are the texts of the key column; values are rows as MessagePack maps (packing.py); `\\0gristmill` has the marks.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.compute as pc

from gristmill.arrow.spilling import batches_of, given, spilling_to
from gristmill.commit.generation import decode_schema
from gristmill.errors import BadJob, BadSource
from gristmill.files.disk import content_of, which_file
from gristmill.process.extras import require
from gristmill.stores.contract import Key, Load, Mark, Mode, Place, Reader, Store, StoreKind, StoreUnavailable, damaged
from gristmill.stores.lookup import keyed
from gristmill.stores.onefile import OneFile, checked, marks_of, read_runs
from gristmill.stores.packing import check_packed, key_bytes, packed_keys, packed_rows, unpacking
from gristmill.stores.refused import AS_TEXT, refuse, refuse_far, refuse_longer
from gristmill.values import dataclass

MARKS = b"\0gristmill"
MOST = 1 << 40  # bytes of address space; the file has only those that are used
SMALLEST = 8192  # bytes of the first pages, without which no file is whole
LONGEST = 511  # bytes of a key, as LMDB is built
PATIENCE, WAIT = (
    5.0,
    0.002,
)  # seconds for a file to be closed that nobody in this process has any more, and between looks
COMMITTED = 65_536  # rows a transaction
SORT_MEMORY = "256MB"  # for sorting rows by key; more are sorted on disk
_RUN = pa.schema([("k", pa.binary()), ("v", pa.binary())])


class Lmdb:
    """`lmdb:///FILE`, or `lmdb://FILE` for a path relative to the current folder."""

    name: ClassVar[str] = "lmdb"
    modes: ClassVar[tuple[Mode, ...]] = ("replace", "upsert")
    keyed: ClassVar[bool] = True
    embedded: ClassVar[bool] = True
    in_address: ClassVar[tuple[str, ...] | None] = ()
    in_options: ClassVar[tuple[str, ...] | None] = ()

    @staticmethod
    def open(place: Place) -> Store:
        """The file, which is made by the first delivery."""
        _package(place)
        checked(place)
        return OneFile(place, Sorted(place))

    @staticmethod
    def reader(place: Place, key: tuple[str, ...]) -> Reader:
        """Keeps the file open that is published, as all readers of this process do together."""
        _package(place)
        return FileReader(place, key)


_: type[StoreKind] = Lmdb  # for mypy


def _package(place: Place) -> Any:
    return require("lmdb", "lmdb", place.shown)


class Sorted:
    """Rows sorted by key."""

    def __init__(self, place: Place) -> None:
        self._place = place

    def check(self, load: Load) -> None:
        check_packed(load.schema, load.key, self._place.shown)

    def staged(self, load: Load) -> pa.Schema:
        return _RUN

    def kept(self, batch: pa.RecordBatch, load: Load) -> pa.RecordBatch:
        refuse_far(batch, self._place.shown, AS_TEXT)
        keys = packed_keys([batch.column(name) for name in load.key])
        shown, name = self._place.shown, ", ".join(load.key)
        empty, way = f"{shown}: a key ({name}) is empty", "drop such rows, or give another key"
        refuse(batch, pc.equal(keys, b""), empty, way, load.key)
        refuse_longer(batch, keys, load.key, LONGEST, shown)
        ours = f"{shown}: a key ({name}) is {MARKS!r}, under which marks are kept"
        refuse(batch, pc.equal(keys, MARKS), ours, "give another key", load.key)
        return pa.record_batch([keys, packed_rows(batch)], schema=_RUN)

    def published(self) -> tuple[list[Mark], int]:
        environment = opened(self._place)
        return ([], 0) if environment is None else (_marks_in(environment, self._place), _entries(environment))

    def build(self, path: str, load: Load, runs: Sequence[str], marks: bytes) -> int:
        with contextlib.suppress(FileNotFoundError):
            os.remove(path)
        return _built(path, self._sorted(load, runs, os.path.dirname(path)), marks, self._place)

    def _sorted(self, load: Load, runs: Sequence[str], folder: str) -> Iterator[pa.RecordBatch]:
        """Keys and values of the whole new file, in the order of the keys."""
        with spilling_to(folder, SORT_MEMORY, threads=2) as db, given(db, staged=(_RUN, read_runs(runs))):
            live = opened(self._place)
            if load.whole or live is None:
                yield from batches_of(db.sql("SELECT k, v FROM staged ORDER BY k"), COMMITTED)
                return
            db.execute("CREATE TEMP TABLE new AS SELECT k, v FROM staged")
            kept = "SELECT k, v FROM live ANTI JOIN new USING (k)"
            with given(db, live=(_RUN, _held(live))):
                yield from batches_of(db.sql(f"SELECT k, v FROM new UNION ALL {kept} ORDER BY k"), COMMITTED)


def _entries(environment: Any) -> int:
    return int(environment.stat()["entries"]) - 1


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
            return _entries(made)
    except lmdb.Error as e:
        raise StoreUnavailable(f"{place.shown}: LMDB says: {place.words(e)}") from e


# ---------------------------------------------------------------- reading

_open: weakref.WeakValueDictionary[tuple[int, int], Any] = weakref.WeakValueDictionary()  # a process opens a file once
_opening = threading.Lock()


def opened(place: Place) -> Any:
    """The published file, open for reading; None if there is none. All in a process share it."""
    lmdb, until = _package(place), time.monotonic() + PATIENCE
    with _opening:
        while (inode := which_file(place.path)) is not None:
            _refuse_cut(place, inode, SMALLEST)
            if (found := _open.get(inode)) is not None:
                _refuse_cut(place, inode, _pages(found))  # somebody may have written over it
                return found
            try:  # no lock: a file that has this name is never changed
                made = lmdb.open(place.path, subdir=False, readonly=True, lock=False, max_readers=1)
            except lmdb.InvalidError as e:
                raise damaged(place.shown, "is no LMDB file", strange=True) from e
            except lmdb.Error as e:
                if "already open" not in str(e) or time.monotonic() > until:
                    raise StoreUnavailable(f"{place.shown}: cannot be opened: {place.words(e)}") from e
                time.sleep(WAIT)  # a thread has let go of it, and it is not closed yet
                continue
            try:
                if inode == which_file(place.path):
                    _refuse_cut(place, inode, _pages(made))
                    _open[inode] = made
                    return made
            except BadJob:
                made.close()
                raise
            made.close()  # another one has got the name meanwhile, and which of them this is nobody tells
    return None


def _pages(environment: Any) -> int:
    """How many bytes a file has that is whole, by its first pages, which LMDB looks at anew for each transaction."""
    return (int(environment.info()["last_pgno"]) + 1) * int(environment.stat()["psize"])


def _refuse_cut(place: Place, inode: tuple[int, int], wanted: int) -> None:
    """Raises BadJob for a file that lacks pages: the kernel ends a process that reads one."""
    with contextlib.suppress(FileNotFoundError):
        about = os.stat(place.path)
        if (about.st_dev, about.st_ino) == inode and about.st_size < wanted:
            strange = wanted == SMALLEST
            why = "is no LMDB file" if strange else f"has {about.st_size:,} bytes of {wanted:,}"
            raise damaged(place.shown, why, strange=strange)


def _marks_in(environment: Any, place: Place) -> list[Mark]:
    with environment.begin() as transaction:
        data = transaction.get(MARKS)
    if data is None:
        raise BadJob(f"{place.shown}: is an LMDB file that gristmill did not write: give another path")
    return marks_of(data, place.shown)


@dataclass(frozen=True)
class Open:
    """The file that is read: what tells its content, the environment, its mark, its key columns, and what makes rows of
    values.
    """

    content: tuple[int, ...]
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
        found, content = self._open, content_of(self._place.path)
        if content is None:
            raise BadSource(f"{self._place.shown}: there is no such file: deliver a result there first")
        if found is None or found.content != content:
            environment = opened(self._place)
            if environment is None:
                return self._now()
            mark = _marks_in(environment, self._place)[0]
            if self._key and self._key != mark.key:
                raise BadJob(
                    f"{self._place.shown}: rows are found by {', '.join(mark.key)} there, not by {self._key[0]}"
                )
            schema = decode_schema(mark.held)
            columns = keyed(self._place.shown, mark.key, {f.name: f.type for f in schema})
            found = self._open = Open(content, environment, mark, columns, unpacking(schema))
        return found

    def find(self, keys: Sequence[Key]) -> tuple[Mark | None, list[dict[str, Any] | None]]:
        now = self._now()
        packed = key_bytes(keys, now.columns, self._place.shown)
        longest = now.environment.max_key_size()
        with now.environment.begin() as transaction:
            return now.mark, now.unpacked(
                [transaction.get(key) if key and len(key) <= longest else None for key in packed]
            )

    def close(self) -> None:
        self._open = None
