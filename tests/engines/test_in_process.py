"""workers=0: what a fresh process does elsewhere, a fresh worker in the same one does."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest

import gristmill as gm


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
