"""Lakes: which version is read, and tables whose files alone are not the rows."""

from __future__ import annotations

import datetime as dt
import json
import subprocess
import sys
import time
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import wells
from scored import job

import gristmill as gm

UTC = pa.timestamp("us", "UTC")


def same(batch: dict[str, Any]) -> dict[str, Any]:
    """One column of each row."""
    return {"double": batch["id"] * 2}


def read(address: str, sink: Path, keep: list[str], **options: Any) -> list[dict[str, Any]]:
    """The rows of a source, by their ids."""
    report = gm.apply(gm.source(address, **options), str(sink), fn=same, keep=keep, returns={"double": "int64"})
    return sorted(report.read().to_table().drop_columns(["double"]).to_pylist(), key=lambda row: row["id"])


@pytest.fixture
def lake() -> Any:
    """The Delta client."""
    return pytest.importorskip("deltalake")


def test_a_folder_with_a_log_is_a_delta_table(lake: Any, tmp_path: Path) -> None:
    """Files that a commit has removed are not read, though they are still there; nothing is copied."""
    place = tmp_path / "table"
    lake.write_deltalake(str(place), pa.table({"id": [1, 2]}))
    lake.write_deltalake(str(place), pa.table({"id": [3]}), mode="overwrite")
    assert read(str(place), tmp_path / "out", ["id"]) == [{"id": 3}]
    assert not list((tmp_path / "out").glob("_gristmill/inputs/*.snapshot"))
    plan = next((tmp_path / "out").glob("_gristmill/g*/snapshots.json")).read_text()
    assert json.loads(plan)["pins"][0]["version"].startswith("1 ")


def test_an_earlier_version(lake: Any, tmp_path: Path) -> None:
    """?version= names it; one that is not there is told."""
    place = tmp_path / "table"
    lake.write_deltalake(str(place), pa.table({"id": [1, 2]}))
    lake.write_deltalake(str(place), pa.table({"id": [3]}), mode="append")
    assert read(f"delta://{place}?version=0", tmp_path / "out", ["id"]) == [{"id": 1}, {"id": 2}]
    with pytest.raises(gm.BadSource, match=r"table\?version=7: cannot be read as a Delta table: .*7"):
        read(f"delta://{place}?version=7", tmp_path / "no", ["id"])
    with pytest.raises(gm.BadJob, match="give the number of a version"):
        read(f"delta://{place}?version=last", tmp_path / "no", ["id"])
    for misspelt in (f"delta://{place}?versoin=0", f"delta+s3://box/{place.name}?versoin=0"):
        with pytest.raises(gm.BadJob, match="has no option 'versoin': did you mean 'version'"):
            read(misspelt, tmp_path / "no", ["id"])
    with pytest.raises(gm.BadJob, match="version has no value"):
        read(f"delta://{place}?version=", tmp_path / "no", ["id"])
    with pytest.raises(gm.BadJob, match=r"storage has 'version', which goes into the address: \?version="):
        read(gm.source(f"delta://{place}", storage={"version": 0}), tmp_path / "no", ["id"])


def test_rows_appended_to_a_table_are_appended_to_the_result(lake: Any, tmp_path: Path) -> None:
    """As with a folder of files: only what is new is scored."""
    place, sink = tmp_path / "table", str(tmp_path / "out")
    lake.write_deltalake(str(place), pa.table({"id": [1, 2]}))
    gm.apply(str(place), sink, fn=same, keep=["id"])
    lake.write_deltalake(str(place), pa.table({"id": [3]}), mode="append")
    report = gm.apply(str(place), sink, fn=same, keep=["id"], append=True)
    assert sorted(report.read().to_table()["id"].to_pylist()) == [1, 2, 3]
    assert len(list((tmp_path / "out").glob("*.parquet"))) == 2


