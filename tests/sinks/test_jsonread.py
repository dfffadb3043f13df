"""A jsonl sink reads back through `gm.read` as what was written, whatever the types."""

from __future__ import annotations

import datetime as dt
import math
import pickle
import string
import subprocess
import sys
import time
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gristmill as gm
from gristmill.sinks import jsonread
from gristmill.sinks.jsonread import stored
from gristmill.sinks.jsontext import json_lines
from gristmill.sinks.jsonyears import beyond_calendar, is_beyond

INTEGERS = {
    f"{u}int{b}": (0 if u else -(2 ** (b - 1)), 2 ** (b if u else b - 1) - 1)
    for b in (8, 16, 32, 64)
    for u in ("", "u")
}
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=6) | st.sampled_from(["NaN", "Infinity", "null", '"'])
DAYS = st.dates()
MOMENTS = st.datetimes(dt.datetime(1, 1, 1), dt.datetime(9999, 12, 31, 23, 59, 59))


def leaves() -> st.SearchStrategy:
    """A type with a strategy for its values."""
    whole = [st.tuples(st.just(pa.type_for_alias(n)), st.just(st.integers(*edges))) for n, edges in INTEGERS.items()]
    rest: list[tuple[pa.DataType, st.SearchStrategy]] = [
        (pa.bool_(), st.booleans()), (pa.null(), st.none()),
        (pa.float64(), st.floats()), (pa.float32(), st.floats(width=32)), (pa.float16(), st.floats(width=16)),
        (pa.string(), TEXT), (pa.large_string(), TEXT), (pa.string_view(), TEXT),
        (pa.binary(), st.binary(max_size=4)), (pa.large_binary(), st.binary(max_size=4)),
        (pa.binary(3), st.binary(min_size=3, max_size=3)),
        (pa.date32(), DAYS), (pa.date64(), DAYS),
        (pa.time32("s"), st.times().map(lambda t: t.replace(microsecond=0))),
        (pa.time32("ms"), st.times().map(lambda t: t.replace(microsecond=t.microsecond // 1000 * 1000))),
        (pa.time64("us"), st.times()),
        (pa.timestamp("us"), MOMENTS), (pa.timestamp("s"), MOMENTS.map(lambda m: m.replace(microsecond=0))),
        (pa.timestamp("us", "Europe/Berlin"), MOMENTS.filter(lambda m: 1900 < m.year < 9000).map(
            lambda m: m.replace(tzinfo=dt.UTC))),
        (pa.duration("us"), st.timedeltas(dt.timedelta(-10**6), dt.timedelta(10**6))),
        (pa.decimal128(38, 10), st.decimals(-(10**20), 10**20, places=10)),
        (pa.decimal256(60, 0), st.integers(-(10**50), 10**50).map(Decimal)),
        (pa.decimal128(10, 2), st.decimals(0, 10**6, places=2)),
    ]  # fmt: skip
    return st.one_of(*whole, *[st.tuples(st.just(k), st.just(v)) for k, v in rest])


def nested(inner: st.SearchStrategy) -> st.SearchStrategy:
    """Lists of all layouts, structs and maps of it."""

    def make(pair: tuple[pa.DataType, st.SearchStrategy], shape: str) -> tuple[pa.DataType, st.SearchStrategy]:
        kind, values = pair
        maybe = st.none() | values
        if shape == "list":
            return pa.list_(kind), st.lists(maybe, max_size=3)
        if shape == "large":
            return pa.large_list(kind), st.lists(maybe, max_size=3)
        if shape == "fixed":
            return pa.list_(kind, 2), st.lists(maybe, min_size=2, max_size=2)
        if shape == "map":
            return pa.map_(pa.string(), kind), st.lists(st.tuples(TEXT, maybe), max_size=2)
        return pa.struct([("a", kind), ('b"', pa.int8())]), st.fixed_dictionaries({"a": maybe, 'b"': st.just(1)})

    return st.builds(make, inner, st.sampled_from(["list", "large", "fixed", "map", "struct"]))


def same(a: Any, b: Any) -> bool:
    """Equal, NaN as NaN, and zeros by their sign."""
    if isinstance(a, float) and isinstance(b, float):
        return (a != a and b != b) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a) if isinstance(a, dict) else a == b


@pytest.mark.long
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_fault_52_every_type_reads_back_equal(data: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Over schemas of every type, nested: text that Python's json can read, and the same values in the same types."""
    columns = data.draw(st.lists(st.recursive(leaves(), nested, max_leaves=3), min_size=1, max_size=3))
    rows = data.draw(st.integers(0, 5))
    names = data.draw(st.lists(st.text(string.printable, max_size=4), min_size=3, max_size=3, unique=True))
    arrays = [pa.array(data.draw(st.lists(st.none() | v, min_size=rows, max_size=rows)), k) for k, v in columns]
    table = pa.Table.from_arrays(arrays, names=names[: len(arrays)])
    schema = stored(table.schema)
    text = b"".join(json_lines(table))
    batch = jsonread._parsed(text, schema, "x") if rows else schema.empty_table()
    batch.validate(full=True)
    assert batch.schema == schema
    assert same(batch.to_pylist(), table.to_pylist())


EVERYTHING = pa.table({
    "id": [2**53 + 1, -(2**63), 5],
    "u": pa.array([2**64 - 1, None, 0], pa.uint64()),
    "v": pa.array([[1.5, -0.0], None, [math.inf, 2.0]], pa.list_(pa.float32(), 2)),
    "f": [math.nan, math.inf, None],
    "d": [dt.date(2020, 1, 1), None, dt.date(1, 1, 1)],
    "t": pa.array([dt.time(1, 2, 3, 4), None, dt.time(0)], pa.time64("us")),
    "w": pa.array([1, None, -5], pa.duration("ns")),
    "at": pa.array([0, None, 10**18], pa.timestamp("ns", "Europe/Berlin")),
    "l": pa.array(["NaN", "é😀\x00", None], pa.large_string()),
    "m": pa.array([[("k", 1), ("k", None)], None, []], pa.map_(pa.string(), pa.int64())),
    "b": [b"\x00\xff", None, b""],
    "dec": [Decimal("1.50"), None, Decimal("-0.01")],
    "s": [{"a": [None]}, None, {"a": None}],
    "c": pa.array(["x", None, "x"]).dictionary_encode(),
    "z": pa.nulls(3),
    "day": ["a/b", None, "=%é"],
})  # fmt: skip


@pytest.mark.parametrize("compression", ["none", "gz", "zst"])
@pytest.mark.parametrize("keys", [[], ["day"], ["id", "d"]])
def test_fault_52_a_jsonl_sink_reads_back(tmp_path: Path, compression: str, keys: list[str]) -> None:
    """Whole jobs: types, partition columns, compression; the Dataset is read twice, filtered, counted, pickled."""
    sink = gm.sink(str(tmp_path / "out"), format="jsonl", keep=EVERYTHING.column_names, partition_by=keys,
                   options={"compression": compression})  # fmt: skip
    gm.Job(EVERYTHING, lambda b: {"y": b["id"]}, sink, workers=0, on_nan="keep").run()
    read = gm.read(str(tmp_path / "out"))
    wanted = [{**row, "y": row["id"]} for row in EVERYTHING.to_pylist()]
    for found in (read, read, pickle.loads(pickle.dumps(read))):
        table = found.to_table().sort_by("u")
        assert table.schema.field("v").type == pa.list_(pa.float32(), 2)
        assert table.schema.field("at").type == pa.timestamp("ns", "Europe/Berlin")
        assert same(table.select(wanted[0]).to_pylist(), sorted(wanted, key=lambda r: (r["u"] is None, r["u"])))
    assert read.count_rows() == 3
    assert read.to_table(columns=["y"], filter=pa.compute.field("id") > 0).num_rows == 2


@pytest.mark.long
def test_fault_52_long_rows_and_many_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows over 1 MB, and files of many blocks, are read whole and in order."""
    monkeypatch.setattr(jsonread, "_BLOCK", 100_000)
    table = pa.table({"id": np.arange(60), "t": [("é" if i % 20 else "long" * 500_000) * (i + 1) for i in range(60)]})
    gm.Job(
        table.slice(0, 40),
        lambda b: {"y": b["id"]},
        gm.sink(str(tmp_path / "o"), format="jsonl", keep=["t"]),
        workers=0,
    ).run()
    read = gm.read(str(tmp_path / "o")).to_table()
    assert read["y"].to_pylist() == list(range(40))
    assert read["t"].equals(table["t"].slice(0, 40))


def test_fault_52_what_json_cannot_hold_is_told_at_the_start(tmp_path: Path) -> None:
    """Intervals are refused before anything is written; rows of years that ISO cannot write are dead letters."""
    months = pa.array([(1, 2, 3)] * 3, pa.month_day_nano_interval())
    sink = gm.sink(str(tmp_path / "out"), format="jsonl")
    with pytest.raises(gm.BadJob, match="'y' is month_day_nano_interval, and a jsonl sink cannot hold"):
        gm.Job(
            EVERYTHING, gm.model(lambda b: {"y": months.slice(0, b.num_rows)}, batch_format="arrow"), sink, workers=0
        ).run()


_FAR = [
    pa.array([0, 10**13, None], pa.timestamp("s")),
    pa.array([0, 2_932_897 * 86_400_000, -719_162 * 86_400_000], pa.timestamp("ms", "UTC")),
    pa.array([0, -719_162 * 86_400_000_000 - 1, None], pa.timestamp("us")),  # the last moment before the year 1
    pa.array([0, 2_932_897, 2_932_896], pa.date32()),
    pa.array([[{"at": 1}], [{"at": -62_135_596_801_000}], [None]], pa.list_(pa.struct({"at": pa.timestamp("ms")}))),
    pa.array([[("k", 0)], [("k", 10**13)], None], pa.map_(pa.string(), pa.timestamp("s"))),
    pa.array([0, 10**13, None], pa.timestamp("s")).dictionary_encode(),
]
_RUNS = pa.RunEndEncodedArray.from_arrays(pa.array([1, 3], pa.int32()), pa.array([0, 3_000_000], pa.date32()))


def test_what_of_a_dictionary_is_beyond_the_calendar() -> None:
    """Only the values that rows have, whatever way these are kept in."""
    for kept in (_RUNS, _RUNS.values.take(pa.array([0, 1, 1]))):
        for index, beyond in (([0, None], False), ([0, 2], True)):
            values = pa.DictionaryArray.from_arrays(pa.array(index, pa.int32()), kept)
            assert is_beyond(values) is beyond


def test_years_of_many_rows_are_looked_at_at_once() -> None:
    """Which rows are beyond is told for columns of all kinds, and for many rows takes no longer than for few."""
    far = np.where(np.arange(60_000) % 5 == 1, -(10**12), np.where(np.arange(60_000) % 7 == 1, 10**12, 86_399))
    nested = pa.ListArray.from_arrays(np.arange(60_001, dtype=np.int32), pa.array(far[::-1], pa.timestamp("s")))
    rows = pa.table({"a": pa.array(far, pa.timestamp("s")), "b": pa.array(range(60_000)), "c": nested.slice(0, 60_000)})
    for some in (rows.select(["a", "b"]), rows.slice(0, 500), rows.slice(100, 300).select(["c"])):
        flat = {n: np.array([v[0] if isinstance(v, list) else v for v in _seconds(some[n])]) for n in some.column_names}
        expected = np.flatnonzero(np.any([np.abs(v) == 10**12 for n, v in flat.items() if n != "b"], axis=0))
        began = time.process_time()
        assert beyond_calendar(some) == expected.tolist()
        assert time.process_time() - began < 1


def _seconds(column: pa.ChunkedArray) -> list[Any]:
    kind = pa.list_(pa.int64()) if pa.types.is_list(column.type) else pa.int64()
    found: list[Any] = column.cast(kind).to_pylist()
    return found


@pytest.mark.parametrize("made", _FAR, ids=lambda made: str(made.type).split("<")[0] + str(made.type)[-6:])
def test_a_year_that_iso_cannot_write_is_a_dead_letter(tmp_path: Path, made: pa.Array) -> None:
    """Rows with a time before the year 1 or after 9999, at any depth, are told of; the rows beside them are written."""
    model = gm.model(lambda b: {"y": made.take(pc.bit_wise_and(b["i"], 1))}, batch_format="arrow")
    source = pa.table({"i": range(6)})
    sink = gm.sink(str(tmp_path / "out"), format="jsonl", keep=["i"])
    report = gm.Job(source, model, sink, workers=0, gates={"min_ok": 0.5}).run()
    assert (report.rows_ok, report.rows_dead) == (3, 3)
    assert "YearBeyond" in str(report.errors)
    read = gm.read(str(tmp_path / "out")).to_table()
    assert read["i"].to_pylist() == [0, 2, 4]
    plain = made.dictionary_decode() if pa.types.is_dictionary(made.type) else made
    assert read["y"].to_pylist() == [plain[0].as_py()] * 3


# ---------------------------------------------------------------- partition keys

KEYS = [
    ["a", "B", "..", ".", "a/b", "%2F", "é", "a=b", " x ", "\x00", "", None, "k" * 300, "__HIVE_DEFAULT_PARTITION__"],
    [1.5, math.nan, math.inf, -0.0, 0.1, None, 1e300], [2**63, 0, None, 2**64 - 1],
    [dt.date(2020, 1, 1), None], [dt.datetime(2020, 1, 1, 5, 0, 0, 1), None], [True, False, None],
    [dt.time(1, 2, 3), None],
]  # fmt: skip


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
@pytest.mark.parametrize("values", KEYS, ids=lambda v: str(v[0]))
def test_fault_53_partition_keys_read_back_or_are_dead(tmp_path: Path, values: list[Any], form: str) -> None:
    """Every key reads back equal through gm.read, or its row alone is a dead letter that says why."""
    kind = pa.uint64() if 2**63 in values else None
    table = pa.table({"id": np.arange(len(values)), "k": pa.array(values, kind)})
    pq.write_table(table, tmp_path / "in.parquet")
    sink = gm.sink(str(tmp_path / "out"), format=form, keep=["k"], partition_by=["k"])
    gates = {"min_ok": 0.1}
    gm.Job(str(tmp_path / "in.parquet"), lambda b: {"y": b["id"]}, sink, workers=0, gates=gates).run()
    read = {row["y"]: row["k"] for row in gm.read(str(tmp_path / "out")).to_table().to_pylist()}
    dead = gm.dead(str(tmp_path / "out"))
    lost = {"", "k" * 300, "__HIVE_DEFAULT_PARTITION__"}
    gone = [i for i, v in enumerate(values) if isinstance(v, str) and v in lost]
    assert all(same(v, values[i]) for i, v in read.items())
    assert sorted(set(range(len(values))) - set(read)) == gone
    assert dead["error"].to_pylist() == ["PartitionKey"] * len(gone)


@pytest.mark.parametrize("kind", [pa.decimal128(5, 1), pa.binary(), pa.duration("s")])
def test_fault_53_keys_that_cannot_name_folders_are_refused(tmp_path: Path, kind: pa.DataType) -> None:
    """Decimals, bytes and durations are told before anything is written, with the way out."""
    value = {"b": b"\xff", "d": dt.timedelta(1)}.get(str(kind)[0]) if "dec" not in str(kind) else Decimal("1.5")
    table = pa.table({"id": [1], "k": pa.array([value], kind)})
    with pytest.raises(gm.BadJob, match=r"partition_by names 'k'.*convert it to text in a step"):
        gm.Job(
            table, lambda b: {"y": b["id"]}, gm.sink(str(tmp_path / "o"), keep=["k"], partition_by=["k"]), workers=0
        ).run()


def test_fault_53_integers_beyond_64_bits_are_not_rounded(tmp_path: Path) -> None:
    """In a JSON Lines source: as uint64 where they fit, else told at planning; never floats."""

    def read(text: str, **types: str) -> list[int]:
        (tmp_path / "in.jsonl").write_text(text)
        source = gm.source(str(tmp_path / "in.jsonl"), types=types or None)
        job = gm.Job(source, lambda b: {"y": b["id"]}, str(tmp_path / f"out{len(text)}{len(types)}"), workers=0)
        return job.run().read().to_table()["y"].to_pylist()

    assert read('{"id":9223372036854775809}\n{"id":18446744073709551615}\n') == [2**63 + 1, 2**64 - 1]
    assert read('{"id":1}\n{"id":18446744073709551615}\n', id="uint64") == [1, 2**64 - 1]
    for text in ('{"id":1}\n{"id":18446744073709551615}\n', '{"id":1}\n{"id":28446744073709551615}\n'):
        with pytest.raises(gm.BadSource, match="types="):
            read(text)


@pytest.mark.long
@pytest.mark.parametrize("read", ["rows.to_table()", "next(iter(rows.to_batches()))"], ids=["whole", "left"])
def test_a_process_that_read_json_lines_ends_well(tmp_path: Path, read: str) -> None:
    """Arrow's threads, which open the files, do not abort the process that ends after a read or in the midst of one."""
    rows = [{"x": i, "text": "abc" * 200} for i in range(16_000)]
    model = gm.model(lambda batch: [{"y": row["x"]} for row in batch], batch_format="rows")
    gm.Job(rows, model, gm.sink(str(tmp_path), keep=["text"], format="jsonl"), workers=0, shard_rows=1_000).run()
    code = f"import gristmill as gm; rows = gm.read({str(tmp_path)!r}); {read}"
    for _ in range(4):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("zone", [None, "Europe/Berlin"])
def test_the_first_and_last_nanoseconds_of_the_range(tmp_path: Path, zone: str | None) -> None:
    """pandas' Timestamp.min among them, which Arrow's own parser takes for out of range."""
    values = [-(2**63) + 1, -9223372036854775000, None, 0, 2**63 - 1]
    rows = pa.table({"t": pa.array(values, pa.timestamp("ns", zone))})
    gm.apply(rows, str(tmp_path / "out"), fn=lambda batch: {"k": [1] * len(batch["t"])}, keep=["t"], format="jsonl",
             workers=0)  # fmt: skip
    assert gm.read(tmp_path / "out").to_table()["t"].cast(pa.int64()).to_pylist() == values
