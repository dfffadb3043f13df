"""Memory of a run that asks for row after row: it is bounded by what is in flight, however many rows there are.

python benchmarks/in_flight.py [--rows 100000 1000000] [--prompts]

A coroutine function that answers at once (with --prompts: prompts to tests/llmserver.py, slower by far), 256 at a time,
one worker. Prints the peak of the worker's resident bytes and of the driver's for each number of rows, and their ratio.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
import time
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq

import gristmill as gm

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "tests"))
from llmserver import KEY, ChatServer

AT_ONCE = 256


async def answer(row: dict[str, Any]) -> dict[str, Any]:
    """As an endpoint would answer, at once."""
    return {"answer": row["text"].upper(), "words": len(row["text"].split())}


class Peaks:
    """The most resident bytes of this process, and of all below it together, while this is entered."""

    def __enter__(self) -> Peaks:
        self.own = self.below = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        me = psutil.Process()
        while not self._over.wait(0.05):
            self.own, below = max(self.own, me.memory_info().rss), 0
            for process in me.children(recursive=True):
                try:
                    below += process.memory_info().rss
                except psutil.Error:  # it has just ended
                    continue
            self.below = max(self.below, below)


def written(path: str, rows: int) -> None:
    """Rows with texts of a hundred characters, a file of row groups."""
    schema = pa.schema([("id", pa.int64()), ("text", pa.string())])
    with pq.ParquetWriter(path, schema) as out:
        for start in range(0, rows, 50_000):
            ids = range(start, min(rows, start + 50_000))
            texts = [f"row {n} says what a prompt of some length would say: {'word ' * 10}{n}" for n in ids]
            out.write_table(pa.table({"id": ids, "text": texts}, schema=schema))


def measured(rows: int, prompts: bool) -> Peaks:
    """One run over so many rows."""
    with tempfile.TemporaryDirectory() as folder, ChatServer() as server:
        source, sink = os.path.join(folder, "rows.parquet"), os.path.join(folder, "out")
        written(source, rows)
        begun = time.perf_counter()
        model: Any = gm.model(answer, returns={"answer": "string", "words": "int64"}, concurrency=AT_ONCE)
        if prompts:
            model = gm.Prompt("{{ text }}", "m", base_url=server.url, api_key=KEY, concurrency=AT_ONCE)
        with Peaks() as peaks:
            report = gm.Job(source, model, gm.sink(sink, keep=["id"]), workers=1).run()
        assert (report.rows_ok, report.rows_dead) == (rows, 0)
        seconds = time.perf_counter() - begun
    print(
        f"  {rows:,} rows: workers {peaks.below >> 20} MB, driver {peaks.own >> 20} MB; {rows / seconds:,.0f} rows/s",
        flush=True,
    )
    return peaks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs=2, default=(100_000, 1_000_000))
    parser.add_argument("--prompts", action="store_true")
    given = parser.parse_args()
    few, many = (measured(rows, given.prompts) for rows in given.rows)
    print(f"  {many.below / few.below:.2f} of the workers' memory, {many.own / few.own:.2f} of the driver's")


if __name__ == "__main__":
    main()
