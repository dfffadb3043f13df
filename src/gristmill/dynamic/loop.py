"""The asyncio driver: callbacks on one event loop that obey the policy, for functions that are coroutines.

There is a task only while a batch runs, so nothing is left behind when the loop ends. Not thread-safe, like all of
asyncio: everything but `close` is called on the loop.
"""

from __future__ import annotations

import asyncio
import contextvars
import math
from contextlib import suppress

from gristmill.dynamic import nesting
from gristmill.dynamic.admission import Admission, Batch, Rules, Wait
from gristmill.dynamic.callerrors import ordinary
from gristmill.dynamic.calls import Call, clock, fail, settle
from gristmill.dynamic.execution import Work
from gristmill.dynamic.queueing import batches_of, enter, leave
from gristmill.dynamic.stats import Tally
from gristmill.errors import BatcherClosed


class LoopLane:
    """A queue and what serves it on one loop."""

    def __init__(self, work: Work, rules: Rules, loop: asyncio.AbstractEventLoop) -> None:
        self.run: nesting.Run | None = None
        self.tally = Tally()
        self._work = work
        self._policy = Admission(rules)
        self._loop = loop
        # The function sees no variables of the caller that happened to come first, as in a thread of its own.
        self._context = contextvars.Context()
        self._closed = False
        self._wakes_at = math.inf  # when the policy will next be asked if nothing arrives
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
        """Queue the call; unlike a thread's, always possible: code that interrupts a coroutine's step cannot await."""
        if self._closed:
            raise BatcherClosed("the call came after close()")
        if enter(self._policy, call, self.tally) < self._wakes_at:
            # Not at once: other coroutines that are ready now belong to the same batch.
            self._wakes_at = -math.inf
            self._loop.call_soon(self._turn, context=self._context)
        return True

    def drop(self, call: Call) -> None:
        """The call's caller has left: its items that are not running yet are not run."""
        leave(self._policy, call, self.tally)

    async def here(self, call: Call) -> None:
        """Run the call in this task, by itself, now."""
        for batch in batches_of(call, self._policy.rules):
            await self._work.arun(batch, self.tally)

    def count(self, total: Tally) -> None:
        """Add what was done to `total`."""
        total.add(self.tally)

    def clear_counts(self) -> None:
        """Start counting from zero again."""
        self.tally = Tally()

    def close(self, *, cancel: bool) -> None:
        """Take no more calls, and serve (or end) those that wait; from any thread, without waiting for them."""
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
        except BaseException as error:  # not the function's, or Ctrl-C: every caller must be answered
            self._end(fail(self._policy, ordinary(error)))
            raise
        finally:
            self._task = None
        self._turn()

    async def _run(self, batch: Batch) -> list[Call]:
        try:
            with nesting.running(self):
                return await self._work.arun(batch, self.tally)
        except BaseException as error:  # not the function's, whose errors `arun` keeps: every caller must be answered
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
    """Ctrl-C during the function is for the program, too, not only for its callers."""
    for call in over:
        cause = call.failure.error.__cause__ if call.failure is not None else None
        if isinstance(cause, KeyboardInterrupt):
            raise cause
