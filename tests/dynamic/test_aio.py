"""The asyncio form: coroutine functions on the caller's loop, plain ones in a thread, caches and strategies."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import gc
import importlib
import inspect
import pickle
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest

import gristmill as gm
from callers import eventually
from gristmill import aio, batched
from gristmill.dynamic.cache import AsyncCache
from gristmill.errors import CallTimeout, QueueFull

pytestmark = pytest.mark.timeout(60)


def both(function: Callable[[list[Any]], Any], **told: Any) -> list[Any]:
    """The function as a plain one and as a coroutine function, batched."""

    async def later(items: list[Any]) -> Any:
        await asyncio.sleep(0)
        return function(items)

    return [aio.dynamically(**told)(function), aio.dynamically(**told)(later)]


def test_gathered_calls_share_batches() -> None:
    """A hundred coroutines that are ready at once make two batches of 50, without a wait."""
    for function in both(lambda items: [2 * item for item in items], batch_size=50, timeout_ms=10_000):

        async def main(function: Any = function) -> list[int]:
            return list(await asyncio.wait_for(asyncio.gather(*(function(i) for i in range(100))), 20))

        assert asyncio.run(main()) == [2 * i for i in range(100)]
        assert function.stats.batch_sizes == {50: 2}


def test_items_lists_and_nothing() -> None:
    """As for threads."""
    for function in both(lambda items: [item + 1 for item in items], timeout_ms=1):
        assert asyncio.run(function(1)) == 2
        assert asyncio.run(function([3, 1, 2])) == [4, 2, 3]
        assert asyncio.run(function([])) == []
        assert asyncio.run(function.acall(5)) == 6
        assert inspect.iscoroutinefunction(function.__call__)


def test_timing() -> None:
    """A lone call waits for its timeout, and not at all without one; a full batch does not wait."""

    async def same(items: list[int]) -> list[int]:
        return items

    async def seconds(function: Any, calls: int) -> float:
        began = time.perf_counter()
        await asyncio.gather(*(function(i) for i in range(calls)))
        return time.perf_counter() - began

    async def main() -> None:
        patient, eager = aio.dynamically(batch_size=4, timeout_ms=100)(same), aio.dynamically(timeout_ms=0)(same)
        assert 0.099 < await seconds(patient, 1) < 1
        assert await seconds(patient, 4) < 0.09
        assert sorted([await seconds(eager, 1) for _ in range(100)])[50] < 0.02

    asyncio.run(main())


def test_one_batch_at_a_time_on_a_loop() -> None:
    """A function that awaits is not entered again before it is done."""
    running = 0
    most = 0

    async def serve(items: list[int]) -> list[int]:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.002)
        running -= 1
        return items

    function = aio.dynamically(batch_size=3, timeout_ms=0)(serve)

    async def main() -> None:
        await asyncio.gather(*(function([i] * (i % 7 + 1)) for i in range(20)))

    asyncio.run(main())
    assert most == 1


def test_a_plain_function_does_not_block_the_loop() -> None:
    """It runs in a thread; the loop goes on meanwhile."""

    @aio.dynamically(timeout_ms=0)
    def slow(items: list[int]) -> list[str]:
        time.sleep(0.1)
        return [threading.current_thread().name] * len(items)

    async def main() -> int:
        call = asyncio.ensure_future(slow(1))
        beats = 0
        while not call.done():
            await asyncio.sleep(0.005)
            beats += 1
        assert call.result() == "gristmill slow"
        return beats

    assert asyncio.run(main()) > 5


def test_time_limits_and_refusals() -> None:
    """CallTimeout and QueueFull under the asyncio driver; the next calls are served."""

    async def slow(items: list[float]) -> list[float]:
        await asyncio.sleep(max(items))
        return items

    function = aio.dynamically(batch_size=1, timeout_ms=0, max_queue=1, when_full="refuse")(slow)

    async def main() -> None:
        first = asyncio.ensure_future(function(0.1))
        await asyncio.sleep(0.01)
        second = asyncio.ensure_future(function(0.0, timeout=0.02))
        await asyncio.sleep(0)
        with pytest.raises(QueueFull):
            await function(0.0)
        with pytest.raises(CallTimeout):
            await second
        assert await first == 0.1
        assert await function(0.0) == 0.0
        stats = function.stats
        assert (stats.total_dropped, stats.total_refused, stats.total_processed) == (1, 1, 2)

    asyncio.run(main())


def test_callers_variables_do_not_leak_into_the_function() -> None:
    """A batch belongs to nobody in particular, so it sees no context of whoever came first."""
    user: contextvars.ContextVar[str] = contextvars.ContextVar("user", default="nobody")

    async def who(items: list[int]) -> list[str]:
        await asyncio.sleep(0)
        return [user.get()] * len(items)

    for function in (aio.dynamically(timeout_ms=1)(who), aio.dynamically(lambda items: [user.get()] * len(items))):

        async def main(function: Any = function) -> Any:
            user.set("somebody")
            return await function(1)

        assert asyncio.run(main()) == "nobody"


def test_methods_are_collected_with_their_instance() -> None:
    """Coroutine methods have a queue an instance, too."""

    class Scorer:
        @aio.dynamically
        async def score(self, items: list[int]) -> list[int]:
            return [id(self)] * len(items)

    async def main() -> None:
        one, two = Scorer(), Scorer()
        assert await asyncio.gather(one.score(1), two.score(1)) == [id(one), id(two)]
        gone = weakref.ref(one)
        del one
        gc.collect()
        assert gone() is None
        assert await two.score(2) == id(two)

    asyncio.run(main())


class Memory:
    """A cache as `cache=` takes it, which counts."""

    def __init__(self) -> None:
        self.kept: dict[Any, Any] = {}
        self.asked: list[Any] = []

    async def get(self, key: Any) -> Any:
        self.asked.append(key)
        return self.kept.get(str(key))

    async def set(self, key: Any, value: Any) -> None:
        self.kept[str(key)] = value

    async def clear(self) -> None:
        self.kept.clear()

    def stats(self) -> int:
        return len(self.asked)


def test_a_cache_is_asked_first() -> None:
    """Each item once; only what it does not hold reaches the function; its figures are among the stats."""
    cache: AsyncCache = Memory()
    seen: list[int] = []

    @aio.dynamically(cache=cache, timeout_ms=1)
    async def square(items: list[int]) -> list[int]:
        seen.extend(items)
        return [item**2 for item in items]

    async def main() -> None:
        assert await square([1, 2]) == [1, 4]
        await asyncio.sleep(0.01)
        assert await square([3, 2, 1]) == [9, 4, 1]
        await asyncio.sleep(0.01)
        assert await square(3) == 9

    asyncio.run(main())
    assert seen == [1, 2, 3]
    assert square.stats.cache_stats == 6
    assert square.stats.snapshot()["cache_stats"] == "6"


@pytest.mark.parametrize("features", [False, True])
def test_a_cache_tells_instances_apart(features: bool) -> None:
    """A method's answers are its instance's, also where a new one has the place in memory of one that is gone."""
    memory = Memory()

    class Scaled:
        def __init__(self, factor: int) -> None:
            self.factor = factor

        @aio.dynamically(cache=memory, timeout_ms=0)
        async def item(self, items: list[int]) -> list[int]:
            return [item * self.factor for item in items]

        @aio.inference.dynamically(cache=memory, timeout_ms=0)
        async def row(self, features: Any) -> np.ndarray:
            return features["x"] * self.factor

        @aio.dynamically(cache=memory, timeout_ms=0)
        @classmethod
        async def named(cls, items: list[int]) -> list[str]:
            return [cls.__name__ for _ in items]

    class Other(Scaled):
        pass

    async def answered(one: Scaled) -> int:
        found = await (one.row(x=np.array([7])) if features else one.item(7))
        await asyncio.sleep(0.001)
        return int(found[0]) if features else found

    async def main() -> None:
        kept = [Scaled(1), Scaled(100)]
        for _ in range(2):
            assert [await answered(one) for one in kept] == [7, 700]
            assert [await kind.named(7) for kind in (Scaled, Other)] == ["Scaled", "Other"]
        assert len(memory.kept) == 4
        for factor in range(20):
            assert await answered(Scaled(factor)) == 7 * factor

    asyncio.run(main())


def test_a_cache_written_for_the_original_library() -> None:
    """Generic, told apart by isinstance, with statistics of its own; and all of the other names of that module."""
    from gristmill.batched import types

    class Memory(types.AsyncCache[str, int]):
        def __init__(self) -> None:
            self.held: dict[str, int] = {}
            self.counted = types.CacheStats()

        async def get(self, key: str) -> int | None:
            self.counted.update_get(hit=key in self.held, time_taken=0.5)
            return self.held.get(key)

        async def set(self, key: str, value: int) -> None:
            self.held[key] = value
            self.counted.update_set(time_taken=0.25)

        async def clear(self) -> None:
            self.held.clear()

        def stats(self) -> types.CacheStats:
            return self.counted

    async def main() -> None:
        assert [await function("four"), await function("four")] == [4, 4]

    cache = Memory()
    function = aio.dynamically(lambda items: [len(item) for item in items], cache=cache, timeout_ms=0)
    asyncio.run(main())
    told = function.stats.cache_stats
    assert (told.gets, told.hits, told.sets, told.avg_get_time, told.avg_hit_time) == (2, 1, 1, 0.5, 0.5)
    assert function.stats.snapshot()["cache_stats"]["total_set_time"] == 0.25
    assert isinstance(cache, types.AsyncCache) and not isinstance(object(), types.AsyncCache)
    assert types.BatchFunc[int, str] and types.Feature[np.ndarray] and types.BatchInfer
    original = pytest.importorskip("batched.types")
    ours = vars(types)
    public = {n for n, v in vars(original).items() if getattr(v, "__module__", "") == "batched.types" and n[0] != "_"}
    assert public <= set(ours), public - set(ours)


def test_a_cache_for_features() -> None:
    """Keys are a row's features; outputs come back stacked, cached or not."""
    seen: list[int] = []

    @aio.inference.dynamically(cache=Memory(), timeout_ms=1)
    def double(features: dict[str, np.ndarray]) -> np.ndarray:
        seen.append(len(features["x"]))
        return features["x"] * 2

    async def main() -> None:
        assert (await double(x=np.array([[1], [2]]))).tolist() == [[2], [4]]
        await asyncio.sleep(0.01)
        assert (await double(x=np.array([[2], [3]]))).tolist() == [[4], [6]]

    asyncio.run(main())
    assert seen == [2, 1]


