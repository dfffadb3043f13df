"""A prompt a row, as a model: prompts from templates, answers as columns."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pyarrow as pa

from gristmill.errors import BadModel, RunFailed
from gristmill.job.prompts import Prompt, prices, text_of
from gristmill.job.secret import Secret, reveal
from gristmill.job.specs import Call, FunctionModel
from gristmill.models.answercache import AnswerCache, digest_of
from gristmill.models.apis import FORMS, Reply, Sampling
from gristmill.models.calls import check_arguments, is_async
from gristmill.models.columns import check_columns
from gristmill.models.contract import ModelInfo, Place
from gristmill.models.conversation import Conversation, examples_of, letters, text_in
from gristmill.models.endpoint import Endpoint, Refused
from gristmill.models.returns import parse_schema
from gristmill.models.room import Room
from gristmill.models.rowfunction import LoadedRows
from gristmill.process.targets import import_target

OPENAI = "https://api.openai.com/v1"
WAITING = 4  # rows that are begun, per request in flight: some wait before they are sent again
MOST_KNOWN = 20_000  # answers that `dedupe` remembers, in each worker
LETTERS = 4  # of a token, about: what a prompt will take is corrected by what the endpoint says it took
CHOICE = "choice"
NEW_MOST = "max_completion_tokens"  # as newer models of OpenAI want max_tokens to be named


class Misfit(Exception):
    """An answer that is not of the form asked for, also when asked for again."""


def resolve(spec: Prompt) -> Prompt:
    """The spec with the texts of its files, its endpoint and its key, which the workers' machines may lack."""
    key = os.environ.get("OPENAI_API_KEY")
    return replace(
        spec,
        prompt=None if spec.prompt is None else text_of(spec.prompt, "prompt"),
        examples=None if spec.examples is None else tuple(examples_of(spec)),
        system=None if spec.system is None else text_of(spec.system, "system"),
        base_url=spec.base_url or os.environ.get("OPENAI_BASE_URL") or OPENAI,
        cache=None if spec.cache is None else os.path.abspath(os.path.expanduser(spec.cache)),
        api_key=spec.api_key or (None if key is None else Secret("${env:OPENAI_API_KEY}", key)),
    )


def remarks(spec: Prompt) -> tuple[str, ...]:
    """A warning if all rows are asked the same."""
    asked = Conversation(resolve(spec), answers_of(spec))
    if asked.whole or asked.columns:
        return ()
    return ("the prompt names no column, so all rows are asked the same: a column's value is {{ column }}",)


def describe(spec: Prompt, schema: pa.Schema | None) -> ModelInfo:
    """See ModelKind. No request is made."""
    outputs = _schema(spec)
    asked = Conversation(spec, answers_of(spec))
    check_columns(schema, asked.columns, spec.name, "has a prompt with")
    _check_images(spec, schema)
    return ModelInfo(
        spec.name,
        None if asked.whole else asked.columns,
        tuple(outputs.names),
        outputs,
        keeps_columns=True,
        filled=asked.columns,
        call=_own(spec),
        on_gpu=False,
        at_once=spec.most,
    )


def open_model(spec: Prompt, place: Place) -> LoadedPrompt:
    """The model, as a function of one row that asks the endpoint."""
    spec = resolve(spec)
    asked = Conversation(spec, answers_of(spec))
    at_once = place.at_once or spec.most
    share = at_once / spec.most  # of the run's limits: that of this worker
    call = Call(Asker, {"spec": spec, "share": share, "at_once": at_once, "limit": place.limit}, "row")
    if not asked.whole:
        call = replace(call, takes=dict.fromkeys(asked.columns, "not null"))
    outputs = _schema(spec)
    returns = {field.name: str(field.type) for field in outputs}
    return LoadedPrompt(
        _Asked(call, returns, label=spec.name), replace(place, at_once=WAITING * at_once), spec.messages is not None
    )


class LoadedPrompt(LoadedRows):
    """A prompt at work; a RowModel."""

    def __init__(self, spec: FunctionModel, place: Place, by_user: bool) -> None:
        super().__init__(spec, place)
        self.by_user = by_user

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


def answers_of(spec: Prompt) -> tuple[str, ...]:
    """The columns of an answer itself."""
    return (spec.output,) if spec.returns is None else tuple(spec.returns)


def _own(spec: Prompt) -> Call | None:
    """The user's function that gives the messages. Raises BadModel if it is none of one row."""
    if spec.messages is None:
        return None
    call = Call(spec.messages, batch_format="row")
    target = import_target(call.target) if isinstance(call.target, str) else call.target
    if is_async(target) or isinstance(target, type):
        raise BadModel(f"messages={call.name}: give a plain function of a row, which gives its messages")
    check_arguments(replace(call, target=target))
    return call


