"""Steps in processes of their own (`steps_workers`): the same rows, the same accounting, rows that kill are isolated as
ever, and nothing is left running.
"""

from __future__ import annotations

import importlib
import os
import shutil
import socket
import sys
from pathlib import Path
from typing import Any

import jobs
import numpy as np
import oracles
import processes
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import victims
from heard import Heard

import gristmill as gm
from gristmill.errors import BadJob
from gristmill.process.spawning import mortal

IDS = list(range(200))


def words(path: Path) -> list[list[int]]:
    """The numbers in each line of a log."""
    return [[int(w) for w in line.split()] for line in path.read_text().splitlines()]


@pytest.mark.long
def test_steps_run_elsewhere_and_change_nothing(numbers: str, quick: Path) -> None:
    """Each worker has its own processes for steps; what is published is what a worker alone publishes."""
    found = []
    for beside in (0, 2):
        steps = [gm.filter("id % 3 <> 0"), gm.step(victims.tagged, log=str(quick / f"steps{beside}")), victims.odd]
        sink = str(quick / f"out{beside}")
        args = {"log": str(quick / f"model{beside}")}
        report = jobs.run(
            numbers, sink, "tagged_model", args, steps=steps, workers=2, shard_rows=10, steps_workers=beside
        )
        assert (report.rows_in, report.rows_dead) == (200, 0)
        found.append(report.read().to_table())
    assert found[0].equals(found[1])
    models = {pid for (pid,) in words(quick / "model2")}
    steps_of = [
        (pid, parent) for pid, parent in words(quick / "steps2") if pid not in models
    ]  # the probe is the worker's
    assert len({pid for pid, _ in steps_of}) == 2 * len({parent for _, parent in steps_of})
    assert {parent for _, parent in steps_of} <= models
    assert {pid for pid, _ in words(quick / "steps0")} <= {pid for (pid,) in words(quick / "model0")}


@pytest.mark.long
@pytest.mark.real_model
def test_tokenising_beside_the_model(minilm_int8: Path, docstrings: list[str], tmp_path: Path) -> None:
    """Texts are tokenised in the other process, and give the vectors that the worker alone gives."""
    pq.write_table(pa.table({"id": range(120), "text": docstrings[:120]}), tmp_path / "in.parquet")
    found = []
    for beside in (0, 1):
        report = gm.embed(
            tmp_path / "in.parquet", tmp_path / f"out{beside}", text="text", model=str(minilm_int8), keep=["id"],
            workers=1, shard_rows=20, steps_workers=beside,
        )  # fmt: skip
        found.append(report.read().to_table().sort_by("id"))
    one, two = (np.stack(t["embedding"].to_numpy(zero_copy_only=False)) for t in found)
    np.testing.assert_array_equal(one, two)


@pytest.mark.long
def test_rows_that_kill_in_a_step_are_found(numbers: str, quick: Path) -> None:
    """A process of steps that segfaults takes its worker along; the two rows that did it become dead letters."""
    report = jobs.run(
        numbers, str(quick / "out"), "scored", steps=[victims.harmful_step], workers=1, shard_rows=40, steps_workers=2
    )
    assert (report.rows_ok, report.rows_dead) == (198, 2)
    dead = report.dead().to_pylist()
    assert sorted(d["position"] for d in dead) == [85, 86] or len({d["source"] for d in dead}) == 2
    assert {d["error"] for d in dead} == {"WorkerDied"}
    oracles.nothing_lost_nothing_twice(str(quick / "out"), IDS)


@pytest.mark.long
def test_a_step_that_hangs_is_ended(numbers: str, quick: Path) -> None:
    """Also one that holds the GIL: its process exits after batch_timeout, and its shard is done again."""
    heard = Heard()
    step = gm.step(victims.hanging_step, marker=str(quick / "hung"))
    job = jobs.job(numbers, str(quick / "out"), "scored", steps=[step], workers=1, steps_workers=1, batch_timeout=3.0)
    report = job.run(observer=heard)
    assert (report.rows_ok, report.rows_dead, heard.deaths()) == (200, 0, 1)
    oracles.nothing_lost_nothing_twice(str(quick / "out"), IDS)


