"""Answers that an endpoint gives and has not finished, whatever its form calls that: none is published."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import gristmill as gm
from gristmill.models.answerschema import NamedAnswers
from gristmill.models.apis import FORMS
from gristmill.models.prompt import _json
from llmserver import ChatServer

pytestmark = pytest.mark.filterwarnings("ignore::gristmill.GristmillWarning")
ROWS = pa.table({"id": [1, 2], "text": ["an odd one", "another one"]})


def _choice(**has: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "message": {"role": "assistant", "content": ""}, "text": "", **has}]}


def _said(text: str | None, finish: str, **has: Any) -> dict[str, Any]:
    return _choice(message={"role": "assistant", "content": text}, text=text or "", finish_reason=finish, **has)


ERROR = {"code": "invalid_prompt", "message": "boom"}
FAILED: list[tuple[str, dict[str, Any], str]] = [
    ("responses", {"status": "failed", "error": ERROR, "output": []}, r"\(failed\): invalid_prompt: boom"),
    ("responses", {"status": "cancelled", "error": None, "output": []}, r"\(cancelled\)"),
    ("responses", {"status": "in_progress", "output": None}, r"\(in_progress\)"),
    (
        "responses",
        {
            "status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"},
            "output": [{"type": "reasoning", "summary": []}],
        },
        r"cut at max_tokens \(20\) before it said anything: raise max_tokens",
    ),
    ("chat", _said("partial", "error"), r"\(error\); it began 'partial'"),
    ("chat", _said("partial", "stop", error={"code": 400, "message": "boom"}), r"\(stop\): 400: boom"),
    ("chat", _said("partial", "insufficient_system_resource"), "insufficient_system_resource"),
    ("chat", _said("", "length"), r"cut at max_tokens \(20\)"),
    ("chat", _said(None, "length"), r"cut at max_tokens \(20\)"),
    ("chat", _said("<think>hm", "length"), r"cut at max_tokens \(20\)"),
    ("chat", _said("partial", "SAFETY"), "content filter"),
    ("chat", _said("", "tool_calls"), "no answer: nothing, and no text"),
    ("completions", _said("partial", "abort"), r"\(abort\)"),
    ("completions", _said("", "length"), r"cut at max_tokens \(20\)"),
]  # fmt: skip


@pytest.mark.few(4)
@pytest.mark.parametrize(("api", "instead", "said"), FAILED)
def test_no_answer_is_its_row_s_failure(
    chat: ChatServer, tmp_path: Path, api: Any, instead: dict[str, Any], said: str
) -> None:
    """In the endpoint's words, or with the option to raise; the rows beside it have their answers."""
    chat.set(instead=instead)
    gm.prompt(
        ROWS, tmp_path / "out", prompt="{{ text }}", model="m", api=api, max_tokens=20, keep=["id"], workers=0,
        gates={"min_ok": 0},
    )  # fmt: skip
    assert gm.read(tmp_path / "out").to_table().to_pylist() == [{"id": 2, "answer": "<another one>"}]
    (letter,) = gm.dead(tmp_path / "out").to_pylist()
    assert json.loads(letter["payload"])["id"] == 1
    assert re.search(said, letter["message"]), letter["message"]


@pytest.mark.parametrize(("code", "tries", "ok"), [("server_error", 1, 2), ("server_error", 9, 1), ("invalid", 1, 1)])
def test_a_failure_that_passes_is_asked_for_once_more(chat: ChatServer, code: str, tries: int, ok: int) -> None:
    """As a server's error does, or a limit of its rate; counted and paid as it is."""
    failed = {"status": "failed", "error": {"code": code, "message": "boom"}, "output": []}
    chat.set(instead=failed, odd_times=tries)
    found = gm.prompt(
        ROWS, prompt="{{ text }}", model="m", api="responses", workers=0, gates={"min_ok": 0}, dedupe=True
    )
    assert found.num_rows == ok and chat.told()["requests"] == (3 if code == "server_error" else 2)


@pytest.mark.parametrize(
    ("content", "finish", "choices", "answer"),
    [
        ("no", "length", ["no", "north"], None),
        ("no", "stop", ["no", "north"], "no"),
        ("north", "length", ["no", "north"], "north"),
        ('{"choice": "no"}', "length", ["no", "north"], "no"),
        ('{"choice": null}', "stop", ["none", "some"], None),
        ('{"choice": true}', "stop", ["true", "false"], None),
        ('{"choice": "some", "choice": "none"}', "stop", ["none", "some"], None),
        ('```json\n{"choice": "some"}\n```', "stop", ["none", "some"], "some"),
        ("```\nsome\n```", "stop", ["none", "some"], "some"),
    ],
)
def test_a_choice_is_a_text_that_was_said_to_its_end(
    chat: ChatServer, content: str, finish: str, choices: list[str], answer: str | None
) -> None:
    """A cut one is none where another begins so; only a string is one, said once, in a fence or not."""
    chat.set(odd={"message": {"role": "assistant", "content": content}, "finish_reason": finish})
    found = gm.prompt(
        ["very odd"], prompt="{{ text }}", model="m", choices=choices, workers=0,
        gates={"min_ok": 0, "allow_empty": True}, request={"seed": 1},
    )  # fmt: skip
    assert found["answer"].to_pylist() == ([] if answer is None else [answer])


