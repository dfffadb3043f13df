"""Processes that a program forks after and between jobs, as multiprocessing and torch's DataLoader do."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import gristmill as gm
from gristmill.process import forks

ENDED = '''
import gc, os, sys, time

def ended(work, *given):
    """How a fork ends that does this work, and then exits as a program does: its exit status, or that it hangs."""
    child = os.fork()
    if child == 0:
        work(*given)
        sys.exit(0)
    until = time.monotonic() + 20
    while time.monotonic() < until:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(child, 9)
    return "hangs"
'''
JOBS = """
import multiprocessing
import gristmill as gm

def twice(batch):
    return {"y": [int(n) * 2 for n in batch["n"]]}

def collect(number):
    gc.collect()
    return number

def scored(to, workers):
    gm.Job(
        gm.source("in", where="n % 5 <> 1"), gm.model(twice), gm.sink(to, keep=["n"]), steps=[gm.filter("n > 5")],
        workers=workers,
    ).run()

if __name__ == "__main__":
    gc.disable()  # what a run leaves is collected in the forks
    workers = int(sys.argv[1])
    scored("ours", workers)
    found = [ended(os._exit, collect(0)), ended(collect, 0), ended(scored, "theirs", workers), ended(collect, 0)]
    scored("more", workers)
    with multiprocessing.get_context("fork").Pool(2) as pool:
        print(*found, *pool.map_async(collect, range(4)).get(20))
"""
OPEN = """
import pyarrow as pa
from gristmill.arrow.spilling import batches_of, spilling, spilling_to
from gristmill.sources.where import SqlWhere

def forgotten():
    kept = [spilling_to(".", "64MB")]
    kept.append(kept)

def read_in_part():
    with spilling("64MB") as connection:
        kept = [batches_of(connection.sql("SELECT n FROM range(10000000) t(n)"), 1000)]
    kept[0].read_next_batch()
    kept.append(kept)

def masked():
    assert where.mask(rows).tolist() == [False, True]
    where.close()
    assert where.mask(rows).tolist() == [False, True]

gc.disable()
forgotten()
read_in_part()
rows = pa.table({"x": [1, 2]})
where, held = SqlWhere("x > 1", rows.schema), spilling_to(".", "64MB")
masked()
found = ended(gc.collect), ended(masked), ended(lambda: None)
masked()
print(*found)
"""

GRAPHS = """
import onnx
from onnx import TensorProto, helper
from pathlib import Path
from gristmill.models.contract import Place
from gristmill.models.onnx import OnnxEncoder
from gristmill.models.openvino import OpenVinoEncoder

made = [
    helper.make_node("Cast", ["input_ids"], ["cast"], to=TensorProto.FLOAT),
    helper.make_node("Unsqueeze", ["cast", "last"], ["last_hidden_state"]),
]
given = helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["b", "s"])
answer = helper.make_tensor_value_info("last_hidden_state", TensorProto.FLOAT, ["b", "s", 1])
graph = helper.make_graph(made, "g", [given], [answer], [helper.make_tensor("last", TensorProto.INT64, [1], [2])])
onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), "m.onnx")

def forgotten(kind):
    about = (Path("m.onnx"), "embed", Place(threads=2))
    kept = [OnnxEncoder(*about, "m") if kind == "onnx" else OpenVinoEncoder(*about, "float32", "m")]
    kept.append(kept)

gc.disable()
forgotten(sys.argv[1])
# As multiprocessing ends: at any other exit, ONNX Runtime hangs if it was merely imported before a fork.
print(ended(lambda: os._exit(gc.collect() * 0)))
"""


def said_by(code: str, folder: Path, *given: str) -> str:
    """What a program prints that may fork."""
    (folder / "program.py").write_text(ENDED + code)
    command = [sys.executable, "program.py", *given]
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert not ran.returncode, ran.stderr
    return ran.stdout.strip()


@pytest.fixture
def numbers(tmp_path: Path) -> str:
    (tmp_path / "in").mkdir()
    pq.write_table(pa.table({"n": range(50)}), tmp_path / "in" / "a.parquet")
    return str(tmp_path / "in")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.parametrize("workers", ["0", "2"])
def test_forks_after_jobs_with_conditions_end(numbers: str, tmp_path: Path, workers: str) -> None:
    """Their garbage collector finds what the job left; a job of theirs ends, too."""
    assert said_by(JOBS, tmp_path, workers) == "0 0 0 0 0 1 2 3"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_forks_never_destroy_what_is_open(tmp_path: Path) -> None:
    """Neither as garbage nor when they exit: a connection, a reader that outlives one, and a condition, which is
    evaluated there by a connection of the fork's own.
    """
    assert said_by(OPEN, tmp_path) == "0 0 0"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.parametrize(("kind", "library"), [("onnx", "onnxruntime"), ("openvino", "openvino")])
def test_forks_never_destroy_graphs(tmp_path: Path, kind: str, library: str) -> None:
    """Models that a run has left in this process, which have threads, too."""
    for needed in ("onnx", library):
        pytest.importorskip(needed)
    assert said_by(GRAPHS, tmp_path, kind) == "0"


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def still_open() -> list[Any]:
    """DuckDB's connections in this process."""
    found = []
    for one in (ref() for ref in list(forks._threaded)):
        try:
            if isinstance(one, duckdb.DuckDBPyConnection) and one.execute("SELECT 1"):
                found.append(one)
        except duckdb.ConnectionException:  # is closed
            continue
    return found


def twice(batch: Any) -> Any:
    return {"y": [int(n) * 2 for n in batch["n"]]}


def fails(batch: Any) -> Any:
    raise ValueError("no")


STRANGE = "CAST(CASE WHEN n > 5 THEN 'x' ELSE '1' END AS INTEGER) = 1"


@pytest.mark.parametrize(
    ("model", "where", "options"),
    [
        (twice, "n > 1", {}),
        (twice, "n > 1", {"limit": 5}),
        (fails, "n > 1", {}),
        (twice, STRANGE, {}),
        (twice, "m", {}),
    ],
    ids=["done", "limit", "model fails", "condition fails", "no column"],
)
def test_a_run_closes_its_conditions(
    numbers: str, tmp_path: Path, model: Any, where: str, options: Any, no_collector: None
) -> None:
    """At its end, and not when garbage is collected: DuckDB has threads in the meantime."""
    job = gm.Job(
        gm.source(numbers, where=where, **options), gm.model(model), gm.sink(str(tmp_path / "out"), keep=["n"]),
        steps=[gm.filter(where)], workers=0,
    )  # fmt: skip
    try:
        job.run()
    except gm.GristmillError:
        assert model is fails or where in (STRANGE, "m")
    assert still_open() == []
