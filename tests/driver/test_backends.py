"""Which backend runs a text model that leaves it open, and int8 on request: chosen once, measured, said, kept."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import gristmill as gm
from gristmill.driver import backends, planning
from gristmill.models import fidelity, runtimes
from gristmill.models.runtimes import Runtime

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


@pytest.mark.long
def test_a_long_job_is_exported_once_and_pinned(
    cache: Path, source: Path, minilm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A short job runs on torch. A long one is exported, compared on its own rows, and runs on whatever is the fastest;
    from then on short jobs do too, but a sink keeps the backend that its plan was made for.
    """
    small = job(source, tmp_path / "a", minilm)
    assert small.plan().backend.startswith("torch (too small")
    first = small.run()
    assert first.details["runs_on"]["backend"] == "torch"
    assert not (cache / "exports").exists()
    with monkeypatch.context() as patch:
        patch.setattr(backends, "QUICK_SECONDS", 0.0)
        patch.setattr(backends, "QUICK_A_BYTE", 0.0)
        second = job(source, tmp_path / "b", minilm).run()
    (note,) = (cache / "exports").glob("*.runtimes.json")
    found = json.loads(note.read_text())["runtimes"]
    assert set(found) == {"torch", "onnx", "openvino"}
    assert all(one["difference"] <= 1e-5 and one["rate"] > 0 for one in found.values())
    fastest = max(found, key=lambda name: found[name]["rate"])
    assert second.details["runs_on"]["backend"] == fastest
    np.testing.assert_allclose(vectors(second), vectors(first), atol=1e-5)
    assert job(source, tmp_path / "c", minilm).plan().backend == f"{fastest} (compared before)"
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
        of = Runtime(failed=found) if isinstance(found, str) else Runtime(900.0, found)
        runtimes.remember(r.model, {"torch": Runtime(100.0), "onnx": of, "openvino": of})
        chosen = backends.settle(r)
        assert chosen.resolved.model.backend == "torch"
        assert chosen.notes == (f"embed {minilm}: stays on torch: {said}",)


