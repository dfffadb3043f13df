"""What functions are given, and what becomes of columns that they hand back: exact, in every type and batch format, and
never a matter of the rows that stand beside a row.
"""

from __future__ import annotations

import itertools
import math
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gristmill as gm
from gristmill.driver.run import retry_dead
from gristmill.models.contract import Place
from gristmill.models.function import open_model
from gristmill.worker.steps import LoadedStep

FORMATS = ("numpy", "rows", "pandas", "polars", "arrow")
ZONES = (None, "UTC", "Europe/Berlin")
INTEGERS = [t for bits in (8, 16, 32, 64) for t in (getattr(pa, f"int{bits}")(), getattr(pa, f"uint{bits}")())]
LEAVES = [
    *INTEGERS,
    *(pa.bool_(), pa.float32(), pa.float64(), pa.string(), pa.large_string(), pa.binary(), pa.decimal128(20, 3)),
    *(pa.timestamp(unit, zone) for unit in ("s", "ms", "us", "ns") for zone in ZONES),
    *(pa.date32(), pa.date64(), pa.time32("s"), pa.time32("ms"), pa.time64("us"), pa.time64("ns")),
    *(pa.duration(unit) for unit in ("s", "ms", "us", "ns")),
]
TYPES = st.recursive(
    st.sampled_from(LEAVES),
    lambda inner: st.one_of(
        inner.map(pa.list_),
        inner.map(pa.large_list),
        st.builds(pa.list_, inner, st.integers(1, 3)),
        st.builds(lambda a, b: pa.struct([("a", a), ("b", b)]), inner, inner),
        inner.map(lambda kind: pa.map_(pa.string(), kind)),
    ),
    max_leaves=3,
)
DAYS = 10**7  # since 1970: beyond the year 9999, which Python's own dates end with


