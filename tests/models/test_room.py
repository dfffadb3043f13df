"""How many requests are in flight, against simulated endpoints."""

from __future__ import annotations

import heapq
import random

import pytest

from gristmill.models.room import FIRST, Room


def simulated(room: Room, capacity: int, seconds: float, refuses: int | None = None, rows: int = 20_000) -> float:
    """Answers a second from an endpoint that works at `capacity` requests at a time, each taking `seconds` alone and
    longer beside more; it refuses requests beside `refuses` others.
    """
    drawn = random.Random(1)
    now, answered, flying = 0.0, 0, []
    while answered < rows and now < 1000:
        while len(flying) < room.limit:
            busy = refuses is not None and len(flying) >= refuses
            took = seconds * max(1.0, (len(flying) + 1) / capacity) * drawn.uniform(0.7, 1.3)
            heapq.heappush(flying, (now + (0.01 if busy else took), now, busy))
        end, begun, busy = heapq.heappop(flying)
        now = max(now, end)
        if busy:
            room.refused(now, begun)
        else:
            answered += 1
            room.answered(now, len(flying) + 1)
    return answered / now


@pytest.mark.parametrize("capacity", [1, 4, 16, 50, 100])
@pytest.mark.parametrize("seconds", [0.05, 1.0])
def test_as_many_as_help(capacity: int, seconds: float) -> None:
    """Near the most that the endpoint can do, without many more in flight than it works at."""
    room = Room(256, auto=True)
    assert simulated(room, capacity, seconds) >= 0.8 * capacity / seconds
    assert room.limit <= max(2 * FIRST, 2.6 * capacity)


def test_fewer_once_it_is_too_much() -> None:
    """Near what the endpoint takes, and seldom refused; a given number stays."""
    room = Room(256, auto=True)
    simulated(room, 1000, 0.05, refuses=60)
    assert 20 <= room.limit <= 66
    fixed = Room(100, auto=False)
    fixed.refused(1.0, 0.5)
    assert fixed.limit == 100


def test_what_is_not_used_does_not_rise() -> None:
    """Where there is not enough to do, more room says nothing."""
    room = Room(256, auto=True)
    for n in range(2000):
        room.answered(n / 10, 3)
    assert room.limit == FIRST
