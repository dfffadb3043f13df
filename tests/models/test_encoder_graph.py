"""Graphs written from an encoder's weights: equal to torch for each family, and never made of what is not known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gristmill.models import encoder_graph, export
from gristmill.models.contract import Place
from gristmill.models.encoder import EncoderFiles, find_encoder
from gristmill.models.onnx import OnnxEncoder
from gristmill.models.text import Batch

pytestmark = pytest.mark.real_model

SMALL = {"vocab_size": 90, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", {**SMALL, "max_position_embeddings": 300}),
    "roberta": ("Roberta", {**SMALL, "max_position_embeddings": 302, "pad_token_id": 1}),
    "xlm-roberta": ("XLMRoberta", {**SMALL, "max_position_embeddings": 302, "pad_token_id": 1, "type_vocab_size": 1}),
    "camembert": ("Camembert", {**SMALL, "max_position_embeddings": 302, "pad_token_id": 1, "hidden_act": "relu"}),
    "distilbert": (
        "DistilBert",
        {"vocab_size": 90, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "max_position_embeddings": 300},
    ),
    "mpnet": ("MPNet", {**SMALL, "max_position_embeddings": 302, "pad_token_id": 1}),
}


def made(family: str, task: str, folder: Path, **other: Any) -> Any:
    """A small random model with weights large enough for every part to matter, saved to the folder."""
    import torch
    import transformers

    name, config = FAMILIES[family]
    ends = "ForSequenceClassification" if task == "classify" else "Model"
    torch.manual_seed(0)
    model = getattr(transformers, name + ends)(getattr(transformers, f"{name}Config")(**{**config, **other})).eval()
    with torch.no_grad():
        for weights in model.parameters():
            weights.normal_(0, 0.3)
    model.save_pretrained(folder)
    return model


def files(folder: Path) -> EncoderFiles:
    return find_encoder(folder, folder, None, "onnx", "float32", "cpu", "a model")


def batch(padding: int) -> Batch:
    """Three rows, of which one fills the width, one is a token; long enough for mpnet's last bucket."""
    ids = np.random.default_rng(1).integers(5, 90, size=(3, 290))
    mask = np.arange(290) < np.array([290, 141, 1])[:, None]
    return Batch(np.where(mask, ids, padding), mask)


@pytest.mark.parametrize("task", ["embed", "classify"])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_graph_is_equal_to_torch(family: str, task: str, tmp_path: Path) -> None:
    """For each family and task, rows of all lengths, with the padding token and positions of its own."""
    model = made(family, task, tmp_path)
    shape = encoder_graph.known(files(tmp_path), task)
    assert shape is not None
    encoder_graph.write_graph(files(tmp_path), shape, task, tmp_path / "model.onnx")
    given = batch(int(model.config.pad_token_id))
    found = OnnxEncoder(tmp_path / "model.onnx", task, Place(), "a model").output(given)
    wanted = export._values(model, task, given)
    if task == "embed":
        found, wanted = found[given.mask], wanted[given.mask]
    np.testing.assert_allclose(found, wanted, atol=2e-5)
    assert np.abs(wanted).max() > 0.1


def test_a_real_model_is_written_in_no_time(minilm: Path, tmp_path: Path) -> None:
    """MiniLM's graph gives torch's token vectors, without torch and without tracing."""
    import subprocess
    import sys

    from gristmill.process.startup import import_path

    code = (
        f"import sys; sys.path[:0] = {import_path()!r}\n"
        "from pathlib import Path\n"
        "from gristmill.models import encoder, encoder_graph\n"
        f"root = Path({str(minilm)!r})\n"
        "files = encoder.find_encoder(root, root, None, 'onnx', 'float32', 'cpu', 'a model')\n"
        "shape = encoder_graph.known(files, 'embed')\n"
        f"encoder_graph.write_graph(files, shape, 'embed', Path({str(tmp_path)!r}, 'm.onnx'))\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    import transformers

    assert (tmp_path / "m.onnx").stat().st_size < 1 << 20 < (tmp_path / "m.onnx.data").stat().st_size
    model = transformers.AutoModel.from_pretrained(minilm).eval()
    ids = np.random.default_rng(0).integers(1000, 30_000, size=(2, 200))
    given = Batch(ids, np.arange(200) < np.array([200, 90])[:, None])
    found = OnnxEncoder(tmp_path / "m.onnx", "embed", Place(), "a model").output(given)
    np.testing.assert_allclose(found[given.mask], export._values(model, "embed", given)[given.mask], atol=1e-5)


@pytest.mark.parametrize(
    ("family", "changed"),
    [
        ("bert", {"position_embedding_type": "relative_key"}),
        ("bert", {"hidden_act": "silu"}),
        ("bert", {"is_decoder": True}),
        ("bert", {"rope_theta": 10000.0}),
        ("bert", {"auto_map": {"AutoModel": "modeling.Own"}}),
        ("bert", {"model_type": "nomic_bert"}),
        ("bert", {"num_hidden_layers": 3}),
        ("bert", {"hidden_size": 36}),
        ("bert", {"max_position_embeddings": 512}),
        ("bert", {"pruned_heads": {"0": [1]}}),
        ("roberta", {"pad_token_id": None}),
        ("mpnet", {"relative_attention_num_buckets": 16}),
        ("distilbert", {"sinusoidal_pos_embds": True}),
    ],
)
def test_a_configuration_with_something_unknown_is_not_known(
    family: str, changed: dict[str, Any], tmp_path: Path
) -> None:
    """A key, a value or a size that the graph would not follow: it is traced."""
    made(family, "embed", tmp_path)
    assert encoder_graph.known(files(tmp_path), "embed") is not None
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **changed}))
    assert encoder_graph.known(files(tmp_path), "embed") is None


