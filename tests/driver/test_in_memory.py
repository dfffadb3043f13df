"""Sources in memory, through jobs: one column is the same, or refused, in whatever form it is given."""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gristmill as gm
from gristmill.errors import BadOutput, BadSource


def echo(rows: list) -> list:
    return [{"seen": repr(row["x"])} for row in rows]


def scored(data: Any) -> list[Any]:
    """What comes of a source's column `x` that a job carries over."""
    return gm.apply(data, fn=echo, batch_format="rows", workers=0, keep=["x"])["x"].to_pylist()


def objects(values: list) -> np.ndarray:
    out = np.empty(len(values), dtype=object)
    out[:] = values
    return out


FORMS: dict[str, Callable[[list], Any]] = {
    "rows": lambda v: [{"x": x} for x in v],
    "dict": lambda v: {"x": v},
    "tuple": lambda v: {"x": tuple(v)},
    "numpy objects": lambda v: {"x": objects(v)},
    "pandas objects": lambda v: pd.DataFrame({"x": pd.Series(v, dtype=object)}),
    "pandas series": lambda v: pd.Series(v, dtype=object, name="x"),
    "pandas column": lambda v: {"x": pd.Series(v, dtype=object)},
    "polars objects": lambda v: pl.DataFrame({"x": pl.Series(v, dtype=pl.Object)}),
}
EAST = dt.timezone(dt.timedelta(hours=5))
MIXED: dict[str, list] = {
    "date and datetime": [dt.date(2020, 1, 1), dt.datetime(2020, 1, 1, 12, 30)],
    "float and bool": [1.5, True],
    "naive and zoned": [dt.datetime(2020, 1, 1), dt.datetime(2020, 1, 1, tzinfo=EAST)],
    "text and bytes": ["a", b"b"],
    "text and number": ["a", 1],
    "large and fraction": [2**53 + 1, 0.5],
    "nanoseconds, year 2400": [pd.Timestamp("2020-01-01T00:00:00.000000001"), dt.datetime(2400, 1, 1)],
    "in lists": [[dt.date(2020, 1, 1)], [dt.datetime(2020, 1, 1, 12)]],
    "in dicts": [{"a": 1.5}, {"a": True}],
    "decimal and float": [Decimal("1.1"), 0.1],
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("mixed", MIXED)
def test_a_column_of_two_kinds_is_refused_in_every_form(form: str, mixed: str) -> None:
    """No time is cut off a datetime, no truth value becomes a number: the column is named."""
    with pytest.raises(BadSource, match="column 'x'"):
        scored(FORMS[form](MIXED[mixed]))


@pytest.mark.parametrize("mixed", ["date and datetime", "float and bool", "naive and zoned", "text and bytes"])
def test_categories_of_two_kinds_are_refused(mixed: str) -> None:
    """They are objects too."""
    values = MIXED[mixed]
    frame = pd.DataFrame({"x": pd.Categorical.from_codes([0, 1], categories=pd.Index(values, dtype=object))})
    with pytest.raises(BadSource, match="column 'x'"):
        scored(frame)


VALUES = [1, -3, 2**53 + 1, 1.5, True, "a", b"b", dt.date(2020, 1, 1), dt.datetime(2020, 1, 1, 12, 30), None]
VALUES += [
    dt.datetime(2020, 1, 1, tzinfo=dt.UTC),
    dt.time(12),
    dt.timedelta(hours=1),
    Decimal("1.10"),
    [1, 2],
    {"a": 1},
]


@pytest.mark.long
@settings(max_examples=20, deadline=None)
@given(st.lists(st.sampled_from(VALUES), min_size=1, max_size=4).filter(lambda v: v != [None] * len(v)))
def test_all_forms_of_a_column_agree(values: list) -> None:
    """The same values come out, or none is taken; what comes out is equal and of its kind."""
    each = []
    for make in FORMS.values():
        try:
            each.append(scored(make(values)))
        except BadSource:
            each.append(None)
    assert all(e == each[0] for e in each)
    if each[0] is not None:
        assert each[0] == values
        assert all(isinstance(e, bool) == isinstance(v, bool) for e, v in zip(each[0], values, strict=True))


def test_nan_is_nan_and_null_is_null() -> None:
    """NaN of arrays and lists is a number; pandas has it for what is missing, where it is null."""
    for data in ([{"x": math.nan}, {"x": None}], {"x": [math.nan, None]}, pl.DataFrame({"x": [math.nan, None]})):
        first, second = scored(data)
        assert math.isnan(first) and second is None
    assert math.isnan(scored({"x": np.array([math.nan, 1.0])})[0])
    for kind in ("float64", "Float64", "object"):
        series = pd.Series([math.nan, 1.0], dtype=kind)
        assert scored(pd.DataFrame({"x": series})) == scored({"x": series}) == [None, 1.0]
    assert scored(pd.DataFrame({"x": pd.Series([math.nan, "a"], dtype=object)})) == [None, "a"]


def test_columns_of_arrays_and_frames_keep_their_types() -> None:
    """Widths, units and zones are theirs."""
    small = gm.apply({"x": np.array([1, 2], np.int8)}, fn=echo, batch_format="rows", workers=0, keep=["x"])
    assert str(small.schema.field("x").type) == "int8"
    assert scored({"x": np.ones((2, 3))}) == [[1.0] * 3] * 2
    stamp = pd.Timestamp("2020-01-01T00:00:00.000000001")
    assert scored(pd.DataFrame({"x": pd.Series([stamp])}))[0].nanosecond == 1
    with pytest.raises(BadSource, match="column 'x': it is a str"):
        scored({"x": "abc"})


def test_a_reader_is_read_once_and_given_as_often_as_a_job_looks(tmp_path: Path) -> None:
    """A RecordBatchReader gives its rows once: plan, preview, stream and run of one job all see them."""
    table = pa.table({"x": list(range(10))})
    job = gm.Job(table.to_reader(max_chunksize=3), score, str(tmp_path / "out"), workers=0)
    assert job.plan().rows == 10
    assert job.preview(3).num_rows == 3
    assert [sum(t.num_rows for t in job.stream()) for _ in range(2)] == [10, 10]
    assert job.run().rows_ok == 10 and job.run().state == "nothing to do"
    assert gm.read(str(tmp_path / "out")).to_table()["y"].to_pylist() == table["x"].to_pylist()


def score(batch: dict[str, Any]) -> dict[str, Any]:
    """A row-wise function."""
    return {"y": batch["x"]}


def test_periods_of_pandas_are_refused() -> None:
    """Other functions than those of pandas would be given numbers for them."""
    pd = pytest.importorskip("pandas")
    frame = pd.DataFrame({"m": pd.period_range("2024-01", periods=3, freq="M")})
    with pytest.raises(gm.BadSource, match=r"column 'm'.*period.*astype\(str\)"):
        gm.apply(frame, fn=lambda b: {"y": b["m"]})


def test_a_table_is_the_same_wherever_its_copy_lies(tmp_path: Path) -> None:
    """A sink that was renamed knows its table: nothing to do, dead rows tried again, verified; another one is refused
    with the way out that there is for it.
    """
    model = gm.model(odd_alone, batch_format="rows")

    def made(name: str, rows: Any) -> gm.Job:
        return gm.Job(rows, model, gm.sink(str(tmp_path / name)), workers=0, gates={"min_ok": 0.0})

    data = {"x": list(range(10))}
    assert made("out", data).run().rows_ok == 5
    (tmp_path / "out").rename(tmp_path / "moved")
    assert made("moved", data).run().state == "nothing to do"
    assert gm.retry_dead(made("moved", data)).rows_dead == 5
    assert gm.verify(str(tmp_path / "moved"), source=True).ok
    assert gm.verify(made("moved", data), source=True).ok
    kept = {"table://" + p.name for p in (tmp_path / "moved" / "_gristmill" / "inputs").iterdir()}
    assert set(gm.dead(str(tmp_path / "moved"))["source"].to_pylist()) == kept
    other = {"x": list(range(1, 11))}
    for verb in (made("moved", other).run, lambda: gm.retry_dead(made("moved", other))):
        with pytest.raises(gm.PlanChanged, match="the table in memory has different content") as refused:
            verb()
        assert "table://" not in str(refused.value) and "--append" not in str(refused.value)
    assert made("moved", other).run(restart=True).rows_ok == 5


def odd_alone(rows: list) -> list:
    return [row if row["x"] % 2 else ValueError("even") for row in rows]


def test_other_rows_in_memory_are_told_in_words_of_a_table(tmp_path: Path) -> None:
    """Of a frame that was changed, or of new rows, nothing is said of the file that it is kept in, nor is an append of
    them, which nobody can make, a way out.
    """
    job: dict[str, Any] = {"fn": echo, "batch_format": "rows", "workers": 0, "keep": ["x"]}
    frame, out = pd.DataFrame({"x": [1, 2, 3]}), str(tmp_path / "out")
    gm.apply(frame, out, **job)
    for changed in (frame.assign(x=[1, 2, 4]), pd.DataFrame({"x": [7]})):
        for verbs in ({}, {"append": True}, {"on_new_files": "append"}):
            with pytest.raises(gm.errors.PlanChanged, match="table in memory") as refused:
                gm.apply(changed, out, **job, **verbs)
            said = str(refused.value)
            assert (
                ".table" not in said
                and "table://" not in said
                and "--append" not in said
                and "--restart (restart=True)" in said
            )
            assert ("rows in memory cannot be appended" in said) == bool(verbs)
    assert gm.apply(frame, out, **job).state == "nothing to do"


def test_answers_stand_beside_rows_in_memory_or_nothing_is_answered() -> None:
    """A dead row would shift those behind it to their neighbours; with what tells them apart it may be missing."""
    frame = pd.DataFrame({"id": range(60), "x": [1.0, 0.0, *range(2, 60)]})
    for rows in (frame, frame["x"], frame["x"].tolist()):
        with pytest.raises(gm.GateFailed, match=r"1 of 60 rows could not be scored.*keep= which columns"):
            gm.apply(rows, fn=_log, workers=0)
    with pytest.warns(gm.GristmillWarning, match="1 of 60 rows"):
        told = gm.apply(frame, fn=_log, keep=["id"], workers=0).to_pandas().set_index("id")["y"]
    assert told.index.tolist() == [0, *range(2, 60)]
    assert np.allclose(told, np.log(frame["x"][told.index]))


def _log(batch: dict[str, Any]) -> dict[str, Any]:
    with np.errstate(divide="ignore"):
        return {"y": np.log(next(v for n, v in batch.items() if n != "id"))}


def test_an_index_of_few_rows_is_theirs_though_a_column_says_the_same(tmp_path: Path) -> None:
    """Rows that fail are found in calls of two and three, in which flags are easily the order that was sorted by."""
    values = np.random.default_rng(0).permutation(400).astype(float)
    values[[7, 100, 300]] = -1
    for seed in range(4):
        flags = np.random.default_rng(seed).integers(0, 2, 400)
        frame = pd.DataFrame({"x": values, "flag": flags, "grade": flags + 1})
        report = gm.apply(frame, gm.sink(str(tmp_path / str(seed)), keep=["x"]), fn=_ranked, batch_format="pandas",
                          workers=0, gates={"min_ok": 0.5})  # fmt: skip
        found = gm.read(report).to_pandas()
        assert report.rows_dead == 3 and (found["y"] == found["x"] * 2).all()


def _ranked(rows: pd.DataFrame) -> pd.DataFrame:
    if (rows["x"] < 0).any():
        raise ValueError("negative")
    return pd.DataFrame({"y": rows["x"] * 2}, index=rows.index).sort_values("y", ascending=False)


def test_labels_of_few_rows_are_not_taken_for_the_order() -> None:
    """Where calls of many rows have shown labels of the function's own; where none has, nobody can tell."""
    table = pa.table({"id": [2, 0, 1], "x": [1.0, 2.0, 3.0]})
    with pytest.raises(BadOutput, match="does not tell which row is which"):
        gm.apply(table, fn=_by_id, batch_format="pandas", workers=0)
    for seed in range(3):
        chance = np.random.default_rng(seed)
        frame = pd.DataFrame({"id": chance.permutation(2000), "flag": chance.integers(0, 2, 2000)})
        frame["x"] = frame["id"] + 0.5
        frame.loc[chance.choice(2000, 8, replace=False), "x"] = -1.0
        found = gm.apply(frame, fn=_by_flag, batch_format="pandas", keep=["x"], workers=0, gates={"min_ok": 0.5})
        assert found.num_rows == 1992 and found["y"].to_pylist() == [2 * x for x in found["x"].to_pylist()]


def _by_id(rows: pd.DataFrame) -> dict[str, Any]:
    return {"y": pd.Series(dict(zip(rows["id"], rows["x"], strict=True)))}


def _by_flag(rows: pd.DataFrame) -> pd.DataFrame:
    if (rows["x"] < 0).any():
        raise ValueError("negative")
    pairs = zip(rows["flag"], rows["id"], rows["x"], strict=True)
    return pd.DataFrame({"y": pd.Series({(flag, number): 2 * x for flag, number, x in pairs})})


@pytest.mark.parametrize("index", ["filtered", "shuffled", "named", "levels", "times", "range", "sliced"])
def test_a_frame_s_index_comes_back_with_its_answers(index: str) -> None:
    """So that pandas puts them beside their rows; also where a column has the index's name."""
    frame = pd.DataFrame({"x": range(30)})
    frame = {
        "filtered": frame[frame.x % 3 != 0],
        "shuffled": frame.sample(frac=1, random_state=1),
        "named": frame.set_index(pd.Index([f"r{i}" for i in range(30)], name="y")),
        "levels": frame.set_index(pd.MultiIndex.from_product([range(5), list("abcdef")])),
        "times": frame.set_index(pd.date_range("2026-01-01", periods=30)),
        "range": frame.set_index(pd.RangeIndex(60, 0, -2)),
        "sliced": pd.DataFrame({"x": range(90)})[30:60],
    }[index]
    answers = gm.apply(frame, fn=lambda batch: {"y": batch["x"] * 10}, workers=0).to_pandas()
    assert [type(name) for name in answers.columns] == [str]
    assert frame.assign(y=answers["y"])["y"].tolist() == (frame.x * 10).tolist()
    table = gm.apply(frame, fn=lambda batch: {"y": batch["x"] * 10}, workers=0).sort_by([("y", "descending")])
    assert frame.assign(y=table.to_pandas()["y"])["y"].tolist() == (frame.x * 10).tolist()
    plain = gm.apply(frame.reset_index(drop=True), fn=lambda batch: {"y": batch["x"] * 10}, workers=0)
    assert plain.column_names == ["y"]


@pytest.mark.parametrize("index", [[10, 20, 30, 40], [0, 1, 2, 3]])
@pytest.mark.parametrize("how", ["where", "filter", "again", "sample", "nulls"])
def test_where_rows_are_left_out_answers_have_no_index_and_it_is_said(how: str, index: list[int]) -> None:
    """Also where as many others stand twice: labels of rows that an answer is not of would be worse. The commonest
    index, 0, 1, …, is one, too, which pandas would take the place of an answer for.
    """
    frame = pd.DataFrame({"v": [1.0, 2.0, None, 4.0]}, index=index)

    def again(batch: dict) -> dict:
        return {"v": batch["v"], "_row": np.full(len(batch["v"]), len(batch["v"]) - 1)}

    options = {
        "where": {"where": "v > 2"},
        "filter": {"steps": [gm.filter(lambda batch: batch["v"] > 2)]},
        "again": {"steps": [gm.step(again), gm.filter(lambda batch: batch["v"] > 0)]},
        "sample": {"sample": 2, "on_nan": "keep"},
        "nulls": {"takes": {"v": "float64 not null"}, "on_null": "skip"},
    }
    with pytest.warns(gm.GristmillWarning, match="do not carry the index of the DataFrame"):
        answers = gm.apply(frame, fn=lambda batch: {"y": batch["v"]}, workers=0, **options[how]).to_pandas()
    assert answers.index.tolist() == list(range(len(answers)))


@pytest.mark.parametrize("option", [{"partition_by": ["v"]}, {"merge": True}, {"format": "csv"}])
def test_what_is_about_files_needs_a_sink(option: dict) -> None:
    """Rows of partitions would stand in another order than those they are answers of."""
    frame = pd.DataFrame({"v": list("abab")}, index=[3, 1, 2, 0])
    with pytest.raises(gm.BadJob, match="is an option of a sink's files, and no sink is given"):
        gm.apply(frame, fn=lambda batch: {"y": batch["v"]}, workers=0, **option)


@pytest.mark.real_model
def test_a_series_of_texts_has_its_index_back(minilm_int8: Path) -> None:
    """Vectors of a Series stand beside its texts."""
    texts = pd.Series(["a dog", "two cats", "three birds"], index=[7, 3, 5])
    table = gm.embed(texts, model=str(minilm_int8), workers=0)
    one = gm.embed(["two cats"], model=str(minilm_int8), workers=0)["embedding"].to_pylist()[0]
    np.testing.assert_allclose(table.to_pandas()["embedding"].loc[3], one, atol=1e-5)


def test_what_cannot_be_given_says_how_it_can() -> None:
    """A column of pandas without an Arrow form, an index named as a column, a sentence where a list belongs."""
    for odd in (pd.Series(pd.arrays.SparseArray([0, 1])), pd.Series([1j, 2j])):
        with pytest.raises(BadSource, match=r"column 'x': its type is .+, for which Arrow has none: make it numbers"):
            scored(pd.DataFrame({"x": odd}))
    frame = pd.DataFrame({"x": [1, 2]}, index=pd.Index(["a", "b"], name="id"))
    with pytest.raises(BadSource, match=r"'id' is the index of the DataFrame, which is no column: give \.reset_index"):
        gm.apply(frame, fn=echo, batch_format="rows", workers=0, keep=["id"])
    with pytest.raises(gm.BadJob, match=r"embed: 'one dog' is no file: texts are given as a list, \['one dog'\]"):
        gm.embed("one dog", model="anything")
