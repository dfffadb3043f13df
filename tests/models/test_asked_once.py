"""A row costs one request, whatever is wrong with it or with its neighbours: its answer or its refusal is known."""

from __future__ import annotations

import collections
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import gristmill as gm
from llmserver import ChatServer

pytestmark = pytest.mark.filterwarnings("ignore::gristmill.GristmillWarning")


def table(rows: int, odd: Any = "") -> pa.Table:
    """Rows of different texts, some of them with more words."""
    return pa.table({"id": range(rows), "text": [f"row {n} {odd(n) if odd else ''}".strip() for n in range(rows)]})


def prompted(source: Any, sink: Path, **options: Any) -> Any:
    """A run."""
    options = {"prompt": "{{ text }}", "model": "m", "keep": ["id"], "workers": 1, "gates": {"min_ok": 0}, **options}
    return gm.prompt(source, sink, **options)


@pytest.mark.long
def test_a_text_that_no_column_holds_costs_no_other_row(chat: ChatServer, tmp_path: Path) -> None:
    """Half a pair of surrogates, as an answer that was cut may end: its neighbours are not asked again."""
    chat.set(odd={"message": {"role": "assistant", "content": "smile \ud83d"}})
    report = prompted(table(1000, lambda n: "odd" if n == 777 else ""), tmp_path / "out")
    assert (report.rows_ok, report.rows_dead) == (999, 1)
    assert chat.told()["requests"] == 1000


@pytest.mark.long
def test_equal_rows_are_samples_of_their_own(chat: ChatServer, tmp_path: Path) -> None:
    """Also those of other shards, which the first row's answer is none for."""
    rows = pa.table({"id": range(600), "text": ["the same"] * 600})
    prompted(rows, tmp_path / "out", shard_rows=100)
    assert chat.told()["requests"] == 600 == collections.Counter(chat.told()["answered"]).total()


@pytest.mark.long
def test_a_stretch_of_refused_rows_is_refused_once(chat: ChatServer, tmp_path: Path) -> None:
    """Whole shards of them: what is tried beside them, to learn whether the endpoint works, is a handful."""
    report = prompted(table(900, lambda n: "is too long" * (300 <= n < 600)), tmp_path / "out", shard_rows=100)
    assert (report.rows_ok, report.rows_dead) == (600, 300)
    assert 900 <= chat.told()["requests"] <= 960


def told_alike(sink: Path) -> None:
    """Equal prompts have one answer."""
    found = gm.read(sink).to_table().to_pylist()
    told = collections.defaultdict(set)
    for row in found:
        told[row["text"]].add(row["answer"])
    assert {len(some) for some in told.values()} == {1}


@pytest.mark.few(1)
@pytest.mark.parametrize("workers", [1, 3])
def test_equal_prompts_are_asked_once_by_all_workers(chat: ChatServer, tmp_path: Path, workers: int) -> None:
    """Also one that is refused; nothing of it is left once the result is published."""
    chat.set(latency=0.05)
    texts = [f"text {n % 7} {'is too long' * (n % 7 == 3)}" for n in range(2000)]
    rows = pa.table({"id": range(2000), "text": texts})
    report = prompted(
        rows, tmp_path / "out", dedupe=True, shard_rows=200, workers=workers, keep=["id", "text"], concurrency=8
    )
    assert chat.told()["requests"] == 7
    assert report.rows_dead == len([n for n in range(2000) if n % 7 == 3])
    told_alike(tmp_path / "out")
    assert not list((tmp_path / "out").rglob("once"))


@pytest.mark.long
def test_equal_prompts_are_asked_once_over_kills(chat: ChatServer, tmp_path: Path) -> None:
    """But for those that were in flight: what was answered is kept for rows that had no turn yet."""
    chat.set(latency=0.02)
    code = (
        "import pyarrow as pa, gristmill as gm, sys\n"
        "if __name__ == '__main__':\n"
        "    rows = pa.table({'id': range(3000), 'text': [f'text {n % 1500 // 2}' for n in range(3000)]})\n"
        "    gm.prompt(rows, sys.argv[1], prompt='{{ text }}', model='m', keep=['id', 'text'],\n"
        "              workers=2, dedupe=True, shard_rows=500, concurrency=8, gates={'min_ok': 0})\n"
    )
    (tmp_path / "job.py").write_text(code)
    command = [sys.executable, str(tmp_path / "job.py"), str(tmp_path / "out")]
    kills = 0
    for wanted in (100, 300, 500):
        run = subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True)
        until = time.monotonic() + 60
        while chat.told()["requests"] < wanted and run.poll() is None and time.monotonic() < until:
            time.sleep(0.05)
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)
            kills += 1
        run.wait()
    assert subprocess.run(command, stderr=subprocess.DEVNULL).returncode == 0 and kills
    answered = collections.Counter(chat.told()["answered"])
    assert len(answered) == 750 and answered.total() <= 750 + kills * 8
    told_alike(tmp_path / "out")
