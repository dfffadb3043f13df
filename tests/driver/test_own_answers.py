"""Each published answer is its own row's, whatever was scored before it to find a schema or to clear a doubt."""

from __future__ import annotations

import ctypes
import itertools
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import answering
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gristmill as gm
from gristmill.driver.run import retry_dead
from gristmill.engines import crew
from gristmill.errors import BadOutput
from gristmill.shards.shard import Piece, Shard
from gristmill.shards.sourcefiles import SourceFile
from gristmill.worker.identity import Identity
from gristmill.worker.recipe import Task
from gristmill.worker.suspects import of_task


def numbers(folder: Path, files: list[int]) -> None:
    """Files of so many rows; those of file n are numbered from 1000 n."""
    (folder / "in").mkdir()
    for n, rows in enumerate(files):
        pq.write_table(pa.table({"x": range(1000 * n, 1000 * n + rows)}), folder / "in" / f"{n}.parquet")


def job(folder: Path, source: dict[str, Any], *, copies: bool, workers: int) -> gm.Job:
    """The rows in shards of 30."""
    steps = [gm.flat_map(answering.copied)] if copies else []
    model = gm.model(answering.scored, state=str(folder), batch_format="rows")
    sink = gm.sink(str(folder / "out"), keep=["x", "c"] if copies else ["x"])
    return gm.Job(
        gm.source(str(folder / "in"), **source), model, sink, steps=steps, workers=workers,
        gates={"min_ok": 0.0, "allow_empty": True}, shard_rows=30, batch_rows=16,
    )  # fmt: skip


def rows_of(folder: Path, *, copies: bool) -> tuple[list[tuple[int, int]], list[tuple[int, str | None]]]:
    """Published rows as number and copy, after a look at their answers; dead rows as number and copy."""
    rows = [(r["x"], r.get("c", 0), r["y"]) for r in gm.read(folder / "out").to_table().to_pylist()]
    assert [r for r in rows if r[2] != answering.answer(r[0], r[1])] == []
    dead = gm.dead(folder / "out").to_pylist()
    sources = [(int(Path(d["source"]).stem) * 1000 + d["position"], d["copy"] if copies else None) for d in dead]
    return [r[:2] for r in rows], sources


def set_bad(folder: Path, bad: set[int]) -> None:
    """These rows fail from now on."""
    (folder / "bad").write_text(" ".join(map(str, bad)))


def ran(work: Any, folder: Path) -> bool:
    """Runs to the end, also through a stop; false where nothing was scored at all."""
    for _ in range(2):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                work()
        except BadOutput:
            (folder / "left").unlink()
        except gm.GristmillError as e:
            assert "fails on every" in str(e) or "none of" in str(e), e
            return False
        else:
            return True
    raise AssertionError("it does not come to an end")


FILES = st.lists(st.integers(1, 90), min_size=1, max_size=3)
SOURCES = [{}, {}, {"sample": 60, "seed": 3}, {"limit": 100}, {"where": "x % 4 != 1"}]
STOP = st.one_of(st.none(), st.integers(1, 12))


def check(draw: st.DataObject, workers: int) -> None:
    """A job with rows that fail, stopped and run again; its dead rows scored again, while some of them still fail."""
    files, source, copies = draw.draw(FILES), draw.draw(st.sampled_from(SOURCES)), draw.draw(st.booleans())
    every = [1000 * n + i for n, rows in enumerate(files) for i in range(rows)]
    first = draw.draw(st.integers(0, len(every) - 1))
    bad = set(every[first : first + draw.draw(st.integers(0, 60))])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        numbers(folder, files)
        for verb, failing in (("run", bad), ("retry", draw.draw(st.sampled_from([bad, bad, set(sorted(bad)[::3])])))):
            set_bad(folder, failing)
            if (stop := draw.draw(STOP)) is not None:
                (folder / "left").write_text(str(stop))
            made = job(folder, source, copies=copies, workers=workers)
            if not ran(made.run if verb == "run" else lambda made=made: retry_dead(made.spec), folder):
                return
            ok, dead = rows_of(folder, copies=copies)
            assert len(set(ok)) == len(ok) and len(set(dead)) == len(dead)
            assert not {x for x, _ in ok} & failing and {x for x, _ in dead} <= failing
            assert gm.verify(folder / "out", deep=True).ok
            if verb == "run":
                before = len(ok) + len(dead)
            assert len(ok) + len(dead) == before
            (folder / "left").unlink(missing_ok=True)


