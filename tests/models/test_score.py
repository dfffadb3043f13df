"""Log-probabilities of continuations: from an endpoint that echoes prompts, and from a model on this machine."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import gristmill as gm
import kit
from gristmill.errors import BadJob, BadModel, PlanChanged
from gristmill.models.score import _logged
from llmserver import ChatServer, echoed

ROWS = pa.table({"id": [1, 2], "question": ["is it", "was it so"], "answers": [["yes", "no", "eh"], ["oui"]]})
pytestmark = pytest.mark.filterwarnings("ignore::gristmill.GristmillWarning")


def wanted(context: str, text: str) -> tuple[float, int]:
    """By tokens of three letters, of which those count that hold letters of the continuation."""
    whole = context + text
    tokens = [whole[n : n + 3] for n in range(0, len(whole), 3) if n + 3 > len(context)]
    return sum(map(echoed, tokens)), len(tokens)


@pytest.mark.few(1)
@pytest.mark.parametrize("special", ["", "<s>"])
@pytest.mark.parametrize("newer", [True, False])
def test_an_endpoint_scores_continuations(chat: ChatServer, special: str, newer: bool) -> None:
    """All of a row in one request, whatever special tokens its model has; a token is made only if one must be."""
    chat.set(special=special, newer=newer)
    options: dict[str, Any] = {"prompt": "{{ question }}? ", "model": "m", "keep": ["id"]}
    found = gm.score(ROWS, continuations=["yes", "no", "eh"], concurrency=1, **options)
    assert {f.name: f.type for f in found.schema} == {
        "id": pa.int64(), "score": pa.list_(pa.float64()), "score_tokens": pa.list_(pa.int64()),
        "score_best": pa.string(),
    }  # fmt: skip
    for row, question in zip(found.to_pylist(), ROWS["question"].to_pylist(), strict=True):
        told = {text: wanted(f"{question}? ", text) for text in ("yes", "no", "eh")}
        assert row["score"] == [score for score, _ in told.values()]
        assert row["score_tokens"] == [count for _, count in told.values()]
        assert row["score_best"] == max(told, key=lambda text: told[text])
    statuses = chat.told()["statuses"]
    assert statuses["200"] == 2 and statuses.get("400", 0) in ((1, 2) if newer else (0,))
    one = gm.score(ROWS, continuations="yes", output="p", **options).to_pylist()
    assert one[0] == {"id": 1, "p": wanted("is it? ", "yes")[0], "p_tokens": wanted("is it? ", "yes")[1]}


@pytest.mark.long
def test_continuations_of_a_column(chat: ChatServer) -> None:
    """A text each, or lists of texts of any length; an empty one is its row's dead letter."""
    options: dict[str, Any] = {"prompt": "{{ question }}? ", "model": "m", "keep": ["id"]}
    found = gm.score(ROWS, continuations_from="answers", **options).to_pylist()
    assert [row["score"] for row in found] == [
        [wanted("is it? ", text)[0] for text in ("yes", "no", "eh")], [wanted("was it so? ", "oui")[0]]
    ]  # fmt: skip
    assert found[1]["score_best"] == "oui"
    texts = ROWS.set_column(2, "answers", pa.array(["yes", ""]))
    with pytest.warns(gm.GristmillWarning, match="each continuation is a text, none is empty"):
        found = gm.score(texts, continuations_from="answers", gates={"min_ok": 0}, **options).to_pylist()
    assert [row["score"] for row in found] == [wanted("is it? ", "yes")[0]]


@pytest.mark.long
def test_an_endpoint_that_does_not_score_is_told_at_once(chat: ChatServer) -> None:
    """In its own words, or ours if it ignores what it was asked."""
    options: dict[str, Any] = {"prompt": "{{ question }}? ", "model": "m", "continuations": ["yes", "no"]}
    chat.set(echoes=False)
    with pytest.raises(BadModel, match=r"does not score prompts \(echo with logprobs\): 400: Only no echo"):
        gm.score(ROWS, **options)
    assert chat.told()["requests"] == 1
    with pytest.raises(BadModel, match="Score needs completions with echo and logprobs"):
        gm.score(ROWS, request={"echo": False}, **{**options, "continuations": ["yes"]})


