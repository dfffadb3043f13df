"""Data files that the log of any table has named stay, whatever becomes of the table that they were delivered to; what
no log names goes.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import shops
from test_every_store import ROWS, write
from test_lakes import again, files_of, iceberg_catalog, iceberg_table, job, wanted

import gristmill as gm
from gristmill.stores import delta, iceberg, lance
from gristmill.stores.named import NOTES, Named

TABLES = {"delta": delta.Table, "iceberg": iceberg.Table, "lance": lance.Table}


@pytest.fixture(params=list(TABLES))
def shop(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[shops.Shop]:
    """Each kind of lake, without tables."""
    with shops.SHOPS[request.param]("", tmp_path) as made:
        yield made


@pytest.fixture
def out(tmp_path: Path) -> str:
    """A sink with a result."""
    write(tmp_path / "in", 0, ROWS)
    job(tmp_path).run()
    return str(tmp_path / "out")


def ys(folder: Path, name: str) -> list[float]:
    """The values of an Iceberg table, in order."""
    return sorted(iceberg_table(folder, name).scan().to_arrow()["y"].to_pylist())


def told(times: int = 1) -> list[float]:
    """Those of a result."""
    return sorted(row["y"] for row in wanted(range(ROWS), times).values())


@pytest.mark.parametrize("how", ["renamed", "registered"])
@pytest.mark.parametrize("mode", ["replace", "append"])
def test_an_iceberg_table_under_another_name(mode: str, how: str, out: str, tmp_path: Path) -> None:
    """Keeps its rows when the same result and the next one are delivered to the old name, whose table is in the same
    folder; also once its files are removed there with the table that was renamed.
    """
    with shops.SHOPS["iceberg"]("", tmp_path) as shop:
        to, catalog = gm.to(shop.address("scores"), mode=mode), iceberg_catalog(tmp_path)
        gm.deliver(out, to)
        if how == "renamed":
            catalog.rename_table(("nights", "scores"), ("nights", "old"))
        else:
            there = iceberg_table(tmp_path).metadata_location
            catalog.drop_table(("nights", "scores"))
            catalog.register_table(("nights", "old"), there)
        gm.deliver(out, to)
        assert ys(tmp_path, "old") == ys(tmp_path, "scores") == told()
        assert not shared(tmp_path, "old", "scores")
        gm.deliver(again(tmp_path, 2), gm.to(shop.address("scores")))
        assert ys(tmp_path, "old") == told() and ys(tmp_path, "scores") == told(2)


def shared(folder: Path, one: str, other: str) -> set[str]:
    """Data files of two Iceberg tables."""
    paths = [{task.file.file_path for task in iceberg_table(folder, n).scan().plan_files()} for n in (one, other)]
    return paths[0] & paths[1]


def test_an_iceberg_table_that_is_registered_twice(out: str, tmp_path: Path) -> None:
    """A result that came to one of the two stays there as the next one comes to both, from one run."""
    with shops.SHOPS["iceberg"]("", tmp_path) as shop:
        first, second = (gm.to(shop.address(name)) for name in ("scores", "copy"))
        gm.deliver(out, first)
        iceberg_catalog(tmp_path).register_table(("nights", "copy"), iceberg_table(tmp_path).metadata_location)
        gm.deliver(again(tmp_path, 2), first)
        before = iceberg_table(tmp_path).current_snapshot()
        job(tmp_path, 3, deliver=[first, second]).run(restart=True)
        assert ys(tmp_path, "scores") == ys(tmp_path, "copy") == told(3)
        earlier = iceberg_table(tmp_path).scan(snapshot_id=before.snapshot_id)
        assert sorted(earlier.to_arrow()["y"].to_pylist()) == told(2)


def forgotten(folder: Path) -> None:
    """Let the log of a Delta table forget which staging places were committed, as Spark's checkpoints do after
    `delta.setTransactionRetentionDuration`.
    """
    from deltalake import DeltaTable

    table = DeltaTable(str(folder))
    table.alter.set_table_properties({"delta.setTransactionRetentionDuration": "interval 7 days"}, False)
    table.create_checkpoint()
    log = folder / "_delta_log"
    (path,) = log.glob("*.checkpoint.parquet")
    found = pq.read_table(path)
    pq.write_table(found.filter(pc.invert(pc.is_valid(found["txn"]))), path)
    for entry in sorted(log.glob("*.json"))[:-1]:
        entry.unlink()


@pytest.mark.parametrize("noted", [True, False])
def test_a_delta_table_that_has_forgotten_its_transactions(noted: bool, out: str, tmp_path: Path) -> None:
    """Keeps its files until rows take the place of theirs, those of earlier versions too if they were noted."""
    with shops.SHOPS["delta"]("", tmp_path) as shop:
        to = gm.to(shop.address("scores"), mode="upsert", key="id")
        gm.deliver(out, gm.to(shop.address("scores")))
        first = files_of(shop, tmp_path)
        second = again(tmp_path, 2)
        gm.deliver(second, gm.to(shop.address("scores")))
        before = files_of(shop, tmp_path)
        forgotten(tmp_path / "scores")
        if not noted:
            shutil.rmtree(tmp_path / "scores" / NOTES)
        gm.deliver(again(tmp_path, 3), to)
        assert shop.seen("scores") == wanted(range(ROWS), 3)
        assert files_of(shop, tmp_path) >= (before if noted else before - first)


class Killed(BaseException):
    """What ends a process."""


def dies(*_: Any) -> Any:
    raise Killed


def test_what_was_interrupted_before_its_commit(
    shop: shops.Shop, out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Is used by the attempt that goes on, and removed before the next result comes."""
    gm.deliver(out, gm.to(shop.address("scores")))
    own = files_of(shop, tmp_path)
    second = again(tmp_path, 2)
    with monkeypatch.context() as here:
        here.setattr(TABLES[shop.name], "commit", dies)
        with pytest.raises(Killed):
            gm.deliver(second, gm.to(shop.address("scores")))
        left = files_of(shop, tmp_path) - own
        with pytest.raises(Killed):
            gm.deliver(second, gm.to(shop.address("scores")))
    assert files_of(shop, tmp_path) - own == left
    gm.deliver(again(tmp_path, 3), gm.to(shop.address("scores")))
    assert not files_of(shop, tmp_path) & left and files_of(shop, tmp_path) > own
    assert shop.seen("scores") == wanted(range(ROWS), 3)