@pytest.mark.long
@settings(deadline=None, max_examples=12)
@given(st.data())
def test_each_answer_is_its_rows(draw: st.DataObject) -> None:
    """In one process, for samples, limits, conditions and expansions."""
    check(draw, 0)


@pytest.mark.long
@pytest.mark.parametrize("workers", [1, 2])
def test_each_answer_is_its_rows_in_workers(workers: int) -> None:
    """The same in processes of their own."""
    settings(deadline=None, max_examples=3)(given(st.data())(lambda draw: check(draw, workers)))()


@pytest.mark.parametrize(("copies", "workers"), [*itertools.product([False, True], [0]), (False, 2)])
def test_rows_scored_to_clear_a_doubt_answer_for_no_other(copies: bool, workers: int, tmp_path: Path) -> None:
    """All dead rows fail again, so that rows from elsewhere are scored to learn whether the model works: these have the
    numbers in the first file that the dead ones have in the second, and stay what they are.
    """
    numbers(tmp_path, [100, 100])
    bad = set(range(1000, 1030))
    set_bad(tmp_path, bad)
    made = job(tmp_path, {}, copies=copies, workers=workers)
    with pytest.warns(gm.GristmillWarning):
        before = made.run()
    again = retry_dead(made.spec)
    ok, dead = rows_of(tmp_path, copies=copies)
    assert {x for x, _ in dead} == bad and not {x for x, _ in ok} & bad
    assert (again.rows_ok, again.rows_dead) == (before.rows_ok, before.rows_dead) == (len(ok), len(dead))


def test_what_killed_among_the_first_rows_is_suspected_in_the_first_shard_by_its_file(tmp_path: Path) -> None:
    """A shard's notes name rows by their file: the pieces of the task that takes them over are others."""
    pieces = [Piece(i, SourceFile(f"{i}.parquet", 1, ""), 100, ((0, 100),)) for i in range(2)]
    probe = Task("probe", Shard(0, tuple(pieces)), folder=str(tmp_path), attempt="a.1")
    row = Identity(np.array([1], dtype=np.int32), np.array([5]))
    of_task(probe).note("model", row, np.arange(1))
    of_task(Task("probe", probe.shard, folder=str(tmp_path), attempt="a.2", blame="a.1"))
    heir = of_task(Task("score", Shard(0, (pieces[1],)), folder=str(tmp_path), attempt="a.3"))
    who = Identity(np.zeros(20, dtype=np.int32), np.arange(20))
    assert [(first, last) for first, last, _ in heir.runs("model", who)] == [(0, 5), (5, 6), (6, 20)]
    mended = Piece(1, SourceFile("1.parquet", 1, "later"), 100, ((0, 100),))  # another row stands there now
    other = of_task(Task("score", Shard(0, (mended,)), folder=str(tmp_path), attempt="b.1"))
    assert [(first, last) for first, last, _ in other.runs("model", who)] == [(0, 20)]


def backwards(frame: Any) -> Any:
    """The last row first."""
    return frame.sort_values("id", ascending=False).assign(seen=lambda f: f["id"] * 7)


def doubled_backwards(rows: list[dict]) -> list[dict]:
    """Each row twice, the last one first."""
    return [{**row, "copy": copy} for row in reversed(rows) for copy in "ba"]


