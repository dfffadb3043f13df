"""A published result brought to tables of lakes, against the quickest way by hand to write the same rows there.

    python benchmarks/lakes.py [--rows 1000000] [--vectors 100000] [--rounds 5]

Rows are (id, label, score), vectors 384 floats. By hand is the bulk writer of each library, over the sink's Parquet
files, in turns with `gm.deliver`; the sink is scored before, and not timed. Each writes a new table each time.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

import gristmill as gm


def labelled(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A label and a score."""
    labels = np.array(["negative", "neutral", "positive"])
    return {"label": labels[batch["id"] % 3], "score": (batch["id"] % 1000) / 1000}


def embedded(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """384 floats."""
    made = np.random.default_rng(int(batch["id"][0])).normal(size=(len(batch["id"]), 384))
    return {"v": made.astype(np.float32)}


def by_hand(store: str, files: str, folder: Path) -> None:
    """The rows of Parquet files in a new table, as the store's library writes many rows."""
    rows = ds.dataset(files, format="parquet").to_table()
    if store == "delta":
        from deltalake import write_deltalake

        write_deltalake(folder / "rows", rows)
    elif store == "lance":
        import lance

        lance.write_dataset(rows, folder / "rows.lance")
    else:
        catalog(folder).create_table("n.rows", rows.schema).append(rows)


def catalog(folder: Path) -> object:
    """A catalog in a SQLite file, with a namespace."""
    from pyiceberg.catalog import load_catalog

    made = load_catalog("c", type="sql", uri=f"sqlite:///{folder}/c.sqlite", warehouse=f"file://{folder}/lake")
    made.create_namespace_if_not_exists("n")
    return made


def delivered(store: str, sink: str, folder: Path) -> None:
    """The same by a delivery."""
    if store == "iceberg":
        catalog(folder)
        query = f"type=sql&uri=sqlite:///{folder}/c.sqlite&warehouse=file://{folder}/lake"
        gm.deliver(sink, f"iceberg://c/n.rows?{query}")
    else:
        gm.deliver(sink, f"delta://{folder}/rows" if store == "delta" else f"lance://{folder}/db#rows")


def seconds(work: Callable[[], None]) -> float:
    """Of some work, its files on the disk."""
    os.sync()
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--vectors", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        for what, count, model in (("rows", given.rows, labelled), ("vectors", given.vectors, embedded)):
            source, sink = folder / f"{what}.parquet", str(folder / what)
            pq.write_table(pa.table({"id": np.arange(count)}), source, row_group_size=50_000)
            gm.apply(str(source), sink, fn=model, keep=["id"])
            files = len(list(Path(sink).glob("*.parquet")))
            print(f"{count:,} {what} in {files} files")
            for store in ("delta", "iceberg", "lance"):
                found: dict[str, list[float]] = {"by hand": [], "delivery": []}
                for _ in range(given.rounds):
                    for way, work in (("by hand", by_hand), ("delivery", delivered)):
                        at = folder / "store"
                        at.mkdir()
                        given_to = sink if way == "delivery" else [str(p) for p in Path(sink).glob("*.parquet")]
                        found[way].append(seconds(lambda w=work, s=store, g=given_to, a=at: w(s, g, a)))
                        shutil.rmtree(at)
                hand, ours = (statistics.median(found[way]) for way in ("by hand", "delivery"))
                ranges = (f"{min(found[way]):.2f} to {max(found[way]):.2f}" for way in ("by hand", "delivery"))
                print(f"{store:8} by hand {hand:.2f} s ({next(ranges)}), delivery {ours:.2f} s ({next(ranges)}): "
                      f"{ours / hand:.2f}")  # fmt: skip


if __name__ == "__main__":
    main()
