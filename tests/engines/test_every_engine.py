"""The same jobs on every engine: same published values, same receipts, whatever happens to a worker on the way."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jobs
import oracles
import processes
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import victims
from heard import Heard
from places import Place
from pydantic import BaseModel

import gristmill as gm
from batchserver import BatchServer
from llmserver import KEY, ChatServer

IDS = list(range(200))


def without(table: pa.Table, ids: list[int]) -> pa.Table:
    """The rows of other ids."""
    return table.filter(pc.invert(pc.is_in(table["id"], pa.array(ids))))


def test_a_plain_job(place: Place, numbers: str, wanted: pa.Table, tmp_path: Path) -> None:
    """Every row once, values byte for byte, one receipt a shard; a second run has nothing to do."""
    root = str(tmp_path / "out")
    report = jobs.run(numbers, root, "scored", engine=place.engine, shard_rows=20)
    assert (report.rows_ok, report.engine) == (200, place.name)
    assert processes.receipts_in(root) == report.shards > 9
    oracles.same_values(root, wanted)
    oracles.tidy(root)
    again = jobs.run(numbers, root, "scored", engine=place.engine, shard_rows=20)
    assert (again.state, again.rows_ok) == ("nothing to do", 200)


@pytest.mark.long
def test_steps_dead_letters_and_ids(place: Place, numbers: str, tmp_path: Path) -> None:
    """Steps that filter and multiply rows, in processes of their own, a row id and dead letters: the same table as
    without any worker.
    """

    def job(root: Path, engine: dict[str, Any]) -> gm.Job:
        sink = gm.sink(str(root), keep=["id"], row_id="rid")
        steps = [victims.odd, gm.flat_map(twice)]
        return jobs.job(numbers, sink, "scored", {"bad": [30]}, steps=steps, engine=engine, shard_rows=50)

    job(tmp_path / "wanted", {"name": "local", "workers": 0}).run()
    report = job(tmp_path / "out", {**place.engine, "steps_workers": 2}).run()
    assert (report.rows_ok, report.rows_dead, report.rows_filtered) == (358, 2, 20)
    oracles.same_values(str(tmp_path / "out"), gm.read(tmp_path / "wanted").to_table())
    letters = [gm.dead(tmp_path / name).drop_columns(["traceback"]).to_pylist() for name in ("out", "wanted")]
    assert letters[0] == letters[1]


@pytest.mark.long
@pytest.mark.parametrize("key", [None, "id"], ids=["files", "rows"])
def test_an_update(place: Place, key: str | None, tmp_path: Path) -> None:
    """A file edited, one gone and one new: as many rows are kept and scored as without any worker, by files or by a
    key, and the same values are published.
    """

    def write(name: str, ids: range, by: float) -> None:
        x = [float(i) * by for i in ids]
        pq.write_table(pa.table({"id": pa.array(ids, pa.int64()), "x": x}), tmp_path / "in" / f"{name}.parquet")

    def night(root: str, engine: dict[str, Any]) -> gm.Report:
        update = {"key": [key]} if key else True
        model = gm.model(doubled, takes={"x": "float64 not null"})
        sink = gm.sink(str(tmp_path / root), keep=["id"], row_id="rid")
        spec = jobs.engine_of(engine)
        return gm.Job(str(tmp_path / "in"), model, sink, update=update, engine=spec, shard_rows=30).run()

    (tmp_path / "in").mkdir()
    alone = {"name": "local", "workers": 0}
    for n in range(4):
        write(str(n), range(n * 100, n * 100 + 100), 1.0)
    for root, engine in (("out", place.engine), ("wanted", alone)):
        assert night(root, engine).rows_ok == 400
    write("1", range(90, 200), 1.0)  # ten of them were in another file
    write("0", range(90), 1.0)
    write("2", range(200, 300), 2.0)
    write("4", range(400, 450), 1.0)
    (tmp_path / "in" / "3.parquet").unlink()
    told = [night(root, engine) for root, engine in (("out", place.engine), ("wanted", alone))]
    assert told[0].rows_ok == told[1].rows_ok == 350
    assert told[0].updated == told[1].updated and told[0].updated["kept"] > 0
    oracles.same_values(str(tmp_path / "out"), gm.read(tmp_path / "wanted").to_table())
    assert gm.verify(tmp_path / "out", source=True).ok


def doubled(batch: dict[str, Any]) -> dict[str, Any]:
    """Twice a number."""
    return {"y": batch["x"] * 2}


def twice(row: dict[str, Any]) -> list[dict[str, Any]]:
    """One row as two."""
    return [{"x": row["x"]}, {"x": -row["x"]}]


class Told(BaseModel):
    """What an answer has."""

    answer: str


@pytest.mark.few(1)
def test_a_prompt_a_row(place: Place, numbers: str, tmp_path: Path) -> None:
    """Each has its answer, asked for once, checked by a class; no more requests are in flight in the whole run than it
    was told.
    """
    with ChatServer(latency=0.02, answer='{"answer": "<$>"}') as server:
        prompt = gm.Prompt("{{ id }}", "m", base_url=server.url, api_key=KEY, concurrency=8, returns=Told)
        sink = gm.sink(str(tmp_path / "out"), keep=["id"])
        report = gm.Job(numbers, prompt, sink, engine=jobs.engine_of(place.engine), shard_rows=50).run()
        told = server.told()
    found = {row["id"]: row["answer"] for row in gm.read(tmp_path / "out").to_table().to_pylist()}
    assert found == {n: f"<{n}>" for n in IDS} and report.rows_ok == 200
    assert (set(told["answered"].values()), told["requests"], told["most"] <= 8) == ({1}, 200, True)


@pytest.mark.long
def test_a_batch_api(place: Place, numbers: str, tmp_path: Path) -> None:
    """Each shard is a batch, whichever worker has it; every row is answered, and paid for, once."""
    with BatchServer(takes=1.0) as server:
        prompt = gm.Prompt("{{ id }}", "m", base_url=server.url, api_key=KEY, batch_api="openai")
        sink = gm.sink(str(tmp_path / "out"), keep=["id"])
        report = gm.Job(numbers, prompt, sink, engine=jobs.engine_of(place.engine), shard_rows=50).run()
        told = server.told()
    found = {row["id"]: row["answer"] for row in gm.read(tmp_path / "out").to_table().to_pylist()}
    assert found == {n: f"<{n}>" for n in IDS} and report.rows_ok == 200
    assert set(told["computed"].values()) == {1} and sum(told["batches"]) + told["requests"] == 200
    assert len(told["batches"]) == 4 and told["requests"] <= 2


@pytest.mark.few(1)
def test_a_worker_is_killed(place: Place, numbers: str, wanted: pa.Table, tmp_path: Path) -> None:
    """SIGKILL to a worker in the middle: its shards are done again, nothing is lost, twice, or blamed."""
    root, heard = str(tmp_path / "out"), Heard()
    args = {"marker": str(tmp_path / "killed"), "at": 77, "what": "kill"}
    report = jobs.job(numbers, root, "once", args, engine=place.engine, shard_rows=20).run(observer=heard)
    assert (report.rows_ok, report.rows_dead, heard.deaths()) == (200, 0, 1)
    assert any("ended (SIGKILL)" in n.text for n in heard.notes)
    assert processes.receipts_in(root) == report.shards
    oracles.same_values(root, wanted)


def test_a_poison_row(place: Place, numbers: str, wanted: pa.Table, tmp_path: Path) -> None:
    """A row on which the model raises is a dead letter with its traceback; the others are as they would be."""
    root = str(tmp_path / "out")
    report = jobs.run(numbers, root, "scored", {"bad": [123]}, engine=place.engine, shard_rows=40)
    assert (report.rows_ok, oracles.dead_ids(root)) == (199, [123])
    letter = gm.dead(root).to_pylist()[0]
    assert (letter["error"], letter["message"]) == ("ValueError", "row 123 is bad")
    assert "victims.py" in letter["traceback"]
    oracles.same_values(root, without(wanted, [123]))


@pytest.mark.long
def test_a_row_that_segfaults(place: Place, numbers: str, wanted: pa.Table, tmp_path: Path) -> None:
    """It is isolated across processes, dead after it has killed two alone; no other row is blamed."""
    root, heard = str(tmp_path / "out"), Heard()
    args = {"bad": {"85": "segfault"}}
    job = jobs.job(numbers, root, "harmful", args, engine=place.engine, shard_rows=20, batch_rows=4)
    report = job.run(observer=heard)
    assert (report.rows_ok, oracles.dead_ids(root)) == (199, [85])
    assert 3 <= heard.deaths() <= 8
    assert gm.dead(root)["error"].to_pylist() == ["WorkerDied"]
    oracles.same_values(root, without(wanted, [85]))


@pytest.mark.few(1)
def test_a_call_that_hangs(place: Place, numbers: str, wanted: pa.Table, tmp_path: Path) -> None:
    """A call that never returns and holds the GIL ends its worker by the limit for a batch, and is said to have."""
    root, heard = str(tmp_path / "out"), Heard()
    args = {"marker": str(tmp_path / "hung"), "at": 77, "what": "gil"}
    options: dict[str, Any] = {"engine": place.engine, "shard_rows": 50, "batch_timeout": 1.5}
    report = jobs.job(numbers, root, "once", args, **options).run(observer=heard)
    assert (report.rows_ok, report.rows_dead, heard.deaths()) == (200, 0, 1)
    assert any("a call took longer than its limit" in n.text for n in heard.notes)
    oracles.same_values(root, wanted)


@pytest.mark.few(1)
def test_a_model_that_cannot_load(place: Place, numbers: str, tmp_path: Path) -> None:
    """The run stops with the model's own error, not with that of the engine."""
    model = gm.model(Unloadable)
    job = gm.Job(numbers, model, str(tmp_path / "out"), engine=jobs.engine_of(place.engine))
    with pytest.raises(gm.RunFailed, match="no licence for this model"):
        job.run()