@pytest.mark.parametrize("window_bytes", [1, 16 << 20])
def test_rows_are_in_the_order_of_the_source_whatever_order_steps_give_them(tmp_path: Path, window_bytes: int) -> None:
    """Before and after the model, in a window or in many; the rows made of one are in the step's own order."""
    for name, copies, steps in (
        ("plain", [""], [gm.step(backwards, batch_format="pandas")]),
        ("several", ["b", "a"], [gm.step(doubled_backwards, batch_format="rows")]),
    ):
        job = gm.Job(
            pa.table({"id": range(10)}),
            lambda b: {"y": b["id"] * 2},
            gm.sink(str(tmp_path / name), keep=["id", "seen"] if name == "plain" else ["id", "copy"]),
            steps=steps,
            post=[gm.step(backwards, batch_format="pandas")],
            workers=0,
            window_bytes=window_bytes,
        )
        found = job.run().read().to_table()
        assert found["id"].to_pylist() == [i for i in range(10) for _ in copies]
        assert found["y"].to_pylist() == [2 * i for i in found["id"].to_pylist()]
        assert found["seen"].to_pylist() == [7 * i for i in found["id"].to_pylist()]
        if name == "several":
            assert found["copy"].to_pylist() == copies * 10


SORTED = [3.0, 1.0, 2.0, 6.0, 5.0, 4.0]


def frames(how: str) -> Any:
    """Ten times the id of each row, as a function of a frame that it has sorted, taken apart or labelled."""
    import pandas as pd

    def answer(df: Any) -> Any:
        by = df.sort_values("x")
        return {
            "frame": lambda: pd.DataFrame({"y": by["id"] * 10, "z": by["x"]}),
            "series": lambda: {"y": by["id"] * 10},
            "two series": lambda: {"y": by["id"] * 10, "z": df["x"]},
            "grouped": lambda: pd.concat([g.assign(y=g["id"] * 10)[["y"]] for _, g in df.groupby(df["x"] > 3)]),
            "backwards": lambda: pd.DataFrame({"y": df["id"] * 10})[::-1],
            "labels": lambda: pd.DataFrame({"y": (df["id"] * 10).to_numpy()}, index=list("fedcba")[: len(df)]),
            "from one": lambda: pd.DataFrame({"y": (df["id"] * 10).to_numpy()}, index=range(1, len(df) + 1)),
            "indexed": lambda: pd.DataFrame({"y": df.set_index("id")["x"] * 0 + (df["id"] * 10).to_numpy()}),
            "counted": lambda: by.reset_index(drop=True).assign(y=(df["id"] * 10))[["y"]],
            "array beside": lambda: {"y": by["id"] * 10, "z": by["x"].to_numpy()},
            "repeated": lambda: pd.DataFrame({"y": df["id"] * 10}).iloc[[0, 0, 1, 2, 3, 4][: len(df)]],
            "two halves": lambda: pd.concat([(df["id"] * 10).iloc[:3]] * 2).to_frame("y"),
            "index by name": lambda: by.reset_index().set_index("index").assign(y=by["id"].to_numpy() * 10)[["y"]],
            "keyed": lambda: pd.concat({k: g.assign(y=g["id"] * 10)[["y"]] for k, g in df.groupby(df["x"] > 3)}),
            "by group": lambda: df.groupby((-df["x"]).rename("r")).apply(lambda g: pd.DataFrame({"y": g["id"] * 10})),
            "floats": lambda: (
                df.set_index(df.index.astype(float)).sort_values("x").assign(y=lambda d: d["id"] * 10)[["y"]]
            ),
            "arrow": lambda: pa.Table.from_pandas(pd.DataFrame({"y": by["id"] * 10})),
            "arrow backwards": lambda: pa.Table.from_pandas(pd.DataFrame({"y": df["id"] * 10})[::-1]),
            "a rank": lambda: pd.DataFrame({"y": df["id"] * 10}).set_index(
                (df["x"].rank() - 1).astype(int).rename("rank")
            ),
            "numbers of its own": lambda: pd.DataFrame({"y": (df["id"] * 10).to_numpy()}, index=df["k"].to_numpy()),
            "texts": lambda: pd.DataFrame({"y": by["id"] * 10}).pipe(lambda d: d.set_index(d.index.astype(str))),
            "by id": lambda: pd.DataFrame({"y": by.set_index("id")["x"]}),
        }[how]()

    return answer


