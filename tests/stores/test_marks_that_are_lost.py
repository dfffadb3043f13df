"""Tables that were copied or restored without the marks of what was delivered to them: nothing is appended twice."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import shops

import gristmill as gm

COLUMNS = pa.schema([("id", pa.int64()), ("y", pa.int64()), ("v", pa.list_(pa.float32()))])
DATABASES = ("sqlite", "duckdb", "postgresql")  # whose marks are in a table of their own


@pytest.fixture(params=[*DATABASES, "delta", "iceberg"], scope="session")
def kind(request: pytest.FixtureRequest) -> tuple[str, str]:
    """Each kind of store to which rows are appended, and which may lose marks; the address of its server."""
    server = shops.SERVERS.get(request.param)
    return request.param, request.getfixturevalue(server) if server else ""


@pytest.fixture
def shop(kind: tuple[str, str], tmp_path: Path) -> Iterator[shops.Shop]:
    """A store of that kind, without rows."""
    with shops.SHOPS[kind[0]](kind[1], tmp_path) as made:
        yield made


def ran(shop: shops.Shop, server: str, folder: Path, *statements: str) -> None:
    """Run SQL in a database, whose tables are named as they are delivered to."""
    if shop.name == "sqlite":
        with closing(sqlite3.connect(folder / "shop.sqlite")) as db, db:
            for sql in statements:
                db.execute(sql)
    elif shop.name == "duckdb":
        import duckdb

        with duckdb.connect(str(folder / "shop.duckdb")) as db:
            for sql in statements:
                db.execute(sql)
    else:
        import psycopg

        schema = shop.address("scores").partition("#")[2].partition(".")[0]
        with psycopg.connect(server, autocommit=True, options=f"-c search_path={schema}") as db:
            for sql in statements:
                db.execute(sql)


def without_marks(shop: shops.Shop, server: str, folder: Path, rows: list[dict[str, Any]]) -> None:
    """The table alone, with these rows, as somebody has copied it."""
    held = pa.Table.from_pylist(rows, COLUMNS)
    if shop.name in DATABASES:
        ran(shop, server, folder, "DROP TABLE gristmill_marks")
    elif shop.name == "delta":
        from deltalake import write_deltalake

        shop.clear("scores")
        write_deltalake(folder / "scores", held)
    else:
        from pyiceberg.catalog import load_catalog

        shop.clear("scores")
        about = {"uri": f"sqlite:///{folder}/catalog.sqlite", "warehouse": f"file://{folder}/lake", "type": "sql"}
        load_catalog("shop", **about).create_table(("nights", "scores"), COLUMNS).append(held)


def scored(batch: dict[str, Any]) -> dict[str, Any]:
    """A number and a vector for each row."""
    return {"y": batch["id"], "v": [[1.0, float(i)] for i in batch["id"]]}


def job(folder: Path, ids: list[int], **options: Any) -> gm.Job:
    """The rows of a folder, with a file of these ids."""
    import pyarrow.parquet as pq

    (folder / "in").mkdir(exist_ok=True, parents=True)
    pq.write_table(pa.table({"id": pa.array(ids, pa.int64())}), folder / "in" / f"{ids[0]}.parquet")
    model = gm.model(scored, returns={"y": "int64", "v": "float32[2]"})
    return gm.Job(str(folder / "in"), model, gm.sink(str(folder / "out"), keep=["id"]), workers=0, **options)


def test_a_table_without_its_marks(shop: shops.Shop, kind: tuple[str, str], tmp_path: Path) -> None:
    """Nothing is appended to its rows: it is told before anything is scored, and by `verify`; a replace ends it."""
    to = gm.to(shop.address("scores"), mode="append")
    job(tmp_path, [1, 2, 3], deliver=[to]).run()
    before = shop.seen("scores")
    assert before is not None
    without_marks(shop, kind[1], tmp_path, list(before.values()))
    told = r"holds 3 rows, and no mark of a delivery .* generation 1 was delivered there .*: restore the marks, "
    nightly = job(tmp_path, [4], on_new_files="append", deliver=[to])
    with pytest.raises(gm.BadJob, match=told):
        nightly.run()
    assert shop.seen("scores") == before
    verdict = gm.verify(nightly)
    assert not verdict.ok and re.search(told, verdict.lines[-1])
    assert ("gristmill_marks was dropped" in verdict.lines[-1]) == (shop.name in DATABASES)
    gm.deliver(str(tmp_path / "out"), shop.address("scores"))
    assert nightly.run().deliveries[-1].rows == 1
    assert gm.verify(nightly).ok and sorted(shop.seen("scores") or ()) == [1, 2, 3, 4]


def test_what_another_has_replaced_is_appended_again(shop: shops.Shop, tmp_path: Path) -> None:
    """Beside the rows of the other; so is what was in a table that is gone."""
    to = gm.to(shop.address("scores"), mode="append")
    nightly = job(tmp_path / "one", [1, 2, 3], deliver=[to], on_new_files="append")
    nightly.run()
    job(tmp_path / "other", [7], deliver=[gm.to(shop.address("scores"))]).run()
    job(tmp_path / "one", [4])
    assert nightly.run().deliveries[-1].rows == 4
    assert sorted(shop.seen("scores") or ()) == [1, 2, 3, 4, 7]
    shop.clear("scores")
    job(tmp_path / "one", [5])
    assert nightly.run().deliveries[-1].rows == 5 and sorted(shop.seen("scores") or ()) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("kind", [(name, shops.SERVERS.get(name, "")) for name in DATABASES], ids=DATABASES)
def test_what_another_has_replaced_and_people_have_changed(
    kind: tuple[str, str], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Is appended again all the same: the other's mark tells that these rows went, unless its own came again later."""
    name, server = kind[0], request.getfixturevalue(kind[1]) if kind[1] else ""
    with shops.SHOPS[name](server, tmp_path) as shop:
        to = gm.to(shop.address("scores"), mode="append")
        nightly = {
            sink: job(tmp_path / sink, [first], deliver=[how], on_new_files="append")
            for sink, first, how in (("all", 7, shop.address("scores")), ("one", 1, to))
        }
        for number, sql in enumerate(("INSERT INTO scores (id) VALUES (90)", "DELETE FROM scores WHERE id = 7"), 1):
            nightly["one"].run()
            job(tmp_path / "all", [7 + number])
            nightly["all"].run()
            ran(shop, server, tmp_path, sql)
            kept = "CREATE TABLE kept AS SELECT * FROM gristmill_marks"
            ran(shop, server, tmp_path, "DROP TABLE IF EXISTS kept", kept)
            job(tmp_path / "one", [1 + number])
            assert nightly["one"].run().deliveries[-1].rows == 1 + number
        ran(shop, server, tmp_path, "DELETE FROM gristmill_marks", "INSERT INTO gristmill_marks SELECT * FROM kept")
        job(tmp_path / "one", [4])
        with pytest.raises(gm.BadJob, match="and no mark of a delivery of this sink"):
            nightly["one"].run()


