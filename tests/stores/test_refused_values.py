"""Values that a store does not hold end a delivery with exit 2, as no repeat helps, and are told with their row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import shops

import gristmill as gm
from gristmill.arrow.topython import to_plain

STRANGE = {
    "sqlite://{folder}/s.sqlite#t": ("", r"column 'y' has NaN, which SQLite stores as null, in the row with id = 3, "),
    "lmdb://{folder}/empty": ("k", r"a key \(k\) is empty, in the row with id = 2, "),
    "lmdb://{folder}/long": ("long", r"a key \(long\) has more than 511 bytes, in the row with id = 4, "),
    "usearch://{folder}/u": ("id", r"column 'v' has a vector with NaN or infinity in it, .* row with id = 6, "),
    "qdrant://{folder}/q#t": ("id", r"column 'v' has a vector with NaN or infinity in it, .* row with id = 6, "),
    "{postgres}#strange": ("", r"column 't' has a text with a zero byte, .* row with id = 5, .*'a\\x00b'"),
}


def odd(batch: dict[str, Any]) -> dict[str, Any]:
    """In each row something that one of the stores does not take."""
    x, vectors = batch["x"], np.ones((len(batch["x"]), 3), np.float32)
    vectors[x == 6] = np.inf
    return {
        "y": np.where(x == 3, np.nan, x),
        "k": ["" if n == 2 else f"k{n:g}" for n in x],
        "long": [f"{n:g}" + "z" * 600 * int(n == 4) for n in x],
        "t": ["a\0b" if n == 5 else "t" for n in x],
        "v": vectors,
    }


@pytest.fixture(scope="module")
def strange(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A sink with such rows."""
    out = tmp_path_factory.mktemp("strange") / "out"
    rows = pa.table({"id": np.arange(10), "x": np.arange(10, dtype=np.float64)})
    returns = {"y": "float64", "k": "string", "long": "string", "t": "string", "v": "float32[3]"}
    gm.Job(rows, gm.model(odd, returns=returns), gm.sink(str(out), keep="id"), workers=0, on_nan="keep").run()
    return str(out)


@pytest.mark.parametrize("store", STRANGE)
def test_a_value_that_a_store_does_not_hold(store: str, strange: str, tmp_path: Path, request: Any) -> None:
    """The column, the row and the way out; nothing says that the same command delivers it."""
    server = request.getfixturevalue("postgres") if "{postgres}" in store else ""
    key, told = STRANGE[store]
    to = gm.to(store.format(folder=tmp_path, postgres=server), key=key or ())
    with pytest.raises(gm.BadJob, match=told) as refused:
        gm.deliver(strange, to)
    assert "to run again delivers nothing until that is mended" in str(refused.value)
    assert refused.value.exit_code == 2


def test_a_constraint_of_a_file_that_is_not_met(strange: str, tmp_path: Path) -> None:
    """In the words of the store, and exit 2, too."""
    import duckdb

    with duckdb.connect(str(tmp_path / "d")) as db:
        db.execute("CREATE TABLE t (id bigint, y double, k text UNIQUE, long text, t text CHECK (t = 't'), v float[3])")
    with pytest.raises(gm.BadJob, match=r"DuckDB says: .*CHECK constraint failed"):
        gm.deliver(strange, f"duckdb://{tmp_path}/d#t")


FAR = {
    "d": pa.array([0, -800_000], pa.int32()).cast(pa.date32()),
    "t": pa.array([0, 253_402_300_800_000_000]).cast(pa.timestamp("us")),
    "days": pa.array([[0], [0, None, 3_000_000]], pa.list_(pa.int32())).cast(pa.list_(pa.date32())),
    "deep": pa.array([[[0]], [[], [-(10**12)]]], pa.list_(pa.list_(pa.timestamp("s", "UTC")))),
}


def vectors(batch: pa.RecordBatch) -> pa.RecordBatch:
    """A vector for each row, which some stores ask for."""
    return pa.record_batch({"vector": pa.array([[1.0, 0.0]] * len(batch), pa.list_(pa.float32(), 2))})


