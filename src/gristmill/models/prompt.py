"""A prompt a row, as a model: prompts from templates, answers as columns."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pyarrow as pa

from gristmill.arrow.typetext import parse_type
from gristmill.errors import BadModel
from gristmill.job.prompts import Prompt, is_class, text_of
from gristmill.job.secret import reveal
from gristmill.job.specs import Call
from gristmill.models import generator, vllm
from gristmill.models.answercache import digest_of
from gristmill.models.answerschema import Answers, answers_in, object_of
from gristmill.models.apis import FORMS, Nothing, Reply, Sampling
from gristmill.models.askers import LoadedAsker, loaded
from gristmill.models.asking import LETTERS, asks, estimated, reached
from gristmill.models.bill import Answer, Bill
from gristmill.models.calls import check_arguments, is_async
from gristmill.models.columns import check_columns
from gristmill.models.contract import ModelInfo, Place, Prepared, Told
from gristmill.models.conversation import Conversation, examples_of, letters, text_in
from gristmill.models.conversion import to_batch
from gristmill.models.generator import Generator, check_request
from gristmill.models.llmfiles import MODULES, LlmFiles, backend_of, find_llm
from gristmill.models.paid import Paid, endpoint_of, provided_of
from gristmill.models.replies import Refused, UnderWay
from gristmill.models.rowtypes import Misfit
from gristmill.process.extras import installed, require
from gristmill.process.targets import import_target
from gristmill.values import dataclass

CHOICE = "choice"
STRUCTURED = ("response_format", "json_schema", "structured", "output_config")  # words of a refusal of a schema
# Codes of refusals that are about what a row asks, whatever they name.
ROWS_OWN = ("context_length_exceeded", "string_above_max_length", "content_filter", "content_policy_violation")
NEW_MOST = "max_completion_tokens"  # as newer models of OpenAI want max_tokens to be named


def resolve(spec: Prompt) -> Prompt:
    """The spec with the texts of its files, its endpoint and its key, which the workers' machines may lack."""
    spec = replace(
        spec,
        prompt=None if spec.prompt is None else text_of(spec.prompt, "prompt"),
        returns=_returned(spec.returns),
        examples=None if spec.examples is None else tuple(examples_of(spec)),
        system=None if spec.system is None else text_of(spec.system, "system"),
        cache=None if spec.cache is None else os.path.abspath(os.path.expanduser(spec.cache)),
    )
    files = _files(spec)
    if files is None:
        return reached(spec, FORMS[spec.api].vendor)
    return replace(spec, llm=os.path.abspath(files.opened), backend=backend_of(files, spec.backend))


def _returned(returns: Any) -> Any:
    """What answers have, read from its file, or imported, if it is named by a text. Raises BadModel."""
    if not isinstance(returns, str):
        return returns
    if not returns.startswith("@"):
        try:
            found = import_target(returns)
        except BadModel as e:
            name, _, kind = map(str.strip, returns.partition(":"))
            with contextlib.suppress(ValueError):
                parse_type(kind)
                raise BadModel(f"returns {e}, or give NAME=TYPE, as in {name}={kind}") from None
            raise
        if not is_class(found):
            raise BadModel(f"returns {returns} is no pydantic class: give one, or names and types, or a JSON Schema")
        return found
    try:
        found = json.loads(text_of(returns, "returns").removeprefix("\ufeff"))
    except ValueError as e:
        raise BadModel(f"returns {returns}: not JSON: {e}") from e
    if not isinstance(found, dict):
        raise BadModel(f"returns {returns} holds {type(found).__name__}: give a JSON Schema, or names and types")
    return found


_OF_ENDPOINTS = ("api_key", "requests_per_minute", "tokens_per_minute", "price", "max_cost", "images", "batch_api")


def _files(spec: Prompt) -> LlmFiles | None:
    """The files of a model on this machine; None for an endpoint's. Raises BadModel for options of the other kind."""
    files = None
    if spec.base_url is None:
        files = find_llm(spec.llm, elsewhere=bool(os.environ.get("OPENAI_BASE_URL")))
    if files is None:
        if spec.sha256 is not None:
            raise BadModel(f"sha256 is of a model's files, and {spec.llm} names none on this machine: leave it out")
        if spec.backend != "auto" or spec.vllm:
            given = "vllm" if spec.vllm else "backend"
            raise BadModel(f"{given} is for a model on this machine, and {spec.llm} names none: leave it out")
        return None
    backend = backend_of(files, spec.backend)
    others = [name for name in _OF_ENDPOINTS if getattr(spec, name) is not None]
    others += ["keep_reasoning"] if spec.keep_reasoning else []
    others += [] if spec.api == "chat" else ["api"]
    if others:
        raise BadModel(f"{others[0]} is for endpoints, and {spec.llm} is a model on this machine: leave it out")
    if backend != "vllm" and (spec.keep_score or spec.vllm):
        given = "keep_score" if spec.keep_score else "vllm"
        raise BadModel(
            f"{given} is for endpoints and for backend vllm, and {spec.llm} is run by OpenVINO GenAI: leave it out"
        )
    check_request(spec.request, vllm.FIELDS if backend == "vllm" else generator.FIELDS)
    return files


