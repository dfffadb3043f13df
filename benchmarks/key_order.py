"""Rows that come in the order of their key, against rows in any order: deliveries to stores, and lookups there.

    python benchmarks/key_order.py [--rows 1000000] [--rounds 3]

A sink as it comes and one with `sort_by` and `files=1` are delivered to new stores in turns. Printed for each are the
medians of a delivery (s), of a lookup of one key (µs), and of 100,000 keys at once (s).
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import gristmill as gm

STORES = {
    "duckdb": ("duckdb://{}.duckdb#t", 100),
    "sqlite": ("sqlite://{}.sqlite#t", 2000),
    "lmdb": ("lmdb://{}", 2000),
}


def scored(batch: dict[str, Any]) -> dict[str, Any]:
    """Two columns of each row."""
    return {"label": batch["label"], "score": batch["score"]}


def seconds(work: Callable[[], Any]) -> float:
    """How long it takes."""
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def measured(sink: Path, uri: str, ids: int, looks: int) -> tuple[float, float, float]:
    """A delivery, a lookup of one, and lookups of many at once."""
    took = seconds(lambda: gm.deliver(str(sink), uri, key="id"))
    with gm.lookup(uri, key="id") as rows:
        rows.get(1)
        each = [seconds(lambda key=key: rows.get(key)) for key in random.sample(range(ids), looks)]  # type: ignore[misc]
        many = seconds(lambda: rows.get_many(random.sample(range(ids), min(ids, 100_000))))
    return took, statistics.median(each) * 1e6, many


def main() -> None:
    """Print a line for each store and order."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="order-") as name:
        folder, order = Path(name), np.random.default_rng(0).permutation(given.rows)
        table = pa.table({"id": order, "label": ["abc"] * given.rows, "score": order / 7})
        pq.write_table(table, folder / "rows.parquet")
        for sink, how in (("plain", {}), ("sorted", {"sort_by": ["id"], "files": 1})):
            target = gm.sink(str(folder / sink), keep=["id"], **how)  # type: ignore[arg-type]
            job = gm.Job(str(folder / "rows.parquet"), gm.model(scored), target, workers=1)
            print(f"{sink}: the run takes {seconds(job.run):.2f} s")
        for store, (uri, looks) in STORES.items():
            found: dict[str, list[tuple[float, float, float]]] = {"plain": [], "sorted": []}
            for n in range(given.rounds):
                for sink, figures in found.items():
                    at = uri.format(folder / f"{sink}-{n}-{store}")
                    figures.append(measured(folder / sink, at, given.rows, looks))
            for sink, figures in found.items():
                took, one, many = (statistics.median(column) for column in zip(*figures, strict=True))
                print(f"{store}, {sink}: {took:.2f} s, a key {one:.1f} µs, 100,000 keys {many:.2f} s")


if __name__ == "__main__":
    main()
