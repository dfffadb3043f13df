"""What threads do with their time."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import gristmill as gm
from gristmill.driver.runrecord import listed
from gristmill.files.disk import LOCAL
from gristmill.worker.clock import Clock


def test_laps_add_up() -> None:
    """Each lap is all the time since the one before; of one, a part that was measured apart goes to another."""
    times = iter([5.0, 7.0, 8.5, 12.5, 13.0])
    clock = Clock(lambda: next(times))
    clock.start()
    clock.lap("read")
    clock.lap("place", ("call", 3.0))
    clock.lap("read", ("call", 9.0))
    assert clock.took == {"read": 1.5, "call": 3.5, "place": 1.0}
    assert sum(clock.took.values()) == 13.0 - 7.0


def doubled(batch: dict) -> dict:
    """Takes no time."""
    return {"y": batch["x"] * 2}


def test_the_report_says_where_the_time_went(tmp_path: Path) -> None:
    """Phases add up to the run's time, and what a worker's three threads did to the same as each other; the command
    prints both.
    """
    source, sink = tmp_path / "in.parquet", tmp_path / "out"
    pq.write_table(pa.table({"id": np.arange(50_000), "x": np.arange(50_000.0)}), source)
    gm.run(gm.Job(str(source), doubled, gm.sink(str(sink), keep=["id"]), workers=2))
    (run,) = listed(str(sink), LOCAL)
    assert {"planning", "loading", "running", "publishing"} <= set(run.phases)
    assert sum(run.phases.values()) == pytest.approx(run.seconds, abs=0.01)
    assert set(run.threads) == {"reading", "predicting", "writing"}
    totals = [sum(took.values()) for took in run.threads.values()]
    assert totals == pytest.approx([totals[0]] * 3, abs=0.02)
    assert {"read", "digest", "waiting"} <= set(run.threads["reading"])
    assert {"receipt", "close and sync"} <= set(run.threads["writing"])
    told = subprocess.run(
        [sys.executable, "-m", "gristmill", "report", str(sink)], capture_output=True, text=True, check=True
    )
    (line,) = [line for line in told.stdout.splitlines() if line.startswith("time ")]
    assert "planning" in line and "running" in line
    assert sum(line.startswith(("  reading", "  predicting", "  writing")) for line in told.stdout.splitlines()) == 3


FAULTS = (
    "import resource, sys, threading\n"
    "import numpy as np\n"
    "from gristmill.worker import heap\n"
    "if sys.argv[1] == 'kept': heap.keep_freed()\n"
    "def work():\n"
    "    for _ in range(200): np.ones(1 << 18) * 2.0\n"
    "before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
    "thread = threading.Thread(target=work); thread.start(); thread.join()\n"
    "print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)\n"
)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="this C library has no mallopt")
def test_freed_memory_is_used_again() -> None:
    """Arrays of 2 MB that come and go take few new pages, unless somebody has set the limits of malloc."""

    def faults(how: str, **variables: str) -> int:
        env = {**{k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_"))}, **variables}
        done = subprocess.run([sys.executable, "-c", FAULTS, how], env=env, capture_output=True, text=True, check=True)
        return int(done.stdout)

    as_set = {"MALLOC_MMAP_THRESHOLD_": "131072"}
    assert faults("kept") < 10_000 < faults("kept", **as_set)
