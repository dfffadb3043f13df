"""DuckDB connections of a run's own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import duckdb
import pyarrow as pa
import pytest

from gristmill.arrow.spilling import apart, batches_of, given, spilling
from gristmill.errors import CorruptStore

SHOWN = """
import duckdb, json
from gristmill.arrow.spilling import spilling
import pyarrow as pa
from gristmill.sources.where import SqlWhere
asked = "SELECT current_setting('enable_progress_bar')"
found = [duckdb.connect().execute(asked).fetchone()[0]]
with spilling("256MB") as connection:
    found.append(connection.execute(asked).fetchone()[0])
found.append(SqlWhere("x > 1", pa.schema({"x": "int64"}))._db().execute(asked).fetchone()[0])
print(json.dumps(found))
"""


def test_no_bar_of_duckdb_is_among_what_a_program_prints() -> None:
    """DuckDB shows one for what takes over two seconds where Python runs no script, as in a notebook."""
    told = subprocess.run([sys.executable, "-c", SHOWN], capture_output=True, text=True, check=True).stdout
    assert told == "[true, false, false]\n"


@pytest.mark.parametrize("after", [0.3, 1.5])
def test_a_signal_ends_a_sort(after: float) -> None:
    """One that takes long, in the main thread, which DuckDB would not look up from."""

    def stop(number: int, frame: Any) -> None:
        raise InterruptedError("stopped")

    before = signal.signal(signal.SIGUSR1, stop)
    try:
        with spilling("256MB") as db:

            def work() -> Any:
                db.execute("CREATE TEMP TABLE k AS SELECT hash(i) AS h, i AS n FROM range(500000000) t(i)")
                return db.sql("SELECT h, n FROM k ORDER BY h, n").fetchall()

            threading.Timer(after, os.kill, (os.getpid(), signal.SIGUSR1)).start()
            with pytest.raises(InterruptedError, match="stopped"):
                apart(work, db)
            begun = time.monotonic()
        assert time.monotonic() - begun < 3
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_what_a_query_raises_is_raised() -> None:
    """From the thread that asks."""
    with spilling("64MB") as db, pytest.raises(duckdb.Error, match="nowhere"):
        apart(lambda: db.execute("SELECT * FROM nowhere"), db)


@pytest.mark.parametrize("lazily", [False, True])
def test_what_a_stream_raises_is_raised_as_it_is(lazily: bool) -> None:
    """DuckDB makes its text an error of its own, also where rows of a query are read one batch after the other."""
    schema = pa.schema([("x", pa.int64())])

    def batches() -> Iterator[pa.RecordBatch]:
        yield pa.record_batch([pa.array([1, 2])], schema=schema)
        raise CorruptStore("part-1 is gone")

    with spilling("256MB") as db:
        with pytest.raises(CorruptStore, match=r"^part-1 is gone$"), given(db, read=(schema, batches())):
            if lazily:
                list(batches_of(db.sql("SELECT x FROM read"), 1))
            else:
                apart(lambda: db.execute("SELECT sum(x) FROM read").fetchone(), db)
        with pytest.raises(duckdb.Error, match="nothing"), given(db, read=(schema, iter(()))):
            db.execute("SELECT nothing FROM read")
