"""Batch APIs and equal requests (`dedupe`): in one batch of all shards, and paid once, whoever is killed meanwhile."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import gristmill as gm
from batchjobs import PROVIDERS, answers, asked, once, until
from batchserver import BatchServer
from gristmill.errors import RunFailed
from llmserver import KEY

PRICE = {"input": "1/token", "output": "1/token"}  # 8 dollars a row
pytestmark = pytest.mark.filterwarnings("ignore::gristmill.GristmillWarning")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[BatchServer]:
    """A server, its addresses and its key in the environment."""
    with BatchServer(takes=0.5) as running:
        monkeypatch.setenv("OPENAI_API_KEY", KEY)
        monkeypatch.setenv("OPENAI_BASE_URL", running.url)
        monkeypatch.setenv("ANTHROPIC_API_KEY", KEY)
        monkeypatch.setenv("ANTHROPIC_BASE_URL", running.anthropic)
        yield running


def overlapping(shards: int, rows: int) -> pa.Table:
    """Rows of shards of which each has half of the texts of the one before it."""
    places = [shard * (rows // 2) + n for shard in range(shards) for n in range(rows)]
    return pa.table({"id": range(shards * rows), "text": [f"row {place} is here" for place in places]})


def billed(told: dict[str, Any]) -> int:
    """Requests that the server has computed, in batches and alone."""
    return sum(sum(told[how].values()) for how in ("computed", "answered", "alone"))


def looked_at(server: BatchServer, batches: int, looks: int) -> bool:
    """Whether so many batches are there, and have been looked at more often than that."""
    told = server.told()
    return len(told["batches"]) >= batches and told["asked"].get("GET batch", 0) > looks


def command_of(rows: str, sink: str, provider: str, workers: int) -> list[str]:
    """A job of shards of 20 rows."""
    return [
        sys.executable, "-m", "gristmill", "prompt", rows, sink, "--prompt", "{{ text }}",
        "--model", "m", "--keep", "id", "--batch-api", provider, "--max-tokens", "20", "--dedupe",
        "--set", "running.shard_rows=20", "--workers", str(workers), "--progress", "off",
    ]  # fmt: skip


@pytest.mark.few(1)
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("provider", PROVIDERS)
def test_equal_requests_of_shards_under_way_are_sent_once(
    server: BatchServer, tmp_path: Path, provider: str, workers: int
) -> None:
    """The later shard waits for the batch of the other one."""
    rows = overlapping(4, 20)
    report = asked(rows, tmp_path / "out", provider, dedupe=True, price=PRICE, shard_rows=20, workers=workers)
    told = server.told()
    once(told)
    assert report.rows_ok == 80 and billed(told) == 50 == report.used["requests"] and report.used["cost"] == 8 * 50
    texts = dict(zip(rows["id"].to_pylist(), rows["text"].to_pylist(), strict=True))
    assert answers(tmp_path / "out") == {n: f"<{text}>" for n, text in texts.items()}


@pytest.mark.long
@pytest.mark.parametrize("provider", PROVIDERS)
def test_what_one_batch_left_is_asked_again_once(server: BatchServer, tmp_path: Path, provider: str) -> None:
    """By whichever shard: half of the first two batches expires, some fail for now, some have no answer at first."""
    server.set(expire=2, later=0.1, gone=0.1)
    report = asked(overlapping(4, 20), tmp_path / "out", provider, dedupe=True, price=PRICE, shard_rows=20, workers=2)
    told = server.told()
    once(told)
    assert report.rows_ok == 80 and billed(told) == 50 == report.used["requests"]


POINTS = [("POST files", 1), ("POST batches", 0), ("created", 0), ("created", 1), ("GET batch", 2), ("GET content", 1)]


@pytest.mark.long
@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("worker", [False, True])
def test_equal_requests_are_paid_once_over_kills(
    server: BatchServer, tmp_path: Path, provider: str, worker: bool
) -> None:
    """The driver with all that it started, or both workers, at every point."""
    for number, (call, after) in enumerate(POINTS):
        if (provider, call) == ("anthropic", "POST files"):
            continue
        rows = overlapping(4, 20)
        texts = [f"{number} {text}" for text in rows["text"].to_pylist()]
        pq.write_table(rows.set_column(1, "text", pa.array(texts)), tmp_path / f"rows{number}.parquet")
        server.set(stops=[call, after], reached=False, takes=0.3)
        before, sink = billed(server.told()), f"out{number}"
        command = command_of(f"rows{number}.parquet", sink, provider, 2)
        run = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, start_new_session=True)
        until(lambda: server.told()["reached"], run)
        assert server.told()["reached"], (call, after, run.communicate())
        time.sleep(0.3)  # what others were doing
        if worker:
            for process in [p for p in psutil.Process(run.pid).children(recursive=True) if not p.children()]:
                process.kill()
        else:
            os.killpg(run.pid, signal.SIGKILL)
            run.communicate()
            run = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
        _, said = run.communicate(timeout=100)
        assert run.returncode == 0, (call, after, said)
        assert answers(tmp_path / sink) == {n: f"<{text}>" for n, text in enumerate(texts)}
        told = server.told()
        twice = [json.loads(body)["messages"][0]["content"] for body, n in told["computed"].items() if n > 1]
        assert not twice, (call, after, twice)
        assert billed(told) - before == 50, (call, after)


@pytest.mark.few(1)
@pytest.mark.parametrize(("provider", "kills"), [("openai", [2]), ("anthropic", [1, 2])])
def test_a_second_batch_of_an_equal_shard_is_waited_for(
    server: BatchServer, tmp_path: Path, provider: str, kills: list[int]
) -> None:
    """The first one expires half answered, and what it left is in another one, or was asked alone; the driver is
    killed, with all that it started, while the second is under way, or either.
    """
    texts = [f"row {n} is here" for n in range(20)] * 2
    pq.write_table(pa.table({"id": range(40), "text": texts}), tmp_path / "rows.parquet")
    server.set(expire=1, waits=True)
    command, looks = command_of("rows.parquet", "out", provider, 1), 0
    for batches in kills:
        run = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, start_new_session=True)
        until(functools.partial(looked_at, server, batches, looks), run)
        time.sleep(0.5)  # what it notes of that
        os.killpg(run.pid, signal.SIGKILL)
        run.communicate()
        time.sleep(1.0)
        looks = server.told()["asked"]["GET batch"] + 3
    assert len(server.told()["batches"]) == 2
    run = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    until(lambda: looked_at(server, 3, 0) or looked_at(server, 2, looks + 6), run)
    server.set(waits=False)
    _, said = run.communicate(timeout=100)
    assert run.returncode == 0, said
    assert answers(tmp_path / "out") == {n: f"<{text}>" for n, text in enumerate(texts)}
    once(server.told())
    assert billed(server.told()) == 20


@pytest.mark.few(1)
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("provider", PROVIDERS)
def test_what_a_cancelled_batch_answered_is_not_paid_by_equal_shards(
    server: BatchServer, tmp_path: Path, provider: str, workers: int
) -> None:
    """Neither in the run that it ends, in which no other batch is made, nor in the next one, which is told late."""
    server.set(cancel=1)
    rows = pa.table({"id": range(80), "text": [f"row {n} is here" for n in range(20)] * 4})
    more = {"dedupe": True, "price": PRICE, "shard_rows": 20, "workers": workers}
    with pytest.raises(gm.RunFailed, match="was cancelled at the provider"):
        asked(rows, tmp_path / "out", provider, **more)
    assert len(server.told()["batches"]) == 1
    server.set(late=3)
    report = asked(rows, tmp_path / "out", provider, **more)
    assert report.rows_ok == 80 and billed(server.told()) == 20 == report.used["requests"]
    once(server.told())


@pytest.mark.long
def test_a_shard_whose_rows_are_dead_letters_holds_no_other_up(server: BatchServer, tmp_path: Path) -> None:
    """What a batch refuses is refused for equal rows of others, too, and asked for once."""
    server.set(takes=0.2, says=["row 15", 400, "Not this one", ""])
    report = asked(overlapping(2, 20), tmp_path / "out", "openai", dedupe=True, shard_rows=20, gates={"min_ok": 0})
    told = server.told()
    assert (report.rows_ok, report.rows_dead) in ((38, 2), (39, 1))
    once(told)
    assert {letter["message"] for letter in gm.dead(str(tmp_path / "out")).to_pylist()} == {"400: Not this one"}


@pytest.mark.few(1)
@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.long)])
def test_equal_requests_of_batches_that_another_shard_inherits(
    server: BatchServer, tmp_path: Path, workers: int
) -> None:
    """An update over a changed source goes on with the batches of a run that it gives up, in whichever shard."""
    (tmp_path / "in").mkdir()
    server.set(takes=0.2)

    def run(first: str, **how: Any) -> gm.Report:
        texts = [first, *(f"row {n % 20} is here" for n in range(1, 60))]
        pq.write_table(pa.table({"id": range(60), "text": texts}), tmp_path / "in" / "a.parquet")
        model = gm.Prompt("{{ text }}", "m", max_tokens=5, batch_api="openai", dedupe=True)
        sink = gm.sink(str(tmp_path / "out"), keep=["id"])
        update: Any = {"key": ["id"]}
        return gm.Job(str(tmp_path / "in"), model, sink, workers=workers, shard_rows=20, update=update, **how).run()

    server.set(away="GET batch", retry_after="1000")
    with pytest.raises(RunFailed):
        run("row 0 is here", batch_timeout=1.0)
    server.set(away="", retry_after=None)
    assert run("changed is here").rows_ok == 60
    told = server.told()  # the first row of all is asked alone, before there are shards, and its answer is its own
    assert billed(told) <= 22 and told["batches"] == [19, 1]
    found = gm.read(str(tmp_path / "out")).to_table().to_pylist()
    want = {n: f"<row {n % 20} is here>" for n in range(1, 60)}
    assert {row["id"]: row["answer"] for row in found} == {0: "<changed is here>", **want}
