"""File locks: the kernel drops a lock with the process that holds it, however that ends."""

from __future__ import annotations

import contextlib
import io
import os
import weakref
from collections.abc import Iterator

if os.name == "nt":
    import msvcrt
else:
    import fcntl


class LockFile(io.FileIO):
    """A file to be locked; it releases its lock when it is closed or collected.

    A process forked meanwhile, such as one of a pool, would share the open file and keep the lock for as long as it
    lives: so the file is closed there. It has no buffer, which a fork could write a second time.
    """

    def lock(self, *, wait: bool = False, shared: bool = False) -> None:
        """Lock it exclusively or `shared` (not on Windows). Raises OSError at once if it is taken, unless it is to
        `wait`.
        """
        if os.name == "nt":
            self.seek(1 << 30)  # beyond the text, so that others can read it
            msvcrt.locking(self.fileno(), msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
            self.seek(0)
        else:
            _locked.add(self)  # before it is locked
            try:
                fcntl.flock(self, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
            except OSError:
                _locked.discard(self)
                raise

    def unlock(self) -> None:
        """Release the lock and keep the file open."""
        if os.name == "nt":
            self.seek(1 << 30)
            msvcrt.locking(self.fileno(), msvcrt.LK_UNLCK, 1)  # type: ignore[attr-defined]
            self.seek(0)
        else:
            fcntl.flock(self, fcntl.LOCK_UN)
            _locked.discard(self)

    def close(self) -> None:
        """Close it and release the lock, even if another process has it open, such as a child that does not run
        Python.
        """
        if os.name != "nt" and self in _locked and not self.closed:
            fcntl.flock(self, fcntl.LOCK_UN)
        super().close()


@contextlib.contextmanager
def locked_folder(path: str) -> Iterator[bool]:
    """While inside, a folder itself is locked, unless it is taken, as is told: no file is written, so that it may be
    one that only others may write. Where folders cannot be locked (on Windows, on some network file systems), none is
    taken.
    """
    if os.name == "nt":
        yield True
        return
    try:
        folder = os.open(path, os.O_RDONLY)
    except OSError:
        yield True
        return
    try:
        yield _lock_if_free(folder)
    finally:
        os.close(folder)


def _lock_if_free(folder: int) -> bool:
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # not a file system whose folders can be locked
        return True
    return True


_locked: weakref.WeakSet[LockFile] = weakref.WeakSet()


def _close_all() -> None:
    """In a fork, close all files: their locks are the parent's."""
    for file in list(_locked):
        io.FileIO.close(file)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_all)
