"""The short sweep of a plain run: budgets are tried on its own rows, remembered, and never change what is answered."""

from __future__ import annotations

import json
from pathlib import Path

import functions
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer

import gristmill as gm
from gristmill.driver import budgets

pytestmark = pytest.mark.real_model


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    monkeypatch.setenv("GRISTMILL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "budgets"


def embed(folder: Path, sink: str, model: Path, texts: list[str], **options: object) -> gm.Report:
    source = folder / "in.parquet"
    if not source.exists():
        pq.write_table(pa.table({"id": range(len(texts)), "text": texts}), source)
    return gm.embed(str(source), str(folder / sink), text="text", model=str(model), workers=1, **options)


def values(report: gm.Report) -> np.ndarray:
    column = report.read().to_table().sort_by("id")["embedding"].combine_chunks()
    return np.asarray(column.flatten())


@pytest.mark.long
def test_a_plain_run_finds_its_budget_and_the_next_one_knows_it(
    cache: Path, tmp_path: Path, minilm_onnx: Path, docstrings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first run tries budgets on its own batches; the second uses what was found, and gives the same vectors."""
    texts = [t[:400] for t in docstrings[:1000]]  # seconds of work, as each budget is judged over half a second
    monkeypatch.setattr(budgets, "LEAST_ROWS", 100)
    monkeypatch.setattr(budgets, "ONNX_TRIES", (128, 512, 1024))
    first = embed(tmp_path, "a", minilm_onnx, texts)
    (note,) = cache.iterdir()
    found = json.loads(note.read_text())
    assert found["budget"] in (128, 512, 1024)
    assert set(found["rates"]) <= {"128", "512", "1024"}
    assert first.details["batch"]["tries"] == (128, 512, 1024)
    second = embed(tmp_path, "b", minilm_onnx, texts)
    assert second.details["batch"]["tokens"] == found["budget"]
    assert second.details["batch"]["tries"] == ()
    np.testing.assert_allclose(values(second), values(first), atol=1e-5)
    assert first.padding is not None
    assert first.padding < 0.1


def calls(folder: Path, rows: int, args: dict[str, object], **options: object) -> list[int]:
    """How many rows the calls of a function were given by one worker, whose answers are right."""
    if not (folder / "numbers.parquet").exists():
        pq.write_table(pa.table({"id": range(rows), "x": np.arange(rows)}), folder / "numbers.parquet")
    log = folder / "calls"
    log.unlink(missing_ok=True)
    given = {"log": str(log), **args}
    report = gm.apply(
        str(folder / "numbers.parquet"), str(folder / "out"), fn=functions.measured, args=given, keep=["id"],
        workers=1, restart=True, **options,
    )  # fmt: skip
    table = report.read().to_table().sort_by("id")
    assert table["y"].to_pylist() == [2.0 * n for n in range(rows)]
    return [int(line) for line in log.read_text().split()]


def test_a_quick_function_gets_more_rows_a_call(tmp_path: Path) -> None:
    """Calls of a function that takes no time grow from 1,024 rows to those of a window, and stay there."""
    sizes = calls(tmp_path, 200_000, {})
    grown = [n for n in sizes if n & (n - 1) == 0 and n >= 1024]
    assert grown == sorted(grown) and grown[0] == 1024 and grown[-1] == 16_384, sizes
    assert max(sizes) == 16_384


def test_a_slow_function_keeps_its_rows_a_call(tmp_path: Path) -> None:
    """Calls that take 10 ms or more do not grow, nor do those whose number of rows was given."""
    assert max(calls(tmp_path, 20_000, {"seconds": 0.012})) == 1024
    assert max(calls(tmp_path, 20_000, {}, batch_rows=300)) == 300


def test_calls_do_not_grow_again_after_memory_ran_out(tmp_path: Path) -> None:
    """The size that was too large is not tried a second time, and no row is lost for it."""
    sizes = calls(tmp_path, 100_000, {"most": 5000})
    assert sum(n > 5000 for n in sizes) == 1, sizes


@pytest.mark.long
def test_a_budget_that_was_given_is_used(tmp_path: Path, minilm_int8: Path, docstrings: list[str], cache: Path) -> None:
    """batch_tokens= is neither tried against others nor replaced by what was found, and small jobs try nothing."""
    report = embed(tmp_path, "a", minilm_int8, docstrings[:40], batch_tokens=300)
    assert (report.details["batch"]["tokens"], report.details["batch"]["tries"]) == (300, ())
    assert embed(tmp_path, "b", minilm_int8, docstrings[:40]).details["batch"]["tries"] == ()
    assert not cache.exists()


@pytest.mark.long
def test_the_report_counts_every_token(tmp_path: Path, minilm_int8: Path, docstrings: list[str]) -> None:
    """Also those of the first rows, which are scored before the plan: as the model's own tokenizer counts them."""
    texts = docstrings[:60]
    tokenizer = Tokenizer.from_file(str(minilm_int8 / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(256)  # what the model was made for
    report = embed(tmp_path, "a", minilm_int8, texts, max_length=256)
    assert report.tokens == sum(len(found.ids) for found in tokenizer.encode_batch(texts))


@pytest.mark.long
def test_a_cache_that_cannot_be_read_or_written_is_no_error(
    tmp_path: Path, minilm_int8: Path, docstrings: list[str], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A torn note, and a cache that is a file, cost another sweep and nothing else."""
    cache.parent.parent.mkdir(exist_ok=True)
    cache.parent.write_text("in the way")
    monkeypatch.setattr(budgets, "LEAST_ROWS", 10)
    assert embed(tmp_path, "a", minilm_int8, [t[:100] for t in docstrings[:60]]).rows_ok == 60
