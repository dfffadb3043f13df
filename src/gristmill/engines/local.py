"""The local engine: fresh interpreters on this machine, fed through pipes. It starts, feeds, watches and ends them."""

from __future__ import annotations

import contextlib
import gc
import importlib
import itertools
import math
import os
import pickle
import queue
import selectors
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from traceback import print_exception
from typing import Any, BinaryIO, NoReturn

from gristmill.engines import interpreter
from gristmill.engines.crew import BEAT, HELD, Crew, Ended, held_by
from gristmill.engines.interpreter import SPARES
from gristmill.engines.overheard import Overheard
from gristmill.plan.beats import give_signs, sign
from gristmill.plan.contracts import (
    DONE,
    WAIT,
    Alive,
    Elsewhere,
    Emit,
    Event,
    Feed,
    Item,
    Left,
    Outcome,
    Portion,
    Printed,
    Stages,
    Started,
    Stopped,
    Taken,
)
from gristmill.plan.ending import ENDING
from gristmill.plan.pickling import from_value
from gristmill.plan.processes import become_worker, heed_no_signals, packed, print_whole_lines
from gristmill.plan.spawning import Spawner

GRACE = 10.0  # seconds between asking a worker to stop and killing it (contract: out within 12 s)
ROOM = 1 << 20  # bytes that a pipe to a worker holds, so that most messages are written in one go
KILLED = 1.0  # seconds that the kernel has to end those that are killed
WITHDRAWN = -1  # the number of a portion that says that no more of its item will come
_HEADER = struct.Struct("<Q")

if sys.platform == "linux":
    import fcntl


def send(pipe: BinaryIO, message: Any) -> None:
    """One length-prefixed pickle."""
    data = pickle.dumps(message, protocol=5)
    pipe.write(_HEADER.pack(len(data)) + data)
    pipe.flush()


def receive(pipe: BinaryIO) -> Any:
    """The next message. Raises EOFError at the end of the stream."""
    header = pipe.read(_HEADER.size)
    if len(header) < _HEADER.size:
        raise EOFError
    length = _HEADER.unpack(header)[0]
    data = pipe.read(length)
    if len(data) < length:  # it was killed while it spoke
        raise EOFError
    return pickle.loads(data)


# ---------------------------------------------------------------- driver


class Local:
    """Runs items in `workers` fresh interpreters, or in the calling process for 0.

    `path` is put before sys.path in the workers. A worker that dies is replaced for as long as the feed has items.
    """

    def __init__(self, workers: int = 1, path: tuple[str, ...] = (), grace: float = GRACE) -> None:
        self._workers = workers
        self._path = path
        self._grace = grace

    def run(self, stages: Stages, feed: Feed) -> Iterator[Event]:
        """Events until the feed is done. Closing the iterator ends all workers; none is left running."""
        return _InProcess(stages, feed).events() if self._workers == 0 else self._events(stages, feed)

    def _events(self, stages: Stages, feed: Feed) -> Iterator[Event]:
        payload = packed(stages)
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        spawner = Spawner()
        processes: dict[str, Process] = {}

        def start(name: str, index: int) -> Process:
            environment = stages.environment(index)
            processes[name] = spawner.call(lambda: Process(name, self._path, environment, payload, events.put))
            if len(processes) == self._workers:
                SPARES.end()
            return processes[name]

        crew = Crew(feed, self._workers, start, events, held_by(stages))
        try:
            yield from crew.events()
        finally:
            end(list(processes.values()), self._grace)
            spawner.close()


class Process:
    """A worker in a fresh interpreter below this process. What it reports, prints, and at last its end goes to `emit`.

    Make it in a thread that lasts (`Spawner`): the kernel ends it when the thread that made it ends.
    """

    ready = True

    def __init__(
        self, name: str, path: Sequence[str], environment: Mapping[str, str], payload: bytes, emit: Emit
    ) -> None:
        popen = SPARES.take(path, environment) or interpreter.start(path, environment)
        self.popen = popen
        self.outbox = Outbox(popen)
        self.outbox.put((name, {**os.environ, **environment}, payload))
        overheard = Overheard()
        listening = [_thread(_listen, popen, name, emit), _thread(_overhear, popen, overheard, name, emit)]
        _thread(_await, popen, overheard, name, emit, listening)

    def give(self, item: Item | Portion | None) -> None:
        """See crew.Link; also a portion of an item that was given."""
        self.outbox.put(item)

    def drop(self) -> None:
        """See crew.Link. Whether it dies of it, and when, is up to the kernel."""
        self.popen.kill()


