"""A table that is replaced stays all that it was to others: what hangs on it, what refers to it, who may read it, and
what was changed in it a moment ago.
"""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import duckdb as duckdb_client
import numpy as np
import psycopg
import pyarrow as pa
import pytest

import gristmill as gm
from gristmill.commit.publication import published
from gristmill.stores.delivery import Loading, Result, opened
from gristmill.stores.postgres import Server

NIGHTS: Mapping[str, range] = {"first": range(12), "second": range(10), "third": range(4, 14)}


def scored(batch: dict[str, Any], night: int) -> dict[str, Any]:
    """A number and a label for each row."""
    return {"y": batch["x"] * night, "label": [f"n{night}" for _ in batch["x"]]}


@pytest.fixture(scope="module")
def nights(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A sink after each of three nights, whose rows come and go."""
    folder = tmp_path_factory.mktemp("nights")
    for night, (name, ids) in enumerate(NIGHTS.items(), 1):
        job(folder / "out", ids, night).run(restart=night > 1)
        shutil.copytree(folder / "out", folder / name)
    return {name: str(folder / name) for name in NIGHTS}


def job(sink: Path, ids: range, night: int = 1, **said: Any) -> gm.Job:
    """A job over rows of these ids."""
    rows = pa.table({"id": np.arange(ids.start, ids.stop), "x": np.arange(ids.start, ids.stop, dtype=np.float64)})
    model = gm.model(scored, night=night, returns={"y": "float64", "label": "string"})
    return gm.Job(rows, model, gm.sink(str(sink), keep="id"), workers=0, shard_rows=4, **said)


@pytest.fixture
def database(postgres: str) -> Iterator[Any]:
    """A connection to a schema of its own of a Postgres database."""
    with psycopg.connect(postgres, autocommit=True, options="-c search_path=area") as db:
        db.execute("DROP PUBLICATION IF EXISTS p")
        db.execute("DROP SCHEMA IF EXISTS area CASCADE")
        db.execute("CREATE SCHEMA area")
        yield db
        db.execute("DROP PUBLICATION IF EXISTS p")
        db.execute("DROP SCHEMA area CASCADE")


def staged_early(sink: str, to: Any) -> None:
    """What a run loads beside itself."""
    found = published(sink)
    loading = Loading(to, Result.of(found), opened(to))
    loading.stage(found.live())
    loading.rest()


TABLE = "(id bigint PRIMARY KEY, y double precision, label text)"
ALL = "SELECT count(*), min(id), max(id), min(label), max(label) FROM t"


# ---------------------------------------------------------------- tables of others refer to it


@pytest.mark.few(2)
@pytest.mark.parametrize("then", ["ON DELETE CASCADE", "ON DELETE SET NULL", "ON DELETE SET DEFAULT", "", "DEFERRABLE"])
def test_rows_that_others_refer_to(then: str, postgres: str, database: Any, nights: dict[str, str]) -> None:
    """By their key they are updated; one that goes, and to which nothing refers, is deleted; else nothing changes."""
    database.execute(f"CREATE TABLE t {TABLE}")
    to = gm.to(f"{postgres}#area.t", key="id")
    gm.deliver(nights["first"], to)
    database.execute(f"CREATE TABLE notes (n int, about bigint REFERENCES t {then})")
    database.execute("INSERT INTO notes SELECT i, i FROM generate_series(0, 5) i")
    gm.deliver(nights["second"], to)
    assert database.execute(ALL).fetchone() == (10, 0, 9, "n2", "n2")
    with pytest.raises(gm.BadJob, match=r"notes.* refers? to it by id|violates foreign key .* on table \"notes\""):
        gm.deliver(nights["third"], to)
    assert database.execute(ALL).fetchone() == (10, 0, 9, "n2", "n2")
    assert database.execute("SELECT count(*), count(about) FROM notes").fetchone() == (6, 6)
    database.execute("DELETE FROM notes WHERE about < 4")
    gm.deliver(nights["third"], to)
    assert database.execute(ALL).fetchone() == (10, 4, 13, "n3", "n3")
    assert database.execute("SELECT count(about) FROM notes").fetchone() == (2,)


def test_rows_that_others_refer_to_in_duckdb(tmp_path: Path, nights: dict[str, str]) -> None:
    """The same; and a column that DuckDB does not update in such a table is refused."""
    file, said = tmp_path / "t.duckdb", f"duckdb://{tmp_path}/t.duckdb#t"

    def run(sql: str) -> list[Any]:
        with duckdb_client.connect(str(file)) as db:
            return db.execute(sql).fetchall()

    run(f"CREATE TABLE t {TABLE}")
    gm.deliver(nights["first"], gm.to(said, key="id"))
    run("CREATE TABLE notes (n int, about bigint REFERENCES t (id))")
    run("INSERT INTO notes SELECT i, i FROM range(6) r(i)")
    gm.deliver(nights["second"], gm.to(said, key="id"))
    with pytest.raises(gm.BadJob, match=r"notes.* refers to it by id .*, and 4 rows there .*id = \d"):
        gm.deliver(nights["third"], gm.to(said, key="id"))
    assert run(ALL) == [(10, 0, 9, "n2", "n2")]
    with pytest.raises(gm.BadJob, match="give key='id', by which rows are updated"):
        gm.deliver(nights["second"], gm.to(said))
    with pytest.raises(gm.BadJob, match="DuckDB does not update column 'label'"):
        gm.deliver(nights["third"], gm.to(said, key="id", index={"label": "art"}))
    run("DELETE FROM notes WHERE about < 4")
    gm.deliver(nights["third"], gm.to(said, key="id"))
    assert run(ALL) == [(10, 4, 13, "n3", "n3")]


@pytest.mark.parametrize("key", [(), "label"])
def test_a_replace_of_such_a_table_is_refused_before_anything_is_scored(
    key: Any, postgres: str, database: Any, tmp_path: Path
) -> None:
    """If its rows cannot be told by what others refer to; the way is named."""
    database.execute(f"CREATE TABLE t {TABLE}")
    database.execute("CREATE TABLE notes (about bigint REFERENCES t ON DELETE CASCADE)")
    with pytest.raises(gm.BadJob, match=r"notes refers to it by id .* deletes rows there .*key='id'.*mode='upsert'"):
        job(tmp_path / "out", range(4), deliver=[gm.to(f"{postgres}#area.t", key=key)]).run()
    assert not (tmp_path / "out" / "_SUCCESS").exists()


# ---------------------------------------------------------------- what hangs on it

HUNG = {
    "serial": "CREATE TABLE t (n serial, id bigint, y double precision, label text)",
    "bigserial key": "CREATE TABLE t (n bigserial PRIMARY KEY, id bigint, y double precision, label text)",
    "identity": f"CREATE TABLE t {TABLE}; ALTER TABLE t ADD n int GENERATED ALWAYS AS IDENTITY",
    "sequence": f"CREATE TABLE t {TABLE}; CREATE SEQUENCE own OWNED BY t.id",
    "function of rows": f"CREATE TABLE t {TABLE}; CREATE FUNCTION f() RETURNS SETOF t LANGUAGE sql AS 'TABLE t'",
    "function": f"CREATE TABLE t {TABLE}; CREATE FUNCTION f() RETURNS bigint BEGIN ATOMIC SELECT count(*) FROM t; END",
    "column of rows": f"CREATE TABLE t {TABLE}; CREATE TABLE o (r t)",
    "list of rows": f"CREATE TABLE t {TABLE}; CREATE TABLE o (r t[])",
    "rule": f"CREATE TABLE t {TABLE}; CREATE TABLE o (n int); CREATE RULE r AS ON DELETE TO t DO ALSO INSERT INTO o "
    "VALUES (1)",
    "view": f"CREATE TABLE t {TABLE}; CREATE MATERIALIZED VIEW o AS SELECT count(*) FROM t",
    "options": f"CREATE TABLE t {TABLE} WITH (fillfactor = 70, autovacuum_enabled = false)",
    "options of an index": f"CREATE TABLE t {TABLE}; ALTER INDEX t_pkey SET (fillfactor = 50)",
    "comments": f"CREATE TABLE t {TABLE}; COMMENT ON TABLE t IS 'it''s'; COMMENT ON COLUMN t.y IS 'score'",
    "comment of an index": f"CREATE TABLE t {TABLE}; COMMENT ON INDEX t_pkey IS 'key'",
    "replica identity": f"CREATE TABLE t {TABLE}; ALTER TABLE t REPLICA IDENTITY FULL",
    "publication": f"CREATE TABLE t {TABLE}; CREATE PUBLICATION p FOR TABLE t",
    "publication of all": f"CREATE TABLE t {TABLE}; CREATE PUBLICATION p FOR ALL TABLES",
    "statistics": f"CREATE TABLE t {TABLE}; CREATE STATISTICS s ON id, y FROM t",
    "statistics of a column": f"CREATE TABLE t {TABLE}; ALTER TABLE t ALTER y SET STATISTICS 777",
    "unlogged": f"CREATE UNLOGGED TABLE t {TABLE}",
    "not valid": f"CREATE TABLE t {TABLE}; ALTER TABLE t ADD CONSTRAINT pos CHECK (y >= 0) NOT VALID",
    "generated": f"CREATE TABLE t {TABLE}; ALTER TABLE t ADD z double precision GENERATED ALWAYS AS (y * 2) STORED",
    "deferred": "CREATE TABLE t (id bigint UNIQUE DEFERRABLE INITIALLY DEFERRED, y double precision, label text)",
    "own reference": f"CREATE TABLE t {TABLE}; ALTER TABLE t ADD up bigint REFERENCES t DEFERRABLE INITIALLY DEFERRED",
    "policy": f"CREATE TABLE t {TABLE}; CREATE POLICY p ON t USING (true); ALTER TABLE t ENABLE ROW LEVEL SECURITY",
}
ABOUT = """
SELECT concat(reloptions, relpersistence, relreplident, relrowsecurity) FROM pg_class WHERE oid = 't'::regclass
UNION ALL SELECT concat(x.indexrelid::regclass, pg_get_indexdef(x.indexrelid), obj_description(x.indexrelid))
    FROM pg_index x WHERE x.indrelid = 't'::regclass
UNION ALL SELECT conname || pg_get_constraintdef(oid) FROM pg_constraint WHERE conrelid = 't'::regclass
UNION ALL SELECT rulename FROM pg_rules WHERE tablename = 't'
UNION ALL SELECT policyname FROM pg_policies WHERE tablename = 't'
UNION ALL SELECT concat(objsubid, description) FROM pg_description WHERE objoid = 't'::regclass
UNION ALL SELECT concat(attname, attstattarget, attidentity, attgenerated, pg_get_expr(d.adbin, d.adrelid))
    FROM pg_attribute a LEFT JOIN pg_attrdef d ON d.adrelid = attrelid AND d.adnum = attnum
    WHERE attrelid = 't'::regclass AND attnum > 0 AND NOT attisdropped
UNION ALL SELECT relname FROM pg_class WHERE relkind = 'S' AND relnamespace = 'area'::regnamespace
UNION ALL SELECT stxname FROM pg_statistic_ext WHERE stxrelid = 't'::regclass
UNION ALL SELECT pubname || tablename FROM pg_publication_tables WHERE tablename = 't'
UNION ALL SELECT proname FROM pg_proc WHERE proname = 'f' ORDER BY 1
"""


@pytest.mark.few(8)
@pytest.mark.parametrize("hung", HUNG)
def test_what_hangs_on_a_table_stays(hung: str, postgres: str, database: Any, nights: dict[str, str]) -> None:
    """Whatever it is, the table is replaced, and has it afterwards."""
    database.execute(HUNG[hung])
    before = database.execute(ABOUT).fetchall()
    for name in ("first", "third"):
        gm.deliver(nights[name], f"{postgres}#area.t")
        assert [row[0] for row in database.execute("SELECT id FROM t ORDER BY 1").fetchall()] == list(NIGHTS[name])
    assert database.execute(ABOUT).fetchall() == before


def test_what_a_table_does_when_rows_go_is_not_done(postgres: str, database: Any, nights: dict[str, str]) -> None:
    """A trigger that removes rows of others by hand is no reason to lose them."""
    database.execute(f"CREATE TABLE t {TABLE}; CREATE TABLE notes (about bigint)")
    gm.deliver(nights["first"], f"{postgres}#area.t")
    database.execute("INSERT INTO notes SELECT id FROM t")
    database.execute(
        "CREATE FUNCTION gone() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN DELETE FROM notes WHERE about = old.id; "
        "RETURN old; END $$; CREATE TRIGGER gone AFTER DELETE ON t FOR EACH ROW EXECUTE FUNCTION gone()"
    )
    gm.deliver(nights["second"], f"{postgres}#area.t")
    assert database.execute("SELECT count(*) FROM notes").fetchone() == (12,)
    assert database.execute(ALL).fetchone() == (10, 0, 9, "n2", "n2")


def test_a_table_that_keeps_rows_away(postgres: str, database: Any, nights: dict[str, str]) -> None:
    """By a rule: told, with exit 2, and it is as it was. A view is refused."""
    database.execute(f"CREATE TABLE t {TABLE}")
    gm.deliver(nights["first"], f"{postgres}#area.t")
    database.execute("CREATE RULE none AS ON INSERT TO t WHERE new.id > 5 DO INSTEAD NOTHING")
    with pytest.raises(gm.BadJob, match="10 rows were to be there, and 6 are: triggers or rules of the table"):
        gm.deliver(nights["second"], f"{postgres}#area.t")
    assert database.execute(ALL).fetchone() == (12, 0, 11, "n1", "n1")
    database.execute("CREATE VIEW seen AS SELECT * FROM t")
    with pytest.raises(gm.BadJob, match="is a view, whose rows cannot be replaced"):
        gm.deliver(nights["second"], f"{postgres}#area.seen")


# ---------------------------------------------------------------- what was changed a moment ago


@pytest.mark.parametrize(
    "change", ["ADD owner text DEFAULT 'me'", "ADD CHECK (y >= 0)", "index", "ALTER y TYPE numeric"]
)
def test_postgres_keeps_a_change_between_staging_and_the_switch(
    change: str, postgres: str, database: Any, nights: dict[str, str]
) -> None:
    """The staged rows are of the table that was: it stays, as it is."""
    to = gm.to(f"{postgres}#area.t")
    database.execute("CREATE TABLE t (id bigint, y double precision, label text)")
    gm.deliver(nights["first"], to)
    staged_early(nights["second"], to)
    database.execute("CREATE INDEX own ON t (y)" if change == "index" else f"ALTER TABLE t {change}")
    before = database.execute(ABOUT).fetchall()
    if "TYPE" in change:
        with pytest.raises(gm.BadJob, match="column 'y' is numeric"):
            gm.deliver(nights["second"], to)
    else:
        gm.deliver(nights["second"], to)
        assert database.execute(ALL).fetchone() == (10, 0, 9, "n2", "n2")
    assert database.execute(ABOUT).fetchall() == before


@pytest.mark.parametrize(
    "change", ["CREATE INDEX own ON t (y)", "CREATE VIEW o AS SELECT id FROM t", "ALTER TABLE t ADD o int"]
)
def test_postgres_keeps_a_change_right_before_the_last_step(
    change: str, postgres: str, database: Any, nights: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the staging table got was of the table that was; from then on a lock keeps changes out."""
    database.execute(f"CREATE TABLE t {TABLE}")
    gm.deliver(nights["first"], f"{postgres}#area.t")
    keep, before = Server.keep, []

    def late(self: Server, session: Any, load: Any) -> None:
        database.execute(change)
        before.append(database.execute(ABOUT).fetchall())
        keep(self, session, load)

    monkeypatch.setattr(Server, "keep", late)
    gm.deliver(nights["second"], f"{postgres}#area.t")
    assert [database.execute(ABOUT).fetchall()] == before
    assert database.execute(ALL).fetchone() == (10, 0, 9, "n2", "n2")


@pytest.mark.parametrize("store", ["duckdb", "sqlite"])
def test_files_keep_a_change_between_staging_and_the_switch(store: str, tmp_path: Path, nights: dict[str, str]) -> None:
    """A column that was added stays; one that was removed does not come back."""
    to = gm.to(f"{store}://{tmp_path}/file#t")
    gm.deliver(nights["first"], to)
    for n, change in enumerate(('ADD COLUMN "own" text', 'DROP COLUMN "own"')):
        name = ("second", "third")[n]
        staged_early(nights[name], to)
        connect = sqlite3.connect if store == "sqlite" else duckdb_client.connect
        with contextlib.closing(connect(str(tmp_path / "file"))) as db:
            db.execute(f"ALTER TABLE t {change}")
            db.commit()
        gm.deliver(nights[name], to)
        with contextlib.closing(connect(str(tmp_path / "file"))) as db:
            columns = [about[0] for about in db.execute("SELECT * FROM t").description]
            assert db.execute("SELECT count(*), min(label) FROM t").fetchall() == [(10, f"n{n + 2}")]
        assert columns == ["id", "y", "label", *(["own"] if n == 0 else [])]


def test_a_snapshot_that_is_older_than_the_switch(postgres: str, database: Any, nights: dict[str, str]) -> None:
    """Where rows are replaced in place, a transaction that began before sees the old ones, as it has not looked yet."""
    database.execute(f"CREATE TABLE t {TABLE}; CREATE VIEW o AS SELECT * FROM t")
    gm.deliver(nights["first"], f"{postgres}#area.t")
    with psycopg.connect(postgres, options="-c search_path=area") as reader:
        reader.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        reader.execute("SELECT 1")
        gm.deliver(nights["second"], f"{postgres}#area.t")
        assert reader.execute(ALL).fetchone() == (12, 0, 11, "n1", "n1")
    assert database.execute(ALL).fetchone() == (10, 0, 9, "n2", "n2")


# ---------------------------------------------------------------- rights


@pytest.fixture
def role(postgres: str, database: Any) -> Iterator[str]:
    """The address of the database for a role that may log in, and nothing else."""
    database.execute("CREATE ROLE weak LOGIN")
    yield postgres.replace("postgres:@", "weak@", 1)
    database.execute("DROP OWNED BY weak")
    database.execute("DROP ROLE weak")


def test_rights_that_are_missing_are_told_before_anything_is_scored(role: str, database: Any, tmp_path: Path) -> None:
    """Each with what to grant; then the delivery is made."""
    database.execute(f"CREATE TABLE t {TABLE}")
    for way in (
        'GRANT USAGE, CREATE ON SCHEMA "area" TO weak',
        'GRANT SELECT, INSERT, DELETE ON "area"."t" TO weak',
    ):
        with pytest.raises(gm.BadJob) as told:
            job(tmp_path / "out", range(4), deliver=[f"{role}#area.t"]).run()
        assert way in str(told.value)
        assert not (tmp_path / "out" / "_SUCCESS").exists()
        database.execute(way)
    with pytest.raises(gm.BadJob, match="an index of 'label' cannot be added, as another role owns the table"):
        job(tmp_path / "out", range(4), deliver=[gm.to(f"{role}#area.t", index={"label": "btree"})]).run()
    job(tmp_path / "out", range(4), deliver=[gm.to(f"{role}#area.t", key="id")]).run()
    assert database.execute(ALL).fetchone() == (4, 0, 3, "n1", "n1")


def test_a_reader_is_told_what_to_grant(role: str, postgres: str, database: Any, nights: dict[str, str]) -> None:
    """Who may read the table alone cannot know how its rows were delivered."""
    gm.deliver(nights["first"], gm.to(f"{postgres}#area.t", key="id"))
    database.execute("GRANT SELECT ON t TO weak; GRANT USAGE ON SCHEMA area TO weak")
    with gm.lookup(f"{role}#area.t") as lookup:
        with pytest.raises(gm.BadJob, match=r'GRANT SELECT ON "area"\."gristmill_marks" TO weak'):
            lookup.get(3)
        database.execute('GRANT SELECT ON "area"."gristmill_marks" TO weak')
        assert lookup.get(3) == {"id": 3, "y": 3.0, "label": "n1"}


def test_nobody_gets_a_right_by_a_replace(role: str, postgres: str, database: Any, nights: dict[str, str]) -> None:
    """Rights that new tables have by default are not those of this one."""
    gm.deliver(nights["first"], f"{postgres}#area.t")
    database.execute("ALTER DEFAULT PRIVILEGES IN SCHEMA area GRANT SELECT ON TABLES TO weak")
    rights = "SELECT has_table_privilege('weak', 't', 'SELECT'), 't'::regclass::oid::int"
    before = database.execute(rights).fetchone()
    gm.deliver(nights["second"], f"{postgres}#area.t")
    after = database.execute(rights).fetchone()
    database.execute("ALTER DEFAULT PRIVILEGES IN SCHEMA area REVOKE SELECT ON TABLES FROM weak")
    assert (before[0], after[0]) == (False, False) and before[1] != after[1]


# ---------------------------------------------------------------- others keep it locked


@pytest.mark.parametrize("mode", ["append", "upsert", "replace"])
@pytest.mark.parametrize("theirs", ["SELECT count(*) FROM area.locked", "UPDATE area.locked SET label = 'theirs'"])
def test_a_table_that_somebody_keeps_locked(
    theirs: str,
    mode: Any,
    postgres: str,
    database: Any,
    nights: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step that changes the table gives up after a while, so that those who wait behind it go on; then it is made."""
    monkeypatch.setattr("gristmill.stores.postgres.LOCKED", "150ms")
    database.execute("CREATE TABLE locked (id bigint, label text)")
    if mode == "replace":
        database.execute("CREATE VIEW beside AS SELECT id FROM locked")  # its rows are replaced, and a column is added
    to, sink = gm.to(f"{postgres}#area.locked", mode=mode, key="id", evolve=True), str(tmp_path / "sink")
    shutil.copytree(nights["first"], sink)
    database.execute("INSERT INTO locked VALUES (1, 'theirs')")
    with psycopg.connect(postgres, options="-c idle_in_transaction_session_timeout=4s") as other:
        other.execute(theirs)
        with pytest.raises(gm.RunFailed, match=r"area\.locked: Postgres says: canceling statement due to lock timeout"):
            gm.deliver(sink, to)
        assert database.execute("SELECT count(*), max(label) FROM locked").fetchone() == (1, "theirs")
    gm.deliver(sink, to)
    count = {"append": 13, "upsert": 12, "replace": 12}[mode]
    assert database.execute("SELECT count(*), count(y) FROM locked").fetchone() == (count, 12)
