"""Parquet as a source: planned from footers, read by any ranges, bad files named."""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gristmill as gm
from gristmill.errors import BadSource
from gristmill.sources.int96 import misfit

VALUES = st.lists(
    st.tuples(
        st.none() | st.integers(-(2**63), 2**63 - 1),
        st.none() | st.floats(allow_nan=False),
        st.none() | st.text(max_size=20),
        st.none() | st.lists(st.integers(0, 9), max_size=3),
        st.none() | st.sampled_from(["red", "green"]),
    ),
    max_size=60,
)


def table(rows: list[tuple[Any, ...]]) -> pa.Table:
    columns = list(zip(*rows, strict=True)) if rows else [[]] * 5
    return pa.table(
        {
            "i": pa.array(columns[0], pa.int64()),
            "f": pa.array(columns[1], pa.float64()),
            "s": pa.array(columns[2], pa.string()),
            "l": pa.array(columns[3], pa.list_(pa.int32())),
            "d": pa.array(columns[4], pa.string()).dictionary_encode(),
            "n": pa.array([None if v is None else {"x": v, "y": [v]} for v in columns[0]],
                          pa.struct([("x", pa.int64()), ("y", pa.list_(pa.int64()))])),
        }
    )  # fmt: skip


@pytest.mark.long
@settings(max_examples=60, deadline=None)
@given(
    rows=VALUES,
    group=st.integers(1, 40),
    edges=st.lists(st.integers(0, 60), max_size=8),
    columns=st.none() | st.lists(st.sampled_from(list("ifsldn")), unique=True, min_size=1),
    block_bytes=st.sampled_from([1, 100, 1 << 20]),
    where=st.sampled_from([None, "i > 0", "s IS NOT NULL", "d = 'red'", "true", "i IS NULL AND i IS NOT NULL"]),
)
def test_any_ranges_tile_the_file(
    scratch: Any, planned: Any, rows: Any, group: int, edges: Any, columns: Any, block_bytes: int, where: Any
) -> None:
    """Every row once, in order, with its number as position, whatever the row groups, ranges, columns and blocks."""
    path = str(scratch.folder() / "x.parquet")
    pq.write_table(table(rows), path, row_group_size=group)
    plan = planned(path)
    expected = pq.read_table(path).cast(plan.schema)
    holds = np.ones(len(rows), dtype=bool)
    if where:
        import duckdb

        db = duckdb.connect()
        db.register("expected", expected.select(["i", "s", "d"]))
        holds = db.execute(f"SELECT coalesce({where}, false) AS h FROM expected").fetchnumpy()["h"].astype(bool)
    read = plan.in_parts([min(e, len(rows)) for e in edges], columns=columns, where=where, block_bytes=block_bytes)
    wanted = expected.select(columns or expected.column_names).filter(pa.array(holds))
    assert read.rows.to_pylist() == wanted.to_pylist()
    assert read.position.tolist() == np.flatnonzero(holds).tolist()
    assert read.filtered == len(rows) - holds.sum()


@settings(max_examples=40, deadline=None)
@given(picked=st.sets(st.integers(0, 499)), group=st.integers(1, 200), block_bytes=st.sampled_from([8, 1 << 20]))
def test_many_small_ranges_in_one_call(
    scratch: Any, planned: Any, picked: set[int], group: int, block_bytes: int
) -> None:
    """A sample: single rows from everywhere."""
    path = str(scratch.folder() / "x.parquet")
    pq.write_table(pa.table({"i": np.arange(500), "s": [f"row {i}" for i in range(500)]}), path, row_group_size=group)
    read = planned(path).read([[i, i + 1] for i in sorted(picked)], block_bytes=block_bytes)
    assert read.position.tolist() == sorted(picked) == read.rows["i"].to_pylist()
    assert read.rows["s"].to_pylist() == [f"row {i}" for i in sorted(picked)]


def test_what_planning_knows(scratch: Any, planned: Any) -> None:
    """Row groups are the places to cut; nulls are counted; a rewrite of the same size shows in the layout."""
    path = scratch.folder() / "x.parquet"
    pq.write_table(pa.table({"a": [1, None, 3, None, 5], "b": ["x"] * 5}), path, row_group_size=2)
    info = planned(str(path)).info
    assert (info.extent, info.rows, info.divisible) == (5, 5, True)
    assert info.cuts.tolist() == [0, 2, 4, 5]
    assert info.cut_rows.tolist() == [2, 2, 1]
    assert info.nulls == {"a": 2, "b": 0}
    pq.write_table(pa.table({"a": [1, None, 3, 5, None], "b": ["x"] * 5}), path, row_group_size=3)
    assert planned(str(path)).info.layout != info.layout


