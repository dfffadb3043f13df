"""The local engine: fresh interpreters on this machine, fed through pipes. It starts, feeds, watches and ends them."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import queue
import selectors
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

from gristmill.engines import interpreter
from gristmill.engines.contract import Room, Wanted
from gristmill.engines.crew import BEAT, Crew, Ended, held_by
from gristmill.engines.forkserver import Child
from gristmill.engines.interpreter import SPARES
from gristmill.engines.output import Overheard
from gristmill.engines.registry import this_machine
from gristmill.engines.serving import GRACE, HEADER, receive
from gristmill.job.options import LocalOptions
from gristmill.process.messages import (
    CLOSED,
    WAIT,
    Alive,
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
)
from gristmill.process.spawning import Spawner
from gristmill.process.startup import packed

Popen: TypeAlias = "subprocess.Popen[bytes] | Child"
ROOM = 1 << 20  # capacity in bytes of a pipe to a worker, so that most messages are written in one go
KILLED = 1.0  # seconds that the kernel has to end killed processes
CUT = 5.0  # seconds that a process may live after its end of the pipe is closed: it can report nothing any more

if sys.platform == "linux":
    import fcntl


# ---------------------------------------------------------------- driver


class Local:
    """Runs items in `workers` fresh interpreters, or in the calling process for 0.

    `path` is put before sys.path in the workers. A worker that dies is replaced for as long as the feed has items.
    """

    Options = LocalOptions
    here = True

    def __init__(self, workers: int = 1, path: tuple[str, ...] = (), grace: float = GRACE) -> None:
        self._workers = workers
        self._path = path
        self._grace = grace

    @staticmethod
    def room(options: LocalOptions) -> Room:
        """The capacity of this machine, whose GPUs workers may share."""
        return replace(this_machine(options.gpus_per_worker or 1), shares=options.gpus_per_worker is None)

    @staticmethod
    def open(options: LocalOptions, wanted: Wanted) -> Local:
        return Local(wanted.workers, wanted.path, options.grace)

    def run(self, stages: Stages, feed: Feed) -> Generator[Event, None, None]:
        """Events until the feed is done. Closing the iterator ends all workers; none is left running."""
        return _InProcess(stages, feed).events() if self._workers == 0 else self._events(stages, feed)

    def _events(self, stages: Stages, feed: Feed) -> Generator[Event, None, None]:
        payload = packed(stages)
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        spawner = Spawner()
        processes: dict[str, Process] = {}

        def begin(name: str, environment: Mapping[str, str]) -> None:
            processes[name] = Process(name, self._path, environment, payload, events.put, SPARES.taken)

        def start(name: str, index: int) -> Process:
            spawner.call(partial(begin, name, stages.environment(index)))
            if len(processes) == self._workers:
                SPARES.end()
            return processes[name]

        crew = Crew(feed, self._workers, start, events, held_by(stages))
        try:
            yield from crew.events()
        finally:
            try:
                spawner.call(lambda: None)  # wait, so that one still being started is ended, too
            finally:
                end(list(processes.values()), self._grace)
                spawner.close()


class Process:
    """A worker in a fresh interpreter below this process. What it reports, what it prints, and finally its end go to
    `emit`.

    Make it in a lasting thread (`Spawner`): the kernel ends it when the thread that made it ends.
    """

    ready = True

    def __init__(
        self,
        name: str,
        path: Sequence[str],
        environment: Mapping[str, str],
        payload: bytes,
        emit: Emit,
        start: Callable[[Sequence[str], Mapping[str, str]], Popen] = interpreter.start,
    ) -> None:
        popen = start(path, environment)
        self.popen = popen
        self.outbox = Outbox(popen)
        self.outbox.put((name, {**os.environ, **environment}, payload))
        overheard, life = Overheard(), _Life()
        listening = [_thread(_listen, popen, name, emit, life), _thread(_overhear, popen, overheard, name, emit)]
        _thread(_await, popen, overheard, name, emit, listening, life)

    def give(self, item: Item | Portion | None) -> None:
        """See crew.Link; also a portion of an item that was given."""
        self.outbox.put(item)

    def drop(self) -> None:
        """See crew.Link. Whether and when it then dies is up to the kernel."""
        self.popen.kill()


class Outbox:
    """Messages to a worker, in order. Never waits for the worker, which may be stopped: what does not fit into its pipe
    is written by a thread as room appears.
    """

    def __init__(self, popen: Popen) -> None:
        assert popen.stdin is not None
        self._pipe = popen.stdin
        self._lock = threading.Lock()
        self._late: deque[memoryview] = deque()
        os.set_blocking(self._pipe.fileno(), False)
        if sys.platform == "linux":
            with contextlib.suppress(OSError):  # more than this user is allowed
                fcntl.fcntl(self._pipe.fileno(), fcntl.F_SETPIPE_SZ, ROOM)

    def put(self, message: Any) -> None:
        """Send a message, or have it sent. A broken pipe is a death, which is reported elsewhere. Schemas may have
        types whose classes are defined in a script or a notebook; these travel along.
        """
        import cloudpickle

        data = cloudpickle.dumps(message, protocol=5)
        with self._lock:
            waiting = bool(self._late)
            self._late += [memoryview(HEADER.pack(len(data)) + data)]
            if not waiting and not self._sent():
                _thread(self._send_late)

    def close(self) -> None:
        """Send nothing more: the worker sees the end of its input."""
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
        """Write what there is room for. Returns whether that was everything."""
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
        for process in processes:  # one stuck in the kernel ends when the kernel lets it go
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.popen.wait(max(0.0, deadline - time.monotonic()))


def _thread(target: Any, *args: Any) -> threading.Thread:
    thread = threading.Thread(target=target, args=args, daemon=True)
    thread.start()
    return thread


class _Life:
    """Whether a process is gone. One whose pipe is closed while it goes on is ended here: `cut` says why."""

    def __init__(self) -> None:
        self.gone = threading.Event()
        self.cut = ""


def _listen(popen: Popen, name: str, emit: Emit, life: _Life) -> None:
    assert popen.stdout is not None
    why = "closed a file descriptor that it had not opened, over which it reports"
    try:
        while True:
            emit(replace(receive(popen.stdout), worker=name))  # type: ignore[arg-type]
    except (EOFError, OSError, ValueError):
        pass
    except Exception as e:  # what it writes is no message
        why = f"wrote to a file descriptor that it had not opened, over which it reports ({type(e).__name__}: {e})"
    if not life.gone.wait(CUT):
        life.cut = f"the process {why}, and was ended\n"
        emit(Printed(name, life.cut))
        popen.kill()


def _overhear(popen: Popen, overheard: Overheard, name: str, emit: Emit) -> None:
    """User code's prints: always read, so that a flood cannot block the worker."""
    assert popen.stderr is not None
    with contextlib.suppress(OSError, ValueError):
        while data := os.read(popen.stderr.fileno(), 65536):
            if text := overheard.heard(data):
                emit(Printed(name, text))


