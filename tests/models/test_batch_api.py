"""Batch APIs of providers: every row answered once and paid once, whatever they do and whoever is killed meanwhile."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import gristmill as gm
from batchjobs import PROVIDERS, answers, asked, once, table, until
from batchserver import BatchServer
from gristmill.errors import BadJob, BadModel, RunFailed
from gristmill.job.secret import Secret
from gristmill.models.desk import Desk
from gristmill.observe.events import Progress, Silent
from llmserver import KEY

pytestmark = pytest.mark.filterwarnings("ignore::gristmill.GristmillWarning")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[BatchServer]:
    """A server, its addresses and its key in the environment."""
    with BatchServer() as running:
        monkeypatch.setenv("OPENAI_API_KEY", KEY)
        monkeypatch.setenv("OPENAI_BASE_URL", running.url)
        monkeypatch.setenv("ANTHROPIC_API_KEY", KEY)
        monkeypatch.setenv("ANTHROPIC_BASE_URL", running.anthropic)
        yield running


class Shown(Silent):
    """An observer that keeps what is waited for."""

    def __init__(self) -> None:
        self.waits: list[str] = []

    def progress(self, now: Progress) -> None:
        """See Observer."""
        if now.waiting and now.waiting not in self.waits:
            self.waits.append(now.waiting)


@pytest.mark.few(1)
@pytest.mark.parametrize("provider", PROVIDERS)
def test_every_row_has_its_answer(server: BatchServer, tmp_path: Path, provider: str) -> None:
    """A batch for each shard but for the first row, which is asked alone; results come in any order."""
    shown = Shown()
    price = {"input": "1/token", "output": "2/token"}
    report = asked(table(300), tmp_path / "out", provider, shard_rows=100, price=price, observer=shown, keep_usage=True)
    assert report.rows_ok == 300 and answers(tmp_path / "out") == {n: f"<row {n} is here>" for n in range(300)}
    told = server.told()
    assert sorted(told["batches"]) == [99, 100, 100]
    once(told)
    assert report.used["requests"] == 300 and report.used["cost"] == 300 * 4 * 3
    assert any("batch_" in wait and " of 99 done, 2 more shards after it" in wait for wait in shown.waits), shown.waits
    row = gm.read(str(tmp_path / "out")).to_table().to_pylist()[200]
    assert (row["answer_prompt_tokens"], row["answer_completion_tokens"], row["answer_finish_reason"]) == (4, 4, "stop")
    assert not list((tmp_path / "out").glob("_gristmill/*/journal/*"))


@pytest.mark.long
@pytest.mark.parametrize("provider", PROVIDERS)
def test_what_fails_for_now_is_asked_again(server: BatchServer, tmp_path: Path, provider: str) -> None:
    """In another batch: 429 and 500, what nobody answered, and what an expired batch left."""
    server.set(later=0.1, gone=0.1, expire=1, takes=0.1)
    rows = table(150).set_column(1, "text", pa.array(["too long" if n % 50 == 49 else f"row {n}" for n in range(150)]))
    report = asked(rows, tmp_path / "out", provider, gates={"min_ok": 0})
    told = server.told()
    once(told)
    assert (report.rows_ok, report.rows_dead) == (147, 3)
    assert len(told["batches"]) == 3 and told["batches"][0] == 149
    letters = gm.dead(str(tmp_path / "out")).to_pylist()
    assert {letter["message"] for letter in letters} == {"400: This model's maximum context length is 8 tokens"}


@pytest.mark.long
@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_provider_that_works_now_and_then(server: BatchServer, tmp_path: Path, provider: str) -> None:
    """429, 500, 503 and cut connections at every call; batches whose creation is not answered are found again."""
    server.set(flaky=0.25, lose=1, takes=0.2)
    report = asked(table(100), tmp_path / "out", provider, shard_rows=50, concurrency=2, batch_timeout=20.0)
    told = server.told()
    once(told)
    assert report.rows_ok == 100 and len(told["batches"]) == 2


@pytest.mark.long
@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_creation_without_an_answer(server: BatchServer, tmp_path: Path, provider: str) -> None:
    """It is looked for before it is created again: one was made, or none."""
    server.set(lose=1, takes=0.2)
    assert asked(table(40), tmp_path / "a", provider).rows_ok == 40
    assert server.told()["batches"] == [39]
    server.set(unheard=1)
    assert asked(table(50), tmp_path / "b", provider, system="b", batch_timeout=10.0).rows_ok == 50
    assert server.told()["batches"] == [39, 49]
    once(server.told())


def typed(provider: str, *more: str) -> list[str]:
    """The command that the tests of kills run."""
    return [
        sys.executable, "-m", "gristmill", "prompt", "rows.parquet", "out", "--prompt", "{{ text }}", "--model", "m",
        "--keep", "id", "--batch-api", provider, "--max-tokens", "20", "--set", "running.shard_rows=60", *more,
    ]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_creation_that_is_obeyed_late(
    server: BatchServer, tmp_path: Path, provider: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """A proxy has given up waiting for it (504): it is waited for, which is said, and not created twice."""
    server.set(slowly=12.0, takes=4.0)
    assert asked(table(40), tmp_path / "out", provider).rows_ok == 40
    assert server.told()["batches"] == [39]
    assert "was not answered (504: Gateway Time-out): it is looked for at the provider for" in capfd.readouterr().err


@pytest.mark.long
@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_creation_that_is_obeyed_after_it_was_repeated(
    server: BatchServer, tmp_path: Path, provider: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """What the other batch takes is told; it is cancelled where it can be told by then from those of others."""
    server.set(slowly=13.0, takes=4.0)
    price = {"input": "1/token", "output": "1/token"}
    report = asked(table(40), tmp_path / "out", provider, batch_timeout=6.0, price=price)
    told = server.told()
    assert report.rows_ok == 40 and told["batches"] == [39, 39]
    billed = sum(sum(told[how].values()) for how in ("computed", "answered", "alone"))
    assert report.used["requests"] == billed and report.used["cost"] == 8 * billed
    assert told["asked"].get("POST cancel", 0) == (provider == "openai")
    said = capfd.readouterr().err.replace("msg", "")
    assert "the same requests as batch" in said
    if provider == "anthropic":  # whose batches nothing tells from those of others before they are over
        assert "cancel it at the provider" in said


POINTS = [("POST files", 0), ("POST batches", 0), ("created", 0), ("created", 1), ("GET batch", 2), ("GET content", 1)]


@pytest.mark.long
@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("worker", [False, True])
def test_killed_at_every_point(server: BatchServer, tmp_path: Path, provider: str, worker: bool) -> None:
    """The driver with all that it started, or one worker: the batches that are under way are those that are waited for
    afterwards.
    """
    pq.write_table(table(180), tmp_path / "rows.parquet")
    for number, (call, after) in enumerate(POINTS):
        if (provider, call) == ("anthropic", "POST files"):
            continue
        server.set(stops=[call, after], reached=False, takes=0.2)
        sink, seen = f"out{number}", len(server.told()["batches"])
        command = [sink if word == "out" else word for word in typed(provider, "--system", f"{number}")]
        run = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
        until(lambda: server.told()["reached"], run)
        assert server.told()["reached"], (call, after, run.communicate())
        time.sleep(0.3)  # what others were doing
        children = psutil.Process(run.pid).children(recursive=True)
        for process in children if worker else [*children, psutil.Process(run.pid)]:
            process.kill()
        if not worker:
            run.communicate()
            run = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
        _, said = run.communicate(timeout=100)
        assert run.returncode == 0, (call, after, said)
        assert answers(tmp_path / sink) == {n: f"<row {n} is here>" for n in range(180)}
        once(server.told())
        made = server.told()["batches"][seen:]  # before which each worker that goes on may ask one request alone
        assert len(made) == 3 and 177 <= sum(made) <= 179, (call, after, made)


@pytest.mark.parametrize("worker", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.long
def test_the_manner_of_a_batch_under_way_is_kept(server: BatchServer, tmp_path: Path, worker: bool) -> None:
    """At an endpoint that wants requests in another form than they have at first: whoever goes on after a kill asks
    for none alone that is in the batch.
    """
    server.set(takes=0.2, waits=True, newer=True)
    pq.write_table(table(60), tmp_path / "rows.parquet")
    command = typed("openai", "--set", "running.shard_rows=30", "--workers", "1", "--progress", "off")
    run = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)

    def half() -> bool:
        receipts = (tmp_path / "out").glob("_gristmill/g*/receipts/*")
        return len(server.told()["batches"]) == 2 and any(not path.name.endswith("tmp") for path in receipts)

    until(half, run)
    before = server.told()
    assert before["statuses_of"] == ["ended", "going"]
    children = psutil.Process(run.pid).children(recursive=True)
    for process in children if worker else [*children, psutil.Process(run.pid)]:
        process.kill()
    if not worker:
        run.communicate()
        run = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    looks = before["asked"]["GET batch"]
    until(lambda: server.told()["asked"]["GET batch"] > looks + 1, run)
    server.set(waits=False)
    _, said = run.communicate(timeout=100)
    assert run.returncode == 0, said
    assert answers(tmp_path / "out") == {n: f"<row {n} is here>" for n in range(60)}
    told = server.told()
    assert told["batches"] == before["batches"] and told["answered"] == before["answered"]


@pytest.mark.long
@pytest.mark.parametrize("provider", PROVIDERS)
def test_stopped_while_it_waits(server: BatchServer, tmp_path: Path, provider: str) -> None:
    """Out at once; `status` says what is waited for; the next run fetches what the batch was answered meanwhile."""
    server.set(takes=6)
    pq.write_table(table(60), tmp_path / "rows.parquet")
    run = subprocess.Popen(typed(provider), cwd=tmp_path, stderr=subprocess.DEVNULL)

    def waits() -> bool:
        if not (tmp_path / "out").exists():
            return False
        state = gm.status(tmp_path / "out")
        return "batch_0: 0 of 59 done" in str(state)

    until(waits, run)
    assert waits()
    begun = time.monotonic()
    run.send_signal(signal.SIGTERM)
    assert run.wait(20) == 143 and time.monotonic() - begun < 12
    begun = time.monotonic()
    assert subprocess.run(typed(provider), cwd=tmp_path, stderr=subprocess.DEVNULL).returncode == 0
    once(server.told())
    assert server.told()["batches"] == [59] and answers(tmp_path / "out").keys() == set(range(60))


@pytest.mark.long
@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--batch-api", "openai", "--restart"], "are left to it, which may charge for them: batch_0;"),
        ([], "batch_0: under way at the provider, and not waited for without batch_api"),
    ],
)
def test_batches_that_nobody_waits_for_are_told(
    server: BatchServer, tmp_path: Path, more: list[str], said: str
) -> None:
    """They are left to the provider, by name: by a restart, and by who goes on without them."""
    pq.write_table(table(60), tmp_path / "rows.parquet")
    server.set(takes=60)
    run = subprocess.Popen(typed("openai"), cwd=tmp_path, stderr=subprocess.DEVNULL)
    until(lambda: server.told()["asked"].get("GET batch"), run)
    run.send_signal(signal.SIGINT)
    run.wait(20)
    server.set(takes=0.1)
    command = [word for word in typed("openai") if word not in ("--batch-api", "openai")]
    again = subprocess.run([*command, *more], cwd=tmp_path, capture_output=True, text=True)
    assert again.returncode == 0 and said in again.stderr, again.stderr
    assert answers(tmp_path / "out") == {n: f"<row {n} is here>" for n in range(60)}


@pytest.mark.long
def test_longer_than_a_call_may_take(server: BatchServer, tmp_path: Path) -> None:
    """To wait for a batch is no hang."""
    server.set(takes=6)
    assert asked(table(30), tmp_path / "out", "openai", batch_timeout=1.0, workers=1).rows_ok == 30
    assert server.told()["batches"] == [29]


@pytest.mark.long
@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_cancelled_batch_stops_the_run_once(server: BatchServer, tmp_path: Path, provider: str) -> None:
    """Somebody wanted that; what it was answered is kept, and the next run asks for the rest, for one row of it alone
    at first, in case that the model was the reason.
    """
    server.set(cancel=1, takes=0.2)
    with pytest.raises(RunFailed, match=r"batch_0 was cancelled at the provider, with 20 requests unanswered"):
        asked(table(40), tmp_path / "out", provider)
    assert asked(table(40), tmp_path / "out", provider).rows_ok == 40
    assert server.told()["batches"] == [39, 19]
    once(server.told())


@pytest.mark.long
def test_a_batch_that_is_refused_stops_the_run(server: BatchServer, tmp_path: Path) -> None:
    """In the provider's words; the next run creates another. One that is too much is cut."""
    server.set(fails="invalid_json_line", takes=0.2)
    with pytest.raises(RunFailed, match="batch batch_0 was refused: invalid_json_line!"):
        asked(table(40), tmp_path / "out", "openai")
    assert asked(table(40), tmp_path / "out", "openai").rows_ok == 40
    assert server.told()["batches"] == [39, 38]  # who goes on asks one request alone, before a new batch
    server.set(holds=40)
    report = gm.prompt(table(61), tmp_path / "b", prompt="b {{ text }}", model="m", keep=["id"], batch_api="openai")
    assert report.rows_ok == 61 and server.told()["batches"][-3:] == [60, 30, 30]
    once(server.told())


