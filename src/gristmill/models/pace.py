"""How fast requests may be sent, decided from a clock alone."""

from __future__ import annotations

import math
from collections.abc import MutableSequence

MARGIN = 0.98  # of the rate: what leaves within a second may arrive within a little less,
MOST = (
    0.985  # and of that second's share, so that what a stall held up comes again without another pause a second later
)
SLACK = 0.25  # seconds by which units that come late are made up for, so that a stall costs none,
CATCH_UP = 1.25  # no faster than so many times as fast: what leaves together needs connections, and arrives together
START = (
    0.1  # of the first second's share is left out: connections are opened, and what leaves meanwhile arrives together
)
SPARE = 16  # units of a Beat that may have their turn together, one of each worker, and not be sent after all
JITTER = 0.01  # seconds by which a clock that counts whole milliseconds and an event loop are late anyway


class Pace:
    """Nearly `rate` units a minute (MARGIN), evenly from the first one on: a unit may come once those before it have
    had their time (the generic cell rate algorithm of ITU-T I.371, with a tolerance of SLACK for the rate, and one of
    JITTER for CATCH_UP times the rate). Times are seconds of any clock, and never 0 but for the first one. What it
    remembers is in `numbers`, as many as `size_for` the highest rate, which are 0 at first; others may have them, too.
    """

    def __init__(self, rate: float | None, numbers: MutableSequence[float] | None = None) -> None:
        # When the next unit may come; and the soonest that it may where those before it were late (0: none was sent).
        self._numbers = [0.0] * self.size_for(rate) if numbers is None else numbers
        self.of(rate)

    @staticmethod
    def size_for(rate: float | None) -> int:
        """Numbers that are needed."""
        return 2

    def of(self, rate: float | None) -> None:
        """It is at another rate from now on."""
        self.most = rate or float("inf")  # units that may be taken at once: those of a minute
        self._each = 0.0 if rate is None else 60.0 / (MARGIN * rate)

    def anew(self) -> None:
        """What comes next is the first unit again: nobody was held up, there was nothing to send."""
        self._numbers[1] = 0.0

    @property
    def limited(self) -> bool:
        """Whether there is a rate."""
        return self._each > 0

    def wait(self, now: float) -> float:
        """Seconds until the next units may be sent, as far as is known now."""
        return max(0.0, self._numbers[0] - now)

    def turn(self, now: float, units: float = 1.0) -> float:
        """When these units may be sent: now or later. They are taken to be sent then, so whoever asks next has waited
        for that.
        """
        following, soonest = self._numbers[0], self._numbers[1]
        late = SLACK if soonest else 0.0  # nothing was held up before the first one
        begin = max(following, now - late)
        soonest = max(soonest, now - min(late, JITTER))
        self._numbers[0] = begin + units * self._each
        self._numbers[1] = soonest + units * self._each / CATCH_UP
        return max(now, begin, soonest)

    def more(self, units: float) -> None:
        """So many more units were used than were taken (or, if less than 0, fewer)."""
        self._numbers[0] += units * self._each
        if self._numbers[1]:
            self._numbers[1] += units * self._each / CATCH_UP


class Beat(Pace):
    """A Pace of single units, of which no second has more than its share of the rate (MOST), whatever was late before.
    (Where that is no whole number, it is the next one, of a little more than a second.)
    """

    @staticmethod
    def size_for(rate: float | None) -> int:
        """Those of a Pace, how many units were sent, and when the last ones were: a second's share, and those before
        them that count again if the last ones are not sent.
        """
        return 3 + _share(rate) + SPARE

    def of(self, rate: float | None) -> None:
        """See Pace."""
        super().of(rate)
        self._share = _share(rate)
        self._stretch = 0.0 if rate is None else 60 * self._share / (MOST * rate)

    def turn(self, now: float, units: float = 1.0) -> float:
        """See Pace."""
        first = not self._numbers[1]
        begin = super().turn(now, units)
        if self._share:
            for _ in range(int(START * self._share) if first else 0):
                self._put(begin)
            if (sent := int(self._numbers[2])) >= self._share:
                begin = max(begin, self._numbers[self._place(sent - self._share)] + self._stretch)
            self._put(begin)
        return begin

    def left(self, turn: float, at: float) -> None:
        """The unit that had this turn was sent then, later."""
        if (number := self._number(turn)) is not None:
            self._numbers[self._place(number)] = at

    def unsent(self, at: float) -> None:
        """The unit that had this turn, or that `left` then, is not sent after all: another one may be, instead."""
        if (number := self._number(at)) is not None:
            self.more(-1.0)
            for later in range(number, int(self._numbers[2]) - 1):
                self._numbers[self._place(later)] = self._numbers[self._place(later + 1)]
            self._numbers[2] -= 1

    def _number(self, at: float) -> int | None:
        """The number of the last unit of that time, which no other one's end changes: numbers are those of whichever
        units are left. None if it was long ago.
        """
        sent = int(self._numbers[2]) if self._share else 0
        those = range(sent - 1, max(-1, sent - 1 - (len(self._numbers) - 3)), -1)
        return next((number for number in those if self._numbers[self._place(number)] == at), None)

    def _put(self, at: float) -> None:
        self._numbers[self._place(int(self._numbers[2]))] = at
        self._numbers[2] += 1

    def _place(self, number: int) -> int:
        return 3 + number % (len(self._numbers) - 3)


def _share(rate: float | None) -> int:
    """Units of a second."""
    return math.ceil(MOST * (rate or 0.0) / 60)
