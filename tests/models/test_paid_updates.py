"""Updates of prompts that stop before they publish, over a source that changes: what was paid is paid once."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import gristmill as gm
from batchjobs import PROVIDERS
from batchserver import BatchServer
from gristmill.cli.app import main
from gristmill.errors import BadJob, RunFailed
from llmserver import KEY, ChatServer

pytestmark = pytest.mark.filterwarnings("ignore::gristmill.GristmillWarning")
PRICE = {"input": "1/token", "output": "0/token"}  # four dollars a row


def night(tmp_path: Path, number: int, rows: int = 60) -> None:
    """A source of three files; the first row is another one each night."""
    (tmp_path / "in").mkdir(exist_ok=True)
    texts = [f"night {number} is here", *(f"row {n} is here" for n in range(1, rows))]
    for file in range(3):
        ids = list(range(file * rows // 3, (file + 1) * rows // 3))
        pq.write_table(pa.table({"id": ids, "text": [texts[n] for n in ids]}), tmp_path / "in" / f"{file}.parquet")


def run(tmp_path: Path, shard_rows: int = 10, **more: Any) -> gm.Report:
    limit = {name: more.pop(name) for name in ("batch_timeout",) if name in more}
    model = gm.Prompt("{{ text }}", "m", price=PRICE, max_tokens=5, **more)
    sink = gm.sink(str(tmp_path / "out"), keep=["id"])
    how: dict[str, Any] = {"workers": 1, "shard_rows": shard_rows, "update": {"key": ["id"]}}
    return gm.Job(str(tmp_path / "in"), model, sink, **how, **limit).run()


def texts(tmp_path: Path) -> dict[int, str]:
    found = gm.read(str(tmp_path / "out")).to_table().to_pylist()
    assert gm.verify(str(tmp_path / "out")).ok and len({row["id"] for row in found}) == len(found)
    return {row["id"]: row["answer"] for row in found}


@pytest.mark.parametrize("before", [0, pytest.param(15, marks=pytest.mark.long)], ids=["first", "later"])
def test_a_row_that_is_as_it_was_is_paid_once(chat: ChatServer, tmp_path: Path, before: int) -> None:
    """However many nights stop at max_cost, each over a source with another row."""
    if before:
        night(tmp_path, 0, before)
        run(tmp_path)
    for number in range(1, 6):
        night(tmp_path, number)
        try:
            report = run(tmp_path, max_cost=100.0)
            break
        except RunFailed as e:
            assert "max_cost 100" in str(e)
    answered = chat.told()["answered"]
    assert set(answered.values()) == {1} and len(answered) <= 60 + 5
    assert number in (2, 3) and any("rows that are as they were keep their answers" in note for note in report.notes)
    assert texts(tmp_path) == {0: f"<night {number} is here>", **{n: f"<row {n} is here>" for n in range(1, 60)}}
    night(tmp_path, 9)
    assert run(tmp_path).updated == {"kept": 59, "scored": 1, "gone": 0}
    assert not list((tmp_path / "out").glob("_gristmill/g0001-*"))


def test_files_of_other_names_each_night(chat: ChatServer, tmp_path: Path) -> None:
    """As exports have: what was not committed is found in the shard that is as far on."""
    night(tmp_path, 1)
    with pytest.raises(RunFailed, match="max_cost 100"):
        run(tmp_path, max_cost=100.0)
    for path in (tmp_path / "in").iterdir():
        path.rename(path.with_name(f"{path.stem}-again.parquet"))
    assert run(tmp_path).rows_ok == 60
    assert set(chat.told()["answered"].values()) == {1}


def test_equal_rows_have_an_answer_each(chat: ChatServer, tmp_path: Path) -> None:
    """Without dedupe, an answer of an unfinished run serves one row, whatever shards equal ones are in."""
    (tmp_path / "in").mkdir()
    rows = {"id": list(range(60)), "text": ["the same for all"] * 60}
    pq.write_table(pa.table(rows), tmp_path / "in" / "a.parquet")
    with pytest.raises(RunFailed, match="max_cost 100"):
        run(tmp_path, max_cost=100.0)
    paid = chat.told()["requests"]
    pq.write_table(pa.table({**rows, "id": [*range(59), 100]}), tmp_path / "in" / "a.parquet")
    assert run(tmp_path).rows_ok == 60
    assert 60 <= chat.told()["requests"] <= 61 and paid > 10


@pytest.mark.long
def test_a_restart_drops_what_was_paid_and_says_so(
    chat: ChatServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """All of it, with committed shards; also where another night's run has kept it on."""
    for number in (1, 2):
        night(tmp_path, number, 100)
        with pytest.raises(RunFailed, match="max_cost 100"):
            run(tmp_path, max_cost=100.0)
    asked = chat.told()["requests"]
    model = gm.Prompt("{{ text }}", "m", price=PRICE, max_tokens=5)
    job = gm.Job(str(tmp_path / "in"), model, gm.sink(str(tmp_path / "out"), keep=["id"]), update={"key": ["id"]})
    assert job.run(restart=True).rows_ok == 100
    assert chat.told()["requests"] == asked + 100
    assert re.search(r"is given up, with \d+ answers of an endpoint for \$\d+", capfd.readouterr().err)


