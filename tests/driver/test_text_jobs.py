"""Real models over real text, from the command line: resumed after a kill, and each format in and out."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import functions
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import gristmill as gm

GRISTMILL = [sys.executable, "-m", "gristmill"]


def vectors(table: pa.Table) -> np.ndarray:
    """The embedding column as [rows, dimensions]."""
    return np.stack(table["embedding"].to_numpy(zero_copy_only=False))


@pytest.mark.long
@pytest.mark.real_model
def test_kill_9_and_the_same_command_again(minilm_onnx: Path, reviews: pa.Table, tmp_path: Path) -> None:
    """A killed embed, run again, gives what an uninterrupted run gives, and scores no committed shard twice."""
    pq.write_table(reviews.slice(0, 240), tmp_path / "reviews.parquet")
    options = ["--text", "text", "--model", str(minilm_onnx), "--keep", "review_id", "--set", "running.shard_rows=12"]
    command = [*GRISTMILL, "embed", str(tmp_path / "reviews.parquet"), str(tmp_path / "killed"), *options]
    running = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and len(list((tmp_path / "killed").rglob("receipts/*.json"))) < 3:
        time.sleep(0.02)
    os.kill(running.pid, signal.SIGKILL)
    running.wait()
    assert not (tmp_path / "killed" / "_SUCCESS").exists()
    before = {p.name: p.read_bytes() for p in (tmp_path / "killed").rglob("receipts/*.json")}
    assert 3 <= len(before) < 20
    again = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert again.returncode == 0, again.stderr
    after = {p.name: p.read_bytes() for p in (tmp_path / "killed").rglob("receipts/*.json")}
    assert all(after[name] == data for name, data in before.items()), "a committed shard was done again"
    whole = gm.embed(
        tmp_path / "reviews.parquet", tmp_path / "whole", text="text", model=str(minilm_onnx), keep=["review_id"]
    )
    one, two = whole.read().to_table(), gm.read(tmp_path / "killed").to_table()
    assert one["review_id"].to_pylist() == two["review_id"].to_pylist()
    assert np.abs(vectors(one) - vectors(two)).max() < 1e-5


@pytest.mark.few(1)
@pytest.mark.real_model
@pytest.mark.parametrize("workers", [0, 2])
def test_embeddings_equal_those_of_sentence_transformers(
    minilm: Path, docstrings: list[str], tmp_path: Path, workers: int
) -> None:
    """Row i's vector is that of text i, as sentence-transformers computes it, on texts of very mixed length."""
    from sentence_transformers import SentenceTransformer

    texts = [*docstrings[:40], "", "  ", "ü" * 3000]
    table = gm.embed(
        [{"text": t} for t in texts], text="text", model=str(minilm), backend="torch", workers=workers, shard_rows=12
    )
    expected = SentenceTransformer(str(minilm), device="cpu").encode(texts, normalize_embeddings=True)
    found = vectors(table)
    cosine = (found * expected).sum(axis=1) / np.linalg.norm(found, axis=1) / np.linalg.norm(expected, axis=1)
    assert cosine.min() >= 0.9999


@pytest.mark.real_model
@pytest.mark.parametrize("option", ["row_id", "model_version"])
def test_a_column_that_a_step_makes_is_not_overwritten(minilm_onnx: Path, tmp_path: Path, option: str) -> None:
    """A text model carries all columns over, and which there are after steps only the rows tell."""
    model = gm.TextEmbedder(str(minilm_onnx), text="text")
    sink = gm.sink(str(tmp_path / "out"), **{option: "made"})
    job = gm.Job([{"text": "one"}, {"text": "two"}], model, sink, steps=[gm.step(functions.makes)], workers=0)
    with pytest.raises(gm.BadJob, match=f"{option} names column 'made', which the rows already have"):
        job.run()


