"""Requests that are asked once, whichever workers have rows for them and whoever is killed: their answers, beside the
plan until the result is published, and who is asking now. A SQLite file a machine, as such a file is of one machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import sqlite3
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from gristmill.files.sqlitelog import log_ahead
from gristmill.process.locks import LockFile
from gristmill.process.ownstderr import say

PATIENCE = 30.0  # seconds: other workers may be writing
LATE = 1800.0  # seconds after which somebody else asks, if whoever claimed it has not renewed that: it is stopped
MINE, WAIT = "mine", "wait"
_RELEASE = "DELETE FROM claims WHERE request = ? AND owner = ?"


class Once:
    """What one worker knows of them. `folder` is in the generation's, on a disk of this machine's; refusals and answers
    that fitted no form are for attempts of this `run` alone. A file that cannot be used is told once, and then every
    worker asks for itself.
    """

    def __init__(self, folder: str, run: str) -> None:
        self._run = run
        self._broken = False
        self._lock = threading.Lock()  # closed by one thread, perhaps while another asks
        self._dead: set[str] = set()
        self._owner = secrets.token_hex(8)
        self._folder = folder
        self._host = socket.gethostname()
        self._held: sqlite3.Connection | None = None
        self._alive: LockFile | None = None
        try:
            os.makedirs(folder, exist_ok=True)
            self._alive = LockFile(self._lock_of(self._owner), "x+")
            self._alive.lock()
            path = os.path.join(folder, f"{self._host}.sqlite")
            self._held = sqlite3.connect(path, timeout=PATIENCE, isolation_level=None, check_same_thread=False)
            log_ahead(self._held, PATIENCE)
            # After a power failure the last answers may be gone, and are asked for again; the file is whole.
            self._held.execute("PRAGMA synchronous=NORMAL")
            self._held.execute(
                "CREATE TABLE IF NOT EXISTS answers (request BLOB PRIMARY KEY, run TEXT, refused INT, answer TEXT) "
                "WITHOUT ROWID"
            )
            self._held.execute(
                "CREATE TABLE IF NOT EXISTS claims (request BLOB PRIMARY KEY, owner TEXT, at REAL) WITHOUT ROWID"
            )
        except (OSError, sqlite3.Error) as e:
            self._stop(e)

    def claim(self, request: bytes) -> tuple[str, Any]:
        """MINE if this worker is to ask, WAIT if another one is asking, else the answer after "answer" or "refused"."""
        try:
            if (known := self._known(request)) is not None:
                return known
            now = time.monotonic()  # of one machine, as the file is: an owner from before it started anew is dead
            if self._changed("INSERT OR IGNORE INTO claims VALUES (?, ?, ?)", (request, self._owner, now)):
                if (known := self._known(request)) is not None:  # since just now
                    self.release(request)
                    return known
                return MINE, None
            found = self._one("SELECT owner, at FROM claims WHERE request = ?", (request,))
            if found is None or (now - found[1] < LATE and not self._is_dead(found[0])):
                return WAIT, None
            taken = "UPDATE claims SET owner = ?, at = ? WHERE request = ? AND owner = ?"
            return (MINE if self._changed(taken, (self._owner, now, request, found[0])) else WAIT), None
        except (sqlite3.Error, ValueError) as e:
            self._stop(e)
            return MINE, None

    def renew(self) -> float:
        """This worker goes on, whatever its claims wait for. Returns in how many seconds it has to tell that again."""
        self._write(("UPDATE claims SET at = ? WHERE owner = ?", (time.monotonic(), self._owner)))
        return LATE / 4

    def known(self, request: bytes) -> bool:
        """Whether there is an answer."""
        try:
            return (found := self._known(request)) is not None and found[0] == "answer"
        except (sqlite3.Error, ValueError):
            return False

    def put(self, request: bytes, answer: Mapping[str, Any], refused: bool = False) -> None:
        """Keep an answer, or why the request was `refused`; the first one stays."""
        run = self._run if refused else ""
        keeps = (
            "INSERT INTO answers VALUES (?, ?, ?, ?) ON CONFLICT (request) DO UPDATE SET run = excluded.run, "
            "refused = excluded.refused, answer = excluded.answer WHERE run NOT IN ('', excluded.run)"
        )
        row = (request, run, int(refused), json.dumps(answer))
        self._write((keeps, row), (_RELEASE, (request, self._owner)))

    def release(self, request: bytes) -> None:
        """There is no answer: somebody else may ask."""
        self._write((_RELEASE, (request, self._owner)))

    def forget(self, requests: Sequence[bytes]) -> None:
        """What these were answered is of no use to another run."""
        own = "UPDATE answers SET run = ? WHERE request = ?"
        self._write(*((own, (self._run, request)) for request in requests))

    def close(self) -> None:
        """Others may ask what this worker was asking."""
        with self._lock:
            if self._held is not None:
                self._held.close()
            self._held, self._broken = None, True
        if self._alive is not None:
            self._alive.close()
            with contextlib.suppress(OSError):
                os.unlink(self._lock_of(self._owner))

    def _known(self, request: bytes) -> tuple[str, Any] | None:
        found = self._one(
            "SELECT refused, answer FROM answers WHERE request = ? AND run IN ('', ?)", (request, self._run)
        )
        return None if found is None else ("refused" if found[0] else "answer", json.loads(found[1]))

    def _one(self, statement: str, values: tuple[Any, ...]) -> Any:
        with self._lock:
            return None if self._held is None or self._broken else self._held.execute(statement, values).fetchone()

    def _changed(self, statement: str, values: tuple[Any, ...]) -> bool:
        with self._lock:
            return self._held is None or self._broken or self._held.execute(statement, values).rowcount > 0

    def _write(self, *statements: tuple[str, tuple[Any, ...]]) -> None:
        """All of these or none."""
        try:
            with self._lock:
                if self._held is None or self._broken:
                    return
                self._held.execute("BEGIN IMMEDIATE")
                try:
                    for statement, values in statements:
                        self._held.execute(statement, values)
                finally:
                    self._held.execute("COMMIT")
        except sqlite3.Error as e:
            self._stop(e)

    def _is_dead(self, owner: str) -> bool:
        """Whether a worker is gone: the lock of its file goes with it, however it ends."""
        if owner == self._owner or owner in self._dead:
            return owner != self._owner
        try:
            with LockFile(self._lock_of(owner), "r+") as file:
                file.lock()
        except FileNotFoundError:
            pass
        except OSError:
            return False
        self._dead.add(owner)
        return True

    def _lock_of(self, owner: str) -> str:
        return os.path.join(self._folder, f"{self._host}.{owner}.lock")

    def _stop(self, error: Exception) -> None:
        if not self._broken:
            say(f"{self._folder}: {error}: equal requests are asked once a worker")
        self._broken = True
