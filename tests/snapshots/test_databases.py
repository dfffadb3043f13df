"""Databases as sources: their types, how they are asked, and what they refuse."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import gristmill as gm
from gristmill.job.snapshots import SNAPSHOTS, wanted


def count(batch: dict[str, Any]) -> dict[str, Any]:
    """One column of each row."""
    return {"one": [1 for _ in next(iter(batch.values()))]}


def read(source: Any, sink: Path, *keep: str, **options: Any) -> pa.Table:
    """The rows of a source."""
    report = gm.apply(source, str(sink), fn=count, keep=list(keep), **options)
    return report.read().to_table().drop_columns(["one"])


@pytest.fixture
def pg(postgres: str) -> Any:
    """A connection to the server, and a schema that goes with the test."""
    import psycopg

    pytest.importorskip("adbc_driver_postgresql")
    with psycopg.connect(postgres, autocommit=True) as db:
        db.execute("DROP SCHEMA IF EXISTS tried CASCADE; CREATE SCHEMA tried")
        yield db


def test_the_types_of_postgres(pg: Any, postgres: str, tmp_path: Path) -> None:
    """Exact ones where Arrow has one, else the text that Postgres writes."""
    pg.execute("DROP TYPE IF EXISTS mood; CREATE TYPE mood AS ENUM ('fine', 'so-so')")
    pg.execute("DROP DOMAIN IF EXISTS stars; CREATE DOMAIN stars AS int CHECK (VALUE < 6)")
    columns: dict[str, tuple[str, str, Any, pa.DataType]] = {
        "n": ("numeric(30, 10)", "12345678901234567890.0123456789", Decimal("12345678901234567890.0123456789"),
              pa.decimal128(30, 10)),
        "free": ("numeric", "0.1000", "0.1000", pa.string()),
        "wide": ("numeric(60, 1)", "1" * 59 + ".5", Decimal("1" * 59 + ".5"), pa.decimal256(60, 1)),
        "local": ("timestamp", "2026-03-29 02:30:00.000001", dt.datetime(2026, 3, 29, 2, 30, 0, 1), pa.timestamp("us")),
        "clock": ("time", "23:59:59.999999", dt.time(23, 59, 59, 999999), pa.time64("us")),
        "zoned": ("timetz", "12:00:00+02", "12:00:00+02", pa.string()),
        "span": ("interval", "1 mon 2 days", "1 mon 2 days", pa.string()),
        "id128": ("uuid", "00000000-0000-0000-0000-0000000000ff", "00000000-0000-0000-0000-0000000000ff", pa.string()),
        "mood": ("mood", "so-so", "so-so", pa.string()),
        "stars": ("stars", "5", 5, pa.int32()),
        "net": ("inet", "10.0.0.1", "10.0.0.1/32", pa.string()),
        "padded": ("char(4)", "ab", "ab  ", pa.string()),
        "numbers": ("numeric(5, 2)[]", "{1.50,NULL}", ["1.50", None], pa.list_(pa.string())),
        "days": ("date[]", "{2026-01-01}", [dt.date(2026, 1, 1)], pa.list_(pa.date32())),
        "object": ("oid", "4294967295", 4294967295, pa.int64()),
        "raw_json": ("json", '{"a" :1}', '{"a" :1}', pa.string()),
        "any_vector": ("vector", "[1,2.5]", [1.0, 2.5], pa.list_(pa.float32())),
        "vector": ("vector(2)", "[1,2.5]", [1.0, 2.5], pa.list_(pa.float32(), 2)),
        "half": ("halfvec(2)", "[1,2.5]", [1.0, 2.5], pa.list_(pa.float32(), 2)),
    }  # fmt: skip
    pg.execute(f"CREATE TABLE tried.kinds ({', '.join(f'{name} {about[0]}' for name, about in columns.items())})")
    pg.execute(f"INSERT INTO tried.kinds VALUES ({', '.join(['%s'] * len(columns))})", [a[1] for a in columns.values()])
    pg.execute(f"INSERT INTO tried.kinds VALUES ({', '.join(['NULL'] * len(columns))})")
    found = read(f"{postgres}#tried.kinds", tmp_path / "out", *columns)
    assert {name: found.schema.field(name).type for name in columns} == {name: a[3] for name, a in columns.items()}
    assert found.to_pylist() == [{name: about[2] for name, about in columns.items()}, dict.fromkeys(columns)]


@pytest.mark.parametrize(
    "value",
    ["'infinity'::timestamptz", "'-infinity'::timestamp", "timestamp '294276-12-31'", "'infinity'::date",
     "'24:00:00'::time", "ARRAY['infinity'::date]"],
)  # fmt: skip
def test_times_that_arrow_does_not_hold(value: str, postgres: str, tmp_path: Path) -> None:
    """They are refused, not changed."""
    pytest.importorskip("adbc_driver_postgresql")
    with pytest.raises(gm.BadSource, match=r"column 'x' has infinity, or a time that .* does not hold: give null"):
        read(gm.source(postgres, query=f"SELECT {value} AS x"), tmp_path / "no", "x")


def test_arrays_of_arrays(postgres: str, tmp_path: Path) -> None:
    """Lists have one dimension here: others are refused, not flattened."""
    pytest.importorskip("adbc_driver_postgresql")
    with pytest.raises(gm.BadSource, match=r"more than one dimension in 'x': ask for to_json"):
        read(gm.source(postgres, query="SELECT '{{1,2},{3,4}}'::int[] AS x"), tmp_path / "no", "x")
    query = "SELECT to_json('{{1,2},{3,4}}'::int[]) AS x, '{}'::int[] AS none"
    found = read(gm.source(postgres, query=query), tmp_path / "out", "x", "none")
    assert found.to_pylist() == [{"x": "[[1,2],[3,4]]", "none": []}]


def test_a_big_table_is_read_in_ranges(pg: Any, postgres: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Side by side, each row once, at one snapshot; what is deleted leaves ranges empty."""
    from gristmill.snapshots import postgres as kind

    monkeypatch.setattr(kind, "RANGE", 256 << 10)
    pg.execute("CREATE TABLE tried.big AS SELECT g AS id, repeat('x', 100) AS text FROM generate_series(1, 20000) g")
    pg.execute("DELETE FROM tried.big WHERE id BETWEEN 3000 AND 9000")
    (asked,) = wanted(gm.source(f"{postgres}#tried.big"))
    with contextlib.closing(SNAPSHOTS.get("postgresql").open(asked, "")) as snapshot:
        pieces = snapshot.pieces()
        pg.execute("INSERT INTO tried.big SELECT g, 'late' FROM generate_series(20001, 30000) g")
        pg.execute("DELETE FROM tried.big WHERE id < 100")
        assert len(pieces) > 8
        ids = [i for piece in pieces for batch in piece() for i in batch["id"].to_pylist()]
    assert ids == [*range(1, 3000), *range(9001, 20001)]
    pg.execute("DELETE FROM tried.big WHERE id > 20000")
    found = read(f"{postgres}#tried.big", tmp_path / "out", "id")
    assert sorted(found["id"].to_pylist()) == [*range(100, 3000), *range(9001, 20001)]


