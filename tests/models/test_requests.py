"""Batches of requests: one line for each, at its place, whatever becomes of it; nothing answered is asked again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import gristmill as gm
from gristmill.errors import BadJob, BadModel, RunFailed
from llmserver import KEY, ChatServer

pytestmark = pytest.mark.filterwarnings("ignore::gristmill.GristmillWarning")
CHAT = "/v1/chat/completions"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ChatServer]:
    """A server, its address and its key in the environment; the current folder is empty."""
    monkeypatch.chdir(tmp_path)
    with ChatServer() as made:
        monkeypatch.setenv("OPENAI_API_KEY", KEY)
        monkeypatch.setenv("OPENAI_BASE_URL", made.url)
        yield made


def request(custom_id: str, url: str = CHAT, **body: Any) -> str:
    """A line of a batch."""
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})


def chat(custom_id: str, text: str, **more: Any) -> str:
    """A line that asks for a chat completion."""
    return request(custom_id, messages=[{"role": "user", "content": text}], **more)


def write(*lines: str | bytes) -> None:
    Path("in.jsonl").write_bytes(b"\n".join(x.encode() if isinstance(x, str) else x for x in lines))


def read(path: str = "out.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def said(line: Mapping[str, Any]) -> Any:
    """What the endpoint answered to a chat."""
    return line["response"]["body"]["choices"][0]["message"]["content"]


def typed(*more: str) -> subprocess.CompletedProcess[str]:
    """The command, as people type it."""
    line = ["run-batch", "-i", "in.jsonl", "-o", "out.jsonl", "--model", "m", *more]
    return subprocess.run([sys.executable, "-m", "gristmill", *line], capture_output=True, text=True)


@pytest.mark.long
def test_a_batch_as_vllm_takes_it(server: ChatServer) -> None:
    """The same command line; a line for each request in their order, with what OpenAI's output has."""
    server.set(latency=0.01, slow=0.1, times=20)
    write(*(chat(f"request-{n}", f"row {n}", model="m", max_completion_tokens=9) for n in range(200)))
    done = typed()
    assert done.returncode == 0, done.stderr
    lines = read()
    assert [line["custom_id"] for line in lines] == [f"request-{n}" for n in range(200)]
    assert [said(line) for line in lines] == [f"<row {n}>" for n in range(200)]
    assert list(lines[0]) == ["id", "custom_id", "response", "error"] and len({line["id"] for line in lines}) == 200
    response = lines[0]["response"]
    assert (response["status_code"], response["request_id"][:2], lines[0]["error"]) == (200, "x-", None)
    assert response["body"]["object"] == "chat.completion" and response["body"]["usage"]["total_tokens"] == 4
    assert server.told()["bodies"][0]["max_completion_tokens"] == 9
    assert "asked       200 requests, 400 tokens in, 400 out" in done.stdout
    again = typed()
    assert again.returncode == 0 and "nothing to do" in again.stdout and server.told()["requests"] == 200


def test_every_form(server: ChatServer) -> None:
    """Chat, completions, embeddings, responses; and score and rerank, as vLLM has them."""
    server.set(nonsense=0.2)  # which is no reply in any form, and is asked for again
    write(
        chat("a", "one two"),
        request("b", "/v1/completions", prompt="one two", model="m"),
        request("c", "/v1/embeddings", input="one two three"),
        request("d", "/v1/responses", input="four", model=""),
        request("e", "/v1/score", text_1="x", text_2="y"),
        request("f", "/rerank", query="x", documents=["y"]),
    )
    report = gm.run_batch("in.jsonl", "out.jsonl", model="m")
    found = {line["custom_id"]: line["response"]["body"] for line in read()}
    assert found["a"]["choices"][0]["message"]["content"] == found["b"]["choices"][0]["text"] == "<one two>"
    assert found["c"]["data"][0]["embedding"] == [3.0, 0.5]
    assert found["d"]["output"][1]["content"][0]["text"] == "<four>"
    assert found["e"]["data"][0]["score"] == [1.0, 0.5] and found["f"]["results"][0]["relevance_score"] == 1.0
    assert {body["model"] for body in server.told()["bodies"]} == {"m"}
    assert report.used["requests"] == 6 and report.used["prompt_tokens"] == 2 + 2 + 3 + 1 + 1