def test_no_rows(scratch: Any, planned: Any) -> None:
    """Fault 12: an empty file is a file without rows."""
    path = str(scratch.folder() / "x.parquet")
    pq.write_table(pa.table({"a": pa.array([], pa.int64())}), path)
    plan = planned(path)
    assert (plan.info.extent, plan.info.rows, plan.info.cuts[0], plan.info.cuts[-1]) == (0, 0, 0, 0)
    assert plan.read().rows.num_rows == 0


@pytest.mark.parametrize("left", [0, 3, 11, 12, 100, -1, -4, -100])
def test_a_truncated_file_is_named_when_planning(scratch: Any, planned: Any, left: int) -> None:
    """Fault 8: in one line, wherever it ends."""
    path = scratch.folder() / "bad.parquet"
    pq.write_table(pa.table({"a": np.arange(1000)}), path)
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(BadSource, match=r"bad\.parquet.*(truncated|corrupt|Parquet)") as caught:
        planned(str(path))
    assert "\n" not in str(caught.value)


def test_a_file_cut_out_of_the_middle_is_truncated(scratch: Any, planned: Any) -> None:
    """The footer is whole, but the data it names is not all there."""
    path = scratch.folder() / "bad.parquet"
    pq.write_table(pa.table({"a": np.random.default_rng(0).random(5000)}), path)
    content = path.read_bytes()
    path.write_bytes(content[:1000] + content[20_000:])
    with pytest.raises(BadSource, match=r"bad\.parquet: truncated"):
        planned(str(path))


def test_what_is_not_parquet_says_so(scratch: Any, planned: Any) -> None:
    """The first bytes help to see what it is."""
    with pytest.raises(BadSource, match=r"not Parquet: it begins with b'a,b"):
        planned(scratch.file("x.parquet", b"a,b\n1,2\n1,2\n1,2\n"))


@pytest.mark.parametrize("compression", ["zstd", "snappy", "none"])
def test_corruption_met_while_reading_names_file_and_row_group(scratch: Any, planned: Any, compression: str) -> None:
    """Fault 8: what only decoding finds. Files with page checksums are checked against them."""
    path = scratch.folder() / "bad.parquet"
    rows = pa.table({"a": np.random.default_rng(0).random(30_000)})
    pq.write_table(
        rows, path, row_group_size=10_000, compression=compression, use_dictionary=False, write_page_checksum=True
    )
    second = pq.read_metadata(path).row_group(1).column(0)
    content = bytearray(path.read_bytes())
    at = second.data_page_offset + second.total_compressed_size // 2
    content[at : at + 64] = bytes(64)
    path.write_bytes(content)
    plan = planned(str(path))
    assert plan.read([[0, 10_000]]).rows.num_rows == 10_000
    with pytest.raises(BadSource, match=r"bad\.parquet: row group 1 ") as caught:
        plan.read()
    assert "\n" not in str(caught.value)
    assert plan.read([[20_000, 30_000]]).rows.num_rows == 10_000


def test_other_columns_of_a_row_group_without_hits_are_not_read(scratch: Any, planned: Any) -> None:
    """Shown by a column that cannot be read."""
    path = scratch.folder() / "x.parquet"
    noise = np.random.default_rng(0).random(20_000)
    pq.write_table(
        pa.table({"k": np.arange(20_000), "v": noise}),
        path, row_group_size=10_000, use_dictionary=False, write_page_checksum=True,
    )  # fmt: skip
    column = pq.read_metadata(path).row_group(1).column(1)
    content = bytearray(path.read_bytes())
    content[column.data_page_offset + 1000 : column.data_page_offset + 1064] = bytes(64)
    path.write_bytes(content)
    plan = planned(str(path))
    assert plan.read(where="k < 5").rows["v"].to_pylist() == noise[:5].tolist()
    with pytest.raises(BadSource, match="row group 1"):
        plan.read(where="k > 15000")


