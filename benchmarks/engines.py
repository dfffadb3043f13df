"""MiniLM over film reviews on one machine with two workers: the rows a second of each engine, once it has started.

    python benchmarks/engines.py [--engines local,spark] [--rows 4000] [--rounds 3]

Engines take turns. Starting (a session or a cluster, interpreters, models) is left out: the rate is that from when a
fifth of the shards is committed to the last one. What counts is the ratio to the local engine within one run.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import pyarrow.parquet as pq

import gristmill as gm
import kit
from gristmill.job.options import EngineSpec
from gristmill.observe.events import Note, Progress

ENGINES = {
    "local": EngineSpec("local", workers=2),
    "ray": EngineSpec("ray", workers=2),
    "spark": EngineSpec("spark", workers=2, options={"master": "local[2,4]"}),
}


class Clock:
    """Notes when how many rows were committed, and in how many shards."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, int, int]] = []
        self.shards = 0

    def progress(self, now: Progress) -> None:
        if now.phase == "running" and (not self.seen or now.shards_done > self.seen[-1][1]):
            self.seen.append((time.monotonic(), now.shards_done, now.rows_ok))
            self.shards = now.shards_total

    def note(self, note: Note) -> None:
        if note.level != "print":
            print(note.text, file=sys.stderr)

    def close(self) -> None:
        pass

    def rate(self) -> float:
        """Rows a second after a fifth of the shards."""
        first = next(s for s in self.seen if s[1] >= self.shards / 5)
        last = self.seen[-1]
        return (last[2] - first[2]) / (last[0] - first[0])


def once(engine: str, source: str, folder: str) -> tuple[float, float]:
    """Rows a second once started, and the seconds of the whole run."""
    clock, begun = Clock(), time.monotonic()
    model = gm.TextEmbedder(str(kit.minilm_onnx()), text="text")
    gm.Job(source, model, gm.sink(folder, keep=[]), engine=ENGINES[engine]).run(observer=clock)
    return clock.rate(), time.monotonic() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--engines", default="local,spark")
    parser.add_argument("--rows", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    names = given.engines.split(",")
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    with tempfile.TemporaryDirectory() as folder:
        source = os.path.join(folder, "reviews.parquet")
        pq.write_table(kit.reviews().select(["text"]).slice(0, given.rows), source)
        for turn in range(given.rounds):
            for name in names:
                found[name].append(once(name, source, os.path.join(folder, f"{name}{turn}")))
    base = statistics.median(r for r, _ in found[names[0]])
    print(
        f"| engine | rows/s once started, median of {given.rounds} | to {names[0]} | whole run, s |\n|---|---|---|---|"
    )
    for name in names:
        rate, whole = (statistics.median(column) for column in zip(*found[name], strict=True))
        each = ", ".join(f"{r:.0f}" for r, _ in found[name])
        print(f"| {name} | {rate:.0f} ({each}) | {rate / base:.2f} | {whole:.1f} |")


if __name__ == "__main__":
    main()
