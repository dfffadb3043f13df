"""Python values as Arrow arrays: what they were, or refused."""

from __future__ import annotations

import datetime as dt
import uuid
from decimal import Decimal

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gristmill as gm
from gristmill.arrow.casts import Lossy
from gristmill.arrow.frompython import from_python
from gristmill.errors import BadOutput, BadSource
from gristmill.models.conversion import from_result

EAST = dt.timezone(dt.timedelta(hours=5))
NOON = dt.datetime(2020, 1, 1, 12, 30)
MASKED = np.ma.array([1.0, 2.0], mask=[0, 1])

MIXED = {
    "date, datetime": ([NOON.date(), NOON], "date.*datetime"),
    "instant, naive": ([NOON.replace(tzinfo=dt.UTC), NOON], "datetime without a zone.*one"),
    "naive, instant": ([NOON, NOON.replace(tzinfo=EAST)], "datetime without a zone.*one"),
    "float, uint64": ([1.5, np.uint64(2**64 - 1)], "too large"),
    "numpy bool, int": ([np.True_, 2], "bool.*number"),
    "float, bool": ([1.5, True], "number.*bool"),
    "time with a zone": ([dt.time(1, tzinfo=EAST)], "zone"),
    "text, bytes": (["a", b"b"], "text.*bytes"),
    "uuid, bytes": ([uuid.UUID(int=1), b"0" * 16], "UUID.*bytes"),
    "longdouble": ([1.5, np.longdouble(1) / 3], "longdouble"),
    "nanoseconds, year 2400": ([pd.Timestamp(1), dt.datetime(2400, 1, 1)], "nanoseconds.*2400"),
    "nanoseconds, a long time": ([pd.Timedelta(1), dt.timedelta(200_000)], "nanoseconds.*too large"),
    "keys": ([{b"a": 1}], "bytes, not text"),
    "in arrays": ([np.array([True]), [1]], "bool.*number"),
    "uint64 in arrays": ([np.array([1.5]), np.array([2**64 - 1], np.uint64)], "too large"),
}
NESTS = {
    "bare": lambda v: v,
    "in a list": lambda v: [v],
    "in a dict": lambda v: {"k": v},
    "deep": lambda v: [{"k": [v]}],
}


@pytest.mark.parametrize("nest", NESTS)
@pytest.mark.parametrize("case", MIXED)
def test_fault_51_answers_of_two_kinds_are_refused_by_name(case, nest):
    """No value becomes one of another kind because of the value before it, at any depth."""
    values, says = MIXED[case]
    with pytest.raises(BadOutput, match=f"(?s)'v'.*{says}"):
        from_result([{"v": NESTS[nest](v)} for v in values], len(values), "score", "output")
    held = np.empty(len(values), object)
    for i, value in enumerate(values):
        held[i] = NESTS[nest](value)
    with pytest.raises(BadOutput, match=f"(?s)'v'.*{says}"):
        from_result({"v": held}, len(values), "score", "output")
    with pytest.raises(BadOutput, match=f"(?s)'v'.*{says}"):
        from_result(pd.DataFrame({"v": pd.Series(held, dtype=object)}), len(values), "score", "output")


FINE = pd.Timestamp("2023-11-14T22:13:20.123456789")
NANOSECONDS = {
    "timestamps": ([FINE, None, NOON, pd.NaT], pa.timestamp("ns"), [FINE.value, None, pd.Timestamp(NOON).value, None]),
    "zoned": ([FINE.tz_localize("UTC"), None], pa.timestamp("ns", "UTC"), [FINE.value, None]),
    "durations": ([pd.Timedelta(1234567891), None], pa.duration("ns"), [1234567891, None]),
}


@pytest.mark.parametrize("nest", NESTS)
@pytest.mark.parametrize("case", NANOSECONDS)
def test_nanoseconds_of_pandas_are_kept_one_by_one(case, nest):
    """A Timestamp that rows were given comes back whole under any name, beside datetimes and nulls, at any depth; also
    as what `returns` declares."""
    values, kind, counts = NANOSECONDS[case]
    rows = [{"v": NESTS[nest](v)} for v in values]
    found = from_result(rows, len(values), "score", "output")
    assert from_result(rows, len(values), "score", "output", types=found.schema).equals(found)
    leaf = found["v"].combine_chunks()
    while pa.types.is_nested(leaf.type):
        leaf = leaf.flatten()[0] if pa.types.is_struct(leaf.type) else leaf.flatten()
    assert leaf.equals(pa.array(counts).view(kind))


def test_fault_51_values_that_have_a_common_type_get_it():
    """Whole and other numbers are floats where that is exact; instants of several zones are instants."""
    tz = NOON.replace(tzinfo=dt.UTC)
    assert from_python([1, 2.5]).to_pylist() == [1.0, 2.5]
    assert from_python([np.float16(1.5), 2049]).to_pylist() == [1.5, 2049.0]
    assert from_python([np.uint8(200), np.int8(-1)]).to_pylist() == [200, -1]
    assert from_python([np.float32(0.1), 0.1]).to_pylist() == [float(np.float32(0.1)), 0.1]
    assert from_python([tz, tz.astimezone(EAST)]).to_pylist() == [tz, tz]
    assert from_python([1, Decimal("1.5")]).to_pylist() == [1, Decimal("1.5")]
    with pytest.raises(pa.ArrowInvalid):
        from_python([2**53 + 1, 0.5])


