"""Numbers of shards: a set and a queue that are as those of Python, in a few bytes a number."""

from __future__ import annotations

from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from gristmill.shards.numbers import NumberQueue, Numbers


@given(st.lists(st.integers(0, 3000)), st.integers(-5, 4000))
def test_the_set_is_a_set(added: list[int], asked: int) -> None:
    """Whatever is added, in any order, however often."""
    found, expected = Numbers(), set[int]()
    for number in added:
        found.add(number)
        expected.add(number)
        assert len(found) == len(expected)
    assert list(found) == sorted(expected)
    assert (asked in found) == (asked in expected) and "1" not in found


@given(st.lists(st.integers(0, 50)), st.lists(st.integers(-9, 60), max_size=40))
def test_the_queue_is_a_queue(numbers: list[int], steps: list[int]) -> None:
    """Taken from any place, put back to the front: as with a deque."""
    found, expected = NumberQueue(numbers), deque(numbers)
    for step in steps:
        if step < 0:
            found.put_first(-step)
            expected.appendleft(-step)
        elif expected:
            at = step % len(expected)
            assert found.take(at) == expected[at]
            del expected[at]
        assert [found[n] for n in range(len(found))] == list(expected)
        assert (3 in found) == (3 in expected)
