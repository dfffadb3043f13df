"""Functions and classes as models."""

from __future__ import annotations

import sys

import numpy as np
import pyarrow as pa
import pytest

from gristmill.arrow.typetext import parse_type
from gristmill.errors import BadModel, BadOutput
from gristmill.job.specs import Call, model
from gristmill.models import kinds
from gristmill.models.calls import load_call
from gristmill.models.contract import Place
from gristmill.process.failure import SomeFailed

ROWS = pa.table({"x": pa.array([1.0, 2.0, 3.0, 4.0], pa.float32()), "text": ["a", "b", "c", "d"]})


def run(spec, index=(0, 1, 2, 3), rows=ROWS):
    loaded = kinds.open(spec, Place())
    try:
        return loaded.predict(loaded.prepare(rows), np.array(index, dtype=np.int64))
    finally:
        loaded.close()


def doubled(batch):
    return {"y": batch["x"] * 2}


def scaled(batch, factor):
    return {"y": batch["x"] * factor}


class Scorer:
    built = 0
    closed = 0

    def __init__(self, weight: float = 1.0) -> None:
        Scorer.built += 1
        self.weight = weight

    def __call__(self, batch):
        return batch["x"] * np.float32(self.weight)

    def close(self) -> None:
        Scorer.closed += 1


@pytest.mark.parametrize("index", [(0, 1, 2, 3), (1, 2), (3, 0, 2), (2,)])
@pytest.mark.parametrize("form", ["numpy", "arrow", "pandas", "polars", "rows"])
def test_rows_come_back_in_the_order_asked_for(index, form):
    """predict gives one output for each index, in that order, for every batch format."""

    def same(batch):
        return [r["text"] for r in batch] if form == "rows" else {"output": batch["text"]}

    assert run(model(same, batch_format=form), index)["output"].to_pylist() == ["abcd"[i] for i in index]


def test_a_class_is_built_once_and_closed():
    """A class is built once per worker with its arguments; close closes it."""
    Scorer.built = Scorer.closed = 0
    loaded = kinds.open(model(Scorer, weight=2.0), Place())
    prepared = loaded.prepare(ROWS)
    for _ in range(3):
        assert loaded.predict(prepared, np.arange(4))["output"].to_pylist() == [2, 4, 6, 8]
    loaded.close()
    assert (Scorer.built, Scorer.closed) == (1, 1)


def test_functions_get_their_arguments():
    """Arguments of a function go with every call."""
    assert run(model(scaled, factor=3)).to_pydict() == {"y": [3, 6, 9, 12]}


def test_changing_a_batch_in_place_does_not_reach_the_rows():
    """A batch is the function's own to change, numbers and texts."""

    def shout(batch):
        batch["text"][:] = [t.upper() for t in batch["text"]]
        return {"t": batch["text"]}

    loaded = kinds.open(model(shout), Place())
    prepared = loaded.prepare(ROWS)
    for _ in range(2):
        assert loaded.predict(prepared, np.arange(4))["t"].to_pylist() == ["A", "B", "C", "D"]
    assert prepared.inputs.rows["text"].to_pylist() == ["a", "b", "c", "d"]

    def overwrite(batch):
        batch["x"] *= 2
        return batch

    assert run(model(overwrite))["x"].to_pylist() == [2.0, 4.0, 6.0, 8.0]
    assert ROWS["x"].to_pylist() == [1.0, 2.0, 3.0, 4.0]


def test_returns_fixes_names_and_types():
    """returns= gives the schema: floats are the nearest of its width, all else must fit it without loss."""
    wide = run(model(lambda b: b["x"].astype(np.float64) * 0.1, returns={"score": "float32"}))["score"]
    assert wide.to_pylist() == (np.array([1, 2, 3, 4]) * 0.1).astype(np.float32).tolist()
    assert run(model(lambda b: [0.1] * len(b["x"]), returns={"score": "float32"})).schema == pa.schema(
        {"score": pa.float32()}
    )
    assert run(model(doubled, returns={"y": "float64"})).schema == pa.schema({"y": pa.float64()})
    assert run(model(lambda b: np.ones((len(b["x"]), 2)), returns={"v": "float32[2]"})).schema.field(
        "v"
    ).type == pa.list_(pa.float32(), 2)
    assert run(model(lambda b: np.ones((len(b["x"]), 1)), returns={"v": "float32"}))["v"].to_pylist() == [1] * 4


