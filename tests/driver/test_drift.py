"""Sources whose files differ: in columns that nobody reads it does not matter, else there is a way out that works."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pcsv
import pyarrow.parquet as pq
import pytest

import gristmill as gm
from gristmill.commit.generation import generations
from gristmill.errors import BadOutput

BASE = {"id": "int64", "x": "double", "qty": "int64"}


def score(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Says nothing of what it reads."""
    return {"s": batch["x"] * 2 + batch["qty"]}


def seen(batch: Mapping[str, Any]) -> dict[str, Any]:
    """What it is given, and which of the notes are null."""
    nulls = [str(n) if n is not None else None for n in batch.get("note", [None] * len(batch["id"]))]
    return {"given": [",".join(batch)] * len(batch["id"]), "said": np.array(nulls, dtype=object)}


def write(folder: Path, name: str, start: int, kind: str, qty: Any = None, **more: Any) -> None:
    """Ten rows from `start` in a file."""
    folder.mkdir(exist_ok=True)
    ids = np.arange(start, start + 10)
    table = pa.table({"id": ids, "x": ids / 4, "qty": ids % 7 if qty is None else qty, **more})
    path = folder / f"{name}.{kind}"
    if kind == "parquet":
        pq.write_table(table, path)
    elif kind == "csv":
        pcsv.write_csv(table, path)
    else:
        table.to_pandas().to_json(path, orient="records", lines=True)


def notes(start: int) -> list[str]:
    """The values of a column that came later."""
    return [f"n{i}" for i in range(start, start + 10)]


def job(tmp: Path, model: Any = score, source: Mapping[str, Any] | None = None, **sink: Any) -> gm.Job:
    """A function over the folder `in`."""
    given = gm.source(f"{tmp / 'in'}/", **(source or {}))
    return gm.Job(given, model, gm.sink(str(tmp / "out"), **{"keep": ["id", "qty"], **sink}), workers=0)


KINDS = pytest.mark.parametrize("kind", ["parquet", "csv"])


@KINDS
def test_a_column_that_is_left_out_with_columns_may_be_in_some_files_only(kind: str, tmp_path: Path) -> None:
    """`columns=` is the way out that the message names, and what it names is what is read."""
    write(tmp_path / "in", "a", 0, kind)
    write(tmp_path / "in", "b", 10, kind, note=notes(10))
    with pytest.raises(gm.BadSource, match=r"'note' is missing in .*a\..*--columns id,x,qty, columns="):
        job(tmp_path).run()
    report = job(tmp_path, source={"columns": ["id", "x", "qty"]}).run()
    table = gm.read(report.sink).to_table()
    assert table["s"].to_pylist() == [i / 2 + i % 7 for i in range(20)]


@KINDS
def test_naming_the_columns_that_were_read_before_is_the_same_job(kind: str, tmp_path: Path) -> None:
    """A file with another column is appended once `columns=` names the others: that is no other option."""
    write(tmp_path / "in", "a", 0, kind)
    assert job(tmp_path).run().rows_ok == 10
    named = {"columns": ["id", "x", "qty"]}
    assert job(tmp_path, source=named).run().generation == 1
    write(tmp_path / "in", "b", 10, kind, note=notes(10))
    with pytest.raises(gm.BadSource, match="'note' is missing"):
        job(tmp_path).run(append=True)
    report = job(tmp_path, source=named).run(append=True)
    assert (report.generation, report.rows_ok) == (2, 20)
    with pytest.raises(gm.PlanChanged, match=r"source\.columns was .*, is \[\"id\", \"x\"\]"):
        job(tmp_path, source={"columns": ["id", "x"]}, keep=["id"]).run()


def test_other_columns_are_another_job(tmp_path: Path) -> None:
    """What a function is given shapes its answers: other columns, or another order, are refused."""
    write(tmp_path / "in", "a", 0, "parquet")
    job(tmp_path, seen).run()
    for other in (["id", "x"], ["qty", "id", "x"]):
        with pytest.raises(gm.PlanChanged, match=r"source\.columns was not given"):
            job(tmp_path, seen, {"columns": other}, keep=["id"]).run()


