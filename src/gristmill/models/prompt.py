"""A prompt a row, as a model: prompts from templates, answers as columns."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from gristmill.errors import BadModel, RunFailed
from gristmill.job.prompts import Prompt, prices, text_of
from gristmill.job.secret import Secret, reveal
from gristmill.job.specs import Call, FunctionModel
from gristmill.models.answercache import AnswerCache, digest_of
from gristmill.models.columns import check_columns
from gristmill.models.contract import Journal, ModelInfo, Place, Prepared
from gristmill.models.endpoint import Endpoint, Refused
from gristmill.models.generator import Generator, check_request
from gristmill.models.llmfiles import LlmFiles, find_llm
from gristmill.models.returns import parse_schema
from gristmill.models.rowfunction import LoadedRows
from gristmill.models.template import Template
from gristmill.process.extras import installed, require

OPENAI = "https://api.openai.com/v1"
WAITING = 4  # rows that are begun, per request in flight: some wait before they are sent again
MOST_KNOWN = 20_000  # answers that `dedupe` remembers, in each worker
LETTERS = 4  # of a token, about: what a prompt will take is corrected by what the endpoint says it took
CHOICE = "choice"


class Misfit(Exception):
    """An answer that is not of the form asked for, also when asked for again."""


def resolve(spec: Prompt) -> Prompt:
    """The spec with the texts of its files, its endpoint and its key, which the workers' machines may lack."""
    spec = replace(
        spec,
        prompt=text_of(spec.prompt, "prompt"),
        system=None if spec.system is None else text_of(spec.system, "system"),
        cache=None if spec.cache is None else os.path.abspath(os.path.expanduser(spec.cache)),
    )
    if (files := _files(spec)) is not None:
        return replace(spec, llm=os.path.abspath(files.opened))
    key = os.environ.get("OPENAI_API_KEY")
    return replace(
        spec,
        base_url=spec.base_url or os.environ.get("OPENAI_BASE_URL") or OPENAI,
        api_key=spec.api_key or (None if key is None else Secret("${env:OPENAI_API_KEY}", key)),
    )


def _files(spec: Prompt) -> LlmFiles | None:
    """The files of a model on this machine; None for an endpoint's. Raises BadModel for options of the other kind."""
    files = None
    if spec.base_url is None:
        files = find_llm(spec.llm, elsewhere=bool(os.environ.get("OPENAI_BASE_URL")))
    if files is None:
        if spec.sha256 is not None:
            raise BadModel(f"sha256 is of a model's files, and {spec.llm} names none on this machine: leave it out")
        return None
    for name in ("api_key", "requests_per_minute", "tokens_per_minute", "price", "max_cost"):
        if getattr(spec, name) is not None:
            raise BadModel(f"{name} is for endpoints, and {spec.llm} is a model on this machine: leave it out")
    check_request(spec.request)
    return files


def describe(spec: Prompt, schema: pa.Schema | None) -> ModelInfo:
    """See ModelKind. No request is made."""
    templates = _templates(spec)
    columns = tuple(dict.fromkeys(column for template in templates for column in template.columns))
    check_columns(schema, columns, spec.name, "has a prompt with")
    given = None if any(template.whole for template in templates) else columns
    outputs = _schema(spec)
    info = ModelInfo(
        spec.name,
        given,
        tuple(outputs.names),
        outputs,
        keeps_columns=True,
        filled=columns,
        on_gpu=False,
        at_once=spec.concurrency,
    )
    if (files := _files(spec)) is None:
        return info
    if not installed("openvino_genai"):
        require("openvino_genai", "genai", f"{spec.llm}, a language model on this machine,")
    digests = files.digests(spec.sha256, spec.name)
    return replace(info, digest=digests.all, digests=digests.by_file, weight_bytes=files.weight_bytes)


def open_model(spec: Prompt, place: Place) -> LoadedPrompt:
    """The model, as a function of one row that asks the endpoint, or the model that it loads."""
    spec = resolve(spec)
    files = _files(spec)
    if files is not None:
        spec = replace(spec, sha256=files.digests(spec.sha256, spec.name).all)
        place = replace(place, limit=math.inf)  # a row's time is mostly that of others; max_tokens bounds it
    templates = _templates(spec)
    whole = any(template.whole for template in templates)
    columns = [column for template in templates for column in template.columns]
    at_once = place.at_once or spec.concurrency
    share = at_once / spec.concurrency  # of the run's limits: that of this worker
    call = Call(Asker, {"spec": spec, "files": files, "share": share, "at_once": at_once, "place": place}, "row")
    if not whole:
        call = replace(call, takes=dict.fromkeys(columns, "not null"))
    outputs = _schema(spec)
    returns = {field.name: str(field.type) for field in outputs}
    return LoadedPrompt(_Asked(call, returns, label=spec.name), replace(place, at_once=WAITING * at_once))