def test_a_view_and_a_partitioned_table(pg: Any, postgres: str, tmp_path: Path) -> None:
    """They have no pages of their own, and are read by one statement."""
    pg.execute("CREATE TABLE tried.parts (id int, at date) PARTITION BY RANGE (at)")
    pg.execute("CREATE TABLE tried.p1 PARTITION OF tried.parts FOR VALUES FROM ('2026-01-01') TO ('2026-02-01')")
    pg.execute("INSERT INTO tried.parts VALUES (1, '2026-01-05'), (2, '2026-01-06')")
    pg.execute("CREATE VIEW tried.seen AS SELECT id + 10 AS id FROM tried.parts")
    assert sorted(read(f"{postgres}#tried.parts", tmp_path / "a", "id")["id"].to_pylist()) == [1, 2]
    assert sorted(read(f"{postgres}#tried.seen", tmp_path / "b", "id")["id"].to_pylist()) == [11, 12]


def test_names_that_have_to_be_quoted(pg: Any, postgres: str, tmp_path: Path) -> None:
    """Of tables and columns."""
    pg.execute('CREATE TABLE tried."Odd Ones" ("Id" int, "a ""b"" %s {x}" text)')
    pg.execute("""INSERT INTO tried."Odd Ones" VALUES (1, 'y')""")
    found = read(f"{postgres}#tried.Odd Ones", tmp_path / "out", "Id", 'a "b" %s {x}')
    assert found.to_pylist() == [{"Id": 1, 'a "b" %s {x}': "y"}]


