"""The soak: jobs of a few thousand rows under at least a hundred SIGKILLs, to workers, the driver, or all at once."""

from __future__ import annotations

import contextlib
import random
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import oracles
import processes
import psutil
import pytest
import victims

import gristmill as gm
from gristmill.commit.publication import success

ROWS = 3000
KILLS = 100
SEED = 20_240_229
SECONDS = 900.0  # a bound; it takes a third of it on two cores


class Siege:
    """One job, started again and again until it is done, while its processes are killed."""

    def __init__(self, source: str, folder: Path, chance: random.Random) -> None:
        self.root, self.log = str(folder / "out"), str(folder / "calls")
        self.kills: dict[str, int] = {"worker": 0, "driver": 0, "all": 0}
        self.runs = 0
        self._source = source
        self._chance = chance

    def survive(self, enough: int, deadline: float) -> None:
        """Run until the job is done; no more kills after `enough`."""
        while success(self.root) is None:
            assert time.monotonic() < deadline, f"not done after {self.kills}"
            oracles.nothing_partial(self.root)
            done = oracles.committed(self.root, self._source)
            Path(self.log).unlink(missing_ok=True)
            self.runs += 1
            running = processes.start(
                "jobs:run", source=self._source, sink=self.root, fn="slow", args={"log": self.log, "seconds": 0.03},
                workers=2, shard_rows=20, batch_rows=10,
            )  # fmt: skip
            self._harass(running, enough)
            printed, _ = running.communicate(timeout=120)
            assert running.returncode in (0, 1, -9), printed
            assert running.returncode != 1 or "workers in a row ended while starting" in printed, printed
            assert not done & set(oracles.called(self.log)), "the model was called for a committed shard"

    def _harass(self, running: subprocess.Popen[str], enough: int) -> None:
        while running.poll() is None and sum(self.kills.values()) < enough:
            with contextlib.suppress(subprocess.TimeoutExpired):
                running.wait(self._chance.uniform(0.1, 1.6))
            workers = processes.workers_of(running.pid)
            if running.poll() is not None or not workers:
                continue
            what = self._chance.choices(["worker", "driver", "all"], [6, 2, 1])[0]
            self.kills[what] += 1
            if what in ("driver", "all"):
                running.send_signal(signal.SIGKILL)
            for worker in [self._chance.choice(workers)] if what == "worker" else workers if what == "all" else []:
                with contextlib.suppress(psutil.NoSuchProcess):
                    worker.kill()
            if what != "worker":
                assert processes.gone(workers), "workers outlive their driver"


@pytest.mark.soak
def test_soak(quick: Path) -> None:
    """After a hundred kills every row is there once, with the right value; none became a dead letter."""
    chance, begun = random.Random(SEED), time.monotonic()
    source = victims.write_input(str(quick / "in"), ROWS, files=3)
    wanted: dict[int, float] = {i: float(np.sqrt(float(i)) * 2.0 + i) for i in range(ROWS)}
    total: dict[str, Any] = {"worker": 0, "driver": 0, "all": 0, "runs": 0, "jobs": 0}
    while sum(total[k] for k in ("worker", "driver", "all")) < KILLS:
        folder = quick / str(total["jobs"])
        folder.mkdir()
        siege = Siege(source, folder, chance)
        siege.survive(KILLS - sum(total[k] for k in ("worker", "driver", "all")), begun + SECONDS)
        oracles.nothing_lost_nothing_twice(siege.root, list(range(ROWS)))
        assert oracles.dead_ids(siege.root) == []
        table = gm.read(siege.root).to_table()
        assert dict(zip(table["id"].to_pylist(), table["y"].to_pylist(), strict=True)) == wanted
        oracles.tidy(siege.root)
        for what, count in siege.kills.items():
            total[what] += count
        total["runs"] += siege.runs
        total["jobs"] += 1
    print(f"\n{total}, {time.monotonic() - begun:.0f} s")
