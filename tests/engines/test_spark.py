"""What only the Spark engine has to stand: executors that die, copies of tasks, Spark giving up; and its session."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jobs
import oracles
import places
import processes
import psutil
import pyarrow as pa
import pytest
from heard import Heard
from places import Place

import gristmill as gm
from gristmill.commit.publication import success
from gristmill.observe.events import Progress

pytestmark = pytest.mark.leaves_children  # Spark's own; those of gristmill are watched by `leaves_no_worker`


@pytest.fixture(scope="module")
def spark() -> Iterator[Place]:
    """A session on this machine."""
    with places.started("spark") as place:
        yield place


def executors(pid: int) -> list[psutil.Process]:
    """The JVMs that a cluster below a process has its tasks run in."""
    found = psutil.Process(pid).children(recursive=True)
    return [p for p in found if p.name() == "java" and "CoarseGrainedExecutorBackend" in " ".join(p.cmdline())]


@pytest.mark.parametrize("speculation", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["plain", "spark"])
@pytest.mark.long
def test_an_executor_is_killed(speculation: bool, numbers: str, wanted: pa.Table, tmp_path: Path) -> None:
    """One of two executors gets SIGKILL in the middle: the run completes with one receipt a shard, every row once; also
    with speculation on, where it is Spark that tries the lost partitions again.
    """
    root, log, variables = str(tmp_path / "out"), str(tmp_path / "calls"), dict(places.SPARK_ENV)
    variables["SPARK_WORKER_DIR"] = str(tmp_path / "workers")
    conf = {"spark.executor.memory": "512m", "spark.locality.wait": "0"}
    if speculation:
        conf |= {"spark.speculation": "true"}
    engine = {"name": "spark", "workers": 2, "options": {"master": "local-cluster[2,1,512]", "conf": conf}}
    arguments: dict[str, Any] = {"fn": "slow", "args": {"log": log, "seconds": 0.1}, "shard_rows": 20, "batch_rows": 5}
    running = processes.start("jobs:run", variables, source=numbers, sink=root, engine=engine, **arguments)
    try:
        processes.until(lambda: processes.receipts_in(root) >= 3 or running.poll() is not None, 180)
        assert running.poll() is None, running.communicate()
        before = executors(running.pid)
        assert len(before) == 2, before
        before[0].kill()
        printed, _ = running.communicate(timeout=90)
    finally:
        running.kill()
    assert running.returncode == 0, printed
    assert (done := success(root)) is not None and processes.receipts_in(root) == done.shards
    oracles.nothing_lost_nothing_twice(root, list(range(200)))
    oracles.same_values(root, wanted)
    oracles.tidy(root)
    assert processes.gone(before)


@pytest.mark.long
def test_every_task_has_a_copy(
    spark: Place, numbers: str, wanted: pa.Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each shard is scored by two Python workers at once, as with speculation (which needs several hosts, so that the
    copies are put beside the tasks here): one receipt a shard, every row once, the second outcome is not counted.
    """
    from gristmill.engines import spark as engine

    alone = engine._Rounds._stage
    monkeypatch.setattr(
        engine._Rounds, "_stage", lambda self, items: alone(self, [i for i in items if i for _ in range(2)])
    )
    root, log = str(tmp_path / "out"), str(tmp_path / "calls")
    options: dict[str, Any] = {"engine": spark.engine, "shard_rows": 20}
    report = jobs.run(numbers, root, "slow", {"log": log, "seconds": 0.05}, **options)
    assert (report.rows_ok, report.rows_run) == (200, 200)
    assert len(oracles.called(log)) > 300, "hardly a task was run twice, so that nothing is shown"
    assert processes.receipts_in(root) == report.shards
    oracles.same_values(root, wanted)
    oracles.tidy(root)


@pytest.mark.long
def test_spark_gives_up_a_stage(spark: Place, numbers: str, wanted: pa.Table, tmp_path: Path) -> None:
    """A Python worker of Spark dies, which in a local session ends the stage: what is missing is done in another."""
    root, heard = str(tmp_path / "out"), Heard()
    job = gm.Job(
        numbers, gm.model(KillsSpark, marker=str(tmp_path / "killed")), gm.sink(root, keep=["id"]),
        engine=jobs.engine_of(spark.engine), shard_rows=20,
    )  # fmt: skip
    report = job.run(observer=heard)
    assert (report.rows_ok, report.rows_dead) == (200, 0)
    assert any("Spark gave up the stage" in n.text for n in heard.notes)
    assert processes.receipts_in(root) == report.shards
    oracles.nothing_lost_nothing_twice(root, list(range(200)))


class KillsSpark:
    """Kills the process above its own, once: in there a Python worker of Spark."""

    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        if 77 in batch["id"] and not os.path.exists(self.marker):
            open(self.marker, "w").close()
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(60)
        return {"y": batch["x"]}


@pytest.mark.long
def test_one_process_for_many_shards(spark: Place, numbers: str, tmp_path: Path) -> None:
    """The model is loaded once a Python worker of Spark, not once a shard; progress is told while the run goes on."""
    root, heard = str(tmp_path / "out"), Counted()
    model = gm.model(Named, returns={"pid": "int64"})
    report = gm.Job(numbers, model, root, engine=jobs.engine_of(spark.engine), shard_rows=5).run(observer=heard)
    assert report.shards >= 40
    assert len(set(gm.read(root).to_table()["pid"].to_pylist())) <= 3
    assert len(heard.shards) > 3


class Counted(Heard):
    """Also keeps how many shards were done, each time that it was told."""

    def __init__(self) -> None:
        super().__init__()
        self.shards: set[int] = set()

    def progress(self, now: Progress) -> None:
        """Keep the number."""
        self.shards.add(now.shards_done)


class Named:
    """Says which process it is in."""

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        time.sleep(0.05)
        return {"pid": [os.getpid()] * len(batch["id"])}


@pytest.mark.long
def test_a_given_session_stays(spark: Place, numbers: str, tmp_path: Path) -> None:
    """`gm.spark(session=…)` runs in it, with its number of slots, and does not stop it."""
    from pyspark.sql import SparkSession

    session = SparkSession.builder.getOrCreate()
    root = str(tmp_path / "out")
    report = gm.Job(numbers, gm.model(Named), root, engine=gm.spark(session=session)).run()
    assert (report.rows_ok, report.workers, report.engine) == (200, 1, "spark")
    assert session.range(3).count() == 3


def test_what_cannot_be(spark: Place, numbers: str, tmp_path: Path) -> None:
    """Another master than that of the session there is, unknown options, a session with a master: one clear line."""
    job = gm.Job(numbers, gm.model(Named), str(tmp_path / "out"), engine=gm.spark(master="local[7]"))
    with pytest.raises(gm.BadJob, match=r"master is 'local\[7\]', but this process has a session on 'local\[2\]'"):
        job.run()
    with pytest.raises(gm.BadJob, match="engine spark has no option 'mastr': did you mean 'master'"):
        gm.spark(mastr="local")
    with pytest.raises(gm.BadJob, match="a session is given"):
        gm.spark(session=object(), master="local")
