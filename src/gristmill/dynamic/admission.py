"""When a batch of waiting calls leaves, and who is in it.

Pure decisions: the time is an argument, whose items wait is unknown here, and nothing waits, locks or runs anything.
The drivers (`threads.py`, `loop.py`) put entries in, ask `next`, and do what it says.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from gristmill.values import dataclass

# While small and large calls wait together, large ones get at least this share of the places, so that a stream of
# small calls cannot starve them; a quarter costs the small ones little.
LARGE_SHARE = 0.25


@dataclass(frozen=True)
class Rules:
    """What a batch may hold and how long its items may wait for it.

    `batch_size` in items; `timeout` in seconds, counted from the arrival of the oldest item; `max_cost` in the unit of
    the items' costs. With `padded`, a batch costs its longest item times its number of items, else the sum. Calls of
    more than `small_batch_threshold` items go after smaller ones (None: strictly in order of arrival). Of more than
    `max_queue` waiting items the rest wait in front of the queue, or are refused. Raises ValueError.
    """

    batch_size: int = 32
    timeout: float = 0.005
    small_batch_threshold: int | None = 8
    max_cost: float | None = None
    padded: bool = False
    max_queue: int | None = None
    refuse: bool = False

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size is {self.batch_size!r}: it must be at least 1")
        if not 0 <= self.timeout < math.inf:
            raise ValueError(f"timeout_ms is {self.timeout * 1000!r}: it must be a finite number, at least 0")
        if self.max_cost is not None and not self.max_cost > 0:
            raise ValueError(f"the most that a batch may cost is {self.max_cost!r}: it must be more than 0")
        if self.max_queue is not None and self.max_queue < 1:
            raise ValueError(f"max_queue is {self.max_queue!r}: it must be at least 1, or None for no bound")


class Entry:
    """Items of one call that wait together, in this order; `costs` has one number for each of `items`, or is None.

    `priority` is in seconds: the entry is served as if it had arrived that much later (earlier, if negative), so that
    urgent items overtake, but nobody waits for ever. The policy looks neither at the items nor at who called with them.
    """

    # Set on the class, because an entry is made for every call and most never need another value.
    priority = 0.0
    costs: Sequence[float] | None = None
    large = False
    taken = 0  # how many of the items have left
    queued = False  # in the queue, not in front of it

    def __init__(self, items: Sequence[Any], arrived: float) -> None:
        self.items = items
        self.arrived = arrived
        self.end = len(items)

    @property
    def left(self) -> int:
        """How many items still wait."""
        return self.end - self.taken


@dataclass(frozen=True)
class Batch:
    """Leave now, with items `start` to `stop` of each of these entries; `items` are all of them in this order."""

    parts: Sequence[tuple[Entry, int, int]]
    items: list[Any]


@dataclass(frozen=True)
class Wait:
    """Nothing leaves for `seconds` (infinity: until something arrives)."""

    seconds: float


FOREVER = Wait(math.inf)


class Admission:
    """The queue in front of one function. Every entry given to `offer` leaves in batches once, unless it is dropped."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.waiting = 0  # items in the queue
        self._size = rules.batch_size
        self._timeout = rules.timeout
        self._bounded = rules.max_queue is not None
        self._measured = rules.max_cost is not None
        self._small = _Line()
        self._large = _Line()
        self._outside: deque[Entry] = deque()  # entries that found the queue full
        self._cost = 0.0  # of the items in the queue; with `padded`, of the longest one
        self._credit = 0.0  # places that large calls may take before small ones

    @property
    def queued(self) -> int:
        """Items that have not left, in the queue and in front of it."""
        return self.waiting + (sum(entry.left for entry in tuple(self._outside)) if self._outside else 0)

    def offer(self, entry: Entry) -> float | None:
        """Take in an entry, of at least one item; None if it was refused.

        Returns when the entry wants `next` to be asked, at the latest: minus infinity, which means at once, if a batch
        is full now; infinity if the entry stays in front of the queue until others have left.
        """
        if self._bounded and (self._outside or not self._fits(entry)):
            if self.rules.refuse:
                return None
            self._outside.append(entry)
            return math.inf
        if self._measured or entry.priority:
            self._let_in(entry)
        else:  # the same, and most of all calls
            (self._large if entry.large else self._small).plain.append(entry)
            entry.queued = True
            self.waiting += entry.end
        if self.waiting >= self._size or (self._measured and self.full()):
            return -math.inf
        return entry.arrived + self._timeout

    def drop(self, entry: Entry) -> None:
        """Forget the items of this entry that have not left; doing it twice is allowed."""
        left, entry.end, entry.items = entry.left, entry.taken, ()
        if left and entry.queued:
            self.waiting -= left
            self._recount(entry.costs, entry.taken, entry.taken + left)
            self._admit()

    def __iter__(self) -> Iterator[Entry]:
        """The entries that have items left, in no order."""
        return (entry for entry in (*self._small, *self._large, *self._outside) if entry.left)

    def full(self) -> bool:
        """Whether a batch can leave without waiting for more items."""
        if not self._measured or self.waiting >= self._size:
            return self.waiting >= self._size
        return self.waiting > 0 and self._cost * (self.waiting if self.rules.padded else 1) >= (
            self.rules.max_cost or 0
        )

    def next(self, now: float) -> Batch | Wait:
        """What a driver whose function is idle should do at the time `now`, in seconds of any steady clock."""
        if not self.waiting:
            return FOREVER
        if not self.full() and self._timeout > 0:
            left = min(self._small.oldest(), self._large.oldest()) + self._timeout - now
            if left > 0:
                return Wait(left)
        return self._cut()

    def _fits(self, entry: Entry) -> bool:
        limit = self.rules.max_queue
        if limit is None or self.waiting + entry.left <= limit:
            return True
        # A call larger than the whole queue may enter an empty one, or it would wait for ever.
        return not self.waiting and not self.rules.refuse

    def _let_in(self, entry: Entry) -> None:
        (self._large if entry.large else self._small).push(entry)
        entry.queued = True
        self.waiting += entry.end
        if self._measured and entry.costs is not None:
            self._cost = max(self._cost, *entry.costs) if self.rules.padded else self._cost + sum(entry.costs)

    def _admit(self) -> None:
        while self._outside and self._fits(self._outside[0]):
            entry = self._outside.popleft()
            if entry.left:
                self._let_in(entry)

    def _cut(self) -> Batch:
        draft = _Draft(self.rules)
        if self._small.head() and self._large.head():
            self._credit += self.rules.batch_size * LARGE_SHARE
            self._credit -= draft.fill(self._large, int(self._credit))
        else:
            self._credit = 0.0
        draft.fill(self._small, self.rules.batch_size)
        draft.fill(self._large, self.rules.batch_size)
        self.waiting -= len(draft.items)
        if self._measured:
            for entry, start, stop in draft.parts:
                self._recount(entry.costs, start, stop)
        if self._outside:
            self._admit()
        return Batch(tuple(draft.parts), draft.items)

    def _recount(self, costs: Sequence[float] | None, start: int, stop: int) -> None:
        if costs is None or not self._measured:
            return
        if not self.rules.padded:
            # Sums of floats drift: an empty queue costs nothing.
            self._cost = self._cost - sum(costs[start:stop]) if self.waiting else 0.0
        elif max(costs[start:stop]) >= self._cost:
            waiting = (*self._small, *self._large)
            self._cost = max((max(e.costs[e.taken : e.end]) for e in waiting if e.left and e.costs), default=0.0)


