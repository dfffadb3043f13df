"""Values in tables of lakes: each is there as it was, or is refused before the table changes."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import shops

import gristmill as gm
from gristmill.sinks.partition import NULL
from gristmill.stores.contract import Part

pytestmark = pytest.mark.filterwarnings("ignore:Delete operation did not match:UserWarning")
RECORD = pa.struct([("a", pa.string())])
DEEP = pa.list_(pa.list_(RECORD))
HOLLOW = {
    "tags": pa.array([[{"a": "x"}], [], None, [None]], pa.list_(RECORD)),
    "by": pa.array([[("k", {"a": "x"})], [], None, [("k", None)]], pa.map_(pa.string(), RECORD)),
    "deep": pa.array([{"n": [[{"a": "x"}], None]}, {"n": None}, None, {"n": []}], pa.struct([("n", DEEP)])),
    "plain": pa.array([[1], [], None, [None]], pa.list_(pa.int32())),
}  # fmt: skip


def same(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The rows as they are."""
    return batch


def sink_of(rows: pa.Table, folder: Path, name: str) -> str:
    """A sink with these rows."""
    gm.Job(rows, gm.model(same, batch_format="arrow"), str(folder / name), workers=0, on_nan="keep").run()
    return str(folder / name)


def about(folder: Path) -> dict[str, str]:
    """Where the catalog of the shop of Iceberg is."""
    return {"type": "sql", "uri": f"sqlite:///{folder}/catalog.sqlite", "warehouse": f"file://{folder}/lake"}


def catalog(folder: Path) -> Any:
    """That catalog."""
    from pyiceberg.catalog import load_catalog

    return load_catalog("shop", **about(folder))


def source(folder: Path) -> Any:
    """The Iceberg table, as a source."""
    return gm.source("iceberg://shop/nights.scores", storage=about(folder))


def stored(folder: Path) -> list[dict[str, Any]]:
    """The rows of the Iceberg table, as Arrow reads its files."""
    tasks = catalog(folder).load_table(("nights", "scores")).scan().plan_files()
    files = [task.file.file_path.removeprefix("file://") for task in tasks]
    return sorted((row for path in files for row in pq.ParquetFile(path).read().to_pylist()), key=lambda row: row["id"])


@pytest.mark.few(1)
def test_iceberg_null_lists_of_structs(tmp_path: Path) -> None:
    """They stay null in rows that a delivery does not bring, when they are looked up, and as a source, also of files
    that lack a column."""
    rows = pa.table({"id": range(4), **HOLLOW})
    whole, one = sink_of(rows, tmp_path, "whole"), sink_of(rows[:1], tmp_path, "one")
    with shops.iceberg("", tmp_path) as shop:
        address = shop.address("scores")
        gm.deliver(whole, address, mode="upsert", key="id")
        gm.deliver(one, address, mode="upsert", key="id")
        assert stored(tmp_path) == rows.to_pylist()
        with gm.lookup(address) as lookup:
            assert lookup.get_many(range(4)) == rows.to_pylist()
        report = gm.apply(source(tmp_path), str(tmp_path / "again"), fn=same, batch_format="arrow")
        assert report.read().to_table().sort_by("id").to_pylist() == rows.to_pylist()
        more = pa.list_(pa.struct([*RECORD, pa.field("b", pa.int64())]))
        with catalog(tmp_path).load_table(("nights", "scores")).update_schema() as columns:
            columns.union_by_name(pa.schema([("more", pa.list_(RECORD)), ("tags", more)]))
        tags = [[{"a": "x", "b": None}], [], None, [None]]
        wanted = [{**row, "tags": some, "more": None} for row, some in zip(rows.to_pylist(), tags, strict=True)]
        with gm.lookup(address) as lookup:
            assert lookup.get_many(range(4)) == wanted


@pytest.mark.few(1)
def test_iceberg_files_that_only_pyiceberg_reads(tmp_path: Path) -> None:
    """A column whose nulls would become empty is not read where its fields have other names in a file."""
    rows = pa.table({"id": range(4), "tags": HOLLOW["tags"]})
    sink = sink_of(rows, tmp_path, "whole")
    with shops.iceberg("", tmp_path) as shop:
        gm.deliver(sink, shop.address("scores"), key="id")
        with catalog(tmp_path).load_table(("nights", "scores")).update_schema() as columns:
            columns.rename_column("tags.a", "b")
        told = "column 'tags' has lists or maps of structs, .* had other names or types"
        with gm.lookup(shop.address("scores")) as lookup, pytest.raises(gm.BadSource, match=told):
            lookup.get(1)


