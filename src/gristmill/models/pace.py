"""How fast requests may be sent, decided from a clock alone."""

from __future__ import annotations

import math
from collections import deque

MARGIN = 0.98  # of the rate: what leaves within a second may arrive within a fiftieth less
SLACK = 0.25  # seconds by which units that come late may be closer together than their time, so that a stall costs none


class Pace:
    """Nearly `rate` units a minute (MARGIN), evenly: a unit may come once those before it have had their time (the
    generic cell rate algorithm of ITU-T I.371, with a tolerance of SLACK). Times are seconds of any clock.
    """

    def __init__(self, rate: float | None) -> None:
        self.most = rate or float("inf")  # units that may be taken at once: those of a minute
        self._each = 0.0 if rate is None else 60.0 / (MARGIN * rate)
        self._next = 0.0

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
        begin = max(self._next, now - SLACK)
        self._next = begin + units * self._each
        return max(now, begin)

    def more(self, units: float) -> None:
        """So many more units were used than were taken (or, if less than 0, fewer)."""
        self._next += units * self._each

    def pause(self, until: float) -> None:
        """Nothing may be sent before that time."""
        self._next = max(self._next, until)


class Beat(Pace):
    """A Pace of single units, of which no second has more than its share of the rate, whatever was late before. (Where
    that is no whole number, it is the next one, of a little more than a second.)
    """

    def __init__(self, rate: float | None) -> None:
        super().__init__(rate)
        share = math.ceil(MARGIN * (rate or 0.0) / 60)
        self._sent: deque[float] = deque(maxlen=share)
        self._stretch = share * self._each

    def turn(self, now: float, units: float = 1.0) -> float:
        """See Pace."""
        begin = super().turn(now, units)
        if self._sent.maxlen:
            if len(self._sent) == self._sent.maxlen:
                begin = max(begin, self._sent[0] + self._stretch)
            self._sent.append(begin)
        return begin