class _Line:
    """Entries in order of rank. Those without priority are in order already, so most never enter the heap."""

    def __init__(self) -> None:
        self.plain: deque[Entry] = deque()
        self.ranked: list[tuple[float, int, Entry]] = []
        self._pushed = 0

    def __iter__(self) -> Iterator[Entry]:
        yield from self.plain
        yield from (entry for _, _, entry in self.ranked)

    def push(self, entry: Entry) -> None:
        if entry.priority:
            self._pushed += 1
            heapq.heappush(self.ranked, (entry.arrived + entry.priority, self._pushed, entry))
        else:
            self.plain.append(entry)

    def head(self) -> Entry | None:
        """The entry to be served next; entries before it that have no items left are dropped."""
        plain, ranked = self.plain, self.ranked
        while plain and plain[0].taken == plain[0].end:
            plain.popleft()
        if not ranked:
            return plain[0] if plain else None
        while ranked and not ranked[0][2].left:
            heapq.heappop(ranked)
        if ranked and not (plain and plain[0].arrived <= ranked[0][0]):
            return ranked[0][2]
        return plain[0] if plain else None

    def oldest(self) -> float:
        """When the oldest waiting entry arrived."""
        if self.head() is None:
            return math.inf
        oldest = self.plain[0].arrived if self.plain else math.inf
        for _, _, entry in self.ranked:
            if entry.left:
                oldest = min(oldest, entry.arrived)
        return oldest


class _Draft:
    """A batch being filled: at least one item, and no more than the rules allow."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.parts: list[tuple[Entry, int, int]] = []
        self.items: list[Any] = []
        self.cost = 0.0

    def fill(self, line: _Line, most: int) -> int:
        """Take up to `most` items from the head of the line; returns how many."""
        before = len(self.items)
        room = min(most, self.rules.batch_size - before)
        if not line.ranked and self.rules.max_cost is None:
            room = self._fill_plainly(line.plain, room)
        while room > 0 and (entry := line.head()) is not None:
            start, stop = entry.taken, entry.end
            if stop - start > room:
                stop = start + room
            if entry.costs is not None:
                stop = self._affordable(entry.costs, start, stop)
            if stop == start:  # what does not fit is not overtaken, or large items would starve
                break
            entry.taken = stop
            self.parts.append((entry, start, stop))
            self.items += entry.items[start:stop]
            room -= stop - start
        return len(self.items) - before

    def _fill_plainly(self, plain: deque[Entry], room: int) -> int:
        """`fill` for entries that go in order of arrival, whatever they cost. Returns the room left."""
        parts, items = self.parts, self.items
        while room > 0 and plain:
            entry = plain[0]
            start, stop = entry.taken, entry.end
            if stop - start > room:
                stop = start + room
            else:
                plain.popleft()
            if stop > start:
                entry.taken = stop
                parts.append((entry, start, stop))
                items += entry.items[start:stop]
                room -= stop - start
        return room

    def _affordable(self, costs: Sequence[float], start: int, stop: int) -> int:
        limit = self.rules.max_cost
        if limit is None:
            return stop
        size, cost = len(self.items), self.cost
        for index in range(start, stop):
            item = costs[index]
            size += 1
            cost = max(cost, item) if self.rules.padded else cost + item
            if size > 1 and cost * (size if self.rules.padded else 1) > limit:
                return index
            self.cost = cost
        return stop
