"""Tables of lakes whose columns others change, between two deliveries or in the middle of one."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import shops

import gristmill as gm
from gristmill.stores.lake import Lake

KINDS = {
    "decimals": (pa.decimal128(10, 2), pa.decimal128(12, 4), [Decimal("1.25"), Decimal("-3.10")]),
    "whole": (pa.int32(), pa.int64(), [5, -7]),
    "floats": (pa.float32(), pa.float64(), [0.5, 0.25]),
}
MODES = ["append", "upsert", "replace"]


def same(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The rows as they are."""
    return batch


def sink_of(rows: pa.Table, folder: Path, name: str = "out") -> str:
    """A sink with these rows."""
    gm.Job(rows, gm.model(same, batch_format="arrow"), str(folder / name), workers=0).run()
    return str(folder / name)


def lance(rows: pa.Table, folder: Path) -> Path:
    """A table of somebody else."""
    import lance

    (folder / "db").mkdir()
    lance.write_dataset(rows, path := folder / "db" / "t.lance")
    return path


def seen(path: Path) -> list[tuple[Any, ...]]:
    """The rows of a Lance table."""
    import lance

    return sorted(tuple(row.values()) for row in lance.dataset(path).to_table(columns=["id", "v"]).to_pylist())


def widened(path: Path, kind: pa.DataType) -> None:
    """Change the type of the column `v`."""
    import lance

    lance.dataset(path).alter_columns({"path": "v", "data_type": kind})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.few(3)
