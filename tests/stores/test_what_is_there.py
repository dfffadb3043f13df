"""Which rows a store is taken to have, whatever happened to the sink's records, to the table, and to its address."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import gristmill as gm
from gristmill.files.document import seal, unseal

ROWS = 10
CLAIMS = Path("out/_gristmill/generations")


def doubled(batch: dict[str, Any], times: int = 2) -> dict[str, Any]:
    """A number for each row."""
    return {"y": batch["id"] * times}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with rows in it."""
    monkeypatch.chdir(tmp_path)
    pq.write_table(pa.table({"id": list(range(ROWS))}), "rows.parquet")
    return tmp_path


def job(*deliver: gm.Delivery, times: int = 2, sink: str = "out") -> gm.Job:
    """The rows, here."""
    model = gm.model(doubled, times=times, returns={"y": "int64"})
    return gm.Job("rows.parquet", model, gm.sink(sink, keep="id"), workers=0, deliver=list(deliver))


def count(file: str, table: str = "scores") -> int:
    """How many rows are in a table of a SQLite file."""
    with closing(sqlite3.connect(file)) as db:
        return int(db.execute(f'SELECT count(*) FROM "{table}"').fetchone()[0])


@pytest.mark.parametrize("what", ["damaged", "removed"])
def test_a_claim_that_is_lost_appends_nothing_twice(what: str) -> None:
    """That of a generation long replaced, by which stores know the sink: every later document repeats it."""
    made = job(gm.to("sqlite://s.sqlite#scores", mode="append"))
    made.run()
    made.run(restart=True)
    assert count("s.sqlite") == 2 * ROWS
    claim = CLAIMS / "0001.json"
    claim.unlink() if what == "removed" else claim.write_text("{")
    assert made.run().state == "nothing to do" and gm.verify("out").ok
    gm.deliver("out", "sqlite://s.sqlite#scores", mode="append")
    assert count("s.sqlite") == 2 * ROWS
    made.run(restart=True)
    assert count("s.sqlite") == 3 * ROWS


def test_a_sink_whose_name_in_stores_is_lost_appends_nothing() -> None:
    """One that an earlier version wrote, of which the first claim alone said it."""
    made = job(gm.to("sqlite://s.sqlite#scores", mode="append"))
    made.run()
    made.run(restart=True)
    for path in [Path("out/_SUCCESS"), *Path("out/_gristmill").glob("published/*"), *CLAIMS.glob("*")]:
        said = unseal(path.read_bytes(), str(path))
        assert said.pop("sink")
        path.write_bytes(seal(said))
    assert made.run().state == "nothing to do" and gm.verify("out").ok
    (CLAIMS / "0001.json").unlink()
    assert "which rows there are this sink's cannot be told" in gm.verify("out").lines[-1]
    with pytest.raises(gm.RunFailed, match=r"rows are not appended twice: restore _gristmill/generations/0001\.json"):
        made.run()
    assert count("s.sqlite") == 2 * ROWS


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("sqlite://s.sqlite#scores", "sqlite://s.sqlite#Scores"),
        ("duckdb://s.duckdb#scores", "duckdb://s.duckdb#SCORES"),
        ("duckdb://s.duckdb#scores", "duckdb://s.duckdb#Main.scores"),
        ("duckdb://s.duckdb#own.Scores", "duckdb://s.duckdb#OWN.scores"),
        ("postgres#aliased", "postgres#public.aliased"),
    ],
)
def test_a_table_by_another_spelling_is_the_same_table(first: str, second: str, request: pytest.FixtureRequest) -> None:
    """Nothing is appended twice, and the rows are looked up by each."""
    if first.startswith("postgres"):
        server = request.getfixturevalue("postgres")
        first, second = (to.replace("postgres", server, 1) for to in (first, second))
    for to in (first, second, first):
        made = gm.to(to, mode="append", key="id")
        report = job(made).run()
        assert gm.verify(job(made)).ok and report.deliveries[0].rows == ROWS
        with gm.lookup(to) as lookup:
            assert lookup.get(3) == {"id": 3, "y": 6} and lookup.generation == 1
    job(gm.to(second, key="id")).run(restart=True)
    assert gm.verify(job(gm.to(second, key="id"))).ok  # which counts them


def test_a_name_without_a_schema_is_found_as_the_database_finds_it(postgres: str) -> None:
    """In a later schema of the search path, if it is there, and not made a second time in the first."""
    import psycopg

    with psycopg.connect(postgres, autocommit=True) as db:
        db.execute("CREATE SCHEMA IF NOT EXISTS ahead")
        to = f"{postgres}{'&' if '?' in postgres else '?'}options=-csearch_path%3Dahead,public#found_late"
        job(gm.to(f"{postgres}#found_late", mode="append")).run()
        job(gm.to(to, mode="append")).run()
        assert db.execute("SELECT count(*) FROM public.found_late").fetchone() == (ROWS,)
        assert db.execute("SELECT to_regclass('ahead.found_late')").fetchone() == (None,)