def test_parts_that_do_not_go_together(chat: ChatServer) -> None:
    """Said before any request, with the way out."""
    for options, said in (
        ({}, "give continuations .*or continuations_from"),
        ({"continuations": "a", "continuations_from": "answers"}, "give continuations .*or continuations_from"),
        ({"continuations": ["a", "a"]}, "give different texts, none of them empty"),
        ({"continuations": [""]}, "none of them empty"),
        ({"continuations_from": "answer"}, "has a prompt with 'answer', which the source does not have"),
        ({"continuations_from": "id"}, "continuations_from names column 'id', which has int64"),
        ({"continuations": "a", "prompt": "{{ questio }}"}, "did you mean 'question'"),
        ({"continuations": "a", "max_cost": 1.0}, "max_cost needs price"),
    ):
        with pytest.raises((BadJob, BadModel), match=said):
            gm.score(ROWS, model="m", **{"prompt": "{{ question }}", **options})
    assert chat.told()["requests"] == 0


@pytest.mark.long
def test_typed_as_a_command_and_as_a_job_file(chat: ChatServer, tmp_path: Path) -> None:
    """Other continuations are another job."""
    pq.write_table(ROWS, tmp_path / "rows.parquet")

    def run(*words: str, code: int = 0) -> str:
        done = subprocess.run([sys.executable, "-m", "gristmill", *words], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == code, done.stderr
        return done.stdout + done.stderr

    score = ("score", "rows.parquet", "out", "--prompt", "{{ question }}? ", "--model", "m", "--continuations")
    run(*score, "yes,no", "--save", "job.yaml")
    found = gm.read(tmp_path / "out").to_table().to_pylist()
    assert [row["score"] for row in found] == [
        [wanted(f"{question}? ", text)[0] for text in ("yes", "no")] for question in ROWS["question"].to_pylist()
    ]
    assert "nothing to do" in run("run", "job.yaml")
    assert "model.continuations" in run(*score, "no,yes", code=PlanChanged.exit_code)
    written = "source: rows.parquet\nmodel: {score: '{{ question }}? ', llm: m, continuations: [yes, no]}\nsink: out\n"
    (tmp_path / "other.yaml").write_text(written)
    assert "nothing to do" in run("run", "other.yaml")


@pytest.mark.parametrize("number", [True, 0.7, "-1", float("nan")])
def test_what_is_no_log_probability_is_none(number: Any) -> None:
    """A probability, or a word for one, is no score."""
    logprobs = {"tokens": ["ab", "cd"], "token_logprobs": [None, number]}
    with pytest.raises(ValueError, match=r"its token 'cd' has"):
        _logged({"text": "abcd", "logprobs": logprobs}, "abcd", 2, 0)
    assert _logged({"text": "abcd", "logprobs": {**logprobs, "token_logprobs": [None, 0]}}, "abcd", 2, 0) == [0.0]


@pytest.mark.parametrize(
    ("tokens", "prompt", "begin", "most", "found"),
    [
        (["<s>", "s"], "s", 0, 0, [-1.0]), (["<s>", "s", "</s>"], "s", 0, 1, [-1.0]), (["<s>", ">"], ">", 0, 1, [-1.0]),
        (["<s>", " s"], "s", 0, 0, [-1.0]), (["<s>", "<"], "<", 0, 0, [-1.0]), (["<s>", "s", "s"], "s", 0, 1, [-1.0]),
        (["<|begin|>", "be", "gin"], "begin", 2, 0, [-2.0]), (["<s>", "s", "!"], "s", 0, 0, [-1.0]),
        (["<s>", "s", "s", "s"], "ss", 1, 1, [-2.0]),
    ],
)  # fmt: skip
def test_a_prompt_that_stands_in_a_special_token_is_found_behind_it(
    tokens: list[str], prompt: str, begin: int, most: int, found: list[float]
) -> None:
    """By whole tokens, whatever the endpoint made after it."""
    logprobs = {"tokens": tokens, "token_logprobs": [None, *(-float(n) for n in range(1, len(tokens)))]}
    assert _logged({"text": prompt, "logprobs": logprobs}, prompt, begin, most) == found


# ---------------------------------------------------------------- on this machine

CASES = [
    ("The capital of France is", " Paris"), ("The capital of France is", " Berlin"),
    ("Question: Is water wet?\nAnswer:", " yes"), ("Once upon a time there was a", "n old man who lived by the sea."),
    ("The café in Zürich serves", " crème brûlée"), ("1, 2, 3, 4,", " 5, 6, 7"), ("A blank ", "follows"),
    ("The capital of France is Paris. " * 40 + "The capital of Spain is", " Madrid."),
]  # fmt: skip


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2 as a folder for OpenVINO, as GenAI reads it from the GGUF file."""
    genai = pytest.importorskip("openvino_genai")
    try:
        model = kit.smollm()
    except kit.KitError as e:
        pytest.skip(str(e))
    folder = tmp_path_factory.mktemp("graph")
    shutil.copy(model, folder / "smollm.gguf")
    genai.LLMPipeline(str(folder / "smollm.gguf"), "CPU", enable_save_ov_model=True)
    (folder / "smollm.gguf").unlink()
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 8192}))
    return folder


def by_hand(folder: Path) -> list[list[float]]:
    """The log-probabilities of each case's tokens from the logits of the graph itself, one text at a time."""
    import openvino
    import openvino_genai

    core = openvino.Core()
    exact = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}
    model = core.compile_model(folder / "openvino_model.xml", "CPU", exact)
    tokenizer = openvino_genai.Tokenizer(str(folder))
    found = []
    for context, text in CASES:
        before, ids = (tokenizer.encode(t).input_ids.data[0].tolist() for t in (context, context + text))
        begin = next((n for n, (a, b) in enumerate(zip(before, ids, strict=False)) if a != b), len(before))
        whole = np.array([ids], dtype=np.int64)
        request = model.create_infer_request()
        given = {"input_ids": whole, "attention_mask": np.ones_like(whole), "beam_idx": np.zeros(1, dtype=np.int32)}
        given["position_ids"] = np.arange(whole.shape[1], dtype=np.int64)[None]
        logits = request.infer(given)[0][0].astype(np.float64)
        logged = (
            logits
            - np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1, keepdims=True))
            - logits.max(1, keepdims=True)
        )
        found.append([float(logged[n - 1, ids[n]]) for n in range(begin, len(ids))])
    return found


