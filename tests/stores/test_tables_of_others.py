"""Rows of tables that others made, found by columns of types that no delivery has."""

from __future__ import annotations

import contextlib
import datetime as dt
import sqlite3
import uuid
from contextlib import closing
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import psycopg
import pyarrow as pa
import pytest

import gristmill as gm

ID = uuid.UUID("0b03a1cd-19ca-477b-80f2-403dafc6536e")
HUGE = Decimal(f"1{'0' * 60}.5")
# For each store a column: its type, its value in SQL, keys that are equal to that, and keys that are not.
Column = tuple[str, str, list[Any], list[Any]]
POSTGRES: list[Column] = [
    ("uuid", f"'{ID}'", [ID, str(ID), str(ID).upper()], [uuid.UUID(int=1)]),
    ("numeric", "1.50", [Decimal("1.5"), 1.5, "1.50", "1.5"], [1, 1.6, float("nan"), "NaN"]),
    ("numeric", f"{HUGE}", [HUGE, str(HUGE)], [10**60, float(10**60)]),
    ("numeric(10,2)", "0.10", [Decimal("0.1"), "0.1"], [0.1]),
    ("real", "0.1", ["0.1", 0.10000000149011612], [0.1]),
    ("interval", "'1 hour'", [dt.timedelta(hours=1)], [dt.timedelta(hours=2)]),
    ("time", "'12:30'", [dt.time(12, 30), "12:30"], [dt.time(12, 31)]),
    ("timestamp(3) with time zone", "'2026-01-01T00:00:00.5Z'", ["2026-01-01T01:00:00.5+01:00"], ["2026-01-01T00:00Z"]),
    ("char(5)", "'ab'", ["ab"], ["a", "AB"]),
    ("varchar(5)", "'ab'", ["ab"], ["a", "AB", "ab "]),
    ("bit(3)", "'101'", ["101"], ["1", "100"]),
    ("jsonb", """'{"a": 1}'""", ['{"a":1}'], ['{"a":2}']),
]
SQLITE: list[Column] = [
    ("REAL", "0.1", [0.1, "0.1", "1e-1"], [0.2, Decimal("0.1")]),
    ("NUMERIC", "1.5", [1.5, "1.50", Decimal("1.5")], [1, float("nan"), "1.6"]),
    ("DECIMAL(10,2)", "3", [3, 3.0, "3", "3.0"], [3.5, 4]),
    ("NUMERIC", str(2**53 + 1), [2**53 + 1, str(2**53 + 1)], [2**53, float(2**53)]),
]
DUCKDB: list[Column] = [
    ("UUID", f"'{ID}'", [ID, str(ID), str(ID).upper()], [uuid.UUID(int=1)]),
    ("DECIMAL(10,2)", "1.5", [Decimal("1.5"), 1.5, "1.50"], [1, "1.6"]),
    ("TIME", "'12:30'", [dt.time(12, 30), "12:30"], [dt.time(12, 31)]),
    ("REAL", "0.1", ["0.1"], [0.1]),
]


def _found(address: str, right: list[Any], wrong: list[Any]) -> None:
    with gm.lookup(address, key="k") as lookup:
        found = lookup.get_many([*right, *wrong])
        assert [row and row["n"] for row in found] == [7] * len(right) + [None] * len(wrong)


@pytest.mark.parametrize("column", POSTGRES, ids=lambda c: f"{c[0]} {c[1][:9]}")
def test_in_postgres(column: Column, postgres: str) -> None:
    """The server compares: each key finds the row whose key it equals."""
    kind, value, right, wrong = column
    with psycopg.connect(postgres, autocommit=True) as db:
        db.execute(f"CREATE TABLE others (k {kind}, n bigint)")
        try:
            db.execute(f"INSERT INTO others VALUES ({value}, 7), (NULL, 8)")
            _found(f"{postgres}#others", right, wrong)
        finally:
            db.execute("DROP TABLE others")


def test_what_postgres_cannot_read_or_compare(postgres: str) -> None:
    """A text that is no value of the column is a BadKey in its words; lists are refused."""
    with psycopg.connect(postgres, autocommit=True) as db:
        db.execute("CREATE TABLE others (u uuid, m numeric, l bigint[], k text)")
        try:
            for key, value, error in (("u", "none", gm.BadKey), ("m", "none", gm.BadKey), ("l", "{1}", gm.BadJob)):
                with gm.lookup(f"{postgres}#others", key=key) as lookup, pytest.raises(error, match=r"UUID|none|lists"):
                    lookup.get(value)
            db.execute("INSERT INTO others (k) VALUES ('a'), ('b'), ('b')")
            with gm.lookup(f"{postgres}#others", key="k") as lookup:
                assert lookup.get_many(["a", "c", "a"])[::2] == [lookup.get("a")] * 2
                with pytest.raises(gm.BadSource, match="several rows have k = 'b'"):
                    lookup.get_many(["a", "b"])
        finally:
            db.execute("DROP TABLE others")


