"""The forms in which endpoints are asked and answer: chat completions, completions and responses, as OpenAI's reference
has them (https://platform.openai.com/docs/api-reference), and Anthropic's messages
(https://platform.claude.com/docs/en/api/messages).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from gristmill.job.prompts import Api
from gristmill.models.replies import CHAT, LATER, MESSAGES, place_of, usage_of
from gristmill.models.vendors import ANTHROPIC, OPENAI, Vendor
from gristmill.values import dataclass

Schema = Mapping[str, Any] | None
Said = Sequence[Mapping[str, Any]]  # as the chat form has them: role, content; whatever form they are sent in


@dataclass(frozen=True)
class Sampling:
    """What answers are drawn with. None and empty: as the endpoint does."""

    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    scored: bool = False  # with the log-probabilities of their tokens


# Why an answer ended, in the words of chat completions for those of other forms and servers (Gemini, Mistral, TGI).
FINISHES: Mapping[str, str] = {
    "end_turn": "stop", "stop_sequence": "stop", "eos": "stop", "eos_token": "stop", "complete": "stop",
    "completed": "stop", "max_tokens": "length", "max_output_tokens": "length", "model_length": "length",
    "model_context_window_exceeded": "length", "refusal": "content_filter", "safety": "content_filter",
    "recitation": "content_filter", "blocklist": "content_filter", "prohibited_content": "content_filter",
    "spii": "content_filter", "sensitive": "content_filter",
}  # fmt: skip
# What words for an answer that was not finished have in them, whoever's they are: error, network_error, aborted,
# insufficient_system_resource, in_progress, not_finished, pause_turn, malformed_function_call, …
UNFINISHED = (
    "error", "fail", "abort", "cancel", "insufficient", "timeout", "time_out", "timed_out", "interrupt", "unavailable",
    "overload", "malformed", "not_finished", "unfinished", "incomplete", "in_progress", "queued", "pause", "exceeded",
    "expired", "other",
)  # fmt: skip
# What a message of a chat may have beside its text, or instead.
BESIDE = ("tool_calls", "function_call", "reasoning_content", "reasoning", "audio")
# What of these would be another time.
PASSING = (
    "server_error", "internal_error", "internal server error", "rate_limit", "rate limit", "overload", "timeout",
    "timed out", "unavailable", "network_error", "insufficient_system_resource",
)  # fmt: skip
PASSING_CODES = frozenset(str(status) for status in LATER if status >= 400)


@dataclass(frozen=True)
class Reply:
    """An answer. `finish` is "stop", "length", "content_filter", …; `tokens` have each token's text and
    log-probability, if they were asked for and the endpoint tells them. If it `failed`, as that says in the endpoint's
    words, its text is no answer.
    """

    text: str
    finish: str | None = None
    refusal: str | None = None
    reasoning: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    tokens: tuple[tuple[str, float], ...] = ()
    failed: str = ""

    @property
    def empty(self) -> bool:
        """Whether it was cut before it said anything, but for thoughts."""
        return self.finish == "length" and _says_nothing(self.text)


class Nothing(LookupError):
    """A reply that says nothing, but what is beside a text."""

    def __init__(self, why: str, reply: Reply) -> None:
        super().__init__(why)
        self.reply = reply


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

    def ended(self, found: Mapping[str, Any]) -> tuple[str | None, str]:
        """Why the answer ended, in the words of chat completions, and how it failed, if it did. Raises as `reply`."""
        ...

    def reply(self, found: Mapping[str, Any]) -> Reply:
        """The answer in what an endpoint gave. Raises LookupError, TypeError, AttributeError for what is none, and
        Nothing for one that says nothing.
        """
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

    def ended(self, found: Mapping[str, Any]) -> tuple[str | None, str]:
        """See Form."""
        return _of_choice(found)

    def reply(self, found: Mapping[str, Any]) -> Reply:
        """See Form."""
        choice = _first(found["choices"])
        message = choice.get("message") or {}
        ended, failed = self.ended(found)
        content = message.get("content")
        parts = _kinds(content)
        tokens = (choice.get("logprobs") or {}).get("content") or ()
        reply = Reply(
            _text(content) or "",
            ended,
            _text(message.get("refusal")) or _refusal(content),
            _text(message.get("reasoning_content") or message.get("reasoning")),
            *_used(found, "prompt_tokens", "completion_tokens"),
            _tokens((t["token"], t["logprob"]) for t in tokens),
            failed,
        )
        beside = [name for name in BESIDE if message.get(name)] + [kind for kind in parts if kind != "text"]
        return _said(reply, isinstance(content, str) or "text" in parts, beside)


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

    def ended(self, found: Mapping[str, Any]) -> tuple[str | None, str]:
        """See Form."""
        return _of_choice(found)

    def reply(self, found: Mapping[str, Any]) -> Reply:
        """See Form."""
        choice = _first(found["choices"])
        ended, failed = self.ended(found)
        logged = choice.get("logprobs") or {}
        pairs = zip(logged.get("tokens") or (), logged.get("token_logprobs") or (), strict=False)
        reply = Reply(
            _text(choice["text"]) or "",
            ended,
            None,
            None,
            *_used(found, "prompt_tokens", "completion_tokens"),
            _tokens(pairs),
            failed,
        )
        return _said(reply, choice["text"] is not None, [])


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

    def ended(self, found: Mapping[str, Any]) -> tuple[str | None, str]:
        """See Form."""
        why = (found.get("incomplete_details") or {}).get("reason") or found.get("status")
        if why in (None, "completed"):  # endpoints that tell no status have finished, unless a part tells one
            messages = [item for item in found.get("output") or () if item.get("type") == "message"]
            why = next((s for item in messages if (s := item.get("status")) not in (None, "completed")), "completed")
        return _ended(why, found.get("error"))

    def reply(self, found: Mapping[str, Any]) -> Reply:
        """See Form."""
        output = found["output"] or ()
        parts = [part for item in output if item.get("type") == "message" for part in item["content"] or ()]
        texts = [part for part in parts if part.get("type") == "output_text"]
        thoughts = [item for item in output if item.get("type") == "reasoning"]
        thought = "\n".join(
            part["text"] for item in thoughts for part in (*(item.get("summary") or ()), *(item.get("content") or ()))
        )
        ended, failed = self.ended(found)
        reply = Reply(
            "".join(part["text"] for part in texts),
            ended,
            _text(next((part["refusal"] for part in parts if part.get("type") == "refusal"), None)),
            thought or None,
            *_used(found, "input_tokens", "output_tokens"),
            _tokens((t["token"], t["logprob"]) for part in texts for t in part.get("logprobs") or ()),
            failed,
        )
        beside = [kind for kind in (*_kinds(output), *_kinds(parts)) if kind not in ("message", "output_text")]
        return _said(reply, bool(texts), beside)


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

    def ended(self, found: Mapping[str, Any]) -> tuple[str | None, str]:
        """See Form."""
        return _ended(found.get("stop_reason"), found.get("error"))

    def reply(self, found: Mapping[str, Any]) -> Reply:
        """See Form."""
        texts = [block["text"] for block in found["content"] if block["type"] == "text"]
        thoughts = [block["thinking"] for block in found["content"] if block["type"] == "thinking"]
        ended, failed = self.ended(found)
        reply = Reply(
            "".join(texts),
            ended,
            None,
            "\n".join(thoughts) or None,
            *_used(found, "input_tokens", "output_tokens"),
            failed=failed,
        )
        return _said(reply, bool(texts), [kind for kind in _kinds(found["content"]) if kind != "text"])


FORMS: Mapping[Api, Form] = {
    "chat": Chat(), "completions": Completions(), "responses": Responses(), "messages": Messages()
}  # fmt: skip
BY_PATH: Mapping[str, Form] = {form.path: form for form in FORMS.values()}


def _said(reply: Reply, text: bool, beside: Sequence[str]) -> Reply:
    """A reply that says something: an answer, or what became of it. No text is an answer only if there is a `text` that
    is empty, nothing `beside` it, and the endpoint says that it stops there. Raises Nothing.
    """
    told = reply.failed or reply.refusal or reply.finish in ("content_filter", "length")
    if told or not _says_nothing(reply.text) or (text and not beside and not reply.text and reply.finish == "stop"):
        return reply
    has = list(dict.fromkeys([*beside, *(["reasoning"] if reply.reasoning or reply.text else [])]))
    raise Nothing(f"{' and '.join(has) if has else 'nothing'}, and no text (it ended with {reply.finish})", reply)


def _says_nothing(text: str) -> bool:
    """Whether there is no more to a text than thoughts; blanks are a text."""
    begun = text.lstrip()
    return not text or (begun.startswith("<think>") and not begun.partition("</think>")[2].strip())


def _kinds(parts: Any) -> list[str]:
    """Of what sorts the parts of an answer are; none for a text."""
    return (
        [str(part.get("type")) for part in parts] if isinstance(parts, Sequence) and not isinstance(parts, str) else []
    )


def _refusal(parts: Any) -> str | None:
    """What a part of an answer says of why there is none."""
    if not isinstance(parts, list):
        return None
    return next((_text(part["refusal"]) for part in parts if part.get("type") == "refusal" and part["refusal"]), None)


def passes(found: Mapping[str, Any], path: str) -> bool:
    """Whether a reply says that its answer failed because of something that passes, as a server's error does."""
    form = BY_PATH.get(path)
    try:
        said = "" if form is None else form.ended(found)[1].lower()
    except (LookupError, TypeError, AttributeError):  # told where it is read
        return False
    return any(word in said for word in PASSING) or any(part in PASSING_CODES for part in said.split(": "))


