"""First rows of which none can be scored: more are looked at, and each is counted once."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import gristmill as gm
from gristmill import api

ROWS = 3000


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> str:
    """3,000 rows."""
    path = tmp_path_factory.mktemp("numbers") / "in.parquet"
    pq.write_table(pa.table({"id": np.arange(ROWS), "x": np.arange(ROWS) * 1.0}), path, row_group_size=100)
    return str(path)


def nan_first(n):
    return lambda b: {"y": np.where(b["id"] < n, np.nan, b["x"])}


def bad_first(n):
    def answer(batch):
        if (batch["id"] < n).any():
            raise ValueError("first rows")
        return {"y": batch["x"]}

    return answer


def told_first(n):
    return lambda b: {"y": [ValueError("told") if i < n else float(i) for i in b["id"]]}


def twice(row):
    return [{"part": 0}, {"part": 1}]


def later(n):
    return gm.filter(f"id >= {n}")


def late(n):
    return gm.filter(lambda b: b["id"] >= n)


CASES = {
    "NaN": (nan_first, [], []),
    "NaN after a flat_map": (nan_first, [gm.flat_map(twice)], []),
    "NaN after a step": (nan_first, [gm.step(lambda b: {"k": b["id"]})], []),
    "told": (told_first, [], []),
    "filtered": (lambda n: lambda b: {"y": b["x"]}, [later], []),
    "filtered by a function": (lambda n: lambda b: {"y": b["x"]}, [late], []),
    "filtered behind a flat_map": (lambda n: lambda b: {"y": b["x"]}, [gm.flat_map(twice), late], []),
    "dead in a step": (lambda n: lambda b: {"y": b["x"]}, [lambda n: gm.step(told_first(n))], []),
    "dead in a post step": (lambda n: lambda b: {"m": b["x"]}, [], [lambda n: gm.step(told_first(n))]),
    "NaN in a post step": (lambda n: lambda b: {"m": b["x"]}, [], [lambda n: gm.step(nan_first(n))]),
}


RUNS = [(case, first, 0) for case in CASES for first in (64, 200, 1100)]
RUNS += [(case, 200, 1) for case in CASES if not case.startswith("filtered")]  # processes of their own for some


@pytest.mark.few(15)
@pytest.mark.parametrize(("case", "first", "workers"), RUNS)
def test_fault_60_counts_are_right(numbers: str, tmp_path: Path, case: str, first: int, workers: int) -> None:
    """However many first rows are dead or filtered, and by what, every row is there once and counts add up."""
    make, steps, post = CASES[case]
    made = {"steps": [s(first) if not hasattr(s, "kind") else s for s in steps], "post": [s(first) for s in post]}
    sink = gm.sink(str(tmp_path / "out"), keep=["id"])
    report = gm.Job(numbers, make(first), sink, **made, workers=workers, gates={"min_ok": 0.1}).run()
    copies = 2 if "flat_map" in case else 1
    ids = gm.read(str(tmp_path / "out")).to_table()
    assert ids["id"].to_pylist() == [i for i in range(first, ROWS) for _ in range(copies)]
    assert "y" in ids.column_names
    filtered = case.startswith("filtered")
    assert report.rows_in == ROWS
    assert report.rows_dead == (0 if filtered else first * copies)
    assert report.rows_filtered == (first * copies if filtered else 0)
    assert len(gm.dead(str(tmp_path / "out"))) == report.rows_dead
    assert api.verify(str(tmp_path / "out")).ok


def test_a_result_of_dead_letters_alone_is_verified(numbers: str, tmp_path: Path) -> None:
    """Where no row came out there is no column of row ids to compare the dead letters with."""
    sink = gm.sink(str(tmp_path / "out"), keep=["id"], row_id="rid")
    gm.Job(numbers, nan_first(ROWS), sink, workers=0, gates={"min_ok": 0, "allow_empty": True}).run()
    assert len(gm.dead(str(tmp_path / "out"))) == ROWS
    assert api.verify(str(tmp_path / "out")).ok


@pytest.mark.parametrize(
    "sink",
    [{"row_id": "rid"}, {"model_version": "v"}, {"row_id": "rid", "merge": True}, {"partition_by": ["an_answer"]}],
)
def test_a_result_without_rows_is_published(numbers: str, tmp_path: Path, sink: dict) -> None:
    """Where every row is filtered, nothing tells what the model would have returned, and nothing is asked of it."""
    made = gm.sink(str(tmp_path / "out"), keep=["id"], **sink)
    job = gm.Job(numbers, told_first(0), made, steps=[gm.filter("id < 0")], workers=0, gates={"allow_empty": True})
    report = job.run()
    assert (report.rows_in, report.rows_ok, report.rows_filtered) == (ROWS, 0, ROWS)
    assert gm.read(str(tmp_path / "out")).count_rows() == 0
    assert api.verify(str(tmp_path / "out")).ok


def test_a_stretch_of_rows_that_fail_is_none_of_the_model(tmp_path: Path) -> None:
    """However long it is at the beginning: rows from all over the source show that a function of one row works."""
    calls: list[int] = []

    async def halves(row: dict[str, Any]) -> dict[str, Any]:
        calls.append(row["id"])
        if row["id"] < 700:
            raise ValueError("too long")
        return {"y": row["id"] / 2}

    rows = pa.table({"id": list(range(2000))})
    sink = gm.sink(str(tmp_path / "out"), keep=["id"])
    with pytest.warns(gm.GristmillWarning):
        report = gm.Job(rows, gm.model(halves, concurrency=16), sink, workers=0, gates={"min_ok": 0.5}).run()
    assert (report.rows_ok, report.rows_dead) == (1300, 700)
    assert len(calls) < 2000 * 1.15


def test_a_function_that_fails_everywhere_is_called_for_few_rows(tmp_path: Path) -> None:
    """Each call may cost something: the first rows and some from all over tell enough."""
    calls: list[int] = []

    async def never(row: dict[str, Any]) -> dict[str, Any]:
        calls.append(row["id"])
        raise ValueError("no")

    job = gm.Job(
        pa.table({"id": list(range(5000))}), gm.model(never, concurrency=16), gm.sink(str(tmp_path / "out")), workers=0
    )
    with pytest.raises(gm.RunFailed, match=r"first rows: ValueError: no\nIt fails on 32 rows from all over"):
        job.run()
    assert len(calls) < 200


@pytest.mark.parametrize("workers", [0, 2])
def test_equal_rows_each_have_an_answer_of_their_own(tmp_path: Path, workers: int) -> None:
    """What the first rows were answered before there was a plan is theirs, in whatever shards equal ones are."""
    rows = pa.table({"id": list(range(400)), "text": ["draw"] * 400})
    sink = gm.sink(str(tmp_path / "out"), keep=["id"])
    model = gm.model(drawn, takes={"text": "string"}, concurrency=8)
    gm.Job(rows, model, sink, workers=workers, shard_rows=50).run()
    assert len(set(gm.read(str(tmp_path / "out")).to_table()["y"].to_pylist())) == 400


async def drawn(row: dict[str, Any]) -> dict[str, Any]:
    return {"y": secrets.token_hex(8)}
