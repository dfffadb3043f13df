"""Requests that cost something, asked of an endpoint: at most once each if they are equal, counted, and within what
they may cost.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NoReturn, Protocol

from gristmill.errors import BadModel, GristmillError
from gristmill.job.endpoints import Provider
from gristmill.job.secret import reveal, secrets_in
from gristmill.models.answercache import AnswerCache, digest_of
from gristmill.models.apis import passes
from gristmill.models.asking import Asking
from gristmill.models.bill import Bill
from gristmill.models.contract import Journal, Once
from gristmill.models.desk import Desk
from gristmill.models.ending import Ending
from gristmill.models.endpoint import Endpoint, Payer
from gristmill.models.keeping import Keeping
from gristmill.models.provided import Provided
from gristmill.models.providers import PROVIDERS
from gristmill.models.replies import CHAT, NOBODY, REPLIES, Empty, Refused, UnderWay, holds
from gristmill.models.room import Room
from gristmill.models.spending import LOOK, Spending, Stake
from gristmill.models.usual import most_tokens
from gristmill.models.vendors import OPENAI, VENDORS, Vendor
from gristmill.process.descriptors import room
from gristmill.process.ownstderr import say

MOST_KNOWN, MOST_REMEMBERED = 20_000, 1 << 26  # answers that `dedupe` remembers in each worker, and their characters
SOON = 0.02  # seconds until it is looked whether another worker was answered, at first


class Asked(Protocol):
    """Who answers requests: an endpoint, or a model on this machine."""

    ending: Ending

    @property
    def trouble(self) -> str: ...
    @property
    def most_flying(self) -> int:
        """See RowModel."""
        ...

    @property
    def put_off(self) -> int:
        """See RowModel."""
        ...

    @property
    def news(self) -> list[str]:
        """See RowModel."""
        ...

    async def ask(
        self, body: Mapping[str, Any], tokens: float, path: str = CHAT, payer: Payer | None = None
    ) -> dict[str, Any]: ...
    def resumed(self) -> None:
        """Others have been answered for this job before."""
        ...

    def share_in(self, run: str) -> None:
        """Limits are for whichever worker of this run has something to send."""
        ...

    def stop(self, error: GristmillError) -> NoReturn: ...
    async def close(self) -> None: ...


def endpoint_of(
    spec: Asking,
    share: float,
    at_once: int,
    limit: float,
    nobody: Mapping[int, str] = NOBODY,
    vendor: Vendor = OPENAI,
) -> Endpoint:
    """The endpoint that a spec names. `share` of the run's limits are this worker's, which asks `at_once` at a time,
    each for up to `limit` seconds; `nobody` and `vendor` as for Endpoint. Raises BadModel if this process may not have
    so many connections.
    """
    urls = [url.strip() for url in str(reveal(spec.base_url)).split(",") if url.strip()]
    auto = spec.concurrency == "auto" or spec.batch_api is not None
    return Endpoint(
        urls, reveal(spec.api_key),
        timeout=spec.timeout, limit=0.9 * limit, room=Room(_connections(at_once, len(urls), auto), auto=auto),
        requests=spec.requests_per_minute, tokens=spec.tokens_per_minute, share=share, nobody=nobody,
        vendor=vendor, secrets=tuple(secrets_in(spec)),
    )  # fmt: skip


def _connections(at_once: int, addresses: int, auto: bool) -> int:
    """How many requests may be in flight, by the files that this process may have open: answers could not be kept that
    are paid for. One that is done leaves its connection open, for the next to the same address.
    """
    most = room(at_once * addresses) // addresses
    if most >= at_once:
        return at_once
    ways = f"raise the limit (ulimit -n {64 * -(-at_once * addresses // 64) + 128})"
    if most < 1 or not auto:
        raise BadModel(
            f"concurrency {at_once} in each worker is more than this process may have connections "
            f"{f'to each of {addresses} addresses ' if addresses > 1 else ''}beside its files, {most}: {ways}"
            f"{f', or give concurrency {most} or less a worker' if most else ''}"
        )
    say(f"at most {most} requests in flight, by the files that may be open: {ways} for {at_once}")
    return most


def provided_of(spec: Asking, paid: Paid, limit: float) -> Provided | None:
    """Where requests are answered in bulk; None if a spec names no batch API. `limit` as for Endpoint."""
    return None if spec.batch_api is None else provided_by(spec.batch_api, spec, paid, limit)


def provided_by(provider: Provider, spec: Asking, paid: Paid, limit: float) -> Provided:
    """A provider at the (first) address of a spec."""
    headers = VENDORS[provider].headers(reveal(spec.api_key))
    url, secrets = str(reveal(spec.base_url)).partition(",")[0].strip(), tuple(secrets_in(spec))
    desk = Desk(url, headers, timeout=spec.timeout, limit=limit, secrets=secrets)
    return Provided(PROVIDERS[provider], desk, paid, spec.dedupe)


class Paid:
    """Asks somebody, in one event loop; `share` of what the run may cost is this worker's if none is claimed."""

    def __init__(self, spec: Asking, share: float, asked: Asked) -> None:
        self.remote = spec.base_url is not None
        self._spec = spec
        self._asked = asked
        self.spending = Spending(spec, share, asked.ending)
        self._keeping = Keeping(asked.ending)
        self._cache = None if spec.cache is None else AnswerCache(spec.cache)
        self._first = asyncio.Lock()
        self.answered: float | None = None  # see provided.Pays
        self._once: Once | None = None
        self._renewal: asyncio.Task[None] | None = None
        self._known: dict[bytes, asyncio.Future[dict[str, Any]]] = {}  # equal requests, answered or in flight
        self._sizes: dict[bytes, int] = {}  # of the answers among them, in the order in which they came
        self._remembered = 0

    @property
    def trouble(self) -> str:
        """See RowModel."""
        return self._asked.trouble

    @property
    def most_flying(self) -> int:
        """See RowModel."""
        return self._asked.most_flying

    @property
    def put_off(self) -> int:
        """See RowModel."""
        return self._asked.put_off

    @property
    def news(self) -> list[str]:
        """See RowModel."""
        return self._asked.news

    def share_in(self, run: str) -> None:
        """See Asked."""
        self._asked.share_in(run)

    def shares(self, journal: Journal) -> None:
        """From now on what may be spent is claimed of the run's, and equal requests are asked once in all workers, and
        over their deaths; and nothing is asked while its answers cannot be kept.
        """
        self._keeping.of(journal)
        if journal.allowance is not None:
            self.spending.of(journal.allowance)
        if self._spec.dedupe and self._once is None and journal.once is not None:
            self._once = journal.once()

    async def ask(self, body: Mapping[str, Any], tokens: float, bill: Bill, path: str = CHAT) -> dict[str, Any]:
        """An answer that is kept from before, or that an equal request in flight gets, or a new one, for which the row
        is billed; the prompt has about so many `tokens` by its length. Raises as Endpoint.ask.
        """
        if bill.trial or (not self._spec.dedupe and self._cache is None):
            return await self._new(body, tokens, path, bill)
        key = digest_of({"path": path, "body": body})
        bill.keys.append(key)
        if self._cache is not None and (kept := self._cache.get(key)) is not None:
            return kept
        if not self._spec.dedupe:
            return self._cached(key, await self._new(body, tokens, path, bill))
        known = self._known.get(key)
        if own := known is None:
            known = self._known[key] = asyncio.ensure_future(self._new_to_all(key, body, tokens, path, bill))
            known.add_done_callback(partial(self._asked_once, key))
        try:
            return self._cached(key, await asyncio.shield(known))
        except asyncio.CancelledError:  # all rows are being ended
            known.cancel()
            raise
        except UnderWay:  # another shard's batch has it, which says nothing of this row's
            if own:
                raise
            return self._cached(key, await self._new(body, tokens, path, bill))

    async def _new_to_all(
        self, key: bytes, body: Mapping[str, Any], tokens: float, path: str, bill: Bill
    ) -> dict[str, Any]:
        """A new answer, or what another worker was or is answered. Raises as `ask`."""
        if (once := self.claims()) is None:
            return await self._new(body, tokens, path, bill)
        pause = SOON
        while (found := once.claim(key))[0] == "wait":
            if bill.bulk is not None and not bill.bulk.done:  # it may be in a batch, for hours
                raise UnderWay
            await self._asked.ending.sleep(pause)
            pause = min(LOOK, 1.5 * pause)
        what, told = found
        if what == "answer":
            return dict(told)
        if what == "refused":
            raise Refused(told["why"], told["status"], told["reply"])
        try:
            reply = await self._new(body, tokens, path, bill)
        except Refused as e:
            once.put(key, {"why": str(e), "status": e.status, "reply": e.reply}, refused=True)
            raise
        except BaseException:
            once.release(key)
            raise
        once.put(key, reply)
        return reply

    def claims(self) -> Once | None:
        """See provided.Pays."""
        if self._once is not None and self._renewal is None:
            self._renewal = asyncio.ensure_future(_renewed(self._once))
        return self._once

    def _asked_once(self, key: bytes, known: asyncio.Future[Any]) -> None:
        if known.cancelled() or known.exception() is not None:
            self._known.pop(key, None)  # the next row asks again
            return
        self._sizes[key] = len(json.dumps(known.result()))
        self._remembered += self._sizes[key]
        while len(self._sizes) > MOST_KNOWN or self._remembered > MOST_REMEMBERED:
            oldest = next(iter(self._sizes))
            self._remembered -= self._sizes.pop(oldest)
            self._known.pop(oldest, None)

    def _cached(self, key: bytes, reply: dict[str, Any]) -> dict[str, Any]:
        if self._cache is not None:
            self._cache.put(key, reply)
        return reply

    async def _new(self, body: Mapping[str, Any], tokens: float, path: str, bill: Bill) -> dict[str, Any]:
        """An answer, counted; not asked for if it might cost more than is left."""
        if self.spending.first(body):
            async with self._first:  # what one takes: until then one at a time
                if self.spending.first(body):
                    return await self._sent(body, tokens, path, bill)
        return await self._sent(body, tokens, path, bill)

    async def _sent(self, body: Mapping[str, Any], tokens: float, path: str, bill: Bill) -> dict[str, Any]:
        taken = None if bill.bulk is None else bill.bulk.take(path, body)  # which is counted
        if taken is not None and holds(taken, REPLIES[path]):
            return taken
        for again in (True, False) if taken is None else (False,):
            try:
                return await self.alone(body, tokens, path, bill)
            except Empty as e:  # which may be once, and is paid for
                self.spending.count(e.reply, tokens, bill, path, body)
                if not again:
                    raise
        raise AssertionError("the second reply is an answer or raised")

    async def alone(self, body: Mapping[str, Any], tokens: float, path: str, bill: Bill) -> dict[str, Any]:
        """The answer to a request of its own, counted. Raises as Endpoint.ask."""
        new = await self._sent_once(body, tokens, path, bill)
        if passes(new, path):  # it failed, and may not the next time
            new = await self._sent_once(body, tokens, path, bill)
        self.answered = time.monotonic()
        if bill.bulk is not None:
            await bill.bulk.asked_alone(path, body, new, bill)
        return new

    async def _sent_once(self, body: Mapping[str, Any], tokens: float, path: str, bill: Bill) -> dict[str, Any]:
        self._asked.ending.go_on()
        spending = self.spending
        given, made = spending.tokens(tokens, most_tokens(body))
        stake = Stake(spending, self._keeping, bill, tokens, most_tokens(body))
        await stake.again()
        try:
            reply = await self._asked.ask(body, given + made, path, stake)
            spending.count(reply, tokens, bill, path, body)
        finally:
            stake.end()
        return reply

    def kept(self, path: str, body: Mapping[str, Any]) -> bool:
        """Whether there is an answer from before."""
        key = digest_of({"path": path, "body": body})
        there = self._cache is not None and self._cache.get(key) is not None
        return there or (self._once is not None and self._once.known(key))

    @contextlib.contextmanager
    def billed(self, bill: Bill) -> Iterator[None]:
        """Whatever a row fails with inside also has what that row took (contract.USED), and no answer that it was
        given is kept for another run: it could not be asked again. What is about all rows says nothing of this one's
        answers; then, and if the run is ended, the row is unfinished.
        """
        try:
            yield
        except (GristmillError, asyncio.CancelledError):
            bill.unfinished()
            raise
        except Exception as e:
            if self._cache is not None:
                self._cache.forget(bill.keys)
            if self._once is not None:
                self._once.forget(bill.keys)
            with contextlib.suppress(AttributeError, TypeError):  # a class without room for it
                e.used = bill.used  # type: ignore[attr-defined]
            raise

    def resumed(self) -> None:
        """See Asked."""
        self._asked.resumed()

    def stop(self, error: GristmillError) -> NoReturn:
        """No more requests, for this reason, which is raised."""
        self._asked.stop(error)

    async def aclose(self) -> None:
        """Close the connections."""
        if self._renewal is not None:
            self._renewal.cancel()
        await self._asked.close()
        self.spending.close()
        if self._cache is not None:
            self._cache.close()
        if self._once is not None:
            self._once.close()


async def _renewed(once: Once) -> None:
    """A request may wait for its turn for longer than a claim lasts: what is claimed stays so while this loop runs."""
    while True:
        await asyncio.sleep(await asyncio.to_thread(once.renew))