def test_reading_goes_on_where_it_stopped(scratch: Any, planned: Any) -> None:
    """A thousand shards inside one row group cost little more than one: 1,000 times decoding it would take a minute."""
    path = str(scratch.folder() / "x.parquet")
    n = 400_000
    pq.write_table(pa.table({f"c{i}": np.random.default_rng(i).random(n) for i in range(8)}), path, row_group_size=n)
    plan = planned(path)
    started = time.perf_counter()
    whole = plan.read()
    once = time.perf_counter() - started
    started = time.perf_counter()
    edges = np.linspace(0, n, 1001).astype(int)
    total = sum(plan.read([[a, b]]).rows.num_rows for a, b in itertools.pairwise(edges))
    assert total == whole.rows.num_rows == n
    assert time.perf_counter() - started < 20 * once + 3


def test_an_abandoned_read_does_no_harm(scratch: Any, planned: Any) -> None:
    """Taking one block and leaving, as a limit does; then going back, and two readers of one file at once."""
    path = str(scratch.folder() / "x.parquet")
    pq.write_table(pa.table({"a": np.arange(200_000)}), path)
    plan = planned(path)
    from gristmill.sources.contract import Reading

    ranges, reading = np.array([[0, 200_000]]), Reading(None, plan.schema)
    one, other = (plan.format.read(plan.info, plan.fs, ranges, reading) for _ in range(2))
    next(one)
    assert next(other).position[0] == 0
    next(other)
    one.close()
    assert plan.read([[10, 20]]).rows["a"].to_pylist() == list(range(10, 20))
    assert next(other).position[0] == 131_072
    other.close()
    assert plan.read().rows["a"].to_pylist() == list(range(200_000))


def test_a_column_that_is_not_there_and_one_that_is_twice(scratch: Any, planned: Any) -> None:
    """By name."""
    path = str(scratch.folder() / "x.parquet")
    pq.write_table(pa.table([pa.array([1]), pa.array([2])], names=["a", "a"]), path)
    with pytest.raises(BadSource, match="column 'a' appears more than once"):
        planned(path)


@pytest.mark.long
def test_a_large_row_group_is_read_in_pieces(scratch: Any, planned: Any, tmp_path: Path) -> None:
    """Memory is bounded by blocks, not by row groups: 400 MB in one group are read within a few blocks."""
    path = str(scratch.folder() / "x.parquet")
    text = os.urandom(50_000).hex()
    with pq.ParquetWriter(
        path, pa.schema([("t", pa.string())]), compression="snappy", use_dictionary=False, write_batch_size=8
    ) as out:
        out.write_table(pa.table({"t": [text] * 4000}), row_group_size=4000)
    plan = planned(path)
    most, total = 0, 0
    before = pa.total_allocated_bytes()
    from gristmill.sources.contract import Reading

    for block in plan.format.read(plan.info, plan.fs, np.array([[0, 4000]]), Reading(None, plan.schema)):
        total += block.rows.num_rows
        most = max(most, pa.total_allocated_bytes() - before)
    assert total == 4000
    assert most < 6 * (16 << 20)


@pytest.mark.parametrize("sizes", [[0], [10, 0], [0, 10], [10, 0, 5]])
def test_row_groups_without_rows(tmp_path: Path, sizes: list[int]) -> None:
    """Whose columns have no page at all: an empty frame with a boolean last, a writer that flushed nothing."""
    schema = pa.schema({"n": pa.int64(), "b": pa.bool_()})
    with pq.ParquetWriter(tmp_path / "a.parquet", schema, use_dictionary=False) as out:
        for size in sizes:
            out.write_table(pa.table([list(range(size)), [True] * size], schema=schema), row_group_size=max(1, size))
    report = gm.apply(
        str(tmp_path / "a.parquet"), str(tmp_path / "out"), fn=doubled, workers=0, gates={"allow_empty": True}
    )
    assert report.rows_ok == sum(sizes) and gm.verify(str(tmp_path / "out")).ok


def doubled(batch: Any) -> Any:
    return {"y": batch["n"] * 2}


LONG = [chr(65 + i) * 2000 for i in range(8)]


