"""A prompt a row, as a model: prompts from templates, answers as columns."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pyarrow as pa

from gristmill.errors import BadModel
from gristmill.job.prompts import Prompt, text_of
from gristmill.job.secret import reveal
from gristmill.models.columns import check_columns
from gristmill.models.contract import ModelInfo, Place
from gristmill.models.endpoint import Refused
from gristmill.models.paid import LETTERS, LoadedAsker, Paid, loaded, reached
from gristmill.models.returns import parse_schema
from gristmill.models.template import Template

CHOICE = "choice"


class Misfit(Exception):
    """An answer that is not of the form asked for, also when asked for again."""


def resolve(spec: Prompt) -> Prompt:
    """The spec with the texts of its files, its endpoint and its key, which the workers' machines may lack."""
    return replace(
        reached(spec),
        prompt=text_of(spec.prompt, "prompt"),
        system=None if spec.system is None else text_of(spec.system, "system"),
    )


def describe(spec: Prompt, schema: pa.Schema | None) -> ModelInfo:
    """See ModelKind. No request is made."""
    templates = _templates(spec)
    columns = tuple(dict.fromkeys(column for template in templates for column in template.columns))
    check_columns(schema, columns, spec.name, "has a prompt with")
    given = None if any(template.whole for template in templates) else columns
    outputs = _schema(spec)
    return ModelInfo(
        spec.name,
        given,
        tuple(outputs.names),
        outputs,
        keeps_columns=True,
        filled=columns,
        on_gpu=False,
        at_once=spec.concurrency,
    )


def open_model(spec: Prompt, place: Place) -> LoadedAsker:
    """The model, as a function of one row that asks the endpoint."""
    spec = resolve(spec)
    templates = _templates(spec)
    whole = any(template.whole for template in templates)
    columns = [column for template in templates for column in template.columns]
    return loaded(Asker, spec, place, None if whole else dict.fromkeys(columns, "not null"), _schema(spec))


def _templates(spec: Prompt) -> list[Template]:
    texts = {"prompt": spec.prompt, "system": spec.system}
    return [Template(text_of(text, what), what) for what, text in texts.items() if text is not None]


def _schema(spec: Prompt) -> pa.Schema:
    """The columns that the model adds."""
    named = parse_schema({spec.output: "string"} if spec.returns is None else spec.returns)
    if not spec.keep_usage:
        return named
    usage = [(f"{spec.output}_{name}", kind) for name, kind in _USAGE.items()]
    for name, _ in usage:
        if name in named.names:
            raise BadModel(f"returns has column {name!r}, which keep_usage adds: rename one (output=)")
    return pa.schema([*named, *(pa.field(name, kind) for name, kind in usage)])


_USAGE = {"prompt_tokens": pa.int64(), "completion_tokens": pa.int64(), "finish_reason": pa.string()}


class Asker:
    """Asks an endpoint for one row at a time; called for many at once, in one event loop."""

    def __init__(self, spec: Prompt, share: float, at_once: int, limit: float) -> None:
        self._spec = spec
        self._paid = Paid(spec, share, at_once, limit)
        self._prompt, *system = _templates(spec)
        self._system = system[0] if system else None
        self._form = _Form(spec)
        self._structured = self._form.schema is not None  # until the endpoint refuses it

    async def __call__(self, row: Mapping[str, Any]) -> dict[str, Any]:
        messages = [{"role": "user", "content": self._prompt.of(row)}]
        if self._system is not None:
            messages.insert(0, {"role": "system", "content": self._system.of(row)})
        reply = await self._asked(messages)
        for again in (True, False):
            choice = reply["choices"][0]
            message = choice.get("message") or {}
            if choice.get("finish_reason") == "content_filter" or message.get("refusal"):
                why = message.get("refusal") or message.get("content") or "no reason given"
                raise Refused(f"content filter: {why}")
            text = message.get("content") or ""
            try:
                found = self._form.parsed(text)
            except ValueError as e:
                cut = " (the answer was cut at max_tokens)" if choice.get("finish_reason") == "length" else ""
                if not again:
                    raise Misfit(f"{e}{cut}; the answer was {text[:2000]!r}") from None
                words = f"That does not fit: {e}. {self._form.words}"
                told = [{"role": "assistant", "content": text}, {"role": "user", "content": words}]
                reply = await self._asked([*messages, *told])
                continue
            return {**found, **self._usage(reply, choice)}
        raise AssertionError("the second answer fits or does not")

    def used(self) -> dict[str, float]:
        """What was asked for since the last call."""
        return self._paid.spent.taken()

    async def aclose(self) -> None:
        """Close the connections."""
        await self._paid.aclose()

    async def _asked(self, messages: list[dict[str, str]]) -> dict[str, Any]:
        spec = self._spec
        body: dict[str, Any] = {"model": spec.llm, "messages": messages, **reveal(dict(spec.request))}
        for name in ("temperature", "top_p", "max_tokens"):
            if (value := getattr(spec, name)) is not None:
                body[name] = value
        tokens = sum(len(m["content"]) for m in messages) / LETTERS + (spec.max_tokens or 0)
        if self._structured:
            try:
                return await self._paid.ask({**body, "response_format": self._form.response_format}, tokens)
            except Refused as e:
                if not any(word in str(e) for word in ("response_format", "json_schema", "structured")):
                    raise
                self._structured = False
        if self._form.words:
            body["messages"] = [*messages[:-1], {**messages[-1], "content": self._form.asked(messages[-1]["content"])}]
        return await self._paid.ask(body, tokens)

    def _usage(self, reply: Mapping[str, Any], choice: Mapping[str, Any]) -> dict[str, Any]:
        if not self._spec.keep_usage:
            return {}
        used = {**(reply.get("usage") or {}), "finish_reason": choice.get("finish_reason")}
        return {f"{self._spec.output}_{name}": used.get(name) for name in _USAGE}


