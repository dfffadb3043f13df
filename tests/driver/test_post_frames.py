"""What a step after the model hands back: a frame is the row, a dict adds to it."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import gristmill as gm
from gristmill.errors import BadJob, BadOutput

SOURCE = pa.table({"id": [1, 2, 3], "ssn": ["a", "b", "c"], "x": [1.0, 2.0, 3.0]})
FRAMES = ["pandas", "polars", "arrow"]


def model(batch: dict[str, Any]) -> dict[str, Any]:
    """A score, and what it came from."""
    return {"score": batch["x"] * 2, "debug": batch["x"]}


def without(*names: str) -> Any:
    """A step that drops these columns."""

    def tidy(frame: Any) -> Any:
        if isinstance(frame, pa.Table):
            return frame.drop_columns(list(names))
        return frame.drop(columns=list(names)) if hasattr(frame, "iloc") else frame.drop(*names)

    return tidy


def only(*names: str) -> Any:
    """A step that takes these columns out of a frame."""
    return lambda frame: frame.select(list(names)) if not hasattr(frame, "iloc") else frame[list(names)]


def renamed(frame: Any) -> Any:
    """Another name for the score."""
    if isinstance(frame, pa.Table):
        return frame.rename_columns(["final" if n == "score" else n for n in frame.column_names])
    return frame.rename(columns={"score": "final"}) if hasattr(frame, "iloc") else frame.rename({"score": "final"})


def ones(frame: Any) -> Any:
    """One more column, and a column of the source made anew."""
    new = {"z": pa.array([1] * len(frame)), "x": pa.array([0.0] * len(frame))}
    if isinstance(frame, pa.Table):
        return frame.drop_columns(["x"]).append_column("z", new["z"]).append_column("x", new["x"])
    if hasattr(frame, "iloc"):
        return frame.assign(z=1, x=0.0)
    import polars

    return frame.with_columns(polars.from_arrow(pa.table(new)))


def ran(folder: Path, *steps: Any, form: str = "pandas", **sink: Any) -> tuple[gm.RunReport, pa.Table]:
    """The report of a job with these steps after the model, and the rows that it published."""
    if form in ("pandas", "polars"):
        pytest.importorskip(form)
    post = [gm.step(step, batch_format=form) for step in steps]
    out = gm.sink(str(folder / "out"), **{"keep": ["id"], **sink})
    report = gm.Job(SOURCE, model, out, post=post, workers=0).run()
    return report, report.read().to_table()


@pytest.mark.parametrize("form", FRAMES)
@pytest.mark.parametrize(
    ("step", "columns"),
    [
        (without("debug"), ["id", "score"]),
        (without("x"), ["id", "score", "debug"]),
        (without("x", "debug"), ["id", "score"]),
        (renamed, ["id", "debug", "final"]),
        (ones, ["id", "score", "debug", "z"]),
        (only("score"), ["id", "score"]),
        (only("ssn", "score"), ["id", "score"]),
    ],
)
def test_a_frame_is_the_row(tmp_path: Path, form: str, step: Any, columns: list[str]) -> None:
    """Columns of the source are published if keep names them, and no others; answers that are left out are dropped."""
    _, rows = ran(tmp_path, step, form=form)
    assert rows.column_names == columns
    assert rows["id"].to_pylist() == [1, 2, 3]
    if "score" in columns:
        assert rows["score"].to_pylist() == [2.0, 4.0, 6.0]


@pytest.mark.parametrize("form", FRAMES)
def test_a_frame_of_new_columns_adds_them(tmp_path: Path, form: str) -> None:
    """As a dict of them does; a kept column has the values that a frame gives it."""
    new = {
        "pandas": lambda df: df[["x"]].rename(columns={"x": "z"}),
        "polars": lambda df: df.select(z="x"),
        "arrow": lambda t: pa.table({"z": t["x"]}),
    }[form]
    assert ran(tmp_path / "a", new, form=form)[1].column_names == ["id", "score", "debug", "z"]
    rows = ran(tmp_path / "b", ones, form=form, keep=["id", "x"])[1]
    assert rows.column_names == ["id", "x", "score", "debug", "z"] and rows["x"].to_pylist() == [0.0] * 3


def test_later_steps_are_given_what_a_frame_left(tmp_path: Path) -> None:
    """A name that it dropped may be used again, and what it has not been given (takes=) is not dropped."""
    pytest.importorskip("pandas")
    given: list[list[str]] = []

    def seen(df: Any) -> Any:
        given.append(list(df.columns))
        return df.rename(columns={"score": "debug"})

    rows = ran(tmp_path / "a", without("debug"), seen)[1]
    assert given[0] == ["id", "ssn", "x", "score", "_row"]
    assert rows.column_names == ["id", "debug"] and rows["debug"].to_pylist() == [2.0, 4.0, 6.0]
    few = gm.step(lambda df: df.assign(z=1), batch_format="pandas", takes={"score": "float64"})
    job = gm.Job(SOURCE, model, gm.sink(str(tmp_path / "b"), keep=["id"]), post=[few], workers=0)
    assert job.run().read().to_table().column_names == ["id", "score", "debug", "z"]


@pytest.mark.parametrize("form", ["numpy", "rows", "pandas"])
def test_a_dict_that_hands_back_source_columns_is_told(tmp_path: Path, form: str) -> None:
    """They are published, and a note says which, and how to leave them out; what is changed, dropped or kept is not."""

    def some(batch: Any) -> Any:
        if form == "rows":
            return [{"ssn": r["ssn"], "id": r["id"], "x": r["x"] + 1, "z": 1} for r in batch]
        return {"ssn": batch["ssn"], "id": batch["id"], "x": batch["x"] + 1, "z": batch["x"]}

    report, rows = ran(tmp_path / "a", some, form=form)
    assert set(rows.column_names) == {"id", "score", "debug", "ssn", "x", "z"}
    notes = [note for note in report.notes if "hands back" in note]
    assert len(notes) == 1 and "column 'ssn' of the rows unchanged" in notes[0] and "drop=['ssn']" in notes[0]
    report, rows = ran(tmp_path / "b", some, form=form, drop=["ssn"])
    assert set(rows.column_names) == {"id", "score", "debug", "x", "z"} and not report.notes


def test_what_is_left_out_may_be_in_drop_but_not_all_there_is(tmp_path: Path) -> None:
    """A job that dropped it before goes on to; one that leaves nothing is refused."""
    assert ran(tmp_path / "a", without("debug"), drop=["debug"])[1].column_names == ["id", "score"]
    with pytest.raises(BadJob, match="nothing is left to write"):
        ran(tmp_path / "b", only("ssn"), keep=[])
    with pytest.raises(BadJob, match="sort_by names 'debug'"):
        ran(tmp_path / "c", without("debug"), sort_by=["debug"])


def later(df: Any) -> Any:
    """Leaves out the one among the first rows, the other one later."""
    return df.drop(columns=["score" if len(df) == 0 or df["x"].iloc[0] >= 100 else "debug"])


def test_later_windows_are_treated_as_planned(tmp_path: Path) -> None:
    """What the first rows' frames had and a later one's lack stays the model's, beside rows that died meanwhile; what
    they lacked and a later one's have is refused.
    """
    pytest.importorskip("pandas")
    source = tmp_path / "in.parquet"
    pq.write_table(pa.table({"x": np.arange(300.0)}), source)

    def sparing(df: Any) -> Any:
        return df if df["x"].iloc[0] < 100 else df.drop(columns=["debug"])

    def killing(rows: list[dict[str, Any]]) -> list[Any]:
        return [ValueError("150") if r["x"] == 150 else {"z": r["x"]} for r in rows]

    def job(name: str, *post: Any) -> gm.Job:
        out = gm.sink(str(tmp_path / name), keep=["x"])
        return gm.Job(str(source), model, out, post=list(post), workers=0, shard_rows=100, gates={"min_ok": 0.5})

    steps = gm.step(sparing, batch_format="pandas"), gm.step(killing, batch_format="rows")
    rows = job("a", *steps).run().read().to_table()
    assert rows["debug"].to_pylist() == rows["x"].to_pylist() == [x for x in range(300) if x != 150]
    with pytest.raises(BadOutput, match="have a column 'debug', which the first rows did not have"):
        job("b", gm.step(later, batch_format="pandas")).run()


class Tidy:
    """Drops the debug column; raises for a row while a file says so."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __call__(self, df: Any) -> Any:
        if os.path.exists(f"{self.folder}/bad") and (df["id"] == 150).any():
            raise ValueError("150")
        if os.path.exists(f"{self.folder}/stop") and (df["id"] >= 200).any():
            return df.head(1)  # which ends the run
        return df.drop(columns=["debug"]).assign(z=1)


