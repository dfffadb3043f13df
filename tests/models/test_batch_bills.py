"""Batch APIs: what the provider bills is what is told, whoever takes the answers, and `max_cost` holds for it."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import gristmill as gm
from batchjobs import PROVIDERS, answers, asked, once, table, until
from batchserver import BatchServer
from gristmill.errors import RunFailed
from gristmill.models.bulk import Bulk
from llmserver import KEY

PRICE = {"input": "1/token", "output": "1/token"}  # 8 dollars a row of table()
pytestmark = pytest.mark.filterwarnings("ignore::gristmill.GristmillWarning")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[BatchServer]:
    """A server, its addresses and its key in the environment."""
    with BatchServer(takes=0.2) as running:
        monkeypatch.setenv("OPENAI_API_KEY", KEY)
        monkeypatch.setenv("OPENAI_BASE_URL", running.url)
        monkeypatch.setenv("ANTHROPIC_API_KEY", KEY)
        monkeypatch.setenv("ANTHROPIC_BASE_URL", running.anthropic)
        yield running


def billed(told: dict[str, Any]) -> int:
    """Requests that the server has computed, in batches and alone."""
    return sum(sum(told[how].values()) for how in ("computed", "answered", "alone"))


def repeated(rows: int, texts: int) -> pa.Table:
    return pa.table({"id": range(rows), "text": [f"row {n % texts} is here" for n in range(rows)]})


@pytest.mark.long
@pytest.mark.parametrize("provider", PROVIDERS)
def test_answers_that_no_row_takes_are_told(server: BatchServer, tmp_path: Path, provider: str) -> None:
    """Two shards of equal rows are under way at once; the second has its answers from the first (`cache`)."""
    more: dict[str, Any] = {"cache": str(tmp_path / "kept"), "price": PRICE, "shard_rows": 20, "workers": 1}
    report = asked(repeated(40, 20), tmp_path / "out", provider, **more)
    told = server.told()
    assert report.rows_ok == 40 and max(told["computed"].values()) == 2
    assert report.used["requests"] == billed(told) and report.used["cost"] == 8 * billed(told)


def test_max_cost_holds_for_answers_that_no_row_takes(server: BatchServer, tmp_path: Path) -> None:
    """Shards of equal rows, two at a time: each is paid for."""
    more: dict[str, Any] = {"price": PRICE, "shard_rows": 20, "workers": 1, "concurrency": 2}
    more["cache"] = str(tmp_path / "kept")
    rows = pa.table({"id": range(200), "text": [f"row {n % 20 + 10 * (n // 40)} is here" for n in range(200)]})
    with pytest.raises(RunFailed, match="max_cost 700") as e:
        asked(rows, tmp_path / "out", "openai", max_cost=700.0, max_tokens=5, **more)
    told = server.told()
    assert 8 * billed(told) <= 700
    assert e.value.report is not None and e.value.report.used["cost"] == 8 * billed(told)


@pytest.mark.long
def test_max_cost_holds_where_answers_take_more_than_max_tokens(server: BatchServer, tmp_path: Path) -> None:
    """The row that is asked alone shows it: then only few are under way until it is known what they take."""
    server.set(odd={"usage": {"prompt_tokens": 4, "completion_tokens": 200}})
    rows = pa.table({"id": range(200), "text": [f"odd row {n}" for n in range(200)]})
    price = {"input": "0/token", "output": "1/token"}
    with pytest.raises(RunFailed, match="max_cost 4000"):
        asked(rows, tmp_path / "out", "openai", price=price, max_cost=4000.0, workers=1)
    assert 2000 <= 200 * billed(server.told()) <= 4000


def test_a_batch_of_which_nothing_is_needed_any_more_is_told(server: BatchServer, tmp_path: Path) -> None:
    """Another run has answered all of its rows meanwhile, and these are in the cache."""
    more: dict[str, Any] = {"cache": str(tmp_path / "kept"), "price": PRICE, "workers": 1}
    server.set(away="GET batch", retry_after="1000")
    with pytest.raises(RunFailed):
        asked(table(20), tmp_path / "out", "openai", batch_timeout=2.0, **more)
    server.set(away="", retry_after=None)
    assert (
        gm.prompt(
            table(20), tmp_path / "other", prompt="{{ text }}", model="m", max_tokens=20, keep=["id"], **more
        ).rows_ok
        == 20
    )
    report = asked(table(20), tmp_path / "out", "openai", **more)
    told = server.told()
    assert report.rows_ok == 20 and told["batches"] == [19]
    assert report.used["cost"] == 8 * 20  # the first row and the batch; the other run has its own


@pytest.mark.long
def test_a_batch_of_which_nothing_is_needed_is_not_waited_for(
    server: BatchServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """For longer than a batch_timeout: then it counts as what it may cost."""
    more: dict[str, Any] = {"cache": str(tmp_path / "kept"), "price": PRICE, "workers": 1, "batch_timeout": 2.0}
    server.set(takes=1000)
    server.set(away="GET batch", retry_after="1000")
    with pytest.raises(RunFailed):
        asked(table(20), tmp_path / "out", "openai", **more)
    server.set(away="", retry_after=None)
    gm.prompt(table(20), tmp_path / "other", prompt="{{ text }}", model="m", max_tokens=20, keep=["id"], **more)
    report = asked(table(20), tmp_path / "out", "openai", **more)
    assert report.rows_ok == 20 and 8 + 19 * 20 <= report.used["cost"] <= 8 + 19 * 30
    assert "batch_0: under way at the provider, and not waited for" in capfd.readouterr().err


@pytest.mark.long
def test_answers_in_batches_are_told_as_kept(server: BatchServer, tmp_path: Path) -> None:
    """A run that stops tells all that is paid and kept for the next one, also what that fetches of batches."""
    with pytest.raises(RunFailed, match=r"max_cost 90: \$\d+\.\d+ are spent, and what comes next might cost") as e:
        asked(table(40), tmp_path / "out", "openai", price=PRICE, max_cost=90.0, workers=0)
    assert e.value.report is not None
    used, paid = e.value.report.used, billed(server.told())
    assert (used["kept"], used["batched"]) == (1, paid - 1) and used["cost"] == 8 * paid
    assert f"1 answer kept for the next run, {paid - 1} more in batches at the provider" in str(e.value.report)
    assert asked(table(40), tmp_path / "out", "openai", price=PRICE, workers=0).rows_ok == 40
    assert billed(server.told()) == 40


@pytest.mark.few(2)
@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("lag", ["none", "half", "fewer", "total"])
def test_counts_of_a_moment_ago_are_not_believed(server: BatchServer, tmp_path: Path, provider: str, lag: str) -> None:
    """A batch that is over before its counts and files are: none of its requests is asked, and paid, again."""
    server.set(lag=[lag])
    report = asked(table(20), tmp_path / "out", provider, price=PRICE, workers=0)
    told = server.told()
    assert report.rows_ok == 20 and told["batches"] == [19] and billed(told) == 20
    assert report.used["requests"] == 20 and report.used["cost"] == 8 * 20


@pytest.mark.long
def test_counts_that_stay_behind_end_the_run(server: BatchServer, tmp_path: Path) -> None:
    """After a batch_timeout, resumable; once they are there the next run has the answers."""
    server.set(lag=["half"] * 100)
    with pytest.raises(RunFailed, match="gives 0 of the 19 results that there are: run again"):
        asked(table(20), tmp_path / "out", "openai", price=PRICE, workers=0, batch_timeout=3.0, timeout=3.0)
    server.set(lag=[])
    assert asked(table(20), tmp_path / "out", "openai", price=PRICE, workers=0).rows_ok == 20
    assert billed(server.told()) == 20


@pytest.mark.long
@pytest.mark.parametrize("provider", PROVIDERS)
def test_told_once_over_kills(
    server: BatchServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, provider: str
) -> None:
    """Killed before, while and after results are read, and with equal rows in shards that are under way at once."""
    pq.write_table(repeated(180, 90), tmp_path / "rows.parquet")
    (tmp_path / "job.py").write_text(
        "import gristmill as gm, json, sys\n"
        "if __name__ == '__main__':\n"
        "    report = gm.prompt('rows.parquet', 'out', prompt='{{ text }}', model='m', keep=['id'], max_tokens=20,\n"
        "        batch_api=sys.argv[1], shard_rows=60, dedupe=True,\n"
        "        price={'input': '1/token', 'output': '1/token'})\n"
        "    print(json.dumps(dict(report.used)))\n"
    )
    command = [sys.executable, "job.py", provider]
    told_last: list[str] = []
    for call, after in (("GET batch", 1), ("GET content", 0), ("GET content", 1), ("GET content", 2)):
        if told_last:  # it came to its end before
            break
        server.set(stops=[call, after], reached=False)
        run = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, start_new_session=True)
        until(lambda: server.told()["reached"], run)
        time.sleep(0.3)
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)
        told_last += run.communicate()[0].splitlines()[-1:]
        server.set(stops=[])
    if not told_last:
        told_last = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stdout.splitlines()
    told, used = server.told(), json.loads(told_last[-1])
    assert gm.read(str(tmp_path / "out")).to_table().num_rows == 180
    assert used["requests"] == billed(told) == 90 and used["cost"] == 8 * billed(told)


@pytest.mark.long
@pytest.mark.parametrize("provider", PROVIDERS)
def test_rows_that_nobody_was_asked_for_are_no_dead_letters(server: BatchServer, tmp_path: Path, provider: str) -> None:
    """However many batches were cancelled before their turn."""
    server.set(cancel=3, takes=0.1)
    for _ in range(3):
        with pytest.raises(RunFailed, match="was cancelled"):
            asked(table(40), tmp_path / "out", provider)
    assert asked(table(40), tmp_path / "out", provider).rows_ok == 40
    once(server.told())


@pytest.mark.long
def test_a_batch_whose_results_are_not_there_hides_no_other(server: BatchServer, tmp_path: Path) -> None:
    """A creation that was not answered is found beside another's batch of as many requests, which is gone (404)."""
    server.set(takes=0.1)
    asked(table(20), tmp_path / "before", "anthropic", system="before")
    server.set(lose=1, removed=["msgbatch_0"])
    assert asked(table(20), tmp_path / "out", "anthropic").rows_ok == 20
    assert server.told()["batches"] == [19, 19]


