"""Calls of a user's function with one row each, many of them at a time."""

from __future__ import annotations

import asyncio
import contextlib
import math
import queue
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from gristmill.errors import GristmillError
from gristmill.models.firstanswers import FirstAnswers
from gristmill.process.failure import Unasked
from gristmill.process.startup import UserCode
from gristmill.shards.counts import summed

SOON = 5.0  # seconds: what a function does when its call is cancelled should not take longer


class Raised:
    """The answer of a call that raised."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


_OPEN = object()
DROPPED = Raised(RuntimeError("the call was dropped"))


class Answers:
    """The answers to some rows, on their way. `answered` is called after each, in any thread, with these, the row's
    number and its answer, if it has one; it holds no reference to them, so that they are gone once nobody needs them,
    and not when garbage is looked for. `order` has the rows' numbers as they are to be begun. Answers are kept as `own`
    gives them: a function may return the same object each time, with the next row's answer in it.
    """

    def __init__(
        self,
        rows: Sequence[Any],
        answered: Callable[[Answers, int, Any], None],
        own: Callable[[int, Any], Any],
        order: Sequence[int] | None = None,
    ) -> None:
        self.rows: list[Any] = list(rows)  # None once answered
        self._order = range(len(self.rows)) if order is None else order
        self._found: list[Any] = [_OPEN] * len(self.rows)
        self._left = len(self.rows)
        self._answered = answered
        self._own = own
        self._changed = threading.Condition()
        self.dropped = self.proven = False  # whether nobody needs them; whether they are asked for whatever fails
        self.used: dict[str, float] = {}  # what the answers have taken (contract.USED)

    def took(self, used: Mapping[str, float]) -> None:
        """Count what one of the answers has taken."""
        if used:
            with self._changed:
                self.used = summed([self.used, used])

    def put(self, place: int, answer: Any) -> BaseException | None:
        """The answer to a row, or `Raised`. Called before the function is called again by whoever called it. Returns
        what it failed with.
        """
        try:
            if not isinstance(answer, Raised):
                answer = self._own(place, answer)
        except Exception as e:  # whatever copying an object of the user's calls
            answer = Raised(e)
        try:
            self._answered(self, place, answer)
        finally:  # somebody waits for it, whatever listeners do
            with self._changed:
                self.rows[place] = None
                self._found[place] = answer
                self._left -= 1
                if not self._left:
                    self._changed.notify_all()
        return answer.error if isinstance(answer, Raised) else None

    def open(self) -> list[int]:
        """The rows that have no answer yet, in the order in which to begin them."""
        return [place for place in self._order if self._found[place] is _OPEN]

    def wait(self, seconds: float | None = None) -> int:
        """How many have not been answered, once all have been or after so many seconds."""
        with self._changed:
            self._changed.wait_for(lambda: not self._left, seconds)
            return self._left

    def of(self, places: Sequence[int]) -> list[Any]:
        """The answers to these rows. An exception stands for a call that raised it."""
        found = [self._found[place] for place in places]
        return [answer.error if isinstance(answer, Raised) else answer for answer in found]


class Flight(Protocol):
    """Calls a function with rows, in the order in which they were begun, up to a number at a time."""

    def begin(self, answers: Answers) -> None: ...

    def close(self, last: Callable[[], Any] | None = None) -> None:
        """Drop what has not been answered; `last` is called after that."""
        ...


class Coroutines:
    """Runs a coroutine function on an event loop in a thread of its own. A call that takes over `limit` seconds is
    cancelled, and raises TimeoutError for its row. With `first`, it is not called any more once all rows have failed
    (Unasked), but for those of `proven` answers.
    """

    def __init__(
        self,
        function: Callable[[Any], Awaitable[Any]],
        most: int,
        limit: float = math.inf,
        first: FirstAnswers | None = None,
    ) -> None:
        self._function = function
        self._most = most
        self._first = first
        self._limit = None if limit == math.inf else limit
        self._waiting: deque[tuple[Answers, int]] = deque()
        self._running: set[asyncio.Task[None]] = set()
        self._ending = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="gristmill-rows", daemon=True)
        self._thread.start()

    def begin(self, answers: Answers) -> None:
        """Begin as soon as earlier rows leave room."""
        self._loop.call_soon_threadsafe(self._add, answers)

    def do(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Run something else in the same loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def close(self, last: Callable[[], Any] | None = None) -> None:
        """Cancel what is running; await `last` in the same loop; end the loop."""
        if self._loop.is_closed():
            return
        try:
            asyncio.run_coroutine_threadsafe(self._ended(), self._loop).result()
            if last is not None:
                found = asyncio.run_coroutine_threadsafe(self._last(last), self._loop).result()
                if found is not None:
                    raise found.error
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()

    async def _ended(self) -> None:
        self._ending = True
        self._fill()
        for task in self._running:
            task.cancel()
        if self._running:
            await asyncio.wait(self._running, timeout=SOON)

    async def _last(self, last: Callable[[], Any]) -> Raised | None:
        try:
            with UserCode():
                found = last()
                if asyncio.iscoroutine(found):
                    await found
        except BaseException as e:  # which would end the loop, and be lost
            return Raised(e)
        return None

    def _add(self, answers: Answers) -> None:
        self._waiting.extend((answers, place) for place in answers.open())
        self._fill()

    def _fill(self) -> None:
        while self._waiting and (len(self._running) < self._at_once() or self._ending):
            answers, place = self._waiting.popleft()
            if answers.dropped or self._ending:
                answers.put(place, DROPPED)
                continue
            if self._first is not None and self._first.doubted and not answers.proven:
                assert self._first.failure is not None
                answers.put(place, Raised(Unasked(self._first.failure)))
                continue
            task = self._loop.create_task(self._one(answers, place))
            self._running.add(task)
            task.add_done_callback(self._done)

    def _at_once(self) -> int:
        return self._most if self._first is None else self._first.most(self._most)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        self._fill()

    async def _one(self, answers: Answers, place: int) -> None:
        late = _Deadline(self._loop, self._limit)
        # Nothing may leave a task: SystemExit would end the loop, and with it all other calls.
        try:
            with UserCode():
                answer = await self._function(answers.rows[place])
        except asyncio.CancelledError as e:  # too late, by the function itself, or because all is being ended
            over = TimeoutError(f"no answer within {self._limit or 0:g} s (batch_timeout)")
            answer = Raised(over if late.over else e)
        except BaseException as e:
            answer = Raised(e)
        late.stop()
        if self._ending:  # whatever it makes of being cancelled is no answer to the row
            answer = DROPPED
        elif late.over and not isinstance(answer, Raised):
            answer = Raised(TimeoutError(f"no answer within {self._limit or 0:g} s (batch_timeout)"))
        failure = answers.put(place, answer)
        if self._first is not None and not isinstance(failure, GristmillError):  # which is about more than its row
            self._first.one(failure)


class _Deadline:
    """Cancels the task that makes it after so many seconds. Cheaper than `asyncio.wait_for`, which makes another."""

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float | None) -> None:
        self.over = False
        self._task = asyncio.current_task(loop)
        self._timer = None if seconds is None else loop.call_later(seconds, self._cancel)

    def stop(self) -> None:
        """There is an answer."""
        if self._timer is not None:
            self._timer.cancel()

    def _cancel(self) -> None:
        self.over = True
        assert self._task is not None
        self._task.cancel()


class Threads:
    """Runs a plain function in threads, which are started as rows need them."""

    def __init__(self, function: Callable[[Any], Any], most: int) -> None:
        self._function = function
        self._most = most
        self._ending = False
        self._waiting: queue.SimpleQueue[tuple[Answers, int] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def begin(self, answers: Answers) -> None:
        """Begin as soon as earlier rows leave room."""
        for place in answers.open():
            self._waiting.put((answers, place))
        while len(self._threads) < self._most and not self._waiting.empty():
            thread = threading.Thread(target=self._run, name=f"gristmill-row-{len(self._threads)}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def close(self, last: Callable[[], Any] | None = None) -> None:
        """Drop what waits; call `last` once the calls that are running have returned, or after a while."""
        self._ending = True
        with contextlib.suppress(queue.Empty):
            while (found := self._waiting.get_nowait()) is not None:
                found[0].put(found[1], DROPPED)
        for _ in self._threads:
            self._waiting.put(None)
        for thread in self._threads:
            thread.join(SOON)
        if last is not None:
            with UserCode():
                last()

    def _run(self) -> None:
        while (found := self._waiting.get()) is not None:
            answers, place = found
            if answers.dropped:
                answers.put(place, DROPPED)
                continue
            try:
                with UserCode():
                    answer = self._function(answers.rows[place])
            except BaseException as e:  # the row's own failure, whatever it is
                answer = Raised(e)
            answers.put(place, DROPPED if self._ending else answer)
