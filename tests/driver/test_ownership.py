"""What user code returns is a copy before it is called again, and what it is given is its own to change."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gristmill as gm
from gristmill.job.specs import SklearnModel
from gristmill.models import kinds
from gristmill.models.contract import Place

ROWS = 300
FORMATS = ("numpy", "rows", "arrow", "pandas", "polars")


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Rows with a column of each kind that is handed out."""
    ids = np.arange(ROWS)
    table = pa.table({
        "id": ids, "x": ids.astype(np.float64), "t": [f"t{i}" for i in ids], "l": [[i, i + 0.5] for i in ids.tolist()],
        "s": [{"a": i} for i in ids.tolist()], "v": pa.array([[i, i] for i in ids.tolist()], pa.list_(pa.float32(), 2)),
        "b": (ids % 2 == 0).tolist(), "w": ids.astype("M8[us]"),
    })  # fmt: skip
    path = tmp_path_factory.mktemp("numbers") / "in.parquet"
    pq.write_table(table, path, row_group_size=64)
    return str(path)


def ids_of(batch: Any) -> np.ndarray:
    if isinstance(batch, list):
        return np.array([row["id"] for row in batch])
    return np.array(batch["id"] if not isinstance(batch, pa.Table) else batch["id"].to_numpy())


# ---------------------------------------------------------------- answers in memory that is used again

BUFFER = np.zeros(ROWS * 2)
WHOLE = np.zeros(ROWS, np.int64)
TENSOR = torch.zeros(ROWS)
TIMES = np.zeros(ROWS, "M8[us]")
RECORDS = np.zeros(ROWS, [("y", "f8"), ("z", "i4")])
LISTS: list[list[float]] = [[0.0] for _ in range(ROWS)]
ARRAYS = [np.zeros(2) for _ in range(ROWS)]
OBJECTS = np.empty(ROWS, object)


def _buffer(n: int, values: np.ndarray) -> np.ndarray:
    BUFFER[:n] = values
    return BUFFER[:n]


def _arrow(n: int, values: np.ndarray) -> pa.Array:
    return pa.Array.from_buffers(pa.float64(), n, [None, pa.py_buffer(_buffer(n, values))])


def _read_only(n: int, values: np.ndarray) -> np.ndarray:
    view = _buffer(n, values)[:]
    view.flags.writeable = False
    return view


def _strided(n: int, values: np.ndarray) -> np.ndarray:
    BUFFER[::2][:n] = values
    return BUFFER[::2][:n]


def _matrix(n: int, values: np.ndarray) -> np.ndarray:
    return np.asmatrix(_buffer(n, values)).T


def _tensor(n: int, values: np.ndarray) -> torch.Tensor:
    TENSOR[:n] = torch.from_numpy(values.astype(np.float32))
    return TENSOR[:n]


def _times(n: int, values: np.ndarray) -> np.ndarray:
    TIMES[:n] = values.astype(np.int64).astype("M8[us]")
    return TIMES[:n]


def _records(n: int, values: np.ndarray) -> np.ndarray:
    RECORDS["y"][:n] = values
    return RECORDS[:n]


def _lists(n: int, values: np.ndarray) -> list[list[float]]:
    for i, v in enumerate(values):
        LISTS[i][0] = float(v)
    return LISTS[:n]


def _arrays(n: int, values: np.ndarray) -> np.ndarray:
    for i, v in enumerate(values):
        ARRAYS[i][:] = v
        OBJECTS[i] = ARRAYS[i]
    return OBJECTS[:n]


def _masked(n: int, values: np.ndarray) -> Any:
    WHOLE[:n] = values
    return pd.Series(pd.arrays.IntegerArray(WHOLE[:n], np.zeros(n, bool)))


