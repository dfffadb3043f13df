"""pyarrow file systems and files that are written in Python. Arrow reads and releases them in threads of its own,
perhaps after a read has returned; a thread that enters Python while the interpreter ends aborts the process.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from functools import cache
from typing import Any

from gristmill.process.forks import never_destroyed

__all__ = ["called", "go_on", "python_file", "python_files"]

_QUIET = 0.05  # seconds without a call after which no more are expected
_PATIENCE = 60.0  # seconds that the process waits for calls when it ends, such as to a store that does not answer

# The latest that Arrow was given, so that none of its threads is the last to release one, which would need Python.
_SYSTEMS: deque[Any] = deque(maxlen=1000)
_FILES: deque[Any] = deque(maxlen=1000)


class _Calls:
    """Calls from Arrow's threads: how many there are, and when the latest began or ended."""

    def __init__(self) -> None:
        self.running = 0
        self.latest = 0.0
        self.ending = False
        self.lock = threading.Lock()

    def count(self, more: int) -> None:
        with self.lock:
            self.running += more
            self.latest = time.monotonic()

    def busy(self) -> bool:
        with self.lock:
            return self.running > 0 or time.monotonic() < self.latest + _QUIET


_calls = _Calls()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_calls.__init__)  # type: ignore[misc]


def python_files(handler: Any) -> Any:
    """The pyarrow file system of a FileSystemHandler, whose reading methods are `called`."""
    import pyarrow.fs as pafs

    _wait_at_end()
    _SYSTEMS.append(pafs.PyFileSystem(handler))
    return _SYSTEMS[-1]


def python_file(file: Any) -> Any:
    """A file of such a file system as pyarrow reads it; its `read` is `called`."""
    import pyarrow as pa

    _FILES.append(pa.PythonFile(file, mode="r"))
    return _FILES[-1]


@contextlib.contextmanager
def called() -> Iterator[None]:
    """Marks that an Arrow thread is in Python: the process waits for it before it ends."""
    _calls.count(1)
    try:
        go_on()
        yield
    finally:
        _calls.count(-1)


def go_on() -> None:
    """Raises OSError if the process is ending: nobody waits for the rows any more."""
    if _calls.ending:
        raise OSError("the process is ending: an abandoned read does not go on")


@cache
def _wait_at_end() -> None:
    atexit.register(_end)


def _end() -> None:
    _calls.ending, until = True, time.monotonic() + _PATIENCE
    while _calls.busy() and time.monotonic() < until:
        time.sleep(_QUIET / 5)
    _calls.ending = False  # other exit handlers may read
    for kept in (*_SYSTEMS, *_FILES):
        never_destroyed(kept)  # nor does the end of the interpreter release any
