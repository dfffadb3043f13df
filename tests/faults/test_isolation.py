"""Rows that end their process, at each stage of the way: they alone are dead letters, in a run and in retry-dead, and
kills from outside accuse nobody (faults 21, 45, 54, 55).
"""

from __future__ import annotations

import contextlib
import json
import random
import re
import signal
import time
from pathlib import Path
from typing import Any

import processes
import psutil
import pytest
import victims

import gristmill as gm
from children import is_worker
from gristmill.driver.opening import Verbs
from gristmill.driver.run import finish

SOURCE_STAGES = ("filter", "map", "flat_map")  # what dies there is a source row with both of its twins
STAGES = (*SOURCE_STAGES, "derived", "model", "post")


def deadly_job(source: str, root: str, bad: str, **options: Any) -> gm.Job:
    """User code at each stage, that dies of the rows that the file "bad" in the folder `bad` names."""
    steps = [
        gm.filter(victims.deadly_filter, bad=bad),
        gm.step(victims.deadly_map, bad=bad),
        gm.flat_map(victims.deadly_flat_map, bad=bad),
        gm.step(victims.deadly_derived, bad=bad),
    ]
    model, post = gm.model(victims.deadly_model, bad=bad), [gm.step(victims.deadly_post, bad=bad)]
    sink = gm.sink(root, keep=["id", "twin"])
    return gm.Job(source, model, sink, steps=steps, post=post, gates=gm.Gates(min_ok=0.0), **options)


def run(source: str, root: str, bad: str, **options: Any) -> gm.Report:
    """For processes apart."""
    return deadly_job(source, root, bad, **options).run()


def scored_are(root: str, rows: int, killers: dict[str, list[int]], letters_each: int = 1) -> None:
    """Dead are the killers, once each, where they died; all other twins are scored, once each. A source row on whose
    way `letters_each` twins were dead before has as many letters.
    """
    gone = {t for stage in SOURCE_STAGES for i in killers.get(stage, []) for t in (2 * i, 2 * i + 1)}
    derived = [t for stage in ("derived", "model", "post", "raising") for t in killers.get(stage, [])]
    read = gm.read(root).to_table()
    assert sorted(read["twin"].to_pylist()) == [t for t in range(2 * rows) if t not in {*gone, *derived}]
    letters = [json.loads(p) for p in gm.dead(root)["payload"].to_pylist()]
    assert sorted(p["twin"] for p in letters if "twin" in p) == sorted(derived)
    assert sorted(p["id"] for p in letters if "twin" not in p) == sorted(
        i for stage in SOURCE_STAGES for i in killers.get(stage, []) for _ in range(letters_each)
    )
    assert gm.dead(root)["error"].to_pylist().count("ValueError") == len(killers.get("raising", []))
    verdict = gm.verify(root)
    assert verdict.ok, verdict.lines


def written(path: Path, **told: Any) -> str:
    """What the rows are that kill, by the name of the folder: a file that an argument names is a part of the model."""
    path.write_text(json.dumps(told))
    return str(path.parent)


@pytest.mark.long
def test_fault_45_killers_at_every_stage(quick: Path) -> None:
    """Each is isolated where it kills: it is dead, once, and nobody else is."""
    source, root = victims.write_input(str(quick / "in"), 100, files=1), str(quick / "out")
    killers = {"filter": [75], "map": [80], "flat_map": [85], "derived": [180], "model": [191], "post": [199]}
    deadly_job(source, root, written(quick / "bad", **killers), workers=2, shard_rows=2).run()
    scored_are(root, 100, killers)


@pytest.mark.long
def test_fault_55_killers_in_retry_dead(quick: Path) -> None:
    """They die there as in a run, once each; by a third one they are scored, once the code is mended."""
    source, root = victims.write_input(str(quick / "in"), 100, files=1), str(quick / "out")
    killers = {"filter": [85], "map": [86], "flat_map": [87], "derived": [190], "model": [199], "post": [181]}
    raising = {"raising": [10, 181, 190, 199, *(2 * i for i in (85, 86, 87)), *(2 * i + 1 for i in (85, 86, 87))]}
    job = deadly_job(source, root, written(quick / "bad", **raising), workers=1, shard_rows=50)
    job.run()
    scored_are(root, 100, raising)
    written(quick / "bad", **killers)
    finish(job.spec, Verbs(retry=True))
    scored_are(root, 100, killers, letters_each=2)
    written(quick / "bad")
    finish(job.spec, Verbs(retry=True))
    scored_are(root, 100, {})


