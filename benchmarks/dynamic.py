"""Dynamic batching against the original `batched`, in turns: medians, and ratios of what ran side by side.

    python benchmarks/dynamic.py [--rounds 5] [--seconds 2]

Every measurement is a process of its own, and the two libraries take turns, so that a busy machine slows both. The
batched function takes 2 ms whatever its batch, and leaves the processor alone meanwhile, as a model on a GPU does.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

FUNCTION_S = 0.002
BATCH = 64
LIBRARIES = {"gristmill": "gristmill.batched", "batched": "batched"}
BARE = "bare"  # what a coroutine function is measured with, too: see Bare


class Clocked:
    """A function of 2 ms a batch that notes when it began and ended."""

    def __init__(self) -> None:
        self.spans: list[tuple[float, float]] = []

    def __call__(self, items: list[Any]) -> list[Any]:
        began = time.perf_counter()
        time.sleep(FUNCTION_S)
        self.spans.append((began, time.perf_counter()))
        return items

    async def later(self, items: list[Any]) -> list[Any]:
        began = time.perf_counter()
        await asyncio.sleep(FUNCTION_S)
        self.spans.append((began, time.perf_counter()))
        return items

    def report(self, items: int, seconds: float, cpu: float) -> dict[str, float]:
        """Items a second; what each item took beside the function, in microseconds of time and of processor."""
        inside = sum(end - began for began, end in self.spans)
        return {
            "items_s": items / seconds,
            "overhead_us": (seconds - inside) / items * 1e6,
            "cpu_us": cpu / items * 1e6,
        }


class Bare:
    """The least that groups coroutines' calls: a list, a future a call, a task while there are any. It waits for no
    batch to fill, and knows no errors, cancelling, bounds, order or figures: what nothing that does can go beyond.
    """

    def __init__(self, function: Callable[[list[Any]], Any]) -> None:
        self._function = function
        self._waiting: list[tuple[Any, asyncio.Future[Any]]] = []
        self._task: asyncio.Task[None] | None = None

    async def __call__(self, item: Any) -> Any:
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        self._waiting.append((item, future))
        if self._task is None:
            self._task = loop.create_task(self._serve())
        return await future

    async def _serve(self) -> None:
        while self._waiting:
            batch = self._waiting[:BATCH]
            del self._waiting[:BATCH]
            rows = await self._function([item for item, _ in batch])
            for (_, future), row in zip(batch, rows, strict=True):
                future.set_result(row)
        self._task = None


def lone(library: Any, seconds: float, **told: Any) -> dict[str, float]:
    """Calls one after the other by a single thread; the function does nothing."""
    same = library.dynamically(**told)(lambda items: items)
    took = []
    stop = time.monotonic() + seconds
    while time.monotonic() < stop:
        began = time.perf_counter()
        same(1)
        took.append(time.perf_counter() - began)
    return {"p50_us": statistics.median(took) * 1e6}


def full(library: Any, seconds: float) -> dict[str, float]:
    """From the arrival of the item that fills a batch of 8 to the start of the function."""
    began = [0.0]
    arrived = [0.0] * 8

    def note(items: list[int]) -> list[int]:
        began[0] = time.perf_counter()
        return items

    same = library.dynamically(batch_size=8)(note)
    took: list[float] = []
    barrier = threading.Barrier(8, action=lambda: took.append(began[0] - max(arrived)) if began[0] else None)
    stop = time.monotonic() + seconds

    def ask(place: int) -> None:
        while time.monotonic() < stop or barrier.n_waiting:
            try:
                barrier.wait(1)
            except threading.BrokenBarrierError:
                return
            arrived[place] = time.perf_counter()
            same(place)

    _threads([lambda place=place: ask(place) for place in range(8)])  # type: ignore[misc]
    return {"p50_us": statistics.median(took) * 1e6, "p90_us": statistics.quantiles(took, n=10)[-1] * 1e6}


def threads(library: Any, seconds: float) -> dict[str, float]:
    """64 threads that call again as soon as they are answered."""
    clocked = Clocked()
    function = library.dynamically(batch_size=BATCH)(clocked)
    counts = [0] * 64
    stop = time.monotonic() + seconds

    def ask(place: int) -> None:
        while time.monotonic() < stop:
            function(place)
            counts[place] += 1

    began, cpu = time.perf_counter(), time.process_time()
    _threads([lambda place=place: ask(place) for place in range(64)])  # type: ignore[misc]
    return clocked.report(sum(counts), time.perf_counter() - began, time.process_time() - cpu)


def coroutines(call: Callable[[int], Any], clocked: Clocked, seconds: float) -> dict[str, float]:
    """1,000 coroutines that call again as soon as they are answered."""
    count = 0

    async def ask(place: int) -> None:
        nonlocal count
        while time.monotonic() < stop:
            await call(place)
            count += 1

    async def main() -> None:
        await asyncio.gather(*(ask(place) for place in range(1000)))

    stop = time.monotonic() + seconds
    began, cpu = time.perf_counter(), time.process_time()
    asyncio.run(main())
    return clocked.report(count, time.perf_counter() - began, time.process_time() - cpu)


def acall(library: Any, seconds: float) -> dict[str, float]:
    """`dynamically`, awaited."""
    clocked = Clocked()
    return coroutines(library.dynamically(batch_size=BATCH)(clocked).acall, clocked, seconds)


def aio_plain(library: Any, seconds: float) -> dict[str, float]:
    """`aio.dynamically` on an ordinary function."""
    clocked = Clocked()
    return coroutines(library.aio.dynamically(batch_size=BATCH)(clocked), clocked, seconds)


def aio_coroutine(library: Any, seconds: float) -> dict[str, float]:
    """`aio.dynamically` on a coroutine function; asyncio's timers count whole milliseconds, which both suffer."""
    clocked = Clocked()

    async def later(items: list[Any]) -> list[Any]:
        return await clocked.later(items)

    call = Bare(later) if library is None else library.aio.dynamically(batch_size=BATCH)(later)
    return coroutines(call, clocked, seconds)


