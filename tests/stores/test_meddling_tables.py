"""Tables that do something else with rows than to take them: their triggers, rules, constraints and columns that are
expressions. Nothing is counted as delivered that is not there.
"""

from __future__ import annotations

import shutil
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pytest

import gristmill as gm
from gristmill.stores.contract import Load
from gristmill.stores.tables import Tables

ROWS = 12
TABLE = "(id bigint, y double precision, label text)"
MODES: dict[str, dict[str, Any]] = {
    "replace": {},
    "append": {"mode": "append"},
    "upsert": {"mode": "upsert", "key": "id"},
    "upsert with delete": {"mode": "upsert", "key": "id", "delete": True},
}


def scored(batch: dict[str, Any]) -> dict[str, Any]:
    """The same label for all rows."""
    return {"y": batch["x"], "label": ["new"] * len(batch["x"])}


def job(sink: Path, drop: list[str] | None = None, **said: Any) -> gm.Job:
    """A job over a dozen rows."""
    rows = pa.table({"id": np.arange(ROWS), "x": np.arange(ROWS, dtype=np.float64)})
    model = gm.model(scored, returns={"y": "float64", "label": "string"})
    return gm.Job(rows, model, gm.sink(str(sink), keep="id", drop=drop or []), workers=0, shard_rows=4, **said)


