"""Keys and passwords of endpoints reach nothing that is written or shown, however they came, whoever repeats them."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import gristmill as gm
from gristmill.errors import BadModel
from gristmill.job.secret import Secret, scrub, scrub_values
from llmserver import ChatServer

KEY = "sk-very/secret=0123456789"
PASSWORD = "open%2Fsesame"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ChatServer]:
    """One that repeats the headers of requests that it refuses."""
    monkeypatch.chdir(tmp_path)
    pq.write_table(
        pa.table({"id": range(20), "text": [f"{'tell' if n % 5 == 3 else 'ok'} {n}" for n in range(20)]}), "in.parquet"
    )
    with ChatServer(key="", tells="tell") as found:
        yield found


def run(*typed: str, **env: str) -> str:
    """What a command prints."""
    done = subprocess.run(
        [sys.executable, "-m", "gristmill", *typed], capture_output=True, text=True, env={**os.environ, **env}
    )
    return done.stdout + done.stderr


def told(printed: str, *secrets: str) -> list[str]:
    """Where secrets are: in files of this folder, or in what was printed."""
    found = [secret for secret in secrets if secret in printed]
    for path in Path().rglob("*"):
        if path.is_file():
            found += [str(path) for secret in secrets if secret.encode() in path.read_bytes()]
    return found


@pytest.mark.long
def test_a_key_of_the_environment_that_the_endpoint_repeats(server: ChatServer) -> None:
    """In refusals of rows, of all rows, and in a batch's output."""
    env = {"OPENAI_API_KEY": KEY, "OPENAI_BASE_URL": server.url}
    ask = (
        "prompt",
        "in.parquet",
        "out",
        "--prompt",
        "{{ text }}",
        "--model",
        "m",
        "--min-ok",
        "0",
        "--set",
        "running.log=l",
    )
    printed = run(*ask, **env) + run("dead", "out", **env)
    assert "headers were" in printed and told(printed, KEY, json.dumps(KEY)[1:-1].replace("/", "\\/")) == []
    body = json.dumps({"messages": [{"role": "user", "content": "tell"}]})
    Path("b.jsonl").write_text(
        f'{{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {body}}}\n'
    )
    printed = run("run-batch", "-i", "b.jsonl", "-o", "o.jsonl", "--model", "m", **env)
    assert "headers were" in Path("o.jsonl").read_text() and told(printed, KEY) == []
    server.set(key="another", tells="")
    printed = run(*ask[:2], "out2", *ask[3:], **env)
    assert "Incorrect API key" in printed and told(printed, KEY) == []


def test_a_key_that_is_written_in_a_script(server: ChatServer, capfd: pytest.CaptureFixture[str]) -> None:
    """Is one as well: of prompts, vectors, scores and requests, wherever the endpoint repeats it."""
    source, asked = gm.source("in.parquet"), {"base_url": server.url, "api_key": KEY}
    models = {
        "prompt": gm.Prompt("{{ text }}", "m", **asked),  # type: ignore[arg-type]
        "vector": gm.TextEmbedder("m", text="text", **asked),  # type: ignore[arg-type]
        "score": gm.Score("{{ text }}", "m", continuations=["a"], **asked),  # type: ignore[arg-type]
    }
    for name, model in models.items():
        gm.Job(source, model, gm.sink(name, keep=["id"]), gates={"min_ok": 0}, workers=1, log="l").run()
        (message, *_) = gm.dead(name)["message"].to_pylist()
        assert "headers were" in message, name
    server.set(key="another", tells="")
    with pytest.raises(BadModel, match="Incorrect API key"):
        gm.prompt("in.parquet", "refused", prompt="{{ text }}", model="m", workers=1, **asked)  # type: ignore[arg-type]
    assert told("".join(capfd.readouterr()), KEY) == []


def test_names_in_what_an_endpoint_replies_are_scrubbed() -> None:
    """As the texts beside them; the columns of a dead letter's row keep theirs."""
    assert scrub_values({KEY: [{f"a {KEY}": KEY}], 1: 2}, [Secret("***", KEY)]) == {"***": [{"a ***": "***"}], 1: 2}
    odd = 'k"ey\\é/ 1'
    assert scrub(f"{odd} {json.dumps(odd)} {quote(odd, safe='')}", [Secret("***", odd)]) == '*** "***" ***'


@pytest.mark.long
@pytest.mark.parametrize("how", ["option", "environment", "job file"])
def test_a_password_in_an_address(server: ChatServer, how: str) -> None:
    """Wherever the address is given, and whether anybody is there; also as it is sent."""
    sent = base64.b64encode(b"user:open/sesame").decode()
    env = {"OPENAI_API_KEY": KEY}
    for number, (host, says) in enumerate(
        ((f"127.0.0.1:{server.port}", "headers were"), ("127.0.0.1:9", "no answer"), ("host:port", "is not an address"))
    ):
        url, out = f"http://user:{PASSWORD}@{host}/v1", f"out{number}"
        ask = ["prompt", "in.parquet", out, "--prompt", "{{ text }}", "--model", "m", "--min-ok", "0"]
        if how == "option":
            printed = run(*ask, "--base-url", url, **env)
        elif how == "environment":
            printed = run(*ask, **env, OPENAI_BASE_URL=url)
        else:
            model = "model: {prompt: '{{ text }}', llm: m, base_url: '${env:GATE}'}"
            Path("job.yaml").write_text(f"source: in.parquet\n{model}\nsink: {out}\ngates: {{min_ok: 0}}\n")
            printed = run("run", "job.yaml", **env, GATE=url)
        printed += run("dead", out, **env) if number == 0 else ""
        assert says in printed and told(printed, PASSWORD, "open/sesame", sent, KEY) == [], printed


def test_a_user_and_a_key(server: ChatServer) -> None:
    """Are the same header: told before any request."""
    with pytest.raises(BadModel, match="base_url has a user, and there is an api_key"):
        gm.prompt(["a"], prompt="{{ text }}", model="m", base_url=server.url.replace("//", "//a:b@"), api_key="k")
