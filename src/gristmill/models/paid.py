"""Requests that cost something, asked of an endpoint: at most once each if they are equal, counted, and within what
they may cost.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NoReturn, Protocol, TypeVar

import numpy as np
import pyarrow as pa

from gristmill.errors import GristmillError, RunFailed
from gristmill.job.prompts import prices
from gristmill.job.secret import Secret, reveal
from gristmill.job.specs import Call, FunctionModel, changed
from gristmill.models.answercache import AnswerCache, digest_of
from gristmill.models.contract import Allowance, Journal, Place, Prepared
from gristmill.models.endpoint import CHAT, NOBODY, Endpoint, usage_of
from gristmill.models.room import Room
from gristmill.models.rowfunction import LoadedRows
from gristmill.shards.counts import summed

OPENAI = "https://api.openai.com/v1"
WAITING = 4  # rows that are begun, per request in flight: some wait before they are sent again
LETTERS = 4  # of a token, about: what a prompt will take is corrected by what the endpoint says it took
MOST_KNOWN = 20_000  # answers that `dedupe` remembers, in each worker


class Asking(Protocol):
    """What specs of models behind endpoints say of how they are asked; see job.prompts."""

    @property
    def name(self) -> str: ...
    @property
    def concurrency(self) -> int | Literal["auto"]: ...
    @property
    def most(self) -> int: ...
    @property
    def base_url(self) -> str | None: ...
    @property
    def api_key(self) -> str | None: ...
    @property
    def requests_per_minute(self) -> int | None: ...
    @property
    def tokens_per_minute(self) -> int | None: ...
    @property
    def dedupe(self) -> bool: ...
    @property
    def cache(self) -> str | None: ...
    @property
    def price(self) -> Mapping[str, str] | None: ...
    @property
    def max_cost(self) -> float | None: ...
    @property
    def timeout(self) -> float: ...


class Asked(Protocol):
    """Who answers requests: an endpoint, or a model on this machine."""

    @property
    def flying(self) -> int: ...
    async def ask(
        self, body: Mapping[str, Any], tokens: float, path: str = CHAT, before: Callable[[], None] | None = None
    ) -> dict[str, Any]: ...
    def stop(self, error: GristmillError) -> NoReturn: ...
    async def close(self) -> None: ...


S = TypeVar("S", bound=Asking)
L = TypeVar("L", bound="LoadedAsker")


def reached(spec: S) -> S:
    """The spec with its endpoint, key and folder, which the workers' machines may lack."""
    key = os.environ.get("OPENAI_API_KEY")
    return changed(
        spec,
        base_url=spec.base_url or os.environ.get("OPENAI_BASE_URL") or OPENAI,
        cache=None if spec.cache is None else os.path.abspath(os.path.expanduser(spec.cache)),
        api_key=spec.api_key or (None if key is None else Secret("${env:OPENAI_API_KEY}", key)),
    )


def loaded(
    asker: Callable[..., Any],
    spec: Asking,
    place: Place,
    takes: Mapping[str, str] | None,
    outputs: pa.Schema,
    kind: type[L],
    by_user: bool = False,
    **more: Any,
) -> L:
    """The model whose rows are answered by `asker(spec, share, at_once, limit, **more)`, as Paid and `endpoint_of` have
    these: a class with an async `__call__`, which gives an Answer, with `paid`, a Paid, and `aclose`. It takes and adds
    these columns; `by_user` as in RowModel.
    """
    at_once = place.at_once or spec.most
    share = at_once / spec.most  # of the run's limits: that of this worker
    call = Call(asker, {"spec": spec, "share": share, "at_once": at_once, "limit": place.limit, **more}, "row", takes)
    returns = {field.name: str(field.type) for field in outputs}
    return kind(_Asked(call, returns, label=spec.name), replace(place, at_once=WAITING * at_once), by_user)


def estimated(spec: Asking, sizes: Sequence[tuple[int, int | None]]) -> dict[str, float]:
    """What requests will take (contract.USED), each of so many characters and with an answer of at most so many tokens;
    answers are taken to be as long as they may, and left out of the count if nothing limits them.
    """
    given = sum(letters for letters, _ in sizes) / LETTERS
    most = [tokens for _, tokens in sizes]
    made = None if None in most else float(sum(tokens or 0 for tokens in most))
    found = {"requests": float(len(sizes)), "prompt_tokens": given}
    if made is not None:
        found["completion_tokens"] = made
    if spec.price is not None:
        of_given, of_made = prices(spec.price)
        found["cost"] = given * of_given + (made or 0.0) * of_made
    return found


