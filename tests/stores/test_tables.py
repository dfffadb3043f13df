"""What hangs on a table stays when its rows are replaced; indices on request; values in the database's own types."""

from __future__ import annotations

import decimal
import random
import shutil
import sqlite3
import zlib
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import gristmill as gm

ROWS = 30


def scored(batch: dict[str, Any], times: int = 1) -> dict[str, Any]:
    """A number and a vector for each row."""
    vectors = np.stack([batch["x"], batch["x"] * times, np.ones(len(batch["x"]))], axis=1).astype(np.float32)
    return {"y": batch["x"] * times, "v": vectors}


@pytest.fixture(scope="module")
def nights(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A sink after each of two nights."""
    folder = tmp_path_factory.mktemp("nights")
    rows = pa.table({"id": np.arange(ROWS), "x": np.arange(ROWS, dtype=np.float64)})
    for night in (1, 2):
        model = gm.model(scored, times=night)
        gm.Job(rows, model, gm.sink(str(folder / "out"), keep="id"), workers=0).run(restart=night == 2)
        shutil.copytree(folder / "out", folder / f"night{night}")
    return str(folder / "night1"), str(folder / "night2")


@pytest.fixture
def database(postgres: str) -> Iterator[Any]:
    """A connection to a Postgres database whose tables are dropped afterwards."""
    import psycopg

    with psycopg.connect(postgres, autocommit=True) as db:
        yield db
        for (name,) in db.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'public'").fetchall():
            db.execute(f'DROP TABLE "{name}" CASCADE')


def one(db: Any, sql: str) -> Any:
    """The first value of a query."""
    return db.execute(sql).fetchone()[0]


def test_postgres_keeps_indices_grants_and_constraints(postgres: str, database: Any, nights: tuple[str, str]) -> None:
    """The table is another one, with all that the old one had, under the same names."""
    database.execute(
        "CREATE TABLE scores (id bigint PRIMARY KEY, y double precision NOT NULL CHECK (y >= 0), v vector(3), "
        "told timestamptz DEFAULT now())"
    )
    database.execute("CREATE INDEX by_y ON scores (y DESC) WHERE y > 1")
    database.execute("CREATE INDEX by_v ON scores USING hnsw (v vector_l2_ops)")
    database.execute("COMMENT ON COLUMN scores.y IS 'the score'")
    database.execute("DROP ROLE IF EXISTS reader")
    database.execute("CREATE ROLE reader")
    database.execute("GRANT SELECT ON scores TO reader WITH GRANT OPTION")
    about = """
        SELECT array_agg(indexdef ORDER BY indexname) FROM pg_indexes WHERE tablename = 'scores' UNION ALL
        SELECT array_agg(pg_get_constraintdef(oid) ORDER BY conname) FROM pg_constraint
        WHERE conrelid = 'scores'::regclass
        UNION ALL SELECT array[col_description('scores'::regclass, 2)] UNION ALL
        SELECT array_agg(privilege_type || is_grantable) FROM information_schema.role_table_grants
        WHERE grantee = 'reader'
        UNION ALL SELECT array_agg(column_default) FROM information_schema.columns WHERE table_name = 'scores'
    """
    before, table = database.execute(about).fetchall(), one(database, "SELECT 'scores'::regclass::oid")
    for night, sink in enumerate(nights, 1):
        gm.deliver(sink, f"{postgres}#scores")
        assert one(database, "SELECT sum(y) FROM scores") == sum(range(ROWS)) * night
    assert database.execute(about).fetchall() == before
    assert one(database, "SELECT 'scores'::regclass::oid") != table
    assert one(database, "SELECT count(told) FROM scores") == ROWS
    assert one(database, "SELECT count(*) FROM pg_tables WHERE tablename LIKE 'gm\\_%'") == 0
    database.execute("DROP TABLE scores")
    database.execute("DROP ROLE reader")


def test_postgres_keeps_what_others_hang_on_the_table(postgres: str, database: Any, nights: tuple[str, str]) -> None:
    """With views, foreign keys or triggers it stays the same table, with other rows."""
    gm.deliver(nights[0], f"{postgres}#scores")
    table = one(database, "SELECT 'scores'::regclass::oid")
    database.execute("CREATE VIEW best AS SELECT id FROM scores WHERE y > 40")
    database.execute("CREATE TABLE log (n bigint)")
    database.execute(
        "CREATE FUNCTION told() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN INSERT INTO log SELECT count(*) FROM scores; RETURN NULL; END $$"
    )
    database.execute("CREATE TRIGGER told AFTER INSERT ON scores FOR EACH STATEMENT EXECUTE FUNCTION told()")
    assert one(database, "SELECT count(*) FROM best") == 0
    gm.deliver(nights[1], f"{postgres}#scores")
    assert one(database, "SELECT count(*) FROM best") == 9
    assert one(database, "SELECT 'scores'::regclass::oid") == table
    assert database.execute("SELECT n FROM log").fetchall() == [(ROWS,)]
    database.execute("DROP FUNCTION told CASCADE")


def test_postgres_indices_on_request(postgres: str, database: Any, nights: tuple[str, str]) -> None:
    """Are there when the rows are: for vectors HNSW, by the key, and by a column."""
    made = gm.to(f"{postgres}#scores", key="id", index={"v": {"kind": "hnsw", "ops": "vector_l2_ops"}, "y": "btree"})
    for sink in nights:
        gm.deliver(sink, made)
        kinds = [
            row[0].partition(" USING ")[2]
            for row in database.execute("SELECT indexdef FROM pg_indexes WHERE tablename = 'scores' ORDER BY 1")
        ]
        assert sorted(kinds) == ["btree (id)", "btree (y)", "hnsw (v vector_l2_ops)"]
    near = database.execute("SELECT id FROM scores ORDER BY v <-> '[3,6,1]' LIMIT 2").fetchall()
    assert near[0] == (3,)
    assert gm.lookup(f"{postgres}#scores").get(3) == {"id": 3, "y": 6.0, "v": [3.0, 6.0, 1.0]}


def test_postgres_says_what_it_refuses(postgres: str, database: Any, nights: tuple[str, str]) -> None:
    """In its own words, and nothing has changed: a right that is missing, a constraint that does not hold."""
    database.execute("CREATE TABLE scores (id bigint, y double precision CHECK (y < 5), v vector(3))")
    with pytest.raises(gm.BadJob, match=r'Postgres says: .*violates check constraint "scores_y_check"'):
        gm.deliver(nights[0], f"{postgres}#scores")
    assert one(database, "SELECT count(*) FROM scores") == 0
    database.execute("DROP ROLE IF EXISTS guest")
    database.execute("CREATE ROLE guest LOGIN")
    guest = postgres.replace("postgres:@", "guest@", 1)
    with pytest.raises(gm.BadJob, match=r"role guest may not .*: GRANT .* TO guest"):
        gm.deliver(nights[0], f"{guest}#scores")
    with pytest.raises(gm.BadJob, match=r"Postgres says: .*does not exist|cannot be reached: .*does not exist"):
        gm.deliver(nights[0], f"{postgres.replace('/postgres?', '/nowhere?')}#scores")
    database.execute("DROP ROLE guest")


def test_a_connection_that_is_cut(
    postgres: str, database: Any, nights: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At any statement: the store's own words, the old rows, and the next command finishes."""
    from gristmill.stores.pgsession import Transaction

    run, count, cut = Transaction.run, 0, 0

    def counted(self: Any, sql: str, *values: Any) -> Any:
        nonlocal count
        count += 1
        if count == cut:
            database.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'gristmill'"
            )
        return run(self, sql, *values)

    monkeypatch.setattr(Transaction, "run", counted)
    gm.deliver(nights[0], f"{postgres}#scores")
    whole = count
    for cut in range(1, whole, 7):
        cut, at = 0, cut
        database.execute("DROP TABLE IF EXISTS scores")
        gm.deliver(nights[0], f"{postgres}#scores")
        count, cut = 0, at
        with pytest.raises((gm.RunFailed, gm.BadJob), match=r"Postgres says: .*terminating connection"):
            gm.deliver(nights[1], f"{postgres}#scores")
        assert one(database, "SELECT sum(y) FROM scores") == sum(range(ROWS))
        cut = 0
        gm.deliver(nights[1], f"{postgres}#scores")
        assert one(database, "SELECT sum(y) FROM scores") == sum(range(ROWS)) * 2


