"""Faults of models and workers: 1, 17 to 24, 26, 29a, 31. Real signals, real crashes, real hangs."""

from __future__ import annotations

import math
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import jobs
import oracles
import processes
import psutil
import pyarrow.parquet as pq
import pytest
import victims
from heard import Heard

import gristmill as gm
from gristmill.commit.publication import success

IDS = list(range(200))


def test_fault_01_a_worker_is_killed(numbers: str, quick: Path) -> None:
    """SIGKILL to a worker: its shard is done again by another one, and no row is blamed."""
    heard = Heard()
    args = {"marker": str(quick / "killed"), "at": 77, "what": "kill"}
    job = jobs.job(numbers, str(quick / "out"), "once", args, workers=2, shard_rows=20)
    report = job.run(observer=heard)
    assert (report.rows_ok, report.rows_dead, heard.deaths()) == (200, 0, 1)
    oracles.nothing_lost_nothing_twice(str(quick / "out"), IDS)


@pytest.mark.long
def test_fault_01_the_driver_alone_is_killed(numbers: str, quick: Path) -> None:
    """SIGKILL to the driver: its workers leave by themselves, and the next run scores what was not committed."""
    root, log = str(quick / "out"), str(quick / "calls")
    arguments: dict[str, Any] = {"workers": 2, "shard_rows": 10, "batch_rows": 5, "args": {"log": log, "seconds": 0.1}}
    running = processes.start("jobs:run", source=numbers, sink=root, fn="slow", **arguments)
    processes.until(lambda: processes.receipts_in(root) >= 3)
    workers = processes.workers_of(running.pid)
    assert workers
    processes.killed(running)
    assert processes.gone(workers)
    done = oracles.committed(root, numbers)
    assert 0 < len(done) < 200
    os.unlink(log)
    jobs.run(numbers, root, "slow", **arguments)
    oracles.nothing_lost_nothing_twice(root, IDS)
    assert not done & set(oracles.called(log))


@pytest.mark.parametrize("size", [1024, 4096])
def test_fault_17_one_poison_row_among_100_000(quick: Path, size: int) -> None:
    """It costs its batch about 2 log2(batch) more calls, and alone is a dead letter."""
    pq.write_table(victims.table(100_000), quick / "in.parquet")
    log = str(quick / "calls")
    args = {"log": log, "bad": [54_321]}
    root = str(quick / "out")
    report = jobs.run(str(quick / "in.parquet"), root, "scored", args, workers=0, batch_rows=size, shard_rows=100_000)
    assert (report.rows_ok, oracles.dead_ids(root)) == (99_999, [54_321])
    calls = Path(log).read_text().splitlines()
    extra = [c for c in calls if "54321" in c.split()]
    with_poison = len(extra)
    assert with_poison <= math.log2(size) + 1
    assert len(calls) <= 100_000 / size + 4 + 2 * math.log2(size) + 1
    letter = gm.dead(root).to_pylist()[0]
    assert (letter["error"], letter["message"], letter["position"]) == ("ValueError", "row 54321 is bad", 54_321)


@pytest.mark.long
def test_fault_18_a_model_that_fails_on_every_row_stops_the_job(quick: Path) -> None:
    """Exit 1 with the model's own traceback after some calls, not a million dead letters; also in shards of 8 rows."""
    pq.write_table(victims.table(20_000), quick / "in.parquet")
    for run, options in enumerate(({"workers": 2}, {"workers": 0, "shard_rows": 8})):
        log, root = str(quick / f"calls{run}"), str(quick / f"out{run}")
        with pytest.raises(gm.RunFailed, match=r"no weights in here(.|\n)*victims\.py") as failed:
            jobs.run(str(quick / "in.parquet"), root, "always_fails", {"log": log}, **options)
        assert failed.value.exit_code == 1
        assert len(Path(log).read_text().splitlines()) < 300
        assert processes.receipts_in(root) == 0