@pytest.mark.few(1)
def test_iceberg_null_lists_of_structs_in_partitions(tmp_path: Path) -> None:
    """pyiceberg would store them as empty ones: they are refused with their row, and nothing changes."""
    rows = pa.table({"id": range(4), "tags": HOLLOW["tags"], "deep": HOLLOW["deep"]})
    with shops.iceberg("", tmp_path) as shop:
        table = catalog(tmp_path).create_table(("nights", "scores"), rows.schema)
        with table.update_spec() as spec:
            spec.add_identity("id")
        told = r"column '{}' has a null list or map of structs, .* partitions, in the row with id = {}: "
        for name, row in (("tags", 2), ("deep", 0)):
            some = rows.select(["id", name])
            with pytest.raises(gm.BadJob, match=told.format(name, row)):
                gm.deliver(sink_of(some, tmp_path, name), shop.address("scores"))
        assert table.refresh().current_snapshot() is None
        fine = rows.take([3])
        gm.deliver(sink_of(fine, tmp_path, "fine"), shop.address("scores"))
        assert stored(tmp_path) == fine.to_pylist()


def delta_by(column: str, kind: pa.DataType, folder: Path) -> Any:
    """A Delta table that is partitioned by a column."""
    from deltalake import DeltaTable, Schema

    columns = Schema.from_arrow(pa.schema([("id", pa.int64()), (column, kind)]))
    return DeltaTable.create(str(folder / "scores"), columns, partition_by=[column])


LOST = {
    "empty text": pa.array(["a", "", None]),
    "text of null": pa.array(["a", NULL, None]),
    "long text": pa.array(["a", "x" * 300, None]),
    "decimal": pa.array([Decimal("1.50"), Decimal("-0.01"), None], pa.decimal128(10, 2)),
    "decimal below -1": pa.array([Decimal("-2.00"), Decimal("-1.50"), None], pa.decimal128(10, 2)),
    "large float": pa.array([0.5, 1e300, None]),
    "date before year 1": pa.array([0, -800_000, None], pa.int32()).cast(pa.date32()),
}


@pytest.mark.parametrize("values", LOST)
@pytest.mark.parametrize("mode", ["append", "replace", "upsert"])
@pytest.mark.few(3)
def test_delta_partitions_that_are_not_given_back(values: str, mode: Any, tmp_path: Path) -> None:
    """Such a value is refused with its row, and the table is as it was: others of its type are delivered."""
    given = LOST[values]
    table = delta_by("p", given.type, tmp_path)
    rows = pa.table({"id": range(3), "p": given})
    with pytest.raises(gm.BadJob, match=r"column 'p'.* in the row with id = 1, p = ") as refused:
        gm.deliver(sink_of(rows, tmp_path, "out"), gm.to(f"delta://{tmp_path}/scores", mode=mode, key="id"))
    assert refused.value.exit_code == 2
    table.update_incremental()
    assert table.version() == 0
    fine = rows.take([0, 2])
    address = gm.to(f"delta://{tmp_path}/scores", mode=mode, key="id")
    gm.deliver(sink_of(fine, tmp_path, "fine"), address)
    table.update_incremental()
    assert table.to_pyarrow_table().sort_by("id").to_pylist() == fine.to_pylist()
    with gm.lookup(address) as lookup:
        assert lookup.get_many([0, 2]) == fine.to_pylist()


def test_delta_partitions_by_bytes(tmp_path: Path) -> None:
    """No value comes back: that is told before anything is scored."""
    delta_by("p", pa.binary(), tmp_path)
    rows = pa.table({"id": range(2), "p": pa.array([b"a", b"b"])})
    out, address = str(tmp_path / "out"), f"delta://{tmp_path}/scores"
    with pytest.raises(gm.BadJob, match="column 'p': the table is partitioned by it, and deltalake does not give"):
        gm.Job(rows, gm.model(same, batch_format="arrow"), out, workers=0, deliver=address).run()
    assert not (tmp_path / "out" / "_SUCCESS").exists()


BARE = pa.timestamp("us")
ZONELESS = {
    "column": BARE,
    "list": pa.list_(BARE),
    "struct": pa.struct([("at", BARE)]),
    "values": pa.map_(pa.string(), BARE),
    "keys": pa.map_(BARE, pa.string()),
    "deep": pa.struct([("by", pa.list_(pa.map_(pa.string(), BARE)))]),
}
TIMED = {
    BARE: dt.datetime(2026, 1, 1),
    ZONELESS["list"]: [dt.datetime(2026, 1, 1), None],
    ZONELESS["struct"]: {"at": dt.datetime(2026, 1, 1)},
}


def timed(kind: pa.DataType) -> pa.Table:
    """Rows with times without a zone, nulls where they are in maps."""
    return pa.table({"id": range(2), "c": pa.array([TIMED.get(kind), None], kind)})


