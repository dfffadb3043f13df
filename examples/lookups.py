"""`make demo-lookup`: scores of every night, looked up while the next night's replace them.

    python examples/lookups.py [--customers 200000] [--nights 4] [--seconds 2]

Each night scores all customers anew, and brings the scores to Redis and to an LMDB file; the folder has an index,
too. Meanwhile a reader for each of the three asks for fifty customers at a time, over and over, and counts of which
night the answers are. All rows of an answer must be of one night, and no later answer of an earlier one. Without a
redis-server there is no Redis, which is said. Everything is in a temporary folder.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import gristmill as gm

TOGETHER = 50  # customers in one answer


class Scorer:
    """How likely a customer is to come back, by weights that are trained anew every day."""

    def __init__(self, night: int) -> None:
        self.night = night
        self.weights = np.random.default_rng(night).normal(size=4)

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        seen = np.column_stack([batch[name] for name in ("visits", "spent", "days", "opened")])
        score = 1 / (1 + np.exp(-seen @ self.weights))
        return {"score": score, "night": np.full(len(score), self.night)}


def customers(path: Path, count: int) -> None:
    """What is known of each."""
    drawn = np.random.default_rng(0)
    columns = {name: drawn.normal(size=count) for name in ("visits", "spent", "days", "opened")}
    pq.write_table(pa.table({"customer": np.arange(count), **columns}), path, row_group_size=20_000)


def scored(source: Path, sink: Path, night: int, stores: list[str]) -> float:
    """One night's run, which ends when its scores are in every store; how many seconds it took."""
    begun = time.perf_counter()
    gm.Job(
        str(source),
        gm.model(Scorer, night=night),
        gm.sink(str(sink), keep=["customer"], index="customer"),
        deliver=[gm.to(store, key="customer") for store in stores],
    ).run(restart=night > 1)
    return time.perf_counter() - begun


# ---------------------------------------------------------------- reading, in a process of its own


def read(place: str, count: int) -> None:
    """Ask for customers until standard input ends; print a line before that, and then what was seen, as JSON."""
    import threading

    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    drawn, nights, mixed, back, last, took = np.random.default_rng(), Counter(), 0, 0, 0, []
    with gm.lookup(place) as scores:
        scores.get(0)
        print("reading", flush=True)
        while not ended.is_set():
            asked = drawn.integers(count, size=TOGETHER).tolist()
            begun = time.perf_counter()
            rows = scores.get_many(asked)
            took.append(time.perf_counter() - begun)
            found = {row and row["night"] for row in rows}
            whole = len(found) == 1 and [row and row["customer"] for row in rows] == asked
            mixed += not whole
            if whole:
                (night,) = found
                back += night < last
                nights[night] += 1
                last = night
    p50, p99 = np.percentile(np.array(took) * 1000, [50, 99])
    print(json.dumps({"nights": nights, "mixed": mixed, "back": back, "p50": p50, "p99": p99}))


@contextlib.contextmanager
def reader(place: str, count: int, told: dict[str, dict]) -> Iterator[None]:
    """Someone who looks up at a place meanwhile; what they saw is put into `told`."""
    command = [sys.executable, __file__, "--read", place, "--customers", str(count)]
    running = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert running.stdout is not None and running.stdout.readline(), "the reader could not begin"
        yield
    finally:
        said, _ = running.communicate("")
    told[place] = json.loads(said)


# ---------------------------------------------------------------- the whole pattern


@contextlib.contextmanager
def redis() -> Iterator[list[str]]:
    """The address of a Redis server, started here; none if there is no such program."""
    program = shutil.which("redis-server")
    if program is None:
        print("there is no redis-server here (Debian's package of that name), so the scores go to LMDB alone")
        yield []
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        server = subprocess.Popen(
            [program, "--port", str(port), "--bind", "127.0.0.1", "--save", ""], cwd=folder, stdout=subprocess.DEVNULL
        )
        try:
            for _ in range(200):
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                    break
                time.sleep(0.05)
            yield [f"redis://127.0.0.1:{port}/0#scores"]
        finally:
            server.terminate()
            server.wait(10)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--customers", type=int, default=200_000)
    parser.add_argument("--nights", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=2, help="of day between two nights")
    parser.add_argument("--read", metavar="PLACE", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.read:
        read(given.read, given.customers)
        return 0
    told: dict[str, dict] = {}
    with tempfile.TemporaryDirectory() as made, redis() as servers, contextlib.ExitStack() as readers:
        folder = Path(made)
        customers(folder / "customers.parquet", given.customers)
        stores = [*servers, f"lmdb://{folder}/scores.lmdb"]
        for night in range(1, given.nights + 1):
            seconds = scored(folder / "customers.parquet", folder / "scores", night, stores)
            print(f"night {night}: {given.customers:,} customers scored and delivered in {seconds:.1f} s", flush=True)
            if night == 1:
                for place in (*stores, str(folder / "scores")):
                    readers.enter_context(reader(place, given.customers, told))
            time.sleep(given.seconds)
        readers.close()
        return summary(told, str(folder))


def summary(told: dict[str, dict], folder: str) -> int:
    """Print what the readers saw; 1 if any of it may not be."""
    print(f"\nanswers of {TOGETHER} customers each, looked up meanwhile:")
    for place, seen in told.items():
        nights = ", ".join(f"{count:,} of night {night}" for night, count in sorted(seen["nights"].items()))
        shown = place.replace(f"{folder}/", "")
        print(f"  {shown}: {nights}; {seen['p50']:.2f} ms each, 99 of 100 under {seen['p99']:.2f} ms")
    mixed, back = (sum(seen[what] for seen in told.values()) for what in ("mixed", "back"))
    if mixed or back:
        print(f"{mixed} answers were of more than one night, and {back} of an earlier one than the answer before")
        return 1
    print("every answer was of one night alone, and none of an earlier night than the answer before it")
    return 0


if __name__ == "__main__":
    sys.exit(main())