@pytest.mark.parametrize("some", [{"limit": 15}, {"sample": 8}])
def test_the_order_of_files_counts_where_only_some_rows_are_taken(some: dict[str, Any], tmp_path: Path) -> None:
    """The first rows of other files are other rows; of all rows any order is the same job."""

    def scored(names: str, some: dict[str, Any]) -> gm.Report:
        source = gm.source(*(str(tmp_path / "in" / f"{name}.csv") for name in names), **some)
        return gm.Job(source, score, gm.sink(str(tmp_path / f"out{len(some)}"), keep=["id"]), workers=0).run()

    write(tmp_path / "in", "a", 0, "csv")
    write(tmp_path / "in", "b", 100, "csv")
    scored("ab", some)
    assert scored("ab", some).state == "nothing to do"
    with pytest.raises(gm.PlanChanged, match=r"source.uri in order was .*a.csv"):
        scored("ba", some)
    scored("ab", {})
    assert scored("ba", {}).state == "nothing to do"


@KINDS
@pytest.mark.parametrize("drift", ["missing", "type"])
def test_drift_in_a_column_that_nobody_reads_is_no_reason_to_refuse(kind: str, drift: str, tmp_path: Path) -> None:
    """Where model, conditions and keep say what is read, nothing else matters, also beside a filter."""
    write(tmp_path / "in", "a", 0, kind, **({} if drift == "missing" else {"note": list(range(10))}))
    write(tmp_path / "in", "b", 10, kind, note=notes(10))
    model = gm.model(score, takes={"x": "float64", "qty": "int64"})
    steps = [gm.filter("id % 2 = 0")]
    source = gm.source(f"{tmp_path / 'in'}/", where="x >= 0")
    sink = gm.sink(str(tmp_path / "out"), keep=["id"])
    report = gm.Job(source, model, sink, steps=steps, workers=0).run()
    assert gm.read(report.sink).to_table()["id"].to_pylist() == list(range(0, 20, 2))
    with pytest.raises(gm.BadSource, match="column 'note' is"):
        gm.Job(gm.source(f"{tmp_path / 'in'}/", where="note = 'n11'"), model, sink, workers=0).run(restart=True)


@pytest.mark.parametrize("kind", ["parquet", "csv", "jsonl"])
@pytest.mark.parametrize("where", [None, "id % 3 = 0"])
def test_with_evolve_what_a_file_lacks_is_null(kind: str, where: str | None, tmp_path: Path) -> None:
    """The rows of a file without the column have null there, whoever reads it; a plain run finds nothing to do."""
    write(tmp_path / "in", "a", 0, kind)
    write(tmp_path / "in", "b", 10, kind, note=notes(10))
    report = job(tmp_path, seen, {"where": where}, evolve=True, keep=["note", "id"]).run()
    table = gm.read(report.sink).to_table()
    ids = [i for i in range(20) if where is None or i % 3 == 0]
    wanted = [None if i < 10 else f"n{i}" for i in ids]
    assert (table["id"].to_pylist(), table["note"].to_pylist(), table["said"].to_pylist()) == (ids, wanted, wanted)
    again = job(tmp_path, seen, {"where": where}, keep=["note", "id"]).run()
    assert (again.state, again.generation) == ("nothing to do", 1)


@pytest.mark.parametrize("nulls", [False, True])
@pytest.mark.parametrize("append", [False, True])
def test_a_column_that_is_not_null_in_one_file_only_is_read_as_one(nulls: bool, append: bool, tmp_path: Path) -> None:
    """That one writer marks a column so binds no other: rows of both files in one window and one result, in which a
    step's column may be the one that it was given."""
    (tmp_path / "in").mkdir()
    for part, (start, bound) in enumerate([(0, True), (10, False)]):
        table = pa.table({"id": range(start, start + 10), "v": [None if nulls and part else 7] * 10})
        table = table.cast(pa.schema([pa.field(n, pa.int64(), nullable=not bound) for n in table.column_names]))
        pq.write_table(table, tmp_path / "in" / f"{part}.parquet")
        if append or part:
            sink, steps = gm.sink(str(tmp_path / "out")), [gm.step(_same, batch_format="arrow")]
            made = gm.Job(f"{tmp_path / 'in'}/", gm.model(_doubled, batch_format="arrow"), sink, steps=steps, workers=0)
            made.run(append=bool(part and append))
    result = gm.read(str(tmp_path / "out")).to_table()
    assert result["y"].to_pylist() == list(range(0, 40, 2))
    assert result["v"].to_pylist() == [7] * 10 + [None if nulls else 7] * 10
    assert gm.verify(str(tmp_path / "out"), deep=True).ok
    assert made.run(restart=True).rows_ok == 20


