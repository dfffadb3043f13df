"""Prompts answered by a model on this machine: SmolLM2-135M, as GGUF, through OpenVINO GenAI."""

from __future__ import annotations

import json
import re
import shutil
import signal
import struct
import subprocess
import sys
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
import kit
from gristmill.errors import BadModel, MissingExtra, PlanChanged
from gristmill.models.gguf import context_length
from gristmill.models.grammar import grammar_of
from gristmill.models.llmfiles import find_llm
from gristmill.process import extras

pytestmark = pytest.mark.filterwarnings("ignore::gristmill.GristmillWarning")
COUNTRIES = {"France": "Paris", "Spain": "Madrid", "Italy": "Rome", "Peru": "Lima", "Japan": "Tokyo", "Egypt": "Cairo"}


@pytest.fixture(autouse=True)
def nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """No endpoint in the environment."""
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


@pytest.fixture
def smollm() -> str:
    """The model's file, or a skip that says what is missing."""
    pytest.importorskip("openvino_genai")
    try:
        return str(kit.smollm())
    except kit.KitError as e:
        pytest.skip(str(e))


def gguf(path: Path, context: int = 8192, version: int = 3) -> Path:
    """A file that has the head of a GGUF file, with values of each kind before the one that counts."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value.encode())) + value.encode()

    entries = [
        text("general.architecture") + struct.pack("<I", 8) + text("llama"),
        text("general.quantized") + struct.pack("<I?", 7, True),
        text("some.numbers") + struct.pack("<IIQ3f", 9, 6, 3, 1, 2, 3),
        text("some.texts") + struct.pack("<IIQ", 9, 8, 2) + text("a") + text("ü"),
        text("llama.context_length") + struct.pack("<II", 4, context),
    ]
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", version, 0, len(entries)) + b"".join(entries))
    return path


def table(names: list[str]) -> pa.Table:
    return pa.table({"id": range(len(names)), "name": names})


# ---------------------------------------------------------------- before anything is loaded


def test_a_gguf_file_says_how_many_tokens_it_takes(tmp_path: Path) -> None:
    """Wherever in its head that stands; what is no such file, or half of one, is told as that."""
    assert context_length(gguf(tmp_path / "m.gguf", 4096)) == 4096
    whole = (tmp_path / "m.gguf").read_bytes()
    for content, said in (
        (b"PK\3\4", "does not begin with GGUF"),
        (whole[: len(whole) // 2], "cannot be read .* is it whole"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 40), "a text of 1099511627776 bytes"),
    ):
        (tmp_path / "bad.gguf").write_bytes(content)
        with pytest.raises(BadModel, match=said):
            context_length(tmp_path / "bad.gguf")
    with pytest.raises(BadModel, match="version 1 is not supported"):
        context_length(gguf(tmp_path / "old.gguf", version=1))


def test_which_names_are_models_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders and files that exist; a path where nothing is is told with the way out; others are an endpoint's."""
    monkeypatch.chdir(tmp_path)
    one = gguf(tmp_path / "one.gguf")
    found = find_llm("one.gguf", elsewhere=True)
    assert found is not None and (found.context, found.weight_bytes) == (8192, one.stat().st_size)
    folder = tmp_path / "ov"
    folder.mkdir()
    for name in ("openvino_model.xml", "openvino_model.bin", "openvino_tokenizer.xml"):
        (folder / name).write_text(name)
    (folder / "config.json").write_text(json.dumps({"text_config": {"max_position_embeddings": 2048}}))
    found = find_llm("ov", elsewhere=True)
    assert found is not None and found.context == 2048 and len(found.files) == 4
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")
    shutil.copy(one, tmp_path / "two.gguf")
    for llm, said in (
        ("./hf", r"has no openvino_model.xml \(it holds config.json\): export it with `optimum-cli export openvino"),
        ("two.ggu", None),
        ("twos.gguf", r"no such file or folder: give a folder .* or base_url.*; did you mean two.gguf\?$"),
        ("/nowhere/model", "there is no such file or folder: give"),
        (str(tmp_path), r"it holds one.gguf, two.gguf: give one of these"),
        ("hf/config.json", "this file is no .gguf"),
        ("gpt-4.1-mini", None),
        ("hf", None),
        ("nobody/has-this", None),
        ("accounts/x/models/y", None),
        ("hg/", "there is no such file or folder"),
        ("ov/config", r"no such file or folder: .*; did you mean ov/config.json\?$"),
        ("hf/", "this folder has no openvino_model.xml"),
        ("model.safetensors", "there is no such file or folder"),
        ("s3://models/qwen3", "there is no such file or folder"),
        ("..", "this folder has no openvino_model.xml"),
    ):
        if said is None:
            assert find_llm(llm, elsewhere=True) is None
        else:
            with pytest.raises(BadModel, match=said):
                find_llm(llm, elsewhere=True)
    (folder / "openvino_tokenizer.xml").unlink()
    with pytest.raises(BadModel, match=r"has openvino_model.xml, but no openvino_tokenizer.xml"):
        find_llm("ov", elsewhere=True)


