"""What a row becomes is its own affair: not that of the rows that stand beside it, nor of how calls are grouped."""

from __future__ import annotations

import datetime
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gristmill as gm
from gristmill.driver.run import retry_dead
from gristmill.worker.steps import LoadedStep

ROWS = 300
CORRECTED = 5


@pytest.fixture
def numbers(tmp_path: Path) -> str:
    """300 rows with a number and a language."""
    pq.write_table(pa.table({"x": range(ROWS), "lang": ["en"] * ROWS}), tmp_path / "in.parquet")
    return str(tmp_path / "in.parquet")


def one_row(row: dict[str, Any], value: Any = "fr") -> dict[str, Any]:
    return {"x": row["x"], "lang": value} if row["x"] == CORRECTED else {"x": row["x"]}


def in_flat_map(row):
    return [one_row(row), one_row(row)]


def in_step(batch):
    return [one_row(r) for r in batch]


def with_failures(batch):
    return [ValueError("no") if r["x"] == 7 else one_row(r) for r in batch]


def repeated(batch):
    return [{"_row": r["_row"], **one_row(r)} for r in reversed(batch) for _ in range(2)]


CORRECTING = {
    "flat_map": (gm.flat_map(in_flat_map), 2),
    "step": (gm.step(in_step, batch_format="rows"), 1),
    "a failed row": (gm.step(with_failures, batch_format="rows"), 1),
    "_row": (gm.step(repeated, batch_format="rows"), 2),
}


@pytest.mark.parametrize("kind", CORRECTING)
def test_a_key_that_a_dict_lacks_leaves_the_row_s_column(numbers: str, tmp_path: Path, kind: str) -> None:
    """A step that corrects one row leaves the values of the others, in any call."""
    step, copies = CORRECTING[kind]
    sink = gm.sink(str(tmp_path / "out"), keep=["x", "lang"])
    model = gm.model(lambda b: {"y": b["x"]})
    gm.Job(numbers, model, sink, steps=[step], workers=0, shard_rows=100, gates={"min_ok": 0.9}).run()
    found = gm.read(str(tmp_path / "out")).to_table().to_pylist()
    assert [r["lang"] for r in found] == ["fr" if r["x"] == CORRECTED else "en" for r in found]
    assert len(found) == (ROWS - (kind == "a failed row")) * copies


def test_a_post_step_that_corrects_one_answer_leaves_the_others(numbers: str, tmp_path: Path) -> None:
    """The model's answers stay where a post step's dict lacks their name; what is new is null where it is lacking."""

    def post(batch):
        return [{"y": -1} if r["x"] == CORRECTED else {"z": 1} for r in batch]

    gm.Job(
        numbers,
        gm.model(lambda b: {"y": b["x"]}),
        gm.sink(str(tmp_path / "out"), keep=["x"]),
        post=[gm.step(post, batch_format="rows")],
        workers=0,
        shard_rows=100,
    ).run()
    for row in gm.read(str(tmp_path / "out")).to_table().to_pylist():
        corrected = row["x"] == CORRECTED
        assert (row["y"], row["z"]) == ((-1, None) if corrected else (row["x"], 1))


def test_values_of_another_type_than_those_of_the_other_rows_are_refused(numbers: str, tmp_path: Path) -> None:
    """A column that would have to hold texts and numbers stops the run, naming step and column."""
    step = gm.step(lambda b: [one_row(r, 1.5) for r in b], batch_format="rows")
    with pytest.raises(gm.GristmillError, match=r"step .*'lang'.* string"):
        gm.Job(numbers, lambda b: {"y": b["x"]}, str(tmp_path / "out"), steps=[step], workers=0).run()


def test_a_result_that_takes_a_kept_column_s_place_midway_stops_the_run(numbers: str, tmp_path: Path) -> None:
    """A model that answers under the name of a kept column for one late row does not blank that of its neighbours."""

    def model(batch):
        return [{"y": r["x"], **({"lang": "fr"} if r["x"] == 250 else {})} for r in batch]

    with pytest.raises(gm.GristmillError, match="'lang'"):
        gm.Job(
            numbers,
            gm.model(model, batch_format="rows"),
            gm.sink(str(tmp_path / "out"), keep=["lang"]),
            workers=0,
            shard_rows=100,
        ).run()
    assert not (tmp_path / "out" / "_SUCCESS").exists()


