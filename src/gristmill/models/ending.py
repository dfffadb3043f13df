"""When nobody is asked any more: said once, and heard by all who wait, whatever they wait for."""

from __future__ import annotations

import asyncio
from typing import NoReturn

from gristmill.errors import GristmillError


class Ending:
    """Why no more requests are sent; `error` is None while they are. Whoever waits with it is woken by `stop`, and
    whoever holds a place in a queue leaves it then: so all others get theirs, and ask again before they send anything.
    Used in one event loop; another thread may set `error`.
    """

    def __init__(self) -> None:
        self.error: GristmillError | None = None
        self._sleeping: set[asyncio.Future[None]] = set()
        self._events: list[asyncio.Event] = []

    def go_on(self) -> None:
        """Returns if there is no end yet; raises its reason."""
        if self.error is not None:
            self.stop(self.error)

    def stop(self, error: GristmillError) -> NoReturn:
        """It is over, for this reason, or an earlier one, which is raised."""
        self.error = self.error or error
        for sleeper in self._sleeping:
            _wake(sleeper)
        for event in self._events:
            event.set()
        raise self.error.with_traceback(None)  # which grows each time that it is raised, of thousands of rows

    def event(self) -> asyncio.Event:
        """An event that the end sets, too."""
        self._events.append(made := asyncio.Event())
        return made

    async def sleep(self, seconds: float) -> None:
        """Returns after so many seconds. Raises the reason if it is over before."""
        self.go_on()
        loop = asyncio.get_running_loop()
        sleeper: asyncio.Future[None] = loop.create_future()
        timer = loop.call_later(seconds, _wake, sleeper)
        self._sleeping.add(sleeper)
        try:
            await sleeper
        finally:
            timer.cancel()
            self._sleeping.discard(sleeper)
        self.go_on()


def _wake(sleeper: asyncio.Future[None]) -> None:
    if not sleeper.done():
        sleeper.set_result(None)