@pytest.mark.long
def test_an_interrupted_run_goes_on_at_its_version(lake: Any, tmp_path: Path) -> None:
    """Though the table was overwritten meanwhile; what it read can be verified while the files are there."""
    with wells.delta("", tmp_path) as well:
        well.fill(wells.rows(0, 120))
        running, sink = begun(well), tmp_path / "out"
        try:
            until = time.monotonic() + 60
            while len(list(sink.glob("_gristmill/g*/receipts/*.json"))) < 2:
                assert running.poll() is None and time.monotonic() < until
                time.sleep(0.02)
        finally:
            running.kill()
            running.wait()
        lake.write_deltalake(str(tmp_path / "well"), wells.table(wells.rows(500, 510)), mode="overwrite")
        report = job(well.address, str(sink), {}, 0.1).run()
    assert report.shards_resumed > 0
    assert sorted(gm.read(str(sink)).to_table()["id"].to_pylist()) == list(range(120))
    told = subprocess.run(
        [sys.executable, "-m", "gristmill", "verify", str(sink), "--source"], capture_output=True, text=True
    )
    assert told.returncode == 0 and "unchanged" in told.stdout, told.stdout + told.stderr


def begun(well: wells.Well) -> subprocess.Popen[bytes]:
    """The suite's job, in a process of its own."""
    sink = str(Path(well.address.partition("://")[2]).parent / "out")
    about = {"address": well.address, "sink": sink, "storage": {}, "pause": 0.1}
    code = f"import sys; sys.path[:0] = {[str(Path(__file__).parent)]!r}; import scored; scored.run(**{about!r})"
    return subprocess.Popen([sys.executable, "-c", code])


def test_partitions_of_all_types(lake: Any, tmp_path: Path) -> None:
    """Values that are in the log and not in the files, with their types."""
    rows = pa.table(
        {
            "id": pa.array([1, 2, 3], pa.int64()),
            "day": pa.array([dt.date(2026, 1, 2), None, dt.date(1969, 5, 4)]),
            "text": ["a/b=c d%20", "ü", None],
            "at": pa.array([dt.datetime(2026, 1, 1, microsecond=5), None, dt.datetime(1960, 1, 1)], UTC),
            "price": pa.array([Decimal("1.50"), Decimal("-2.00"), None], pa.decimal128(10, 2)),
            "flag": [True, False, None],
            "small": pa.array([1, None, -3], pa.int16()),
        }
    )
    names = [name for name in rows.column_names if name != "id"]
    lake.write_deltalake(str(tmp_path / "table"), rows, partition_by=names)
    report = gm.apply(str(tmp_path / "table"), str(tmp_path / "out"), fn=same, keep=rows.column_names)
    found = report.read().to_table().select(rows.column_names).sort_by("id")
    assert found.to_pylist() == rows.to_pylist()
    assert found.schema.types == rows.schema.types
    assert not list((tmp_path / "out").glob("_gristmill/inputs/*.snapshot"))


def test_columns_that_were_added_and_widened(lake: Any, tmp_path: Path) -> None:
    """Earlier files lack them: the table's reader gives null, and its rows are copied."""
    place = str(tmp_path / "table")
    lake.write_deltalake(place, pa.table({"id": [1]}))
    lake.write_deltalake(place, pa.table({"id": [2], "more": ["x"]}), mode="append", schema_mode="merge")
    assert read(place, tmp_path / "out", ["id", "more"]) == [{"id": 1, "more": None}, {"id": 2, "more": "x"}]
    assert read(place, tmp_path / "again", ["id"], columns=["id"]) == [{"id": 1}, {"id": 2}]


def test_a_copied_version_is_the_same_input_when_it_is_copied_again(lake: Any, tmp_path: Path) -> None:
    """Its reader gives rows in any order, and what identifies them is the version."""
    place = str(tmp_path / "table")
    for number in range(8):
        columns = {"id": [number], **({"more": ["x"]} if number % 2 else {})}
        lake.write_deltalake(place, pa.table(columns), mode="append", schema_mode="merge")
    for _ in range(4):
        assert len(read(place, tmp_path / "out", ["id", "more"])) == 8


def _log(place: Path, version: int, *actions: dict[str, Any]) -> None:
    (place / "_delta_log").mkdir(exist_ok=True, parents=True)
    lines = "".join(json.dumps(action) + "\n" for action in actions)
    (place / "_delta_log" / f"{version:020}.json").write_text(lines)