@pytest.mark.parametrize("first", [0, 90, 180])
def test_fault_18_twenty_bad_neighbours_are_dead_letters(numbers: str, quick: Path, first: int) -> None:
    """Twenty rows in a row that fail do not stop a model that works elsewhere, wherever they stand."""
    bad = list(range(first, first + 20))
    root = str(quick / "out")
    report = jobs.run(numbers, root, "scored", {"bad": bad}, workers=1, shard_rows=20)
    assert (report.rows_ok, sorted(oracles.dead_ids(root))) == (180, bad)


@pytest.mark.long
def test_fault_18_bad_rows_at_the_beginning(quick: Path) -> None:
    """More bad rows at the start than a first look takes: the job looks further, and goes on."""
    pq.write_table(victims.table(900), quick / "in.parquet")
    root = str(quick / "out")
    report = jobs.run(
        str(quick / "in.parquet"), root, "scored", {"bad": list(range(150))}, workers=0, shard_rows=50, batch_rows=64
    )
    assert (report.rows_ok, report.rows_dead) == (750, 150)


def test_fault_18_a_model_that_breaks_midway_stops_the_job(quick: Path) -> None:
    """A model that worked and fails from some time on: the run stops, and what was not scored is not dead."""
    pq.write_table(victims.table(5000), quick / "in.parquet")
    root, marker = str(quick / "out"), str(quick / "broken")
    arguments: dict[str, Any] = {"args": {"marker": marker, "after": 12}, "shard_rows": 50, "workers": 1}
    with pytest.raises(gm.RunFailed, match="the licence has expired") as failed:
        jobs.run(str(quick / "in.parquet"), root, "breaks", **arguments)
    assert failed.value.report.rows_dead <= 20
    os.unlink(marker)
    arguments["workers"] = 0
    victims._calls[0] = -1000
    report = jobs.run(str(quick / "in.parquet"), root, "breaks", **arguments)
    assert report.rows_in == 5000
    assert report.rows_dead <= 20


@pytest.mark.few(1)
@pytest.mark.parametrize("what", ["hang", "gil"])
def test_fault_19_a_model_that_hangs(quick: Path, what: str) -> None:
    """A call that never returns, also one that holds the GIL, ends its worker; the row behind it is a dead letter."""
    source = victims.write_input(str(quick / "in"), 80, files=1)
    root, heard = str(quick / "out"), Heard()
    job = jobs.job(
        source, root, "harmful", {"bad": {"75": what}}, workers=1, shard_rows=16, batch_rows=2, batch_timeout=1.0
    )
    report = job.run(observer=heard)
    assert (report.rows_ok, oracles.dead_ids(root)) == (79, [75])
    told = re.compile(r"a call took longer than its limit of [\d.]+ s(, at \S+victims\.py:\d+ in \S+)?")
    assert any(re.search(rf"w0 ended \({told.pattern}\) while it held", n.text) for n in heard.notes)
    assert not any("most recent call first" in n.text or "Thread 0x" in n.text for n in heard.notes)
    (letter,) = gm.dead(root).to_pylist()
    assert letter["error"] == "CallTimeout" and told.match(letter["message"])
    assert "victims.py" in letter["message"]


@pytest.mark.parametrize(("what", "how"), [("segfault", "SIGSEGV"), ("exit", "exit code 3")])
def test_a_row_that_kills_is_told_with_how_its_workers_died(quick: Path, what: str, how: str) -> None:
    """The dead letter names the signal or the exit code, which nobody can tell from it afterwards."""
    source, root = victims.write_input(str(quick / "in"), 20, files=1), str(quick / "out")
    jobs.run(source, root, "harmful", {"bad": {"7": what}}, workers=1, shard_rows=20, batch_rows=2)
    (letter,) = gm.dead(root).to_pylist()
    assert letter["error"] == "WorkerDied"
    assert letter["message"] == f"killed its worker 2 times ({how}), alone in its batch"


