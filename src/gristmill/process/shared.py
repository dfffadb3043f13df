"""Numbers that the workers of a run change one after the other, on one machine: in a temporary file that all of them
have in memory, under its lock.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import time
from collections.abc import Iterator, MutableSequence

from gristmill.process.locks import LockFile
from gristmill.process.scratch import make_owned, owned

LOOK = 1.0  # seconds between two looks at who is there
PATIENCE, PAUSE = 0.02, 0.0002  # seconds for which the lock is waited for: whoever has it is done in less


class Shared:
    """So many numbers, 0 at first, of a `run`, and the `share` that each worker has brought with it, which goes with
    it, however it ends. Raises OSError, and BadJob for a temporary folder that others may write to.
    """

    def __init__(self, run: str, share: float, size: int) -> None:
        self._folder = folder = owned("gristmill-shared")
        make_owned(folder)
        _sweep(folder)
        self._prefix = f"{run}."
        self._file = _locked(os.path.join(folder, f"{self._prefix}numbers"))
        try:
            # Zeros, not a hole: on a full disk a write to a hole that is in memory would kill the process (SIGBUS).
            while (missing := 8 * size - os.fstat(self._file.fileno()).st_size) > 0:
                self._file.write(bytes(missing))
            self._map = mmap.mmap(self._file.fileno(), 8 * size)
            self.numbers: MutableSequence[float] = memoryview(self._map).cast("d")  # type: ignore[assignment]
            self._own = LockFile(os.path.join(folder, f"{self._prefix}{secrets.token_hex(8)}.share"), "x+")
            self._own.write(repr(share).encode())
            self._own.lock()
        finally:
            self._file.unlock()
        self._mine = self._present = share
        self._looked = float("-inf")

    @contextlib.contextmanager
    def locked(self) -> Iterator[float]:
        """Others wait until this is left. Gives the shares of all workers that are there; 0 if somebody else holds the
        lock, who is stopped, if that lasts: then nothing is to be changed.
        """
        until = time.monotonic() + PATIENCE
        while True:
            try:
                self._file.lock()
                break
            except OSError:
                if time.monotonic() > until:
                    yield 0.0
                    return
                time.sleep(PAUSE)
        try:
            yield self._there()
        finally:
            self._file.unlock()

    def _there(self) -> float:
        now = time.monotonic()
        if now >= self._looked + LOOK:
            self._looked = now
            others = (path for path in _shares(self._folder, self._prefix) if path != self._own.name)
            self._present = self._mine + sum(map(_brought, others))
        return self._present

    def close(self) -> None:
        """This worker is not there any more."""
        with contextlib.suppress(OSError), self.locked() as there:
            os.unlink(self._own.name)
            self._looked = float("-inf")
            if there and self._there() <= self._mine:  # nobody else is
                os.unlink(self._file.name)
        self._own.close()
        self._file.close()


def _locked(path: str) -> LockFile:
    """A file that is there, locked: the last one to leave has removed an earlier one."""
    while True:
        file = LockFile(path, "a+")
        file.lock(wait=True)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(path), os.fstat(file.fileno())):
                return file
        file.close()


def _shares(folder: str, prefix: str) -> list[str]:
    names = [name for name in os.listdir(folder) if name.startswith(prefix) and name.endswith(".share")]
    return [os.path.join(folder, name) for name in names]


def _brought(path: str) -> float:
    """What the worker of this file has brought, if it is there; called under the lock of the numbers."""
    try:
        with LockFile(path, "r+") as file:
            try:
                file.lock()
            except OSError:
                return float(file.readall() or 0.0)
    except FileNotFoundError:
        return 0.0
    with contextlib.suppress(OSError):  # it has ended
        os.unlink(path)
    return 0.0


def _sweep(folder: str) -> None:
    """Remove what runs have left that were killed."""
    for name in os.listdir(folder):
        if name.endswith(".numbers"):
            path = os.path.join(folder, name)
            with contextlib.suppress(OSError), LockFile(path, "r+") as file:
                file.lock()
                if not sum(map(_brought, _shares(folder, name.removesuffix("numbers")))):
                    os.unlink(path)
