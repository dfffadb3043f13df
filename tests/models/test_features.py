"""Feature columns side by side: the same array and refusals as column by column, in calls that grow with them."""

from __future__ import annotations

import cProfile
import pstats

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.models.features import Stacker

VALUES = st.sampled_from([0.5, -2.0, float("nan"), float("inf"), -float("inf"), 1e300, 3e38, None])
TYPES = st.sampled_from([pa.float32(), pa.float64(), pa.int64(), pa.dictionary(pa.int32(), pa.float64())])


@st.composite
def tables(draw: st.DrawFn) -> pa.Table:
    """Some columns of numbers, most of which have nothing wrong with them."""
    rows = draw(st.integers(1, 5))
    columns = {}
    for n in range(draw(st.integers(2, 5))):
        kind, odd = draw(TYPES), draw(st.booleans())
        values = draw(st.lists(VALUES if odd else st.just(0.5), min_size=rows, max_size=rows))
        if kind == pa.int64():
            values = [None if v is None else draw(st.sampled_from([1, 2**60 + 1])) for v in values]
        with np.errstate(over="ignore"):
            given_ = [v if kind != pa.float32() or v is None else float(np.float32(v)) for v in values]
        encoded = pa.types.is_dictionary(kind)
        columns[f"c{n}"] = pa.array(given_, pa.float64()).dictionary_encode() if encoded else pa.array(given_, kind)
    return pa.table(columns)


@settings(deadline=None)
@given(tables(), st.sampled_from(["float32", "float64"]), st.booleans(), st.booleans())
def test_columns_side_by_side_are_those_one_by_one(table: pa.Table, dtype: str, missing: bool, keep: bool) -> None:
    """Values, refused rows and the reason of each, whatever is wrong with some columns."""
    whole, single = (Stacker(table, "m", missing=missing, keep=keep) for _ in range(2))
    found = whole.matrix(table.column_names, dtype)
    expected = np.column_stack([single.column(name, dtype) for name in table.column_names])
    assert isinstance(found, np.ndarray) and found.dtype == dtype
    refused = [r.row for r in single.refused]
    np.testing.assert_array_equal(np.delete(found, refused, 0), np.delete(expected, refused, 0))
    assert whole.refused == single.refused


@pytest.mark.parametrize("width", [None, 1])
def test_the_calls_for_a_matrix_grow_with_its_columns(width: int | None) -> None:
    """Twice the columns take twice the calls, also where the model says how many values it takes."""

    def calls(columns: int) -> int:
        table = pa.table({f"c{n}": np.ones(4, np.float32) for n in range(columns)})
        profile = cProfile.Profile()
        profile.runcall(Stacker(table, "m").matrix, table.column_names, "float32", width and columns)
        return int(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]

    assert calls(400) < 2.5 * calls(200)