@pytest.mark.parametrize(
    "how",
    [
        *("frame", "series", "two series", "grouped", "backwards", "labels", "from one", "indexed", "counted"),
        *("index by name", "keyed", "by group", "floats", "arrow", "arrow backwards"),
    ],
)
@pytest.mark.parametrize("stage", ["model", "step", "post"])
def test_what_pandas_has_sorted_is_put_back_in_order(tmp_path: Path, how: str, stage: str) -> None:
    """The index tells which row an answer is of, if it is the batch's own; labels of the function's own do not."""
    pytest.importorskip("pandas")
    plain, mine = gm.model(lambda b: {"other": b["id"]}), frames(how)
    job = gm.Job(
        pa.table({"id": range(6), "x": SORTED}),
        gm.model(mine, batch_format="pandas") if stage == "model" else plain,
        gm.sink(str(tmp_path), keep=["id", "y"] if stage == "step" else ["id"]),
        steps=[gm.step(mine, batch_format="pandas")] if stage == "step" else [],
        post=[gm.step(mine, batch_format="pandas")] if stage == "post" else [],
        workers=0,
    )
    found = job.run().read().to_table()
    assert found["id"].to_pylist() == list(range(6))
    assert found["y"].to_pylist() == [10 * i for i in range(6)]


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "how", ["array beside", "repeated", "two halves", "by id", "a rank", "numbers of its own", "texts"]
)
def test_an_index_that_does_not_tell_which_row_is_which_is_refused(tmp_path: Path, how: str) -> None:
    """What it could mean is said, with the way to say so."""
    pytest.importorskip("pandas")
    model = gm.model(frames(how), batch_format="pandas")
    with pytest.raises(BadOutput, match=r"pandas column 'y'.*sort_index\(\)"):
        source = pa.table({"id": range(6), "x": SORTED, "k": [3, 1, 0, 5, 4, 2]})
        gm.Job(source, model, str(tmp_path / "out"), workers=0).run()


@pytest.mark.parametrize("batch_format", ["numpy", "rows", "pandas"])
def test_a_filter_may_answer_none(tmp_path: Path, batch_format: str) -> None:
    """None holds no more than False, also where a call has no other answer, as for rows whose number is missing."""
    table = pa.table({"x": pa.array([1, None, 700, None, 900], pa.int64())})

    def large(batch: Any) -> Any:
        if batch_format == "rows":
            return [None if row["x"] is None else row["x"] > 500 for row in batch]
        if batch_format == "pandas":
            return batch.apply(lambda row: row["x"] > 500, axis=1)
        found = [None if v is None or v != v else bool(v > 500) for v in batch["x"]]
        return np.array(found, dtype=object)

    steps = [gm.filter(large, batch_format=batch_format)]
    gm.run(gm.Job(table, gm.model(same), gm.sink(tmp_path / "out", keep=["x"]), steps=steps, workers=0))
    assert gm.read(tmp_path / "out").to_table()["x"].to_pylist() == [700, 900]


def same(batch: dict[str, Any]) -> dict[str, Any]:
    """The number again."""
    return {"y": batch["x"]}


def test_a_filter_s_sorted_mask_is_of_its_rows(tmp_path: Path) -> None:
    """A series of truth values in another order keeps the rows that it says."""
    pytest.importorskip("pandas")
    kept = gm.filter(lambda df: df.sort_values("x")["x"] > 3, batch_format="pandas")
    source = pa.table({"id": range(6), "x": SORTED})
    job = gm.Job(source, lambda b: {"y": b["x"]}, gm.sink(str(tmp_path), keep=["id"]), steps=[kept], workers=0)
    assert job.run().read().to_table().to_pylist() == [{"id": i, "y": x} for i, x in enumerate(SORTED) if x > 3]


