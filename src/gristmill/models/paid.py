"""Requests that cost something, asked of an endpoint: at most once each if they are equal, counted, and within what
they may cost.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import time
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NoReturn, Protocol

from gristmill.errors import GristmillError, RunFailed
from gristmill.job.endpoints import prices
from gristmill.job.secret import reveal, secrets_in
from gristmill.models.answercache import AnswerCache, digest_of
from gristmill.models.apis import letters_in, passes
from gristmill.models.asking import LETTERS, Asking
from gristmill.models.bill import Bill
from gristmill.models.contract import Allowance, Journal, Once
from gristmill.models.desk import Desk
from gristmill.models.ending import Ending
from gristmill.models.endpoint import LONGEST, Endpoint, Payer
from gristmill.models.provided import Provided
from gristmill.models.providers import PROVIDERS
from gristmill.models.purse import Purse
from gristmill.models.replies import CHAT, NOBODY, REPLIES, Empty, Refused, UnderWay, holds, tokens_in, usage_of
from gristmill.models.room import Room
from gristmill.models.usual import Usual, most_tokens
from gristmill.models.vendors import OPENAI, Vendor
from gristmill.process.ownstderr import say

SHARE = "_requests"  # in a reply that whoever was asked has made of a part of another: that of the request
MOST_KNOWN, MOST_REMEMBERED = 20_000, 1 << 26  # answers that `dedupe` remembers in each worker, and their characters
ANSWERS_TOKENS = ("completion_tokens", "output_tokens")  # names of what a usage has of an answer
SOON = 0.02  # seconds until it is looked whether another worker was answered, at first
PATIENCE, LOOK = 10.0, 0.5  # seconds in which other workers may leave money, and between two looks for it


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
    def news(self) -> list[str]:
        """See RowModel."""
        ...

    async def ask(
        self, body: Mapping[str, Any], tokens: float, path: str = CHAT, payer: Payer | None = None
    ) -> dict[str, Any]: ...
    def resumed(self) -> None:
        """Others have been answered for this job before."""
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
    each for up to `limit` seconds; `nobody` and `vendor` as for Endpoint.
    """

    def shared(rate: int | None) -> float | None:
        return None if rate is None else rate * share

    urls = str(reveal(spec.base_url)).split(",")
    auto = spec.concurrency == "auto" or spec.batch_api is not None
    return Endpoint(
        [url.strip() for url in urls if url.strip()], reveal(spec.api_key),
        timeout=spec.timeout, limit=0.9 * limit, room=Room(at_once, auto=auto),
        requests=shared(spec.requests_per_minute), tokens=shared(spec.tokens_per_minute), nobody=nobody,
        vendor=vendor, secrets=tuple(secrets_in(spec)),
    )  # fmt: skip


def provided_of(spec: Asking, paid: Paid, limit: float, vendor: Vendor = OPENAI) -> Provided | None:
    """Where requests are answered in bulk; None if a spec names no batch API. `limit` as for Endpoint."""
    if spec.batch_api is None:
        return None
    headers = vendor.headers(reveal(spec.api_key))
    secrets = tuple(secrets_in(spec))
    desk = Desk(str(reveal(spec.base_url)), headers, timeout=spec.timeout, limit=limit, secrets=secrets)
    return Provided(PROVIDERS[spec.batch_api], desk, paid, spec.dedupe)