@pytest.mark.long
def test_results_that_would_tell_whose_batch_it_is(server: BatchServer, tmp_path: Path) -> None:
    """They are not there: the run stops, and says so; the next one looks once more, and creates a batch."""
    server.set(takes=0.1)
    asked(table(20), tmp_path / "before", "anthropic", system="before")
    server.set(unheard=1, removed=["msgbatch_0"])
    with pytest.raises(RunFailed, match=r"the results of msgbatch_0 are not there, .* can be told by these alone"):
        asked(table(20), tmp_path / "out", "anthropic", batch_timeout=10.0)
    assert asked(table(20), tmp_path / "out", "anthropic", batch_timeout=10.0).rows_ok == 20
    assert server.told()["batches"] == [19, 18]


@pytest.mark.long
def test_money_goes_as_far_as_it_goes(server: BatchServer, tmp_path: Path) -> None:
    """A shard that might cost more than there is goes in smaller batches, for as long as one request can be paid."""
    more: dict[str, Any] = {"price": PRICE, "workers": 1, "max_tokens": 5}
    server.set(takes=0.1)
    with pytest.raises(RunFailed, match=r"max_cost 500: .* what comes next might cost \$") as e:
        asked(table(300), tmp_path / "out", "openai", max_cost=500.0, **more)
    told = server.told()
    assert 500 - 10 < 8 * billed(told) <= 500
    assert e.value.report is not None and e.value.report.used["cost"] == 8 * billed(told)
    assert asked(table(300), tmp_path / "out", "openai", **more).rows_ok == 300
    once(server.told())


