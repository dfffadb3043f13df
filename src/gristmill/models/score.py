"""Log-probabilities of continuations, as a model: from an endpoint that echoes prompts, or a model on this machine."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from gristmill.errors import BadModel
from gristmill.job.prompts import text_of
from gristmill.job.scores import Score
from gristmill.job.secret import reveal
from gristmill.models.apis import is_logprob
from gristmill.models.askers import LoadedAsker, loaded
from gristmill.models.asking import LETTERS, asks, estimated, reached
from gristmill.models.bill import Answer, Bill
from gristmill.models.columns import check_columns, is_text
from gristmill.models.contract import ModelInfo, Place, Prepared, Told
from gristmill.models.conversion import to_batch
from gristmill.models.generator import AT_ONCE
from gristmill.models.llmfiles import LlmFiles, backend_of, find_llm
from gristmill.models.paid import Paid, endpoint_of
from gristmill.models.replies import Refused, placed
from gristmill.models.scorer import SCORES, Scorer
from gristmill.models.template import Template
from gristmill.models.usual import most_tokens
from gristmill.process.extras import installed, require

PATH = "completions"
_OF_ENDPOINTS = ("api_key", "requests_per_minute", "tokens_per_minute", "price", "max_cost")


def resolve(spec: Score) -> Score:
    """The spec with the text of its file, its endpoint and its key, which the workers' machines may lack."""
    cache = None if spec.cache is None else os.path.abspath(os.path.expanduser(spec.cache))
    spec = replace(spec, prompt=text_of(spec.prompt, "prompt"), cache=cache)
    files = _files(spec)
    return reached(spec) if files is None else replace(spec, llm=os.path.abspath(files.opened))


def _files(spec: Score) -> LlmFiles | None:
    """The files of a model on this machine; None for an endpoint's. Raises BadModel for options of the other kind."""
    files = None
    if spec.base_url is None:
        files = find_llm(spec.llm, elsewhere=bool(os.environ.get("OPENAI_BASE_URL")))
    if files is None:
        if spec.sha256 is not None:
            raise BadModel(f"sha256 is of a model's files, and {spec.llm} names none on this machine: leave it out")
        return None
    backend_of(files, "genai")
    others = [name for name in _OF_ENDPOINTS if getattr(spec, name) is not None]
    if others := [*others, *(["request"] if spec.request else [])]:
        raise BadModel(f"{others[0]} is for endpoints, and {spec.llm} is a model on this machine: leave it out")
    return files


def describe(spec: Score, schema: pa.Schema | None) -> ModelInfo:
    """See ModelKind. No request is made."""
    asked = Template(spec.prompt, "prompt")
    columns = _columns(spec, asked)
    check_columns(schema, columns, spec.name, "has a prompt with")
    for name in sorted(asked.taken.intersection(() if schema is None else schema.names)):
        raise BadModel(f"{spec.name}: {name!r} in the prompt is Jinja's or the whole row, and there is a column "
                       f"of that name: write {{{{ row[{name!r}] }}}} for it, or rename it in a step")  # fmt: skip
    outputs = _outputs(spec, schema)
    info = ModelInfo(
        spec.name,
        None if asked.whole else columns,
        None if outputs is None else tuple(outputs.names),
        outputs,
        keeps_columns=True,
        filled=columns,
        on_gpu=False,
        at_once=spec.most,
        asks=asks(spec),
    )
    if (files := _files(spec)) is None:
        return info
    if not installed("openvino_genai"):
        require("openvino_genai", "genai", f"{spec.llm}, a language model on this machine,")
    digests = files.digests(spec.sha256, spec.name)
    at_once = AT_ONCE if spec.concurrency == "auto" else spec.concurrency
    return replace(
        info, digest=digests.all, digests=digests.by_file, weight_bytes=files.weight_bytes, at_once=at_once, alone=0
    )


def open_model(spec: Score, place: Place) -> LoadedScores:
    """The model, as a function of one row that asks the endpoint, or the model that it loads."""
    spec = resolve(spec)
    files = _files(spec)
    if files is not None:
        spec = replace(spec, sha256=files.digests(spec.sha256, spec.name).all)
    asked = Template(spec.prompt, "prompt")
    takes = None if asked.whole else dict.fromkeys(_columns(spec, asked), "not null")
    outputs = _outputs(spec, None)
    return loaded(Rater, spec, place, takes, outputs, LoadedScores, files=files, threads=place.threads)


