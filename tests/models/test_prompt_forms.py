"""What prompts send and what they make of answers: messages, examples, images, forms of requests, columns beside."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import gristmill as gm
from gristmill.errors import BadJob, BadModel, PlanChanged, RunFailed
from llmserver import ChatServer

PNG = b"\x89PNG\r\n\x1a\n...."
ROWS = pa.table({"id": [1, 2, 3], "text": ["a b", "c", "d e f"]})


def asked(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Messages of one's own."""
    if row["text"] == "c":
        raise KeyError("no words for c")
    return [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"{row['id']}: {row['text']}"}]


@pytest.mark.long
def test_messages_of_ones_own(chat: ChatServer) -> None:
    """A function of the row gives all that is sent; a row for which it raises is a dead letter alone."""
    with pytest.warns(gm.GristmillWarning, match="1 of 3 rows"):
        found = gm.prompt(ROWS, messages=asked, model="m", keep=["id"], gates={"min_ok": 0.5}, keep_prompt=True)
    assert found.sort_by("id").to_pylist() == [
        {"id": 1, "answer": "<1: a b>", "answer_prompt": "1: a b"},
        {"id": 3, "answer": "<3: d e f>", "answer_prompt": "3: d e f"},
    ]
    assert [m["role"] for m in chat.told()["bodies"][0]["messages"]] == ["system", "user"]
    for wrong, said in ((lambda row: 3, "messages gave int"), (lambda row: [{"role": "user"}], "a role and a content")):
        with pytest.raises(gm.GristmillError, match=said):
            gm.prompt(ROWS, messages=wrong, model="m")


PARTS = [{"type": "text", "text": ""}]


