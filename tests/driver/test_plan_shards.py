"""How many shards a plan says that there are: exactly as many as the run has, or said to be about that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import gristmill as gm
from gristmill.driver.planview import PlanView
from gristmill.driver.views import plan


def same(batch: dict[str, Any]) -> dict[str, Any]:
    """So quick that its shards are larger than those of a function that nobody has timed."""
    return {"y": batch["x"]}


def made(tmp_path: Path, rows: int, end: str = "parquet", **options: Any) -> gm.Job:
    """A job over so many rows, in a file of that format."""
    path = tmp_path / f"rows.{end}"
    if end == "parquet":
        pq.write_table(pa.table({"x": range(rows)}), path)
    else:
        path.write_text("".join(f'{{"x": {n}}}\n' for n in range(rows)))
    return gm.Job(str(path), same, str(tmp_path / "out"), **{"workers": 2, **options})


def line(view: PlanView) -> str:
    """What a person is told of the shards."""
    return next(told for told in str(view).splitlines() if told.startswith("shards")).removeprefix("shards").strip()


@pytest.mark.parametrize(
    ("rows", "end", "options", "settled"),
    [
        (200, "parquet", {}, ""),
        (60_000, "parquet", {}, "settled once the model is timed"),
        (60_000, "parquet", {"shard_rows": 10_000}, ""),
        (60_000, "jsonl", {"shard_rows": 10_000}, "by the rows that are estimated"),
    ],
)
def test_a_first_run(rows: int, end: str, options: dict[str, Any], settled: str, tmp_path: Path) -> None:
    """An exact number is the run's; of a quick function that is other than without its time, and said to be about."""
    job = made(tmp_path, rows, end, **options)
    view = plan(job.spec)
    assert line(view) == (f"about {view.shards} ({settled})" if settled else f"{view.shards}")
    assert view.shards_estimated == bool(settled)
    done = job.run().shards_done
    assert (done < view.shards) if "timed" in settled else (done == view.shards)
    view = plan(job.spec)
    assert (line(view), view.idle) == (str(done), True)


def test_what_is_there_already(tmp_path: Path) -> None:
    """The plan of a run that was stopped has its own shards; what is new is divided by the run."""

    def unsure(batch: dict[str, Any]) -> dict[str, Any]:
        return {"y": [float("nan") if 20_000 < x < 30_000 else x for x in batch["x"]]}

    for name, first in (("a", 0), ("b", 60_000)):
        pq.write_table(pa.table({"x": range(first, first + 60_000)}), tmp_path / f"{name}.parquet")
    job = gm.Job(str(tmp_path / "a.parquet"), unsure, str(tmp_path / "out"), workers=0, update={"key": ["x"]})
    with pytest.raises(gm.GateFailed):
        job.run()
    begun = plan(job.spec)
    assert (line(begun), begun.shards_estimated) == (str(job.run(accept=True).shards_done), False)
    (tmp_path / "b.parquet").rename(tmp_path / "a.parquet")
    changed = plan(job.spec)
    assert changed.shards_estimated and "a run divides what it has to score" in line(changed)