ANSWERS = {
    "array": _buffer, "strided": _strided, "read-only": _read_only, "matrix": _matrix, "tensor": _tensor,
    "tensor.numpy()": lambda n, v: _tensor(n, v).numpy(), "dlpack": lambda n, v: np.from_dlpack(_tensor(n, v)),
    "2-D": lambda n, v: _buffer(2 * n, np.repeat(v, 2)).reshape(n, 2), "times": _times, "lists": _lists,
    "arrays in an array": _arrays, "arrow": _arrow, "table": lambda n, v: pa.table({"y": _arrow(n, v)}),
    "record batch": lambda n, v: pa.record_batch({"y": _arrow(n, v)}), "records": _records,
    "chunked": lambda n, v: pa.chunked_array([_arrow(n, v)[: n // 2], _arrow(n, v)[n // 2 :]]),
    "list of an array": lambda n, v: pa.ListArray.from_arrays(np.arange(n + 1, dtype=np.int32), _arrow(n, v)),
    "frame": lambda n, v: pd.DataFrame({"y": _buffer(n, v)}, copy=False), "series": lambda n, v: pd.Series(
        _buffer(n, v), copy=False), "Int64": _masked,
    "arrow series": lambda n, v: pd.Series(pd.arrays.ArrowExtensionArray(_arrow(n, v))),
    "polars": lambda n, v: pl.DataFrame({"y": pl.Series(_buffer(n, v))}),
    "polars over arrow": lambda n, v: pl.from_arrow(pa.table({"y": _arrow(n, v)})),
    "polars series": lambda n, v: pl.from_arrow(_arrow(n, v)),
    "dicts": lambda n, v: [{"y": a} for a in _arrays(n, v)],
}  # fmt: skip


WHOLE_ANSWERS = ("frame", "polars", "polars over arrow", "table", "record batch", "records", "dicts")


def first(value: Any) -> float:
    """The one number in an answer, whatever holds it."""
    while isinstance(value, list):
        value = value[0]
    return round(value.timestamp() * 1e6) if hasattr(value, "timestamp") else value


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", ANSWERS)
def test_fault_41_memory_that_is_used_again(numbers: str, tmp_path: Path, kind: str) -> None:
    """A function that writes its next answers over those that it returned publishes each row's own, bisected or not."""

    def answer(batch):
        if 137 in batch["id"]:
            raise ValueError("137")
        found = ANSWERS[kind](len(batch["id"]), batch["id"] * 2.0)
        return found if kind in WHOLE_ANSWERS else {"y": found}

    sink = gm.sink(str(tmp_path / "out"), keep=["id"])
    gm.Job(numbers, answer, sink, workers=0, batch_rows=50).run()
    table = gm.read(str(tmp_path / "out")).to_table()
    assert table["id"].to_pylist() == [i for i in range(ROWS) if i != 137]
    assert [first(v) for v in table["y"].to_pylist()] == [2.0 * i for i in range(ROWS) if i != 137]


def test_fault_41_steps_filters_flat_maps_and_post_steps(numbers: str, tmp_path: Path) -> None:
    """The same in every place where user code answers; a flat_map may yield one dict again and again."""

    def before(batch):
        return {"k": _buffer(len(batch["id"]), batch["id"] * 10.0)}

    def some(batch):
        WHOLE[: len(batch["id"])] = batch["id"] % 2 == 0
        return WHOLE[: len(batch["id"])].view(np.int64) == 1

    piece: dict[str, Any] = {"part": np.zeros(1), "names": [""]}

    def split(row):
        for n in range(2):
            piece["part"][:] = row["id"] * 10 + n
            piece["names"][0] = f"{row['id']}.{n}"
            yield piece

    def model(batch):
        return {"y": _buffer(len(batch["k"]), batch["k"] + 1)}

    def after(batch):
        return {"z": _buffer(len(batch["y"]), batch["y"] + 1)}

    sink = gm.sink(str(tmp_path / "out"), keep=["id", "k", "part", "names"])
    steps = [gm.step(before), gm.filter(some), gm.flat_map(split)]
    gm.Job(numbers, model, sink, steps=steps, post=[after], workers=0, batch_rows=32, shard_rows=100).run()
    wanted = [
        {"id": i, "k": i * 10.0, "part": [i * 10.0 + n], "names": [f"{i}.{n}"], "y": i * 10.0 + 1, "z": i * 10.0 + 2}
        for i in range(0, ROWS, 2)
        for n in range(2)
    ]
    assert gm.read(str(tmp_path / "out")).to_table().to_pylist() == wanted


# ---------------------------------------------------------------- inputs changed in place


def spoil(batch: Any) -> None:
    """Change all of a batch in place."""
    if isinstance(batch, list):
        for row in batch:
            row["l"].append(-1.0)
            row["s"]["a"] = -1
            row.update(x=-1.0, t="spoilt", v=None)
    elif isinstance(batch, dict):
        for name in ("x", "id", "v"):
            batch[name][:] = -1
            if batch[name].ndim == 1:
                torch.from_numpy(batch[name]).mul_(3)
        batch["t"][:] = "spoilt"
        batch["w"][:] = np.datetime64(0, "us")
        for values, row in zip(batch["l"], batch["s"], strict=True):
            values[:] = -1
            row["a"] = -1
    elif isinstance(batch, pd.DataFrame):
        batch.loc[:, "x"] = -1.0
        batch.loc[batch.index[0], "id"] = -1
        for values, row in zip(batch["l"], batch["s"], strict=True):
            values[:] = -1
            row["a"] = -1
    else:  # frames that cannot be changed, but whose numbers torch takes to be writable
        column = batch["x"].to_numpy()
        torch.from_numpy(column).fill_(-1)


@pytest.mark.long
@settings(max_examples=25, deadline=None)
@given(
    form=st.sampled_from(FORMATS), place=st.sampled_from(["model", "step", "post"]),
    bad=st.sets(st.integers(0, ROWS - 1), max_size=3),
    rows=st.sampled_from([7, 64, 1000]),
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_fault_41_inputs_are_the_function_s_own(numbers, tmp_path_factory, form, place, bad, rows) -> None:
    """Whatever a function does to its batch, before it answers or fails, no other call and no written row sees it."""

    def ruthless(batch):
        ids = ids_of(batch)
        xs = [r["x"] for r in batch] if isinstance(batch, list) else batch["x"]
        texts = [r["t"] for r in batch] if isinstance(batch, list) else batch["t"]
        answer = {"y": np.array(xs) + 1, "u": [str(t) for t in texts]}
        spoil(batch)
        if bad & set(ids.tolist()):
            raise ValueError("bad")
        return answer

    ruthless_step = gm.step(ruthless, batch_format=form)
    model, more = (lambda b: {"m": b["id"]}), {}
    if place == "model":
        model = gm.model(ruthless, batch_format=form)
    else:
        more = {"steps" if place == "step" else "post": [ruthless_step]}
    source = pq.read_table(numbers)
    out = tmp_path_factory.mktemp("out")
    keep = [*source.column_names, *(["y"] if place == "step" else [])]
    job = gm.Job(
        numbers, model, gm.sink(str(out / "a"), keep=keep), workers=0, batch_rows=rows, gates={"min_ok": 0.5}, **more
    )
    job.run()
    good = [i for i in range(ROWS) if i not in bad]
    table = gm.read(str(out / "a")).to_table()
    assert table.select(source.column_names).equals(source.take(good))
    assert table["y"].to_pylist() == [i + 1.0 for i in good]
    assert sorted(
        int(p.split('"id": ')[1].split(",")[0]) for p in gm.dead(str(out / "a"))["payload"].to_pylist()
    ) == sorted(bad)


def test_fault_41_an_estimator_that_works_in_place(tmp_path: Path) -> None:
    """A scaler with copy=False changes its input: rows that are scored again after a failure are not scaled twice."""
    import skops.io
    from sklearn.preprocessing import StandardScaler

    table = pa.table({"a": [1.0, 2.0, 4.0], "b": [0.0, 1.0, 5.0]})
    rows = np.column_stack([table["a"], table["b"]])
    scaler = StandardScaler(copy=False).fit(rows.copy())
    skops.io.dump(scaler, tmp_path / "scaler.skops")
    spec = SklearnModel(str(tmp_path / "scaler.skops"), features=("a", "b"), method="transform")
    loaded = kinds.open(spec, Place())
    prepared = loaded.prepare(table)
    for _ in range(2):
        found = loaded.predict(prepared, np.arange(3))["transformed"].to_pylist()
        assert np.allclose(found, StandardScaler().fit_transform(rows))
    loaded.close()


# ---------------------------------------------------------------- exceptions as answers


def _told(batch: Any, kind: str, bad: set[int]) -> Any:
    ids = ids_of(batch)
    answers = [KeyError(int(i)) if int(i) in bad else float(i) for i in ids]
    if kind == "list":
        return answers
    if kind == "array":
        return np.array(answers, dtype=object)
    if kind == "dict of lists":
        return {"output": answers, "other": ids.tolist()}
    if kind == "series":
        return pd.Series(answers, dtype=object)
    return [a if isinstance(a, KeyError) else {"output": a} for a in answers]


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("kind", ["list", "array", "dict of lists", "series", "dicts"])
def test_fault_82_an_exception_is_a_row_s_answer(numbers: str, tmp_path: Path, form: str, kind: str) -> None:
    """The rows answered with an exception are dead letters with it; each row is asked for once, also if all fail."""
    calls: list[int] = []
    bad = {3, 137, *range(200, 250)}

    def answer(batch):
        calls.extend(ids_of(batch).tolist())
        return _told(batch, kind, bad)

    sink = gm.sink(str(tmp_path / "out"), keep=["id"])
    gm.Job(numbers, gm.model(answer, batch_format=form), sink, workers=0, batch_rows=50, gates={"min_ok": 0.5}).run()
    table = gm.read(str(tmp_path / "out")).to_table()
    good = [i for i in range(ROWS) if i not in bad]
    assert (table["id"].to_pylist(), table["output"].to_pylist()) == (good, [float(i) for i in good])
    dead = gm.dead(str(tmp_path / "out"))
    assert dead["error"].to_pylist() == ["KeyError"] * len(bad)
    assert sorted(int(m) for m in dead["message"].to_pylist()) == sorted(bad)
    again = [i for i, n in ((i, calls.count(i)) for i in range(ROWS)) if n > 1]
    assert [i for i in again if i >= 64] == []  # the first rows may be scored again, for the plan


@pytest.mark.parametrize("place", ["steps", "post", "flat_map", "filter", "_row"])
def test_fault_82_in_steps(numbers: str, tmp_path: Path, place: str) -> None:
    """Steps of every kind may answer so; with `_row` the exception is that row's."""
    bad = {3, 137}
    calls = itertools.count()

    def answer(batch):
        next(calls)
        found = {"y": [KeyError(int(i)) if int(i) in bad else float(i) for i in batch["id"]]}
        return {**found, "_row": batch["_row"]} if place == "_row" else found

    def pieces(row):
        return KeyError(row["id"]) if row["id"] in bad else [{"y": float(row["id"])}]

    def holds(batch):
        return [KeyError(int(i)) if int(i) in bad else True for i in batch["id"]]

    step = {"flat_map": gm.flat_map(pieces), "filter": gm.filter(holds)}.get(place, gm.step(answer))
    keep = ["id"] if place in ("post", "filter") else ["id", "y"]
    more = {"post" if place == "post" else "steps": [step]}
    gm.Job(numbers, lambda b: {"m": b["id"]}, gm.sink(str(tmp_path / "out"), keep=keep), workers=0, **more).run()
    table = gm.read(str(tmp_path / "out")).to_table()
    assert table["id"].to_pylist() == [i for i in range(ROWS) if i not in bad]
    assert gm.dead(str(tmp_path / "out"))["error"].to_pylist() == ["KeyError", "KeyError"]
    assert next(calls) <= 4
