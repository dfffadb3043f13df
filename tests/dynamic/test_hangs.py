"""Nothing ever hangs: whatever the function does and whenever it is called, each caller gets a result or an error."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from callers import at_once, eventually
from gristmill import aio
from gristmill.dynamic.decorator import dynamically
from gristmill.errors import BatcherClosed, BatchFailed, WrongOutput

pytestmark = pytest.mark.timeout(60)


class Unusual(BaseException):
    """No Exception."""


def raising(error: BaseException) -> Callable[[list[Any]], list[Any]]:
    def serve(items: list[Any]) -> list[Any]:
        if "bad" in items:
            raise error
        return items

    return serve


def sync(function: Callable[..., Any], **told: Any) -> Callable[..., Any]:
    """The function under the thread driver."""
    return dynamically(**told)(function)


def on_a_loop(function: Callable[..., Any], **told: Any) -> Callable[..., Any]:
    """The function as a coroutine under the asyncio driver, called from a new loop each time."""

    async def serve(items: list[Any]) -> Any:
        await asyncio.sleep(0)
        return function(items)

    batched = aio.dynamically(**told)(serve)
    return lambda item, **more: asyncio.run(batched(item, **more))


drivers = pytest.mark.parametrize("driver", [sync, on_a_loop])


@drivers
@pytest.mark.parametrize(
    "error",
    [
        SystemExit(3),
        KeyboardInterrupt(),
        GeneratorExit(),
        StopIteration(1),
        StopAsyncIteration(),
        asyncio.CancelledError(),
        Unusual(),
    ],
)
def test_the_function_raises_what_is_no_ordinary_error(driver: Any, error: BaseException) -> None:
    """Callers get BatchFailed, whose cause it is; their own threads and loops go on; the next call is served."""
    function = driver(raising(error), timeout_ms=0)
    caught = at_once([functools.partial(function, item) for item in ("bad", ["bad", "bad"])])
    if isinstance(error, KeyboardInterrupt) and driver is on_a_loop:  # Ctrl-C ends the loop, too
        assert {type(one) for one in caught} <= {BatchFailed, KeyboardInterrupt}
    else:
        # (Python itself makes a RuntimeError of a coroutine's StopIteration, which is one of the ordinary errors.)
        wrapped = RuntimeError if isinstance(error, StopIteration) and driver is on_a_loop else BatchFailed
        assert [type(one) for one in caught] == [wrapped, wrapped]
        assert all(type(one.__cause__) is type(error) for one in caught)
    assert function("good") == "good"


@drivers
@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda items: items[1:], "returned 0 results for 1 items"),
        (lambda items: [*items, 1], "returned 2 results for 1 items"),
        (lambda items: None, "returned NoneType"),
        (lambda items: 3, "returned 3"),
        (lambda items: "x", "returned str"),
        (lambda items: b"x", "returned bytes"),
        (lambda items: {"a": 1}, "returned dict"),
        (lambda items: {1}, "returned set"),
        (lambda items: itertools.repeat(1), "more results for 1 items"),
        (lambda items: iter(()), "returned 0 results"),
        (lambda items: type("Table", (), {"columns": [1], "__iter__": lambda self: iter([1])})(), "returned Table"),
    ],
)
def test_the_function_returns_something_else(driver: Any, answer: Any, said: str) -> None:
    """Too few, too many, endlessly many, None, or what only looks like a list: WrongOutput says what it was."""
    with pytest.raises(WrongOutput, match=said):
        driver(answer, timeout_ms=0)(1)


def test_the_function_is_a_generator() -> None:
    """Its results are taken, never more than are needed; what it raises on the way is the callers' error."""

    def endless(items: list[int]) -> Iterator[int]:
        yield from items
        while True:
            yield 0

    def broken(items: list[int]) -> Iterator[int]:
        yield 1
        raise OSError("half way")

    async def asynchronous(items: list[int]) -> AsyncIterator[int]:
        for item in items:
            yield item

    async def asynchronous_endless(items: list[int]) -> AsyncIterator[int]:
        while True:
            yield 0

    assert dynamically(lambda items: (-item for item in items))([1, 2]) == [-1, -2]
    with pytest.raises(WrongOutput, match="more results for 2 items"):
        dynamically(endless)([1, 2])
    with pytest.raises(OSError, match="half way"):
        dynamically(broken)([1, 2])
    assert asyncio.run(aio.dynamically(asynchronous)([1, 2])) == [1, 2]
    with pytest.raises(WrongOutput, match="3 results for 2 items"):
        asyncio.run(aio.dynamically(asynchronous_endless)([1, 2]))