@pytest.mark.long
@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_key_that_is_refused_is_told_at_once(
    server: BatchServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, provider: str
) -> None:
    """Before there is a batch, and while one is waited for; its shard goes on with the right key."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-wrong")
    monkeypatch.setenv("ANTHROPIC_API_KEY", "sk-wrong")
    with pytest.raises(gm.GristmillError, match="refuses the key: 401: Incorrect API key"):
        asked(table(40), tmp_path / "out", provider)
    assert server.told()["batches"] == []
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("ANTHROPIC_API_KEY", KEY)
    server.set(takes=4)

    def withdraw() -> None:
        while not server.told()["asked"].get("GET batch"):
            time.sleep(0.02)
        server.set(key="sk-another")

    thread = threading.Thread(target=withdraw)
    thread.start()
    with pytest.raises(RunFailed, match="the provider refuses the key: 401"):
        asked(table(40), tmp_path / "out", provider)
    thread.join()
    server.set(key=KEY)
    assert asked(table(40), tmp_path / "out", provider).rows_ok == 40
    once(server.told())


@pytest.mark.few(1)
@pytest.mark.parametrize("provider", PROVIDERS)
def test_an_answer_that_does_not_fit_is_asked_for_once_more_alone(
    server: BatchServer, tmp_path: Path, provider: str
) -> None:
    """At once, in the ordinary form: few rows do not wait for another batch."""
    server.set(answer="second", takes=0.2)
    report = asked(table(30), tmp_path / "out", provider, returns={"n": "int64", "word": "string"})
    told = server.told()
    found = gm.read(str(tmp_path / "out")).to_table().to_pylist()
    assert report.rows_ok == 30 and {row["word"] for row in found} == {"That"}  # of what it was told
    assert told["batches"] == [29] and report.used["requests"] == 60
    once(told)


@pytest.mark.long
def test_what_it_may_cost_is_held_before_a_batch_is_made(server: BatchServer, tmp_path: Path) -> None:
    """As what requests cost so far, for all of them."""
    price = {"input": "1/token", "output": "1/token"}  # 8 dollars a row
    server.set(takes=0.2)
    with pytest.raises(RunFailed, match="max_cost 1000"):
        asked(table(300), tmp_path / "out", "openai", shard_rows=100, price=price, max_cost=1000.0)
    assert 8 + sum(server.told()["batches"]) * 8 <= 1000
    assert asked(table(300), tmp_path / "out", "openai", shard_rows=100, price=price).rows_ok == 300
    once(server.told())


@pytest.mark.long
def test_equal_requests_and_answers_from_before(server: BatchServer, tmp_path: Path) -> None:
    """Are in no batch, if that is asked for; else each row has its own answer."""
    rows = pa.table({"id": range(60), "text": [f"text {n % 5}" for n in range(60)]})
    server.set(takes=0.2)
    assert asked(rows, tmp_path / "a", "openai", dedupe=True, cache=str(tmp_path / "kept")).rows_ok == 60
    assert server.told()["batches"] == [4] and server.told()["requests"] == 1
    assert asked(rows, tmp_path / "b", "openai", cache=str(tmp_path / "kept")).rows_ok == 60
    assert server.told()["batches"] == [4] and server.told()["requests"] == 1
    assert asked(rows, tmp_path / "c", "openai", system="c").rows_ok == 60
    # The answer to the first row is journalled, and another row is equal.
    assert server.told()["batches"] == [4, 58] and max(server.told()["computed"].values()) > 1
    rows = pa.table({"id": range(60), "text": [f"text {n % 30}" for n in range(60)]})
    assert asked(rows, tmp_path / "d", "openai", system="d", dedupe=True).rows_ok == 60
    assert server.told()["batches"] == [4, 58, 29]


@pytest.mark.long
def test_what_an_earlier_run_was_answered_is_in_no_batch(server: BatchServer, tmp_path: Path) -> None:
    """Also not for the rows that are equal to those, if equal ones are asked once."""
    rows = pa.table({"id": range(20), "text": [f"text {n % 5}" for n in range(20)]})
    server.set(takes=0.2)
    price = {"input": "1/token", "output": "0/token"}  # about 2 dollars a row
    with pytest.raises(RunFailed, match="max_cost 5"):
        asked(rows, tmp_path / "out", "openai", dedupe=True, price=price, max_cost=5.0)
    assert server.told()["requests"] == 1
    assert asked(rows, tmp_path / "out", "openai", dedupe=True, price=price).rows_ok == 20
    assert sum(server.told()["batches"]) + server.told()["requests"] == 5


def test_a_request_that_is_no_json_is_in_no_batch(server: BatchServer, tmp_path: Path) -> None:
    """A number that JSON has no word for, as 1e400 becomes: its own error, alone; the others are answered."""
    server.set(takes=0.2)
    bodies = [f'{{"messages": [{{"role": "user", "content": "hello {n}"}}]}}' for n in range(20)]
    bodies[7] = bodies[7][:-1] + ', "temperature": 1e400}'
    head = '{"custom_id": "r%d", "method": "POST", "url": "/v1/chat/completions", "body": '
    (tmp_path / "in.jsonl").write_text("\n".join(head % n + body + "}" for n, body in enumerate(bodies)))
    gm.run_batch(str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl"), model="m", batch_api="openai")
    told = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [line["custom_id"] for line in told] == [f"r{n}" for n in range(20)]
    failed = [line["custom_id"] for line in told if (line["response"] or {}).get("status_code") != 200]
    assert set(failed) <= {"r7"}
    assert (sum(server.told()["batches"]), server.told()["requests"]) == (18, 2)  # the first one and that one are alone


def test_requests_that_are_there(server: BatchServer, tmp_path: Path) -> None:
    """A batch for each form that they have; those that no batch takes are sent."""
    server.set(takes=0.2)
    lines = []
    for n in range(60):
        url, body = "/v1/chat/completions", {"messages": [{"role": "user", "content": f"hello {n}"}]}
        if n % 3 == 1:
            url, body = "/v1/embeddings", {"input": f"hello {n}"}
        if n % 20 == 19:
            url, body = "/v1/score", {"text_1": f"hello {n}", "text_2": "b"}
        lines.append(json.dumps({"custom_id": f"r{n}", "method": "POST", "url": url, "body": body}))
    (tmp_path / "in.jsonl").write_text("\n".join([*lines, "nonsense"]))
    gm.run_batch(str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl"), model="m", batch_api="openai")
    found = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [one["response"]["status_code"] for one in found] == [200] * 60 + [400]
    assert [one["custom_id"] for one in found[:60]] == [f"r{n}" for n in range(60)]
    told = server.told()
    once(told)
    assert len(told["batches"]) == 2 and sum(told["batches"]) == 60 - 1 - 3


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"batch_api": "anthropic"}, "max_tokens is missing"),
        ({"batch_api": "anthropic", "max_tokens": 5, "api": "responses"}, "takes messages"),
        ({"batch_api": "openai", "max_tokens": 5, "api": "messages"}, "takes chat, completions, responses"),
        ({"batch_api": "open"}, "batch_api"),
        ({"batch_api": "openai", "base_url": "http://a/v1,http://b/v1"}, "base_url has several addresses"),
    ],
)
def test_options_that_do_not_go_together(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    """Are said before anything is asked."""
    with pytest.raises(BadJob if "base_url" not in options else gm.GristmillError, match=said):
        gm.prompt(table(3), tmp_path / "out", prompt="{{ text }}", model="m", **options)


def test_messages_without_a_batch(server: BatchServer, tmp_path: Path) -> None:
    """Anthropic's form by itself: system apart, images, reasoning, and the key in its own header."""
    rows = pa.table({"id": [0, 1], "text": ["a", "b"], "picture": [b"\x89PNG\r\n\x1a\n1"] * 2})
    ask = gm.Prompt(
        "{{ text }}", "m", api="messages", max_tokens=5, system="Be brief.", images=["picture"], keep_reasoning=True,
        examples=[{"text": "x", "picture": None, "answer": "y"}],
    )  # fmt: skip
    gm.Job(rows, ask, gm.sink(str(tmp_path / "out"), keep=["id"]), workers=0).run()
    found = gm.read(str(tmp_path / "out")).to_table().to_pylist()
    assert [(row["answer"], row["answer_reasoning"]) for row in found] == [("<a|image>", "hm"), ("<b|image>", "hm")]
    body = server.told()["bodies"][0]
    assert body["system"] == "Be brief." and body["max_tokens"] == 5 and len(body["messages"]) == 3
    source = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgox"}
    assert body["messages"][2]["content"][1] == {"type": "image", "source": source}