def _meta(fields: list[dict[str, Any]], **configuration: str) -> dict[str, Any]:
    schema = json.dumps({"type": "struct", "fields": fields})
    about = {"id": "x", "format": {"provider": "parquet", "options": {}}, "schemaString": schema}
    return {"metaData": {**about, "partitionColumns": [], "configuration": configuration, "createdTime": 0}}


def test_deleted_rows_that_stand_in_their_file(lake: Any, tmp_path: Path) -> None:
    """A deletion vector, as Spark writes one: the row is not read."""
    import pyarrow.parquet as pq

    place = tmp_path / "table"
    place.mkdir()
    pq.write_table(pa.table({"id": pa.array([10, 11, 12], pa.int64())}), place / "a.parquet")
    protocol = {"minReaderVersion": 3, "minWriterVersion": 7, "readerFeatures": ["deletionVectors"],
                "writerFeatures": ["deletionVectors"]}  # fmt: skip
    field = {"name": "id", "type": "long", "nullable": True, "metadata": {}}
    # A roaring bitmap with the one row 1, inline in the log, in the base 85 of ZeroMQ.
    bitmap = (1681511377).to_bytes(4, "little") + (1).to_bytes(8, "little") + bytes(4)
    bitmap += (12346).to_bytes(4, "little") + (1).to_bytes(4, "little") + bytes(4) + (16).to_bytes(4, "little")
    bitmap += (1).to_bytes(2, "little")
    padded = bitmap + bytes(-len(bitmap) % 4)
    vector = {"storageType": "i", "pathOrInlineDv": _z85(padded), "sizeInBytes": len(bitmap), "cardinality": 1}
    size = (place / "a.parquet").stat().st_size
    add = {"path": "a.parquet", "partitionValues": {}, "size": size, "modificationTime": 0, "dataChange": True,
           "stats": json.dumps({"numRecords": 3}), "deletionVector": vector}  # fmt: skip
    _log(place, 0, {"protocol": protocol}, _meta([field], **{"delta.enableDeletionVectors": "true"}), {"add": add})
    assert read(str(place), tmp_path / "out", ["id"]) == [{"id": 10}, {"id": 12}]