@pytest.mark.parametrize(
    ("column", "options"),
    [
        (LONG * 500, {}),
        ([[text] for text in LONG * 500], {}),
        ([{"a": text} for text in LONG * 500], {}),
        ([text.encode() for text in LONG * 500], {"compression": "zstd"}),
        (["x" * 2000 + str(i) for i in range(4000)], {"use_dictionary": False, "column_encoding": "DELTA_BYTE_ARRAY"}),
        ([[0.5] * 250] * 4000, {}),
        (["x"] * 1500 + LONG * 312 + ["x"] * 4, {}),
    ],
    ids=["texts", "lists", "structs", "bytes", "prefixes", "vectors", "short at first"],
)
@pytest.mark.parametrize("where", [None, "k % 3 > 0"])
def test_blocks_are_as_large_as_asked_however_values_are_encoded(
    scratch: Any, planned: Any, column: list[Any], options: dict[str, Any], where: str | None
) -> None:
    """Values that repeat take next to nothing in the file and all of their length in memory; where the first rows do
    not tell, one block may be as large as these let expect, and no other."""
    path = str(scratch.folder() / "x.parquet")
    if "column_encoding" in options:
        options = {**options, "column_encoding": {"t": options["column_encoding"]}}
    given = pa.table({"k": range(4000), "t": column})
    pq.write_table(given, path, **options)
    plan = planned(path)
    asked = 1 << 18
    blocks = plan.blocks(block_bytes=asked, where=where)
    rows = pa.concat_tables([b.rows for b in blocks])
    expected = given if where is None else given.filter(pa.array([k % 3 > 0 for k in range(4000)]))
    assert rows.equals(expected.cast(rows.schema))
    assert np.array_equal(np.concatenate([b.position for b in blocks]), rows["k"].to_numpy())
    large = [b for b in blocks if b.rows.nbytes > 2 * asked]
    assert len(large) <= (column[0] == "x")


CITIES = np.array([f"{i:05d}" + "x" * 95 for i in range(50_000)])  # 5 MB


@pytest.mark.parametrize("nested", [False, True])
def test_categories_are_read_in_blocks_of_their_values(tmp_path: Path, planned: Any, nested: bool) -> None:
    """Each batch that is decoded holds the whole dictionary, which says nothing about how large its rows are."""
    codes = np.random.default_rng(0).integers(0, len(CITIES), 100_000).astype("int32")
    city = pa.DictionaryArray.from_arrays(pa.array(codes), pa.array(CITIES))
    column = pa.StructArray.from_arrays([city], ["name"]) if nested else city
    pq.write_table(pa.table({"k": range(100_000), "city": column}), tmp_path / "x.parquet")
    blocks = planned(str(tmp_path / "x.parquet")).blocks(block_bytes=1 << 20)
    assert len(blocks) < 30 and max(b.rows.nbytes for b in blocks) < 2 << 20
    rows = pa.concat_tables([b.rows for b in blocks])
    names = rows["city"].combine_chunks()
    assert rows["k"].to_pylist() == list(range(100_000))
    assert (names.field(0) if nested else names).equals(pa.array(CITIES[codes]))


