"""Workers in threads that can die: the engine of `workers=0`, in which a row of user code ends its worker as a signal
would, without a word and with nothing that follows, and the driver hears of a death.
"""

from __future__ import annotations

import contextvars
import itertools
import threading
from collections.abc import Generator
from typing import Any, ClassVar

from gristmill.engines.local import _InProcess
from gristmill.process.messages import Alive, Death, Event, Feed, Item, Outcome, Signal, Stages

VERSION: contextvars.ContextVar[int] = contextvars.ContextVar("version")  # of the code that a command runs


class Mortal(_InProcess):
    """Stands in for that engine (test_protocol.py puts it there). One of its workers at a time runs user code."""

    by_version: ClassVar[dict[int, Mortal]] = {}
    over: ClassVar[threading.Event] = threading.Event()  # set once all commands have ended: threads of the dead may go

    def __init__(self, stages: Stages, feed: Feed) -> None:
        self._held: list[str] = []
        self._name = ""
        self._dead: set[str] = set()
        super().__init__(stages, _Watched(feed, self._held))
        self.by_version[VERSION.get(0)] = self

    def events(self) -> Generator[Event, None, None]:
        for number in itertools.count():
            self._name = f"w{number}"
            self._held.clear()
            left: Any = yield from self._heard(self._to_its_end(self._name))
            if self._name in self._dead:
                yield Death(self._name, keys=tuple(self._held), signal=11, evidence="Segmentation fault")
            elif left is None:
                return
            else:
                yield left

    def _heard(self, events: Generator[Event, None, Any]) -> Generator[Event, None, Any]:
        while True:
            try:
                event = next(events)
            except StopIteration as end:
                return end.value
            if isinstance(event, Outcome) and event.worker in self._dead:
                continue
            if isinstance(event, Outcome) and event.key in self._held:
                self._held.remove(event.key)
            yield event

    def kill(self) -> None:
        """Called by the worker's own code: its thread never comes back while commands run."""
        self._dead.add(self._name)
        over = Mortal.over
        self._events.put(Alive(self._name, 0.0))
        over.wait()
        raise SystemExit

    @staticmethod
    def bury() -> None:
        """All commands have ended, and what they wrote is looked at no more."""
        Mortal.over.set()
        Mortal.over = threading.Event()
        Mortal.by_version.clear()


class _Watched:
    """A feed that notes what it hands out."""

    def __init__(self, feed: Feed, held: list[str]) -> None:
        self._feed, self._held = feed, held

    def take(self, worker: str) -> Item | Signal:
        item = self._feed.take(worker)
        if isinstance(item, Item):
            self._held.append(item.key)
        return item

    def wanted(self) -> int:
        return self._feed.wanted()


def dies(version: int) -> None:
    """Ends the worker whose command runs this version of the code."""
    Mortal.by_version[version].kill()