class Outbox:
    """Messages to a worker, in order. Never waits for the worker, which may be stopped: what its pipe has no room for
    is written by a thread, as there is room.
    """

    def __init__(self, popen: subprocess.Popen[bytes]) -> None:
        assert popen.stdin is not None
        self._pipe = popen.stdin
        self._lock = threading.Lock()
        self._late: deque[memoryview] = deque()
        os.set_blocking(self._pipe.fileno(), False)
        if sys.platform == "linux":
            with contextlib.suppress(OSError):  # more than a user may have
                fcntl.fcntl(self._pipe.fileno(), fcntl.F_SETPIPE_SZ, ROOM)

    def put(self, message: Any) -> None:
        """Send it, or have it sent. A broken pipe is a death, which is reported by another way. Types of schemas may be
        of classes in a script or a notebook, which travel with it.
        """
        import cloudpickle

        data = cloudpickle.dumps(message, protocol=5)
        with self._lock:
            waiting = bool(self._late)
            self._late += [memoryview(_HEADER.pack(len(data)) + data)]
            if not waiting and not self._sent():
                _thread(self._send_late)

    def close(self) -> None:
        """No more: the worker sees the end of its input."""
        with self._lock, contextlib.suppress(OSError):
            self._late.clear()
            self._pipe.close()

    def _send_late(self) -> None:
        while True:
            with self._lock:
                if self._sent():
                    return
            with contextlib.suppress(OSError, ValueError), selectors.DefaultSelector() as room:  # closed meanwhile
                room.register(self._pipe, selectors.EVENT_WRITE)
                room.select(0.5)

    def _sent(self) -> bool:
        """Write what there is room for; whether that was all."""
        try:
            while self._late:
                written = os.write(self._pipe.fileno(), self._late[0])
                self._late[0] = self._late[0][written:]
                if not self._late[0]:
                    self._late.popleft()
        except BlockingIOError:
            return False
        except (OSError, ValueError):
            self._late.clear()
        return True


def end(processes: Sequence[Process], grace: float) -> None:
    """Ask processes to stop, and kill those that have not after `grace` seconds."""
    for process in processes:
        process.outbox.close()  # end of input: stop
    deadline = time.monotonic() + grace
    try:
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.popen.wait(max(0.0, deadline - time.monotonic()))
    finally:  # also when a second signal breaks the wait
        for process in processes:
            if process.popen.poll() is None:
                process.popen.kill()
        deadline = time.monotonic() + KILLED
        for process in processes:  # one that is stuck in the kernel ends when that lets it go
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.popen.wait(max(0.0, deadline - time.monotonic()))


def _thread(target: Any, *args: Any) -> threading.Thread:
    thread = threading.Thread(target=target, args=args, daemon=True)
    thread.start()
    return thread


def _listen(popen: subprocess.Popen[bytes], name: str, emit: Emit) -> None:
    assert popen.stdout is not None
    with contextlib.suppress(EOFError, OSError, ValueError):
        while True:
            emit(replace(receive(popen.stdout), worker=name))  # type: ignore[arg-type]


def _overhear(popen: subprocess.Popen[bytes], overheard: Overheard, name: str, emit: Emit) -> None:
    """User code's prints: always read, so that a flood cannot block the worker."""
    assert popen.stderr is not None
    with contextlib.suppress(OSError, ValueError):
        while data := os.read(popen.stderr.fileno(), 65536):
            if text := overheard.heard(data):
                emit(Printed(name, text))