@pytest.mark.parametrize(
    ("function", "kind", "says"),
    [
        (lambda b: b["text"], "float32", "it is string, not float"),
        (lambda b: b["x"], "string", "it is double, not string"),
        (lambda b: np.array([1, 0, 1, 0]), "bool", "not bool"),
        (lambda b: np.ones((4, 3)), "float32[2]", "holds 2"),
        (lambda b: {"other": b["x"]}, "float32", "returned columns other; returns= declares score"),
    ],
)
def test_returns_refuses_what_would_lose_something(function, kind, says):
    """A cast that would change a value stops the job and says which column."""

    def widened(batch):
        return function({k: v.astype(np.float64) if v.dtype.kind == "f" else v for k, v in batch.items()})

    with pytest.raises(BadOutput) as caught:
        run(model(widened, returns={"score": kind}))
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("answers", "kind", "lost"),
    [
        (lambda b: np.array([1, 2, 3, 2**40]), "int32", {3: "1099511627776"}),
        (lambda b: np.array([1.0, 0.5, 2.0, np.nan]), "int64", {1: "0.5", 3: "nan"}),
        (lambda b: np.array([1e300, 0.1, np.inf, np.nan]), "float32", {0: "1e+300"}),
        (lambda b: np.array([-1] * 4), "uint8", dict.fromkeys(range(4), "-1")),
        (lambda b: [[1.0, 2.0], [3.0, 1e300], None, [0.0, 0.0]], "float32[2]", {1: "[3.0, 1e+300]"}),
        (lambda b: np.array([[1.0], [1e300], [2.0], [3.0]]), "float32", {1: "1e+300"}),
        (lambda b: [1, 2, ValueError("1e300 itself"), 2**40], "int32", {2: "1e300 itself", 3: "1099511627776"}),
    ],
)
def test_a_number_that_does_not_fit_is_its_rows_own_failure(answers, kind, lost):
    """One number that the type of returns= cannot hold costs its row, not the job; the others have that type."""
    with pytest.raises(SomeFailed) as caught:
        run(model(answers, batch_format="rows" if kind == "float32[2]" else "numpy", returns={"score": kind}))
    assert caught.value.table.schema.field("score").type == parse_type(kind)
    assert caught.value.table.num_rows == 4 - len(lost)
    assert {row: text in str(caught.value.failed[row]) for row, text in lost.items()} == dict.fromkeys(lost, True)
    assert all(kind in str(e) for e in caught.value.failed.values() if "itself" not in str(e))


def test_output_renames_the_one_column():
    """output= names a bare result, renames a single column, and refuses several."""
    assert run(model(Scorer, output="z")).column_names == ["z"]
    assert run(model(doubled, output="z")).column_names == ["z"]
    with pytest.raises(BadOutput, match="rename only one"):
        run(model(lambda b: {"a": b["x"], "b": b["x"]}, output="z"))


@pytest.mark.parametrize("value", [None, [1, 2, 3], (i for i in range(4))])
def test_wrong_counts_name_the_function(value):
    """The error names the function and both counts."""

    def broken(batch):
        return value

    with pytest.raises(BadOutput, match=r"broken was given 4 rows and returned"):
        run(model(broken))