class Unloadable:
    """A model class whose constructor raises."""

    def __init__(self) -> None:
        raise OSError("no licence for this model")

    def __call__(self, batch: Any) -> Any:
        return batch


@pytest.mark.few(1)
def test_prints_reach_the_driver(place: Place, numbers: str, tmp_path: Path) -> None:
    """What user code prints, on both streams and past Python, is passed on; a flood of it blocks nothing."""
    heard = Heard()
    job = jobs.job(numbers, str(tmp_path / "out"), "floods", {"size": 2000}, engine=place.engine, shard_rows=100)
    assert job.run(observer=heard).rows_ok == 200
    assert all(letter * 2000 in heard.printed() for letter in "oew")


SCRIPT = """
import json, sys
import gristmill as gm
from gristmill.job.options import EngineSpec

engine, source, sink = json.loads(sys.argv[1]), sys.argv[2], sys.argv[3]
FACTOR = 2.0

class Scorer:
    def __init__(self, shift):
        self.shift = shift
    def __call__(self, batch):
        return {"y": batch["x"] * FACTOR + batch["id"] + self.shift}

def halved(batch):
    return {"x": batch["x"] / 2.0 * 2.0}

report = gm.Job(source, gm.model(Scorer, shift=0.0), gm.sink(sink, keep=["id"]), steps=[halved],
                engine=EngineSpec(**engine)).run()
print("rows", report.rows_ok)
"""


