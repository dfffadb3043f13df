"""What passes between a driver, an engine and its workers: items, a feed that decides, events, and failures as text."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import field
from typing import Any, Literal, Protocol

from gristmill.values import dataclass


@dataclass(frozen=True)
class Item:
    """A piece of work for an engine, which does not look inside `value`.

    `portions` are set in a worker if the first stage runs elsewhere: what that stage has made of the item, in order;
    iterating them raises `Elsewhere` if the first stage failed.
    """

    key: str
    value: Any
    portions: Iterable[bytes | memoryview] | None = None


class Signal:
    """What a feed returns when it has no item."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name


WAIT = Signal("WAIT")  # nothing now; ask again after the next event
DONE = Signal("DONE")  # nothing ever again


class Feed(Protocol):
    """Decides what runs next. Called by one thread; never blocks."""

    def take(self, worker: str) -> Item | Signal:
        """An Item for this worker, WAIT or DONE."""
        ...

    def wanted(self) -> int:
        """How many workers are worth starting by now; an engine may have fewer."""
        ...


@dataclass(frozen=True)
class Event:
    """Something an engine reports. `at` is seconds on the monotonic clock of the driver."""

    worker: str


@dataclass(frozen=True)
class Started(Event):
    """A worker is ready: its model is loaded. `about` says what it runs on."""

    seconds: float = 0.0
    about: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Alive(Event):
    """A sign of life of a worker, which may now be silent for `limit` seconds before it is given up."""

    limit: float = math.inf


@dataclass(frozen=True)
class Stopped(Event):
    """A worker's process was stopped by a signal (SIGSTOP) or, if `over`, has been continued."""

    over: bool = False


@dataclass(frozen=True)
class Tick(Event):
    """The progress of an uncommitted attempt at an item: source rows that have answers, to the precision of a window,
    and how many of the item's positions are done.
    """

    key: str = ""
    rows: int = 0
    passed: int = 0


@dataclass(frozen=True)
class Printed(Event):
    """Text that user code printed: whole lines, except for `stream` "stdout", which is passed on as written. If a
    worker cannot tell the two streams apart, it is "stderr". "warning" is a warning of the worker itself.
    """

    text: str = ""
    stream: Literal["stdout", "stderr", "warning"] = "stderr"


@dataclass(frozen=True)
class Outcome(Event):
    """An item's end: a value, or an error as `Failure`."""

    key: str = ""
    value: Any = None
    error: Failure | None = None


@dataclass(frozen=True)
class Took(Event):
    """What a worker's threads did with their time, in seconds, by thread and work: told as it ends."""

    threads: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


# Exit code of a process whose pipe to the driver its code has closed, or written to: it can report nothing any more.
CLOSED = 71


@dataclass(frozen=True)
class Death(Event):
    """A worker ended without being asked. `keys` are the items it held, the first one was running.

    `lost` says how it was lost with its machine or taken away: then nothing that it ran is to blame. `silent`: it was
    given up because it gave no sign of life.
    """

    keys: tuple[str, ...] = ()
    evidence: str = ""
    exit_code: int | None = None
    signal: int | None = None
    started: bool = True
    lost: str = ""
    silent: bool = False


@dataclass(frozen=True)
class Left(Event):
    """A worker left by itself and wants to be replaced. `keys` are items that it had not begun and gives back."""

    keys: tuple[str, ...] = ()
    reason: str = ""


@dataclass(frozen=True)
class Portion(Event):
    """Part of what the first stage made of an item, on its way to the second; the last one has no body."""

    key: str = ""
    number: int = 0
    body: bytes | None = None
    failure: Failure | None = None
    last: bool = False


@dataclass(frozen=True)
class Taken(Event):
    """A worker has taken a portion of this item: there is room for another."""

    key: str = ""


class Elsewhere(Exception):
    """The first stage of an item failed in another process; without a `failure`, a Death reports it."""

    def __init__(self, failure: Failure | None) -> None:
        super().__init__("" if failure is None else failure.message)
        self.failure = failure


@dataclass(frozen=True)
class Waiting(Event):
    """The engine is waiting for something outside, to be shown to the user."""

    reason: str = ""


FailureKind = Literal[
    "row",
    "output",
    "undeclared",
    "load",
    "source",
    "space",
    "io",
    "model",
    "memory",
    "sick",
    "timeout",
    "uncounted",
    "job",
    "other",
]


@dataclass(frozen=True)
class Failure:
    """An exception as text, so that it crosses any boundary. `kind` says which decision it calls for.

    `kind` is "row", "output" (a broken contract), "undeclared" (other columns than the job declares), "load" (the model
    cannot load), "source" (source changed), "space" (disk), "io" (a disk that may recover), "model" (every row tried
    fails), "memory" (as "model"), "sick" (a row that worked in this process fails now), "timeout" (of a map's call),
    "uncounted" (rows are missing), "job" (it cannot run this way), "other". `type` is the name of the class, for
    people; `ours` is the class of gristmill.errors, "" for any other class. `step` is the name of the step that failed,
    "" for the model.
    """

    kind: FailureKind
    type: str
    message: str
    traceback: str = ""
    ours: str = ""
    step: str = ""

    @property
    def who(self) -> str:
        """The step, or the model."""
        return f"step {self.step}" if self.step else "the model"


Emit = Callable[[Event], None]


class Worker(Protocol):
    """User code at work in one process. If it has `silence()`, that returns for how many seconds it may be silent
    before it is given up (None: send no sign of life now); without it, the worker is never given up.
    """

    def work(self, items: Iterator[Item], emit: Emit) -> None:
        """Run items until there are no more, emitting an Outcome for each; may pull one ahead of the one it runs."""
        ...

    def stop(self) -> None:
        """From another thread: finish or drop the current batch and let `work` return soon."""
        ...


class Stages(Protocol):
    """What an engine ships to each worker once: picklable, opaque, opened where the work is done.

    `ahead`, if present, is the number of items a worker can use beyond the current one (default 1).
    """

    def open(self, name: str, emit: Emit) -> Worker:
        """Builds what lasts (models, readers). Slow; raises if user code cannot load."""
        ...

    def environment(self, index: int) -> Mapping[str, str]:
        """Variables that must be set before the interpreter of worker number `index` starts."""
        ...


class SplitStages(Stages, Protocol):
    """Stages of which the first can be placed separately from the others."""

    def first(self) -> Stages:
        """What to ship to workers of the first stage; they emit Portions instead of outcomes."""
        ...

    def apart(self, item: Item) -> bool:
        """Whether the two parts of this item may be done in different places."""
        ...
