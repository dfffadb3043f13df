"""Bytes of values: no two values of a type have the same, and a value has the same in every layout."""

from __future__ import annotations

import decimal
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from gristmill.arrow.hashing import kinds_of, rough, row_digests
from gristmill.arrow.valuebytes import value_bytes
from gristmill.sources.contract import Block
from gristmill.sources.rowdigests import Content

D = decimal.Decimal
FAR = 2**62  # beyond year 9999 in every unit, and beyond Python's durations


def _counts(kind: pa.DataType, *counts: int) -> pa.Array:
    return pa.array(counts, pa.int32() if kind.bit_width == 32 else pa.int64()).view(kind)


def _leaves() -> Iterator[pa.Array]:
    """Three values of each type that Python might take for one, or not hold at all."""
    yield from (pa.array([0, 1, 100], kind()) for kind in (pa.int8, pa.uint16, pa.int32, pa.uint64))
    yield from (pa.array(np.array([0.0, -0.0, 1.5], f"f{width}")) for width in (2, 4, 8))
    yield pa.array([True, False, None])
    for unit in ("s", "ms", "us", "ns"):
        kinds = (pa.timestamp(unit), pa.timestamp(unit, "Europe/Berlin"), pa.duration(unit))
        yield from (_counts(kind, 1, FAR, FAR + 1) for kind in kinds)
    yield from (_counts(pa.time32(unit), 1, 2, 3) for unit in ("s", "ms"))
    yield from (_counts(pa.time64(unit), 1, 2, 999) for unit in ("us", "ns"))
    yield _counts(pa.date32(), 1, 2**30, 2**30 + 1)
    yield _counts(pa.date64(), 0, 86_400_000, 86_400_000 * 10**10)
    for made in (pa.decimal32(9, 3), pa.decimal64(18, 3), pa.decimal128(30, 3), pa.decimal256(60, 3)):
        yield pa.array([D("1.100"), D("1.101"), D(0)], made)
    yield from (pa.array(["None", "a', 'b", ""], kind) for kind in (pa.string(), pa.large_string(), pa.string_view()))
    yield from (pa.array([b"", b"\0", b"\0\0"], kind) for kind in (pa.binary(), pa.large_binary(), pa.binary_view()))
    yield pa.array([b"abc", b"ab\0", b"\0\0\0"], pa.binary(3))
    yield pa.array([pa.MonthDayNano(days) for days in ((1, 2, 3), (1, 2, 4), (1, 30, 4))])
    yield pa.nulls(3)


LEAVES = {str(pool.type): pool for pool in _leaves()}


def wrapped(kind: pa.DataType) -> Iterator[pa.DataType]:
    """Types that hold values of this one."""
    yield from (pa.list_(kind), pa.large_list(kind), pa.list_view(kind), pa.list_(kind, 2), pa.list_(kind, 0))
    yield from (pa.struct([("a", kind), ("b", pa.int8())]), pa.struct([]), pa.map_(pa.string(), kind))


def values_of(kind: pa.DataType) -> list[Any]:
    """Different values, as None, numbers of values of a leaf, and tuples of what a nested one holds."""
    t = pa.types
    if t.is_map(kind):
        items = values_of(kind.item_type)[:4]
        return [None, (), *(((0, item),) for item in items), ((0, None), (1, None)), ((1, items[-1]),)]
    if t.is_struct(kind):
        if not kind.num_fields:
            return [None, ()]
        return [None, *itertools.product(values_of(kind.field(0).type)[:5], (None, 0, 1))]
    if t.is_nested(kind):
        inner = values_of(kind.value_type)[:4]
        pairs = [pair for size in range(4) for pair in itertools.product(inner[:2], repeat=size)]
        whole = [None, *pairs, *((one,) for one in inner[2:]), *((inner[-1], one) for one in inner)]
        size = kind.list_size if t.is_fixed_size_list(kind) else None
        return list(dict.fromkeys(v for v in whole if v is None or size in (None, len(v))))
    return [None] if t.is_null(kind) else [None, *(n for n, v in enumerate(LEAVES[str(kind)]) if v.is_valid)]


