"""TextClassifier against the transformers pipeline itself."""

from __future__ import annotations

import functools
import json
import os
import shutil

import numpy as np
import pyarrow as pa
import pytest

import kit
from gristmill.errors import BadModel
from gristmill.job.specs import TextClassifier
from gristmill.models import kinds
from gristmill.models.contract import Place


@functools.cache
def texts() -> tuple[str, ...]:
    return (*kit.reviews()["text"].to_pylist()[:60], *kit.docstrings(20), "", "ünïcode ☃ 日本語", "word " * 3000)


def classify(spec: TextClassifier, values=None) -> pa.Table:
    table = pa.table({"text": pa.array(values or texts(), pa.string())})
    model = kinds.open(kinds.resolve(spec), Place(threads=2))
    prepared = model.prepare(table)
    order = np.argsort(-prepared.lengths, kind="stable")
    parts = [model.predict(prepared, order[i : i + 16]) for i in range(0, len(order), 16)]
    return pa.concat_tables(parts).take(np.argsort(order))


def peer(folder, values, **options) -> list:
    from transformers import pipeline

    return pipeline("text-classification", model=str(folder), device="cpu")(list(values), truncation=True, **options)


@functools.cache
def wanted_scores() -> list:
    """What the pipeline says of the texts: both backends are held against it."""
    return peer(kit.sentiment_classifier(), texts(), top_k=None)


@pytest.fixture
def changed(tmp_path):
    """The classifier's folder with another configuration."""

    def make(**config):
        folder = tmp_path / "model"
        shutil.copytree(kit.sentiment_classifier(), folder, copy_function=_linked)
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
        return folder

    return make


def _linked(source, target):
    if source.endswith(".safetensors"):
        try:
            return os.link(source, target)
        except OSError:
            pass
    return shutil.copyfile(source, target)


@pytest.mark.long
@pytest.mark.real_model
@pytest.mark.parametrize("backend", ["onnx", "torch"])
def test_equals_the_transformers_pipeline(backend):
    """Labels are the pipeline's and scores within 1e-4, for empty and over-long texts too."""
    folder = kit.sentiment_classifier_onnx() if backend == "onnx" else kit.sentiment_classifier()
    found = classify(TextClassifier(str(folder), text="text", backend=backend, all_scores=True))
    wanted = wanted_scores()
    by_label = np.array(
        [[next(s["score"] for s in row if s["label"] == n) for n in ("fresh", "rotten")] for row in wanted]
    )
    scores = found["scores"].combine_chunks().flatten().to_numpy().reshape(-1, 2)
    assert np.abs(scores - by_label).max() < 1e-4
    assert found["label"].to_pylist() == [row[0]["label"] for row in wanted]
    assert np.abs(found["score"].to_numpy() - by_label.max(axis=1)).max() < 1e-4
    assert json.loads(found.schema.field("scores").metadata[b"labels"]) == ["fresh", "rotten"]
    assert set(found["label"].to_pylist()) == {"fresh", "rotten"}


@pytest.mark.long
@pytest.mark.real_model
@pytest.mark.parametrize("problem", ["multi_label_classification", "single_label_classification", "regression"])
def test_problem_types(changed, problem):
    """Sigmoid for several labels, softmax for one of several, raw values for regression, as the pipeline does."""
    folder = changed(problem_type=problem)
    values = texts()[:6]
    found = classify(TextClassifier(str(folder), text="text"), values)
    wanted = peer(folder, values)
    assert found["label"].to_pylist() == [w["label"] for w in wanted]
    assert np.abs(found["score"].to_numpy() - [w["score"] for w in wanted]).max() < 1e-4


@pytest.mark.long
@pytest.mark.real_model
def test_one_label(tmp_path):
    """A classifier with one logit gets a sigmoid."""
    from transformers import AutoModelForSequenceClassification

    folder = tmp_path / "one"
    shutil.copytree(kit.sentiment_classifier(), folder)
    model = AutoModelForSequenceClassification.from_pretrained(
        kit.sentiment_classifier(),
        num_labels=1,
        id2label={0: "good"},
        label2id={"good": 0},
        ignore_mismatched_sizes=True,
    )
    model.save_pretrained(folder)
    values = texts()[:4]
    found = classify(TextClassifier(str(folder), text="text"), values)
    wanted = peer(folder, values)
    assert found["label"].to_pylist() == ["good"] * 4
    assert np.abs(found["score"].to_numpy() - [w["score"] for w in wanted]).max() < 1e-4


@pytest.mark.long
@pytest.mark.real_model
def test_export_on_request(tmp_path, monkeypatch):
    """backend=onnx on a torch folder exports the classifier and gives the same scores."""
    monkeypatch.setenv("GRISTMILL_CACHE", str(tmp_path))
    values = texts()[:10]
    spec = TextClassifier(str(kit.sentiment_classifier()), text="text", backend="onnx")
    found = classify(spec, values)
    wanted = peer(kit.sentiment_classifier(), values)
    assert np.abs(found["score"].to_numpy() - [w["score"] for w in wanted]).max() < 1e-4


def test_columns_and_schema_before_loading():
    """describe tells names and types: label, score, scores, or as output= says."""
    folder = str(kit.sentiment_classifier())
    source = pa.schema({"text": pa.string()})

    def schema(**options):
        info = kinds.describe(kinds.resolve(TextClassifier(folder, text="text", **options)), source)
        assert info.outputs == tuple(info.schema.names)
        assert info.keeps_columns
        return info.schema

    assert schema() == pa.schema({"label": pa.string(), "score": pa.float32()})
    assert schema(all_scores=True, output="mood") == pa.schema(
        {"mood": pa.string(), "mood_score": pa.float32(), "mood_scores": pa.list_(pa.float32(), 2)}
    )


def test_an_encoder_is_no_classifier():
    """A folder of another architecture says what it is."""
    with pytest.raises(BadModel, match=r"BertModel, which is not a sequence classifier; for vectors, use embed"):
        kinds.resolve(TextClassifier(str(kit.minilm()), text="text"))