WRONG: Sequence[tuple[str | bytes, str | None, int, str]] = (
    (b"{not json", None, 400, "the line is not a JSON object: "),
    (b"[1, 2]", None, 400, "the line is not a JSON object: '{' is expected"),
    (b'{"custom_id": "x"} {}', None, 400, "something follows the object"),
    (b"\xff\xfe\xfd", None, 400, "the line is not UTF-8"),
    (b"{}", None, 400, "there is no custom_id; there is no method; there is no url; there is no body"),
    (b'{"custom_id": 7, "method": "POST", "url": "/v1/embeddings", "body": {}}', None, 400, "custom_id is 7, not text"),
    (b'{"custom_id": "\\ud800", "method": "POST", "url": "/v1/embeddings", "body": {}}', None, 400, "custom_id is "),
    (b'{"custom_id": "n", "method": "POST", "url": "/v1/embeddings", "body": [1]}', "n", 400, "body is [1], not an "),
    (b'{"custom_id": "g", "method": "GET", "url": "/v1/embeddings", "body": {}}', "g", 400, "method is GET"),
    (request("u", "/v1/images", prompt="a cat"), "u", 400, "url is /v1/images: it must be one of /v1/chat/completions"),
    (chat("s", "x", stream=True), "s", 400, "stream is set"),
    (chat("o", "x", model="other"), "o", 404, "the model 'other' is not that of this run, 'm'"),
    (chat("t", "too long"), "t", 400, "maximum context length is 8 tokens"),
)  # fmt: skip


def test_whatever_is_wrong_stands_in_its_line(server: ChatServer) -> None:
    """Between the answers to its neighbours; nothing that is wrong in itself is sent."""
    lines = [part for wrong, *_ in WRONG for part in (chat("ok", "fine"), wrong)]
    write(*lines, "", "  ", chat("ok", "fine"))
    done = typed()
    assert done.returncode == 0, done.stderr
    found = read()
    assert len(found) == 2 * len(WRONG) + 1 and {said(line) for line in found[::2]} == {"<fine>"}
    for line, (_, custom_id, status, why) in zip(found[1::2], WRONG, strict=True):
        assert (line["custom_id"], line["response"]["status_code"]) == (custom_id, status)
        assert why in line["error"]["message"]
    codes = [line["error"]["code"] for line in found[1::2]]
    assert codes == ["invalid_request"] * (len(WRONG) - 1) + ["refused"]
    assert found[-2]["response"]["body"]["error"]["code"] == "context_length_exceeded"
    told = server.told()
    assert told["answered"] == {"fine": len(WRONG) + 1} and f"{len(WRONG)} errors" in done.stdout
    assert gm.verify("out.jsonl", deep=True).ok


@pytest.mark.long
def test_a_form_that_the_endpoint_does_not_have(server: ChatServer) -> None:
    """Is an error of these lines alone."""
    server.set(lacks=["embeddings"])
    write(*(line for n in range(30) for line in (request(f"e{n}", "/v1/embeddings", input="x"), chat(f"c{n}", "hi"))))
    gm.run_batch("in.jsonl", "out.jsonl", model="m", concurrency=2)
    lines = read()
    assert {line["response"]["status_code"] for line in lines[::2]} == {404} and said(lines[1]) == "<hi>"
    assert lines[0]["response"]["body"] == {"detail": "Not Found"}


