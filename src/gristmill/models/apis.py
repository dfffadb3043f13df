"""The forms in which endpoints are asked and answer: chat completions, completions and responses, as OpenAI's reference
has them (https://platform.openai.com/docs/api-reference), and Anthropic's messages
(https://platform.claude.com/docs/en/api/messages).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gristmill.job.prompts import Api
from gristmill.models.endpoint import CHAT, MESSAGES, usage_of
from gristmill.models.vendors import ANTHROPIC, OPENAI, Vendor

Schema = Mapping[str, Any] | None
Said = Sequence[Mapping[str, Any]]  # as the chat form has them: role, content; whatever form they are sent in


@dataclass(frozen=True)
class Sampling:
    """What answers are drawn with. None and empty: as the endpoint does."""

    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    scored: bool = False  # with the log-probabilities of their tokens


@dataclass(frozen=True)
class Reply:
    """An answer. `finish` is "stop", "length", "content_filter", …; `tokens` have each token's text and
    log-probability, if they were asked for and the endpoint tells them.
    """

    text: str
    finish: str | None = None
    refusal: str | None = None
    reasoning: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    tokens: tuple[tuple[str, float], ...] = ()


class Form(Protocol):
    """One form. `path` follows an endpoint's address; `most_tokens` limits the length of an answer; `vendor` is whose
    it is.
    """

    path: str
    most_tokens: str
    vendor: Vendor

    def body(self, llm: str, messages: Said, sampling: Sampling, schema: Mapping[str, Any] | None) -> dict[str, Any]:
        """A request. With `schema`, a JSON Schema, the answer is to be JSON of that schema."""
        ...

    def reply(self, found: Mapping[str, Any]) -> Reply:
        """The answer in what an endpoint gave. Raises LookupError, TypeError, AttributeError for what is none."""
        ...


class Chat:
    """Chat completions."""

    path, most_tokens, vendor = CHAT, "max_tokens", OPENAI

    def body(self, llm: str, messages: Said, sampling: Sampling, schema: Mapping[str, Any] | None) -> dict[str, Any]:
        """See Form."""
        body = {"model": llm, "messages": list(messages), **_drawn(sampling, self.most_tokens)}
        if sampling.scored:
            body["logprobs"] = True
        if schema is not None:
            body["response_format"] = {"type": "json_schema", "json_schema": _named(schema)}
        return body

    def reply(self, found: Mapping[str, Any]) -> Reply:
        """See Form."""
        choice = found["choices"][0]
        message = choice.get("message") or {}
        ended = _text(choice.get("finish_reason"))
        if message.get("content") is None and not message.get("refusal") and ended != "content_filter":
            raise LookupError(f"no text, and finish_reason {ended}")
        tokens = (choice.get("logprobs") or {}).get("content") or ()
        return Reply(
            _text(message.get("content")) or "",
            ended,
            _text(message.get("refusal")),
            _text(message.get("reasoning_content") or message.get("reasoning")),
            *_used(found, "prompt_tokens", "completion_tokens"),
            _tokens((t["token"], t["logprob"]) for t in tokens),
        )


class Completions:
    """Completions of a text, of models that were not taught to chat. Contents of messages are one text."""

    path, most_tokens, vendor = "completions", "max_tokens", OPENAI

    def body(self, llm: str, messages: Said, sampling: Sampling, schema: Mapping[str, Any] | None) -> dict[str, Any]:
        """See Form."""
        text = "\n\n".join(str(m["content"]) for m in messages)
        body = {"model": llm, "prompt": text, **_drawn(sampling, self.most_tokens)}
        if sampling.scored:
            body["logprobs"] = 0
        if schema is not None:
            body["response_format"] = {"type": "json_schema", "json_schema": _named(schema)}
        return body

    def reply(self, found: Mapping[str, Any]) -> Reply:
        """See Form."""
        choice = found["choices"][0]
        logged = choice.get("logprobs") or {}
        pairs = zip(logged.get("tokens") or (), logged.get("token_logprobs") or (), strict=False)
        return Reply(
            _text(choice["text"]) or "",
            _text(choice.get("finish_reason")),
            None,
            None,
            *_used(found, "prompt_tokens", "completion_tokens"),
            _tokens(pairs),
        )


class Responses:
    """Responses, OpenAI's newer form."""

    path, most_tokens, vendor = "responses", "max_output_tokens", OPENAI

    def body(self, llm: str, messages: Said, sampling: Sampling, schema: Mapping[str, Any] | None) -> dict[str, Any]:
        """See Form."""
        given = [{"role": m["role"], "content": _input(m["content"], m["role"])} for m in messages]
        body = {"model": llm, "input": given, **_drawn(sampling, self.most_tokens)}
        if sampling.scored:
            body["include"] = ["message.output_text.logprobs"]
        if schema is not None:
            body["text"] = {"format": {"type": "json_schema", **_named(schema)}}
        return body

    def reply(self, found: Mapping[str, Any]) -> Reply:
        """See Form."""
        parts = [part for item in found["output"] if item.get("type") == "message" for part in item["content"]]
        texts = [part for part in parts if part.get("type") == "output_text"]
        thoughts = [item for item in found["output"] if item.get("type") == "reasoning"]
        thought = "\n".join(
            part["text"] for item in thoughts for part in (*(item.get("summary") or ()), *(item.get("content") or ()))
        )
        why = (found.get("incomplete_details") or {}).get("reason")
        return Reply(
            "".join(part["text"] for part in texts),
            {None: "stop", "max_output_tokens": "length"}.get(why) or _text(why),
            _text(next((part["refusal"] for part in parts if part.get("type") == "refusal"), None)),
            thought or None,
            *_used(found, "input_tokens", "output_tokens"),
            _tokens((t["token"], t["logprob"]) for part in texts for t in part.get("logprobs") or ()),
        )


