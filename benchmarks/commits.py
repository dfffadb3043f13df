"""What a commit costs: that of a receipt alone, and of a run whose shards take a second each.

    python benchmarks/commits.py [--seconds 20] [--folder DIR]

`scale_plan.py` prints what planning and resuming take.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import gristmill as gm
from gristmill.commit import receipt as receipts
from gristmill.commit.receipt import Part, Receipt
from gristmill.files.disk import LocalFiles

ONE_ROW = (1, 1, 0, 0, 1, 0, 0, 1)  # Counts.values() of a shard of one row that was scored


def second(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A shard's work: a second."""
    time.sleep(1.0)
    return {"y": batch["x"] * 2.0}


def commit_overhead(folder: Path, seconds: int) -> None:
    """Shards whose model takes a second each: how much more the run takes, from the first receipt to `_SUCCESS`."""
    rows = 1000 * (seconds + 1)
    pq.write_table(
        pa.table({"id": np.arange(rows), "x": np.random.default_rng(0).random(rows)}), folder / "in2.parquet"
    )
    root = folder / "seconds"
    sink = gm.sink(str(root), keep=["id"])
    gm.Job(str(folder / "in2.parquet"), second, sink, workers=1, shard_rows=1000, batch_rows=1000).run()
    times = sorted(p.stat().st_mtime for p in root.glob("_gristmill/g*/receipts/*.json"))
    times = times[1:]  # a part of the first shard was scored by the probe
    published = (root / "_SUCCESS").stat().st_mtime
    ideal = len(times) - 1
    print(
        f"{len(times)} shards of a second: {times[-1] - times[0]:.2f} s from the first receipt to the last instead of "
        f"{ideal}, {published - times[-1]:.2f} s until published: {(published - times[0]) / ideal - 1:.2%} over"
    )


def commit_alone(folder: Path, count: int = 200) -> None:
    """The commit function alone: a receipt written, synced, linked, its folder synced."""
    files, took = LocalFiles(), []
    for n in range(count):
        part = Part("work", f"part-{n:07d}.g1.parquet", 1, 1, "0" * 64, "rows")
        begun = time.perf_counter()
        receipts.commit(files, str(folder / "receipts"), Receipt(n, "nonce", ONE_ROW, (part,)))
        took.append(time.perf_counter() - begun)
    print(f"creating a receipt: {statistics.median(took) * 1e3:.1f} ms (median of {count})")


def main() -> None:
    """Run both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=20)
    parser.add_argument("--folder")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=given.folder))
    try:
        commit_alone(folder)
        commit_overhead(folder, given.seconds)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