@pytest.mark.long
def test_what_no_line_would_be_answered_for_stops(server: ChatServer) -> None:
    """A wrong key, model or address; nothing is published, and it is said after a few requests."""
    write(*(chat(f"{n}", "hi") for n in range(100)))
    for options, why, most in (
        ({"model": "gone"}, "refuses the address or the model: 404: The model `gone` does not exist", 32),
        ({"api_key": "wrong"}, "refuses the key: 401", 1),
        ({"base_url": f"{server.url}/nowhere"}, "refuses the address or the model: 404", 0),
        ({"base_url": "http://127.0.0.1:9/v1"}, "no answer to a row's request", 0),
    ):
        before = server.told()["requests"]
        code = 1 if why.startswith("no answer") else 2  # which may be there later
        with pytest.raises(gm.RunFailed if code == 1 else BadModel, match=why) as e:
            gm.run_batch("in.jsonl", "out.jsonl", **{"model": "m", **options})  # type: ignore[arg-type]
        assert e.value.exit_code == code and server.told()["requests"] - before <= most
        assert not Path("out.jsonl").exists()


@pytest.mark.long
def test_an_endpoint_that_goes_away_costs_no_line(server: ChatServer) -> None:
    """The job stops, with exit 1; what is answered is kept, and the rest is asked when it is there again."""
    write(*(chat(f"{n}", f"row {n}") for n in range(120)))
    server.set(latency=0.05)
    line = ["run-batch", "-i", "in.jsonl", "-o", "out.jsonl", "--model", "m", "--batch-timeout", "6", "--workers", "1"]
    run = subprocess.Popen([sys.executable, "-m", "gristmill", *line], stderr=subprocess.PIPE, text=True)
    while server.told()["requests"] < 60:
        time.sleep(0.02)
    server.set(down=True)
    _, told = run.communicate()
    assert run.returncode == 1 and "no answer from http://127.0.0.1" in told, told
    server.set(down=False, latency=0.0)
    report = gm.run_batch("in.jsonl", "out.jsonl", model="m")
    assert [said(line) for line in read()] == [f"<row {n}>" for n in range(120)] and report.rows_dead == 0


@pytest.mark.long
def test_one_request_that_is_never_answered_is_an_error(server: ChatServer) -> None:
    """As long as others are answered."""
    server.set(stuck="never")
    write(*(chat(f"{n}", "never" if n == 7 else f"row {n} of 40") for n in range(40)))
    report = gm.run_batch(
        "in.jsonl", "out.jsonl", model="m", batch_timeout=3.0, timeout=0.5, concurrency=1, requests_per_minute=700
    )
    lines = read()
    assert [line["error"] is None for line in lines] == [n != 7 for n in range(40)] and report.rows_dead == 0
    assert (lines[7]["response"], lines[7]["error"]["code"]) == (None, "unanswered")


@pytest.mark.long
def test_killed_and_run_again(server: ChatServer) -> None:
    """The lines are those of the requests, in their order, and only what was in flight is asked again."""
    count, kills, before = 1200, 3, 0
    write(*(chat(f"r{n}", "too long" if n % 100 == 3 else f"row {n}") for n in range(count)))
    server.set(latency=0.02)
    line = ["run-batch", "-i", "in.jsonl", "-o", "out.jsonl", "--model", "m", "--set", "running.shard_rows=400"]
    for _ in range(kills):
        run = subprocess.Popen([sys.executable, "-m", "gristmill", *line, "--workers", "1"], stderr=subprocess.DEVNULL)
        while server.told()["requests"] < before + 200 and run.poll() is None:
            time.sleep(0.02)
        for process in [*psutil.Process(run.pid).children(recursive=True), psutil.Process(run.pid)]:
            process.kill()
        run.wait()
        time.sleep(0.1)
        before = server.told()["requests"]
        assert not Path("out.jsonl").exists()
    done = typed("--set", "running.shard_rows=400", "--workers", "1")
    assert done.returncode == 0, done.stderr
    lines = read()
    assert [line["custom_id"] for line in lines] == [f"r{n}" for n in range(count)]
    refused = [n for n, line in enumerate(lines) if line["error"] is not None]
    assert refused == list(range(3, count, 100))
    assert all(said(lines[n]) == f"<row {n}>" for n in range(count) if n not in refused)
    again = server.told()["requests"] - count
    assert 0 <= again <= kills * 32 + 32, again  # and the first rows of a run that had no plan yet


