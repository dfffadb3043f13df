"""Vectors of texts from an endpoint that speaks OpenAI's form of embeddings, many texts a request."""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa

from gristmill.arrow.rows import picked
from gristmill.arrow.topython import to_plain
from gristmill.errors import BadModel, GristmillError
from gristmill.job.secret import reveal
from gristmill.job.specs import TextEmbedder
from gristmill.models.askers import LoadedAsker, loaded
from gristmill.models.asking import LETTERS, asks, estimated, reached
from gristmill.models.bill import Answer, Bill
from gristmill.models.columns import check_text
from gristmill.models.contract import Columns, ModelInfo, Place, Prepared
from gristmill.models.conversion import from_array
from gristmill.models.endpoint import Endpoint, Payer
from gristmill.models.paid import Paid, endpoint_of
from gristmill.models.pooling import normalized
from gristmill.models.replies import Empty, Refused, placed, usage_of
from gristmill.models.rowtypes import Checks
from gristmill.models.spending import SHARE, Stake, keep
from gristmill.process.failure import SomeFailed
from gristmill.values import dataclass

PATH = "embeddings"
# Texts of a request, and their tokens at most. OpenAI takes 2,048 and 300,000, others fewer: what an endpoint refuses
# is sent in halves, and if all of these are taken, requests have no more from then on.
INPUTS, TOKENS = 128, 60_000
_FLOAT = np.dtype("<f4")  # of vectors in base64


def resolve(spec: TextEmbedder) -> TextEmbedder:
    """The spec with its key and folder, which the workers' machines may lack."""
    return reached(spec)


def describe(spec: TextEmbedder, schema: pa.Schema | None) -> ModelInfo:
    """See ModelKind. No request is made."""
    check_text(schema, spec.text, spec.name)
    return ModelInfo(
        spec.name,
        (spec.text,),
        (spec.output,),
        None if (kind := _type(spec)) is None else pa.schema([(spec.output, kind)]),
        digests={"name": spec.model},
        keeps_columns=True,
        filled=(spec.text,),
        on_gpu=False,
        at_once=spec.most,
        asks=asks(spec),
    )


def estimate(spec: TextEmbedder, rows: pa.Table) -> dict[str, float]:
    """See ModelKind."""
    texts = [text for text in to_plain(rows[spec.text]) if text is not None]
    found = estimated(spec, [(len(text) + len(spec.prompt or ""), 0) for text in texts])
    return {**found, "requests": max(found["requests"] / INPUTS, found["prompt_tokens"] / TOKENS)}


def open_model(spec: TextEmbedder, place: Place) -> LoadedEmbeddings:
    """The model, as a function of one row that asks for its vector together with others."""
    rows = place.rows or INPUTS
    held = pa.schema([(spec.output, pa.string())])  # in base64, until a batch is whole
    found = loaded(
        Embedder, reached(spec), place, {spec.text: "not null"}, held, LoadedEmbeddings, rows=rows, inputs=rows
    )
    found.spec = spec
    return found


def _type(spec: TextEmbedder) -> pa.DataType | None:
    """The type of the vectors, if the spec tells their dimension. Raises BadModel."""
    cut, asked = spec.truncate_dim, spec.dimensions
    if cut is not None and (cut < 1 or (asked is not None and cut > asked)):
        raise BadModel(f"{spec.name}: truncate_dim is {cut}: give 1 or more, and no more than dimensions ({asked})")
    size = cut or asked
    return None if size is None else pa.list_(pa.float32(), size)