def estimate(spec: Score, rows: pa.Table) -> dict[str, float]:
    """See ModelKind. Rows for which there is no prompt are left out."""
    if _files(spec) is not None:
        return {}
    asked, sizes = Template(text_of(spec.prompt, "prompt"), "prompt"), []
    for row in to_batch(rows, "rows"):
        try:
            texts = _texts(spec, row)[0]
            sizes.append((len(texts) * len(asked.of(row)) + sum(map(len, texts)), 0))
        except Exception:  # told when the row is asked for
            continue
    return estimated(spec, sizes)


def _columns(spec: Score, asked: Template) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*asked.columns, *filter(None, [spec.continuations_from]))))


def _outputs(spec: Score, schema: pa.Schema | None) -> pa.Schema | None:
    """The columns that the model adds; None if it is not known whether a row has several continuations. Raises BadModel
    for a column that holds none.
    """
    if spec.continuations_from is None:
        several = len(spec.continuations or ()) > 1
    elif schema is None:
        return None
    else:
        kind = schema.field(spec.continuations_from).type
        several = bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))
        if not is_text(kind.value_type if several else kind):
            raise BadModel(
                f"continuations_from names column {spec.continuations_from!r}, which has {kind}: give one of texts, or "
                "of lists of texts"
            )
    number, count = pa.float64(), pa.int64()
    if not several:
        return pa.schema([(spec.output, number), (f"{spec.output}_tokens", count)])
    return pa.schema([
        (spec.output, pa.list_(number)), (f"{spec.output}_tokens", pa.list_(count)),
        (f"{spec.output}_best", pa.string()),
    ])  # fmt: skip


def _texts(spec: Score, row: Mapping[str, Any]) -> tuple[Sequence[str], bool]:
    """The continuations of a row, and whether there may be several. Raises ValueError."""
    if spec.continuations_from is None:
        return spec.continuations or (), len(spec.continuations or ()) > 1
    held = row[spec.continuations_from]
    given = [held] if isinstance(held, (str, bytes)) else list(held or ())
    texts: list[str] = [text.decode() if isinstance(text, bytes) else text for text in given]
    if not texts or not all(texts):
        raise ValueError(f"column {spec.continuations_from!r} has {held!r}: each continuation is a text, none is empty")
    return texts, not isinstance(held, (str, bytes))


class LoadedScores(LoadedAsker):
    """A Score at work; a RowModel."""

    def begin(self, prepared: Prepared, rows: np.ndarray, told: Told) -> None:
        """See RowModel."""
        self._call.built.alive(told.answered)
        super().begin(prepared, rows, told)