@pytest.mark.long
def test_killed_each_night(chat: ChatServer, tmp_path: Path) -> None:
    """What was in flight is asked again; nothing else."""
    chat.set(latency=0.1)
    code = (
        "import gristmill as gm\n"
        "if __name__ == '__main__':\n"
        "    model = gm.Prompt('{{ text }}', 'm', concurrency=4)\n"
        "    sink = gm.sink('out', keep=['id'])\n"
        "    gm.Job('in', model, sink, workers=1, shard_rows=40, update={'key': ['id']}).run()\n"
    )
    (tmp_path / "job.py").write_text(code)
    for number in range(1, 5):
        night(tmp_path, number, 150)
        one = subprocess.Popen([sys.executable, "job.py"], cwd=tmp_path, start_new_session=True)
        until = 25 * number
        while one.poll() is None and sum(chat.told()["answered"].values()) < until:
            time.sleep(0.05)
        if one.poll() is None:
            os.killpg(one.pid, signal.SIGKILL)
        assert one.wait() == -signal.SIGKILL
    night(tmp_path, 5, 150)
    subprocess.run([sys.executable, "job.py"], cwd=tmp_path, check=True)
    assert len(texts(tmp_path)) == 150 and texts(tmp_path)[149] == "<row 149 is here>"
    assert sum(chat.told()["answered"].values()) <= 150 + 5 + 4 * 4  # and at most four rows were in flight


@pytest.mark.few(1)
@pytest.mark.parametrize("provider", PROVIDERS)
def test_batches_under_way_are_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, provider: Any) -> None:
    """By the run over the changed source: only the row that changed is in a new one."""
    with BatchServer(takes=0.2) as server:
        monkeypatch.setenv("OPENAI_API_KEY", KEY)
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        monkeypatch.setenv("ANTHROPIC_API_KEY", KEY)
        monkeypatch.setenv("ANTHROPIC_BASE_URL", server.anthropic)
        night(tmp_path, 1)
        server.set(away="GET batch", retry_after="1000")
        with pytest.raises(RunFailed):
            run(tmp_path, batch_api=provider, batch_timeout=1.0, shard_rows=20)
        server.set(away="", retry_after=None)
        night(tmp_path, 2)
        report = run(tmp_path, batch_api=provider, shard_rows=20)
        told = server.told()
        assert report.rows_ok == 60 and texts(tmp_path)[0] == "<night 2 is here>"
        computed = Counter(told["computed"]) + Counter(told["answered"]) + Counter(told["alone"])
        assert sum(computed.values()) <= 62 and sum(told["batches"]) in (59, 60)


