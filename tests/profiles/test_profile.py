"""Profiles: those of any parts add up to that of the whole, whatever the columns hold and however they are cut."""

from __future__ import annotations

import itertools

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.commit.receipt import Receipt
from gristmill.profiles.columns import SAMPLED, Profiling, kind_of, profiled
from gristmill.profiles.profile import ColumnProfile, Profile, sketch_of, summed
from gristmill.profiles.sketch import K, Ranks, repeated, sketched

RANK_ERROR = 0.02  # of a sketch of K values, one chance in a thousand; twice, as two sketches are compared

NUMBERS = st.one_of(st.none(), st.floats(width=32), st.sampled_from([0.0, 1.0, 2.5]))
TEXTS = st.one_of(st.none(), st.sampled_from(["a", "b", "été", ""]), st.text(max_size=5))
VECTORS = st.one_of(st.none(), st.lists(st.floats(-8, 8, width=32), min_size=3, max_size=3))
ROWS = st.lists(
    st.tuples(NUMBERS, st.one_of(st.none(), st.integers(-5, 200)), TEXTS, st.one_of(st.none(), st.booleans()), VECTORS),
    max_size=150,
)
TYPES = {"n": "float32", "i": "int64", "t": "string", "b": "bool", "v": None}


def table(rows: list[tuple[object, ...]]) -> pa.Table:
    """The rows as a table of five columns."""
    columns = list(zip(*rows, strict=True)) or [()] * 5
    kinds = [pa.list_(pa.float32(), 3) if kind is None else kind for kind in TYPES.values()]
    return pa.table({n: pa.array(c, k) for n, c, k in zip(TYPES, columns, kinds, strict=True)})


def agree(a: ColumnProfile, b: ColumnProfile) -> None:
    """Two profiles of the same rows say the same, up to the errors of sketches and sums."""
    assert (a.rows, a.nulls, a.kind, a.strange) == (b.rows, b.nulls, b.kind, b.strange)
    assert a.counts == b.counts
    if a.total is not None or b.total is not None:
        assert np.allclose(a.mean(), b.mean(), atol=1e-9) and np.isclose(a.squares, b.squares)
    if a.sketch or b.sketch:
        one, other = Ranks(sketch_of(a)), Ranks(sketch_of(b))
        assert (one.rows, one.least, one.most) == (other.rows, other.least, other.most)
        points = np.unique(np.concatenate([one.values, other.values]))
        assert np.abs(one.below(points) - other.below(points)).max() <= (0 if one.rows < K else RANK_ERROR)


@settings(deadline=None, max_examples=60)
@given(ROWS, st.lists(st.integers(0, 150), max_size=6), st.booleans())
def test_any_split_adds_up(rows: list[tuple[object, ...]], cuts: list[int], backwards: bool) -> None:
    """Parts merged in any order are the whole: counts exactly, quantiles within the sketch's error."""
    whole, edges = table(rows), sorted({0, len(rows), *(c for c in cuts if c < len(rows))})
    parts = [profiled(whole.slice(a, b - a), TYPES) for a, b in itertools.pairwise(edges)]
    found = summed(parts[::-1] if backwards else parts)
    straight = profiled(whole, TYPES)
    assert found is not None and (found.rows, dict(found.nulls)) == (
        (straight.rows, dict(straight.nulls)) if rows else (0, {})
    )
    for name in found.columns:
        agree(found.columns[name], straight.columns[name])