class _Form:
    """The form of an answer: free text, one of some choices, or an object with columns."""

    def __init__(self, spec: Prompt) -> None:
        self._output = spec.output
        self._choices = spec.choices
        self._columns = None if spec.returns is None else parse_schema(spec.returns)
        self.schema: dict[str, Any] | None = None
        self.words = ""
        if self._choices is not None:
            self.schema = _object({CHOICE: {"type": "string", "enum": list(self._choices)}})
            self.words = f"Answer with one of these and nothing else: {', '.join(self._choices)}."
        elif self._columns is not None:
            self.schema = _object({f.name: _json_type(f.type, f.name) for f in self._columns})
            self.words = f"Answer with a JSON object of this schema and nothing else: {json.dumps(self.schema)}"

    @property
    def response_format(self) -> dict[str, Any]:
        """As OpenAI's structured outputs name it."""
        return {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": self.schema}}

    def asked(self, prompt: str) -> str:
        """A prompt for an endpoint that knows nothing of structured output."""
        return f"{prompt}\n\n{self.words}"

    def parsed(self, text: str) -> dict[str, Any]:
        """The columns of an answer. Raises ValueError with what is wrong, in words that a model understands."""
        if self._choices is not None:
            return {self._output: self._choice(text)}
        if self._columns is None:
            return {self._output: text}
        found = _json(text)
        if not isinstance(found, dict):
            raise ValueError("it is not a JSON object")
        if lost := [name for name in self._columns.names if name not in found]:
            raise ValueError(f"it has no {lost[0]!r}")
        return {field.name: _value(found[field.name], field) for field in self._columns}

    def _choice(self, text: str) -> str:
        assert self._choices is not None
        said = text.strip()
        if said.startswith("{"):
            found = _json(said)
            said = str(found.get(CHOICE, "")) if isinstance(found, dict) else said
        plain = said.strip().strip("\"'`*.").casefold()
        for choice in self._choices:
            if plain == choice.casefold():
                return choice
        raise ValueError(f"{said[:100]!r} is none of {', '.join(self._choices)}")


def _json(text: str) -> Any:
    """JSON, also between the fences of a Markdown block. Raises ValueError."""
    text = text.strip()
    if text.startswith("```"):
        text = text.partition("\n")[2].rpartition("```")[0]
    try:
        return json.loads(text)
    except ValueError as e:
        raise ValueError(f"it is not JSON ({e})") from None


def _value(value: Any, field: pa.Field) -> Any:
    """A value of a column, if it is one of its type: not a text for a number, nor a fraction for a whole number."""
    kind = field.type
    wrong = ValueError(f"{field.name!r} is {json.dumps(value)[:100]}, which is not {_json_type(kind, field.name)}")
    if value is None:
        return None
    if isinstance(value, bool) != pa.types.is_boolean(kind) and not pa.types.is_nested(kind):
        raise wrong
    try:
        return pa.scalar(value, kind).as_py()
    except (pa.ArrowInvalid, pa.ArrowTypeError, TypeError, ValueError, OverflowError):
        raise wrong from None


def _object(properties: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "type": "object", "properties": dict(properties), "required": list(properties), "additionalProperties": False
    }  # fmt: skip


def _json_type(kind: pa.DataType, name: str) -> dict[str, Any]:
    """A type as JSON Schema has it. Raises BadModel for one that JSON does not have."""
    if pa.types.is_boolean(kind):
        return {"type": "boolean"}
    if pa.types.is_integer(kind):
        return {"type": "integer"}
    if pa.types.is_floating(kind):
        return {"type": "number"}
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return {"type": "string"}
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return {"type": "array", "items": _json_type(kind.value_type, name)}
    if pa.types.is_struct(kind):
        return _object({f.name: _json_type(f.type, name) for f in kind})
    raise BadModel(f"returns gives column {name!r} the type {kind}, which JSON does not have: string, int64, float64, "
                   "bool, list<…> and struct<…> are")  # fmt: skip
