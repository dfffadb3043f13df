"""What very many shards, and very many files, cost the driver: planning, resuming, publishing, by the real path.

    python benchmarks/scale_plan.py [--shards 1000000] [--files 100000] [--folder DIR]

and, on a simulated clock, 10^10 rows on 1,000 workers.

Each step is a process of its own, so that its seconds (of the wall, and of the CPUs with all its workers) and the most
memory it has held are its own. A shard is one row. The receipts of the workers are written directly, not by the commit
function (a million fsyncs measure a disk, not us), and their work files are names of a few equal files of one row.
"""

from __future__ import annotations

import argparse
import cProfile
import hashlib
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

NAMES = 20_000  # that one file is given: a file system has a limit (65,000 for ext4)


class Steps:
    """Prints what each step of a process has taken, since the one before."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), _cpu()

    def done(self, what: str) -> None:
        wall, cpu = time.perf_counter(), _cpu()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
        print(f"{what:<56} {wall - self._wall:7.2f} s {cpu - self._cpu:7.2f} s CPU  peak {peak:5d} MB", flush=True)
        self._wall, self._cpu = wall, cpu


class Phases:
    """An observer of a run that prints its phases."""

    def __init__(self, steps: Steps, names: dict[str, str]) -> None:
        self._steps, self._names, self._seen = steps, names, set[str]()

    def progress(self, now: Any) -> None:
        if now.phase not in self._seen:
            self._seen.add(now.phase)
            if now.phase in self._names:
                self._steps.done(self._names[now.phase])

    def note(self, note: Any) -> None:
        print(f"  ({note.text[:150]})")

    def close(self) -> None: ...


def _cpu() -> float:
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(r.ru_utime + r.ru_stime for r in used)


def double(batch: dict[str, Any]) -> dict[str, Any]:
    """A row-wise function."""
    return {"y": batch["x"] * 2.0}


def job(folder: Path) -> Any:
    """The job of the shards, in the calling process."""
    import gristmill as gm

    return gm.Job(
        str(folder / "in.parquet"), double, gm.sink(str(folder / "out"), keep=["id"]), workers=0, shard_rows=1
    )


# ---------------------------------------------------------------- steps, each in a process


def plan(folder: Path, count: int) -> None:
    """From nothing to the first shard that is committed: files listed, model tried, cut, plan written and read back."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    from gristmill.driver.run import streamed

    pq.write_table(pa.table({"id": np.arange(count), "x": np.ones(count)}), folder / "in.parquet")
    asked, steps = job(folder), Steps()
    running = streamed(asked.spec)
    next(running)
    steps.done(f"plan: {count:,} shards, until the first is committed")
    running.close()


def fill(folder: Path, count: int) -> None:
    """What the workers would write: a receipt and a work file a shard."""
    from gristmill.commit import receipt as receipts
    from gristmill.commit.generation import generations

    generation = generations(str(folder / "out"))[0]
    made = receipts.valid(receipts.listed(generation.receipts)[0])
    assert made is not None
    (part,) = made.parts
    content, steps = (folder / "out" / part.work).read_bytes(), Steps()
    stored = replace(made, shard=7).dump().replace(b"part-0000000", b"part-%07d").replace(b'"shard": 7', b'"shard": %d')
    body = json.loads(stored.replace(b"%d", b"7"))
    old = body.pop("checksum").encode()
    sealed = json.dumps(body, sort_keys=True, separators=(",", ":")).encode().replace(b'"shard":7', b'"shard":%d')
    for n in range(1, count):
        source = f"{folder}/content-{n // NAMES}"
        if n == 1 or n % NAMES == 0:
            Path(source).write_bytes(content)
        os.link(source, f"{folder}/out/{part.work}".replace("part-0000000", f"part-{n:07d}"))
        checksum = hashlib.sha256(sealed % (n, n, n)).hexdigest().encode()
        with open(f"{generation.receipts}/{receipts.name(n)}", "wb", buffering=0) as out:
            out.write((stored % (n, n, n)).replace(old, checksum))
    steps.done("(receipts and work files written, for the workers)")


def resume(folder: Path, count: int, left: int = 10) -> None:
    """The job again, with all receipts but a few: read, the rest scored, published."""
    from gristmill.commit.generation import generations

    generation = generations(str(folder / "out"))[0]
    for n in range(count - left, count):
        Path(generation.receipts, f"{n:07d}.json").unlink()
    asked, steps = job(folder), Steps()
    named = {
        "running": f"resume: {count:,} receipts read, until a shard is handed out",
        "publishing": f"resume: the other {left} shards scored, all files there",
        "done": "publish: linked, sealed, listed, settled",
    }
    report = asked.run(observer=Phases(steps, named))
    steps.done("publish: delivered, reported")
    assert report.counts.ok == count == report.files, report.counts


def again(folder: Path, count: int) -> None:
    """The same command once more: nothing to do."""
    asked, steps = job(folder), Steps()
    assert asked.run().state == "nothing to do"
    steps.done("the same command again, nothing to do")