def test_weights_with_something_unknown_are_not_known(tmp_path: Path) -> None:
    """A tensor too many (an adapter, a gate), one too few, or one in whole numbers; and adapters beside the weights."""
    from safetensors.numpy import load_file, save_file

    made("bert", "embed", tmp_path)
    whole = load_file(tmp_path / "model.safetensors")
    gate = np.ones((48, 32), np.float32)
    name = "encoder.layer.1.output.dense.weight"
    for weights in (
        {**whole, "encoder.layer.0.intermediate.gate.weight": gate},
        {**whole, "encoder.layer.0.attention.self.query.lora_A.weight": gate},
        {k: v for k, v in whole.items() if k != name},
        {**whole, name: whole[name].astype(np.int8)},
    ):
        save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
        assert encoder_graph.known(files(tmp_path), "embed") is None
    save_file(whole, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert encoder_graph.known(files(tmp_path), "embed") is not None
    (tmp_path / "adapter_config.json").write_text("{}")
    assert encoder_graph.known(files(tmp_path), "embed") is None


def test_saved_as_an_older_or_a_larger_model(tmp_path: Path) -> None:
    """Prefixes, gamma and beta, halves, and heads of other tasks: read as transformers reads them."""
    import torch
    import transformers
    from safetensors.torch import load_file, save_file

    made("bert", "embed", tmp_path)
    old = {}
    for name, value in load_file(tmp_path / "model.safetensors").items():
        name = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
        old[f"bert.{name}"] = value.to(torch.bfloat16)
    old["cls.predictions.bias"] = torch.zeros(90)
    old["bert.embeddings.position_ids"] = torch.arange(300)[None]
    save_file(old, tmp_path / "model.safetensors", metadata={"format": "pt"})
    shape = encoder_graph.known(files(tmp_path), "embed")
    assert shape is not None
    encoder_graph.write_graph(files(tmp_path), shape, "embed", tmp_path / "model.onnx")
    model = transformers.AutoModel.from_pretrained(tmp_path, dtype=torch.float32).eval()
    given = batch(0)
    found = OnnxEncoder(tmp_path / "model.onnx", "embed", Place(), "a model").output(given)
    np.testing.assert_allclose(found[given.mask], export._values(model, "embed", given)[given.mask], atol=2e-5)


def test_a_graph_with_other_values_is_traced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What is written is compared with torch before it is kept: a graph that is wrong after all gives way to a traced
    one.
    """
    monkeypatch.setenv("GRISTMILL_CACHE", str(tmp_path / "cache"))
    model = made("roberta", "embed", tmp_path / "model", layer_norm_eps=0.1)
    right = encoder_graph.known(files(tmp_path / "model"), "embed")
    assert right is not None
    import dataclasses

    monkeypatch.setattr(encoder_graph, "known", lambda *_: dataclasses.replace(right, epsilon=1e-12))
    made_of = export.exported(files(tmp_path / "model"), "embed", "a model")
    assert "tracing it" in caplog.text
    given = batch(1)
    found = OnnxEncoder(made_of, "embed", Place(), "a model").output(given)
    np.testing.assert_allclose(found[given.mask], export._values(model, "embed", given)[given.mask], atol=2e-5)


def test_distances_are_in_torchs_buckets() -> None:
    """Also at the borders between them, where a rounding of the logarithm would show."""
    import torch
    from transformers.models.mpnet.modeling_mpnet import MPNetEncoder

    distance = np.arange(-700, 701)
    wanted = MPNetEncoder.relative_position_bucket(torch.from_numpy(distance)).numpy()
    np.testing.assert_array_equal(encoder_graph.buckets(distance), wanted)