@pytest.mark.long
def test_fault_55_killers_among_rows_that_raise(quick: Path) -> None:
    """A retry in which nothing works: rows are tried to find out whether the model does, and those that kill are found
    by that, too. The run ends, with each row dead of its own.
    """
    source, root = victims.write_input(str(quick / "in"), 40, files=1), str(quick / "out")
    bad = {"raising": [*range(20, 64)], "model": [64, 79]}  # tried first are the others, 20 of which raise on the way
    job = deadly_job(source, root, written(quick / "bad", **bad), workers=1, shard_rows=1000, batch_rows=1)
    job.run()
    scored_are(root, 40, bad)
    finish(job.spec, Verbs(retry=True))
    scored_are(root, 40, bad)


@pytest.mark.long
@pytest.mark.parametrize("stage", ["map", "post"])
def test_fault_45_two_killers_among_2000_rows(quick: Path, stage: str) -> None:
    """One shard with two of them, in calls that take a while: nobody else is dead."""
    source, root = victims.write_input(str(quick / "in"), 2000, files=1), str(quick / "out")
    killers = {stage: [700, 1900]}
    bad = written(quick / "bad", **killers, slow=0.01)
    report = deadly_job(source, root, bad, workers=1, shard_rows=2000).run()
    assert report.rows_dead == 2
    scored_are(root, 2000, killers)


@pytest.mark.long
def test_fault_45_a_row_alone(quick: Path) -> None:
    """All that there is kills in a post step: two dead letters, and the run ends."""
    source, root = victims.write_input(str(quick / "in"), 1, files=1), str(quick / "out")
    with pytest.raises(gm.GateFailed) as failed:
        deadly_job(source, root, written(quick / "bad", post=[0, 1]), workers=1).run()
    assert (failed.value.report.rows_in, failed.value.report.rows_ok, failed.value.report.rows_dead) == (1, 0, 2)


@pytest.mark.long
def test_fault_54_kills_of_everything_beside_killers(quick: Path) -> None:
    """Workers and the driver are killed at random times while killers at two stages are looked for: slow innocents that
    were noted then are scored in the end.
    """
    source, root = victims.write_input(str(quick / "in"), 60, files=1), str(quick / "out")
    killers = {"map": [12], "post": [77]}
    bad = written(quick / "bad", **killers, slow=0.05)
    arguments = {"source": source, "root": root, "bad": bad, "workers": 2, "shard_rows": 20}
    chance = random.Random(54)
    for kill in range(8):
        running = processes.start("test_isolation:run", **arguments)
        until = time.monotonic() + chance.uniform(1.0, 5.0)
        while time.monotonic() < until and running.poll() is None:
            time.sleep(chance.uniform(0.3, 0.9))
            for worker in processes.workers_of(running.pid) if kill % 2 else []:
                worker.send_signal(signal.SIGKILL)
        processes.killed(running)
        for worker in [p for p in psutil.process_iter() if is_worker(p) and p.ppid() == 1]:
            processes.gone([worker])
    run(**arguments)
    scored_are(root, 60, killers)


@pytest.mark.long
def test_fault_54_an_innocent_noted_beside_a_killer(quick: Path) -> None:
    """Three times the whole run is killed while a slow row is noted, alone, in an attempt that a killer made careful:
    the deaths of workers that follow, of the killer, are not that row's.
    """
    source, root = victims.write_input(str(quick / "in"), 20, files=1), str(quick / "out")
    killers = {"model": [14]}
    bad = written(quick / "bad", **killers, slow_rows=[6])
    arguments = {"source": source, "root": root, "bad": bad, "workers": 1, "shard_rows": 20, "batch_rows": 1}

    def noted() -> bool:
        for path in Path(root, "_gristmill").glob("g*/suspects/*.*.json"):
            with contextlib.suppress(FileNotFoundError):  # done meanwhile
                recent = time.time() - path.stat().st_mtime < 5
                if recent and re.search(r'\[\["[^"]*", 3, "0"\]\]', path.read_text()):
                    return True
        return False

    for _ in range(3):
        running = processes.start("test_isolation:run", **arguments)
        processes.until(lambda running=running: noted() or running.poll() is not None)
        assert running.poll() is None, "the slow row was noted alone"
        workers = processes.workers_of(running.pid)
        processes.killed(running)
        assert processes.gone(workers)
        time.sleep(5.0)  # until that note is old
    written(quick / "bad", **killers)
    run(**arguments)
    scored_are(root, 20, killers)