def test_the_function_returns_an_awaitable() -> None:
    """A coroutine function in disguise: the error sends it to aio, and no warning about it is left behind."""

    async def later(items: list[int]) -> list[int]:
        return items

    with pytest.raises(WrongOutput, match="async def"):
        dynamically(lambda items: later(items))(1)  # noqa: PLW0108 (the lambda is the disguise)


@drivers
def test_each_caller_gets_an_error_of_its_own(driver: Any) -> None:
    """Of its type, with its attributes; what one adds to it, and where it was raised again, is no other's business."""

    class Refused(ValueError):
        def __init__(self, code: int, *, hint: str) -> None:
            super().__init__(f"code {code}")
            self.hint = hint

    batched = aio.dynamically(batch_size=4, timeout_ms=2000)

    def refuse(items: list[int]) -> list[int]:
        raise Refused(7, hint="turn it off") from KeyError("deep")

    if driver is sync:
        function = dynamically(batch_size=4, timeout_ms=2000)(refuse)
        errors = at_once([functools.partial(function, i) for i in range(4)])
    else:

        async def later(items: list[int]) -> list[int]:
            return refuse(items)

        function = batched(later)

        async def all_four() -> list[Any]:
            return await asyncio.gather(*(function(i) for i in range(4)), return_exceptions=True)

        errors = asyncio.run(all_four())
    assert len({id(error) for error in errors}) == 4
    for error in errors:
        assert (type(error), str(error), error.hint) == (Refused, "code 7", "turn it off")
        assert isinstance(error.__cause__, KeyError)
        assert "refuse" in str([frame.name for frame in _frames(error)])
    errors[0].hint = "changed"
    assert errors[1].hint == "turn it off"


def _frames(error: BaseException) -> Any:
    import traceback

    return traceback.extract_tb(error.__traceback__)


@drivers
def test_retry_alone_singles_out_the_items_at_fault(driver: Any) -> None:
    """The others of their batch get their results; a list with a bad item fails, other calls do not."""
    batches: list[list[int]] = []

    def serve(items: list[int]) -> list[float]:
        batches.append(items)
        return [1 / item for item in items]

    function = driver(serve, batch_size=3, timeout_ms=100, retry_alone=True)
    with pytest.raises(ZeroDivisionError):
        function([1, 0, 2])
    assert batches == [[1, 0, 2], [1], [0], [2]]
    if driver is sync:
        outcomes = at_once([functools.partial(function, item) for item in (1, 0, 4)])
        assert (outcomes[0], type(outcomes[1]), outcomes[2]) == (1.0, ZeroDivisionError, 0.25)


@drivers
def test_without_retry_the_items_of_a_call_that_failed_are_not_run(driver: Any) -> None:
    """A list of a hundred whose first batch fails does not keep the function busy for nobody."""
    batches: list[list[int]] = []

    def serve(items: list[int]) -> list[int]:
        batches.append(items)
        raise OSError("no")

    function = driver(serve, batch_size=2, timeout_ms=0)
    with pytest.raises(OSError, match="no"):
        function(list(range(100)))
    assert batches == [[0, 1]]


def test_calls_after_close() -> None:
    """BatcherClosed, which is a RuntimeError; closing twice is closing."""
    function = dynamically(lambda items: items)
    assert function(1) == 1
    function.close()
    function.shutdown()
    with pytest.raises(RuntimeError, match=r"after close\(\)"):
        function(2)
    with pytest.raises(BatcherClosed):
        asyncio.run(function.acall(2))
    never_used = dynamically(lambda items: items)
    never_used.close()
    with pytest.raises(BatcherClosed):
        never_used([1, 2])
    later = aio.dynamically(_echo)
    later.close()
    with pytest.raises(BatcherClosed):
        asyncio.run(later(1))


async def _echo(items: list[Any]) -> list[Any]:
    await asyncio.sleep(0)
    return items