@pytest.mark.parametrize("rows", [350, 5_000, 200_000])
def test_long_columns_add_up(rows: int) -> None:
    """So are those of many rows, cut into windows and shards, of which sketches hold only some."""
    r = np.random.default_rng(rows)
    whole = pa.table(
        {
            "n": r.lognormal(size=rows).astype("float32"),
            "i": np.where(r.random(rows) < 0.9, r.integers(0, 9, rows), r.integers(0, 10**12, rows)),
            "t": pa.array([f"text {n}" * (n % 7) for n in r.integers(0, 5000, rows)]),
            "label": pa.array(np.array(["good", "bad"])[r.integers(0, 2, rows)]).dictionary_encode(),
        }
    )
    exact = {name: whole[name].to_numpy() for name in ("n", "i")}
    exact["t"] = np.array([len(t) for t in whole["t"].to_pylist()])
    shards = []
    for first in range(0, rows, 70_000):
        held = Profile()
        for start in range(first, min(first + 70_000, rows), 16_384):
            window = whole.slice(start, min(16_384, first + 70_000 - start))
            held = held + profiled(window, whole.column_names, held)
        shards.append(held)
    found = summed(shards)
    labels = dict(zip(*np.unique(whole["label"].to_numpy(), return_counts=True), strict=True))
    assert found is not None and found.columns["label"].counts == labels
    for name, values in exact.items():
        ranks, ranked = Ranks(sketch_of(found.columns[name])), np.sort(values.astype("float64"))
        points = np.unique(ranked[:: max(1, rows // 500)])
        truth = np.searchsorted(ranked, points) / rows
        assert ranks.rows == rows and (ranks.least, ranks.most) == (ranked[0], ranked[-1])
        assert np.abs(ranks.below(points) - truth).max() < RANK_ERROR


def test_what_a_receipt_holds_reads_back() -> None:
    """A profile survives the receipt, and one of an earlier version, without a profile, makes the whole unknown."""
    some = profiled(table([(1.5, 3, "a", True, [1.0, 2.0, 3.0]), (None, None, None, None, None)]), TYPES)
    receipt = Receipt(0, "n", (0,) * 8, (), profile=some)
    assert Receipt.load(receipt.dump(), "r").profile == some
    old = Receipt.load(Receipt(0, "n", (0,) * 8, ()).dump(), "r")
    assert old.profile is None and summed([some, old.profile]) is None


def test_columns_that_came_later_are_null_before() -> None:
    """As gm.read shows them, if that is said; else nothing is known of them, nor of values that only some looked at."""
    old, new = profiled(pa.table({"a": [1, 2]}), ["a"]), profiled(pa.table({"a": [3], "b": ["x"]}), ["a", "b"])
    assert dict((old + new).nulls) == {"a": 0} and list((new + old).columns) == ["a"]
    both = old.read_as(["a", "b"]) + new
    assert dict(both.nulls) == {"a": 0, "b": 2} and both.columns["b"].counts == {"x": 1}
    assert dict((both + profiled(pa.table({"a": [1], "b": ["y"]}), ["a"])).columns).keys() == {"a"}


def test_rows_by_windows() -> None:
    """The profile of a shard is that of its rows; a column that some windows lack is unknown."""
    r = np.random.default_rng(3)
    whole = pa.table({"n": r.random(200_000), "label": np.array(["a", "b"])[r.integers(0, 2, 200_000)]})
    for step in (64, 16_384, 70_000):
        made = Profiling(["n", "label", "other"])
        for start in range(0, 50 * step if step == 64 else whole.num_rows, step):
            made.add(whole.slice(start, step))
        rows = made.profile().rows
        found, exact = made.profile().columns, whole.slice(0, rows)
        assert found["n"].held == found["label"].held == rows
        ranks, ranked = Ranks(found["n"].sketch), np.sort(exact["n"].to_numpy())
        points = ranked[:: max(1, rows // 500)]
        assert np.abs(ranks.below(points) - np.searchsorted(ranked, points) / rows).max() < RANK_ERROR
        assert (ranks.least, ranks.most) == (ranked[0], ranked[-1])
        counts = dict(zip(*np.unique(exact["label"].to_numpy(), return_counts=True), strict=True))
        assert found["label"].counts == (counts if rows < SAMPLED else pytest.approx(counts, rel=0.02))
    made.add(whole.select(["label"]))
    assert dict(made.profile().nulls) == {"label": 0} and list(made.profile().columns) == ["label"]
    made.add(pa.table({"x": [1]}))
    assert made.profile() == Profile(made.profile().rows)


def test_types_that_change_their_column() -> None:
    """Whole numbers and floats are one kind; anything else that meets is compared by its nulls alone."""
    whole, real, text = (profiled(pa.table({"a": v}), ["a"]) for v in ([1, 2], [1.0, 2.5], ["x", "y"]))
    assert (whole + real).columns["a"].counts == {"1": 2, "2": 1, "2.5": 1}
    assert (whole + text).columns["a"].kind == "other"
    none = profiled(pa.table({"a": pa.nulls(3)}), ["a"])
    assert (none + text).columns["a"].counts == {"x": 1, "y": 1} and (text + none).columns["a"].nulls == 3


def test_kinds_of_types() -> None:
    """Times are numbers, lists of numbers vectors, whatever the encoding."""
    kinds = {
        pa.timestamp("us", "UTC"): "whole", pa.decimal128(9, 2): "number", pa.float16(): "number",
        pa.dictionary(pa.int8(), pa.string()): "text", pa.large_string(): "text", pa.bool_(): "boolean",
        pa.list_(pa.float32()): "vector", pa.list_(pa.string()): "other", pa.binary(): "other",
    }  # fmt: skip
    assert {kind: kind_of(kind) for kind in kinds} == kinds


def test_values_of_every_type_are_looked_at() -> None:
    """No type that a sink can hold stops a run because it is profiled; nulls and NaN are told apart."""
    values = {
        pa.timestamp("us", "UTC"): [1, 2], pa.date32(): [1, 2], pa.time64("us"): [1, 2], pa.duration("s"): [1, 2],
        pa.decimal128(9, 2): ["1.5", "2"], pa.float16(): [1.0, float("nan")], pa.uint64(): [2**64 - 1, 0],
        pa.large_string(): ["a" * 300, "b"], pa.list_(pa.float64()): [[1.0], [1.0, 2.0]], pa.binary(): [b"a", b"b"],
        pa.list_(pa.float64(), 2): [[1.0, float("inf")], [3.0, 4.0]], pa.struct({"x": pa.int8()}): [{"x": 1}, None],
    }  # fmt: skip
    for kind, some in values.items():
        made = pa.array(some, pa.string() if pa.types.is_decimal(kind) else kind)
        found = profiled(pa.table({"a": pa.concat_arrays([made.cast(kind), pa.nulls(1, kind)])}), ["a"]).columns["a"]
        assert (found.rows, found.nulls) == (3, 1 + made.null_count), kind
        strange = kind in (pa.float16(), pa.list_(pa.float64(), 2))
        assert found.strange == strange, kind


def test_counts_become_a_sketch() -> None:
    """Values that were counted are in the sketch with their numbers, also if these are billions."""
    ranks = Ranks(repeated(np.array([1.0, 2.0, 9.0]), np.array([3_000_000_007, 1_000_000_000, 1])))
    assert ranks.rows == 4_000_000_008 and ranks.most == 9.0
    assert np.allclose(ranks.below(np.array([1.0, 2.0, 9.0]), inclusive=True), [0.75, 1, 1], atol=1e-8)
    assert sketched(np.array([])) == {} == repeated(np.array([]), np.array([], dtype=np.int64))