def lethal(row: dict[str, Any]) -> str:
    """Kills the process, at some row."""
    if row["id"] == 47:
        os.kill(os.getpid(), signal.SIGSEGV)
    return str(row["text"])


@pytest.mark.long
def test_a_row_that_kills_its_worker_is_a_dead_letter_alone(server: BatchServer, tmp_path: Path) -> None:
    """While requests are made of rows, before any of them is sent; nothing is paid twice."""
    server.set(takes=0.2)
    report = gm.prompt(
        table(180), tmp_path / "out", messages=lethal, model="m", keep=["id"], batch_api="openai", shard_rows=60,
        gates={"min_ok": 0.9}, workers=1,
    )  # fmt: skip
    once(server.told())
    assert report.rows_ok == 179 and report.rows_dead == 1
    assert server.told()["answered"].keys() | {
        json.loads(body)["messages"][0]["content"] for body in server.told()["computed"]
    } == {f"row {n} is here" for n in range(180) if n != 47}


@pytest.mark.long
@pytest.mark.parametrize("provider", PROVIDERS)
def test_lines_that_cannot_be_read_cost_no_other_row(server: BatchServer, tmp_path: Path, provider: str) -> None:
    """Their requests are in another batch, as if nothing had been said of them; so are looks that tell of no state."""
    server.set(garbled=1, mum=2, takes=0.1)
    report = asked(table(40), tmp_path / "out", provider)
    assert report.rows_ok == 40 and answers(tmp_path / "out") == {n: f"<row {n} is here>" for n in range(40)}
    assert server.told()["batches"] == [39, 9]