def remarks(spec: Prompt) -> tuple[str, ...]:
    """A warning if all rows are asked the same."""
    spec = resolve(spec)
    asked = Conversation(spec, answers_of(spec))
    if asked.whole or asked.columns:
        return ()
    return ("the prompt names no column, so all rows are asked the same: a column's value is {{ column }}",)


def describe(spec: Prompt, schema: pa.Schema | None) -> ModelInfo:
    """See ModelKind. No request is made."""
    outputs = _schema(spec)
    asked = Conversation(spec, answers_of(spec))
    check_columns(schema, asked.columns, spec.name, "has a prompt with")
    if schema is not None and not asked.whole and not asked.columns:
        _refuse_single_braces(spec, schema)
    for name in sorted(asked.taken.intersection(() if schema is None else schema.names)):
        raise BadModel(f"{spec.name}: {name!r} in the prompt is Jinja's or the whole row, and there is a column "
                       f"of that name: write {{{{ row[{name!r}] }}}} for it, or rename it in a step")  # fmt: skip
    _check_images(spec, schema)
    info = ModelInfo(
        spec.name,
        None if asked.whole else asked.columns,
        tuple(outputs.names),
        outputs,
        keeps_columns=True,
        filled=asked.columns,
        call=_own(spec),
        code=(spec.returns,) if is_class(spec.returns) else (),
        on_gpu=False,
        at_once=spec.most,
        bulk=spec.batches,
        asks=asks(spec),
    )
    if (files := _files(spec)) is None:
        return info
    backend = backend_of(files, spec.backend)
    if not installed(MODULES[backend]):
        require(MODULES[backend], backend, f"{spec.llm}, a language model on this machine,")
    digests = files.digests(spec.sha256, spec.name)
    most = vllm.AT_ONCE if backend == "vllm" else generator.AT_ONCE
    return replace(
        info, digest=digests.all, digests=digests.by_file, weight_bytes=files.weight_bytes, on_gpu=backend == "vllm",
        at_once=most if spec.concurrency == "auto" else spec.concurrency, alone=0,
    )  # fmt: skip


def _refuse_single_braces(spec: Prompt, schema: pa.Schema) -> None:
    """Raises BadModel for a prompt that names no column as a template does, but one as Python's format does: all rows
    would be asked the same, and paid for.
    """
    text = re.sub(r"(?s)\{%-? *raw.*?endraw *-?%\}|\{#.*?#\}|\{\{.*?\}\}", "", resolve(spec).prompt or "")
    if meant := next(
        (n for n in re.findall(r"(?<!\{)\{ ?(\w+)(?:![rsa])?(?::[^{}]*)? ?\}(?!\})", text) if n in schema.names), None
    ):
        raise BadModel(
            f"{spec.name}: the prompt names no column, so that all rows would be asked the same: column {meant!r} is "
            f"{{{{ {meant} }}}}, with two braces (and a text in one brace {{{{ '{{{meant}}}' }}}})"
        )


def open_model(spec: Prompt, place: Place) -> LoadedPrompt:
    """The model, as a function of one row that asks the endpoint, or the model that it loads."""
    spec = resolve(spec)
    files = _files(spec)
    if files is not None:
        spec = replace(spec, sha256=files.digests(spec.sha256, spec.name).all)
    asked = Conversation(spec, answers_of(spec))
    takes = None if asked.whole else dict.fromkeys(asked.columns, "not null")
    own = spec.messages is not None or is_class(spec.returns)
    return loaded(
        Asker, spec, place, takes, _schema(spec), LoadedPrompt, by_user=own, files=files, threads=place.threads
    )


def estimate(spec: Prompt, rows: pa.Table) -> dict[str, float]:
    """See ModelKind. Rows for which there is no prompt are left out; nothing is told of messages of the user's own."""
    if spec.messages is not None or _files(spec) is not None:
        return {}
    spec = resolve(spec)
    asked, sizes = Conversation(spec, answers_of(spec)), []
    for row in to_batch(rows, "rows"):
        try:
            sizes.append((letters(asked.of(row)), spec.max_tokens))
        except Exception:  # told when the row is asked for
            continue
    return estimated(spec, sizes)