class LoadedAsker(LoadedRows):
    """A model behind an endpoint at work; a RowModel."""

    def __init__(self, spec: FunctionModel, place: Place, by_user: bool) -> None:
        # The endpoint limits the time of each request, without that of waiting for its turn.
        super().__init__(spec, replace(place, limit=math.inf))
        self.by_user = by_user

    def begin(
        self, prepared: Prepared, rows: np.ndarray, answered: Callable[[], None], journal: Journal | None = None
    ) -> None:
        """See RowModel."""
        if journal is not None and journal.allowance is not None:
            self._call.built.paid.of(journal.allowance)
        super().begin(prepared, rows, answered, journal)

    def leave(self) -> None:
        """See RowModel."""
        self._flight.close(self._call.built.aclose)

    def _kept(self, answer: Answer) -> Any:
        return dict(answer)


class Answer(dict[str, Any]):
    """The columns of an answer, and what it has taken (contract.USED)."""

    used: Mapping[str, float] = {}


class Bill:
    """What one row has taken: the requests that a cache may know, and what those made cost."""

    def __init__(self) -> None:
        self.keys: list[bytes] = []
        self.used: dict[str, float] = {}

    def add(self, used: Mapping[str, float]) -> None:
        """One more request."""
        self.used = summed([self.used, used])


@dataclass(frozen=True)
class _Asked(FunctionModel):
    label: str = ""

    @property
    def name(self) -> str:
        return self.label


def endpoint_of(spec: Asking, share: float, at_once: int, limit: float, nobody: Mapping[int, str] = NOBODY) -> Endpoint:
    """The endpoint that a spec names. `share` of the run's limits are this worker's, which asks `at_once` at a time,
    each for up to `limit` seconds; `nobody` as for Endpoint.
    """

    def shared(rate: int | None) -> float | None:
        return None if rate is None else rate * share

    urls = str(reveal(spec.base_url)).split(",")
    return Endpoint(
        [url.strip() for url in urls if url.strip()], reveal(spec.api_key),
        timeout=spec.timeout, limit=0.9 * limit, room=Room(at_once, auto=spec.concurrency == "auto"),
        requests=shared(spec.requests_per_minute), tokens=shared(spec.tokens_per_minute), nobody=nobody,
    )  # fmt: skip


