"""The lease: a courtesy between runs on one sink. Safety never rests on it (receipts are created once), so a stale
lease can only cost double work, not a wrong result.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import time

from gristmill.errors import CorruptStore, NewerFormat, SinkBusy
from gristmill.files.contract import Files
from gristmill.files.document import Document
from gristmill.process.locks import LockFile
from gristmill.values import dataclass

_LOOK = 0.1  # seconds, longer than somebody who looks holds a lock
_LOOKED = 30.0  # seconds; if many look all the time, few moments are free of them


@dataclass(frozen=True)
class Holder(Document, what="lease", sealed=False):
    """The run that holds a lease: its process, and since when. The lease of an object store also has the kernel
    (`machine`), when the process began there, its `nonce`, and its number of beats.
    """

    pid: int = 0
    host: str = "?"
    started: str = "?"
    machine: str = ""
    began: int | None = None
    nonce: str = ""
    beat: int = 0


class Lease:
    """Holds a sink's lock file while the run lives. It ends with the process, however that ends."""

    def __init__(self, sink: str, folder: str, files: Files | None = None) -> None:
        self._files = files
        self.path = os.path.join(folder, "lock")
        self._sink = sink
        self._file: LockFile

    def __enter__(self) -> Lease:
        """Take the lease. Raises SinkBusy, naming the run that holds it."""
        os.makedirs(os.path.dirname(self.path), exist_ok=True)
        self._file = LockFile(self.path, "a+")
        try:
            self._take()
            self._file.truncate(0)
            self._file.write(myself().dump())
        except BaseException:  # perhaps of a full disk: whoever keeps the exception must not keep the lock
            self._file.close()
            raise
        return self

    def _take(self) -> None:
        began = seen = time.monotonic()
        while not self._locked():
            if self._locked(shared=True):  # held by some who look, not by a run
                self._file.unlock()
                seen = time.monotonic()
            if time.monotonic() > min(seen + _LOOK, began + _LOOKED):
                about = _told(self._file)
                who = named(about) if about.pid else "its name is not known yet"
                raise SinkBusy(f"{self._sink}: another run holds this sink ({who}): wait for it or stop it")
            time.sleep(random.uniform(0.001, 0.01))

    def _locked(self, *, shared: bool = False) -> bool:
        with contextlib.suppress(BlockingIOError, PermissionError):
            self._file.lock(shared=shared)
            return True
        return False

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def held(self) -> bool:
        """Whether the locked file is the one that others would lock."""
        if self._file.closed:  # in a fork
            return False
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self._file.fileno()))
        except (FileNotFoundError, NotADirectoryError):
            return False

    def say(self, path: str, data: bytes) -> None:
        """Record the run's progress."""
        if self._files is not None:
            self._files.note(path, data)


def myself() -> Holder:
    """This run, as others see it."""
    return Holder(os.getpid(), socket.gethostname(), time.strftime("%Y-%m-%dT%H:%M:%S%z"))


def named(about: Holder) -> str:
    """A run in words, as far as its lease describes it."""
    return f"process {about.pid or '?'} on {about.host}, started {about.started}"


def holder(folder: str) -> Holder | None:
    """Who holds the lease of a sink now, or None; an empty Holder if it has not written its name yet."""
    try:
        file = LockFile(os.path.join(folder, "lock"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    with file:
        try:
            file.lock(shared=True)  # shared, so that none of many who look is taken for a run
        except OSError:
            return _told(file)
    return None


def _told(file: LockFile) -> Holder:
    file.seek(0)
    return told(file.read())


def told(data: bytes) -> Holder:
    """What a lease says about its holder; empty if this version does not know the lease's format: it is held all the
    same, as its lock or its heartbeat shows.
    """
    try:
        return Holder.load(data, "lease")
    except (CorruptStore, NewerFormat):
        return Holder()
