"""Prompts over rows: every row answered once at its place, whatever the endpoint does; limits; forms of answers."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gristmill as gm
from gristmill.errors import BadJob, BadModel, GristmillWarning, PlanChanged, RunFailed
from gristmill.models.answercache import AnswerCache
from gristmill.models.apis import Reply
from gristmill.models.endpoint import FIRST_TRIES
from gristmill.models.pace import JITTER, MARGIN, MOST, SLACK, Beat, Pace
from gristmill.models.prompt import _Form
from gristmill.models.template import Template
from gristmill.observe.events import Progress, Silent
from llmserver import KEY, ChatServer

ROWS = 400
pytestmark = pytest.mark.filterwarnings("ignore::gristmill.GristmillWarning")


def table(rows: int = ROWS) -> pa.Table:
    return pa.table({"id": range(rows), "text": [f"row {n} is here" for n in range(rows)]})


def answers(sink: Any) -> dict[int, str]:
    """By the row's number, each once."""
    found = gm.read(str(sink)).to_table().to_pylist()
    assert len({row["id"] for row in found}) == len(found)
    return {row["id"]: row["answer"] for row in found}


@pytest.mark.few(1)
@pytest.mark.parametrize("workers", [0, 2])
def test_every_row_has_its_answer(chat: ChatServer, tmp_path: Path, workers: int) -> None:
    """Of an endpoint that is busy, breaks, cuts connections and talks nonsense now and then; answered once each."""
    chat.set(busy=0.05, broken=0.02, cut=0.02, nonsense=0.02, latency=0.005)
    report = gm.prompt(
        table(), tmp_path / "out", prompt="Say {{ text }}", model="m", keep=["id"], workers=workers, keep_usage=True
    )
    assert report.rows_ok == ROWS
    assert answers(tmp_path / "out") == {n: f"<Say row {n} is here>" for n in range(ROWS)}
    usage = gm.read(str(tmp_path / "out")).to_table().to_pylist()[0]
    assert (usage["answer_prompt_tokens"], usage["answer_completion_tokens"]) == (5, 5)
    assert usage["answer_finish_reason"] == "stop"
    told = chat.told()
    assert set(told["answered"].values()) == {1} and {"429", "500", "0"} <= set(told["statuses"])
    assert told["most"] <= 32


@pytest.mark.long
def test_a_row_that_is_refused_is_a_dead_letter_alone(chat: ChatServer, tmp_path: Path) -> None:
    """In the endpoint's words; nothing that cannot succeed is sent again."""
    rows = pa.table({"id": range(6), "text": ["a", "too long b", "c", "forbidden d", "", None]})
    gm.prompt(rows, tmp_path / "out", prompt="{{ text }}", model="m", keep=["id"], gates={"min_ok": 0})
    assert answers(tmp_path / "out") == {0: "<a>", 2: "<c>", 4: "<>"}
    dead = {json.loads(d["payload"])["id"]: d for d in gm.dead(str(tmp_path / "out")).to_pylist()}
    assert {n: d["error"] for n, d in dead.items()} == {1: "Refused", 3: "Refused", 5: "NullColumn"}
    assert "maximum context length is 8 tokens" in dead[1]["message"] and "content filter" in dead[3]["message"]
    assert chat.told()["requests"] == 5


@pytest.mark.long
def test_what_no_row_would_be_answered_for_is_said_after_one_request(chat: ChatServer, tmp_path: Path) -> None:
    """A wrong key, an unknown model, an address where nobody is (which may change: exit 1), or none at all."""
    for options, said, requests in (
        ({"model": "gone"}, r"refuses the address or the model: 404: The model `gone` does not exist", 1),
        ({"api_key": "wrong"}, "refuses the key: 401: Incorrect API key provided", 1),
        (
            {"base_url": "http://127.0.0.1:9/v1"},
            r"http://127.0.0.1:9/v1/chat/completions: no answer to .* is this the endpoint",
            0,
        ),
        ({"base_url": "nowhere"}, "base_url 'nowhere' is not an address", 0),
        ({"base_url": "localhost:8000/v1"}, "base_url 'localhost:8000/v1' is not an address", 0),
    ):
        before = chat.told()["requests"]
        code = 1 if "is this the endpoint" in said else 2
        with pytest.raises(RunFailed if code == 1 else BadModel, match=said) as e:
            gm.prompt(table(), tmp_path / "out", prompt="{{ text }}", **{"model": "m", **options})  # type: ignore[arg-type]
        assert e.value.exit_code == code and chat.told()["requests"] - before == requests