@pytest.mark.long
def test_max_cost_is_of_all_workers_whose_batches_are_under_way(server: BatchServer, tmp_path: Path) -> None:
    """Each claims what it orders, from its first batch on."""
    with pytest.raises(RunFailed, match="max_cost 500"):
        asked(
            table(120), tmp_path / "out", "openai", price=PRICE, workers=2, shard_rows=10, max_tokens=5, concurrency=2,
            max_cost=500.0,
        )  # fmt: skip
    time.sleep(1.0)  # what was sent is computed by then
    assert 8 * billed(server.told()) <= 500


@pytest.mark.long
def test_money_that_is_kept_for_a_batch_under_way_is_waited_for(server: BatchServer, tmp_path: Path) -> None:
    """It may turn out to cost less: the second shard is sent then, if need be in parts."""
    report = asked(
        table(80), tmp_path / "out", "openai", price=PRICE, workers=1, shard_rows=40, max_tokens=20, max_cost=1000.0
    )
    assert report.rows_ok == 80 and report.used["cost"] == 640
    once(server.told())


@pytest.mark.long
def test_a_model_that_goes_in_the_middle_of_a_batch(server: BatchServer, tmp_path: Path) -> None:
    """404 for some rows: one of them is asked alone, and the others again as that is answered."""
    server.set(says=["row 1", 404, "no such model", ""], takes=0.1)
    report = asked(table(20), tmp_path / "out", "openai")
    told = server.told()
    assert report.rows_ok == 20 and told["batches"] == [19, 10]
    once(told)


