"""Answers to one row: what is seen at a glance to fit its columns can be written in them."""

from __future__ import annotations

import datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.models.contract import Columns
from gristmill.models.rowtypes import AnswerTypes, Misfit, quick

KINDS = [
    "string", "bool", "int8", "int64", "uint64", "float", "double", "list<int64>", "list<float>", "list<string>",
    "vector", "struct",
]  # fmt: skip
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.integers(-3, 3), st.floats(), st.text(max_size=3),
    st.just("\ud83d"), st.binary(max_size=2), st.sampled_from([np.float32(1.5), np.int8(3), datetime.date(2026, 1, 2)]),
)  # fmt: skip
ARRAYS = st.sampled_from(
    [np.zeros(2, kind) for kind in ("f4", "f8", "i8", "bool", "U1", "f2")]
    + [np.zeros((2, 1), "f4"), np.array([1, "a"], object), np.array(1.0), np.zeros(3, "f4")]
)
VALUES = SCALARS | ARRAYS | st.lists(SCALARS, max_size=3) | st.dictionaries(st.sampled_from("ab"), SCALARS)


def kind_of(name: str) -> pa.DataType:
    """The type of that name."""
    if name.startswith("list"):
        return pa.list_(kind_of(name[5:-1]))
    made = {"vector": pa.list_(pa.float32(), 2), "struct": pa.struct([("a", pa.int64())]), "string": pa.string()}
    made |= {"float": pa.float32(), "double": pa.float64(), "bool": pa.bool_()}
    return made.get(name) or getattr(pa, name)()


@given(name=st.sampled_from(KINDS), value=VALUES, declared=st.booleans())
def test_what_fits_at_a_glance_fits(name: str, value: Any, declared: bool) -> None:
    """And is the same value as a column of its own; whether it is declared so or planned."""
    kind, row = kind_of(name), pa.table({"x": [1]})
    schema = pa.schema([("y", kind)])
    types = AnswerTypes("f", "y", None, schema if declared else None, {"y": name})
    planned = None if declared else Columns(schema, ("y",))
    if value is None or not quick(kind, rounds=declared)(value):
        return
    ((column, found),) = types.columns({"y": value}, row, planned)
    assert column == "y" and found.type.equals(kind)
    if not isinstance(value, np.ndarray) and "float" not in name:
        (back,) = found.to_pylist()
        assert back == value or (back != back and value != value)


@given(value=VALUES, name=st.sampled_from(KINDS))
def test_whatever_is_returned_fits_or_is_named(value: Any, name: str) -> None:
    """With its column; nothing else is raised."""
    types = AnswerTypes("f", "y", None, pa.schema([("y", kind_of(name))]), {"y": name})
    checks = types.checks(None)
    for answer in (value, {"y": value}):
        try:
            types.check(answer, pa.table({"x": [1]}), 0, None, checks)
        except Misfit as e:
            assert "column" in str(e)
            str(e).encode()


def test_columns_that_others_do_not_have() -> None:
    """Are no answers, unless a later step may read them."""
    types, row = AnswerTypes("f", "y", None, None, {}), pa.table({"x": [1]})
    schema = pa.schema([("y", pa.int64())])
    with pytest.raises(Misfit, match="a column 'z', which the first rows did not have: they are y"):
        types.check({"y": 1, "z": 2}, row, 0, Columns(schema, ("y",)), {})
    types.check({"y": 1, "z": 2}, row, 0, Columns(schema, None), {})
