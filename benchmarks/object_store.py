"""What a sink in an object store costs beside one on a local disk, and how long it takes to list very many receipts.

    python benchmarks/object_store.py [--keys 100000] [--rows 200000]

Against a real S3 server on this machine (SeaweedFS, which `make install` brings): what is measured is our side and that
server's, without a network between them.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import gristmill as gm
from gristmill.files.roots import opened

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import kit
from s3server import S3Server


def double(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A row-wise function that takes some time, so that uploads have something to overlap with."""
    time.sleep(0.2)
    return {"twice": batch["x"] * 2}


def listing(server: S3Server, keys: int) -> None:
    """Receipts are listed whenever a run resumes."""
    root, files = opened("s3://box/many", server.storage())
    with ThreadPoolExecutor(32) as pool:
        list(pool.map(lambda n: files.write_over(f"{root}/receipts/{n:07d}.json", b"{}"), range(keys)))
    taken = []
    for _ in range(3):
        begun = time.perf_counter()
        assert len(files.names(f"{root}/receipts")) == keys
        taken.append(time.perf_counter() - begun)
    print(f"{keys:,} keys listed in {statistics.median(taken):.1f} s (median of 3)")


def jobs(server: S3Server, folder: Path, rows: int) -> None:
    """One job on both sinks, in turns: from the command to `_SUCCESS`."""
    pq.write_table(pa.table({"x": np.random.default_rng(0).random(rows)}), folder / "in.parquet")
    taken: dict[str, list[float]] = {"disk": [], "store": []}
    for number in range(3):
        sinks = {
            "disk": gm.sink(str(folder / f"out{number}")),
            "store": gm.sink(f"s3://box/out{number}", storage=server.storage()),
        }
        for where, sink in sinks.items():
            begun = time.perf_counter()
            sizes = {"shard_rows": rows // 20, "batch_rows": rows // 40}
            job = gm.Job(str(folder / "in.parquet"), double, sink, workers=2, **sizes)
            assert job.run().rows_ok == rows
            taken[where].append(time.perf_counter() - begun)
    disk, store = (statistics.median(taken[w]) for w in ("disk", "store"))
    print(f"{rows:,} rows in 20 shards: {disk:.2f} s to a disk, {store:.2f} s to the store ({store / disk:.2f} ×)")


def main() -> None:
    """Both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, default=100_000)
    parser.add_argument("--rows", type=int, default=200_000)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        server = S3Server(kit.weed(), Path(name))
        with contextlib.ExitStack() as stack:
            stack.callback(server.stop)
            jobs(server, Path(name), given.rows)
            listing(server, given.keys)


if __name__ == "__main__":
    main()
