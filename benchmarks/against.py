"""This code against that of another checkout, in alternation, whole processes: what a change costs.

    git worktree add /tmp/before COMMIT
    python benchmarks/against.py /tmp/before/src [--rounds 7] [--only cheap|text|small|map|resume] [--shards 100000]

Prints for each job the medians of wall seconds, and the median of the rounds' ratios (now / before) with the least and
the most; and the same of the processor time of all its processes, which scatters less on a machine that others use.

`resume` (only if it is named: it takes minutes) is a run of many shards of a row each that was killed before its last
ten, by its own code on either side: going on, and publishing.
"""

from __future__ import annotations

import argparse
import compileall
import hashlib
import os
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

HERE = Path(__file__).parent
PEERS = HERE / "peers"
MAP = "import gristmill as gm; from operator import neg; assert sum(gm.map(neg, list(range(10_000)))) < 0"


def jobs(data: Path) -> dict[str, list[str]]:
    """Commands by name; `{out}` is a folder that is not there yet."""
    sys.path.insert(0, str(HERE.parent / "tests"))
    import kit

    def gristmill(*args: str) -> list[str]:
        return [sys.executable, "-m", "gristmill", *args, "{out}", "--progress", "off", "--json"]

    scored = ["--fn", "softmax:predict", "--keep", "id"]
    return {
        "cheap": [*gristmill("apply", str(data / "features.parquet")), *scored],
        "text": [*gristmill("embed", str(data / "texts.parquet")), "--text", "text", "--model", str(kit.minilm())],
        "small": [*gristmill("apply", str(data / "small.parquet")), *scored],
        "map": [sys.executable, "-c", MAP],
    }


Taken = tuple[float, float]


def once(command: list[str], source: Path, folder: Path, env: dict[str, str]) -> Taken:
    """Wall seconds of one run into a new `out`, and those of processors. Raises CalledProcessError."""
    out = folder / "out"
    shutil.rmtree(out, ignore_errors=True)
    return _timed(command, source, folder, env)


def _timed(command: list[str], source: Path, folder: Path, env: dict[str, str]) -> Taken:
    os.sync()
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(
        [part.format(out=folder / "out") if part == "{out}" else part for part in command],
        check=True, capture_output=True, cwd=folder, env=_env(source, env),
    )  # fmt: skip
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _env(source: Path, env: dict[str, str]) -> dict[str, str]:
    return {**env, "PYTHONPATH": os.pathsep.join([str(source), str(PEERS)])}


class Stopped:
    """Runs of many shards that were killed near their end, one by each source, copied for each that goes on. In memory:
    a hundred thousand fsyncs measure a disk.
    """

    def __init__(self, folder: Path, shards: int, env: dict[str, str]) -> None:
        import numpy as np
        import pyarrow as pa
        import pyarrow.parquet as pq

        self._folder, self._shards, self._env = folder, shards, env
        pq.write_table(pa.table({"x": np.arange(float(shards))}), folder / "rows.parquet")

    def once(self, source: Path) -> Taken:
        """As `once`, going on with what was killed."""
        kept = self._folder / f"killed-{hashlib.sha256(bytes(source)).hexdigest()[:8]}"
        command = [sys.executable, str(PEERS / "ones.py"), "rows.parquet", "{out}"]
        out = self._folder / "out"
        shutil.rmtree(out, ignore_errors=True)
        if not kept.exists():
            env = {**_env(source, self._env), "STOP_AT": str(self._shards - 10)}
            killed = subprocess.run(
                [*command[:-1], str(out)], check=False, capture_output=True, cwd=self._folder, env=env
            )
            if killed.returncode != -signal.SIGKILL:
                raise RuntimeError(f"it was to be killed, and ended with {killed.returncode}: {killed.stderr.decode()}")
            out.rename(kept)
        subprocess.run(["cp", "-a", str(kept), str(out)], check=True)
        return _timed(command, source, self._folder, self._env)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="the src folder of the other checkout")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", choices=["cheap", "text", "small", "map", "resume"])
    parser.add_argument("--shards", type=int, default=100_000, help="of the run that goes on")
    parser.add_argument("--data", type=Path, default=Path(tempfile.gettempdir()) / "gristmill-bench")
    given = parser.parse_args()
    now, before = HERE.parent / "src", given.before.resolve()
    for source in (now, before):
        compileall.compile_dir(source, quiet=2)
    env = {**os.environ, "BENCH_DATA": str(given.data), "HF_HUB_OFFLINE": "1"}
    subprocess.run([sys.executable, str(PEERS / "data.py"), str(given.data)], check=True, env=env)
    _small(given.data)
    for name, command in jobs(given.data).items():
        if given.only in (None, name):
            with tempfile.TemporaryDirectory(prefix="against-") as folder:
                compare(name, now, before, given.rounds, partial(once, command, folder=Path(folder), env=env))
    if given.only == "resume":
        memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        with tempfile.TemporaryDirectory(prefix="against-", dir=memory) as folder:
            compare("resume", now, before, given.rounds, Stopped(Path(folder), given.shards, env).once)


def compare(name: str, now: Path, before: Path, rounds: int, once: Callable[..., Taken]) -> None:
    """Run both in turns, and print what they took."""
    taken: dict[Path, list[Taken]] = {now: [], before: []}
    for number in range(rounds + 1):  # the first one fills caches
        for source in (now, before)[:: 1 if number % 2 else -1]:
            figures = once(source=source)
            if number:
                taken[source].append(figures)
    for what, which in (("wall", 0), ("processors", 1)):
        ours, theirs = ([figures[which] for figures in taken[source]] for source in (now, before))
        ratios = sorted(a / b for a, b in zip(ours, theirs, strict=True))
        print(
            f"{name}, {what}: now {statistics.median(ours):.2f} s, before {statistics.median(theirs):.2f} s, "
            f"ratio {statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})",
            flush=True,
        )


def _small(data: Path) -> None:
    import pyarrow.parquet as pq

    if not (data / "small.parquet").exists():
        rows = next(pq.ParquetFile(data / "features.parquet").iter_batches(1000))
        pq.write_table(rows.schema.empty_table().from_batches([rows]), data / "small.parquet")


if __name__ == "__main__":
    main()
