"""Numbers of shards, of which a run may have a million: a set that takes a byte for each, a queue that takes eight."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Iterator

import numpy as np


class Numbers(Collection[int]):
    """A set of numbers from 0 on, in ascending order, that only grows."""

    def __init__(self) -> None:
        self._held = bytearray()
        self._count = 0

    @classmethod
    def of(cls, numbers: np.ndarray) -> Numbers:
        """These numbers (int [n])."""
        found = cls()
        found._held = bytearray(np.bincount(numbers).astype(np.bool_).tobytes())
        found._count = sum(found._held)
        return found

    def add(self, number: int) -> None:
        """Add a number; nothing changes if it is there."""
        if number >= len(self._held):
            self._held.extend(bytes(max(number + 1, 2 * len(self._held)) - len(self._held)))
        self._count += not self._held[number]
        self._held[number] = 1

    def __contains__(self, number: object) -> bool:
        return isinstance(number, int) and 0 <= number < len(self._held) and bool(self._held[number])

    def __iter__(self) -> Iterator[int]:
        at = self._held.find(1)
        while at >= 0:
            yield at
            at = self._held.find(1, at + 1)

    def __len__(self) -> int:
        return self._count


class NumberQueue:
    """Numbers in a queue: taken from its front, or now and then from further back, and put back to the front."""

    def __init__(self, numbers: Iterable[int] = ()) -> None:
        self._held, self._start = array("q", numbers), 0

    def __len__(self) -> int:
        return len(self._held) - self._start

    def __getitem__(self, at: int) -> int:
        return self._held[self._start + at]

    def __contains__(self, number: int) -> bool:
        return number in self._held[self._start :]

    def take(self, at: int = 0) -> int:
        """Remove the number in that place, counted from the front, and return it."""
        start, place = self._start, self._start + at
        number = self._held[place]
        self._held[start + 1 : place + 1] = self._held[start:place]  # those before it: as a rule few, and none for 0
        self._start += 1
        return number

    def put_first(self, number: int) -> None:
        """Put a number in front of the others."""
        if self._start:
            self._start -= 1
            self._held[self._start] = number
        else:
            self._held.insert(0, number)
