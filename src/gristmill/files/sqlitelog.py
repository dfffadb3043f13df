"""SQLite files that several processes read and write at once."""

from __future__ import annotations

import sqlite3
import time


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