class Paid:
    """Asks somebody, in one event loop; `share` of what the run may cost is this worker's if none is claimed."""

    def __init__(self, spec: Asking, share: float, asked: Asked) -> None:
        self.remote = spec.base_url is not None
        self._spec = spec
        self._asked = asked
        self._prices = None if spec.price is None else prices(spec.price)
        self._purse = None if spec.max_cost is None else Purse(spec.max_cost, share)
        self._usual = Usual()
        self._estimates = False  # whether it was said that costs are such
        # What an answer takes has to be known where it is limited, and nothing else tells.
        self._bounded = self._purse is not None or spec.tokens_per_minute is not None
        self._flying = 0  # requests for which money is reserved, without those in bulk
        self._turn = asyncio.Lock()  # of those that wait for money, in their order
        self._freed = asked.ending.event()
        self._cache = None if spec.cache is None else AnswerCache(spec.cache)
        self._first = asyncio.Lock()
        self.tried = False  # whether somebody was answered
        self._once: Once | None = None
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
    def news(self) -> list[str]:
        """See RowModel."""
        return self._asked.news

    def of(self, allowance: Allowance) -> None:
        """What may be spent is claimed there from now on."""
        if self._purse is not None:
            self._purse.allowance = allowance

    def shares(self, journal: Journal) -> None:
        """Equal requests are asked once in all workers from now on, and over their deaths."""
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
        if (once := self._once) is None:
            return await self._new(body, tokens, path, bill)
        pause = SOON
        while (found := once.claim(key))[0] == "wait":
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
        if self._bounded and not self._usual.known and (self._purse is not None or most_tokens(body) is None):
            async with self._first:  # what one takes: until then one at a time
                if not self._usual.known:
                    return await self._sent(body, tokens, path, bill)
        return await self._sent(body, tokens, path, bill)

    async def _sent(self, body: Mapping[str, Any], tokens: float, path: str, bill: Bill) -> dict[str, Any]:
        taken = None if bill.bulk is None else bill.bulk.take(path, body)
        if taken is not None:
            if not taken.told:
                self.count(taken.reply, tokens, bill, path, body, bulk=True, ours=taken.ours)
            if holds(taken.reply, REPLIES[path]):
                return taken.reply
        for again in (True, False) if taken is None else (False,):
            try:
                return await self._alone(body, tokens, path, bill)
            except Empty as e:  # which may be once, and is paid for
                self.count(e.reply, tokens, bill, path, body)
                if not again:
                    raise
        raise AssertionError("the second reply is an answer or raised")

    async def _alone(self, body: Mapping[str, Any], tokens: float, path: str, bill: Bill) -> dict[str, Any]:
        """The answer to a request of its own."""
        new = await self._sent_once(body, tokens, path, bill)
        if passes(new, path):  # it failed, and may not the next time
            new = await self._sent_once(body, tokens, path, bill)
        self.tried = True
        if bill.bulk is not None:
            await bill.bulk.asked_alone(path, body, new)
        return new

    async def _sent_once(self, body: Mapping[str, Any], tokens: float, path: str, bill: Bill) -> dict[str, Any]:
        self._asked.ending.go_on()
        given, made = self._usual.tokens(tokens, most_tokens(body))
        stake = Stake(self, bill, tokens, self._dollars(given, made))
        await stake.again()
        try:
            reply = await self._asked.ask(body, given + made, path, stake)
            self.count(reply, tokens, bill, path, body)
        finally:
            stake.end()
        return reply

    def probed(self, path: str, body: Mapping[str, Any], reply: Mapping[str, Any] | None, bill: Bill) -> None:
        """Count a request that was made to see whether the endpoint is well; without a reply, as what it may cost."""
        tokens = len(json.dumps(body)) / LETTERS
        if reply is None:
            self.pay(self.guess(tokens, most_tokens(body)), bill)
            return
        used, taken = _used(reply), self._taken(reply, tokens, path, body)
        bill.add({name: n for name, n in used.items() if n})
        self.pay(self._dollars(*taken), bill)

    def pay(self, cost: float, bill: Bill) -> None:
        """Count what a request has cost, or may have cost."""
        if self._prices is not None:
            bill.add({"cost": cost})
        if self._purse is not None:
            self._purse.spent += cost

    def count(
        self,
        reply: Mapping[str, Any],
        tokens: float,
        bill: Bill,
        path: str,
        body: Mapping[str, Any],
        bulk: bool = False,
        ours: bool = True,
    ) -> None:
        """Count what a request took, as its reply says, which came in `bulk` or not; one that is not `ours` was paid
        for by an earlier attempt.
        """
        used, (given, made) = _used(reply), self._taken(reply, tokens, path, body)
        if self._prices is not None:
            used["cost"] = given * self._prices[0] + made * self._prices[1]
        if not bulk:  # else it was learned when it came
            self._usual.add(tokens, given, made)
        if self._purse is not None and ours:
            self._purse.spent += used.get("cost", 0.0)
        bill.add(used, again=bulk)

    def _taken(
        self, reply: Mapping[str, Any], tokens: float, path: str, body: Mapping[str, Any]
    ) -> tuple[float, float]:
        """Tokens of prompt and answer to count with: where the endpoint does not tell them, those of the prompt by its
        length, and as many of the answer as it may have, or else by its length.
        """
        (given, made), told = tokens_in(reply), usage_of(reply)
        answered = path not in LONGEST or not told.keys().isdisjoint(ANSWERS_TOKENS)
        if answered and (given or not tokens):
            return given, made
        if path in LONGEST:
            most = most_tokens(body)
            made = max(made, letters_in(reply, path) / LETTERS if most is None else most)
        if self._prices is not None and not self._estimates:
            self._estimates = True
            say(
                "the endpoint does not say what requests take (usage): their cost is an estimate, by the length of "
                "prompts and max_tokens, or the length of answers"
            )
        rest = told.get("total_tokens", 0.0) - made
        return given or max(self._usual.tokens(tokens, None)[0], rest), made

    async def keep(self, cost: float) -> None:
        """Keep so many dollars free. Raises RunFailed if they cannot be, also once what is in flight is answered."""
        if self._purse is not None:
            await self._afford(self._purse, cost)

    def fly(self, more: int) -> None:
        """So many requests more are in flight, for which money is kept free."""
        self._flying += more

    async def _afford(self, purse: Purse, cost: float) -> None:
        if not self._turn.locked() and self._holds(purse, cost):
            return
        async with self._turn:
            others_until = time.monotonic() + PATIENCE
            while self._goes_on() and not self._holds(purse, cost):
                if self._flying:  # which may turn out to cost less
                    others_until = time.monotonic() + PATIENCE
                elif purse.alone or purse.allowance is None or time.monotonic() > others_until:
                    self._stop_at(purse, cost)
                self._freed.clear()
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._freed.wait(), LOOK)

    def _goes_on(self) -> bool:
        """Raises why all is over, if it is: then nobody is asked whether there is money."""
        self._asked.ending.go_on()
        return True

    def _holds(self, purse: Purse, cost: float) -> bool:
        """Whether so many dollars could be reserved. Raises RunFailed if that cannot be known."""
        try:
            return purse.reserve(cost)
        except Exception as e:  # whatever a store's library raises: this is about all rows
            self._asked.stop(RunFailed(f"max_cost {purse.total:g}: what is spent cannot be noted: {e}"))

    def _stop_at(self, purse: Purse, cost: float) -> NoReturn:
        self._asked.stop(
            RunFailed(
                f"max_cost {purse.total:g}: ${_money(purse.spent)} are spent by this worker, and what comes next might "
                f"cost ${_money(cost)}, for which not enough of the run's max_cost is left: what is answered is kept; "
                "run again, with another max_cost if need be"
            )
        )

    def kept(self, path: str, body: Mapping[str, Any]) -> bool:
        """See provided.Money."""
        key = digest_of({"path": path, "body": body})
        there = self._cache is not None and self._cache.get(key) is not None
        return there or (self._once is not None and self._once.known(key))

    @property
    def known(self) -> bool:
        """See provided.Money."""
        return self._purse is None or self._usual.known

    @property
    def learns(self) -> bool:
        """See provided.Money."""
        return self._bounded

    @property
    def answered(self) -> int:
        """See provided.Money."""
        return self._usual.answered

    def bounds(self, most: int | None) -> bool:
        """See provided.Money."""
        return self._purse is None or (self._usual.known and most is not None)

    def learn(self, path: str, body: Mapping[str, Any], reply: Mapping[str, Any], tokens: float) -> float:
        """See provided.Money."""
        taken = self._taken(reply, tokens, path, body)
        self._usual.add(tokens, *taken)
        return self._dollars(*taken)

    def correct(self, cost: float) -> None:
        """See provided.Money."""
        if self._purse is not None:
            self._purse.release(-cost)

    def guess(self, tokens: float, most: int | None) -> float:
        """See provided.Money."""
        return self._dollars(*self._usual.tokens(tokens, most))

    def _dollars(self, given: float, made: float) -> float:
        return 0.0 if self._prices is None else given * self._prices[0] + made * self._prices[1]

    def order(self, cost: float) -> None:
        """See provided.Money."""
        if self._purse is not None and not self._holds(self._purse, cost):
            self._stop_at(self._purse, cost)

    def settle(self, cost: float) -> None:
        """See provided.Money."""
        if self._purse is not None:
            self._purse.release(cost)
            self._freed.set()

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
        await self._asked.close()
        if self._purse is not None:
            self._purse.close()
        if self._cache is not None:
            self._cache.close()
        if self._once is not None:
            self._once.close()