def _same(table: pa.Table) -> pa.Table:
    return table


def _doubled(table: pa.Table) -> pa.Table:
    return table.append_column("y", pc.multiply(table["id"], 2))


@KINDS
def test_a_column_that_comes_later_is_appended_with_evolve(kind: str, tmp_path: Path) -> None:
    """Rows of before have null in it, also where all columns are kept."""
    write(tmp_path / "in", "a", 0, kind)

    def made(**sink: Any) -> gm.Job:
        source, sinks = gm.source(f"{tmp_path / 'in'}/"), gm.sink(str(tmp_path / "out"), **sink)
        return gm.Job(source, gm.model(_all, batch_format="arrow"), sinks, workers=0)

    made().run()
    write(tmp_path / "in", "b", 10, kind, note=notes(10))
    with pytest.raises(gm.BadSource, match=r"--evolve \(evolve=True\)"):
        made().run(append=True)
    assert len(generations(str(tmp_path / "out"))) == 1
    report = made(evolve=True).run(append=True)
    table = gm.read(report.sink).to_table()
    assert table["note"].to_pylist() == [*[None] * 10, *notes(10)]
    assert gm.verify(report.sink, deep=True).ok
    assert made().run().generation == 2


def _all(table: pa.Table) -> pa.Table:
    return table.append_column("s", table["x"])


@pytest.mark.parametrize("kind", ["parquet", "csv", "jsonl"])
@pytest.mark.parametrize("form", ["parquet", "jsonl"])
@pytest.mark.few(3)
def test_whole_numbers_become_floats_with_evolve_where_each_is_exact(kind: str, form: str, tmp_path: Path) -> None:
    """The result's and the new rows': then the column is one of floats for all, and reads so."""
    write(tmp_path / "in", "a", 0, kind)
    job(tmp_path, format=form).run()
    write(tmp_path / "in", "b", 10, kind, qty=np.arange(10) / 2)
    with pytest.raises((gm.BadSource, gm.PlanChanged), match="evolve=True"):
        job(tmp_path, format=form).run(append=True)
    report = job(tmp_path, format=form, evolve=True).run(append=True)
    table = gm.read(report.sink).to_table()
    assert table["qty"].to_pylist() == [*[float(i % 7) for i in range(10)], *[i / 2 for i in range(10)]]
    assert table.schema.field("qty").type == pa.float64() and gm.verify(report.sink, deep=True).ok
    assert job(tmp_path, format=form).run().state == "nothing to do"


def test_evolve_says_why_it_does_not_widen(tmp_path: Path) -> None:
    """A whole number of the result that a float does not hold; and types that nothing holds."""
    write(tmp_path / "in", "a", 0, "jsonl", qty=np.arange(10) + 2**53)
    job(tmp_path).run()
    write(tmp_path / "in", "b", 10, "jsonl", qty=np.arange(10) / 2)
    with pytest.raises(gm.GristmillError, match=r"column 'qty' was int64, is double, which cannot hold every value"):
        job(tmp_path, evolve=True).run(append=True)
    (tmp_path / "in" / "b.jsonl").unlink()
    assert job(tmp_path).run().state == "nothing to do"


@pytest.mark.parametrize("how", [{"partition_by": ["k"]}, {"format": "jsonl"}], ids=["folders", "jsonl"])
def test_evolve_does_not_widen_floats_that_stand_as_text(how: Mapping[str, Any], tmp_path: Path) -> None:
    """float32's few digits are other numbers as float64: what is published stays, and float32 can be appended."""
    few = np.array([0.1, 0.7] * 5, dtype=np.float32)
    write(tmp_path / "in", "a", 0, "parquet", k=few, v=pa.array([[x] for x in few], pa.list_(pa.float32())))
    given = {"keep": ["id", "k", "v"], "evolve": True, **how}
    report = job(tmp_path, **given).run()
    before = gm.read(report.sink).to_table().sort_by("id")
    for name in ["k"] if "partition_by" in how else ["k", "v"]:
        more = {"k": few, "v": [[x] for x in few], name: before[name].cast(pa.float64() if name == "k" else DOUBLES)}
        write(tmp_path / "in", "b", 10, "parquet", **more)
        with pytest.raises(gm.PlanChanged, match=f"column '{name}' was .*float.* would be .*a step can cast it"):
            job(tmp_path, **given).run(append=True)
    assert gm.read(report.sink).to_table().sort_by("id").equals(before)
    write(tmp_path / "in", "b", 10, "parquet", k=few, v=before["v"])
    job(tmp_path, **given).run(append=True)
    assert gm.read(report.sink).to_table().sort_by("id")["k"].to_pylist() == [*before["k"].to_pylist()] * 2