def made(kind: pa.DataType, values: Sequence[Any], junk: Any = None) -> pa.Array:
    """These values as an array; what is under a null list is not always nothing."""
    t = pa.types
    if not t.is_nested(kind):
        pool, index = LEAVES[str(kind)], pa.array(values, pa.int64())
        if t.is_string_view(kind) or t.is_binary_view(kind):  # which Arrow cannot take
            return pool.cast(pa.large_binary()).take(index).cast(pa.large_binary()).cast(kind)
        return pool.take(index)
    gone = pa.array([v is None for v in values], pa.bool_())
    if t.is_struct(kind):
        if not kind.num_fields:
            return pa.array([None if v is None else {} for v in values], kind)
        parts = [[v[i] if v is not None else None for v in values] for i in range(kind.num_fields)]
        children = [made(f.type, part) for f, part in zip(kind, parts, strict=True)]
        return pa.StructArray.from_arrays(children, fields=list(kind), mask=gone)
    if t.is_fixed_size_list(kind) and kind.list_size == 0:
        bits = pa.array([v is not None for v in values], pa.bool_()).buffers()[1]
        return pa.FixedSizeListArray.from_buffers(kind, len(values), [bits], children=[made(kind.value_type, [])])
    under = (None,) * (kind.list_size if t.is_fixed_size_list(kind) else 1)
    under = ((0, None),) if t.is_map(kind) else under
    lists = [under if v is None else v for v in values]
    flat, ends = [x for v in lists for x in v], np.cumsum([0, *map(len, lists)])
    if t.is_map(kind):
        items = made(kind.item_type, [x for _, x in flat])
        keys = pa.array(["k", "l"]).take(pa.array([k for k, _ in flat], pa.int64()))
        return pa.MapArray.from_arrays(pa.array(ends.astype(np.int32)), keys, items, kind, mask=gone)
    inner = made(kind.value_type, flat)
    if t.is_fixed_size_list(kind):
        return pa.FixedSizeListArray.from_arrays(inner, type=kind, mask=gone)
    large = t.is_large_list(kind)
    offsets = pa.array(ends.astype(np.int64 if large else np.int32))
    if t.is_list_view(kind):
        sizes = pa.array(np.diff(ends).astype(np.int32))
        return pa.ListViewArray.from_arrays(offsets[:-1], sizes, inner, kind, mask=gone)
    return (pa.LargeListArray if large else pa.ListArray).from_arrays(offsets, inner, kind, mask=gone)


def digests(column: Any) -> list[Any]:
    """Digests of a column's values, whatever its type is called."""
    return list(row_digests(pa.table({"x": column}).rename_columns(["x"]), "test").tolist())


def depths(kind: pa.DataType, every: int) -> list[pa.DataType]:
    """A type, those that hold values of it, and of those that hold values of these each so many."""
    once = list(wrapped(kind))
    twice = [outer for inner in once for outer in wrapped(inner)]
    return [kind, *once, *twice[list(LEAVES).index(str(kind)) % every :: every]]


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.long), 21])
@pytest.mark.parametrize("leaf", LEAVES)
def test_no_two_values_of_a_type_are_alike(leaf: str, every: int) -> None:
    """At every depth a value has its own digest and its own bytes, and the same in slices, in chunks and in another
    order.
    """
    for kind in depths(LEAVES[leaf].type, every):
        values = values_of(kind)
        whole = made(kind, values)
        found = digests(whole)
        assert len(set(found)) == len(values), kind
        assert len(set(value_bytes(whole).to_pylist())) == len(values), kind
        back = list(reversed(values))
        assert digests(made(kind, back))[::-1] == found, kind
        again = made(kind, [*back[:2], *values, *back])
        assert digests(again.slice(2, len(values))) == found, kind
        chunks = pa.chunked_array([again.slice(2, 1), again.slice(3, 0), again.slice(3, len(values) - 1)], kind)
        assert digests(chunks) == found, kind
        assert rough(pa.table({"x": chunks})).tolist() == rough(pa.table({"x": whole})).tolist(), kind


