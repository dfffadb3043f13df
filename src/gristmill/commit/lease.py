"""The lease: politeness between runs on one sink. Safety never rests on it (receipts are created once), so a stale one
can only cost double work, not a wrong result.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Mapping
from typing import Any

from gristmill.errors import SinkBusy
from gristmill.plan.contracts import Files
from gristmill.plan.locks import LockFile

_LOOK = 0.1  # seconds, more than somebody who looks holds a lock


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
        until = time.monotonic() + _LOOK
        while not self._locked():
            if time.monotonic() > until:
                about = _told(self._file)
                self._file.close()
                who = named(about) if about else "it has not told its name yet"
                raise SinkBusy(f"{self._sink}: another run holds this sink ({who}): wait for it or stop it")
            time.sleep(0.01)
        self._file.truncate(0)
        self._file.write(json.dumps(myself()).encode())
        return self

    def _locked(self) -> bool:
        with contextlib.suppress(BlockingIOError, PermissionError):
            self._file.lock()
            return True
        return False

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def held(self) -> bool:
        """Whether the file that is locked is the one that others would lock."""
        if self._file.closed:  # in a fork
            return False
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self._file.fileno()))
        except (FileNotFoundError, NotADirectoryError):
            return False

    def say(self, path: str, data: bytes) -> None:
        """Note how far the run is."""
        if self._files is not None:
            self._files.note(path, data)


def myself() -> dict[str, Any]:
    """This run, as others see it."""
    return {"pid": os.getpid(), "host": socket.gethostname(), "started": time.strftime("%Y-%m-%dT%H:%M:%S%z")}


def named(about: Mapping[str, Any]) -> str:
    """A run in words, as far as its lease tells."""
    return "process {} on {}, started {}".format(*(about.get(name, "?") for name in ("pid", "host", "started")))


def holder(folder: str) -> dict[str, Any] | None:
    """Who holds the lease of a sink now, or None; {} if it has not told its name yet."""
    try:
        file = LockFile(os.path.join(folder, "lock"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    with file:
        try:
            file.lock(shared=True)  # so that of many who look none is taken for a run
        except OSError:
            return _told(file)
    return None


def _told(file: LockFile) -> dict[str, Any]:
    file.seek(0)
    try:
        return json.load(file)  # type: ignore[no-any-return]
    except ValueError:
        return {}