@pytest.mark.long
def test_postgres_numbers_of_any_size(postgres: str, database: Any, tmp_path: Path) -> None:
    """Decimals of every scale and length come through the binary form as they were."""
    chance = random.Random(7)
    for precision, scale in ((1, 0), (4, 4), (5, 4), (9, 0), (18, 3), (38, 20), (38, 0), (76, 33)):
        top = 10**precision - 1
        values = [
            0,
            1,
            -1,
            top,
            -top,
            *(chance.randint(-top, top) for _ in range(20)),
            *(10**n for n in range(precision)),
        ]
        numbers = [decimal.Decimal(v).scaleb(-scale, decimal.Context(prec=80)) for v in values]
        kind = pa.decimal256(precision, scale) if precision > 38 else pa.decimal128(precision, scale)
        rows = pa.table({"id": range(len(numbers)), "n": pa.array(numbers, kind)})
        name = f"n{precision}_{scale}"
        sink = gm.sink(str(tmp_path / name))
        model = gm.model(lambda batch: batch, batch_format="arrow")
        gm.Job(rows, model, sink, workers=0, deliver=f"{postgres}#{name}").run()
        assert [row[0] for row in database.execute(f"SELECT n FROM {name} ORDER BY id")] == numbers


def test_duckdb_keeps_views_indices_and_constraints(tmp_path: Path, nights: tuple[str, str]) -> None:
    """A table with an index or a constraint stays the same table; a view goes on to show the table of its name."""
    import duckdb

    file = str(tmp_path / "s.duckdb")
    with duckdb.connect(file) as db:
        db.execute("CREATE TABLE scores (id BIGINT PRIMARY KEY, y DOUBLE, v FLOAT[3], told DATE DEFAULT '2026-01-01')")
        db.execute("CREATE INDEX by_y ON scores (y)")
        db.execute("CREATE VIEW best AS SELECT id FROM scores WHERE y > 40")
    for sink in nights:
        gm.deliver(sink, f"duckdb://{file}#scores")
        gm.deliver(sink, f"duckdb://{file}#plain")
        with duckdb.connect(file) as db:
            db.execute("CREATE OR REPLACE VIEW most AS SELECT id FROM plain WHERE y > 40")
    with duckdb.connect(file, read_only=True) as db:
        assert (
            db.sql("SELECT count(*) FROM best").fetchall() == db.sql("SELECT count(*) FROM most").fetchall() == [(9,)]
        )
        assert db.sql("SELECT index_name FROM duckdb_indexes()").fetchall() == [("by_y",)]
        assert db.sql("SELECT count(told) FROM scores").fetchall() == [(ROWS,)]
        assert {row[0] for row in db.sql("SELECT table_name FROM duckdb_tables()").fetchall()} == {
            "scores", "plain", "gristmill_marks", "gristmill_parts",
        }  # fmt: skip