@pytest.mark.long
@pytest.mark.real_model
def test_classify_jsonl_to_jsonl(sentiment_classifier_onnx: Path, reviews: pa.Table, tmp_path: Path) -> None:
    """JSON lines in, labels out as JSON lines; an unreadable line and a null text are dead letters with their place."""
    lines = [json.dumps({"id": i, "text": t}) for i, t in enumerate(reviews["text"].to_pylist()[:60])]
    lines[7] = '{"id": 7, "text": '
    lines[9] = '{"id": 9, "text": null}'
    (tmp_path / "in.jsonl").write_text("\n".join(lines) + "\n")
    options = ["--text", "text", "--model", str(sentiment_classifier_onnx), "--format", "jsonl", "--keep", "id",
               "--min-ok", "0.9"]  # fmt: skip
    done = subprocess.run(
        [*GRISTMILL, "classify", str(tmp_path / "in.jsonl"), str(tmp_path / "out"), *options],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(x) for p in sorted((tmp_path / "out").glob("*.jsonl")) for x in p.read_text().splitlines()]
    assert [r["id"] for r in rows] == [i for i in range(60) if i not in (7, 9)]
    assert {r["label"] for r in rows} <= {"fresh", "rotten"}
    assert all(0.5 <= r["score"] <= 1 for r in rows)
    letters = sorted(gm.dead(tmp_path / "out").to_pylist(), key=lambda x: x["position"])
    assert [x["stage"] for x in letters] == ["read", "model"]
    assert letters[0]["position"] == len("\n".join(lines[:7])) + 1 or letters[0]["position"] > 0
    assert "in.jsonl" in letters[0]["message"]


@pytest.mark.real_model
def test_npy_with_ids_and_manifest(minilm_int8: Path, tmp_path: Path) -> None:
    """float32 shards, ids beside them row by row, and a manifest of which input went where."""
    for name in ("a", "b"):
        (tmp_path / "docs").mkdir(exist_ok=True)
        table = pa.table(
            {"id": [f"{name}{i}" for i in range(30)], "text": [f"{name} text number {i}" for i in range(30)]}
        )
        pq.write_table(table, tmp_path / "docs" / f"{name}.parquet")
    report = gm.embed(
        tmp_path / "docs", tmp_path / "out", text="text", model=str(minilm_int8), keep=["id"], format="npy"
    )
    manifest = pq.read_table(tmp_path / "out" / "manifest.parquet").to_pylist()
    assert sum(row["rows"] for row in manifest) == 60 == report.rows_ok
    assert {Path(row["input_path"]).name for row in manifest} == {"a.parquet", "b.parquet"}
    ids = []
    for part in sorted((tmp_path / "out").glob("part-*.npy")):
        array = np.load(part, mmap_mode="r")
        aligned = pq.read_table(str(part).removesuffix(".npy") + ".ids.parquet")["id"].to_pylist()
        assert array.dtype == np.float32
        assert array.shape == (len(aligned), 384)
        ids += aligned
    assert ids == [f"{n}{i}" for n in "ab" for i in range(30)]


@pytest.mark.long
@pytest.mark.real_model
def test_documents_in_folders_are_chunked_and_embedded(minilm_int8: Path, tmp_path: Path) -> None:
    """One row a file, flat_map into chunks, a prompt, a stable row id: the example of the Python contract."""
    for i in range(5):
        (tmp_path / "docs" / f"d{i}").mkdir(parents=True)
        (tmp_path / "docs" / f"d{i}" / "x.md").write_text("\n\n".join(f"Paragraph {j} of {i}." for j in range(i + 1)))

    def chunk(row: dict[str, str]) -> list[dict[str, str]]:
        return [{"text": piece} for piece in row["text"].split("\n\n")]

    job = gm.Job(
        source=gm.source(str(tmp_path / "docs" / "**" / "*.md"), format="text"),
        steps=[gm.filter("length(text) > 0"), gm.flat_map(chunk)],
        model=gm.TextEmbedder(str(minilm_int8), text="text", output="vector", prompt="passage: "),
        sink=gm.sink(str(tmp_path / "chunks"), keep=["path"], row_id="chunk_id"),
    )
    assert job.preview(2).num_rows >= 2
    report = job.run()
    table = report.read().to_table()
    assert (report.rows_in, report.rows_ok) == (5, 15)
    assert table.column_names == ["chunk_id", "path", "vector"]
    assert len(set(table["chunk_id"].to_pylist())) == 15


