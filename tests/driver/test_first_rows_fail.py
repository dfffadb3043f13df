"""First rows on which the model fails: rows from all over the source tell whether they or the model are to blame."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import rowwise
from hypothesis import given
from hypothesis import strategies as st

import gristmill as gm
from gristmill.errors import RunFailed
from gristmill.shards.shard import Selection, rows_between, spread
from gristmill.shards.sourcefiles import FileInfo, SourceFile
from llmserver import KEY, ChatServer

ROWS = 3000
pytestmark = pytest.mark.filterwarnings("ignore::gristmill.GristmillWarning")


def calls(folder: Path) -> Counter[int]:
    """How often each row was asked for."""
    return Counter(map(int, (folder / "asked").read_text().split()))


@pytest.mark.few(2)
@pytest.mark.parametrize("bad", [5, 40, 300, 900, 1400])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_function_of_one_row(tmp_path: Path, bad: int, workers: int) -> None:
    """Those that fail are dead letters, and the others are scored, each called once but for a handful."""
    pq.write_table(pa.table({"x": range(ROWS)}), tmp_path / "rows.parquet", row_group_size=500)
    model = gm.model(rowwise.refuses, file=str(tmp_path / "asked"), below=bad, concurrency=16)
    sink = gm.sink(str(tmp_path / "out"), keep=["x"])
    job = gm.Job(str(tmp_path / "rows.parquet"), model, sink, workers=workers, gates={"min_ok": 0.5})
    report = job.run()
    assert (report.rows_ok, report.rows_dead) == (ROWS - bad, bad)
    assert sorted(gm.read(tmp_path / "out").to_table()["y"].to_pylist()) == [2 * x for x in range(bad, ROWS)]
    called = calls(tmp_path)
    assert set(called) == set(range(ROWS)) and called.total() <= ROWS + 60


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["coroutine", "thread", "batch"])
def test_one_that_works_on_nothing_is_called_a_few_times(tmp_path: Path, kind: str) -> None:
    """However many rows there are, with and without declared columns; what to do is said."""
    for returns in (None, {"y": "int64"}):
        model = {"coroutine": rowwise.refuses, "thread": rowwise.refuses_in_threads, "batch": rowwise.refuses_batches}
        options: dict[str, Any] = {} if kind == "coroutine" else {"concurrency": 8} if kind == "thread" else {}
        spec = gm.model(model[kind], file=str(tmp_path / "asked"), below=20_000, returns=returns, **options)
        (tmp_path / "asked").write_text("")
        job = gm.Job(pa.table({"x": range(20_000)}), spec, gm.sink(str(tmp_path / f"o{returns is None}")), workers=1)
        with pytest.raises(RunFailed, match=r"first rows: ValueError: not \d+\nIt fails on 32 rows from all over") as e:
            job.run()
        assert "--preview 20" in str(e.value)
        assert calls(tmp_path).total() <= (100 if kind != "batch" else 500)


def test_a_batch_function_whose_first_files_are_bad(tmp_path: Path) -> None:
    """Rows of the last one show that it works."""
    for n in range(3):
        pq.write_table(pa.table({"x": range(1000 * n, 1000 * (n + 1))}), tmp_path / f"{n}.parquet")
    model = gm.model(rowwise.refuses_batches, file="", below=2000)
    sink = gm.sink(str(tmp_path / "out"), keep=["x"])
    report = gm.Job(str(tmp_path / "*.parquet"), model, sink, workers=0, gates={"min_ok": 0.1}).run()
    assert (report.rows_ok, report.rows_dead) == (1000, 2000)


def sevenfold(batch: dict[str, np.ndarray], below: int) -> dict[str, np.ndarray]:
    """A step, or the model, that fails where a batch has a row below this."""
    if (batch["x"] < below).any():
        raise ValueError("below")
    return {"z": batch["x"] * 7}


def double(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The model."""
    return {"y": batch["x"] * 2}


@pytest.mark.few(2)
@pytest.mark.parametrize("bad", [10, 19, 20, 40])
@pytest.mark.parametrize("place", ["steps", "post"])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_step_that_fails_on_the_first_rows(tmp_path: Path, bad: int, place: str, workers: int) -> None:
    """Has dead letters of these alone, though they are probed more than once, by one process; before the model, and
    after it.
    """
    step = gm.step(sevenfold, below=bad)
    steps: dict[str, Any] = {place: [step]}
    rows = pa.table({"x": range(300)})
    report = gm.Job(rows, double, gm.sink(str(tmp_path / "out"), keep=["x"]), workers=workers, batch_rows=5, **steps,
                    gates={"min_ok": 0.5}).run()  # fmt: skip
    assert (report.rows_ok, report.rows_dead) == (300 - bad, bad)


def prompted(rows: pa.Table, sink: Path, **options: Any) -> Any:
    """A run."""
    return gm.prompt(rows, sink, prompt="{{ text }}", model="m", keep=["id"], **options)


