"""The worker's side of a parallel map: it holds the function and calls it, chunk after chunk. It imports next to
nothing, so that the first result comes soon.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import itertools
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from gristmill.errors import PlanChanged
from gristmill.parallel import transport
from gristmill.parallel.pickles import Bundle, Unread, opened, seal_back
from gristmill.parallel.transport import Fault, Parcel, fault_of
from gristmill.process.messages import Emit, Event, Failure, Item, Outcome, Printed
from gristmill.process.ownstderr import flush, say
from gristmill.process.startup import UserCode, thread_variables
from gristmill.process.timelimit import Deadline
from gristmill.values import dataclass

if TYPE_CHECKING:
    from gristmill.fingerprint.pins import Planned

FLUSH = 0.05  # seconds: results are not held back longer than this while a chunk is still running


@dataclass(frozen=True)
class Chunk:
    """Some inputs as a bundle, and their `numbers`."""

    numbers: tuple[int, ...]
    inputs: Parcel


@dataclass(frozen=True)
class Answers:
    """Results of calls: `values` is a bundle of the results of `numbers`; `faults` are the inputs without a result.

    `seconds` is the time that the calls took.
    """

    numbers: tuple[int, ...] = ()
    values: Parcel | None = None
    faults: tuple[tuple[int, Fault], ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True)
class Some(Event):
    """Results of a chunk that is still running."""

    key: str = ""
    answers: Answers = Answers()


@dataclass(frozen=True)
class CallStages:
    """What an engine ships to each worker: the function, once. `folder` is a disk that caller and worker share, if any.

    `threads` are the cores that one call may use; `gpus` are given to workers one each; `timeout` is in seconds per
    call; `plain` is as in `shipping`. `planned` is what results depend on: values of modules, modules, files
    (fingerprint.pins).
    """

    function: Any
    folder: str | None = None
    threads: int = 1
    gpus: tuple[str, ...] = ()
    timeout: float | None = None
    plain: bool = True
    planned: tuple[Any, Any, Any] = ((), (), ())

    def environment(self, index: int) -> Mapping[str, str]:
        """Thread counts and the one GPU of worker `index`; maps inside calls get the same cores."""
        variables = {**thread_variables(self.threads), CORES: str(self.threads)}
        if self.gpus:
            variables["CUDA_VISIBLE_DEVICES"] = self.gpus[index % len(self.gpus)]
        return variables

    def open(self, name: str, emit: Emit) -> CallWorker:
        """Nothing here is slow: slow work is done by the function's first call. Its prints are sent line by line."""
        told = Told(name, emit)
        sys.stdout, transport.plain = told, self.plain
        held, modules, _ = self.planned
        if held:
            from gristmill.fingerprint.pins import unlike

            for text in unlike(held, modules):
                say(f"warning: {text}")
        return CallWorker(self, name, told)


CORES = "GRISTMILL_CORES"  # cores that a map may use: set in workers, so that nested maps do not multiply


class CallWorker:
    """Calls the function for the inputs it is given. The function object stays, with whatever it stores on itself."""

    def __init__(self, stages: CallStages, name: str, told: Told) -> None:
        self._stages = stages
        self._told = told
        self._name = name
        self._stopping = threading.Event()
        self._planned: Planned | None = None
        _, modules, files = stages.planned
        if modules or files:
            from gristmill.fingerprint.pins import Planned

            self._planned = Planned(modules, files, "call the map again")
        late = None
        if stages.timeout is not None and stages.folder is not None:
            late = os.open(_late_path(stages.folder, name), os.O_WRONLY | os.O_CREAT, 0o600)
        self._deadline = Deadline(late)

    def silence(self) -> float:
        """See messages.Worker. A call without a timeout may hold the GIL for ever: it is given up only if its process
        is stopped, which is reported to the parent.
        """
        self._deadline.enforce()
        return math.inf if self._stages.timeout is None else self._stages.timeout

    def stop(self) -> None:
        self._stopping.set()

    def work(self, items: Iterator[Item], emit: Emit) -> None:
        """Every item to its Outcome, whose value is an Answers with the results not sent before. What a call is given
        and returns is its own: created just before it, and sealed before the next.
        """
        for item in items:
            if self._stopping.is_set():
                return
            self._called(item, emit)

    def _called(self, item: Item, emit: Emit) -> None:
        chunk: Chunk = item.value
        batch = _Batch(self._stages.folder)
        for number, value in zip(chunk.numbers, opened(chunk.inputs), strict=True):
            if self._stopping.is_set():
                return
            begun = time.monotonic()
            if type(value) is Unread:
                batch.failed(number, fault_of(value.error))
            else:
                self._call(number, value, batch)
            batch.seconds += time.monotonic() - begun
            if time.monotonic() - batch.since > FLUSH and number != chunk.numbers[-1]:
                if (changed := self._changed()) is not None:
                    emit(Outcome(self._name, item.key, error=changed))
                    return
                emit(Some(self._name, item.key, batch.answers()))
                batch = _Batch(self._stages.folder)
        flush()
        self._told.flush()  # also if the call has put something else in its place
        changed = self._changed()
        emit(Outcome(self._name, item.key, batch.answers() if changed is None else None, changed))

    def _changed(self) -> Failure | None:
        """A change to code, or to files it names, on which the results depend: then none of these results is sent."""
        try:
            if self._planned is not None:
                self._planned.look()
        except PlanChanged as e:
            return fault_of(e).failure
        return None

    def _call(self, number: int, value: Any, batch: _Batch) -> None:
        self._arm()
        try:
            with UserCode():
                result = self._stages.function(*value) if isinstance(value, tuple) else self._stages.function(value)
        except BaseException as e:  # also SystemExit: an input's failure never ends the worker
            self._disarm()
            batch.failed(number, fault_of(e))
        else:
            self._disarm()
            batch.returned(number, result)

    def _arm(self) -> None:
        """End the process, with its stacks written, if the call takes too long, even if it holds the GIL."""
        if self._stages.timeout is not None:
            self._deadline.set(self._stages.timeout)

    def _disarm(self) -> None:
        if self._stages.timeout is not None:
            self._deadline.clear()


