"""Prompts answered by vLLM on this machine, and by `vllm serve`: SmolLM2-135M, on vLLM's build for CPUs, which has an
environment of its own (make test-vllm).
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import gristmill as gm
import kit
from gristmill.errors import BadModel, MissingExtra, RunFailed
from gristmill.models import llmfiles
from gristmill.models.llmfiles import LlmFiles, backend_of, find_llm
from gristmill.models.replies import Refused
from gristmill.models.vllm import VllmGenerator

# Compiling takes minutes on two cores, for a model that answers in seconds.
ENGINE = {"enforce_eager": True}
TYPED = ["--vllm", "enforce_eager=true", "--threads", "1"]
COUNTRIES = {"France": "Paris", "Spain": "Madrid", "Peru": "Lima", "Japan": "Tokyo", "Germany": "Berlin"}
# `vllm serve` and `vllm run-batch`: the command `vllm` asks for metadata that the build for CPUs does not have.
SERVE = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
RUN_BATCH = [sys.executable, "-m", "vllm.entrypoints.openai.run_batch"]
HERE = importlib.util.find_spec("vllm") is not None
with_vllm = [
    pytest.mark.skipif(not HERE, reason="vLLM is not installed here: make test-vllm makes an environment that has it"),
    pytest.mark.slow,
    pytest.mark.real_model,
    pytest.mark.timeout(1200),
]


def marked(test: Any) -> Any:
    """A test that needs vLLM."""
    for mark in with_vllm:
        test = mark(test)
    return test


@pytest.fixture(autouse=True)
def nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """No endpoint in the environment."""
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def folder(path: Path) -> Path:
    """A folder with the files of a model in safetensors, as far as they count before it is loaded."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"max_position_embeddings": 2048}))
    (path / "model.safetensors").write_bytes(b"")
    return path


def table(names: list[str]) -> pa.Table:
    return pa.table({"id": range(len(names)), "name": names})


def engines() -> set[int]:
    """Processes of vLLM's engines that run."""
    found = set()
    for process in psutil.process_iter(["pid", "cmdline", "status"]):
        line = " ".join(process.info["cmdline"] or [])
        if line.startswith(("VLLM::", "[VLLM")) and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.add(process.info["pid"])
    return found


# ---------------------------------------------------------------- which backend


def test_files_and_gpus_pick_the_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with safetensors is vLLM's, one of OpenVINO GenAI's, a GGUF file's the GPU's; what is said wins."""
    safetensors = find_llm(str(folder(tmp_path / "hf")), elsewhere=False)
    assert safetensors is not None and safetensors.context == 2048 and safetensors.backends == ("vllm",)
    gguf = LlmFiles(tmp_path / "m.gguf", (), None, ("genai", "vllm"))
    graph = LlmFiles(tmp_path / "ov", (), None)
    here: dict[str, bool] = {}
    gpus: list[str] = []
    monkeypatch.setattr(llmfiles, "installed", lambda name: here.get(name, False))
    monkeypatch.setattr(llmfiles.machine, "gpus", lambda: gpus)
    with pytest.raises(BadModel, match=r"runs on vLLM \(pip install 'gristmill\[vllm\]'.*optimum-cli export openvino"):
        backend_of(safetensors, "auto")
    assert [backend_of(f, "auto") for f in (gguf, graph)] == ["genai", "genai"]
    here["vllm"] = True
    assert backend_of(safetensors, "auto") == "vllm"
    gpus.append("0")
    assert backend_of(safetensors, "auto") == "vllm" and backend_of(graph, "auto") == "genai"
    assert backend_of(gguf, "auto") == "vllm"  # nothing else is installed
    here["openvino_genai"] = True
    assert backend_of(gguf, "auto") == "genai"  # vLLM lacks its plugin
    with pytest.raises(BadModel, match="pip install vllm-gguf-plugin"):
        backend_of(gguf, "vllm")
    here["vllm_gguf_plugin"] = True
    assert backend_of(gguf, "auto") == "vllm" and backend_of(gguf, "genai") == "genai"
    for files, asked in ((safetensors, "genai"), (graph, "vllm")):
        with pytest.raises(BadModel, match=f"backend {asked} cannot open it"):
            backend_of(files, asked)  # type: ignore[arg-type]


def test_what_is_not_taken_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is loaded, with exit code 2; so is vLLM where it is not installed, with how to install it."""
    model = str(folder(tmp_path / "hf"))
    monkeypatch.setattr(llmfiles.machine, "gpus", lambda: ["0"])
    for options, said in (
        ({"price": {"input": "1/1M", "output": "1/1M"}}, "price is for endpoints, and .*hf is a model on this machine"),
        ({"request": {"reasoning_effort": "low"}}, "does not take: it takes seed, stop,.* chat_template_kwargs"),
        ({"backend": "genai"}, "backend genai cannot open it: export it with `optimum-cli"),
        ({"backend": "torch"}, "backend is 'torch'"),
    ):
        with pytest.raises(Exception, match=said) as e:
            gm.prompt(table(["a"]), prompt="{{ name }}", model=model, **options)  # type: ignore[call-overload]
        assert e.value.exit_code == 2
    with pytest.raises(BadModel, match="vllm is for a model on this machine, and m names none"):
        gm.prompt(table(["a"]), prompt="{{ name }}", model="m", vllm={"max_model_len": 5})
    if not HERE:
        with pytest.raises(MissingExtra, match=r"needs vllm, .* pip install 'gristmill\[vllm\]'"):
            gm.prompt(table(["a"]), prompt="{{ name }}", model=model)