def int96(path: Path, values: list[int | None], nested: bool = False) -> None:
    """Nanoseconds since 1970, of years that these do not hold too, as a file of Spark's or Impala's has them."""
    micros = [None if v is None else v // 1000 for v in values]
    in_years = pa.array(micros, pa.timestamp("us"))
    if all(v is None or -(2**63) < v < 2**63 for v in values):
        in_years = pa.array(values, pa.timestamp("ns"))
    columns = {"k": pa.array(range(len(values))), "t": in_years}
    if nested:
        listed = pa.ListArray.from_arrays(list(range(len(values) + 1)), in_years)
        columns = {"k": columns["k"], "t": pa.StructArray.from_arrays([listed], ["times"])}
    pq.write_table(pa.table(columns), path, use_deprecated_int96_timestamps=True)


NIGHT = 1_577_836_800_000_000_000  # 2020-01-01
FAR = 253_370_764_800_000_000_000  # 9999-01-01


@pytest.mark.parametrize("nested", [False, True])
def test_int96_timestamps_are_read_as_they_are_or_not_at_all(tmp_path: Path, planned: Any, nested: bool) -> None:
    """As microseconds, of whatever year; one with more digits is an error that says where, and what to do."""
    fine = [NIGHT + 1000, None, FAR + 999_999_000, -62_135_596_800_000_000_000, -1000]
    int96(tmp_path / "fine.parquet", fine, nested)
    read = planned(str(tmp_path / "fine.parquet"))
    inner = pa.timestamp("us")
    times = read.read().rows["t"]
    assert times.type == (pa.struct([("times", pa.list_(pa.field("element", inner)))]) if nested else inner)
    flat = times.combine_chunks().field(0).flatten() if nested else times
    assert flat.cast(pa.int64()).to_pylist() == [None if v is None else v // 1000 for v in fine]
    for lost in (NIGHT + 1, -1):
        path = tmp_path / f"lost{lost}.parquet"
        int96(path, [NIGHT, None, lost], nested)
        said = rf"{path}: column 't', row group 0: .* has digits below a microsecond: options={{'int96': 'ns'}}"
        with pytest.raises(BadSource, match=said):
            planned(str(path)).read()
        assert planned(str(path)).read(columns=["k"]).rows.num_rows == 3
        exact = planned(str(path), options={"int96": "ns"}).read().rows["t"]
        flat = exact.combine_chunks().field(0).flatten() if nested else exact
        assert flat.cast(pa.int64()).to_pylist() == [NIGHT, None, lost]
    with pytest.raises(BadSource, match=r"9999-01-01T00:00:00\.999999000 is of a year that nanoseconds do not hold"):
        planned(str(tmp_path / "fine.parquet"), options={"int96": "ns"}).read()


def test_a_wrong_unit_of_int96_timestamps_is_refused(tmp_path: Path, planned: Any) -> None:
    """By name, as an option that there is not."""
    int96(tmp_path / "x.parquet", [NIGHT])
    with pytest.raises(BadSource, match="option int96 of a Parquet source is 'ms': give 'us' or 'ns'"):
        planned(str(tmp_path / "x.parquet"), options={"int96": "ms"})
    with pytest.raises(BadSource, match="Parquet sources have no option int69"):
        planned(str(tmp_path / "x.parquet"), options={"int69": "ns"})


@pytest.mark.parametrize("inside", [False, True])
def test_int96_timestamps_of_a_column_with_dots_in_its_name(tmp_path: Path, planned: Any, inside: bool) -> None:
    """They are checked as all others, beside columns whose names begin alike."""

    def written(name: str, *values: int) -> Any:
        times = pa.array([v // 1000 for v in values], pa.timestamp("us"))
        if all(v < 2**63 for v in values):
            times = pa.array(values, pa.timestamp("ns"))
        column = pa.StructArray.from_arrays([times], ["a.b"]) if inside else times
        path = str(tmp_path / name)
        columns = {"event": range(len(values)), "event.time": column, "event.time.zone": ["UTC"] * len(values)}
        pq.write_table(pa.table(columns), path, use_deprecated_int96_timestamps=True)
        return path

    lost, far = written("lost.parquet", NIGHT, NIGHT + 1), written("far.parquet", NIGHT, FAR)
    with pytest.raises(BadSource, match=r"column 'event\.time', row group 0: .* has digits below a microsecond"):
        planned(lost).read()
    with pytest.raises(BadSource, match=r"column 'event\.time', .* is of a year that nanoseconds do not hold"):
        planned(far, options={"int96": "ns"}).read()
    for path, unit, expected in ((lost, "ns", [NIGHT, NIGHT + 1]), (far, "us", [NIGHT // 1000, FAR // 1000])):
        for columns in (None, ["event.time"]):
            times = planned(path, options={"int96": unit}).read(columns=columns).rows["event.time"].combine_chunks()
            assert (times.field(0) if inside else times).cast(pa.int64()).to_pylist() == expected
        assert planned(path, options={"int96": unit}).read(columns=["event"]).rows.column_names == ["event"]


def test_other_timestamps_beside_those_of_int96(tmp_path: Path) -> None:
    """They have a unit of their own, in which nothing is lost: only what differs between the two ways is looked at."""
    times = [pa.array([1], pa.timestamp(unit)) for unit in ("us", "ms", "us")]
    read = pa.StructArray.from_arrays(times, ["old", "new", "newer"])
    beside = pa.StructArray.from_arrays([pa.array([1001], pa.timestamp("ns")), *times[1:]], ["old", "new", "newer"])
    assert misfit(read.field(1), read.field(1), "us") is None
    assert "00:00:00.000001001 has digits" in str(misfit(read, beside, "us"))
    beside = pa.StructArray.from_arrays([pa.array([1000], pa.timestamp("ns")), *times[1:]], ["old", "new", "newer"])
    assert misfit(read, beside, "us") is None