def test_sqlite_keeps_views_indices_and_triggers(tmp_path: Path, nights: tuple[str, str]) -> None:
    """As in DuckDB; and a table with nothing but our own index is switched."""
    file = str(tmp_path / "s.sqlite")
    with closing(sqlite3.connect(file)) as db:
        db.executescript(
            "CREATE TABLE scores (id INTEGER PRIMARY KEY, y REAL, v BLOB, told TEXT DEFAULT 'now');"
            "CREATE INDEX by_y ON scores (y); CREATE TABLE log (id INTEGER);"
            "CREATE TRIGGER told AFTER INSERT ON scores BEGIN INSERT INTO log VALUES (new.id); END;"
            "CREATE VIEW best AS SELECT id FROM scores WHERE y > 40;"
        )
    for sink in nights:
        gm.deliver(sink, f"sqlite://{file}#scores")
        gm.deliver(sink, f"sqlite://{file}#plain", key="id", index={"y": True})
    with closing(sqlite3.connect(file)) as db:
        assert db.execute("SELECT count(*) FROM best").fetchall() == [(9,)]
        assert db.execute("SELECT count(*) FROM log").fetchall() == [(2 * ROWS,)]
        assert db.execute("SELECT count(told) FROM scores").fetchall() == [(ROWS,)]
        own = [row[1] for row in db.execute("PRAGMA index_list(plain)")]
        assert len(own) == 2 and all(name.startswith("gm_") for name in own)
        assert np.frombuffer(db.execute("SELECT v FROM plain WHERE id = 3").fetchone()[0], np.float32).tolist() == [
            3,
            6,
            1,
        ]


