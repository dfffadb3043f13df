"""What reliability costs: planning many files, resuming a plan of very many shards, the commits of shards of a second.

    python benchmarks/resume.py [--files 10000] [--shards 100000] [--seconds 20] [--folder DIR]

The receipts of the large plan are written directly, not by the commit function (100,000 fsyncs measure a disk, not us);
their parts are copies of one Parquet file of one row. Everything else is the real path.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import gristmill as gm
from gristmill.commit import inspections
from gristmill.commit import receipt as receipts
from gristmill.commit.generation import generations
from gristmill.commit.receipt import Part, Receipt
from gristmill.driver import planning
from gristmill.driver.run import streamed
from gristmill.files.disk import LocalFiles, sha256_of
from gristmill.observe.events import Note, Progress

ONE_ROW = (1, 1, 0, 0, 1, 0, 0, 1)  # Counts.values() of a shard of one row that was scored


def double(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A row-wise function."""
    return {"y": batch["x"] * 2.0}


def second(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A shard's work: a second."""
    time.sleep(1.0)
    return {"y": batch["x"] * 2.0}


class Phases:
    """Seconds of each phase of a run."""

    def __init__(self) -> None:
        self.begun = time.perf_counter()
        self.at: dict[str, float] = {}

    def progress(self, now: Progress) -> None:
        self.at.setdefault(now.phase, time.perf_counter() - self.begun)

    def note(self, note: Note) -> None: ...

    def close(self) -> None: ...


def peak() -> str:
    """The most memory this process has held."""
    return f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10} MB"


def plan_files(folder: Path, count: int) -> None:
    """Planning: list, read the metadata, check the schemas, fingerprint."""
    source = folder / "files"
    source.mkdir()
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"id": np.arange(10), "x": np.random.default_rng(0).random(10)}), sink)
    for n in range(count):
        (source / f"{n:06d}.parquet").write_bytes(sink.getvalue())
    begun = time.perf_counter()
    job = gm.Job(str(source), double, str(folder / "out"), workers=1)
    resolved = planning.resolve(job.spec)
    print(f"planning {count:,} Parquet files: {time.perf_counter() - begun:.1f} s, {peak()}")
    assert resolved.rows == 10 * count
    job.run()
    begun = time.perf_counter()
    known = inspections.of_generations(generations(str(folder / "out")))
    again = planning.resolve(job.spec, None, known)
    print(f"planning them again, as a resumed run does: {time.perf_counter() - begun:.1f} s, {peak()}")
    assert again.fingerprint == resolved.fingerprint


def resume_shards(folder: Path, count: int, left: int = 10) -> None:
    """A run with all receipts but `left`: resumed, scored, published."""
    pq.write_table(pa.table({"id": np.arange(count), "x": np.ones(count)}), folder / "in.parquet")
    root = folder / "shards"
    job: Any = gm.Job(str(folder / "in.parquet"), double, gm.sink(str(root), keep=["id"]), workers=0, shard_rows=1)
    running = streamed(job.spec)  # a stream gives control back after each shard
    next(running)
    running.close()
    generation = generations(str(root))[0]
    done = receipts.valid(receipts.listed(generation.receipts)[0])
    assert done is not None
    work = Path(root, done.parts[0].work)
    part, content = done.parts[0], work.read_bytes()
    for n in set(range(count - left)) - set(receipts.listed(generation.receipts)):
        path = work.with_name(f"part-{n:07d}.g1.parquet.made.tmp")
        path.write_bytes(content)
        mine = Part(os.path.relpath(path, root), f"part-{n:07d}.g1.parquet", 1, part.bytes, part.sha256, "rows")
        Path(generation.receipts, receipts.name(n)).write_bytes(Receipt(n, "made", ONE_ROW, (mine,)).dump())
    assert sha256_of(str(work)) == part.sha256
    phases = Phases()
    report = job.run(observer=phases)
    at, end = phases.at, time.perf_counter() - phases.begun
    print(
        f"resuming a plan of {count:,} shards, {left} of them left: {end:.1f} s "
        f"({at['running']:.1f} until the first shard was handed out, {at['publishing'] - at['running']:.1f} until all "
        f"receipts were read, {end - at['publishing']:.1f} for publishing {report.files:,} files), {peak()}"
    )
    begun = time.perf_counter()
    assert job.run().state == "nothing to do"
    print(f"the same command again, nothing to do: {time.perf_counter() - begun:.1f} s")


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
    """Run all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=10_000)
    parser.add_argument("--shards", type=int, default=100_000)
    parser.add_argument("--seconds", type=int, default=20)
    parser.add_argument("--folder")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=given.folder))
    try:
        plan_files(folder, given.files)
        commit_alone(folder)
        commit_overhead(folder, given.seconds)
        resume_shards(folder, given.shards)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
