"""Workers that are there and do nothing: stopped (SIGSTOP), or waiting in the kernel. Their shards are done elsewhere,
nobody waits for them, and nothing is left running (faults 58 and 59).
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jobs
import oracles
import processes
import psutil
import pytest
import victims
from heard import Heard

import gristmill as gm

IDS = list(range(200))


class Stopping(Heard):
    """Stops a process, once, when it has heard of some rows. `which` finds it among those below this one."""

    def __init__(self, which: Any) -> None:
        super().__init__()
        self.which = which
        self.stopped: list[psutil.Process] = []

    def progress(self, now: Any) -> None:
        super().progress(now)
        if now.shards_done >= 2 and not self.stopped and (found := self.which()):
            self.stopped = found[:1]
            found[0].send_signal(signal.SIGSTOP)

    def said(self) -> list[str]:
        """Warnings of silence."""
        return [n.text for n in self.notes if "without a sign of life" in n.text]


def workers() -> list[psutil.Process]:
    """Those of this process."""
    return processes.workers_of(psutil.Process().pid)


def beside() -> list[psutil.Process]:
    """The processes of steps below workers of this process."""
    below = [p for w in workers() for p in w.children()]
    return [p for p in below if "worker.stepprocesses" in " ".join(p.cmdline())]


@pytest.mark.long
@pytest.mark.parametrize("count", [1, 2])
def test_fault_58_a_stopped_worker(numbers: str, quick: Path, count: int) -> None:
    """Its shards are done by another one, or by a new one, a note says why, and it is gone in the end."""
    heard, root = Stopping(workers), str(quick / "out")
    options: dict[str, Any] = {"workers": count, "shard_rows": 10, "batch_timeout": 4.0, "batch_rows": 5}
    report = jobs.job(numbers, root, "slow", {"seconds": 0.1}, **options).run(observer=heard)
    assert (report.rows_ok, report.rows_dead) == (200, 0)
    assert heard.stopped and processes.gone(heard.stopped, 1.0)
    assert len(heard.said()) == 1
    assert "while it held shard" in heard.said()[0]
    oracles.nothing_lost_nothing_twice(root, IDS)


@pytest.mark.long
def test_fault_58_a_stopped_process_of_steps(numbers: str, quick: Path) -> None:
    """It is given up by its worker, which another one takes over from; both are gone."""
    heard, root = Stopping(beside), str(quick / "out")
    step = gm.step(victims.tagged, log=str(quick / "log"))
    options: dict[str, Any] = {"workers": 1, "steps_workers": 2, "shard_rows": 10, "batch_timeout": 4.0}
    report = jobs.job(numbers, root, "slow", {"seconds": 0.1}, steps=[step], **options).run(observer=heard)
    assert (report.rows_ok, report.rows_dead) == (200, 0)
    assert heard.stopped and processes.gone(heard.stopped, 1.0)
    assert len(heard.said()) == 1
    oracles.nothing_lost_nothing_twice(root, IDS)


def seized(pid: int) -> subprocess.Popen[str]:
    """A process that traces another and never looks at it: killed, that one is not gone for its parent until the
    tracer is, as with one that is stuck in the kernel.
    """
    code = "import ctypes, sys, time; print(ctypes.CDLL(None).ptrace(0x4206, int(sys.argv[1]), 0, 0), flush=True)"
    tracer = subprocess.Popen(
        [sys.executable, "-c", code + "; time.sleep(600)", str(pid)], stdout=subprocess.PIPE, text=True
    )
    assert tracer.stdout is not None
    if tracer.stdout.readline().strip() != "0":
        tracer.kill()
        pytest.skip("this system allows no tracing")
    return tracer


@pytest.mark.long
def test_fault_58_a_worker_that_cannot_be_killed(numbers: str, quick: Path) -> None:
    """It is given up, and the run does not wait for its end, neither there nor in the end."""
    tracers: list[subprocess.Popen[str]] = []

    def which() -> list[psutil.Process]:
        found = workers()
        tracers.append(seized(found[0].pid))
        return found

    heard, root = Stopping(which), str(quick / "out")
    options: dict[str, Any] = {"workers": 2, "shard_rows": 10, "batch_timeout": 4.0, "batch_rows": 5}
    try:
        begun = time.monotonic()
        report = jobs.job(numbers, root, "slow", {"seconds": 0.1}, **options).run(observer=heard)
        assert time.monotonic() - begun < 50.0
        assert (report.rows_ok, report.rows_dead, len(heard.said())) == (200, 0, 1)
        assert tracers[0].poll() is None
        assert heard.stopped[0].status() == psutil.STATUS_ZOMBIE, "it was not held: nothing is shown"
    finally:
        for tracer in tracers:
            tracer.kill()
            tracer.communicate()
    oracles.nothing_lost_nothing_twice(root, IDS)


@pytest.mark.long
def test_fault_58_asked_to_stop_with_a_stopped_worker(numbers: str, quick: Path) -> None:
    """SIGTERM to the driver while one of its workers is stopped: out within 12 s, 143, nothing left."""
    root = str(quick / "out")
    running = processes.start(
        "jobs:run", source=numbers, sink=root, fn="slow", args={"seconds": 0.2}, workers=2, shard_rows=10
    )
    processes.until(lambda: processes.receipts_in(root) >= 2)
    both = processes.workers_of(running.pid)
    both[0].send_signal(signal.SIGSTOP)
    begun = time.monotonic()
    running.send_signal(signal.SIGTERM)
    printed, _ = running.communicate(timeout=30)
    assert running.returncode == 143, printed
    assert time.monotonic() - begun < 12.0
    assert processes.gone(both, 1.0)


@pytest.mark.long
def test_fault_59_worker_and_driver_killed_while_a_step_holds_the_gil(numbers: str, quick: Path) -> None:
    """The process of the steps cannot see the end of its input then, and ends all the same."""
    marker = quick / "hung"
    running = processes.start("test_stopped:hangs", source=numbers, sink=str(quick / "out"), marker=str(marker))
    processes.until(marker.exists)
    both = processes.workers_of(running.pid)
    below = [p for w in both for p in w.children()]
    assert [p for p in below if "worker.stepprocesses" in " ".join(p.cmdline())]
    for process in [*both, psutil.Process(running.pid)]:
        process.send_signal(signal.SIGKILL)
    running.communicate(timeout=20)
    assert processes.gone([*both, *below], 5.0)


def hangs(source: str, sink: str, marker: str) -> None:
    """A step that holds the GIL for an hour, in a process of its own; for processes apart."""
    step = gm.step(victims.hangs_apart, marker=marker)
    jobs.run(source, sink, "scored", steps=[step], engine={"workers": 1, "steps_workers": 1})


IMPATIENT = """
import sys
if "gristmill.engines" in " ".join(sys.orig_argv):
    import gristmill.worker.watch as work
    work.LONGEST_LOAD = 3.0