DOUBLES = pa.list_(pa.float64())


def test_evolve_says_that_no_type_holds_both(tmp_path: Path) -> None:
    """Numbers and text."""
    write(tmp_path / "in", "a", 0, "parquet")
    job(tmp_path, worded).run()
    write(tmp_path / "in", "b", 10, "parquet")
    with pytest.raises(gm.PlanChanged, match=r"(?s)s was int64, is string.*without loss"):
        job(tmp_path, worded, evolve=True).run(append=True)


def worded(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers, and later text."""
    return {"s": [str(i) if i >= 10 else int(i) for i in batch["id"]]}


def whole(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Twice x; where it is told to, it stops the run in the middle, or fails at one row."""
    if "STOP" in os.environ and (batch["x"] >= 60).any():
        return {"s": [1.0]}
    if "DOWN" in os.environ and (batch["x"] == 70).any():
        raise ConnectionError("away")
    return {"s": batch["x"] * 2}


LATER = {
    "plain": ({}, {}, [], {"x": ["7", "n/a"]}),
    "takes": ({"takes": {"x": "int64"}}, {}, [], {"x": ["7", "n/a"]}),
    "where": ({}, {"where": "x + 1 > 0"}, [], {"x": ["7", "n/a"]}),
    "filter": ({}, {}, ["x * 2 >= 0"], {"x": ["7", "n/a"]}),
    "nulls": ({"takes": {"x": "int64 not null"}}, {}, [], {"x": [1, None] * 300}),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("what", LATER)
def test_a_file_that_came_later_is_none_of_a_plan_s_matter(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unfinished run goes on, dead rows are scored again, and the job is told what is new, although it cannot be run
    over what has come: that is refused where it is to be appended.
    """
    options, source, filters, columns = LATER[what]
    pq.write_table(pa.table({"x": range(100)}), _made(tmp_path / "in") / "day1.parquet")
    job = gm.Job(
        gm.source(f"{tmp_path / 'in'}/", **source), gm.model(whole, **options),
        gm.sink(str(tmp_path / "out"), keep=["x"]), steps=[gm.filter(f) for f in filters], workers=0, shard_rows=10,
        batch_rows=10, gates={"min_ok": 0.9},
    )  # fmt: skip
    monkeypatch.setenv("STOP", "1")
    with pytest.raises(BadOutput):
        job.run()
    monkeypatch.delenv("STOP")
    monkeypatch.setenv("DOWN", "1")
    pq.write_table(pa.table(columns), tmp_path / "in" / "day2.parquet")
    report = job.run()
    assert (report.rows_ok, report.rows_dead) == (99, 1) and report.notes
    monkeypatch.delenv("DOWN")
    assert gm.retry_dead(job).rows_ok == 100
    found = gm.read(job).to_table()
    assert found["s"].to_pylist() == [2 * x for x in found["x"].to_pylist()]
    with pytest.raises(gm.PlanChanged, match=r"day2.parquet is new"):
        job.run()
    with pytest.raises((gm.BadJob, gm.GateFailed)):
        job.run(append=True)


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def test_what_is_published_stands_where_a_restart_was_held_back_and_its_code_is_gone(tmp_path: Path) -> None:
    """--accept is about the job as it is: that of the result has nothing to do."""
    pq.write_table(pa.table({"x": range(100)}), tmp_path / "in.parquet")

    def job(factor: int) -> gm.Job:
        def scored(batch: Mapping[str, Any]) -> dict[str, Any]:
            if factor == 3 and (batch["x"] % 5 == 0).any():
                raise ValueError("no")
            return {"s": batch["x"] * factor}

        return gm.Job(str(tmp_path / "in.parquet"), scored, str(tmp_path / "out"), workers=0)

    job(2).run()
    with pytest.raises(gm.GateFailed):
        job(3).run(restart=True)
    assert job(2).run(accept=True).state == "nothing to do"
    assert gm.read(str(tmp_path / "out")).to_table()["s"].to_pylist() == [2 * x for x in range(100)]