@pytest.mark.long
def test_a_missing_key_and_a_wrong_address_are_named(
    chat: ChatServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OPENAI_API_KEY, if none was sent; the whole address that is not there, and that /v1 is missing."""
    asked = {"prompt": "{{ text }}", "model": "m", "workers": 0}
    root = chat.url.removesuffix("/v1")
    with pytest.raises(BadModel, match=rf"404: Not Found \({root}/chat/completions; most addresses end in /v1"):
        gm.prompt(table(), tmp_path / "out", base_url=root, **asked)
    with pytest.raises(BadModel, match=rf"404: Not Found \({chat.url}/more/chat/completions\)"):
        gm.prompt(table(), tmp_path / "out", base_url=f"{chat.url}/more", **asked)
    with pytest.raises(BadModel, match=r"401: Incorrect API key provided$"):
        gm.prompt(table(), tmp_path / "out", api_key="wrong", **asked)
    monkeypatch.delenv("OPENAI_API_KEY")
    with pytest.raises(BadModel, match=r"401: Incorrect .*; no key was sent: OPENAI_API_KEY is not set"):
        gm.prompt(table(), tmp_path / "out", **asked)


def test_a_column_in_one_brace_is_refused(tmp_path: Path) -> None:
    """All rows would be asked the same, and paid for; a text in braces that is no column's is only noted."""
    asked = {"model": "m", "workers": 0, "base_url": "http://127.0.0.1:9/v1"}
    with pytest.raises(BadModel, match=r"column 'text' is \{\{ text \}\}, with two braces") as e:
        gm.prompt(table(), tmp_path / "out", prompt="Is it good? {text}", **asked)  # type: ignore[arg-type]
    assert e.value.exit_code == 2
    for formatted in ("{text!r}", "{text:>3}"):
        with pytest.raises(BadModel, match="with two braces"):
            gm.prompt(table(), tmp_path / "out", prompt=formatted, **asked)  # type: ignore[arg-type]
    for prompt in (
        'Answer {"text": 1}',
        "Say {this}",
        "{{ '{text}' }}",
        "{% raw %}{text}{% endraw %}",
        "{text} is {{ text }}",
        "{# of {text} #} Say this",
    ):
        gm.Job(table(), gm.Prompt(prompt, "m", base_url="http://127.0.0.1:9/v1"), str(tmp_path / "out")).plan()


def test_a_prompt_without_a_column_is_noted(tmp_path: Path) -> None:
    """By the plan; not one that names a column anywhere, in a file as well, or that may read any."""
    (tmp_path / "prompt.txt").write_text("{{ text }}")
    told = {}
    for prompt in ("{ this }", "{{ text }}", "{{ row }}", f"@{tmp_path / 'prompt.txt'}"):
        job = gm.Job(table(3), gm.Prompt(prompt, "m", base_url="http://127.0.0.1:9/v1"), str(tmp_path / "out"))
        told[prompt] = [note for note in job.plan().notes if "all rows are asked the same" in note]
    assert [bool(notes) for notes in told.values()] == [True, False, False, False], told


def test_a_bad_prompt_is_said_before_any_request(chat: ChatServer, tmp_path: Path) -> None:
    """With the nearest name, the line, the field."""
    (tmp_path / "latin.txt").write_bytes("für {{ text }}".encode("latin-1"))
    bad: tuple[tuple[dict[str, Any], type[Exception], str], ...] = (
        ({"prompt": "{{ txt }}"}, BadModel, r"has a prompt with 'txt', which the source does not have: .*'text'\?"),
        ({"prompt": '{{ row["txt"] }}'}, BadModel, r"did you mean 'text'\?"),
        ({"prompt": "a\n{{ text "}, BadModel, "prompt, line 2: unexpected end of template"),
        ({"system": "{% if %}", "prompt": "x"}, BadModel, "system, line 1: "),
        ({"prompt": "@gone.txt"}, BadJob, "prompt @gone.txt: cannot be read"),
        ({"prompt": f"@{tmp_path / 'latin.txt'}"}, BadJob, "latin.txt: cannot be read .*utf-8"),
        ({"prompt": "x", "choices": ["a"]}, BadJob, "give two or more different texts"),
        ({"prompt": "x", "choices": ["a", "b"], "returns": {"y": "string"}}, BadJob, "leave one of them out"),
        ({"prompt": "x", "returns": {"y": "timestamp[us]"}}, BadModel, "'y' the type timestamp.* JSON does not have"),
        ({"prompt": "x", "request": {"model": "y"}}, BadJob, "request has 'model', which is not an option"),
        ({"prompt": "x", "temperature": -1}, BadJob, "temperature is -1: give a number of at least 0"),
        ({"prompt": "x", "max_token": 3}, BadJob, "did you mean 'max_tokens'"),
    )
    for options, kind, said in bad:
        with pytest.raises(kind, match=said):
            gm.prompt(table(), tmp_path / "out", model="m", **options)
    assert chat.told()["requests"] == 0


@pytest.mark.long
def test_a_key_that_is_withdrawn_stops_the_job(chat: ChatServer, tmp_path: Path) -> None:
    """With exit 1, and no row a dead letter; with a good key the next run asks for the rest."""
    chat.set(latency=0.02)
    job = gm.Job(
        table(2000), gm.Prompt("{{ text }}", "m"), gm.sink(str(tmp_path / "out"), keep=["id"]), workers=1,
        shard_rows=200,
    )  # fmt: skip

    def withdraw() -> None:
        while not list((tmp_path / "out").glob("_gristmill/g*/receipts/*.json")):
            time.sleep(0.02)
        chat.set(key="another")

    withdrawn = threading.Thread(target=withdraw, daemon=True)
    withdrawn.start()
    try:
        with pytest.raises(RunFailed, match="the endpoint refuses the key now: 401"):
            job.run()
    finally:
        withdrawn.join()
    asked = chat.told()["requests"]
    chat.set(key=KEY)
    report = job.run()
    assert (report.rows_ok, report.rows_dead) == (2000, 0)
    assert report.shards_resumed > 0 and asked < 2000
    assert answers(tmp_path / "out") == {n: f"<row {n} is here>" for n in range(2000)}


@pytest.mark.long
def test_slow_answers_keep_no_other_waiting(chat: ChatServer, tmp_path: Path) -> None:
    """1 % take 100 times as long: a loop that waits for each batch of 32 takes over three times as long."""
    chat.set(latency=0.01, slow=0.01, seed=3)
    begun = time.monotonic()
    gm.prompt(table(1600), tmp_path / "out", prompt="{{ text }}", model="m", keep=["id"], workers=0)
    took = time.monotonic() - begun
    assert took < 11, took  # 50 batches of which 14 hold such a row: 14 s
    assert len(answers(tmp_path / "out")) == 1600


@pytest.mark.long
def test_a_limit_of_requests_holds(chat: ChatServer, tmp_path: Path) -> None:
    """In two workers together: none of them is answered 429 by a server of about that limit (a stall of this machine
    sends what it held up a little closer together).
    """
    chat.set(limit=135)
    begun = time.monotonic()
    gm.prompt(
        table(300), tmp_path / "out", prompt="{{ text }}", model="m", keep=["id"], workers=2, requests_per_minute=6000
    )
    took, told = time.monotonic() - begun, chat.told()
    assert "429" not in told["statuses"] and took > 2.0
    assert told["rate"] <= 135 and len(answers(tmp_path / "out")) == 300


def test_answers_with_columns(chat: ChatServer, tmp_path: Path) -> None:
    """A JSON object, in a fence or not; of these types; structured where the endpoint takes it, described where not."""
    returns = {"n": "int64", "word": "string", "all": "list<string>"}
    chat.set(answer="json")
    for structured in (True, False):
        chat.set(structured=structured)
        found = gm.prompt(table(3), prompt="{{ text }}", model="m", returns=returns)
        words = [f"row {n} is here".split() for n in range(3)]
        more = [] if structured else [["Answer", "with", "a", "JSON", "object", "of", "this", "schema"]]
        assert [row["word"] for row in found.to_pylist()] == ["row"] * 3
        assert found.schema.field("all").type == pa.list_(pa.string())
        assert all(row["all"][:4] == w for row, w in zip(found.to_pylist(), words, strict=True))
        assert bool(more) == (found["n"][0].as_py() > 4)
    bodies = chat.told()["bodies"]
    schema = bodies[0]["response_format"]["json_schema"]["schema"]
    assert schema["required"] == ["n", "word", "all"] and schema["properties"]["n"] == {"type": "integer"}
    assert "response_format" not in bodies[-1]


def test_an_answer_that_does_not_fit_is_asked_for_once_more(chat: ChatServer, tmp_path: Path) -> None:
    """With what was wrong; then the row is a dead letter with the answer in it."""
    chat.set(answer="second")
    found = gm.prompt(table(2), prompt="{{ text }}", model="m", returns={"n": "int64", "word": "string"})
    assert found["word"].to_pylist() == ["That", "That"]  # of the words that say what was wrong
    assert "it has no 'word'" in chat.told()["bodies"][-1]["messages"][-1]["content"]
    chat.set(answer="never")
    gm.prompt(
        table(2), tmp_path / "out", prompt="{{ text }}", model="m", returns={"n": "int64"}, keep=["id"],
        gates={"min_ok": 0, "allow_empty": True},
    )  # fmt: skip
    letters = gm.dead(str(tmp_path / "out")).to_pylist()
    assert len(letters) == 2 and all("I would rather not say." in letter["message"] for letter in letters)


def test_one_of_some_choices(chat: ChatServer) -> None:
    """As it was written in choices, however the model writes it."""
    chat.set(answer="choice")
    rows = pa.table({"text": ["one", "one two"]})
    for structured in (True, False):
        chat.set(structured=structured)
        found = gm.prompt(rows, prompt="{{ text }}", model="m", choices=["yes", "no"], output="odd")
        assert found["odd"].to_pylist() == ["yes", "no"] or not structured
        assert set(found["odd"].to_pylist()) <= {"yes", "no"}


def test_a_prompt_from_a_file_is_its_text(chat: ChatServer, tmp_path: Path) -> None:
    """Whatever it begins with."""
    (tmp_path / "at.txt").write_text("@all: {{ text }}")
    found = gm.prompt(table(2), prompt=f"@{tmp_path / 'at.txt'}", model="m", keep=["id"])
    assert found["answer"].to_pylist() == ["<@all: row 0 is here>", "<@all: row 1 is here>"]


def test_a_null_is_decided_by_on_null(chat: ChatServer) -> None:
    """As for text models: a dead letter, left out, or given to the template."""
    rows = pa.table({"id": [1, 2], "text": ["a", None]})
    prompt = "{% if text is none %}nothing{% else %}{{ text }}{% endif %}"
    kept = gm.prompt(rows, prompt=prompt, model="m", keep=["id"], on_null="keep")
    assert kept["answer"].to_pylist() == ["<a>", "<nothing>"]
    assert gm.prompt(rows, prompt=prompt, model="m", keep=["id"], on_null="skip")["answer"].to_pylist() == ["<a>"]
    with pytest.warns(GristmillWarning, match=r"NullColumn: column 'text' is null, and prompt m takes no nulls there"):
        gm.prompt(rows, prompt=prompt, model="m", keep=["id"])


@pytest.mark.long
def test_the_key_is_nowhere(chat: ChatServer, tmp_path: Path) -> None:
    """Neither in the sink nor in what is printed; a job file names the variable."""
    (tmp_path / "ask.txt").write_text("Repeat: {{ text }}")
    pq.write_table(table(5), tmp_path / "rows.parquet")
    (tmp_path / "job.yaml").write_text(
        "source: rows.parquet\nmodel: {prompt: '@ask.txt', llm: m, api_key: '${env:OTHER}'}\n"
        "sink: {uri: out, keep: [id]}\n"
    )
    run = subprocess.run(
        [sys.executable, "-m", "gristmill", "run", "job.yaml"], cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "OTHER": KEY, "OPENAI_API_KEY": "wrong"},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert answers(tmp_path / "out")[2] == "<Repeat: row 2 is here>"
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert files and not [path for path in files if KEY.encode() in path.read_bytes()] and KEY not in run.stderr
    (tmp_path / "ask.txt").write_text("Say: {{ text }}")
    again = subprocess.run(
        [sys.executable, "-m", "gristmill", "run", "job.yaml"], cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "OTHER": KEY},
    )  # fmt: skip
    assert again.returncode == 4 and "model.prompt" in again.stderr, again.stderr