"""


class NeverLoads:
    """Waits for a lock that nobody gives back."""

    def __init__(self) -> None:
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()

    def __call__(self, rows: dict[str, Any]) -> Any:
        return rows["x"]


def never_loads(source: str, sink: str) -> None:
    """A run of a model that hangs while it is loaded; for processes apart."""
    gm.run(gm.Job(source, gm.model(NeverLoads), sink, workers=1, batch_timeout=1.0))


@pytest.mark.long
def test_a_model_that_hangs_while_it_is_loaded_ends_the_run(numbers: str, quick: Path) -> None:
    """Once, with the line at which it stood."""
    (quick / "first").mkdir()
    (quick / "first" / "sitecustomize.py").write_text(IMPATIENT)
    path = os.pathsep.join([str(quick / "first"), *filter(None, sys.path)])
    run = processes.start("test_stopped:never_loads", {"PYTHONPATH": path}, source=numbers, sink=str(quick / "out"))
    printed, _ = run.communicate(timeout=60)
    assert run.returncode != 0
    assert re.search(r"longer to load than their limit of 3 s, at .*test_stopped.py:\d+ in __init__; a larger", printed)


STOPS_ITSELF = """
import os, signal, sys
if {which!r} in " ".join(sys.orig_argv):
    os.kill(os.getpid(), signal.SIGSTOP)
"""


@pytest.mark.few(1)
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the kernel ends nobody with its parent")
@pytest.mark.parametrize("which", ["engines.forkserver", "engines.serving", "worker.stepprocesses"])
def test_fault_58_stopped_while_it_starts(numbers: str, quick: Path, which: str) -> None:
    """A process that was stopped before it had run a line of its own goes with the run that is killed."""
    (quick / "first").mkdir()
    (quick / "first" / "sitecustomize.py").write_text(STOPS_ITSELF.format(which=which))
    path = os.pathsep.join(filter(None, [str(quick / "first"), os.environ.get("PYTHONPATH")]))
    run = processes.start(
        "test_stopped:hangs",
        {"PYTHONPATH": path, "GRISTMILL_FORK": "01"["fork" in which]},
        source=numbers,
        sink=str(quick / "out"),
        marker=str(quick / "hung"),
    )
    below: list[psutil.Process] = []
    try:
        processes.until(lambda: _stopped_below(run.pid))
        below = psutil.Process(run.pid).children(recursive=True)
        run.kill()
        run.wait()
        assert processes.gone(below, 5.0)
    finally:
        run.kill()
        for process in below:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def _stopped_below(pid: int) -> list[psutil.Process]:
    return [p for p in psutil.Process(pid).children(recursive=True) if p.status() == psutil.STATUS_STOPPED]
