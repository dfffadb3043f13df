"""The digest of what was read: of values and places, wherever rows are cut into blocks."""

from __future__ import annotations

import datetime as dt
import decimal
import itertools
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.sources.contract import BadRow, Block
from gristmill.sources.rowdigests import Content

INTS = st.integers(-(2**31), 2**31 - 1)
KINDS: list[tuple[pa.DataType, st.SearchStrategy[Any]]] = [
    (pa.int32(), INTS),
    (pa.float64(), st.floats(allow_nan=False)),
    (pa.bool_(), st.booleans()),
    (pa.string(), st.text(max_size=6)),
    (pa.large_string(), st.text(max_size=6)),
    (pa.binary(), st.binary(max_size=6)),
    (pa.binary(3), st.binary(min_size=3, max_size=3)),
    (pa.string_view(), st.text(max_size=20)),
    (pa.dictionary(pa.int8(), pa.string()), st.sampled_from(["a", "b", "cc"])),
    (pa.timestamp("us", "UTC"), st.datetimes(dt.datetime(1990, 1, 1), dt.datetime(2040, 1, 1))),
    (pa.date32(), st.dates()),
    (pa.decimal128(9, 2), st.decimals(-1000, 1000, places=2).map(decimal.Decimal)),
    (pa.null(), st.none()),
    (pa.list_(pa.string()), st.lists(st.none() | st.text(max_size=3), max_size=3)),
    (pa.large_list(pa.int32()), st.lists(st.none() | INTS, max_size=3)),
    (pa.list_(pa.float32(), 2), st.lists(st.floats(width=32, allow_nan=False), min_size=2, max_size=2)),
    (pa.map_(pa.string(), pa.int32()), st.dictionaries(st.text(max_size=2), st.none() | INTS, max_size=2)),
    (pa.struct({"a": pa.int32(), "b": pa.list_(pa.string())}),
     st.fixed_dictionaries({"a": st.none() | INTS, "b": st.none() | st.lists(st.text(max_size=2), max_size=2)})),
]  # fmt: skip
columns = st.sampled_from(KINDS).flatmap(
    lambda kind: st.tuples(st.just(kind[0]), st.lists(st.none() | kind[1], min_size=1, max_size=12))
)


def made(kind: pa.DataType, values: list[Any]) -> pa.Array:
    """An array of the type; maps from dicts."""
    if pa.types.is_map(kind):
        values = [None if v is None else list(v.items()) for v in values]
    return pa.array(values, kind)


def digest(table: pa.Table, edges: list[int], first: int = 0, bad: tuple[BadRow, ...] = (), filtered: int = 0) -> str:
    """The digest of a table given in blocks cut at `edges`, with positions that count from `first`."""
    content = Content()
    cuts = sorted({0, *(e % (table.num_rows + 1) for e in edges), table.num_rows})
    for a, b in itertools.pairwise(cuts):
        content.add(Block(table.slice(a, b - a), np.arange(first + a, first + b)))
    content.add(Block(table.slice(0, 0), np.empty(0, dtype=np.int64), filtered, bad))
    return content.hexdigest()


@settings(max_examples=200, deadline=None)
@given(columns, st.lists(st.integers(0, 40), max_size=4), st.data())
def test_it_is_of_the_values_alone(
    column: tuple[pa.DataType, list[Any]], edges: list[int], data: st.DataObject
) -> None:
    """The same however blocks and chunks are cut, and whatever stands under nulls; another where a value is another."""
    kind, values = column
    plain = pa.table({"x": made(kind, values)})
    half = data.draw(st.integers(0, len(values)))
    pieces = pa.chunked_array([made(kind, values[:half]), made(kind, values[half:])], kind)
    assert digest(plain, []) == digest(plain, edges) == digest(pa.table({"x": pieces}), edges)
    surrounded = pa.concat_tables([plain, plain, plain]).combine_chunks().slice(len(values), len(values))
    assert digest(surrounded, edges) == digest(plain, []), "offsets into larger arrays"
    at = data.draw(st.integers(0, len(values) - 1))
    other = data.draw(st.none() | {str(k): s for k, s in KINDS}[str(kind)])
    if made(kind, [other]).equals(made(kind, values[at : at + 1])):
        return
    changed = [*values[:at], other, *values[at + 1 :]]
    assert digest(pa.table({"x": made(kind, changed)}), edges) != digest(plain, edges)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (["ab", "c"], ["a", "bc"]),
        ([["a"], ["b"]], [["a", "b"], []]),
        ([[None], []], [[], [None]]),
        ([None, 1], [1, None]),
        ([0, None], [None, 0]),
        (["", None], [None, ""]),
        ([1, 2], [2, 1]),
    ],
)
def test_what_runs_together_is_told_apart(one: list[Any], other: list[Any]) -> None:
    """Values whose bytes, or nulls, are the same in a row."""
    assert digest(pa.table({"x": one}), []) != digest(pa.table({"x": other}), [])


def test_places_filtered_and_bad_rows_count() -> None:
    """Rows that moved, rows that a condition left out, and what was no row."""
    table = pa.table({"x": [1, 2, 3]})
    bad = BadRow(7, b"{", "BadJson", "no")
    found = {
        digest(table, []),
        digest(table, [], first=1),
        digest(table, [], filtered=1),
        digest(table, [], bad=(bad,)),
        digest(table, [], bad=(BadRow(7, b"[", "BadJson", "no"),)),
        digest(table, [], bad=(BadRow(8, b"{", "BadJson", "no"),)),
        digest(table.rename_columns(["y"]), []),
        digest(table.cast(pa.schema({"x": pa.int32()})), []),
    }
    assert len(found) == 8


def test_what_stands_under_a_null_is_nothing() -> None:
    """Two arrays that are equal, whose memory is not."""
    mask = pa.py_buffer(b"\x05")
    arrays = [
        pa.Array.from_buffers(pa.int64(), 3, [mask, pa.py_buffer(np.array([1, hidden, 3]).tobytes())])
        for hidden in (7, 9)
    ]
    assert arrays[0].equals(arrays[1])
    assert digest(pa.table({"x": arrays[0]}), []) == digest(pa.table({"x": arrays[1]}), [])
