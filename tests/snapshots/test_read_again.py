"""What a run reads when it reads a store again: the same rows, or an error that says what is not there any more."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import gristmill as gm

lake = pytest.importorskip("deltalake")
EACH = 20_000  # rows of a file: of small ones the table's reader makes one task


def doubled(batch: dict[str, Any], folder: str) -> dict[str, Any]:
    """Twice the number; while a file asks for it, one row fails, or the second shard ends the run."""
    if Path(folder, "dead").exists() and 3 * EACH + 5 in batch["id"]:
        raise ValueError("not this one")
    if Path(folder, "stop").exists() and list(Path(folder, "out").glob("_gristmill/g*/receipts/*.json")):
        raise KeyboardInterrupt
    return {"double": batch["id"] * 2}


def job(folder: Path, sink: str = "out") -> gm.Job:
    """A table's rows, in a shard for each file."""
    model = gm.model(doubled, folder=str(folder), returns={"double": "int64"})
    output = gm.sink(str(folder / sink), keep=["id"], row_id="row")
    return gm.Job(f"delta://{folder}/table", model, output, workers=0, shard_rows=EACH)


def filled(place: Path, first: int = 0, *, copied: bool = True) -> None:
    """A table of six files; if it is to be copied, the last has a column that the others lack."""
    shutil.rmtree(place, ignore_errors=True)
    for at in range(6):
        ids = pa.array(range(first + at * EACH, first + (at + 1) * EACH))
        more = {"more": ["x"] * EACH} if copied and at == 5 else {}
        lake.write_deltalake(str(place), pa.table({"id": ids, **more}), mode="append", schema_mode="merge")


def lost(folder: Path) -> int:
    """How many copies were there, which are now gone: so is the folder for temporary files after a restart."""
    copies = list((folder / "out" / "_gristmill" / "inputs").glob("*.snapshot"))
    for copy in copies:
        shutil.rmtree(copy)
    return len(copies)


def stopped(folder: Path) -> None:
    """A run that ends after it has committed a shard or more, and whose copy is lost."""
    (folder / "stop").touch()
    with pytest.raises(gm.RunFailed):
        job(folder).run()
    (folder / "stop").unlink()
    assert list((folder / "out").glob("_gristmill/g*/receipts/*.json"))
    lost(folder)


def ids(folder: Path) -> list[int]:
    """What was published."""
    return sorted(gm.read(str(folder / "out")).to_table()["id"].to_pylist())


def test_a_copy_that_is_lost_is_made_again_in_the_same_order(tmp_path: Path) -> None:
    """Rows are known by their place in it: in another order some would be scored twice, and others never."""
    filled(tmp_path / "table")
    stopped(tmp_path)
    table = lake.DeltaTable(str(tmp_path / "table"))
    table.create_checkpoint()
    table.delete("id < 5")
    assert job(tmp_path).run().shards_resumed
    assert ids(tmp_path) == list(range(6 * EACH))


def test_dead_letters_of_a_copy_that_is_lost(tmp_path: Path) -> None:
    """The rows that died are those that are scored again, of a copy in the same order."""
    filled(tmp_path / "table")
    (tmp_path / "dead").touch()
    assert job(tmp_path).run().rows_dead == 1
    (tmp_path / "dead").unlink()
    assert lost(tmp_path) == 1
    assert gm.retry_dead(job(tmp_path)).rows_dead == 0
    assert ids(tmp_path) == list(range(6 * EACH))


def test_row_ids_of_a_copy_are_the_same_in_every_result(tmp_path: Path) -> None:
    """They are positions in it."""
    filled(tmp_path / "table")
    one, other = (job(tmp_path, sink).run().read().to_table().sort_by("id")["row"] for sink in ("one", "other"))
    assert one.equals(other)


def test_a_table_that_is_made_again_is_another_table(tmp_path: Path) -> None:
    """Though its versions have the same numbers: for a finished result, and for a run that is to go on."""
    filled(tmp_path / "table")
    job(tmp_path, "done").run()
    stopped(tmp_path)
    filled(tmp_path / "table", first=500_000)
    with pytest.raises(gm.PlanChanged, match="the store that is the source holds other rows now"):
        job(tmp_path, "done").run()
    with pytest.raises(gm.PlanChanged, match=r"table: version 5, which .* is gone: another table is there .*--restart"):
        job(tmp_path).run()
    job(tmp_path).run(restart=True)
    assert ids(tmp_path) == list(range(500_000, 500_000 + 6 * EACH))


@pytest.mark.parametrize("copied", [False, True])
def test_a_version_whose_files_were_removed(tmp_path: Path, copied: bool) -> None:
    """VACUUM: what was read is gone, and what remains is said."""
    filled(tmp_path / "table", copied=copied)
    stopped(tmp_path)
    more = {"more": ["x"]} if copied else {}
    lake.write_deltalake(str(tmp_path / "table"), pa.table({"id": [1], **more}), mode="overwrite")
    lake.DeltaTable(str(tmp_path / "table")).vacuum(0, enforce_retention_duration=False, dry_run=False)
    with pytest.raises(gm.PlanChanged, match=r"version 5, which .* is gone: .*--restart") as told:
        job(tmp_path).run()
    assert told.value.exit_code == 4
    assert job(tmp_path).run(restart=True).rows_ok == 1


