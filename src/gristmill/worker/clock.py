"""What a thread does with its time."""

from __future__ import annotations

import time
from collections.abc import Callable

WAITING = "waiting"


class Clock:
    """Seconds of one thread, by what they went into. Each `lap` is all the time since the one before, so that the sum
    is that of the thread's life, whatever is left unnamed.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.took: dict[str, float] = {}
        self._now = now
        self._at = now()

    def start(self) -> None:
        """The thread begins."""
        self.took, self._at = {}, self._now()

    def lap(self, what: str, of_it: tuple[str, float] | None = None) -> None:
        """Put the time since the last lap down to this; `of_it`: so many seconds of it, measured apart, to another."""
        now = self._now()
        seconds, self._at = now - self._at, now
        if of_it is not None:
            other, part = of_it[0], min(of_it[1], seconds)
            self.took[other] = self.took.get(other, 0.0) + part
            seconds -= part
        self.took[what] = self.took.get(what, 0.0) + seconds
