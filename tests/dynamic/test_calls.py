"""Calls of a batched function from threads: who gets what, in which batches, and what the figures say about it."""

from __future__ import annotations

import asyncio
import copy
import functools
import gc
import json
import math
import pickle
import threading
import time
import weakref
from collections.abc import Callable
from itertools import chain
from typing import Any

import cloudpickle
import numpy as np
import pytest

import gristmill
from callers import at_once, eventually
from gristmill.dynamic.decorator import dynamically

pytestmark = pytest.mark.timeout(60)


@dynamically(batch_size=4)
def lengths(texts: list[str]) -> list[int]:
    """Counts letters."""
    return [len(text) for text in texts]


class Scorer:
    """Counts, for each instance, the batches that it was given."""

    def __init__(self, factor: int) -> None:
        self.factor = factor
        self.batches: list[list[int]] = []

    @dynamically(timeout_ms=1)
    def score(self, items: list[int]) -> list[int]:
        self.batches.append(items)
        return [item * self.factor for item in items]

    @dynamically
    @staticmethod
    def inner_static(items: list[int]) -> list[int]:
        return [item + 1 for item in items]

    @staticmethod
    @dynamically
    def outer_static(items: list[int]) -> list[int]:
        return [item + 2 for item in items]

    @dynamically
    @classmethod
    def inner_class(cls, items: list[int]) -> list[str]:
        return [f"{cls.__name__}{item}" for item in items]

    @classmethod
    @dynamically
    def outer_class(cls, items: list[int]) -> list[str]:
        return [f"{cls.__name__}{item}" for item in items]


class Better(Scorer):
    """Inherits its batched methods."""


def test_one_item_gives_one_result_and_a_list_gives_a_list() -> None:
    """In the order of the list, whatever batches it was cut into; other sequences are items."""
    assert gristmill.dynamically is dynamically
    assert lengths("four") == 4
    assert lengths(["a", "bb", "ccc", "dddd", "eeeee"]) == [1, 2, 3, 4, 5]
    assert lengths([]) == []
    assert lengths(("a", "b", "c")) == 3
    assert asyncio.run(lengths.acall(["a", "bb"])) == [1, 2]
    assert asyncio.run(lengths.acall("a")) == 1
    assert asyncio.run(lengths.acall([])) == []


def test_it_looks_like_the_function() -> None:
    """Name, docstring and the function itself stay within reach."""
    assert (lengths.__name__, lengths.__doc__) == ("lengths", "Counts letters.")
    assert lengths.__wrapped__(["abc"]) == [3]
    assert "lengths" in repr(lengths)


def test_concurrent_calls_share_batches() -> None:
    """Sixteen threads, batches of sixteen: one call of the function, and each its own result."""
    batches: list[int] = []

    @dynamically(batch_size=16, timeout_ms=2000)
    def double(items: list[int]) -> list[int]:
        batches.append(len(items))
        return [2 * item for item in items]

    assert at_once([functools.partial(double, i) for i in range(16)]) == [2 * i for i in range(16)]
    assert batches == [16]


def test_threads_and_loops_share_batches() -> None:
    """`acall` from several loops and plain calls meet in one queue."""

    @dynamically(batch_size=6, timeout_ms=2000)
    def double(items: list[int]) -> list[int]:
        return [2 * item for item in items]

    async def two(item: int) -> list[int]:
        return list(await asyncio.gather(double.acall(item), double.acall(item + 1)))

    calls = [lambda: double(1), lambda: double([2, 3]), lambda: asyncio.run(two(4)), lambda: double(6)]
    assert at_once(calls) == [2, [4, 6], [8, 10], 12]
    assert double.stats.batch_sizes == {6: 1}


def test_a_full_batch_does_not_wait() -> None:
    """With a timeout of 20 s, the last of eight callers sets all of them going."""

    @dynamically(batch_size=8, timeout_ms=20_000)
    def same(items: list[int]) -> list[int]:
        return items

    began = time.monotonic()
    assert at_once([functools.partial(same, i) for i in range(8)]) == list(range(8))
    assert time.monotonic() - began < 5


def test_a_partial_batch_leaves_after_its_timeout() -> None:
    """Not before, and measured from the call."""

    @dynamically(batch_size=8, timeout_ms=100)
    def when(items: list[int]) -> list[float]:
        return [time.monotonic()] * len(items)

    for _ in range(3):
        began = time.monotonic()
        assert 0.099 < when(1) - began < 1.0