def _check_images(spec: Prompt, schema: pa.Schema | None) -> None:
    types = pa.types
    if schema is None:
        return
    for name in spec.images or ():
        kind = schema.field(name).type
        if not (types.is_binary(kind) or types.is_large_binary(kind) or types.is_string(kind) or
                types.is_large_string(kind) or types.is_null(kind)):  # fmt: skip
            raise BadModel(f"images names column {name!r}, which has {kind}: give a column of bytes, or of addresses")


def _schema(spec: Prompt) -> pa.Schema:
    """The columns that the model adds."""
    named = parse_schema({spec.output: "string"} if spec.returns is None else spec.returns)
    for option, kinds in _BESIDE.items():
        for name, kind in kinds.items() if getattr(spec, option) else ():
            column = f"{spec.output}_{name}"
            if column in named.names:
                raise BadModel(f"returns has column {column!r}, which {option} adds: rename one (output=)")
            named = named.append(pa.field(column, kind))
    return named


_USAGE = {"prompt_tokens": pa.int64(), "completion_tokens": pa.int64(), "finish_reason": pa.string()}
_BESIDE: Mapping[str, Mapping[str, pa.DataType]] = {
    "keep_usage": _USAGE,
    "keep_score": {"score": pa.float64()},
    "keep_reasoning": {"reasoning": pa.string()},
    "keep_prompt": {"prompt": pa.string()},
}