def test_equal_ids_are_each_answered(server: ChatServer) -> None:
    """In their places, as vLLM does."""
    write(chat("same", "one"), chat("same", "two"), chat("same", "one"))
    gm.run_batch("in.jsonl", "out.jsonl", model="m", dedupe=True)
    assert [(line["custom_id"], said(line)) for line in read()] == [
        ("same", "<one>"),
        ("same", "<two>"),
        ("same", "<one>"),
    ]
    assert server.told()["requests"] == 2


@pytest.mark.long
def test_limits_prices_and_a_cache(server: ChatServer) -> None:
    """As for prompts."""
    write(*(chat(f"{n}", f"row {n}") for n in range(50)))
    price = {"input": "1/1K", "output": "1/1K"}
    first = gm.run_batch("in.jsonl", "a.jsonl", model="m", price=price, cache="kept", requests_per_minute=6000)
    assert first.used["cost"] == pytest.approx(0.2)
    second = gm.run_batch("in.jsonl", "b.jsonl", model="m", cache="kept")
    assert server.told()["requests"] == 50 and "requests" not in second.used
    assert [said(line) for line in read("b.jsonl")] == [f"<row {n}>" for n in range(50)]
    with pytest.raises(RunFailed, match="max_cost"):
        gm.run_batch("in.jsonl", "c.jsonl", model="m", price=price, max_cost=0.05, concurrency=1)


def test_requests_from_any_source(server: ChatServer) -> None:
    """Parquet with these columns; a job file; answers as a table, read back as they are in the lines."""
    body = '{"messages": [{"role": "user", "content": "hi"}], "seed": 12345678901234567890, "top_p": 0.10}'
    rows = pa.table(
        {"custom_id": ["a", "b"], "method": ["POST"] * 2, "url": [CHAT] * 2, "body": [body, "[]"], "n": [1, 2]}
    )
    pq.write_table(rows, "in.parquet")
    Path("job.yaml").write_text(
        "source: in.parquet\nmodel: {requests: m}\nsink: {uri: out.jsonl, format: openai-batch, keep: [custom_id, n]}\n"
    )
    gm.load_job("job.yaml").run()
    lines = read()
    assert [(line["n"], line["error"] is None) for line in lines] == [(1, True), (2, False)]
    assert "body is not an object" in lines[1]["error"]["message"]
    assert server.told()["bodies"][0]["seed"] == 12345678901234567890
    table = gm.read("out.jsonl").to_table().to_pylist()
    assert [json.loads(row["response"]) for row in table] == [line["response"] for line in lines]
    with pytest.raises(BadModel, match="'body' as text, but it is int64"):
        gm.Job(rows.set_column(3, "body", [[1, 2]]), gm.Requests("m"), "x/").run()


