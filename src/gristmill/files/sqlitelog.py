"""SQLite files that several processes read and write at once."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Iterator
from typing import Any

from gristmill.process.interrupts import Patience

_AT_ONCE = 0.1  # seconds that SQLite waits by itself, in C, where a process hears no signal
_PAUSE = 0.002  # seconds between two tries
_HELD = "database is locked"
_BUSY, _RECOVERY = 5, 261  # SQLITE_BUSY and SQLITE_BUSY_RECOVERY, which pass: https://sqlite.org/rescode.html#busy
_PASSING = (_BUSY, _RECOVERY)


def patient(address: str, patience: float) -> sqlite3.Connection:
    """A connection, for any thread, to a file that others may hold: each `execute` waits `patience` seconds for them,
    and hears signals meanwhile. Transactions are the caller's, and begin to write with BEGIN IMMEDIATE.
    """
    made = sqlite3.connect(
        address, timeout=_AT_ONCE, isolation_level=None, check_same_thread=False, factory=_Patient, uri=True
    )
    made.patience = patience
    return made


@contextlib.contextmanager
def at_once(held: sqlite3.Connection) -> Iterator[None]:
    """While inside, a statement of a `patient` connection waits for nobody."""
    assert isinstance(held, _Patient)
    patience, held.patience = held.patience, -1.0
    try:
        yield
    finally:
        held.patience = patience


class _Patient(sqlite3.Connection):
    patience = 0.0

    def execute(self, sql: str, values: Any = (), /) -> sqlite3.Cursor:
        patience: Patience | None = None
        while True:
            try:
                return super().execute(sql, values)
            except sqlite3.OperationalError as e:
                patience = patience or Patience(self.patience)
                if getattr(e, "sqlite_errorcode", _BUSY) not in _PASSING or _HELD not in str(e) or patience.over():
                    raise
                time.sleep(_PAUSE)  # where SQLite sees that waiting is no use, it does not


def log_ahead(held: sqlite3.Connection, patience: float) -> None:
    """Give a file a write-ahead log, so that readers and a writer work at once. Of several that are first to open a
    file, SQLite makes one wait for the others but refuses the rest at once, whatever the connection's time-out: they
    try again for `patience` seconds. Raises sqlite3.Error.
    """
    until = time.monotonic() + patience
    while True:
        try:
            held.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError:
            if time.monotonic() > until:
                raise
            time.sleep(0.01)
