"""Folders for files in transit: they belong to this process, and another one removes them if this one is killed."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import shutil
import stat
import tempfile
import threading
from collections.abc import Iterator
from typing import BinaryIO

from gristmill.errors import BadJob
from gristmill.process.locks import LockFile

_PASSING: set[str] = set()


@contextlib.contextmanager
def passing() -> Iterator[str]:
    """A temporary folder, removed afterwards, for results that nobody else reads."""
    with tempfile.TemporaryDirectory(prefix="gristmill-") as folder:
        _PASSING.add(os.path.realpath(folder))
        try:
            yield folder
        finally:
            _PASSING.discard(os.path.realpath(folder))


def owned(name: str) -> str:
    """A folder among the temporary ones that stays, and is this user's alone: it may not exist yet (`make_owned`).
    Raises BadJob if it is somebody else's, or others may write to it: what lies there would be believed.
    """
    user = os.getuid() if hasattr(os, "getuid") else 0
    path = os.path.join(tempfile.gettempdir(), f"{name}-{user}")
    with contextlib.suppress(FileNotFoundError):
        about = os.lstat(path)
        if not stat.S_ISDIR(about.st_mode) or (os.name != "nt" and (about.st_uid != user or about.st_mode & 0o022)):
            raise BadJob(
                f"{path}: others may write to it, so that what lies there is not to be trusted: remove it, or set "
                "TMPDIR to a folder of your own"
            )
    return path


def make_owned(path: str) -> None:
    """Make it, for this user alone."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    owned(os.path.basename(path).rpartition("-")[0])


def is_passing(path: str) -> bool:
    """Whether a path is below such a folder, or a `Folder`, of this process."""
    return any(path.startswith(folder + os.sep) for folder in list(_PASSING))


class Folder:
    """A folder below `above` in which only this process and its workers make files. Making one removes those with the
    same `prefix` whose processes were killed: their lock is free. Raises OSError.
    """

    def __init__(self, prefix: str, above: str) -> None:
        _sweep(prefix, above)
        self.process = os.getpid()
        while True:
            self.path = tempfile.mkdtemp(prefix=prefix, dir=above)
            _PASSING.add(os.path.realpath(self.path))
            try:
                self._lock = LockFile(os.path.join(self.path, "lock"), "a+")
            except FileNotFoundError:
                continue  # removed by another process, as it was empty
            if os.name == "nt" or (_held(self._lock) and os.path.exists(self._lock.name)):
                return
            self._lock.close()  # removed before it was locked

    def stands(self) -> bool:
        """Whether it is there, with its lock, without which another process would remove it."""
        return os.path.exists(self._lock.name)

    def remove(self) -> None:
        """Remove it with its contents; not from a fork of its process."""
        if os.getpid() == self.process:
            _PASSING.discard(os.path.realpath(self.path))
            shutil.rmtree(self.path, ignore_errors=True)
            self._lock.close()


class Scratch:
    """Names in a temporary folder (TMPDIR), which is made on first use and removed with the process; a fork has its
    own. One that somebody removes, as those do who tidy temporary folders up, is followed by another.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Without a folder yet."""
        self._folder: Folder | None = None
        self._numbers = itertools.count()
        self._guard = threading.Lock()

    def path(self, name: str) -> str:
        """A path at which there is no file."""
        with self._guard:
            if self._folder is None or self._folder.process != os.getpid() or not self._folder.stands():
                self._folder = Folder("gristmill-scratch-", tempfile.gettempdir())
                atexit.register(self._folder.remove)
            return os.path.join(self._folder.path, f"{next(self._numbers)}-{name}")

    def create(self, name: str) -> BinaryIO:
        """A new file at such a path. Raises OSError, but no FileNotFoundError, which would be said of what it is a copy
        of.
        """
        try:
            return open(self.path(name), "xb", buffering=1 << 20)
        except FileNotFoundError as e:
            raise OSError(f"{e.filename}: the temporary folder is gone (TMPDIR names another)") from e


SCRATCH = Scratch()  # one of a process: each holds a folder and its lock, until the process ends
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=SCRATCH.begin)  # another thread may have held its guard


def _sweep(prefix: str, above: str) -> None:
    for name in os.listdir(above):
        if name.startswith(prefix):
            folder = os.path.join(above, name)
            with contextlib.suppress(OSError):
                os.rmdir(folder)  # its process was killed before it made a lock; if alive, it makes another
            with contextlib.suppress(OSError), LockFile(os.path.join(folder, "lock"), "r+") as lock:
                if _held(lock):
                    shutil.rmtree(folder, ignore_errors=True)


def _held(file: LockFile) -> bool:
    """Take the lock of a folder; False if its process is alive."""
    if os.name == "nt":
        return False  # an open file cannot be removed there: such folders are left to the system
    with contextlib.suppress(OSError):
        file.lock()
        return True
    return False