def test_an_idle_function_without_timeout_starts_at_once() -> None:
    """A lone call with timeout_ms=0 takes a fraction of a millisecond."""

    @dynamically(timeout_ms=0)
    def same(items: list[int]) -> list[int]:
        return items

    def once() -> float:
        began = time.perf_counter()
        same(1)
        return time.perf_counter() - began

    assert sorted(once() for _ in range(200))[100] < 0.002


@pytest.mark.parametrize("answer", [list, tuple, np.array, iter, lambda items: (item for item in items)])
def test_results_may_come_in_any_sequence(answer: Callable[[list[int]], Any]) -> None:
    """Tuples, arrays, generators."""
    assert dynamically(lambda items: answer(items))([3, 1, 2]) == [3, 1, 2]  # noqa: PLW0108 (iter has no signature)


def test_the_function_may_do_what_it_likes_with_its_list() -> None:
    """Its list of items is its own, and so is the caller's."""

    @dynamically(retry_alone=True)
    def eat(items: list[int]) -> list[int]:
        results = [-item for item in items]
        items.clear()
        return results

    mine = [1, 2, 3]
    assert eat(mine) == [-1, -2, -3]
    assert mine == [1, 2, 3]


def test_each_instance_has_a_queue_of_its_own() -> None:
    """Methods see their own instance, equal or unhashable ones too, and never another's items."""

    class Twin(Scorer):
        __hash__ = None  # type: ignore[assignment]

        def __eq__(self, other: object) -> bool:
            return True

    one, two = Twin(1), Twin(10)
    calls = [functools.partial(scorer.score, i) for i in range(10) for scorer in (one, two)]
    assert at_once(calls) == [i * factor for i in range(10) for factor in (1, 10)]
    assert sorted(chain(*one.batches)) == sorted(chain(*two.batches)) == list(range(10))
    assert one.score.stats.total_processed == 10


def test_static_and_class_methods_in_either_order() -> None:
    """And the class methods of a subclass see the subclass."""
    scorer = Better(2)
    for owner in (scorer, Better):
        assert owner.inner_static([1, 2]) == [2, 3]
        assert owner.outer_static(1) == 3
        assert owner.inner_class([1]) == ["Better1"]
        assert owner.outer_class(1) == "Better1"
    assert Scorer.inner_class(1) == "Scorer1"
    assert Scorer.score(Scorer(3), [1, 2]) == [3, 6]
    assert asyncio.run(scorer.inner_class.acall(7)) == "Better7"


def test_an_instance_can_be_copied_pickled_and_collected() -> None:
    """The queue is not part of the instance, and does not keep it alive."""
    scorer = Scorer(2)
    assert scorer.score(1) == 2
    assert set(vars(scorer)) == {"factor", "batches"}
    assert copy.deepcopy(scorer).score(4) == 8
    assert pickle.loads(pickle.dumps(scorer)).score(5) == 10
    assert pickle.loads(pickle.dumps(scorer.score))(6) == 12
    gone = weakref.ref(scorer)
    del scorer
    gc.collect()
    assert gone() is None


def test_a_bound_method_keeps_its_instance() -> None:
    """As ordinary bound methods do."""
    score = Scorer(5).score
    gc.collect()
    assert score([1, 2]) == [5, 10]
    assert Scorer(6).score(1) == 6


def test_an_instance_that_cannot_be_watched_is_named() -> None:
    """__slots__ without __weakref__: the error says what to add."""

    class Slotted:
        __slots__ = ("x",)

        @dynamically
        def score(self, items: list[int]) -> list[int]:
            return items

    with pytest.raises(TypeError, match="'__weakref__'"):
        Slotted().score(1)


def test_functions_can_be_pickled() -> None:
    """By name from a module, by value with cloudpickle from anywhere."""
    assert pickle.loads(pickle.dumps(lengths)) is lengths

    @dynamically(batch_size=3)
    def local(items: list[int]) -> list[int]:
        return [item + 1 for item in items]

    assert cloudpickle.loads(cloudpickle.dumps(local))([1, 2, 3, 4]) == [2, 3, 4, 5]