def test_a_cache_that_fails() -> None:
    """An error of `get` is the caller's; an error of `set` is reported by asyncio, and the result is there."""

    class Broken(Memory):
        async def get(self, key: Any) -> Any:
            if key == "bad":
                raise OSError("no cache")

        async def set(self, key: Any, value: Any) -> None:
            raise OSError("full")

    function = aio.dynamically(lambda items: items, cache=Broken(), timeout_ms=1)

    async def main() -> None:
        reports: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, report: reports.append(report["exception"]))
        assert await function("good") == "good"
        with pytest.raises(OSError, match="no cache"):
            await function("bad")
        for _ in range(100):
            gc.collect()
            await asyncio.sleep(0.01)
            if reports:
                break
        assert [str(report) for report in reports] == ["full"]

    asyncio.run(main())


def test_strategies() -> None:
    """none: as they come; priority: small calls first; length: and the items of large ones shortest first."""
    expected = {
        "none": ["cccc", "aa", "b", "dddd", "x"],
        "priority": ["cccc", "x", "aa", "b", "dddd"],
        "length": ["cccc", "x", "b", "aa", "dddd"],
    }
    for name, order in expected.items():
        for strategy in (name, batched.types.PriorityStrategy[name.upper()]):
            seen: list[str] = []
            all_asked = asyncio.Event()  # the first batch holds the function until every call is waiting

            async def serve(items: list[str], seen: list[str] = seen, ready: asyncio.Event = all_asked) -> list[str]:
                await ready.wait()
                seen.extend(items)
                return items

            function = aio.dynamically(batch_size=1, timeout_ms=0, small_batch_threshold=1, priority_strategy=strategy)(
                serve
            )

            async def main(function: Any = function, ready: asyncio.Event = all_asked) -> None:
                calls = []
                for given in ("cccc", ["aa", "b", "dddd"], "x"):
                    calls.append(asyncio.ensure_future(function(given)))
                    await asyncio.sleep(0.01)
                ready.set()
                assert await asyncio.gather(*calls) == ["cccc", ["aa", "b", "dddd"], "x"]

            asyncio.run(main())
            assert seen == order, name


