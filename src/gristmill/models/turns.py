"""When a worker's requests may be sent, one after the other, by limits that are the whole run's."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator

from gristmill.errors import BadJob
from gristmill.models.ending import Ending
from gristmill.models.pace import Beat, Pace
from gristmill.process.ownstderr import say
from gristmill.process.shared import Shared

LOOK = 0.25  # seconds between two looks at the limit of tokens
TOGETHER = 0.98  # of the rate of several workers: what one is late with may arrive together with another's
PATIENCE, AGAIN = 5.0, 0.01  # seconds for which other workers may hold what is shared, and until it is looked again


class Turns:
    """`requests` and `tokens` a minute are the run's limits (None: none), of which this worker has a `share`. Once it
    shares with others of its machine, the shares of all that are there are for whoever has something to send.
    """

    def __init__(self, requests: float | None, tokens: float | None, share: float, ending: Ending) -> None:
        self._rates = (requests, tokens)
        self._share = share
        self._requests, self._tokens = Beat(requests), Pace(tokens)
        self._at(share)
        self._ending = ending
        self._queue = asyncio.Lock()
        self._shared: Shared | None = None
        self._opened = False
        self._more = 0.0  # tokens that were used, and are not taken yet
        self._unsent: list[float] = []  # times of units that were not sent, which are not given back yet
        self._rests = 0.0  # until when nothing is sent
        self.most = self._tokens.most  # tokens that are waited for

    def share_in(self, run: str) -> None:
        """Share with the other workers of this run."""
        if self._opened or not run or self._share >= 1.0 or self._rates == (None, None):
            return
        self._opened = True
        beat = Beat.size_for(self._rates[0])
        try:
            self._shared = Shared(run, self._share, beat + Pace.size_for(self._rates[1]))
        except (OSError, BadJob) as e:
            say(f"limits are shared evenly, whoever has something to send: {e}")
            return
        numbers = self._shared.numbers
        self._requests, self._tokens = Beat(None, numbers[:beat]), Pace(None, numbers[beat:])

    def anew(self) -> None:
        """Nobody was held up until now."""
        with self._held() as there:
            if there:
                self._requests.anew()

    def rest(self, until: float) -> None:
        """This worker sends nothing before that time."""
        self._rests = max(self._rests, until)

    def more(self, tokens: float) -> None:
        """So many more tokens were used than were taken."""
        self._more += tokens
        with self._held() as there:
            if there:
                self._tokens.more(self._more)
                for at in self._unsent:
                    self._requests.unsent(at)
                self._more, self._unsent = 0.0, []

    def unsent(self, at: float, tokens: float) -> None:
        """A request whose turn had come, at that time, is not sent."""
        self._unsent.append(at)
        self.more(-tokens)

    async def take(self, tokens: float) -> float:
        """Returns when a request of about so many tokens may be sent, with the time of its turn, by which it is known.
        Raises the reason if all is over.
        """
        if self._rates == (None, None) and self._rests <= time.monotonic():
            return 0.0
        async with self._queue:  # one after the other: what a stall held up does not leave all at once
            self._ending.go_on()
            while (wait := self._wait()) > 0:  # less, once answers are shorter than they might be
                await self._ending.sleep(min(wait, LOOK))
            turn, begin = await self._turn(tokens)
            try:
                while (left := begin - (now := time.monotonic())) > 0:
                    await self._ending.sleep(left)
            except BaseException:
                self.unsent(turn, tokens)
                raise
            return self._left(turn, now)

    def _left(self, turn: float, now: float) -> float:
        """The time by which a request is known that is sent now."""
        with self._held() as there:
            if there:
                self._requests.left(turn, now)
                return now
        return turn

    def _wait(self) -> float:
        now = time.monotonic()
        return max(self._rests - now, self._tokens.wait(now))

    async def _turn(self, tokens: float) -> tuple[float, float]:
        """Its turn by the limit of requests, and when it may be sent."""
        until = time.monotonic() + PATIENCE
        while True:
            with self._held() as there:
                if there:
                    now = time.monotonic()
                    turn = self._requests.turn(now)
                    return turn, max(turn, self._tokens.turn(now, tokens))
            if time.monotonic() > until:  # whoever has it is stopped, and sends nothing
                self._leave()
            await self._ending.sleep(AGAIN)

    @contextlib.contextmanager
    def _held(self) -> Iterator[bool]:
        """Whether nobody else changes the same meanwhile."""
        if self._shared is None:
            yield True
            return
        with self._shared.locked() as share:
            if share:
                self._at(share)
            yield share > 0

    def _at(self, share: float) -> None:
        of = min(1.0, share) * (TOGETHER if share > self._share else 1.0)
        requests, tokens = (None if rate is None else rate * of for rate in self._rates)
        self._requests.of(requests)
        self._tokens.of(tokens)

    def _leave(self) -> None:
        """Go on alone, with this worker's share."""
        self.close()
        self._requests, self._tokens = Beat(self._rates[0]), Pace(self._rates[1])
        self._at(self._share)

    def close(self) -> None:
        """Nothing is sent any more."""
        if self._shared is not None:
            self._shared.close()
        self._shared = None
