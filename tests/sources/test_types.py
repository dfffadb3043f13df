"""Every Arrow type, kept and answered: it reads back equal and is verified, or is refused before anything is scored."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import gristmill as gm

TEXTS = pa.array(["a", "b"])
RUNS = pa.array([2, 6], pa.int32())
HELD = pa.table({
    "dictionary of numbers": pa.array([1, 2, None, 1, 2, 3]).dictionary_encode(),
    "dictionary of times": pa.array([1, None, 3] * 2, pa.timestamp("s", "UTC")).dictionary_encode(),
    "dictionary of bytes": pa.array([b"a", b"b", None] * 2).dictionary_encode(),
    "dictionary of large text": pa.array(["a", "b", None] * 2, pa.large_string()).dictionary_encode(),
    "dictionary of views": pa.DictionaryArray.from_arrays(
        pa.array([0, 1, None] * 2, pa.int8()), TEXTS.cast(pa.string_view())
    ),
    "dictionary of lists": pa.DictionaryArray.from_arrays(pa.array([0, 1, None] * 2), pa.array([[1], [2]])),
    "dictionary of lists of views": pa.DictionaryArray.from_arrays(
        pa.array([0, 1, None] * 2), pa.array([["a"], [None]], pa.list_(pa.string_view()))
    ),
    "dictionary with null": pa.DictionaryArray.from_arrays(pa.array([0, 1, None] * 2), pa.array(["a", None])),
    "list of dictionaries": pa.ListArray.from_arrays(range(7), pa.array(["a", None] * 3).dictionary_encode()),
    "run-ends": pa.RunEndEncodedArray.from_arrays(RUNS, TEXTS),
    "run-ends of structs": pa.RunEndEncodedArray.from_arrays(RUNS, pa.array([{"a": 1}, None])),
    "list of run-ends": pa.ListArray.from_arrays(range(7), pa.RunEndEncodedArray.from_arrays(RUNS, TEXTS)),
    "no length": pa.array([[], None, []] * 2, pa.list_(pa.int8(), 0)),
    "lists of no length": pa.array([[[]], [], None] * 2, pa.list_(pa.list_(pa.string(), 0))),
    "vector of nulls": pa.array([[None, None], None, [None, None]] * 2, pa.list_(pa.null(), 2)),
    "map to nulls": pa.array([[("a", None)], [], None] * 2, pa.map_(pa.string(), pa.null())),
    "uuid": pa.ExtensionArray.from_storage(pa.uuid(), pa.array([b"x" * 16, None, b"\x00" * 16] * 2, pa.binary(16))),
    "json": pa.ExtensionArray.from_storage(pa.json_(), pa.array(['{"a": 1}', None, "{}"] * 2)),
    "bool8": pa.ExtensionArray.from_storage(pa.bool8(), pa.array([1, 0, None] * 2, pa.int8())),
    "tensor": pa.ExtensionArray.from_storage(
        pa.fixed_shape_tensor(pa.float32(), [2, 2]), pa.array([[1, 2, 3, 4]] * 6, pa.list_(pa.float32(), 4))
    ),
    "view": pa.array(["a", None, "x" * 30] * 2, pa.string_view()),
    "view of bytes": pa.array([b"a", None, b"x" * 30] * 2, pa.binary_view()),
    "view of a list": pa.array([[1], None, [2, 3]] * 2, pa.list_view(pa.int8())),
    "list of views": pa.array([["a"], None, ["b", None]] * 2, pa.list_(pa.string_view())),
    "seconds": pa.array([1, None, 3] * 2, pa.timestamp("s", "Europe/Warsaw")),
    "small decimal": pa.array([Decimal("1.5"), None, Decimal(0)] * 2, pa.decimal32(6, 1)),
    "date64": pa.array([dt.date(2020, 1, 1), None, dt.date(1, 1, 1)] * 2, pa.date64()),
})  # fmt: skip
STRUCTS = pa.array([{}, None, {}] * 2, pa.struct([]))
NOWHERE = {
    "a union": pa.UnionArray.from_sparse(pa.array([0] * 6, pa.int8()), [pa.array(range(6)), pa.array(["a"] * 6)]),
    "an interval": pa.array([(1, 2, 3)] * 6, pa.month_day_nano_interval()),
    "two fields of the same name": pa.StructArray.from_arrays([pa.array(range(6))] * 2, names=["a", "a"]),
    "an extension type inside": pa.ListArray.from_arrays(range(7), HELD.column("uuid").combine_chunks()),
}


def run(table: pa.Table, form: str, sink: Path, keep: list[str]) -> pa.Table:
    """The columns `keep` kept from a table, the others answered by a function; what is published, which is verified."""
    answers = table.drop_columns(keep).append_column("answered", pa.array(range(table.num_rows)))

    def answer(batch: pa.Table) -> pa.Table:
        rows = [answers.slice(i, 1) for i in batch.column("number of the row").to_pylist()]
        return pa.concat_tables(rows)

    source = table.select(keep).append_column("number of the row", pa.array(range(table.num_rows)))
    target = gm.sink(str(sink), format=form, keep=keep)
    model = gm.model(answer, batch_format="arrow")
    gm.Job(source, model, target, workers=0, shard_rows=2, batch_rows=1, on_nan="keep").run()
    verdict = gm.verify(str(sink))
    assert verdict.ok, verdict.lines
    return gm.read(str(sink)).to_table()


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
@pytest.mark.parametrize("way", ["kept", "answered"])
def test_rare_types_read_back_equal(tmp_path: Path, form: str, way: str) -> None:
    """Encodings, views and extension types, from a table in memory and from a function."""
    found = run(HELD, form, tmp_path / "out", HELD.column_names if way == "kept" else [])
    for name in HELD.column_names:
        assert found.column(name).to_pylist() == HELD.column(name).to_pylist(), name
    assert found.schema.field("uuid").type == pa.uuid()


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
@pytest.mark.parametrize("what", NOWHERE)
@pytest.mark.parametrize("way", ["kept", "answered"])
def test_what_no_file_holds_is_refused_at_once(tmp_path: Path, form: str, what: str, way: str) -> None:
    """With the column, its type and a way out, and nothing is published."""
    table = pa.table({"c": NOWHERE[what]})
    with pytest.raises(gm.BadJob, match=rf"(?s)column 'c' is .*cannot hold .*{what}.*cast it to another type") as e:
        run(table, form, tmp_path / "out", ["c"] if way == "kept" else [])
    assert e.value.exit_code == 2
    assert not list(tmp_path.glob("out/part-*"))


def test_structs_without_fields_are_for_jsonl_alone(tmp_path: Path) -> None:
    """Parquet has none, which is said; JSON has."""
    table = pa.table({"c": STRUCTS})
    for keep, form in ((["c"], "parquet"), ([], "parquet")):
        with pytest.raises(gm.BadJob, match=r"column 'c' is struct<>.*cannot hold"):
            run(table, form, tmp_path / f"out{len(keep)}", keep)
    assert run(table, "jsonl", tmp_path / "out", []).column("c").to_pylist() == STRUCTS.to_pylist()


# ---------------------------------------------------------------- any type

LEAVES = [
    (pa.int8(), st.integers(-128, 127)), (pa.uint64(), st.integers(0, 2**64 - 1)), (pa.bool_(), st.booleans()),
    (pa.float32(), st.floats(width=32, allow_nan=False)), (pa.float16(), st.floats(width=16, allow_nan=False)),
    (pa.string(), st.text("a\"\n\\é", max_size=3)), (pa.large_string(), st.text("ab", max_size=3)),
    (pa.string_view(), st.text("ab", max_size=20)), (pa.large_binary(), st.binary(max_size=2)),
    (pa.binary(2), st.binary(min_size=2, max_size=2)), (pa.null(), st.none()), (pa.date32(), st.dates()),
    (pa.time64("us"), st.times()), (pa.duration("us"), st.timedeltas(dt.timedelta(-9), dt.timedelta(9))),
    (pa.timestamp("us"), st.datetimes()), (pa.decimal128(9, 2), st.decimals(-99, 99, places=2)),
]  # fmt: skip


@st.composite
def column(draw: Any, rows: int) -> pa.Array:
    """A column of any type that Python values make, encoded or not."""
    kind, values = draw(st.sampled_from(LEAVES))
    for shape in draw(st.lists(st.sampled_from(["fixed", "list", "large", "view", "map", "struct"]), max_size=3)):
        if shape == "fixed":
            size = draw(st.sampled_from([2, 0, 3]))
            kind, values = pa.list_(kind, size), st.lists(st.none() | values, min_size=size, max_size=size)
        elif shape == "map":
            pair = st.tuples(st.sampled_from("kl"), st.none() | values)
            kind, values = pa.map_(pa.string(), kind), st.lists(pair, max_size=2)
        elif shape == "struct":
            kind, values = pa.struct([("a", kind)]), st.fixed_dictionaries({"a": st.none() | values})
        else:
            kind = {"list": pa.list_, "large": pa.large_list, "view": pa.list_view}[shape](kind)
            values = st.lists(st.none() | values, max_size=3)
    made = draw(st.lists(st.none() | values, min_size=rows, max_size=rows))
    array = pa.array(made, kind)
    how = draw(st.sampled_from(["as it is", "as it is", "dictionary", "run-ends"]))
    if how == "dictionary":
        return pa.DictionaryArray.from_arrays(pa.array(range(rows), pa.int16()), array)
    return (
        pa.RunEndEncodedArray.from_arrays(pa.array(range(1, rows + 1), pa.int32()), array)
        if how != "as it is"
        else array
    )


@pytest.mark.long
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(data=st.data())
def test_any_type_reads_back_equal(data: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Some columns of one table are kept and the others answered, into sinks of both kinds."""
    table = pa.table({f"c{i}": data.draw(column(5)) for i in range(6)})
    keep = [n for n in table.column_names if data.draw(st.booleans())]
    for form in ("parquet", "jsonl"):
        found = run(table, form, tmp_path_factory.mktemp("any") / "out", keep)
        for name in table.column_names:
            assert found.column(name).to_pylist() == table.column(name).to_pylist(), (form, name)