@pytest.mark.parametrize(
    "call", ["GET batch", *(pytest.param(c, marks=pytest.mark.long) for c in ("POST batches", "POST files"))]
)
@pytest.mark.long
def test_a_provider_that_turns_everything_away_ends_the_run(server: BatchServer, tmp_path: Path, call: str) -> None:
    """Once its time is over, or before one that it sets itself; the next run has the same batch, or creates it."""
    server.set(away=call, takes=0.1)
    with pytest.raises(RunFailed, match="no call was obeyed for 2 s, the last time: 429: Too many"):
        asked(table(20), tmp_path / "out", "openai", batch_timeout=2.0, timeout=1.0)
    server.set(retry_after="1732528230000")
    with pytest.raises(RunFailed, match="asks to be left alone for 86,400 s"):
        asked(table(20), tmp_path / "out", "openai", batch_timeout=2.0, timeout=1.0)
    server.set(away="")
    assert asked(table(20), tmp_path / "out", "openai", batch_timeout=2.0, timeout=1.0).rows_ok == 20
    told = server.told()
    assert len(told["batches"]) == 1 and told["batches"][0] + told["requests"] == 20 and told["requests"] <= 3
    once(told)


def test_a_batch_is_sent_to_no_other_address(server: BatchServer, tmp_path: Path) -> None:
    """Though the provider points to one: it would get the key."""
    with BatchServer(moved="") as other:
        server.set(moved=other.url)
        with pytest.raises(
            BadModel, match=f"answers 307, a redirect to {other.url}/chat/completions: it is not followed"
        ):
            asked(table(20), tmp_path / "out", "openai")
        assert other.told()["requests"] == 0