@pytest.mark.long
def test_fault_20_a_model_that_leaks(quick: Path) -> None:
    """A worker that has grown past its limit is replaced after its shard; nothing is lost or blamed."""
    source = victims.write_input(str(quick / "in"), 160)
    log, root, heard = str(quick / "pids"), str(quick / "out"), Heard()
    args = {"log": log, "size": 100 << 20}
    job = jobs.job(source, root, "leaks", args, workers=1, shard_rows=20, batch_rows=20, worker_memory=400 << 20)
    report = job.run(observer=heard)
    assert (report.rows_ok, report.rows_dead, heard.deaths()) == (160, 0, 0)
    pids = Path(log).read_text().split()
    assert len(set(pids)) >= 2
    assert max(pids.count(p) for p in pids) <= 5
    assert any("worker_memory" in n.text for n in heard.notes)
    oracles.nothing_lost_nothing_twice(root, list(range(160)))


@pytest.mark.long
@pytest.mark.parametrize("what", ["replace", "close"])
def test_code_that_closes_what_it_has_not_opened(quick: Path, what: str) -> None:
    """A worker that can report nothing any more is ended: its shard is done again, or the run ends."""
    source = victims.write_input(str(quick / "in"), 80, files=1)
    args: dict[str, Any] = {"marker": str(quick / "closed"), "at": 66, "what": what}
    report = jobs.job(source, str(quick / "out"), "once", args, workers=1, shard_rows=20).run()
    assert (report.rows_ok, report.rows_dead) == (80, 0)
    oracles.nothing_lost_nothing_twice(str(quick / "out"), list(range(80)))
    job = jobs.job(source, str(quick / "b"), "harmful", {"bad": {"66": "close"}}, workers=1, shard_rows=20)
    with pytest.raises(gm.WorkerLost, match=r"shard 3: \d workers have died of it \(its code closed file descriptors"):
        job.run()


@pytest.mark.few(1)
@pytest.mark.parametrize("how", ["none", "closed", "text", "tee", "timer", "descriptors"])
def test_code_that_changes_what_its_process_prints_to(quick: Path, how: str) -> None:
    """Replaced or closed streams, and a cancelled timer, end no worker; one that hangs still ends by its limit."""
    source, heard = victims.write_input(str(quick / "in"), 80, files=1), Heard()
    args = {"how": how, "once": {"marker": str(quick / "hung"), "at": 66, "what": "hang"}}
    options = {"workers": 1, "shard_rows": 20, "batch_rows": 10, "batch_timeout": 2.0}
    report = jobs.job(source, str(quick / "out"), "Unheard", args, **options).run(observer=heard)
    assert (report.rows_ok, report.rows_dead, heard.deaths()) == (80, 0, 1)
    oracles.nothing_lost_nothing_twice(str(quick / "out"), list(range(80)))
    if how != "descriptors":  # nobody can hear it any more
        (ended,) = [n.text for n in heard.notes if "w0 ended" in n.text]
        assert re.search(r"a call took longer than its limit of [\d.]+ s, at \S+victims\.py:\d+ in ", ended)
        assert "it cannot be closed" in "".join(n.text for n in heard.notes)
    assert ("it is heard" in "".join(n.text for n in heard.notes)) == (how == "tee")


@pytest.mark.few(1)
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("how", ["redirected", "none", "closed"])
def test_a_step_that_keeps_its_process_from_printing(quick: Path, how: str, apart: bool) -> None:
    """It is nothing to the worker, nor to a step process."""
    source, root = victims.write_input(str(quick / "in"), 60, files=1), str(quick / "out")
    steps = [gm.step(victims.silenced, how=how)]
    options = {"workers": 1, "shard_rows": 20, "batch_rows": 10, "batch_timeout": 3.0, "steps_workers": int(apart)}
    report = jobs.job(source, root, "slow", {"seconds": 0.2}, steps=steps, **options).run()
    assert (report.rows_ok, report.rows_dead) == (60, 0)
    oracles.nothing_lost_nothing_twice(root, list(range(60)))