def test_results_of_frames_are_resumed_retried_and_added_to(tmp_path: Path) -> None:
    """Their columns are those of the first run, whatever verb writes the rows."""
    pytest.importorskip("pandas")
    (tmp_path / "in").mkdir()

    def put(name: str, first: int) -> None:
        ids = np.arange(first, first + 300)
        pq.write_table(pa.table({"id": ids, "ssn": ids.astype(str), "x": ids * 1.0}), tmp_path / "in" / name)

    put("a.parquet", 0)
    (tmp_path / "bad").touch()
    (tmp_path / "stop").touch()
    post = [gm.step(Tidy, folder=str(tmp_path), batch_format="pandas")]
    sink = gm.sink(str(tmp_path / "out"), keep=["id"])
    job = gm.Job(str(tmp_path / "in"), model, sink, post=post, workers=0, shard_rows=100, gates={"min_ok": 0.5})
    with pytest.raises(BadOutput):
        job.run()
    (tmp_path / "stop").unlink()
    assert job.run().rows_dead == 1
    (tmp_path / "bad").unlink()
    assert gm.retry_dead(job).rows_ok == 300
    put("b.parquet", 300)
    rows = job.run(append=True).read().to_table()
    assert rows.column_names == ["id", "score", "z"]
    assert sorted(rows["id"].to_pylist()) == list(range(600))
    assert [2.0 * i for i in rows["id"].to_pylist()] == rows["score"].to_pylist()


