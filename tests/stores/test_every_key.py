"""Rows are found by keys of every type and name, on the first night, after an upsert and after an append; keys that
differ in the last digit of their type are two, and -0.0 and 0.0 are one.
"""

from __future__ import annotations

import decimal
import math
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from shops import Shop

import gristmill as gm
from gristmill.arrow.topython import to_plain
from gristmill.job.delivery import STORES

NS = 1_700_000_000_123_456_789
# Four values of each type: the first two come on the first night, the middle two on the second, the last on the third.
KEYS: dict[str, tuple[pa.DataType, list[Any]]] = {
    "int8": (pa.int8(), [-128, 127, 0, 1]),
    "int64": (pa.int64(), [2**53, 2**53 + 1, -(2**63), 2**63 - 1]),
    "uint32": (pa.uint32(), [0, 2**32 - 1, 2**31, 5]),
    "uint64": (pa.uint64(), [2**64 - 1, 2**64 - 2, 2**53 + 1, 2**63]),
    "bool_text": (pa.string(), ["true", "True", "1", " "]),
    "half": (pa.float16(), [0.0, 0.5, 6e-8, -1.0]),
    "double": (pa.float64(), [0.3, 0.30000000000000004, 1e300, -5e-324]),
    "zeros": (pa.float64(), [1.0, 0.0, -2.0, 3.0]),
    "decimal": (pa.decimal128(38, 2), [decimal.Decimal(n) for n in (10**35, 10**35 + 1, -(10**35), 10**35 - 1)]),
    "money": (pa.decimal128(10, 2), [decimal.Decimal(t) for t in ("1.50", "1.51", "-0.01", "99999999.99")]),
    "decimal256": (pa.decimal256(60, 0), [decimal.Decimal(10**50 + i) for i in range(4)]),
    "time_us": (pa.time64("us"), [0, 1, 86_399_999_999, 2]),
    "time_ns": (pa.time64("ns"), [0, 1, 86_399_999_999_999, 2000]),
    "stamp_us": (pa.timestamp("us"), [NS // 1000, NS // 1000 + 1, -1, 0]),
    "stamp_ns": (pa.timestamp("ns"), [NS, NS + 1, -1, 0]),
    "zoned": (pa.timestamp("us", "Europe/Berlin"), [NS // 1000, NS // 1000 + 1, -1, 0]),
    "duration_us": (pa.duration("us"), [NS // 1000, NS // 1000 + 1, -1, 0]),
    "duration_ns": (pa.duration("ns"), [NS, NS + 1, -1, 0]),
    "date": (pa.date32(), [0, -1, 19_000, 2_000_000]),
    "text": (pa.string(), ["a", "A", "é", "a" * 40 + "\U0001f600"]),
    "large_text": (pa.large_string(), ["a", "b", "c", "d"]),
    "dictionary": (pa.dictionary(pa.int32(), pa.string()), ["a", "b", "c", "d"]),
    "bytes": (pa.binary(), [b"a", b"\xff", b"\xff\0", b"\0"]),
    "uuid": (pa.uuid(), [b"\xff" * 16, b"\0" * 16, b"a" * 16, bytes(range(16))]),
    "fixed": (pa.binary(2), [b"ab", b"a\0", b"\xff\xff", b"\0\0"]),
}
# What is refused, by the name of the column, before anything is scored for it.
REFUSED: dict[str, list[str]] = {
    "duckdb": ["half", "decimal256", "duration_us", "duration_ns"],
    "delta": ["decimal256", "time_us", "time_ns", "stamp_ns", "duration_us", "duration_ns"],
    "iceberg": ["decimal256", "time_ns", "stamp_ns", "duration_us", "duration_ns"],
    "sqlite": ["uint64"],
    "postgresql": ["time_ns", "stamp_ns", "duration_ns"],
    **{name: ["half", "double", "zeros"] for name in ("redis", "lmdb", "cassandra", "qdrant", "usearch", "faiss")},
}


def given(kind: pa.DataType, values: list[Any]) -> pa.Array:
    """Values of a type; times are given as numbers, as Python has none with nanoseconds."""
    if pa.types.is_temporal(kind):
        return pa.array(values, pa.int32() if kind.bit_width == 32 else pa.int64()).cast(kind)
    return pa.array(values, pa.string()).dictionary_encode() if pa.types.is_dictionary(kind) else pa.array(values, kind)


def same(batch: pa.RecordBatch) -> pa.RecordBatch:
    """A vector for each row, which some stores ask for."""
    return pa.record_batch({"vector": pa.array([[1.0, 0.0]] * len(batch), pa.list_(pa.float32(), 2))})


def right(address: str, sink: str, shop: Shop, mode: Any, key: str = "k") -> bool:
    """Whether all is in the store as it was delivered there."""
    made = gm.to(address, mode=mode, key=[key], **shop.odd)
    job = gm.Job("none", gm.model(same, batch_format="arrow"), gm.sink(sink), deliver=[made])
    return bool(gm.verify(job).ok)


@pytest.fixture(scope="module", params=KEYS)
def key(request: pytest.FixtureRequest) -> str:
    """Each type of keys, by name."""
    return str(request.param)


@pytest.fixture(scope="module")
def nights(key: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sink after each of three nights."""
    kind, values = KEYS[key]
    folder = tmp_path_factory.mktemp(key)
    (folder / "in").mkdir()
    for night, some in enumerate(
        (values[:2], [-0.0 if v == 0 and key == "zeros" else v for v in values[1:3]], values[3:]), 1
    ):
        rows = pa.table({"k": given(kind, some), "night": pa.array([night] * len(some))})
        pq.write_table(rows, folder / "in" / f"{night}.parquet")
        sink = gm.sink(str(folder / "out"), keep=["k", "night"])
        gm.Job(str(folder / "in"), gm.model(same, batch_format="arrow"), sink, workers=0, on_new_files="append").run()
        shutil.copytree(folder / "out", folder / f"after{night}")
    return folder


@pytest.mark.few(10)
def test_every_key_is_found(shop: Shop, key: str, nights: Path, tmp_path: Path) -> None:
    """In the row of its latest night; or its type is refused before anything is brought."""
    address, sink = shop.address(f"k_{key}"), tmp_path / "out"
    kind, values = KEYS[key]
    asked = to_plain(given(kind, values))
    found: dict[int, int] = {}
    for night, mode in ((1, "upsert"), (2, "upsert"), (3, "append")):
        shutil.rmtree(sink, ignore_errors=True)
        shutil.copytree(nights / f"after{night}", sink)
        if mode not in gm.job.delivery.STORES.get(shop.name).modes:
            mode = "upsert"
        try:
            gm.deliver(str(sink), gm.to(address, mode=mode, key="k", **shop.odd))
        except gm.BadJob as e:
            assert "'k'" in str(e) and night == 1
            assert key in REFUSED[shop.name]
            return
        found.update({1: {0: 1, 1: 1}, 2: {1: 2, 2: 2}, 3: {3: 3}}[night])
        with gm.lookup(address) as lookup:
            got = lookup.get_many(asked)
            assert {n: row["night"] for n, row in enumerate(got) if row is not None} == found
            assert lookup.get(asked[0])["night"] == 1
        assert right(address, str(sink), shop, mode)
    assert key not in REFUSED.get(shop.name, [])


@pytest.mark.few(4)
def test_nan_is_no_key(shop: Shop, tmp_path: Path) -> None:
    """It is equal to nothing, so that a row with it would be found by nobody; it is told as a null is."""
    (tmp_path / "in").mkdir()
    pq.write_table(pa.table({"k": [1.0, math.nan], "night": [1, 1]}), tmp_path / "in" / "1.parquet")
    sink = gm.sink(str(tmp_path / "out"), keep=["k", "night"])
    gm.Job(str(tmp_path / "in"), gm.model(same, batch_format="arrow"), sink, workers=0).run()
    with pytest.raises(gm.GristmillError, match=r"key column 'k' is double|1 row has a null in its key \(k\), or NaN"):
        gm.deliver(str(tmp_path / "out"), gm.to(shop.address("nan"), key="k", **shop.odd))


NAMES = ["a b", 'q"q', "dot.ted", "is?", "100%", "back`tick", "it's", "{}", "a/b", "ünï", "select"]
# Columns by which rows cannot be brought, which is told before anything is.
UNNAMED: dict[str, list[str]] = {"delta": ["back`tick"], "lance": ['q"q', "dot.ted", "back`tick"]}


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For each odd name of a column a sink after two nights."""
    folder = tmp_path_factory.mktemp("names")
    for n, name in enumerate(NAMES):
        (folder / f"in{n}").mkdir()
        for night, some in ((1, [1, 2, 3]), (2, [3, 4])):
            rows = pa.table({name: some, "night": pa.array([night] * len(some))})
            pq.write_table(rows, folder / f"in{n}" / f"{night}.parquet")
            sink = gm.sink(str(folder / f"out{n}"), keep=[name, "night"])
            model = gm.model(same, batch_format="arrow")
            gm.Job(str(folder / f"in{n}"), model, sink, workers=0, on_new_files="append").run()
            shutil.copytree(folder / f"out{n}", folder / f"after{night}.{n}")
    return folder


@pytest.mark.few(3)
def test_odd_names_of_columns(shop: Shop, named: Path, tmp_path: Path) -> None:
    """Rows are brought, updated and found by a key of any name; or it is refused before anything is brought."""
    refused = []
    for n, name in enumerate(NAMES):
        address, sink = shop.address(f"n{n}"), str(tmp_path / "out")
        try:
            for night in (1, 2):
                shutil.rmtree(sink, ignore_errors=True)
                shutil.copytree(named / f"after{night}.{n}", sink)
                gm.deliver(sink, gm.to(address, mode="upsert", key=[name], **shop.odd))
        except gm.BadJob as e:
            assert repr(name) in str(e) and night == 1
            refused.append(name)
            continue
        with gm.lookup(address) as lookup:
            assert [row and row["night"] for row in lookup.get_many([1, 2, 3, 4, 5])] == [1, 1, 2, 2, None], name
        assert right(address, sink, shop, "upsert", name)
    assert refused == UNNAMED.get(shop.name, [])


@pytest.mark.few(6)
def test_a_column_of_two_types_in_one_table(shop: Shop, tmp_path: Path) -> None:
    """A second sink whose column has other values is refused, unless the store gives back each as it was."""
    texts, days = pa.array(["a", "b"]), pa.array([19_000, 19_001], pa.int32()).cast(pa.date32())
    address = shop.address("types")
    for n, (ids, values) in enumerate((([1, 2], texts), ([3, 4], days))):
        (tmp_path / f"in{n}").mkdir()
        pq.write_table(pa.table({"k": ids, "night": values}), tmp_path / f"in{n}" / "1.parquet")
        sink = gm.sink(str(tmp_path / f"out{n}"), keep=["k", "night"])
        made = gm.to(address, mode="upsert", key="k", **shop.odd)
        job = gm.Job(str(tmp_path / f"in{n}"), gm.model(same, batch_format="arrow"), sink, workers=0, deliver=[made])
        if not n:
            job.run()
    with pytest.raises(gm.BadJob, match="column 'night'"):
        job.run()
    with gm.lookup(address) as lookup:
        assert [row and row["night"] for row in lookup.get_many([1, 3])] == ["a", None]


# Keys that an earlier delivery brought, and one of a later delivery whose type is narrower.
NARROWED: dict[str, tuple[pa.Array, pa.Array]] = {
    "whole": (pa.array([1, 2**40], pa.int64()), pa.array([2], pa.int32())),
    "stamps": (pa.array([1, 2_000_000], pa.timestamp("us")), pa.array([3], pa.timestamp("s"))),
    "bytes": (pa.array([b"abcdef", b"x"], pa.binary()), pa.array([b"ab"], pa.binary(2))),
}


@pytest.mark.parametrize("kind", NARROWED)
@pytest.mark.parametrize("restart", [False, True], ids=["beside", "again"])
@pytest.mark.few(10)
def test_a_later_delivery_with_a_narrower_type(shop: Shop, kind: str, restart: bool, tmp_path: Path) -> None:
    """Rows of an earlier one, of the same sink or another, are found by their keys: values, texts and mappings."""
    address, made = shop.address(f"n_{kind}_{int(restart)}"), []
    for n, column in enumerate(NARROWED[kind]):
        (tmp_path / "in").mkdir(exist_ok=True)
        pq.write_table(pa.table({"k": column}), tmp_path / "in" / "1.parquet")
        sink = gm.sink(str(tmp_path / f"out{0 if restart else n}"), keep=["k"])
        to = gm.to(address, mode="upsert", key="k", **shop.odd)
        job = gm.Job(str(tmp_path / "in"), gm.model(same, batch_format="arrow"), sink, workers=0, deliver=[to])
        try:
            job.run(restart=bool(n and restart))
        except gm.BadJob as e:
            assert "column 'k'" in str(e)  # and the rows that are there stay
            break
        made += column.to_pylist()
    with gm.lookup(address, key="k") as lookup:
        asked = [*made, {"k": made[0]}, *([str(key) for key in made] if kind == "whole" else [])]
        assert [row and row["k"] for row in lookup.get_many(asked)] == [*made, made[0], *made][: len(asked)]
        assert [lookup.get(key) is not None for key in asked] == [True] * len(asked)


# A value that an earlier delivery brought, and one of a later delivery whose type does not hold it.
ROUNDED: dict[str, tuple[pa.Array, pa.Array]] = {
    "float": (pa.array([0.1]), pa.array([0.5], pa.float32())),
    "whole": (pa.array([2**40]), pa.array([1], pa.int32())),
    "fraction": (pa.array([0.5]), pa.array([1], pa.int32())),
    "stamp": (pa.array([5], pa.timestamp("us")), pa.array([1], pa.timestamp("ms"))),
    "zoned": (pa.array([5], pa.timestamp("us", "UTC")), pa.array([1], pa.timestamp("s", "Europe/Berlin"))),
    "floats": (pa.array([[0.1]]), pa.array([[0.5]], pa.list_(pa.float32()))),
    "bytes": (pa.array([b"abcdef"]), pa.array([b"ab"], pa.binary(2))),
    "nothing": (pa.array(["a"]), pa.nulls(1)),
}


@pytest.mark.parametrize("kind", ROUNDED)
@pytest.mark.few(10)
def test_a_later_delivery_whose_type_would_round(shop: Shop, kind: str, tmp_path: Path) -> None:
    """It is refused, or values of the earlier one are given back as they were."""
    address = shop.address(f"r_{kind}")
    for n, column in enumerate(ROUNDED[kind]):
        (tmp_path / f"in{n}").mkdir()
        pq.write_table(pa.table({"k": [n], "x": column}), tmp_path / f"in{n}" / "1.parquet")
        sink = gm.sink(str(tmp_path / f"out{n}"), keep=["k", "x"])
        to = gm.to(address, mode="upsert", key="k", **shop.odd)
        model = gm.model(same, batch_format="arrow")
        try:
            gm.Job(str(tmp_path / f"in{n}"), model, sink, workers=0, deliver=[to]).run()
        except gm.BadJob as e:
            assert n and "column 'x'" in str(e)
    with gm.lookup(address, key="k") as lookup:
        found = lookup.get(0)
    assert found is not None and found["x"] == ROUNDED[kind][0][0].as_py()


@pytest.mark.parametrize("mode", ["replace", "upsert"])
@pytest.mark.few(4)
def test_columns_that_differ_in_capitals(shop: Shop, mode: Any, tmp_path: Path) -> None:
    """A store that takes them for one refuses them before its rows are scored; any other has both."""
    scored: list[int] = []

    def both(batch: dict[str, Any]) -> dict[str, Any]:
        scored.append(len(batch["k"]))
        return {"Y": [1.5] * len(batch["k"]), "y": [2.5] * len(batch["k"]), "vector": [[1.0, 0.0]] * len(batch["k"])}

    types: Any = {"Y": "float64", "y": "float64", "vector": pa.list_(pa.float32(), 2)}
    address = shop.address(f"c_{mode}")
    sink, to = gm.sink(str(tmp_path / "out"), keep="k"), gm.to(address, mode=mode, key="k", **shop.odd)
    job = gm.Job(pa.table({"k": list(range(500))}), gm.model(both, returns=types), sink, workers=0, deliver=[to])
    if shop.name in ("duckdb", "sqlite", "delta", "spark"):
        with pytest.raises(gm.BadJob, match="columns 'Y' and 'y' are the same but for capitals"):
            job.run()
        assert sum(scored) < 500  # a few, to try the model
        return
    job.run()
    with gm.lookup(address) as lookup:
        row = lookup.get(1)
    assert row is not None and (row["Y"], row["y"]) == (1.5, 2.5)


@pytest.mark.few(4)
def test_fields_that_differ_in_capitals(shop: Shop, tmp_path: Path) -> None:
    """The same of the fields of structs, at any depth."""
    record = pa.struct([("A", pa.int64()), ("a", pa.string())])
    deep = pa.array([[{"s": {"A": 1, "a": "x"}}]] * 500, pa.list_(pa.struct([("s", record)])))
    scored: list[int] = []

    def counted(batch: pa.RecordBatch) -> pa.RecordBatch:
        scored.append(len(batch))
        return same(batch)

    sink = gm.sink(str(tmp_path / "out"), keep=["k", "deep"])
    rows, to = pa.table({"k": range(500), "deep": deep}), gm.to(shop.address("fields"), key="k", **shop.odd)
    job = gm.Job(rows, gm.model(counted, batch_format="arrow"), sink, workers=0, deliver=[to])
    if shop.name in ("duckdb", "delta", "spark"):
        told = "column 'deep'.*: its fields 'A' and 'a' are the same but for capitals"
        with pytest.raises(gm.BadJob, match=told):
            job.run()
        assert sum(scored) < 500
        return
    job.run()
    with gm.lookup(shop.address("fields")) as lookup:
        row = lookup.get(1)
    assert row is not None and row["deep"] == deep[1].as_py()


# Values of each type that is told apart, in rows of one sink; another one delivers beside them a column of nulls alone.
BESIDE: dict[str, tuple[pa.DataType, list[Any]]] = {
    **{name: KEYS[name] for name in KEYS if name != "zeros"},
    "single": (pa.float32(), [0.1, 0.2, 3e38, 1e-45]),
    "bool": (pa.bool_(), [True, False, True, True]),
    "ints": (pa.list_(pa.int64()), [[1], [], [2**53 + 1], [1, 2]]),
    "days": (pa.list_(pa.date32()), [[0], [], [1], [1, 2]]),
    "record": (pa.struct([("a", pa.date32())]), [{"a": 1}, {"a": None}, {"a": 2}, {"a": 3}]),
}


@pytest.fixture(scope="module", params=BESIDE)
def beside(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[pa.Array, Path]:
    """Values of a type, and a folder with two sinks: one of rows with them, and one of rows with nulls alone."""
    told, values = BESIDE[request.param]
    made = pa.array(values, told) if pa.types.is_nested(told) else given(told, values)
    folder = tmp_path_factory.mktemp("beside")
    for name, first, column in (("one", 0, made), ("other", 10, pa.nulls(4))):
        rows = pa.table({"id": pa.array(range(first, first + 4), pa.int64()), "c": column})
        gm.Job(
            rows, gm.model(same, batch_format="arrow"), gm.sink(str(folder / name), keep=["id", "c"]), workers=0
        ).run()
    return made, folder


@pytest.mark.few(12)
@pytest.mark.parametrize("mode", ["upsert", "append"])
def test_a_column_of_nulls_beside_others(shop: Shop, beside: tuple[pa.Array, Path], mode: Any) -> None:
    """The rows that were there come back as they were; or the column, of either sink, is refused before scoring."""
    if mode not in STORES.get(shop.name).modes:
        return
    made, folder = beside
    to = gm.to(shop.address("beside"), mode=mode, key="id", **shop.odd)
    shop.clear("beside")
    for name in ("one", "other"):
        try:
            gm.deliver(str(folder / name), to)
        except gm.BadJob as e:
            assert "column 'c'" in str(e)
            if name == "one":
                return
    with gm.lookup(to) as lookup:
        found = lookup.get_many(range(4))
        assert [repr(row["c"]) for row in found] == [repr(value) for value in to_plain(made)]
        assert (lookup.get(10) or {"c": None})["c"] is None