class LoadedPrompt(LoadedAsker):
    """A prompt at work; a RowModel."""

    def begin(self, prepared: Prepared, rows: np.ndarray, told: Told) -> None:
        """See RowModel."""
        self._call.built.alive(told.answered)
        super().begin(prepared, rows, told)

    @property
    def _may_ask_again(self) -> bool:
        asker: Asker = self._call.built
        return asker.may_misfit

    def _order(self, rows: Sequence[Any]) -> Sequence[int]:
        asker: Asker = self._call.built
        return asker.order(rows)


def answers_of(spec: Prompt) -> tuple[str, ...]:
    """What an answer itself has: its column, or the names in its object."""
    answers = _answers(spec)
    return (spec.output,) if answers is None else tuple(answers.sent["properties"])


def _answers(spec: Prompt) -> Answers | None:
    """Answers with columns, of a spec that is resolved. Raises BadModel, MissingExtra."""
    if spec.returns is None:
        return None
    assert not isinstance(spec.returns, str)
    return answers_in(spec.returns)


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
    answers = _answers(spec)
    named = pa.schema([(spec.output, pa.string())]) if answers is None else answers.columns
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


@dataclass(frozen=True)
class _Manner:
    """What requests have that not every endpoint takes: a schema, log-probabilities, the newer name of max_tokens."""

    structured: bool
    scored: bool
    newer: bool = False

    def without(self, said: str) -> _Manner | None:
        """Without what a refusal names; None if it names nothing of it."""
        if self.structured and any(word in said for word in STRUCTURED):
            return replace(self, structured=False)
        if self.scored and "logprobs" in said:
            return replace(self, scored=False)
        return replace(self, newer=True) if not self.newer and NEW_MOST in said else None


