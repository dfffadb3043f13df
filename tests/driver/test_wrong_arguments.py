"""Values of a wrong kind in Python: each is told at once, with the argument that it was given as."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest

import gristmill as gm

OF_A_SINK = {
    "read": gm.read,
    "dead": gm.dead,
    "reduced": gm.reduced,
    "verify": gm.verify,
    "status": gm.status,
    "lookup": gm.lookup,
    "prove": lambda sink: gm.prove(sink, 1),
    "compare": lambda sink: gm.compare(sink, "out", on="id"),
    "deliver": lambda sink: gm.deliver(sink, "sqlite:///x.db#t"),
}
OF_A_JOB = {"run": gm.run, "plan": gm.plan, "tune": gm.tune, "retry_dead": gm.retry_dead}


def score(batch: Any) -> Any:
    return {"y": batch["x"]}


@pytest.mark.parametrize("value", [5, None, ["out"], b"out"])
@pytest.mark.parametrize("name", [*OF_A_SINK, *OF_A_JOB])
def test_no_sink_and_no_job(name: str, value: Any) -> None:
    """The argument, its value and what to give: not what Python says of it inside."""
    what = "sink" if name in OF_A_SINK else "job"
    with pytest.raises((gm.BadJob, gm.BadSource), match="^" + what + r" is .*: give a ") as told:
        (OF_A_SINK | OF_A_JOB)[name](value)
    assert repr(value) in str(told.value)


@pytest.mark.parametrize("value", [5, 1.5, b"rows", {1, 2}, score])
def test_no_source(value: Any) -> None:
    """It is refused where it is given, not when the job runs."""
    for given in (lambda: gm.Job(value, score, "q/"), lambda: gm.source(value), lambda: gm.source("a", value)):
        with pytest.raises(gm.BadSource, match=r"^source is .*: give a path, a list of paths, a DataFrame"):
            given()


@pytest.mark.filterwarnings("error")
def test_rows_that_are_not_made_yet() -> None:
    """A lazy frame and a generator are told how they become rows, and nothing works them out before."""
    with pytest.raises(gm.BadSource, match=r"^source is a LazyFrame: give its rows, \.collect\(\)$"):
        gm.apply(pl.LazyFrame({"x": [1]}), fn=score)
    with pytest.raises(gm.BadSource, match=r"^source is a generator: give its rows, list\(…\)$"):
        gm.apply(({"x": x} for x in range(3)), fn=score)


def test_options_of_a_table(tmp_path: Path) -> None:
    """`gm.source` takes tables with options, too: they are no paths of that name."""
    job = gm.Job(gm.source(pa.table({"x": [1, 2, 3]}), limit=2), score, str(tmp_path / "out"), workers=0)
    assert job.run().read().to_table().column("y").to_pylist() == [1, 2]


@pytest.mark.parametrize("rows", [0, -1, "x", True, 1.5, None])
def test_rows_of_a_preview(rows: Any) -> None:
    """The count is told as the preview's own, not as an option of the source."""
    with pytest.raises(gm.BadJob, match=r"^preview rows is .*: give a whole number of at least 1$"):
        gm.Job(pa.table({"x": [1]}), score).preview(rows)


class Fitted:
    """An estimator, as those of scikit-learn."""

    def fit(self, rows: Any) -> Fitted:
        return self

    def predict(self, rows: Any) -> Any:
        return rows


def test_an_estimator_in_memory() -> None:
    """Wherever a model is given: it is to be saved, and its file given. Another kind of value is told as before."""
    table = pa.table({"x": [1.0], "text": ["a"]})
    for given in (
        lambda model: gm.predict(table, model=model),
        gm.SklearnModel,
        gm.OnnxModel,
        gm.TextEmbedder,
        gm.model,
        lambda model: gm.embed(table, text="text", model=model),
        lambda model: gm.apply(table, fn=model),
        lambda model: gm.Job(table, model, "q/"),
    ):
        with pytest.raises(gm.BadJob, match=r"model is an object in memory \(Fitted\).*skops\.io\.dump.*file's name"):
            given(Fitted())
    with pytest.raises(gm.BadJob, match="model is 5: give text"):
        gm.predict(table, model=5)  # type: ignore[call-overload]


def test_a_sink_in_place_of_its_job() -> None:
    """The way is told: the job itself, or the command."""
    with pytest.raises(gm.BadJob, match=r"^job is 'out/', which is no job: .* gristmill retry-dead SINK"):
        gm.retry_dead("out/")


@pytest.mark.parametrize("value", [print, type("Mine", (), dict.fromkeys(("progress", "note", "close"), print)), {}])
@pytest.mark.parametrize("way", ["job", "twin", "retry"])
def test_no_observer(tmp_path: Path, value: Any, way: str) -> None:
    """Also a function: refused at once, with the methods that an observer has, and nothing was run."""
    sink = tmp_path / "out"
    job = gm.Job({"x": [1, 2]}, score, sink)
    runs: dict[str, Any] = {
        "job": job.run,
        "twin": lambda **told: gm.apply({"x": [1, 2]}, sink, fn=score, **told),
        "retry": lambda **told: gm.retry_dead(job, **told),
    }
    with pytest.raises(
        gm.BadJob, match=r"^observer is .*: give an object with the methods progress\(now\), note\(note\)"
    ):
        runs[way](observer=value)
    assert not sink.exists()
