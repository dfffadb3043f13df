"""Interpreters that are started ahead of a run, where workers are no forks: used where they fit, and never left
behind.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from pretended import Feed, Stages, Worker

import gristmill as gm
from children import is_alive
from gristmill.driver import warmup
from gristmill.engines.interpreter import MOST, SPARES, Spares
from gristmill.engines.local import Local
from gristmill.errors import BadJob
from gristmill.job.job import JobSpec, Source
from gristmill.job.options import EngineSpec
from gristmill.job.specs import Call, FunctionModel
from gristmill.process.messages import Emit, Printed
from gristmill.process.startup import import_path, thread_variables


@dataclass(frozen=True)
class Threaded(Stages):
    """Workers with one thread each and a variable."""

    variables: Mapping[str, str] = field(default_factory=lambda: {**thread_variables(1), "GIVEN": "later"})

    def environment(self, index: int) -> Mapping[str, str]:
        return self.variables

    def open(self, name: str, emit: Emit) -> Worker:
        return Reader(name)


class Reader(Worker):
    """Prints what it sees of the environment."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        print(*(os.environ.get(key, "") for key in ("GIVEN", "SET_LATER", "OPENBLAS_NUM_THREADS")))


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where there is no fork server."""
    monkeypatch.setenv("GRISTMILL_FORK", "0")


@pytest.fixture
def ready() -> Iterator[set[int]]:
    """The process ids of two that wait."""
    before = {p.pid for p in psutil.Process().children()}
    SPARES.start(EngineSpec(workers=2, threads=1), 2)
    yield {p.pid for p in psutil.Process().children()} - before
    SPARES.end()


def pids(feed: Feed) -> set[int]:
    """Of the workers that echoed."""
    return {value[1] for value in feed.ended.values()}


def driven(workers: int, stages: Stages, path: tuple[str, ...] | None = None) -> Feed:
    """Ten items through the local engine."""
    feed = Feed([("echo", n) for n in range(10)], workers=workers)
    for event in Local(workers, import_path() if path is None else path).run(stages, feed):
        feed.on(event)
    assert sorted(feed.ended) == list(range(10))
    return feed


def test_they_become_the_workers(ready: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A run takes them, with variables that were set after they had started; none is left to take."""
    assert len(ready) == 2
    monkeypatch.setenv("SET_LATER", "yes")
    feed = driven(2, Threaded())
    assert pids(feed) <= ready
    assert "later yes 1" in "".join(event.text for event in feed.events if isinstance(event, Printed))
    assert not any(map(psutil.pid_exists, ready))


def test_those_that_are_not_needed_end_when_the_run_begins(ready: set[int]) -> None:
    """One of the two is taken, the other is gone before the work is done."""
    feed = Feed([("echo", 0), ("sleep", 1)], workers=1)
    left = []
    for event in Local(1, import_path()).run(Threaded(), feed):
        feed.on(event)
        left.append(sum(map(psutil.pid_exists, ready)))
    assert feed.ended[0][1] in ready
    assert max(left) == 1


@pytest.mark.parametrize("why", ["threads", "path", "dead"])
def test_one_that_does_not_fit_is_not_taken(ready: set[int], why: str, tmp_path: Path) -> None:
    """Other threads, another import path, or killed while it waited: the run starts interpreters of its own."""
    if why == "dead":
        for pid in ready:
            psutil.Process(pid).kill()
            psutil.Process(pid).wait(5)
    threads = {"threads": 2}.get(why, 1)
    path = (*import_path(), str(tmp_path)) if why == "path" else None
    assert not pids(driven(1, Threaded(variables=thread_variables(threads)), path)) & ready


def test_some_engines_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """No worker of its own on this machine: nothing is started. On many cores only a few are."""
    spares = Spares()
    before = len(psutil.Process().children())
    spares.start(EngineSpec(workers=0), 2)
    spares.start(EngineSpec("ray"), 2)
    assert len(psutil.Process().children()) == before
    spares.start(EngineSpec(), 64)
    spares.start(EngineSpec(), 64)
    assert len(psutil.Process().children()) == before + MOST
    spares.end()
    assert len(psutil.Process().children()) == before


def test_a_fork_leaves_them_alone(ready: set[int]) -> None:
    """A child of this process takes none and ends none."""
    if (child := os.fork()) == 0:
        SPARES.end()
        os._exit(0 if SPARES.take(import_path(), thread_variables(1)) is None else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert all(is_alive(psutil.Process(pid)) for pid in ready)


def test_a_small_job_starts_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder, a larger file, and rows in memory more."""
    begun: list[int] = []
    monkeypatch.setattr(SPARES, "start", lambda spec, cores, imports, most: begun.append(most))
    small, large = tmp_path / "small.jsonl", tmp_path / "large.jsonl"
    small.write_text('{"x": 1}\n')
    large.write_bytes(b'{"x": 1}\n' * (1 << 19))
    model = FunctionModel(Call(len))
    for source, most in [
        (Source((str(small),)), 1),
        (Source((str(small), str(small))), 1),
        (Source((str(large),)), MOST),
        (Source((str(tmp_path),)), MOST),
        (Source((str(tmp_path / "*.jsonl"),)), MOST),
        (Source(data=[{"x": 1}]), MOST),
    ]:
        warmup.start(JobSpec(source, model))
        assert begun.pop() == most, source


@pytest.mark.parametrize(
    "begin",
    [
        "from gristmill.cli import main; main(['apply', 'rows.jsonl', 'out', '--fn', 'builtins:len', '--keep', 'x'])",
        "import gristmill as gm; gm.run(gm.Job(source='rows.jsonl', model=len, sink='out'))",
    ],
    ids=["command", "Python"],
)
def test_they_start_before_arrow_is_imported(tmp_path: Path, begin: str) -> None:
    """Both then import at the same time: what this process imports before is time that its workers wait for."""
    (tmp_path / "rows.jsonl").write_text('{"x": 1}\n')
    code = (
        "import os, sys\nfrom gristmill.driver import warmup\n"
        "def start(spec):\n"
        "    print([m for m in ('numpy', 'pyarrow') if m in sys.modules], flush=True)\n    os._exit(0)\n"
        f"warmup.start = start\n{begin}"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert (ran.stdout.strip(), ran.stderr) == ("[]", "")


def test_a_job_that_cannot_run_leaves_none(tmp_path: Path) -> None:
    """They are ended where planning fails."""
    (tmp_path / "rows.jsonl").write_bytes(b'{"x": 1}\n' * (1 << 19))
    before = {p.pid for p in psutil.Process().children()}
    with pytest.raises(BadJob):
        gm.run(gm.Job(source=tmp_path / "rows.jsonl", model=len, sink=tmp_path / "out", keep=["y"], workers=2))
    assert {p.pid for p in psutil.Process().children()} <= before


def test_one_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    """A driver that is killed while it plans leaves no interpreter behind."""
    code = (
        "import os, time\nfrom gristmill.engines.interpreter import SPARES\n"
        "from gristmill.job.options import EngineSpec\n"
        "SPARES.start(EngineSpec(workers=2), 2)\nprint('started', flush=True)\ntime.sleep(60)\n"
    )
    driver = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert driver.stdout is not None and driver.stdout.readline() == b"started\n"
    children = psutil.Process(driver.pid).children()
    driver.kill()
    driver.communicate()
    assert len(children) == 2
    deadline = time.monotonic() + 10
    while any(is_alive(p) for p in children):
        assert time.monotonic() < deadline
        time.sleep(0.05)