def test_what_a_result_took_is_told_once_it_is_published(
    chat: ChatServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """By the report, in the terminal and as a page, and by status."""
    night(tmp_path, 1)
    gm.prompt(tmp_path / "in", tmp_path / "out", prompt="{{ text }}", model="m", keep=["id"], price=PRICE, workers=0)
    out = str(tmp_path / "out")
    assert gm.status(out)["used"]["cost"] == 240.0
    said = "60 requests, 240 tokens in, 240 out, $240.0000"
    for typed in (["status", out], ["report", out]):
        assert main(typed) == 0 and re.search(rf"asked +{re.escape(said)}", capfd.readouterr().out)
    assert main(["report", out, "-o", str(tmp_path / "page.html")]) == 0
    assert f"Asked: {said}" in (tmp_path / "page.html").read_text()


@pytest.mark.long
def test_new_files_beside_an_unfinished_run_have_no_max_cost_of_their_own(chat: ChatServer, tmp_path: Path) -> None:
    """A command that finishes a plan and then appends spends it once."""
    job: dict[str, Any] = {"prompt": "{{ text }}", "model": "m", "keep": ["id"], "price": PRICE, "max_tokens": 5}
    job |= {"workers": 1, "shard_rows": 10, "on_new_files": "append", "concurrency": 4}

    def asks(**more: Any) -> gm.Report:
        return gm.prompt(str(tmp_path / "in"), str(tmp_path / "out"), **job, **more)

    night(tmp_path, 1)
    with pytest.raises(RunFailed, match="max_cost 160"):
        asks(max_cost=160.0)
    before = chat.told()["requests"]
    ids = list(range(100, 160))
    pq.write_table(pa.table({"id": ids, "text": [f"row {n} is here" for n in ids]}), tmp_path / "in" / "new.parquet")
    with pytest.raises(RunFailed, match=r"max_cost 160: \$1[3-6]\d\.\d+ are spent, and what comes next might cost"):
        asks(max_cost=160.0)
    assert 120 <= 4 * (chat.told()["requests"] - before) <= 160
    assert asks().rows_ok == 120 and chat.told()["requests"] == 120


def test_a_price_without_a_unit_is_told_which(chat: ChatServer) -> None:
    """With the price as it would be written."""
    for price in ({"input": 0.20, "output": "1/1M"}, {"input": "$0.2", "output": "1/1M"}):
        with pytest.raises(BadJob, match=r"without a unit: \$?0\.2/1M is for a million tokens"):
            gm.Prompt("{{ text }}", "m", price=price)  # type: ignore[arg-type]


def refused(tmp_path: Path, ids: range) -> None:
    """A source of rows of which each other one is refused, as long as the server forbids them."""
    (tmp_path / "in").mkdir(exist_ok=True)
    texts = [f"{'bad' if n % 2 else 'row'} {n} is here" for n in ids]
    pq.write_table(pa.table({"id": list(ids), "text": texts}), tmp_path / "in" / f"{ids[0]}.parquet")


def job(tmp_path: Path, update: bool = True, **more: Any) -> gm.Job:
    model = gm.Prompt("{{ text }}", "m", price=PRICE, max_tokens=5, **more)
    how: dict[str, Any] = {"update": {"key": ["id"]}} if update else {}
    how["gates"] = gm.Gates(min_ok=0.0)
    return gm.Job(
        str(tmp_path / "in"), model, gm.sink(str(tmp_path / "out"), keep=["id"]), workers=1, shard_rows=10, **how
    )


@pytest.mark.long
@pytest.mark.parametrize("update", [True, False], ids=["update", "append"])
def test_retry_dead_gives_up_nothing_that_was_paid_for(chat: ChatServer, tmp_path: Path, update: bool) -> None:
    """An unfinished update or append has answers: it is finished first, and then the dead letters are scored."""
    chat.set(forbids="bad")
    refused(tmp_path, range(20))
    job(tmp_path, update).run()
    refused(tmp_path, range(100, 140))
    more: dict[str, Any] = {} if update else {"append": True}
    with pytest.raises(RunFailed, match="max_cost 40"):
        job(tmp_path, update, max_cost=40.0).run(**more)
    with pytest.raises(BadJob, match=r"would be given up, with \d+ answers of an endpoint.*run"):
        gm.retry_dead(job(tmp_path, update))
    chat.set(forbids="")
    job(tmp_path, update).run(**more)
    gm.retry_dead(job(tmp_path, update))
    answered = chat.told()["answered"]
    assert set(answered.values()) == {1} and len(answered) == len(texts(tmp_path)) == 60


@pytest.mark.long
def test_an_update_keeps_what_an_unfinished_retry_was_answered(chat: ChatServer, tmp_path: Path) -> None:
    """Dead rows that it has scored, and committed or not, are not paid for again."""
    chat.set(forbids="bad")
    refused(tmp_path, range(40))
    job(tmp_path).run()
    chat.set(forbids="")
    with pytest.raises(RunFailed, match="max_cost 60"):
        gm.retry_dead(job(tmp_path, max_cost=60.0))
    paid = len(chat.told()["answered"])
    refused(tmp_path, range(100, 102))
    job(tmp_path).run()
    answered = chat.told()["answered"]
    assert paid > 30 and set(answered.values()) == {1} and len(answered) == 42
    assert texts(tmp_path) == {n: f"<{'bad' if n % 2 else 'row'} {n} is here>" for n in [*range(40), 100, 101]}