def test_a_table_of_others_is_looked_up_by_its_own_types(postgres: str, tmp_path: Path) -> None:
    """No delivery tells the types of its columns: a whole number finds a row, and no fraction does."""
    import psycopg

    made = "CREATE TABLE others (id INTEGER, name VARCHAR(9)); INSERT INTO others VALUES (5, 'five'), (6, 'six');"
    with closing(sqlite3.connect(tmp_path / "others.sqlite")) as db:
        db.executescript(made)
    with psycopg.connect(postgres, autocommit=True) as server:
        server.execute("DROP TABLE IF EXISTS others;" + made)
    for at in (f"sqlite://{tmp_path}/others.sqlite#others", f"{postgres}#others"):
        with gm.lookup(at, key="id") as by_id, gm.lookup(at, key="name") as by_name:
            assert by_id.get_many([5, "6", 5.5, 2**70]) == [
                {"id": 5, "name": "five"},
                {"id": 6, "name": "six"},
                None,
                None,
            ]
            assert by_name.get("six") == {"id": 6, "name": "six"}


def test_keys_are_numbered_as_zlib_does() -> None:
    """Clients of others find a row's hash by crc32 of its key."""
    from gristmill.stores.packing import crc32s

    chance = random.Random(3)
    keys = [b"", b"a", *(chance.randbytes(chance.randint(0, 70)) for _ in range(500))]
    found = crc32s(pa.array([b"x", *keys], pa.binary()).slice(1))
    assert found.tolist() == [zlib.crc32(key) for key in keys]


def test_keys_are_told_apart_whatever_their_column_compares(postgres: str, database: Any, tmp_path: Path) -> None:
    """In a column that takes 'A' for 'a', the rows of both are two, for an upsert and a lookup."""
    import duckdb

    # A collation of its own: those that take 'A' for 'a' come with ICU, without which this server is built.
    database.execute('CREATE TABLE cased (id text COLLATE "POSIX", y double precision)')
    with closing(sqlite3.connect(tmp_path / "t.sqlite")) as db:
        db.execute("CREATE TABLE cased (id TEXT COLLATE NOCASE, y REAL)")
    with duckdb.connect(str(tmp_path / "t.duckdb")) as made:
        made.execute("CREATE TABLE cased (id VARCHAR COLLATE NOCASE, y DOUBLE)")
    places = (f"sqlite://{tmp_path}/t.sqlite#cased", f"duckdb://{tmp_path}/t.duckdb#cased", f"{postgres}#cased")
    for night, ids in enumerate((["A", "a", "b"], ["A"], ["B"])):
        rows = pa.table({"id": ids, "x": [float(night)] * len(ids)})
        out = gm.sink(str(tmp_path / f"out{night}"), keep="id")
        gm.Job(rows, gm.model(lambda batch: {"y": batch["x"]}), out, workers=0).run()
        for at in places:
            gm.deliver(str(tmp_path / f"out{night}"), gm.to(at, mode="upsert", key="id"))
    for at in places:
        with gm.lookup(at) as lookup:
            assert [row and row["y"] for row in lookup.get_many(["A", "a", "b", "B"])] == [1.0, 0.0, 0.0, 2.0], at
