"""Whether this process was asked to end: who waits for something outside, a store that is away, then gives up soon."""

from __future__ import annotations

import time

SOON = 3.0  # seconds: out within 12 s, of which workers may take most


class Ending:
    """Asked for by a signal in a driver, by the driver in its workers."""

    def __init__(self) -> None:
        self._since: float | None = None

    def begin(self) -> None:
        """From now on nothing outside is waited for any longer than SOON seconds."""
        if self._since is None:
            self._since = time.monotonic()

    def over(self) -> None:
        """The run that was to end has ended; this process goes on."""
        self._since = None

    def overdue(self, began: float) -> bool:
        """Whether to give up what `began` then, on the monotonic clock."""
        return self._since is not None and time.monotonic() - max(self._since, began) > SOON


ENDING = Ending()