def _await(
    popen: Popen, overheard: Overheard, name: str, emit: Emit, listening: Sequence[threading.Thread], life: _Life
) -> None:
    """Death is seen by waiting for the process, not by end of file: grandchildren may hold its pipes."""
    _tell_stops(popen.pid, name, emit)
    code = popen.wait()
    life.gone.set()
    for thread, pipe in zip(listening, (popen.stdout, popen.stderr), strict=True):
        thread.join(timeout=1.0)
        if not thread.is_alive() and pipe is not None:  # a grandchild may hold the other end, so its reader still waits
            pipe.close()
    if text := overheard.rest():
        emit(Printed(name, text))
    emit(Ended(name, CLOSED if life.cut and code < 0 else code))  # the rows' doing, not a kill from outside


def _tell_stops(pid: int, name: str, emit: Emit) -> None:
    """Until the process has ended, report when it is stopped and continued. The kernel tells its parent; nobody else
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
            if found := os.waitid(os.P_PID, pid, changes | os.WNOHANG):  # consumed, to wait for the next change
                emit(Stopped(name, over=found.si_code == os.CLD_CONTINUED))


# ---------------------------------------------------------------- no processes at all


class _InProcess:
    """workers=0: the same worker in a thread of the calling process, for debugging and for tiny jobs. One that leaves
    is followed by the next. One that limits its own silence is waited for no longer than that: a thread cannot be
    ended, and lives as long as its process.
    """

    def __init__(self, stages: Stages, feed: Feed) -> None:
        self._stages = stages
        self._feed = feed
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._items: queue.SimpleQueue[Item | None] = queue.SimpleQueue()
        self._worker: list[Any] = []

    def events(self) -> Generator[Event, None, None]:
        for number in itertools.count():
            left = yield from self._to_its_end(f"w{number}")
            if left is None:
                return
            yield left

    def _to_its_end(self, name: str) -> Generator[Event, None, Left | None]:
        """The events of one worker; returns its `Left`, with the items that it gives back, if it has left."""
        self._items, self._worker = queue.SimpleQueue(), []
        thread = _thread(self._work, name)
        held: list[str] = []
        left: Left | None = None
        ended, until = False, math.inf
        try:
            while (thread.is_alive() and time.monotonic() < until) or not self._events.empty():
                while not ended and left is None and len(held) < held_by(self._stages):
                    item = self._feed.take(name)
                    if item is WAIT:
                        break
                    given = item if isinstance(item, Item) else None  # DONE
                    ended = given is None
                    held += [] if given is None else [given.key]
                    self._items.put(given)
                try:
                    event = self._events.get(timeout=BEAT)
                except queue.Empty:
                    event = Event("")
                if isinstance(event, Ended):
                    if event.worker == name:  # one that was given up may end late
                        thread.join()
                    continue
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
        from gristmill.process.failure import failure_of

        begun = time.monotonic()
        try:
            worker = self._stages.open(name, self._events.put)
            self._worker.append(worker)
            self._events.put(Started(name, time.monotonic() - begun))
            worker.work(iter(self._items.get, None), self._events.put)
        except BaseException as e:
            self._events.put(Outcome(name, "", None, failure_of(e, "other" if self._worker else "load")))
        finally:
            self._events.put(Ended(name, 0))