def test_small_calls_overtake_a_large_one() -> None:
    """One item does not wait for the thousand before it."""
    done: list[int] = []

    @dynamically(batch_size=10, timeout_ms=0, small_batch_threshold=4)
    def slow(items: list[int]) -> list[int]:
        time.sleep(0.002)
        done.extend(items)
        return items

    large = threading.Thread(target=slow, args=(list(range(1000)),))
    large.start()
    assert eventually(lambda: len(done) >= 20)
    slow(-1)
    large.join(30)
    assert done.index(-1) < 200
    assert [item for item in done if item >= 0] == list(range(1000))


def test_a_large_call_is_not_starved() -> None:
    """It ends while small calls keep coming, faster than they can be served."""

    @dynamically(batch_size=2, timeout_ms=0, small_batch_threshold=1)
    def slow(items: list[int]) -> list[int]:
        time.sleep(0.001)
        return items

    stop = threading.Event()

    def nag() -> None:
        while not stop.is_set():
            slow(0)

    naggers = [threading.Thread(target=nag, daemon=True) for _ in range(8)]
    for nagger in naggers:
        nagger.start()
    try:
        assert slow(list(range(50)), timeout=20) == list(range(50))
    finally:
        stop.set()
        for nagger in naggers:
            nagger.join(10)


def held() -> tuple[Any, threading.Event, list[list[Any]]]:
    """A batched function whose first batch waits for the event, and the batches it was given."""
    begin = threading.Event()
    batches: list[list[Any]] = []

    def serve(items: list[Any]) -> list[Any]:
        batches.append(items)
        begin.wait(20)
        return items

    return serve, begin, batches


def waits(function: Any, items: int) -> bool:
    return eventually(lambda: function.stats.queue_size == items)


def test_priority_of_a_call_and_of_an_item() -> None:
    """Lower goes first; a call's own word counts more than the function's."""
    serve, begin, batches = held()
    function = dynamically(batch_size=1, timeout_ms=0, priority=lambda item: item)(serve)
    threads = []
    for waiting, (item, told) in enumerate([(0, {}), (30, {}), (10, {}), ([25, 5], {}), (99, {"priority": -50})]):
        threads.append(threading.Thread(target=functools.partial(function, item, **told), daemon=True))
        threads[-1].start()
        assert eventually(lambda: batches) and waits(function, waiting + (waiting > 3) if waiting != 3 else 4)
    begin.set()
    for thread in threads:
        thread.join(20)
    assert batches == [[0], [99], [5], [10], [25], [30]]


def test_cost_bounds_a_batch() -> None:
    """A budget of letters; an item that is over it goes alone; `max_batch_cost` alone measures by length."""
    for told in ({"cost": len}, {}):
        serve, begin, batches = held()
        begin.set()
        function = dynamically(max_batch_cost=6, timeout_ms=50, **told)(serve)
        assert function(["aaa", "bbb", "cc", "dddddddd", "e"]) == ["aaa", "bbb", "cc", "dddddddd", "e"]
        assert batches == [["aaa", "bbb"], ["cc"], ["dddddddd"], ["e"]]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0])
def test_a_cost_or_priority_that_is_no_number_fails_its_own_call(bad: float) -> None:
    """With ValueError, before anything waits."""
    function = dynamically(cost=lambda item: item, max_batch_cost=5, timeout_ms=0)(lambda items: items)
    with pytest.raises(ValueError, match="cost of an item"):
        function(bad)
    if bad != -1.0:
        with pytest.raises(ValueError, match="priority"):
            function(1, priority=bad)
    assert function(1) == 1


def test_max_queue_waits() -> None:
    """Never more than two in the queue, and every call is answered."""
    seen: list[int] = []

    def serve(items: list[int]) -> list[int]:
        seen.append(function._batcher._thread_lane._policy.waiting)
        return items

    function = dynamically(batch_size=1, timeout_ms=0, max_queue=2)(serve)
    assert at_once([functools.partial(function, i) for i in range(30)]) == list(range(30))
    assert max(seen) <= 2


def test_max_queue_refuses() -> None:
    """QueueFull says how full; the others are answered, and refusals are counted."""
    serve, begin, batches = held()
    function = dynamically(batch_size=1, timeout_ms=0, max_queue=2, when_full="refuse")(serve)
    threads = [threading.Thread(target=function, args=(i,), daemon=True) for i in range(3)]
    for waiting, thread in enumerate(threads):
        thread.start()
        assert eventually(lambda: batches) and waits(function, waiting)
    with pytest.raises(RuntimeError, match="2 items wait, and max_queue=2") as caught:
        function(3)
    assert type(caught.value).__name__ == "QueueFull"
    begin.set()
    for thread in threads:
        thread.join(20)
    assert batches == [[0], [1], [2]]
    assert function.stats.total_refused == 1


