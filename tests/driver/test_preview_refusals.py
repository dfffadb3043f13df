"""A preview refuses what the run of the same job would refuse, as far as its rows show it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import gristmill as gm
from gristmill.driver.views import preview


def doubled(batch: dict[str, Any]) -> dict[str, Any]:
    """A function, whose columns only rows can tell."""
    return {"y": batch["x"] * 2}


def made(tmp_path: Path, **options: Any) -> gm.Job:
    """A job over ten rows."""
    rows = str(tmp_path / "rows.parquet")
    if not Path(rows).exists():
        pq.write_table(pa.table({"id": range(10), "x": [float(n) for n in range(10)]}), rows)
    sink = {name: options.pop(name) for name in ("partition_by", "sort_by", "index") if name in options}
    return gm.Job(rows, doubled, gm.sink(str(tmp_path / "out"), keep=["id"], **sink), workers=0, **options)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"gates": {"drift": {"yy": {}}}}, "gates.drift names column 'yy'"),
        ({"deliver": "sqlite://{}/s.sqlite"}, "name a table"),
        ({"deliver": "sqlite://{}/no/s.sqlite#t"}, "there is no folder"),
        ({"deliver": "sqlite://{}/s.sqlite?mode=upsert&key=idd#t"}, "key names column 'idd'"),
        ({"deliver": "lmdb://{}/s.lmdb?key=y"}, "key column 'y' is double"),
        ({"partition_by": "yy"}, "partition_by names column 'yy'"),
        ({"index": "yy"}, "index names column 'yy'"),
    ],
)
def test_what_the_run_refuses(options: dict[str, Any], told: str, tmp_path: Path) -> None:
    """In the same words for gates and deliveries; nothing is left behind."""
    options = {name: value.format(tmp_path) if name == "deliver" else value for name, value in options.items()}
    job = made(tmp_path, **options)
    with pytest.raises(gm.BadJob, match=told):
        job.preview(2)
    assert [one.name for one in tmp_path.iterdir()] == ["rows.parquet"]
    with pytest.raises(gm.BadJob):
        job.run()


def test_nothing_is_published(tmp_path: Path) -> None:
    """Nor is it said so while it runs."""
    phases: list[str] = []

    class Phases:
        def progress(self, now: Any) -> None:
            phases.append(now.phase)

        def note(self, note: Any) -> None: ...

        def close(self) -> None:
            phases.append("closed")

    preview(made(tmp_path).spec, 2, Phases())
    assert "running" in phases and "publishing" not in phases and phases[-1] == "closed"


def test_what_the_run_takes(tmp_path: Path) -> None:
    """Also where a store has later results of the sink than a first run would bring, or is not there now."""
    to = f"sqlite://{tmp_path}/s.sqlite#t"
    job = made(tmp_path, deliver=to, partition_by="id", sort_by="y", gates={"drift": {"y": {}, "x": {}}})
    assert job.preview(2).num_rows == 2 and not (tmp_path / "s.sqlite").exists()
    job.run()
    job.run(restart=True)
    assert job.preview(2).num_rows == 2
    assert made(tmp_path, deliver="postgresql://127.0.0.1:9/x#t").preview(2).num_rows == 2


@pytest.mark.parametrize("made_by_a_step", [False, True])
def test_keys_that_are_folders_of_the_result(made_by_a_step: bool, tmp_path: Path) -> None:
    """A preview has no folders, and the run has: an index or a delivery by such a column fits."""
    rows, options = str(tmp_path / "rows.parquet"), {}
    pq.write_table(pa.table({"id": range(10), "x": [float(n) for n in range(10)], "day": ["a", "b"] * 5}), rows)
    if made_by_a_step:
        options["steps"] = [gm.step(lambda batch: {**batch, "part": [f"p{n % 2}" for n in batch["id"]]})]
    by = "part" if made_by_a_step else "day"
    sink = gm.sink(str(tmp_path / "out"), keep=["id"], partition_by=by, index=[by, "id"])
    to = f"sqlite://{tmp_path}/s.sqlite?mode=upsert&key={by}&key=id#t"
    job = gm.Job(rows, doubled, sink, workers=0, deliver=to, **options)
    assert job.preview(2).num_rows == 2
    assert job.run().rows_ok == 10
    assert job.preview(2).num_rows == 2