class Rater:
    """Scores the continuations of one row at a time; called for many at once, in one event loop."""

    provided = None

    def __init__(
        self, spec: Score, share: float, at_once: int, limit: float, files: LlmFiles | None, threads: int
    ) -> None:
        self._spec = spec
        self._asked = Template(spec.prompt, "prompt")
        self._own = None if files is None else Scorer(files, threads=threads, most=at_once, request={}, choice="")
        self.paid = Paid(spec, share, self._own or endpoint_of(spec, share, at_once, limit))
        self._new_tokens = 0  # or 1, for an endpoint that makes at least one
        self._answered = False

    async def __call__(self, row: Mapping[str, Any]) -> Answer:
        context = self._asked.of(row)
        texts, several = _texts(self._spec, row)
        bill = Bill(row)
        with self.paid.billed(bill):
            found = await (self._here if self._own is not None else self._there)(context, texts, bill)
        sums, counts = [sum(scores) for scores in found], [len(scores) for scores in found]
        name = self._spec.output
        answer = Answer({name: sums, f"{name}_tokens": counts, f"{name}_best": texts[int(np.argmax(sums))]})
        if not several:
            answer = Answer({name: sums[0], f"{name}_tokens": counts[0]})
        answer.used = bill.used
        return answer

    def alive(self, heard: Callable[[], None]) -> None:
        """`heard` is called whenever a local model got on."""
        if self._own is not None:
            self._own.alive = heard

    async def aclose(self) -> None:
        """Close the connections."""
        await self.paid.aclose()

    async def _here(self, context: str, texts: Sequence[str], bill: Bill) -> list[list[float]]:
        """The log-probabilities of each text's tokens."""
        model = self._spec.sha256

        async def one(text: str) -> list[float]:
            body = {"model": model, "prompt": context, "continuation": text}
            found: list[float] = (await self.paid.ask(body, 0, bill, PATH))[SCORES]
            return found

        return list(await asyncio.gather(*map(one, texts)))

    async def _there(self, context: str, texts: Sequence[str], bill: Bill) -> list[list[float]]:
        prompts = [context + text for text in texts]
        choices, made = await self._choices(prompts, bill)
        found = []
        for prompt, text, choice in zip(prompts, texts, choices, strict=True):
            try:
                found.append(_logged(choice, prompt, len(prompt) - len(text), made))
            except (LookupError, TypeError, AttributeError, ValueError) as e:
                told = Refused(f"no log-probabilities of the prompt: {e}")
                if not self._answered:
                    self.paid.stop(BadModel(
                        f"the endpoint gives {told}: Score needs completions with echo and logprobs, as vLLM has them"
                    ))  # fmt: skip
                raise told from None
        self._answered = True
        return found

    async def _choices(self, prompts: Sequence[str], bill: Bill) -> tuple[list[Mapping[str, Any]], int]:
        """What the endpoint gave for each prompt, and how many tokens it may have made after each."""
        most = self._new_tokens
        body = {
            "model": self._spec.llm, "prompt": prompts if len(prompts) > 1 else prompts[0], "max_tokens": most,
            "temperature": 0, "echo": True, "logprobs": 1, **reveal(dict(self._spec.request)),
        }  # fmt: skip
        try:
            reply = await self.paid.ask(body, sum(map(len, prompts)) / LETTERS, bill, PATH)
        except Refused as e:
            if not most and "max_tokens" in str(e):
                self._new_tokens = 1
                return await self._choices(prompts, bill)
            if not self._answered and any(word in str(e) for word in ("echo", "logprobs")):
                self.paid.stop(BadModel(f"the endpoint does not score prompts (echo with logprobs): {e}"))
            raise
        choices = reply["choices"]
        found = placed(choices)
        if sorted(found) != list(range(len(prompts))):
            raise Refused(f"{len(choices)} choices for {len(prompts)} prompts")
        return [found[place] for place in range(len(prompts))], (most_tokens(body) or 0) // len(prompts)


def _logged(choice: Mapping[str, Any], prompt: str, begin: int, most: int) -> list[float]:
    """The log-probabilities of the tokens that hold letters of a prompt from `begin` on; after it come up to
    `most` that the endpoint made. Raises ValueError and others if they are not told.
    """
    if not choice["text"].lstrip().startswith(prompt.lstrip()):
        raise ValueError("it does not echo the prompt")
    logged = choice["logprobs"]
    tokens, numbers = logged["tokens"], logged["token_logprobs"]
    at = _place(prompt, tokens, most)
    found, place = [], 0
    for token, number in zip(tokens, numbers, strict=True):
        if place < at + len(prompt) and place + len(token) > at + begin:
            if number is None:
                raise ValueError(f"none for its token {token!r}, which nothing comes before")
            if not is_logprob(number):
                raise ValueError(f"its token {token!r} has {number!r}")
            found.append(float(number))
        place += len(token)
    return found


def _place(prompt: str, tokens: Sequence[str], most: int) -> int:
    """Where a prompt begins in the text of tokens. Before it there may be special ones, in whose names it may stand,
    too, and after it `most` that the endpoint made, or fewer, or one more where it makes at least one: it is of whole
    tokens, but for spaces before it. Raises ValueError.
    """
    text, begins, length = "".join(tokens), {0}, 0
    for token in tokens:
        spaces = len(token) - len(token.lstrip())
        begins |= {length + n for n in range(spaces + 1)}
        length += len(token)
    for made in (*range(most, -1, -1), most + 1):
        at = sum(map(len, tokens[: max(0, len(tokens) - made)])) - len(prompt)
        if at in begins and text.startswith(prompt, at):
            return at
    raise ValueError(f"its tokens do not make up the prompt: {text[:80]!r}")
