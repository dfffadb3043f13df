"""The thread driver: one daemon thread that obeys the policy, for functions that are not coroutines.

The first call starts it. It keeps nothing alive while it sleeps: when the last user of the lane is gone, the lane is
collected and its thread ends.
"""

from __future__ import annotations

import atexit
import math
import os
import threading
import weakref
from _thread import allocate_lock, get_ident
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from gristmill.dynamic import nesting
from gristmill.dynamic.admission import Admission, Batch, Rules
from gristmill.dynamic.callerrors import ordinary
from gristmill.dynamic.calls import Call, clock, fail, wake_loops
from gristmill.dynamic.execution import Work
from gristmill.dynamic.queueing import batches_of, enter, leave
from gristmill.dynamic.stats import Tally
from gristmill.errors import BatcherClosed

# How long the interpreter's end waits for running batches: native code that is cut off in the middle may crash.
EXIT_S = 1.0
# Of the threads that wait for a batch, this many are woken at once, and each wakes one more: dozens that contend for
# the interpreter lock at the same time take a fifth longer, on a busy machine twice as long (64 threads, 2 cores).
HEADS = 2
# After this long the rest are woken, whatever happened to those; 64 threads need half of it.
PATIENCE_S = 0.003


class ThreadLane:
    """A queue and the thread that serves it. Every method may be called from any thread."""

    def __init__(self, work: Work, rules: Rules) -> None:
        self.tally = Tally()
        self._nested = Tally()
        self._work = work
        self._rules = rules
        self._closed = False
        self.renew()
        _lanes.add(self)

    def renew(self) -> None:
        """Begin with an empty queue and no thread: the state of a new lane, and of any lane in a forked child."""
        self.run: nesting.Run | None = None
        self._policy = Admission(self._rules)
        self._lock: Any = threading.RLock()
        self._thread: threading.Thread | None = None
        self._ident: int | None = None
        self._gate = _closed_gate()  # the thread sleeps in front of it
        self._wakes_at = -math.inf  # when it will next ask the policy by itself
        self._sleepers: deque[Call] = deque()  # calls whose callers block and whose results are ready

    @property
    def queued(self) -> int:
        """Items that have not left in a batch."""
        return self._policy.queued

    def submit(self, call: Call) -> bool:
        """Queue the call; False if it must run in place, because nothing can serve it while its caller waits."""
        # A signal handler or a finalizer may call in the middle of this method, or in the middle of the lane's thread.
        if self._lock._is_owned() or self._ident == get_ident():
            return False
        with self._lock:
            if self._closed and not _exiting:
                raise BatcherClosed("the call came after close()")
            if self._closed:
                return False
            if self._thread is None:
                self._start()
            if enter(self._policy, call, self.tally) < self._wakes_at:
                _open_gate(self._gate)
                self._wakes_at = -math.inf
        return True

    def block(self, call: Call, timeout: float | None) -> None:
        """Wait for the call's end, at most `timeout` seconds."""
        awake = over = False
        try:
            awake = call.lock.acquire(timeout=-1 if timeout is None else timeout)
        finally:
            if not awake:  # out of time, or Ctrl-C
                over, call.gone = call.finished, True
                self.drop(call)
            if self._sleepers:
                self._wake_next()
        if timeout is not None and not awake and not over:
            call.expire(timeout)

    def drop(self, call: Call) -> None:
        """The call's caller has left: its items that are not running yet are not run."""
        with self._lock:
            leave(self._policy, call, self.tally)

    def here(self, call: Call) -> None:
        """Run the call in this thread, by itself, now."""
        tally = Tally()
        for batch in batches_of(call, self._rules):
            self._work.run(batch, tally)
        with self._lock:
            self._nested.add(tally)

    def count(self, total: Tally) -> None:
        """Add what was done to `total`."""
        total.add(self.tally)
        total.add(self._nested)

    def clear_counts(self) -> None:
        """Start counting from zero again."""
        with self._lock:
            self.tally, self._nested = Tally(), Tally()

    def close(self, *, cancel: bool, timeout: float | None) -> None:
        """Take no more calls, serve those that wait (or end them, with `cancel`, or after `timeout` seconds).

        Returns when the thread has ended, or after `timeout`; at once when called from inside a batch function.
        """
        with self._lock:
            self._closed = True
            thread = self._thread
        if cancel:
            self._end_pending()
        _open_gate(self._gate)
        if thread is None or thread is threading.current_thread() or nesting.inside() is not None:
            return
        thread.join(timeout)
        if thread.is_alive():
            self._end_pending()

    def give_up(self, error: BaseException) -> None:
        """The thread dies of this error, as do the calls that wait for it. The next call gets a new thread."""
        with self._lock:
            self._thread = self._ident = None
            over = fail(self._policy, ordinary(error))
        self._deliver(over)

    def turn(self, gate: Any) -> float | None:
        """Run batches while there are any; returns for how many seconds to sleep, or None to end."""
        linger = math.inf
        self._ident = get_ident()
        while True:
            with self._lock:
                if gate is not self._gate:  # the process was forked from inside this thread
                    return None
                now = clock()
                step = self._policy.next(math.inf if self._closed else now)
                if not isinstance(step, Batch):
                    if self._closed:
                        self._thread = self._ident = None
                        return None
                    # After a batch, one more look by itself saves callers from waking this thread.
                    pause = min(step.seconds, linger)
                    self._wakes_at = now + pause
                    return min(pause, PATIENCE_S) if self._sleepers else pause
                self._wakes_at = -math.inf
            self._serve(step)
            linger = self._rules.timeout or math.inf

    def wake_all(self) -> None:
        """Wake all callers whose results are ready."""
        while self._wake_next():
            pass

    def _wake_next(self) -> bool:
        """Wake one of them; False if there is none."""
        try:
            while True:
                call = self._sleepers.popleft()
                _open_gate(call.lock)
                if not call.gone:  # a caller that has gone wakes nobody; one that goes later wakes one on leaving
                    return True
        except IndexError:
            return False

    def _serve(self, batch: Batch) -> None:
        try:
            over = self._work.run(batch, self.tally)
        except BaseException as error:  # not the function's, whose errors `run` keeps: every caller must be answered
            over = fail([entry for entry, _, _ in batch.parts], ordinary(error))
        self._deliver(over)

    def _deliver(self, over: Sequence[Call]) -> None:
        self.wake_all()
        blocked = []
        for call in over:
            if call.missing:
                self.drop(call)
            if call.loop is None:
                blocked.append(call)
        self._sleepers.extend(blocked)
        for _ in range(HEADS):
            self._wake_next()
        if len(blocked) < len(over):
            wake_loops(over)

    def _start(self) -> None:
        gate = self._gate
        name = f"gristmill {getattr(self._work.function, '__name__', 'batches')}"
        # The callback opens the gate when the lane is collected, so that the thread notices. It takes no lock: it may
        # run anywhere.
        watched = weakref.ref(self, lambda _: _open_gate(gate))
        thread = threading.Thread(target=_drive, args=(watched, gate), name=name, daemon=True)
        thread.start()
        self._thread = thread

    def _end_pending(self) -> None:
        with self._lock:
            over = fail(self._policy, BatcherClosed("the batcher was closed while the call waited"))
        self._deliver(over)


