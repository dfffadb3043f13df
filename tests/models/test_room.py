"""How many requests are in flight, against simulated endpoints."""

from __future__ import annotations

import heapq
import random

import pytest

from gristmill.models.addresses import LONG, Addresses
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


def busy(
    room: Room, chance: float, after: float | None, refuses: int | None = None, most: float = 60.0
) -> tuple[float, int, bool]:
    """An address that puts requests off by chance, or beside `refuses` others, each answered in 0.05 s or refused in a
    fifth of that: answers a second over `most` seconds, how many were refused, and whether all were ever to wait.
    """
    addresses, drawn, flying = Addresses(["http://host/v1"], 30.0), random.Random(1), []
    (address,) = addresses
    now, answered, refused, rested = 0.0, 0, 0, False
    while now < most:
        while len(flying) < room.limit and addresses.free(now):
            own, full = addresses.sends(address), refuses is not None and len(flying) >= refuses
            off = full or drawn.random() < chance
            took = (0.01 if off else 0.05) * drawn.uniform(0.7, 1.3)
            heapq.heappush(flying, (now + took, now, len(flying) + answered + refused, off, own))
            address.flying += 1
        if not flying:
            now += 0.01
            continue
        now, begun, _, off, own = heapq.heappop(flying)
        address.flying -= 1
        addresses.over(address, own)
        if not off:
            answered += 1
            addresses.answered(address, begun)
            room.answered(now, len(flying) + 1)
            continue
        refused += 1
        if addresses.failed(address, now, begun, after, full=True):
            room.refused(now, begun)
        rested |= addresses.rest(now) > 0
    return answered / now, refused, rested


@pytest.mark.parametrize("chance", [0.03, 0.1])
def test_what_is_refused_by_chance_lowers_nothing(chance: float) -> None:
    """A few, whatever is in flight, with a short pause: each waits alone, and more are in flight where that helps."""
    room = Room(256, auto=True)
    answers, _, rested = busy(room, chance, 0.2, most=12.0)
    assert room.limit > 2 * FIRST and answers > 10 * FIRST and not rested


def test_a_long_pause_is_everybodys() -> None:
    """Also after a single request."""
    assert busy(Room(256, auto=True), 0.001, LONG + 1)[2]


@pytest.mark.parametrize("after", [None, 0.2])
def test_a_limit_of_requests_at_once_is_kept_to(after: float | None) -> None:
    """Nearly all that it allows is used, few are refused, and it is found again after each attempt to do better."""
    room = Room(256, auto=True)
    answers, refused, _ = busy(room, 0.0, after, refuses=8)
    assert answers > 0.8 * 8 / 0.05 and refused < 0.03 * 60 * answers and room.limit <= 10