def test_what_a_query_gives(pg: Any, postgres: str, tmp_path: Path) -> None:
    """Its columns need names of their own, it may not write, and percent signs are not placeholders."""
    query = "SELECT g AS id, 'a%sb' AS text, (g / 3.0)::numeric(10, 4) AS third FROM generate_series(1, 3) g;"
    found = read(gm.source(postgres, query=query), tmp_path / "out", "id", "text", "third")
    assert found.to_pylist()[0] == {"id": 1, "text": "a%sb", "third": Decimal("0.3333")}
    with pytest.raises(gm.BadSource, match="two columns are named 'id': give them other names"):
        read(gm.source(postgres, query="SELECT 1 AS id, 2 AS id"), tmp_path / "no")
    pg.execute("CREATE TABLE tried.kept (id int)")
    with pytest.raises(gm.BadSource, match="Postgres says: "):
        read(gm.source(postgres, query="INSERT INTO tried.kept VALUES (1) RETURNING id"), tmp_path / "no")
    inserts = "INSERT INTO tried.kept VALUES (1) RETURNING 1"
    pg.execute(f"CREATE FUNCTION tried.writes() RETURNS int LANGUAGE sql AS '{inserts}'")
    with pytest.raises(gm.BadSource, match=r"Postgres says: .*read-only transaction"):
        read(gm.source(postgres, query="SELECT tried.writes() AS id"), tmp_path / "no")
    with pytest.raises(gm.BadJob, match="names a table, and the source has a query"):
        read(gm.source(f"{postgres}#tried.kept", query="SELECT 1"), tmp_path / "no")
    with pytest.raises(gm.BadJob, match="a query, which is asked of one database"):
        read(gm.source(str(tmp_path), query="SELECT 1"), tmp_path / "no")


def test_a_server_that_is_away_or_refuses(postgres: str, tmp_path: Path) -> None:
    """Words of the client without the password, and exit codes that say whether to try again."""
    away = "postgresql://someone:hush-hush@127.0.0.1:1/shop#rows"
    with pytest.raises(gm.RunFailed, match=r"127.0.0.1:1/shop#rows: cannot be reached: .*refused.*run again") as told:
        read(away, tmp_path / "no")
    assert "hush" not in str(told.value) and "\n" not in str(told.value)
    with pytest.raises(gm.BadSource, match=r"cannot be reached: .*does not exist.*: check the address"):
        read(postgres.replace("/postgres?", "/nowhere?") + "#rows", tmp_path / "no")
    assert not (tmp_path / "no").exists()


def test_a_connection_that_is_lost_while_rows_are_copied(pg: Any, postgres: str, tmp_path: Path) -> None:
    """The run ends, and can be run again."""
    pg.execute("CREATE TABLE tried.rows AS SELECT g AS id FROM generate_series(1, 10) g")
    (asked,) = wanted(gm.source(f"{postgres}#tried.rows"))
    with contextlib.closing(SNAPSHOTS.get("postgresql").open(asked, "")) as snapshot:
        ends = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE state = 'idle in transaction'"
        assert {row[0] for row in pg.execute(ends).fetchall()} == {True}
        with pytest.raises(gm.RunFailed, match="run again when the server answers"):
            list(snapshot.pieces()[0]())