def test_staged_before_a_column_changes_its_type(
    mode: Any, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a delivery that was interrupted: the values are those of the result, and of the table, in the new type."""
    narrow, wide, values = KINDS[kind]
    path = lance(pa.table({"id": [100], "v": pa.array(values[:1], narrow)}), tmp_path)
    result = sink_of(pa.table({"id": [1, 2], "v": pa.array(values, narrow)}), tmp_path)
    to = gm.to(f"lance://{tmp_path}/db#t", mode=mode, key="id")

    def stopped(self: Lake, load: Any) -> None:
        raise gm.RunFailed("stopped")

    with monkeypatch.context() as patch, pytest.raises(gm.RunFailed, match="stopped"):
        patch.setattr(Lake, "publish", stopped)
        gm.deliver(result, to)
    widened(path, wide)
    gm.deliver(result, to)
    assert seen(path) == [(1, values[0]), (2, values[1]), *([] if mode == "replace" else [(100, values[0])])]
    with gm.lookup(to) as lookup:
        assert lookup.get(2) == {"id": 2, "v": values[1]}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.few(1)
def test_a_column_that_changes_its_type_before_the_atomic_step(
    mode: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The delivery ends with exit 1 and changes nothing, and the next one brings the values in the new type."""
    narrow, wide, values = KINDS["decimals"]
    path = lance(pa.table({"id": [100], "v": pa.array(values[:1], narrow)}), tmp_path)
    result = sink_of(pa.table({"id": [1, 2], "v": pa.array(values, narrow)}), tmp_path)
    to = gm.to(f"lance://{tmp_path}/db#t", mode=mode, key="id")
    publish = Lake.publish

    def late(self: Lake, load: Any) -> None:
        widened(path, wide)
        publish(self, load)

    with monkeypatch.context() as patch, pytest.raises(gm.RunFailed, match="staged is not there any more: run again"):
        patch.setattr(Lake, "publish", late)
        gm.deliver(result, to)
    assert seen(path) == [(100, values[0])]
    gm.deliver(result, to)
    assert seen(path) == [(1, values[0]), (2, values[1]), *([] if mode == "replace" else [(100, values[0])])]


WAYS: list[dict[str, Any]] = [{"mode": "append"}, {"mode": "replace"}, {"mode": "upsert", "delete": True}]
STRICT = pa.schema([pa.field("id", pa.int64()), pa.field("v", pa.float64()), pa.field("z", pa.int32(), nullable=False)])


@pytest.mark.parametrize("way", WAYS, ids=lambda way: "-".join(map(str, way.values())))
@pytest.mark.parametrize("store", ["delta", "iceberg", "lance"])
@pytest.mark.few(4)
def test_a_column_that_takes_no_nulls_and_is_not_in_the_result(store: str, way: dict[str, Any], tmp_path: Path) -> None:
    """Refused before a row is scored, and the table can be read on."""
    with shops.SHOPS[store]("", tmp_path) as shop:
        old = pa.table({"id": [100], "v": [0.5], "z": pa.array([1], pa.int32())}, schema=STRICT)
        made(store, old, tmp_path)
        to = gm.to(shop.address("scores"), key="id", **way)
        refused = "that the result lacks" if store == "iceberg" and "delete" in way else "column 'z' takes no nulls"
        source = pa.table({"id": [1, 2], "v": [0.25, 1.5]})
        with pytest.raises(gm.BadJob, match=refused):
            gm.Job(source, gm.model(same, batch_format="arrow"), str(tmp_path / "out"), workers=0, deliver=[to]).run()
        assert not (tmp_path / "out" / "_SUCCESS").exists()
        assert shop.seen("scores") == {100: {"id": 100, "v": 0.5, "z": 1}}


def made(store: str, rows: pa.Table, folder: Path, **options: Any) -> None:
    """Make the table `scores` of somebody else."""
    if store == "delta":
        from deltalake import write_deltalake

        write_deltalake(folder / "scores", rows, **options)
    elif store == "lance":
        import lance

        (folder / "lancedb").mkdir(exist_ok=True)
        lance.write_dataset(rows, folder / "lancedb" / "scores.lance", **options)
    else:
        from pyiceberg.catalog import load_catalog
        from pyiceberg.schema import Schema
        from pyiceberg.types import DoubleType, IntegerType, LongType, NestedField

        about = {"type": "sql", "uri": f"sqlite:///{folder}/catalog.sqlite", "warehouse": f"file://{folder}/lake"}
        kinds = {pa.int64(): LongType(), pa.float64(): DoubleType(), pa.int32(): IntegerType()}
        fields = [NestedField(n, f.name, kinds[f.type], required=not f.nullable) for n, f in enumerate(rows.schema, 1)]
        load_catalog("shop", **about).create_table(("nights", "scores"), Schema(*fields)).append(rows)


ODD: dict[str, dict[str, Any]] = {
    "partitions": {"partition_by": ["id"]},
    "its partitions": {"partition_by": ["z"]},
    "changes": {"configuration": {"delta.enableChangeDataFeed": "true"}},
    "deletions": {"configuration": {"delta.enableDeletionVectors": "true"}},
    "names": {"configuration": {"delta.columnMapping.mode": "name"}},
    "numbers": {"configuration": {"delta.columnMapping.mode": "id"}},
    "a constraint": {},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("about", ODD)
@pytest.mark.few(7)
def test_delta_that_asks_more_and_has_a_column_that_the_result_lacks(about: str, mode: Any, tmp_path: Path) -> None:
    """It is null in the rows of the result, and as it was in others, also when nights go on."""
    from deltalake import DeltaTable

    made("delta", pa.table({"id": [100], "v": [0.5], "z": pa.array([1], pa.int32())}), tmp_path, **ODD[about])
    if about == "a constraint":
        DeltaTable(tmp_path / "scores").alter.add_constraint({"small": "v < 1000"})
    for night, values in enumerate(([0.25, 0.75], [1.5, 2.5])):
        ids = [1, 2] if mode == "replace" else [2 * night + 1, 2 * night + 2]
        result = sink_of(pa.table({"id": ids, "v": values}), tmp_path, f"night{night}")
        gm.deliver(result, gm.to(f"delta://{tmp_path}/scores", mode=mode, key="id"))
    there = pa.RecordBatchReader.from_stream(DeltaTable(tmp_path / "scores").scan()).read_all().to_pylist()
    found = sorted(tuple(row[name] for name in ("id", "v", "z")) for row in there)
    last = [(1, 1.5, None), (2, 2.5, None)]
    added = [(1, 0.25, None), (2, 0.75, None), (3, 1.5, None), (4, 2.5, None), (100, 0.5, 1)]
    assert found == (last if mode == "replace" else added)


@pytest.mark.parametrize("mode", ["append", "replace"])
@pytest.mark.few(2)
def test_iceberg_with_partitions_by_a_column_that_the_result_lacks(mode: Any, tmp_path: Path) -> None:
    """It is null in the rows of the result, and as it was in others."""
    from pyiceberg.transforms import IdentityTransform
    from test_lakes import iceberg_table

    with shops.iceberg("", tmp_path) as shop:
        made("iceberg", pa.table({"id": [100], "v": [0.5], "z": pa.array([1], pa.int32())}), tmp_path)
        with iceberg_table(tmp_path).update_spec() as spec:
            spec.add_field("z", IdentityTransform(), "z_part")
        to = gm.to(shop.address("scores"), mode=mode, key="id")
        gm.deliver(sink_of(pa.table({"id": [1, 2], "v": [0.25, 1.5]}), tmp_path), to)
        old = {100: {"id": 100, "v": 0.5, "z": 1}} if mode == "append" else {}
        new = {1: {"id": 1, "v": 0.25, "z": None}, 2: {"id": 2, "v": 1.5, "z": None}}
        assert shop.seen("scores") == {**old, **new}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("mapped", ["name", "id"])
@pytest.mark.few(2)
def test_delta_with_mapped_names_gets_no_columns(mapped: str, mode: Any, tmp_path: Path) -> None:
    """Refused before a row is scored; without new columns `evolve` does nothing there."""
    from deltalake import DeltaTable

    about = {"configuration": {"delta.columnMapping.mode": mapped}}
    made("delta", pa.table({"id": [100], "v": [0.5]}), tmp_path, **about)
    to = gm.to(f"delta://{tmp_path}/scores", mode=mode, key="id", evolve=True)
    source = pa.table({"id": [1], "v": [0.25], "w": ["a"], "x": [1]})
    with pytest.raises(gm.BadJob, match="has mapped column names, to which deltalake adds none: add 'w', 'x' there"):
        gm.Job(source, gm.model(same, batch_format="arrow"), str(tmp_path / "out"), workers=0, deliver=[to]).run()
    assert not (tmp_path / "out" / "_SUCCESS").exists()
    gm.deliver(sink_of(source.select(["id", "v"]), tmp_path, "less"), to)
    there = pa.RecordBatchReader.from_stream(DeltaTable(tmp_path / "scores").scan()).read_all().to_pylist()
    assert sorted(row["id"] for row in there) == ([1] if mode == "replace" else [1, 100])