@pytest.mark.parametrize("mode", ["append", "replace", "upsert"])
@pytest.mark.parametrize("where", ZONELESS)
@pytest.mark.few(3)
def test_delta_times_without_a_zone_in_new_columns(where: str, mode: Any, tmp_path: Path) -> None:
    """A table that did not have such can be opened afterwards, by deltalake, too, or is as it was."""
    from deltalake import DeltaTable, write_deltalake

    at, kind = str(tmp_path / "scores"), ZONELESS[where]
    write_deltalake(at, pa.table({"id": [7]}), configuration={"delta.enableChangeDataFeed": "true"})
    out, rows = sink_of(timed(kind), tmp_path, "out"), {**dict.fromkeys(range(2)), 7: None}
    to = gm.to(f"delta://{at}", mode=mode, key="id", evolve=True)
    if kind in TIMED:
        gm.deliver(out, to)
        rows[0] = TIMED[kind]
        assert "changeDataFeed" in DeltaTable(at).protocol().writer_features
    else:
        with pytest.raises(gm.BadJob, match=r"column 'c' .*a table of it that nobody can open: cast it") as refused:
            gm.deliver(out, to)
        assert refused.value.exit_code == 2
    there = DeltaTable(at).to_pyarrow_table().to_pylist()
    if kind in TIMED:
        assert {row["id"]: row["c"] for row in there} == (rows if mode != "replace" else {0: rows[0], 1: None})
        with gm.lookup(to) as lookup:
            assert lookup.get(0) == {"id": 0, "c": TIMED[kind]}
    else:
        assert there == [{"id": 7}]


@pytest.mark.parametrize("where", ["values", "keys", "deep"])
@pytest.mark.few(3)
def test_delta_times_without_a_zone_in_maps_at_first(where: str, tmp_path: Path) -> None:
    """They are refused before anything is scored; beside a column of such times, deltalake makes a good table."""
    rows, at = timed(ZONELESS[where]), tmp_path / "scores"
    with pytest.raises(gm.BadJob, match=r"column 'c' .*a table of it that nobody can open: cast it"):
        gm.Job(
            rows, gm.model(same, batch_format="arrow"), str(tmp_path / "out"), workers=0, deliver=f"delta://{at}"
        ).run()
    assert not (tmp_path / "out" / "_SUCCESS").exists()
    assert not at.exists()
    more = rows.append_column("at", pa.array([dt.datetime(2026, 1, 1)] * 2, BARE))
    gm.deliver(sink_of(more, tmp_path, "more"), gm.to(f"delta://{at}", key="id"))
    with gm.lookup(f"delta://{at}") as lookup:
        assert lookup.get_many([0, 1]) == more.to_pylist()


PAIR = pa.struct([("a", pa.int64())])
FIXED = {
    "texts": pa.list_(pa.string(), 2),
    "bytes in lists": pa.list_(pa.list_(pa.binary(), 2)),
    "texts in structs": pa.struct([("f", pa.list_(pa.string(), 2))]),
    "lists": pa.list_(pa.list_(pa.int64()), 2),
    "lists in structs": pa.list_(pa.struct([("f", pa.list_(pa.int64()))]), 2),
    "structs": pa.list_(PAIR, 2),
    "structs in lists": pa.list_(pa.list_(PAIR, 2)),
    "nothing": pa.list_(pa.null(), 2),
}


@pytest.mark.parametrize("kind", FIXED)
def test_lance_lists_of_a_fixed_size(kind: str, tmp_path: Path) -> None:
    """Those with which Lance panics, or which it does not read, are refused before anything is scored."""
    rows = pa.table({"id": range(2), "c": pa.nulls(2, FIXED[kind])})
    job = gm.Job(rows, gm.model(same, batch_format="arrow"), str(tmp_path / "out"), workers=0,
                 deliver=f"lance://{tmp_path}/lance#t")  # fmt: skip
    with pytest.raises(gm.BadJob, match=r"column 'c' is .*, which Lance cannot hold without loss"):
        job.run()
    assert not (tmp_path / "out" / "_SUCCESS").exists()


def test_lance_lists_of_a_fixed_size_of_numbers(tmp_path: Path) -> None:
    """They are given back as they were, at any depth, and found by key."""
    deep = pa.list_(pa.struct([("f", pa.list_(pa.list_(pa.float32(), 2), 2))]))
    flags = pa.array([[True, False], None], pa.list_(pa.bool_(), 2))
    rows = pa.table({"id": range(2), "c": pa.array([[{"f": [[1.0, 2.0], [3.0, 4.0]]}], None], deep), "flags": flags})
    to = gm.to(f"lance://{tmp_path}/lance#t", mode="upsert", key="id")
    for night in ("one", "two"):
        gm.deliver(sink_of(rows, tmp_path, night), to)
        with gm.lookup(to) as lookup:
            assert lookup.get_many(range(2)) == rows.to_pylist()


def test_lance_panics(tmp_path: Path) -> None:
    """One that nobody foresaw is told as what Lance does, with exit 2, and is no traceback of Rust."""
    from gristmill.stores.lance import Table

    rows = pa.table({"c": pa.array([["a", "b"]], FIXED["texts"])})
    part = Part("x", 1, "x", lambda: iter(()))
    table = Table(gm.to(f"lance://{tmp_path}/lance#t").place)
    with pytest.raises(gm.BadJob, match=r"lance#t: Lance fails: .") as refused:
        table.write(None, str(tmp_path / "x.lance"), [part], rows.schema, iter(rows.to_batches()))
    assert refused.value.exit_code == 2