def test_messages_have_words_of_their_own() -> None:
    """Anthropic's stop reasons, as the other forms have them."""
    for why, finish, failed in (
        ("end_turn", "stop", False), ("refusal", "content_filter", False), ("pause_turn", "pause_turn", True),
        ("max_tokens", "length", False), ("model_context_window_exceeded", "length", False),
    ):  # fmt: skip
        said = [{"type": "text", "text": "x"}] if why == "end_turn" else []
        content = [{"type": "thinking", "thinking": "hm"}, *said]
        reply = FORMS["messages"].reply({"content": content, "stop_reason": why})
        assert (reply.finish, bool(reply.failed), reply.empty) == (finish, failed, finish == "length")


def _chat(content: Any, finish: str | None = "stop", **message: Any) -> dict[str, Any]:
    return {"choices": [{"message": {"content": content, **message}, "finish_reason": finish}]}


CALL = {"id": "1", "function": {"name": "f", "arguments": "{}"}}
HALF = {"type": "message", "status": "incomplete", "content": [{"type": "output_text", "text": "half"}]}
SILENT: list[tuple[str, dict[str, Any], str]] = [
    ("chat", _chat("", None), "nothing, and no text"),
    ("chat", _chat(None, "tool_calls"), "tool_calls"),
    ("chat", _chat("", "tool_calls"), "tool_calls"),
    ("chat", _chat("", tool_calls=[CALL]), "tool_calls, and no text"),
    ("chat", _chat("", "function_call"), "function_call"),
    ("chat", _chat("", reasoning_content="hm"), "reasoning_content and reasoning, and no text"),
    ("chat", _chat("<think>hm</think>"), "reasoning, and no text"),
    ("chat", _chat("<think>hm"), "reasoning, and no text"),
    ("chat", _chat([]), "nothing, and no text"),
    ("completions", {"choices": [{"text": ""}]}, "nothing, and no text"),
    ("responses", {"output": []}, "nothing, and no text"),
    ("responses", {"output": None, "status": "completed"}, "nothing, and no text"),
    ("responses", {"output": [{"type": "function_call", "name": "f"}], "status": "completed"}, "function_call"),
    ("responses", {"output": [{"type": "reasoning", "summary": []}], "status": "completed"}, "reasoning"),
    ("messages", {"content": [], "stop_reason": "end_turn"}, "nothing, and no text"),
    ("messages", {"content": [{"type": "tool_use", "id": "x"}], "stop_reason": "tool_use"}, "tool_use"),
]


@pytest.mark.parametrize(("api", "reply", "said"), SILENT)
def test_a_reply_that_says_nothing_is_no_answer(api: Any, reply: dict[str, Any], said: str) -> None:
    """In no form: it tells what there is instead."""
    with pytest.raises(LookupError, match=said):
        FORMS[api].reply(reply)


def test_what_else_a_reply_without_text_is() -> None:
    """A refusal in a part, half a message, and an answer that is empty, as the model meant it."""
    assert FORMS["chat"].reply(_chat([{"type": "refusal", "refusal": "no"}])).refusal == "no"
    assert "incomplete" in FORMS["responses"].reply({"output": [HALF]}).failed
    cut = {"output": [HALF], "status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
    assert not FORMS["responses"].reply(cut).failed
    empty = {"content": [{"type": "text", "text": ""}], "stop_reason": "end_turn"}
    assert FORMS["messages"].reply(empty).text == FORMS["chat"].reply(_chat("")).text == ""


def test_numbers_and_names_that_would_become_others() -> None:
    """A whole number that a float has rounded, and a name with two values, are answers that do not fit."""
    answers = NamedAnswers({"n": "int64"})
    assert answers.held({"n": 3.0}) == {"n": 3} and answers.held({"n": 9007199254740993}) == {"n": 9007199254740993}
    with pytest.raises(ValueError, match=r"'n' is 9007199254740992\.0"):
        answers.held(_json('{"n": 9007199254740993.0}'))
    with pytest.raises(ValueError, match="it has 'n' twice"):
        _json('{"a": [{"n": 1, "n": 2}]}')