@pytest.mark.parametrize("expands", [False, True])
def test_steps_that_make_something_new_at_each_call(tmp_path: Path, expands: bool) -> None:
    """What stands beside an answer is what the model was given, also for the rows that were tried before planning."""
    drawn = iter(range(10**6))
    step = gm.flat_map(lambda row: ({"crop": next(drawn)} for _ in range(2))) if expands else gm.step(
        lambda batch: {"crop": [next(drawn) for _ in batch["id"]]}, batch_format="numpy"
    )  # fmt: skip
    source = pa.table({"id": range(3000)})
    sink = gm.sink(str(tmp_path / "out"), keep=["id", "crop"])
    report = gm.Job(source, lambda b: {"seen": b["crop"]}, sink, steps=[step], workers=0).run()
    found = report.read().to_table()
    assert found.num_rows == 6000 if expands else 3000
    assert found["crop"].to_pylist() == found["seen"].to_pylist()


class FirstOfEach:
    """Keeps the first row of each key, and numbers what it is given, as a step that remembers rows does."""

    def __init__(self) -> None:
        self.seen: set[int] = set()

    def __call__(self, batch: Any) -> Any:
        new = []
        for k in batch["k"].tolist():
            new.append(k not in self.seen)
            self.seen.add(k)
        return new


class Numbers:
    """Counts the rows it was given."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, batch: Any) -> Any:
        self.count += len(batch["k"])
        return {"n": np.arange(self.count - len(batch["k"]), self.count)}


@pytest.mark.parametrize("workers", [0, 1])
def test_a_step_that_remembers_meets_each_row_once(tmp_path: Path, workers: int) -> None:
    """Of one worker that nothing fails in: rows tried before planning are none that it has seen."""
    source = pa.table({"k": [i % 700 for i in range(1400)]})
    steps = [gm.filter(FirstOfEach, batch_format="numpy")]
    post = [gm.step(Numbers, batch_format="numpy")]
    sink = gm.sink(str(tmp_path / "out"), keep=["k"])
    report = gm.Job(source, scored, sink, steps=steps, post=post, workers=workers).run()
    found = report.read().to_table()
    assert sorted(found["k"].to_pylist()) == list(range(700))
    assert found["n"].to_pylist() == list(range(700))


def scored(batch: Any) -> Any:
    """The key once more."""
    return {"y": batch["k"]}


class ClosesBadly:
    """Fails when it is closed, which is after its last row."""

    def __call__(self, batch: Any) -> Any:
        return {"y": batch["k"]}

    def close(self) -> None:
        raise RuntimeError("cannot close")


@pytest.mark.parametrize("workers", [0, 1])
def test_a_model_that_cannot_be_closed_has_scored_its_rows(tmp_path: Path, workers: int) -> None:
    """What `close` raises costs no row, and the result is published."""
    source = pa.table({"k": range(100)})
    report = gm.Job(source, gm.model(ClosesBadly, batch_format="numpy"), str(tmp_path / "out"), workers=workers).run()
    assert report.rows_ok == 100 and report.read().to_table()["y"].to_pylist() == list(range(100))


class NeverCloses(ClosesBadly):
    """Waits for what does not come."""

    def close(self) -> None:
        time.sleep(600)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_model_whose_close_hangs_has_scored_its_rows(tmp_path: Path, workers: int) -> None:
    """It is ended like a batch that hangs, or left with its thread, and said; the result is published."""
    source, model = pa.table({"k": range(100)}), gm.model(NeverCloses, batch_format="numpy")
    begun = time.monotonic()
    report = gm.Job(source, model, str(tmp_path / "out"), workers=workers, batch_timeout=0.5).run()
    assert time.monotonic() - begun < 60
    assert any("close() does not return" in note and "its rows are done" in note for note in report.notes)
    assert report.read().to_table()["y"].to_pylist() == list(range(100))


class ClosesAlone(ClosesBadly):
    """Waits in its close for what does not come, and lets nobody else do anything meanwhile."""

    def close(self) -> None:
        ctypes.PyDLL(None).sleep(600)


@pytest.mark.long
def test_a_close_that_holds_the_gil_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is heard of the worker any more: it is ended, its rows being done."""
    monkeypatch.setattr(crew, "LEAVING", 0.5)
    source, model = pa.table({"k": range(100)}), gm.model(ClosesAlone, batch_format="numpy")
    report = gm.Job(source, model, str(tmp_path / "out"), workers=1).run()
    assert any("without a sign of life" in note and "its rows are done" in note for note in report.notes)
    assert report.read().to_table()["y"].to_pylist() == list(range(100))


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("where", ["close(self)", "__call__(self, batch)"])
def test_a_signal_ends_a_run_whose_model_hangs_in_the_calling_process(tmp_path: Path, where: str, number: int) -> None:
    """One is enough, after some seconds that the model is given to come back."""
    script = tmp_path / "job.py"
    script.write_text(
        "import time, gristmill as gm\n"
        "class Hangs:\n"
        "    def __call__(self, batch): return {'y': batch['k']}\n"
        "    def close(self): pass\n"
        f"    def {where}:\n"
        f"        open({str(tmp_path / 'hangs')!r}, 'w').close()\n"
        "        time.sleep(600)\n"
        f"gm.Job([{{'k': 1}}], gm.model(Hangs), {str(tmp_path / 'out')!r}, workers=0).run()\n"
    )
    running = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "hangs").exists():
            assert running.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        running.send_signal(number)
        assert running.wait(30) == 128 + number
    finally:
        running.kill()
        running.wait()