def test_a_partition_that_is_named_as_null_is(tmp_path: Path) -> None:
    """A text that folders' names have for null stays a text."""
    rows = pa.table({"id": [1, 2], "part": ["__HIVE_DEFAULT_PARTITION__", "b"]})
    lake.write_deltalake(str(tmp_path / "table"), rows, partition_by=["part"])
    report = gm.apply(str(tmp_path / "table"), str(tmp_path / "out"), fn=lambda b: {"d": b["id"]}, keep=["part"])
    assert sorted(report.read().to_table()["part"].to_pylist()) == ["__HIVE_DEFAULT_PARTITION__", "b"]


def test_a_store_that_is_named_twice_is_read_once(tmp_path: Path) -> None:
    """As a file is, and it is said; also if two versions have files in common."""
    filled(tmp_path / "table", copied=False)
    place = f"delta://{tmp_path}/table"
    for named, said in (
        ([place, str(tmp_path / "table")], "is named twice as a source: it is read once"),
        ([f"{place}?version=2", place], "files that several of the addresses name are read once"),
    ):
        sink = tmp_path / said[:8]
        for _ in range(2):
            with pytest.warns(gm.GristmillWarning, match=said):
                gm.apply(gm.source(*named), str(sink), fn=lambda b: {"d": b["id"]}, keep=["id"])
        assert gm.read(str(sink)).count_rows() == 6 * EACH


# ---------------------------------------------------------------- Iceberg


@pytest.fixture
def iceberg(tmp_path: Path) -> Any:
    """A catalog, and what opens it."""
    pytest.importorskip("pyiceberg")
    from pyiceberg.catalog import load_catalog

    place = {"type": "sql", "uri": f"sqlite:///{tmp_path}/catalog.db", "warehouse": f"file://{tmp_path}/house"}
    made = load_catalog("again", **place)
    made.create_namespace("deep")
    return made, place


def test_an_iceberg_table_that_names_a_file_twice(iceberg: Any, tmp_path: Path) -> None:
    """Its rows are two each, as for every other reader."""
    import pyarrow.parquet as pq

    made, storage = iceberg
    table = made.create_table("deep.twice", schema=pa.schema({"id": pa.int64()}))
    pq.write_table(pa.table({"id": [1, 2]}), tmp_path / "file.parquet")
    table.add_files([str(tmp_path / "file.parquet")])
    table.add_files([str(tmp_path / "file.parquet")], check_duplicate_files=False)
    source = gm.source("iceberg://again/deep.twice", storage=storage)
    report = gm.apply(source, str(tmp_path / "out"), fn=lambda batch: {"double": batch["id"] * 2}, keep=["id"])
    assert sorted(report.read().to_table()["id"].to_pylist()) == [1, 1, 2, 2]


def test_row_ids_of_a_copied_iceberg_table(iceberg: Any, tmp_path: Path) -> None:
    """Manifests that were rewritten name its files in another order; the copy has them in one."""
    from pyiceberg.types import StringType

    made, storage = iceberg
    table = made.create_table("deep.copied", schema=pa.schema({"id": pa.int64()}))
    for at in range(6):
        table.append(pa.table({"id": range(10 * at, 10 * at + 10)}))
    with table.update_schema() as update:
        update.add_column("more", StringType())
    made.load_table("deep.copied").delete("id = 5")
    results = []
    for sink in ("one", "other"):
        report = gm.apply(gm.source("iceberg://again/deep.copied", storage=storage, columns=["id", "more"]),
                          str(tmp_path / sink), fn=lambda b: {"d": b["id"]}, keep=["id"], row_id="row")  # fmt: skip
        results.append({r["id"]: r["row"] for r in report.read().to_table().to_pylist()})
        table = made.load_table("deep.copied")
        names = {"commit.manifest-merge.enabled": "true", "commit.manifest.min-count-to-merge": "1"}
        with table.transaction() as change:
            change.set_properties(names)
        table.append(pa.table({"id": [99], "more": ["x"]}))
        table.delete("id = 99")
    assert len(results[0]) == 59 and results[0] == results[1]


@pytest.mark.parametrize("how", ["expired", "made again"])
def test_an_iceberg_snapshot_that_is_gone(iceberg: Any, tmp_path: Path, how: str) -> None:
    """A run that is to go on says so."""
    made, storage = iceberg

    def filled(*values: int) -> Any:
        table = made.create_table("deep.rows", schema=pa.schema({"id": pa.int64()}))
        for value in values:
            table.append(pa.table({"id": [value]}))
        return table

    def run(**options: Any) -> gm.Report:
        model = gm.model(doubled, folder=str(tmp_path), returns={"double": "int64"})
        source = gm.source("iceberg://again/deep.rows", storage=storage)
        return gm.Job(source, model, gm.sink(str(tmp_path / "out")), workers=0, shard_rows=1).run(**options)

    table = filled(1, 2, 3)
    (tmp_path / "stop").touch()
    with pytest.raises(gm.RunFailed):
        run()
    (tmp_path / "stop").unlink()
    if how == "expired":
        then = table.current_snapshot().snapshot_id
        table.append(pa.table({"id": [4]}))
        table.maintenance.expire_snapshots().by_id(then).commit()
    else:
        made.drop_table("deep.rows")
        filled(7)
    with pytest.raises(gm.PlanChanged, match=r"rows: snapshot \d+, which .* is gone: .*--restart"):
        run()
    assert run(restart=True).rows_ok == (4 if how == "expired" else 1)
