"""Casts that lose nothing."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from fractions import Fraction
from random import Random

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.arrow.casts import Lossy, lossless, together
from gristmill.arrow.topython import to_plain

NUMBERS = [pa.int8(), pa.int32(), pa.int64(), pa.uint8(), pa.uint64(), pa.float16(), pa.float32(), pa.float64()]
WHOLE = st.integers(-(2**63), 2**64 - 1) | st.integers(-300, 300) | st.sampled_from([2**53 + 1, 2**63, 2**24 + 1])
REAL = st.floats() | st.floats(width=16) | WHOLE.map(float)


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_a_number_is_the_same_or_refused(data):
    """Over all number types: what comes out equals what went in, as Python compares integers and floats exactly."""
    source, target = data.draw(st.sampled_from(NUMBERS)), data.draw(st.sampled_from(NUMBERS))
    values = []
    for value in data.draw(st.lists(st.none() | (REAL if pa.types.is_floating(source) else WHOLE), max_size=4)):
        try:
            kept = pa.array([value], pa.float64() if isinstance(value, float) else source).cast(source, safe=False)
        except (pa.ArrowInvalid, OverflowError):
            continue
        values += kept.to_pylist()
    column = pa.array(values, source)
    exact = all(_holds(target, v) for v in values)
    try:
        out = lossless(column, target).to_pylist()
    except Lossy:
        assert not exact, f"{values} fit {target}"
        return
    assert all(a == b or (a != a and b != b) for a, b in zip(values, out, strict=True)), (values, out)


@pytest.mark.parametrize("source", [pa.int8(), pa.int32(), pa.int64(), pa.uint8(), pa.uint32(), pa.uint64()], ids=str)
@pytest.mark.parametrize("target", [pa.float16(), pa.float32(), pa.float64()], ids=str)
def test_the_ends_of_integers_as_floats(source, target):
    """The least and the largest integer of a type, and their neighbours, are the same as floats or refused."""
    low, high = np.iinfo(str(source)).min, np.iinfo(str(source)).max
    for value in (int(low), int(low) + 1, int(high) - 1, int(high)):
        column = pa.array([value, None], source)
        if _holds(target, value):
            assert lossless(column, target).to_pylist() == [value, None]
        else:
            with pytest.raises(Lossy):
                lossless(column, target)


DECIMALS = [
    pa.decimal32(7, 2), pa.decimal64(10, 2), pa.decimal128(20, 3), pa.decimal128(38, 10), pa.decimal256(50, 5),
]  # fmt: skip


@pytest.mark.parametrize("target", [pa.float32(), pa.float64()], ids=str)
@pytest.mark.parametrize("source", DECIMALS, ids=str)
def test_a_decimal_becomes_the_float_that_is_nearest(source, target):
    """No other float of the type is nearer, of whole numbers, of fractions, and in lists."""
    random, made = Random(1), []
    for _ in range(400):
        digits = random.randrange(1, min(source.precision, 15) + 1)
        made.append(Decimal(random.randrange(10**digits)).scaleb(-source.scale))
    found = 0
    for value, column in zip(made, (pa.array([value, None], source) for value in made), strict=True):
        try:
            out = lossless(pa.array([[value]], pa.list_(source)), pa.list_(target))[0].as_py()[0]
        except Lossy:
            with pytest.raises(Lossy):
                lossless(column, target)
            continue
        assert lossless(column, target).to_pylist() == [out, None]
        of = np.float32 if target == pa.float32() else np.float64
        for end in (-np.inf, np.inf):
            other = Fraction(float(np.nextafter(of(out), of(end))))
            assert abs(Fraction(out) - Fraction(value)) <= abs(other - Fraction(value)), (value, out)
        found += 1
    assert found > 100


def _holds(kind: pa.DataType, value) -> bool:
    if value is None:
        return True
    if pa.types.is_integer(kind):
        low, high = np.iinfo(str(kind)).min, np.iinfo(str(kind)).max
        return value == value and value not in (np.inf, -np.inf) and value == int(value) and low <= value <= high
    dtype = kind.to_pandas_dtype()
    with np.errstate(over="ignore"):
        out = dtype(value)
    if value != value or value in (np.inf, -np.inf):
        return True
    return bool(np.isfinite(out)) and int(float(out)) == value if isinstance(value, int) else float(out) == value


KEPT = [
    ([1, None, 3], pa.float32()),
    ([0.5, float("inf"), None], pa.float16()),
    ([dt.datetime(2020, 1, 1)], pa.date32()),
    ([dt.date(2020, 1, 1)], pa.timestamp("ns")),
    ([Decimal("1.50")], pa.decimal256(50, 4)),
    (["é", None], pa.large_string()),
    ([[1, 2], None, [3, 4]], pa.list_(pa.float64(), 2)),
    (pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int64(), 2)).slice(1), pa.large_list(pa.int8())),
    (pa.array([{"a": 1}, None, {"a": 3}]).slice(1), pa.struct([("b", pa.string()), ("a", pa.int16())])),
    (pa.array([[("a", 1)], None, [("b", None)]], pa.map_(pa.string(), pa.int64())).slice(1),
     pa.map_(pa.large_string(), pa.int8())),
    (pa.array(["a", None, "a"]).dictionary_encode(), pa.string()),
    (["a", None, "a"], pa.dictionary(pa.int8(), pa.string())),
    ([None, None], pa.list_(pa.struct([("a", pa.int8())]))),
]  # fmt: skip


@pytest.mark.parametrize(("values", "kind"), KEPT)
def test_what_fits_is_what_it_was(values, kind):
    """Containers, text, times and decimals change their type and nothing else, slices and nulls too."""
    column = values if isinstance(values, pa.Array) else pa.array(values)
    out = lossless(column, kind)
    out.validate(full=True)
    assert out.type.equals(kind)
    wanted = column.to_pylist()
    if pa.types.is_temporal(kind):
        wanted = column.cast(kind).to_pylist()
    elif pa.types.is_struct(kind):
        wanted = [v if v is None else {"b": None, **v} for v in wanted]
    assert out.to_pylist() == wanted


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([1000], pa.bool_()), ([True], pa.int64()), ([0.1], pa.float32()), ([2**53 + 1], pa.float64()),
        ([2**63 - 1], pa.float64()), ([1.5], pa.int64()), ([float("nan")], pa.int8()), ([65520], pa.float16()),
        ([dt.datetime(2020, 1, 1, 5)], pa.date32()), ([dt.datetime(2020, 1, 1, 0, 0, 0, 1)], pa.timestamp("s")),
        ([dt.datetime(2020, 1, 1)], pa.timestamp("us", "UTC")), ([dt.datetime(3000, 1, 1)], pa.timestamp("ns")),
        ([dt.timedelta(seconds=1.5)], pa.duration("s")), ([dt.time(1, 2, 3, 4)], pa.time32("ms")),
        ([Decimal("1.55")], pa.decimal128(5, 1)), ([1], pa.string()), (["1"], pa.int64()), (["a"], pa.binary()),
        ([[1, 2], [3]], pa.list_(pa.int64(), 2)), ([[2**53 + 1]], pa.list_(pa.float64())), ([b"abc"], pa.binary(2)),
        ([{"a": 1, "c": 2}], pa.struct([("a", pa.int64())])),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(values, kind):
    """Nothing is rounded, cut, relabelled or left out."""
    with pytest.raises(Lossy):
        lossless(pa.array(values), kind)


def test_nulls_beside_what_arrow_cannot_build() -> None:
    """Dictionaries of nested values, and views, in lists of which some are null: cast as others are, in slices too."""
    maps = pa.array([[("k", 1)], [("l", None)]], pa.map_(pa.string(), pa.int32()))
    held = pa.DictionaryArray.from_arrays(pa.array([0, 1, None, 0, 1, 1], pa.int32()), maps)
    views = pa.array(["a", None, "", "b", "c", "d"], pa.string_view())
    structs = pa.StructArray.from_arrays([views], ["a"])
    gone = pa.array([True, False, True])
    for inner, kind in (
        (held, pa.map_(pa.string(), pa.int16())), (views, pa.large_string()), (views, pa.string_view()),
        (structs, pa.struct([("a", pa.string_view()), ("b", pa.int8())])),
    ):  # fmt: skip
        fixed = pa.FixedSizeListArray.from_arrays(inner, 2, mask=gone)
        several = pa.ListArray.from_arrays(pa.array([0, 2, 4, 6], pa.int32()), inner, mask=gone)
        for column in (fixed, several, fixed.slice(1), several.slice(1, 2)):
            for wanted in (pa.list_(kind), pa.list_(kind, 2), pa.large_list(kind)):
                out = lossless(column, wanted)
                out.validate(full=True)
                assert out.type == wanted
                assert [v and [x.get("a") if isinstance(x, dict) else x for x in v] for v in out.to_pylist()] == [
                    v and [x.get("a") if isinstance(x, dict) else x for x in v] for v in to_plain(column)
                ]
    encoded = pa.DictionaryArray.from_arrays(
        pa.array([0, None], pa.int32()), pa.array([["a", "b"]], pa.list_(pa.string_view(), 2))
    )
    assert lossless(encoded, pa.list_(pa.string_view(), 2)).to_pylist() == [["a", "b"], None]


def test_python_floats_may_be_rounded_where_that_is_said():
    """Rounding is for values without a width, and never to infinity."""
    assert lossless(pa.array([[0.1]]), pa.list_(pa.float32()), rounds=True).to_pylist() == [[float(np.float32(0.1))]]
    with pytest.raises(Lossy):
        lossless(pa.array([1e300]), pa.float32(), rounds=True)


def test_rows_together_keep_their_values():
    """Integers and floats meet where every value fits; truth values and numbers do not, nor ids and floats."""
    assert together([pa.table({"a": [1]}), pa.table({"a": [1.5]})])["a"].to_pylist() == [1.0, 1.5]
    assert together([pa.table({"a": [1]}), pa.table({"b": ["x"]})]).to_pydict() == {"a": [1, None], "b": [None, "x"]}
    for one, other in (([2**53 + 1], [1.5]), ([True], [1]), ([1], ["a"])):
        with pytest.raises(Lossy, match="column 'a'"):
            together([pa.table({"a": one}), pa.table({"a": other})])
