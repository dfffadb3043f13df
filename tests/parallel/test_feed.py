"""The feed of a parallel map, alone: every input once, whatever workers do; in bounded steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.parallel.calling import Answers, Some
from gristmill.parallel.inputfeed import CHUNK_BYTES, LOST, ORDERED_AHEAD, CallFeed
from gristmill.parallel.inputs import Inputs
from gristmill.parallel.pickles import Bundle
from gristmill.parallel.transport import Fault
from gristmill.process.messages import DONE, WAIT, Death, Failure, Item, Outcome


def answers(numbers: list[int], faults: list[int] = (), seconds: float = 0.001) -> Answers:  # type: ignore[assignment]
    """What a worker would send: the number itself as the result."""
    fault = Fault(Failure("other", "ValueError", "bad"))
    bundle = Bundle(None)
    for number in numbers:
        bundle.add(number)
    return Answers(tuple(numbers), bundle.parcel(), tuple((n, fault) for n in faults), seconds)


@settings(max_examples=200, deadline=None)
@given(data=st.data(), total=st.integers(0, 60), workers=st.integers(1, 4), ordered=st.booleans())
def test_every_input_ends_once(data: st.DataObject, total: int, workers: int, ordered: bool) -> None:
    """Results, failures, deaths and lost machines in any order: each input has exactly one result in the end."""
    retries = data.draw(st.integers(0, 2))
    inputs = Inputs(enumerate(range(total)), total)
    feed = CallFeed(inputs, workers, None, retries, ordered=ordered)
    held: dict[str, list[Item]] = {f"w{n}": [] for n in range(workers)}
    found: list[int] = []
    for _ in range(4000):
        for name, items in held.items():
            while len(items) < 2 and isinstance(item := feed.take(name), Item):
                items.append(item)
        busy = [name for name, items in held.items() if items]
        if not busy:
            if feed.take("w0") is DONE:
                break
            continue
        name = data.draw(st.sampled_from(busy))
        item = held[name][0]
        numbers = list(item.value.numbers)
        what = data.draw(st.sampled_from(["all", "all", "all", "some", "fail", "die", "lost"]))
        if what == "die" or what == "lost":
            keys = tuple(i.key for i in held[name])
            lost = "its node went away" if what == "lost" else ""
            found += [r.number for r in feed.on(Death(name, keys, "", None, 9, True, lost))]
            held[name].clear()
        elif what == "some":
            found += [r.number for r in feed.on(Some(name, item.key, answers(numbers[: len(numbers) // 2])))]
        else:
            bad = numbers[-1:] if what == "fail" else []
            good = [n for n in numbers if n not in bad]
            found += [r.number for r in feed.on(Outcome(name, item.key, answers(good, bad)))]
            held[name].pop(0)
    assert feed.fatal is None
    assert sorted(found) == list(range(total))


def test_near_the_end_everybody_gets_a_share() -> None:
    """Quick calls make large chunks, but the last inputs are shared out."""
    feed = CallFeed(Inputs(enumerate(range(1000)), 1000), 2)
    sizes = []
    while isinstance(item := feed.take("w0"), Item):
        numbers = list(item.value.numbers)
        sizes.append(len(numbers))
        list(feed.on(Outcome("w0", item.key, answers(numbers, seconds=1e-6))))
    assert sizes[0] == 1 and max(sizes) > 100 and sizes[-1] == 1
    assert sum(sizes) == 1000


def test_large_inputs_go_few_at_a_time() -> None:
    """However quick the calls are, a message holds some megabytes, not hundreds of them; also where all inputs are one
    object, which each gets for itself.
    """
    shared = [bytearray(1 << 20), [bytes(1 << 20)], (1, "a" * (1 << 20)), np.zeros(1 << 16)]
    feed = CallFeed(Inputs(((n, n if n < 500 else shared[n % 4]) for n in range(1000)), 1000), 2)
    sizes = []
    while isinstance(item := feed.take("w0"), Item):
        numbers = list(item.value.numbers)
        assert item.value.inputs.size <= CHUNK_BYTES + (2 << 20)
        sizes.append(len(numbers))
        list(feed.on(Outcome("w0", item.key, answers(numbers, seconds=1e-6))))
    assert sum(sizes) == 1000
    assert max(sizes) > 100


def test_order_bounds_what_is_held() -> None:
    """One slow input: others go on, but only so far."""
    feed = CallFeed(Inputs(enumerate(iter(int, 1)), None), 2, ordered=True)
    first = feed.take("w0")
    assert isinstance(first, Item)
    given = 0
    while isinstance(item := feed.take("w1"), Item):
        given += len(item.value.numbers)
        list(feed.on(Outcome("w1", item.key, answers(list(item.value.numbers), seconds=1.0))))
    assert item is WAIT
    assert ORDERED_AHEAD < given < 3 * ORDERED_AHEAD
    feed.inputs.close()


def test_a_machine_that_goes_away_blames_nobody_but_not_for_ever() -> None:
    """An input whose machine is lost is tried again without counting, a bounded number of times."""
    feed = CallFeed(Inputs(enumerate([5]), 1), 1)
    results: list[Any] = []
    for _ in range(LOST):
        item = feed.take("w0")
        assert isinstance(item, Item) and not results
        results += feed.on(Death("w0", (item.key,), "", None, None, True, "its node went away"))
    assert [r.fault.died for r in results] == [True]
    assert feed.take("w0") is DONE


@pytest.mark.parametrize(
    ("timed", "signal", "kind"), [(True, None, "CallTimeout"), (True, 9, "WorkerLost"), (False, None, "WorkerLost")]
)
def test_last_words_are_no_timeout_by_themselves(timed: bool, signal: int | None, kind: str) -> None:
    """Only a worker that ended by itself, in a map with a timeout, took too long."""
    feed = CallFeed(Inputs(enumerate([5]), 1), 1, timed=timed)
    item = feed.take("w0")
    assert isinstance(item, Item)
    code = 1 if signal is None else None
    (result,) = feed.on(Death("w0", (item.key,), "ReadError: Timeout (30 s)", code, signal, True))
    assert result.fault.failure.type == kind