@pytest.mark.real_model
def test_a_model_that_changes_between_runs_is_refused(minilm_int8: Path, tmp_path: Path) -> None:
    """Another model file on a finished sink is exit 4, and a pinned digest that does not fit is exit 2."""
    import shutil

    folder = tmp_path / "model"
    shutil.copytree(minilm_int8, folder)
    pq.write_table(pa.table({"id": [1], "text": ["one text"]}), tmp_path / "in.parquet")
    job = gm.Job(str(tmp_path / "in.parquet"), gm.TextEmbedder(str(folder), text="text"), str(tmp_path / "out"))
    job.run()
    pinned = gm.TextEmbedder(str(folder), text="text", sha256="0" * 64)
    with pytest.raises(gm.BadModel, match="0000"):
        gm.Job(str(tmp_path / "in.parquet"), pinned, str(tmp_path / "other")).run()
    config = folder / "config.json"
    config.write_text(config.read_text() + "\n")
    with pytest.raises(gm.PlanChanged, match=r"config\.json"):
        job.run()


@pytest.mark.few(1)
@pytest.mark.real_model
@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_a_file_of_nothing_has_no_columns_to_miss(minilm_int8: Path, tmp_path: Path, kind: str) -> None:
    """It fails the gate as a source without rows, and is recorded where that is meant, whatever the job names."""
    (tmp_path / f"in.{kind}").touch()

    def job(sink: str, **gates: bool) -> gm.Job:
        source = gm.source(str(tmp_path / f"in.{kind}"), columns=["id", "text"], where="id > 1")
        model, target = gm.TextEmbedder(str(minilm_int8), text="text"), gm.sink(str(tmp_path / sink), keep=["id"])
        return gm.Job(source, model, target, steps=[gm.filter("length(text) > 0")], workers=0, gates=gates)

    with pytest.raises(gm.GateFailed, match="the source has no rows"):
        job("refused").run()
    report = job("out", allow_empty=True).run()
    assert report.rows_in == 0 and report.read().to_table().column_names == ["embedding"]
    (tmp_path / "in.jsonl").write_text("{}\n")  # a row, though without columns
    with pytest.raises(gm.BadModel, match="does not have"):
        gm.embed(str(tmp_path / "in.jsonl"), str(tmp_path / "rows"), text="text", model=str(minilm_int8), workers=0)


@pytest.mark.long
def test_texts_alone(minilm_int8: Path) -> None:
    """A list of strings, a Series, an array: the texts themselves, their vectors in their order, with or without a
    name.
    """
    pd, pl = pytest.importorskip("pandas"), pytest.importorskip("polars")
    texts = ["a dog", "a cat", "the stock market"]
    model = str(minilm_int8)
    found = gm.embed(texts, model=model, workers=0)
    assert found.column_names[-1] == "embedding" and found.num_rows == 3
    vectors = np.stack(found["embedding"].to_pylist())
    assert vectors[0] @ vectors[1] > vectors[0] @ vectors[2], "dogs are more like cats than markets"
    for form in (tuple(texts), pd.Series(texts), pl.Series(texts), np.array(texts), pa.array(texts)):
        assert gm.embed(form, model=model, workers=0)["embedding"].equals(found["embedding"]), type(form)
    named = gm.embed(texts, text="body", model=model, workers=0, keep=["body"])
    assert named["body"].to_pylist() == texts
    with pytest.raises(gm.GateFailed, match="1 of 4 rows are null in text"):
        gm.embed([*texts, None], model=model, workers=0)
    with pytest.raises(gm.BadJob, match="the list of texts is empty"):
        gm.embed([], model=str(minilm_int8))
    with pytest.raises(gm.BadJob, match="a generator: make it a list"):
        gm.embed((t for t in ["a"]), model=str(minilm_int8))
    with pytest.raises(gm.BadJob, match="embed needs text="):
        gm.embed("reviews.csv", model=model)