class Stake:
    """What a row's request may cost, kept free from `again` until `free`; an endpoint.Payer. The prompt has about so
    many `tokens` by its length.
    """

    def __init__(self, paid: Paid, bill: Bill, tokens: float, cost: float) -> None:
        self._paid, self._bill, self._tokens, self._cost = paid, bill, tokens, cost
        self._kept = self._flies = self._over = False

    async def again(self) -> None:
        """See Payer."""
        await self.keep()
        self.fly()

    async def keep(self) -> None:
        """As `again`, but others may not wait for what becomes of it: it is not in flight before `fly`."""
        if self._over or self._kept:
            return
        await self._paid.keep(self._cost)
        self._kept = True
        self._free_if_over()  # as it may be by now

    def _free_if_over(self) -> None:
        if self._over:
            self.free()

    def fly(self) -> None:
        """It is sent."""
        if not self._over and not self._flies:
            self._paid.fly(1)
            self._flies = True

    def end(self) -> None:
        """Its row is answered, or given up."""
        self._over = True
        self.free()

    def free(self) -> None:
        """Nothing is kept free for it any more."""
        if self._flies:
            self._paid.fly(-1)
        if self._kept:
            self._paid.settle(self._cost)
        self._kept = self._flies = False

    def lost(self) -> None:
        """See Payer."""
        self._paid.pay(self._cost, self._bill)
        self.free()

    def took(self, reply: Mapping[str, Any], path: str, body: Mapping[str, Any]) -> None:
        """It was answered, and what the reply says was paid for nothing."""
        self._paid.count(reply, self._tokens, self._bill, path, body)
        self.free()

    def probed(self, path: str, body: Mapping[str, Any], reply: Mapping[str, Any] | None) -> None:
        """See Payer."""
        self._paid.probed(path, body, reply, self._bill)


def _money(dollars: float) -> str:
    """Dollars, with two digits at least of what is less than a cent."""
    return f"{dollars:.{4 if dollars <= 0 else max(4, 1 - math.floor(math.log10(dollars)))}f}"


def _used(reply: Mapping[str, Any]) -> dict[str, float]:
    """What a request has taken, by what the endpoint says of it; of one for several rows, each has a part."""
    given, made = tokens_in(reply)
    return {"requests": reply.get(SHARE, 1.0), "prompt_tokens": given, "completion_tokens": made}