@pytest.mark.long
def test_a_password_of_the_job_is_nowhere(pg: Any, postgres: str, tmp_path: Path) -> None:
    """Not in the plan, the notes, the messages or the report."""
    pg.execute("CREATE TABLE tried.rows AS SELECT 1 AS id")
    job = tmp_path / "job.yaml"
    (tmp_path / "counting.py").write_text(
        "def count(batch):\n    return {'one': [1 for _ in next(iter(batch.values()))]}\n"
    )
    address = postgres.replace("postgres:@/", "postgres:${env:PG_WORD}@/")
    job.write_text(json.dumps({
        "source": {"uri": address, "query": "SELECT id, true AS other FROM tried.rows"},
        "model": {"call": "counting:count"}, "sink": {"uri": "out/", "keep": ["id", "other"]},
    }))  # fmt: skip
    env = {**os.environ, "PG_WORD": "hush-hush-7"}
    command = [sys.executable, "-m", "gristmill", "run", str(job)]
    ran = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert gm.read(str(tmp_path / "out")).to_table()["other"].to_pylist() == [True]
    texts = [ran.stdout.encode(), ran.stderr.encode()]
    texts += [path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert len(texts) > 6 and not any(b"hush-hush-7" in text for text in texts)


def test_query_is_an_option_of_the_commands(tmp_path: Path) -> None:
    """--query beside the address of the database."""
    with contextlib.closing(sqlite3.connect(tmp_path / "a.sqlite")) as db, db:
        db.execute("CREATE TABLE rows (id INTEGER, text TEXT)")
        db.executemany("INSERT INTO rows VALUES (?, ?)", [(i, f"t{i}") for i in range(5)])
    (tmp_path / "counting.py").write_text("def count(batch):\n    return {'one': batch['id'] * 0 + 1}\n")
    command = [sys.executable, "-m", "gristmill", "apply", "sqlite://a.sqlite", "out/", "--fn", "counting:count"]
    ran = subprocess.run(
        [*command, "--query", "SELECT id FROM rows WHERE id > 2", "--keep", "id"], cwd=tmp_path, capture_output=True,
        text=True,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert gm.read(str(tmp_path / "out")).to_table()["id"].to_pylist() == [3, 4]
    assert "sqlite://" in ran.stderr and "2 rows copied" in ran.stderr


# ---------------------------------------------------------------- files


def test_the_types_of_duckdb(tmp_path: Path) -> None:
    """Those that Arrow does not have come as text; a union is refused, with the way out."""
    import duckdb

    with duckdb.connect(str(tmp_path / "a.duckdb")) as db:
        db.execute("SET TimeZone = 'Asia/Kolkata'")
        db.execute(
            "CREATE TABLE rows AS SELECT 1 AS id, "
            "18446744073709551615::UBIGINT AS u, INTERVAL 1 DAY AS span, '12:00:00+02'::TIMETZ AS zoned, '101'::BIT AS "
            "bits, 'b'::ENUM('a', 'b') AS e, MAP {'k': 1} AS m, TIMESTAMPTZ '2026-01-01 00:00:00+05:30' AS at, "
            "'2026-01-01 00:00:00.123456789'::TIMESTAMP_NS AS ns, [1.5, NULL]::FLOAT[2] AS v"
        )
        db.execute("CREATE TABLE odd AS SELECT 1 AS id, union_value(a := 1) AS u")
    names = ["u", "span", "zoned", "bits", "e", "m", "at", "v"]
    found = read(f"duckdb://{tmp_path}/a.duckdb#rows", tmp_path / "out", *names, "ns").to_pylist()[0]
    assert [found[n] for n in names] == [2**64 - 1, "1 day", "12:00:00+02", "101", "b", [("k", 1)],
        dt.datetime(2025, 12, 31, 18, 30, tzinfo=dt.timezone.utc), [1.5, None]]  # fmt: skip
    assert str(found["ns"]).startswith("2026-01-01 00:00:00.123456")
    for value in ("'infinity'::TIMESTAMP", "'-infinity'::DATE"):
        with pytest.raises(gm.BadSource, match="column 'x' has infinity"):
            read(gm.source(f"duckdb://{tmp_path}/a.duckdb", query=f"SELECT {value} AS x"), tmp_path / "no", "x")
    with pytest.raises(gm.BadJob, match=r"column 'u' is .*union.*cannot hold a union: cast it"):
        read(f"duckdb://{tmp_path}/a.duckdb#odd", tmp_path / "no", "id")


def test_a_hugeint_that_no_decimal_holds(tmp_path: Path) -> None:
    """It has 39 digits: it is refused, not cut."""
    import duckdb

    with duckdb.connect(str(tmp_path / "a.duckdb")) as db:
        db.execute("CREATE TABLE rows AS SELECT (99999999999999999999999999999999999999)::HUGEINT AS huge")
    found = read(f"duckdb://{tmp_path}/a.duckdb#rows", tmp_path / "out", "huge")
    assert found["huge"].to_pylist() == [Decimal("9" * 38)]
    for value in ("170141183460469231731687303715884105727::HUGEINT", "[{'n': (-1.5e38)::HUGEINT}]"):
        source = gm.source(f"duckdb://{tmp_path}/a.duckdb", query=f"SELECT {value} AS huge")
        with pytest.raises(gm.BadSource, match="column 'huge' has a number of more than 38 digits: cast it in a query"):
            read(source, tmp_path / "no", "huge")


def test_types_of_duckdb_inside_of_others(tmp_path: Path) -> None:
    """What Arrow does not have is text in lists, structs and maps, too; a time that it cannot hold is refused there."""
    import duckdb

    with duckdb.connect(str(tmp_path / "a.duckdb")) as db:
        db.execute(
            "CREATE TABLE rows AS SELECT ['12:00:00+05'::TIMETZ, NULL] AS list, [INTERVAL 1 DAY]::INTERVAL[1] "
            "AS fixed, {'a b{}': 340282366920938463463374607431768211455::UHUGEINT, 'size': [{'x': '101'::BIT}], "
            "'n': 1} AS struct, MAP {'101'::BIT: '1'::BIGNUM} AS map, [1.5::DECIMAL(3, 1)] AS plain"
        )
    names = ["list", "fixed", "struct", "map", "plain"]
    found = read(f"duckdb://{tmp_path}/a.duckdb#rows", tmp_path / "out", *names)
    assert found.to_pylist() == [
        {
            "list": ["12:00:00+05", None],
            "fixed": ["1 day"],
            "struct": {"a b{}": "3402823669" + "20938463463374607431768211455", "size": [{"x": "101"}], "n": 1},
            "map": [("101", "1")],
            "plain": [Decimal("1.5")],
        }
    ]
    outside = ["{'a': 'infinity'::TIMESTAMP}", "MAP {1: '-infinity'::DATE}", "[['infinity'::TIMESTAMPTZ]]"]
    for value in (*outside, "'24:00'::TIME"):
        with pytest.raises(gm.BadSource, match="column 'x' has infinity, or a time that"):
            read(gm.source(f"duckdb://{tmp_path}/a.duckdb", query=f"SELECT {value} AS x"), tmp_path / "no", "x")
    source = gm.source(f"duckdb://{tmp_path}/a.duckdb", query="SELECT row(1, '1:00:00+05'::TIMETZ) AS x")
    with pytest.raises(gm.BadJob, match=r"column 'x' is .*: cast it in a query \(x::VARCHAR\)"):
        read(source, tmp_path / "no", "x")


def test_values_of_sqlite_that_are_not_what_the_table_declares(tmp_path: Path) -> None:
    """Its columns hold anything: what does not fit is told by column; expressions have the types of their values."""
    with contextlib.closing(sqlite3.connect(tmp_path / "a.sqlite")) as db, db:
        db.execute("CREATE TABLE rows (id INTEGER, n INTEGER, any)")
        db.executemany("INSERT INTO rows VALUES (?, ?, ?)", [(1, 1, 2**53 + 1), (2, "two", None), (3, None, 5)])
    with pytest.raises(gm.BadSource, match=r"column 'n', which is int64 there: .*: cast it in a query"):
        read(f"sqlite://{tmp_path}/a.sqlite#rows", tmp_path / "no", "id", "n")
    with contextlib.closing(sqlite3.connect(tmp_path / "b.sqlite")) as db, db:
        db.execute("CREATE TABLE rows (n INTEGER)")
        db.executemany("INSERT INTO rows VALUES (?)", [(n if n < 39_000 else n + 0.5,) for n in range(40_000)])
    with pytest.raises(gm.BadSource, match=r"column 'n', which is int64 there: .*39000\.5.*: cast it in a query"):
        read(f"sqlite://{tmp_path}/b.sqlite#rows", tmp_path / "no", "n")  # in a batch of their own
    query = "SELECT id, CAST(n AS TEXT) AS n, any, id * 1.5 AS x, NULL AS none FROM rows"
    source = gm.source(f"sqlite://{tmp_path}/a.sqlite", query=query)
    found = read(source, tmp_path / "out", "id", "n", "any", "x", "none")
    assert found.to_pylist()[1] == {"id": 2, "n": "two", "any": None, "x": 3.0, "none": None}
    assert found.schema.field("any").type == pa.int64() and found["any"][0].as_py() == 2**53 + 1
    both = "SELECT id AS either FROM rows UNION ALL SELECT 'text'"
    with pytest.raises(gm.BadSource, match=r"column 'either'.*text.*cast it in a query"):
        read(gm.source(f"sqlite://{tmp_path}/a.sqlite", query=both), tmp_path / "no", "either")


def test_values_that_sqlalchemy_would_change(tmp_path: Path) -> None:
    """SQLite by its dialect is as by its own address: not rounded, parsed or taken for true."""
    pytest.importorskip("sqlalchemy")
    with contextlib.closing(sqlite3.connect(tmp_path / "a.sqlite")) as db, db:
        db.execute("CREATE TABLE rows (price DECIMAL(10, 2), small NUMERIC, about JSON, at DATETIME, flag BOOLEAN)")
        db.execute("""INSERT INTO rows VALUES (1.234, 1.25e-12, '{"a":1,"a":2}', 'garbage', 1)""")
        db.execute("CREATE TABLE odd (flag BOOLEAN)")
        db.execute("INSERT INTO odd VALUES (2)")
    names = ["price", "small", "about", "at", "flag"]
    found = read(f"sqlalchemy+sqlite:///{tmp_path}/a.sqlite#rows", tmp_path / "out", *names)
    assert found.to_pylist() == [
        {"price": 1.234, "small": 1.25e-12, "about": '{"a":1,"a":2}', "at": "garbage", "flag": True}
    ]
    with pytest.raises(gm.BadSource, match=r"column 'flag'.*not bool: cast"):
        read(f"sqlalchemy+sqlite:///{tmp_path}/a.sqlite#odd", tmp_path / "no", "flag")


def test_a_value_that_a_dialect_does_not_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told with its column, whatever the dialect raises."""
    sqlalchemy = pytest.importorskip("sqlalchemy")
    from sqlalchemy.dialects.sqlite.pysqlite import SQLiteDialect_pysqlite

    other = type("Other", (SQLiteDialect_pysqlite,), {"name": "other", "supports_statement_cache": True})
    monkeypatch.setitem(sqlalchemy.dialects.registry.impls, "other", lambda: other)
    with contextlib.closing(sqlite3.connect(tmp_path / "a.sqlite")) as db, db:
        db.execute("CREATE TABLE rows (n INTEGER, at DATETIME)")
        db.execute("INSERT INTO rows VALUES (1, 'garbage')")
    with pytest.raises(gm.BadSource, match=r"rows: column 'at' has a value that is not one .*'garbage': cast it"):
        read(f"sqlalchemy+other:///{tmp_path}/a.sqlite#rows", tmp_path / "no", "n")


def test_floats_of_mysql_are_not_rounded() -> None:
    """Its dialect has them as decimals of ten digits after the point, unless it is asked for floats."""
    sqlalchemy = pytest.importorskip("sqlalchemy")
    from sqlalchemy.dialects import mysql

    from gristmill.snapshots.sqlalchemy import exact

    dialect = mysql.dialect()
    for kind, value in ((mysql.DOUBLE(), 1.25e-12), (mysql.REAL(), 0.1 + 0.2), (mysql.ENUM("a"), "")):
        read_as = exact(sqlalchemy, dialect, sqlalchemy.Column("v", kind)).type
        made = read_as.dialect_impl(dialect).result_processor(dialect, None)
        assert (made(value) if made else value) == value
    about = exact(sqlalchemy, dialect, sqlalchemy.Column("v", mysql.JSON()))
    assert str(about.compile(dialect=dialect)) == "CAST(v AS CHAR)"


def test_options_that_no_database_knows(tmp_path: Path) -> None:
    """Those of an address, which nobody would look at; of a server the client says what it knows."""
    for address in ("sqlite://a.sqlite?tabel=t#t", "duckdb://a.duckdb?tabel=t#t", "spark://db.t?tabel=t"):
        with pytest.raises(gm.BadJob, match="has no option 'tabel': it takes none"):
            read(address, tmp_path / "no")
    pytest.importorskip("psycopg")
    pytest.importorskip("adbc_driver_postgresql")
    with pytest.raises(gm.BadSource, match='Postgres\' client says: invalid URI query parameter: "tabel"'):
        read("postgresql://127.0.0.1:1/db?tabel=t#t", tmp_path / "no")


def test_a_file_of_the_other_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is told by its address, where the rows are read, delivered to and looked up."""
    duckdb = pytest.importorskip("duckdb")
    monkeypatch.chdir(tmp_path)
    with contextlib.closing(sqlite3.connect("lite.db")) as db:
        db.execute("CREATE TABLE t (id INTEGER)")
    duckdb.connect("duck.db").close()
    connect = duckdb.connect
    offline = {"autoinstall_known_extensions": False}  # else it would look for the extension on the network
    monkeypatch.setattr(duckdb, "connect", lambda path, read_only=False, config=None: connect(path, config=offline))
    made = gm.apply(pa.table({"id": [1]}), "out", fn=lambda batch: {"y": batch["id"]}, keep=["id"], workers=0)
    assert made.rows_ok == 1
    for wrong, right in (
        ("duckdb://lite.db#t", "sqlite:///.*lite.db#t"),
        ("sqlite://duck.db#t", "duckdb:///.*duck.db#t"),
    ):
        asked = (
            lambda wrong=wrong: read(wrong, tmp_path / "no"),
            lambda wrong=wrong: gm.deliver("out", wrong),
            lambda wrong=wrong: gm.lookup(wrong, "id").get(1),
        )
        for one in asked:
            with pytest.raises((gm.BadJob, gm.RunFailed), match=rf"its address is {right}(,|$)"):
                one()


def test_what_is_no_database(tmp_path: Path) -> None:
    """The words of the database, before anything is made."""
    (tmp_path / "a.txt").write_text("not a database, but long enough to be looked at " * 100)
    for scheme in ("duckdb", "sqlite"):
        with pytest.raises(gm.BadSource, match=r"(DuckDB|SQLite) says: .*(not a|valid).*database"):
            read(f"{scheme}://{tmp_path}/a.txt#rows", tmp_path / "no")
    with pytest.raises(gm.MissingExtra, match="needs a package for this database"):
        read("mysql+nodriver://host/db#rows", tmp_path / "no")
    with pytest.raises(gm.MissingExtra, match=r"'MySQLdb': pip install pymysql, and write mysql\+pymysql://"):
        read("mysql://host/db#rows", tmp_path / "no")
    with pytest.raises(gm.BadSource, match="did you mean 'duckdb'"):
        read(f"duckbd://{tmp_path}/a.duckdb#rows", tmp_path / "no")
    (tmp_path / "a.sqlite").touch()
    with pytest.raises(gm.BadSource, match=r"is read as sqlite://FILE#TABLE, .* name those \(FOLDER/\*.jpg\)"):
        read(str(tmp_path / "a.sqlite"), tmp_path / "no")
    assert not (tmp_path / "no").exists()


def test_tables_and_files_are_not_mixed(tmp_path: Path) -> None:
    """Several tables are one source; a table and a folder are not."""
    with contextlib.closing(sqlite3.connect(tmp_path / "a.sqlite")) as db, db:
        db.execute("CREATE TABLE one (id INTEGER)")
        db.execute("CREATE TABLE two (id INTEGER)")
        db.execute("INSERT INTO one VALUES (1)")
        db.execute("INSERT INTO two VALUES (2)")
    at = f"sqlite://{tmp_path}/a.sqlite"
    assert read(gm.source(f"{at}#one", f"{at}#two"), tmp_path / "out", "id")["id"].to_pylist() == [1, 2]
    with pytest.raises(gm.BadJob, match="a store and files"):
        read(gm.source(f"{at}#one", str(tmp_path / "x.parquet")), tmp_path / "no")


# ---------------------------------------------------------------- dead letters and verify


LIMIT = 18


def picky(batch: dict[str, Any]) -> dict[str, Any]:
    """Refuses some rows."""
    if any(i >= LIMIT for i in batch["id"].tolist()):
        raise ValueError("too much")
    if os.path.exists("stop") and list(Path("out").glob("_gristmill/g0002*/receipts/*.json")):
        raise KeyboardInterrupt
    return {"double": batch["id"] * 2}


def test_dead_letters_are_scored_again_from_the_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is kept for as long as there are some, whatever the table holds by then; then it goes."""
    file, sink = tmp_path / "a.sqlite", str(tmp_path / "out")
    with contextlib.closing(sqlite3.connect(file)) as db, db:
        db.execute("CREATE TABLE rows (id INTEGER)")
        db.executemany("INSERT INTO rows VALUES (?)", [(i,) for i in range(20)])
    model = gm.model(picky, returns={"double": "int64"})
    job = gm.Job(f"sqlite://{file}#rows", model, gm.sink(sink, keep=["id"]), workers=0, gates={"min_ok": 0.5})
    assert job.run().rows_dead == 2
    copies = list((tmp_path / "out").glob("_gristmill/inputs/*.snapshot"))
    assert len(copies) == 1
    with contextlib.closing(sqlite3.connect(file)) as db, db:
        db.execute("DELETE FROM rows")
    with pytest.raises(gm.PlanChanged, match="the store that is the source holds other rows now") as told:
        job.run()
    assert "--append" not in str(told.value) and "--restart" in str(told.value)
    assert list((tmp_path / "out").glob("_gristmill/inputs/*.snapshot")) == copies
    monkeypatch.setattr(sys.modules[__name__], "LIMIT", 100)
    report = gm.retry_dead(job, accept_code_change=True)
    assert (report.rows_ok, report.rows_dead) == (20, 0)
    assert not list((tmp_path / "out").glob("_gristmill/inputs/*.snapshot"))


def test_the_copy_of_dead_letters_outlives_other_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A restart of other rows that was stopped has a copy of its own, and refusals remove neither."""
    file, sink = tmp_path / "a.sqlite", tmp_path / "out"

    def filled(rows: int) -> None:
        with contextlib.closing(sqlite3.connect(file)) as db, db:
            db.execute("CREATE TABLE IF NOT EXISTS rows (id INTEGER)")
            db.execute("DELETE FROM rows")
            db.executemany("INSERT INTO rows VALUES (?)", [(i,) for i in range(rows)])

    def copies() -> set[Path]:
        return set(sink.glob("_gristmill/inputs/*.snapshot"))

    filled(20)
    model = gm.model(picky, returns={"double": "int64"})
    job = gm.Job(f"sqlite://{file}#rows", model, gm.sink(str(sink), keep=["id"]), workers=0, shard_rows=5,
                 gates={"min_ok": 0.5})  # fmt: skip
    assert job.run().rows_dead == 2
    before = copies()
    filled(30)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "stop").touch()
    with pytest.raises(gm.RunFailed):
        job.run(restart=True)
    assert list(sink.glob("_gristmill/g0002*/receipts/*.json")) and len(copies() - before) == 1
    (tmp_path / "stop").unlink()
    filled(40)
    with pytest.raises(gm.BadJob, match="an unfinished run of this job is here, whose result will replace these"):
        gm.retry_dead(job, accept_code_change=True)
    assert copies() > before and len(copies() - before) == 1
    shutil.rmtree(next(sink.glob("_gristmill/g0002*")) / "receipts")
    next(sink.glob("_gristmill/g0002*/plan.json")).unlink()  # as if it had been stopped a moment earlier
    monkeypatch.setattr(sys.modules[__name__], "LIMIT", 100)
    assert gm.retry_dead(job, accept_code_change=True).rows_dead == 0
    assert sorted(gm.read(str(sink)).to_table()["id"].to_pylist()) == list(range(20))


def test_no_dead_letters_are_nothing_to_do(tmp_path: Path) -> None:
    """Whatever the store holds by then."""
    file = tmp_path / "a.sqlite"
    with contextlib.closing(sqlite3.connect(file)) as db, db:
        db.execute("CREATE TABLE rows AS SELECT 1 AS id")
    model = gm.model(picky, returns={"double": "int64"})
    job = gm.Job(f"sqlite://{file}#rows", model, str(tmp_path / "out"), workers=0)
    job.run()
    with contextlib.closing(sqlite3.connect(file)) as db, db:
        db.execute("INSERT INTO rows VALUES (2)")
    assert gm.retry_dead(job).rows_ok == 1


def test_what_a_killed_run_was_copying_is_removed(tmp_path: Path) -> None:
    """By the next run, with copies that nobody needs; tables in memory beside them stay."""
    file, sink = tmp_path / "a.sqlite", tmp_path / "out"
    with contextlib.closing(sqlite3.connect(file)) as db, db:
        db.execute("CREATE TABLE rows (id INTEGER)")
        db.execute("INSERT INTO rows VALUES (1)")
    read(f"sqlite://{file}#rows", sink, "id")
    inputs = sink / "_gristmill" / "inputs"
    for name in ("half.tmp", "old.snapshot"):
        (inputs / name).mkdir()
        (inputs / name / "000000.table").write_bytes(b"cut")
    (inputs / "memory.table").touch()
    read(f"sqlite://{file}#rows", sink, "id")
    assert sorted(os.listdir(inputs)) == ["memory.table"]


def test_verify_of_a_source_that_was_copied(tmp_path: Path) -> None:
    """The result is verified; what the store held then cannot be read again: that is said, and no fault."""
    file, sink = tmp_path / "a.sqlite", tmp_path / "out"
    with contextlib.closing(sqlite3.connect(file)) as db, db:
        db.execute("CREATE TABLE rows (id INTEGER)")
        db.execute("INSERT INTO rows VALUES (1)")
    read(f"sqlite://{file}#rows", sink, "id")
    found = gm.verify(str(sink), source=True)
    assert found.ok and "all as published" in found.lines[0]
    assert any("a copy of a store, which was removed" in line for line in found.lines)
    next(sink.glob("*.parquet")).unlink()
    assert not gm.verify(str(sink), source=True).ok


@pytest.mark.long
def test_a_signal_ends_a_statement_that_takes_long(postgres: str, tmp_path: Path) -> None:
    """The server is asked to give it up; nothing is left in the sink but what proves that it can be written."""
    pytest.importorskip("adbc_driver_postgresql")
    code = "import sys, gristmill as gm; gm.apply(gm.source(sys.argv[1], query=sys.argv[2]), 'out', fn=len)"
    query = "SELECT g AS id, pg_sleep(0.02)::text AS slow FROM generate_series(1, 100000) g"
    running = subprocess.Popen([sys.executable, "-c", code, postgres, query], cwd=tmp_path, stderr=subprocess.PIPE)
    try:
        until = time.monotonic() + 30
        while not list(tmp_path.glob("out/_gristmill/inputs/*.tmp/*")):
            assert running.poll() is None and time.monotonic() < until
            time.sleep(0.05)
        running.send_signal(signal.SIGTERM)
        assert running.wait(10) == 143
    finally:
        running.kill()
        running.communicate()
    assert not list(tmp_path.glob("out/_gristmill/inputs/*"))
