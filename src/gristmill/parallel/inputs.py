"""The inputs of a parallel map: a list, or any iterable, even an endless one, read only as far ahead as is needed."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from gristmill.values import dataclass

Numbered = tuple[int, Any]
KNOWN_AHEAD = 4096  # inputs with a known result that an iterator may be ahead of what was asked for
PATIENCE = 0.02  # seconds that `take` waits for a slow iterator before it returns nothing yet


@dataclass(frozen=True)
class Known:
    """An input whose result is kept somewhere, under `key`."""

    number: int
    key: str


class Order:
    """Numbers in the order in which they began: the first that has not ended, and how many after it have ended. One
    thread may begin them while another ends them.
    """

    def __init__(self) -> None:
        self._begun: deque[int] = deque()
        self._ended: set[int] = set()

    def begin(self, number: int) -> None:
        """Begin a number; each once."""
        self._begun.append(number)

    def end(self, number: int) -> None:
        """End a number that has begun."""
        self._ended.add(number)
        while self._begun and self._begun[0] in self._ended:
            self._ended.remove(self._begun.popleft())

    @property
    def first(self) -> int | None:
        """The first number that has not ended."""
        return self._begun[0] if self._begun else None

    @property
    def beyond(self) -> int:
        """How many after the first have ended."""
        return len(self._ended)


class Inputs:
    """Numbered inputs, taken a few at a time. `total` is how many the iterable says it has, which is only a hint; None
    if only reading will tell.

    If it is None a separate thread reads them, so that a slow iterator does not hold up results; `ahead` inputs are
    read beyond those taken. Inputs that turn out to be Known go to `known` instead, which hands them out; `total` does
    not count them.
    """

    def __init__(self, numbered: Iterable[Numbered | Known], total: int | None, known: Iterable[Known] = ()) -> None:
        self.total = total
        self.ahead = 1
        self._numbered: Iterator[Any] = iter(numbered)
        self._known = deque(known)
        self._held: deque[Numbered] = deque()
        self._change = threading.Condition()
        self._ended = self._closed = False
        self._error: BaseException | None = None
        self._taken = 0
        if self.total is None:
            threading.Thread(target=self._read, daemon=True, name="gristmill-inputs").start()

    def take(self, most: int) -> list[Numbered]:
        """At most `most` inputs; none if nothing has come yet, or nothing will come again. Raises what the iterator
        raised.
        """
        if self.total is not None:
            taken = [self._held.popleft() for _ in range(min(most, len(self._held)))]
            taken += itertools.islice(self._numbered, most - len(taken))
            self._taken += len(taken)
            if len(taken) < most:
                self._ended = True
            elif self._taken >= self.total:  # all that its length promised: but are there more?
                self._held.extend(itertools.islice(self._numbered, 1))
                self.total, self._ended = self._taken + len(self._held), not self._held
            return taken
        with self._change:
            if not self._held and not self._ended:
                self._change.wait(PATIENCE)
            taken = [self._held.popleft() for _ in range(min(most, len(self._held)))]
            self._taken += len(taken)
            self._change.notify_all()
            if not taken and self._error is not None:
                raise self._error
            return taken

    def wait(self) -> bool:
        """Wait a moment; returns whether there is an input to take, or will never be one."""
        if self.total is not None:
            return True
        with self._change:
            if not self._held and not self._ended and not self._known:
                self._change.wait(0.1)
            return bool(self._held) or self._ended

    def known(self, below: int | None) -> Iterator[Known]:
        """The inputs with a known result that are there now; only those with numbers below `below`."""
        for _ in range(len(self._known)):  # no more: an endless iterator may keep adding
            if below is not None and self._known[0].number >= below:
                return
            with self._change:
                found = self._known.popleft()
                self._change.notify_all()
            yield found

    @property
    def ended(self) -> bool:
        """Whether all have been taken."""
        if self.total is not None:
            return self._ended
        with self._change:
            return self._ended and not self._held and self._error is None

    @property
    def left(self) -> int | None:
        """How many have not been taken, if that is known."""
        return None if self.total is None else 0 if self._ended else self.total - self._taken

    def close(self) -> None:
        """Read no further."""
        with self._change:
            self._closed = True
            self._change.notify_all()

    def _read(self) -> None:
        try:
            for pair in self._numbered:
                with self._change:
                    (self._known if isinstance(pair, Known) else self._held).append(pair)
                    self._change.notify_all()
                    while self._full() and not self._closed:
                        self._change.wait()
                    if self._closed:
                        return
        except BaseException as e:  # raised again by take, in the caller's thread
            self._error = e
        finally:
            with self._change:
                self._ended = True
                self._change.notify_all()

    def _full(self) -> bool:
        return len(self._held) >= self.ahead or len(self._known) >= KNOWN_AHEAD
