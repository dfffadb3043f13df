"""How fast requests may be sent, decided from a clock alone."""

from __future__ import annotations

SLACK = 0.01  # seconds by which units that come late may be closer together than their time
MARGIN = 0.97  # of the rate: in no second do more than 0.98 of it leave, and delays on the way may bring some together


class Pace:
    """Nearly `rate` units a minute (MARGIN), evenly: a unit may come once those before it have had their time (the
    generic cell rate algorithm of ITU-T I.371, with a tolerance of SLACK). Times are seconds of any clock.
    """

    def __init__(self, rate: float | None) -> None:
        self.most = rate or float("inf")  # units that may be taken at once: those of a minute
        self._each = 0.0 if rate is None else 60.0 / (MARGIN * rate)
        self._next = 0.0

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