@pytest.mark.few(1)
@pytest.mark.parametrize("what", ["segfault", "exit", "abort"])
def test_fault_21_rows_that_end_the_process(quick: Path, what: str) -> None:
    """Several rows of one shard that end their worker are isolated across processes; all others are scored."""
    source = victims.write_input(str(quick / "in"), 120, files=1)
    root, heard = str(quick / "out"), Heard()
    bad = {"85": what, "86": what, "93": what} if what == "segfault" else {"6": what}
    job = jobs.job(source, root, "harmful", {"bad": bad}, workers=2, shard_rows=20, batch_rows=8)
    report = job.run(observer=heard)
    assert sorted(oracles.dead_ids(root)) == sorted(int(i) for i in bad)
    assert report.rows_ok == 120 - len(bad)
    oracles.nothing_lost_nothing_twice(root, list(range(120)))
    # One death to become careful, one a halving, two alone; twice for rows that the probe meets first.
    assert heard.deaths() <= 2 * len(bad) * (math.log2(8) + 3)
    assert "alone in its batch" in gm.dead(root)["message"][0].as_py()


@pytest.mark.long
@pytest.mark.parametrize("kind", ["step", "flat_map"])
def test_fault_21_rows_that_end_the_process_in_a_step(quick: Path, kind: str) -> None:
    """The same for a step before the model: only the rows that do it are dead."""
    source = victims.write_input(str(quick / "in"), 120, files=1)
    root, heard = str(quick / "out"), Heard()
    step = {"step": gm.step(victims.harmful_step), "flat_map": gm.flat_map(victims.harmful_row)}[kind]
    sink = gm.sink(root, keep=["id"], row_id="rid")
    model, gates = gm.model(victims.scored, bad=[90]), {"min_ok": 0.9}
    job = gm.Job(source, model, sink, steps=[step], workers=1, shard_rows=16, gates=gates)
    report = job.run(observer=heard)
    assert (report.rows_ok, sorted(oracles.dead_ids(root))) == (117, [85, 86, 90])
    assert oracles.ok_ids(root) == [i for i in range(120) if i not in (85, 86, 90)]
    assert sorted(gm.dead(root)["stage"].to_pylist()) == ["before", "before", "model"]
    assert heard.deaths() <= 2 * (math.log2(16) + 3)


def test_fault_21_sys_exit_is_the_rows_failure(numbers: str, quick: Path) -> None:
    """sys.exit in a model is an exception like another: the row is a dead letter, and no worker dies of it."""
    root, heard = str(quick / "out"), Heard()
    report = jobs.job(numbers, root, "harmful", {"bad": {"150": "sysexit"}}, workers=1, shard_rows=50).run(
        observer=heard
    )
    assert (report.rows_ok, oracles.dead_ids(root), heard.deaths()) == (199, [150], 0)


@pytest.mark.long
def test_fault_22_memory_error(numbers: str, quick: Path) -> None:
    """MemoryError halves the batch; at one row, with a model that works elsewhere, the row is a dead letter."""
    root = str(quick / "out")
    report = jobs.run(numbers, root, "harmful", {"bad": {"150": "memory"}}, workers=0, shard_rows=50)
    assert (report.rows_ok, oracles.dead_ids(root)) == (199, [150])
    assert gm.dead(root)["error"].to_pylist() == ["MemoryError"]


def test_fault_22_cuda_out_of_memory(numbers: str, quick: Path) -> None:
    """torch's own exception: the batch is halved until it fits, that size is remembered, and no row is dead."""
    pytest.importorskip("torch")
    log = quick / "sizes"
    root = str(quick / "out")
    args = {"most": 30, "log": str(log)}
    report = jobs.run(numbers, root, "cuda_out_of_memory", args, workers=0, batch_rows=100, shard_rows=200)
    assert (report.rows_ok, report.rows_dead) == (200, 0)
    oracles.nothing_lost_nothing_twice(root, IDS)
    sizes = [int(line) for line in log.read_text().splitlines()]
    too_large = [n for n, size in enumerate(sizes) if size > 30]
    assert 1 <= len(too_large) <= 4, "tried again at a size known to be too large"
    assert sum(size for size in sizes if size <= 30) >= 200


def test_fault_23_an_exception_that_cannot_be_pickled_or_shown(numbers: str, quick: Path) -> None:
    """It is a dead letter with its type and traceback as text; the worker lives."""
    root, heard = str(quick / "out"), Heard()
    report = jobs.job(numbers, root, "unpicklable", {"bad": [3]}, workers=1, shard_rows=50).run(observer=heard)
    assert (report.rows_ok, report.rows_dead, heard.deaths()) == (199, 1, 0)
    letter = gm.dead(root).to_pylist()[0]
    assert "Odd" in letter["error"]
    assert "unpicklable" in letter["traceback"]