@pytest.mark.parametrize("merge", [False, True])
def test_categories_may_be_more_than_the_first_rows_have(tmp_path: Path, merge: bool) -> None:
    """pandas counts the categories of a batch in a byte; those of a whole column need more room."""
    pd = pytest.importorskip("pandas")
    model = gm.model(lambda df: pd.DataFrame({"c": pd.Categorical([f"c{k}" for k in df["k"]])}), batch_format="pandas")
    sink = gm.sink(str(tmp_path / "out"), keep=["k"], merge=merge)
    report = gm.Job(pa.table({"k": range(3000)}), model, sink, workers=0, batch_rows=50, shard_rows=100).run()
    found = report.read().to_table()
    assert found["c"].to_pylist() == [f"c{k}" for k in found["k"].to_pylist()]


@pytest.mark.parametrize("how", ["jsonl", "partition", "text"])
def test_text_that_is_no_utf8_is_one_dead_row(tmp_path: Path, minilm_int8: Path, how: str) -> None:
    """Parquet passes on any bytes as text; what cannot hold or read them refuses that row alone."""
    texts = pa.array([b"one", b"caf\xe9", b"two"]).view(pa.string())
    pq.write_table(pa.table({"id": range(3), "t": texts}), tmp_path / "in.parquet")
    source, out = str(tmp_path / "in.parquet"), str(tmp_path / "out")
    gates = {"min_ok": 0.5}
    if how == "text":
        report = gm.embed(source, out, text="t", model=str(minilm_int8), gates=gates, workers=1)
    else:
        options: dict[str, Any] = {"format": "jsonl"} if how == "jsonl" else {"partition_by": ["t"]}
        sink = gm.sink(out, keep=["id", "t"], **options)
        report = gm.Job(source, lambda b: {"y": b["id"]}, sink, workers=0, gates=gates).run()
    assert report.read().to_table()["id"].to_pylist() == [0, 2] or how == "partition"
    assert report.dead().column("position").to_pylist() == [1]


