"""Where files of a shard are written before they travel: a folder of this process, which another one sweeps away if
this one is killed.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import shutil
import tempfile
import threading
from typing import Any

_PREFIX = "gristmill-scratch-"


class Scratch:
    """Names in a temporary folder (TMPDIR), made when the first one is asked for and removed with the process."""

    def __init__(self) -> None:
        self._folder: str | None = None
        self._lock: Any = None
        self._numbers = itertools.count()
        self._guard = threading.Lock()

    def path(self, name: str) -> str:
        """A path that nothing stands at."""
        with self._guard:
            if self._folder is None:
                self._folder = self._made()
        return os.path.join(self._folder, f"{next(self._numbers)}-{name}")

    def _made(self) -> str:
        _sweep()
        while True:
            folder = tempfile.mkdtemp(prefix=_PREFIX)
            try:
                self._lock = open(os.path.join(folder, "lock"), "a+")  # noqa: SIM115
            except FileNotFoundError:
                continue  # swept, as it was empty
            if os.name == "nt" or (_held(self._lock) and os.path.exists(self._lock.name)):
                atexit.register(shutil.rmtree, folder, ignore_errors=True)
                return folder
            self._lock.close()  # swept before it was locked


def _sweep() -> None:
    """Remove the folders of processes that were killed: their lock can be taken."""
    above = tempfile.gettempdir()
    for name in os.listdir(above):
        if name.startswith(_PREFIX):
            folder = os.path.join(above, name)
            with contextlib.suppress(OSError):
                os.rmdir(folder)  # its process was killed before it made a lock; if it lives it makes another
            with contextlib.suppress(OSError), open(os.path.join(folder, "lock"), "r+") as lock:
                if _held(lock):
                    shutil.rmtree(folder, ignore_errors=True)


def _held(file: Any) -> bool:
    """Take the lock of a folder; false if its process lives."""
    if os.name == "nt":
        return False  # a file that is open cannot be removed there: such folders are left to the system
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError:
        return False