@pytest.mark.long
@pytest.mark.parametrize("shard_rows", [100, 5000])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_prompt_whose_first_rows_are_refused(chat: ChatServer, tmp_path: Path, shard_rows: int, workers: int) -> None:
    """They are dead letters in the endpoint's words, at one request each; the share of the others decides."""
    rows = pa.table({"id": range(2000), "text": [f"row {n} {'is too long' * (n < 600)}" for n in range(2000)]})
    options = {"workers": workers, "shard_rows": shard_rows}
    report = prompted(rows, tmp_path / "out", gates={"min_ok": 0.5}, **options)
    assert (report.rows_ok, report.rows_dead) == (1400, 600)
    assert set(gm.dead(tmp_path / "out")["position"].to_pylist()) == set(range(600))
    assert 2000 <= chat.told()["requests"] <= 2060
    with pytest.raises(gm.GateFailed, match="min_ok"):
        prompted(rows, tmp_path / "strict", **options)


@pytest.mark.few(1)
@pytest.mark.parametrize("rows", [1, 5, 19, 20, 200, 5000])
def test_answers_of_which_none_fits(chat: ChatServer, tmp_path: Path, rows: int) -> None:
    """Two requests a row, and of many rows few are asked; of a handful each is a dead letter."""
    chat.set(answer="never")
    table = pa.table({"id": range(rows), "text": [f"row {n}" for n in range(rows)]})
    with pytest.raises(
        gm.GateFailed if rows < 20 else RunFailed, match="min_ok|none of 1 row" if rows < 20 else "I would rather not"
    ):
        prompted(table, tmp_path / "out", workers=1, choices=["yes", "no"])
    assert chat.told()["requests"] <= 2 * min(rows, 33)
    if rows < 20:
        assert {"Misfit" in error for error in gm.dead(tmp_path / "out")["error"].to_pylist()} == {True}


def test_a_field_that_the_endpoint_does_not_take(chat: ChatServer, tmp_path: Path) -> None:
    """Every request is refused: the run ends soon, and the next one asks as few."""
    chat.set(newer=True, key=KEY)
    rows = pa.table({"id": range(5000), "text": ["is too long"] * 5000})
    for run in (1, 2):
        with pytest.raises(RunFailed, match="400: This model's maximum context"):
            prompted(rows, tmp_path / "out", workers=2)
        assert chat.told()["requests"] <= 100 * run


def stored(folder: Path, form: str, ids: list[int]) -> str:
    """Rows in two files."""
    folder.mkdir()
    for name, part in (("a", ids[: len(ids) // 2]), ("b", ids[len(ids) // 2 :])):
        table = pa.table({"x": part, "t": [f"t {n}" for n in part]})
        lines = "".join(json.dumps(row) + "\n" for row in table.to_pylist()).encode()
        if form == "parquet":
            pq.write_table(table, folder / f"{name}.parquet", row_group_size=300)
        elif form == "jsonl":
            (folder / f"{name}.jsonl").write_bytes(lines)
        elif form == "jsonl.gz":
            (folder / f"{name}.jsonl.gz").write_bytes(gzip.compress(lines))
        else:
            pyarrow.csv.write_csv(table, folder / f"{name}.csv")
    return str(folder)


@pytest.mark.few(2)
@pytest.mark.parametrize("form", ["parquet", "jsonl", "jsonl.gz", "csv"])
@pytest.mark.parametrize("source", [{}, {"where": "x % 50 = 7"}, {"limit": 2500}, {"sample": 1000, "seed": 1}])
def test_every_format_is_looked_at_all_over(tmp_path: Path, form: str, source: dict[str, Any]) -> None:
    """Also where a condition leaves few rows, and where files cannot be cut."""
    ids = list(range(ROWS))
    folder = stored(tmp_path / "in", form, ids)
    model = gm.model(rowwise.refuses, file=str(tmp_path / "asked"), below=1200)
    sink = gm.sink(str(tmp_path / "out"), keep=["x"])
    job = gm.Job(gm.source(folder, format=form.partition(".")[0], **source), model, sink, workers=0,
                 gates={"min_ok": 0.1})  # fmt: skip
    report = job.run()
    found = gm.read(tmp_path / "out").to_table()["x"].to_pylist()
    assert min(found) >= 1200 and report.rows_ok == len(found) and report.rows_dead > 0
    assert report.rows_ok + report.rows_dead == len(calls(tmp_path))
    assert calls(tmp_path).total() <= len(calls(tmp_path)) + 60


FILES = st.lists(st.tuples(st.integers(0, 500), st.booleans()), min_size=1, max_size=6)


@given(FILES, st.integers(1, 40))
def test_places_are_in_the_selection_and_far_apart(files: list[tuple[int, bool]], most: int) -> None:
    """No more than asked for, in order, none twice, and no long stretch of rows without one."""
    infos = []
    for rows, whole in files:
        cuts = np.arange(0, rows + 1, 100) if whole else np.array([0, rows])
        cuts = np.unique(np.append(cuts, rows))
        infos.append(FileInfo(SourceFile("f", 1, ""), rows, cuts, not whole, pa.schema([]), np.diff(cuts)))
    selection = Selection.everything(infos)
    found = spread(infos, selection, most)
    total = sum(rows for rows, _ in files)
    assert sum(rows for *_, rows, _ in found) <= most and bool(found) == bool(total)
    ranges = [(index, a, b) for index, a, b, _, _ in found]
    assert ranges == sorted(set(ranges))
    assert all(b <= c for (i, _, b), (j, c, _) in pairwise(ranges) if i == j)
    for index, a, b, rows, of in found:
        assert 0 <= a < b <= files[index][0] and 1 <= rows <= b - a
        assert files[index][1] is False or rows_between(infos[index], a, b) == of
