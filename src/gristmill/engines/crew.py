"""The crew: what engines with lasting workers share. Workers are started as the feed wants them, given items, heard,
replaced when they die and given up when they are silent. How a worker is started and reached is up to the engine.
"""

from __future__ import annotations

import itertools
import queue
import time
from collections.abc import Callable, Iterator
from dataclasses import field, replace
from typing import Protocol

from gristmill.process import liveness
from gristmill.process.messages import (
    WAIT,
    Alive,
    Death,
    Event,
    Feed,
    Item,
    Left,
    Outcome,
    Printed,
    Stages,
    Started,
    Stopped,
)
from gristmill.values import dataclass

HELD = 2  # fewest items that a worker holds: it prepares one while it predicts the other
BEAT = 0.25  # seconds between looks at the clock and at signals when nothing happens
TAIL = 16_000  # bytes of a worker's last words kept as evidence
LEAVING = 10.0  # seconds that a worker with nothing left to do may be silent before it is ended


class Link(Protocol):
    """How the driver reaches one worker."""

    ready: bool  # it has a place and can be given items

    def give(self, item: Item | None) -> None:
        """The next item, or None for "no more". Never raises: `Ended` reports a worker that is gone."""
        ...

    def drop(self) -> None:
        """End the worker by force, without waiting: it is no longer needed, or has been silent for too long."""
        ...


@dataclass(frozen=True)
class Ended(Event):
    """A worker is gone. `code` is its exit code, negative for a signal, None if it was `lost` with its machine."""

    code: int | None = None
    lost: str = ""
    evidence: str = ""
    silent: bool = False


@dataclass(frozen=True)
class Aside(Event):
    """An event about a process outside the crew. The items of a death are no longer held."""

    event: Event = field(default_factory=lambda: Event(""))


@dataclass
class Member:
    """A worker as the driver sees it. `held` are its items in the order given; `tail` its last words."""

    name: str
    index: int
    link: Link
    held: list[str] = field(default_factory=list)
    started: bool = False
    done: bool = False
    stopped: bool = False
    left: Left | None = None
    tail: bytes = b""


def held_by(stages: Stages) -> int:
    """How many items a worker of these stages can use at once."""
    return max(HELD, 1 + getattr(stages, "ahead", 1))


class Crew:
    """Up to `most` workers. `start` makes the link of a worker of that name and number, or returns None for "not yet";
    it puts what workers report, and their `Ended`, into `events`. `clock` gives seconds.
    """

    def __init__(
        self,
        feed: Feed,
        most: int,
        start: Callable[[str, int], Link | None],
        events: queue.SimpleQueue[Event],
        held: int = HELD,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.members: dict[str, Member] = {}
        self._feed = feed
        self._most = most
        self._start = start
        self._events = events
        self._held = held
        self._serial = itertools.count()
        self._clock = clock
        self._vigil = liveness.Vigil()
        self._looked = clock()

    def events(self) -> Iterator[Event]:
        """Events until the feed is done and all workers have left; the first as soon as workers have been started."""
        self._fit()
        self._give()
        yield Event("")
        while True:
            self._fit()
            self._give()
            if not self.members:
                return
            yield from self._given_up()
            try:
                event = self._events.get(timeout=BEAT)
            except queue.Empty:
                yield Event("")  # a heartbeat, so that the caller can look at signals and at the clock
                continue
            yield from self._seen(event)

    def _fit(self) -> None:
        """Start as many workers as are wanted; if fewer are, drop those that have not been placed yet."""
        wanted = min(self._most, self._feed.wanted())
        while len(self.members) < wanted:
            taken = {m.index for m in self.members.values()}
            index = next(i for i in itertools.count() if i not in taken)  # that of a dead worker, with its GPU
            name = f"w{next(self._serial)}"
            link = self._start(name, index)
            if link is None:
                break
            self.members[name] = Member(name, index, link)
            self._give()
        surplus = len(self.members) - wanted
        for member in [m for m in reversed(self.members.values()) if not m.link.ready][: max(0, surplus)]:
            member.link.drop()
            del self.members[member.name]
            self._vigil.forget(member.name)

    def _give(self) -> None:
        """Give workers that have room what the feed has for them."""
        for member in self.members.values():
            while member.link.ready and not member.done and len(member.held) < self._held:
                item = self._feed.take(member.name)
                if item is WAIT:
                    break
                given = item if isinstance(item, Item) else None  # DONE
                member.done = given is None
                member.held += [] if given is None else [given.key]
                member.link.give(given)

    def _given_up(self) -> Iterator[Event]:
        """Give up workers that have given no sign of life for too long: no row is to blame, and others do their
        items.
        """
        now = self._clock()
        if now - self._looked < BEAT or not self._events.empty():  # pending events are heard first
            return
        self._looked = now
        for m in self.members.values():
            self._vigil.watch(m.name) if m.link.ready else self._vigil.rest(m.name)
        limits = {m.name: liveness.STOPPED for m in self.members.values() if m.stopped}
        limits |= {m.name: LEAVING for m in self.members.values() if m.done and not m.held}
        for name, seconds in self._vigil.late(now, limits):
            self.members[name].link.drop()
            how = f"given up after {seconds:.0f} s without a sign of life: stopped, stuck or unreachable"
            yield from self._gone(self.members[name], Ended(name, lost=how, silent=True))

    def _gone(self, member: Member, ended: Ended) -> Iterator[Event]:
        del self.members[member.name]
        self._vigil.forget(member.name)
        if member.left is not None:
            yield replace(member.left, keys=tuple(member.held))
        elif not member.done or member.held:
            yield _death(member, ended)
        elif ended.silent or ended.code:
            code = ended.code or 0
            how = ended.lost or (f"killed by signal {-code}" if code < 0 else f"code {code}")
            done = "all it had left to do was to close its model; its rows are done"
            yield Printed(member.name, f"worker {member.name} did not end cleanly ({how}): {done}", "warning")

    def _seen(self, event: Event) -> Iterator[Event]:
        if isinstance(event, Aside):
            lost = event.event.keys if isinstance(event.event, Death) else ()
            for member in self.members.values():
                member.held = [key for key in member.held if key not in lost]
            yield event.event
            return
        if (found := self.members.get(event.worker)) is None:
            return
        member = found
        if isinstance(event, Ended):
            yield from self._gone(member, event)
            return
        self._vigil.heard(member.name, event.limit if isinstance(event, Alive) else None)
        if isinstance(event, Stopped):
            member.stopped = not event.over
        if isinstance(event, (Alive, Stopped)):
            yield Event("")
            return
        if isinstance(event, Left):
            member.done, member.left = True, event  # the feed hears it when the worker has ended
            return
        if isinstance(event, Printed):
            member.tail = (member.tail + event.text.encode("utf-8", "replace"))[-TAIL:]
        elif isinstance(event, Started):
            member.started = True
        elif isinstance(event, Outcome) and event.key in member.held:
            member.held.remove(event.key)
        yield event


def _death(member: Member, ended: Ended) -> Death:
    code = ended.code
    return Death(
        member.name,
        tuple(member.held),
        member.tail.decode("utf-8", "replace") + ended.evidence,
        code if code is not None and code >= 0 else None,
        -code if code is not None and code < 0 else None,
        member.started,
        ended.lost,
        ended.silent,
    )
