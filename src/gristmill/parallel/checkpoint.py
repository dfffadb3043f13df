"""Results kept on disk, in one SQLite file: a checkpoint from which a later call continues, and the results of a
detached map. The file's `user_version` is its format; 0 is what versions before the first format wrote.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import sqlite3
import threading
from collections.abc import Iterable, Iterator
from typing import Any

from gristmill.errors import BadJob, NewerFormat, RunFailed
from gristmill.files.document import refuse_newer
from gristmill.files.sqlitelog import log_ahead
from gristmill.parallel.transport import Fault, by_name
from gristmill.process.messages import Failure

FORMAT = 1


class Kept:
    """Results by key. Each `add` is one transaction: its results survive the end of the process."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._seen = 0
        self._lock = threading.Lock()  # closing a connection that another thread is using is a crash
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            self._file = sqlite3.connect(path, timeout=60.0, isolation_level=None, check_same_thread=False)
            (found,) = self._file.execute("pragma user_version").fetchone()
            self._refuse_newer(found)
            log_ahead(self._file, 60.0)
            self._file.execute("pragma synchronous = normal")
            self._file.execute("create table if not exists results (key text primary key, value blob, fault blob)")
            if found < FORMAT:
                self._file.execute(f"pragma user_version = {FORMAT}")
        except (OSError, sqlite3.Error) as e:
            raise BadJob(f"{path}: results cannot be kept here ({e}): give a folder on a writable disk") from e

    def _refuse_newer(self, found: int) -> None:
        try:
            refuse_newer(self.path, "file of results", found, FORMAT, "another folder")
        except NewerFormat:
            self._file.close()
            raise

    def add(self, results: Iterable[tuple[str, Any, Fault | None]]) -> None:
        """Keep results: key, value, and for an input without a result its fault; its value then tells which it is."""
        rows = [(k, by_name(v), None if f is None else _fault_stored(f)) for k, v, f in results]
        with self._lock, self._well():
            self._file.execute("begin")
            try:
                self._file.executemany("insert or replace into results values (?, ?, ?)", rows)
                self._file.execute("commit")
            finally:
                if self._file.in_transaction:
                    self._file.execute("rollback")

    def find(self, key: str) -> tuple[Any] | None:
        """The value kept under a key, in a tuple; None if there is none."""
        query = "select value from results where key = ? and fault is null"
        with self._lock, self._well():
            row = self._file.execute(query, (key,)).fetchone()
        return None if row is None else (pickle.loads(row[0]),)

    def has(self, key: str) -> bool:
        """Whether a value is kept under a key."""
        query = "select 1 from results where key = ? and fault is null"
        with self._lock, self._well():
            return self._file.execute(query, (key,)).fetchone() is not None

    def new(self) -> Iterator[tuple[str, Any, Fault | None]]:
        """What has been kept since the last call of this method, in that order."""
        query = "select rowid, key, value, fault from results where rowid > ? order by rowid limit 64"
        while True:
            with self._well():
                rows = self._file.execute(query, (self._seen,)).fetchall()
            if not rows:
                return
            for self._seen, key, value, fault in rows:
                yield key, pickle.loads(value), None if fault is None else _fault_of(fault)

    def written(self) -> set[str]:
        """Paths in arguments whose files appeared during a call: see `note_written`."""
        with self._lock, self._well():
            self._file.execute("create table if not exists written (path text primary key)")
            return {path for (path,) in self._file.execute("select path from written")}

    def note_written(self, paths: Iterable[str]) -> None:
        """Note that the callable writes these itself. Raises OSError if that cannot be kept."""
        try:
            with self._lock:
                self._file.executemany("insert or ignore into written values (?)", [(path,) for path in paths])
        except sqlite3.Error as e:
            raise OSError(f"{self.path}: {e}") from e

    def count(self) -> int:
        """How many results are kept."""
        with self._well():
            return int(self._file.execute("select count(*) from results").fetchone()[0])

    @contextlib.contextmanager
    def _well(self) -> Iterator[None]:
        """Raises RunFailed if the disk is full, or fails."""
        try:
            yield
        except sqlite3.Error as e:
            raise RunFailed(
                f"{self.path}: {e}: no result that was kept here is lost; call the map again when the disk works again"
            ) from e

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._file.close()


def _fault_stored(fault: Fault) -> bytes:
    """A fault by the names of its parts, so that no class of ours is in what is stored."""
    return pickle.dumps({**vars(fault), "failure": vars(fault.failure)})


def _fault_of(data: bytes) -> Fault:
    told = pickle.loads(data)
    return Fault(Failure(**told["failure"]), told["exception"], told["died"])


def checkpoint(folder: str) -> Kept:
    """The results kept in a folder. Raises BadJob if it is not a folder of this machine."""
    if "://" in folder:
        raise BadJob(f"checkpoint {folder}: a checkpoint must be a local or mounted folder")
    return Kept(os.path.join(os.path.abspath(os.path.expanduser(folder)), "results.sqlite"))


def code_digest(function: Any, kept: Kept) -> tuple[str, dict[str, Any], tuple[Any, Any, Any]]:
    """Three things. A digest of a callable: its source, local code that it uses, its arguments and closure (see
    models.code), and the content of the files that these name, except files that appeared during an earlier call: the
    callable writes them itself. What is at the paths, as a `Watch` takes it. What must be the same in workers: values
    of modules, the modules, and the files, as `fingerprint.pins` compares them.
    """
    from gristmill.fingerprint import digests
    from gristmill.fingerprint.code import callable_digests, value_digest
    from gristmill.fingerprint.digests import FILE, NOT_COMPARED, file_path
    from gristmill.fingerprint.modelfiles import real_places
    from gristmill.fingerprint.pins import named_pins, pins

    looked: dict[str, Any] = {}
    written = kept.written()
    held: list[Any] = []
    found = callable_digests(function, looked, held, real_places(written))
    told = digests.compared(found)
    code = value_digest(sorted((name, digest) for name, digest in told.items() if not name.startswith(FILE)))
    files = {name: digest for name, digest in found.items() if name.startswith(FILE)}
    compared = [
        (name, digest)
        for name, digest in sorted(files.items())
        if not digest.startswith(NOT_COMPARED) and file_path(name, found) not in written
    ]
    theirs = {name: digest for name, digest in found.items() if file_path(name, found) not in written}
    planned = tuple(held), pins(found), named_pins(theirs, (), looked)
    return (
        value_digest([code, compared]) if compared else code,
        {name: at for name, at in looked.items() if name not in written},
        planned,
    )


def key_of(code: str, value: Any) -> str:
    """The key of an input's result: the function's digest and the input's."""
    from gristmill.fingerprint.code import exact_digest

    return exact_digest([code, value])
