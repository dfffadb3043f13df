"""The inputs of a parallel map: a list, or any iterable, also an endless one, read only as far ahead as is needed."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

Numbered = tuple[int, Any]
PATIENCE = 0.02  # seconds that `take` waits for a slow iterator before it says "nothing yet"


class Inputs:
    """Numbered inputs, taken a few at a time. `total` is how many there are, None where only reading will tell.

    Where that is not known they are read by a thread of their own, so that results are not held up by a slow iterator;
    `ahead` inputs are read beyond what was taken.
    """

    def __init__(self, numbered: Iterable[Numbered], total: int | None) -> None:
        self.total = total
        self.ahead = 1
        self._numbered: Iterator[Numbered] = iter(numbered)
        self._held: deque[Numbered] = deque()
        self._change = threading.Condition()
        self._ended = self._closed = False
        self._error: BaseException | None = None
        self._taken = 0
        if self.total is None:
            threading.Thread(target=self._read, daemon=True, name="gristmill-inputs").start()

    def take(self, most: int) -> list[Numbered]:
        """At most `most` inputs; none where there is nothing yet, or nothing ever again. Raises what the iterator
        raised.
        """
        if self.total is not None:
            taken = [pair for _, pair in zip(range(most), self._numbered, strict=False)]
            self._ended = self._ended or len(taken) < most
            self._taken += len(taken)
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

    def wait(self) -> None:
        """Until there is an input, or it is known that there is none."""
        if self.total is None:
            with self._change:
                while not self._held and not self._ended:
                    self._change.wait(0.1)

    @property
    def ended(self) -> bool:
        """Whether all have been taken."""
        if self.total is not None:
            return self._taken >= self.total or self._ended
        with self._change:
            return self._ended and not self._held and self._error is None

    @property
    def left(self) -> int | None:
        """How many have not been taken, where that is known."""
        return None if self.total is None else self.total - self._taken

    def close(self) -> None:
        """Read no further."""
        with self._change:
            self._closed = True
            self._change.notify_all()

    def _read(self) -> None:
        try:
            for pair in self._numbered:
                with self._change:
                    self._held.append(pair)
                    self._change.notify_all()
                    while len(self._held) >= self.ahead and not self._closed:
                        self._change.wait()
                    if self._closed:
                        return
        except BaseException as e:  # raised again by take, in the caller's thread
            self._error = e
        finally:
            with self._change:
                self._ended = True
                self._change.notify_all()
