"""Stores of which only marks tell the columns' types: rows are read as they were delivered also once a later delivery,
or another sink's, lacks some of their columns.
"""

from __future__ import annotations

import datetime as dt
import sqlite3
import uuid
from collections.abc import Iterator
from contextlib import closing
from decimal import Decimal
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pyarrow as pa
import pytest
import shops

import gristmill as gm

UNTYPED = ("sqlite", "lmdb", "redis", "usearch", "faiss", "qdrant", "cassandra")
COLUMNS: dict[str, tuple[pa.DataType, Any]] = {
    "when": (pa.timestamp("us"), dt.datetime(2026, 1, 1, 3)),
    "amount": (pa.decimal128(10, 2), Decimal("1.50")),
    "day": (pa.date32(), dt.date(2026, 1, 2)),
    "took": (pa.duration("ms"), dt.timedelta(seconds=2)),
}


@pytest.fixture(params=UNTYPED, scope="session")
def kind(request: pytest.FixtureRequest) -> tuple[str, str]:
    """Each kind of these stores, and the address of its server, if it has one."""
    server = shops.SERVERS.get(request.param)
    return request.param, request.getfixturevalue(server) if server else ""


@pytest.fixture
def shop(kind: tuple[str, str], tmp_path: Path) -> Iterator[shops.Shop]:
    """A store of that kind, without rows."""
    with shops.SHOPS[kind[0]](kind[1], tmp_path) as made:
        yield made


def numbered(batch: dict[str, Any]) -> dict[str, Any]:
    """A number for each row."""
    return {"y": batch["id"]}


def scored(batch: dict[str, Any]) -> dict[str, Any]:
    """A number and a vector for each row."""
    return {**numbered(batch), "v": [[1.0, float(i)] for i in batch["id"]]}


WITH_VECTORS = gm.model(scored, returns={"y": "int64", "v": "float32[2]"})


def deliver(
    folder: Path, to: gm.Delivery, number: int, columns: dict[str, tuple[pa.DataType, Any]], model: Any = WITH_VECTORS
) -> None:
    """The row of this number, with these columns and their values, from a sink in this folder."""
    kinds = {name: pa.array([value], kind) for name, (kind, value) in columns.items()}
    rows = pa.table({"id": pa.array([number], pa.int64()), **kinds})
    sink = gm.sink(str(folder / "out"), keep=["id", *columns])
    gm.Job(rows, model, sink, workers=0, deliver=[to]).run(restart=True)


def held(to: gm.Delivery, number: int) -> dict[str, Any]:
    """The columns of a row that has them, as it is looked up."""
    with gm.lookup(to, "id") as lookup:
        return {name: value for name, value in lookup.get(number).items() if name in COLUMNS | OF_MARKS}


@pytest.mark.few(3)
def test_a_night_that_lacks_columns(shop: shops.Shop, tmp_path: Path) -> None:
    """Rows of the night before are read as they were, a later night that has them otherwise is refused, and one that
    has them as they were is not: until a replace, after which none of those rows are there.
    """
    to = gm.to(shop.address("scores"), mode="upsert", key="id")
    deliver(tmp_path, to, 1, COLUMNS)
    deliver(tmp_path, to, 2, {})
    values = {name: value for name, (_, value) in COLUMNS.items()}
    assert held(to, 1) == values
    otherwise = {"took": (pa.duration("s"), dt.timedelta(seconds=2))}
    with pytest.raises(gm.BadJob, match=r"column 'took' (is|has values of) duration\[ms\] there"):
        deliver(tmp_path, to, 3, otherwise)
    deliver(tmp_path, to, 3, {"took": COLUMNS["took"]})
    assert held(to, 1) == values and held(to, 3).items() >= {"took": values["took"]}.items()
    again = gm.to(shop.address("scores"), key="id", evolve=True)
    deliver(tmp_path, again, 4, {})
    deliver(tmp_path, again, 4, otherwise)
    assert held(to, 4)["took"] == values["took"]


@pytest.mark.few(3)
def test_a_sink_that_lacks_columns_of_another(shop: shops.Shop, tmp_path: Path) -> None:
    """Rows of the other are read as they were, whoever delivered last; neither needs leave for columns there."""
    to = gm.to(shop.address("scores"), mode="upsert", key="id")
    one, other = tmp_path / "one", tmp_path / "other"
    deliver(one, to, 1, {})
    deliver(other, gm.to(shop.address("scores"), mode="upsert", key="id", evolve=True), 2, COLUMNS)
    for _ in range(2):
        deliver(one, to, 1, {})
        assert held(to, 2) == {name: value for name, (_, value) in COLUMNS.items()}
        deliver(other, to, 2, COLUMNS)