@pytest.fixture(scope="module")
def sink(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A published result of rows with the ids from 0."""
    folder = tmp_path_factory.mktemp("sink") / "out"
    job(folder).run()
    return str(folder)


def file(folder: Path, *statements: str) -> Callable[[str], list[Any]]:
    """An SQLite file in which these statements have been run; runs others there."""

    def run(sql: str) -> list[Any]:
        with closing(sqlite3.connect(folder / "t.sqlite")) as db, db:
            return db.execute(sql).fetchall()

    for one in statements:
        run(one)
    return run


def duck(folder: Path, *statements: str) -> Callable[[str], list[Any]]:
    """The same of a DuckDB file."""

    def run(sql: str) -> list[Any]:
        with duckdb.connect(str(folder / "t.duckdb")) as db:
            return db.execute(sql).fetchall()

    for one in statements:
        run(one)
    return run


# ---------------------------------------------------------------- rows that a table does not take

NOT_TAKEN = r"\d+ rows were to be there( of others)?, and \d+ are: triggers or rules of the table"
IN_SQLITE = {
    "ignored": [f"CREATE TABLE t {TABLE[:-1]} UNIQUE ON CONFLICT IGNORE)"],
    "replaced": [f"CREATE TABLE t {TABLE[:-1]} UNIQUE ON CONFLICT REPLACE)"],
    "null": [f"CREATE TABLE t {TABLE[:-1]} NOT NULL, own text DEFAULT NULL NOT NULL ON CONFLICT IGNORE)"],
    "raised": [
        f"CREATE TABLE t {TABLE}",
        "CREATE TRIGGER g BEFORE INSERT ON t WHEN new.id % 2 = 0 BEGIN SELECT RAISE(IGNORE); END",
    ],
    "removed": [
        f"CREATE TABLE t {TABLE}",
        "CREATE TRIGGER g AFTER INSERT ON t BEGIN DELETE FROM t WHERE id = new.id AND id % 2 = 0; END",
    ],
    "added": [
        f"CREATE TABLE t {TABLE}",
        "CREATE TRIGGER g AFTER INSERT ON t WHEN new.id = 3 BEGIN INSERT INTO t VALUES (-3, 0, 'more'); END",
    ],
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("how", IN_SQLITE)
def test_rows_that_sqlite_does_not_take(how: str, mode: str, sink: str, tmp_path: Path) -> None:
    """Exit 2, and the table is as it was."""
    run = file(tmp_path, *IN_SQLITE[how])
    with pytest.raises(gm.BadJob, match=NOT_TAKEN):
        gm.deliver(sink, gm.to(f"sqlite://{tmp_path}/t.sqlite#t", **MODES[mode]))
    assert run("SELECT count(*) FROM t") == [(0,)]


def test_updates_that_sqlite_does_not_make(sink: str, tmp_path: Path) -> None:
    """A row that keeps its old values is not delivered; nor is one that takes a row of others out."""
    old = "INSERT INTO t VALUES (3, 0, 'old'), (99, 0, 'other')"
    trigger = "CREATE TRIGGER g BEFORE UPDATE ON t WHEN old.id = 3 BEGIN SELECT RAISE(IGNORE); END"
    run = file(tmp_path, f"CREATE TABLE t {TABLE}", old, trigger)
    to = gm.to(f"sqlite://{tmp_path}/t.sqlite#t", mode="upsert", key="id")
    with pytest.raises(gm.BadJob, match="1 rows were to be updated, and 0 are"):
        gm.deliver(sink, to)
    run("DROP TABLE t")
    run("CREATE TABLE t (id bigint, y double UNIQUE ON CONFLICT REPLACE, label text)")
    run("INSERT INTO t VALUES (99, 5, 'other')")
    with pytest.raises(gm.BadJob, match="1 rows were to be there of others, and 0 are"):
        gm.deliver(sink, to)
    assert run("SELECT * FROM t") == [(99, 5.0, "other")]


def test_triggers_that_leave_rows_alone(sink: str, tmp_path: Path) -> None:
    """A table that has some is delivered to in each mode; views of SQLite by theirs."""
    log = "CREATE TRIGGER g_{0} AFTER {0} ON t BEGIN INSERT INTO log VALUES (new.id); END"
    made = [f"CREATE TABLE t {TABLE}", "CREATE TABLE log (id)", log.format("INSERT"), log.format("UPDATE")]
    run = file(tmp_path, *made, "INSERT INTO t VALUES (3, 0, 'old'), (99, 0, 'other')")
    for mode, rows in (("upsert", 13), ("upsert with delete", 12), ("replace", 12)):
        gm.deliver(sink, gm.to(f"sqlite://{tmp_path}/t.sqlite#t", **MODES[mode]))
        assert run("SELECT count(*), count(DISTINCT id) FROM t") == [(rows, rows)], mode
    assert run("SELECT count(*) FROM log") == [(2 + 12 + 12 + 12,)]
    run("CREATE VIEW seen AS SELECT * FROM t WHERE label <> 'old'")
    run("CREATE TRIGGER i INSTEAD OF INSERT ON seen BEGIN INSERT INTO t VALUES (new.id, new.y, new.label); END")
    gm.deliver(sink, f"sqlite://{tmp_path}/t.sqlite#seen", mode="append")
    assert run("SELECT count(*) FROM t") == [(24,)]


SWALLOWS = (
    "CREATE FUNCTION sw() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF new.id % 2 = 0 THEN {} END IF; "
    "RETURN new; END $$; CREATE TRIGGER sw {} ON t FOR EACH ROW EXECUTE FUNCTION sw()"
)
IN_POSTGRES = {
    "not inserted": SWALLOWS.format("RETURN NULL;", "BEFORE INSERT"),
    "removed": SWALLOWS.format("DELETE FROM area.t WHERE id = new.id;", "AFTER INSERT"),
    "removed at the end": SWALLOWS.format("DELETE FROM area.t WHERE id = new.id;", "AFTER INSERT")
    .replace("CREATE TRIGGER", "CREATE CONSTRAINT TRIGGER")
    .replace("ON t", "ON t DEFERRABLE INITIALLY DEFERRED"),
    "added": SWALLOWS.format("INSERT INTO area.t VALUES (-1 - 2 * new.id, 0, 'more');", "AFTER INSERT"),
    "rule": "CREATE RULE sw AS ON INSERT TO t WHERE new.id % 2 = 0 DO INSTEAD NOTHING",
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("how", IN_POSTGRES)
def test_rows_that_postgres_does_not_take(how: str, mode: str, sink: str, postgres: str, database: Any) -> None:
    """As in SQLite."""
    database.execute(f"CREATE TABLE t {TABLE}; {IN_POSTGRES[how]}")
    with pytest.raises(gm.BadJob, match=NOT_TAKEN):
        gm.deliver(sink, gm.to(f"{postgres}#area.t", **MODES[mode]))
    assert database.execute("SELECT count(*) FROM t").fetchone() == (0,)


def test_updates_that_postgres_does_not_make(sink: str, postgres: str, database: Any) -> None:
    """As in SQLite."""
    database.execute(f"CREATE TABLE t {TABLE}; INSERT INTO t VALUES (4, 0, 'old')")
    database.execute(SWALLOWS.format("RETURN NULL;", "BEFORE UPDATE"))
    with pytest.raises(gm.BadJob, match="1 rows were to be updated, and 0 are"):
        gm.deliver(sink, gm.to(f"{postgres}#area.t", mode="upsert", key="id"))
    assert database.execute("SELECT count(*) FROM t").fetchone() == (1,)


def test_a_trigger_that_brings_rows_to_their_partition(sink: str, postgres: str, database: Any) -> None:
    """The database counts no row that it was given itself: all are there, replaced and appended."""
    database.execute(f"CREATE TABLE t {TABLE}; CREATE TABLE even () INHERITS (t); INSERT INTO t VALUES (99, 0, 'old')")
    database.execute(SWALLOWS.format("INSERT INTO area.even SELECT new.*; RETURN NULL;", "BEFORE INSERT"))
    for mode, rows in (("append", 13), ("replace", 12)):
        gm.deliver(sink, gm.to(f"{postgres}#area.t", **MODES[mode]))
        assert database.execute("SELECT count(*) FROM t").fetchone() == (rows,)
    assert database.execute("SELECT count(*) FROM even").fetchone() == (6,)


def test_a_view_of_postgres_that_hides_rows(sink: str, postgres: str, database: Any) -> None:
    """Rows that are appended through it are in its table; by key they would come again each night."""
    database.execute(f"CREATE TABLE t {TABLE}; CREATE VIEW seen AS SELECT * FROM t WHERE id < 3")
    gm.deliver(sink, gm.to(f"{postgres}#area.seen", mode="append"))
    assert database.execute("SELECT count(*) FROM t").fetchone() == (12,)
    with pytest.raises(gm.BadJob, match="were to be"):
        gm.deliver(sink, gm.to(f"{postgres}#area.seen", mode="upsert", key="id"))
    database.execute("DELETE FROM t; CREATE VIEW all_of_it AS SELECT * FROM t")
    gm.deliver(sink, gm.to(f"{postgres}#area.all_of_it", mode="upsert", key="id"))
    assert database.execute("SELECT count(*) FROM t").fetchone() == (12,)


UNCHANGED = "CREATE TRIGGER g BEFORE UPDATE ON t "
SUPPRESSES = {
    "sqlite": UNCHANGED
    + "WHEN old.label IS new.label COLLATE NOCASE AND old.y = new.y BEGIN SELECT RAISE(IGNORE); END",
    "postgres": UNCHANGED + "FOR EACH ROW EXECUTE FUNCTION suppress_redundant_updates_trigger()",
}


def labelled(batch: pa.RecordBatch) -> pa.RecordBatch:
    """What each row says, and nothing else."""
    return pa.record_batch({"y": pa.array([0.5] * len(batch))})


@pytest.mark.parametrize("delete", [False, True])
@pytest.mark.parametrize("name", SUPPRESSES)
def test_updates_that_would_change_nothing(name: str, delete: bool, request: Any, tmp_path: Path) -> None:
    """A table that does not write such rows again has them nevertheless; those that it does not change are missed."""
    columns = "(id bigint PRIMARY KEY, y double precision, label text, more {}, side {})"
    if name == "sqlite":
        run, at = file(tmp_path, f"CREATE TABLE t {columns.format('text', 'blob')}"), f"sqlite://{tmp_path}/t.sqlite#t"
    else:
        at, run = f"{request.getfixturevalue('postgres')}#area.t", request.getfixturevalue("database").execute
        run(f"CREATE TABLE t {columns.format('json', 'public.vector(2)')}")
    run(SUPPRESSES[name])
    to = gm.to(at, mode="upsert", key="id", delete=delete)

    def night(labels: list[str | None]) -> None:
        rows = pa.table(
            {"id": range(4), "label": pa.array(labels, pa.string()), "more": [{"a": 1}, {"a": 2}, None, {}]}
        )
        rows = rows.append_column("side", pa.array([[1.0, 2.0]] * 3 + [None], pa.list_(pa.float32(), 2)))
        made = gm.sink(str(tmp_path / "out"), keep=rows.column_names)
        gm.Job(rows, gm.model(labelled, batch_format="arrow"), made, workers=0, deliver=to).run(restart=True)

    night(["a", "b", None, "d"])
    night(["a", "z", None, "e"])
    night(["a", "z", None, "e"])
    with gm.lookup(at, key="id") as lookup:
        found = lookup.get_many(range(4))
    assert [row["label"] for row in found] == ["a", "z", None, "e"]
    if name == "sqlite":  # takes Z for z
        with pytest.raises(gm.BadJob, match="4 rows were to be updated, and 3 are"):
            night(["a", "Z", None, "e"])


# ---------------------------------------------------------------- what a table does when rows go


def test_what_sqlite_does_when_rows_go_is_not_done(sink: str, tmp_path: Path) -> None:
    """A replace is no reason to remove notes about rows; afterwards the triggers are there, as they were."""
    run = file(
        tmp_path,
        f"CREATE TABLE t {TABLE}",
        "CREATE TABLE notes (about)",
        'CREATE TRIGGER "the rows" AFTER DELETE ON t BEGIN DELETE FROM notes WHERE about = old.id; END',
        "CREATE TRIGGER keep BEFORE DELETE ON T BEGIN SELECT RAISE(ABORT, 'kept') WHERE old.id = 2; END",
        "INSERT INTO t VALUES (1, 0, 'old'), (2, 0, 'old')",
        "INSERT INTO notes VALUES (1)",
    )
    triggers = "SELECT name, sql FROM sqlite_master WHERE type = 'trigger' ORDER BY rowid"
    before = run(triggers)
    gm.deliver(sink, f"sqlite://{tmp_path}/t.sqlite#t")
    assert run("SELECT count(*), min(label) FROM t") == [(12, "new")]
    assert run("SELECT * FROM notes") == [(1,)] and run(triggers) == before
    run("DELETE FROM t WHERE id = 1")
    assert run("SELECT * FROM notes") == []


# ---------------------------------------------------------------- refused before anything is scored

ADDRESSES = ("sqlite", "duckdb", "postgres")


@pytest.fixture(params=ADDRESSES)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Callable[[str], Any]]:
    """The address of a store without its table, and what runs SQL there."""
    if request.param == "postgres":
        return f"{request.getfixturevalue('postgres')}#area.", request.getfixturevalue("database").execute
    return f"{request.param}://{tmp_path}/t.{request.param}#", (file if request.param == "sqlite" else duck)(tmp_path)


@pytest.mark.parametrize("evolve", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.few(8)
def test_a_column_that_the_table_makes(mode: str, evolve: bool, store: Any, tmp_path: Path) -> None:
    """Before scoring, in each mode; a delivery without it is made, and it is made as before."""
    address, run = store
    stored = "STORED" if address.startswith("postgres") else ""
    run(f"CREATE TABLE t (id bigint, y double precision, label text GENERATED ALWAYS AS ('a,b') {stored})")
    with pytest.raises(gm.BadJob, match="column 'label' is GENERATED there"):
        job(tmp_path / "out", deliver=[gm.to(f"{address}t", evolve=evolve, **MODES[mode])]).run()
    assert not (tmp_path / "out" / "_SUCCESS").exists()
    job(tmp_path / "out", drop=["label"], deliver=[gm.to(f"{address}t", **MODES[mode])]).run()
    found = run("SELECT count(*), min(label) FROM t")
    assert (found if isinstance(found, list) else found.fetchall()) == [(12, "a,b")]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ADDRESSES[:2])
def test_a_view_in_a_file(name: str, mode: str, tmp_path: Path) -> None:
    """Its rows are those of a table, which is to be named, whatever its capitals."""
    run = (file if name == "sqlite" else duck)(tmp_path, f"CREATE TABLE u {TABLE}", "CREATE VIEW T AS SELECT * FROM u")
    with pytest.raises(gm.BadJob, match="is a view, whose rows cannot be replaced: deliver to the table"):
        job(tmp_path / "out", deliver=[gm.to(f"{name}://{tmp_path}/t.{name}#t", **MODES[mode])]).run()
    assert not (tmp_path / "out" / "_SUCCESS").exists() and run("SELECT count(*) FROM u") == [(0,)]


# ---------------------------------------------------------------- DuckDB


def test_duckdb_keeps_collations(sink: str, tmp_path: Path) -> None:
    """And expressions beside them, whatever the names are."""
    for name in ("t", '"ta(ble"', '"s (".u'):
        run = duck(
            tmp_path,
            'CREATE SCHEMA IF NOT EXISTS "s ("',
            f"CREATE TABLE {name} (id bigint, y double, label text COLLATE NOCASE, z bigint AS (id * 2))",
        )
        sql = "SELECT sql FROM duckdb_tables() WHERE table_name IN ('t', 'ta(ble', 'u') ORDER BY 1"
        before = run(sql)
        gm.deliver(sink, f"duckdb://{tmp_path}/t.duckdb#{name.replace(chr(34), '')}")
        assert run(sql) == before
        assert run(f"SELECT count(*), max(z) FROM {name} WHERE label = 'NEW'") == [(12, 22)]


def test_duckdb_renames_a_table_of_columns(sink: str, tmp_path: Path) -> None:
    """Nothing is lost with it: it takes no copy of the rows."""
    from gristmill.stores import duckdb as module

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("rows are moved")

    name = '"s (".""" u"'
    duck(
        tmp_path, 'CREATE SCHEMA "s ("', f'CREATE TABLE {name} (id bigint, y double, label text, "group" struct(a int))'
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "moved", never)
        gm.deliver(sink, f'duckdb://{tmp_path}/t.duckdb#s (." u', evolve=True)
    with duckdb.connect(str(tmp_path / "t.duckdb")) as db:
        assert db.execute(f"SELECT count(*) FROM {name}").fetchall() == [(12,)]


@pytest.mark.parametrize("depth", ["map", "list", "struct", "map of maps"])
def test_a_map_with_a_key_twice(depth: str, tmp_path: Path) -> None:
    """Told with its column and row: DuckDB does not take it, at whatever depth."""
    kind, twice, once = pa.map_(pa.string(), pa.int64()), [("a", 1), ("a", 2)], [("a", 1), ("b", 2)]
    made = {
        "map": (kind, lambda v: v),
        "list": (pa.list_(kind), lambda v: [None, once, v]),
        "struct": (pa.struct([("m", kind)]), lambda v: {"m": v}),
        "map of maps": (pa.map_(pa.string(), kind), lambda v: [("x", once), ("y", v)]),
    }
    deep, value = made[depth]
    for name, last in (("right", once), ("wrong", twice)):
        rows = pa.table({"id": range(4), "m": pa.array([value(once), None, value(once), value(last)], deep)})
        to = f"duckdb://{tmp_path}/{name}.duckdb#t"
        made_job = gm.Job(rows, gm.model(zero, batch_format="arrow"), gm.sink(str(tmp_path / name), keep=["id", "m"]),
                          workers=0, deliver=[to])  # fmt: skip
        if name == "right":
            made_job.run()
            continue
        with pytest.raises(gm.BadJob, match=r"column 'm' has a map in which a key stands twice, .* id = 3"):
            made_job.run()


def zero(batch: pa.RecordBatch) -> pa.RecordBatch:
    """A column of zeros."""
    return pa.record_batch({"zero": [0] * len(batch)})


# ---------------------------------------------------------------- decimals of 32 and 64 bits


@pytest.mark.parametrize("kind", ["decimal32", "decimal64"])
def test_narrow_decimals(kind: str, postgres: str, database: Any, tmp_path: Path) -> None:
    """Postgres holds them, also in lists and as keys; Lance, which does not, says so before anything is scored."""
    if not hasattr(pa, kind):
        pytest.skip("pyarrow 18 has them")
    from decimal import Decimal

    values = [Decimal("1.50"), None, Decimal("-0.01"), Decimal("99999.99")]
    deep = getattr(pa, kind)(7, 2)
    rows = pa.table({"id": range(4), "d": pa.array(values, deep), "l": pa.array([[v] for v in values], pa.list_(deep))})

    def made(name: str, to: Any) -> gm.Job:
        sink = gm.sink(str(tmp_path / name), keep=["id", "d", "l"])
        return gm.Job(rows, gm.model(zero, batch_format="arrow"), sink, workers=0, deliver=[to])

    made("pg", gm.to(f"{postgres}#area.t")).run()
    assert [row[0] for row in database.execute("SELECT d FROM t ORDER BY id")] == values
    with gm.lookup(f"{postgres}#area.t", key="d") as lookup:
        found = lookup.get(Decimal("-0.01"))
        assert (found["id"], found["d"], found["l"]) == (2, values[2], [values[2]])
    pytest.importorskip("lance")
    with pytest.raises(gm.BadJob, match=f"'d'.*{kind}"):
        made("lance", gm.to(f"lance://{tmp_path}/lance#t")).run()
    assert not (tmp_path / "lance" / "_SUCCESS").exists()


# ---------------------------------------------------------------- tables of ours


def test_two_first_deliveries_at_once(
    sink: str, postgres: str, database: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To two tables of a schema in which nothing is yet: both are made."""
    shutil.copytree(sink, tmp_path / "other")
    meeting, came, begin = threading.Barrier(2), set(), Tables._begin

    def together(self: Tables, session: Any, load: Load) -> None:
        if load.target not in came:
            came.add(load.target)
            meeting.wait(20)
        begin(self, session, load)

    monkeypatch.setattr(Tables, "_begin", together)
    with ThreadPoolExecutor(2) as pool:
        made = [
            pool.submit(gm.deliver, one, f"{postgres}#area.{name}")
            for one, name in ((sink, "t"), (str(tmp_path / "other"), "u"))
        ]
        assert [future.result().rows for future in made] == [ROWS, ROWS]
    assert len(came) == 2
