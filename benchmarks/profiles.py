"""What profiles cost a run of a cheap function: without any (for which the code is changed), with the counts that every
run makes, and with the values of one, two and three columns (`gates: {drift: …}`). Runs take turns; CPU seconds of all
processes are what counts, as other work on the machine does not change them much.

python benchmarks/profiles.py [--rows 3000000] [--rounds 5]
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RUN = """
import sys
import gristmill as gm, fns
if sys.argv[2] == "none":
    from gristmill.profiles.columns import Profiling
    Profiling.add = lambda self, rows: None
drift = {name: {} for name in sys.argv[2].split(",") if name not in ("none", "counts")}
gm.run(gm.Job("rows.parquet", fns.score, gm.sink(sys.argv[1], keep=["id"]), workers=2, gates={"drift": drift or None}))
"""
FUNCTIONS = """
import numpy as np

LABELS = np.array(["low", "middle", "high"])


def score(batch):
    made = batch["x"] * np.float32(0.5) + batch["y"]
    return {"score": made, "label": LABELS[(made > 0.5).astype(int) + (made > 1)]}
"""
WAYS = ("none", "counts", "score", "score,label", "score,label,x")


def used(folder: Path, way: str, number: int) -> tuple[float, float]:
    """Wall seconds and CPU seconds of a run in a fresh process, its workers included."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    env = {**os.environ, "GRISTMILL_FORK": "1", "PYTHONPATH": os.pathsep.join([str(folder), *filter(None, sys.path)])}
    subprocess.run([sys.executable, "-c", RUN, f"out-{number}-{way}", way], cwd=folder, env=env, check=True,
                   capture_output=True)  # fmt: skip
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=3_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, r = Path(name), np.random.default_rng(1)
        (folder / "fns.py").write_text(FUNCTIONS)
        columns = {n: r.random(asked.rows, dtype=np.float32) for n in "xy"}
        pq.write_table(pa.table({"id": range(asked.rows), **columns}), folder / "rows.parquet", row_group_size=200_000)
        times: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
        for number in range(asked.rounds):
            for way in WAYS:
                times[way].append(used(folder, way, number))
        least = min(cpu for _, cpu in times["none"])
        print(f"{asked.rows:,} rows, {asked.rounds} rounds\n{'profile of':<16} wall s   CPU s   more")
        for way, found in times.items():
            wall, cpu = statistics.median(w for w, _ in found), min(c for _, c in found)
            print(f"{way:<16} {wall:6.2f}  {cpu:6.2f}  {cpu / least - 1:+6.1%}")


if __name__ == "__main__":
    main()
