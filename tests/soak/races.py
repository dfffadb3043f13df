"""Drivers that race on one sink, and readers while a result is replaced again and again: the figures of "how good"."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from random import Random

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

import gristmill as gm
from soak import witness
from soak.harm import LONGEST, TAG, nothing_left
from soak.witness import Broken, same, same_rows

RACERS = 10
READERS = 3
ROWS = 60


def doubled(batch: dict, version: int, log: str) -> dict:  # type: ignore[type-arg]
    """The model: writes down whom it was called for."""
    with open(log, "a") as out:
        out.write("".join(f"{i}\n" for i in batch["id"].tolist()))
    return {"y": batch["id"] * version}


def job(folder: Path, version: int, workers: int) -> None:
    """A job file of 60 rows in five shards; `version` is the code's."""
    if not (folder / "in.parquet").exists():
        pq.write_table(pa.table({"id": range(ROWS)}), folder / "in.parquet")
    made = {
        "source": {"uri": "in.parquet"},
        "model": {"call": "soak.races:doubled", "args": {"version": version, "log": str(folder / "calls")}},
        "sink": {"uri": "out", "keep": ["id"]},
        "engine": {"workers": workers},
        "running": {"shard_rows": 12},
    }
    (folder / ".job.yaml").write_text(yaml.safe_dump(made))
    (folder / ".job.yaml").replace(folder / "job.yaml")


def start(folder: Path, *flags: str, printed: int = 0) -> subprocess.Popen[bytes]:
    """A driver."""
    with open(folder / f"printed{printed}", "wb") as out:
        return subprocess.Popen(
            [sys.executable, "-m", "gristmill", "run", "job.yaml", "--progress", "off", *flags],
            stdout=out, stderr=out, cwd=folder, env={**os.environ, TAG: str(folder)},
        )  # fmt: skip


def races(seed: str, starts: int, root: Path) -> int:
    """Ten drivers at once on a sink, new or restarted, until `starts` have been started: one result each time."""
    chance, done, broken, at = Random(seed), Counter[str](), 0, time.monotonic()
    while done["drivers"] < starts and not broken:
        folder = root / str(done["races"])
        folder.mkdir()
        try:
            for version in range(1, chance.choice([2, 3]) + 1):
                if done["drivers"] < starts:
                    _race(folder, version, chance, done)
            shutil.rmtree(folder)
        except Broken as e:
            broken += 1
            print(f"BROKEN {e}\n    kept: {folder}")
        done["races"] += 1
    print(", ".join(f"{k} {n}" for k, n in sorted(done.items())))
    print(f"races: seed {seed}: {broken} broken of {done['races']} races, {time.monotonic() - at:.0f} s")
    return 1 if broken else 0


def _race(folder: Path, version: int, chance: Random, done: Counter[str]) -> None:
    job(folder, version, workers=chance.choice([0, 0, 1]))
    flags = ["--restart"] if version > 1 else []
    running = []
    for n in range(RACERS):
        running.append(start(folder, *flags, printed=n))
        time.sleep(chance.choice([0, 0, 0.05, 0.3]))
    deadline = time.monotonic() + LONGEST
    codes = [run.wait(max(1.0, deadline - time.monotonic())) for run in running]
    nothing_left(str(folder), [])
    done.update(f"exit {c}" for c in codes)
    done["drivers"] += len(codes)
    odd = [n for n, code in enumerate(codes) if code not in (0, 75)]
    if odd or 0 not in codes:
        raise Broken(f"exit codes {codes}: {(folder / f'printed{(odd or [0])[0]}').read_text()[-1500:]}")
    wanted = [(i, i * version) for i in range(ROWS)]
    sink = str(folder / "out")
    same_rows(_pairs(gm.read(sink).to_table()), wanted, "gm.read")
    same_rows([tuple(v for _, v in row) for row in witness.by_files(sink)], wanted, "the files themselves")
    verdict = gm.verify(sink)
    same(verdict.ok, True, f"gm.verify: {verdict.lines[:5]}")
    calls = Counter((folder / "calls").read_text().split())
    if version == 1 and max(calls.values()) > 2:  # once for the probe, which is kept for its shard alone
        raise Broken(f"the model was called {max(calls.values())} times for row {calls.most_common(1)}")


def _pairs(table: pa.Table) -> list[tuple[int, int]]:
    return list(zip(table["id"].to_pylist(), table["y"].to_pylist(), strict=True))


# ---------------------------------------------------------------- readers


def readers(seed: str, reads: int, root: Path) -> int:
    """Reads in a loop, in three processes, while the result is restarted, some of the restarts killed."""
    chance, at, version, kills = Random(seed), time.monotonic(), 1, 0
    job(root, 1, workers=0)
    same(start(root).wait(), 0, "the first run")
    stop, logs = root / "stop", [root / f"reads{n}" for n in range(READERS)]
    reading = [
        subprocess.Popen([sys.executable, "-m", "soak.races", str(root / "out"), str(stop), str(log)]) for log in logs
    ]
    try:
        while sum(_count(log) for log in logs) < reads and all(r.poll() is None for r in reading):
            version += 1
            job(root, version, workers=0)
            while True:
                run = start(root, "--restart")
                if chance.random() < 0.3:
                    time.sleep(chance.uniform(0.2, 1.5))
                    run.kill()
                    kills += 1
                if run.wait() == 0:
                    break
    finally:
        stop.touch()
        codes = [r.wait() for r in reading]
    found = [json.loads(log.with_suffix(".json").read_text()) for log in logs if not any(codes)]
    wrong = [w for f in found for w in f["wrong"]]
    for line in wrong[:10]:
        print(f"BROKEN {line}")
    seen = {v for f in found for v in f["versions"]}
    print(f"reads {sum(f['reads'] for f in found)}, results {version} of which seen {len(seen)}, kills {kills}")
    bad = bool(wrong or any(codes) or not seen <= set(range(1, version + 1)))
    print(f"readers: seed {seed}: {'BROKEN' if bad else 'ok'}, {len(wrong)} wrong reads, {time.monotonic() - at:.0f} s")
    return 1 if bad else 0


def _count(log: Path) -> int:
    return int(log.read_text() or 0) if log.exists() else 0


def _read_on(sink: str, stop: Path, log: Path) -> None:
    """Read until told to stop; each read must be whole, of one version, and of none that is older than the last."""
    count, last, wrong, versions = 0, 0, [], set()
    while not stop.exists() and len(wrong) < 100:
        count += 1
        try:
            rows = sorted(_pairs(gm.read(sink).to_table()))
            version = rows[1][1] if len(rows) > 1 else 0
            if rows != [(i, i * version) for i in range(ROWS)]:
                wrong.append(f"read {count}: {len(rows)} rows, {rows[:3]}")
            if version < last:
                wrong.append(f"read {count}: version {version} after {last}")
            last = version
            versions.add(version)
        except Exception as e:
            wrong.append(f"read {count}: {type(e).__name__}: {e}"[:400])
        if count % 50 == 0:
            log.write_text(str(count))
    log.with_suffix(".json").write_text(json.dumps({"reads": count, "wrong": wrong, "versions": sorted(versions)}))


if __name__ == "__main__":
    _read_on(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
