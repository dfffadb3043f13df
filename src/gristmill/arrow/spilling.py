"""DuckDB connections: to sort, group and join more rows than memory holds, without a file, spilling to disk."""

from __future__ import annotations

import os
import queue
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from gristmill.process.forks import left_in_forks
from gristmill.process.interrupts import SOON
from gristmill.process.startup import imported

if TYPE_CHECKING:
    import pyarrow as pa

T = TypeVar("T")


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
    return tamed(imported("duckdb").connect(":memory:", config=config))


@contextmanager
def given(connection: Any, **streams: tuple[pa.Schema, Iterable[pa.RecordBatch]]) -> Iterator[None]:
    """Batches as tables of these names, each to be read once. What one of them raises is raised as it is: DuckDB tells
    its text in an error of its own, which no caller looks for.
    """
    import pyarrow as pa

    failed: list[BaseException] = []

    def noted(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        try:
            yield from batches
        except GeneratorExit:  # DuckDB wants no more
            raise
        except BaseException as e:
            failed.append(e)
            raise

    for name, (schema, batches) in streams.items():
        connection.register(name, pa.RecordBatchReader.from_batches(schema, noted(batches)))
    try:
        yield
    except Exception:
        if not failed:
            raise
        raise failed[0] from None


def apart(work: Callable[[], T], connection: Any) -> T:
    """What `work` returns, which asks this connection, from a thread of its own: DuckDB does not look for signals while
    it sorts, for half a minute where there is much. When one arrives, it is told to give up.
    """
    if threading.current_thread() is not threading.main_thread():
        return work()  # signals are heard elsewhere
    done: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            done.put((work(), None))
        except BaseException as e:
            done.put((None, e))

    thread = threading.Thread(target=run, daemon=True, name="gristmill sort")
    thread.start()
    try:
        found, error = done.get()
    except BaseException:
        begun = time.monotonic()
        while thread.is_alive() and time.monotonic() - begun < SOON:
            connection.interrupt()  # again and again, as one between two queries is lost
            thread.join(0.05)
        raise
    if error is not None:
        raise error
    return found  # type: ignore[return-value]


def batches_of(relation: Any, rows: int) -> Any:
    """A reader of a query's rows, so many at a time: as long as it lives, so do the threads of a closed connection."""
    return left_in_forks(relation.to_arrow_reader(rows))


def tamed(connection: Any) -> Any:
    """The connection without DuckDB's own progress bar, which it shows where Python runs no script (-c, a notebook);
    left alone in forks, which have none of its threads.
    """
    left_in_forks(connection)
    connection.execute("SET enable_progress_bar = false")
    return connection