class LoadedEmbeddings(LoadedAsker):
    """A TextEmbedder of an endpoint at work; a RowModel. The first vector's dimension is that of all."""

    spec: TextEmbedder
    _size: int | None = None

    def predict(self, prepared: Prepared, index: np.ndarray) -> pa.Table:
        """One vector for each row at `index`: a fixed-size list of float32. Raises SomeFailed."""
        found = self._result(prepared, index, picked(prepared.inputs.rows, index))
        vectors, failed = [], {}
        for row, answer in enumerate(found):
            try:
                if isinstance(answer, BaseException):
                    raise answer
                vectors.append(self._vector(answer[self.spec.output]))
            except Exception as e:  # the row's own
                failed[row] = e
        table = pa.table({self.spec.output: self._column(vectors)})
        if failed:
            raise SomeFailed(table, failed, raised=True)
        return table

    def _check(self, answer: Any, rows: pa.Table, row: int, planned: Columns | None, checks: Checks) -> None:
        name = self.spec.output
        kind = planned.types.field(name).type if planned is not None and name in planned.types.names else None
        if kind is not None and pa.types.is_fixed_size_list(kind) and self.spec.truncate_dim is None:
            self._size = kind.list_size  # whichever comes first in this process
        self._vector(answer[name])

    def _vector(self, text: str) -> np.ndarray:
        vector = np.frombuffer(base64.b64decode(text), _FLOAT)
        asked = self.spec.dimensions
        if asked is not None and len(vector) != asked:
            raise ValueError(f"a vector of {len(vector)} dimensions, and {asked} were asked for (dimensions)")
        self._size = self._size or len(vector)
        if len(vector) != self._size:
            raise ValueError(f"a vector of {len(vector)} dimensions, and others have {self._size}")
        if (cut := self.spec.truncate_dim) is not None and cut > len(vector):
            raise ValueError(f"a vector of {len(vector)} dimensions, and truncate_dim is {cut}")
        return vector[: self.spec.truncate_dim]

    def _column(self, vectors: list[np.ndarray]) -> pa.Array:
        if not vectors:
            kind = _type(self.spec)
            return pa.array([], pa.null() if kind is None else kind)
        found = np.stack(vectors).astype(np.float32, copy=False)
        return from_array(normalized(found) if self.spec.normalize else found)


class Embedder:
    """Asks for the vector of one row at a time; called for many at once, in one event loop."""

    provided = None

    def __init__(self, spec: TextEmbedder, share: float, at_once: int, limit: float, inputs: int) -> None:
        self._spec = spec
        self._others = {**reveal(dict(spec.request))}
        if spec.dimensions is not None:
            self._others["dimensions"] = spec.dimensions
        self.paid = Paid(spec, share, Together(endpoint_of(spec, share, at_once, limit), at_once, inputs))

    async def __call__(self, row: Mapping[str, Any]) -> Answer:
        text, bill = row[self._spec.text], Bill(row)
        text = text.decode() if isinstance(text, bytes) else text or ""  # nulls are empty texts, if they are kept
        text = (self._spec.prompt or "") + text
        body = {"model": self._spec.model, "input": text, **self._others}
        with self.paid.billed(bill):
            reply = await self.paid.ask(body, len(text) / LETTERS, bill, PATH)
        answer = Answer({self._spec.output: reply["data"][0]["embedding"]})
        answer.used = bill.used
        return answer

    async def aclose(self) -> None:
        """Close the connections."""
        await self.paid.aclose()


@dataclass(frozen=True)
class _One:
    """A text that waits for its vector."""

    body: Mapping[str, Any]
    tokens: float
    payer: Stake | None
    answer: asyncio.Future[dict[str, Any]]

    def answered(self, found: dict[str, Any] | BaseException) -> None:
        """Give the answer to who waits, if somebody does."""
        if self.answer.done():
            return
        if isinstance(found, BaseException):
            self.answer.set_exception(found)
        else:
            self.answer.set_result(found)