class Asker:
    """Asks an endpoint for one row at a time; called for many at once, in one event loop."""

    def __init__(self, spec: Prompt, share: float, at_once: int, limit: float) -> None:
        self._spec = spec
        self._conversation = Conversation(spec, answers_of(spec))
        self._api = FORMS[spec.api]
        self._most_tokens = self._api.most_tokens
        self._sampling = Sampling(spec.temperature, spec.top_p, spec.max_tokens, spec.keep_score)
        self._form = _Form(spec)
        self._structured = self._form.schema is not None  # until the endpoint refuses it
        self._prices = None if spec.price is None else prices(spec.price)
        self._most = None if spec.max_cost is None else spec.max_cost * share
        self._spent = _Spent()
        self._cache = None if spec.cache is None else AnswerCache(spec.cache)
        self._known: dict[bytes, asyncio.Future[dict[str, Any]]] = {}  # equal requests, answered or in flight

        def shared(rate: int | None) -> float | None:
            return None if rate is None else rate * share

        urls = str(reveal(spec.base_url)).split(",")
        self._endpoint = Endpoint(
            [url.strip() for url in urls if url.strip()], reveal(spec.api_key),
            timeout=spec.timeout, limit=0.9 * limit,
            room=Room(at_once, auto=spec.concurrency == "auto"),
            requests=shared(spec.requests_per_minute), tokens=shared(spec.tokens_per_minute),
        )  # fmt: skip

    async def __call__(self, row: Mapping[str, Any]) -> dict[str, Any]:
        messages = self._conversation.of(row)
        used: list[bytes] = []  # of the cache
        try:
            return await self._answered(messages, used)
        except (Misfit, Refused):  # or nobody could have the row asked for again
            if self._cache is not None:
                self._cache.forget(used)
            raise

    async def _answered(self, messages: list[dict[str, Any]], used: list[bytes]) -> dict[str, Any]:
        """The columns of an answer that fits."""
        reply = await self._asked(messages, used)
        for again in (True, False):
            if reply.finish == "content_filter" or reply.refusal:
                raise Refused(f"content filter: {reply.refusal or reply.text or 'no reason given'}")
            try:
                found = self._form.parsed(reply.text)
            except ValueError as e:
                cut = " (the answer was cut at max_tokens)" if reply.finish == "length" else ""
                if not again:
                    raise Misfit(f"{e}{cut}; the answer was {reply.text[:2000]!r}") from None
                words = f"That does not fit: {e}. {self._form.words}"
                told = [{"role": "assistant", "content": reply.text}, {"role": "user", "content": words}]
                reply = await self._asked([*messages, *told], used)
                continue
            return {**found, **self._beside(messages, reply)}
        raise AssertionError("the second answer fits or does not")

    def used(self) -> dict[str, float]:
        """What was asked for since the last call."""
        return self._spent.taken()

    async def aclose(self) -> None:
        """Close the connections."""
        await self._endpoint.close()
        if self._cache is not None:
            self._cache.close()

    async def _asked(self, messages: list[dict[str, Any]], used: list[bytes]) -> Reply:
        """An answer in whatever form the endpoint understands."""
        tokens = letters(messages) / LETTERS + (self._spec.max_tokens or 0)
        while True:
            structured, scored, most_tokens = self._structured, self._sampling.scored, self._most_tokens
            try:
                return self._api.reply(await self._paid(self._body(messages), tokens, used))
            except Refused as e:
                said = str(e)
                if structured and any(word in said for word in ("response_format", "json_schema", "structured")):
                    self._structured = False
                elif scored and "logprobs" in said:
                    self._sampling = replace(self._sampling, scored=False)
                elif most_tokens != NEW_MOST and NEW_MOST in said:
                    self._most_tokens = NEW_MOST
                elif (structured, scored, most_tokens) == self._understood:  # it is the row that is refused
                    raise
            except (LookupError, TypeError, AttributeError) as e:
                raise Refused(f"an answer of another form than {self._api.path} has: {type(e).__name__}: {e}") from None

    @property
    def _understood(self) -> tuple[bool, bool, str]:
        return self._structured, self._sampling.scored, self._most_tokens

    def _body(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        spec, form = self._spec, self._form
        if form.words and not self._structured:
            last = messages[-1]
            messages = [*messages[:-1], {**last, "content": form.asked(last["content"])}]
        body = self._api.body(spec.llm, messages, self._sampling, form.schema if self._structured else None)
        if self._most_tokens != self._api.most_tokens and spec.max_tokens is not None:
            body[self._most_tokens] = body.pop(self._api.most_tokens)
        return {**body, **reveal(dict(spec.request))}

    async def _paid(self, body: Mapping[str, Any], tokens: float, used: list[bytes]) -> dict[str, Any]:
        """An answer that is kept from before, or that an equal request in flight gets, or a new one."""
        if not self._spec.dedupe and self._cache is None:
            return await self._new(body, tokens)
        key = digest_of(body)
        used.append(key)
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
            found = await self._endpoint.ask(body, tokens, self._api.path, self._api.key)
            self._spent.add(found.get("usage") or {}, self._prices)
        return found

    def _beside(self, messages: list[dict[str, Any]], reply: Reply) -> dict[str, Any]:
        """The columns beside the answer's own."""
        spec = self._spec
        found: dict[str, Any] = {}
        if spec.keep_usage:
            found.update(
                prompt_tokens=reply.prompt_tokens,
                completion_tokens=reply.completion_tokens,
                finish_reason=reply.finish,
            )
        if spec.keep_score:
            found["score"] = self._form.score(reply)
        if spec.keep_reasoning:
            found["reasoning"] = reply.reasoning
        if spec.keep_prompt:
            found["prompt"] = text_in(messages)
        return {f"{spec.output}_{name}": value for name, value in found.items()}


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
        given = float(usage.get("prompt_tokens") or usage.get("input_tokens") or 0)
        made = float(usage.get("completion_tokens") or usage.get("output_tokens") or 0)
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

    def asked(self, content: Any) -> Any:
        """A prompt for an endpoint that knows nothing of structured output."""
        if isinstance(content, str):
            return f"{content}\n\n{self.words}"
        return [*content, {"type": "text", "text": self.words}]

    def score(self, reply: Reply) -> float | None:
        """The probability of an answered choice, in (0, 1]: that of the tokens which hold it; None if not told."""
        if not reply.tokens or self._choices is None:
            return None
        text = "".join(token for token, _ in reply.tokens)
        plain = text.strip()
        if plain.startswith("{"):
            said = _json(plain).get(CHOICE)
            begin = text.find(json.dumps(said, ensure_ascii=False)[1:-1], text.find(CHOICE) + len(CHOICE))
            end = begin + len(str(said))
        else:
            begin = text.find(plain)
            end = begin + len(plain)
        total, place = 0.0, 0
        for token, logprob in reply.tokens:
            if place < end and place + len(token) > begin:
                total += logprob
            place += len(token)
        return min(1.0, math.exp(total))

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
        if said.startswith("{") and said not in self._choices:
            found = _json(said)
            said = str(found.get(CHOICE, "")) if isinstance(found, dict) else said
        if said in self._choices:
            return said
        alike = [choice for choice in self._choices if _plain(choice) == _plain(said)]
        if len(alike) == 1:  # choices that differ in case or marks alone are told apart by these
            return alike[0]
        raise ValueError(f"{said[:100]!r} is none of {', '.join(self._choices)}")


def _plain(text: str) -> str:
    return text.strip().strip("\"'`*.").casefold()


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
    """A value of a column, if it is one of its type: not a text for a number or an array, nor a fraction for a whole
    number, and each field of an object. Raises ValueError.
    """
    kind = field.type
    wrong = ValueError(f"{field.name!r} is {json.dumps(value)[:100]}, which is not {_json_type(kind, field.name)}")
    try:
        return _typed(value, kind)
    except (pa.ArrowException, TypeError, ValueError, OverflowError, LookupError):
        raise wrong from None


def _typed(value: Any, kind: pa.DataType) -> Any:
    """A value as its type has it, at any depth. Raises TypeError and others for one that is not of the JSON type."""
    if value is None:
        return None
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        if not isinstance(value, list):
            raise TypeError("not an array")
        return [_typed(item, kind.value_type) for item in value]
    if pa.types.is_struct(kind):
        if not isinstance(value, dict):
            raise TypeError("not an object")
        return {field.name: _typed(value[field.name], field.type) for field in kind}
    if isinstance(value, bool) != pa.types.is_boolean(kind) or isinstance(value, (list, dict)):
        raise TypeError("of another type")
    return pa.scalar(value, kind).as_py()


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