def _drive(watched: Callable[[], ThreadLane | None], gate: Any) -> None:
    while (lane := watched()) is not None:
        try:
            with nesting.running(lane):
                pause = lane.turn(gate)
        except BaseException as error:  # out of memory, perhaps: the function's own errors do not come here
            lane.give_up(error)
            raise
        del lane  # or this thread would keep it alive while it sleeps
        if pause is None:
            return
        if not gate.acquire(timeout=pause if pause < threading.TIMEOUT_MAX else -1) and (lane := watched()) is not None:
            lane.wake_all()


def _closed_gate() -> Any:
    gate = allocate_lock()
    gate.acquire()
    return gate


def _open_gate(gate: Any) -> None:
    try:  # noqa: SIM105 (cheaper than a context, and on the way of every call)
        gate.release()
    except RuntimeError:  # it is open
        pass


_lanes: weakref.WeakSet[ThreadLane] = weakref.WeakSet()
_exiting = False


def _at_exit() -> None:
    global _exiting  # noqa: PLW0603
    _exiting = True
    deadline = clock() + EXIT_S
    lanes = list(_lanes)
    for lane in lanes:
        lane.close(cancel=True, timeout=0.0)
    for lane in lanes:
        lane.close(cancel=True, timeout=max(0.0, deadline - clock()))


def _in_child() -> None:
    nesting.after_fork()
    for lane in list(_lanes):
        lane.renew()


atexit.register(_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