@pytest.mark.long
def test_replies_of_a_batch_that_hold_nothing_are_counted(server: BatchServer, tmp_path: Path) -> None:
    """They are paid for, and asked for once more, alone."""
    server.set(empties="row 7", takes=0.1)
    price = {"input": "1/token", "output": "0/token"}
    report = asked(table(20), tmp_path / "out", "openai", price=price, gates={"min_ok": 0})
    assert (report.rows_ok, report.rows_dead, server.told()["batches"]) == (19, 1, [19])
    assert (report.used["requests"], report.used["cost"]) == (21, 21 * 4)
    assert [letter["message"] for letter in gm.dead(str(tmp_path / "out")).to_pylist()] == ["a reply without choices"]


@pytest.mark.long
@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("fault", ["late", "cut_files", "lost"])
def test_results_that_are_not_there_yet_are_not_paid_again(
    server: BatchServer, tmp_path: Path, provider: str, fault: str
) -> None:
    """A batch is over before its file is there, or a file comes in part: what was answered is waited for."""
    server.set(takes=0.1, **{fault: 2})
    assert asked(table(30), tmp_path / "out", provider).rows_ok == 30
    assert server.told()["batches"] == [29]
    once(server.told())


@pytest.mark.long
def test_a_row_that_is_asked_alone_may_take_its_time(server: BatchServer, tmp_path: Path) -> None:
    """Longer than one look at it, whose end has another name before Python 3.11."""
    server.set(takes=0.1, latency=1.2)
    assert asked(table(3), tmp_path / "out", "openai", workers=1).rows_ok == 3


@pytest.mark.long
@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("ended", ["expire", "cancel"])
def test_a_cut_file_of_a_batch_that_was_ended_is_not_taken_for_whole(
    server: BatchServer, tmp_path: Path, provider: str, ended: str
) -> None:
    """Lines of requests that were not done stand for no answer: the answers are waited for, and not paid again."""
    server.set(takes=0.1, cut_files=1, **{ended: 1})
    if ended == "cancel":
        with pytest.raises(RunFailed, match="was cancelled at the provider, with 20 requests unanswered"):
            asked(table(41), tmp_path / "out", provider, workers=1)
    assert asked(table(41), tmp_path / "out", provider, workers=1).rows_ok == 41
    told = server.told()
    alone = ended == "cancel"  # by the run that goes on
    assert told["batches"] == [40, 20 - alone] and set(told["computed"].values()) == {1}