@pytest.mark.few(3)
@pytest.mark.parametrize("mode", ["append", "upsert"])
def test_a_table_that_another_makes_anew(mode: Any, shop: shops.Shop, kind: tuple[str, str], tmp_path: Path) -> None:
    """Once somebody has dropped it: no mark of before counts for it, and every sink brings all of its rows."""
    to = gm.to(shop.address("scores"), mode=mode, key="id" if mode == "upsert" else ())
    nightly = {}
    for name, first in (("one", 1), ("other", 7)):
        nightly[name] = job(tmp_path / name, [first, first + 1], deliver=[to], on_new_files="append")
        nightly[name].run()
    if shop.name in DATABASES:
        ran(shop, kind[1], tmp_path, "DROP TABLE scores")
    else:
        shop.clear("scores")
    for name, new in (("one", 3), ("other", 9)):
        job(tmp_path / name, [new])
        assert nightly[name].run().deliveries[-1].rows == 3 and gm.verify(nightly[name]).ok
    assert sorted(shop.seen("scores") or ()) == [1, 2, 3, 7, 8, 9]


def test_another_sink_that_comes_beside_rows_without_marks(
    shop: shops.Shop, kind: tuple[str, str], tmp_path: Path
) -> None:
    """Its marks say so: what the first one had delivered is not appended again, until one has replaced all of it."""
    to = gm.to(shop.address("scores"), mode="append")
    job(tmp_path / "one", [1, 2, 3], deliver=[to]).run()
    without_marks(shop, kind[1], tmp_path, list((shop.seen("scores") or {}).values()))
    other = job(tmp_path / "other", [7], deliver=[to], on_new_files="append")
    other.run()
    job(tmp_path / "other", [8])
    other.run()
    nightly = job(tmp_path / "one", [4], on_new_files="append", deliver=[to])
    with pytest.raises(gm.BadJob, match=r"holds 5 rows, and no mark of a delivery of this sink .* generation 1 was"):
        nightly.run()
    assert sorted(shop.seen("scores") or ()) == [1, 2, 3, 7, 8]
    gm.deliver(str(tmp_path / "other" / "out"), shop.address("scores"))
    assert nightly.run().deliveries[-1].rows == 4
    assert sorted(shop.seen("scores") or ()) == [1, 2, 3, 4, 7, 8]