def test_max_batch_length() -> None:
    """The sum of the items' lengths; items without one count as one."""
    seen: list[Any] = []
    function = aio.dynamically(lambda items: seen.append(items) or items, max_batch_length=5, timeout_ms=1)
    assert asyncio.run(function(["aaa", "bb", "cccc", "d", 7])) == ["aaa", "bb", "cccc", "d", 7]
    assert seen == [["aaa", "bb"], ["cccc", "d"], [7]]


def test_all_names_of_the_original_are_there() -> None:
    """As attributes and as modules."""
    import gristmill.batched.aio.inference
    import gristmill.batched.inference
    from gristmill.batched.aio import inference as nested
    from gristmill.batched.types import PriorityStrategy

    assert batched.aio.inference is nested is gristmill.batched.aio.inference
    assert batched.aio.dynamically is aio.dynamically
    assert batched.aio.inference.dynamically is aio.inference.dynamically
    assert batched.inference.dynamically is gristmill.inference.dynamically
    assert batched.dynamically is gristmill.dynamically
    assert PriorityStrategy.NONE is not PriorityStrategy.LENGTH
    for place in ("batched", "batched.aio", "batched.inference", "batched.aio.inference"):
        theirs, ours = (importlib.import_module(name) for name in (place, f"gristmill.{place}"))
        assert set(theirs.__all__) <= set(ours.__all__), place
    theirs, ours = importlib.import_module("batched.utils"), importlib.import_module("gristmill.batched.utils")
    made = [n for n, v in vars(theirs).items() if getattr(v, "__module__", "") == "batched.utils" and len(n) > 1]
    assert made and set(made) <= set(ours.__all__)


