"""A parallel map at work: inputs through an engine, results as they come."""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import operator
import os
import shutil
import sys
import tempfile
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sized
from typing import Any, TextIO

from gristmill.engines.registry import engine_kind, open_engine
from gristmill.errors import PlanChanged, RunFailed
from gristmill.job.options import EngineSpec
from gristmill.parallel.calling import CallStages, late_at
from gristmill.parallel.checkpoint import Kept, checkpoint, code_digest, key_of
from gristmill.parallel.inputfeed import CallFeed, CallResult
from gristmill.parallel.inputs import Inputs, Known, Numbered, Order
from gristmill.parallel.pickles import Sealed, seal
from gristmill.parallel.progress import Line
from gristmill.parallel.transport import revived
from gristmill.process.forks import never_destroyed
from gristmill.process.messages import Event, Printed, Waiting
from gristmill.process.scratch import Folder
from gristmill.process.startup import import_path
from gristmill.values import dataclass

GRACE = 0.5  # seconds that calls which are no longer wanted are given to end
_NONE = object()


def _nothing() -> None:
    """The default `watch`: nothing to watch."""


@dataclass(frozen=True)
class Mapping:
    """How a function is mapped: where, how often, and what is done with results."""

    engine: EngineSpec
    workers: int
    threads: int = 1
    gpus: tuple[str, ...] = ()
    ordered: bool = False
    return_exceptions: bool = False
    retries: int = 0
    timeout: float | None = None
    checkpoint: str | None = None
    spinner: bool = True


def mapped(function: Any, values: Iterable[Any], how: Mapping) -> Generator[Any, None, None]:
    """Results as they come, or in order; begins at once (see `delivered`)."""
    return delivered(results(function, values, how), how.ordered, how.return_exceptions)


def delivered(
    found: Generator[CallResult, None, None], ordered: bool, return_exceptions: bool
) -> Generator[Any, None, None]:
    """What a caller is given. Raises the first exception of a call at once, but that of a worker which died only after
    the other inputs have finished.
    """
    died: list[Exception] = []
    early: dict[int, Any] = {}
    first = 0
    with contextlib.closing(found):
        for result in found:
            value = result.value
            if result.fault is not None:
                error = revived(result.fault, result.number, result.input)
                if not return_exceptions and not result.fault.died:
                    raise error
                value = error if return_exceptions else _NONE
                if not return_exceptions:
                    died.append(error)
            early[result.number if ordered else first] = value
            while first in early:
                if (value := early.pop(first)) is not _NONE:
                    yield value
                first += 1
    if died:
        notes = [f"and also: {error}" for error in died[1:]]
        died[0].__notes__ = [*getattr(died[0], "__notes__", []), *notes]  # type: ignore[attr-defined]
        raise died[0]


def results(
    function: Any, values: Iterable[Any], how: Mapping, watch: Callable[[], None] = _nothing
) -> Generator[CallResult, None, None]:
    """What became of each input, as soon as it is known. Calls have begun when this returns, unless the first input is
    slow to come. Closing the iterator ends all workers. `watch` is called several times a second, and ends the map by
    raising.
    """
    found: Any = _results(function, values, how, watch)
    next(found)
    return found  # type: ignore[no-any-return]


def _results(
    function: Any, values: Iterable[Any], how: Mapping, watch: Callable[[], None]
) -> Generator[CallResult | None, None, None]:
    """None, once, when calls have begun; then results."""
    process = os.getpid()
    with contextlib.ExitStack() as stack:
        _open.add(stack)
        for result in _found(function, values, how, watch, stack):
            yield result
            if os.getpid() != process:
                raise RunFailed("a map belongs to the process that began it, and cannot go on in a fork of it")


_open: weakref.WeakSet[contextlib.ExitStack] = weakref.WeakSet()  # what ends each map


@atexit.register
def _close_all() -> None:
    """Maps that were left unfinished end before the interpreter does: later, its threads can no longer be joined."""
    for stack in list(_open):
        with contextlib.suppress(ValueError):  # another thread is inside
            stack.close()