def test_a_call_may_have_a_time_limit() -> None:
    """CallTimeout is a TimeoutError; what has not begun is not done; the function goes on and serves others."""
    serve, begin, batches = held()
    function = dynamically(batch_size=1, timeout_ms=0, timeout=0.05)(serve)
    for item in (1, 2):
        with pytest.raises(TimeoutError, match=r"0\.05 s"):
            function(item)
    with pytest.raises(TimeoutError, match=r"0\.01 s"):
        asyncio.run(function.acall(3, timeout=0.01))
    begin.set()
    assert function(4, timeout=math.inf) == 4
    assert batches == [[1], [4]]
    assert function.stats.total_dropped == 2
    with pytest.raises(ValueError, match="timeout is -1"):
        function(5, timeout=-1)


def test_stats_and_their_snapshot() -> None:
    """Counts, averages and histograms; plain values for JSON; a picture that does not change."""

    @dynamically(batch_size=4, timeout_ms=1)
    def slow(items: list[int]) -> list[int]:
        time.sleep(0.01)
        return [1 // item for item in items]

    assert slow([1] * 10) == [1] * 10
    with pytest.raises(ZeroDivisionError):
        slow(0)
    assert eventually(lambda: slow.stats.total_batches == 4)
    stats = slow.stats
    assert (stats.total_processed, stats.total_failed, stats.queue_size) == (11, 1, 0)
    assert stats.batch_sizes == {1: 1, 2: 1, 4: 2}
    assert stats.avg_batch_size == 11 / 4
    assert 0.01 <= stats.avg_processing_time < 1
    assert sum(stats.waiting_ms.values()) == 11
    assert sum(count for bound, count in stats.waiting_ms.items() if bound > 8) >= 6  # two batches were before them
    plain = json.loads(json.dumps(stats.snapshot()))
    assert plain["batch_sizes"] == {"1": 1, "2": 1, "4": 2}
    with pytest.raises(AttributeError):
        stats.queue_size = 3  # type: ignore[misc]
    slow.clear_stats()
    assert slow.stats.total_processed == 0
    assert stats.total_processed == 11


@pytest.mark.parametrize(
    ("told", "error"),
    [
        ({"batch_size": 0}, ValueError),
        ({"timeout_ms": -1}, ValueError),
        ({"cost": len}, ValueError),
        ({"cost": 3, "max_batch_cost": 3}, TypeError),
        ({"priority": 1}, TypeError),
        ({"when_full": "explode"}, ValueError),
        ({"max_queue": 0}, ValueError),
    ],
)
def test_options_that_cannot_be_are_refused_at_decoration(told: dict[str, Any], error: type[Exception]) -> None:
    """Not at the first call."""
    with pytest.raises(error):
        dynamically(**told)(lambda items: items)


def test_what_is_decorated_has_to_fit() -> None:
    """A coroutine function is sent to its own decorator, also behind a partial; what cannot be called is named."""

    async def later(items: list[int]) -> list[int]:
        return items

    for function in (later, functools.partial(later)):
        with pytest.raises(TypeError, match=r"gristmill\.aio\.dynamically"):
            dynamically(function)
    with pytest.raises(TypeError, match="cannot be called"):
        dynamically(3)  # type: ignore[call-overload]
    for call in (lambda: lengths(1, 2), lambda: lengths(object(), 2)):  # no method, which is called with its instance
        with pytest.raises(TypeError, match="lengths takes one item or a list of items, not 2 arguments"):
            call()
    with pytest.raises(TypeError, match=r"lengths takes one item or a list of items, by position, .* not items="):
        lengths(items=["a"])
    with pytest.raises(TypeError, match="one item or a list of items, not 0 arguments"):
        lengths()  # type: ignore[call-overload]


def test_nothing_heavy_is_imported() -> None:
    """Batching alone needs neither numpy nor torch, nor anything else that is installed."""
    import subprocess
    import sys

    program = (
        "import sys, gristmill, gristmill.batched, gristmill.aio.inference\n"
        "assert gristmill.dynamically(timeout_ms=0)(lambda items: items)([1, 2]) == [1, 2]\n"
        "print(sorted({'numpy', 'torch', 'pyarrow', 'cloudpickle'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")