@pytest.mark.parametrize("cancel", [False, True])
def test_close_with_calls_waiting(cancel: bool) -> None:
    """They are served first; or, if that is asked for, they end with BatcherClosed. The batch that has left goes on."""
    begin = threading.Event()

    def serve(items: list[int]) -> list[int]:
        begin.wait(20)
        return items

    function = dynamically(batch_size=1, timeout_ms=0)(serve)
    outcomes: list[Any] = []

    def ask(item: int) -> None:
        try:
            outcomes.append(function(item))
        except BatcherClosed as error:
            outcomes.append(error)

    first, *others = [threading.Thread(target=ask, args=(i,), daemon=True) for i in range(4)]
    first.start()
    assert eventually(lambda: function.stats.waiting_ms)
    for other in others:
        other.start()
    assert eventually(lambda: function.stats.queue_size == 3)
    closer = threading.Thread(target=function.close, kwargs={"cancel": cancel}, daemon=True)
    closer.start()
    if cancel:
        assert eventually(lambda: len(outcomes) == 3)
    begin.set()
    for thread in (first, *others, closer):
        thread.join(20)
        assert not thread.is_alive()
    assert sum(isinstance(outcome, BatcherClosed) for outcome in outcomes) == (3 if cancel else 0)
    assert {outcome for outcome in outcomes if isinstance(outcome, int)} == ({0} if cancel else {0, 1, 2, 3})


def test_close_does_not_wait_longer_than_it_is_told() -> None:
    """A function that hangs keeps its own batch; what waits behind it is ended, and close returns."""
    begin = threading.Event()
    function = dynamically(batch_size=1, timeout_ms=0)(lambda items: begin.wait(30) and items)
    pool = ThreadPoolExecutor(2)
    stuck = pool.submit(function, 1)
    assert eventually(lambda: function.stats.waiting_ms)
    behind = pool.submit(function, 2)
    assert eventually(lambda: function.stats.queue_size == 1)
    began = time.monotonic()
    function.close(timeout=0.05)
    assert time.monotonic() - began < 5
    with pytest.raises(BatcherClosed):
        behind.result(10)
    begin.set()
    assert stuck.result(10) == 1


def test_close_from_inside_the_function() -> None:
    """It does not wait for itself."""

    def serve(items: list[int]) -> list[int]:
        function.close()
        return items

    function = dynamically(serve)
    assert function(1) == 1
    with pytest.raises(BatcherClosed):
        function(2)


def test_aclose_waits_for_what_is_served() -> None:
    """On the loop that calls it; with a limit, what still waits is ended."""

    async def slow(items: list[int]) -> list[int]:
        await asyncio.sleep(0.05)
        return items

    async def main() -> None:
        function = aio.dynamically(batch_size=1, timeout_ms=0)(slow)
        calls = [asyncio.ensure_future(function(i)) for i in range(3)]
        await asyncio.sleep(0.01)
        await function.aclose()
        assert [call.done() for call in calls] == [True] * 3
        other = aio.dynamically(batch_size=1, timeout_ms=0)(slow)
        calls = [asyncio.ensure_future(other(i)) for i in range(3)]
        await asyncio.sleep(0.01)
        await other.aclose(timeout=0.01)
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [int, BatcherClosed, BatcherClosed]
        plain = aio.dynamically(timeout_ms=0)(lambda items: items)
        assert await plain(1) == 1
        await plain.aclose()
        with pytest.raises(BatcherClosed):
            await plain(1)

    asyncio.run(main())


def test_the_function_calls_itself() -> None:
    """As an ordinary function would: factorials, by threads and by coroutines."""

    def product(items: list[int]) -> list[int]:
        return [1 if item == 0 else item * function(item - 1) for item in items]

    function = dynamically(batch_size=3)(product)
    assert function([5, 6, 0, 4]) == [120, 720, 1, 24]

    async def aproduct(items: list[int]) -> list[int]:
        return [1 if item == 0 else item * await afunction(item - 1) for item in items]

    afunction = aio.dynamically(batch_size=3)(aproduct)

    async def bounded() -> list[int]:
        return await asyncio.wait_for(afunction([5, 6, 0, 4]), 20)

    assert asyncio.run(bounded()) == [120, 720, 1, 24]


