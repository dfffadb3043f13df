"""This code against that of another checkout, in alternation, whole processes: what a change costs.

    git worktree add /tmp/before COMMIT
    python benchmarks/against.py /tmp/before/src [--rounds 7] [--only cheap|text|small|map]

Prints for each job the medians, and the median of the rounds' ratios (now / before) with the least and the most.
"""

from __future__ import annotations

import argparse
import compileall
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
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


def once(command: list[str], source: Path, folder: Path, env: dict[str, str]) -> float:
    """Wall seconds of one run. Raises CalledProcessError."""
    out = folder / "out"
    shutil.rmtree(out, ignore_errors=True)
    os.sync()
    paths = os.pathsep.join([str(source), str(PEERS)])
    began = time.perf_counter()
    subprocess.run(
        [part.format(out=out) if part == "{out}" else part for part in command],
        check=True, capture_output=True, cwd=folder, env={**env, "PYTHONPATH": paths},
    )  # fmt: skip
    return time.perf_counter() - began


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="the src folder of the other checkout")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", choices=["cheap", "text", "small", "map"])
    parser.add_argument("--data", type=Path, default=Path(tempfile.gettempdir()) / "gristmill-bench")
    given = parser.parse_args()
    now, before = HERE.parent / "src", given.before.resolve()
    for source in (now, before):
        compileall.compile_dir(source, quiet=2)
    env = {**os.environ, "BENCH_DATA": str(given.data), "HF_HUB_OFFLINE": "1"}
    subprocess.run([sys.executable, str(PEERS / "data.py"), str(given.data)], check=True, env=env)
    _small(given.data)
    for name, command in jobs(given.data).items():
        if given.only not in (None, name):
            continue
        taken: dict[Path, list[float]] = {now: [], before: []}
        with tempfile.TemporaryDirectory(prefix="against-") as folder:
            for number in range(given.rounds + 1):  # the first one fills caches
                for source in (now, before)[:: 1 if number % 2 else -1]:
                    seconds = once(command, source, Path(folder), env)
                    if number:
                        taken[source].append(seconds)
        ratios = sorted(a / b for a, b in zip(taken[now], taken[before], strict=True))
        print(
            f"{name}: now {statistics.median(taken[now]):.2f} s, before {statistics.median(taken[before]):.2f} s, "
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
