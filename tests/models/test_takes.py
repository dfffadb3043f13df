"""What a function or step says it takes: checked by name and type before anything runs, and given alone."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import gristmill as gm
from gristmill.job.specs import SklearnModel

Batch = dict[str, np.ndarray]


def doubled(batch: Batch) -> Batch:
    """Says what it was given: names and types."""
    assert list(batch) == ["x", "n"], list(batch)
    assert (batch["x"].dtype, batch["n"].dtype) == (np.float64, np.int64)
    return {"y": batch["x"] * 2 + batch["n"]}


TAKES = {"x": "float64 not null", "n": "int64 not null"}


@pytest.fixture
def source(tmp_path: Path) -> str:
    """Ten rows with float32 x (row 3 is null), int32 n, and a text."""
    x = pa.array([float(i) if i != 3 else None for i in range(10)], pa.float32())
    table = pa.table({"id": range(10), "x": x, "n": pa.array(range(10), pa.int32()), "text": ["t"] * 10})
    pq.write_table(table, tmp_path / "in.parquet")
    return str(tmp_path / "in.parquet")


def job(source: str, folder: Path, model: Any = None, **options: Any) -> gm.Job:
    """The job of these tests, in this process."""
    model = model or gm.model(doubled, takes=TAKES)
    return gm.Job(source, model, gm.sink(str(folder / "out"), keep=["id"]), **{"workers": 0, **options})


@pytest.mark.parametrize(
    ("on_null", "ok", "dead", "filtered"), [("dead", 9, 1, 0), ("skip", 9, 0, 1), ("keep", 9, 1, 0)]
)
def test_given_alone_as_declared(source: str, tmp_path: Path, on_null: str, ok: int, dead: int, filtered: int) -> None:
    """Declared columns alone, widened to the declared types; a null where none may be follows on_null: kept, it is
    given to the function, whose NaN is a dead letter, not an answer.
    """
    report = job(source, tmp_path, on_null=on_null).run()
    assert (report.rows_ok, report.rows_dead, report.rows_filtered) == (ok, dead, filtered)
    expected = {i: 3.0 * i for i in range(10) if i != 3}
    table = report.read().to_table()
    assert dict(zip(table["id"].to_pylist(), table["y"].to_pylist(), strict=True)) == expected


@pytest.mark.parametrize(
    ("takes", "says"),
    [
        ({"z": "float32"}, r"takes column 'z'.*has id, x, n, text"),
        ({"text": "float32"}, r"column 'text' as float.*string"),
        ({"id": "int32"}, r"column 'id' as int32.*int64.*without loss"),
        ({"x": "flot32"}, r"takes= gives column 'x' the type 'flot32'"),
    ],
)
def test_refused_before_anything_runs(source: str, tmp_path: Path, takes: dict[str, str], says: str) -> None:
    """A missing column, a type that would lose something, a type that is none: exit 2, for models and for steps."""
    for options in ({"model": gm.model(doubled, takes=takes)}, {"steps": [gm.step(doubled, takes=takes)]}):
        with pytest.raises(gm.BadJob, match=says) as failed:
            job(source, tmp_path, **options).run()
        assert failed.value.exit_code == 2
    assert not (tmp_path / "out").exists()


def test_columns_that_a_step_makes_are_checked_when_they_are_there(source: str, tmp_path: Path) -> None:
    """After a step the source's schema says nothing: the first rows do, and the job stops, not a row being dead."""
    steps = [gm.step(lambda b: {"n": np.array(["a"] * len(b["id"]))})]
    with pytest.raises(gm.GristmillError, match=r"column 'n' as int64"):
        job(source, tmp_path, steps=steps).run()


def test_null_counts_break_a_gate_before_anything_runs(source: str, tmp_path: Path) -> None:
    """One of ten rows is null in a column that may not be: min_ok 1 cannot hold."""
    with pytest.raises(gm.GateFailed, match="1 of 10 rows are null"):
        job(source, tmp_path, gates=gm.Gates(min_ok=1)).run()