class Messages:
    """Messages, Anthropic's form. It tells no log-probabilities."""

    path, most_tokens, vendor = MESSAGES, "max_tokens", ANTHROPIC

    def body(self, llm: str, messages: Said, sampling: Sampling, schema: Mapping[str, Any] | None) -> dict[str, Any]:
        """See Form."""
        told = [m for m in messages if m["role"] == "system"]
        given = [{"role": m["role"], "content": _blocks(m["content"])} for m in messages if m["role"] != "system"]
        body = {"model": llm, "messages": given, **_drawn(sampling, self.most_tokens)}
        if told:
            body["system"] = "\n\n".join(_text(m["content"]) or "" for m in told)
        if schema is not None:
            body["output_config"] = {"format": {"type": "json_schema", "schema": schema}}
        return body

    def reply(self, found: Mapping[str, Any]) -> Reply:
        """See Form."""
        texts = [block["text"] for block in found["content"] if block["type"] == "text"]
        thoughts = [block["thinking"] for block in found["content"] if block["type"] == "thinking"]
        ended = _text(found.get("stop_reason"))
        return Reply(
            "".join(texts),
            {"end_turn": "stop", "max_tokens": "length", "refusal": "content_filter"}.get(ended or "", ended),
            None,
            "\n".join(thoughts) or None,
            *_used(found, "input_tokens", "output_tokens"),
        )


FORMS: Mapping[Api, Form] = {
    "chat": Chat(), "completions": Completions(), "responses": Responses(), "messages": Messages()
}  # fmt: skip


def _drawn(sampling: Sampling, most_tokens: str) -> dict[str, Any]:
    values = {"temperature": sampling.temperature, "top_p": sampling.top_p, most_tokens: sampling.max_tokens}
    return {name: value for name, value in values.items() if value is not None}


def _named(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": "answer", "strict": True, "schema": schema}


def _used(found: Mapping[str, Any], *names: str) -> tuple[int | None, int | None]:
    usage = usage_of(found)
    given, made = (int(usage[name]) if name in usage else None for name in names)
    return given, made


def _text(value: Any) -> str | None:
    """A text, also one in parts, as some endpoints have it. Raises TypeError for anything else."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(part, dict) for part in value):
        return "".join(part["text"] for part in value if isinstance(part.get("text"), str))
    raise TypeError(f"{str(value)[:100]!r} is no text")


def _tokens(pairs: Iterable[tuple[Any, Any]]) -> tuple[tuple[str, float], ...]:
    """Tokens with their log-probabilities; none if one has no number."""
    found = tuple(pairs)
    return found if all(isinstance(t, str) and isinstance(n, (int, float)) for t, n in found) else ()


def _input(content: Any, role: str) -> Any:
    """Parts of a message as responses name them."""
    if isinstance(content, str):
        return content
    text = "output_text" if role == "assistant" else "input_text"
    out = []
    for part in content:
        if part.get("type") == "image_url":
            url = part["image_url"]
            out.append({"type": "input_image", "image_url": url["url"] if isinstance(url, Mapping) else url})
        else:
            out.append({"type": text, "text": part["text"]} if part.get("type") == "text" else part)
    return out


def _blocks(content: Any) -> Any:
    """Parts of a message as Anthropic's form names them."""
    if isinstance(content, str):
        return content
    out = []
    for part in content:
        if part.get("type") != "image_url":
            out.append(part)
            continue
        url = part["image_url"]
        url = url["url"] if isinstance(url, Mapping) else url
        head, _, data = url.partition(";base64,")
        source = {"type": "url", "url": url}
        if url.startswith("data:"):
            source = {"type": "base64", "media_type": head.removeprefix("data:"), "data": data}
        out.append({"type": "image", "source": source})
    return out