# ---------------------------------------------------------------- callables by name


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "scoring_here.py").write_text(
        "import numpy as np\n"
        "def score(batch):\n    return batch['x'] + 1\n"
        "class Scorer:\n"
        "    def __init__(self, threshold=0.5): self.threshold = threshold\n"
        "    def __call__(self, batch): return batch['x'] > self.threshold\n"
        "made = Scorer()\n"
        "number = 3\n"
        "class Strict:\n"
        "    def __init__(self, path): pass\n"
        "    def __call__(self, batch): return batch\n"
        "def mixed(batch, b, c, d=1): return batch\n"
    )
    (tmp_path / "broken_here.py").write_text("import not_there_at_all\n")
    (tmp_path / "raises_here.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    yield tmp_path
    for name in ("scoring_here", "broken_here", "raises_here"):
        sys.modules.pop(name, None)


def test_callables_by_name_from_the_current_folder(here):
    """MODULE:NAME finds modules in the current folder."""
    assert run(model("scoring_here:score"))["output"].to_pylist() == [2, 3, 4, 5]
    assert run(model("scoring_here:Scorer", threshold=2.5))["output"].to_pylist() == [False, False, True, True]


@pytest.mark.parametrize(
    ("target", "args", "says"),
    [
        ("scoring_her:score", {}, "there is no module 'scoring_her'"),
        ("scoring_here:scor", {}, "did you mean 'score'"),
        ("scoring_here:made", {}, "an instance of Scorer was given"),
        ("scoring_here:number", {}, "cannot be called"),
        ("scoring_here:Scorer", {"treshold": 1}, "did you mean 'threshold'"),
        ("scoring_here:score", {"factor": 1}, "has no argument 'factor'"),
        (
            "scoring_here:Strict",
            {},
            "missing a required argument: 'path'; give it with --arg path=…, args: {path: …} or",
        ),
        ("scoring_here:mixed", {"b": 1}, "missing a required argument: 'c'; give it with --arg c=…"),
        ("broken_here:f", {}, "No module named 'not_there_at_all'"),
        ("raises_here:f", {}, "ZeroDivisionError"),
    ],
)
def test_bad_callables_are_told_before_anything_runs(here, target, args, says):
    """Wrong names, arguments and instances are one clear line, from the driver and from a worker."""
    for attempt in (lambda: kinds.describe(model(target, **args), None), lambda: load_call(Call(target, args))):
        with pytest.raises(BadModel) as caught:
            attempt()
        assert says in str(caught.value)
        assert "\n" not in str(caught.value)


def test_async_functions_of_batches_are_refused():
    """A coroutine function is given one row: in a step, there are none."""

    async def score(row):
        return row

    with pytest.raises(BadModel, match="async"):
        load_call(Call(score))
    with pytest.raises(BadModel, match="called with one row as a dict: leave out batch_format \\('arrow'\\)"):
        kinds.describe(model(score, batch_format="arrow"), None)
    assert kinds.describe(model(score), None).at_once == 32


def test_class_without_call_is_refused():
    """A class that cannot be called says what is missing."""

    class Silent:
        pass

    with pytest.raises(BadModel, match="__call__"):
        run(model(Silent))


def test_describe_tells_the_outputs_that_returns_declares():
    """With returns= the schema is known before anything runs, without it nothing is."""
    info = kinds.describe(model(doubled, returns={"y": "float32"}), ROWS.schema)
    assert info.outputs == ("y",)
    assert info.schema == pa.schema({"y": pa.float32()})
    assert kinds.describe(model(doubled), None).outputs is None
    with pytest.raises(BadModel, match="did you mean 'float32'"):
        kinds.describe(model(doubled, returns={"y": "flaot32"}), None)


# ---------------------------------------------------------------- types as text


@pytest.mark.parametrize(
    "kind",
    [
        pa.int8(), pa.float32(), pa.string(), pa.bool_(), pa.date32(), pa.timestamp("us"), pa.timestamp("ms"),
        pa.list_(pa.float32()), pa.list_(pa.float64(), 384), pa.list_(pa.list_(pa.int64())),
        pa.struct({"a": pa.int64(), "b": pa.list_(pa.string())}), pa.decimal128(12, 2), pa.decimal256(50, -3),
        pa.timestamp("us", "UTC"), pa.struct({"d": pa.decimal128(5, 1), "t": pa.timestamp("ns", "Europe/Berlin")}),
        pa.map_(pa.string(), pa.int32()), pa.map_(pa.int64(), pa.map_(pa.string(), pa.list_(pa.decimal128(5, 1), 2))),
        pa.map_(pa.field("k", pa.string(), nullable=False), pa.field("v", pa.int8())),
        pa.map_(pa.string(), pa.int8(), keys_sorted=True), pa.struct({"m": pa.map_(pa.string(), pa.bool_())}),
        pa.large_list(pa.int8()), pa.large_string(), pa.binary(16), pa.duration("ns"), pa.time64("us"), pa.date64(),
    ],
)  # fmt: skip
def test_types_as_arrow_prints_them(kind):
    """What Arrow prints for a type can be written in returns=."""
    assert parse_type(str(kind)).equals(kind)


def test_a_map_under_another_name_is_one_where_returns_says_so():
    """Pairs alone could be lists too: the error says how to declare them, and of declared ones what does not fit."""
    maps = pa.table({"m": pa.array([[("a", 1)], None, [("b", 2), ("c", None)], []], pa.map_(pa.string(), pa.int32()))})

    def again(batch):
        return {"o": batch["m"]}

    for kind in ("map<string,int32>", "map<string, int32>"):
        found = run(model(again, returns={"o": kind}), rows=maps)
        assert found["o"].combine_chunks().equals(maps["m"].combine_chunks())
    with pytest.raises(BadOutput, match=r"declare pairs as a map with returns=\{'o': 'map<string, int64>'\}"):
        run(model(again), rows=maps)
    with pytest.raises(BadOutput, match="as map<int8, int8>: "):
        run(model(again, returns={"o": "map<int8, int8>"}), rows=maps)
    with pytest.raises(BadModel, match="'map<string>' is not a map type: write map<string, float32>"):
        kinds.describe(model(again, returns={"o": "map<string>"}), None)