def reusing(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The same objects each time, with the next row's text in them; and the row is changed."""
    PARTS[0]["text"] = row.pop("text")
    return [{"role": "user", "content": PARTS}]


def test_messages_that_use_an_object_again(chat: ChatServer, tmp_path: Path) -> None:
    """Each row is asked with its own text, also when it is asked once more, and keeps the answer to that."""
    chat.set(answer="second", latency=0.05)
    rows = pa.table({"id": range(40), "text": [f"w{n} {'x ' * (n % 5)}" for n in range(40)]})
    ask: dict[str, Any] = {"messages": reusing, "model": "m", "keep": ["id"], "keep_prompt": True, "workers": 1}
    gm.prompt(rows, tmp_path / "out", returns={"n": "int64", "word": "string"}, **ask)
    found = sorted(gm.read(tmp_path / "out").to_table().to_pylist(), key=lambda row: row["id"])
    assert [row["answer_prompt"] for row in found] == rows["text"].to_pylist()
    asked_again = [b["messages"][0]["content"] for b in chat.told()["bodies"] if len(b["messages"]) > 2]
    assert sorted(content[0]["text"] for content in asked_again) == sorted(rows["text"].to_pylist())


def test_messages_that_cannot_be_sent_are_told(chat: ChatServer) -> None:
    """In words, before anything is sent."""
    with pytest.raises(gm.GristmillError, match="messages gave what cannot be sent as JSON"):
        gm.prompt(ROWS, messages=lambda row: [{"role": "user", "content": {1, 2}}], model="m", workers=0)
    assert chat.told()["requests"] == 0


def test_messages_count_as_code(chat: ChatServer, tmp_path: Path) -> None:
    """Another function is another job, from a file named on the command line, too."""
    pq.write_table(ROWS, tmp_path / "rows.parquet")
    (tmp_path / "ask.py").write_text("def messages(row):\n    return 'X ' + row['text']\n")
    command = [sys.executable, "-m", "gristmill", "prompt", "rows.parquet", "out", "--messages", "ask.py:messages"]
    done = subprocess.run([*command, "--model", "m"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert sorted(gm.read(tmp_path / "out").to_table()["answer"].to_pylist()) == ["<X a b>", "<X c>", "<X d e f>"]
    (tmp_path / "ask.py").write_text("def messages(row):\n    return 'Y ' + row['text']\n")
    done = subprocess.run([*command, "--model", "m", "--append"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == PlanChanged.exit_code and "messages" in done.stderr


def test_examples_are_shown_first(chat: ChatServer, tmp_path: Path) -> None:
    """As questions and answers of the template, from a list or a file; others than before are another job."""
    lines = '\ufeff{"text": "u\u2028", "answer": "U"}\n\n{"text": "v", "answer": "V"}\n'
    (tmp_path / "few.jsonl").write_text(lines, encoding="utf-8")
    sink = tmp_path / "out"
    prompt = {"prompt": "Say {{ text }}", "model": "m", "system": "S"}
    gm.prompt(ROWS, sink, examples=f"@{tmp_path / 'few.jsonl'}", **prompt)
    sent = chat.told()["bodies"][0]["messages"]
    assert [m["content"] for m in sent[:-1]] == ["S", "Say u\u2028", "U", "Say v", "V"]
    assert [m["role"] for m in sent] == ["system", "user", "assistant", "user", "assistant", "user"]
    requests = chat.told()["requests"]
    given = [{"text": "u\u2028", "answer": "U"}, {"text": "v", "answer": "V"}]
    assert gm.prompt(ROWS, sink, examples=given, **prompt).rows_ok == 3
    assert chat.told()["requests"] == requests
    with pytest.raises(PlanChanged, match="examples"):
        gm.prompt(ROWS, sink, examples=given[:1], **prompt)
    chat.set(answer="auto")
    example = {"text": "u", "n": 1, "word": "u"}
    returns = {"n": "int64", "word": "string"}
    found = gm.prompt(ROWS, examples=[example], returns=returns, prompt="{{ text }}", model="m", request={"seed": 1})
    assert found.num_rows == 3
    assert json.loads(chat.told()["bodies"][-1]["messages"][1]["content"]) == {"n": 1, "word": "u"}
    for examples, said in (
        ([{"text": "u"}], "examples have one without 'answer': it has text"),
        ([{"answer": "u"}], "without 'text'"), ("few.jsonl", "or @FILE of JSON Lines"), (["u"], "a list of mappings"),
        (f"@{tmp_path / 'gone'}", "cannot be read"),
    ):  # fmt: skip
        with pytest.raises((BadJob, BadModel), match=said):
            gm.prompt(ROWS, examples=examples, prompt="{{ text }}", model="m")


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_images_are_sent_as_parts(chat: ChatServer, api: Any) -> None:
    """From bytes, with their type, or as addresses; what is no image is that row's dead letter, and none is none."""
    rows = pa.table({"id": [1, 2, 3, 4], "i": [PNG, b"\xff\xd8\xff12", None, b"%PDF"], "text": ["a", "b", "c", "d"]})
    with pytest.warns(gm.GristmillWarning, match="not a PNG, JPEG, GIF or WebP image"):
        found = gm.prompt(rows, prompt="{{ text }}", model="m", images="i", api=api, keep=["id"], on_null="keep",
                          gates={"min_ok": 0.5})  # fmt: skip
    word = {"chat": "image_url", "responses": "input_image"}[api]
    assert {r["id"]: r["answer"] for r in found.to_pylist()} == {1: f"<a|{word}>", 2: f"<b|{word}>", 3: "<c>"}
    bodies = chat.told()["bodies"]
    parts = [m["content"] for b in bodies for m in b.get("messages") or b["input"] if isinstance(m["content"], list)]
    urls = {str(p["image_url"]["url"] if api == "chat" else p["image_url"])[:22] for part in parts for p in part[1:]}
    assert urls == {"data:image/png;base64,", "data:image/jpeg;base64"}
    addresses = pa.table({"i": ["https://example.org/a.png"], "text": ["a"]})
    assert gm.prompt(addresses, prompt="{{ text }}", model="m", images="i", api=api).num_rows == 1
    with pytest.raises(BadModel, match="images names column 'n', which has int64"):
        gm.prompt(pa.table({"n": [1], "text": ["a"]}), prompt="{{ text }}", model="m", images="n")


@pytest.mark.few(1)
@pytest.mark.parametrize("api", ["chat", "completions", "responses"])
@pytest.mark.parametrize("structured", [True, False])
def test_forms_of_requests_answer_alike(chat: ChatServer, api: Any, structured: bool) -> None:
    """Texts, choices with their probability, columns, tokens, an answer that is asked for once more."""
    chat.set(answer="choice", structured=structured)
    options: dict[str, Any] = {"prompt": "{{ text }}", "model": "m", "api": api, "keep": ["id"], "max_tokens": 50}
    found = gm.prompt(ROWS, choices=["yes", "no"], keep_score=True, keep_usage=True, **options).to_pylist()
    # By the number of words; what a prompt says of choices if they are not structured has ten.
    assert {r["id"]: r["answer"] for r in found} == {1: "no", 2: "yes", 3: "yes"}
    assert all(r["answer_finish_reason"] == "stop" and r["answer_completion_tokens"] > 0 for r in found)
    assert {r["answer_score"] for r in found} <= {0.5, 0.25}  # one token or two of three letters, each a half
    chat.set(answer="auto" if structured else "json")
    found = gm.prompt(ROWS, returns={"n": "int64", "word": "string"}, keep_reasoning=True, **options).to_pylist()
    assert all(isinstance(r["n"], int) and r["word"] for r in found)
    assert {r["answer_reasoning"] for r in found} == {None if api == "completions" else "hm"}
    assert {*chat.told()["statuses"]} == ({"200"} if structured else {"200", "400"})


def test_what_an_endpoint_does_not_know_is_left_out(chat: ChatServer) -> None:
    """Without log-probabilities there is no score; newer models want another name for max_tokens; said once each."""
    chat.set(answer="choice", logprobs=False, newer=True, structured=False)
    found = gm.prompt(ROWS, prompt="{{ text }}", model="m", choices=["yes", "no"], keep_score=True, max_tokens=9)
    assert found["answer_score"].null_count == 3 and found.num_rows == 3
    told = chat.told()
    assert told["statuses"]["400"] <= 9 and "max_completion_tokens" in told["bodies"][-1]


@pytest.mark.long
def test_a_preview_shows_the_prompt_beside_the_answer(chat: ChatServer, tmp_path: Path) -> None:
    """In Python and on the command line; the sink has it only on request."""
    job = gm.Job(ROWS, gm.Prompt("Q: {{ text }}", "m"), gm.sink(tmp_path / "out", keep=["id"]))
    assert job.preview(1).to_pylist() == [{"id": 1, "answer": "<Q: a b>", "answer_prompt": "Q: a b"}]
    assert job.run().rows_ok == 3 and gm.read(tmp_path / "out").to_table().column_names == ["id", "answer"]


def test_a_preview_of_what_is_delivered(chat: ChatServer, tmp_path: Path) -> None:
    """What it shows beside, the prompt, is nothing that the table would need."""
    asked = gm.Prompt("Q: {{ text }}", "m")
    to = {"to": f"sqlite:///{tmp_path / 'd.sqlite'}#answers", "key": ["id"], "mode": "upsert"}
    job = gm.Job(ROWS, asked, gm.sink(tmp_path / "out", keep=["id"]), deliver=[to])
    job.run()
    (row,) = job.preview(1).to_pylist()
    assert row == {"id": 1, "answer": "<Q: a b>", "answer_prompt": "Q: a b"}


def test_parts_that_do_not_go_together(chat: ChatServer) -> None:
    """Said before any request, with the way out."""
    for options, said in (
        ({}, "give a prompt .--prompt.*messages"), ({"prompt": "x", "messages": asked}, "give a prompt .*or messages"),
        ({"messages": asked, "system": "s"}, "system belongs to a prompt"),
        ({"messages": 3}, "give a function of a row"),
        ({"prompt": "x", "api": "completions", "system": "s"}, "api=completions sends one text"),
        ({"prompt": "x", "keep_score": True}, "keep_score is of choices"),
        ({"prompt": "x", "api": "embeddings"}, "it must be one of chat, completions, responses"),
        ({"prompt": "x", "images": "picture"}, "which the source does not have"),
        ({"prompt": "x", "returns": {"answer_prompt": "string"}, "keep_prompt": True}, "which keep_prompt adds"),
        ({"prompt": "x", "concurrency": "many"}, "whole number of at least 1, or 'auto'"),
    ):  # fmt: skip
        with pytest.raises((BadJob, BadModel), match=said):
            gm.prompt(ROWS, model="m", **options)
    assert chat.told()["requests"] == 0


@pytest.mark.long
def test_a_plan_estimates_what_the_prompts_take(chat: ChatServer, tmp_path: Path) -> None:
    """Requests, tokens and dollars for all rows, from some at several places, before any request."""
    texts = pa.table({"text": ["word " * (10 if n % 2 else 30) for n in range(4000)]})  # 100 letters on average
    pq.write_table(texts, tmp_path / "rows.parquet", row_group_size=400)
    price = {"input": "1/1M", "output": "2/1M"}
    plain = gm.Prompt("{{ text }}", "m", max_tokens=50, price=price)
    plan = gm.Job(str(tmp_path / "rows.parquet"), plain, gm.sink(tmp_path / "out")).plan()
    assert plan.takes["requests"] == pytest.approx(4000)
    assert plan.takes["prompt_tokens"] == pytest.approx(4000 * 100 / 4)
    assert plan.takes["completion_tokens"] == pytest.approx(4000 * 50)
    assert plan.takes["cost"] == pytest.approx(4000 * (25 + 2 * 50) / 1e6)
    half = gm.Job(gm.source(str(tmp_path / "rows.parquet"), where="length(text) > 100"), plain, gm.sink("out")).plan()
    assert half.takes["requests"] == pytest.approx(2000, rel=0.05)
    (tmp_path / "job.yaml").write_text(
        "source: rows.parquet\nmodel: {prompt: '{{ text }}', llm: m, price: {input: 1/1M, output: 2/1M}}\nsink: out\n"
    )
    command = [sys.executable, "-m", "gristmill", "plan", "job.yaml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    said = (
        "asks     about 4,000 requests, 100,000 tokens in, and the answers (limit them by max_tokens), more than $0.1"
    )
    assert said in done.stdout, done.stdout + done.stderr
    assert chat.told()["requests"] == 0


def test_a_plan_tells_what_is_still_to_be_asked(chat: ChatServer, tmp_path: Path) -> None:
    """Of a run that stopped at its max_cost about what is left, of one that is done nothing, of new files theirs."""
    (tmp_path / "in").mkdir()
    pq.write_table(pa.table({"text": [f"row {n}" for n in range(200)]}), tmp_path / "in" / "a.parquet")
    price = {"input": "1/token", "output": "0/token"}

    def job(**more: Any) -> gm.Job:
        asked = gm.Prompt("{{ text }}", "m", max_tokens=5, price=price, **more)
        how: dict[str, Any] = {"shard_rows": 20, "workers": 0, "on_new_files": "append"}
        return gm.Job(str(tmp_path / "in"), asked, gm.sink(tmp_path / "out"), **how)

    assert job().plan().takes["requests"] == pytest.approx(200)
    with pytest.raises(RunFailed, match="max_cost 250"):
        job(max_cost=250.0).run()
    assert 60 < job().plan().takes["requests"] < 140
    job().run()
    plan = job().plan()
    assert plan.idle and plan.takes == {}
    pq.write_table(pa.table({"text": [f"new {n}" for n in range(30)]}), tmp_path / "in" / "b.parquet")
    assert job().plan().takes["requests"] == pytest.approx(30)


def test_no_time_is_told_by_one_row_s_answer(
    chat: ChatServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """400 rows were taken to need a hundred times as long as they did, and missed deadlines."""
    chat.set(answer="json", latency=0.3)
    asked = gm.Prompt("{{ text }}", "m", returns={"n": "int64"}, concurrency=100)
    rows = pa.table({"text": [f"row {n}" for n in range(400)]})
    pq.write_table(rows, tmp_path / "rows.parquet")
    gm.Job(str(tmp_path / "rows.parquet"), asked, gm.sink(tmp_path / "out"), workers=1).run()
    assert "by the first rows" not in capfd.readouterr().err


def test_a_plan_of_an_update_tells_what_may_be_asked(chat: ChatServer, tmp_path: Path) -> None:
    """Of files that are as they were, nothing."""
    (tmp_path / "in").mkdir()
    for n, name in enumerate("ab"):
        rows = pa.table({"id": range(40 * n, 40 * (n + 1)), "text": [f"row {n} {k}" for k in range(40)]})
        pq.write_table(rows, tmp_path / "in" / f"{name}.parquet")
    asked = gm.Prompt("{{ text }}", "m", max_tokens=5)
    job = gm.Job(str(tmp_path / "in"), asked, gm.sink(tmp_path / "out", keep=["id"]), workers=0, update={"key": ["id"]})
    job.run()
    assert job.plan().takes == {}
    pq.write_table(rows.slice(0, 25), tmp_path / "in" / "b.parquet")
    assert job.plan().takes["requests"] == pytest.approx(25)
    (tmp_path / "in" / "b.parquet").unlink()
    assert job.plan().takes == {}


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("code", ["", "context_length_exceeded"])
def test_a_row_that_is_refused_changes_no_other_s_request(chat: ChatServer, first: bool, code: str) -> None:
    """Whatever its refusal names: what all are asked with is left out only where a request without it is answered."""
    words = "max_completion_tokens, logprobs and response_format: your prompt is 9,000 tokens too long"
    chat.set(answer="choice", complains=[words, code])
    texts = [f"one more row {n}" for n in range(40)]
    texts[0 if first else 20] = "complain"
    ask: dict[str, Any] = {"choices": ["yes", "no"], "keep_score": True, "max_tokens": 9, "concurrency": 2}
    ask["gates"] = {"min_ok": 0.5}
    found = gm.prompt(texts, prompt="{{ text }}", model="m", workers=0, **ask)
    assert found.num_rows == 39 and found["answer_score"].null_count == 0
    bodies = chat.told()["bodies"]
    assert len(bodies) == 39 and all({"response_format", "logprobs", "max_tokens"} <= body.keys() for body in bodies)