@pytest.mark.parametrize("column", SQLITE, ids=lambda c: f"{c[0]} {c[1]}")
def test_in_sqlite(column: Column, tmp_path: Path) -> None:
    """Numbers of columns that have every kind of number."""
    kind, value, right, wrong = column
    with closing(sqlite3.connect(tmp_path / "o.sqlite")) as db, db:
        db.execute(f"CREATE TABLE others (k {kind}, n INTEGER)")
        db.execute(f"INSERT INTO others VALUES ({value}, 7), (NULL, 8)")
    _found(f"sqlite://{tmp_path}/o.sqlite#others", right, wrong)


@pytest.mark.parametrize("column", DUCKDB, ids=lambda c: f"{c[0]} {c[1]}")
def test_in_duckdb(column: Column, tmp_path: Path) -> None:
    """UUIDs as they are and as texts, decimals and times."""
    kind, value, right, wrong = column
    with duckdb.connect(str(tmp_path / "o.duckdb")) as db:
        db.execute(f"CREATE TABLE others (k {kind}, n BIGINT)")
        db.execute(f"INSERT INTO others VALUES ({value}, 7), (NULL, 8)")
    _found(f"duckdb://{tmp_path}/o.duckdb#others", right, wrong)


@pytest.mark.parametrize("kind", ["INTERVAL", "BIT"])
def test_columns_of_duckdb_by_which_nothing_is_found(kind: str, tmp_path: Path) -> None:
    """Refused by their type, not answered with None."""
    with duckdb.connect(str(tmp_path / "o.duckdb")) as db:
        db.execute(f"CREATE TABLE others (k {kind})")
    why = f"column 'k' is {kind}: rows are not found by such values"
    with gm.lookup(f"duckdb://{tmp_path}/o.duckdb#others", key="k") as lookup, pytest.raises(gm.BadJob, match=why):
        lookup.get("1")


def test_keys_of_76_digits(tmp_path: Path) -> None:
    """Two that differ in the last one are two, in an upsert and looked up; as texts, too."""
    kind, near = pa.decimal256(76, 10), [Decimal("9" * 66 + ".0000000001"), Decimal("9" * 66 + ".0000000002")]
    rows = pa.table({"k": pa.array([near[0], Decimal("1E-10")], kind), "n": [7, 8]})
    more = pa.table({"k": pa.array([near[1], Decimal("1E-10")], kind), "n": [9, 10]})
    for address in (f"sqlite://{tmp_path}/s.sqlite#t", f"lmdb://{tmp_path}/s.lmdb"):
        for name, table in (("one", rows), ("other", more)):
            sink = gm.sink(str(tmp_path / name), keep=["k", "n"])
            to = gm.to(address, mode="upsert", key="k")
            gm.Job(table, gm.model(_nothing, batch_format="arrow"), sink, workers=0, deliver=[to]).run()
        with gm.lookup(address) as lookup:
            asked = [near[0], str(near[1]), "0.0000000001", Decimal("2E-10")]
            assert [row and row["n"] for row in lookup.get_many(asked)] == [7, 9, 10, None]


def _nothing(batch: pa.RecordBatch) -> pa.RecordBatch:
    return pa.record_batch({"zero": [0] * len(batch)})


WIDER = [("postgres", "numeric"), ("postgres", "numeric(14,5)"), ("duckdb", "DECIMAL(14,5)")]


@pytest.mark.parametrize(("store", "kind"), WIDER, ids=lambda c: c)
@pytest.mark.parametrize("mode", ["append", "upsert", "replace"])
def test_decimals_in_wider_columns(
    store: str, kind: str, mode: str, postgres: str, database: Any, tmp_path: Path
) -> None:
    """Are as they were delivered, beside those of others, whose digits are all found; narrower columns are refused."""

    def run(*statements: str) -> None:
        with contextlib.nullcontext(database) if store == "postgres" else duckdb.connect(str(tmp_path / "d")) as db:
            for sql in statements:
                db.execute(sql)

    address = f"{postgres}#area." if store == "postgres" else f"duckdb://{tmp_path}/d#"
    prices = pa.array([Decimal("1.50"), Decimal("-99999999.99")], pa.decimal128(10, 2))
    source, sink = pa.table({"n": [1, 2], "k": prices}), gm.sink(str(tmp_path / "out"), keep=["n", "k"])
    gm.Job(source, gm.model(lambda batch: {"y": batch["n"]}, returns={"y": "int64"}), sink, workers=0).run()
    run(f"CREATE TABLE wider (n bigint, k {kind}, y bigint)", "INSERT INTO wider VALUES (7, 0.12345, 7)")
    for _ in range(2):
        gm.deliver(str(tmp_path / "out"), gm.to(f"{address}wider", mode=mode, key="k"))
    with gm.lookup(f"{address}wider", key="k") as lookup:
        found = lookup.get_many([1.5, "1.500", Decimal("-99999999.99"), Decimal("1.50001")])
        assert [row and row["n"] for row in found] == [1, 1, 2, None]
        assert str(found[0]["k"]) == "1.50"
        theirs = lookup.get("0.12345")
        assert theirs is None if mode == "replace" else str(theirs["k"]) == "0.12345"
    run("CREATE TABLE narrow (n bigint, k NUMERIC(11,4), y bigint)")
    with pytest.raises(gm.BadJob, match=r"column 'k' is (numeric|DECIMAL)\(11,4\), which does not hold"):
        gm.deliver(str(tmp_path / "out"), gm.to(f"{address}narrow", mode="append"))
