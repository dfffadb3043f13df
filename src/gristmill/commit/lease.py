"""The lease: politeness between runs on one sink. Safety never rests on it (receipts are created once), so a stale one
can only cost double work, not a wrong result.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping
from typing import Any

from gristmill.errors import SinkBusy
from gristmill.plan.contracts import Files


class Lease:
    """Holds a sink's lock file while the run lives. The kernel drops it with the process, however that ends."""

    def __init__(self, sink: str, folder: str, files: Files | None = None) -> None:
        self._files = files
        self.path = os.path.join(folder, "lock")
        self._sink = sink
        self._file: Any = None

    def __enter__(self) -> Lease:
        """Take the lease. Raises SinkBusy, naming the run that holds it."""
        os.makedirs(os.path.dirname(self.path), exist_ok=True)
        self._file = open(self.path, "a+")
        try:
            lock(self._file)
        except OSError:
            raise SinkBusy(
                f"{self._sink}: another run holds this sink ({self._holder()}): wait for it or stop it"
            ) from None
        self._file.seek(0)
        self._file.truncate()
        json.dump(myself(), self._file)
        self._file.flush()
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def held(self) -> bool:
        """Whether the file that is locked is the one that others would lock."""
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self._file.fileno()))
        except (FileNotFoundError, NotADirectoryError):
            return False

    def say(self, path: str, data: bytes) -> None:
        """Note how far the run is."""
        if self._files is not None:
            self._files.note(path, data)

    def _holder(self) -> str:
        self._file.seek(0)
        try:
            about = json.load(self._file)
        except ValueError:
            return "it has not told its name yet"
        finally:
            self._file.close()
        return named(about)


def myself() -> dict[str, Any]:
    """This run, as others see it."""
    return {"pid": os.getpid(), "host": socket.gethostname(), "started": time.strftime("%Y-%m-%dT%H:%M:%S%z")}


def named(about: Mapping[str, Any]) -> str:
    """A run in words."""
    return f"process {about['pid']} on {about['host']}, started {about['started']}"


def holder(folder: str) -> dict[str, Any] | None:
    """Who holds the lease of a sink now, or None."""
    path = os.path.join(folder, "lock")
    if not os.path.exists(path):
        return None
    with open(path, "r+") as file:
        try:
            lock(file)
        except OSError:
            try:
                return json.load(file)  # type: ignore[no-any-return]
            except ValueError:
                return {}
        return None


if os.name == "nt":
    import msvcrt

    def lock(file: Any) -> None:
        """Lock an open file, or raise OSError at once."""
        file.seek(1 << 30)  # beyond the text, so that others can read it
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
        file.seek(0)

else:
    import fcntl

    def lock(file: Any) -> None:
        """Lock an open file, or raise OSError at once."""
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