@pytest.mark.long
def test_user_code_of_a_script(place: Place, numbers: str, wanted: pa.Table, tmp_path: Path) -> None:
    """A script's own class and function, which no module holds, without an `if __name__` guard."""
    import json

    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    root = str(tmp_path / "out")
    ended = subprocess.run(
        [sys.executable, str(script), json.dumps(place.engine), numbers, root],
        capture_output=True, text=True, timeout=120, env={**os.environ, **place.env}, cwd=tmp_path,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert re.search(r"^rows 200$", ended.stdout, re.MULTILINE)
    oracles.same_values(root, wanted)


def stopped(place: Place, numbers: str, root: str, log: str) -> set[int]:
    """Begin a job on an engine, end it with SIGTERM after some shards; the ids that are committed then."""
    arguments = {"engine": place.engine, "shard_rows": 10, "batch_rows": 5, "args": {"log": log, "seconds": 0.1}}
    running = processes.start("jobs:run", place.env, source=numbers, sink=root, fn="slow", **arguments)
    processes.until(lambda: processes.receipts_in(root) >= 3 or running.poll() is not None)
    begun = time.monotonic()
    running.send_signal(signal.SIGTERM)
    printed, _ = running.communicate(timeout=30)
    assert running.returncode == 143, printed
    assert time.monotonic() - begun < 12
    done = oracles.committed(root, numbers)
    assert 0 < len(done) < 200
    os.unlink(log)
    return done


@pytest.mark.long
def test_stopped_here_and_resumed_elsewhere(place: Place, numbers: str, wanted: pa.Table, tmp_path: Path) -> None:
    """SIGTERM: out within 12 s, exit 143. The local engine goes on with what another left, scoring only the rest."""
    root, log = str(tmp_path / "out"), str(tmp_path / "calls")
    done = stopped(place, numbers, root, log)
    report = jobs.run(numbers, root, "slow", {"log": log, "seconds": 0.1}, workers=0, batch_rows=5)
    assert report.rows_run == 200 - len(done)
    assert not done & set(oracles.called(log))
    oracles.same_values(root, wanted)
    oracles.tidy(root)


@pytest.mark.long
def test_stopped_elsewhere_and_resumed_here(place: Place, numbers: str, wanted: pa.Table, tmp_path: Path) -> None:
    """What the local engine began another one finishes, scoring only the rest."""
    root, log = str(tmp_path / "out"), str(tmp_path / "calls")
    done = stopped(Place("local", {"name": "local", "workers": 2}), numbers, root, log)
    report = jobs.run(numbers, root, "slow", {"log": log, "seconds": 0.1}, engine=place.engine, batch_rows=5)
    assert (report.engine, report.rows_run) == (place.name, 200 - len(done))
    assert not done & set(oracles.called(log))
    oracles.same_values(root, wanted)
    oracles.tidy(root)