@pytest.mark.few(1)
@pytest.mark.long
def test_answers_that_are_gone_from_a_batch_that_expired_stop_the_run(server: BatchServer, tmp_path: Path) -> None:
    """The file of what was not done is there: as many lines, and none of them an answer."""
    server.set(takes=0.1, expire=1, removed=["out-batch_0"])
    with pytest.raises(RunFailed, match=r"batch_0 is over, and the provider gives 0 of the 20 results .* no longer th"):
        asked(table(41), tmp_path / "out", "openai", batch_timeout=2.0, timeout=1.0, workers=1)
    server.set(removed=[])
    assert asked(table(41), tmp_path / "out", "openai", workers=1).rows_ok == 41
    assert set(server.told()["computed"].values()) == {1}


@pytest.mark.long
@pytest.mark.parametrize("fault", ["late", "cut_files"])
def test_results_that_do_not_come_end_the_run(server: BatchServer, tmp_path: Path, fault: str) -> None:
    """After batch_timeout; the next run looks again, and no request is in another batch."""
    server.set(takes=0.1, **{fault: 10**6})
    for _ in range(2):
        with pytest.raises(RunFailed, match=r"batch_0 is over, and the provider gives \d+ of the 19 results"):
            asked(table(20), tmp_path / "out", "openai", batch_timeout=2.0, timeout=1.0)
    server.set(**{fault: 0})
    assert asked(table(20), tmp_path / "out", "openai").rows_ok == 20
    assert server.told()["batches"] == [19]


def test_a_list_that_is_not_there_gives_no_batch_up(server: BatchServer, tmp_path: Path) -> None:
    """Whether a batch was created cannot be told then: the run stops, and the next one finds it."""
    server.set(lose=1, unlisted=1, takes=0.1)
    with pytest.raises(RunFailed, match=r"batches cannot be listed at the provider \(404: Invalid URL\)"):
        asked(table(20), tmp_path / "out", "openai")
    assert asked(table(20), tmp_path / "out", "openai").rows_ok == 20
    assert server.told()["batches"] == [19]
    once(server.told())


@pytest.mark.long
@pytest.mark.parametrize(("status", "code", "said"), [(429, "insufficient_quota", "the account"), (401, "", "the key")])
def test_a_line_that_is_about_all_rows_stops_once(
    server: BatchServer, tmp_path: Path, status: int, code: str, said: str
) -> None:
    """What else the batch answered is kept; the next run asks for one such request alone, and has the others in a new
    batch.
    """
    server.set(says=["row 1", status, "No more", code], takes=0.1)
    with pytest.raises(RunFailed, match=f"batch_0 was not answered in full: the provider refuses {said}: {status}: No"):
        asked(table(20), tmp_path / "out", "openai")
    assert asked(table(20), tmp_path / "out", "openai").rows_ok == 20
    assert server.told()["batches"] == [19, 10]
    once(server.told())


@pytest.mark.long
def test_max_cost_of_a_run_that_goes_on_while_batches_are_under_way(server: BatchServer, tmp_path: Path) -> None:
    """What requests take is learned from another row: they are three times as long as their letters let expect."""
    rows = pa.table({"id": range(100), "text": [f"{n} a b c d e f g h i j k l m n o p q" for n in range(100)]})
    more: dict[str, Any] = {"shard_rows": 10, "price": {"input": "1/token", "output": "0/token"}, "max_cost": 500.0}
    server.set(away="GET batch", retry_after="1000", takes=0.1)
    with pytest.raises(RunFailed):
        asked(rows, tmp_path / "out", "openai", workers=1, batch_timeout=2.0, **more)
    before = server.told()
    server.set(away="", retry_after=None, mum=8)
    with pytest.raises(RunFailed, match="max_cost 500"):
        asked(rows, tmp_path / "out", "openai", workers=1, **more)
    after = server.told()
    new = sum(after["batches"]) - sum(before["batches"]) + after["requests"] - before["requests"]
    assert 0 < 18 * new <= 500
    once(after)


@pytest.mark.long
@pytest.mark.parametrize("fault", [{"holds": 5}, {"expire": 1}])
def test_max_cost_is_not_kept_for_what_was_not_computed(
    server: BatchServer, tmp_path: Path, fault: dict[str, Any]
) -> None:
    """Requests of a batch that was too much, or has expired, are asked again for the same dollars."""
    price = {"input": "1/token", "output": "1/token"}
    server.set(takes=0.1, **fault)
    report = asked(table(8), tmp_path / "out", "openai", price=price, max_cost=8 * 24.0 + 30)
    assert report.rows_ok == 8
    once(server.told())


@pytest.mark.long
def test_a_key_that_a_batch_repeats_is_not_written(server: BatchServer, tmp_path: Path) -> None:
    """Neither in a dead letter nor by run-batch."""
    server.set(says=["row 7", 400, f"Not with {KEY}", ""], takes=0.1)
    bodies = [{"messages": [{"role": "user", "content": f"row {n}"}]} for n in range(10)]
    lines = [
        {"custom_id": f"{n}", "method": "POST", "url": "/v1/chat/completions", "body": b} for n, b in enumerate(bodies)
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, lines)))
    gm.run_batch(str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl"), model="m", batch_api="openai")
    found = (tmp_path / "out.jsonl").read_text()
    assert "Not with ${env:OPENAI_API_KEY}" in found and KEY not in found
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, lines)).replace("row 5", f"row 5 {KEY}"))
    gm.run_batch(str(tmp_path / "in.jsonl"), str(tmp_path / "alone.jsonl"), model="m")
    found = (tmp_path / "alone.jsonl").read_text()
    assert "<row 5 ${env:OPENAI_API_KEY}>" in found and KEY not in found


