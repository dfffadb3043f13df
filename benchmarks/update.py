"""What an update costs: a million rows of which 2 % changed, against scoring all and against reading and writing alone.

    python benchmarks/update.py [--rows 1000000] [--changed 0.02] [--width 384] [--key] [--shuffled] [--folder DIR]

The model is a function that is told to take its time (--cost, microseconds a row), so that what is saved shows; reading
and writing alone is the same job, committed and verified as ever, with answers that take none. Each run is a process of
its own; memory is that of its largest process.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

FILES = 16

RUN = """
import json, os, resource, sys, time
import numpy as np
import gristmill as gm

told = json.loads(sys.argv[1])

def vectors(batch):
    rows = len(batch["text"])
    with open(told["asked"], "a") as out:
        out.write(f"{rows}\\n")
    time.sleep(told["cost"] * rows / 1e6)
    firsts = np.fromiter((hash(t) & 0xffff for t in batch["text"]), np.float32, rows)
    return {"vector": np.arange(told["width"], dtype=np.float32)[None, :] * 1e-3 + firsts[:, None]}

model = gm.model(vectors, takes={"text": "string"})
begun = time.perf_counter()
report = gm.Job(told["source"], model, gm.sink(told["sink"], keep=["id", "price"]), update=told["update"],
                workers=told["workers"]).run()
seconds = time.perf_counter() - begun
cpu = sum(r.ru_utime + r.ru_stime for r in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)))
peak = max(resource.getrusage(w).ru_maxrss for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)) >> 10
print(json.dumps({"seconds": seconds, "cpu": cpu, "peak": peak, "updated": dict(report.updated), "ok": report.rows_ok}))
"""


def put(folder: Path, rows: int, changed: set[int], order: np.ndarray, version: int) -> None:
    """The source: rows in this order, those that `changed` with another text."""
    folder.mkdir(exist_ok=True)
    rng = np.random.default_rng(0)
    words = np.array([f"word{n}" for n in range(5000)])
    picks = rng.integers(0, len(words), (rows, 12))
    for n, part in enumerate(np.array_split(order, FILES)):
        texts = [
            f"{i} {' '.join(words[picks[i]])}" + (f" version {version}" if i in changed else "") for i in part.tolist()
        ]
        table = pa.table({"id": part, "text": texts, "price": part * 1.5})
        pq.write_table(table, folder / f"{n:02}.parquet", row_group_size=131_072)


def run(folder: Path, given: argparse.Namespace, **told: Any) -> dict[str, Any]:
    """One run in a process of its own."""
    asked = folder / "asked"
    asked.unlink(missing_ok=True)
    update: Any = {"key": ["id"]} if given.key else True
    about = {"asked": str(asked), "width": given.width, "workers": given.workers, "source": str(folder / "in")}
    about |= {"update": update, "cost": given.cost, **told}
    (folder / "run.py").write_text(RUN)
    env = {**os.environ, "PYTHONHASHSEED": "0"}
    done = subprocess.run(
        [sys.executable, str(folder / "run.py"), json.dumps(about)],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    rows = sum(map(int, asked.read_text().split())) if asked.exists() else 0
    return {**json.loads(done.stdout.splitlines()[-1]), "asked": rows}


def plain(folder: Path) -> tuple[float, float]:
    """Seconds in which pyarrow alone reads the input and what is published, and writes that again, in one thread."""
    begun, cpu = time.perf_counter(), time.process_time()
    for path in sorted((folder / "in").glob("*.parquet")):
        for batch in pq.ParquetFile(path).iter_batches():
            del batch
    for path in sorted((folder / "out").glob("*.parquet")):
        file = pq.ParquetFile(path)
        with pq.ParquetWriter(
            folder / "plain.parquet", file.schema_arrow, compression="zstd", use_dictionary=False
        ) as w:
            for batch in file.iter_batches():
                w.write_batch(batch)
    os.unlink(folder / "plain.parquet")
    return time.perf_counter() - begun, time.process_time() - cpu


def line(name: str, found: dict[str, Any], against: dict[str, Any] | None = None) -> None:
    """Print one run."""
    ratios = ["" if against is None else f" ({found[what] / against[what]:.2f} x)" for what in ("seconds", "cpu")]
    took = f"{found['seconds']:7.2f} s{ratios[0]}, of CPU {found['cpu']:.2f} s{ratios[1]}"
    asked = f"model asked for {found['asked']:,} rows; peak {found['peak']} MB"
    print(f"{name:<28} {took}; {asked} {found['updated'] or ''}", flush=True)


def main() -> None:
    """Run all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--changed", type=float, default=0.02)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--cost", type=float, default=0.0)
    parser.add_argument("--key", action="store_true", help="match rows by id, not by their place")
    parser.add_argument("--shuffled", action="store_true", help="all rows have moved")
    parser.add_argument("--folder")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=given.folder))
    try:
        order = np.arange(given.rows)
        put(folder / "in", given.rows, set(), order, 0)
        line("all rows, first night", run(folder, given, sink=str(folder / "out")))
        rng = np.random.default_rng(1)
        changed = set(rng.choice(given.rows, int(given.rows * given.changed), replace=False).tolist())
        put(folder / "in", given.rows, changed, rng.permutation(order) if given.shuffled else order, 1)
        alone = run(folder, given, sink=str(folder / "alone"), cost=0.0, update=None)
        line("reading and writing alone", alone)
        took = plain(folder)
        print(f"{'the same by pyarrow alone':<28} {took[0]:7.2f} s, of CPU {took[1]:.2f} s; one thread", flush=True)
        line("an update", run(folder, given, sink=str(folder / "out")), alone)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