def test_processors_made_by_their_classes() -> None:
    """With the original's signatures, by position and by name; what the decorators return is of these classes."""
    made = batched.BatchProcessor(lambda items: [2 * x for x in items], 16, 1.0, 4)
    assert (made(3), made([1, 2]), asyncio.run(made.acall(4))) == (6, [2, 4], 8)
    assert made.stats.total_processed == 4
    made.start()
    made.shutdown()
    with pytest.raises(gm.BatcherClosed):
        made(1)

    async def later(items: list[int]) -> list[int]:
        return [3 * x for x in items]

    for function in (later, lambda items: [3 * x for x in items]):
        strategy = batched.types.PriorityStrategy.LENGTH
        many = batched.aio.AsyncBatchProcessor(
            func=function, batch_size=8, timeout_ms=1, small_batch_threshold=2, cache=None, max_batch_length=None,
            priority_strategy=strategy,
        )  # fmt: skip
        assert asyncio.run(many([1, 2])) == [3, 6]
        many.clear_stats()
        assert many.stats.total_batches == 0

    def double(x: np.ndarray) -> np.ndarray:
        return x * 2

    told: dict[str, Any] = {"batch_size": 8, "timeout_ms": 1, "pad_tokens": {"x": 7}, "spread_kwargs": True}
    model = batched.inference.ModelBatchProcessor(double, padding_side="left", **told)
    assert model(x=np.array([[1], [2]])).tolist() == [[2], [4]]
    slow = batched.aio.inference.AsyncModelBatchProcessor(double, max_batch_length=64, **told)
    assert asyncio.run(slow({"x": np.array([[1, 2]])})).tolist() == [[2, 4]]
    assert pickle.loads(cloudpickle.dumps(made)).stats.total_processed == 0

    pairs: list[tuple[Any, type]] = [
        (batched.dynamically, batched.BatchProcessor),
        (batched.aio.dynamically, batched.aio.AsyncBatchProcessor),
        (batched.inference.dynamically, batched.inference.ModelBatchProcessor),
        (batched.aio.inference.dynamically, batched.aio.inference.AsyncModelBatchProcessor),
    ]
    for decorator, kind in pairs:
        assert type(decorator(double)) is kind

    class Louder(batched.BatchProcessor[int, int]):
        """A form of one's own."""

        def __init__(self, by: int) -> None:
            super().__init__(lambda items: [by * x for x in items], batch_size=4, timeout_ms=0)

    assert Louder(5)([1, 2]) == [5, 10]


