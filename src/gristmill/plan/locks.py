"""Files that are locked: the kernel drops a lock with the process that has taken it, however that ends."""

from __future__ import annotations

import io
import os
import weakref

if os.name == "nt":
    import msvcrt
else:
    import fcntl


class LockFile(io.FileIO):
    """A file to be locked, which gives its lock back when it is closed, or collected.

    A process that is forked meanwhile, as one of a pool, would share the open file and keep the lock for as long as it
    lives: there it is closed. It has no buffer, which a fork might write once more.
    """

    def lock(self, *, wait: bool = False, shared: bool = False) -> None:
        """Lock it alone or `shared` with others (not on Windows), or raise OSError at once unless it is to `wait`."""
        if os.name == "nt":
            self.seek(1 << 30)  # beyond the text, so that others can read it
            msvcrt.locking(self.fileno(), msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
            self.seek(0)
        else:
            _locked.add(self)  # before it is
            try:
                fcntl.flock(self, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
            except OSError:
                _locked.discard(self)
                raise

    def close(self) -> None:
        """Also where another process has it open, as a child that runs no Python."""
        if os.name != "nt" and self in _locked and not self.closed:
            fcntl.flock(self, fcntl.LOCK_UN)
        super().close()


_locked: weakref.WeakSet[LockFile] = weakref.WeakSet()


def _close_all() -> None:
    """In a fork, where the locks are another's."""
    for file in list(_locked):
        io.FileIO.close(file)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_all)
