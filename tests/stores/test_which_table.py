"""Which table of a database the marks of deliveries are of, whatever its name is now: each row comes to it once."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import shops
from test_marks_that_are_lost import ANOTHER, AWAY, BACK, DATABASES, copied, job, ran

import gristmill as gm


@pytest.fixture(params=DATABASES)
def base(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[shops.Shop, str]]:
    """A database without rows, and the address of its server."""
    server = request.getfixturevalue(shops.SERVERS[request.param]) if request.param in shops.SERVERS else ""
    with shops.SHOPS[request.param](server, tmp_path) as shop:
        yield shop, server


def night(shop: shops.Shop, sink: Path, first: int, *more: int, name: str = "scores", **how: Any) -> int:
    """Run the job of a sink with a new file of these ids; how many rows were delivered."""
    to = gm.to(shop.address(name), **{"mode": "append", **how})
    return job(sink, [first, *more], on_new_files="append", deliver=[to]).run().deliveries[-1].rows


def test_one_that_is_put_back_with_as_many_rows(base: tuple[shops.Shop, str], tmp_path: Path) -> None:
    """As marks tell of another one that was made in its place: their number tells nothing, and no row comes twice."""
    shop, server = base
    for sink, ids in (("one", [1, 2]), ("other", [7, 8])):
        night(shop, tmp_path / sink, *ids)
    ran(shop, server, tmp_path, *AWAY)
    night(shop, tmp_path / "one", 3, 4)
    ran(shop, server, tmp_path, *BACK)
    assert night(shop, tmp_path / "other", 9) == 1
    with gm.lookup(shop.address("scores"), "id") as lookup:  # which refuses keys that repeat
        assert None not in lookup.get_many([1, 2, 7, 8, 9])


@pytest.mark.parametrize("mode", ["upsert", "replace"])
def test_one_that_another_sink_has_made_anew(mode: str, base: tuple[shops.Shop, str], tmp_path: Path) -> None:
    """Once it was dropped, nights ago: it was made without rows of this one, which brings all, whatever is there."""
    shop, server = base
    night(shop, tmp_path / "one", 1, mode=mode, key="id")
    night(shop, tmp_path / "other", 7)
    ran(shop, server, tmp_path, "DROP TABLE scores")
    for new in (2, 3):
        night(shop, tmp_path / "one", new, mode=mode, key="id")
    ran(shop, server, tmp_path, "INSERT INTO scores SELECT 99, y, v FROM scores WHERE id = 3")
    assert night(shop, tmp_path / "other", 8) == 2
    assert sorted(shop.seen("scores") or ()) == [1, 2, 3, 7, 8, 99]


def test_one_that_gets_another_name(base: tuple[shops.Shop, str], tmp_path: Path) -> None:
    """And so does its address: its marks go with it, those of other sinks too, and back again."""
    shop, server = base
    names = ("scores", "second", "scores")
    for number, name in enumerate(names):
        if number:
            ran(shop, server, tmp_path, f"ALTER TABLE {names[number - 1]} RENAME TO {name}")
        for sink, first in (("one", 1), ("other", 101)):
            assert night(shop, tmp_path / sink, first + number, name=name) == 1
    assert sorted(shop.seen("scores") or ()) == [1, 2, 3, 101, 102, 103]


@pytest.mark.parametrize("how", [{"mode": "upsert", "key": "id"}, {"index": {"id": {}}}], ids=["key", "index"])
def test_one_that_is_kept_each_month(how: dict[str, Any], base: tuple[shops.Shop, str], tmp_path: Path) -> None:
    """Under another name: its index goes with it, and has a name that the next one's gets not."""
    shop, server = base
    if shop.name == "duckdb" and "index" in how:
        pytest.skip("DuckDB renames no table that has indices")
    if shop.name == "postgresql" and "index" in how:
        how = {"index": {"id": "btree"}}
    for month in range(1, 5):
        assert night(shop, tmp_path, month, **how) == month
        ran(shop, server, tmp_path, f"ALTER TABLE scores RENAME TO scores_{month}")


SWAP = ("ALTER TABLE scores RENAME TO z", "ALTER TABLE second RENAME TO scores", "ALTER TABLE z RENAME TO second")
BY_A_SCRIPT = {
    "sqlite": "CREATE TABLE scores (id INTEGER, y INTEGER, v BLOB)",
    "duckdb": "CREATE TABLE scores (id BIGINT, y BIGINT, v FLOAT[2])",
    "postgresql": "CREATE TABLE scores (id bigint, y bigint, v real[])",
}


def once(shop: shops.Shop, name: str, ids: list[int]) -> None:
    """Raises unless a table has a row of each of these ids, and no other."""
    assert sorted(shop.seen(name) or ()) == ids
    with gm.lookup(shop.address(name), "id") as lookup:  # which refuses keys that repeat
        assert None not in lookup.get_many(ids)


def test_one_that_is_kept_and_delivered_to_later(base: tuple[shops.Shop, str], tmp_path: Path) -> None:
    """Under its new name, by the job that has made another of the old one meanwhile: it has what was in it."""
    shop, server = base
    night(shop, tmp_path, 1, 2)
    ran(shop, server, tmp_path, "ALTER TABLE scores RENAME TO second")
    assert night(shop, tmp_path, 3) == 3
    assert night(shop, tmp_path, 4, name="second") == 2
    once(shop, "second", [1, 2, 3, 4])
    ran(shop, server, tmp_path, "DROP TABLE scores", "ALTER TABLE second RENAME TO scores")
    assert night(shop, tmp_path, 5) == 1