def _late_path(folder: str, worker: str) -> str:
    return os.path.join(folder, f"late-{worker}")


def late_at(folder: str | None, worker: str) -> str | None:
    """Where a worker was when its call took too long: the lines of a traceback, with only the user's own frames. None
    if it ended for another reason, or on a disk that this process does not see.
    """
    if folder is None:
        return None
    with contextlib.suppress(FileNotFoundError), open(_late_path(folder, worker), errors="replace") as file:
        *others, of_calls = file.read().split("\nThread ")  # the main thread comes last
        if not others:
            return None
        frames = [line for line in of_calls.splitlines() if line.startswith("  File ")]
        own = itertools.takewhile(lambda line: __file__ not in line, frames)
        return "\n".join(reversed(list(own)))
    return None


class Told(io.TextIOBase):
    """A standard output whose lines are events, so that all of them reach the caller, on the right stream. A forked
    child, whose events would mix with those of the worker, writes to the process's own output instead.
    """

    encoding = "utf-8"
    errors = "replace"

    def __init__(self, name: str, emit: Emit) -> None:
        self._name = name
        self._emit = emit
        self._parts: list[str] = []
        self._lock = threading.RLock()  # user code may print from its own threads
        self._process = os.getpid()
        self.buffer = _ToldBytes(self)

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        """Text is kept until the end of a line."""
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        self.add(text, str)
        return len(text)

    def add(self, data: Any, decoded: Callable[[Any], str]) -> None:
        """Adds text, or bytes, to the pending text."""
        if os.getpid() != self._process:  # the lock may have been held by a thread that does not exist here
            _write_all(data if isinstance(data, bytes) else data.encode("utf-8", "backslashreplace"))
            return
        with self._lock:
            text = decoded(data)
            self._parts.append(text)
            if "\n" in text:
                self._send()

    def flush(self) -> None:
        if os.getpid() == self._process:
            with self._lock:
                self._parts.append(self.buffer.rest())
                self._send()

    def _send(self) -> None:
        text, self._parts = "".join(self._parts), []
        if text:
            self._emit(Printed(self._name, text, "stdout"))

    def reconfigure(self, **options: Any) -> None:
        """As for a text file, for code that sets encodings: here any text is accepted."""

    def fileno(self) -> int:
        """The descriptor of the process's own output, which the caller sees as standard error."""
        return 1


class _ToldBytes(io.BufferedIOBase):
    """The byte stream below a Told: its bytes are decoded as UTF-8."""

    def __init__(self, told: Told) -> None:
        self._told = told
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        """A character may come in several pieces."""
        data = memoryview(data).tobytes()
        self._told.add(data, self._decoder.decode)
        return len(data)

    def rest(self) -> str:
        """The text of a character that was left incomplete."""
        return self._decoder.decode(b"", final=True)

    def flush(self) -> None:
        self._told.flush()

    def close(self) -> None:
        """Does nothing: a wrapper that one call leaves behind would close it for later calls."""


def _write_all(data: bytes) -> None:
    while data:
        data = data[os.write(1, data) :]


class _Batch:
    """Results that wait to be sent."""

    def __init__(self, folder: str | None) -> None:
        self.seconds = 0.0
        self.since = time.monotonic()
        self._bundle = Bundle(folder)
        self._numbers: list[int] = []
        self._faults: list[tuple[int, Fault]] = []

    def returned(self, number: int, value: Any) -> None:
        """A call came back. What cannot be pickled is a failure."""
        try:
            self._bundle.add(seal_back(value))
        except Exception as e:
            self.failed(number, fault_of(TypeError(f"the result cannot be pickled: {e}")))
        else:
            self._numbers.append(number)

    def failed(self, number: int, fault: Fault) -> None:
        self._faults.append((number, fault))

    def answers(self) -> Answers:
        """What to send."""
        values = self._bundle.parcel() if self._numbers else None
        return Answers(tuple(self._numbers), values, tuple(self._faults), self.seconds)
