"""What the requests of one worker cost: kept free before they are sent, counted once they are answered, and within what
they may cost together.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from gristmill.errors import RunFailed
from gristmill.job.endpoints import prices
from gristmill.models.apis import letters_in
from gristmill.models.asking import LETTERS, Asking
from gristmill.models.bill import TINY, Bill
from gristmill.models.contract import Allowance
from gristmill.models.ending import Ending
from gristmill.models.endpoint import LONGEST
from gristmill.models.keeping import Keeping
from gristmill.models.outcomes import filtered
from gristmill.models.purse import Purse
from gristmill.models.replies import tokens_in, usage_of
from gristmill.models.usual import Usual, most_tokens
from gristmill.process.ownstderr import say

SHARE = "_requests"  # in a reply that whoever was asked has made of a part of another: that of the request
ANSWERS_TOKENS = ("completion_tokens", "output_tokens")  # names of what a usage has of an answer
PATIENCE, LOOK = 10.0, 0.5  # seconds in which other workers may leave money, and between two looks for it


class Spending:
    """Used in one event loop. `share` of what the run may cost is this worker's if none is claimed. What waits here for
    money is woken by the `ending`.
    """

    def __init__(self, spec: Asking, share: float, ending: Ending) -> None:
        self._ending = ending
        self._prices = None if spec.price is None else prices(spec.price)
        self._purse = None if spec.max_cost is None else Purse(spec.max_cost, share)
        self._usual = Usual()
        self._estimates = False  # whether it was said that costs are such
        # What an answer takes has to be known where it is limited, and nothing else tells.
        self.bounded = self._purse is not None or spec.tokens_per_minute is not None
        self._flying = 0  # requests for which money is reserved, without those in bulk
        self._turn = asyncio.Lock()  # of those that wait for money, in their order
        self._freed = ending.event()

    def of(self, allowance: Allowance) -> None:
        """What may be spent is claimed there from now on."""
        if self._purse is not None:
            self._purse.allowance = allowance

    @property
    def alone(self) -> bool:
        """Whether no other worker can leave money."""
        return self._purse is None or self._purse.alone or self._purse.allowance is None

    # ------------------------------------------------ what requests take

    @property
    def answered(self) -> int:
        """How many requests are known, of those that were answered."""
        return self._usual.answered

    @property
    def known(self) -> bool:
        """Whether it is known what requests cost, if that matters."""
        return self._purse is None or self._usual.known

    def first(self, body: Mapping[str, Any]) -> bool:
        """Whether this request is to tell what others take, before any other is sent."""
        return self.bounded and not self._usual.known and (self._purse is not None or most_tokens(body) is None)

    def bounds(self, most: int | None) -> bool:
        """Whether what a request may cost at most is known, if that matters; its answer has at most so many tokens,
        which says nothing where others had more than theirs.
        """
        return self._purse is None or (self._usual.known and most is not None and not self._usual.exceeded)

    def tokens(self, size: float, most: float | None) -> tuple[float, float]:
        """See Usual."""
        return self._usual.tokens(size, most)

    def guess(self, size: float, most: float | None) -> float:
        """Dollars that a request may cost, of a size as Usual has it."""
        return self._dollars(*self._usual.tokens(size, most))

    def of_reply(
        self, reply: Mapping[str, Any], size: float, path: str, most: int | None, learn: bool = True
    ) -> dict[str, float]:
        """What a request has taken (contract.USED), as its reply says, or else by its size; later ones are reckoned by
        that, if they are to `learn`.
        """
        used, (given, made) = _used(reply), self._taken(reply, size, path, most)
        if self._prices is not None:
            used["cost"] = self._dollars(given, made)
        if learn:
            self._usual.add(size, given, made, most)
        return used

    def of_refusal(self, reply: Any, size: float) -> dict[str, float]:
        """What a request has taken that was refused: nothing, unless its reply says so, or that a filter read it, which
        is billed as its prompt.
        """
        if not isinstance(reply, Mapping):
            return {}
        error = reply.get("error")
        for told in (reply, error if isinstance(error, Mapping) else {}):
            if sum(tokens := tokens_in(told)):
                return {**_used(told), **({} if self._prices is None else {"cost": self._dollars(*tokens)})}
        if self._prices is None or not filtered(reply):
            return {}
        return {"cost": self._dollars(self._usual.tokens(size, 0)[0], 0.0)}

    def _taken(self, reply: Mapping[str, Any], size: float, path: str, most: int | None) -> tuple[float, float]:
        """Tokens of prompt and answer to count with: where the endpoint does not tell them, those of the prompt by its
        length, and as many of the answer as it may have, or else by its length.
        """
        (given, made), told = tokens_in(reply), usage_of(reply)
        answered = path not in LONGEST or not told.keys().isdisjoint(ANSWERS_TOKENS)
        if answered and (given or not size):
            return given, made
        if path in LONGEST:
            made = max(made, letters_in(reply, path) / LETTERS if most is None else most)
        if self._prices is not None and not self._estimates:
            self._estimates = True
            say(
                "the endpoint does not say what requests take (usage): their cost is an estimate, by the length of "
                "prompts and max_tokens, or the length of answers"
            )
        rest = told.get("total_tokens", 0.0) - made
        return given or max(self._usual.tokens(size, None)[0], rest), made

    def _dollars(self, given: float, made: float) -> float:
        return 0.0 if self._prices is None else given * self._prices[0] + made * self._prices[1]

    # ------------------------------------------------ what is spent

    def count(self, reply: Mapping[str, Any], size: float, bill: Bill, path: str, body: Mapping[str, Any]) -> None:
        """Count what a request of a row took, as its reply says."""
        self._count(self.of_reply(reply, size, path, most_tokens(body)), bill)

    def refused(self, reply: Any, size: float, bill: Bill) -> None:
        """A request of a row was refused, and may be on the bill all the same."""
        if used := self.of_refusal(reply, size):
            self._count(used, bill)

    def probed(self, path: str, body: Mapping[str, Any], reply: Mapping[str, Any] | None, bill: Bill) -> None:
        """Count a request that was made to see whether the endpoint is well; without a reply, as what it may cost."""
        size = len(json.dumps(body)) / LETTERS
        if reply is None:
            self.pay(self.guess(size, most_tokens(body)), bill)
            return
        used = self.of_reply(reply, size, path, most_tokens(body), learn=False)
        self._count({name: n for name, n in used.items() if n}, bill)

    def pay(self, cost: float, bill: Bill) -> None:
        """Count what a request may have cost."""
        if self._prices is not None:
            self._count({"cost": cost}, bill)

    def _count(self, used: Mapping[str, float], bill: Bill) -> None:
        self.spend(used.get("cost", 0.0))
        bill.add(used)

    def spend(self, cost: float, kept: float = 0.0) -> None:
        """So much is spent, for which so much was kept free."""
        if self._purse is not None:
            self._purse.spent += cost
            self.settle(kept)

    # ------------------------------------------------ what is kept free

    async def keep(self, cost: Callable[[], float]) -> None:
        """Keep so many dollars free, by what is known when they are. Raises RunFailed if they cannot be, also once what
        is in flight is answered.
        """
        if self._purse is not None:
            await self._afford(self._purse, cost)

    def more(self, cost: float) -> bool:
        """Whether so many dollars more could be kept free at once."""
        return self._purse is None or self._holds(self._purse, cost)

    def settle(self, cost: float) -> None:
        """So much that was kept free is not needed any more."""
        if self._purse is not None and cost:
            self._purse.release(cost)
            self._freed.set()

    def fly(self, more: int) -> None:
        """So many requests more are in flight, for which money is kept free."""
        self._flying += more

    def order(self, costs: Sequence[float], some: bool) -> int:
        """For how many of these requests, from the first one on, money is kept free now: for all, or else for none, or
        `some` as far as it goes.
        """
        if self._purse is None or self._holds(self._purse, math.fsum(costs)):
            return len(costs)
        found, step = 0, len(costs) // 2 if some else 0
        while step and found < len(costs):
            step = min(step, len(costs) - found)
            if self._holds(self._purse, math.fsum(costs[found : found + step])):
                found += step
            else:
                step //= 2
        return found

    async def freed(self, seconds: float) -> bool:
        """Whether something was settled within so many seconds."""
        self._freed.clear()
        with contextlib.suppress(asyncio.TimeoutError):
            return await asyncio.wait_for(self._freed.wait(), seconds)
        return False

    @property
    def flying(self) -> int:
        """Requests for which money is reserved, without those in bulk."""
        return self._flying

    async def _afford(self, purse: Purse, cost: Callable[[], float]) -> None:
        if not self._turn.locked() and self._holds(purse, cost()):
            return
        async with self._turn:
            others_until = time.monotonic() + PATIENCE
            while self.goes_on() and not self._holds(purse, now := cost()):
                if self._flying:  # which may turn out to cost less
                    others_until = time.monotonic() + PATIENCE
                elif self.alone or time.monotonic() > others_until:
                    self.stop_at(now)
                await self.freed(LOOK)

    def goes_on(self) -> bool:
        """Raises why all is over, if it is: then nobody is asked whether there is money."""
        self._ending.go_on()
        return True

    def _holds(self, purse: Purse, cost: float) -> bool:
        """Whether so many dollars could be reserved. Raises RunFailed if that cannot be known."""
        try:
            return purse.reserve(cost)
        except Exception as e:  # whatever a store's library raises: this is about all rows
            self._ending.stop(RunFailed(f"max_cost {purse.total:g}: what is spent cannot be noted: {e}"))

    def stop_at(self, cost: float) -> NoReturn:
        """No more requests, as there is no money for one that might cost so much. Raises RunFailed."""
        assert self._purse is not None
        kept, others = self._purse.reserved, ""
        if self._purse.left_behind > TINY * self._purse.total:
            others = "by a worker that died" if self.alone else "by other workers, or by one that died"
        self._ending.stop(
            RunFailed(
                f"max_cost {self._purse.total:g}: ${_money(self._purse.gone)} are spent"
                f"{f', or kept free {others}' if others else ''}"
                f"{f', ${_money(kept)} are kept free for what is under way' if kept > TINY * self._purse.total else ''}"
                ", and what comes next might cost "
                f"${_money(cost)}, for which not enough is left: what is answered is kept; run again, with another "
                "max_cost if need be (it begins anew with each run)"
            )
        )

    def close(self) -> None:
        """Other workers may have what is left."""
        if self._purse is not None:
            self._purse.close()


async def keep(stakes: Sequence[Stake]) -> None:
    """Keep free what these may cost, which is one request: all at once, as one that waits with a part of it would hold
    up another one that does. They are not in flight before `fly`. Raises RunFailed.
    """
    if any(stake.open for stake in stakes):
        spending, keeping = stakes[0].spending, stakes[0].keeping
        await keeping.ready()
        await spending.keep(lambda: math.fsum([stake.reckoned() for stake in stakes if stake.open]))
        for stake in stakes:  # nothing has happened since they were reckoned
            stake.kept |= stake.open


class Stake:
    """What a row's request may cost, kept free from `again` until `free`; an endpoint.Payer. The prompt has about so
    many `tokens` by its length, and its answer has `most` (None: no limit).
    """

    def __init__(self, spending: Spending, keeping: Keeping, bill: Bill, tokens: float, most: float | None) -> None:
        self.spending, self.keeping, self._bill, self._tokens, self._most = spending, keeping, bill, tokens, most
        self._cost = spending.guess(tokens, most)
        self.kept = self._flies = self._over = False

    async def again(self) -> None:
        """See Payer."""
        await keep([self])
        self.fly()

    @property
    def open(self) -> bool:
        """Whether something is to be kept free for it."""
        return not (self._over or self.kept)

    def reckoned(self) -> float:
        """What it may cost, as far as is known now, from now on."""
        self._cost = self.spending.guess(self._tokens, self._most)
        return self._cost

    def fly(self) -> None:
        """It is sent."""
        if not self._over and not self._flies:
            self.spending.fly(1)
            self._flies = True

    def still(self) -> bool:
        """See Payer."""
        cost = self.spending.guess(self._tokens, self._most)
        if self._over:
            return True
        if self.keeping.trouble is None:
            if not self.kept or cost <= self._cost:
                return True
            if self.spending.more(cost - self._cost):
                self._cost = cost
                return True
        self.free()
        return False

    def end(self) -> None:
        """Its row is answered, or given up."""
        self._over = True
        self.free()

    def free(self) -> None:
        """Nothing is kept free for it any more."""
        if self._flies:
            self.spending.fly(-1)
        if self.kept:
            self.spending.settle(self._cost)
        self.kept = self._flies = False

    def lost(self) -> None:
        """See Payer."""
        self.spending.pay(self._cost, self._bill)
        self.free()

    def refused(self, reply: Any) -> None:
        """See Payer."""
        self.spending.refused(reply, self._tokens, self._bill)

    def took(self, reply: Mapping[str, Any], path: str, body: Mapping[str, Any]) -> None:
        """It was answered, and what the reply says was paid for nothing."""
        self.spending.count(reply, self._tokens, self._bill, path, body)
        self.free()

    def probed(self, path: str, body: Mapping[str, Any], reply: Mapping[str, Any] | None) -> None:
        """See Payer."""
        self.spending.probed(path, body, reply, self._bill)


def _money(dollars: float) -> str:
    """Dollars, with two digits at least of what is less than a cent."""
    return f"{dollars:.{4 if dollars <= 0 else max(4, 1 - math.floor(math.log10(dollars)))}f}"


def _used(reply: Mapping[str, Any]) -> dict[str, float]:
    """What a request has taken, by what the endpoint says of it; of one for several rows, each has a part."""
    given, made = tokens_in(reply)
    return {"requests": reply.get(SHARE, 1.0), "prompt_tokens": given, "completion_tokens": made}
