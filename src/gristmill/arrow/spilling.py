"""DuckDB connections: to sort, group and join more rows than memory holds, without a file, spilling to disk."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gristmill.process.startup import imported


@contextmanager
def spilling(memory: str) -> Iterator[Any]:
    """A DuckDB connection that holds at most so much ("256MB") in memory, and the rest in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="gristmill-") as folder, spilling_to(folder, memory) as connection:
        yield connection


def spilling_to(folder: str, memory: str, threads: int | None = None) -> Any:
    """The same with the rest in a folder of the caller's; with at most four threads, unless told otherwise."""
    config: dict[str, Any] = {
        "memory_limit": memory,
        "temp_directory": os.path.join(folder, "spilled"),
        "threads": threads or min(4, os.cpu_count() or 1),
    }
    return quiet(imported("duckdb").connect(":memory:", config=config))


def quiet(connection: Any) -> Any:
    """The connection without DuckDB's own progress bar, which it shows where Python runs no script (-c, a notebook)."""
    connection.execute("SET enable_progress_bar = false")
    return connection
