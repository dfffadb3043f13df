"""The limit of a call: a timer that ends a hang, even one that holds the GIL."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from gristmill.process.failure import LATE_BY
from gristmill.process.timelimit import Deadline

T = TypeVar("T")
MONTH = 2_592_000.0  # seconds: timers do not take arbitrarily large numbers on any platform
LONGEST_LOAD = 1800.0  # seconds: loading that takes longer counts as a hang, unless `batch_timeout` is more
SLOWEST = 20  # design §4: a model call may take this many times the slowest one seen


def _unheard(limit: float) -> None:
    pass


class Watch:
    """A dump-and-exit timer that also ends a hang holding the GIL; every sign of life restarts it.

    The limit is the larger of `patience` times `least` seconds and 20 times the slowest stretch seen between two signs
    of life. Within a call of the model only stretches within calls count: reading that took seconds on a busy machine
    says nothing about how long a call may take.
    """

    def __init__(self, least: float | None) -> None:
        self._least = least
        self.patience = 1.0  # the limit is so many times as long
        self._slowest = 0.0
        self._slowest_call = 0.0  # of the stretches within calls of the model
        self._calling = False
        self._said = 0.0
        self.say: Callable[[float], None] = _unheard  # called when the limit has grown, before it is used
        self._since: float | None = None
        self._until = -1e9  # when the timer that was set last ends the process
        self._deadline = Deadline()
        self._clock = time.monotonic  # user code may replace it
        self._lock = threading.Lock()

    @property
    def limit(self) -> float:
        """Seconds that may pass without a sign of life, outside calls: never less than within them."""
        return math.inf if self._least is None else max(self.patience * self._least, SLOWEST * self._slowest)

    def load(self) -> None:
        """From now on imports and models are being loaded, until the next call."""
        if self._least is not None:
            self._end_after(max(self._least, LONGEST_LOAD))

    def beat(self, calling: bool | None = None) -> None:
        """A sign of life. `calling`: whether a call of the model is under way from now on; None: as before."""
        if self._least is None:
            return
        with self._lock:
            now = self._clock()
            if self._since is not None:
                self._slowest = max(self._slowest, now - self._since)
                if self._calling:
                    self._slowest_call = max(self._slowest_call, now - self._since)
            self._since = now
            self._calling = self._calling if calling is None else calling
            limit = self.limit
            if limit > 1.05 * self._said:
                self._said = limit
                self.say(limit)
            if self._calling:
                limit = max(self.patience * self._least, SLOWEST * self._slowest_call)
            # Arming starts a thread, so not at every batch of a quick model.
            if abs(now + limit - self._until) > limit / 50:
                self._until = now + limit
                self._end_after(limit)

    def over(self, values: Iterator[T]) -> Iterator[T]:
        """The values, with a sign of life before each is made."""
        while True:
            self.beat()
            try:
                value = next(values)
            except StopIteration:
                return
            yield value

    def rest(self) -> None:
        """Nothing is being done: no limit."""
        if self._least is not None:
            with self._lock:
                self._since, self._until, self._calling = None, -1e9, False
                self._deadline.clear()

    def enforce(self) -> None:
        """End the process if its time is over and the timer was cancelled, by user code. Called from time to time."""
        self._deadline.enforce()

    def _end_after(self, seconds: float) -> None:
        self._deadline.set(min(seconds * LATE_BY, MONTH))
