"""Rows picked, cast and written from slices of nested columns are the rows that they were."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import gristmill as gm
from gristmill.arrow.casts import entries, lossless
from gristmill.arrow.rows import picked
from gristmill.arrow.schemas import plain
from gristmill.sinks.jsontext import json_lines

LEAVES = [
    (pa.int8(), st.integers(-128, 127)), (pa.bool_(), st.booleans()), (pa.string(), st.text("ab", max_size=3)),
    (pa.float64(), st.integers(0, 9).map(float)), (pa.binary(2), st.binary(min_size=2, max_size=2)),
    (pa.string_view(), st.text("ab", max_size=20)), (pa.null(), st.none()),
    (pa.dictionary(pa.int8(), pa.string()), st.sampled_from(["x", "y"])),
]  # fmt: skip
SHAPES = ["fixed", "fixed", "fixed", "list", "large", "map", "struct"]
VECTORS = pa.list_(pa.list_(pa.int8(), 3), 3)


@st.composite
def columns(draw: Any) -> pa.Array:
    """An array of a nested type: a slice, with nulls at any depth or with none, perhaps of another one's children."""
    kind, values = draw(st.sampled_from(LEAVES))
    some = draw(st.booleans())
    for shape in draw(st.lists(st.sampled_from(SHAPES), max_size=3)):
        value = st.none() | values if some else values
        if shape == "fixed":
            size = draw(st.sampled_from([1, 2, 3, 0]))
            kind, values = pa.list_(kind, size), st.lists(value, min_size=size, max_size=size)
        elif shape == "map":
            kind, values = pa.map_(pa.string(), kind), st.lists(st.tuples(st.sampled_from("kl"), value), max_size=2)
        elif shape == "struct":
            kind, values = (
                pa.struct([("a", kind), ("b", pa.int8())]),
                st.fixed_dictionaries({"a": value, "b": st.just(1)}),
            )
        else:
            kind = (pa.list_ if shape == "list" else pa.large_list)(kind)
            values = st.lists(value, max_size=3)
    made = draw(st.lists(st.none() | values if some else values, min_size=1, max_size=9))
    array = pa.array(made, kind)
    first = draw(st.integers(0, len(array)))
    array = array.slice(first, draw(st.integers(0, len(array) - first)))
    if draw(st.booleans()) and len(array) % 2 == 0:
        array = pa.FixedSizeListArray.from_arrays(array, 2)  # begins at 0 itself, what is in it does not
    return pa.StructArray.from_arrays([array], ["x"]).flatten()[0] if draw(st.booleans()) else array


@pytest.mark.long
@settings(max_examples=300, deadline=None)
@given(columns(), st.randoms(use_true_random=False))
@example(pa.array([[[i + j] * 3 for j in range(3)] for i in range(9)], VECTORS)[4:], None)
@example(pa.FixedSizeListArray.from_arrays(pa.array([[i] * 3 for i in range(9)], pa.list_(pa.int8(), 3))[3:], 2), None)
def test_rows_of_slices_are_the_rows_that_they_were(array: pa.Array, chance: Any) -> None:
    """Picked, cast, taken apart, written as JSON and as Parquet: `to_pylist` of the slice says what is right."""
    bare = lossless(array, plain(array.type))
    bare.validate(full=True)
    wanted = array.to_pylist()
    assert bare.to_pylist() == wanted
    index = [i for i in range(len(array)) if chance is None or chance.random() < 0.6]
    index += index[::-2]
    for rows in (bare, pa.chunked_array([bare, bare]), pa.chunked_array([bare])):
        assert picked(rows, np.array(index, dtype=np.int64)).to_pylist() == [wanted[i] for i in index]
    table = pa.table({"x": bare, "n": range(len(bare))})
    found = picked(table, pa.array([*index, None], pa.int64()))
    assert found.column("x").to_pylist() == [wanted[i] for i in index] + [None]
    if pa.types.is_map(bare.type):
        assert entries(bare).to_pylist() == [v and [{"key": k, "value": i} for k, i in v] if v else v for v in wanted]
    if pa.types.is_fixed_size_list(bare.type):
        lists = lossless(bare, pa.list_(bare.type.value_type))
        lists.validate(full=True)
        assert lists.to_pylist() == wanted
        assert lossless(lists, bare.type).to_pylist() == wanted
    text = b"".join(json_lines(pa.table({"x": array}))).splitlines()
    assert [json.loads(line)["x"] is None for line in text] == [v is None for v in wanted]
    again = io.BytesIO()
    pq.write_table(table, again)
    assert pq.read_table(again).column("x").to_pylist() == wanted


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_vectors_of_vectors_are_kept_row_by_row(tmp_path: Path, form: str) -> None:
    """A column of matrices, read in windows of which some rows die: what is kept is each row's own."""
    values = [[[i % 100, j, k] for k, j in enumerate(range(3))] for i in range(300)]
    pq.write_table(pa.table({"id": range(300), "v": pa.array(values, VECTORS)}), tmp_path / "in.parquet")

    def score(batch: dict[str, Any]) -> dict[str, Any]:
        if (batch["id"] % 43 == 0).any():
            raise ValueError("this one not")
        return {"n": batch["id"]}

    source = gm.source(str(tmp_path / "in.parquet"), where="id % 5 <> 0")
    sink = gm.sink(str(tmp_path / "out"), format=form, keep=["id", "v"])
    gates = {"min_ok": 0.5}
    gm.Job(source, gm.model(score), sink, workers=0, shard_rows=100, batch_rows=1, window_bytes=1000, gates=gates).run()
    rows = gm.read(str(tmp_path / "out")).to_table().to_pylist()
    assert sorted(r["id"] for r in rows) == [i for i in range(300) if i % 5 and i % 43]
    assert all(r["v"] == values[r["id"]] for r in rows)