def _forget_all() -> None:
    """In a fork, maps belong to the parent: its workers and files stay, and its threads are not here to be joined. The
    reference keeps them to the very end of the interpreter, which would otherwise close what nothing refers to.
    """
    for stack in list(_open):
        never_destroyed(stack.pop_all())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)


def _found(
    function: Any, values: Iterable[Any], how: Mapping, watch: Callable[[], None], stack: contextlib.ExitStack
) -> Iterator[CallResult | None]:
    """None, then the results; what has to be closed afterwards goes on the stack."""
    memory: _Memory | None = None
    planned: tuple[Any, Any, Any] = ((), (), ())
    if how.checkpoint is None:
        inputs = Inputs(enumerate(owned(values)), length(values))
    else:
        from gristmill.fingerprint.selfwritten import Watch

        kept = checkpoint(how.checkpoint)
        stack.callback(kept.close)
        code, looked, planned = code_digest(function, kept)
        held, modules, files = planned
        planned = held, modules, ()  # files are looked at here, modules where they are loaded
        memory = _Memory(kept, code, how.ordered, files)
        stack.callback(memory.end)
        stack.enter_context(Watch(looked, kept.note_written))
        if length(values) is not None:
            missing: list[Numbered] = []
            known: list[Known] = []
            for found in memory.sorted(values):
                known.append(found) if isinstance(found, Known) else missing.append(found)
            inputs = Inputs(missing, len(missing), known)
        else:
            inputs = Inputs(memory.sorted(values), None)
    stack.callback(inputs.close)
    folder = None
    if engine_kind(how.engine).here:  # workers see the caller's disk
        with contextlib.suppress(OSError):  # no room there: slower, but values still arrive
            made = Folder("gristmill-map-", _in_memory() or tempfile.gettempdir())
            stack.callback(made.remove)
            folder = made.path
    if late := not inputs.wait():
        yield None
    while late and not inputs.wait():
        watch()
        if memory is not None:
            yield from memory.known(inputs)
    feed = CallFeed(
        inputs,
        how.workers,
        folder,
        how.retries,
        timed=how.timeout is not None,
        ordered=how.ordered,
        late_at=functools.partial(late_at, folder),
    )
    line = stack.enter_context(Line(name_of(function), inputs.total, how.spinner))
    events = stack.enter_context(contextlib.closing(_events(function, feed, how, folder, planned)))
    if late:
        yield from _run(feed, events, line, memory, watch)
    else:
        first = next(events, Event(""))
        yield None
        yield from _run(feed, itertools.chain([first], events), line, memory, watch)


def _run(
    feed: CallFeed, events: Iterable[Event], line: Line, memory: _Memory | None, watch: Callable[[], None]
) -> Iterator[CallResult]:
    done = 0
    for event in events:
        watch()
        if isinstance(event, Printed):
            _show(event.text, sys.stdout if event.stream == "stdout" else sys.stderr)
        elif isinstance(event, Waiting) and event.reason:
            line.say(event.reason)
        for result in feed.on(event):
            done += 1
            if memory is not None:
                memory.keep(result)
            yield result
        if memory is not None:
            memory.settle(LATE)
            yield from memory.known(feed.inputs)
        line.update(done, feed.running)
        if feed.fatal is not None:
            break
    if memory is not None:
        memory.settle()
        yield from memory.known(feed.inputs)
    if feed.fatal is not None:
        raise feed.fatal


def _show(text: str, stream: TextIO | None) -> None:
    """Write text so that a character which the stream cannot encode does not end the map. It is checked first: the
    stream may be the progress line's, which would keep the text and fail on it again. Without a stream (a daemon),
    nothing is written, as with print.
    """
    if stream is None:
        return
    encoding = getattr(stream, "encoding", None)  # None if it takes any text
    if encoding:
        try:
            text.encode(encoding, getattr(stream, "errors", None) or "strict")
        except UnicodeEncodeError:
            text = text.encode(encoding, "backslashreplace").decode(encoding)
    stream.write(text)
    stream.flush()


