"""Columns that `partition_by` names are carried over without being named in `keep`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import gristmill as gm

ROWS = pa.table({"id": list(range(9)), "x": [float(i) for i in range(9)], "day": ["a", "b", "c"] * 3})


def twice(batch: Any) -> Any:
    return {"y": batch["x"] * 2}


def own_day(batch: Any) -> Any:
    return {"y": batch["x"] * 2, "day": [f"of {d}" for d in batch["day"]]}


def one_day(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"y": r["x"], **({"day": "own"} if r["id"] == 5 else {})} for r in rows]


@pytest.mark.parametrize("keep", [None, ["id"], ["day", "id"]])
def test_columns_that_name_folders_are_carried_over(keep: list[str] | None, tmp_path: Path) -> None:
    """Of a function that returns others; beside what keep names."""
    out = tmp_path / "out"
    gm.apply(ROWS, str(out), fn=twice, partition_by=["day"], workers=0, **({} if keep is None else {"keep": keep}))
    found = gm.read(str(out)).to_table().sort_by("y")
    assert found["day"].to_pylist() == ROWS["day"].to_pylist()
    assert sorted(p.name for p in out.iterdir() if p.is_dir() and "=" in p.name) == ["day=a", "day=b", "day=c"]
    assert ("id" in found.column_names) == (keep is not None)


def test_answers_of_that_name_are_what_rows_are_partitioned_by(tmp_path: Path) -> None:
    """A function that returns such a column means its own; asked for in keep, the two are refused as ever."""
    gm.apply(ROWS, str(tmp_path / "out"), fn=own_day, partition_by=["day"], workers=0, shard_rows=2)
    found = gm.read(str(tmp_path / "out")).to_table().sort_by("y")
    assert found["day"].to_pylist() == [f"of {d}" for d in ROWS["day"].to_pylist()]
    with pytest.raises(gm.BadJob, match="would appear twice"):
        gm.apply(ROWS, str(tmp_path / "two"), fn=own_day, partition_by=["day"], keep=["day"], workers=0)


def test_answers_and_source_are_not_mixed_in_one_column(tmp_path: Path) -> None:
    """Where a later row answers in the column that the first rows carried over, the run stops."""
    job = gm.Job(
        ROWS,
        gm.model(one_day, batch_format="rows"),
        gm.sink(str(tmp_path / "out"), partition_by=["day"]),
        workers=0, batch_rows=2, shard_rows=2,
    )  # fmt: skip
    with pytest.raises(gm.GristmillError, match="have a column 'day', which those of the first rows did not"):
        job.run()


@pytest.mark.parametrize("after", [lambda b: {"z": b["y"]}, lambda b: {**b}, lambda b: {"y": b["y"], "day": b["day"]}])
def test_post_steps_change_nothing_of_that(after: Any, tmp_path: Path) -> None:
    """Whatever they return of the rows: a new column alone, all of them, or the one that names folders."""
    sink = gm.sink(str(tmp_path / "out"), keep=["id"], partition_by=["day"])
    gm.Job(ROWS, twice, sink, post=[after], workers=0, shard_rows=2).run()
    found = gm.read(str(tmp_path / "out")).to_table().sort_by("id")
    assert found["day"].to_pylist() == ROWS["day"].to_pylist() and gm.verify(str(tmp_path / "out")).ok


def test_a_column_that_steps_make_is_carried_over(tmp_path: Path) -> None:
    """It need not be the source's own."""
    job = gm.Job(
        ROWS,
        twice,
        gm.sink(str(tmp_path / "out"), partition_by=["part"]),
        steps=[lambda b: {**b, "part": b["id"] % 2}],
        workers=0,
    )
    job.run()
    assert gm.read(str(tmp_path / "out")).to_table().sort_by("y")["part"].to_pylist() == [i % 2 for i in range(9)]


def test_columns_of_post_steps_and_of_the_sink_name_folders(tmp_path: Path) -> None:
    """A column that post makes of the answers, and the version of the model: neither is the source's to carry over."""
    post = gm.Job(
        ROWS, twice, gm.sink(str(tmp_path / "post"), partition_by=["big"]),
        post=[lambda b: {"y": b["y"], "big": b["y"] > 6}], workers=0, shard_rows=2,
    )  # fmt: skip
    post.run()
    assert sorted(p.name for p in (tmp_path / "post").glob("big=*")) == ["big=false", "big=true"]
    version = gm.sink(str(tmp_path / "version"), partition_by=["v"], model_version="v")
    gm.Job(ROWS, twice, version, workers=0).run()
    assert len([*(tmp_path / "version").glob("v=*")]) == 1
