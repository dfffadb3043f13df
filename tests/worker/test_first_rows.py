"""What a worker does with its first rows: small windows, and on a GPU half of a probe to warm up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import gristmill as gm
from gristmill.driver import planning, probe, shipping, sizes
from gristmill.driver.resolved import Resolved
from gristmill.files.disk import LocalFiles
from gristmill.models import kinds
from gristmill.shards.shard import Shard
from gristmill.worker.predict import Predict
from gristmill.worker.prepare import FIRST_WINDOW, Prepare
from gristmill.worker.recipe import Recipe, Task

ROWS = 3000


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory, minilm_int8: Path) -> tuple[Resolved, Recipe]:
    """A text model over short texts, and what its workers are given."""
    folder = tmp_path_factory.mktemp("first")
    pq.write_table(pa.table({"t": [f"row {i}" for i in range(ROWS)]}), folder / "t.parquet")
    model = gm.TextEmbedder(model=str(minilm_int8), text="t")
    spec = gm.Job(source=str(folder / "t.parquet"), model=model, sink=str(folder / "out"), workers=1).spec
    found = planning.resolve(spec)
    return found, shipping.recipe(found, spec.sink, LocalFiles(), sizes.budget_of(found))


def task(r: Resolved, kind: Any, number: int = 0) -> Task:
    return Task(kind, Shard(number, shipping.pieces(r, ROWS)), rows=ROWS)


def test_only_the_first_shard_begins_with_a_small_window(job: tuple[Resolved, Recipe]) -> None:
    """The model gets work while the first shard's next window is read; later shards are read while it has some."""
    resolved, recipe = job
    model = kinds.open(recipe.model, recipe.place)
    prepare = Prepare(recipe, model)
    windows = [
        [w.rows.num_rows for w in prepare.windows(task(resolved, kind, n))]
        for n, kind in enumerate(("probe", "score", "score"))
    ]
    assert [sum(rows) for rows in windows] == [ROWS] * 3
    assert windows[0][0] == windows[1][0] == FIRST_WINDOW  # a probe is no shard
    assert windows[2][0] > FIRST_WINDOW


def test_half_of_a_gpus_first_rows_are_to_warm_up(job: tuple[Resolved, Recipe]) -> None:
    """They are told apart from the others, each in batches of its own, and every row is answered once; on a CPU, and in
    a shard, none are.
    """
    resolved, recipe = job
    model = kinds.open(recipe.model, recipe.place)
    window = next(Prepare(recipe, model).windows(task(resolved, "probe")))
    on_gpu = replace(recipe, place=replace(recipe.place, device="cuda:0"))
    scored = Predict(on_gpu, model).score(task(resolved, "probe"), window)
    assert scored.rows.num_rows == FIRST_WINDOW
    assert scored.figures["warmup_rows"] == FIRST_WINDOW // 2
    assert 0 < scored.figures["warmup_seconds"] < scored.figures["model_seconds"]
    for other, kind in ((on_gpu, "score"), (recipe, "probe")):
        assert "warmup_rows" not in Predict(other, model).score(task(resolved, kind), window).figures


def test_the_rate_of_first_rows_leaves_out_warming_up() -> None:
    """512 rows in 2 s, of which the first 256 took 1.9 s: 2,560 a second; where all were for that, what they took."""
    r: Any = SimpleNamespace(job=SimpleNamespace(steps=()), info=SimpleNamespace(asks="", at_once=0))
    figures = {"model_seconds": 2.0, "warmup_seconds": 1.9, "warmup_rows": 256.0}
    assert probe.rate(r, {"ok": 512, "figures": figures}) == pytest.approx(2560)
    assert probe.rate(r, {"ok": 256, "figures": figures}) == pytest.approx(128)
    assert probe.rate(r, {"ok": 512, "figures": {"model_seconds": 2.0}}) == pytest.approx(256)


@pytest.mark.parametrize(("asks", "at_once", "known"), [("http://a/v1", 1, False), ("", 65, False), ("", 64, True)])
def test_first_rows_of_a_model_that_answers_row_by_row_tell_a_rate_if_they_are_many(
    asks: str, at_once: int, known: bool
) -> None:
    """One row's answer says nothing of many at a time; an endpoint may be away for the moment."""
    r: Any = SimpleNamespace(job=SimpleNamespace(steps=()), info=SimpleNamespace(asks=asks, at_once=at_once))
    assert probe.rate(r, {"ok": 64, "figures": {"model_seconds": 2.0}}) == (32.0 if known else None)


def test_more_first_rows_on_a_gpu(job: tuple[Resolved, Recipe]) -> None:
    """A GPU takes as long for a few rows as for one, which tells nothing of its rate."""
    resolved, recipe = job
    counts = []
    for device in ("cpu", "cuda:0"):
        r = replace(resolved, place=replace(resolved.place, device=device))
        at: Any = SimpleNamespace(resolved=r, spec=r.job, batch=recipe.batch)
        counts.append(probe.first_rows(at))
    assert counts == [probe.TIMED_ROWS, probe.GPU_TIMED_ROWS]
