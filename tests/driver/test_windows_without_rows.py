"""Windows of which no row is left: whoever comes after is not asked about them, whatever made them so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import gristmill as gm
import kit

N, SHARD = 90, 15


def tenfold(batch: Any) -> Any:
    return {"v": batch["id"] * 10.0}


def pieces(row: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"v": row["id"] * 10.0}] if row["kept"] else []


def score(batch: Any) -> Any:
    return {"y": batch["v"] + 1}


async def score_row(row: dict[str, Any]) -> dict[str, Any]:
    return {"y": row["v"] + 1}


def after(batch: Any) -> Any:
    return {"z": batch["y"] * 2}


def same(batch: Any) -> Any:
    return {"y": batch["q"] + 1}


WAYS = {
    "filter": [gm.filter("kept"), gm.step(tenfold)],
    "rows": [gm.filter(lambda b: b["kept"]), gm.step(tenfold)],
    "flat_map": [gm.flat_map(pieces)],
    "takes": [gm.step(tenfold, takes={"id": "int64", "q": "int64 not null"})],
}
MODELS = {
    "batch": gm.model(score, takes={"v": "float64"}),
    "row": gm.model(score_row, takes={"v": "float64"}, concurrency=4),
}
GONE = {"first": (0, 30), "middle": (30, 45), "last": (60, 90), "all": (0, 90)}


def rows(gone: tuple[int, int], first: int = 0) -> pa.Table:
    """N rows, of which those from gone[0] to gone[1] are not kept, and lack q."""
    kept = [not gone[0] <= i < gone[1] for i in range(N)]
    ids = [first + i for i in range(N)]
    return pa.table(
        {"id": ids, "kept": kept, "q": pa.array([i if k else None for i, k in zip(ids, kept, strict=True)])}
    )


@pytest.mark.few(3)
@pytest.mark.parametrize(("way", "model"), [*((way, "batch") for way in WAYS), ("filter", "row")])
@pytest.mark.parametrize("where", GONE)
def test_no_row_of_a_window_is_left(tmp_path: Path, where: str, way: str, model: str) -> None:
    """The first, one in the middle, the last, all; then again in rows that are appended."""
    source = tmp_path / "in"
    source.mkdir()
    pq.write_table(rows(GONE[where]), source / "a.parquet")
    job = gm.Job(
        str(source / "*.parquet"), MODELS[model], gm.sink(str(tmp_path / "out"), keep=["id"], row_id="rid", key=["v"]),
        steps=WAYS[way], post=[gm.step(after, takes={"y": "float64"})], workers=0, shard_rows=SHARD,
        gates={"min_ok": 0, "allow_empty": True},
    )  # fmt: skip
    kept = [i for i in range(N) if not GONE[where][0] <= i < GONE[where][1]]
    assert job.run().rows_ok == len(kept)
    pq.write_table(rows(GONE[where], first=N), source / "b.parquet")
    assert job.run(append=True).rows_ok == 2 * len(kept)
    found = gm.read(str(tmp_path / "out")).to_table()
    if kept:
        assert found["id"].to_pylist() == [*kept, *(N + i for i in kept)]
        assert len(set(found["rid"].to_pylist())) == 2 * len(kept)
        assert found["z"].to_pylist() == [2 * (10.0 * i + 1) for i in found["id"].to_pylist()]
    assert gm.verify(str(tmp_path / "out")).ok


@pytest.mark.parametrize("on_null", ["skip", "dead"])
def test_no_row_of_a_window_has_an_answer(tmp_path: Path, on_null: Any) -> None:
    """All of its rows are skipped, or dead: a post step is not asked for columns that nobody answered in."""
    pq.write_table(rows((30, 60)), tmp_path / "a.parquet")
    job = gm.Job(
        str(tmp_path / "a.parquet"), gm.model(same, takes={"q": "int64 not null"}),
        gm.sink(str(tmp_path / "out"), keep=["id"]), post=[gm.step(after, takes={"y": "int64"})],
        on_null=on_null, workers=0, shard_rows=SHARD, gates={"min_ok": 0},
    )  # fmt: skip
    report = job.run()
    assert (report.rows_ok, report.rows_dead) == (60, 30 if on_null == "dead" else 0)


def test_a_text_model_reads_what_a_step_makes(tmp_path: Path) -> None:
    """The tokenizer is not asked for the texts of a window without any."""
    texts = ["a b" if not 20 <= i < 40 else "" for i in range(60)]
    pq.write_table(pa.table({"id": range(60), "text": texts}), tmp_path / "a.parquet")
    job = gm.Job(
        str(tmp_path / "a.parquet"), gm.TextEmbedder(str(kit.minilm()), text="word", backend="onnx"),
        gm.sink(str(tmp_path / "out"), keep=["id"]), steps=[gm.filter("length(text) > 0"), gm.flat_map(words)],
        workers=0, shard_rows=10,
    )  # fmt: skip
    assert job.run().rows_ok == 80


def words(row: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"word": word} for word in row["text"].split()]
