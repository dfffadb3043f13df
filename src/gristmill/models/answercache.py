"""Answers of endpoints kept across runs, by the digest of the request: a SQLite file in a folder of the user's."""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
from collections.abc import Mapping, Sequence
from typing import Any

from gristmill.errors import BadModel
from gristmill.files.sqlitelog import log_ahead
from gristmill.process.ownstderr import say

PATIENCE = 30.0  # seconds: other workers may be writing


def digest_of(request: Mapping[str, Any]) -> bytes:
    """Of everything that is sent, except to whom and with which key."""
    return hashlib.blake2b(json.dumps(request, sort_keys=True).encode(), digest_size=20).digest()


class AnswerCache:
    """Used in one thread; several processes of one machine may share a folder. Raises BadModel if it cannot be used."""

    def __init__(self, folder: str) -> None:
        self._broken = False
        self._path = os.path.join(os.path.expanduser(folder), "answers.sqlite")
        try:
            os.makedirs(os.path.dirname(self._path), exist_ok=True)
            self._held = sqlite3.connect(self._path, timeout=PATIENCE, isolation_level=None, check_same_thread=False)
            log_ahead(self._held, PATIENCE)
            # After a power failure the last answers may be gone, and are asked for again; the file is whole.
            self._held.execute("PRAGMA synchronous=NORMAL")
            self._held.execute(
                "CREATE TABLE IF NOT EXISTS answers (request BLOB PRIMARY KEY, answer TEXT) WITHOUT ROWID"
            )
        except (OSError, sqlite3.Error) as e:
            raise BadModel(f"cache {folder}: cannot be used ({e}): give a folder on this machine") from e

    def get(self, key: bytes) -> dict[str, Any] | None:
        """The answer to a request; None if it is not known."""
        try:
            row = self._held.execute("SELECT answer FROM answers WHERE request = ?", (key,)).fetchone()
            found: dict[str, Any] | None = None if row is None else json.loads(row[0])
        except (sqlite3.Error, ValueError) as e:
            self._stop(e)
            return None
        return found

    def put(self, key: bytes, answer: Mapping[str, Any]) -> None:
        """Keep an answer; the first one stays."""
        self._write("INSERT OR IGNORE INTO answers VALUES (?, ?)", [(key, json.dumps(answer))])

    def forget(self, keys: Sequence[bytes]) -> None:
        """Keep the answers to these requests no longer."""
        self._write("DELETE FROM answers WHERE request = ?", [(key,) for key in keys])

    def _write(self, statement: str, rows: Sequence[tuple[Any, ...]]) -> None:
        if self._broken:
            return
        try:
            self._held.executemany(statement, rows)
        except sqlite3.Error as e:
            self._stop(e)

    def _stop(self, error: Exception) -> None:
        """Say it once: rows do not depend on it, and their journal keeps what this run was answered."""
        if not self._broken:
            say(f"cache {self._path}: {error}: it keeps no more answers of this run")
        self._broken = True

    def close(self) -> None:
        """Close the file."""
        self._held.close()