def test_fault_51_masked_and_missing_values_are_null():
    """What is masked or missing is null, not the value below the mask."""
    assert from_python([MASKED, None]).to_pylist() == [[1.0, None], None]
    assert from_python([{"k": MASKED}]).to_pylist() == [{"k": [1.0, None]}]
    assert from_python([np.ma.masked, 1.0]).to_pylist() == [None, 1.0]
    assert from_python([pd.NaT, NOON]).to_pylist() == [None, NOON]
    assert from_python([pd.NA, 1]).to_pylist() == [None, 1]
    matrix = np.ma.array([[1, 2], [3, 4]], mask=[[0, 1], [0, 0]])
    assert from_python([matrix]).to_pylist() == [[[1, None], [3, 4]]]


def test_fault_51_arrays_keep_their_kind_at_any_rank():
    """Times in arrays of no or two dimensions stay times; tensors in dicts are arrays."""
    when = np.array("2020-01-01T00:00:00.000000001", "M8[ns]")
    assert from_python([when]).type == pa.timestamp("ns")
    assert from_python([when.reshape(1, 1)]).type == pa.list_(pa.list_(pa.timestamp("ns")))
    assert from_python([{"t": torch.ones(2, 2)}]).type == pa.struct([("t", pa.list_(pa.list_(pa.float32())))])


def test_fault_51_declared_types_cut_nothing():
    """A declared type is no way round: 1.5 is no whole number, also beside one that fits no other type."""
    assert from_python([2**63, 1], pa.uint64()).to_pylist() == [2**63, 1]
    assert from_python([[("a", 2**63)], {"b": 1}][:1], pa.map_(pa.string(), pa.uint64())).to_pylist() == [
        [("a", 2**63)]
    ]
    for values, kind in (
        ([2**63, 1.5], pa.uint64()),
        ([[2**63], [1.5]], pa.list_(pa.uint64())),
        ([{"a": 2**63}, {"a": 1.5}], pa.struct([("a", pa.uint64())])),
        ([[("a", 2**63), ("b", 1.5)]], pa.map_(pa.string(), pa.uint64())),
        ([NOON.date(), NOON], pa.timestamp("us")),
    ):
        with pytest.raises((Lossy, pa.ArrowException, OverflowError)):
            from_python(values, kind)


def test_fault_51_lists_given_as_sources_are_what_they_were():
    """Rows given as Python values are read as they are, or refused."""
    with pytest.raises(BadSource, match="date, others datetime"):
        gm.apply([{"v": NOON.date()}, {"v": NOON}], fn=dict)


SCALARS = [
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    st.floats(width=16, allow_nan=False).map(np.float16),
    st.floats(width=32, allow_nan=False).map(np.float32),
    st.integers(0, 2**64 - 1).map(np.uint64),
    st.integers(-128, 127).map(np.int8),
    st.booleans().map(np.bool_),
    st.text(max_size=3),
    st.binary(max_size=3),
    st.dates(),
    st.datetimes(),
    st.datetimes(timezones=st.just(dt.UTC)),
    st.times(),
    st.timedeltas(dt.timedelta(-9999), dt.timedelta(9999)),
    st.none(),
]


def column(depth=2):
    kinds = st.lists(st.sampled_from(SCALARS), min_size=1, max_size=2).map(st.one_of)
    if not depth:
        return kinds
    inner = column(depth - 1)
    return st.one_of(
        kinds,
        inner.map(lambda k: st.lists(k, max_size=3)),
        inner.map(lambda k: st.fixed_dictionaries({"a": k}, optional={"b": k})),
    )


def same(answer, held):
    """Whether a value came back as it was: of the same kind, and equal; what a dict lacks is null."""
    if answer is None or held is None:
        return answer is held
    if isinstance(answer, dict):
        return all(same(answer.get(n), v) for n, v in held.items()) and set(answer) <= set(held)
    if isinstance(answer, list):
        return len(answer) == len(held) and all(map(same, answer, held))
    answer = answer.item() if isinstance(answer, np.generic) else answer
    if type(answer) in (int, float):
        return type(held) in (int, float) and answer == held
    zones = [getattr(v, "tzinfo", None) is None for v in (answer, held)]
    return type(answer) is type(held) and zones[0] == zones[1] and answer == held


@given(column().flatmap(lambda k: st.lists(k, max_size=4)))
@settings(max_examples=400, deadline=None)
@pytest.mark.long
def test_fault_51_whatever_is_taken_is_what_it_was(values):
    """Any values, nested and mixed: held as they are, or refused."""
    try:
        held = from_python(values)
    except (Lossy, pa.ArrowException, OverflowError):
        return
    assert all(map(same, values, held.to_pylist()))