def test_a_key_where_a_refusal_is_cut_is_not_told() -> None:
    """Not even a part of it: what is secret is taken out before anything is cut."""
    key = Secret("${env:KEY}", "sk-proj-ABCDEFGHIJKLMNOPQRSTUVWXYZ")
    desk = Desk("http://host/v1", {}, timeout=1.0, limit=1.0, secrets=(key,))
    for text in (json.dumps({"error": {"message": "x" * 990 + key.reveal()}}), "y" * 290 + key.reveal()):
        assert "sk-" not in str(desk._failure("POST", 400, text.encode(), {}, "http://host/v1/batches"))


@pytest.mark.long
@pytest.mark.parametrize("call", ["GET batch", "GET content", "POST files"])
def test_a_call_that_is_answered_by_drops_ends(server: BatchServer, tmp_path: Path, call: str) -> None:
    """As one that is not answered; the next run has the same batch."""
    server.set(drips=call, takes=0.1)
    with pytest.raises(RunFailed, match="no answer for 2 s, the last time: no answer within 1 s"):
        asked(table(20), tmp_path / "out", "openai", batch_timeout=2.0, timeout=1.0)
    server.set(drips="")
    assert asked(table(20), tmp_path / "out", "openai").rows_ok == 20
    told = server.told()
    assert len(told["batches"]) == 1 and told["batches"][0] + told["requests"] == 20


@pytest.mark.long
def test_a_reply_without_an_end_is_given_up(server: BatchServer, tmp_path: Path) -> None:
    """No memory holds it."""
    server.set(floods="GET batch", takes=0.1)
    with pytest.raises(RunFailed, match="the last time: a reply of more than 33,554,432 bytes"):
        asked(table(20), tmp_path / "out", "openai", batch_timeout=2.0, timeout=20.0)


@pytest.mark.long
def test_no_pause_at_all_is_not_taken_at_its_word(server: BatchServer, tmp_path: Path) -> None:
    """Whoever turns calls away and says "after 0 s" is asked some times, not thousands of times."""
    server.set(away="GET batch", retry_after="0", takes=0.1)
    with pytest.raises(RunFailed, match="no call was obeyed for 2 s"):
        asked(table(20), tmp_path / "out", "openai", batch_timeout=2.0, timeout=1.0)
    assert server.told()["asked"]["GET batch"] < 50


@pytest.mark.few(1)
@pytest.mark.parametrize("word", ["COMPLETED", "canceled"])
def test_words_for_how_a_batch_ended(server: BatchServer, tmp_path: Path, word: str) -> None:
    """In any case, and in American English."""
    server.set(word=word, takes=0.1)
    assert asked(table(20), tmp_path / "out", "openai").rows_ok == 20


@pytest.mark.long
def test_a_batch_that_is_never_over_ends_the_run(server: BatchServer, tmp_path: Path) -> None:
    """Some time after it should have been; the next run looks again."""
    server.set(takes=4.0, past=60)
    with pytest.raises(RunFailed, match=r"batch_0 is not over, though it should have been at .*: 0 of 19 are done"):
        asked(table(20), tmp_path / "out", "openai", batch_timeout=2.0, timeout=1.0)
    server.set(past=-60)
    assert asked(table(20), tmp_path / "out", "openai").rows_ok == 20
    assert server.told()["batches"] == [19]


@pytest.mark.long
def test_one_request_that_is_too_much_ends_the_run(server: BatchServer, tmp_path: Path) -> None:
    """Once it has been that for a while, with nothing else under way."""
    server.set(holds=0, takes=0.1)
    with pytest.raises(RunFailed, match=r"of one request is too much for the provider.*token_limit_exceeded"):
        asked(table(3), tmp_path / "out", "openai", batch_timeout=2.0, timeout=1.0)
    server.set(holds=None)
    assert asked(table(3), tmp_path / "out", "openai").rows_ok == 3
    once(server.told())


@pytest.mark.long
@pytest.mark.parametrize("provider", PROVIDERS)
def test_what_is_told_is_what_was_served(server: BatchServer, tmp_path: Path, provider: str) -> None:
    """The row that is asked first is told, and paid, once: in a run that stops, and in the one that goes on."""
    price = {"input": "1/token", "output": "1/token"}  # 8 dollars a row, of which 24 are kept free before a batch
    server.set(takes=0.1)
    more: dict[str, Any] = {"price": price, "max_tokens": 20, "workers": 1}
    with pytest.raises(RunFailed, match=r"max_cost 30: \$8\.0000 are spent") as e:
        asked(table(20), tmp_path / "out", provider, max_cost=30.0, **more)
    assert e.value.report is not None and e.value.report.used["cost"] == 8
    server.set(cancel=1)
    with pytest.raises(RunFailed, match="was cancelled") as e:
        asked(table(20), tmp_path / "out", provider, **more)
    assert e.value.report is not None
    assert e.value.report.used["cost"] == (2 + 9) * 8  # each run asks one alone; and half of the batch
    report = asked(table(20), tmp_path / "out", provider, max_cost=10 * 24.0 + 8, **more)
    assert report.used["requests"] == 20 and report.used["cost"] == 20 * 8
    once(server.told())


