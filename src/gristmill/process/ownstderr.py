"""A worker's own way to its standard error. User code may replace or close `sys.stderr`, and even descriptors that it
did not open: what a worker has to say, and the stacks of a call that takes too long, go to a copy from before it ran.
"""

from __future__ import annotations

import contextlib
import os
import sys

from gristmill.values import dataclass

__all__ = ["Known", "descriptor", "flush", "keep", "say"]

_APART = 500  # below a usual limit of 1024, and above what code that closes descriptors by the hundred reaches


@dataclass(frozen=True)
class Known:
    """A descriptor, and which file it is of: another one may have its number by now, if user code has closed it."""

    fd: int
    file: tuple[int, int]

    @classmethod
    def of(cls, fd: int) -> Known:
        about = os.fstat(fd)
        return cls(fd, (about.st_dev, about.st_ino))

    def ours(self) -> bool:
        """Whether the descriptor is still of that file."""
        return _file_of(self.fd) == self.file


class _OwnStderr:
    """That of this process."""

    def __init__(self) -> None:
        self._kept: Known | None = None
        self._worker = False

    def keep(self) -> None:
        """From now on this process, a worker, says things by a copy of its standard error. Called before user code
        runs.
        """
        self._kept, self._worker = _copied(), True

    def descriptor(self) -> int:
        """Where to write to, for what takes a descriptor."""
        kept = self._kept
        if kept is None:
            kept = _copied()
        elif not kept.ours():
            # If number 2 was closed, too, it may be the next file that was opened: perhaps a part of the result.
            kept = _copied() if _file_of(2) == kept.file else Known.of(os.open(os.devnull, os.O_WRONLY))
        self._kept = kept
        return kept.fd

    def say(self, text: str) -> None:
        """A line for a person. Never raises: what cannot be said is lost. Outside of workers it is said on
        `sys.stderr`, which a notebook or a test may have replaced on purpose.
        """
        line = text.rstrip("\n") + "\n"
        if not self._worker:
            with contextlib.suppress(Exception):  # whatever a program's replacement for a stream raises, or None
                sys.stderr.write(line)
                sys.stderr.flush()
            return
        data = line.encode("utf-8", "backslashreplace")
        with contextlib.suppress(OSError):
            while data:
                data = data[os.write(self.descriptor(), data) :]

    def leave(self) -> None:
        """In a fork of user code: it may outlive the worker, whose output ends when all copies are closed."""
        if self._kept is not None and self._kept.ours():
            os.close(self._kept.fd)
        self._kept, self._worker = None, False


_OWN = _OwnStderr()
keep, descriptor, say = _OWN.keep, _OWN.descriptor, _OWN.say
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_OWN.leave)


def flush() -> None:
    """Flush what user code has printed, to whatever it has made of the streams."""
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        with contextlib.suppress(Exception):  # None, closed, or without such a method
            stream.flush()  # type: ignore[union-attr]


def _file_of(fd: int) -> tuple[int, int] | None:
    try:
        about = os.fstat(fd)
    except OSError:
        return None
    return about.st_dev, about.st_ino


def _copied() -> Known:
    """A copy of standard error whose number is out of the way. Programs that are started do not get it."""
    if sys.platform != "win32":
        import fcntl

        with contextlib.suppress(OSError):  # fewer descriptors are allowed
            return Known.of(fcntl.fcntl(2, fcntl.F_DUPFD_CLOEXEC, _APART))
    return Known.of(os.dup(2))