def test_the_fastest_that_is_equal_to_torch_runs(
    tmp_path: Path, source: Path, minilm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was measured on this machine decides, not which it is; figures of another machine are none of this one."""
    monkeypatch.setenv("GRISTMILL_CACHE", str(tmp_path / "cache"))
    r = planning.resolve(job(source, tmp_path / "a", minilm).spec)
    for rates, wanted in (((3, 2, 1), "torch"), ((2, 3, 1), "onnx"), ((1, 2, 3), "openvino")):
        names = ("torch", "onnx", "openvino")
        runtimes.remember(r.model, {n: Runtime(float(x), 1e-7) for n, x in zip(names, rates, strict=True)})
        assert backends.settle(r).resolved.place.backend == wanted
        assert job(source, tmp_path / "a", minilm).plan().backend == f"{wanted} (compared before)"
    found = {"torch": Runtime(1.0), "onnx": Runtime(2.0, 1e-7), "openvino": Runtime(3.0, 1e-3)}
    assert runtimes.fastest(found, fidelity.CLOSE) == "onnx"
    monkeypatch.setattr(runtimes.machine, "name", lambda: "Another Processor x 64")
    assert runtimes.recall(r.model) is None


def test_what_tune_found_of_all_backends_is_what_later_jobs_run_on(
    tmp_path: Path, source: Path, minilm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rates take the place of the shorter comparison's; those of some backends alone, in another unit, do not."""
    monkeypatch.setenv("GRISTMILL_CACHE", str(tmp_path / "cache"))
    r = planning.resolve(job(source, tmp_path / "a", minilm).spec)
    assert backends.usable(r) == ()
    found = {"torch": Runtime(1.0), "onnx": Runtime(3.0, 1e-7), "openvino": Runtime(9.0, 1e-3)}
    runtimes.remember(r.model, found)
    settled = backends.settle(r).resolved
    assert settled.place.backend == "onnx"
    assert backends.usable(settled) == backends.usable(r) == ("torch", "onnx")  # not what differs from torch
    backends.keep(settled, {"onnx": 900.0})
    assert runtimes.recall(r.model) == found
    backends.keep(settled, {"onnx": 900.0, "torch": 1000.0})
    assert backends.settle(r).resolved.model.backend == "torch"
    assert job(source, tmp_path / "a", minilm).plan().backend == "torch (compared before)"


@pytest.mark.long
def test_an_export_on_request_counts_for_auto(
    tmp_path: Path, docstrings: list[str], minilm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """backend=onnx exports the model and tells what each backend reaches; a job on auto then loads no torch, whatever
    its size.
    """
    monkeypatch.setenv("GRISTMILL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(backends, "QUICK_SECONDS", 0.0)
    monkeypatch.setattr(backends, "QUICK_A_BYTE", 0.0)
    pq.write_table(pa.table({"id": range(60), "text": [t[:200] for t in docstrings[:60]]}), tmp_path / "in.parquet")
    asked = job(tmp_path / "in.parquet", tmp_path / "a", minilm, backend="onnx").run()
    assert asked.details["runs_on"]["backend"] == "onnx"
    r = planning.resolve(job(tmp_path / "in.parquet", tmp_path / "b", minilm).spec)
    found = runtimes.recall(r.model)
    assert found is not None and set(found) == {"torch", "onnx", "openvino"}
    monkeypatch.setattr(runtimes, "measured", None)  # nothing is measured again
    assert backends.foreseen(r).endswith("(compared before)")
    backends.settle(r)


@pytest.mark.long
def test_bfloat16_on_request_tells_how_close_it_is(cache: Path, source: Path, minilm: Path, tmp_path: Path) -> None:
    """On a CPU by OpenVINO, or by whichever is faster where that is left open, with its fidelity told."""
    exact = vectors(job(source, tmp_path / "a", minilm, backend="onnx").run())
    for name, options in (("b", {"backend": "openvino"}), ("c", {})):
        report = job(source, tmp_path / name, minilm, dtype="bfloat16", **options).run()
        assert report.details["runs_on"]["dtype"] == "bfloat16"
        assert any("in bfloat16, on 32 rows of this source: cosine to float32 0.99" in n for n in report.notes)
        assert (vectors(report) * exact).sum(axis=1).min() > 0.99
    with pytest.raises(gm.PlanChanged, match=r"model\.dtype"):
        job(source, tmp_path / "b", minilm).run()


def test_openvino_refuses_what_it_does_not_compute(tmp_path: Path, source: Path, minilm: Path) -> None:
    """Another precision, or a GPU, before anything runs."""
    for options in ({"dtype": "float16"}, {"dtype": "int8"}, {"device": "cuda"}):
        with pytest.raises(gm.BadModel, match="backend openvino computes in float32 or bfloat16 on a CPU"):
            job(source, tmp_path / "a", minilm, backend="openvino", **options).plan()


@pytest.mark.long
def test_a_comparison_that_takes_too_long_ends_no_job(
    tmp_path: Path, source: Path, minilm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is given up after a while: the job stays on torch, now and the next time, and says why; int8 is used as asked
    for.
    """
    monkeypatch.setenv("GRISTMILL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(fidelity, "_MOST_SECONDS", 0.5)
    monkeypatch.setattr(backends, "QUICK_SECONDS", 0.0)
    monkeypatch.setattr(backends, "QUICK_A_BYTE", 0.0)
    for name in "ab":
        report = job(source, tmp_path / name, minilm).run()
        assert (report.rows_ok, report.details["runs_on"]["backend"]) == (60, "torch")
        assert any("stays on torch: " in n and "took over 0 s" in n for n in report.notes)
    (note,) = backends.settle(planning.resolve(job(source, tmp_path / "c", minilm, dtype="int8").spec)).notes
    assert "in int8: not compared with float32" in note


@pytest.mark.long
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


@pytest.mark.long
def test_a_classifier_in_int8_tells_how_often_labels_agree(
    cache: Path, reviews: pa.Table, sentiment_classifier_onnx: Path, tmp_path: Path
) -> None:
    """Agreement of labels is part of the fidelity of a classifier; a float32 ONNX file is quantised without torch."""
    pq.write_table(reviews.slice(0, 60), tmp_path / "in.parquet")
    model = gm.TextClassifier(str(sentiment_classifier_onnx), text="text", dtype="int8")
    report = gm.Job(str(tmp_path / "in.parquet"), model, str(tmp_path / "out"), workers=1).run()
    assert "the same label for" in report.notes[0]
    assert report.rows_ok == 60


@pytest.mark.long
def test_int8_is_made_anew_where_only_a_graphs_external_weights_changed(
    tmp_path: Path, sentiment_classifier_onnx: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A retrained graph whose weights are in a file beside it has the same graph file, and another int8 model."""
    import onnx

    monkeypatch.setenv("GRISTMILL_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    shutil.copytree(sentiment_classifier_onnx, folder)
    (graph,) = folder.rglob("*.onnx")
    made = onnx.load(graph)
    rows = pa.table({"text": ["a fine film", "boring and long"]})
    graphs, scores = [], []
    spec = gm.TextClassifier(str(folder), text="text", all_scores=True, dtype="int8", backend="onnx")
    for factor in (1.0, -1.7):
        for weights in made.graph.initializer:
            values = onnx.numpy_helper.to_array(weights)
            if values.ndim == 2:
                weights.CopyFrom(onnx.numpy_helper.from_array((values * factor).astype(values.dtype), weights.name))
        kept = onnx.ModelProto()
        kept.CopyFrom(made)
        for old in graph.parent.glob(f"{graph.name}*"):
            old.unlink()
        onnx.save_model(kept, graph, save_as_external_data=True, location=f"{graph.name}_data", size_threshold=0)
        graphs.append(graph.read_bytes())
        scores.append(fidelity._scored(spec, rows, alone=False)[0])
    monkeypatch.setenv("GRISTMILL_CACHE", str(tmp_path / "empty"))
    assert graphs[0] == graphs[1]
    assert np.abs(scores[1] - scores[0]).max() > 0.01
    np.testing.assert_array_equal(scores[1], fidelity._scored(spec, rows, alone=False)[0])


MODELING = """
import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

class OwnConfig(PretrainedConfig):
    model_type = "own"
    def __init__(self, hidden_size=4, vocab_size=30522, **rest):
        self.hidden_size, self.vocab_size = hidden_size, vocab_size
        super().__init__(**rest)

class OwnModel(PreTrainedModel):
    config_class = OwnConfig
    def __init__(self, config):
        super().__init__(config)
        self.table = torch.nn.Embedding(config.vocab_size, config.hidden_size)
        self.post_init()
    def forward(self, input_ids=None, attention_mask=None, **rest):
        return BaseModelOutput(last_hidden_state=self.table(input_ids) * FACTOR)
"""


@pytest.mark.long
def test_an_export_and_its_verdict_are_of_the_modeling_code_that_is_there(
    tmp_path: Path, minilm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an edit of a folder's own modeling code, backend="onnx" gives what that code says, and nothing is known of
    how near its export is.
    """
    import torch
    from safetensors.torch import save_file

    monkeypatch.setenv("GRISTMILL_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "own"
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(minilm / name, folder)
    kinds = {"AutoConfig": "modeling_own.OwnConfig", "AutoModel": "modeling_own.OwnModel"}
    about = {"model_type": "own", "architectures": ["OwnModel"], "auto_map": kinds, "max_position_embeddings": 128}
    (folder / "config.json").write_text(json.dumps({**about, "hidden_size": 4, "vocab_size": 30522}))
    weights = {"table.weight": torch.rand(30522, 4, generator=torch.Generator().manual_seed(0))}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    pq.write_table(pa.table({"id": [0], "text": ["a fine film"]}), tmp_path / "in.parquet")
    found = []
    for factor in ("1", "3"):
        (folder / "modeling_own.py").write_text(MODELING.replace("FACTOR", factor))
        options = {"trust_remote_code": True, "pooling": "mean", "normalize": False, "text": "text"}
        assert runtimes.recall(gm.TextEmbedder(str(folder), backend="torch", **options)) is None
        runtimes.remember(gm.TextEmbedder(str(folder), backend="torch", **options), {"torch": Runtime(1.0)})
        job = gm.Job(
            str(tmp_path / "in.parquet"), gm.TextEmbedder(str(folder), backend="onnx", **options),
            str(tmp_path / "out"), workers=1,
        )  # fmt: skip
        found.append(np.array(job.run(restart=True).read().to_table()["embedding"].to_pylist()))
    np.testing.assert_allclose(found[1], found[0] * 3, rtol=1e-5)
