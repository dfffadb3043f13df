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


def vectors(batch: dict[str, Any]) -> dict[str, Any]:
    """A column that neither names folders nor has an order."""
    return {"v": [[x] for x in batch["x"]]}


def halved(batch: dict[str, Any]) -> dict[str, Any]:
    """A step, whose columns only rows can tell."""
    return {**batch, "x": batch["x"] / 2}


def made(tmp_path: Path, **options: Any) -> gm.Job:
    """A job over ten rows."""
    rows = str(tmp_path / "rows.parquet")
    if not Path(rows).exists():
        pq.write_table(pa.table({"id": range(10), "x": [float(n) for n in range(10)], "z": range(10)}), rows)
    names = ("partition_by", "sort_by", "index", "row_id", "model_version")
    sink = {name: options.pop(name) for name in names if name in options}
    source, fn = gm.source(rows, columns=options.pop("columns", None)), options.pop("fn", doubled)
    return gm.Job(source, fn, gm.sink(str(tmp_path / "out"), keep=["id"], **sink), workers=0, **options)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"gates": {"drift": {"yy": {}}}}, "gates.drift names column 'yy'"),
        ({"deliver": "sqlite://{}/s.sqlite"}, "name a table"),
        ({"deliver": "sqlite://{}/no/s.sqlite#t"}, "there is no folder"),
        ({"deliver": "sqlite://{}/s.sqlite?mode=upsert&key=idd#t"}, "key names column 'idd'"),
        ({"deliver": "lmdb://{}/s.lmdb?key=y"}, "key column 'y' is double"),
        ({"partition_by": "yy"}, "partition_by names 'yy', which is neither"),
        ({"partition_by": ["id", "y"]}, "partition_by names every output column"),
        ({"partition_by": "v", "fn": vectors}, "partition_by names 'v', a list"),
        ({"partition_by": "x", "columns": ["id", "x"], "sort_by": "z"}, "sort_by names 'z', which is not an output"),
        ({"partition_by": "z", "columns": ["id", "x"]}, "partition_by names 'z', which is neither"),
        ({"partition_by": "zz", "steps": [gm.step(halved)]}, "partition_by names 'zz', which is neither"),
        ({"sort_by": "v", "fn": vectors}, "sort_by names 'v', a list"),
        ({"sort_by": "zz", "steps": [gm.step(halved)]}, "sort_by names 'zz', which is not an output column"),
        ({"gates": {"drift": {"z": {}}}, "columns": ["id", "x"]}, "gates.drift names column 'z', which is neither"),
        ({"gates": {"drift": {"zz": {}}}, "steps": [gm.step(halved)]}, "gates.drift names column 'zz'"),
        ({"gates": {"against": "{}/gone"}}, "gates.against names"),
        ({"index": "yy"}, "index names column 'yy'"),
    ],
)
def test_what_the_run_refuses(options: dict[str, Any], told: str, tmp_path: Path) -> None:
    """In the same words, but where a store is looked at; nothing is left behind."""
    options = {name: value.format(tmp_path) if name == "deliver" else value for name, value in options.items()}
    job = made(tmp_path, **options)
    with pytest.raises(gm.BadJob, match=told) as previewed:
        job.preview(2)
    assert [one.name for one in tmp_path.iterdir()] == ["rows.parquet"]
    with pytest.raises(gm.BadJob) as refused:
        job.run()
    if "deliver" not in options:
        assert str(previewed.value) == str(refused.value)


@pytest.mark.parametrize("named", ["drift", "against"])
def test_what_a_plan_refuses_of_gates(named: str, tmp_path: Path) -> None:
    """As far as it is known without the rows: columns of a model that says which it adds, and what is compared with."""
    model = gm.model(doubled, returns={"y": "float64"})
    gates = {"drift": {"z": {}}} if named == "drift" else {"against": str(tmp_path / "gone")}
    job = made(tmp_path, fn=model, columns=["id", "x"], gates=gates)
    for verb in (job.plan, job.preview, job.run):
        with pytest.raises(gm.BadJob, match=f"gates.{named} names"):
            verb()
    made(tmp_path, fn=model, gates={"drift": {"z": {}, "y": {}}}).plan()


@pytest.mark.parametrize("returns", [None, {"y": "float64"}])
def test_folders_by_what_the_job_itself_writes(returns: dict[str, str] | None, tmp_path: Path) -> None:
    """The model's version and the row's id are columns like others, whether or not a model says which it adds."""
    model = doubled if returns is None else gm.model(doubled, returns=returns)
    sink = {"model_version": "version", "row_id": "row", "partition_by": ["version", "row"], "sort_by": "version"}
    job = made(tmp_path, fn=model, **sink)
    assert job.plan().problems == []
    assert sorted(job.preview(2).column_names) == ["id", "row", "version", "y"]
    assert gm.read(job.run().sink).count_rows() == 10


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
