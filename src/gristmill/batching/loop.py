"""The asyncio driver: callbacks on one event loop that obey the policy, for functions that are coroutines.

There is a task only while a batch runs, so nothing is left behind when the loop ends. Not thread-safe, like all of
asyncio: everything but `close` is called on the loop.
"""

from __future__ import annotations

import asyncio
import contextvars
import math
from contextlib import suppress

from gristmill.batching import nesting
from gristmill.batching.admission import Admission, Batch, Rules, Wait
from gristmill.batching.calls import Call, clock, fail, settle
from gristmill.batching.failures import ordinary
from gristmill.batching.queueing import batches_of, enter, leave
from gristmill.batching.stats import Tally
from gristmill.batching.work import Work
from gristmill.errors import BatcherClosed


class LoopLane:
    """A queue and what serves it on one loop."""

    def __init__(self, work: Work, rules: Rules, loop: asyncio.AbstractEventLoop) -> None:
        self.run: nesting.Run | None = None
        self.tally = Tally()
        self._work = work
        self._policy = Admission(rules)
        self._loop = loop
        # The function sees no variables of whichever caller happened to come first, as in a thread of its own.
        self._context = contextvars.Context()
        self._closed = False
        self._wakes_at = math.inf  # when the policy will next be asked, if nothing comes
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def queued(self) -> int:
        """Items that have not left in a batch."""
        return self._policy.queued

    @property
    def idle(self) -> bool:
        """Whether nothing waits or runs."""
        return self._task is None and not self._policy.queued

    def submit(self, call: Call) -> bool:
        """Queue the call; unlike a thread's, always possible: whatever interrupts a coroutine's step cannot await."""
        if self._closed:
            raise BatcherClosed("the call came after close()")
        if enter(self._policy, call, self.tally) < self._wakes_at:
            # Not at once: other coroutines that are ready now belong into the same batch.
            self._wakes_at = -math.inf
            self._loop.call_soon(self._turn, context=self._context)
        return True

    def drop(self, call: Call) -> None:
        """The call's caller has left: what has not begun is not done for it."""
        leave(self._policy, call, self.tally)

    async def here(self, call: Call) -> None:
        """Run the call in this task, by itself, now."""
        for batch in batches_of(call, self._policy.rules):
            await self._work.arun(batch, self.tally)

    def count(self, total: Tally) -> None:
        """Add what was done to `total`."""
        total.add(self.tally)

    def clear_counts(self) -> None:
        """Count from nothing again."""
        self.tally = Tally()

    def close(self, *, cancel: bool) -> None:
        """Take no more calls, and serve (or end) those that wait; from any thread, without waiting for that."""
        self._closed = True
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._empty if cancel else self._turn, context=self._context)

    async def drained(self, timeout: float | None) -> bool:
        """Wait until nothing waits or runs; False after `timeout` seconds, or at once from inside a batch function."""
        deadline = math.inf if timeout is None else clock() + timeout
        while not self.idle:
            if nesting.inside() is not None or clock() >= deadline:
                return False
            if self._task is None:
                await asyncio.sleep(0)
            else:
                await asyncio.wait({self._task}, timeout=None if timeout is None else deadline - clock())
        return True

    def _turn(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._task is not None:
            return
        step = self._next()
        if isinstance(step, Batch):
            self._wakes_at = -math.inf
            self._task = self._loop.create_task(self._serve(step))
            return
        self._wakes_at = clock() + step.seconds
        if step.seconds < math.inf:
            self._timer = self._loop.call_later(step.seconds, self._turn, context=self._context)

    async def _serve(self, step: Batch | Wait) -> None:
        try:
            while isinstance(step, Batch):
                over = await self._run(step)
                if self._loop.is_closed():  # this task is being thrown away, and its callers with it
                    return
                self._end(over)
                raise_interrupt(over)
                step = self._next()
        except BaseException as error:  # not the function's, or Ctrl-C: no caller may be left behind
            self._end(fail(self._policy, ordinary(error)))
            raise
        finally:
            self._task = None
        self._turn()

    async def _run(self, batch: Batch) -> list[Call]:
        try:
            with nesting.running(self):
                return await self._work.arun(batch, self.tally)
        except BaseException as error:  # not the function's, whose errors `arun` keeps: no caller may be left behind
            return fail([entry for entry, _, _ in batch.parts], ordinary(error))

    def _next(self) -> Batch | Wait:
        return self._policy.next(math.inf if self._closed else clock())

    def _empty(self) -> None:
        self._end(fail(self._policy, BatcherClosed("the batcher was closed while the call waited")))

    def _end(self, over: list[Call]) -> None:
        for call in over:
            if call.missing:
                self.drop(call)
        settle(over)


def raise_interrupt(over: list[Call]) -> None:
    """Ctrl-C that met the function is for the program, too, not for its callers alone."""
    for call in over:
        cause = call.failure.error.__cause__ if call.failure is not None else None
        if isinstance(cause, KeyboardInterrupt):
            raise cause