def test_two_functions_call_each_other() -> None:
    """Whoever comes second is run in place; both ways at once, from many threads."""

    def is_even(items: list[int]) -> list[bool]:
        return [item == 0 or odd(item - 1) for item in items]

    def is_odd(items: list[int]) -> list[bool]:
        return [item != 0 and even(item - 1) for item in items]

    even = dynamically(batch_size=4, timeout_ms=1)(is_even)
    odd = dynamically(batch_size=4, timeout_ms=1)(is_odd)
    calls = [functools.partial(function, item) for item in range(12) for function in (even, odd)]
    assert at_once(calls) == [item % 2 == wanted for item in range(12) for wanted in (0, 1)]


def test_two_coroutine_functions_call_each_other() -> None:
    """The same under the asyncio driver, also through tasks that the function starts."""

    async def is_even(items: list[int]) -> list[bool]:
        return list(await asyncio.gather(*(_true() if item == 0 else odd(item - 1) for item in items)))

    async def is_odd(items: list[int]) -> list[bool]:
        return [item != 0 and await even(item - 1) for item in items]

    async def _true() -> bool:
        return True

    even = aio.dynamically(batch_size=4, timeout_ms=1)(is_even)
    odd = aio.dynamically(batch_size=4, timeout_ms=1)(is_odd)

    async def main() -> list[bool]:
        calls = [function(item) for item in range(12) for function in (even, odd)]
        return list(await asyncio.wait_for(asyncio.gather(*calls), 20))

    assert asyncio.run(main()) == [item % 2 == wanted for item in range(12) for wanted in (0, 1)]


def test_a_task_that_outlives_its_batch_is_outside() -> None:
    """What a function leaves running calls like anybody else."""
    left: list[asyncio.Task[int]] = []

    async def serve(items: list[int]) -> list[int]:
        if 0 in items:
            left.append(asyncio.ensure_future(afterwards()))
        return items

    async def afterwards() -> int:
        await asyncio.sleep(0.02)
        return await function(5)

    function = aio.dynamically(serve, timeout_ms=0)

    async def main() -> int:
        await function(0)
        return await asyncio.wait_for(left[0], 20)

    assert asyncio.run(main()) == 5
    assert function.stats.total_batches == 2


def test_a_second_event_loop() -> None:
    """One after the other, and two at the same time: coroutine functions, plain functions, and `acall`."""

    def plain(items: list[int]) -> list[int]:
        return items

    for function in (aio.dynamically(_echo), aio.dynamically(plain), dynamically(plain).acall):

        async def some(function: Any = function) -> list[int]:
            return list(await asyncio.gather(*(function(i) for i in range(20))))

        assert [asyncio.run(some()) for _ in range(3)] == [list(range(20))] * 3
        assert at_once([lambda: asyncio.run(some())] * 3) == [list(range(20))] * 3


def test_a_loop_that_ends_with_calls_waiting() -> None:
    """The next loop is served; nothing is left behind, and no task is destroyed while it waits."""
    function = aio.dynamically(timeout_ms=10_000)(_echo)

    async def give_up() -> None:
        task = asyncio.ensure_future(function(1))
        await asyncio.sleep(0.01)
        assert not task.done()

    asyncio.run(give_up())
    loop = asyncio.new_event_loop()
    waiting = loop.create_task(give_up())
    loop.run_until_complete(asyncio.sleep(0.05))
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    assert waiting.done()
    assert asyncio.run(function([1] * 32)) == [1] * 32


def test_cancelled_calls_are_dropped() -> None:
    """Their items never reach the function; their neighbours do."""
    seen: list[int] = []

    async def serve(items: list[int]) -> list[int]:
        seen.extend(items)
        return items

    def plain(items: list[int]) -> list[int]:
        seen.extend(items)
        return items

    for function in (aio.dynamically(timeout_ms=100)(serve), aio.dynamically(timeout_ms=100)(plain)):

        async def main(function: Any = function) -> None:
            tasks = [asyncio.ensure_future(function(i)) for i in range(6)]
            await asyncio.sleep(0.01)
            for task in tasks[::2]:
                task.cancel()
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
            assert [type(outcome) for outcome in outcomes] == [asyncio.CancelledError, int] * 3

        seen.clear()
        asyncio.run(main())
        assert seen == [1, 3, 5]
        assert function.stats.total_dropped == 3