class Once:
    """Hands back columns in a dict, and in a frame once there is a file."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __call__(self, df: Any) -> Any:
        found = df[["ssn", "score"]].assign(z=1)
        return found if os.path.exists(f"{self.folder}/frames") else dict(found)


def test_a_result_of_another_rule_is_added_to_with_its_columns(tmp_path: Path) -> None:
    """One that has answers which frames leave out, and columns of the source that keep does not name, keeps them, and
    it is said.
    """
    pytest.importorskip("pandas")
    (tmp_path / "in").mkdir()
    pq.write_table(SOURCE, tmp_path / "in" / "a.parquet")
    post = [gm.step(Once, folder=str(tmp_path), batch_format="pandas")]
    sink = gm.sink(str(tmp_path / "out"), keep=["id"])
    job = gm.Job(str(tmp_path / "in"), model, sink, post=post, workers=0)
    columns = job.run().read().to_table().column_names
    assert set(columns) == {"id", "score", "debug", "ssn", "z"}
    (tmp_path / "frames").touch()
    pq.write_table(SOURCE, tmp_path / "in" / "b.parquet")
    report = job.run(append=True)
    rows = report.read().to_table()
    assert rows.column_names == columns and rows["debug"].to_pylist() == [1.0, 2.0, 3.0] * 2
    assert rows["ssn"].to_pylist() == ["a", "b", "c"] * 2
    assert any("the result has column 'ssn' of the rows" in note for note in report.notes)


def deadly(frame: Any) -> Any:
    """Drops a column, kills the worker at one row and fails at the two after it."""
    found = set(frame["id"].tolist())
    if 20 in found:
        os.kill(os.getpid(), signal.SIGSEGV)
    if found & {21, 22}:
        raise ValueError("21")
    return frame.drop(columns=["debug"])


def test_a_frame_of_rows_that_are_looked_at_one_by_one(tmp_path: Path) -> None:
    """After a worker has died, rows of a window are tried in parts, and one whose rows are all dead returns nothing."""
    rows = pa.table({"id": range(40), "ssn": ["s"] * 40, "x": [0.5 * i for i in range(40)]})
    pq.write_table(rows, tmp_path / "in.parquet")
    sink, step = gm.sink(str(tmp_path / "out"), keep=["id"]), gm.step(deadly, batch_format="pandas")
    gates = {"min_ok": 0.5, "warn_failed": 1}
    report = gm.Job(str(tmp_path / "in.parquet"), model, sink, post=[step], workers=1, gates=gates).run()
    found = gm.read(str(tmp_path / "out")).to_table()
    assert (report.rows_dead, found.column_names) == (3, ["id", "score"])
    assert found["id"].to_pylist() == [i for i in range(40) if i not in (20, 21, 22)]


def test_texts_handed_back_in_another_type_are_told_of(tmp_path: Path) -> None:
    """Texts of pandas are large ones in Arrow."""
    import pandas as pd

    def back(batch: dict[str, Any]) -> dict[str, Any]:
        return {"ssn": pd.Series(list(batch["ssn"])), "z": batch["x"]}

    with pytest.warns(gm.GristmillWarning, match="hands back column 'ssn' of the rows unchanged"):
        gm.Job(SOURCE, model, gm.sink(str(tmp_path / "out"), keep=["id"]), post=[back], workers=0).run()