def test_a_job_file_of_the_command(server: ChatServer) -> None:
    """`--save` writes one that does the same."""
    write(chat("a", "hi"))
    assert typed("--save", "job.yaml").returncode == 0
    Path("out.jsonl").rename("first.jsonl")
    done = subprocess.run([sys.executable, "-m", "gristmill", "run", "job.yaml"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert read() == read("first.jsonl") and server.told()["requests"] == 1


def test_no_requests(server: ChatServer) -> None:
    """Are no lines."""
    write("", " ")
    assert gm.run_batch("in.jsonl", "out.jsonl", model="m").rows_ok == 0 and read() == []


@pytest.mark.long
def test_what_does_not_fit_is_said(server: ChatServer) -> None:
    """At the latest with the first answer."""
    write(chat("a", "hi"))
    for more, why in (
        (["--set", 'sink.keep=["url"]'], "openai-batch sink writes custom_id, method, url"),
        (["--set", "sink.format=parquet"], "give a file named .parquet"), (["--max-cost", "1"], "max_cost needs price"),
    ):  # fmt: skip
        done = typed(*more)
        assert done.returncode == 2 and why in done.stderr, (more, done.stderr)
    assert server.told()["requests"] <= 1
    with pytest.raises(BadJob, match="did you mean 'concurrency'"):
        gm.run_batch("in.jsonl", "out.jsonl", model="m", concurency=3)  # type: ignore[call-arg]
    shown = subprocess.run(
        [sys.executable, "-m", "gristmill", "run-batch", "--help"], capture_output=True, text=True, env=os.environ
    ).stdout
    assert "-i, --input-file FILE" in shown and "gristmill run-batch -i requests.jsonl -o answers.jsonl" in shown


def test_requests_for_a_path_are_sent_nowhere(server: ChatServer) -> None:
    """A model's file or folder is refused with the way out, also if mistyped; with an address it is a name there."""
    write(chat("a", "x"))
    Path("m.gguf").write_bytes(b"GGUF")
    Path("models/minilm").mkdir(parents=True)
    for name in ("m.gguf", "models/minilm/", "models/minilm", "../x", "modelz/", "models/miniln", "/x/model"):
        with pytest.raises(BadModel, match=r"is a path, .*`gristmill prompt`.* or serve it and give base_url") as e:
            gm.run_batch("in.jsonl", "out.jsonl", model=name)
        assert e.value.exit_code == 2
    assert server.told()["requests"] == 0
    for name, url in (("models/minilm", server.url), ("openai/gpt-4o", None)):  # sent: the server has another model
        with pytest.raises(BadModel, match=rf"404: The model `{name}` does not exist"):
            gm.run_batch("in.jsonl", "out.jsonl", model=name, base_url=url)


def test_a_request_is_known_by_its_url_too(server: ChatServer) -> None:
    """To `dedupe` and to a cache: bodies may be equal, and may have members of any name."""
    body = {"input": "a", "path": "embeddings", "body": {"input": "a"}}
    write(*(request(str(n), f"/v1/{path}", **body) for n, path in enumerate(("embeddings", "responses", "embeddings"))))
    gm.run_batch("in.jsonl", "out.jsonl", model="m", dedupe=True, cache="kept")
    assert ["data" in line["response"]["body"] for line in read()] == [True, False, True]
    assert server.told()["requests"] == 2


def test_odd_numbers_cost_no_line(server: ChatServer) -> None:
    """In requests, of hundreds of digits and over any limit, and in what the endpoint says of them."""
    server.set(odd={"usage": ["many"]})
    many = f'{{"custom_id": "a", "method": "POST", "url": "{CHAT}", "body": {{"max_tokens": 1{"0" * 400}, "messages": '
    write(
        chat("0", "x"), many + '[{"role": "user", "content": "b"}]}}', chat("1", "c", max_tokens=-5), chat("2", "odd")
    )
    gm.run_batch("in.jsonl", "out.jsonl", model="m", tokens_per_minute=10**11)
    assert [line["custom_id"] for line in read()] == ["0", "a", "1", "2"]
    assert [said(line) for line in read()] == ["<x>", "<b>", "<c>", "<odd>"]


def test_a_form_that_the_model_lacks_is_its_lines_error(server: ChatServer) -> None:
    """Though the endpoint names the model: others of its forms are answered."""
    server.set(lacks=["embeddings"], lacking="The model `m` does not support the embeddings API")
    write(*(chat(str(n), "x") for n in range(4)), request("e", "/v1/embeddings", input="x"), chat("5", "y"))
    gm.run_batch("in.jsonl", "out.jsonl", model="m")
    assert [line["response"]["status_code"] for line in read()] == [200] * 4 + [404, 200]


@pytest.mark.long
def test_a_backend_that_is_down_costs_no_line(server: ChatServer) -> None:
    """Behind a gateway that still lists its models: the job stops, and goes on once it is well."""
    write(*(chat(str(n), f"row {n}") for n in range(80)))
    server.set(broken=1.0)
    with pytest.raises((BadModel, RunFailed)):
        gm.run_batch("in.jsonl", "out.jsonl", model="m", batch_timeout=4.0, concurrency=40)
    server.set(broken=0.0)
    assert gm.run_batch("in.jsonl", "out.jsonl", model="m", batch_timeout=4.0, concurrency=40).rows_ok == 80
    assert [said(line) for line in read()] == [f"<row {n}>" for n in range(80)]