@pytest.mark.long
def test_a_day_beside_a_time_is_refused(numbers: str, tmp_path: Path) -> None:
    """In a flat_map and a step too; Arrow would cut the times, or zones, of all but the first off."""
    day, time = datetime.date(2026, 1, 1), datetime.datetime(2026, 1, 1, 12)
    for first, then in ((day, time), (time, time.replace(tzinfo=datetime.UTC))):
        for kind in ("flat_map", "step", "model"):
            made = partial(_dated, first, then, kind == "flat_map")
            steps = {"flat_map": [gm.flat_map(made)], "step": [gm.step(made, batch_format="rows")], "model": []}[kind]
            model = gm.model(made if kind == "model" else lambda b: [{"y": r["x"]} for r in b], batch_format="rows")
            sink = gm.sink(str(tmp_path / kind), keep=["d"] if steps else [])
            with pytest.raises(gm.GristmillError, match=r"'d'.*(date|zone)"):
                gm.Job(numbers, model, sink, steps=steps, workers=0).run()


def _dated(first: Any, then: Any, one: bool, given: Any) -> list[dict[str, Any]]:
    return [{"d": then if r["x"] else first} for r in ([given] if one else given)]


def nested(row: dict[str, Any]) -> dict[str, Any]:
    """Values whose Arrow type is another where a row whose number is divisible by 7 stands beside them."""
    if row["x"] % 7:
        return {"list": [row["x"], 1], "struct": {"a": row["x"]}, "decimal": Decimal(row["x"])}
    return {"list": [row["x"] + 0.5], "struct": {"b": 1, "a": 2}, "decimal": Decimal("0.25")}


def test_retry_dead_knows_rows_with_nested_values_again(numbers: str, tmp_path: Path) -> None:
    """Unchanged code makes the same rows of a row, whatever stood beside it when it died."""
    fixed = tmp_path / "fixed"

    def step(batch):
        return [{"_row": r["_row"], "copy": i, **nested(r)} for r in batch for i in range(2)]

    def model(batch):
        return [ValueError("no") if r["x"] == 8 and r["copy"] and not fixed.exists() else r["copy"] for r in batch]

    sink = gm.sink(str(tmp_path / "out"), keep=["x", "copy"])
    steps = [gm.step(step, batch_format="rows")]
    job = gm.Job(numbers, gm.model(model, batch_format="rows"), sink, steps=steps, workers=0)
    assert job.run().rows_dead == 1
    fixed.mkdir()
    assert retry_dead(job.spec).rows_dead == 0
    found = gm.read(str(tmp_path / "out")).to_table().to_pylist()
    assert sorted((r["x"], r["copy"]) for r in found) == [(x, i) for x in range(ROWS) for i in range(2)]


KEYS = st.fixed_dictionaries({}, optional={"a": st.integers(0, 9), "b": st.text(max_size=2), "c": st.floats(0, 1)})


@settings(deadline=None, max_examples=60)
@given(st.lists(KEYS, min_size=1, max_size=8), st.booleans(), st.data())
def test_dicts_are_merged_by_row_however_they_are_grouped(answers: list[dict], many: bool, data: Any) -> None:
    """Each row is what it was, updated by its dict: given all at once, or in calls of any size."""
    rows = pa.table({"n": range(len(answers)), "a": [-1] * len(answers), "b": ["old"] * len(answers)})
    in_batches = gm.step(lambda b: [{"_row": r["_row"], **answers[r["n"]]} for r in b], batch_format="rows")
    step = LoadedStep(gm.flat_map(lambda r: [answers[r["n"]]]) if many else in_batches)
    cut = data.draw(st.integers(0, len(answers)))
    slices = [(first, rows.slice(first, last - first)) for first, last in ((0, cut), (cut, rows.num_rows))]
    parts = [step.apply(part).moved(first) for first, part in slices if part.num_rows]
    for found in (step.apply(rows), step.together(parts, rows, [])):
        for row, before in zip(found.rows.to_pylist(), rows.to_pylist(), strict=True):
            wanted = {**before, **answers[before["n"]]}
            assert {k: v for k, v in row.items() if k in wanted or v is not None} == wanted


