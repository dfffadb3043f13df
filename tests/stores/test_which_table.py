"""Which table of a database the marks of deliveries are of, whatever its name is now: each row comes to it once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