@pytest.mark.long
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="processes are started without a tool")
@pytest.mark.parametrize("how", ["killed", "missing"])
def test_processes_that_do_not_come_up(numbers: str, quick: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """One that is killed as it starts, before it has read its stages, is a death; one that cannot be started an error
    that says what to do. Neither is waited for.
    """
    tool = quick / "bin" / "setpriv"
    tool.parent.mkdir()
    if how == "killed":
        called, does = "*worker.stepprocesses*", f"mkdir {quick}/once 2>/dev/null && kill -9 $$"
    else:
        called, does = '"--pdeathsig KILL true"', f"rm {tool}"  # found, and then gone
    tool.write_text(f'#!/bin/sh\ncase "$*" in {called}) {does};; esac\nexec {shutil.which("setpriv")} "$@"\n')
    tool.chmod(0o755)
    mortal()  # this process has found its own
    monkeypatch.setenv("PATH", str(tool.parent), prepend=os.pathsep)
    held = np.arange(1 << 19)  # more than a socket takes at once

    def step(rows: dict[str, Any]) -> dict[str, Any]:
        return {**rows, "held": held[rows["id"]]}

    heard = Heard()
    job = jobs.job(numbers, str(quick / "out"), "scored", steps=[step], workers=1, steps_workers=1)
    if how == "killed":
        report = job.run(observer=heard)
        assert (report.rows_ok, report.rows_dead, heard.deaths()) == (200, 0, 1)
        oracles.nothing_lost_nothing_twice(str(quick / "out"), IDS)
    else:
        with pytest.raises(gm.GristmillError, match=r"\(w0\.0\) cannot be started: No such file .*; use fewer workers"):
            job.run()


def test_a_failing_step_stops_the_job(numbers: str, quick: Path) -> None:
    """With the step's name and both counts, as without processes of its own."""
    with pytest.raises(gm.GristmillError, match=r"broken_step"):
        jobs.run(numbers, str(quick / "out"), "scored", steps=[victims.broken_step], workers=1, steps_workers=2)


def test_nothing_is_left_when_the_driver_is_killed(numbers: str, quick: Path) -> None:
    """SIGKILL to the driver: workers leave, and with them the processes of their steps."""
    root = str(quick / "out")
    arguments = {"workers": 2, "shard_rows": 10, "args": {"seconds": 0.2}, "engine": {"workers": 2, "steps_workers": 2}}
    arguments.pop("workers")
    running = processes.start("jobs:run", source=numbers, sink=root, fn="slow", **arguments)
    processes.until(lambda: processes.receipts_in(root) >= 2)
    workers = processes.workers_of(running.pid)
    below = [p for w in workers for p in w.children()]
    assert len([p for p in below if "worker.stepprocesses" in " ".join(p.cmdline())]) >= 2
    processes.killed(running)
    assert processes.gone([*workers, *below])
    assert not [p for p in psutil.process_iter(["cmdline"]) if p.pid in {b.pid for b in below}]


def test_impossible_numbers_are_refused(numbers: str, quick: Path) -> None:
    """Below zero, and beside no worker at all."""
    with pytest.raises(BadJob, match="steps_workers is -1"):
        jobs.run(numbers, str(quick / "out"), "scored", steps_workers=-1)
    with pytest.raises(BadJob, match="leave steps_workers out"):
        jobs.run(numbers, str(quick / "out"), "scored", workers=0, steps_workers=2)


@pytest.mark.long
def test_a_step_that_sets_a_time_for_sockets(numbers: str, quick: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is for its own: no window that takes longer is given up."""
    monkeypatch.syspath_prepend(str(quick))
    text = "import socket, time\nsocket.setdefaulttimeout(0.2)\ndef slow(rows):\n    time.sleep(0.5)\n    return rows\n"
    (quick / "timed_fetching.py").write_text(text)
    heard = Heard()
    try:
        step = importlib.import_module("timed_fetching").slow
        sink = str(quick / "out")
        job = jobs.job(numbers, sink, "scored", steps=[step], workers=1, steps_workers=1, shard_rows=50)
        assert job.run(observer=heard).rows_ok == 200
    finally:
        socket.setdefaulttimeout(None)
        sys.modules.pop("timed_fetching", None)
    assert not [note.text for note in heard.notes if "trying again" in note.text]