def files(folder: Path, count: int) -> None:
    """Planning of very many files: listed, footers read, types compared, fingerprinted; and again, once scored."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    import gristmill as gm
    from gristmill.commit import inspections
    from gristmill.commit.generation import generations
    from gristmill.driver import planning

    source = folder / "files"
    source.mkdir()
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"id": np.arange(10), "x": np.random.default_rng(0).random(10)}), sink)
    for n in range(count):
        (source / f"{n:06d}.parquet").write_bytes(sink.getvalue())
    out = str(folder / "files-out")  # "out" is that of the shards
    asked, steps = gm.Job(str(source), double, out, workers=1), Steps()
    resolved = planning.resolve(asked.spec)
    steps.done(f"plan: {count:,} Parquet files listed, read and checked")
    assert resolved.rows == 10 * count
    asked.run()
    steps.done("(scored)")
    found = planning.resolve(asked.spec, None, inspections.of_generations(generations(out)))
    steps.done("plan: these files again, as a resumed run does")
    assert found.fingerprint == resolved.fingerprint


def simulate(folder: Path, _: int, workers: int = 1000, rows: int = 10**10) -> None:
    """A run of so many rows on so many workers, with a clock that is simulated and the feed and tally of real runs:
    what the driver takes for each event, how long after the last row would be ideal the run ends, and what an object
    store is asked. A worker dies in one of a thousand shards.
    """
    import heapq
    import random

    import numpy as np
    import pyarrow as pa

    from gristmill.driver.shardfeed import ShardFeed
    from gristmill.driver.tally import Tally
    from gristmill.process.messages import Death, Item, Outcome, Started
    from gristmill.shards import shard
    from gristmill.shards.shard import Selection, ShardTable
    from gristmill.shards.sourcefiles import FileInfo, SourceFile
    from gristmill.worker.recipe import Task

    chance, a_second = random.Random(7), 10_000.0  # rows of one worker
    whole = SourceFile("x.parquet", rows * 100, "1")
    info = FileInfo(whole, rows, np.array([0, rows]), True, pa.schema([]), np.array([rows]))
    each = min(shard.MOST_ROWS, rows // (shard.SHARDS_PER_WORKER * workers))
    steps = Steps()
    table = ShardTable(shard.cut([info], Selection.everything([info]), each, workers), [whole], np.array([rows]))
    feed, tally, events = ShardFeed(workers), Tally(), list[tuple[float, int, str, Item | None]]()
    feed.begin(lambda number: Task("score", table[number]), range(len(table)))
    tally.begin(table, None)
    held, busy, seconds, answers, deaths = dict[str, list[Item]](), 0.0, 0.0, list[float](), 0

    def give(worker: str, now: float) -> None:
        while len(held[worker]) < 2 and isinstance(item := feed.take(worker), Item):
            held[worker].append(item)
            if len(held[worker]) == 1:
                begin(worker, now)

    def begin(worker: str, now: float) -> None:
        item = held[worker][0]
        takes = (item.value.shard.rows or 0) / a_second * chance.uniform(0.9, 1.2)
        heapq.heappush(events, (now + takes, len(answers), worker, item))

    def hear(event: Any) -> None:
        feed.on(event)
        tally.hear(event)

    for n in range(workers):
        held[f"w{n}"] = []
        hear(Started(f"w{n}"))
        give(f"w{n}", 0.0)
    while events:
        seconds, _, worker, item = heapq.heappop(events)
        assert item is not None
        begun, had = time.perf_counter(), [i.key for i in held[worker]]
        if died := chance.random() < 0.001:
            deaths, held[worker] = deaths + 1, []
            hear(Death(worker, tuple(had), lost="its machine was taken away"))
            hear(Started(worker))
        else:
            number, _, _ = item.key.partition(".")
            size = table.rows_of(int(number)) or 0
            busy += size / a_second
            held[worker].pop(0)
            counts = (size, size, 0, 0, size, 0, 0, size)
            value = {
                "shard": int(number),
                "counts": counts,
                "figures": {"model_seconds": 1.0},
                "errors": {},
                "flying": 0,
            }
            hear(Outcome(worker, item.key, value))
            if held[worker]:
                begin(worker, seconds)
        give(worker, seconds)
        if died:  # what it gave back may be for one that has nothing to do
            for other in [w for w in held if not held[w]]:
                give(other, seconds)
        answers.append(time.perf_counter() - begun)
    assert len(feed.committed) == len(table) and tally.sums().counts.ok == rows and feed.fatal is None
    steps.done(f"simulated: {rows:.0e} rows, {len(table):,} shards, {workers:,} workers, {deaths} deaths")
    puts, reads = 3 * len(table), 3 * len(table)
    print(
        f"  {seconds / 3600:.1f} h, {seconds / (busy / workers):.3f} of all workers always at work; the driver needs "
        f"{np.mean(answers) * 1e6:.0f} microseconds an event, {len(answers) / seconds:.1f} events a second; an object "
        f"store gets {puts:,} PUTs ({puts / seconds:.0f} a second), {reads:,} reads, and "
        f"{4 * -(-len(table) // 1000):,} listings: {puts * 5e-6 + reads * 0.4e-6:.2f} dollars"
    )


STEPS: dict[str, Callable[[Path, int], None]] = {f.__name__: f for f in (plan, fill, resume, again, files, simulate)}


def main() -> None:
    """Run all steps, or the one that this process is for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, default=1_000_000)
    parser.add_argument("--files", type=int, default=100_000)
    parser.add_argument("--folder", help="where to write; a temporary folder of its own is made in it")
    parser.add_argument("--profile", help="write what cProfile finds of each step to files that begin with this")
    parser.add_argument("--step", choices=STEPS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.step:
        profile = cProfile.Profile()
        step, count = STEPS[given.step], given.files if given.step == "files" else given.shards
        profile.runcall(step, Path(given.folder), count) if given.profile else step(Path(given.folder), count)
        if given.profile:
            profile.dump_stats(f"{given.profile}.{given.step}")
        return
    folder = tempfile.mkdtemp(prefix="scale-", dir=given.folder)
    steps = [
        *(["simulate"] if given.shards else []),
        *(["files"] if given.files else []),
        *(["plan", "fill", "resume", "again"] if given.shards else []),
    ]
    try:
        for step in steps:
            counts = ["--shards", str(given.shards), "--files", str(given.files)]
            counts += ["--profile", given.profile] if given.profile else []
            subprocess.run([sys.executable, __file__, "--step", step, "--folder", folder, *counts], check=True)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
