"""Rows to batches and results to rows."""

from __future__ import annotations

import datetime
import uuid
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.errors import BadOutput
from gristmill.models.conversion import Habit, from_result, to_batch

TABLE = pa.table(
    {
        "id": pa.array([1, 2, 3], pa.int64()),
        "text": ["a", None, "ü"],
        "vector": pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.float32(), 2)),
    }
)


def result(value, rows=3, types=None):
    return from_result(value, rows, "score", "output", types)


# ---------------------------------------------------------------- to_batch


def test_numpy_batches_are_the_functions_own():
    """Numbers and fixed-size lists are copies, to change as one likes: the rows stay what they were."""
    batch = to_batch(TABLE, "numpy")
    assert batch["vector"].shape == (3, 2)
    assert batch["vector"].flags.writeable
    batch["vector"][:] = 0
    assert TABLE["vector"].to_pylist() == [[1, 2], [3, 4], [5, 6]]
    assert batch["text"].dtype == object
    assert batch["text"].tolist() == ["a", None, "ü"]


def test_numpy_batch_of_a_slice_is_the_slice():
    """Offsets of sliced Arrow arrays are obeyed, for fixed-size lists too."""
    batch = to_batch(TABLE.slice(1, 2), "numpy")
    assert batch["vector"].tolist() == [[3, 4], [5, 6]]
    assert batch["id"].tolist() == [2, 3]


def test_nulls_in_numpy_batches():
    """Whole numbers and booleans with nulls are objects, Python's own and None: a float would be another number."""
    table = pa.table({"small": [1, None], "large": [2**60 + 1, None], "flag": [True, None], "none": pa.nulls(2)})
    batch = to_batch(table, "numpy")
    assert batch["small"].dtype == object
    assert [(v, type(v)) for v in batch["small"]] == [(1, int), (None, type(None))]
    assert batch["large"].tolist() == [2**60 + 1, None]
    assert batch["flag"].tolist() == [True, None]
    assert batch["none"].tolist() == [None, None]


def test_null_vectors_are_rows_of_nan():
    """A null in a column of vectors is a row of NaN, so that the array keeps its shape."""
    table = pa.table({"v": pa.array([[1, 2], None, [5, 6]], pa.list_(pa.float32(), 2))})
    array = to_batch(table, "numpy")["v"]
    assert array.shape == (3, 2)
    assert np.isnan(array[1]).all()
    assert array[2].tolist() == [5, 6]


@pytest.mark.parametrize("kind", ["array", "number", "list", "torch", "vector"])
def test_one_row_s_value_may_be_squeezed(kind: str) -> None:
    """A call of one row is made where one fails; `squeeze()` leaves a value without a shape of it."""
    value: Any = {"array": np.array(2.5), "number": np.float64(2.5), "list": 2.5, "vector": np.array([2.5, 3.5])}.get(
        kind
    )
    if kind == "torch":
        value = pytest.importorskip("torch").tensor(2.5)
    habit = Habit()
    if kind == "vector":
        with pytest.raises(BadOutput, match="2 rows"):
            from_result({"a": value}, 1, "f", "output", habit=habit)
        from_result({"a": np.ones((10, 2))}, 10, "f", "output", habit=habit)
    one = [2.5, 3.5] if kind == "vector" else 2.5
    assert from_result({"a": value}, 1, "f", "output", habit=habit).to_pylist() == [{"a": one}]
    with pytest.raises(BadOutput):
        from_result({"a": value}, 3, "f", "output", habit=habit)


@pytest.mark.parametrize(
    ("form", "kind"), [("rows", list), ("arrow", pa.Table), ("pandas", pd.DataFrame), ("polars", pl.DataFrame)]
)
def test_every_kind_of_batch_comes_back_the_same(form, kind):
    """What a function gets, returned unchanged, is the rows it was given."""
    batch = to_batch(TABLE, form)
    assert isinstance(batch, kind)
    back = result(batch)
    assert back.column_names == TABLE.column_names
    assert back["id"].to_pylist() == [1, 2, 3]
    assert back["text"].to_pylist() == ["a", None, "ü"]


@given(st.lists(st.one_of(st.none(), st.text()), min_size=1, max_size=20))
def test_text_survives_every_batch_format(texts):
    """Any text and null goes through every format unchanged."""
    table = pa.table({"text": pa.array(texts, pa.string())})
    for form in ("numpy", "rows", "arrow", "pandas", "polars"):
        back = from_result(to_batch(table, form), len(texts), "same", "output")
        assert back["text"].to_pylist() == texts


# ---------------------------------------------------------------- from_result


def test_bare_arrays_and_lists_become_the_output_column():
    """One bare column gets the given name; 2-D arrays become fixed-size lists."""
    assert result(np.array([1.0, 2.0, 3.0], dtype=np.float32)).schema == pa.schema({"output": pa.float32()})
    assert result(["x", "y", None])["output"].to_pylist() == ["x", "y", None]
    assert result(np.zeros((3, 4), dtype=np.float32)).schema.field("output").type == pa.list_(pa.float32(), 4)
    assert result(np.zeros((3, 2, 2))).schema.field("output").type == pa.list_(pa.list_(pa.float64(), 2), 2)
    assert result(np.zeros((3, 4))[:, ::2])["output"].to_pylist() == [[0, 0]] * 3


