"""How fast requests may be sent, decided from a clock alone."""

from __future__ import annotations


class Pace:
    """At most `rate` units a minute, evenly: a unit may come once those before it have had their time (GCRA without a
    burst, as in ITU-T I.371). Times are seconds of any clock.
    """

    def __init__(self, rate: float | None) -> None:
        self._each = 0.0 if rate is None else 60.0 / rate
        self._next = 0.0

    def turn(self, now: float, units: float = 1.0) -> float:
        """When these units may be sent: now or later. They are taken to be sent then."""
        begin = max(now, self._next)
        self._next = begin + units * self._each
        return begin

    def more(self, units: float) -> None:
        """So many more units were used than were taken (or, if less than 0, fewer)."""
        self._next += units * self._each

    def pause(self, until: float) -> None:
        """Nothing may be sent before that time."""
        self._next = max(self._next, until)
