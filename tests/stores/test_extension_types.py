"""Extension types of Arrow in every store: rows are found by a UUID, and values come back as the result has them."""

from __future__ import annotations

import uuid
from pathlib import Path

import pyarrow as pa
import pytest
from shops import Shop

import gristmill as gm
from gristmill.arrow.topython import to_plain

IDS = [uuid.UUID(bytes=bytes([n] * 16)) for n in (7, 255, 0)]
CLOTHED = {
    "other": pa.array([IDS[1].bytes, None, IDS[0].bytes], pa.uuid()),
    "truth": pa.ExtensionArray.from_storage(pa.bool8(), pa.array([1, None, 0], pa.int8())),
    "grid": pa.ExtensionArray.from_storage(
        pa.fixed_shape_tensor(pa.int16(), [2, 2]),
        pa.array([[1, 2, 3, 4], [5, 6, 7, 8], [0] * 4], pa.list_(pa.int16(), 4)),
    ),
    "said": pa.ExtensionArray.from_storage(pa.json_(), pa.array(['{"a": 1.0,  "b": "\\""}', None, "null"])),
    "opaque": pa.ExtensionArray.from_storage(pa.opaque(pa.int32(), "t", "v"), pa.array([1, None, -1], pa.int32())),
}  # fmt: skip


def same(batch: pa.RecordBatch) -> pa.RecordBatch:
    """A vector for each row, which some stores ask for."""
    return pa.record_batch({"vector": pa.array([[1.0, 0.0]] * len(batch), pa.list_(pa.float32(), 2))})


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sink with such columns, whole in `all`, the first row alone in `one`."""
    folder = tmp_path_factory.mktemp("clothed")
    rows = pa.table({"id": pa.array([key.bytes for key in IDS], pa.uuid()), **CLOTHED})
    for name, some in (("all", rows), ("one", rows[:1])):
        sink = gm.sink(str(folder / name), keep=rows.column_names)
        gm.Job(some, gm.model(same, batch_format="arrow"), sink, workers=0).run()
    return folder


def test_extension_types_are_given_back(shop: Shop, out: Path) -> None:
    """After a delivery, and after an upsert of one of the rows."""
    wanted = [dict(zip(CLOTHED, values, strict=True)) for values in zip(*map(to_plain, CLOTHED.values()), strict=True)]
    address = shop.address("clothed")
    for name in ("all", "one"):
        gm.deliver(str(out / name), gm.to(address, mode="upsert", key="id", **shop.odd))
        with gm.lookup(address) as lookup:
            for keys in (IDS, [str(key) for key in IDS], [key.bytes for key in IDS]):
                found = lookup.get_many(keys)
                assert [row and row["id"] for row in found] == IDS
                assert [{name: row[name] for name in CLOTHED} for row in found if row] == wanted
            assert lookup.get(uuid.UUID(int=5)) is None