def test_a_sink_whose_columns_went_with_a_dropped_table(tmp_path: Path) -> None:
    """Another one may have such a column as it likes, once it has made the table anew."""
    with shops.SHOPS["sqlite"]("", tmp_path) as shop:
        to = gm.to(shop.address("scores"), mode="upsert", key="id", evolve=True)
        deliver(tmp_path / "one", to, 1, COLUMNS)
        with closing(sqlite3.connect(tmp_path / "shop.sqlite")) as db, db:
            db.execute("DROP TABLE scores")
        deliver(tmp_path / "other", to, 2, {})
        otherwise = dt.timedelta(seconds=3)
        for number in (3, 4):
            deliver(tmp_path / "other", to, number, {"took": (pa.duration("s"), otherwise)})
        assert held(to, 3) == {"took": otherwise}


TYPED = {
    "n": (pa.int64(), 5),
    "text": (pa.string(), "x"),
    "bytes": (pa.binary(), b"x"),
    "inside": (pa.struct([("q", pa.int64())]), {"q": 1}),
}
UNTOLD = dict.fromkeys(TYPED, (pa.null(), None))
DATABASES, LAKES = ("sqlite", "duckdb", "postgresql"), ("delta", "lance", "iceberg")


def opened(request: pytest.FixtureRequest, name: str, folder: Path) -> Any:
    """A store of this kind, without rows."""
    server = shops.SERVERS.get(name)
    return shops.SHOPS[name](request.getfixturevalue(server) if server else "", folder)


def values(to: gm.Delivery, number: int) -> dict[str, Any]:
    """The typed columns of a row, as it is looked up."""
    with gm.lookup(to, "id") as lookup:
        return {name: lookup.get(number)[name] for name in TYPED}