def _await(
    popen: subprocess.Popen[bytes], overheard: Overheard, name: str, emit: Emit, listening: Sequence[threading.Thread]
) -> None:
    """Death is seen by waiting for the process, not by end of file: grandchildren may hold its pipes."""
    _tell_stops(popen.pid, name, emit)
    code = popen.wait()
    for thread, pipe in zip(listening, (popen.stdout, popen.stderr), strict=True):
        thread.join(timeout=1.0)
        if not thread.is_alive() and pipe is not None:  # a grandchild may hold the other end, and its reader waits on
            pipe.close()
    if text := overheard.rest():
        emit(Printed(name, text))
    emit(Ended(name, code))


def _tell_stops(pid: int, name: str, emit: Emit) -> None:
    """Until the process has ended, that it is stopped and that it goes on: the kernel tells its parent, as nobody else
    can tell a stopped process from one in a call that holds the GIL.
    """
    if sys.platform != "linux":
        return
    changes = os.WSTOPPED | os.WCONTINUED
    with contextlib.suppress(ChildProcessError):  # another thread has waited for its end
        while True:
            found = os.waitid(os.P_PID, pid, changes | os.WEXITED | os.WNOWAIT)
            if found is not None and found.si_code not in (os.CLD_STOPPED, os.CLD_CONTINUED):
                return
            if found := os.waitid(os.P_PID, pid, changes | os.WNOHANG):  # taken, so that the next change is waited for
                emit(Stopped(name, over=found.si_code == os.CLD_CONTINUED))


# ---------------------------------------------------------------- worker


def serve(imports: Sequence[str] = ()) -> None:
    """A worker's whole life: open the stages, work until told to end. Runs in the fresh interpreter's main thread.

    One that was started ahead has `imports` to do while nobody needs it.
    """
    gc.disable()  # nothing that imports and models leave is garbage, and looking for it is a twelfth of a short run
    commands, reports = _own_pipes()
    print_whole_lines()
    heed_no_signals()
    for module in imports:
        importlib.import_module(module)
    try:
        name, variables, payload = receive(commands)
    except EOFError:
        os._exit(0)
    begun = time.monotonic()
    os.environ.update(variables)
    become_worker()
    lock = threading.Lock()

    def emit(event: Event) -> None:
        with lock:
            send(reports, event)

    items: queue.SimpleQueue[Item | None] = queue.SimpleQueue()
    opened: list[Any] = []

    def unread(error: BaseException) -> NoReturn:  # and what follows it is never done
        from gristmill.plan.failing import failure_of

        print_exception(error)
        with contextlib.suppress(OSError):
            emit(Outcome(name, "", None, failure_of(error)))
        os._exit(1)

    _thread(_obey, commands, items, opened, lambda key: emit(Taken(name, key)), unread)
    code = 0
    give_signs(name, opened, emit)
    try:
        worker = from_value(payload).open(name, emit)
        opened.append(worker)
        gc.freeze()
        gc.enable()
        host = os.uname().nodename if hasattr(os, "uname") else os.environ.get("COMPUTERNAME", "")
        emit(Started(name, time.monotonic() - begun, {"host": host}))
        if (alive := sign(name, opened)) is not None:  # loading has another limit
            emit(alive)
        worker.work(iter(items.get, None), emit)
    except BrokenPipeError:
        code = 0  # the driver is gone
    except BaseException as e:  # reported with its traceback; a worker never dies silently
        from gristmill.plan.failing import failure_of

        with contextlib.suppress(OSError):
            emit(Outcome(name, "", None, failure_of(e, "load" if not opened else "other")))
        code = 1 if not opened else 70
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # user threads and C++ teardown must not keep a finished worker alive


def _own_pipes() -> tuple[BinaryIO, BinaryIO]:
    """The protocol's own copies of stdin and stdout; what user code prints then goes to stderr, what it reads is
    empty.
    """
    commands = os.fdopen(os.dup(0), "rb")
    reports = os.fdopen(os.dup(1), "wb")
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.dup2(2, 1)
    return commands, reports


