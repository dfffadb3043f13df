"""How many requests are in flight at a time, found while they are answered; decided from a clock alone."""

from __future__ import annotations

FIRST = 16
AT_LEAST = 1.0  # seconds over which answers are counted,
ROUNDS = 4  # and answers for each request in flight
RISE, GAIN = 2.0, 1.15  # twice as many are kept if they make so much more of answers a second
BACK = 0.7  # what stays when an endpoint says that it is too much
CAREFUL = 1.1  # the rise after that
HOLD = 20  # intervals between attempts to do better, once no more was found to help
LESS = 0.9  # of a limit at which there was too much is taken to be what works


class Room:
    """A number of requests in flight: `most`, or with `auto` one that rises for as long as that makes more answers a
    second, is lowered when the endpoint has too much (429, 503), and is tried anew now and then. It is not raised while
    it is not used. Times are seconds of any clock.
    """

    def __init__(self, most: int, auto: bool) -> None:
        self.limit = min(most, FIRST) if auto else most
        self._most = most
        self._auto = auto
        self._rise = RISE
        self._before: tuple[int, float] | None = None  # the last lower limit and its answers a second
        self._holding = 0
        self._works = 0  # the limit that is known to work, to which it returns soon
        self._worked = True  # whether an interval has passed since it was lowered
        self._cut = float("-inf")  # when the limit was last lowered: refusals of requests from before say nothing new
        self._since: float | None = None
        self._count = self._full = 0

    def answered(self, now: float, flying: int) -> None:
        """An answer came; `flying` requests were in flight, this one among them."""
        if not self._auto:
            return
        if self._since is None:
            self._since = now
            return
        self._count += 1
        self._full += flying >= self.limit
        took = now - self._since
        if took < AT_LEAST or self._count < ROUNDS * self.limit:
            return
        if 2 * self._full > self._count:  # else there was not enough to do, which tells nothing
            self._decide(self._count / took)
        self._start(now)

    def refused(self, now: float, begun: float) -> None:
        """A request that was sent at `begun` was refused because there are too many."""
        if not self._auto or begun < self._cut:
            return
        if self._worked:  # else what works is lower than this, as it may be for a moment
            self._works = min(self._works, int(self.limit * LESS))
        self._worked = False
        self.limit = max(1, int(self.limit * BACK))
        self._cut, self._rise, self._before, self._holding = now, CAREFUL, None, HOLD // 4
        self._start(None)

    def _start(self, now: float | None) -> None:
        self._since = now
        self._count = self._full = 0

    def _decide(self, rate: float) -> None:
        self._worked = True
        if self.limit < self._works:
            self.limit = min(self._works, max(self.limit + 1, int(self.limit * RISE)))
            return
        self._works = self.limit
        if self._holding:
            self._holding -= 1
            return
        if self._before is not None:
            lower, then = self._before
            gained = rate / then >= 1 + (GAIN - 1) * (self.limit / lower - 1)
            if not gained:
                self.limit = self._works = lower
                self._before, self._holding, self._rise = None, HOLD, CAREFUL
                return
        if self.limit < self._most:
            self._before = (self.limit, rate)
            self.limit = min(self._most, max(self.limit + 1, int(self.limit * self._rise)))
