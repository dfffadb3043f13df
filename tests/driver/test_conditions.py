"""Conditions in SQL select the rows that they name, through jobs: on the source and as a step."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gristmill as gm
from gristmill.errors import BadJob
from gristmill.sources.where import SqlWhere

CASES = pa.table(
    {
        "i": range(6),
        "A": [1, 1, 1, 0, 0, 0],
        "a": [1, 0, 1, 0, 1, 0],
        "Id": range(6),
        "iD": range(5, -1, -1),
        "st": [{"x": n, "X": -n} for n in range(6)],
        "ts": pa.array(range(0, 6 * 3600, 3600), pa.timestamp("s", "UTC")),
    }
)


def echo(rows: list) -> list:
    return [{"seen": row["i"]} for row in rows]


def selected(folder: Path, where: str, step: bool) -> list[int]:
    """The rows of CASES that a job scores."""
    pq.write_table(CASES, folder / "in.parquet")
    source = gm.source(str(folder / "in.parquet"), where=None if step else where)
    steps = [gm.filter(where)] if step else []
    job = gm.Job(source, gm.model(echo, batch_format="rows"), str(folder / "out"), steps=steps, workers=0)
    return job.run().read().to_table()["seen"].to_pylist()


COMMAND = [sys.executable, "-m", "gristmill", "apply", "in.parquet", "out", "--fn", "fn:f", "--batch-format", "rows"]
COMMAND += ["--workers", "0", "--where"]
STEP = pytest.mark.parametrize("step", [False, True], ids=["source", "step"])


@STEP
@pytest.mark.parametrize(
    "where", ["A = 1 and a = 1", '"A" = 1 and "a" = 1', "rows.A + rows.a = 2", "id > 2", "st.X > -3", "COLUMNS(*) > 0"]
)
def test_names_that_sql_takes_for_one_are_refused(tmp_path: Path, where: str, step: bool) -> None:
    """Never the rows of the other column: DuckDB reads A for a, and x for X in a struct, without a word."""
    with pytest.raises(BadJob, match=r"ignores case.*gm\.filter|matches the columns 'Id', 'iD'"):
        selected(tmp_path, where, step)
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").glob("*.parquet"))


@STEP
@pytest.mark.parametrize(("where", "rows"), [("a = 0", [1, 3, 5]), ("A = 0", [3, 4, 5]), ("rows.iD < 2", [4, 5])])
def test_of_two_columns_that_differ_in_case_the_written_one_is_read(
    tmp_path: Path, where: str, rows: list[int], step: bool
) -> None:
    """One of them alone can be asked for."""
    assert selected(tmp_path, where, step) == rows


def test_the_command_refuses_them_too(tmp_path: Path) -> None:
    """Exit 2, in words."""
    pq.write_table(CASES, tmp_path / "in.parquet")
    (tmp_path / "fn.py").write_text("def f(rows):\n    return [{'seen': r['i']} for r in rows]\n")
    done = subprocess.run([*COMMAND, "A = 1 and a = 1"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and "'A' and 'a'" in done.stderr, done.stderr


NAMES = ["a", "A", "b", "B", "é", "É"]


@pytest.mark.long
@settings(max_examples=60, deadline=None)
@given(
    columns=st.lists(st.sampled_from(NAMES), unique=True, min_size=1),
    meant=st.lists(st.sampled_from(NAMES), unique=True, min_size=1),
    quoted=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_a_condition_is_right_or_refused(columns: list[str], meant: list[str], quoted: bool, seed: int) -> None:
    """Whatever names there are, of whatever case: the mask is that of the columns written, or there is none."""
    draw = np.random.default_rng(seed)
    table = pa.table({n: draw.integers(0, 2, 20) for n in columns})
    expression = " AND ".join(f'"{n}" = 1' if quoted else f"{n} = 1" for n in meant)
    try:
        found = SqlWhere(expression, table.schema).mask(table)
    except BadJob:
        folded = [n.lower() if n.isascii() else n for n in meant]
        known = [n.lower() if n.isascii() else n for n in columns]
        alone = all(n in columns or known.count(f) == 1 for n, f in zip(meant, folded, strict=True))
        assert len(set(folded)) < len(folded) or not alone
        return
    expected = np.ones(20, dtype=bool)
    for n in meant:
        column = n if n in columns else next(c for c in columns if c.lower() == n.lower())
        expected &= table[column].to_numpy() == 1
    assert (found == expected).all()


FICKLE = [
    "age(ts) > interval 1 day",
    "age(ts::timestamp) > interval 1 day",
    "ts < localtimestamp",
    "ts < ago(interval 1 day)",
    "current_setting('threads') = '1'",
    "random() < 2",
    "uuid()::text > ''",
    "list_transform([1], lambda x: random())[1] < 2",
    "system.main.random() < 2",
    "i < txid_current()",
    "current_localtimestamp() > ts::timestamp",
    "current_time > '1:00'::time",
]


@pytest.mark.parametrize("fickle", FICKLE)
def test_what_changes_from_attempt_to_attempt_is_refused(tmp_path: Path, fickle: str) -> None:
    """By what DuckDB says of its functions, and of clocks that it forgets: a shard done again keeps the same rows."""
    with pytest.raises(BadJob, match="a different answer on each attempt"):
        selected(tmp_path, fickle, step=False)


def test_the_age_between_two_columns_is_no_clock(tmp_path: Path) -> None:
    """Only that since today is."""
    assert selected(tmp_path, "age(ts::timestamp, timestamp '1970-01-01 02:00') > interval 1 hour", False) == [4, 5]


@pytest.mark.few(1)
@pytest.mark.parametrize("zone", ["Asia/Tokyo", "America/New_York"])
def test_instants_are_read_in_utc_on_every_machine(tmp_path: Path, zone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker in another time zone keeps the same rows."""
    pq.write_table(CASES, tmp_path / "in.parquet")
    (tmp_path / "fn.py").write_text("def f(rows):\n    return [{'seen': r['i']} for r in rows]\n")
    monkeypatch.setenv("TZ", zone)
    done = subprocess.run([*COMMAND, "hour(ts) = 3 and ts > '1970-01-01 02:30'"], cwd=tmp_path, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    assert gm.read(str(tmp_path / "out")).to_table()["seen"].to_pylist() == [3]