def test_a_batch_whose_task_is_cancelled() -> None:
    """Somebody cancels all tasks but the callers': those get an error, and the next call is served."""

    async def slow(items: list[int]) -> list[int]:
        await asyncio.sleep(0.1)
        return items

    function = aio.dynamically(slow, timeout_ms=0)

    async def main() -> int:
        call = asyncio.ensure_future(function(1))
        await asyncio.sleep(0.02)
        for task in asyncio.all_tasks() - {call, asyncio.current_task()}:
            task.cancel()
        with pytest.raises(BatchFailed, match="CancelledError"):
            await call
        return await function(2)

    assert asyncio.run(main()) == 2


def test_ctrl_c_in_a_waiting_thread() -> None:
    """It ends the wait, and only that."""
    begin = threading.Event()

    def serve(items: list[int]) -> list[int]:
        begin.wait(20)
        return items

    function = dynamically(batch_size=1, timeout_ms=0)(serve)
    other = threading.Thread(target=function, args=(1,), daemon=True)
    other.start()
    assert eventually(lambda: function.stats.waiting_ms)

    def interrupt() -> None:
        if eventually(lambda: function.stats.queue_size):  # it is in the queue
            time.sleep(0.1)  # and waits
            os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        function(2)
    assert function.stats.total_dropped == 1
    begin.set()
    other.join(20)
    assert function(3) == 3


def test_a_signal_handler_that_calls() -> None:
    """Also at the moment in which its own thread is putting a call into the queue."""
    function = dynamically(timeout_ms=0)(lambda items: items)
    heard: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda *_: heard.append(function(-1)))
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.0005)
    try:
        deadline = time.monotonic() + 1.5
        while time.monotonic() < deadline:
            assert function(1) == 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert len(heard) > 10
    assert set(heard) == {-1}


def test_a_finalizer_that_calls() -> None:
    """Objects that call when they are collected, in the middle of anything."""
    function = dynamically(timeout_ms=0)(lambda items: items)
    heard: list[int] = []

    class Last:
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            heard.append(function(-1))

    before = gc.get_threshold()
    gc.set_threshold(7)
    try:
        for i in range(300):
            Last()
            assert function(i) == i
    finally:
        gc.set_threshold(*before)
    gc.collect()
    assert len(heard) == 300


def test_the_owner_is_collected() -> None:
    """Its thread ends with it, also when the function belongs to a circle of references; others go on."""

    class Owner:
        def __init__(self) -> None:
            self.me = self

        @dynamically
        def watched(self, items: list[int]) -> list[int]:
            return items

    def threads() -> int:
        return sum(thread.name == "gristmill watched" for thread in threading.enumerate())

    owners = [Owner() for _ in range(5)]
    assert [owner.watched(1) for owner in owners] == [1] * 5
    assert threads() == 5
    gone = [weakref.ref(owner) for owner in owners]
    del owners
    assert eventually(lambda: gc.collect() >= 0 and not any(ref() for ref in gone))
    assert eventually(lambda: threads() == 0)

    def circle() -> weakref.ref[Any]:
        def watched(items: list[int]) -> list[int]:
            return [0 if not item else 1 + function(item - 1) for item in items]

        function = dynamically(watched)
        assert function(3) == 3
        return weakref.ref(function)

    ref = circle()
    assert eventually(lambda: gc.collect() >= 0 and ref() is None)
    assert eventually(lambda: threads() == 0)


def test_an_owner_is_kept_while_its_call_waits() -> None:
    """Even if nobody else holds it."""

    class Owner:
        @dynamically(timeout_ms=50)
        def same(self, items: list[int]) -> list[int]:
            return items

    calls = [lambda: Owner().same(1), lambda: Owner().same([2, 3])]
    assert at_once(calls) == [1, [2, 3]]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.leaves_children
