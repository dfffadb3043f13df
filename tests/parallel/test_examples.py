"""The examples of the parallel map, run as a person runs them, on real models."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import gristmill as gm

EXAMPLES = Path(__file__).parents[2] / "examples"

pytestmark = pytest.mark.real_model


def run(name: str, *arguments: object) -> str:
    """What an example prints."""
    line = [sys.executable, str(EXAMPLES / name), *map(str, arguments)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.long
def test_batch_scoring(sentiment_classifier: Path, reviews: pa.Table, tmp_path: Path) -> None:
    """Every review is scored once, with the model's labels; each worker loads the model once."""
    rows = reviews.slice(0, 60)
    pq.write_table(rows, tmp_path / "reviews.parquet")
    printed = run("batch_scoring.py", sentiment_classifier, tmp_path / "reviews.parquet", tmp_path / "scores.jsonl")
    assert "scored 60 reviews" in printed
    assert 1 <= printed.count("loaded ") <= 2
    scored = [json.loads(line) for line in (tmp_path / "scores.jsonl").read_text().splitlines()]
    assert sorted(r["review_id"] for r in scored) == sorted(rows["review_id"].to_pylist())
    labels = json.loads((sentiment_classifier / "config.json").read_text())["id2label"].values()
    assert {r["label"] for r in scored} <= set(labels)
    assert all(0.5 <= r["score"] <= 1 for r in scored)


@pytest.mark.long
def test_embedding_shards(minilm: Path, minilm_onnx: Path, reviews: pa.Table, tmp_path: Path) -> None:
    """One .npy a shard, rows in order, and a manifest that adds up; vectors as a job computes them."""
    (tmp_path / "in").mkdir()
    for n in range(3):
        pq.write_table(reviews.slice(n * 15, 15), tmp_path / "in" / f"{n}.parquet")
    printed = run("embedding_shards.py", minilm, tmp_path / "in", tmp_path / "out")
    assert "embedded 45 documents in 3 shards" in printed
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert [(r["rows"], r["dimensions"]) for r in manifest] == [(15, 384)] * 3
    vectors = np.load(tmp_path / "out" / "1.npy")
    job = gm.embed(reviews.slice(15, 15), text="text", model=str(minilm_onnx), workers=0)
    np.testing.assert_allclose(vectors, np.stack(job["embedding"].to_numpy(zero_copy_only=False)), atol=1e-5)