@pytest.mark.long
def test_a_batch_of_an_earlier_run_is_paid_by_that(server: BatchServer, tmp_path: Path) -> None:
    """And what it was answered counts for nobody's max_cost again: second tries have all of it."""
    price = {"input": "1/token", "output": "0/token"}
    more: dict[str, Any] = {"price": price, "workers": 1, "returns": {"n": "int64", "word": "string"}}
    server.set(answer="second", takes=0.1, away="GET batch", retry_after="1000")
    with pytest.raises(RunFailed, match="left alone"):
        asked(table(20), tmp_path / "out", "openai", batch_timeout=2.0, **more)
    server.set(away="", retry_after=None)
    with pytest.raises(RunFailed, match="max_cost 300") as e:
        asked(table(20), tmp_path / "out", "openai", max_cost=300.0, **more)
    spent = float(str(e.value).partition("$")[2].partition(" ")[0])
    alone = [body for body in server.told()["bodies"] if len(body["messages"]) > 2]
    assert len(alone) > 3 and spent <= 300.0
    report = asked(table(20), tmp_path / "out", "openai", **more)
    assert report.rows_ok == 20 and report.used["requests"] == 40


@pytest.mark.long
def test_batches_are_small_while_nothing_bounds_their_cost(server: BatchServer, tmp_path: Path) -> None:
    """The first row's answer is short, and no max_tokens limits the others: the first batch tells what they take."""
    rows = pa.table({"id": range(300), "text": ["short"] + [f"row {n} {'is here ' * 50}" for n in range(1, 300)]})
    price = {"input": "0/token", "output": "1/token"}  # 1 dollar for the first row, 102 for the others
    more: dict[str, Any] = {"max_tokens": None, "price": price, "shard_rows": 100, "workers": 1}
    server.set(takes=0.2)
    with pytest.raises(RunFailed, match="max_cost 1000"):
        asked(rows, tmp_path / "out", "openai", max_cost=1000.0, **more)
    assert server.told()["batches"] == [20]  # of 2,040 dollars, as one may cost over what was expected
    assert asked(rows, tmp_path / "out", "openai", max_cost=60_000.0, **more).rows_ok == 300
    told = server.told()
    assert max(told["batches"]) <= 210 and len(told["batches"]) > 3
    once(told)


@pytest.mark.long
@pytest.mark.parametrize("provider", PROVIDERS)
def test_results_that_are_gone_are_asked_for_anew(server: BatchServer, tmp_path: Path, provider: str) -> None:
    """Theirs alone, by a run after the one that has told so; what other batches were answered is kept. Whichever shard
    of the two has its batch first: nine requests, as the first row is asked alone, or ten.
    """
    batch = "batch_0" if provider == "openai" else "msgbatch_0"
    server.set(takes=0.1, removed=[batch])
    more: dict[str, Any] = {"shard_rows": 10, "workers": 1}
    with pytest.raises(
        RunFailed, match=rf"{batch} is over, .* 0 of the (9|10) .* no longer there \(404: No such .*\)\. Run"
    ):
        asked(table(20), tmp_path / "out", provider, batch_timeout=2.0, timeout=1.0, **more)
    before = server.told()
    report = asked(table(20), tmp_path / "out", provider, **more)
    told = server.told()
    assert report.rows_ok == 20 and answers(tmp_path / "out") == {n: f"<row {n} is here>" for n in range(20)}
    lost, new = told["batches"][0], sum(told["batches"][len(before["batches"]) :])
    assert lost + 19 - sum(before["batches"]) - new in (0, 1)  # the run asks for one alone, or not
    twice = [json.loads(body)["messages"][0]["content"] for body, n in told["computed"].items() if n > 1]
    assert len(twice) in (lost, lost - 1) and len({int(text.split()[1]) // 10 for text in twice}) == 1
    assert max(told["computed"].values()) == 2


@pytest.mark.long
def test_a_list_that_never_comes_stops_one_run(server: BatchServer, tmp_path: Path) -> None:
    """Whether a batch was created cannot be told: the next run looks once more, and creates one."""
    server.set(unheard=1, unlisted=10**6, takes=0.1)
    with pytest.raises(RunFailed, match=r"if there is no list then either, its 19 requests are asked for anew"):
        asked(table(20), tmp_path / "out", "openai")
    assert asked(table(20), tmp_path / "out", "openai").rows_ok == 20
    once(server.told())


@pytest.mark.long
def test_a_model_that_has_become_wrong_gets_no_batch(server: BatchServer, tmp_path: Path) -> None:
    """Rows are asked alone until one is answered, and the run ends if none is."""
    more: dict[str, Any] = {"returns": {"n": "int64", "word": "string"}, "shard_rows": 100, "workers": 1}
    server.set(answer="json", takes=0.1)
    with pytest.raises(RunFailed, match="max_cost"):
        asked(
            table(300),
            tmp_path / "out",
            "openai",
            price={"input": "0/token", "output": "1/token"},
            max_cost=60.0,
            **more,
        )
    before = server.told()
    server.set(answer="never")
    with pytest.raises(RunFailed, match="fails on every row tried, 32 from all over the source among them"):
        asked(table(300), tmp_path / "out", "openai", **more)
    after = server.told()
    assert after["batches"] == before["batches"] and after["requests"] - before["requests"] <= 2 * (20 + 3 + 32)
    server.set(answer="json")
    assert asked(table(300), tmp_path / "out", "openai", **more).rows_ok == 300


@pytest.mark.long
@pytest.mark.parametrize("provider", PROVIDERS)
def test_lines_of_others_are_not_taken_for_results(server: BatchServer, tmp_path: Path, provider: str) -> None:
    """What a file lacks at first beside them is there soon: it is waited for, and not paid again."""
    server.set(mixed=1, takes=0.2)
    report = asked(table(40), tmp_path / "out", provider, price={"input": "1/token", "output": "1/token"})
    told = server.told()
    assert report.rows_ok == 40 and report.used["requests"] == 40 and report.used["cost"] == 8 * 40
    assert told["batches"] == [39]
    once(told)
