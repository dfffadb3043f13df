"""The time in which nobody is answered, as people are told of it."""

from __future__ import annotations

import datetime

from gristmill.job.uris import redact
from gristmill.models.addresses import Address
from gristmill.models.replies import Later

MOST_WHY = 100  # characters of a failure, in progress
SAID = (3, 5, 10, 20, 30)  # seconds without an answer at which that is told; then each minute


class Silence:
    """The time since a request failed and none was answered."""

    def __init__(self, since: float) -> None:
        self.since = since
        self.url = self._why = ""
        self._after: float | None = None

    def failed(self, address: Address, later: Later) -> None:
        """One more failure."""
        self.url, self._why, self._after = redact(address.url), later.why, later.after

    def told(self, now: float, rest: float) -> str:
        """For people: how long it lasts, in steps, so that it changes seldom; "" while it is short."""
        quiet = now - self.since
        if self._after is not None and rest > SAID[0]:
            until = datetime.datetime.now().astimezone() + datetime.timedelta(seconds=rest)
            return f"waiting until {until:%H:%M:%S}, as {self.url} asks for ({self._why[:MOST_WHY]})"
        if quiet < SAID[0]:
            return ""
        return f"waiting: no answer from {self.url} for {steps(quiet)} s ({self._why[:MOST_WHY]}), trying again"


def steps(quiet: float) -> int:
    """Seconds, of those that are told."""
    return int(quiet // 60) * 60 or max(n for n in SAID if n <= quiet)