def test_functions_of_utils(tmp_path: Path) -> None:
    """They give what the original's give."""
    theirs, ours = importlib.import_module("batched.utils"), importlib.import_module("gristmill.batched.utils")
    words = ["aaa", "b", "cccc", "dd", ""]
    for size in (1, 2, 5, 9):
        assert list(ours.batch_iter(words, size)) == list(theirs.batch_iter(words, size))
        for longest in (1, 4, 100):
            assert list(ours.batch_iter_by_length(words, longest, size)) == list(
                theirs.batch_iter_by_length(words, longest, size)
            )
        for data in (words, []):
            for way in (True, False):
                assert list(ours.bucket_batch_iter(data, size, descending=way)) == list(
                    theirs.bucket_batch_iter(data, size, descending=way)
                )
    for function in (len, theirs.AsyncDiskCache._set, lambda cls: cls):
        assert ours.is_method(function) == theirs.is_method(function)
    assert asyncio.run(ours.ensure_async(len)("abc")) == 3
    cache = pytest.importorskip("diskcache") and ours.AsyncDiskCache(str(tmp_path), collect_stats=True)
    function = aio.dynamically(lambda items: [len(item) for item in items], cache=cache, timeout_ms=0)
    assert [asyncio.run(function("four")) for _ in range(2)] == [4, 4]
    assert (cache.stats().hits, function.stats.total_processed) == (1, 1)


def test_a_missing_package_is_named() -> None:
    """`ensure_import` says how to install it."""
    ours = importlib.import_module("gristmill.batched.utils")
    with pytest.raises(ImportError, match="pip install this"), ours.ensure_import("this"):
        import nowhere_to_be_found  # type: ignore[import-not-found]  # noqa: F401


def test_lanes_of_loops_that_are_gone_are_forgotten() -> None:
    """Their figures are kept, their loops are not."""

    async def same(items: list[int]) -> list[int]:
        return items

    function = aio.dynamically(timeout_ms=0)(same)
    gone: list[weakref.ref[Any]] = []

    async def main() -> None:
        gone.append(weakref.ref(asyncio.get_running_loop()))
        await function(1)

    for _ in range(5):
        asyncio.run(main())
    assert eventually(lambda: gc.collect() >= 0 and sum(ref() is not None for ref in gone) <= 1)
    assert function.stats.total_processed == 5


def test_partials_and_callable_objects() -> None:
    """A coroutine function is known behind them."""

    class Later:
        async def __call__(self, items: list[int]) -> list[int]:
            return items

    async def add(more: int, items: list[int]) -> list[int]:
        return [item + more for item in items]

    assert asyncio.run(aio.dynamically(Later(), timeout_ms=0)(1)) == 1
    assert asyncio.run(aio.dynamically(functools.partial(add, 5), timeout_ms=0)([1, 2])) == [6, 7]