MEASURES: dict[str, tuple[str, Callable[[Any, float], dict[str, float]], dict[str, Any]]] = {
    "lone": ("a lone call", lone, {"timeout_ms": 0}),
    "full": ("a full batch leaves after", full, {}),
    "threads": ("64 threads", threads, {}),
    "acall": ("1,000 coroutines, acall", acall, {}),
    "aio_plain": ("1,000 coroutines, aio, function", aio_plain, {}),
    "aio_coroutine": ("1,000 coroutines, aio, coroutine", aio_coroutine, {}),
}


def _threads(targets: list[Callable[[], None]]) -> None:
    started = [threading.Thread(target=target, daemon=True) for target in targets]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()


def measure(name: str, library: str, seconds: float) -> dict[str, float]:
    """One measurement in a process of its own."""
    command = [sys.executable, __file__, "--one", name, library, "--seconds", str(seconds)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return dict(json.loads(done.stdout))


def here(name: str, library: str, seconds: float) -> dict[str, float]:
    """The measurement itself. A lone call of gristmill's does not wait, which the original cannot be told."""
    module = None if library == BARE else importlib.import_module(LIBRARIES[library])
    _, function, told = MEASURES[name]
    return function(module, seconds, **(told if library == "gristmill" else {}))


def main() -> None:
    """Take turns, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--only", choices=MEASURES, action="append")
    parser.add_argument("--one", nargs=2, metavar=("MEASURE", "LIBRARY"), help=argparse.SUPPRESS)
    told = parser.parse_args()
    if told.one:
        print(json.dumps(here(*told.one, told.seconds)))
        return
    for name in told.only or MEASURES:
        contestants = [*LIBRARIES, *([BARE] if name == "aio_coroutine" else [])]
        rounds: dict[str, list[dict[str, float]]] = {library: [] for library in contestants}
        for turn in range(told.rounds):
            for library in contestants[:: 1 if turn % 2 else -1]:
                rounds[library].append(measure(name, library, told.seconds))
        print(MEASURES[name][0])
        for figure in rounds["gristmill"][0]:
            theirs = [one[figure] for one in rounds["batched"]]
            for library in contestants:
                values = [one[figure] for one in rounds[library]]
                ratios = sorted(one / other for one, other in zip(values, theirs, strict=True))
                print(
                    f"  {figure:12} {library:9} {statistics.median(values):10,.1f}"
                    f"   {statistics.median(ratios):6.3f} of batched ({ratios[0]:.3f} to {ratios[-1]:.3f})"
                )


if __name__ == "__main__":
    main()