@pytest.mark.parametrize("form", ["numpy", "pandas"])
@pytest.mark.parametrize("stage", ["model", "step"])
def test_a_null_beside_it_changes_no_row(tmp_path: Path, form: Literal["numpy", "pandas"], stage: str) -> None:
    """Rows with a null among their whole numbers go in calls of their own: the others are numpy's numbers as ever."""

    def told(batch: Any) -> Any:
        x = batch["x"] if form == "numpy" else batch["x"].to_numpy()
        return {"type": [str(x.dtype)] * len(x), "double": [None if v is None or v != v else v * 2 for v in x.tolist()]}

    x = [None if i % 7 == 3 else i for i in range(200)]
    source = pa.table({"id": range(200), "x": pa.array(x, pa.int64()), "yes": [i % 2 == 0 for i in range(200)]})
    steps = [gm.step(told, batch_format=form)] if stage == "step" else []
    model = (lambda b: {"other": b["id"]}) if stage == "step" else gm.model(told, batch_format=form)
    sink = gm.sink(str(tmp_path / "out"), keep=["id", "type", "double"] if steps else ["id"])
    found = gm.Job(source, model, sink, steps=steps, workers=0).run().read().to_table().to_pylist()
    assert [row["id"] for row in found] == list(range(200))
    assert [row["double"] for row in found] == [None if v is None else 2 * v for v in x]
    assert {row["type"] for row in found if x[row["id"]] is not None} == {"int64"}


def tagged(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A language for some of the first rows."""
    return [{"n": 0, "lang": "de"} if r["id"] < 50 and r["id"] % 3 == 0 else {"n": 0} for r in rows]


def tagged_alone(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The same as a flat_map."""
    return tagged([row])


@pytest.mark.long
@pytest.mark.parametrize("form", ["rows", "numpy"])
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", ["map", "flat_map", "post"])
def test_a_column_that_dicts_of_a_step_have_is_there_however_rows_are_cut(
    tmp_path: Path, kind: str, workers: int, form: Literal["rows", "numpy"]
) -> None:
    """Null where no dict of a window has it, for whoever comes after the step: also in an append, and in a retry."""

    def read(batch: Any) -> Any:
        langs = [r["lang"] for r in batch] if form == "rows" else batch["lang"].tolist()
        ids = [r["id"] for r in batch] if form == "rows" else batch["id"].tolist()
        if 7 in ids and not (tmp_path / "cured").exists():
            raise ValueError("seven")
        return [{"y": str(x)} for x in langs] if form == "rows" else {"y": np.array([str(x) for x in langs])}

    folder, root = tmp_path / "in", str(tmp_path / "out")
    folder.mkdir()
    pq.write_table(pa.table({"id": range(200)}), folder / "a.parquet")
    step = gm.flat_map(tagged_alone) if kind == "flat_map" else gm.step(tagged, batch_format="rows")
    steps, post = ([], [step, gm.step(read, batch_format=form)]) if kind == "post" else ([step], [])
    model = gm.model(lambda b: {"z": b["id"]}) if kind == "post" else gm.model(read, batch_format=form)
    job = gm.Job(
        str(folder), model, gm.sink(root, keep=["id"]), steps=steps, post=post, workers=workers, shard_rows=40,
        gates={"min_ok": 0.9, "warn_failed": 1},
    )  # fmt: skip
    assert job.run().rows_dead == 1
    pq.write_table(pa.table({"id": range(200, 203)}), folder / "b.parquet")
    assert job.run(append=True).rows_dead == 1
    (tmp_path / "cured").touch()
    assert gm.retry_dead(job).rows_dead == 0
    rows = gm.read(root).to_table().sort_by("id")
    wanted = ["de" if n < 50 and n % 3 == 0 else "None" for n in range(203)]
    assert (rows["id"].to_pylist(), rows["y"].to_pylist()) == (list(range(203)), wanted)
