"""Answers whose types change in the middle of a run: the same values, or a stop."""

from __future__ import annotations

import subprocess
import sys
from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import gristmill as gm

ROWS = 400


@pytest.fixture
def numbers(tmp_path: Path) -> str:
    """400 rows with an id."""
    pq.write_table(pa.table({"id": np.arange(ROWS)}), tmp_path / "in.parquet")
    return str(tmp_path / "in.parquet")


def switched(first, then):
    """A function of whole batches that answers as `first`, and from row 200 as `then`."""

    def answer(batch):
        ids = batch["id"]
        return {"y": first(ids) if ids[0] < 200 else then(ids)}

    return answer


def run(numbers: str, sink: Path, fn, **more) -> list:
    report = gm.Job(numbers, fn, str(sink), workers=0, batch_rows=50, shard_rows=100, **more).run()
    return report.read().to_table()["y"].to_pylist()


LOSES = {
    "bool then int": (lambda i: i > 5, lambda i: i + 1000),
    "int then bool": (lambda i: i, lambda i: i > 5),
    "float32 then float64": (lambda i: i.astype(np.float32), lambda i: i + 0.1),
    "int then float": (lambda i: i, lambda i: i + 0.5),
    "float then large int": (lambda i: i + 0.5, lambda i: i + 2**53 + 1),
    "int then text": (lambda i: i, lambda i: [str(v) for v in i]),
    "widths": (lambda i: np.ones((len(i), 3)), lambda i: np.ones((len(i), 2))),
    "seconds then microseconds": (lambda i: i.astype("M8[s]"), lambda i: (i * 1_000_001).astype("M8[us]")),
    "a day then a time": (lambda i: i.astype("M8[D]"), lambda i: (i * 3601).astype("M8[s]")),
    "int32 then int64": (lambda i: i.astype(np.int32), lambda i: i + 2**40),
}  # fmt: skip


@pytest.mark.few(4)
@pytest.mark.parametrize("case", LOSES)
def test_fault_51_types_that_change_midway_stop_the_run(numbers: str, tmp_path: Path, case: str) -> None:
    """A value that the planned type cannot hold as it is stops the run; nothing rounded or cut is published."""
    with pytest.raises(gm.GristmillError, match="returns="):
        run(numbers, tmp_path / "out", switched(*LOSES[case]))
    assert not (tmp_path / "out" / "_SUCCESS").exists()


@pytest.mark.few(5)
@pytest.mark.parametrize("case", LOSES)
def test_fault_51_types_that_change_within_the_first_rows(numbers: str, tmp_path: Path, case: str) -> None:
    """The same where batches of one window differ, before there is a plan: values are those returned, or it stops."""
    first, then = LOSES[case]

    def answer(batch):
        return {"y": first(batch["id"]) if batch["id"][0] % 32 == 0 else then(batch["id"])}

    try:
        got = gm.Job(numbers, answer, str(tmp_path / "out"), workers=0, batch_rows=16).run().read().to_table()["y"]
    except gm.GristmillError as e:
        assert "returns=" in str(e)
        return
    wanted = [v for a in range(0, ROWS, 16) for v in answer({"id": np.arange(a, min(a + 16, ROWS))})["y"].tolist()]
    assert [type(v) is bool for v in got.to_pylist()] == [type(v) is bool for v in wanted]
    assert got.to_pylist() == wanted


def test_fault_51_what_loses_nothing_goes_on(numbers: str, tmp_path: Path) -> None:
    """Integers where floats were planned, and narrower numbers, are the same values and are taken."""
    ids = np.arange(ROWS)
    fits = switched(lambda i: i + 0.5, lambda i: i)
    assert run(numbers, tmp_path / "a", fits) == [*(ids[:200] + 0.5), *ids[200:]]
    assert run(numbers, tmp_path / "b", switched(lambda i: i, lambda i: i.astype(np.int16))) == ids.tolist()


def test_fault_51_steps_and_post_steps(numbers: str, tmp_path: Path) -> None:
    """What steps before and after the model return is held to the same."""
    late = gm.step(switched(lambda i: i, lambda i: i + 0.5))
    for place, keep in (("steps", ["y"]), ("post", [])):
        sink = gm.sink(str(tmp_path / place), keep=keep)
        with pytest.raises(gm.GristmillError, match=r"float|double"):
            gm.Job(numbers, lambda b: {"z": b["id"]}, sink, **{place: [late]}, workers=0, shard_rows=100).run()