@pytest.mark.long
def test_a_local_model_scores_as_its_logits_say(graph: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within 0.002 nats a token, all rows at a time, and rows that begin alike."""
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    rows = pa.table({"n": range(len(CASES)), "a": [a for a, _ in CASES], "b": [b for _, b in CASES]})
    found = gm.score(rows, prompt="{{ a }}", model=str(graph), continuations_from="b", keep=["n"]).sort_by("n")
    for row, logged in zip(found.to_pylist(), by_hand(graph), strict=True):
        assert row["score_tokens"] == len(logged)
        assert row["score"] == pytest.approx(sum(logged), abs=0.002 * len(logged)), CASES[row["n"]]


@pytest.mark.long
def test_a_gguf_file_scores_choices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The likeliest is what one would say; what cannot be scored is its row's dead letter; endpoints' options are not
    taken.
    """
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    pytest.importorskip("openvino_genai")
    try:
        model = str(kit.smollm())
    except kit.KitError as e:
        pytest.skip(str(e))
    rows = pa.table({"id": [1, 2, 3], "text": ["The capital of France is", "The capital of Italy is", ""]})
    ask: dict[str, Any] = {"prompt": "{{ text }}", "model": model, "keep": ["id"], "continuations": [" Paris", " Rome"]}
    gm.score(rows, tmp_path / "out", gates={"min_ok": 0.5}, **ask)
    found = gm.read(tmp_path / "out").to_table().sort_by("id").to_pylist()
    assert [row["score_best"] for row in found] == [" Paris", " Rome"]
    (dead,) = gm.dead(tmp_path / "out").to_pylist()
    assert "no token comes before the continuation" in dead["message"]
    with pytest.raises(BadModel, match="price is for endpoints"):
        gm.score(rows, price={"input": "1/1M", "output": "1/1M"}, **ask)