class Asker:
    """Asks an endpoint, or a model of its own, for one row at a time; called for many at once, in one event loop."""

    def __init__(
        self, spec: Prompt, share: float, at_once: int, limit: float, files: LlmFiles | None, threads: int
    ) -> None:
        self._spec = spec
        self._own: Generator | vllm.VllmGenerator | None = None
        if files is not None:
            self._own = _loaded(spec, files, at_once, threads)
        self._api = FORMS[spec.api]
        vendor = self._api.vendor
        self.paid = Paid(spec, share, self._own or endpoint_of(spec, share, at_once, limit, vendor=vendor))
        self.provided = provided_of(spec, self.paid, limit)
        self._conversation = Conversation(spec, answers_of(spec))
        self._sampling = Sampling(spec.temperature, spec.top_p, spec.max_tokens, spec.keep_score)
        self._form = _Form(spec)
        self._manner = _Manner(self._form.schema is not None, spec.keep_score)
        # With nothing that it could refuse, or once a request was answered, what is refused is the row.
        limited = spec.max_tokens is not None and self._api.most_tokens != NEW_MOST
        self._understood = self._own is not None or not (self._form.schema or spec.keep_score or limited)
        self._finding = asyncio.Lock()

    async def __call__(self, row: Mapping[str, Any]) -> dict[str, Any]:
        messages = self._conversation.of(row)
        bill = Bill(row)
        with self.paid.billed(bill):
            answer = Answer(await self._answered(messages, bill))
        answer.used = bill.used
        return answer

    async def _answered(self, messages: list[dict[str, Any]], bill: Bill) -> dict[str, Any]:
        """The columns of an answer that fits."""
        kept = self._first(messages, bill)
        reply = kept or await self._asked(messages, bill)
        for again in (True, False):
            if reply.finish == "content_filter" or reply.refusal:
                raise Refused(f"content filter: {reply.refusal or reply.text or 'no reason given'}")
            if reply.failed:
                begun = f"; it began {reply.text[:2000]!r}" if reply.text else ""
                raise Refused(f"no answer: {reply.failed}{begun}", status=200)
            if reply.empty:
                raise Refused(f"no answer: {self._too_short()}", status=200)
            try:
                found = self._form.parsed(reply.text, cut=reply.finish == "length")
            except (ValueError, RecursionError) as e:  # of an answer that is nested without end
                cut = " (the answer was cut at max_tokens)" if reply.finish == "length" else ""
                if not again:
                    raise Misfit(f"{e}{cut}; the answer was {reply.text[:2000]!r}") from None
                words = f"That does not fit: {e}. {self._form.words}"
                told = [{"role": "assistant", "content": reply.text}, {"role": "user", "content": words}]
                if bill.kept is not None and kept is None:  # else it is kept, and counted, already
                    bill.put_first(digest_of({"messages": messages}), asdict(reply))
                reply = await self._asked([*messages, *told], bill)
                continue
            return {**found, **self._beside(messages, reply)}
        raise AssertionError("the second answer fits or does not")

    @property
    def may_misfit(self) -> bool:
        """Whether there are answers of which nothing can be made."""
        return bool(self._form.words)

    def _first(self, messages: list[dict[str, Any]], bill: Bill) -> Reply | None:
        """The first answer to a row that an earlier attempt was to ask for once more."""
        if bill.kept is None or (found := bill.kept.first(digest_of({"messages": messages}))) is None:
            return None
        told, used = found
        bill.add(used, again=True)
        return Reply(**{**told, "tokens": tuple((text, number) for text, number in told["tokens"])})

    def _too_short(self) -> str:
        most = self._spec.max_tokens
        limit, way = ("the endpoint's own limit", "give") if most is None else (f"max_tokens ({most})", "raise")
        return f"it was cut at {limit} before it said anything: {way} max_tokens, against which thoughts count, too"

    def request(self, row: Mapping[str, Any]) -> tuple[str, dict[str, Any], float] | None:
        """See provided.Asks."""
        try:
            messages = self._conversation.of(row)
        except Exception:  # told for the row itself, when it is asked for
            return None
        body = self._body(messages, self._manner)
        return self._api.path, body, letters(messages) / LETTERS

    def order(self, rows: Sequence[Mapping[str, Any]]) -> Sequence[int]:
        """The order in which these rows are begun: a local model computes what prompts begin with once for those that
        come one after the other.
        """
        if self._own is None or self._spec.messages is not None:  # the user's function is called once a row
            return range(len(rows))

        def text(place: int) -> list[str]:
            try:
                return [message["content"] for message in self._conversation.of(rows[place])]
            except Exception:  # told for the row itself, when it is asked for
                return []

        return sorted(range(len(rows)), key=text)

    def alive(self, heard: Callable[[], None]) -> None:
        """`heard` is called whenever a local model got on."""
        if self._own is not None:
            self._own.alive = heard

    async def aclose(self) -> None:
        """Close the connections."""
        if self.provided is not None:
            await self.provided.close()
        await self.paid.aclose()

    async def _asked(self, messages: list[dict[str, Any]], bill: Bill) -> Reply:
        """An answer, asked for in whatever manner the endpoint understands: that is found with one row at a time."""
        if self._understood:
            return await self._sent(messages, self._manner, bill)
        async with self._finding:
            if not self._is_understood():
                return await self._found(messages, bill)
        return await self._sent(messages, self._manner, bill)

    def _is_understood(self) -> bool:
        return self._understood

    async def _found(self, messages: list[dict[str, Any]], bill: Bill) -> Reply:
        """An answer; if without something that its refusal names, nobody is asked with that from now on."""
        manner = self._manner
        while True:
            try:
                reply = await self._sent(messages, manner, bill)
            except Refused as e:
                less = None if e.code in ROWS_OWN or e.status == 200 else manner.without(str(e))
                if less is None:  # it is the row that is refused
                    raise
                manner = less
            except UnderWay:  # batches are made in a manner that was found
                self._manner = manner
                raise
            else:
                self._manner, self._understood = manner, True
                return reply

    async def _sent(self, messages: list[dict[str, Any]], manner: _Manner, bill: Bill) -> Reply:
        tokens = letters(messages) / LETTERS
        found = await self.paid.ask(self._body(messages, manner), tokens, bill, self._api.path)
        try:
            return self._api.reply(found)
        except Nothing as e:
            raise Refused(f"no answer: {e}", status=200) from None
        except (LookupError, TypeError, AttributeError) as e:
            why = f"an answer of another form than {self._api.path} has: {type(e).__name__}: {e}"
            raise Refused(why, status=200) from None

    def _body(self, messages: list[dict[str, Any]], manner: _Manner) -> dict[str, Any]:
        spec, form = self._spec, self._form
        if form.words and (not manner.structured or self._own is not None):  # which is held to it, but told nothing
            last = messages[-1]
            messages = [*messages[:-1], {**last, "content": form.asked(last["content"])}]
        body = self._api.body(
            spec.sha256 or spec.llm,
            messages,
            replace(self._sampling, scored=manner.scored),
            form.schema if manner.structured else None,
        )
        if manner.newer and spec.max_tokens is not None:
            body[NEW_MOST] = body.pop(self._api.most_tokens)
        return {**body, **reveal(dict(spec.request))}

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


