"""Sorting in memory and in files: both give the order of an oracle, and change no value."""

from __future__ import annotations

import math
from datetime import datetime, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.arrow import sorting
from gristmill.arrow.sorting import Sorting, sortable

KINDS: dict[Any, st.SearchStrategy[Any]] = {
    pa.int64(): st.integers(-(2**63), 2**63 - 1),
    pa.uint64(): st.integers(0, 2**64 - 1),
    pa.float64(): st.floats() | st.sampled_from([0.0, -0.0, math.nan, math.inf]),
    pa.float16(): st.floats(width=16),
    pa.string(): st.text(max_size=3),
    pa.large_string(): st.text(max_size=3),
    pa.binary(): st.binary(max_size=3),
    pa.binary(2): st.binary(min_size=2, max_size=2),
    pa.bool_(): st.booleans(),
    pa.timestamp("ns", "Europe/Berlin"): st.integers(-(2**62), 2**62),
    pa.date32(): st.integers(-999, 999),
    pa.duration("us"): st.integers(-999, 999),
    pa.decimal128(20, 3): st.decimals(-999, 999, places=3),
    pa.decimal128(7, -2): st.integers(-999, 999).map(lambda n: Decimal(n).scaleb(2)),
    pa.decimal256(38, 2): st.decimals(-999, 999, places=2),
    pa.decimal64(18, 2): st.decimals(-999, 999, places=2),
    pa.decimal32(9, 2): st.decimals(-999, 999, places=2),
    pa.dictionary(pa.int32(), pa.string()): st.sampled_from(["b", "a", "", "é"]),
}


def place(value: Any) -> tuple[Any, ...]:
    """Where a value stands: nulls last, NaN before them, text by its bytes."""
    if value is None:
        return (2,)
    if isinstance(value, float) and math.isnan(value):
        return (1,)
    return 0, value.encode() if isinstance(value, str) else value


def collected(rows: list[pa.Table], by: list[str]) -> pa.Table:
    """What `Sorting` gives back."""
    sorter = Sorting(by)
    try:
        for table in rows:
            sorter.add(table)
        return pa.concat_tables(list(sorter.sorted()) or [rows[0].slice(0, 0)])
    finally:
        sorter.close()


@pytest.mark.parametrize("held", [1 << 20, 600, 1], ids=["memory", "pieces", "rows"])
@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_rows_are_in_order_and_unchanged(held: int, data: st.DataObject) -> None:
    """By one or two columns of any type; equal rows stay as they came."""
    kinds = data.draw(st.lists(st.sampled_from(list(KINDS)), min_size=1, max_size=2))
    count = data.draw(st.integers(1, 40))
    columns = {"n": pa.array(range(count)), "v": pa.FixedSizeListArray.from_arrays(np.arange(count * 2.0), 2)}
    for i, kind in enumerate(kinds):
        few = data.draw(st.lists(st.none() | KINDS[kind], min_size=1, max_size=6))
        chosen = [data.draw(st.sampled_from(few)) for _ in range(count)]
        raw = pa.types.is_timestamp(kind) or pa.types.is_date(kind) or pa.types.is_duration(kind)
        whole = pa.int32() if pa.types.is_date(kind) else pa.int64()
        columns[f"k{i}"] = pa.array(chosen, whole).cast(kind) if raw else pa.array(chosen, kind)
    table = pa.table(columns)
    cuts = sorted(data.draw(st.lists(st.integers(0, count), max_size=4)))
    pieces = [table.slice(a, b - a) for a, b in zip([0, *cuts], [*cuts, count], strict=True)]
    by = [f"k{i}" for i in range(len(kinds))]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sorting, "HELD_BYTES", held)
        got = collected(pieces, by)
    keys = {n: numbers(table[n]) for n in by}
    wanted = sorted(range(count), key=lambda i: tuple(place(keys[n][i]) for n in by))
    assert got["n"].to_pylist() == wanted
    assert got.schema == table.schema
    assert repr(got.drop_columns("n").to_pylist()) == repr(table.take(wanted).drop_columns("n").to_pylist())


def numbers(column: pa.ChunkedArray) -> list[Any]:
    """Values that Python compares: times by their numbers."""
    if pa.types.is_temporal(column.type):
        column = column.cast(pa.int32() if column.type.bit_width == 32 else pa.int64())
    return list(column.to_pylist())


def test_memory_and_files_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many pieces there would be, so many files are open at most; none is left."""
    monkeypatch.setattr(sorting, "HELD_BYTES", 800)
    monkeypatch.setattr(sorting, "MOST_PIECES", 7)
    values = np.random.default_rng(1).permutation(20_000)
    sorter = Sorting(["x"])
    for at in range(0, 20_000, 1000):
        sorter.add(pa.table({"x": values[at : at + 1000]}))
    pieces = list(sorter.sorted())
    assert len(pieces) == 7 and pa.concat_tables(pieces)["x"].to_pylist() == list(range(20_000))
    folder = sorter._folder
    assert folder is not None
    sorter.close()
    assert not Path(folder.name).exists()


def test_types_without_an_order() -> None:
    """Lists, structs and numbers that DuckDB does not have are told apart from those with one."""
    assert not any(map(sortable, [pa.list_(pa.int8()), pa.struct([("a", pa.int8())]), pa.decimal256(50, 2)]))
    assert all(map(sortable, [*KINDS, pa.decimal128(38, 2), pa.null(), pa.time32("s")]))
    when = datetime(2026, 1, 1, tzinfo=timezone.utc)
    rows = pa.table({"t": [when, None], "d": [Decimal("1.5"), Decimal("-1")], "nothing": pa.nulls(2)})
    assert collected([rows], ["nothing", "d"])["d"].to_pylist() == [Decimal("-1"), Decimal("1.5")]