# ---------------------------------------------------------------- the engine


@pytest.fixture(scope="module")
def smollm() -> str:
    try:
        return str(kit.smollm_folder())
    except kit.KitError as e:
        pytest.skip(str(e))


@pytest.fixture(scope="module")
def engine(smollm: str) -> Iterator[VllmGenerator]:
    """One that all tests ask which need no run."""
    before = engines()
    files = find_llm(smollm, elsewhere=False)
    assert files is not None
    found = VllmGenerator(files, threads=1, most=None, request={}, engine=ENGINE, choice="choice")
    yield found
    begun = time.monotonic()
    asyncio.run(found.close())
    assert engines() <= before and time.monotonic() - begun < 10


def asked(engine: VllmGenerator, *texts: str, **fields: Any) -> list[dict[str, Any]]:
    async def all_of_them() -> list[dict[str, Any]]:
        bodies = [{"messages": [{"role": "user", "content": text}], **fields} for text in texts]
        return await asyncio.gather(*(engine.ask(body, 1.0) for body in bodies))

    return asyncio.run(all_of_them())


def said(reply: dict[str, Any]) -> str:
    return str(reply["choices"][0]["message"]["content"])


@marked
def test_answers_are_those_of_transformers(engine: VllmGenerator, smollm: str) -> None:
    """The same first tokens as transformers' greedy ones, from the same files; and as OpenVINO GenAI would say."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm)
    model = AutoModelForCausalLM.from_pretrained(smollm, dtype=torch.bfloat16)
    same = 0
    texts = [f"What is the capital of {name}?" for name in COUNTRIES]
    for text, reply in zip(texts, asked(engine, *texts, max_tokens=8), strict=True):
        chat = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        made = model.generate(**chat, max_new_tokens=8, do_sample=False)[0, chat["input_ids"].shape[1] :]
        same += tokenizer.decode(made, skip_special_tokens=True) == said(reply)
        assert reply["usage"]["prompt_tokens"] == chat["input_ids"].shape[1]
        assert 0 < reply["usage"]["completion_tokens"] <= 8
    assert same >= len(texts) - 1  # bfloat16: two tokens may be as good as equally likely


@marked
def test_requests_have_what_they_ask_for(engine: VllmGenerator) -> None:
    """Choices, columns, log-probabilities, ends, seeds; a prompt that is too long is refused with both counts."""
    form = {"type": "object", "properties": {"choice": {"type": "string", "enum": ["yes", 'no "way"']}}}

    def as_schema(schema: dict[str, Any]) -> dict[str, Any]:
        return {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": schema}}

    (reply,) = asked(engine, "Is it raining?", response_format=as_schema(form), logprobs=True, max_tokens=20)
    assert said(reply) in ("yes", 'no "way"')
    told = reply["choices"][0]["logprobs"]["content"]
    assert "".join(t["token"] for t in told).startswith(said(reply)) and all(t["logprob"] <= 0 for t in told)
    columns = {"film": {"type": "string"}, "stars": {"type": "integer"}, "good": {"type": "boolean"}}
    schema = {"type": "object", "properties": columns, "required": [*columns], "additionalProperties": False}
    (reply,) = asked(engine, "The film 'Up' deserves 5 stars.", response_format=as_schema(schema), max_tokens=100)
    if reply["choices"][0]["finish_reason"] == "stop":
        assert {k: type(v).__name__ for k, v in json.loads(said(reply)).items()} == {
            "film": "str", "stars": "int", "good": "bool"
        }  # fmt: skip
    assert "\n" not in said(reply)
    (reply,) = asked(engine, "Count from 1 to 20.", max_tokens=40, stop=["5"])
    assert "5" not in said(reply) and reply["choices"][0]["finish_reason"] == "stop"
    (reply,) = asked(engine, "Count from 1 to 20.", max_tokens=3)
    assert reply["choices"][0]["finish_reason"] == "length" and reply["usage"]["completion_tokens"] == 3
    drawn = [
        [said(r) for r in asked(engine, "A story of rain", "A story of tea", temperature=1.5, max_tokens=12, seed=seed)]
        for seed in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    with pytest.raises(Refused, match=r"the prompt has 9\d\d\d tokens, and the model's context is 8192"):
        asked(engine, "word " * 9000)
    with pytest.raises(Refused, match="min_p"):
        asked(engine, "a", min_p=7)


@marked
def test_dropped_requests_are_aborted(engine: VllmGenerator) -> None:
    """Nobody waits for them; the engine goes on with others, and tells that it does."""
    signs = []
    engine.alive = lambda: signs.append(time.monotonic())

    async def dropping() -> None:
        body = {
            "messages": [{"role": "user", "content": "Write a long story."}],
            "max_tokens": 4000,
            "ignore_eos": True,
        }
        long = [asyncio.ensure_future(engine.ask(body, 1.0)) for _ in range(3)]
        while len(signs) < 8:
            await asyncio.sleep(0.1)
        assert engine.flying == 3
        for task in long:
            task.cancel()
        await asyncio.gather(*long, return_exceptions=True)

    asyncio.run(dropping())
    assert engine.flying == 0
    until = time.monotonic() + 60
    while engine._engine.get_num_unfinished_requests() and time.monotonic() < until:
        time.sleep(0.1)
    assert engine._engine.get_num_unfinished_requests() == 0
    assert said(asked(engine, "Say yes.", max_tokens=5)[0])


@marked
def test_an_engine_that_ends_ends_the_run(smollm: str) -> None:
    """Requests in flight and later ones raise RunFailed, which says to run again; nothing waits for ever."""
    files = find_llm(smollm, elsewhere=False)
    assert files is not None
    before = engines()
    found = VllmGenerator(files, threads=1, most=None, request={}, engine=ENGINE, choice="choice")
    try:
        for pid in engines() - before:
            os.kill(pid, signal.SIGKILL)
        for _ in range(2):
            with pytest.raises(RunFailed, match=r"vLLM's engine ended: .* run again"):
                asked(found, "Write a long story.", max_tokens=4000, ignore_eos=True)
    finally:
        asyncio.run(found.close())
    assert engines() <= before


# ---------------------------------------------------------------- runs


@marked
def test_a_model_that_cannot_be_loaded_says_why(smollm: str, tmp_path: Path) -> None:
    """In vLLM's own words, which its processes would print; and an argument that it does not have, with the nearest."""
    for given, said in (
        ({"max_model_lens": 5}, "vllm has 'max_model_lens', which vLLM's engine does not take; did you mean"),
        ({**ENGINE, "kv_cache_memory_bytes": 1 << 20}, "vLLM cannot load it: ValueError: No available memory"),
    ):
        with pytest.raises(BadModel, match=said):
            gm.prompt(table(["a"]), prompt="{{ name }}", model=smollm, vllm=given, workers=0, threads=1)
    assert not engines()