class LoadedPrompt(LoadedRows):
    """A prompt at work; a RowModel."""

    def begin(
        self, prepared: Prepared, rows: np.ndarray, answered: Callable[[], None], journal: Journal | None = None
    ) -> None:
        """See RowModel."""
        self._call.built.alive(answered)
        super().begin(prepared, rows, answered, journal)

    def _order(self, rows: Sequence[Any]) -> Sequence[int]:
        asker: Asker = self._call.built
        return asker.order(rows)

    def used(self) -> dict[str, float]:
        """See RowModel."""
        asker: Asker = self._call.built
        return asker.used()

    def leave(self) -> None:
        """See RowModel."""
        self._flight.close(self._call.built.aclose)


@dataclass(frozen=True)
class _Asked(FunctionModel):
    label: str = ""

    @property
    def name(self) -> str:
        return self.label


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
    """Asks an endpoint, or a model of its own, for one row at a time; called for many at once, in one event loop."""

    def __init__(self, spec: Prompt, files: LlmFiles | None, share: float, at_once: int, place: Place) -> None:
        self._spec = spec
        self._prompt, *system = _templates(spec)
        self._system = system[0] if system else None
        self._form = _Form(spec)
        self._structured = self._form.schema is not None  # until the endpoint refuses it
        self._prices = None if spec.price is None else prices(spec.price)
        self._most = None if spec.max_cost is None else spec.max_cost * share
        self._spent = _Spent()
        self._cache = None if spec.cache is None else AnswerCache(spec.cache)
        self._known: dict[bytes, asyncio.Future[dict[str, Any]]] = {}  # equal requests, answered or in flight

        self._endpoint: Endpoint | Generator
        if files is not None:
            self._endpoint = Generator(
                files, threads=place.threads, most=at_once, request=reveal(dict(spec.request)), choice=CHOICE
            )
            return

        def shared(rate: int | None) -> float | None:
            return None if rate is None else rate * share

        urls = str(reveal(spec.base_url)).split(",")
        self._endpoint = Endpoint(
            [url.strip() for url in urls if url.strip()], reveal(spec.api_key),
            timeout=spec.timeout, limit=0.9 * place.limit, at_once=at_once,
            requests=shared(spec.requests_per_minute), tokens=shared(spec.tokens_per_minute),
        )  # fmt: skip

    async def __call__(self, row: Mapping[str, Any]) -> dict[str, Any]:
        messages = self._messages(row)
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

    def _messages(self, row: Mapping[str, Any]) -> list[dict[str, str]]:
        messages = [{"role": "user", "content": self._prompt.of(row)}]
        if self._system is not None:
            messages.insert(0, {"role": "system", "content": self._system.of(row)})
        return messages

    def order(self, rows: Sequence[Mapping[str, Any]]) -> Sequence[int]:
        """The order in which these rows are begun: a local model computes what prompts begin with once for those that
        come one after the other.
        """
        if not isinstance(self._endpoint, Generator):
            return range(len(rows))

        def text(place: int) -> list[str]:
            try:
                return [message["content"] for message in self._messages(rows[place])]
            except Exception:  # told for the row itself, when it is asked for
                return []

        return sorted(range(len(rows)), key=text)

    def alive(self, heard: Callable[[], None]) -> None:
        """`heard` is called whenever a local model got on."""
        if isinstance(self._endpoint, Generator):
            self._endpoint.alive = heard

    def used(self) -> dict[str, float]:
        """What was asked for since the last call."""
        return self._spent.taken()

    async def aclose(self) -> None:
        """Close the connections."""
        await self._endpoint.close()
        if self._cache is not None:
            self._cache.close()

    async def _asked(self, messages: list[dict[str, str]]) -> dict[str, Any]:
        spec = self._spec
        body: dict[str, Any] = {
            "model": spec.sha256 or spec.llm, "messages": messages, **reveal(dict(spec.request))
        }  # fmt: skip
        for name in ("temperature", "top_p", "max_tokens"):
            if (value := getattr(spec, name)) is not None:
                body[name] = value
        tokens = sum(len(m["content"]) for m in messages) / LETTERS + (spec.max_tokens or 0)
        if self._form.words and isinstance(
            self._endpoint, Generator
        ):  # which holds it to the form, but tells it nothing
            body["messages"] = self._told(messages)
        if self._structured:
            try:
                return await self._paid({**body, "response_format": self._form.response_format}, tokens)
            except Refused as e:
                if not any(word in str(e) for word in ("response_format", "json_schema", "structured")):
                    raise
                self._structured = False
        if self._form.words:
            body["messages"] = self._told(messages)
        return await self._paid(body, tokens)

    def _told(self, messages: list[dict[str, str]]) -> list[dict[str, str]]:
        return [*messages[:-1], {**messages[-1], "content": self._form.asked(messages[-1]["content"])}]

    async def _paid(self, body: Mapping[str, Any], tokens: float) -> dict[str, Any]:
        """An answer that is kept from before, or that an equal request in flight gets, or a new one."""
        if not self._spec.dedupe and self._cache is None:
            return await self._new(body, tokens)
        key = digest_of(body)
        if self._cache is not None and (kept := self._cache.get(key)) is not None:
            return kept
        if not self._spec.dedupe:
            return self._kept(key, await self._new(body, tokens))
        if (known := self._known.get(key)) is None:
            known = self._known[key] = asyncio.ensure_future(self._new(body, tokens))
            known.add_done_callback(partial(self._asked_once, key))
            if len(self._known) > MOST_KNOWN:
                self._known.pop(next(iter(self._known)))
        return self._kept(key, await asyncio.shield(known))

    def _asked_once(self, key: bytes, known: asyncio.Future[Any]) -> None:
        if known.cancelled() or known.exception() is not None:
            self._known.pop(key, None)  # the next row asks again

    def _kept(self, key: bytes, reply: dict[str, Any]) -> dict[str, Any]:
        if self._cache is not None:
            self._cache.put(key, reply)
        return reply

    async def _new(self, body: Mapping[str, Any], tokens: float) -> dict[str, Any]:
        """An answer, counted; not asked for if it might cost more than is left."""
        if self._most is not None and self._spent.might_cost() > self._most:
            whose = "" if self._most == self._spec.max_cost else " by this worker"
            self._endpoint.stop(
                RunFailed(
                    f"max_cost {self._spec.max_cost:g}: ${self._spent.cost:.4f} are spent{whose}, and the requests in "
                    "flight might take the rest: what is answered is kept; run again, with another max_cost if need be"
                )
            )
        with self._spent.one():
            reply = await self._endpoint.ask(body, tokens)
            self._spent.add(reply.get("usage") or {}, self._prices)
        return reply

    def _usage(self, reply: Mapping[str, Any], choice: Mapping[str, Any]) -> dict[str, Any]:
        if not self._spec.keep_usage:
            return {}
        used = {**(reply.get("usage") or {}), "finish_reason": choice.get("finish_reason")}
        return {f"{self._spec.output}_{name}": used.get(name) for name in _USAGE}


class _Spent:
    """Requests, tokens and dollars of a worker: added to in its loop, and taken by the thread that reports."""

    def __init__(self) -> None:
        self.cost = 0.0
        self._answers = 0
        self._flying = 0
        self._new: dict[str, float] = {}
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        """A request, in flight meanwhile."""
        self._flying += 1
        try:
            yield
        finally:
            self._flying -= 1

    def might_cost(self) -> float:
        """What is spent, and what the requests in flight and one more cost if they are like the others."""
        return self.cost + (self._flying + 1) * self.cost / max(1, self._answers)

    def add(self, usage: Mapping[str, Any], prices: tuple[float, float] | None) -> None:
        """Count an answer."""
        given, made = (float(usage.get(name) or 0) for name in ("prompt_tokens", "completion_tokens"))
        new = {"requests": 1.0, "prompt_tokens": given, "completion_tokens": made}
        if prices is not None:
            new["cost"] = given * prices[0] + made * prices[1]
            self.cost += new["cost"]
        self._answers += 1
        with self._lock:
            for name, value in new.items():
                self._new[name] = self._new.get(name, 0.0) + value

    def taken(self) -> dict[str, float]:
        """What is new since the last call."""
        with self._lock:
            found, self._new = self._new, {}
        return found


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