def test_series_tensors_and_frames():
    """pandas, polars and torch values are taken as they are; NaN stays NaN."""
    torch = pytest.importorskip("torch")
    assert np.isnan(result(pd.DataFrame({"x": [1.0, np.nan, 3.0]}))["x"].to_numpy()[1])
    assert result(pd.Series([1, 2, 3]))["output"].to_pylist() == [1, 2, 3]
    assert result({"x": pd.array([1, None, 3], dtype="Int64")})["x"].to_pylist() == [1, None, 3]
    cut = result({"x": pd.cut(np.array([1, 5, 2]), [0, 3, 9], labels=["low", "high"])})
    assert cut["x"].to_pylist() == ["low", "high", "low"]
    for nulls in (pd.Categorical([None] * 3), pd.Series([None] * 3, dtype="category")):  # of doubles, to pandas
        assert result({"x": nulls}).schema.field("x").type == result({"x": [None] * 3}).schema.field("x").type
    known = pd.Categorical([None] * 3, categories=["a"])
    assert "string" in str(result({"x": known}).schema.field("x").type)
    assert result(pl.DataFrame({"t": ["a", "b", "c"]})).schema == pa.schema({"t": pa.string()})
    assert result({"t": torch.ones(3, 2, dtype=torch.bfloat16)}).schema.field("t").type == pa.list_(pa.float32(), 2)


def test_rows_with_different_keys_have_nulls():
    """A list of dicts may leave keys out; they are null."""
    assert result([{"a": 1}, {"b": "x"}, {}]).to_pylist() == [
        {"a": 1, "b": None},
        {"a": None, "b": "x"},
        {"a": None, "b": None},
    ]


def test_lists_of_vectors_have_one_type_whatever_their_lengths():
    """A list of arrays is a variable list in every batch, also when all happen to be of one length."""
    kind = pa.list_(pa.int64())
    assert result({"v": [np.array([1]), np.array([2]), np.array([3])]}).schema.field("v").type == kind
    assert result({"v": [[1], [2, 3], None]}).schema.field("v").type == kind


def test_dates_and_times():
    """numpy and Python times keep their unit."""
    day = datetime.date(2026, 1, 1)
    assert result([day] * 3)["output"].type == pa.date32()
    assert result(np.array(["2026-01-01"] * 3, dtype="datetime64[us]"))["output"].type == pa.timestamp("us")


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (None, "was given 3 rows and returned None"),
        ([1, 2], "was given 3 rows and returned 2 rows"),
        ([1, 2, 3, 4], "was given 3 rows and returned 4 rows"),
        ([], "was given 3 rows and returned 0 rows"),
        ((x for x in range(3)), "generator"),
        (iter([1, 2, 3]), "make it a list"),
        (map(str, [1, 2, 3]), "make it a list"),
        ({"a": [1, 2, 3], "b": [1, 2]}, "returned 2 rows in column 'b'"),
        ({"a": 1.0}, "a single value (1.0) as column 'a'"),
        ({"a": "abc"}, "a single value ('abc')"),
        ("abc", "a single value"),
        (np.float32(1), "a single value"),
        (np.array(1.0), "a single value"),
        ({"a": {1: 2}}, "object of type dict"),
        ({}, "returned no columns"),
        ([{}, {}, {}], "dicts without keys"),
        ([{"a": 1}, 2, 3], "mixes dicts with int"),
        ({1: [1, 2, 3]}, "named 1"),
        ((1, 2, 3), "a tuple of 3"),
        ([1, "a", 2], "a column cannot hold"),
        (pd.Series(pd.period_range("2024-01", periods=3, freq="M")), "astype(str)"),
        (pd.DataFrame({"a": pd.cut(pd.Series([1, 2, 3]), [0, 2, 4])}), "column 'a' that a column cannot hold"),
        (np.array([1j, 2, 3]), "complex"),
        (pa.table({"a": [1, 2]}), "returned 2 rows"),
        (pd.DataFrame({"a": [1, 2]}), "returned 2 rows"),
        (pl.DataFrame({"a": [1, 2]}), "returned 2 rows"),
        (np.zeros((3, 0)), "shape (3, 0)"),
    ],
)
def test_results_that_are_not_one_row_each(value, says):
    """Too few, too many, None, generators, single values: refused with the function's name, never stretched."""
    with pytest.raises(BadOutput) as caught:
        result(value)
    assert str(caught.value).startswith("score ")
    assert says in str(caught.value)


def test_columns_must_agree_where_the_count_is_free():
    """A step may return another number of rows, but all its columns the same."""
    assert result({"a": [1, 2]}, rows=None).num_rows == 2
    with pytest.raises(BadOutput, match="different lengths"):
        result({"a": [1, 2], "b": [1]}, rows=None)


def test_plain_numbers_take_the_declared_type():
    """Python's floats have no width: they become what returns= says, unless they do not fit."""
    types = pa.schema({"output": pa.float32()})
    assert result([0.1, 0.2, None], types=types).schema == types
    assert result([0.1, 0.2, 1e300], types=types)["output"].type == pa.float64()
    assert result(np.array([0.1, 0.2, 0.3]), types=types)["output"].type == pa.float64()


def test_objects_of_polars_are_their_values():
    """Polars gives Arrow the addresses of Python's objects: they are taken as the values they are."""
    keys = [uuid.UUID(int=n) for n in range(3)]
    for value in (pl.DataFrame({"a": keys}), {"a": pl.Series(keys)}):
        assert result(value)["a"].to_pylist() == keys
