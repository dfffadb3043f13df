"""A graph beside weights that were trained again: the weights say what the model is, and a change of them is seen."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import onnx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from onnx import TensorProto, helper
from safetensors.numpy import load_file, save_file

import gristmill as gm
from gristmill.driver import backends
from gristmill.models import encoder, runtimes
from gristmill.models.kinds import describe, remarks, resolve

TEXTS = ["good film", "bad film", "a heist that goes wrong"]
QUERY = "encoder.layer.5.attention.self.query.weight"


@pytest.fixture
def both(minilm: Path, minilm_onnx: Path, tmp_path: Path) -> Path:
    """A folder as hubs ship it: weights and a graph of them."""
    folder = tmp_path / "model"
    shutil.copytree(minilm, folder)
    (folder / "onnx").mkdir()
    shutil.copy(minilm_onnx / "onnx" / "model.onnx", folder / "onnx" / "model.onnx")
    return folder


def train(folder: Path, name: str = QUERY) -> None:
    """Another value in one tensor of the weights, as an adapter that is merged changes some."""
    path = folder / "model.safetensors"
    weights = load_file(path)
    weights[name] = weights[name] * np.float32(1.5)
    save_file(weights, path, metadata={"format": "pt"})


def embedded(folder: Path, sink: Path, **options: object) -> np.ndarray:
    rows = pa.table({"id": range(len(TEXTS)), "text": TEXTS})
    model = gm.TextEmbedder(str(folder), text="text", **options)  # type: ignore[arg-type]
    gm.Job(rows, model, gm.sink(str(sink), keep=["id"]), workers=0).run()
    return gm.read(str(sink)).to_numpy("embedding")


@pytest.mark.long
def test_weights_that_are_trained_again_are_used(both: Path, tmp_path: Path) -> None:
    """The next run is another job, which scores with the new weights."""
    before = embedded(both, tmp_path / "out")
    train(both)
    wanted = embedded(both, tmp_path / "torch", backend="torch")
    assert np.abs(before - wanted).max() > 1e-3
    with pytest.raises(gm.PlanChanged, match=r"model\.safetensors"):
        embedded(both, tmp_path / "out")
    np.testing.assert_allclose(embedded(both, tmp_path / "new"), wanted, atol=1e-5)


@pytest.mark.long
def test_a_long_job_takes_an_export_of_the_weights(both: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the graph that lies there, which may be of others; run again and restarted it is the same job."""
    monkeypatch.setattr(backends, "worth_comparing", lambda r: True)
    monkeypatch.setattr(runtimes, "fastest", lambda found, close: "onnx")  # whatever is the fastest on this machine
    train(both)
    wanted = embedded(both, tmp_path / "torch", backend="torch")
    rows = tmp_path / "in.parquet"
    pq.write_table(pa.table({"id": range(len(TEXTS)), "text": TEXTS}), rows)
    job = gm.Job(str(rows), gm.TextEmbedder(str(both), text="text"), str(tmp_path / "out"), workers=1)
    report = job.run()
    assert report.details["runs_on"]["backend"] == "onnx" and "ONNX Runtime" in str(report)
    np.testing.assert_allclose(gm.read(str(tmp_path / "out")).to_numpy("embedding"), wanted, atol=1e-4)
    assert job.run().rows_run == 0
    np.testing.assert_allclose(embedded(both, tmp_path / "small"), wanted, atol=1e-4)  # by what was found before
    assert job.run(restart=True).rows_ok == len(TEXTS)
    assert gm.verify(str(tmp_path / "out")).ok


def test_a_graph_that_is_asked_for_counts_with_the_weights(both: Path, tmp_path: Path) -> None:
    """A change of the weights is seen then, too, and a graph that is older than they are is told of."""
    spec = gm.TextEmbedder(str(both), text="text", backend="onnx")
    assert remarks(spec) == ()
    embedded(both, tmp_path / "out", backend="onnx")
    train(both)
    graph = both / "onnx" / "model.onnx"
    os.utime(graph, (1, graph.stat().st_mtime - 7200))
    with pytest.raises(gm.PlanChanged, match=r"model\.safetensors"):
        embedded(both, tmp_path / "out", backend="onnx")
    (said,) = remarks(spec)
    assert "onnx/model.onnx is used, but is older than model.safetensors" in said


@pytest.mark.long
def test_int8_is_made_of_the_weights(both: Path, tmp_path: Path) -> None:
    """Not of the graph that lies beside them."""
    train(both, "embeddings.word_embeddings.weight")
    wanted = embedded(both, tmp_path / "torch", backend="torch")
    found = embedded(both, tmp_path / "out", dtype="int8")
    assert min(float(a @ b) for a, b in zip(found, wanted, strict=True)) > 0.97


def test_a_graph_that_is_named_itself_is_the_model(both: Path) -> None:
    """What lies beside it is none of its business."""
    named = resolve(gm.TextEmbedder(str(both / "onnx" / "model.onnx"), text="text"))
    train(both)
    assert remarks(named) == () and "model.safetensors" not in describe(named, None).digests


def test_without_torch_the_graph_is_used(both: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There the weights cannot be loaded."""
    monkeypatch.setattr(encoder, "installed", lambda name: name != "torch")
    assert resolve(gm.TextEmbedder(str(both), text="text")).backend == "onnx"


def test_a_graph_that_pools_takes_no_other_pooling(minilm_onnx: Path, tmp_path: Path) -> None:
    """Its vectors are pooled when they come; without pooling= they are taken as they are."""
    folder = tmp_path / "model"
    shutil.copytree(minilm_onnx, folder)
    graph = onnx.load(folder / "onnx" / "model.onnx")
    tokens = next(o.name for o in graph.graph.output if len(o.type.tensor_type.shape.dim) == 3)
    axes = helper.make_tensor("axes", TensorProto.INT64, [1], [1])
    graph.graph.initializer.append(axes)
    graph.graph.node.append(helper.make_node("ReduceMean", [tokens, "axes"], ["sentence_embedding"], keepdims=0))
    del graph.graph.output[:]
    graph.graph.output.append(helper.make_tensor_value_info("sentence_embedding", TensorProto.FLOAT, ["n", 384]))
    onnx.save(graph, folder / "onnx" / "model.onnx")
    assert describe(resolve(gm.TextEmbedder(str(folder), text="text")), None).outputs == ("embedding",)
    for option in ({"pooling": "cls"}, {"normalize": False}):
        spec = gm.TextEmbedder(str(folder), text="text", backend="onnx", **option)
        with pytest.raises(gm.BadModel, match=r"has no effect: .*does its own pooling"):
            spec.open()
    with pytest.raises(gm.BadModel, match=r"pooling='cls' has no effect.*does its own pooling"):
        describe(resolve(gm.TextEmbedder(str(folder), text="text", pooling="cls")), None)