def test_fault_24_a_model_that_floods_stdout(numbers: str, quick: Path) -> None:
    """Megabytes on stdout and stderr block nothing, and what is passed on is bounded."""
    heard = Heard()
    job = jobs.job(numbers, str(quick / "out"), "floods", {"size": 2 << 20}, workers=2, shard_rows=50)
    assert job.run(observer=heard).rows_ok == 200
    printed = sum(len(n.text) for n in heard.notes if n.level == "print")
    assert 0 < printed < 8 << 20


@pytest.mark.long
@pytest.mark.parametrize(
    ("signals", "code"),
    [(["SIGTERM"], 143), (["SIGINT"], 130), (["SIGINT", "SIGINT"], 130), (["SIGTERM", "SIGTERM"], 143)],
)
def test_fault_26_asked_to_stop(numbers: str, quick: Path, signals: list[str], code: int) -> None:
    """One signal: no new work, out within 12 s. Two: at once, although the model hangs. Both can be resumed."""
    root = str(quick / "out")
    args: dict[str, Any] = {"seconds": 60 if len(signals) > 1 else 0.2}
    arguments: dict[str, Any] = {"source": numbers, "sink": root, "fn": "slow", "shard_rows": 10, "workers": 2}
    running = processes.start("jobs:run", **arguments, args=args)
    processes.until(lambda: processes.workers_of(running.pid))
    if len(signals) == 1:
        processes.until(lambda: processes.receipts_in(root) >= 2)
    else:
        time.sleep(3.0)
    workers = processes.workers_of(running.pid)
    begun = time.monotonic()
    for name in signals:
        running.send_signal(getattr(signal, name))
        time.sleep(0.7)
    printed, _ = running.communicate(timeout=20)
    assert running.returncode == code, printed
    assert time.monotonic() - begun < (12 if len(signals) == 1 else 5)
    assert processes.gone(workers, 1.0)
    if len(signals) == 1:
        jobs.run(**arguments, args=args)
        oracles.nothing_lost_nothing_twice(root, IDS)


@pytest.mark.few(1)
@pytest.mark.parametrize("op", ["create", "sync", "link", "remove"])
@pytest.mark.parametrize("restart", [False, True])
def test_fault_29a_and_31_a_stopped_worker_comes_back(quick: Path, op: str, restart: bool) -> None:
    """A worker stopped within its commit, its run killed, another run finished (resumed, or as generation 2):
    continued, it loses its commit, and what was published stays as it is.
    """
    source = victims.write_input(str(quick / "in"), 40, files=1)
    root, journal = str(quick / "out"), str(quick / "journal")
    harm = {"at": 1, "kind": "stop", "ops": [op], "path": "/receipts/" if op in ("link", "remove") else "/work/part-"}
    arguments: dict[str, Any] = {"source": source, "sink": root, "fn": "scored", "workers": 1, "shard_rows": 10}
    running = processes.start("jobs:run", **arguments, journal=journal, harm=harm)
    stopped = Path(journal, "stopped")
    processes.until(lambda: stopped.exists() and stopped.read_text())
    zombie = psutil.Process(int(stopped.read_text()))
    try:
        processes.until(lambda: zombie.status() == psutil.STATUS_STOPPED)
        processes.killed(running)
        if restart:
            arguments["args"] = {"bad": [3]}
        jobs.run(**arguments, verbs={"restart": restart})
        before, body = gm.read(root).to_table(), success(root)
        assert body is not None
        assert body.generation == (2 if restart else 1)
    finally:
        zombie.send_signal(signal.SIGCONT)
    assert processes.gone([zombie], 20)
    jobs.run(**arguments)
    assert success(root) == body
    assert gm.read(root).to_table().equals(before)
    oracles.nothing_lost_nothing_twice(root, list(range(40)))
    oracles.tidy(root)
