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


def dropped(shop: shops.Shop, server: str, folder: Path, table: str) -> None:
    """Take one table out of a database."""
    if shop.name == "sqlite":
        with closing(sqlite3.connect(folder / "shop.sqlite")) as db, db:
            db.execute(f"DROP TABLE {table}")
    elif shop.name == "duckdb":
        import duckdb

        with duckdb.connect(str(folder / "shop.duckdb")) as db:
            db.execute(f"DROP TABLE {table}")
    else:
        import psycopg

        schema = shop.address("scores").partition("#")[2].partition(".")[0]
        with psycopg.connect(server, autocommit=True) as db:
            db.execute(f"DROP TABLE {schema}.{table}")


def without_marks(shop: shops.Shop, server: str, folder: Path, rows: list[dict[str, Any]]) -> None:
    """The table alone, with these rows, as somebody has copied it."""
    held = pa.Table.from_pylist(rows, COLUMNS)
    if shop.name in DATABASES:
        dropped(shop, server, folder, "gristmill_marks")
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
        dropped(shop, kind[1], tmp_path, "scores")
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
