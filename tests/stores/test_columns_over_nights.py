"""Stores of which only marks tell the columns' types: rows are read as they were delivered also once a later delivery,
or another sink's, lacks some of their columns.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

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


def scored(batch: dict[str, Any]) -> dict[str, Any]:
    """A number and a vector for each row."""
    return {"y": batch["id"], "v": [[1.0, float(i)] for i in batch["id"]]}


def deliver(folder: Path, to: gm.Delivery, number: int, columns: dict[str, tuple[pa.DataType, Any]]) -> None:
    """The row of this number, with these columns and their values, from a sink in this folder."""
    kinds = {name: pa.array([value], kind) for name, (kind, value) in columns.items()}
    rows = pa.table({"id": pa.array([number], pa.int64()), **kinds})
    model = gm.model(scored, returns={"y": "int64", "v": "float32[2]"})
    sink = gm.sink(str(folder / "out"), keep=["id", *columns])
    gm.Job(rows, model, sink, workers=0, deliver=[to]).run(restart=True)


def held(to: gm.Delivery, number: int) -> dict[str, Any]:
    """The columns of a row that has them, as it is looked up."""
    with gm.lookup(to, "id") as lookup:
        return {name: value for name, value in lookup.get(number).items() if name in COLUMNS}


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