def _z85(data: bytes) -> str:
    letters = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
    out = ""
    for at in range(0, len(data), 4):
        number = int.from_bytes(data[at : at + 4], "big")
        out += "".join(letters[number // 85**power % 85] for power in (4, 3, 2, 1, 0))
    return out


def test_columns_whose_names_are_mapped(lake: Any, tmp_path: Path) -> None:
    """They have other names in the files, as after a rename."""
    import pyarrow.parquet as pq

    place = tmp_path / "table"
    place.mkdir()
    pq.write_table(pa.table({"col-7f": pa.array([1, 2], pa.int64())}), place / "a.parquet")
    mapping = {"delta.columnMapping.id": 1, "delta.columnMapping.physicalName": "col-7f"}
    field = {"name": "id", "type": "long", "nullable": True, "metadata": mapping}
    said = {"delta.columnMapping.mode": "name", "delta.columnMapping.maxColumnId": "1"}
    size = (place / "a.parquet").stat().st_size
    add = {"path": "a.parquet", "partitionValues": {}, "size": size, "modificationTime": 0, "dataChange": True}
    _log(place, 0, {"protocol": {"minReaderVersion": 2, "minWriterVersion": 5}}, _meta([field], **said), {"add": add})
    assert read(str(place), tmp_path / "out", ["id"]) == [{"id": 1}, {"id": 2}]


# ---------------------------------------------------------------- Iceberg


@pytest.fixture
def catalog(tmp_path: Path) -> Any:
    """A catalog, and what opens it."""
    pytest.importorskip("pyiceberg")
    from pyiceberg.catalog import load_catalog

    place = {"type": "sql", "uri": f"sqlite:///{tmp_path}/catalog.db", "warehouse": f"file://{tmp_path}/ware house"}
    made = load_catalog("wells", **place)
    made.create_namespace("deep")
    return made, place


def test_an_iceberg_table_at_a_snapshot_and_a_branch(catalog: Any, tmp_path: Path) -> None:
    """Its own files are read, of the snapshot that is asked for."""
    made, storage = catalog
    table = made.create_table("deep.rows", schema=pa.schema({"id": pa.int64()}))
    table.append(pa.table({"id": [1, 2]}))
    first = table.current_snapshot().snapshot_id
    table.manage_snapshots().create_tag(first, "then").commit()
    table.append(pa.table({"id": [3]}))
    address = "iceberg://wells/deep.rows"
    assert read(address, tmp_path / "now", ["id"], storage=storage) == [{"id": 1}, {"id": 2}, {"id": 3}]
    assert not list((tmp_path / "now").glob("_gristmill/inputs/*.snapshot"))
    for said in (f"snapshot={first}", "ref=then"):
        assert read(f"{address}?{said}", tmp_path / said, ["id"], storage=storage) == [{"id": 1}, {"id": 2}]
    with pytest.raises(gm.BadSource, match=r"no branch or tag 'other': it has .*then"):
        read(f"{address}?ref=other", tmp_path / "no", ["id"], storage=storage)
    with pytest.raises(gm.BadSource, match="there is no such snapshot"):
        read(f"{address}?snapshot=5", tmp_path / "no", ["id"], storage=storage)
    with pytest.raises(gm.BadSource, match="the catalog cannot be opened: "):
        read(address, tmp_path / "no", ["id"])


def test_iceberg_columns_that_were_renamed_and_deleted_rows(catalog: Any, tmp_path: Path) -> None:
    """Two columns that swapped their names have the right values: they are told apart by their ids."""
    made, storage = catalog
    table = made.create_table("deep.rows", schema=pa.schema({"id": pa.int64(), "a": pa.string(), "b": pa.string()}))
    table.append(pa.table({"id": [1, 2, 3], "a": ["a1", "a2", "a3"], "b": ["b1", "b2", "b3"]}))
    with table.update_schema() as update:
        update.rename_column("a", "c")
    with table.update_schema() as update:
        update.rename_column("b", "a")
    with table.update_schema() as update:
        update.rename_column("c", "b")
    table.delete("id = 2")
    found = read("iceberg://wells/deep.rows", tmp_path / "out", ["id", "a", "b"], storage=storage)
    assert found == [{"id": 1, "a": "b1", "b": "a1"}, {"id": 3, "a": "b3", "b": "a3"}]


def test_a_metadata_file_is_a_table_without_a_catalog(catalog: Any, tmp_path: Path) -> None:
    """As PyIceberg's StaticTable."""
    made, _ = catalog
    table = made.create_table("deep.rows", schema=pa.schema({"id": pa.int64()}))
    table.append(pa.table({"id": [4]}))
    address = "iceberg://" + table.metadata_location.removeprefix("file://")
    assert read(address, tmp_path / "out", ["id"]) == [{"id": 4}]


# ---------------------------------------------------------------- datasets


def test_a_folder_of_splits_asks_for_one(tmp_path: Path) -> None:
    """Each is a folder of its own."""
    with wells.datasets("", tmp_path) as well:
        well.fill(wells.rows(0, 5))
    (tmp_path / "dict").mkdir()
    (tmp_path / "well").rename(tmp_path / "dict" / "train")
    (tmp_path / "dict" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    with pytest.raises(gm.BadSource, match=r"holds several datasets: name one of them: .*dict/train"):
        read(str(tmp_path / "dict"), tmp_path / "no", ["id"])
    assert len(read(str(tmp_path / "dict" / "train"), tmp_path / "out", ["id"])) == 5
    assert len(read(f"datasets://{tmp_path}/dict#train", tmp_path / "split", ["id"])) == 5


def test_a_catalog_that_is_not_there(tmp_path: Path) -> None:
    """It may answer later: exit 1, and its words."""
    pytest.importorskip("pyiceberg")
    source = gm.source("iceberg://away/shop.rows", storage={"type": "rest", "uri": "http://127.0.0.1:9"})
    with pytest.raises(gm.RunFailed, match=r"catalog cannot be opened: .*run again when it answers") as told:
        gm.Job(source, lambda batch: {"y": batch["id"]}, gm.sink(str(tmp_path / "out")), workers=0).run()
    assert told.value.exit_code == 1