def test_the_index_of_the_source_s_own_frame_is_a_column_of_data(tmp_path: Path) -> None:
    """A file that pandas wrote of a shuffled frame names its index; tables that a function makes of it are in order."""
    pd = pytest.importorskip("pandas")
    pd.DataFrame({"x": range(50)}).sample(frac=1, random_state=1).to_parquet(tmp_path / "in.parquet")

    def doubled(t: pa.Table) -> pa.Table:
        return t.append_column("y", pa.array([2 * v for v in t["x"].to_pylist()])).drop_columns(["x"])

    sink, double = gm.sink(str(tmp_path / "out"), keep=["x"]), gm.model(doubled, batch_format="arrow")
    found = gm.Job(str(tmp_path / "in.parquet"), double, sink, workers=0).run().read().to_table()
    assert found["y"].to_pylist() == [2 * v for v in found["x"].to_pylist()]
    assert found["__index_level_0__"].to_pylist() == found["x"].to_pylist()


def tenth(batch: dict[str, Any]) -> dict[str, Any]:
    return {"logit": batch["x"] / 10.0}


def scores(batch: dict[str, Any]) -> dict[str, Any]:
    """A column that the rows have, too, and one that none has."""
    return {"score": batch["logit"] * 2, "z": batch["logit"] * 3}