@pytest.mark.few(3)
@pytest.mark.parametrize("name", [*DATABASES, *LAKES])
def test_a_night_of_nulls_alone(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Fits columns of any type, and what comes after it does."""
    with opened(request, name, tmp_path) as shop:
        to = gm.to(shop.address("scores"), mode="append")
        for number, columns in enumerate((TYPED, UNTOLD, TYPED), 1):
            deliver(tmp_path, to, number, columns)
        for number, columns in enumerate((TYPED, UNTOLD, TYPED), 1):
            assert values(to, number) == {name: value for name, (_, value) in columns.items()}


WAYS: dict[tuple[bool, str], dict[str, Any]] = {
    **{(True, mode): {"mode": mode, "evolve": True} for mode in ("append", "upsert")},
    **{(False, mode): {"mode": "replace"} for mode in ("append", "upsert")},
}


@pytest.mark.few(4)
@pytest.mark.parametrize("name", [*DATABASES, "delta", "lance"])
@pytest.mark.parametrize("mode", ["replace", "append", "upsert"])
def test_columns_that_had_only_nulls(mode: Any, name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Get the type of the first values: with a replace, and where rows stay if the delivery may change columns."""
    with opened(request, name, tmp_path) as shop:
        to = gm.to(shop.address("scores"), mode=mode, key="id")
        deliver(tmp_path, to, 1, UNTOLD)
        if mode != "replace":
            way = "as only nulls are there" if name in DATABASES else "or deliver once with mode replace, as only nulls"
            with pytest.raises(gm.BadJob, match=way):
                deliver(tmp_path, to, 2, TYPED)
            to = gm.to(shop.address("scores"), key="id", **WAYS[name in DATABASES, mode])
        deliver(tmp_path, to, 2, TYPED)
        deliver(tmp_path, to, 3, TYPED)
        assert values(to, 3) == {name: value for name, (_, value) in TYPED.items()}
        if mode != "replace" and name in DATABASES:
            assert values(to, 1) == dict.fromkeys(TYPED) and values(to, 2) == values(to, 3)


def listed(shop: shops.Shop, folder: Path, request: pytest.FixtureRequest) -> int:
    """How many indices a table of a database has."""
    if shop.name == "sqlite":
        with closing(sqlite3.connect(folder / "shop.sqlite")) as db:
            return len(db.execute("PRAGMA index_list(scores)").fetchall())
    if shop.name == "duckdb":
        import duckdb

        with duckdb.connect(str(folder / "shop.duckdb")) as db:
            return len(db.execute("SELECT 1 FROM duckdb_indexes()").fetchall())
    import psycopg

    at = shop.address("scores").partition("#")[2]
    with psycopg.connect(request.getfixturevalue("postgres")) as db:
        return len(db.execute("SELECT 1 FROM pg_index WHERE indrelid = to_regclass(%s)", [at]).fetchall())


@pytest.mark.few(3)
@pytest.mark.parametrize("name", DATABASES)
@pytest.mark.parametrize("mode", ["replace", "append", "upsert"])
@pytest.mark.parametrize("index", [("n",), ("y",), ("text", "n", "y")], ids=", ".join)
def test_columns_that_had_only_nulls_beside_indices_of_ours(
    index: tuple[str, ...], mode: Any, name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Get the type of the first values, too; and the indices are there after."""
    with opened(request, name, tmp_path) as shop:
        about = {"mode": mode, "key": "id", "evolve": True, "index": dict.fromkeys(index, "btree")}
        to = gm.to(shop.address("scores"), **about)
        columns = {"n": TYPED["n"], "text": TYPED["text"]}
        deliver(tmp_path, to, 1, dict.fromkeys(columns, (pa.null(), None)))
        before = listed(shop, tmp_path, request)
        for number in (2, 3):
            deliver(tmp_path, to, number, columns)
            assert listed(shop, tmp_path, request) == before == len(index) + (name != "duckdb")
        with gm.lookup(to) as lookup:
            rows = lookup.get_many([1, 3])
        assert [rows[1][column] for column in columns] == [5, "x"]
        assert rows[0] is None if mode == "replace" else [rows[0][column] for column in columns] == [None, None]


@pytest.mark.parametrize(
    ("mode", "theirs"),
    [
        ("append", "UPDATE scores SET n = 'theirs'"),
        ("append", "CREATE INDEX theirs ON scores (n)"),
        ("replace", "CREATE INDEX theirs ON scores (n)"),
    ],
)
def test_a_column_of_nulls_alone_that_others_use(mode: Any, theirs: str, tmp_path: Path) -> None:
    """Stays as it is: the type is told before anything is scored."""
    with shops.SHOPS["sqlite"]("", tmp_path) as shop:
        to = gm.to(shop.address("scores"), mode=mode, evolve=True)
        deliver(tmp_path, to, 1, {"n": UNTOLD["n"]})
        with closing(sqlite3.connect(tmp_path / "shop.sqlite")) as db, db:
            db.execute(theirs)
        before = shop.seen("scores")
        with pytest.raises(gm.BadJob, match="column 'n' is TEXT, which does not hold the result's int64 without loss"):
            deliver(tmp_path, to, 2, {"n": TYPED["n"]})
        assert shop.seen("scores") == before


@pytest.mark.parametrize("theirs", ["UNIQUE INDEX scores_n ON scores (n)", "INDEX scores_n ON scores (n, y)"])
def test_an_index_of_others_that_is_named_as_ours_are(theirs: str, tmp_path: Path) -> None:
    """Keeps the column of nulls alone as it is, and stays."""
    import duckdb

    with shops.SHOPS["duckdb"]("", tmp_path) as shop:
        to = gm.to(shop.address("scores"), mode="append", evolve=True)
        deliver(tmp_path, to, 1, {"n": UNTOLD["n"]})
        with duckdb.connect(str(tmp_path / "shop.duckdb")) as db:
            db.execute(f"CREATE {theirs}")
        asked = gm.to(shop.address("scores"), mode="append", evolve=True, index={"n": "art"})
        with pytest.raises(gm.BadJob, match="column 'n' is INTEGER, which does not hold the result's int64"):
            deliver(tmp_path, asked, 2, {"n": TYPED["n"]})


def test_a_column_of_nulls_alone_in_a_table_of_others(postgres: str, tmp_path: Path) -> None:
    """Which is more than its type: it stays as it is."""
    import psycopg

    for more in ("DEFAULT 'x'", "CHECK (n <> 'x')", 'COLLATE "C"'):
        with psycopg.connect(postgres, autocommit=True) as db:
            db.execute("DROP TABLE IF EXISTS of_others")
            db.execute(f"CREATE TABLE of_others (id bigint, y bigint, n text {more}, v real[])")
            to = gm.to(f"{postgres}#of_others", mode="replace")
            deliver(tmp_path, to, 1, {"n": UNTOLD["n"]})
            with pytest.raises(gm.BadJob, match="column 'n' is text, which does not hold the result's int64"):
                deliver(tmp_path, to, 2, {"n": TYPED["n"]})


ZONED = dt.datetime(2026, 1, 1, 3, tzinfo=ZoneInfo("Europe/Berlin"))
OF_MARKS: dict[str, tuple[pa.DataType, Any]] = {  # columns of tables, whose types only marks tell in full
    "tz": (pa.timestamp("us", "Europe/Berlin"), ZONED),
    "inside": (pa.struct([("a", pa.decimal128(5, 2)), ("t", pa.date32())]), {"a": Decimal("1.50"), "t": ZONED.date()}),
}


KEPT = [("delete", name) for name in ("sqlite", "duckdb", "postgresql", "delta", "lance")]


@pytest.mark.few(3)
@pytest.mark.parametrize(("way", "store"), [*KEPT, ("referred", "duckdb"), ("referred", "postgresql")])
def test_a_night_that_updates_rows_and_lacks_columns(
    way: str, store: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Where the result is the whole, but rows of its keys stay and keep these columns: they are read as they were."""
    model = gm.model(numbered, returns={"y": "int64"})  # lists keep DuckDB from updating a table that others refer to
    server = request.getfixturevalue(shops.SERVERS[store]) if store in shops.SERVERS else ""
    with shops.SHOPS[store](server, tmp_path) as shop:
        whole: Any = {"mode": "upsert", "delete": True} if way == "delete" else {}
        to = gm.to(shop.address("scores"), key="id", evolve=True, **whole)
        deliver(tmp_path, to, 1, OF_MARKS, model)
        if way == "referred":
            refer(shop)
        deliver(tmp_path, to, 1, {}, model)
        values = {name: value for name, (_, value) in OF_MARKS.items()}
        assert held(to, 1) == values and held(to, 1)["tz"].tzinfo == ZONED.tzinfo
        beside, otherwise = gm.to(shop.address("scores"), mode="upsert", key="id"), (pa.struct({"a": "f8"}), {"a": 2.5})
        with pytest.raises(gm.BadJob, match="column 'inside'"):
            deliver(tmp_path, beside, 2, {"inside": otherwise}, model)
        deliver(tmp_path, beside, 2, {"inside": OF_MARKS["inside"]}, model)
        assert held(to, 1) == values and held(to, 2)["inside"] == values["inside"]


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("store", "mode"),
    [("delta", "append"), ("iceberg", "append"), ("delta", "upsert"), ("lance", "append"), ("lance", "upsert")],
)  # Iceberg refuses such an upsert
def test_a_table_of_a_lake_and_a_night_that_lacks_columns(store: str, mode: Any, tmp_path: Path) -> None:
    """Rows of the night before are read as they were, though columns have other types there."""
    with shops.SHOPS[store]("", tmp_path) as shop:
        to = gm.to(shop.address("scores"), mode=mode, key="id")
        columns = {**OF_MARKS, "large": (pa.uint64(), 5), "id2": (pa.uuid(), uuid.UUID(int=7))}
        deliver(tmp_path, to, 1, columns)
        for number in (2, 3):
            deliver(tmp_path, to, number, {})
        with gm.lookup(to) as lookup:
            row = lookup.get(1)
        assert [repr(row[name]) for name in columns] == [repr(value) for _, value in columns.values()]


def refer(shop: shops.Shop) -> None:
    """Make a table whose rows refer to those delivered."""
    table = shop.address("scores").partition("#")[2]
    statements = [
        f"ALTER TABLE {table} ADD PRIMARY KEY (id)",
        f"CREATE TABLE {table}_notes (about bigint REFERENCES {table} (id))",
        f"INSERT INTO {table}_notes VALUES (1)",
    ]
    if shop.name == "duckdb":
        import duckdb

        with duckdb.connect(shop.address("").removeprefix("duckdb://").rstrip("#")) as db:
            for sql in statements:
                db.execute(sql)
        return
    import psycopg

    with psycopg.connect(shop.address("").partition("#")[0], autocommit=True) as db:
        for sql in statements:
            db.execute(sql)