def _loaded(spec: Prompt, files: LlmFiles, at_once: int, threads: int) -> Generator | vllm.VllmGenerator:
    """A model on this machine."""
    request = reveal(dict(spec.request))
    choice = CHOICE if spec.choices is not None else ""
    if backend_of(files, spec.backend) == "genai":
        return Generator(files, threads=threads, most=at_once, request=request, choice=choice)
    most = None if spec.concurrency == "auto" else at_once
    return vllm.VllmGenerator(
        files, threads=threads, most=most, request=request, engine=reveal(dict(spec.vllm)), choice=choice
    )


class _Form:
    """The form of an answer: free text, one of some choices, or an object with columns."""

    def __init__(self, spec: Prompt) -> None:
        self._output = spec.output
        self._choices = spec.choices
        self._answers = _answers(spec)
        self.schema: dict[str, Any] | None = None
        self.words = ""
        if self._choices is not None:
            self.schema = object_of({CHOICE: {"type": "string", "enum": list(self._choices)}})
            self.words = f"Answer with one of these and nothing else: {', '.join(self._choices)}."
        elif self._answers is not None:
            self.schema = self._answers.sent
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
        said = _unfenced(reply.text)
        begin = text.find(said)
        if said.startswith("{"):
            choice = str(_json(said).get(CHOICE))
            begin = text.find(CHOICE) + len(CHOICE) if CHOICE in text else -1
            forms = [json.dumps(choice, ensure_ascii=ascii)[1:-1] for ascii in (False, True)]
            said = next((form for form in forms if begin >= 0 and text.find(form, begin) >= 0), "")
            begin = text.find(said, begin)
        if begin < 0 or not said:
            return None
        end = begin + len(said)
        total, place = 0.0, 0
        for token, logprob in reply.tokens:
            if place < end and place + len(token) > begin:
                total += logprob
            place += len(token)
        return min(1.0, math.exp(total))

    def parsed(self, text: str, cut: bool = False) -> dict[str, Any]:
        """The columns of an answer, which may be `cut`. Raises ValueError with what is wrong, in words that a model
        understands.
        """
        if self._choices is not None:
            return {self._output: self._choice(text, cut)}
        if self._answers is None:
            return {self._output: text}
        found = _json(text)
        if not isinstance(found, dict):
            raise ValueError("it is not a JSON object")
        return self._answers.held(found)

    def _choice(self, text: str, cut: bool) -> str:
        assert self._choices is not None
        said = text.strip()
        if said not in self._choices:
            said = _unfenced(said)
        if said.startswith("{") and said not in self._choices:
            found = _json(said)
            held = found.get(CHOICE) if isinstance(found, dict) else None
            if not isinstance(held, str):
                raise ValueError(f"its {CHOICE!r} is {json.dumps(held)[:100]}, which is no text")
            said, cut = held, False
        # Choices that differ in case or marks alone are told apart by these. Stars are marks in replies only.
        same = [choice for choice in self._choices if choice == said]
        same = same or [choice for choice in self._choices if choice.casefold() == said.casefold()]
        alike = same or [choice for choice in self._choices if _plain(choice) == _bare(said)]
        if len(alike) != 1:
            raise ValueError(f"{said[:100]!r} is none of {', '.join(self._choices)}")
        begun = _bare(said)
        others = [choice for choice in self._choices if choice != alike[0] and _plain(choice).startswith(begun)]
        if cut and others:
            raise ValueError(f"{said[:100]!r} was cut, and may be {others[0]!r} as well as {alike[0]!r}")
        return alike[0]


def _plain(text: str) -> str:
    return text.strip().strip("\"'`.").casefold()


def _bare(reply: str) -> str:
    return reply.strip().strip("\"'`*.").casefold()


def _unfenced(text: str) -> str:
    """A text without the fences of a Markdown block around it."""
    text = text.strip()
    if not text.startswith("```"):
        return text
    first, _, rest = text.partition("\n")
    return rest.rpartition("```")[0].strip() if rest else first.strip("`").strip()


def _json(text: str) -> Any:
    """JSON, also between the fences of a Markdown block. Raises ValueError."""
    try:
        return json.loads(_unfenced(text), object_pairs_hook=_once_each)
    except Repeated:
        raise
    except ValueError as e:
        raise ValueError(f"it is not JSON ({e})") from None


class Repeated(ValueError):
    """A name stands twice in an object, so that it is not known which value is meant."""


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise Repeated(f"it has {next(name for name in names if names.count(name) > 1)!r} twice")
    return found