def counts(kind: pa.DataType) -> st.SearchStrategy[int]:
    """The numbers by which values of a type of whole numbers or times are held: extremes among them."""
    if pa.types.is_integer(kind):
        info = np.iinfo(kind.to_pandas_dtype())
        return st.integers(int(info.min), int(info.max))
    if pa.types.is_time(kind):
        return st.integers(0, 86_400 * {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[kind.unit] - 1)
    if pa.types.is_date64(kind):
        return st.integers(-DAYS // 20, DAYS).map(lambda day: day * 86_400_000)
    if pa.types.is_date(kind):
        return st.integers(-DAYS // 20, DAYS)
    most = {"s": 10**12, "ms": 10**15, "us": 10**18, "ns": 2**63 - 1}[kind.unit]
    return st.integers(-(most // 30) if pa.types.is_timestamp(kind) else -most, most)


@st.composite
def arrays(draw: Any, kind: pa.DataType, rows: int) -> pa.Array:
    """An array of a type, of `rows` rows, with nulls at any depth. Made of Arrow's parts, not of Python values."""
    t = pa.types
    null = draw(st.lists(st.booleans() if draw(st.booleans()) else st.just(False), min_size=rows, max_size=rows))
    mask = pa.array(null, pa.bool_())
    if t.is_fixed_size_list(kind):
        inner = draw(arrays(kind.value_type, rows * kind.list_size))
        return pa.FixedSizeListArray.from_arrays(inner, type=kind, mask=mask)
    if t.is_struct(kind):
        return pa.StructArray.from_arrays([draw(arrays(f.type, rows)) for f in kind], fields=list(kind), mask=mask)
    if t.is_list(kind) or t.is_large_list(kind) or t.is_map(kind):
        lengths = [0 if n else draw(st.integers(0, 3)) for n in null]
        offsets = pa.array(np.cumsum([0, *lengths]), pa.int64() if t.is_large_list(kind) else pa.int32())
        total = sum(lengths)
        if t.is_map(kind):
            keys = pa.array([f"k{i}" for i in range(total)], pa.string())
            return pa.MapArray.from_arrays(offsets, keys, draw(arrays(kind.item_type, total)), kind, mask=mask)
        made = pa.LargeListArray if t.is_large_list(kind) else pa.ListArray
        return made.from_arrays(offsets, draw(arrays(kind.value_type, total)), kind, mask=mask)
    if t.is_floating(kind):
        one = st.floats(width=kind.bit_width)
    elif t.is_boolean(kind):
        one = st.booleans()
    elif t.is_decimal(kind):
        one = st.decimals(-(10**16), 10**16, places=3)
    elif t.is_binary(kind):
        one = st.binary(max_size=3)
    elif t.is_integer(kind) or t.is_temporal(kind):
        one = counts(kind)
    else:
        one = st.text(max_size=3)
    values = [None if n else draw(one) for n in null]
    if t.is_temporal(kind):
        return pa.array(values, pa.int32() if kind.bit_width == 32 else pa.int64()).view(kind)
    return pa.array(values, kind)


def held(array: pa.Array | pa.ChunkedArray) -> list[Any]:
    """Values as Arrow holds them, comparable: times as their numbers, NaN as text, -0.0 as itself."""
    if isinstance(array, pa.ChunkedArray):
        return [value for chunk in array.chunks for value in held(chunk)]
    kind, t = array.type, pa.types
    valid = array.is_valid().to_pylist()
    if t.is_map(kind):
        return held(array.cast(pa.list_(pa.struct([("k", kind.key_type), ("v", kind.item_type)]))))
    if t.is_struct(kind):
        fields = [held(child) for child in array.flatten()]
        return [row if v else None for row, v in zip(zip(*fields, strict=True), valid, strict=True)]
    if t.is_list(kind) or t.is_large_list(kind) or t.is_fixed_size_list(kind):
        inner = iter(held(array.flatten()))
        lengths = array.value_lengths() if not t.is_fixed_size_list(kind) else None
        sizes = [kind.list_size] * len(array) if lengths is None else lengths.to_pylist()
        return [[next(inner) for _ in range(n)] if v else None for n, v in zip(sizes, valid, strict=True)]
    if t.is_temporal(kind):
        return array.view(pa.int32() if kind.bit_width == 32 else pa.int64()).to_pylist()
    return [repr(v) if isinstance(v, float) else v for v in array.to_pylist()]


@st.composite
def tables(draw: Any) -> tuple[pa.Table, list[pa.Table]]:
    """Up to six rows of a column of any type, and the same cut anywhere."""
    kind, rows = draw(TYPES), draw(st.integers(1, 6))
    table = pa.table({"n": pa.array(range(rows), pa.int64()), "c": draw(arrays(kind, rows))})
    cuts = [0, *sorted(draw(st.lists(st.integers(0, rows), max_size=3))), rows]
    return table, [table.slice(a, b - a) for a, b in itertools.pairwise(cuts) if b > a]


def beyond_polars(kind: pa.DataType) -> bool:
    """Types for which polars has others, with less room: seconds, times of day in them, and zones' names."""
    inner = any(beyond_polars(kind.field(i).type) for i in range(kind.num_fields))
    return inner or (pa.types.is_temporal(kind) and getattr(kind, "unit", "") == "s") or pa.types.is_date64(kind)


def identity(batch: Any) -> Any:
    return batch


def has(batch: Any) -> Any:
    """The columns that were given, without the number that steps are given besides."""
    if isinstance(batch, list):
        return [{"n": r["n"], "c": r["c"]} for r in batch]
    return batch[["n", "c"]] if hasattr(batch, "iloc") else batch


def scored(model: Any, rows: pa.Table) -> pa.Table:
    """A function's answers on rows, as a worker has them."""
    loaded = open_model(model, Place("cpu", 1))
    return loaded.predict(loaded.prepare(rows), np.arange(rows.num_rows))


def in_rows(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_integer(kind):
        return kind if pa.types.is_uint64(kind) else pa.int64()
    return pa.float64() if pa.types.is_floating(kind) else kind


@settings(deadline=None, max_examples=250)
@given(tables(), st.sampled_from(FORMATS))
@pytest.mark.long
def test_a_column_handed_back_is_the_column_that_was_given(case: Any, form: str) -> None:
    """Whatever its type and nulls: type and values are the same after a step, and as the answer of a model; numbers of
    Python, in rows, have no width.
    """
    table, parts = case
    kind = table.schema.field("c").type
    if form == "polars" and beyond_polars(kind):
        return
    step = LoadedStep(gm.step(identity, batch_format=form))
    for rows in (table, *parts):
        for found in (step.apply(rows).rows, scored(gm.model(has, batch_format=form), rows)):
            assert found.schema.field("c").type == (in_rows(kind) if form == "rows" else kind)
            assert held(found["c"]) == held(rows["c"])
            assert found["n"].to_pylist() == rows["n"].to_pylist()


@pytest.mark.parametrize("kind", [pa.int8(), pa.uint64(), pa.float32(), pa.string(), pa.date32()])
def test_nothing_but_nulls_handed_back_has_its_type(kind: pa.DataType) -> None:
    """An array of None says none."""
    table = pa.table({"n": [0, 1], "c": pa.nulls(2, kind)})
    step = LoadedStep(gm.step(identity, batch_format="numpy"))
    assert step.apply(table).rows.schema.field("c").type == kind


def told(value: Any) -> str:
    """A value in words: equal for what a function cannot tell apart, arrays and lists by their kind too."""
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {[told(v) for v in value.tolist()]}"
    if isinstance(value, dict):
        return str({k: told(v) for k, v in value.items()})
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__} {[told(v) for v in value]}"
    if isinstance(value, (np.integer, np.bool_)):
        value = value.item()
    missing = value is None or type(value).__name__ in ("NAType", "NaTType")
    return "null" if missing or str(value) in ("nan", "NaT") else f"{type(value).__name__} {value}"


def far(column: pa.ChunkedArray) -> bool:
    """Whether there are zoned times beyond year 9999, which pandas holds and hands back, but cannot show one of."""
    if not (pa.types.is_timestamp(column.type) and column.type.tz):
        return False
    last = 253_400_000_000 * {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[column.type.unit]
    return any(v is not None and v > last for v in held(column))


def in_words(batch: Any) -> Any:
    if isinstance(batch, list):
        return [{"words": told(row["c"])} for row in batch]
    return {"words": [told(value) for value in batch["c"]]}


@settings(deadline=None, max_examples=250)
@given(tables(), st.sampled_from(("numpy", "rows", "pandas")))
def test_what_a_row_is_given_does_not_depend_on_the_rows_beside_it(case: Any, form: str) -> None:
    """A function of one row gives the same answers however rows are cut into windows."""
    table, parts = case
    if form == "pandas" and far(table["c"]):
        return
    model = gm.model(in_words, batch_format=form)
    whole = scored(model, table)["words"].to_pylist()
    assert [words for part in parts for words in scored(model, part)["words"].to_pylist()] == whole


# ---------------------------------------------------------------- by hand


FAR = 2**60  # microseconds: in the year 38504
LARGE = 2**53 + 1  # no float64 is this number


def source(folder: Path, **columns: Any) -> str:
    """A file of one row group."""
    pq.write_table(pa.table(columns), folder / "in.parquet")
    return str(folder / "in.parquet")


def read(folder: Path) -> pa.Table:
    return gm.read(str(folder / "out")).to_table()


@pytest.mark.parametrize("form", ["numpy", "pandas"])
def test_whole_numbers_with_nulls_are_given_exactly(tmp_path: Path, form: str) -> None:
    """An id beyond 2^53 beside a null is the same id in the text that a function makes of it, and in its answer."""
    ids = [LARGE, None, -LARGE]
    path = source(tmp_path, id=pa.array(ids), big=pa.array([2**64 - 1, None, 0], pa.uint64()))

    def model(batch: Any) -> Any:
        return {"text": [f"{i}/{b}" for i, b in zip(batch["id"], batch["big"], strict=True)], "same": batch["id"]}

    sink = gm.sink(str(tmp_path / "out"), keep=["id"])
    gm.Job(path, gm.model(model, batch_format=form), sink, workers=0).run()
    found = read(tmp_path)
    none = "None" if form == "numpy" else "<NA>"
    assert found["text"].to_pylist() == [f"{LARGE}/{2**64 - 1}", f"{none}/{none}", f"{-LARGE}/0"]
    assert found["same"].to_pylist() == ids


def test_shard_size_does_not_change_answers(tmp_path: Path) -> None:
    """One null in a window does not make floats of the ids beside it."""
    path = source(tmp_path, id=pa.array([None if i == 5 else i for i in range(60)]))
    for rows in (60, 7):
        model = gm.model(lambda b: {"key": [f"user-{i}" for i in b["id"]]})
        gm.Job(path, model, str(tmp_path / "out" / str(rows)), workers=0, shard_rows=rows).run()
        keys = gm.read(str(tmp_path / "out" / str(rows))).to_table()["key"].to_pylist()
        assert keys == [f"user-{None if i == 5 else i}" for i in range(60)]


def test_columns_beside_the_one_that_a_step_makes_stay_as_they_are(tmp_path: Path) -> None:
    """Zone, width, nulls of vectors and metadata of columns that a step only hands on."""
    fields = [
        pa.field("when", pa.timestamp("us", "Europe/Berlin")),
        pa.field("n", pa.int32(), metadata={"unit": "m"}),
        pa.field("v", pa.list_(pa.float32(), 2)),
    ]
    rows = pa.table([[0, 2**50, None], [1, None, 3], [[1, 2], None, [3, None]]], schema=pa.schema(fields))

    def step(batch: Any) -> Any:
        batch["n2"] = [n and n * 2 for n in batch["n"]]
        return batch

    found = LoadedStep(gm.step(step)).apply(rows).rows
    assert found.select(["when", "n", "v"]).equals(rows, check_metadata=True)
    assert found["n2"].to_pylist() == [2, None, 6]


def test_a_zoned_time_that_a_step_moves_keeps_its_zone(tmp_path: Path) -> None:
    """Times are given to "numpy" in UTC, and what comes back under their name is taken for that: the same instants."""
    kind = pa.timestamp("us", "Europe/Berlin")
    rows = pa.table({"when": pa.array([0, None, 3], pa.timestamp("us")).cast(kind)})
    later = LoadedStep(gm.step(lambda b: {"when": b["when"] + np.timedelta64(1, "h")})).apply(rows).rows["when"]
    assert later.type == kind
    assert later.cast(pa.int64()).to_pylist() == [3_600_000_000, None, 3_600_000_003]
    finer = LoadedStep(gm.step(lambda b: {"when": b["when"] + np.timedelta64(1, "ns")})).apply(rows).rows["when"]
    assert (finer.type, finer.cast(pa.int64()).to_pylist()) == (pa.timestamp("ns", "Europe/Berlin"), [1, None, 3001])


def test_a_null_that_arrays_show_as_nan_is_null_again_row_by_row(tmp_path: Path) -> None:
    """Also where the step changed other rows of the column; a NaN that it made of a number is NaN."""
    rows = pa.table({"x": pa.array([1.0, None, -1.0, math.nan])})
    found = LoadedStep(gm.step(lambda b: {"x": np.sqrt(np.abs(b["x"])) * np.where(b["x"] < 0, np.nan, 1)})).apply(rows)
    assert held(found.rows["x"]) == ["1.0", None, "nan", "nan"]


def test_numbers_that_python_only_has_one_type_for_go_back_to_the_column_s(tmp_path: Path) -> None:
    """Rows of a uint64 column, changed: beyond int64 too, and under a new name; a half under a whole number's name."""
    rows = pa.table({"u": pa.array([2**64 - 1, 5, None], pa.uint64()), "i": pa.array([1, 2, 3], pa.int16())})
    step = gm.step(
        lambda b: [{"u": r["u"] and r["u"] - 1, "w": r["u"], "i": r["i"] / 2} for r in b], batch_format="rows"
    )
    found = LoadedStep(step).apply(rows).rows
    assert found.select(["u", "w"]).schema.types == [pa.uint64(), pa.uint64()]
    assert found["u"].to_pylist() == [2**64 - 2, 4, None]
    assert found["w"].to_pylist() == [2**64 - 1, 5, None]
    assert (found.schema.field("i").type, found["i"].to_pylist()) == (pa.float64(), [0.5, 1.0, 1.5])


def test_equal_is_not_enough_to_be_the_same(tmp_path: Path) -> None:
    """1.0 for 1, a time for a day, -0.0 for 0.0, another zone: what a step makes of a value is what is kept."""
    rows = pa.table({"i": [1, 2], "f": pa.array([0.0, None], pa.float32()), "b": [True, False]})
    step = gm.step(
        lambda b: [{"i": float(r["i"]), "f": -0.0 if r["f"] == 0 else math.nan, "b": int(r["b"])} for r in b],
        batch_format="rows",
    )
    found = LoadedStep(step).apply(rows).rows
    assert [found.schema.field(n).type for n in ("i", "f", "b")] == [pa.float64(), pa.float64(), pa.int64()]
    assert held(found["f"]) == ["-0.0", "nan"]


# ---------------------------------------------------------------- dead letters


@pytest.mark.parametrize("form", ["numpy", "rows", "pandas", "arrow"])
def test_a_row_that_python_cannot_hold_is_a_row_like_others(tmp_path: Path, form: str) -> None:
    """Times beyond year 9999: scored, or a dead letter that shows them and is found again by retry-dead."""
    fixed = tmp_path / "fixed"
    path = source(
        tmp_path,
        i=pa.array(range(20)),
        when=pa.array([FAR if i == 5 else i for i in range(20)], pa.timestamp("us")),
        nested=pa.array([[FAR, i] for i in range(20)], pa.list_(pa.timestamp("us", "UTC"))),
        clock=pa.array([1001] * 20, pa.time64("ns")),
    )

    def twice(batch: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{**r, "copy": c} for r in batch for c in range(2)]

    def model(batch: Any) -> Any:
        numbers = [r["i"] for r in batch] if form == "rows" else [int(str(i)) for i in batch["i"]]
        if 5 in numbers and not fixed.exists():
            raise ValueError("no")
        return {"k": numbers}

    sink = gm.sink(str(tmp_path / "out"), keep=["when", "copy"])
    steps = [gm.step(twice, batch_format="rows")]
    job = gm.Job(path, gm.model(model, batch_format=form), sink, steps=steps, workers=0, gates={"min_ok": 0.9})
    report = job.run()
    assert (report.rows_ok, report.rows_dead) == (38, 2)
    assert "38504-" in str(gm.dead(str(tmp_path / "out"))["payload"][0].as_py())
    fixed.mkdir()
    assert retry_dead(job.spec).rows_dead == 0
    assert sorted(read(tmp_path)["when"].cast(pa.int64()).to_pylist())[-2:] == [FAR, FAR]


def test_the_letter_of_a_row_with_any_value_is_written(tmp_path: Path) -> None:
    """Every kind of value at its extremes, all rows dead: each letter is there."""
    extremes = {
        "seconds": pa.array([2**50], pa.timestamp("s")),
        "zoned": pa.array([2**50], pa.timestamp("ms", "Europe/Berlin")),
        "day": pa.array([DAYS], pa.date32()),
        "long": pa.array([2**62], pa.duration("ms")),
        "clock": pa.array([1001], pa.time64("ns")),
        "inner": pa.array([{"a": [FAR]}], pa.struct([("a", pa.list_(pa.timestamp("us")))])),
        "pairs": pa.array([[("a", FAR)]], pa.map_(pa.string(), pa.timestamp("us"))),
        "raw": pa.array([b"\xff"]),
        "decimal": pa.array([Decimal(10**37)], pa.decimal128(38, 0)),
        "huge": pa.array([2**64 - 1], pa.uint64()),
    }
    rows = {name: pa.concat_arrays([values, pa.nulls(1, values.type)]) for name, values in extremes.items()}
    path = source(tmp_path, i=pa.array([0, 1]), **rows)

    def fails(batch: Any) -> Any:
        return [ValueError("no") if i == 0 else 1 for i in batch["i"]]

    job = gm.Job(path, gm.model(fails), str(tmp_path / "out"), workers=0, gates={"min_ok": 0})
    assert job.run().rows_dead == 1
    (letter,) = gm.dead(str(tmp_path / "out")).to_pylist()
    for text in ("clock", "1001", "38504-", "18446744073709551615"):
        assert text in str(letter["payload"])


# ---------------------------------------------------------------- hints and exceptions


def test_a_function_that_cannot_add_to_none_is_told_the_way_out(tmp_path: Path) -> None:
    """The dead letter names the column and the declaration under which its nulls are NaN; with it, all is scored."""
    path = source(tmp_path, n=pa.array([None if i == 3 else i for i in range(200)]), i=pa.array(range(200)))

    def model(batch: Any) -> Any:
        return {"y": batch["n"] + 1}

    sink = gm.sink(str(tmp_path / "out"), keep=[])
    job = gm.Job(path, gm.model(model), sink, workers=0)
    assert job.plan().notes and "'n' has 1 null" in " ".join(job.plan().notes).replace("n has", "'n' has")
    assert job.run().rows_dead == 1
    (letter,) = gm.dead(str(tmp_path / "out")).to_pylist()
    assert letter["error"] == "TypeError"
    assert "'n'" in letter["message"] and "takes={'n': 'float64'}" in letter["message"]
    again = gm.sink(str(tmp_path / "again"), keep=[])
    report = gm.Job(path, gm.model(model, takes={"n": "float64"}), again, workers=0, on_nan="keep").run()
    assert (report.rows_ok, report.rows_dead) == (200, 0)


def test_whole_numbers_declared_as_floats_are_exact_or_refused(tmp_path: Path) -> None:
    """takes= float64 of int64: NaN for null, the same number, or a dead letter for that row alone; in steps too."""
    ids = [1, None, LARGE, 2**53, *range(96)]
    path = source(tmp_path, id=pa.array(ids), i=pa.array(range(100)))

    def model(batch: Any) -> Any:
        assert batch["id"].dtype == np.float64
        return {"y": [None if np.isnan(v) else int(v) for v in batch["id"]]}

    def step(batch: Any) -> Any:
        return {"z": model(batch)["y"]}

    takes = {"id": "float64"}
    for name, options in (
        ("model", {"model": gm.model(model, takes=takes)}),
        ("keep", {"model": gm.model(model, takes={"id": "float64", "i": "int64 not null"}), "on_null": "keep"}),
        ("step", {"model": gm.model(lambda b: {"y": b["z"]}), "steps": [gm.step(step, takes=takes)]}),
    ):
        sink = gm.sink(str(tmp_path / name), keep=["i"])
        report = gm.Job(source=path, sink=sink, workers=0, **options).run()
        assert (report.rows_ok, report.rows_dead) == (99, 1)
        (letter,) = gm.dead(str(tmp_path / name)).to_pylist()
        assert letter["error"] == "InexactNumber" and str(LARGE) in letter["message"]
        found = report.read().to_table()
        assert found["y"].to_pylist() == [ids[i] for i in found["i"].to_pylist()]


def test_exceptions_in_a_list_of_all_rows_are_of_the_rows_at_their_place(tmp_path: Path) -> None:
    """Dicts that carry `_row` only because the rows did are no claim to name rows; those that move rows are."""
    rows = pa.table({"i": range(20)})

    def some(batch: list[dict[str, Any]]) -> list[Any]:
        return [ValueError(r["i"]) if r["i"] % 10 == 3 else {**r, "z": r["i"] * 2} for r in batch]

    found = LoadedStep(gm.step(some, batch_format="rows")).apply(rows)
    assert [(d.row, d.message) for d in found.dead] == [(3, "3"), (13, "13")]
    assert found.rows["z"].to_pylist() == [2 * i for i in range(20) if i % 10 != 3]
    moved = LoadedStep(gm.step(lambda b: some(b)[::-1], batch_format="rows"))
    with pytest.raises(gm.GristmillError, match="without saying for which `_row`"):
        moved.apply(rows)


@pytest.mark.parametrize("stage", ["model", "step"])
@pytest.mark.parametrize("first", [10, 1])
@pytest.mark.parametrize("kind", ["int8", "float32", "uint64"])
def test_numbers_of_python_have_no_width(kind: str, first: int, stage: str, tmp_path: Path) -> None:
    """Answers under the name of a narrow column may be larger or finer than it holds, also where the first ones are not
    or are those that were given; and beyond 2^63 under the name of a uint64.
    """
    large, by = {"int8": (20, 10), "float32": (20, 1.1), "uint64": (2**63, 1)}[kind]
    table = pa.table({"n": np.where(np.arange(400) < 300, 5, large).astype(kind), "k": range(400)})
    factors = [first if k < 300 else by for k in range(400)]

    def tenfold(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{"n": row["n"] * factors[row["k"]]} for row in rows]

    made = gm.model(tenfold if stage == "model" else lambda rows: [{"y": 1} for _ in rows], batch_format="rows")
    steps = [] if stage == "model" else [gm.step(tenfold, batch_format="rows")]
    keep = ["k"] if stage == "model" else ["k", "n"]
    report = gm.Job(table, made, gm.sink(str(tmp_path), keep=keep), steps=steps, workers=0, shard_rows=50).run()
    found = gm.read(report).to_table()["n"].to_pylist()
    assert found == [n * by for n, by in zip(table["n"].to_pylist(), factors, strict=True)]


def _cast_numpy(batch: dict[str, Any]) -> dict[str, Any]:
    return {"i": batch["i"].astype("uint32"), "f": batch["f"].astype("float32"), "v": np.stack(batch["v"])}


def _cast_pandas(frame: Any) -> Any:
    return frame[["i", "f"]].astype({"i": "uint32", "f": "float32"}).assign(v=list(np.stack(frame["v"])))


def _cast_polars(frame: Any) -> Any:
    polars = pytest.importorskip("polars")
    return frame.select(polars.col("i").cast(polars.UInt32), polars.col("f").cast(polars.Float32), "v")


def _cast_arrow(table: pa.Table) -> pa.Table:
    kind = pa.schema([("i", pa.uint32()), ("f", pa.float32()), ("v", pa.list_(pa.float64(), 2))])
    return table.select(["i", "f", "v"]).cast(kind)


CASTS = {"numpy": _cast_numpy, "pandas": _cast_pandas, "polars": _cast_polars, "arrow": _cast_arrow}


@pytest.mark.parametrize("form", CASTS)
@pytest.mark.parametrize("last", [1.0, 1 / 3])
def test_what_a_step_casts_the_model_is_given_so(form: str, last: float, tmp_path: Path) -> None:
    """Also where all values are what they were, and under the column's own name: of one type in every row."""
    rows = 300
    table = pa.table(
        {"i": range(rows), "f": [*map(float, range(rows - 1)), last], "v": [[1.0, 2.0]] * rows, "k": range(rows)}
    )

    def seen(batch: pa.Table) -> dict[str, Any]:
        return {"t": [" ".join(str(batch.schema.field(n).type) for n in ("i", "f"))] * batch.num_rows}

    model, sink = gm.model(seen, batch_format="arrow"), gm.sink(str(tmp_path), keep=["k", "i", "v"])
    steps = [gm.step(CASTS[form], batch_format=form)]
    found = gm.Job(table, model, sink, steps=steps, workers=0, shard_rows=50, batch_rows=20).run().read().to_table()
    assert set(found["t"].to_pylist()) == {"uint32 float"}
    assert found.schema.field("i").type == pa.uint32() and found["i"].to_pylist() == list(range(rows))
    if form in ("numpy", "arrow"):
        assert pa.types.is_fixed_size_list(found.schema.field("v").type)
