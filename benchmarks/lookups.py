"""Published rows by key: a sink with an index, LMDB and Redis, each with the same rows.

    python benchmarks/lookups.py [--rows 1000000] [--gets 20000] [--many 100000] [--rounds 5]

Rows are (id, label, score); keys are drawn at random. Printed are milliseconds of one `get`, and seconds of one
`get_many`; beside what a clock says, what this process computes, which other load on the machine does not change.
Redis is left out where there is no redis-server.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import shutil
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import gristmill as gm
from gristmill.stores.lookup import Lookup


def labelled(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A label and a score."""
    labels = np.array(["negative", "neutral", "positive"])
    return {"label": labels[batch["id"] % 3], "score": (batch["id"] % 1000) / 1000}


@contextlib.contextmanager
def redis() -> Iterator[str | None]:
    """The address of a Redis server without a password; None if there is no such program."""
    program = shutil.which("redis-server")
    if program is None:
        yield None
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        said = ["--port", str(port), "--bind", "127.0.0.1", "--save", ""]
        server = subprocess.Popen([program, *said], cwd=folder, stdout=subprocess.DEVNULL)
        try:
            while True:
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                    break
                time.sleep(0.05)
            yield f"redis://127.0.0.1:{port}/0#scores"
        finally:
            server.terminate()
            server.wait(10)


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds by the clock, and of this process on a core."""
    clock, core = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - clock, time.process_time() - core


def told(name: str, lookup: Lookup, rows: int, gets: int, many: int, rounds: int) -> None:
    """Time lookups, and print the figures."""
    drawn = random.Random(1)
    for key in range(0, rows, max(1, rows // 1000)):  # what is looked up for the first time is read from the disk
        lookup.get(key)
    some = iter([drawn.randrange(rows) for _ in range(gets)])
    singles = np.array([timed(lambda: lookup.get(next(some))) for _ in range(gets)]) * 1000
    keys = [drawn.randrange(rows) for _ in range(many)]
    wholes = [timed(lambda: lookup.get_many(keys)) for _ in range(rounds)]
    assert [row["id"] for row in lookup.get_many(keys) if row is not None] == keys
    p50, p99 = np.percentile(singles[:, 0], [50, 99])
    core = np.percentile(singles[:, 1], 99)
    clock, computed = (statistics.median(seconds) for seconds in zip(*wholes, strict=True))
    least, most = min(w[0] for w in wholes), max(w[0] for w in wholes)
    print(f"{name:6} get p50 {p50:.3f} ms, p99 {p99:.3f} ms (computing: {core:.3f})", end="; ")
    print(f"get_many of {many:,} {clock:.2f} s ({least:.2f} to {most:.2f}; computing: {computed:.2f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, usual in (("rows", 1_000_000), ("gets", 20_000), ("many", 100_000), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=usual)
    given = vars(parser.parse_args())
    with tempfile.TemporaryDirectory() as made, redis() as server:
        source, sink = Path(made) / "rows.parquet", str(Path(made) / "out")
        pq.write_table(pa.table({"id": np.random.default_rng(0).permutation(given["rows"])}), source)
        plain, _ = timed(lambda: gm.apply(str(source), sink, fn=labelled, keep=["id"]))
        index, _ = timed(lambda: gm.apply(str(source), sink, fn=labelled, keep=["id"], index="id"))
        size = sum(f.stat().st_size for f in Path(sink).glob("_index/*")) / given["rows"]
        print(f"{given['rows']:,} rows scored in {plain:.1f} s; an index of them {index:.1f} s, {size:.0f} bytes a row")
        places = {"sink": sink, "lmdb": f"lmdb://{made}/scores.lmdb", "redis": server}
        for name, place in places.items():
            if place is None:
                print(f"{name}: left out, as there is no redis-server here")
                continue
            if place != sink:
                gm.deliver(sink, place, key=["id"])
            with gm.lookup(place) as lookup:
                told(name, lookup, **given)


if __name__ == "__main__":
    main()