class Paid:
    """Asks somebody, in one event loop; `share` of what the run may cost is this worker's if none is claimed."""

    def __init__(self, spec: Asking, share: float, asked: Asked) -> None:
        self._spec = spec
        self._asked = asked
        self._prices = None if spec.price is None else prices(spec.price)
        self._purse = None if spec.max_cost is None else Purse(spec.max_cost, share)
        self._spent = Spent()
        self._cache = None if spec.cache is None else AnswerCache(spec.cache)
        self._first = asyncio.Lock()
        self._known: dict[bytes, asyncio.Future[dict[str, Any]]] = {}  # equal requests, answered or in flight

    def of(self, allowance: Allowance) -> None:
        """What may be spent is claimed there from now on."""
        if self._purse is not None:
            self._purse.allowance = allowance

    async def ask(self, body: Mapping[str, Any], tokens: float, bill: Bill, path: str = CHAT) -> dict[str, Any]:
        """An answer that is kept from before, or that an equal request in flight gets, or a new one, for which the row
        is billed. Raises as Endpoint.ask.
        """
        if not self._spec.dedupe and self._cache is None:
            return await self._new(body, tokens, path, bill)
        key = digest_of({"path": path, "body": body})
        bill.keys.append(key)
        if self._cache is not None and (kept := self._cache.get(key)) is not None:
            return kept
        if not self._spec.dedupe:
            return self._cached(key, await self._new(body, tokens, path, bill))
        if (known := self._known.get(key)) is None:
            known = self._known[key] = asyncio.ensure_future(self._new(body, tokens, path, bill))
            known.add_done_callback(partial(self._asked_once, key))
            if len(self._known) > MOST_KNOWN:
                self._known.pop(next(iter(self._known)))
        return self._cached(key, await asyncio.shield(known))

    def _asked_once(self, key: bytes, known: asyncio.Future[Any]) -> None:
        if known.cancelled() or known.exception() is not None:
            self._known.pop(key, None)  # the next row asks again

    def _cached(self, key: bytes, reply: dict[str, Any]) -> dict[str, Any]:
        if self._cache is not None:
            self._cache.put(key, reply)
        return reply

    async def _new(self, body: Mapping[str, Any], tokens: float, path: str, bill: Bill) -> dict[str, Any]:
        """An answer, counted; not asked for if it might cost more than is left."""
        if self._purse is not None and not self._spent.known:  # what one costs: until then one at a time
            async with self._first:
                if not self._spent.known:
                    return await self._sent(body, tokens, path, bill)
        return await self._sent(body, tokens, path, bill)

    async def _sent(self, body: Mapping[str, Any], tokens: float, path: str, bill: Bill) -> dict[str, Any]:
        reply = await self._asked.ask(body, tokens, path, None if self._purse is None else self._afford)
        used = _used(usage_of(reply), self._prices)
        self._spent.add(used)
        bill.add(used)
        return reply

    def _afford(self) -> None:
        """Raises RunFailed if the requests in flight, among them one that is about to be sent, might cost too much, or
        if that cannot be known.
        """
        assert self._purse is not None
        try:
            enough = self._purse.holds(self._spent.might_cost(self._asked.flying))
        except Exception as e:  # whatever a store's library raises: this is about all rows
            self._asked.stop(RunFailed(f"max_cost {self._spec.max_cost:g}: what is spent cannot be noted: {e}"))
        if not enough:
            self._asked.stop(
                RunFailed(
                    f"max_cost {self._spec.max_cost:g}: ${self._spent.cost:.4f} are spent by this worker, and the "
                    "requests in flight might take all that is left: what is answered is kept; run again, with another "
                    "max_cost if need be"
                )
            )

    def forget(self, bill: Bill) -> None:
        """Keep no answer that this row was given: it could not be asked again."""
        if self._cache is not None:
            self._cache.forget(bill.keys)

    def stop(self, error: GristmillError) -> NoReturn:
        """No more requests, for this reason, which is raised."""
        self._asked.stop(error)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._asked.close()
        if self._purse is not None:
            self._purse.close(self._spent.cost)
        if self._cache is not None:
            self._cache.close()


class Purse:
    """What one worker may spend of `total` dollars: what it claims of the run's allowance, or `share` of them."""

    def __init__(self, total: float, share: float) -> None:
        self.allowance: Allowance | None = None
        self._total = total
        self._share = share
        self._held = 0.0

    def holds(self, cost: float) -> bool:
        """Whether so many dollars are this worker's to spend, of those that it has claimed or can claim now."""
        if self.allowance is None:
            return cost <= self._total * self._share
        if cost > self._held or not self._held:
            self._held += self.allowance.claim(cost - self._held, self._total)
        return cost <= self._held and self._held > 0

    def close(self, spent: float) -> None:
        """Give back what is left."""
        if self.allowance is not None and self._held > spent:
            self.allowance.give_back(self._held - spent)
            self._held = spent


class Spent:
    """What a worker has spent, for the limit of costs."""

    def __init__(self) -> None:
        self.cost = 0.0
        self._answers = 0

    @property
    def known(self) -> bool:
        """Whether a request has told what it cost."""
        return self._answers > 0

    def might_cost(self, flying: int) -> float:
        """What is spent, and what so many requests cost if they are like the others."""
        return self.cost + flying * self.cost / max(1, self._answers)

    def add(self, used: Mapping[str, float]) -> None:
        """Count a request."""
        self.cost += used.get("cost", 0.0)
        self._answers += 1


def _used(usage: Mapping[str, float], prices: tuple[float, float] | None) -> dict[str, float]:
    """What a request has taken, by what the endpoint says of it."""
    names = (("prompt_tokens", "input_tokens"), ("completion_tokens", "output_tokens"))  # the second in responses
    given, made = (usage.get(one) or usage.get(other) or 0.0 for one, other in names)
    cost = {} if prices is None else {"cost": given * prices[0] + made * prices[1]}
    return {"requests": 1.0, "prompt_tokens": given, "completion_tokens": made, **cost}