def test_fork() -> None:
    """The child has a thread and a queue of its own, even if it was forked while the parent's were busy."""
    begin = threading.Event()

    def serve(items: list[int]) -> list[int]:
        if 0 in items:
            begin.wait(20)
        return [item * 2 for item in items]

    function = dynamically(batch_size=2, timeout_ms=0)(serve)
    later = aio.dynamically(_echo)
    assert asyncio.run(later(1)) == 1
    busy = [threading.Thread(target=function, args=(0,), daemon=True) for _ in range(5)]
    for thread in busy:
        thread.start()
    assert eventually(lambda: function.stats.queue_size >= 3)
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            answer = f"{function([4, 5])} {asyncio.run(function.acall(6))} {asyncio.run(later(7))}"
            os.write(write, answer.encode())
        finally:
            os._exit(0)
    os.close(write)
    ended = eventually(lambda: os.waitpid(child, os.WNOHANG) != (0, 0), 20)
    if not ended:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert ended, "the child hangs"
    assert os.read(read, 100) == b"[8, 10] 12 7"
    os.close(read)
    begin.set()
    for thread in busy:
        thread.join(20)
        assert not thread.is_alive()
    assert function(7) == 14


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_fork_from_inside_the_function() -> None:
    """The child's copy of the thread ends instead of waiting for calls that can never come."""
    program = """
import os, sys
from gristmill import dynamically
def serve(items):
    global child
    child = os.fork()
    return items
serve = dynamically(serve)
assert serve(1) == 1
pid, status = os.waitpid(child, 0)
print("ended")
"""
    done = _python(program)
    assert done.stdout.strip() == "ended", done.stderr


@pytest.mark.parametrize(
    "ending",
    [
        "",
        "raise SystemExit(0)",
        "threading.Thread(target=function, args=(0.3,), daemon=True).start(); time.sleep(0.1)",
        "threading.Thread(target=function, args=(600,), daemon=True).start(); time.sleep(0.1)",
        "threading.Thread(target=lambda: print(function(0.3))).start()",
        "import atexit; atexit.register(lambda: print(function(0)))",
        "Last.me = Last()",
        "function.close()",
    ],
)
def test_the_interpreter_ends(ending: str) -> None:
    """At once when idle, with batches running, with callers left, with calls from atexit and from finalizers."""
    program = f"""
import threading, time
from gristmill import dynamically
@dynamically(timeout_ms=0)
def function(items):
    for item in items: time.sleep(item)
    return items
class Last:
    def __del__(self): function(0)
assert function([0, 0]) == [0, 0]
{ending}
"""
    began = time.monotonic()
    done = _python(program)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert time.monotonic() - began < 20
    assert "print" not in ending or done.stdout.strip() in ("0", "0.3")


def test_no_thread_can_be_started() -> None:
    """The caller is told, and is not left in a queue that nobody serves."""
    program = """
import threading
from gristmill import dynamically
start = threading.Thread.start
def no(self): raise RuntimeError("can't start new thread")
threading.Thread.start = no
function = dynamically(timeout_ms=0)(lambda items: items)
try: function(1)
except RuntimeError as error: print(error)
threading.Thread.start = start
print(function(2), function.stats.total_processed)
"""
    assert _python(program).stdout.split("\n") == ["can't start new thread", "2 1", ""]


def _python(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=40, check=False)


@pytest.mark.parametrize("seed", range(3))
def test_everything_at_once(seed: int) -> None:
    """Threads and loops that call, time out, cancel and fail: every call ends, and every item is accounted for."""
    import random

    chance = random.Random(seed)

    def serve(items: list[int]) -> list[int]:
        time.sleep(chance.random() / 500)
        if -1 in items:
            raise OSError("a bad item")
        return [item + 1 for item in items]

    function = dynamically(batch_size=5, timeout_ms=1, retry_alone=True, max_queue=20)(serve)

    def by_thread(base: int) -> int:
        ended = 0
        for i in range(30):
            size = chance.choice([1, 1, 2, 13])
            items = [base + i + place for place in range(size)]
            if chance.random() < 0.1:
                items[-1] = -1
            limit = chance.choice([None, None, 0.002])
            with contextlib.suppress(TimeoutError, OSError):
                assert function(items, timeout=limit) == [item + 1 for item in items]
            ended += 1
        return ended

    async def by_loop(base: int) -> int:
        async def one(i: int) -> None:
            call = function.acall(base + i)
            with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
                assert await asyncio.wait_for(call, chance.choice([0.001, 30])) == base + i + 1

        await asyncio.gather(*(one(i) for i in range(60)))
        return 60

    calls: list[Callable[[], Any]] = [functools.partial(by_thread, 1000 * i) for i in range(10)]
    calls += [lambda: asyncio.run(by_loop(100_000)), lambda: asyncio.run(by_loop(200_000))]
    assert at_once(calls) == [30] * 10 + [60] * 2
    assert eventually(lambda: function.stats.queue_size == 0)