@pytest.mark.few(16)
@pytest.mark.parametrize("column", FAR)
def test_days_that_python_does_not_have(shop: shops.Shop, column: str, tmp_path: Path) -> None:
    """They are given back as the result has them, or refused with their row."""
    rows = pa.table({"id": range(2), column: FAR[column]})
    sink = gm.sink(str(tmp_path / "out"), keep=["id", column])
    gm.Job(rows, gm.model(vectors, batch_format="arrow"), sink, workers=0).run()
    address = gm.to(shop.address(f"far_{column}"), key="id", **shop.odd)
    if shop.name in ("duckdb", "lance") or (shop.name == "postgresql" and column != "deep"):
        gm.deliver(str(tmp_path / "out"), address)
        with gm.lookup(shop.address(f"far_{column}")) as lookup:
            assert [row[column] for row in lookup.get_many(range(2)) if row] == to_plain(FAR[column])
        return
    told = f"column '{column}' has a date or time before the year 1 or after 9999, .* in the row with id = 1"
    with pytest.raises(gm.BadJob, match=told) as refused:
        gm.deliver(str(tmp_path / "out"), address)
    assert refused.value.exit_code == 2


@pytest.mark.parametrize("unit", ["s", "us"])
def test_long_durations(unit: str, postgres: str, tmp_path: Path) -> None:
    """Those that Python does not have come back from Postgres, or are refused with their row."""
    most = {"s": 2**43, "us": 2**63 - 1}[unit]
    spans = pa.array([0, most, -most], pa.duration(unit))
    rows = pa.table({"id": range(3), "span": spans})
    sink = gm.sink(str(tmp_path / "out"), keep=["id", "span"])
    gm.Job(rows, gm.model(vectors, batch_format="arrow"), sink, workers=0).run()
    address = f"{postgres}#spans_{unit}"
    gm.deliver(str(tmp_path / "out"), gm.to(address, key="id"))
    with gm.lookup(address) as lookup:
        assert [row["span"] for row in lookup.get_many(range(3)) if row] == to_plain(spans)


@pytest.mark.parametrize("column", ["real[]", "vector(2)", "vector"])
def test_doubles_in_columns_of_singles(column: str, postgres: str, database: Any, tmp_path: Path) -> None:
    """They would be rounded, or become infinite: refused before anything is scored; singles and halves go there."""
    sides = [[0.5, 1e300], [1.0 / 3, -2.0]]
    out, to = str(tmp_path / "out"), f"{postgres}#area.t"
    database.execute(f"CREATE TABLE t (id bigint, v {column.replace('vector', 'public.vector')}, vector real[])")
    rows = pa.table({"id": range(2), "v": pa.array(sides, pa.list_(pa.float64(), 2))})
    sink = gm.sink(out, keep=["id", "v"])
    with pytest.raises(gm.BadJob, match=r"column 'v' is .*does not hold the result's .*double.* without loss"):
        gm.Job(rows, gm.model(vectors, batch_format="arrow"), sink, workers=0, deliver=to).run()
    assert not (tmp_path / "out" / "_SUCCESS").exists()
    for kind in (pa.float16(), pa.float32()):
        fine = rows.set_column(1, "v", pa.array([np.float16([0.1, 3.0]).tolist(), None], pa.list_(kind, 2)))
        gm.Job(
            fine, gm.model(vectors, batch_format="arrow"), gm.sink(f"{out}{kind}", keep=["id", "v"]), workers=0
        ).run()
        gm.deliver(f"{out}{kind}", gm.to(to, key="id"))
        with gm.lookup(to) as lookup:
            assert [row["v"] for row in lookup.get_many(range(2))] == fine["v"].to_pylist()


def test_a_vector_that_pgvector_does_not_take(postgres: str, tmp_path: Path) -> None:
    """It is told with its column and row."""
    for number, odd in enumerate((None, np.nan, np.inf)):
        rows = pa.table({"id": [7, 8], "v": pa.array([[1.0, 2.0], [1.0, odd]], pa.list_(pa.float32(), 2))})
        out = tmp_path / f"out{number}"
        sink = gm.sink(str(out), keep=["id", "v"])
        gm.Job(rows, gm.model(vectors, batch_format="arrow"), sink, workers=0, on_nan="keep").run()
        with pytest.raises(gm.BadJob, match=r"column 'v' has a vector with .* in the row with id = 8: ") as refused:
            gm.deliver(str(out), f"{postgres}#hollow")
        assert refused.value.exit_code == 2
