"""The policy of dynamic batching, driven by a clock of the test's own."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.dynamic.admission import FOREVER, Admission, Batch, Entry, Rules, Wait


def entry(items: list[object] | int, arrived: float = 0.0, **told: object) -> Entry:
    made = Entry(list(range(items)) if isinstance(items, int) else items, arrived)
    for name, value in told.items():
        setattr(made, name, value)
    return made


def drained(policy: Admission, now: float = 1e6) -> list[list[object]]:
    batches = []
    while isinstance(step := policy.next(now), Batch):
        batches.append(step.items)
    return batches


def test_an_empty_queue_waits_for_ever() -> None:
    """Nothing to do is said as such."""
    assert Admission(Rules()).next(0.0) == FOREVER


def test_a_batch_leaves_at_once_when_it_is_full() -> None:
    """The item that fills it says so, and no time has to pass."""
    policy = Admission(Rules(batch_size=2, timeout=5.0))
    assert policy.offer(entry(1)) == 5.0
    assert policy.next(0.0) == Wait(5.0)
    assert policy.offer(entry(1)) == -math.inf
    assert isinstance(policy.next(0.0), Batch)
    assert policy.next(0.0) == FOREVER


def test_a_batch_leaves_when_its_oldest_item_has_waited_long_enough() -> None:
    """The timeout runs from the first arrival, not from when somebody looks."""
    policy = Admission(Rules(batch_size=8, timeout=5.0))
    policy.offer(entry(["a"], 10.0))
    policy.offer(entry(["b"], 14.0))
    assert policy.next(14.0) == Wait(1.0)
    step = policy.next(15.0)
    assert isinstance(step, Batch) and step.items == ["a", "b"]


def test_without_timeout_an_idle_function_waits_for_nobody() -> None:
    """timeout 0: whatever is there leaves as soon as it is asked for."""
    policy = Admission(Rules(batch_size=8, timeout=0.0))
    assert policy.offer(entry(["a"], 10.0)) == 10.0
    step = policy.next(10.0)
    assert isinstance(step, Batch) and step.items == ["a"]


def test_what_is_left_over_keeps_its_time_of_arrival() -> None:
    """A batch that takes half of a call does not make the other half wait anew."""
    policy = Admission(Rules(batch_size=2, timeout=5.0, small_batch_threshold=None))
    policy.offer(entry(3, 10.0))
    assert isinstance(policy.next(11.0), Batch)
    assert policy.next(11.0) == Wait(4.0)


def test_small_calls_go_first_and_large_ones_keep_a_quarter() -> None:
    """A stream of small calls does not starve a large one, even where a batch has one place."""
    for size in (1, 2, 8):
        policy = Admission(Rules(batch_size=size, timeout=0.0))
        policy.offer(entry(["large"] * 100, large=True))
        taken: list[object] = []
        for now in range(40):
            policy.offer(entry(["small"] * size, float(now)))
            step = policy.next(float(now))
            assert isinstance(step, Batch)
            taken += step.items
        assert taken.count("large") == pytest.approx(len(taken) / 4, abs=1)


def test_priority_is_a_matter_of_seconds() -> None:
    """Urgent items overtake, and late ones are overtaken, by as much as they say and no more."""
    policy = Admission(Rules(batch_size=10, timeout=0.0))
    policy.offer(entry(["plain"], 10.0))
    policy.offer(entry(["late"], 0.0, priority=15.0))
    policy.offer(entry(["urgent"], 12.0, priority=-5.0))
    policy.offer(entry(["new"], 16.0))
    assert drained(policy) == [["urgent", "plain", "late", "new"]]


def test_a_budget_fills_a_batch_before_its_places_do() -> None:
    """Sums of costs, or with padding the longest times the number; what is too dear for any batch goes alone."""
    plain = Admission(Rules(batch_size=10, timeout=9.0, max_cost=10))
    assert plain.offer(entry([5, 4], costs=[5, 4])) == 9.0
    assert plain.offer(entry([3, 50, 1], costs=[3, 50, 1])) == -math.inf
    assert drained(plain) == [[5, 4], [3], [50], [1]]
    padded = Admission(Rules(batch_size=10, timeout=9.0, max_cost=10, padded=True))
    padded.offer(entry([2, 2, 5, 1, 1], costs=[2, 2, 5, 1, 1]))
    assert drained(padded) == [[2, 2], [5, 1], [1]]


def test_a_full_queue_refuses_or_keeps_waiting_what_does_not_fit() -> None:
    """Refused entries were never there; others come in, in their order, as places become free."""
    refusing = Admission(Rules(batch_size=2, timeout=0.0, max_queue=3, refuse=True))
    assert refusing.offer(entry(3)) is not None
    assert refusing.offer(entry(1)) is None
    assert refusing.queued == 3
    keeping = Admission(Rules(batch_size=2, timeout=0.0, max_queue=3, small_batch_threshold=None))
    for name in "abcdef":
        keeping.offer(entry([name] * 2))
    assert (keeping.waiting, keeping.queued) == (2, 12)
    assert [batch[0] for batch in drained(keeping)] == list("abcdef")


def test_a_call_larger_than_the_queue_enters_an_empty_one() -> None:
    """It would wait for ever; where calls are refused, it is."""
    keeping = Admission(Rules(batch_size=4, max_queue=3))
    assert keeping.offer(entry(10)) == -math.inf
    assert Admission(Rules(batch_size=4, max_queue=3, refuse=True)).offer(entry(10)) is None


def test_dropped_items_take_no_place() -> None:
    """Neither in a batch nor in what counts as waiting, also when they were dropped from the middle."""
    policy = Admission(Rules(batch_size=2, timeout=5.0, max_queue=3))
    entries = [entry([name]) for name in "abcd"]
    for one in entries:
        policy.offer(one)
    policy.drop(entries[1])
    policy.drop(entries[1])
    assert policy.queued == policy.waiting == 3
    assert drained(policy) == [["a", "c"], ["d"]]
    late = entry(["e"], priority=3.0)
    policy.offer(late)
    policy.drop(late)
    assert policy.next(1e9) == FOREVER


@pytest.mark.parametrize(
    "wrong",
    [
        {"batch_size": 0},
        {"timeout": -0.001},
        {"timeout": math.inf},
        {"timeout": math.nan},
        {"max_cost": 0},
        {"max_queue": 0},
    ],
)
def test_rules_that_cannot_be_are_refused(wrong: dict[str, float]) -> None:
    """With the value in the message."""
    with pytest.raises(ValueError, match="is "):
        Rules(**wrong)  # type: ignore[arg-type]


steps = st.lists(
    st.tuples(
        st.sampled_from(["offer", "offer", "drop", "next"]),
        st.integers(1, 12),
        st.floats(-3, 3).map(lambda value: round(value, 1)),
        st.booleans(),
    ),
    max_size=60,
)
rules = st.builds(
    Rules,
    batch_size=st.integers(1, 9),
    timeout=st.sampled_from([0.0, 2.0]),
    max_cost=st.sampled_from([None, 7.0, 20.0]),
    padded=st.booleans(),
    max_queue=st.sampled_from([None, 4, 15]),
    refuse=st.booleans(),
)


@settings(max_examples=400, deadline=None)
@given(rules=rules, steps=steps)
def test_every_item_leaves_once_whatever_happens(rules: Rules, steps: list[tuple[str, int, float, bool]]) -> None:
    """Batches hold what was offered, each item once, in the order of its entry, within the rules; nothing is left."""
    policy = Admission(rules)
    alive: list[Entry] = []
    expected: dict[int, list[tuple[int, int]]] = {}
    left: list[tuple[int, int]] = []

    def check(step: Batch) -> None:
        assert 1 <= len(step.items) <= rules.batch_size
        costs = [e.costs[i] for e, start, stop in step.parts for i in range(start, stop)] if rules.max_cost else []
        spent = (max(costs) * len(costs) if rules.padded else sum(costs)) if costs else 0
        assert rules.max_cost is None or len(step.items) == 1 or spent <= rules.max_cost
        left.extend(step.items)

    for now, (kind, size, priority, large) in enumerate(steps):
        if kind == "offer":
            one = entry([(now, place) for place in range(size)], float(now), priority=priority, large=large)
            one.costs = [float((now + place) % 9 + 1) for place in range(size)]
            items = list(one.items)
            if policy.offer(one) is not None:
                alive.append(one)
                expected[now] = items  # type: ignore[assignment]
        elif kind == "drop" and alive:
            one = alive.pop(size % len(alive))
            gone = set(expected[int(one.arrived)][one.taken :])
            expected[int(one.arrived)] = [item for item in expected[int(one.arrived)] if item not in gone]
            policy.drop(one)
        elif isinstance(step := policy.next(float(now)), Batch):
            check(step)
        assert rules.max_queue is None or policy.waiting <= max(rules.max_queue, 12)
    while isinstance(step := policy.next(math.inf), Batch):
        check(step)
    assert policy.queued == 0
    assert sorted(left) == sorted(item for items in expected.values() for item in items)
    for arrived, items in expected.items():
        assert [item for item in left if item[0] == arrived] == items