@pytest.mark.long
def test_a_model_that_was_gone_for_a_while_is_judged_once(server: BatchServer, tmp_path: Path) -> None:
    """By the run that goes on while the others are in a batch: none of them is asked for, and paid, once more."""
    server.set(says=["row 1", 404, "no such model", ""], takes=0.1, waits=True)

    def turn_away() -> None:
        while len(server.told()["batches"]) < 2:
            time.sleep(0.02)
        server.set(away="GET batch", retry_after="1000")

    thread = threading.Thread(target=turn_away)
    thread.start()
    with pytest.raises(RunFailed, match="left alone"):
        asked(table(20), tmp_path / "out", "openai", batch_timeout=2.0, workers=1)
    thread.join()
    server.set(away="", retry_after=None, waits=False)
    report = asked(table(20), tmp_path / "out", "openai", price=PRICE)
    told = server.told()
    assert report.rows_ok == 20 and told["batches"] == [19, 10] and billed(told) == 20
    assert report.used["requests"] == 20
    once(told)


@pytest.mark.long
def test_a_model_that_is_gone_stops_the_run(server: BatchServer, tmp_path: Path) -> None:
    """With the first batch that tells so; no row is a dead letter of it."""
    server.set(takes=4.0)

    def take_away() -> None:
        while not server.told()["asked"].get("GET batch"):
            time.sleep(0.02)
        server.set(turns=[0, 404, 404])

    thread = threading.Thread(target=take_away)
    thread.start()
    with pytest.raises(RunFailed, match=r"refuses the address or the model now: 404"):
        asked(table(20), tmp_path / "out", "openai", workers=1)
    thread.join()
    server.set(turns=[], takes=0.1)
    assert asked(table(20), tmp_path / "out", "openai").rows_ok == 20
    assert server.told()["batches"] == [19, 18]


