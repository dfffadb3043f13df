"""A gate beside a store that is a file: who writes holds it, who reads passes through it. A file of a database has
locks of its own, but none that lets a writer in while readers come one after the other.
"""

from __future__ import annotations

import contextlib
import os
import time

from gristmill.process.interrupts import Patience
from gristmill.process.locks import LockFile
from gristmill.stores.contract import StoreBusy

WAIT = 0.002  # seconds between looks at a gate that is held


class Gate:
    """The gate of the file at `path`, or that a link there leads to: a hidden file beside it, locked by the kernel."""

    def __init__(self, path: str, shown: str, patience: float) -> None:
        folder, name = os.path.split(os.path.realpath(path))
        self._path = os.path.join(folder, f".{name}.gristmill-lock")
        self._shown, self._patience = shown, patience
        self._file: LockFile | None = None

    def hold(self) -> None:
        """Take it. Raises StoreBusy if somebody else holds it for too long."""
        if self._file is None:
            self._file = self._locked()

    def release(self) -> None:
        """Let it go, if it is held."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def through(self) -> None:
        """Wait until nobody holds it. A folder in which nothing can be written has no writers."""
        with contextlib.suppress(FileNotFoundError, PermissionError):
            if os.path.exists(self._path):
                self._locked().close()

    def _locked(self) -> LockFile:
        file, patience = LockFile(self._path, "a"), Patience(self._patience)
        while True:
            try:
                file.lock()
                return file
            except OSError:
                if patience.over():
                    file.close()
                    raise StoreBusy(
                        f"{self._shown}: another process has been writing there for {self._patience:g} seconds: wait "
                        "for it, or stop it, and run again"
                    ) from None
                time.sleep(WAIT)
