"""What processes of their own for slow steps are worth: `steps_workers` 0 against 1 and more, in alternation.

    python benchmarks/steps.py [--rounds 3] [--rows 1200]

Two steps before a fast model: one that waits (10 ms a row, as for a download, one row after the other), and one that
computes in Python (about 8 ms a row, with the GIL held). One worker of one thread.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import gristmill as gm


def waits(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """10 ms a row without the processor."""
    time.sleep(0.01 * len(batch["id"]))
    return {"x": batch["id"] * 2.0}


def computes(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """About 8 ms a row of pure Python."""
    out = []
    for n in batch["id"].tolist():
        total = n
        for i in range(120_000):
            total = (total * 31 + i) % 1_000_003
        out.append(float(total))
    return {"x": np.array(out)}


def model(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Matrix products for about 2 ms a row, without the GIL."""
    weights = np.ones((512, 512), dtype=np.float32)
    for _ in range(len(batch["x"])):
        weights = weights @ weights * np.float32(1 / 512)
    return {"y": batch["x"]}


def seconds(source: Path, folder: Path, step: object, beside: int) -> float:
    """Of the whole run, once."""
    begun = time.perf_counter()
    sink = gm.sink(str(folder / f"out-{time.monotonic_ns()}"), keep=["id"])
    job = gm.Job(str(source), gm.model(model), sink, steps=[step], workers=1, threads=1, steps_workers=beside)
    report = job.run()
    assert report.rows_ok == report.rows_in
    return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=1200)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        source = folder / "in.parquet"
        pq.write_table(pa.table({"id": np.arange(given.rows)}), source, row_group_size=64)
        for step, counts in ((waits, (0, 1, 4)), (computes, (0, 1, 2))):
            found: dict[int, list[float]] = {n: [] for n in counts}
            for _ in range(given.rounds):
                for beside in counts:
                    found[beside].append(seconds(source, folder, step, beside))
            middle = {n: statistics.median(times) for n, times in found.items()}
            for beside, value in middle.items():
                ratio = middle[counts[0]] / value
                print(f"{step.__name__:9} steps_workers={beside}: {value:6.2f} s, {ratio:.2f} times as fast as without")


if __name__ == "__main__":
    sys.exit(main())