@pytest.mark.parametrize("leaf", [name for name in LEAVES if name != "null"])
def test_encodings_do_not_count(leaf: str) -> None:
    """A dictionary, of which a value may be null, and runs hold what they stand for, alone and inside lists and
    structs.
    """
    pool = LEAVES[leaf]
    for kind in [
        pool.type,
        pa.list_(pool.type),
        pa.list_(pool.type, 2),
        pa.struct([("a", pool.type), ("b", pa.int8())]),
    ]:
        values = values_of(kind)
        held, twice = made(kind, values), [*range(len(values)), *range(len(values))]
        index = pa.array([*range(len(values)), *([None] * len(values))], pa.int32())
        encoded = pa.DictionaryArray.from_arrays(index, held)
        bare = made(kind, [*values, *([None] * len(values))])
        assert digests(encoded) == digests(bare), kind
        assert digests(encoded.slice(1, 3)) == digests(bare)[1:4], kind
        for outer in ("list", "struct"):
            one, other = (
                pa.ListArray.from_arrays(pa.array(range(len(twice) + 1), pa.int32()), each)
                if outer == "list"
                else pa.StructArray.from_arrays([each], ["a"])
                for each in (encoded, bare)
            )
            assert digests(one) == digests(other), (outer, kind)
            assert value_bytes(one.slice(2)).to_pylist() == value_bytes(other.slice(2)).to_pylist()
        if not pa.types.is_nested(kind):
            runs = pa.RunEndEncodedArray.from_arrays(pa.array(range(2, 2 * len(values) + 1, 2), pa.int32()), held)
            doubled = [each for each in digests(held) for _ in range(2)]
            assert digests(runs) == doubled, kind
            assert digests(runs.slice(1, 3)) == doubled[1:4], kind


def test_unions_are_told_apart() -> None:
    """By their types, too, dense or sparse, in slices."""
    codes, numbers = pa.array([0, 1, 0, 1], pa.int8()), pa.array([1, 0, 2, 0], pa.int64())
    times = pa.array([0, 1, 0, 2], pa.int64()).view(pa.time64("ns"))
    sparse = pa.UnionArray.from_sparse(codes, [numbers, times])
    dense = pa.UnionArray.from_dense(
        codes, pa.array([0, 0, 1, 1], pa.int32()), [pa.array([1, 2]), pa.array([1, 2], pa.int64()).view(times.type)]
    )
    found = [value_bytes(union).to_pylist() for union in (sparse, dense)]
    assert found[0] == found[1] and len(set(found[0])) == 4
    assert [value_bytes(union.slice(1, 2)).to_pylist() for union in (sparse, dense)] == [found[0][1:3]] * 2
    assert len(set(digests(sparse))) == 4


def test_kinds_are_those_of_the_values() -> None:
    """A type is told without how its values are encoded, at any depth."""
    encoded = pa.schema([("x", pa.list_(pa.dictionary(pa.int8(), pa.string_view())))])
    assert kinds_of(encoded) == kinds_of(pa.schema([("x", pa.list_(pa.string()))]))


def test_what_was_read_is_told_by_its_bytes() -> None:
    """Also of layouts of which no array of numbers is at hand: views of lists, runs and unions."""
    found = set()
    for last in (1, 2, 999):
        times = pa.array([0, last], pa.int64()).view(pa.time64("ns"))
        lists = pa.ListViewArray.from_arrays(pa.array([0, 1], pa.int32()), pa.array([1, 1], pa.int32()), times)
        content = Content()
        content.add(Block(pa.table({"x": lists}), np.arange(2)))
        found.add(content.hexdigest())
    assert len(found) == 3
