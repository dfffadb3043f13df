"""What a parallel map runs next, and what a failure means. Pure decisions, fed with events (see messages.Feed)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import field
from typing import Any

from gristmill.errors import BadJob, PlanChanged, RemoteError, WorkerLost
from gristmill.parallel.calling import Answers, Chunk, Some
from gristmill.parallel.inputs import Inputs, Numbered, Order
from gristmill.parallel.pickles import Bundle, Unread, opened, seal
from gristmill.parallel.transport import Fault, fault_of
from gristmill.process.failure import ended
from gristmill.process.messages import DONE, WAIT, Death, Event, Failure, Item, Left, Outcome, Signal, Started
from gristmill.values import dataclass

CHUNK_SECONDS = 0.03  # work in one message: enough to make its cost small, little enough to share work out evenly
CHUNK_BYTES = 4 << 20  # bytes of inputs that one message should hold
MOST = 512  # inputs in one message
GROWTH = 4  # a chunk is at most this many times the last: one quick call says little about the next
ORDERED_AHEAD = 512  # inputs that a worker may be ahead of the first missing result, if order is kept
UNSTARTED = 3  # workers in a row that may end before they have started
LATE = "the call took longer than its timeout"
LOST = 5  # times that an input may lose its machine


@dataclass(frozen=True)
class CallResult:
    """What became of input `number`: a value, or a fault."""

    number: int
    input: Any
    value: Any = None
    fault: Fault | None = None


@dataclass
class CallFeed:
    """Hands out chunks of inputs; large ones go through files of `folder`. An input whose call raises or whose worker
    ends gets `retries` more tries. If `timed`, calls have a timeout, and each is a message of its own; `late_at` tells
    where a worker was that ended because of it, None for one that ended otherwise.
    """

    inputs: Inputs
    workers: int
    folder: str | None = None
    retries: int = 0
    timed: bool = False
    ordered: bool = False
    late_at: Callable[[str], str | None] = lambda worker: None

    fatal: Exception | None = None
    _again: deque[list[Numbered]] = field(default_factory=deque)
    _out: dict[str, dict[int, Any]] = field(default_factory=dict)
    _with: dict[str, str] = field(default_factory=dict)  # the worker that has each item
    _quick: bool = False  # whether calls are so short that a worker should not have to wait for the next
    _tries: dict[int, int] = field(default_factory=dict)
    _lost: dict[int, int] = field(default_factory=dict)
    _serial: int = 0
    _size: int = 1
    _most: int = MOST  # fewer if inputs are large
    _unstarted: int = 0
    _order: Order = field(default_factory=Order)  # of inputs taken, if order is kept
    _unsent: list[CallResult] = field(default_factory=list)  # of inputs that cannot be pickled

    # ------------------------------------------------ the engine asks

    def wanted(self) -> int:
        """Workers worth having now."""
        if self.fatal is not None:
            return 0
        left = self.inputs.left
        if left is None:
            left = 0 if self.inputs.ended else self.workers
        return min(self.workers, left + len(self._again) + len(self._out) + len(self._unsent))

    def take(self, worker: str) -> Item | Signal:
        """An Item, WAIT or DONE."""
        if self.fatal is not None:
            return DONE
        if worker in self._with.values() and not self._may_wait():
            return WAIT
        while self._again:
            if (item := self._given(worker, self._again.popleft())) is not None:
                return item
        some: list[Numbered] = []
        if not self._too_far():
            try:
                some = self.inputs.take(self._chunk())
            except Exception as e:  # the caller's own iterator
                self.fatal = e
                return DONE
        if self.ordered:
            for number, _ in some:
                self._order.begin(number)
        if some:
            item = self._given(worker, some)
            return self.take(worker) if item is None else item
        return DONE if self.inputs.ended and not self._out and not self._unsent else WAIT

    def _chunk(self) -> int:
        left = self.inputs.left
        size = 1 if self.timed else self._size
        if left is not None:  # near the end, a share for every worker
            size = max(1, min(size, left // (2 * self.workers)))
        self.inputs.ahead = 2 * size * self.workers
        return size

    def _may_wait(self) -> bool:
        """Whether inputs may wait with a busy worker, so that it continues at once: only if calls are quick and many
        are left. Behind a slow call they would wait for it while other workers are idle.
        """
        left = self.inputs.left
        return self._quick and (left is None or left > 4 * self.workers)

    def _too_far(self) -> bool:
        return self.ordered and self._order.beyond > ORDERED_AHEAD * self.workers

    def _given(self, worker: str, some: list[Numbered]) -> Item | None:
        """The first of these inputs as an item, as many as one message should hold; the others come next. `on` reports
        those that cannot be sent; None if these are all.
        """
        bundle = Bundle(self.folder)
        sent: dict[int, Any] = {}
        for place, (number, value) in enumerate(some, 1):
            try:
                bundle.add(seal(value))
            except Exception as e:
                self._unsent.append(CallResult(number, value, None, fault_of(e)))
                continue
            sent[number] = value
            if bundle.size > CHUNK_BYTES:
                self._most = max(1, len(sent) * CHUNK_BYTES // bundle.size)
                if some[place:]:
                    self._again.appendleft(some[place:])
                break
        if not sent:
            return None
        self._serial += 1
        key = str(self._serial)
        self._out[key] = sent
        self._with[key] = worker
        return Item(key, Chunk(tuple(sent), bundle.parcel()))

    # ------------------------------------------------ the engine reports

    def on(self, event: Event) -> Iterable[CallResult]:
        """The results that an event settles."""
        unsent, self._unsent = self._unsent, []
        return [*map(self._settled, unsent), *self._on(event)]

    def _on(self, event: Event) -> Iterable[CallResult]:
        if isinstance(event, Some):
            return self._answered(event.key, event.answers)
        if isinstance(event, Outcome):
            return self._ended(event)
        if isinstance(event, Death):
            return self._died(event)
        if isinstance(event, Left):
            for key in event.keys:
                self._put_back(key)
        elif isinstance(event, Started):
            self._unstarted = 0
        return ()

    @property
    def running(self) -> int:
        """Inputs that are with workers."""
        return sum(map(len, self._out.values()))

    def _ended(self, event: Outcome) -> Iterable[CallResult]:
        if event.error is not None:
            self.fatal = _not_run(event.error)
            return ()
        results = list(self._answered(event.key, event.value))
        self._put_back(event.key)
        return results

    def _answered(self, key: str, answers: Answers) -> Iterable[CallResult]:
        waiting = self._out.get(key, {})
        values = () if answers.values is None else opened(answers.values)
        for number, value in zip(answers.numbers, values, strict=True):
            if number in waiting and type(value) is Unread:
                yield self._settled(CallResult(number, waiting.pop(number), None, fault_of(value.error)))
            elif number in waiting:
                yield self._settled(CallResult(number, waiting.pop(number), value))
        for number, fault in answers.faults:
            if number in waiting:
                yield from self._failed(number, waiting.pop(number), fault)
        calls = len(answers.numbers) + len(answers.faults)
        if calls:
            self._quick = answers.seconds / calls < CHUNK_SECONDS
            fit = int(CHUNK_SECONDS * calls / max(answers.seconds, 1e-9))
            self._size = max(1, min(fit, self._size * GROWTH, self._most))

    def _failed(self, number: int, value: Any, fault: Fault) -> Iterable[CallResult]:
        self._tries[number] = self._tries.get(number, 0) + 1
        if self._tries[number] <= self.retries:
            self._again.append([(number, value)])
        else:
            yield self._settled(CallResult(number, value, None, fault))

    def _settled(self, result: CallResult) -> CallResult:
        self._tries.pop(result.number, None)
        if self.ordered:
            self._order.end(result.number)
        return result

    def _put_back(self, key: str) -> None:
        left = self._out.pop(key, {})
        self._with.pop(key, None)
        if left:
            self._again.appendleft(list(left.items()))

    def _died(self, death: Death) -> Iterable[CallResult]:
        if not death.started:
            self._unstarted += 1
            if self._unstarted >= UNSTARTED:
                self.fatal = WorkerLost(
                    f"{self._unstarted} workers in a row ended while starting ({self._how(death)})\n{death.evidence}"
                )
        results: list[CallResult] = []
        for place, key in reversed(list(enumerate(death.keys))):
            left = self._out.get(key, {})
            if place == 0 and death.started and left and not self._gone(death, left):
                del self._out[key], self._with[key]
                if len(left) == 1:
                    ((number, value),) = left.items()
                    results += self._failed(number, value, self._death_of(death))
                else:  # which input it was shows when each is called alone
                    self._again.extendleft([[pair] for pair in reversed(list(left.items()))])
            else:
                self._put_back(key)
        return results

    def _gone(self, death: Death, left: dict[int, Any]) -> bool:
        """Whether the worker went with its machine, for which its inputs are not to blame, unless it happens often. A
        call that was silent for longer than its timeout took too long, whatever the reason.
        """
        if not death.lost or (self.timed and death.silent):
            return False
        for number in left:
            self._lost[number] = self._lost.get(number, 0) + 1
        return max(self._lost[n] for n in left) < LOST

    def _death_of(self, death: Death) -> Fault:
        if self.timed and (frames := self.late_at(death.worker)) is not None:
            *_, last = frames.splitlines() or [""]
            told = f"{LATE}: {last.strip()}" if last else LATE
            trace = f"Traceback (most recent call last):\n{frames}" if frames else ""
            return Fault(Failure("timeout", "CallTimeout", told, trace))
        how = self._how(death)
        if how == LATE or (self.timed and death.silent):
            return Fault(Failure("timeout", "CallTimeout", how, death.evidence[-4000:]))
        tail = death.evidence.strip()[-4000:]
        text = f"its worker died ({how}) while it ran this input alone" + (
            f"; its last output:\n{tail}" if tail else ""
        )
        return Fault(Failure("other", "WorkerLost", text), died=True)

    def _how(self, death: Death) -> str:
        return ended(death, LATE if self.timed else "")  # without a limit, user code may print the same


def _not_run(failure: Failure) -> Exception:
    for kind in (BadJob, PlanChanged):
        if failure.ours == kind.__name__:
            return kind(failure.message)
    text = f"a worker could not run the function: {failure.type}: {failure.message}\n{failure.traceback}"
    return RemoteError(text.rstrip())