def test_what_is_for_endpoints_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is loaded, with exit code 2; so is a package that is not installed, with how to install it."""
    model = str(gguf(tmp_path / "m.gguf"))
    rows = table(["France"])
    for options, said in (
        ({"requests_per_minute": 5}, "requests_per_minute is for endpoints, and .*m.gguf is a model on this machine"),
        ({"tokens_per_minute": 5}, "tokens_per_minute is for endpoints"),
        ({"price": {"input": "1/1M", "output": "1/1M"}}, "price is for endpoints"),
        ({"api_key": "x"}, "api_key is for endpoints"),
        (
            {"request": {"sed": 5}},
            "has 'sed', which a model on this machine does not take; did you mean 'seed'",
        ),
        ({"request": {"reasoning_effort": "low"}}, r"does not take: it takes seed, stop,"),
        ({"sha256": "0" * 64}, "sha256 is pinned to 0000"),
    ):
        with pytest.raises(BadModel, match=said) as e:
            gm.prompt(rows, prompt="{{ name }}", model=model, **options)  # type: ignore[call-overload]
        assert e.value.exit_code == 2
    with pytest.raises(BadModel, match="sha256 is of a model's files, and m names none"):
        gm.prompt(rows, prompt="{{ name }}", model="m", sha256="0" * 64)
    monkeypatch.setattr("gristmill.models.prompt.installed", lambda module: False)
    real = extras.importlib.import_module

    def missing(name: str) -> Any:
        if name == "openvino_genai":
            raise ModuleNotFoundError(name, name=name)
        return real(name)

    monkeypatch.setattr(extras.importlib, "import_module", missing)
    with pytest.raises(MissingExtra, match=r"pip install 'gristmill\[genai\]'") as missed:
        gm.prompt(rows, prompt="{{ name }}", model=model)
    assert missed.value.exit_code == 2


def test_a_grammar_has_all_columns_in_order() -> None:
    """And one of some choices is that text alone."""
    choice = {"choice": {"type": "string", "enum": ['a "b"', "ü\\"]}}
    assert grammar_of({"type": "object", "properties": choice}, "choice") == r'root ::= "a \"b\"" | "ü\\"'
    inner = {"type": "object", "properties": {"n": {"type": "integer"}}}
    schema = {"type": "object", "properties": {"all": {"type": "array", "items": inner}, "b": {"type": "boolean"}}}
    found = grammar_of(schema, "choice")
    assert found.index(r"\"all\":") < found.index(r"\"n\":") < found.index(r"\"b\":")


@given(st.lists(st.text(st.characters(codec="utf-8"), min_size=1), min_size=2, unique=True))
def test_choices_are_literals(choices: list[str]) -> None:
    """Each is one literal that reads back as the choice, whatever is in it."""
    schema = {"type": "object", "properties": {"choice": {"enum": choices}}}
    literals = re.findall(r'"(?:[^"\\]|\\.)*"', grammar_of(schema, "choice").removeprefix("root ::= "), re.DOTALL)
    assert [json.loads(literal, strict=False) for literal in literals] == choices


# ---------------------------------------------------------------- with the model


@pytest.mark.long
@pytest.mark.real_model
def test_rows_have_their_answers_and_fail_alone(smollm: str, tmp_path: Path) -> None:
    """Each at its place, with its tokens; a prompt over the context is a dead letter with both counts."""
    names = [*COUNTRIES, "word " * 9000]
    report = gm.prompt(
        table(names), tmp_path / "out", prompt="What is the capital of {{ name }}?", model=smollm, max_tokens=12,
        keep=["id"], keep_usage=True, workers=0, gates={"min_ok": 0}, system="Answer in one sentence.",
    )  # fmt: skip
    found = {row["id"]: row for row in report.read().to_table().to_pylist()}
    assert sorted(found) == list(range(len(COUNTRIES)))
    right = [capital in found[n]["answer"] for n, capital in enumerate(COUNTRIES.values())]
    assert sum(right) >= 4, found  # a small model may be wrong, not about all of them, and not shifted by a row
    for row in found.values():
        assert 0 < row["answer_completion_tokens"] <= 12 and row["answer_prompt_tokens"] < 60
        assert row["answer_finish_reason"] == "stop" or row["answer_completion_tokens"] == 12
    (letter,) = report.dead().to_pylist()
    assert re.search(r"the prompt has about 9\d\d\d tokens, and the model's context is 8192", letter["message"])
    assert report.used["requests"] == len(COUNTRIES)


@pytest.mark.long
@pytest.mark.real_model
def test_answers_are_held_to_their_form(smollm: str) -> None:
    """Choices and columns of all types, by a model that would not keep to them by itself."""
    reviews = table(["A wonderful film.", "Dreadful, I left.", "It rained."])
    found = gm.prompt(
        reviews, prompt="Did they like it? {{ name }}", model=smollm, choices=["yes", 'no "way"'], workers=0,
        keep_usage=True,
    )  # fmt: skip
    assert set(found["answer"].to_pylist()) <= {"yes", 'no "way"'}
    assert max(found["answer_completion_tokens"].to_pylist()) <= 6
    returns = {"film": "string", "stars": "int64", "good": "bool", "score": "float64", "who": "struct<name: string>"}
    found = gm.prompt(
        reviews, prompt="{{ name }}", model=smollm, returns=returns, workers=0, max_tokens=200, gates={"min_ok": 0.3}
    )
    assert found.num_rows and found.schema.field("stars").type == pa.int64()
    assert all(isinstance(row["good"], bool) and isinstance(row["who"]["name"], str) for row in found.to_pylist())


@pytest.mark.long
@pytest.mark.real_model
def test_seeds_shape_what_is_sampled(smollm: str) -> None:
    """The same seed gives the same answers, another one others; each prompt draws for itself."""
    rows = table(["rain", "tea", "cats"])

    def told(seed: int) -> list[str]:
        found = gm.prompt(
            rows, prompt="A story about {{ name }}", model=smollm, temperature=1.5, top_p=0.95, max_tokens=12,
            request={"seed": seed, "stop": ["\n\n\n"]}, workers=0,
        )  # fmt: skip
        return [str(answer) for answer in found["answer"].to_pylist()]

    first, second = told(1), told(2)
    assert first == told(1) and first != second and len(set(first)) == 3


@pytest.mark.long
@pytest.mark.real_model
def test_killed_and_run_again_answers_only_the_rest(smollm: str, tmp_path: Path) -> None:
    """And another file of a model is another job."""
    rows = 90
    pq.write_table(table([f"number {n}" for n in range(rows)]), tmp_path / "rows.parquet")
    model = tmp_path / "model.gguf"
    shutil.copy(smollm, model)
    typed = [sys.executable, "-m", "gristmill", "prompt", "rows.parquet", "out", "--prompt", "Tell me of {{ name }}"]
    typed += ["--model", "model.gguf", "--max-tokens", "16", "--keep", "id", "--concurrency", "6", "--workers", "1"]
    run = subprocess.Popen(typed, cwd=tmp_path, stderr=subprocess.DEVNULL)
    until = time.monotonic() + 120
    while not [*tmp_path.glob("out/_gristmill/*/plan.json")] or not any(
        path.stat().st_size > 1000 for path in tmp_path.glob("out/_gristmill/*/journal/*")
    ):
        assert run.poll() is None and time.monotonic() < until
        time.sleep(0.05)
    for process in [*psutil.Process(run.pid).children(recursive=True), psutil.Process(run.pid)]:
        process.send_signal(signal.SIGKILL)
    run.wait()
    done = subprocess.run(typed, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = gm.read(str(tmp_path / "out")).to_table()
    assert found["id"].to_pylist() == list(range(rows)) and all(found["answer"].to_pylist())
    asked = re.search(r"asked +(\d+) requests", done.stdout + done.stderr)
    # What the killed run answered counts, too: a row that had been answered and was asked again would count twice.
    assert asked and int(asked[1]) == rows, done.stderr
    with open(model, "ab") as file:
        file.write(b"\0")
    again = subprocess.run(typed, cwd=tmp_path, capture_output=True, text=True)
    assert again.returncode == PlanChanged.exit_code and "model.gguf" in again.stderr, again.stderr