def test_a_step_gets_what_it_takes(source: str, tmp_path: Path) -> None:
    """The null row is a dead letter of the step; the other columns go on to the model."""

    def seen(batch: Batch) -> Batch:
        assert list(batch) == ["x", "_row"]
        return {"x2": batch["x"] ** 2}

    def one(row: dict[str, Any]) -> list[dict[str, Any]]:
        assert list(row) == ["x2"]
        return [{"x3": row["x2"] + 1}]

    steps = [gm.step(seen, takes={"x": "float32 not null"}), gm.flat_map(one, takes={"x2": "float32"})]
    report = job(source, tmp_path, gm.model(lambda b: {"y": b["x3"] + b["n"]}), steps=steps).run()
    assert (report.rows_ok, report.rows_dead) == (9, 1)
    (letter,) = gm.dead(str(tmp_path / "out")).to_pylist()
    assert letter["error"] == "NullColumn" and "'x' is null" in letter["message"]
    table = report.read().to_table()
    assert dict(zip(table["id"].to_pylist(), table["y"].to_pylist(), strict=True)) == {
        i: i * i + 1.0 + i for i in range(10) if i != 3
    }


def test_declared_in_a_job_file(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`takes` of a model and a step, written by --save and read back; another declaration is another fingerprint."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scoring_takes.py").write_text(
        "def half(batch):\n    return {'h': batch['n'] / 2}\n\n\ndef score(batch):\n    return {'y': batch['h']}\n"
    )
    text = (
        f"source: {source}\nsteps: [{{map: 'scoring_takes:half', takes: {{n: int32}}}}]\n"
        "model: {call: 'scoring_takes:score', takes: {h: float64 not null}}\nsink: {uri: out, keep: [id]}\n"
    )
    (tmp_path / "job.yaml").write_text(text)
    loaded = gm.load_job("job.yaml")
    assert loaded.run().rows_ok == 10
    (tmp_path / "job.yaml").write_text(text.replace("n: int32", "n: int64"))
    with pytest.raises(gm.PlanChanged, match="columns taken by"):
        gm.load_job("job.yaml").run()


def zeros(batch: Any) -> Batch:
    """For arrays and tables of any columns."""
    return {"y": np.zeros(len(batch["x"]))}


@pytest.mark.parametrize("on_null", ["dead", "skip"])
@pytest.mark.parametrize("takes", [None, {"x": "float64", "n": "float64"}])
def test_on_null_is_refused_where_it_would_change_nothing(
    source: str, tmp_path: Path, on_null: str, takes: dict[str, str] | None
) -> None:
    """on_null is about the columns that a function declares not null; where there are none it is not ignored, and the
    refusal shows how to declare one. Not given, nulls are the function's own.
    """
    with pytest.raises(gm.BadJob, match=f"on_null is '{on_null}', and .*zeros d.*not null"):
        job(source, tmp_path, model=gm.model(zeros, takes=takes), on_null=on_null, on_nan="keep").run()
    assert not (tmp_path / "out").exists()
    for number, given in enumerate(({}, {"on_null": "keep"})):
        report = job(source, tmp_path / str(number), model=gm.model(zeros, takes=takes), on_nan="keep", **given).run()
        assert report.rows_ok == 10


def test_on_null_of_an_estimator_that_takes_nulls_is_refused(source: str, tmp_path: Path) -> None:
    """A model that answers rows with nulls leaves nothing for on_null to decide."""
    from sklearn.ensemble import HistGradientBoostingRegressor

    path = tmp_path / "model.joblib"
    joblib.dump(HistGradientBoostingRegressor(max_iter=2).fit([[1.0], [2.0]], [1.0, 2.0]), path)
    spec = SklearnModel(
        str(path), features=("x",), allow_pickle=True, sha256=hashlib.sha256(path.read_bytes()).hexdigest()
    )
    with pytest.raises(gm.BadJob, match=r"on_null is 'skip'.*answers rows with nulls itself.*where"):
        job(source, tmp_path, model=spec, on_null="skip").run()
    assert job(source, tmp_path, model=spec).run().rows_ok == 10


@pytest.mark.parametrize(
    ("takes", "form", "says"),
    [
        (None, "numpy", "x has 1 null: zeros gets NaN for them"),
        ({"x": "float64", "n": "int32"}, "numpy", "x has 1 null: zeros gets NaN for them"),
        (TAKES, "numpy", None),
        (None, "arrow", None),
    ],
)
def test_nulls_that_become_nan_are_told(
    source: str, tmp_path: Path, takes: dict[str, str] | None, form: str, says: str | None
) -> None:
    """Planning says which columns' nulls a function on arrays is given as NaN."""
    made = job(source, tmp_path, model=gm.model(zeros, takes=takes, batch_format=form))
    notes = made.plan().notes
    told = [note for note in notes if "gets NaN" in note]
    assert told[0].startswith(says) if says else not told, notes
    assert [n for n in made.run().notes if "gets NaN" in n] == told