class Together:
    """Whoever asks for one text gets the vector of a request with as many as wait: at most `inputs`, in `at_once`
    requests. An Asked; the vectors in its replies are base64. A request that is refused is sent in halves, down to the
    texts that are refused alone.
    """

    def __init__(self, endpoint: Endpoint, at_once: int, inputs: int) -> None:
        self._endpoint = endpoint
        self.ending = endpoint.ending
        self._at_once = at_once
        self._inputs = inputs
        self._encoded = True  # vectors in base64, until the endpoint refuses that
        self._answered = False
        self._waiting: deque[_One] = deque()
        self._requests: set[asyncio.Task[bool]] = set()
        self._looks = False
        self._resting = 0  # requests that wait for money, while others are sent

    async def ask(
        self, body: Mapping[str, Any], tokens: float, path: str = PATH, payer: Payer | None = None
    ) -> dict[str, Any]:
        """The reply to a request for one text. Raises as Endpoint.ask."""
        loop = asyncio.get_running_loop()
        one = _One(body, tokens, payer if isinstance(payer, Stake) else None, loop.create_future())
        self._waiting.append(one)
        if not self._looks:  # once others that come now have come, too
            self._looks = True
            loop.call_soon(self._look)
        return await one.answer

    @property
    def trouble(self) -> str:
        """See Asked."""
        return self._endpoint.trouble

    @property
    def most_flying(self) -> int:
        """See Asked."""
        return self._endpoint.most_flying

    @property
    def put_off(self) -> int:
        """See Asked."""
        return self._endpoint.put_off

    @property
    def news(self) -> list[str]:
        """See Asked."""
        return self._endpoint.news

    def resumed(self) -> None:
        """See Asked."""
        self._endpoint.resumed()

    def share_in(self, run: str) -> None:
        """See paid.Asked."""
        self._endpoint.share_in(run)

    def stop(self, error: GristmillError) -> NoReturn:
        """No more requests, for this reason, which is raised."""
        self._endpoint.stop(error)

    async def close(self) -> None:
        """Close the connections."""
        for request in self._requests:
            request.cancel()
        await self._endpoint.close()

    def rests(self, more: int) -> None:
        """So many requests more wait for money: that of texts which wait to be sent may be what they wait for."""
        self._resting += more
        self._look()

    def _look(self) -> None:
        self._looks = False
        while self._waiting and len(self._requests) - self._resting < self._at_once:
            request = asyncio.ensure_future(self._sent(self._next()))
            self._requests.add(request)
            request.add_done_callback(self._done)

    def _done(self, request: asyncio.Task[bool]) -> None:
        self._requests.discard(request)
        self._look()

    def _next(self) -> list[_One]:
        """The texts of one request, of those that wait."""
        some, tokens = [self._waiting.popleft()], 0.0
        tokens += some[0].tokens
        while self._waiting and len(some) < self._inputs and tokens + self._waiting[0].tokens <= TOKENS:
            some.append(self._waiting.popleft())
            tokens += some[-1].tokens
        return some

    async def _sent(self, some: Sequence[_One]) -> bool:
        """Give each text its answer; whether all were taken."""
        some = [one for one in some if not one.answer.done()]
        if not some:
            return True
        try:
            for one, reply in zip(some, await self._replies(some), strict=True):
                one.answered(reply)
        except Refused as e:
            return await self._halved(some, e)
        except BaseException as e:
            for one in some:
                one.answered(e)
        return True

    async def _halved(self, some: Sequence[_One], refused: Refused) -> bool:
        if len(some) == 1:
            some[0].answered(refused)
            return False
        if isinstance(refused, Empty):  # each half is paid for again
            for one, part in zip(some, _parts(refused.reply, _letters(some)), strict=True):
                if one.payer is not None:
                    one.payer.took(part, PATH, one.body)
        half = len(some) // 2
        _Payers(some[half:], self.rests).free()  # which the first half may need
        taken = [await self._sent_again(part) for part in (some[:half], some[half:])]
        if all(taken):  # it was too much together
            self._inputs = min(self._inputs, max(half, 1))
        return all(taken)

    async def _sent_again(self, some: Sequence[_One]) -> bool:
        try:
            await _Payers(some, self.rests).again()
        except BaseException as e:
            for one in some:
                one.answered(e)
            return False
        return await self._sent(some)

    async def _replies(self, some: Sequence[_One]) -> list[dict[str, Any]]:
        """A reply for each text. Raises Refused, and Misshapen for a reply of another form."""
        body = {**some[0].body, "input": [one.body["input"] for one in some]}
        if self._encoded and "encoding_format" not in body:
            body["encoding_format"] = "base64"
        try:
            reply = await self._endpoint.ask(body, sum(one.tokens for one in some), PATH, _Payers(some, self.rests))
        except Refused as e:
            if "encoding_format" in str(e) and "encoding_format" not in some[0].body and "encoding_format" in body:
                self._encoded = False
                return await self._replies(some)
            if "dimensions" in str(e) and "dimensions" in body and not self._answered:
                self.stop(BadModel(f"the endpoint does not take dimensions ({e}): leave it out, or use truncate_dim"))
            raise
        try:
            found = _split(reply, _letters(some))
        except (LookupError, TypeError, ValueError, AttributeError) as e:
            raise Misshapen(f"{type(e).__name__}: {e}", reply) from None
        self._answered = True
        return found


class Misshapen(Empty):
    """A reply of another form, which is paid for as one without vectors."""

    def __init__(self, why: str, reply: Mapping[str, Any]) -> None:
        super().__init__(PATH, reply)
        self.args = (f"an answer of another form than {PATH} has: {why}",)