def _events(function: Any, feed: CallFeed, how: Mapping, folder: str | None, planned: tuple[Any, Any, Any]) -> Any:
    import cloudpickle

    plain = not cloudpickle.list_registry_pickle_by_value()
    stages = CallStages(function, folder, how.threads, how.gpus, how.timeout, plain, planned)
    engine = how.engine
    if "grace" in engine.own_names:
        engine = EngineSpec(engine.name, options={**engine.options, "grace": GRACE})
    return open_engine(engine, how.workers, import_path(), bool(how.gpus)).run(stages, feed)


class _Memory:
    """A checkpoint: its results are available at once, the other inputs are computed and kept. Values are read on
    demand; if results are `ordered`, not before those of earlier inputs.
    """

    def __init__(self, kept: Kept, code: str, ordered: bool, files: tuple[Any, ...]) -> None:
        from gristmill.fingerprint.pins import Planned

        self.kept = kept
        self._files = Planned((), files, AGAIN) if files else None
        self._computed: list[tuple[str, Any, None]] = []
        self._looked, self._took = time.monotonic(), 0.0
        self._code = code
        self._keys: dict[int, str] = {}
        self._order = Order() if ordered else None

    def sorted(self, values: Iterable[Any]) -> Iterator[Numbered | Known]:
        """Tells inputs whose results are known from those that must be computed."""
        for number, value in enumerate(values):
            try:
                key = key_of(self._code, value.value() if type(value) is Sealed else value)
            except Exception:  # a value without a digest cannot be sent either, and fails alone
                key = None
            if key is not None and self.kept.has(key):
                yield Known(number, key)
                continue
            if key is not None:
                self._keys[number] = key
            if self._order is not None:
                self._order.begin(number)
            yield number, value if type(values) in _HOLD else _owned(value)

    def known(self, inputs: Inputs) -> Iterator[CallResult]:
        """The known results that are due."""
        first = None if self._order is None else self._order.first
        return map(self.read, inputs.known(first))

    def read(self, known: Known) -> CallResult:
        found = self.kept.find(known.key)
        assert found is not None
        return CallResult(known.number, None, found[0])

    def keep(self, result: CallResult) -> None:
        """Keep a computed result, once `settle` has found the files that the callable names unchanged."""
        key = self._keys.pop(result.number, None)
        if self._order is not None:
            self._order.end(result.number)
        if key is not None and result.fault is None:
            self._computed.append((key, result.value, None))

    def end(self) -> None:
        """For a map that ends early: what it has computed is kept, unless its files have changed."""
        with contextlib.suppress(PlanChanged):
            self.settle()

    def settle(self, after: float = 0.0) -> None:
        """Store what has been computed, if `after` seconds have passed since the last look at the files, and 20 times
        as long as that look took. Raises PlanChanged if a file has changed: what was computed since is not kept.
        """
        now = time.monotonic()
        if not self._computed or (after and now - self._looked < max(after, 20 * self._took)):
            return
        if self._files is not None:
            self._files.look()
            self._looked = time.monotonic()
            self._took = self._looked - now
        self.kept.add(self._computed)
        self._computed.clear()


AGAIN = "call the map again with what is there now"
LATE = 0.05  # seconds for which results may wait to be kept

_HOLD = (list, tuple, range, dict, set, frozenset, deque)  # whose items exist already, and stay what they are


def owned(values: Iterable[Any]) -> Iterable[Any]:
    """The values, each as it is when it is read: an iterator may change an item that it gave when it is asked for the
    next, and inputs are read ahead.
    """
    return values if type(values) in _HOLD else map(_owned, values)


def _owned(value: Any) -> Any:
    try:
        return seal(value)
    except Exception:  # reported when it is to be sent
        return value


def length(values: Iterable[Any]) -> int | None:
    """How many values it says it has; None if it does not say, or says none, which may be wrong."""
    return (operator.length_hint(values) if isinstance(values, Sized) else 0) or None


def name_of(function: Any) -> str:
    """The name of a function in a progress line."""
    name = getattr(function, "__name__", None) or getattr(getattr(function, "func", None), "__name__", None)
    return name or type(function).__name__


def _in_memory() -> str | None:
    """A folder in memory for large values, if there is one with room."""
    folder = "/dev/shm"
    try:
        free = shutil.disk_usage(folder).free
    except OSError:
        return None
    return folder if os.access(folder, os.W_OK) and free > 1 << 30 else None