def _obey(
    commands: BinaryIO,
    items: queue.SimpleQueue[Item | None],
    opened: list[Any],
    taken: Callable[[str], None],
    unread: Callable[[BaseException], NoReturn],
) -> None:
    boxes: dict[str, _Inbox] = {}

    def box(key: str) -> _Inbox:
        return boxes.setdefault(key, _Inbox(key, taken, lambda k: boxes.pop(k, None)))

    try:
        while True:  # to the end: portions of items may follow the last item
            message = receive(commands)
            if isinstance(message, Portion):
                box(message.key).put(message)
            elif message is not None and message.portions is not None:
                items.put(replace(message, portions=box(message.key)))
            else:
                items.put(message)
    except (EOFError, OSError):
        pass
    except BaseException as e:
        unread(e)
    # The driver closed its end: it has all outcomes it wants, or it is dead. Stop soon, or at once if still loading.
    if not opened:
        os._exit(0)
    ENDING.begin()
    opened[0].stop()
    items.put(None)
    for inbox in list(boxes.values()):
        inbox.put(Portion("", "", WITHDRAWN))
    time.sleep(GRACE)
    os._exit(0)


class _Inbox:
    """The portions of one item, made elsewhere, in the order of their numbers, however they arrive."""

    def __init__(self, key: str, taken: Callable[[str], None], forget: Callable[[str], Any]) -> None:
        self._key = key
        self._taken = taken
        self._forget = forget
        self._arrived: queue.SimpleQueue[Portion] = queue.SimpleQueue()

    def put(self, portion: Portion) -> None:
        self._arrived.put(portion)

    def __iter__(self) -> Iterator[bytes]:
        early: dict[int, Portion] = {}
        try:
            for number in itertools.count():
                while number not in early:
                    portion = self._arrived.get()
                    if portion.number == WITHDRAWN:
                        raise Elsewhere(None)
                    early[portion.number] = portion
                portion = early.pop(number)
                if portion.failure is not None:
                    raise Elsewhere(portion.failure)
                if portion.last:
                    return
                assert portion.body is not None
                self._taken(self._key)
                yield portion.body
        finally:
            self._forget(self._key)


# ---------------------------------------------------------------- no processes at all


class _InProcess:
    """workers=0: the same worker in a thread of the calling process, for debugging and for tiny jobs. One that leaves
    is followed by the next. One that says for how long it may be silent is not waited for beyond that: a thread cannot
    be ended, and goes with its process.
    """

    def __init__(self, stages: Stages, feed: Feed) -> None:
        self._stages = stages
        self._feed = feed
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._items: queue.SimpleQueue[Item | None] = queue.SimpleQueue()
        self._worker: list[Any] = []

    def events(self) -> Iterator[Event]:
        for number in itertools.count():
            left = yield from self._to_its_end(f"w{number}")
            if left is None:
                return
            yield left

    def _to_its_end(self, name: str) -> Generator[Event, None, Left | None]:
        """The events of one worker; where it has left, that it has, and what it gives back."""
        self._items, self._worker = queue.SimpleQueue(), []
        thread = _thread(self._work, name)
        held: list[str] = []
        left: Left | None = None
        ended, until = False, math.inf
        try:
            while (thread.is_alive() and time.monotonic() < until) or not self._events.empty():
                while not ended and left is None and len(held) < HELD:
                    item = self._feed.take(name)
                    if item is WAIT:
                        break
                    ended = item is DONE
                    held += [] if ended else [item.key]
                    self._items.put(None if ended else item)
                try:
                    event = self._events.get(timeout=BEAT)
                except queue.Empty:
                    event = Event("")
                if isinstance(event, Left):
                    left = event
                    continue
                if isinstance(event, Alive):
                    until = time.monotonic() + event.limit
                    continue
                if isinstance(event, Outcome) and event.key in held:
                    held.remove(event.key)
                yield event
            return None if left is None else replace(left, keys=tuple(held))
        finally:
            self._items.put(None)
            if self._worker:
                self._worker[0].stop()
            thread.join(GRACE if time.monotonic() < until else 0.0)

    def _work(self, name: str) -> None:
        from gristmill.plan.failing import failure_of

        begun = time.monotonic()
        try:
            worker = self._stages.open(name, self._events.put)
            self._worker.append(worker)
            self._events.put(Started(name, time.monotonic() - begun))
            worker.work(iter(self._items.get, None), self._events.put)
        except BaseException as e:
            self._events.put(Outcome(name, "", None, failure_of(e, "other" if self._worker else "load")))