@dataclass(frozen=True)
class _Payers:
    """Those of the texts of one request; an endpoint.Payer."""

    some: Sequence[_One]
    rests: Callable[[int], None]

    def lost(self) -> None:
        """See Payer."""
        for one in self.some:
            if one.payer is not None:
                one.payer.lost()

    def refused(self, reply: Any) -> None:
        """See Payer."""
        payer = next((one.payer for one in self.some if one.payer is not None), None)
        if payer is not None:
            payer.refused(reply)

    async def again(self) -> None:
        """See Payer. None is in flight before all can be paid for: others would wait for them."""
        payers = [one.payer for one in self.some if one.payer is not None]
        self.rests(1)
        try:
            await keep(payers)
        finally:
            self.rests(-1)
        for payer in payers:
            payer.fly()

    def still(self) -> bool:
        """See Payer."""
        payers = [one.payer for one in self.some if one.payer is not None]
        if all(payer.still() for payer in payers):
            return True
        self.free()
        return False

    def free(self) -> None:
        """Nothing is kept free for them any more."""
        for one in self.some:
            if one.payer is not None:
                one.payer.free()

    def probed(self, path: str, body: Mapping[str, Any], reply: Mapping[str, Any] | None) -> None:
        """See Payer."""
        payer = next((one.payer for one in self.some if one.payer is not None), None)
        if payer is not None:
            payer.probed(path, body, reply)


def _letters(some: Sequence[_One]) -> list[int]:
    return [len(one.body["input"]) for one in some]


def _split(reply: Mapping[str, Any], letters: Sequence[int]) -> list[dict[str, Any]]:
    """A reply for each text of a request, with its part of what that took, by its letters. Raises ValueError and others
    for what is no such reply.
    """
    data = placed(reply["data"])
    if sorted(data) != list(range(len(letters))):
        raise ValueError(f"{len(reply['data'])} vectors for {len(letters)} texts")
    parts = _parts(reply, letters)
    return [
        {"data": [{"embedding": _encoded(data[place]["embedding"])}], **parts[place]} for place in range(len(letters))
    ]


def _parts(reply: Mapping[str, Any], letters: Sequence[int]) -> list[dict[str, Any]]:
    """What each text of a request took of what its reply says."""
    ends = np.cumsum([max(1, n) for n in letters])
    usage = {name: np.diff(np.round(ends * (n / ends[-1])), prepend=0.0) for name, n in usage_of(reply).items()}
    return [
        {"usage": {name: float(parts[place]) for name, parts in usage.items()}, SHARE: float(place == 0)}
        for place in range(len(letters))
    ]


def _encoded(vector: Any) -> str:
    """A vector in base64, whether it came so or as numbers. Raises ValueError, TypeError."""
    if isinstance(vector, str):
        try:
            size = len(base64.b64decode(vector, validate=True))
        except binascii.Error as e:
            raise ValueError(f"a vector that is not base64 ({e})") from None
        if not size or size % _FLOAT.itemsize:
            raise ValueError(f"a vector of {size} bytes")
        return vector
    numbers = np.asarray(vector, _FLOAT)
    if numbers.ndim != 1 or not len(numbers):
        raise ValueError(f"a vector of the shape {numbers.shape}")
    return base64.b64encode(numbers.tobytes()).decode()


class Queries:
    """A TextEmbedder of an endpoint, for texts that are not worth a job. Use it in one thread; `close`, or leave its
    `with` block, when done.
    """

    def __init__(self, spec: TextEmbedder) -> None:
        self._spec = resolve(spec)
        describe(self._spec, None)
        self._model = open_model(self._spec, Place())

    def encode(self, texts: str | Sequence[str]) -> np.ndarray:
        """float32 [texts, width], or [width] for one text. Raises TypeError for anything that is not text, and what
        the endpoint made of a text that it refused.
        """
        every: list[Any] = [texts] if isinstance(texts, str) else list(texts)
        if wrong := [t for t in every if not isinstance(t, str)]:
            raise TypeError(f"{wrong[0]!r} is not text")
        if not every:
            return np.empty((0, self._model._size or 0), dtype=np.float32)
        prepared = self._model.prepare(pa.table({self._spec.text: pa.array(every, pa.string())}))
        try:
            table = self._model.predict(prepared, np.arange(len(every)))
        except SomeFailed as e:
            raise next(iter(e.failed.values())) from None
        column = table[self._spec.output].combine_chunks()
        found: np.ndarray = column.flatten().to_numpy(zero_copy_only=False).reshape(len(every), -1)
        return found[0] if isinstance(texts, str) else found

    def close(self) -> None:
        """Close the connections."""
        self._model.close()

    def __enter__(self) -> Queries:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
