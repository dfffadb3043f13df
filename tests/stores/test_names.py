"""Names that users give never meet those that a store's file gives to its own tables, keys and collections."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest
import shops
from shops import Shop
from test_every_store import UNIT

import gristmill as gm

# Names of ours, by the kind of store: of what is published (`scores` is), of what is staged, and of notes.
OURS = {
    "duckdb": ["gristmill_marks", "Gristmill_Parts", "gristmill_rows", "gm_0123456789_g0001_ab"],
    "sqlite": ["gristmill_marks", "Gristmill_Parts", "gm_0123456789_g0001_ab"],
    "postgresql": ["gristmill_marks", "gristmill_parts", "gm_0123456789_g0001_ab", "x" * 64],
    "redis": ["scores:stages", "scores:gm_0123456789_g0001_ab.12345678:r", "scores:gm_0123456789_g0001_ab.1:parts"],
    "qdrant": ["gm_0123456789_g0001_ab_turn", "gm_0123456789_first_turn"],
    "cassandra": ["scores_live", "scores_Places", "scores_parts"],
}


def _same(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch


def _job(folder: Path, address: str) -> gm.Job:
    rows = pa.table({"id": [0, 1], "v": pa.array(UNIT[:2].tolist(), pa.list_(pa.float32(), 4))})
    model = gm.model(_same, batch_format="arrow")
    return gm.Job(rows, model, gm.sink(str(folder / "out")), workers=0, deliver=[gm.to(address, key="id")])


@pytest.mark.parametrize("shop", OURS, indirect=True, scope="module")
def test_names_that_are_ours_are_refused(shop: Shop, tmp_path: Path) -> None:
    """Before anything is scored, and what is there by the names stays."""
    _job(tmp_path / "first", shop.address("scores")).run()
    seen = shop.seen("scores")
    for name in OURS[shop.name]:
        with pytest.raises(gm.BadJob, match="give another name"):
            _job(tmp_path / "other", shop.address(name)).run()
        assert not list((tmp_path / "other").glob("out/*.parquet"))
    assert shop.seen("scores") == seen


@pytest.mark.parametrize("name", ["asked", "given", "t", "a"])
def test_tables_that_are_named_as_something_in_a_query(name: str, tmp_path: Path) -> None:
    """Are delivered to and looked up like others."""
    for store in ("duckdb", "sqlite"):
        address = f"{store}://{tmp_path}/x.{store}#{name}"
        _job(tmp_path / store, address).run()
        with gm.lookup(address) as lookup:
            assert [row and row["id"] for row in lookup.get_many([1, 5])] == [1, None]


@pytest.mark.parametrize("field", ["of its row", "of none", "another"])
@pytest.mark.parametrize("delete", [False, True])
@pytest.mark.parametrize("name", ["s", "T"])
def test_columns_that_are_named_as_tables_in_a_query(name: str, delete: bool, field: str, tmp_path: Path) -> None:
    """`s.id` in a subquery of DuckDB is the field of a column `s` before it is the column of a table `s` outside: rows
    were lost, doubled or left.
    """
    address = f"duckdb://{tmp_path}/x.duckdb#t"
    added = 100 if field == "of none" else 0
    for first in (0, 3):
        ids = list(range(first, first + 5))
        fields = [{"n" if field == "another" else "id": i + added} for i in ids]
        rows = pa.table({"id": ids, name: fields, "night": [first] * 5})
        to = gm.to(address, key="id", mode="upsert", delete=delete)
        job = gm.Job(rows, gm.model(_same, batch_format="arrow"), str(tmp_path / "out"), workers=0, deliver=[to])
        job.run(restart=True)
    with duckdb.connect(str(tmp_path / "x.duckdb")) as db:
        found = db.execute("SELECT id, night FROM t ORDER BY id").fetchall()
    earlier = [] if delete else [(i, 0) for i in range(3)]
    assert found == earlier + [(i, 3) for i in range(3, 8)]


def test_a_key_of_redis_that_others_have(redis_server: str, tmp_path: Path) -> None:
    """A hash that gristmill did not write keeps its fields; and so does what is no hash."""
    import redis

    with shops.redis(redis_server, tmp_path), redis.Redis.from_url(f"{redis_server}/3") as db:
        db.hset("profile", "name", "Ada")
        db.set("word", "Ada")
        for name in ("profile", "word"):
            with pytest.raises(gm.BadJob, match=r"is a key that gristmill did not write|WRONGTYPE"):
                _job(tmp_path / name, f"{redis_server}/3#{name}").run()
        assert db.hgetall("profile") == {b"name": b"Ada"} and db.get("word") == b"Ada"


def test_columns_that_postgres_would_cut(postgres: str, tmp_path: Path) -> None:
    """It has names of 63 bytes: a longer one is told before anything is scored."""
    with shops.postgres(postgres, tmp_path) as shop:
        rows = pa.table({"id": [0, 1], "é" * 32: ["a", "b"]})
        model, to = gm.model(_same, batch_format="arrow"), gm.to(shop.address("scores"), key="id")
        with pytest.raises(gm.BadJob, match="Postgres has names of 63 bytes at most"):
            gm.Job(rows, model, gm.sink(str(tmp_path / "out")), workers=0, deliver=[to]).run()
        assert shop.seen("scores") is None


RESERVED = {
    "postgresql": ["ctid", "xmin", "xmax", "cmin", "cmax", "tableoid"],
    "lance": ["_rowid", "_rowaddr", "_rowoffset", "_row_created_at_version", "_row_last_updated_at_version", "*"],
}


@pytest.mark.parametrize("shop", RESERVED, indirect=True, scope="module")
def test_columns_that_every_table_has(shop: Shop, tmp_path: Path) -> None:
    """Those of the result are told before anything is scored."""
    for name in RESERVED[shop.name]:
        rows, to = pa.table({"id": [0, 1], name: ["a", "b"]}), gm.to(shop.address("own"), mode="upsert", key=name)
        with pytest.raises(
            gm.BadJob, match=f"column '{re.escape(name)}': .*(of its own|does not find keys of that name)"
        ):
            gm.Job(rows, gm.model(_same, batch_format="arrow"), str(tmp_path / "out"), workers=0, deliver=to).run()
        assert not (tmp_path / "out" / "_SUCCESS").exists()


FIELDS = ["name", "end", "order", "aB", "A", "É", "日本", "a b", 'q"t', "x.y", "a", "1a"]


@pytest.mark.parametrize("mode", ["replace", "append", "upsert"])
def test_fields_of_structs_that_duckdb_quotes_or_does_not(mode: Any, tmp_path: Path) -> None:
    """Whatever a field is called, its table is delivered to each night, at any depth."""
    kinds = {name: pa.struct([(name, pa.list_(pa.struct([(name, pa.int64())])))]) for name in FIELDS}
    columns = {f"c{n}": pa.array([{f: [{f: n}]}, None], kind) for n, (f, kind) in enumerate(kinds.items())}
    to = gm.to(f"duckdb://{tmp_path}/x.duckdb#t", mode=mode, key="id")
    for first in (0, 2):
        rows = pa.table({"id": [first, first + 1], **columns})
        gm.Job(rows, gm.model(_same, batch_format="arrow"), str(tmp_path / str(first)), workers=0, deliver=to).run()
    with gm.lookup(to) as lookup:
        assert lookup.get_many([2, 3]) == rows.to_pylist()


@pytest.mark.parametrize("name", ["", "a\0b"])
def test_fields_of_structs_that_duckdb_does_not_name(name: str, tmp_path: Path) -> None:
    """They are refused before anything is scored."""
    rows = pa.table({"id": [0], "c": pa.array([[{name: 1}]], pa.list_(pa.struct([(name, pa.int64())])))})
    to = f"duckdb://{tmp_path}/x.duckdb#t"
    with pytest.raises(gm.BadJob, match=r"column 'c' has a field named .*: give it another name in a step"):
        gm.Job(rows, gm.model(_same, batch_format="arrow"), str(tmp_path / "out"), workers=0, deliver=to).run()
    assert not (tmp_path / "out" / "_SUCCESS").exists()