def test_one_that_is_made_anew_each_night(
    base: tuple[shops.Shop, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Leaves a few marks of those that are gone, which may be put back, and all of those that are there."""
    monkeypatch.setattr("gristmill.stores.tablemarks._REMEMBERED", 2, raising=False)
    shop, server = base
    for sink, first in (("other", 90), ("one", 1)):
        night(shop, tmp_path / sink, first)
    ran(shop, server, tmp_path, "ALTER TABLE scores RENAME TO second")
    for new in range(2, 7):
        ran(shop, server, tmp_path, "DROP TABLE IF EXISTS scores")
        assert night(shop, tmp_path / "one", new) == new
    few = "CREATE TABLE few (n INTEGER CHECK (n = 5))", "INSERT INTO few SELECT count(*) FROM gristmill_marks"
    ran(shop, server, tmp_path, *few)
    assert [night(shop, tmp_path / "other", 91, name="second"), night(shop, tmp_path / "one", 7, name="second")] == [
        1,
        6,
    ]
    once(shop, "second", [*range(1, 8), 90, 91])


def test_two_that_swap_their_names(base: tuple[shops.Shop, str], tmp_path: Path) -> None:
    """Each keeps its own marks, those of other sinks among them, whichever is delivered to first."""
    shop, server = base
    night(shop, tmp_path / "third", 21)
    for name in ("scores", "second"):
        night(shop, tmp_path / "one", 1, 2, name=name)
    for new, names in ((3, ("scores", "second")), (4, ("second", "scores"))):
        ran(shop, server, tmp_path, *SWAP)
        assert [night(shop, tmp_path / "one", new, name=name) for name in names] == [1, 1]
    assert night(shop, tmp_path / "third", 22) == 1
    once(shop, "scores", [1, 2, 3, 4, 21, 22])
    once(shop, "second", [1, 2, 3, 4])


def test_one_that_does_not_tell(base: tuple[shops.Shop, str], tmp_path: Path) -> None:
    """And is put back after another was made by its name: that it has as many rows as that one had says nothing."""
    shop, server = base
    ran(shop, server, tmp_path, BY_A_SCRIPT[shop.name])
    for sink, ids in (("one", [1, 2]), ("other", [7, 8])):
        night(shop, tmp_path / sink, *ids)
    ran(shop, server, tmp_path, *AWAY)
    assert night(shop, tmp_path / "other", 9, 10) == 4
    ran(shop, server, tmp_path, *BACK)
    if shop.name == "postgresql":  # which tells of all
        assert night(shop, tmp_path / "one", 3) == 1
        return
    for sink in ("one", "other"):
        with pytest.raises(gm.BadJob, match="cannot be told: the table is another one"):
            night(shop, tmp_path / sink, 13)
    assert night(shop, tmp_path / "one", 14, mode="replace") == 4
    assert night(shop, tmp_path / "one", 15) == 1


def test_a_copy_that_is_put_back(base: tuple[shops.Shop, str], tmp_path: Path) -> None:
    """It tells nothing, and marks by its name are of two tables: none of them counts."""
    shop, server = base
    night(shop, tmp_path / "one", 1, 2)
    ran(shop, server, tmp_path, "CREATE TABLE kept AS SELECT * FROM scores", "DROP TABLE scores")
    night(shop, tmp_path / "other", 7, 8)
    ran(shop, server, tmp_path, *BACK)
    for sink in ("one", "other"):
        with pytest.raises(gm.BadJob, match="cannot be told: the table is another one"):
            night(shop, tmp_path / sink, 13)


def test_one_of_others_that_is_renamed(base: tuple[shops.Shop, str], tmp_path: Path) -> None:
    """It has no marks of its own: as the one that was delivered to is gone, it may be that, and gets no row twice."""
    shop, server = base
    ran(shop, server, tmp_path, BY_A_SCRIPT[shop.name])
    night(shop, tmp_path, 1, 2)
    ran(shop, server, tmp_path, "ALTER TABLE scores RENAME TO second")
    if shop.name == "postgresql":  # which tells of all
        assert night(shop, tmp_path, 3, name="second") == 1
        return
    with pytest.raises(gm.BadJob, match=r"delivered to .*#scores at .*, which is not there any more: if this is that"):
        night(shop, tmp_path, 3, name="second")
    ran(shop, server, tmp_path, "ALTER TABLE second RENAME TO scores")
    assert night(shop, tmp_path, 4) == 2


def test_one_of_others_that_is_renamed_and_moved(base: tuple[shops.Shop, str], tmp_path: Path) -> None:
    """To another file, or with all of its schema to another server: no receipt names that one, but its marks are there.
    Where it is told that the table is another one than the one that is gone, all rows come.
    """
    shop, server = base
    moved = shop.address("second").replace("/shop.", "/moved.")
    if shop.name != "postgresql":
        ran(shop, server, tmp_path, BY_A_SCRIPT[shop.name])
    night(shop, tmp_path, 1, 2)
    ran(shop, server, tmp_path, "ALTER TABLE scores RENAME TO second")
    if shop.name == "postgresql":
        ran(shop, server, tmp_path, *copied("second"), *copied("gristmill_marks"))
    else:
        (tmp_path / f"shop.{shop.name}").rename(tmp_path / f"moved.{shop.name}")
    nightly = job(tmp_path, [3], on_new_files="append", deliver=[gm.to(moved, mode="append")])
    with pytest.raises(gm.BadJob, match=r"delivered to a table scores of .*, which is not there any more: if this is"):
        nightly.run()
    if shop.name == "postgresql":
        night(shop, tmp_path, 4, name="third")
        ran(shop, server, tmp_path, "DROP TABLE third", BY_A_SCRIPT[shop.name].replace("scores", "fourth"))
        ran(shop, server, tmp_path, "DELETE FROM gristmill_marks WHERE target = 'scores'")
        ran(shop, server, tmp_path, "INSERT INTO fourth (id) VALUES (9)")
        assert night(shop, tmp_path, 5, name="fourth") == 5


def test_one_of_postgres_in_another_schema(postgres: str, tmp_path: Path) -> None:
    """To which it was moved: its marks follow, and none stays behind."""
    with shops.SHOPS["postgresql"](postgres, tmp_path) as shop:
        for sink, ids in (("one", [1, 2]), ("other", [7, 8])):
            night(shop, tmp_path / sink, *ids)
        schema = shop.address("scores").partition("#")[2].partition(".")[0]
        moved = shop.address("scores").replace(f"#{schema}.", f"#{schema}_2.")
        statements = (f"CREATE SCHEMA {schema}_2", f"ALTER TABLE scores SET SCHEMA {schema}_2")
        ran(shop, postgres, tmp_path, *statements)
        try:
            with gm.lookup(moved, "id") as lookup:
                assert lookup.get(7)["v"] == [1.0, 7.0]
            to = gm.to(moved, mode="append")
            for sink, new in (("one", 3), ("other", 9), ("one", 4)):
                nightly = job(tmp_path / sink, [new], on_new_files="append", deliver=[to])
                assert nightly.run().deliveries[-1].rows == 1 and gm.verify(nightly).ok
            ran(shop, postgres, tmp_path, f"ALTER TABLE {schema}_2.scores SET SCHEMA {schema}")
            assert night(shop, tmp_path / "other", 10) == 1
            once(shop, "scores", [1, 2, 3, 4, 7, 8, 9, 10])
        finally:
            ran(shop, postgres, tmp_path, f"DROP SCHEMA {schema}_2 CASCADE")


def test_one_of_postgres_whose_marks_stay_behind(postgres: str, tmp_path: Path) -> None:
    """In a schema that may not be read any more, when it is moved to another one: it gets no row twice."""
    with shops.SHOPS["postgresql"](postgres, tmp_path) as shop:
        night(shop, tmp_path, 1, 2)
        schema = shop.address("scores").partition("#")[2].partition(".")[0]
        moved = gm.to(shop.address("scores").replace(f"#{schema}.", f"#{schema}_2."), mode="append")
        ran(shop, postgres, tmp_path, f"CREATE SCHEMA {schema}_2", f"ALTER TABLE scores SET SCHEMA {schema}_2")
        ran(shop, postgres, tmp_path, "DROP TABLE gristmill_marks")
        try:
            with pytest.raises(
                gm.BadJob, match=r"holds 2 rows, and no mark .*scores at .*, which is not there any more"
            ):
                job(tmp_path, [3], on_new_files="append", deliver=[moved]).run()
        finally:
            ran(shop, postgres, tmp_path, f"DROP SCHEMA {schema}_2 CASCADE")


@contextmanager
def others(shop: shops.Shop, server: str, columns: str, *statements: str) -> Iterator[None]:
    """A schema of others with a table of the name of marks, and an open transaction that changes it."""
    import psycopg

    schema = shop.address("scores").partition("#")[2].partition(".")[0]
    with psycopg.connect(server, autocommit=True) as db:
        db.execute(f"CREATE SCHEMA {schema}_others")
        db.execute(f"CREATE TABLE {schema}_others.gristmill_marks ({columns})")
        try:
            with db.transaction():
                for sql in statements:
                    db.execute(f"SET LOCAL search_path = {schema}_others")
                    db.execute(sql)
                yield
        finally:
            db.execute(f"DROP SCHEMA {schema}_others CASCADE")


def test_marks_of_others_in_postgres(postgres: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Are theirs: that they are locked, dropped, or something else of the name keeps nobody elsewhere from his rows."""
    monkeypatch.setattr("gristmill.stores.pgtable._WAITS", "50ms")
    with shops.SHOPS["postgresql"](postgres, tmp_path) as shop:
        night(shop, tmp_path, 1)
        dropped = ("target text, which text, sink text, body text", "DROP TABLE gristmill_marks")
        with others(shop, postgres, *dropped), gm.lookup(shop.address("scores"), "id") as lookup:
            assert lookup.get(1)["y"] == 1
            assert night(shop, tmp_path, 2) == 1
        ran(shop, postgres, tmp_path, BY_A_SCRIPT[shop.name].replace("scores", "second"))
        with others(shop, postgres, *dropped):
            with gm.lookup(shop.address("second"), "id") as lookup:  # which has no marks yet, here at least
                assert lookup.get_many([1]) == [None]
            with pytest.raises(gm.GristmillError, match=r"_others\.gristmill_marks is locked by others, and marks of"):
                night(shop, tmp_path, 3, name="second")
        with others(shop, postgres, "which bytea"):
            assert night(shop, tmp_path, 4, name="second") == 4


@pytest.mark.parametrize("mode", ["replace", "append", "upsert"])
def test_marks_of_others_beside_a_table_that_is_made(
    mode: str, postgres: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this delivery: there are none of it in any schema yet, so that nobody's lock is in its way."""
    monkeypatch.setattr("gristmill.stores.pgtable._WAITS", "50ms")
    with shops.SHOPS["postgresql"](postgres, tmp_path) as shop:
        theirs = "target text, which text, sink text, body text", "LOCK TABLE gristmill_marks"
        with others(shop, postgres, *theirs):
            for number in (1, 2):
                rows = night(shop, tmp_path, number, mode=mode, key="id" if mode == "upsert" else ())
                assert rows == (number if mode == "replace" else 1)


def test_one_of_postgres_that_was_moved_while_its_marks_are_locked(
    postgres: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Is not read as if there were none: its values would be of other types, and its key not known."""
    import psycopg

    monkeypatch.setattr("gristmill.stores.pgtable._WAITS", "50ms")
    with shops.SHOPS["postgresql"](postgres, tmp_path) as shop:
        night(shop, tmp_path, 1, mode="upsert", key="id")
        schema = shop.address("scores").partition("#")[2].partition(".")[0]
        moved = shop.address("scores").replace(f"#{schema}.", f"#{schema}_2.")
        ran(shop, postgres, tmp_path, f"CREATE SCHEMA {schema}_2", f"ALTER TABLE scores SET SCHEMA {schema}_2")
        try:
            with gm.lookup(moved, "id") as lookup, psycopg.connect(postgres) as db:
                db.execute(f"LOCK TABLE {schema}.gristmill_marks")
                with pytest.raises(gm.GristmillError, match="gristmill_marks is locked by others, and marks of this"):
                    lookup.get(1)
                db.rollback()
                assert lookup.get(1) is not None and lookup.generation == 1
        finally:
            ran(shop, postgres, tmp_path, f"DROP SCHEMA {schema}_2 CASCADE")


def test_a_database_of_many_schemas(postgres: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is asked with as many statements as one of few, for a table that has no marks."""
    from gristmill.stores.pgsession import Transaction

    plain, asked = Transaction.run, [0]

    def counting(session: Transaction, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        asked[0] += 1
        return plain(session, sql, *values)

    monkeypatch.setattr(Transaction, "run", counting)
    with shops.SHOPS["postgresql"](postgres, tmp_path) as shop:
        schema = shop.address("scores").partition("#")[2].partition(".")[0]
        ran(shop, postgres, tmp_path, BY_A_SCRIPT[shop.name])
        found = []
        try:
            for n in range(6):
                columns = "target text, which text, sink text, body text"
                more = f"CREATE SCHEMA {schema}_{n}", f"CREATE TABLE {schema}_{n}.gristmill_marks ({columns})"
                ran(shop, postgres, tmp_path, *more)
                with gm.lookup(shop.address("scores"), "id") as lookup:
                    asked[0] = 0
                    assert lookup.get(1) is None
                    found.append(asked[0])
        finally:
            ran(shop, postgres, tmp_path, *(f"DROP SCHEMA IF EXISTS {schema}_{n} CASCADE" for n in range(6)))
        assert len(set(found)) == 1


def test_marks_of_many_sinks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one table cost each delivery a few statements, and each sink's mark a few comparisons; a lookup reads none
    that it has read.
    """
    from gristmill.stores.contract import Mark
    from gristmill.stores.sqlite import Transaction

    many, counted = 100, {"load": 0, "__eq__": 0, "run": 0}

    def counts(of: Any, name: str) -> None:
        plain = getattr(of, name)

        def counting(*values: Any) -> Any:
            counted[name] += 1
            return plain(*values)

        monkeypatch.setattr(of, name, counting)

    with shops.SHOPS["sqlite"]("", tmp_path) as shop:
        night(shop, tmp_path, 1)
        more = (
            "INSERT INTO gristmill_marks WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE "
            f"i < {many}) SELECT target, which, printf('g0001-%08x', i), json_set(body, '$.sink', "
            "printf('g0001-%08x', i), '$.total', 0) FROM gristmill_marks, n"
        )
        ran(shop, "", tmp_path, more)
        for of, name in ((Mark, "load"), (Mark, "__eq__"), (Transaction, "run")):
            counts(of, name)
        assert night(shop, tmp_path, 2) == 1
        assert counted["__eq__"] < 20 * many and counted["run"] < 2 * many
        with gm.lookup(shop.address("scores"), "id") as lookup:
            assert lookup.get(1) is not None
            counted["load"] = 0
            assert lookup.get(2) is not None
            assert counted["load"] == 0


def test_another_table_of_postgres_that_is_not_there(postgres: str, tmp_path: Path) -> None:
    """Is told as what it is: it is not the one that was to be looked at."""
    with shops.SHOPS["postgresql"](postgres, tmp_path) as shop:
        night(shop, tmp_path, 1)
        body = "'BEGIN RETURN QUERY SELECT * FROM nowhere; END'"
        made = f"CREATE FUNCTION gone() RETURNS SETOF scores LANGUAGE plpgsql AS {body}"
        ran(shop, postgres, tmp_path, made, "CREATE VIEW second AS SELECT * FROM gone()")
        for name, error, why in (
            ("second", gm.GristmillError, 'relation "nowhere" does not exist'),
            ("third", gm.BadSource, "has no such table: deliver"),
        ):
            with gm.lookup(shop.address(name), "id") as lookup, pytest.raises(error, match=why):
                lookup.get(1)


def test_one_of_postgres_that_gets_the_name_meanwhile(postgres: str, tmp_path: Path) -> None:
    """While the last step waits for whoever gives it the name: rows come to neither of both but as that one's own."""
    import psycopg

    with shops.SHOPS["postgresql"](postgres, tmp_path) as shop:
        for name in ("scores", "second"):
            night(shop, tmp_path, 1, 2, name=name)
        ran(shop, postgres, tmp_path, "CREATE TABLE empty (LIKE second)")
        schema = shop.address("scores").partition("#")[2].partition(".")[0]
        waits = "SELECT 1 FROM pg_locks WHERE NOT granted AND relation = to_regclass('kept')"
        with psycopg.connect(postgres, options=f"-c search_path={schema}") as db:
            db.execute("ALTER TABLE scores RENAME TO kept")
            db.execute("ALTER TABLE empty RENAME TO scores")

            def let_go() -> None:
                for _ in range(400):
                    if db.execute(waits).fetchall():
                        break
                    time.sleep(0.02)
                db.commit()

            other = threading.Thread(target=let_go)
            other.start()
            try:
                night(shop, tmp_path, 3)
            except gm.GristmillError:  # the place of rows that were chosen for another table
                pass
            finally:
                other.join()
        assert sorted(shop.seen("kept") or ()) == [1, 2]
        night(shop, tmp_path, 4)
        once(shop, "scores", [1, 2, 3, 4])


def valued(shop: shops.Shop, sink: Path, name: str, kind: str, value: Callable[[int], Any], **how: Any) -> int:
    """Run a job of two rows, or one more each night, that returns values of a type."""
    (sink / "in").mkdir(parents=True, exist_ok=True)
    number = len(list((sink / "in").iterdir())) + 1
    pq.write_table(pa.table({"id": pa.array([number, -number], pa.int64())}), sink / "in" / f"{number}.parquet")
    model = gm.model(lambda batch: {"y": [value(i) for i in batch["id"]]}, returns={"y": kind})
    to = gm.to(shop.address(name), **how)
    kept = gm.sink(str(sink / "out"), keep=["id"])
    made = gm.Job(str(sink / "in"), model, kept, workers=0, on_new_files="append", deliver=[to])
    return made.run().deliveries[-1].rows


def test_whoever_reads_follows_the_table(base: tuple[shops.Shop, str], tmp_path: Path) -> None:
    """Values are read as those of its own marks, and found by their key, whatever name it has by now."""
    shop, server = base
    how = {"mode": "upsert", "key": "id"}
    valued(shop, tmp_path / "one", "scores", "bool", lambda i: i > 0, **how)
    valued(shop, tmp_path / "other", "second", "int64", lambda i: 5 * i, **how)
    ran(shop, server, tmp_path, "ALTER TABLE scores RENAME TO third", "ALTER TABLE second RENAME TO scores")
    for name, values in (("scores", [5, -5]), ("third", [True, False])):
        with gm.lookup(shop.address(name)) as lookup:
            found = [row["y"] for row in lookup.get_many([1, -1])]
        assert found == values and list(map(type, found)) == list(map(type, values))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("sqlite", ("UPDATE scores SET y = 'a'",)),
        ("postgresql", ("ALTER TABLE scores ALTER y TYPE text", "UPDATE scores SET y = 'a'")),
    ],
)
def test_values_of_another_type(
    name: str, change: tuple[str, ...], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Which others have put into a column: that is said, and of which."""
    server = request.getfixturevalue(shops.SERVERS[name]) if name in shops.SERVERS else ""
    with shops.SHOPS[name](server, tmp_path) as shop:
        valued(shop, tmp_path, "scores", "int64", lambda i: i, key="id")
        ran(shop, server, tmp_path, *change)
        with (
            gm.lookup(shop.address("scores")) as lookup,
            pytest.raises(gm.BadSource, match="column 'y' has values that"),
        ):
            lookup.get(1)


def test_types_of_another_of_the_name(base: tuple[shops.Shop, str], tmp_path: Path) -> None:
    """Refuse nothing: what was delivered to the table that is there counts."""
    shop, server = base
    kinds: dict[str, tuple[str, Callable[[int], Any]]] = {
        "one": ("struct<a: int64>", lambda i: {"a": i}),
        "other": ("struct<b: string>", lambda i: {"b": str(i)}),
    }
    for sink, name in (("one", "scores"), ("other", "second")):
        valued(shop, tmp_path / sink, name, *kinds[sink], mode="append")
    ran(shop, server, tmp_path, "ALTER TABLE scores RENAME TO third", "ALTER TABLE second RENAME TO scores")
    for sink, name in (("other", "scores"), ("one", "third")):
        assert valued(shop, tmp_path / sink, name, *kinds[sink], mode="append") == 2


def comments(address: str) -> list[Any]:
    """What people may say of a table."""
    import duckdb

    with duckdb.connect(address.partition("://")[2].partition("#")[0]) as db:
        sql = "SELECT comment FROM duckdb_tables() WHERE table_name = 'scores'"
        return [row[0] for row in db.execute(sql).fetchall()]


def test_a_comment_of_others_in_duckdb(tmp_path: Path) -> None:
    """Stays, whatever is delivered: the table has no witness then, and marks are of whichever has its name."""
    with shops.SHOPS["duckdb"]("", tmp_path) as shop:
        night(shop, tmp_path, 1)
        assert comments(shop.address("scores"))[0].startswith("gristmill ")
        ran(shop, "", tmp_path, "COMMENT ON TABLE scores IS 'ours'")
        assert night(shop, tmp_path, 2) == 1
        night(shop, tmp_path, 3, mode="replace")
        assert comments(shop.address("scores")) == ["ours"]
        assert night(shop, tmp_path, 4) == 1


@pytest.mark.parametrize("name", ["sqlite", "duckdb"])
def test_what_keeps_a_witness(name: str, tmp_path: Path) -> None:
    """Whatever is done to the table, it is the same one: marks of it hold under its next name."""
    with shops.SHOPS[name]("", tmp_path) as shop:
        night(shop, tmp_path, 1)
        altered = ("ADD COLUMN more INTEGER", "DROP COLUMN more", "DROP COLUMN y", "ADD COLUMN y BIGINT")
        ran(shop, "", tmp_path, *(f"ALTER TABLE scores {how}" for how in (*altered, "RENAME TO second")))
        assert night(shop, tmp_path, 2, name="second") == 1


def test_one_of_postgres_on_another_server(postgres: str, tmp_path: Path) -> None:
    """To which all was restored, where numbers of tables say nothing: its marks hold."""
    with shops.SHOPS["postgresql"](postgres, tmp_path) as shop:
        night(shop, tmp_path, 1)
        number = "(SELECT system_identifier FROM pg_control_system())"
        moved = f"UPDATE gristmill_marks SET body = replace(body, {number}::text, '7')"
        ran(shop, postgres, tmp_path, *copied("scores"), moved)
        assert night(shop, tmp_path, 2) == 1
        assert sorted(shop.seen("scores") or ()) == [1, 2]


@pytest.fixture
def unprivileged(postgres: str) -> Iterator[None]:
    """Nobody but a superuser may ask which server this is, as where somebody else runs it."""
    import psycopg

    function = "EXECUTE ON FUNCTION pg_control_system()"
    with psycopg.connect(postgres, autocommit=True) as db:
        db.execute("CREATE ROLE guest LOGIN")
        db.execute(f"REVOKE {function} FROM public")
        try:
            yield
        finally:
            db.execute(f"GRANT {function} TO public")
            db.execute("DROP OWNED BY guest")
            db.execute("DROP ROLE guest")


@pytest.mark.usefixtures("unprivileged")
def test_a_clone_in_postgres_that_others_look_at(postgres: str, tmp_path: Path) -> None:
    """Who may ask for tables alone: its marks are read by everybody."""
    with shops.SHOPS["postgresql"](postgres, tmp_path) as shop:
        night(shop, tmp_path, 1, 2, mode="upsert", key="id")
        schema = shop.address("scores").partition("#")[2].partition(".")[0]
        clone, copy = f"{schema}_clone", "CREATE TABLE {}.{} AS TABLE {}"
        copies = [copy.format(clone, table, table) for table in ("scores", "gristmill_marks")]
        rights = [f"GRANT {what} {clone} TO guest" for what in ("USAGE ON SCHEMA", "SELECT ON ALL TABLES IN SCHEMA")]
        ran(shop, postgres, tmp_path, f"CREATE SCHEMA {clone}", *copies, *rights)
        guest = gm.to(shop.address("scores").replace(f"#{schema}.", f"#{clone}."), options={"user": "guest"})
        try:
            with gm.lookup(guest) as lookup:  # the key is in the mark
                assert lookup.get(2)["v"] == [1.0, 2.0] and lookup.generation == 1
        finally:
            ran(shop, postgres, tmp_path, f"DROP SCHEMA {clone} CASCADE")


def test_one_of_postgres_whose_marks_are_copied_in_their_place(postgres: str, tmp_path: Path) -> None:
    """They are those of the table that is there by another name: one that others made by the name it had has none."""
    with shops.SHOPS["postgresql"](postgres, tmp_path) as shop:
        night(shop, tmp_path, 1, 2)
        renamed = ("ALTER TABLE scores RENAME TO second", BY_A_SCRIPT[shop.name])
        ran(shop, postgres, tmp_path, *copied("gristmill_marks"), *renamed)
        ran(shop, postgres, tmp_path, "INSERT INTO scores (id) VALUES (-1), (-2)")
        with pytest.raises(gm.BadJob, match="cannot be told: the table is another one"):
            night(shop, tmp_path, 3)
        assert night(shop, tmp_path, 4, name="second") == 2
        once(shop, "second", [1, 2, 3, 4])


@pytest.mark.parametrize("stays", ["behind", "here"])
def test_one_of_postgres_that_was_put_aside(stays: str, postgres: str, tmp_path: Path) -> None:
    """A schema that is restored, or cloned, while the original is still there under another name has its own marks."""
    with shops.SHOPS["postgresql"](postgres, tmp_path) as shop:
        night(shop, tmp_path, 1, 2, mode="upsert", key="id")
        schema = shop.address("scores").partition("#")[2].partition(".")[0]
        aside, tables = f"{schema}_aside", ("scores", "gristmill_marks")
        moves = [f"ALTER TABLE {table} SET SCHEMA {aside}" for table in tables]
        copies = [f"CREATE TABLE {table} (LIKE {aside}.{table} INCLUDING ALL)" for table in tables]
        rows = [f"INSERT INTO {table} SELECT * FROM {aside}.{table}" for table in tables]
        swap = [f"ALTER SCHEMA {schema} RENAME TO {schema}_t", f"ALTER SCHEMA {aside} RENAME TO {schema}"]
        back = [*swap, f"ALTER SCHEMA {schema}_t RENAME TO {aside}"] if stays == "here" else []
        ran(shop, postgres, tmp_path, f"CREATE SCHEMA {aside}", *moves, *copies, *rows, *back)
        copy = shop.address("scores").replace(f"#{schema}.", f"#{aside}.") if back else shop.address("scores")
        try:
            with gm.lookup(copy) as lookup:  # the key is in the mark
                assert lookup.get(2)["v"] == [1.0, 2.0] and lookup.generation == 1
            to = gm.to(copy, mode="upsert", key="id")
            nightly = job(tmp_path, [3], on_new_files="append", deliver=[to])
            assert nightly.run().deliveries[-1].rows == 1 and gm.verify(nightly).ok
        finally:
            ran(shop, postgres, tmp_path, f"DROP SCHEMA {aside} CASCADE")


def test_tables_of_sqlite_with_a_dot_in_their_names(tmp_path: Path) -> None:
    """Each is looked for by its whole name: one beside another of the same job is not taken for it, renamed."""
    with shops.SHOPS["sqlite"]("", tmp_path) as shop:
        made = [f'CREATE TABLE "shop.{name}" (id INTEGER, v BLOB, y INTEGER)' for name in "ab"]
        filled = [f"""INSERT INTO "shop.{name}" VALUES (900, NULL, 1)""" for name in "ab"]
        ran(shop, "", tmp_path, *made, *filled)
        to = [gm.to(shop.address(f"shop.{name}"), mode="append") for name in "ab"]
        for number, one in enumerate(to):
            assert job(tmp_path, [number], on_new_files="append", deliver=[one]).run().deliveries[-1].rows == number + 1


def test_a_copy_by_its_own_sql(tmp_path: Path) -> None:
    """In SQLite it has the table's witness: the marks stay the table's, while it is there and when it is gone."""
    with shops.SHOPS["sqlite"]("", tmp_path) as shop:
        for sink, ids in (("one", [1, 2]), ("other", [7, 8])):
            night(shop, tmp_path / sink, *ids)
        with sqlite3.connect(tmp_path / "shop.sqlite") as db:
            ((made,),) = db.execute("SELECT sql FROM sqlite_master WHERE name = 'scores'").fetchall()
        copy = made.replace("scores", "kept", 1)
        ran(shop, "", tmp_path, copy, "INSERT INTO kept SELECT * FROM scores")
        assert night(shop, tmp_path / "one", 3) == 1
        ran(shop, "", tmp_path, "DROP TABLE kept")
        for sink, new in (("one", 4), ("other", 9)):
            assert night(shop, tmp_path / sink, new) == 1
        once(shop, "scores", [1, 2, 3, 4, 7, 8, 9])


def test_a_table_of_sqlite_with_the_end_of_another_s_name(tmp_path: Path) -> None:
    """Behind a dot: as it tells what it is, it is not the one that was dropped, and gets all rows."""
    with shops.SHOPS["sqlite"]("", tmp_path) as shop:
        night(shop, tmp_path, 1, name="old.a")
        night(shop, tmp_path / "other", 7, name="new.a")
        ran(shop, "", tmp_path, 'DROP TABLE "old.a"', "DELETE FROM gristmill_marks")
        assert night(shop, tmp_path, 2, name="new.a") == 2


@pytest.mark.parametrize("mode", ["append", "upsert"])
def test_one_of_postgres_that_is_restored_twice(mode: str, postgres: str, tmp_path: Path) -> None:
    """With its marks, and then alone, from an earlier dump: it has fewer rows than these tell of."""
    with shops.SHOPS["postgresql"](postgres, tmp_path) as shop:
        how = {"mode": mode, "key": "id" if mode == "upsert" else ()}
        for sink, ids in (("one", [1, 2]), ("other", [7, 8])):
            night(shop, tmp_path / sink, *ids, **how)
        ran(shop, postgres, tmp_path, *copied("scores"), *copied("gristmill_marks"))
        ran(shop, postgres, tmp_path, *copied("scores"), "DELETE FROM scores WHERE id <> 1")
        to = gm.to(shop.address("scores"), **how)
        if mode == "append":
            with pytest.raises(gm.BadJob, match=ANOTHER):
                gm.deliver(str(tmp_path / "one" / "out"), to)
            return
        for sink in ("one", "other"):
            assert gm.deliver(str(tmp_path / sink / "out"), to).rows == 2
        assert sorted(shop.seen("scores") or ()) == [1, 2, 7, 8]


def test_a_file_of_many_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lookup in SQLite reads the SQL of its own table, and of none as long as none is changed; a copy of it is seen
    then, and another one of the name.
    """
    from gristmill.stores.sqlite import Transaction

    plain, read = Transaction.run, [0, 0]

    def counting(session: Transaction, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        found = plain(session, sql, *values)
        read[0] += len(found) if "sqlite_master" in sql else 0
        read[1] += len(found) if "gristmill_marks" in sql and "body" in sql else 0
        return found

    with shops.SHOPS["sqlite"]("", tmp_path) as shop, gm.lookup(shop.address("scores"), "id") as lookup:
        for number in range(5):
            night(shop, tmp_path / str(number), number, name=f"scores_{number}")
        night(shop, tmp_path / "own", 1)
        monkeypatch.setattr(Transaction, "run", counting)
        for expected in ([2, 1], [0, 1]):
            read[:] = [0, 0]
            assert lookup.get(1)["v"] == [1.0, 1.0]
            assert read == expected
        night(shop, tmp_path / "third", 8, name="third")
        ran(shop, "", tmp_path, "ALTER TABLE scores RENAME TO second", "ALTER TABLE third RENAME TO scores")
        assert lookup.get(8)["v"] == [1.0, 8.0] and lookup.get(1) is None


def test_a_sink_of_each_night_that_replaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows: the mark tells of the last few that were replaced, and does not grow with each."""
    monkeypatch.setattr("gristmill.stores.tablemarks._REPLACED", 2, raising=False)
    with shops.SHOPS["sqlite"]("", tmp_path) as shop:
        for number in range(5):
            night(shop, tmp_path / str(number), number, mode="replace")
        told = "SELECT n FROM (SELECT json_array_length(body, '$.replaced') AS n FROM gristmill_marks)"
        ran(shop, "", tmp_path, "CREATE TABLE told (n INTEGER CHECK (n = 2))", f"INSERT INTO told {told}")
        assert night(shop, tmp_path / "3", 9) == 2  # whose rows are known to be gone
        once(shop, "scores", [3, 4, 9])


def copy_of(file: Path, table: str, copy: str, *, rows: bool = True) -> tuple[str, ...]:
    """SQL that copies a table of SQLite by its own SQL, with its witness."""
    with sqlite3.connect(file) as db:
        ((made,),) = db.execute("SELECT sql FROM sqlite_master WHERE name = ?", [table]).fetchall()
    filled = f"INSERT INTO {copy} SELECT * FROM {table}"
    return (made.replace(table, copy, 1), filled) if rows else (made.replace(table, copy, 1),)


@pytest.mark.parametrize("rows", [False, True])
def test_a_copy_that_is_delivered_to(rows: bool, tmp_path: Path) -> None:
    """By another sink, once the table is gone whose SQL it has: it keeps its own marks, and is read by these."""
    with shops.SHOPS["sqlite"]("", tmp_path) as shop:
        night(shop, tmp_path / "one", 1, 2)
        ran(shop, "", tmp_path, *copy_of(tmp_path / "shop.sqlite", "scores", "second", rows=rows))
        assert [night(shop, tmp_path / "other", 7, name="second"), night(shop, tmp_path / "one", 3)] == [1, 1]
        ran(shop, "", tmp_path, "DROP TABLE scores")
        for new in (8, 9):
            with gm.lookup(shop.address("second"), "id") as lookup:
                assert lookup.get(7)["v"] == [1.0, 7.0] and lookup.generation == new - 7
            assert night(shop, tmp_path / "other", new, name="second") == 1
        once(shop, "second", [*([1, 2] if rows else []), 7, 8, 9])
        with pytest.raises(gm.BadJob, match="cannot be told: the table is another one"):  # it may be that one
            night(shop, tmp_path / "one", 4, name="second")
        assert night(shop, tmp_path / "one", 5, name="second", mode="replace") == 5
        assert night(shop, tmp_path / "one", 6, name="second") == 1


def test_a_copy_that_is_renamed_while_its_original_is_replaced(tmp_path: Path) -> None:
    """In place: the copy's marks stay, so that nothing comes twice, and it goes on under its name."""
    with shops.SHOPS["sqlite"]("", tmp_path) as shop:
        night(shop, tmp_path / "one", 1)
        copied = copy_of(tmp_path / "shop.sqlite", "scores", "second", rows=False)
        ran(shop, "", tmp_path, *copied, "CREATE INDEX mine ON scores (id)")
        assert night(shop, tmp_path / "other", 7, name="second") == 1
        ran(shop, "", tmp_path, "ALTER TABLE second RENAME TO third")
        assert night(shop, tmp_path / "one", 2, mode="replace") == 2
        with pytest.raises(gm.BadJob, match="cannot be told: the table is another one"):
            night(shop, tmp_path / "other", 8, name="third")
        ran(shop, "", tmp_path, "ALTER TABLE third RENAME TO second")
        night(shop, tmp_path / "other", 9, name="second")
        once(shop, "second", [7, 8, 9])


def test_copies_that_swap_names(tmp_path: Path) -> None:
    """Tables with one witness, whose sinks follow them: which rows are in which cannot be told."""
    with shops.SHOPS["sqlite"]("", tmp_path) as shop:
        night(shop, tmp_path / "one", 1)
        ran(shop, "", tmp_path, *copy_of(tmp_path / "shop.sqlite", "scores", "second", rows=False))
        night(shop, tmp_path / "other", 7, name="second")
        swapped = (("scores", "third"), ("second", "scores"), ("third", "second"))
        ran(shop, "", tmp_path, *(f"ALTER TABLE {old} RENAME TO {new}" for old, new in swapped))
        for folder, name in (("one", "second"), ("other", "scores")):
            with pytest.raises(gm.BadJob, match="cannot be told: the table is another one"):
                night(shop, tmp_path / folder, 8, name=name)


def test_a_copy_of_another_shape(tmp_path: Path) -> None:
    """Of which the rows are of other types: it is read by its own, once the other is gone, too."""
    with shops.SHOPS["sqlite"]("", tmp_path) as shop:
        night(shop, tmp_path / "one", 1)
        ran(shop, "", tmp_path, *copy_of(tmp_path / "shop.sqlite", "scores", "second", rows=False))
        to, own = gm.to(shop.address("second"), mode="append"), gm.sink(str(tmp_path / "own"), keep="id")
        gm.Job(pa.table({"id": [7]}), lambda batch: {"y": batch["id"] == 7}, own, workers=0, deliver=[to]).run()
        ran(shop, "", tmp_path, "DROP TABLE scores")
        with gm.lookup(shop.address("second"), "id") as lookup:
            assert lookup.get(7)["y"] is True


@pytest.mark.parametrize("then", [(), ("DROP TABLE kept",)], ids=["there", "gone"])
def test_a_copy_of_one_that_was_renamed(then: tuple[str, ...], tmp_path: Path) -> None:
    """Or of one that was copied, delivered to and then renamed: nothing comes twice, and the copy is told."""
    with shops.SHOPS["sqlite"]("", tmp_path) as shop:
        night(shop, tmp_path / "one", 1)
        kept = copy_of(tmp_path / "shop.sqlite", "scores", "kept")
        if then:
            ran(shop, "", tmp_path, *kept)
            night(shop, tmp_path / "one", 2)
        ran(shop, "", tmp_path, *then, "ALTER TABLE scores RENAME TO second")
        night(shop, tmp_path / "other", 7)
        if not then:
            ran(shop, "", tmp_path, *copy_of(tmp_path / "shop.sqlite", "second", "kept"))
        with gm.lookup(shop.address("second"), "id") as lookup:
            assert lookup.get(1)["v"] == [1.0, 1.0]
        way = r"twice: deliver to another" if then else r"twice: kept may be that table, renamed, or a copy"
        with pytest.raises(gm.BadJob, match=way):
            night(shop, tmp_path / "one", 3, name="second")
        if not then:
            ran(shop, "", tmp_path, "DROP TABLE kept")
            assert night(shop, tmp_path / "one", 4, name="second") == 2


def test_a_copy_that_takes_the_name(tmp_path: Path) -> None:
    """Of the table whose SQL it has, after each had a sink of its own: neither is believed more than its rows."""
    with shops.SHOPS["sqlite"]("", tmp_path) as shop:
        night(shop, tmp_path / "one", 1, 2)
        ran(shop, "", tmp_path, *copy_of(tmp_path / "shop.sqlite", "scores", "second", rows=False))
        night(shop, tmp_path / "other", 7, name="second")
        ran(shop, "", tmp_path, "DROP TABLE scores", "ALTER TABLE second RENAME TO scores")
        for sink in ("one", "other"):
            with pytest.raises(gm.BadJob, match="cannot be told: the table is another one"):
                night(shop, tmp_path / sink, 3)


def test_one_that_told_nothing_and_got_the_witness_of_another(tmp_path: Path) -> None:
    """As it was made anew by that one's SQL, which is gone: its own sink's rows may be there, and none comes twice."""
    with shops.SHOPS["sqlite"]("", tmp_path) as shop:
        ran(shop, "", tmp_path, BY_A_SCRIPT["sqlite"].replace("scores", "second"))
        night(shop, tmp_path / "one", 1, name="second")
        night(shop, tmp_path / "other", 7)
        ran(shop, "", tmp_path, *copy_of(tmp_path / "shop.sqlite", "scores", "made", rows=False))
        moved = "INSERT INTO made SELECT id, y, v FROM second", "DROP TABLE second", "DROP TABLE scores"
        ran(shop, "", tmp_path, *moved, "ALTER TABLE made RENAME TO second")
        with pytest.raises(gm.BadJob, match="cannot be told: the table is another one"):
            night(shop, tmp_path / "one", 2, name="second")


def test_one_of_postgres_among_restored_marks(postgres: str, tmp_path: Path) -> None:
    """Of other tables, one of which had on its server the number that this one has: its own are in the schema from
    which it was moved, and go with it.
    """
    with shops.SHOPS["postgresql"](postgres, tmp_path) as shop:
        schema = shop.address("scores").partition("#")[2].partition(".")[0]
        moved, tables = shop.address("scores").replace(f"#{schema}.", f"#{schema}_2."), f"{schema}_2"
        night(shop, tmp_path / "one", 1, 2, key="id", mode="upsert")
        ran(shop, postgres, tmp_path, f"CREATE SCHEMA {tables}")
        try:
            to = gm.to(moved.replace("scores", "second"), mode="append")
            job(tmp_path / "other", [7], deliver=[to]).run()
            elsewhere = f"'{schema}.scores'::regclass::oid || ' 1 2 3'"
            told = f"body = replace(body, '\"' || which || '\"', '\"' || {elsewhere} || '\"')"
            restored = f"UPDATE {tables}.gristmill_marks SET which = {elsewhere}, {told}"
            ran(shop, postgres, tmp_path, restored, f"ALTER TABLE scores SET SCHEMA {tables}")
            with gm.lookup(moved) as lookup:
                assert lookup.get(1)["y"] == 1
            night(shop, tmp_path / "third", 9)
            nightly = job(tmp_path / "one", [3], on_new_files="append", deliver=[gm.to(moved, mode="append")])
            assert nightly.run().deliveries[-1].rows == 1
        finally:
            ran(shop, postgres, tmp_path, f"DROP SCHEMA {tables} CASCADE")


def test_one_of_postgres_that_was_restored_beside_locked_marks(
    postgres: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of another schema: it has its own, by which it is read; others are asked once, until it is moved. A delivery is
    tried again, as one is to a store that another has for itself.
    """
    from gristmill.stores import pgtable

    monkeypatch.setattr(pgtable, "_WAITS", "50ms")
    asked, plain = [0], pgtable._left

    def counting(*given: Any, **more: Any) -> Any:
        asked[0] += 1
        return plain(*given, **more)

    monkeypatch.setattr(pgtable, "_left", counting)
    theirs = "target text, which text, sink text, body text"
    with shops.SHOPS["postgresql"](postgres, tmp_path) as shop:
        night(shop, tmp_path, 1, mode="replace", key="id")
        ran(shop, postgres, tmp_path, *copied("scores"), *copied("gristmill_marks"))
        ran(shop, postgres, tmp_path, "CREATE INDEX gm_scores_id ON scores (id)")
        with others(shop, postgres, theirs, "LOCK TABLE gristmill_marks"):
            with gm.lookup(shop.address("scores")) as lookup:
                assert lookup.get(1)["y"] == 1
            with pytest.raises(gm.RunFailed, match="locked by others, and marks of this table may be there"):
                night(shop, tmp_path, 2, mode="replace", key="id")
        with others(shop, postgres, theirs), gm.lookup(shop.address("scores")) as lookup:
            for more in (1, 0, 0):
                asked[0] = 0
                assert lookup.get(1)["y"] == 1 and asked[0] == more
            ran(shop, postgres, tmp_path, "ALTER TABLE scores RENAME TO z", "ALTER TABLE z RENAME TO scores")
            assert lookup.get(1)["y"] == 1 and asked[0] == 1
        assert gm.deliver(str(tmp_path / "out"), gm.to(shop.address("scores"), key="id")).rows == 2