def letters_in(found: Mapping[str, Any], path: str) -> int:
    """How long an answer is, with its thoughts; 0 for another form's, or what is none."""
    form = BY_PATH.get(path)
    try:
        reply = None if form is None else form.reply(found)
    except Nothing as e:
        reply = e.reply
    except (LookupError, TypeError, AttributeError):  # told where it is read
        reply = None
    return 0 if reply is None else sum(len(text or "") for text in (reply.text, reply.reasoning, reply.refusal))


def _first(choices: Any) -> Any:
    """The choice that is the first by its index, where each has one; else the first of the list."""
    numbers = [n for choice in choices if (n := place_of(choice)) is not None]
    return choices[numbers.index(min(numbers))] if len(numbers) == len(choices) else choices[0]


def _of_choice(found: Mapping[str, Any]) -> tuple[str | None, str]:
    choice = _first(found["choices"])
    return _ended(choice.get("finish_reason"), choice.get("error") or found.get("error"))


def _ended(word: Any, error: Any) -> tuple[str | None, str]:
    """Why an answer ended, and how it failed, if it did: by the endpoint's word, and the error that it tells."""
    word = _text(word)
    plain = (word or "").lower().strip()
    ended = FINISHES.get(plain, word)
    if not error and (ended != word or not any(part in plain for part in UNFINISHED)):
        return ended, ""
    told = [f"the endpoint did not finish it ({word})" if word else "the endpoint did not finish it"]
    if isinstance(error, Mapping):
        told += [str(error[name]) for name in ("code", "type", "message") if error.get(name)] or [str(dict(error))]
    elif error:
        told.append(str(error))
    return ended, ": ".join(told)[:1000]


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
    """Tokens with their log-probabilities; none if one has none."""
    found = tuple(pairs)
    return found if all(isinstance(t, str) and is_logprob(n) for t, n in found) else ()


def is_logprob(number: Any) -> bool:
    """Whether that is the logarithm of a probability, as computed: it may be a little over 0."""
    return type(number) in (int, float) and bool(number <= 1e-3)


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
