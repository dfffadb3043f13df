"""Which backend runs a text model that leaves it open, and int8 on request: chosen once, measured, said, kept."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import gristmill as gm
from gristmill import backends, planning
from gristmill.models import fidelity

pytestmark = pytest.mark.real_model


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that the tests share, so that the model is exported once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def cache(kept: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache in use."""
    monkeypatch.setenv("GRISTMILL_CACHE", str(kept))
    return kept


@pytest.fixture
def source(tmp_path: Path, docstrings: list[str]) -> Path:
    """60 docstrings as Parquet."""
    path = tmp_path / "in.parquet"
    pq.write_table(pa.table({"id": range(60), "text": [t[:300] for t in docstrings[:60]]}), path)
    return path


def job(source: Path, sink: Path, model: Path, **options: object) -> gm.Job:
    return gm.Job(str(source), gm.TextEmbedder(str(model), text="text", **options), str(sink), workers=1)  # type: ignore[arg-type]


def vectors(report: gm.Report) -> np.ndarray:
    column = report.read().to_table().sort_by("id")["embedding"].combine_chunks()
    return column.flatten().to_numpy().reshape(60, -1)


def test_a_long_job_is_exported_once_and_pinned(
    cache: Path, source: Path, minilm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A short job runs on torch. A long one is exported, compared on its own rows, and runs on ONNX Runtime; from then
    on short jobs do too, but a sink keeps the backend that its plan was made for.
    """
    small = job(source, tmp_path / "a", minilm)
    assert small.plan().backend.startswith("torch (too small")
    first = small.run()
    assert first.details["runs_on"]["backend"] == "torch"
    assert not (cache / "exports").exists()
    with monkeypatch.context() as patch:
        patch.setattr(backends, "WORTH_SECONDS", 0.0)
        patch.setattr(backends, "WORTH_A_BYTE", 0.0)
        second = job(source, tmp_path / "b", minilm).run()
    assert second.details["runs_on"]["backend"] == "onnx"
    (note,) = (cache / "exports").glob("*.fidelity.json")
    assert json.loads(note.read_text())["difference"] <= 1e-5
    np.testing.assert_allclose(vectors(second), vectors(first), atol=1e-5)
    assert job(source, tmp_path / "c", minilm).plan().backend == "onnx (exported before)"
    assert small.run().state == "nothing to do"
    pq.write_table(pa.table({"id": [60], "text": ["one more"]}), tmp_path / "more.parquet")
    grown = gm.Job(
        [str(source), str(tmp_path / "more.parquet")], gm.TextEmbedder(str(minilm), text="text"), str(tmp_path / "a")
    ).run(append=True)
    assert (grown.rows_ok, grown.details["runs_on"]["backend"]) == (61, "torch")


def test_a_model_that_exports_to_other_values_stays_on_torch(
    tmp_path: Path, source: Path, minilm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an earlier comparison found decides, and is said."""
    monkeypatch.setenv("GRISTMILL_CACHE", str(tmp_path / "cache"))
    r = planning.resolve(job(source, tmp_path / "a", minilm).spec)
    for found, said in ((2e-3, "exported to ONNX it differs by 2.0e-03"), ("no such operator", "no such operator")):
        fidelity.remember(r.model, found)
        chosen = backends.settle(r)
        assert chosen.resolved.model.backend == "torch"
        assert chosen.notes == (f"embed {minilm}: stays on torch: {said}",)


def test_int8_is_made_on_request_and_measured(cache: Path, source: Path, minilm: Path, tmp_path: Path) -> None:
    """dtype=int8 quantises the exported model, says how near it is to float32 on rows of the source, and is another
    result than float32's.
    """
    spec = job(source, tmp_path / "a", minilm, dtype="int8")
    report = spec.run()
    assert (report.details["runs_on"]["backend"], report.details["runs_on"]["dtype"]) == ("onnx", "int8")
    (note,) = [n for n in report.notes if "int8" in n]
    assert "cosine to float32 0.9" in note
    assert "alone and in a batch differ by up to" in note
    exact = vectors(job(source, tmp_path / "b", minilm, backend="onnx").run())
    assert (vectors(report) * exact).sum(axis=1).min() > 0.95
    with pytest.raises(gm.PlanChanged, match=r"model\.dtype"):
        job(source, tmp_path / "a", minilm).run()


def test_a_classifier_in_int8_tells_how_often_labels_agree(
    cache: Path, reviews: pa.Table, sentiment_classifier_onnx: Path, tmp_path: Path
) -> None:
    """Agreement of labels is part of the fidelity of a classifier; a float32 ONNX file is quantised without torch."""
    pq.write_table(reviews.slice(0, 60), tmp_path / "in.parquet")
    model = gm.TextClassifier(str(sentiment_classifier_onnx), text="text", dtype="int8")
    report = gm.Job(str(tmp_path / "in.parquet"), model, str(tmp_path / "out"), workers=1).run()
    assert "the same label for" in report.notes[0]
    assert report.rows_ok == 60