@pytest.mark.parametrize("name", DATABASES)
def test_marks_of_before_a_sink_came(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Restored alone: those of others are there, but do not tell of all rows, among which are those of this one."""
    server = request.getfixturevalue(shops.SERVERS[name]) if name in shops.SERVERS else ""
    with shops.SHOPS[name](server, tmp_path) as shop:
        to = gm.to(shop.address("scores"), mode="append")
        job(tmp_path / "one", [1, 2], deliver=[to]).run()
        ran(shop, server, tmp_path, "CREATE TABLE backup AS SELECT * FROM gristmill_marks")
        nightly = job(tmp_path / "other", [7, 8], deliver=[to], on_new_files="append")
        nightly.run()
        ran(shop, server, tmp_path, "DELETE FROM gristmill_marks", "INSERT INTO gristmill_marks SELECT * FROM backup")
        job(tmp_path / "other", [9])
        with pytest.raises(gm.BadJob, match="holds 4 rows, and no mark of a delivery of this sink"):
            nightly.run()
        assert not gm.verify(nightly).ok
        gm.deliver(str(tmp_path / "one" / "out"), shop.address("scores"))
        assert nightly.run().deliveries[-1].rows == 3


@pytest.mark.parametrize("name", ["sqlite", "duckdb"])
def test_a_table_in_other_letters(name: str, tmp_path: Path) -> None:
    """Is the same one: without its marks nothing is appended to it either, and one of another name is."""
    with shops.SHOPS[name]("", tmp_path) as shop:
        job(tmp_path, [1, 2, 3], deliver=[gm.to(shop.address("scores"), mode="append")]).run()
        without_marks(shop, "", tmp_path, [])
        with pytest.raises(gm.BadJob, match="holds 3 rows, and no mark of a delivery of this sink"):
            job(tmp_path, [4], on_new_files="append", deliver=[gm.to(shop.address("SCORES"), mode="append")]).run()
        other = gm.to(shop.address("others"), mode="append")
        assert job(tmp_path, [4], on_new_files="append", deliver=[other]).run().deliveries[-1].rows == 4


AWAY = ("ALTER TABLE scores RENAME TO kept",)
BACK = ("DROP TABLE scores", "ALTER TABLE kept RENAME TO scores")
ANOTHER = r"whether the rows of generation 1 .* cannot be told: the table is another one than they came to"


@pytest.mark.parametrize("name", DATABASES)
@pytest.mark.parametrize("mode", ["append", "replace"])
def test_a_table_that_is_put_back(mode: Any, name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """After one of its sinks has made another of its name: it has its own marks, and gets no row twice."""
    server = request.getfixturevalue(shops.SERVERS[name]) if name in shops.SERVERS else ""
    with shops.SHOPS[name](server, tmp_path) as shop:
        to = gm.to(shop.address("scores"), mode="append")
        for sink, ids in (("one", [1, 2]), ("other", [7, 8])):
            job(tmp_path / sink, ids, deliver=[to]).run()
        ran(shop, server, tmp_path, *AWAY)
        gm.deliver(str(tmp_path / "one" / "out"), gm.to(shop.address("scores"), mode=mode))
        ran(shop, server, tmp_path, *BACK)
        assert gm.verify(job(tmp_path / "one", [1, 2], deliver=[to])).ok
        for sink in ("one", "other"):
            gm.deliver(str(tmp_path / sink / "out"), to)
        with gm.lookup(shop.address("scores"), "id") as lookup:  # which refuses keys that repeat
            assert None not in lookup.get_many([1, 2, 7, 8])


def copied(table: str) -> tuple[str, ...]:
    """SQL that puts a copy of a table in its place, as one that is restored from a dump is."""
    return f"CREATE TABLE kept AS TABLE {table}", f"DROP TABLE {table}", f"ALTER TABLE kept RENAME TO {table}"


@pytest.mark.parametrize("mode", ["append", "upsert", "replace"])
def test_a_table_of_postgres_that_is_restored_alone(mode: Any, postgres: str, tmp_path: Path) -> None:
    """Its marks, which stay, are of the one before: all rows are brought by key or in its place, or none is appended;
    so it is for the other sink that had rows there, and for one of which no mark is left.
    """
    with shops.SHOPS["postgresql"](postgres, tmp_path) as shop:
        beside, replaced = gm.to(shop.address("scores"), mode="append"), gm.to(shop.address("scores"))
        to = gm.to(shop.address("scores"), mode=mode, key="id")
        for sink, ids, how in (("gone", [9], beside), ("one", [1, 2, 3], replaced), ("other", [7], beside)):
            job(tmp_path / sink, ids, deliver=[how]).run()
        gm.deliver(str(tmp_path / "one" / "out"), to)
        earlier = ("INSERT INTO scores (id) VALUES (9)", "DELETE FROM scores WHERE id = 3")
        ran(shop, postgres, tmp_path, *copied("scores"), *earlier)
        verdict = gm.verify(job(tmp_path / "one", [1, 2, 3], deliver=[to]))
        assert not verdict.ok and re.search(ANOTHER, verdict.lines[-1])
        if mode == "append":
            with pytest.raises(gm.BadJob, match=ANOTHER):
                gm.deliver(str(tmp_path / "one" / "out"), to)
        else:
            assert gm.deliver(str(tmp_path / "one" / "out"), to).rows == 3
        if mode == "replace":
            assert sorted(shop.seen("scores") or ()) == [1, 2, 3]
            return
        for sink, why in (("other", ANOTHER), ("gone", "rows, and no mark of a delivery of this sink")):
            with pytest.raises(gm.BadJob, match=why):
                gm.deliver(str(tmp_path / sink / "out"), beside)


def test_what_keeps_a_table_of_postgres(postgres: str, tmp_path: Path) -> None:
    """That it is emptied, written anew or altered, or restored with its marks, leaves these as they are."""
    with shops.SHOPS["postgresql"](postgres, tmp_path) as shop:
        to = gm.to(shop.address("scores"), mode="append")
        nightly = job(tmp_path, [1], deliver=[to], on_new_files="append")
        nightly.run()
        ways = (
            ("VACUUM FULL scores",),
            ("CREATE INDEX mine ON scores (id)", "CLUSTER scores USING mine"),
            ("ALTER TABLE scores ADD COLUMN more text", "ALTER TABLE scores ALTER COLUMN more TYPE bytea USING NULL"),
            (*copied("scores"), *copied("gristmill_marks")),
            ("ALTER TABLE scores RENAME TO kept", "ALTER TABLE kept RENAME TO scores"),
        )
        for number, statements in enumerate(ways, 2):
            ran(shop, postgres, tmp_path, *statements)
            job(tmp_path, [number])
            assert nightly.run().deliveries[-1].rows == 1 and gm.verify(nightly).ok
        assert sorted(shop.seen("scores") or ()) == [1, 2, 3, 4, 5, 6]
        ran(shop, postgres, tmp_path, "TRUNCATE scores")
        job(tmp_path, [7])
        assert nightly.run().deliveries[-1].rows == 1
