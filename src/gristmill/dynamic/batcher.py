"""One queue of calls in front of one function: here calls become items that wait, and callers wait for results."""

from __future__ import annotations

import asyncio
import math
import os
import threading
from _thread import allocate_lock
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from gristmill.dynamic import nesting
from gristmill.dynamic.admission import Rules
from gristmill.dynamic.calls import Call, Part, clock, settle
from gristmill.dynamic.execution import Work
from gristmill.dynamic.loop import LoopLane
from gristmill.dynamic.stats import Stats, Tally
from gristmill.dynamic.threads import ThreadLane
from gristmill.errors import BatcherClosed
from gristmill.values import dataclass

_FREE = nullcontext(True)


@dataclass(frozen=True)
class Options:
    """What is decided about a call before it waits.

    `cost` measures an item (None: nothing does), `priority` gives an item's priority, in seconds; `timeout` is how many
    seconds a call may take in all, if it does not set its own; `sort` takes the items of a call in order of cost.
    """

    cost: Callable[[Any], float] | None = None
    priority: Callable[[Any], float] | None = None
    timeout: float | None = None
    sort: bool = False


class Batcher:
    """The calls of one function, or of one instance's method. Coroutine functions have a lane on each loop that calls
    them, others have one thread for all callers.
    """

    def __init__(self, work: Work, rules: Rules, options: Options) -> None:
        self.name = os.urandom(8).hex()  # never reused, not even in other processes or when this one is gone
        self._work = work
        self._rules = rules
        self._options = options
        self._threshold = rules.small_batch_threshold
        self._looks = options.cost is not None or options.priority is not None
        self._default_limit = None if options.timeout is None else _limit(options.timeout)
        self._closed = False
        self._past = Tally()  # of loops that are gone
        self._thread_lane = None if work.asynchronous else ThreadLane(work, rules)
        self._loop_lanes: dict[asyncio.AbstractEventLoop, LoopLane] = {}

    def call(self, owner: Any, items: Sequence[Any], timeout: float | None, priority: float | None) -> list[Any]:
        """One result per item; blocks. Raises what the function raised, CallTimeout, QueueFull or BatcherClosed."""
        lane = self._thread_lane
        assert lane is not None  # coroutine functions have no blocking form
        limit = _limit(timeout) if timeout is not None else self._default_limit
        call = self._open(owner, items, priority)
        call.lock = lock = allocate_lock()
        lock.acquire()
        run = nesting.inside()
        if run is None and lane.submit(call):
            lane.block(call, limit)
        elif run is None:
            lane.here(call)
        else:
            with nesting.waiting(run, lane) as free:
                if free and lane.submit(call):
                    lane.block(call, limit)
                else:
                    lane.here(call)
        return call.rows()

    async def acall(self, owner: Any, items: Sequence[Any], timeout: float | None, priority: float | None) -> list[Any]:
        """`call` without blocking the loop."""
        loop = asyncio.get_running_loop()
        limit = _limit(timeout) if timeout is not None else self._default_limit
        lane = self._thread_lane or self._loop_lanes.get(loop) or self._loop_lane(loop)
        call = self._open(owner, items, priority)
        future = call.will_await(loop)
        run = nesting.inside()
        if run is None and limit is None and lane.submit(call):  # as for most calls, without the overhead of the rest
            try:
                await future
            except BaseException:  # cancelled
                lane.drop(call)
                raise
            return call.rows()
        with _FREE if run is None else nesting.waiting(run, lane) as free:
            if free and lane.submit(call):
                timer = None if limit is None else loop.call_later(limit, _expire, call, lane, limit)
                try:
                    await future
                except BaseException:  # cancelled
                    lane.drop(call)
                    raise
                finally:
                    if timer is not None:
                        timer.cancel()
            elif isinstance(lane, LoopLane):
                await lane.here(call)
            else:
                lane.here(call)
        return call.rows()

    def stats(self, cache_stats: Any = None) -> Stats:
        """What has been done so far, on all lanes."""
        lanes = self._lanes()
        total = Tally()
        total.add(self._past)
        for lane in lanes:
            lane.count(total)
        return total.picture(sum(lane.queued for lane in lanes), cache_stats)

    def clear_stats(self) -> None:
        """Start counting from zero again."""
        self._past = Tally()
        for lane in self._lanes():
            lane.clear_counts()

    def close(self, *, cancel: bool, timeout: float | None) -> None:
        """Take no more calls. Waits for a thread at most `timeout` seconds; loops finish in their own time."""
        self._closed = True
        for lane in self._lanes():
            if isinstance(lane, ThreadLane):
                lane.close(cancel=cancel, timeout=timeout)
            else:
                lane.close(cancel=cancel)

    async def aclose(self, *, cancel: bool, timeout: float | None) -> None:
        """`close` that also waits for the running loop's calls, without blocking it."""
        self._closed = True
        if self._thread_lane is not None:
            await asyncio.to_thread(self._thread_lane.close, cancel=cancel, timeout=timeout)
            return
        self.close(cancel=cancel, timeout=timeout)
        lane = self._loop_lanes.get(asyncio.get_running_loop())
        if lane is not None and not await lane.drained(timeout):
            lane.close(cancel=True)

    def _lanes(self) -> list[ThreadLane | LoopLane]:
        return [self._thread_lane] if self._thread_lane is not None else list(self._loop_lanes.values())

    def _loop_lane(self, loop: asyncio.AbstractEventLoop) -> LoopLane:
        lane = self._loop_lanes.get(loop)
        if lane is None:
            if self._closed:
                raise BatcherClosed("the call came after close()")
            for other in [other for other in self._loop_lanes if other.is_closed()]:
                if (gone := self._loop_lanes.pop(other, None)) is not None:
                    gone.count(self._past)
            lane = self._loop_lanes.setdefault(loop, LoopLane(self._work, self._rules, loop))
        return lane

    def _open(self, owner: Any, items: Sequence[Any], priority: float | None) -> Call:
        call = Call(owner, items, clock())
        if self._threshold is not None and len(items) > self._threshold:
            call.large = True
        if priority is not None:
            call.priority = _seconds(priority)
        if self._looks:
            self._look(call, told=priority is not None)
        return call

    def _look(self, call: Call, *, told: bool) -> None:
        """Measure the call's items, and set the order in which they wait."""
        cost, ranker = self._options.cost, None if told else self._options.priority
        if cost is not None:
            call.costs = [_measured(cost, item) for item in call.items]
        order: Sequence[int] = range(len(call.items))
        if call.costs is not None and self._options.sort:
            order = sorted(order, key=call.costs.__getitem__)
        ranks: dict[float, list[int]] = {}
        for place in order:
            rank = call.priority if ranker is None else _seconds(ranker(call.items[place]))
            ranks.setdefault(rank, []).append(place)
        if len(ranks) == 1 and order == range(len(call.items)):
            call.priority = next(iter(ranks))
        else:
            call.parts = [Part(call, places, rank) for rank, places in ranks.items()]


def _limit(timeout: float) -> float | None:
    if not timeout >= 0:
        raise ValueError(f"timeout is {timeout!r}: it must be a number of seconds, at least 0, or None")
    return None if timeout > threading.TIMEOUT_MAX else timeout


def _measured(cost: Callable[[Any], float], item: Any) -> float:
    value = cost(item)
    if not 0 <= value < math.inf:
        raise ValueError(f"the cost of an item is {value!r}: it must be a finite number, at least 0")
    return value


def _seconds(priority: float) -> float:
    if not -math.inf < priority < math.inf:
        raise ValueError(f"priority is {priority!r}: it must be a finite number of seconds")
    return priority


def _expire(call: Call, lane: ThreadLane | LoopLane, timeout: float) -> None:
    if not call.finished:
        lane.drop(call)
        call.expire(timeout)
        settle([call])