@marked
def test_a_script_without_a_guard(smollm: str, tmp_path: Path) -> None:
    """Its model's processes do not run it again, in the run's own process, too; choices have scores."""
    script = f"""
import gristmill as gm
print("once")
found = gm.prompt(["A wonderful film.", "Dreadful, I left.", "word " * 9000], prompt="Did they like it? {{{{ text }}}}",
    model={smollm!r}, choices=["yes", "no"], keep_score=True, keep_usage=True, gates={{"min_ok": 0}}, vllm={ENGINE!r},
    workers=0, threads=1)
print(found.to_pylist())
"""
    (tmp_path / "script.py").write_text(script)
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    once, rows = [line for line in done.stdout.splitlines() if line == "once" or line.startswith("[{")]
    assert once == "once"
    answers = [row for row in eval(rows) if row["answer"] is not None]
    assert len(answers) == 2
    for row in answers:
        assert row["answer"] in ("yes", "no") and 0 < row["answer_score"] <= 1
    assert not engines()


@marked
def test_killed_and_run_again_answers_only_the_rest(smollm: str, tmp_path: Path) -> None:
    """The driver is killed, and a worker: the engine's processes end with them, and nothing is asked twice."""
    rows = 60
    pq.write_table(table([f"number {n}" for n in range(rows)]), tmp_path / "rows.parquet")
    typed = [sys.executable, "-m", "gristmill", "prompt", "rows.parquet", "out", "--prompt", "Tell me of {{ name }}"]
    typed += ["--model", smollm, "--max-tokens", "24", "--keep", "id", "--concurrency", "4", "--workers", "1", *TYPED]
    run = subprocess.Popen(typed, cwd=tmp_path, stderr=subprocess.DEVNULL)
    until = time.monotonic() + 600
    while not any(path.stat().st_size > 500 for path in tmp_path.glob("out/_gristmill/*/journal/*")):
        assert run.poll() is None and time.monotonic() < until
        time.sleep(0.05)
    assert engines()
    run.kill()  # its worker dies with it, and the engine with the worker
    run.wait()
    until = time.monotonic() + 20
    while engines() and time.monotonic() < until:
        time.sleep(0.1)
    assert not engines()
    done = subprocess.run(typed, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = gm.read(str(tmp_path / "out")).to_table()
    assert found["id"].to_pylist() == list(range(rows)) and all(found["answer"].to_pylist())
    asked = re.search(r"asked +(\d+) requests", done.stdout + done.stderr)
    assert asked and int(asked[1]) == rows, done.stderr
    assert not engines()


# ---------------------------------------------------------------- an endpoint


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class Served:
    """`vllm serve`, which can be killed and started again at its address."""

    def __init__(self, model: str, log: Path) -> None:
        self._log = log
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}/v1"
        self._typed = [
            *SERVE, "--model", model, "--served-model-name", "smollm", "--host",
            "127.0.0.1", "--port", str(self.port), "--enforce-eager", "--kv-cache-memory-bytes", str(1 << 30),
            "--max-model-len", "2048",
        ]  # fmt: skip
        self.start()

    def start(self) -> None:
        with open(self._log, "ab") as log:
            self._process = subprocess.Popen(
                self._typed, stdout=log, stderr=log, start_new_session=True,
                env={**os.environ, "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"},
            )  # fmt: skip

    def ready(self) -> None:
        until = time.monotonic() + 600
        while True:
            assert self._process.poll() is None and time.monotonic() < until, self._log.read_text()[-3000:]
            with contextlib.suppress(OSError, urllib.error.URLError):
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=2).close()
                return
            time.sleep(0.5)

    def kill(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(self._process.pid)
            for process in [*root.children(recursive=True), root]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        self._process.wait()


@pytest.fixture(scope="module")
def served(smollm: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    server = Served(smollm, tmp_path_factory.mktemp("served") / "log")
    try:
        server.ready()
        yield server
    finally:
        server.kill()


@marked
def test_a_real_server_answers(served: Served) -> None:
    """Chat, structured output with the probability of its tokens, a prompt that is too long, a wrong model's name."""
    asking: dict[str, Any] = {"model": "smollm", "base_url": served.url, "temperature": 0, "workers": 0}
    names = [*COUNTRIES, "word " * 3000]
    found = gm.prompt(
        table(names), prompt="What is the capital of {{ name }}?", max_tokens=12, gates={"min_ok": 0}, keep_usage=True,
        **asking,
    )  # fmt: skip
    answers = {row["id"]: row for row in found.to_pylist() if row["answer"]}
    right = [capital in answers[n]["answer"] for n, capital in enumerate(COUNTRIES.values())]
    assert sum(right) >= 3 and len(answers) == len(COUNTRIES), found
    assert all(0 < row["answer_completion_tokens"] <= 12 for row in answers.values())
    rows = table(["A wonderful film.", "Dreadful, I left."])
    found = gm.prompt(
        rows, prompt="Did they like it? {{ name }}", choices=["yes", "no"], keep_score=True, max_tokens=20, **asking
    )
    assert set(found["answer"].to_pylist()) <= {"yes", "no"}
    assert all(0 < score <= 1 for score in found["answer_score"].to_pylist())
    with pytest.raises(BadModel, match="smolm") as wrong:
        gm.prompt(rows, prompt="{{ name }}", **{**asking, "model": "smolm"})
    assert wrong.value.exit_code == 2


@marked
def test_batches_are_answered_as_by_vllm_itself(served: Served, smollm: str, tmp_path: Path) -> None:
    """The same ids in the same order, with the same statuses and texts, as `vllm run-batch` has for the same file. A
    line that vLLM cannot read ends it; here it has a status of 400.
    """

    def line(name: str, body: dict[str, Any], url: str = "/v1/chat/completions") -> str:
        return json.dumps({"custom_id": name, "method": "POST", "url": url, "body": body})

    def chat(text: str, **more: Any) -> dict[str, Any]:
        return {"model": "smollm", "messages": [{"role": "user", "content": text}], "temperature": 0, **more}

    def answered(command: list[str], given: list[str], name: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / f"{name}-in.jsonl").write_text("\n".join(given) + "\n")
        environment = {**os.environ, "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
        typed = [*command, "-i", f"{name}-in.jsonl", "-o", f"{name}.jsonl"]
        return subprocess.run(typed, cwd=tmp_path, capture_output=True, text=True, env=environment)

    def lines_of(name: str) -> list[dict[str, Any]]:
        return [json.loads(text) for text in (tmp_path / f"{name}.jsonl").read_text().splitlines()]

    vllm = [*RUN_BATCH, "--model", smollm, "--served-model-name", "smollm", "--enforce-eager"]
    vllm += ["--kv-cache-memory-bytes", str(1 << 30), "--max-model-len", "2048"]
    ours = [sys.executable, "-m", "gristmill", "run-batch", "--model", "smollm", "--base-url", served.url]
    lines = [line(name, chat(f"What is the capital of {name}?", max_tokens=12)) for name in COUNTRIES]
    lines += [
        line("long", chat("word " * 3000)),
        line("other", {**chat("Hello!"), "model": "another"}),
        line("top", chat("Hello!", top_p=7.0)),
        line("elsewhere", chat("Hello!"), "/v1/nowhere"),
        line("Peru", chat("The same id.", max_tokens=3)),
    ]
    bad = line("bad", chat("Hello!", temperature="warm"))
    for name, command in (("theirs", vllm), ("ours", ours)):
        done = answered(command, lines, name)
        assert done.returncode == 0, done.stderr[-3000:]
        assert [row["custom_id"] for row in lines_of(name)] == [json.loads(text)["custom_id"] for text in lines], name

    def told(row: dict[str, Any]) -> tuple[str, int | None, bool]:
        return row["custom_id"], (row["response"] or {}).get("status_code"), row["error"] is None

    assert [told(row) for row in lines_of("ours")] == [told(row) for row in lines_of("theirs")]
    pairs = [*zip(lines_of("ours"), lines_of("theirs"), strict=True)][: len(COUNTRIES)]
    texts = [[said(row["response"]["body"]) for row in pair] for pair in pairs]
    assert sum(a == b for a, b in texts) >= len(COUNTRIES) - 1
    assert answered(vllm, [bad, lines[0]], "ended").returncode != 0
    assert answered(ours, [bad, lines[0]], "bad").returncode == 0
    assert [told(row)[1] for row in lines_of("bad")] == [400, 200]


@marked
@pytest.mark.leaves_children  # the server that all tests here share
def test_a_server_that_dies_in_the_middle(served: Served, tmp_path: Path) -> None:
    """The run waits for it, and can be stopped; once the server is back the next one asks only for the rest."""
    rows = 40
    pq.write_table(table([f"number {n}" for n in range(rows)]), tmp_path / "rows.parquet")
    typed = [sys.executable, "-m", "gristmill", "prompt", "rows.parquet", "out", "--prompt", "Tell me of {{ name }}"]
    typed += ["--model", "smollm", "--base-url", served.url, "--max-tokens", "24", "--keep", "id", "--concurrency", "4"]
    run = subprocess.Popen(typed, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 300
    while not any(path.stat().st_size > 500 for path in tmp_path.glob("out/_gristmill/*/journal/*")):
        assert run.poll() is None and time.monotonic() < until
        time.sleep(0.05)
    served.kill()
    time.sleep(2)
    assert run.poll() is None  # it tries again
    run.terminate()
    _, errors = run.communicate(timeout=60)
    assert run.returncode == 143, errors
    served.start()
    served.ready()
    done = subprocess.run(typed, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = gm.read(str(tmp_path / "out")).to_table()
    assert found["id"].to_pylist() == list(range(rows)) and all(found["answer"].to_pylist())
    asked = re.search(r"asked +(\d+) requests", done.stdout + done.stderr)
    assert asked and int(asked[1]) == rows, done.stdout + done.stderr
