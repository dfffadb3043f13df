"""workers=0: what a fresh process does elsewhere, a fresh worker in the same one does; and a child that user code forks
does nothing.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pretended import Feed, Stages

import gristmill as gm
from gristmill.engines.crew import BEAT
from gristmill.engines.local import Local


def only_whole(batch: dict) -> dict:
    """Works for the batch of the first rows, and for no row of another."""
    if len(batch["id"]) != 64:
        raise ValueError("not of 64 rows")
    return {"y": batch["id"]}


def fails_at_first(batch: dict, marker: str) -> dict:
    """Fails for every batch that is not whole, until it has failed often enough to be taken for sick."""
    path = Path(marker)
    tried = path.read_text() if path.exists() else ""
    if len(batch["id"]) != 64 and len(tried) < 45:
        path.write_text(tried + "x")
        raise ValueError("the licence server is away")
    return {"y": batch["id"]}


def run(fn: object, folder: Path, **args: object) -> gm.Report:
    """A job of 150 rows in one shard."""
    rows = [{"id": i} for i in range(150)]
    model = gm.model(fn, **args)
    return gm.Job(rows, model, gm.sink(str(folder / "out"), keep=["id"]), workers=0, batch_rows=64).run()


def readers() -> int:
    """Reading threads of workers."""
    return sum("_read" in t.name for t in threading.enumerate())


@pytest.mark.timeout(60)
def test_a_model_that_stays_sick_stops_the_run(tmp_path: Path) -> None:
    """A worker that gives up because a row that worked fails is followed by others, but not for ever."""
    before = readers()
    with pytest.raises(gm.RunFailed, match="not of 64 rows"):
        run(only_whole, tmp_path)
    until = time.monotonic() + 10
    while readers() > before and time.monotonic() < until:
        time.sleep(0.05)  # one that was handing something over looks twice a second whether anybody takes it
    assert readers() == before


@pytest.mark.timeout(60)
def test_a_model_that_is_well_again_goes_on(tmp_path: Path) -> None:
    """What the worker that left gave back is done by the next one."""
    report = run(fails_at_first, tmp_path, marker=str(tmp_path / "tried"))
    assert (report.rows_ok, report.rows_dead) == (150, 0)
    assert np.array_equal(report.read().to_table()["y"].to_numpy(), np.arange(150))


def test_the_end_of_the_worker_is_seen_at_once() -> None:
    """Not at the next look at the clock, which would be most of the time of a small job."""
    took = []
    for _ in range(5):
        feed = Feed([("echo", 1)], workers=1)
        begun = time.monotonic()
        for event in Local(0).run(Stages(), feed):
            feed.on(event)
        took.append(time.monotonic() - begun)
        assert set(feed.ended) == {0}
    assert min(took) < BEAT


def ended(how: str) -> int:
    """The exit code of a forked child that leaves the function which called this in some way; -1 if it does not end."""
    child = os.fork()
    if child == 0:
        if how == "raises":
            raise RuntimeError("raised by the child")
        return 100
    for _ in range(500):
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return -1


class Forking:
    """Adds a column with how a child ended, that came out of its building and out of the call."""

    def __init__(self, name: str, how: str) -> None:
        self._name, self._how, self._built = name, how, ended(how)

    def __call__(self, batch: Any) -> Any:
        code = 1000 * self._built + ended(self._how)
        if isinstance(batch, list):
            return [code] * len(batch)
        return {self._name: np.full(len(batch["id"]), code)}


class Keeping(Forking):
    """A filter: what the child leaves with is not asked."""

    def __call__(self, batch: Any) -> Any:
        found = super().__call__(batch)[self._name]
        return found == found[0]


def pieces(row: dict, how: str) -> Iterator[dict]:
    """A generator, out of which the child comes when it is read."""
    code = ended(how)
    yield {"flat": code}


@pytest.mark.timeout(60)
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(("how", "code"), [("raises", 1), ("returns", 0)])
def test_a_forked_child_of_user_code_is_no_second_worker(tmp_path: Path, workers: int, how: str, code: int) -> None:
    """A child that comes out of a model, a step, a filter, a flat_map or a post step ends there, and it alone."""
    job = gm.Job(
        [{"id": i} for i in range(3)],
        gm.model(Forking, name="model", how=how),
        gm.sink(str(tmp_path / "out"), keep=["id", "step", "flat"]),
        steps=[
            gm.step(Forking, name="step", how=how),
            gm.filter(Keeping, name="kept", how=how),
            gm.flat_map(pieces, how=how),
        ],
        post=[gm.step(Forking, name="post", how=how)],
        workers=workers,
    )
    report = job.run()
    found = report.read().to_table().to_pylist()
    both = 1001 * code
    assert found == [{"id": i, "step": both, "flat": code, "model": both, "post": both} for i in range(3)]