def test_fault_51_declared_types_cut_nothing(numbers: str, tmp_path: Path) -> None:
    """returns= gives Python's floats a width, but cuts no fraction off for an integer column."""
    half = gm.model(lambda b: [0.1] * len(b["id"]), returns={"y": "float32"})
    assert run(numbers, tmp_path / "a", half) == [float(np.float32(0.1))] * ROWS
    with pytest.raises(gm.GateFailed, match="are dead letters"):
        run(numbers, tmp_path / "b", gm.model(lambda b: [1.5] * len(b["id"]), returns={"y": "int64"}))
    said = set(gm.dead(str(tmp_path / "b"))["message"].to_pylist())
    assert len(said) == 1
    assert said.pop().endswith("returned 1.5 in column 'y', which returns= declares int64: it cannot hold that")


def test_fault_51_a_column_that_comes_or_goes(numbers: str, tmp_path: Path) -> None:
    """A column that later batches lack, or have besides, stops the run; what dicts lack is null, in any batch."""

    def lost(batch):
        return {"y": batch["id"], **({"z": batch["id"]} if batch["id"][0] < 200 else {})}

    def new(batch):
        return {"y": batch["id"], **({"z": batch["id"]} if batch["id"][0] >= 200 else {})}

    for name, fn in (("lost", lost), ("new", new)):
        with pytest.raises(gm.GristmillError, match="column 'z'"):
            run(numbers, tmp_path / name, fn)

    def sparse(batch):
        return [{"y": r["id"], **({"z": r["id"]} if r["id"] < 60 else {})} for r in batch]

    gm.Job(numbers, gm.model(sparse, batch_format="rows"), str(tmp_path / "s"), workers=0, shard_rows=100).run()
    z = gm.read(str(tmp_path / "s")).to_table()["z"].to_pylist()
    assert z == [*range(60), *[None] * (ROWS - 60)]


@pytest.mark.long
@pytest.mark.parametrize("beside", [None, 0, 1])
def test_an_extension_type_of_the_script(tmp_path: Path, beside: int | None) -> None:
    """Its class stands in the script alone and has no hash: the column is kept, by workers and without, also beside."""
    script = tmp_path / "script.py"
    script.write_text(MONEY)
    engine = {"workers": 0} if beside is None else {"workers": 1, "steps_workers": beside}
    done = subprocess.run(
        [sys.executable, str(script), repr(engine)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.split() == ["Money", "True"], done.stderr


MONEY = """
import os, sys, pyarrow as pa, pyarrow.parquet as pq, gristmill as gm

class Money(pa.ExtensionType):
    def __init__(self): super().__init__(pa.int64(), "shop.money")
    def __arrow_ext_serialize__(self): return b""
    @classmethod
    def __arrow_ext_deserialize__(cls, storage, data): return cls()

pa.register_extension_type(Money())

def f(rows): return [{"y": 2 * r["v"]} for r in rows]

if __name__ == "__main__":
    rows = pa.table({"v": list(range(100)), "m": pa.ExtensionArray.from_storage(Money(), pa.array(range(100)))})
    pq.write_table(rows, "in.parquet")
    model = gm.model(f, batch_format="rows")
    job = gm.Job("in.parquet", model=model, sink=gm.sink("out", keep=["v", "m"]), **eval(sys.argv[1]))
    found = job.run().read().to_table()
    column = found["m"].combine_chunks()
    print(type(column.type).__name__, column.storage.equals(found["v"].combine_chunks()), flush=True)
    os._exit(0)  # pyarrow, by itself, aborts now and then as a process ends that has read such a type
"""


def test_a_type_that_no_file_holds_is_named_with_its_column() -> None:
    """Before anything is run, also where Parquet's own library is what refuses it."""
    rows = pa.table({"id": [1], "price": pa.array([Decimal("1E+3")], pa.decimal128(5, -3))})
    with pytest.raises(gm.BadJob, match=r"column 'price' is decimal128\(5, -3\), and a source in memory cannot hold"):
        gm.apply(rows, fn=lambda batch: {"y": batch["id"]}, workers=0)