@pytest.mark.long
def test_the_command(chat: ChatServer, tmp_path: Path) -> None:
    """As its help shows it; with another endpoint or other limits it is the same job."""
    pq.write_table(table(40), tmp_path / "rows.parquet")
    typed = [sys.executable, "-m", "gristmill", "prompt", "rows.parquet", "out", "--prompt", "{{ text }}"]
    typed += ["--model", "m", "--keep", "id", "--system", "Be brief about {{ id }}"]
    done = subprocess.run([*typed, "--preview", "2"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "<row 1 is here>" in done.stdout, done.stderr
    done = subprocess.run(typed, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert answers(tmp_path / "out")[39] == "<row 39 is here>"
    assert chat.told()["bodies"][-1]["messages"][0]["content"].startswith("Be brief about ")
    with ChatServer() as other:
        more = ["--base-url", other.url, "--concurrency", "3", "--requests-per-minute", "100", "--timeout", "3"]
        again = subprocess.run([*typed, *more], cwd=tmp_path, capture_output=True, text=True)
        assert again.returncode == 0 and "nothing to do" in again.stdout + again.stderr
    again = subprocess.run([*typed, "--temperature", "0"], cwd=tmp_path, capture_output=True, text=True)
    assert again.returncode == 4 and "model.temperature" in again.stderr


@pytest.mark.long
def test_addresses_share_the_load_and_stand_in_for_each_other(chat: ChatServer, tmp_path: Path) -> None:
    """One dies in the middle: the other answers, and no row is lost."""
    chat.set(latency=0.02)
    with ChatServer(latency=0.02) as other:
        urls = f"{chat.url},{other.url}"
        gm.prompt(table(200), tmp_path / "a", prompt="{{ text }}", model="m", base_url=urls, keep=["id"])
        assert min(chat.told()["requests"], other.told()["requests"]) > 50
        other.set(down=True)
        gm.prompt(table(200), tmp_path / "b", prompt="{{ text }}", model="m", base_url=urls, keep=["id"])
    assert len(answers(tmp_path / "a")) == len(answers(tmp_path / "b")) == 200


def test_killed_and_run_again(chat: ChatServer, tmp_path: Path) -> None:
    """Every row has its answer, and only requests that were in flight are sent again."""
    pq.write_table(table(1500), tmp_path / "rows.parquet")
    chat.set(latency=0.02)
    typed = [sys.executable, "-m", "gristmill", "prompt", "rows.parquet", "out", "--prompt", "{{ text }}"]
    typed += [
        "--model",
        "m",
        "--keep",
        "id",
        "--set",
        "running.shard_rows=500",
        "--workers",
        "1",
        "--concurrency",
        "32",
    ]
    kills, before = 4, 0
    for _ in range(kills):
        run = subprocess.Popen(typed, cwd=tmp_path, stderr=subprocess.DEVNULL)
        while chat.told()["requests"] < before + 200 and run.poll() is None:
            time.sleep(0.02)
        for process in [*psutil.Process(run.pid).children(recursive=True), psutil.Process(run.pid)]:
            process.kill()
        run.wait()
        time.sleep(0.1)
        before = chat.told()["requests"]
    done = subprocess.run(typed, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert answers(tmp_path / "out") == {n: f"<row {n} is here>" for n in range(1500)}
    assert gm.verify(str(tmp_path / "out")).ok
    told = re.search(r"([\d,]+) requests", done.stdout)  # those of the runs that were killed, too
    assert told is not None and 1500 <= int(told[1].replace(",", "")) <= chat.told()["requests"]
    again = chat.told()["requests"] - 1500
    # In flight, and the first rows of a run that was killed before it had a plan.
    assert 0 <= again <= kills * 32 + 32, again
    assert not list((tmp_path / "out").glob("_gristmill/*/journal/*"))


@pytest.mark.long
def test_killed_between_an_answer_that_does_not_fit_and_the_next(chat: ChatServer, tmp_path: Path) -> None:
    """Of rows that are asked for once more only what is in flight is asked again; the figures are of both requests."""
    pq.write_table(table(60), tmp_path / "rows.parquet")
    chat.set(latency=0.05, answer="second")
    typed = [sys.executable, "-m", "gristmill", "prompt", "rows.parquet", "out", "--prompt", "{{ text }}", "--model"]
    typed += [
        "m",
        "--keep",
        "id",
        "--workers",
        "1",
        "--concurrency",
        "4",
        "--returns",
        "n=int64",
        "--returns",
        "word=string",
    ]
    for killed in (30, 70):  # requests
        run = subprocess.Popen(typed, cwd=tmp_path, stderr=subprocess.DEVNULL)
        while chat.told()["requests"] < killed and run.poll() is None:
            time.sleep(0.01)
        for process in [*psutil.Process(run.pid).children(recursive=True), psutil.Process(run.pid)]:
            process.kill()
        run.wait()
    done = subprocess.run(typed, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert 120 <= chat.told()["requests"] <= 120 + 2 * 5
    assert re.search(r"asked  +120 requests", done.stdout), done.stdout


@pytest.mark.long
def test_answers_that_were_paid_for_are_not_dropped_unsaid(
    chat: ChatServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """By another prompt, though no shard is committed: it is refused; --restart says what it drops."""
    ask: dict[str, Any] = {"model": "m", "keep": ["id"], "workers": 1}
    price = {"input": "1/token", "output": "0/token"}  # 4 dollars a row
    with pytest.raises(RunFailed, match="max_cost 45"):
        gm.prompt(table(60), tmp_path / "out", prompt="{{ text }}", price=price, max_cost=45.0, **ask)
    asked = chat.told()["requests"]
    said = rf"unfinished run of a different job here, with {asked} answers of an endpoint for \${4 * asked}\.0000 in"
    with pytest.raises(PlanChanged, match=rf"{said}(.|\n)*--restart .*, which drops these"):
        gm.prompt(table(60), tmp_path / "out", prompt="Say {{ text }}", **ask)
    assert chat.told()["requests"] == asked
    gm.prompt(table(60), tmp_path / "out", prompt="{{ text }}", **ask)
    assert chat.told()["requests"] == 60
    with pytest.raises(RunFailed, match="max_cost 45"):
        gm.prompt(table(60), tmp_path / "b", prompt="A {{ text }}", price=price, max_cost=45.0, **ask)
    gm.prompt(table(60), tmp_path / "b", prompt="B {{ text }}", restart=True, **ask)
    assert re.search(r"is given up, with \d+ answers of an endpoint for \$", capfd.readouterr().err)


class Shown(Silent):
    """An observer that keeps what it is told of costs."""

    def __init__(self) -> None:
        self.costs: list[float] = []

    def progress(self, now: Progress) -> None:
        """See Observer."""
        self.costs += [now.used["cost"]] if now.used else []


@pytest.mark.long
def test_what_it_cost_is_told_and_bounded(chat: ChatServer, tmp_path: Path) -> None:
    """Tokens as the endpoint counts them, by the prices given; over several runs a dollar is not crossed by any."""
    price = {"input": "100/1K", "output": "$0.5/token"}  # 4 tokens each: 2.40 a row
    chat.set(latency=0.005)
    job = gm.Job(
        table(300), gm.Prompt("{{ text }}", "m", price=price, max_cost=300.0, concurrency=8),
        gm.sink(str(tmp_path / "out"), keep=["id"]), workers=1, shard_rows=50,
    )  # fmt: skip
    seen = Shown()
    for run in range(1, 4):
        with contextlib.suppress(RunFailed):
            done = job.run(observer=seen)
        if run < 3:  # what is committed is told while it is not done
            state = gm.status(tmp_path / "out")
            assert state["state"] == "unfinished" and state["used"]["requests"] == chat.told()["requests"]
            assert state["used"]["kept"] == chat.told()["requests"] - state["rows_ok"]
        assert chat.told()["requests"] <= 125 * run
    report = job.run()
    assert answers(tmp_path / "out") == {n: f"<row {n} is here>" for n in range(300)}
    assert chat.told()["requests"] <= 300 + 3 * 32 and report.rows_ok == 300
    assert done.used["requests"] == 300 <= chat.told()["requests"]
    assert seen.costs == sorted(seen.costs) and len(seen.costs) > 3
    told = gm.prompt(table(10), tmp_path / "b", prompt="{{ text }}", model="m", price=price, keep=["id"])
    assert dict(told.used) == {
        "requests": 10,
        "prompt_tokens": 40,
        "completion_tokens": 40,
        "cost": pytest.approx(24.0),
    }
    assert "10 requests, 40 tokens in, 40 out, $24.0000" in str(told)
    for wrong in ({"input": "0.4", "output": "1/1M"}, {"input": "1/1M"}, {**price, "cached": "1/1M"}):
        with pytest.raises(BadJob, match="price has"):
            gm.Prompt("x", "m", price=wrong)
    with pytest.raises(BadJob, match="max_cost needs price"):
        gm.Prompt("x", "m", max_cost=1.0)


@pytest.mark.parametrize("workers", [0, 1])
def test_equal_prompts_are_asked_once(chat: ChatServer, tmp_path: Path, workers: int) -> None:
    """All their rows have the answer, also if the first request for it fails."""
    chat.set(latency=0.02, broken=0.1)
    rows = pa.table({"id": range(500), "text": [f"word {n % 7}" for n in range(500)]})
    report = gm.prompt(
        rows, tmp_path / "out", prompt="{{ text }}", model="m", keep=["id"], dedupe=True, workers=workers
    )
    assert answers(tmp_path / "out") == {n: f"<word {n % 7}>" for n in range(500)}
    assert chat.told()["answered"] == {f"word {n}": 1 for n in range(7)} and report.used["requests"] == 7


@pytest.mark.parametrize("how", ["where", "filter"])
def test_what_the_first_rows_took_counts_where_the_first_shard_has_none(
    chat: ChatServer, tmp_path: Path, how: str
) -> None:
    """They are those of a later shard, and the report's requests and tokens are what the server was asked."""
    (tmp_path / "in").mkdir()
    for n in range(2):
        rows = {"id": range(n * 40, n * 40 + 40), "text": [f"{'ab'[n]} {i}" for i in range(40)]}
        pq.write_table(pa.table(rows), tmp_path / "in" / f"{n}.parquet")
    only = {"where": {"where": "id >= 40"}, "filter": {"steps": [gm.filter(lambda batch: batch["id"] >= 40)]}}[how]
    options = {"prompt": "{{ text }}", "model": "m", "keep": ["id"], "keep_usage": True, "shard_rows": 40}
    report = gm.prompt(str(tmp_path / "in"), tmp_path / "out", workers=1, **options, **only)
    told = gm.read(tmp_path / "out").to_table()
    assert report.rows_ok == report.used["requests"] == chat.told()["requests"] == 40
    assert report.used["prompt_tokens"] == sum(told["answer_prompt_tokens"].to_pylist())


def test_equal_prompts_that_are_to_differ_are_each_asked(chat: ChatServer, tmp_path: Path) -> None:
    """Also those that are equal to the first row, which is asked before there is a plan."""
    rows = pa.table({"id": range(40), "text": ["any number"] * 40})
    report = gm.prompt(rows, tmp_path / "out", prompt="{{ text }}", model="m", keep=["id"], temperature=1.0)
    assert chat.told()["answered"] == {"any number": 40} and report.used["requests"] == 40


@pytest.mark.long
def test_a_cache_keeps_answers_across_runs(chat: ChatServer, tmp_path: Path) -> None:
    """A restart pays nothing; another prompt, temperature or model does; two workers share it."""
    cache = str(tmp_path / "kept")

    def asked(**options: Any) -> int:
        before = chat.told()["requests"]
        given = {"prompt": "{{ text }}", "model": "m", **options}
        report = gm.prompt(table(100), tmp_path / "out", keep=["id"], cache=cache, workers=2, restart=True, **given)
        assert report.rows_ok == 100
        return int(chat.told()["requests"]) - before

    assert [asked(), asked(), asked(temperature=0.5), asked(temperature=0.5)] == [100, 0, 100, 0]
    assert asked(prompt="Say {{ text }}", concurrency=5) == 100 and asked() == 0
    assert answers(tmp_path / "out")[7] == "<row 7 is here>"
    (tmp_path / "file").write_text("x")
    with pytest.raises(BadModel, match=r"cache .*file/inside: cannot be used"):
        gm.prompt(table(2), prompt="x", model="m", cache=str(tmp_path / "file" / "inside"))


def test_templates_name_what_they_read() -> None:
    """Columns by name, by `row["…"]`, in loops and conditions; `row` itself reads all."""
    assert Template("{{ a }} {% if b %}{{ c.d }}{% endif %}{% for x in e %}{{ x }}{% endfor %}", "p").columns == (
        "a", "b", "c", "e",
    )  # fmt: skip
    odd = Template('{{ row["a b"] }}', "p")
    assert (odd.columns, odd.whole, odd.of({"a b": 1})) == (("a b",), False, "1")
    assert Template("{{ row }}", "p").whole and Template("{% for k in row %}{{ row[k] }}{% endfor %}", "p").whole
    for unkind in ("{{ a.__class__.__mro__ }}", "{{ a.append(1) }}"):
        with pytest.raises(Exception, match=r"unsafe|not safely callable|has no attribute|is unsafe"):
            Template(unkind, "p").of({"a": [1]})


def test_units_come_evenly() -> None:
    """From the first one on; what comes late is made up for, up to a quarter of a second and a quarter faster."""
    pace = Pace(60 / MARGIN)
    assert [pace.turn(10.0) for _ in range(3)] == [10, 11, 12]
    assert pace.turn(20.0, 5) == 20.0 and pace.turn(20.0) == 25.0 - SLACK
    pace.more(-1)
    assert pace.turn(20.0) == 25.0 - SLACK
    assert Pace(None).turn(3.0, 1e9) == 3.0
    quick = Pace(6_000 / MARGIN)
    quick.turn(0.0)
    late = [quick.turn(0.2) for _ in range(40)]
    assert late[0] == 0.2 and 0.008 * 38 < late[-1] - 0.2 + JITTER < 0.008 * 40


@given(st.lists(st.floats(0, 0.3), min_size=1, max_size=300), st.floats(60, 60_000))
def test_no_second_has_more_than_its_units(stalls: list[float], rate: float) -> None:
    """However long whoever sends was held up before each: never more than its share, and over longer times nearly
    that much.
    """
    pace, now, sent = Beat(rate), 0.0, []
    for stall in stalls:
        now = pace.turn(now + stall)
        sent.append(now)
    for n, begun in enumerate(sent):
        assert sum(begun <= time < begun + 1 for time in sent[n:]) <= math.ceil(MOST * rate / 60)


@pytest.mark.parametrize("rate", [90.0, 6_000.0, 36_000.0])
def test_what_a_stall_held_up_is_made_up_for(rate: float) -> None:
    """Whoever is a little late each time, and a tenth of a second now and then, still sends nearly the rate."""
    pace, now, count = Beat(rate), 0.0, 0
    begun = pace.turn(now)
    while now < 20 * 60 / 90:
        now = pace.turn(now) + 0.0007
        count += 1
        if not count % 1000:
            now += 0.09
    assert 0.96 * rate / 60 < count / (now - begun) <= rate / 60


def test_choices_that_differ_little_are_told_apart(chat: ChatServer) -> None:
    """By case and marks; an answer that could be two of them is asked for again."""
    rows = pa.table({"id": [0, 1, 2, 3], "text": ["AA", "Aa", "aa", "'aA'"]})
    chat.set(answer="plain")
    found = gm.prompt(rows, prompt="{{ text }}", model="m", choices=["AA", "Aa", "aa"], gates={"min_ok": 0.5})
    assert found["answer"].to_pylist() == ["AA", "Aa", "aa"]
    rows = pa.table({"id": [0, 1, 2], "text": ["A", "a*", "{b}"]})
    found = gm.prompt(rows, prompt="{{ text }}", model="m", choices=["A", "A*", "{b}"], gates={"min_ok": 0.5})
    assert found["answer"].to_pylist() == ["A", "A*", "{b}"]
    rows = pa.table({"id": range(5), "text": ["C", "**C**", "c++", "**Yes.**", "*c*"]})
    choices = ["C*", "C++", "Yes"]
    found = gm.prompt(rows, prompt="{{ text }}", model="m", choices=choices, gates={"min_ok": 0.1})
    assert found["answer"].to_pylist() == ["C++", "Yes"]


def test_nested_values_are_of_their_types(chat: ChatServer) -> None:
    """A text is no list of its letters, an object without a field has none that is null, and 1.5 is not 1."""
    chat.set(answer="plain", structured=False)
    said = {
        '{"s": ["ab"], "o": {"a": 1, "b": null}}': True, '{"s": [], "o": {"a": 1, "b": "x", "z": 3}}': True,
        '{"s": "ab", "o": {"a": 1, "b": "x"}}': False, '{"s": ["ab"], "o": {"a": 1}}': False,
        '{"s": [3], "o": {"a": 1, "b": "x"}}': False, '{"s": ["ab"], "o": {"a": true, "b": "x"}}': False,
        '{"s": {"k": "v"}, "o": {"a": 1, "b": "x"}}': False, '{"s": ["ab"], "o": {"a": 1.5, "b": "x"}}': False,
        '{"s": ["ab"], "o": {"a": "1", "b": "x"}}': False, '{"s": ["ab"], "o": {"a": 1e300, "b": "x"}}': False,
    }  # fmt: skip
    rows = pa.table({"id": range(len(said)), "text": list(said)})
    returns = {"s": "list<string>", "o": "struct<a: int64, b: string>"}
    found = gm.prompt(rows, prompt="{{ text }}", model="m", returns=returns, keep=["id"], gates={"min_ok": 0.1})
    assert found["id"].to_pylist() == [n for n, fits in enumerate(said.values()) if fits]
    assert found["s"].to_pylist() == [["ab"], []]
    assert found["o"].to_pylist() == [{"a": 1, "b": None}, {"a": 1, "b": "x"}]


def test_an_answer_that_never_fits_is_not_kept(chat: ChatServer, tmp_path: Path) -> None:
    """In a cache it would be the answer to every retry."""
    pq.write_table(table(20), tmp_path / "rows.parquet")
    chat.set(answer="never")
    ask = {"prompt": "{{ text }}", "model": "m", "choices": ["yes", "no"], "cache": str(tmp_path / "kept")}
    with pytest.raises(gm.GristmillError):
        gm.prompt(str(tmp_path / "rows.parquet"), tmp_path / "out", **ask)
    chat.set(answer="choice")
    assert gm.prompt(str(tmp_path / "rows.parquet"), tmp_path / "out", **ask).rows_ok == 20


def test_columns_named_as_jinja_names_its_own() -> None:
    """Are columns, unless they are called."""
    found = Template("{{ range }} {{ dict }} {% for n in namespace(a=1) or range(2) %}{% endfor %}", "p")
    assert found.columns == ("dict", "range")
    assert Template("{% for n in range(2) %}{{ n }}{{ x }}{% endfor %}", "p").of({"x": "-"}) == "0-1-"
    assert Template("{{ range }} {{ dict }}", "p").of({"range": "1-2", "dict": "D"}) == "1-2 D"


@pytest.mark.long
@pytest.mark.parametrize("options", [{"requests_per_minute": 300}, {"concurrency": 2}])
def test_a_row_that_waits_for_its_turn_is_in_time(chat: ChatServer, options: dict[str, Any]) -> None:
    """The limit of a call is of the request; what limits and room for others take is not the row's fault."""
    chat.set(latency=0.2)
    found = gm.prompt(table(30), prompt="{{ text }}", model="m", batch_timeout=2.0, workers=1, **options)
    assert found.num_rows == 30 and chat.told()["requests"] == 30


def test_a_text_that_a_filter_forbids_is_a_dead_letter_alone(chat: ChatServer, tmp_path: Path) -> None:
    """With a 403, as a wrong key: it is the key's if that may not list the models. Also if such a text is the first."""
    chat.set(forbids="row 0 ")
    gates = {"min_ok": 0.5}
    assert gm.prompt(table(40), tmp_path / "a", prompt="{{ text }}", model="m", gates=gates).rows_ok == 39
    chat.set(forbids="row", lists=False, latency=0.05)
    with pytest.raises(BadModel, match="the endpoint refuses the key: 403: Forbidden by policy"):
        gm.prompt(table(40), tmp_path / "b", prompt="{{ text }}", model="m", gates=gates)
    assert chat.told()["requests"] <= 40 + 1 + 2


def test_texts_themselves(chat: ChatServer) -> None:
    """A list of texts is these texts, as for embed."""
    assert gm.prompt(["a", "b"], prompt="{{ text }}", model="m")["answer"].to_pylist() == ["<a>", "<b>"]


@pytest.mark.long
def test_what_was_paid_for_before_there_was_a_plan_is_kept(chat: ChatServer, tmp_path: Path) -> None:
    """The first rows: after a kill, and where the costs end the run among them."""
    pq.write_table(table(60), tmp_path / "rows.parquet")
    typed = [sys.executable, "-m", "gristmill", "prompt", "rows.parquet", "out", "--prompt", "{{ text }}"]
    typed += ["--model", "m", "--keep", "id", "--workers", "1"]
    chat.set(stuck="row 10 is here")
    run = subprocess.Popen(typed, cwd=tmp_path, stderr=subprocess.DEVNULL)
    while sum(chat.told()["answered"].values()) < 31 and run.poll() is None:
        time.sleep(0.05)
    time.sleep(0.2)
    for process in [*psutil.Process(run.pid).children(recursive=True), psutil.Process(run.pid)]:
        process.kill()
    run.wait()
    chat.set(stuck=None)
    assert subprocess.run(typed, cwd=tmp_path, stderr=subprocess.DEVNULL).returncode == 0
    assert set(chat.told()["answered"].values()) == {1} and chat.told()["requests"] == 61
    price = {"input": "1/token", "output": "0/token"}  # 5 dollars a row
    ask: dict[str, Any] = {"prompt": "b {{ text }}", "model": "m", "price": price, "keep": ["id"]}
    for _ in range(4):
        with contextlib.suppress(RunFailed):
            gm.prompt(table(20), tmp_path / "b", max_cost=35, **ask)
    assert gm.read(tmp_path / "b").count_rows() == 20 and chat.told()["requests"] == 61 + 20


def test_an_order_that_is_sent_counts(chat: ChatServer, tmp_path: Path) -> None:
    """Of the columns of an answer, which a model fills one after the other, and of the request's own members."""
    chat.set(answer="auto")
    ask: dict[str, Any] = {"prompt": "{{ text }}", "model": "m", "keep": ["id"]}
    reason = {"reason": "string", "verdict": "string"}
    gm.prompt(table(5), tmp_path / "out", returns=reason, request={"a": {"b": 1, "c": 2}}, **ask)
    for other in (
        {"returns": dict(reversed(reason.items())), "request": {"a": {"b": 1, "c": 2}}},
        {"returns": reason, "request": {"a": {"c": 2, "b": 1}}},
    ):
        with pytest.raises(PlanChanged):
            gm.prompt(table(5), tmp_path / "out", **other, **ask)


def test_a_forbidden_text_stops_no_later_run(chat: ChatServer, tmp_path: Path) -> None:
    """Alone in a retry, and where all that is left is forbidden: the key may list the models."""
    chat.set(forbids="row 1")  # 1, and 10 to 19
    rows, gates = tmp_path / "rows.parquet", {"min_ok": 0.4}
    pq.write_table(table(20), rows)
    assert gm.prompt(str(rows), tmp_path / "out", prompt="{{ text }}", model="m", gates=gates).rows_ok == 9
    job = gm.Job(gm.source(str(rows)), gm.Prompt("{{ text }}", "m"), gm.sink(tmp_path / "out"), gates=gates)
    assert gm.retry_dead(job).rows_dead == 11
    chat.set(forbids="")
    assert gm.retry_dead(job).rows_ok == 20


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "odd",
    [
        {"message": {"content": [{"type": "text", "text": "<odd>"}]}},
        {"usage": ["many"]},
        {"usage": {"prompt_tokens": "3", "completion_tokens": 2.0, "total_tokens": None}},
        {"usage": {"prompt_tokens": 1e30, "completion_tokens": -5}},
        {"finish_reason": {"type": "stop"}},
        {"message": {"content": None}, "finish_reason": "length"},
        {"message": {"content": 3}},
        {"message": "text"},
        {"logprobs": {"content": [{"token": "x", "logprob": None}]}},
    ],
)
def test_an_odd_reply_is_its_rows_own_matter(chat: ChatServer, odd: dict[str, Any]) -> None:
    """Of whatever types its values are: the row has an answer or is a dead letter, and the others stand."""
    chat.set(odd=odd)
    rows = pa.table({"id": range(8), "text": ["a", "b", "odd", *"cdefg"]})
    found = gm.prompt(rows, prompt="{{ text }}", model="m", keep=["id"], keep_usage=True, gates={"min_ok": 0.8})
    others = [row for row in found.to_pylist() if row["id"] != 2]
    assert [row["answer"] for row in others] == ["<a>", "<b>", *(f"<{text}>" for text in "cdefg")]
    assert {row["answer"] for row in found.to_pylist() if row["id"] == 2} <= {"<odd>"}


@pytest.mark.long
def test_an_endpoint_that_is_busy_at_first_is_waited_for(chat: ChatServer) -> None:
    """It is there, and says so: more often than one that says nothing is asked."""
    chat.set(busy=1.0, retry_after=0.2)

    def free() -> None:
        while chat.told()["requests"] < 2 * FIRST_TRIES:
            time.sleep(0.05)
        chat.set(busy=0.0)

    freed = threading.Thread(target=free, daemon=True)
    freed.start()
    try:
        assert gm.prompt(table(3), prompt="{{ text }}", model="m").num_rows == 3
    finally:
        freed.join()
    assert chat.told()["requests"] >= 2 * FIRST_TRIES + 3


@pytest.mark.parametrize(
    ("tokens", "text"),
    [
        ([('{"', 0.5), ("choice", 0.5), ('":"', 0.5), ("tea", 0.9), ('"}', 0.5)], '{"choice":"tea"}'),
        ([('{"choice":"', 0.5), ("caf\\u00e9", 0.9), ('"}', 0.5)], '{"choice":"caf\\u00e9"}'),
        ([('{"choice":"', 0.5), ("te", 0.9), ("a", 1.0), ('"}', 0.5), ("<|end|>", 0.2)], '{"choice":"tea"}'),
        ([(" tea", 0.9), ("\n", 0.1)], " tea\n"),
    ],
)
def test_the_score_of_a_choice_is_that_of_its_tokens(tokens: list[tuple[str, float]], text: str) -> None:
    """Escaped or not, and whatever comes after them."""
    form = _Form(gm.Prompt("x", "m", choices=["tea", "café"]))
    assert form.score(Reply(text, tokens=tuple((t, math.log(p)) for t, p in tokens))) == pytest.approx(0.9)
    assert form.score(Reply(text)) is None and form.score(Reply(text, tokens=(("other", -1.0),))) is None


def lethal(row: dict[str, Any]) -> str:
    """What to ask for a row; every eightieth ends its process, once earlier answers are kept."""
    if row["id"] % 80 == 50:
        time.sleep(0.4)
        os._exit(3)
    return f"row {row['id']}"


@pytest.mark.long
def test_what_dead_workers_were_answered_is_paid_once_and_counted(chat: ChatServer, tmp_path: Path) -> None:
    """Rows that kill their workers are found, and no other is asked for again; the figures and `max_cost` are of all
    workers of the run, whichever died.
    """
    price = {"input": "1/token", "output": "0/token"}  # 2 dollars a row
    ask: dict[str, Any] = {
        "messages": lethal, "model": "m", "price": price, "keep": ["id"], "workers": 1, "concurrency": 1,
        "gates": {"min_ok": 0.9},
    }  # fmt: skip
    with pytest.raises(RunFailed, match="max_cost 180"):
        gm.prompt(table(160), tmp_path / "out", max_cost=180, **ask)
    told = chat.told()
    assert {n for n, times in told["answered"].items() if times > 1} <= {"row 47"} and 80 <= told["requests"] <= 90
    report = gm.prompt(table(160), tmp_path / "out", **ask)
    told = chat.told()
    # In flight when the process ended, the three before it: the next one's prompt is made while it waits.
    assert {n for n, times in told["answered"].items() if times > 1} <= {"row 47", "row 127"}
    assert told["answered"].keys() == {f"row {n}" for n in range(160) if n % 80 != 50}
    assert report.rows_ok == 158 and report.rows_dead == 2
    assert report.used["requests"] == 158 and report.used["cost"] == 158 * 2


def test_a_cache_that_breaks_harms_no_row(chat: ChatServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """It keeps no more, which is said once; the rows have their answers."""
    cache = tmp_path / "kept"
    AnswerCache(str(cache)).close()
    with sqlite3.connect(cache / "answers.sqlite") as held:
        held.execute("CREATE TRIGGER full BEFORE INSERT ON answers BEGIN SELECT RAISE(ABORT, 'the disk is full'); END")
    found = gm.prompt(table(5), prompt="{{ text }}", model="m", cache=str(cache), keep=["id"], workers=0)
    assert found["answer"].to_pylist() == [f"<row {n} is here>" for n in range(5)]
    assert capfd.readouterr().err.count("the disk is full") == 1


@pytest.mark.parametrize("depth", [900, 100_000])
def test_an_answer_that_is_nested_without_end_is_asked_for_once_more(
    chat: ChatServer, tmp_path: Path, depth: int
) -> None:
    """As any other that does not fit; what both took is counted."""
    chat.set(answer="json", odd={"message": {"content": "[" * depth}})
    price = {"input": "1/token", "output": "0/token"}
    rows = pa.table({"id": range(4), "text": ["a", "b", "odd", "c"]})
    report = gm.prompt(
        rows, tmp_path / "out", prompt="{{ text }}", model="m", keep=["id"], returns={"n": "int64"}, workers=0,
        price=price,
    )  # fmt: skip
    assert (report.rows_ok, report.rows_dead, report.used["requests"]) == (4, 0, 5)
    assert chat.told()["requests"] == 5


@pytest.mark.parametrize("shared", [True, False])
def test_equal_prompts_are_remembered_by_their_size(
    chat: ChatServer, monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    """Long answers are forgotten sooner; whoever asks again is answered, and the endpoint asked again only where no
    file beside the plan has the answer.
    """
    if not shared:
        monkeypatch.setattr("gristmill.worker.pipeline.ShardWorker._once", lambda *_: None)
    monkeypatch.setattr("gristmill.models.paid.MOST_REMEMBERED", 3000)
    ask: dict[str, Any] = {"prompt": "{{ text }}", "model": "m", "dedupe": True, "workers": 0, "concurrency": 1}
    texts = ["a", "b", "a", "long " * 600, *(f"other {n}" for n in range(12)), "b", "b"]
    found = gm.prompt(texts, **ask)["answer"].to_pylist()
    assert found == [f"<{text}>" for text in texts]
    told = chat.told()["answered"]
    assert (told["a"], told["b"]) == (1, 1 if shared else 2)


@pytest.mark.long
def test_only_answers_that_are_of_use_are_kept_for_the_next_run(chat: ChatServer, tmp_path: Path) -> None:
    """Of a run whose gate fails, answers that fit no column are asked for again, and the report says how many."""
    chat.set(answer="never")
    asks = gm.Prompt("{{ text }}", "m", returns={"n": "int64"})
    job = gm.Job(table(40), asks, gm.sink(tmp_path / "out", keep=["id"]))
    for _ in range(2):
        with pytest.raises(gm.GristmillError) as failed:
            job.run()
        used = failed.value.report.used
        assert used["kept"] == 0 and 0 < used["again"] <= 40, used
        shown = str(failed.value.report)
        assert "kept for the next run" not in shown and "to be asked again, as their answers failed" in shown


@pytest.mark.parametrize(("second", "first"), [(1, 0), (1.0, 0.0), ("1", "0")])
def test_the_first_of_several_choices_is_that_with_the_lowest_index(
    chat: ChatServer, second: object, first: object
) -> None:
    """Whichever comes first in the list, and however it is written; without an index that is the first."""
    two = [{"index": second, "message": {"content": "other"}}, {"index": first, "message": {"content": "this"}}]
    chat.set(instead={"choices": two})
    rows = pa.table({"id": range(2), "text": ["a", "odd"]})
    found = gm.prompt(rows, prompt="{{ text }}", model="m", keep=["id"])
    assert [row["answer"] for row in found.to_pylist()] == ["<a>", "this"]