def test_a_first_delivery_that_was_interrupted_before_its_commit(
    shop: shops.Shop, out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goes on with what is there."""
    with monkeypatch.context() as here:
        here.setattr(TABLES[shop.name], "commit", dies)
        for _ in range(2):
            with pytest.raises(Killed):
                gm.deliver(out, gm.to(shop.address("scores")))
    left = files_of(shop, tmp_path)
    gm.deliver(out, gm.to(shop.address("scores")))
    assert files_of(shop, tmp_path) == left and shop.seen("scores") == wanted(range(ROWS))


@pytest.mark.parametrize("shop", ["delta", "iceberg"], indirect=True)
def test_a_first_delivery_that_may_be_committed_and_is_another_now(
    shop: shops.Shop, out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Leaves what was staged, of other files than it has now, and stages them elsewhere."""
    with monkeypatch.context() as here:
        here.setattr(TABLES[shop.name], "commit", dies)
        with pytest.raises(Killed):
            gm.deliver(out, gm.to(shop.address("scores")))
    left = files_of(shop, tmp_path)
    source = next(tmp_path.rglob("gm_*/*.parquet"))
    odd = source.with_name(source.name.replace(".", "0.", 1))
    table = pq.read_table(source)
    with pq.ParquetWriter(odd, table.schema) as writer:
        writer.add_key_value_metadata({"gristmill.part": "another"})
        writer.write_table(table)
    gm.deliver(out, gm.to(shop.address("scores")))
    assert shop.seen("scores") == wanted(range(ROWS)) and files_of(shop, tmp_path) > left


def test_a_commit_that_is_refused(shop: shops.Shop, out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves nothing that the next result does not remove."""

    def refuses(*_: Any) -> Any:
        raise gm.BadJob("not today")

    with monkeypatch.context() as here:
        here.setattr(TABLES[shop.name], "commit", refuses)
        with pytest.raises(gm.BadJob, match="not today"):
            gm.deliver(out, gm.to(shop.address("scores")))
    left = files_of(shop, tmp_path)
    gm.deliver(again(tmp_path, 2), gm.to(shop.address("scores")))
    assert left and not files_of(shop, tmp_path) & left


def test_a_process_that_ends_as_it_has_committed(out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has named its files: they stay after the table was renamed."""
    with shops.SHOPS["iceberg"]("", tmp_path) as shop:
        with monkeypatch.context() as here:
            here.setattr(Named, "keep", dies)
            with pytest.raises(Killed):
                gm.deliver(out, gm.to(shop.address("scores")))
        iceberg_catalog(tmp_path).rename_table(("nights", "scores"), ("nights", "old"))
        gm.deliver(again(tmp_path, 2), gm.to(shop.address("scores")))
        assert ys(tmp_path, "old") == told() and ys(tmp_path, "scores") == told(2)


@pytest.mark.long
@pytest.mark.leaves_children
def test_a_spark_table_that_was_renamed(out: str, tmp_path: Path, spark_session: str) -> None:
    """Keeps its files when results are delivered to the old name; those of the new table go as ever."""
    from pyspark.sql import SparkSession

    with shops.SHOPS["spark"](spark_session, tmp_path) as shop:
        to, home = gm.to(shop.address("scores")), tmp_path / "lake" / "scores.gristmill"
        gm.deliver(out, to)
        gm.deliver(again(tmp_path, 2), to)
        old = set(home.glob("data-*"))
        database = shop.address("").removeprefix("spark://").rstrip(".")
        SparkSession.builder.getOrCreate().sql(f"ALTER TABLE {database}.scores RENAME TO {database}.old")
        for times in (3, 4, 5):
            gm.deliver(again(tmp_path, times), to)
        assert shop.seen("old") == wanted(range(ROWS), 2) and shop.seen("scores") == wanted(range(ROWS), 5)
        assert old < set(home.glob("data-*")) and len(set(home.glob("data-*")) - old) == 2