@pytest.mark.long
def test_somebody_is_asked_alone_before_each_batch_that_is_made_late(
    server: BatchServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a batch may take a day to tell is told at once."""
    monkeypatch.setattr("gristmill.models.provided.PROOF", 0.0)
    report = asked(table(60), tmp_path / "out", "openai", shard_rows=20, workers=0, concurrency=1)
    told = server.told()
    assert report.rows_ok == 60 and sorted(told["batches"]) == [18, 19, 19]
    once(told)


@pytest.mark.long
def test_a_request_that_an_earlier_batch_left_is_found_in_a_later_one(server: BatchServer, tmp_path: Path) -> None:
    """Beside others that were first asked for in that one: runs that end at `max_cost` pay for none of them again."""
    server.set(later=0.3, takes=0.1)
    more: dict[str, Any] = {"price": PRICE, "workers": 1, "max_tokens": 5}
    for _ in range(3):
        with pytest.raises(RunFailed, match="max_cost 150"):
            asked(table(80), tmp_path / "out", "openai", max_cost=150.0, **more)
    report = asked(table(80), tmp_path / "out", "openai", **more)
    told = server.told()
    assert report.rows_ok == 80 == billed(told) == report.used["requests"]
    once(told)


@pytest.mark.few(1)
@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("looks", [1, 2])
def test_a_batch_that_is_not_there_for_a_while_is_counted_by_its_results(
    server: BatchServer, tmp_path: Path, provider: str, looks: int
) -> None:
    """It is there when the next run looks; if it is not then either, what it may cost is counted."""
    server.set(unseen=looks)
    with pytest.raises(RunFailed, match="is no longer there"):
        asked(table(40), tmp_path / "out", provider, price=PRICE)
    report = asked(table(40), tmp_path / "out", provider, price=PRICE)
    told = server.told()
    assert report.rows_ok == 40 and billed(told) == (40 if looks == 1 else 79)
    if looks == 1:
        assert report.used["requests"] == 40 and report.used["cost"] == 8 * 40
    else:
        assert report.used["requests"] == 40 and report.used["cost"] >= 8 * billed(told)


def without(sink: Path, provider: str, **more: Any) -> gm.Report:
    """The same job as `asked` with a table of 40 rows, without a batch API."""
    if provider == "anthropic":
        more["api"] = "messages"
    return gm.prompt(table(40), sink, prompt="{{ text }}", model="m", keep=["id"], max_tokens=20, shard_rows=20, **more)


def left(server: BatchServer, sink: Path, provider: str) -> None:
    """A run that ends while its batches are under way."""
    server.set(away="GET batch", retry_after="1000")
    with pytest.raises(RunFailed, match="left alone"):
        asked(table(40), sink, provider, price=PRICE, batch_timeout=2.0, shard_rows=20, workers=1)
    server.set(away="", retry_after=None)


@pytest.mark.long
@pytest.mark.parametrize("provider", PROVIDERS)
def test_who_goes_on_without_a_batch_api_has_what_batches_were_answered(
    server: BatchServer, tmp_path: Path, provider: str
) -> None:
    """They are over by then: none of their requests is asked, and paid, again, but for those that they left."""
    server.set(expire=1)
    left(server, tmp_path / "out", provider)
    time.sleep(1.0)
    before = server.told()
    report = without(tmp_path / "out", provider, price=PRICE)
    told = server.told()
    assert report.rows_ok == 40 and answers(tmp_path / "out") == {n: f"<row {n} is here>" for n in range(40)}
    assert told["batches"] == before["batches"] and billed(told) == 40
    assert report.used["requests"] == 40 and report.used["cost"] == 8 * 40


@pytest.mark.long
@pytest.mark.parametrize("provider", PROVIDERS)
def test_who_goes_on_without_a_batch_api_waits_for_no_batch(
    server: BatchServer, tmp_path: Path, provider: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """What they may cost is counted, once, and said; their rows are asked one by one."""
    server.set(takes=1000)
    left(server, tmp_path / "out", provider)
    made = sum(server.told()["batches"])
    with pytest.raises(RunFailed, match="max_cost 160"):
        without(tmp_path / "out", provider, price=PRICE, max_cost=160.0, workers=1)
    report = without(tmp_path / "out", provider, price=PRICE)
    assert report.rows_ok == 40 and answers(tmp_path / "out") == {n: f"<row {n} is here>" for n in range(40)}
    assert billed(server.told()) == 40 and 20 * made <= report.used["cost"] - 8 * 40 <= 30 * made
    said = capfd.readouterr().err
    assert "batch_0: under way at the provider, and not waited for without batch_api: what it may cost" in said


def test_who_goes_on_elsewhere_is_told_of_batches_that_are_not_there(
    server: BatchServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """At another address nobody knows them: what they may cost is counted."""
    left(server, tmp_path / "out", "openai")
    made = sum(server.told()["batches"])
    with BatchServer() as other:
        report = without(tmp_path / "out", "openai", price=PRICE, base_url=other.url)
    assert report.rows_ok == 40 and 20 * made <= report.used["cost"] - 8 * 40 <= 30 * made
    assert "(404: No such batch)" in capfd.readouterr().err


@pytest.mark.long
def test_what_is_known_of_a_shard_s_batches_goes_with_it(
    server: BatchServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of many shards, a worker knows the requests of those that are under way."""
    made: list[weakref.ref[Bulk]] = []
    alive: list[int] = []
    begin = Bulk.__init__

    def counted(self: Bulk, *given: Any, **more: Any) -> None:
        gc.collect()
        alive.append(sum(one() is not None for one in made))
        made.append(weakref.ref(self))
        begin(self, *given, **more)

    monkeypatch.setattr(Bulk, "__init__", counted)
    server.set(takes=0.05)
    assert asked(table(60), tmp_path / "out", "openai", shard_rows=6, workers=0, concurrency=2).rows_ok == 60
    assert len(alive) == 10 and max(alive) <= 5
