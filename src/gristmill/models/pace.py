"""How fast requests may be sent, decided from a clock alone."""

from __future__ import annotations

import math
from collections import deque

MARGIN = 0.98  # of the rate: what leaves within a second may arrive within a little less,
MOST = (
    0.985  # and of that second's share, so that what a stall held up comes again without another pause a second later
)
SLACK = 0.25  # seconds by which units that come late are made up for, so that a stall costs none,
CATCH_UP = 1.25  # no faster than so many times as fast: what leaves together needs connections, and arrives together
START = (
    0.1  # of the first second's share is left out: connections are opened, and what leaves meanwhile arrives together
)
JITTER = 0.01  # seconds by which a clock that counts whole milliseconds and an event loop are late anyway


class Pace:
    """Nearly `rate` units a minute (MARGIN), evenly from the first one on: a unit may come once those before it have
    had their time (the generic cell rate algorithm of ITU-T I.371, with a tolerance of SLACK for the rate, and one of
    JITTER for CATCH_UP times the rate). Times are seconds of any clock.
    """

    def __init__(self, rate: float | None) -> None:
        self.most = rate or float("inf")  # units that may be taken at once: those of a minute
        self._each = 0.0 if rate is None else 60.0 / (MARGIN * rate)
        self._next = 0.0
        self._soonest: float | None = None  # that the next unit may come where those before it were late

    def anew(self) -> None:
        """What comes next is the first unit again: nobody was held up, there was nothing to send."""
        self._soonest = None

    def free(self, now: float) -> bool:
        """Whether no unit has to wait now, however many come: there is no rate, and no pause."""
        return not self._each and self._next <= now

    def wait(self, now: float) -> float:
        """Seconds until the next units may be sent, as far as is known now."""
        return max(0.0, self._next - now)

    def turn(self, now: float, units: float = 1.0) -> float:
        """When these units may be sent: now or later. They are taken to be sent then, so whoever asks next has waited
        for that.
        """
        late = 0.0 if self._soonest is None else SLACK  # nothing was held up before the first one
        begin = max(self._next, now - late)
        soonest = max(self._soonest or 0.0, now - min(late, JITTER))
        self._next = begin + units * self._each
        self._soonest = soonest + units * self._each / CATCH_UP
        return max(now, begin, soonest)

    def more(self, units: float) -> None:
        """So many more units were used than were taken (or, if less than 0, fewer)."""
        self._next += units * self._each
        if self._soonest is not None:
            self._soonest += units * self._each / CATCH_UP

    def pause(self, until: float) -> None:
        """Nothing may be sent before that time."""
        self._next = max(self._next, until)


class Beat(Pace):
    """A Pace of single units, of which no second has more than its share of the rate (MOST), whatever was late before.
    (Where that is no whole number, it is the next one, of a little more than a second.)
    """

    def __init__(self, rate: float | None) -> None:
        super().__init__(rate)
        share = math.ceil(MOST * (rate or 0.0) / 60)
        self._sent: deque[float] = deque(maxlen=share)
        self._stretch = 0.0 if rate is None else 60 * share / (MOST * rate)

    def turn(self, now: float, units: float = 1.0) -> float:
        """See Pace."""
        first = self._soonest is None
        begin = super().turn(now, units)
        if self._sent.maxlen:
            if first:
                self._sent.extend([begin] * int(START * self._sent.maxlen))
            if len(self._sent) == self._sent.maxlen:
                begin = max(begin, self._sent[0] + self._stretch)
            self._sent.append(begin)
        return begin
