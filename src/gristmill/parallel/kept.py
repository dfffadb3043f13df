"""Results kept on disk, in one SQLite file: a checkpoint that a later call goes on from, and what a detached map
found.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import sqlite3
import threading
from collections.abc import Iterable, Iterator
from typing import Any

from gristmill.errors import BadJob, RunFailed
from gristmill.parallel.shipping import Fault, by_name


class Kept:
    """Results by key. Each `add` is one transaction: what it was given survives the end of the process."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._seen = 0
        self._lock = threading.Lock()  # closing a connection that another thread is using is a crash
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            self._file = sqlite3.connect(path, timeout=60.0, isolation_level=None, check_same_thread=False)
            self._file.execute("pragma journal_mode = wal")
            self._file.execute("pragma synchronous = normal")
            self._file.execute("create table if not exists results (key text primary key, value blob, fault blob)")
        except (OSError, sqlite3.Error) as e:
            raise BadJob(
                f"{path}: results cannot be kept here ({e}): give a folder on a disk that can be written"
            ) from e

    def add(self, results: Iterable[tuple[str, Any, Fault | None]]) -> None:
        """Keep results: key, value, and the fault of those that have none, whose value says of what."""
        rows = [(k, by_name(v), None if f is None else pickle.dumps(f)) for k, v, f in results]
        with self._lock, self._well():
            self._file.execute("begin")
            try:
                self._file.executemany("insert or replace into results values (?, ?, ?)", rows)
                self._file.execute("commit")
            finally:
                if self._file.in_transaction:
                    self._file.execute("rollback")

    def find(self, key: str) -> tuple[Any] | None:
        """The value kept under a key, in a tuple; None where there is none."""
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
        """What was kept since this was last asked for, in that order."""
        query = "select rowid, key, value, fault from results where rowid > ? order by rowid limit 64"
        while True:
            with self._well():
                rows = self._file.execute(query, (self._seen,)).fetchall()
            if not rows:
                return
            for self._seen, key, value, fault in rows:
                yield key, pickle.loads(value), None if fault is None else pickle.loads(fault)

    def written(self) -> set[str]:
        """Paths in arguments whose files came to be during a call: see `note_written`."""
        with self._lock, self._well():
            self._file.execute("create table if not exists written (path text primary key)")
            return {path for (path,) in self._file.execute("select path from written")}

    def note_written(self, paths: Iterable[str]) -> None:
        """Note that the callable writes these itself. Raises OSError where that cannot be kept."""
        try:
            with self._lock:
                self._file.executemany("insert or ignore into written values (?)", [(path,) for path in paths])
        except sqlite3.Error as e:
            raise OSError(f"{self.path}: {e}") from e

    def count(self) -> int:
        """How many there are."""
        with self._well():
            return int(self._file.execute("select count(*) from results").fetchone()[0])

    @contextlib.contextmanager
    def _well(self) -> Iterator[None]:
        """Raises RunFailed where the disk is full, or fails."""
        try:
            yield
        except sqlite3.Error as e:
            raise RunFailed(
                f"{self.path}: {e}: no result that was kept here is lost; call the map again when the disk is well"
            ) from e

    def close(self) -> None:
        """Let go of the file."""
        with self._lock:
            self._file.close()


def checkpoint(folder: str) -> Kept:
    """The results kept in a folder. Raises BadJob where that is no folder of this machine."""
    if "://" in folder:
        raise BadJob(f"checkpoint {folder}: a checkpoint is a folder of this machine, or one that is mounted here")
    return Kept(os.path.join(os.path.abspath(os.path.expanduser(folder)), "results.sqlite"))


def code_digest(function: Any, kept: Kept) -> tuple[str, dict[str, Any], tuple[Any, Any, Any]]:
    """A digest of a callable: its source, that of local code it uses, its arguments and closure (see models.code), and
    what the files hold that these name, but for those that came to be during an earlier call: the callable writes them
    itself. What is at the paths, as a `Watch` takes it. And what workers must have alike: values of modules,
    the modules, and the files, as `models.pins` compares them.
    """
    from gristmill.models.code import callable_digests, value_digest
    from gristmill.models.files import real_places
    from gristmill.models.pins import named_pins, pins
    from gristmill.plan import fingerprint
    from gristmill.plan.fingerprint import FILE, NOT_COMPARED, file_path

    looked: dict[str, Any] = {}
    written = kept.written()
    held: list[Any] = []
    found = callable_digests(function, looked, held, real_places(written))
    told = fingerprint.compared(found)
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
    from gristmill.models.code import exact_digest

    return exact_digest([code, value])