def some_scores(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Only the first rows are given another."""
    return [{"z": r["logit"] * 3, **({"score": r["logit"] * 2} if r["x"] < 100 else {})} for r in rows]


def few_scores(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every other row is given another."""
    return [{"z": r["logit"] * 3, **({"score": 1.0} if r["x"] % 2 else {})} for r in rows]


def whole(frame: Any) -> Any:
    """All columns, of which one has changed."""
    return frame.assign(score=frame["logit"] * 2, z=frame["logit"] * 3)


def nans(batch: dict[str, Any]) -> dict[str, Any]:
    """NaN for every other row."""
    return {"score": np.where(batch["x"] % 2 == 1, np.nan, 1.0)}


@pytest.mark.parametrize("keep", [(), ("x",), ("x", "score")])
@pytest.mark.parametrize("step", [scores, some_scores, whole])
@pytest.mark.few(5)
def test_what_a_step_after_the_model_gives_anew_is_its_answer(tmp_path: Path, step: Any, keep: tuple[str, ...]) -> None:
    """A column that the rows have already is written with the step's values, kept or not. Where dicts have none it is
    null, or the row's own where that is kept. One who hands back all columns keeps them to have what it changed, which
    is said.
    """
    source = tmp_path / "in.parquet"
    pq.write_table(pa.table({"x": range(400), "score": [0.5] * 400}), source)
    form = {some_scores: "rows", whole: "pandas"}.get(step, "numpy")
    job = gm.Job(
        str(source), tenth, gm.sink(str(tmp_path / "out"), keep=list(keep)), post=[gm.step(step, batch_format=form)],
        workers=1, shard_rows=100,
    )  # fmt: skip
    report = job.run()
    rows = report.read().to_table()
    unwritten = step is whole and "score" not in keep
    assert set(rows.column_names) == {*keep, "logit", "z"} | ({"score"} if not unwritten else set())
    assert ("'score'" in " ".join(report.notes)) == unwritten
    logits = [x / 10 for x in range(400)]
    assert rows["z"].to_pylist() == [v * 3 for v in logits]
    if not unwritten:
        lacking = 0.5 if "score" in keep else None
        own = [lacking if step is some_scores and x >= 100 else logits[x] * 2 for x in range(400)]
        assert rows["score"].to_pylist() == own


@pytest.mark.parametrize("keep", [("x",), ("x", "score")])
def test_nan_that_a_step_after_the_model_gives_is_a_dead_letter(tmp_path: Path, keep: tuple[str, ...]) -> None:
    """Also in a column that the rows have and keep carries over; NaN that a row had itself is none."""
    source = tmp_path / "in.parquet"
    pq.write_table(pa.table({"x": range(40), "score": [float("nan")] * 20 + [0.5] * 20}), source)
    sink = gm.sink(str(tmp_path / "out"), keep=list(keep))
    gates = {"min_ok": 0.0}
    report = gm.Job(str(source), tenth, sink, post=[gm.step(nans)], workers=1, gates=gates).run()
    odd = [x for x in range(40) if x % 2]
    dead = [x for x in odd if x >= 20 or "score" not in keep]
    assert sorted(d["position"] for d in gm.dead(tmp_path / "out").to_pylist()) == dead
    assert report.read().to_table()["x"].to_pylist() == [x for x in range(40) if x not in dead]


def test_a_step_after_the_model_gives_an_answer_to_every_row_or_none(tmp_path: Path) -> None:
    """Of rows that have such a column themselves none is taken for an answer: neither its, nor the model's."""
    source = tmp_path / "in.parquet"
    pq.write_table(pa.table({"x": range(60), "score": [0.5] * 60}), source)
    post = [gm.step(few_scores, batch_format="rows")]
    with pytest.raises(BadOutput, match="'score' for some rows only"):
        gm.Job(str(source), tenth, gm.sink(str(tmp_path / "few"), keep=["x"]), post=post, workers=1).run()
    model = gm.model(
        lambda rows: [{"y": 1} | ({"score": 2.0} if r["x"] < 20 else {}) for r in rows], batch_format="rows"
    )
    post = [gm.step(lambda batch: {"z": batch["x"] * 1.0})]
    job = gm.Job(str(source), model, gm.sink(str(tmp_path / "model"), keep=["x"]), post=post, workers=0, shard_rows=20)
    assert job.run().read().to_table()["score"].to_pylist() == [2.0] * 20 + [None] * 40


def test_nan_in_a_column_that_is_not_written_is_no_answer(tmp_path: Path) -> None:
    """A step after the model leaves it in a column of the rows that it hands back, and that nobody keeps."""
    source = tmp_path / "in.parquet"
    pq.write_table(pa.table({"x": range(60), "score": [0.5] * 60}), source)
    post = [gm.step(lambda f: f.assign(score=f["score"].where(f["x"] % 3 > 0), z=1.0), batch_format="pandas")]
    report = gm.Job(str(source), tenth, gm.sink(str(tmp_path / "out"), keep=["x"]), post=post, workers=0).run()
    assert (report.rows_ok, report.rows_dead) == (60, 0)


def corrected(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A price for some of the first rows, none for any other."""
    return [{"ok": True, "price": 1.0} if r["id"] < 100 and r["id"] % 3 == 0 else {"ok": True} for r in rows]


def taxed(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What it makes of the answers."""
    return [{"gross": None if r["price"] is None else r["price"] * 2} for r in rows]


@pytest.mark.long
@pytest.mark.parametrize("shard_rows", [100, 1000])
def test_a_row_s_own_value_is_no_answer_however_shards_are_cut(tmp_path: Path, shard_rows: int) -> None:
    """A step after the model is given null where no dict of a window has a column that the first rows' had; also of
    rows that are appended, for which the model never answers in it.
    """
    root, folder = str(tmp_path / "out"), tmp_path / "in"
    folder.mkdir()
    pq.write_table(pa.table({"id": range(400), "price": np.arange(400.0)}), folder / "a.parquet")
    job = gm.Job(
        str(folder), gm.model(corrected, batch_format="rows"), gm.sink(root, keep=["id"]),
        post=[gm.step(taxed, batch_format="rows")], workers=1, shard_rows=shard_rows,
    )  # fmt: skip
    assert job.run().rows_ok == 400
    pq.write_table(pa.table({"id": range(400, 500), "price": np.arange(100.0)}), folder / "b.parquet")
    assert job.run(append=True).rows_ok == 500
    rows = gm.read(root).to_table().sort_by("id")
    wanted = [1.0 if n < 100 and n % 3 == 0 else None for n in range(500)]
    assert rows["price"].to_pylist() == wanted
    assert rows["gross"].to_pylist() == [None if price is None else price * 2 for price in wanted]
