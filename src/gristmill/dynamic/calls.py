"""One call of a batched function: its items, where its results gather, and how its caller is woken."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

from gristmill.dynamic.admission import Batch, Entry
from gristmill.dynamic.callerrors import personal
from gristmill.errors import CallTimeout

clock = time.monotonic


class Raised:
    """Stands in for a missing result. `alone`: no other call is given this error."""

    __slots__ = ("alone", "error")

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.alone = False


class Call(Entry):
    """Waits for as many results as it has items, or for one error. Made and read by its caller, filled by a driver.

    It is its own entry in the queue, or else waits as several `parts`. A blocking caller waits for `lock` to be
    released; a coroutine awaits `future`, on `loop`.
    """

    results: list[Any] | None = None
    parts: Sequence[Part] | None = None
    failure: Raised | None = None
    finished = False
    gone = False  # its caller no longer blocks, though nobody woke it
    lock: Any = None
    loop: asyncio.AbstractEventLoop | None = None
    future: asyncio.Future[None] | None = None

    def __init__(self, owner: Any, items: Sequence[Any], arrived: float) -> None:
        self.owner = owner  # kept until the call is over: a method's instance must not be collected under it
        self.items = items
        self.arrived = arrived
        self.end = self.missing = len(items)

    @property
    def entries(self) -> Sequence[Entry]:
        """What waits in the queue for this call."""
        return (self,) if self.parts is None else self.parts

    def will_await(self, loop: asyncio.AbstractEventLoop) -> asyncio.Future[None]:
        """Records that the caller is a coroutine on this loop; returns the future that it will await."""
        self.loop = loop
        self.future = future = loop.create_future()
        return future

    def rows(self) -> list[Any]:
        """The results in order of the items. Raises the caller's own twin of the error, if there was one."""
        if self.failure is not None:
            raise self.failure.error if self.failure.alone else personal(self.failure.error)
        assert self.results is not None
        return self.results

    def expire(self, seconds: float) -> None:
        self.failure = Raised(CallTimeout(f"no result after {seconds:g} s"))
        self.failure.alone = True

    def fill(self, entry: Entry, start: int, rows: Sequence[Any]) -> None:
        """Store the results of the entry's items from `start` on."""
        if self.results is None:
            self.results = [None] * self.missing
        stop = start + len(rows)
        places = entry.places[start:stop] if isinstance(entry, Part) else range(start, stop)
        for place, row in zip(places, rows, strict=True):
            self.results[place] = row
        self.missing -= len(rows)


class Part(Entry):
    """Some of a call's items, those at these `places`, which wait in an order or with a priority of their own."""

    def __init__(self, call: Call, places: Sequence[int], priority: float) -> None:
        super().__init__([call.items[place] for place in places], call.arrived)
        self.call = call
        self.places = places
        self.priority = priority
        self.large = call.large
        if call.costs is not None:
            self.costs = [call.costs[place] for place in places]


def call_of(entry: Entry) -> Call:
    """The call that an entry's items belong to."""
    return entry.call if isinstance(entry, Part) else entry  # type: ignore[return-value]


def scatter(batch: Batch, outcomes: list[Any], *, any_raised: bool) -> list[Call]:
    """Give each item's outcome (a result or `Raised`) to its call; returns the calls that are over now."""
    over = []
    at = 0
    for entry, start, stop in batch.parts:
        rows = outcomes[at : at + stop - start]
        at += stop - start
        call: Call = entry.call if isinstance(entry, Part) else entry  # type: ignore[assignment]
        if call.finished:
            continue
        if stop - start == call.missing and call is entry and not start:  # all of it at once, as for most calls
            call.results, call.missing = rows, 0
        else:
            call.fill(entry, start, rows)
        if any_raised:
            failure = next((row for row in rows if type(row) is Raised), None)
            if failure is not None:  # only then: the caller may just be recording its timeout
                call.failure = failure
        if not call.missing or call.failure is not None:
            call.finished = True
            over.append(call)
    if not any_raised:
        return over
    failed = [call.failure for call in over if call.failure is not None]
    if len(failed) == 1:
        failed[0].alone = True
    return over


def fail(entries: Iterable[Entry], error: Exception) -> list[Call]:
    """End the calls of these entries with this error; returns those that were not over before."""
    failure = Raised(error)
    over = []
    for entry in entries:
        call = call_of(entry)
        if not call.finished:
            call.failure, call.finished = failure, True
            over.append(call)
    return over


def wake_loops(calls: Iterable[Call]) -> None:
    """Let coroutines continue, from any thread; those on one loop together."""
    by_loop: dict[asyncio.AbstractEventLoop, list[Call]] = {}
    for call in calls:
        if call.loop is not None:
            by_loop.setdefault(call.loop, []).append(call)
    for loop, some in by_loop.items():
        with suppress(RuntimeError):  # the loop is closed: nobody awaits on it any more
            loop.call_soon_threadsafe(settle, some)


def settle(calls: Iterable[Call]) -> None:
    """Let the coroutines continue; only on their loop."""
    for call in calls:
        future = call.future
        if future is not None and not future.done():
            future.set_result(None)
