"""Reading, steps and tokenising in processes of their own below a worker (`steps_workers`), so that Python steps do not
hold up the model's process. Their output crosses in anonymous memory that the worker maps: columns are not copied.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import mmap
import os
import pickle
import queue
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from gristmill.errors import BadJob
from gristmill.process.liveness import LOADING, give_signs, patience, sign
from gristmill.process.messages import Alive, Elsewhere, Event, Item, Outcome, Portion
from gristmill.process.ownstderr import keep, say
from gristmill.process.pickling import by_value
from gristmill.process.spawning import Spawner, mortal
from gristmill.process.startup import become_worker, heed_no_signals, print_whole_lines

if TYPE_CHECKING:
    from gristmill.worker.stages import ShardStages

WAITING = 3  # windows of one process that its worker has not yet taken, at most
_START = (
    "import sys; sys.path[:] = {path!r}; from gristmill.process.spawning import die_with; die_with({parent}); "
    "from gristmill.worker.stepprocesses import serve; serve({fd}, {stages})"
)
_LONGEST = 1e9  # seconds: the kernel's timeouts have an upper limit
_LENGTH = struct.Struct("<Q")
_TIMEVAL = struct.Struct("@ll")
_FEWER = "use fewer workers or steps_workers, or raise the limit (ulimit -n, ulimit -u, a container's pids and memory)"
_ALONE, _WITH_FILE = b"\0", b"\1"  # sent before each event: whether a window's file comes with it
_TAKEN = None  # tells a process that one of its windows was taken


class Beside:
    """`count` processes; items are given to them in turn, so that `count` items are prepared at once."""

    def __init__(self, stages: ShardStages, name: str, count: int) -> None:
        if not hasattr(socket, "send_fds"):
            raise BadJob("steps_workers needs Unix sockets, which this system lacks: leave it out")
        self._stages = stages
        self._names = [f"{name}.{number}" for number in range(count)]
        self._processes: list[_Process] = []
        self._spawner = Spawner()

    def ahead(self, items: Iterator[Item]) -> Iterator[Item]:
        """The items in order; those that may be prepared in a step process get portions, which are being made from now
        on.
        """
        ready: queue.Queue[Item | None] = queue.Queue(len(self._names))
        threading.Thread(target=self._begin, args=(items, ready), daemon=True).start()
        return iter(ready.get, None)

    def _begin(self, items: Iterator[Item], ready: queue.Queue[Item | None]) -> None:
        turn = itertools.count()
        for item in items:
            if item.portions is None and self._stages.apart(item):
                item = replace(item, portions=self._begun(item, next(turn) % len(self._names)))
            ready.put(item)
        ready.put(None)

    def _begun(self, item: Item, number: int) -> Iterator[memoryview]:
        try:
            if number >= len(self._processes):
                number = len(self._processes)
                self._processes.append(_Process(self._stages, self._names[number], self._spawner))
            return self._processes[number].begin(item)
        except BaseException as e:  # raised where the portions are iterated: the item fails
            return _failing(e)

    def close(self) -> None:
        for process in self._processes:
            process.close()


def _failing(error: BaseException) -> Iterator[memoryview]:
    yield from ()
    raise error


class _Process:
    """A step process, as its worker sees it."""

    def __init__(self, stages: ShardStages, name: str, spawner: Spawner) -> None:
        self._name = name
        self._tickets = itertools.count()
        first = stages.first()
        try:
            self._socket, theirs = socket.socketpair()
            self._socket.settimeout(None)  # whatever user code has set for sockets (setdefaulttimeout)
            theirs.settimeout(None)
            # Its stages are passed in a file: sending them could block on a process that is stopped or killed while
            # starting.
            with theirs, _memory(by_value((first, name))) as file:
                file.seek(0)
                fd, held = theirs.fileno(), file.fileno()
                begin = _START.format(path=sys.path, fd=fd, stages=held, parent=os.getpid())
                start = partial(
                    subprocess.Popen[bytes],
                    [*mortal(), sys.executable, "-c", begin],
                    pass_fds=[fd, held],
                    stdin=subprocess.DEVNULL,
                    env={**os.environ, "PYTHONUNBUFFERED": "1", **first.environment(0)},
                )
                self._popen: subprocess.Popen[bytes] = spawner.call(start)
        except OSError as e:
            why = f"a step process ({name}) cannot be started: {e.strerror or e}; {_FEWER}"
            raise OSError(e.errno, why) from e
        self._wait_for(LOADING)

    def begin(self, item: Item) -> Iterator[memoryview]:
        """Start on an item. Returns its portions, in order; iterating them raises Elsewhere if the first stage
        failed.
        """
        ticket = str(next(self._tickets))  # a shard's key is reused when the shard is retried
        with contextlib.suppress(OSError):  # the process is dead, as reading the portions will show
            _send(self._socket, by_value(replace(item, key=ticket)))
        return self._portions(ticket)

    def _portions(self, ticket: str) -> Iterator[memoryview]:
        while True:
            event, body = self._receive()
            if isinstance(event, Outcome):  # the stage could not be opened
                raise Elsewhere(event.error)
            if isinstance(event, Alive):
                self._wait_for(event.limit)
            if not isinstance(event, Portion) or event.key != ticket:
                continue  # from an item that was dropped midway
            if event.failure is not None:
                raise Elsewhere(event.failure)
            if event.last:
                return
            assert body is not None
            yield body

    def _receive(self) -> tuple[Event, memoryview | None]:
        try:
            told, files, _, _ = socket.recv_fds(self._socket, 1, 1)
            if not told:
                raise EOFError
            event = pickle.loads(_receive(self._socket))
        except BlockingIOError:
            self._give_up()
        except (EOFError, ConnectionError):
            self._die_alike()
        if told == _ALONE:
            return event, None
        with contextlib.suppress(OSError):
            _send(self._socket, pickle.dumps(_TAKEN))
        if not files:  # the kernel drops files for which a process has no descriptor left
            raise OSError(errno.EMFILE, f"{os.strerror(errno.EMFILE)} in the worker of {self._name}; {_FEWER}")
        try:
            return event, memoryview(mmap.mmap(files[0], 0, access=mmap.ACCESS_READ))
        finally:
            os.close(files[0])

    def _wait_for(self, limit: float) -> None:
        """Set how long the process may be silent, as measured by the kernel; sending has no limit."""
        self._patience = min(patience(limit), _LONGEST)
        whole, part = divmod(self._patience, 1)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIMEVAL.pack(int(whole), int(part * 1e6)))

    def _give_up(self) -> None:
        """A stopped or stuck process is nobody's fault: its worker ends as if killed from outside, and another one
        takes over its items. While the kernel holds it the process may not die; nobody waits for that.
        """
        say(
            f"the step process ({self._name}) is given up after {self._patience:.0f} s without a sign of life: "
            "stopped, stuck or unreachable"
        )
        self._popen.kill()
        os.kill(os.getpid(), signal.SIGKILL)

    def _die_alike(self) -> None:
        """A process that died in a step takes its worker with it, in the same way: everything then happens as if the
        step had run in the worker (gristmill.driver.retries), down to finding the rows that caused it.
        """
        code = self._popen.wait()
        how = f"exited with {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"
        say(f"the step process ({self._name}) {how}")
        if code < 0:
            os.kill(os.getpid(), -code)
        os._exit(code if code > 0 else 70)

    def close(self) -> None:
        """Close its input; the process then leaves."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


# ---------------------------------------------------------------- in the process


def serve(fd: int, held: int) -> None:
    """The whole life of a step process: make windows of the items it is sent, a few ahead of the worker."""
    keep()
    print_whole_lines()
    with socket.socket(fileno=fd) as line:
        heed_no_signals()
        become_worker()
        items: queue.SimpleQueue[Item] = queue.SimpleQueue()
        room, speaking = threading.Semaphore(WAITING), threading.Lock()
        with os.fdopen(held, "rb") as file:
            stages, name = pickle.load(file)
        threading.Thread(target=_obey, args=(line, items, room), daemon=True).start()

        def emit(event: Event) -> None:
            body = event.body if isinstance(event, Portion) else None
            if isinstance(event, Portion):
                event = replace(event, body=None)
            told = pickle.dumps(event, protocol=5)
            if body is None:
                with speaking:
                    line.sendall(_ALONE)
                    _send(line, told)
                return
            room.acquire()
            with _memory(body) as file, speaking:
                socket.send_fds(line, [_WITH_FILE], [file.fileno()])
                _send(line, told)

        opened: list[Any] = []
        give_signs(name, opened, emit)
        try:
            worker = stages.open(name, emit)
            opened.append(worker)
            if (alive := sign(name, opened)) is not None:
                emit(alive)
            worker.work(iter(items.get, None), emit)
        except BrokenPipeError:
            os._exit(0)  # the worker is gone
        except BaseException as e:  # reported to the worker, where it fails the item
            from gristmill.process.failure import failure_of

            with contextlib.suppress(OSError):
                emit(Outcome(name, "", None, failure_of(e, "load")))
        os._exit(1)


def _obey(line: socket.socket, items: queue.SimpleQueue[Item], room: threading.Semaphore) -> None:
    try:
        while True:
            message = pickle.loads(_receive(line))
            if message is _TAKEN:
                room.release()
            else:
                items.put(message)
    except (EOFError, OSError):
        os._exit(0)
    except BaseException:  # an unreadable item would never be done, so end: nobody then waits for it
        say(traceback.format_exc())
        os._exit(1)


def _memory(data: bytes) -> Any:
    """An unnamed file that holds the data, in memory, or on disk if the system has no such files."""
    if hasattr(os, "memfd_create"):
        file: Any = os.fdopen(os.memfd_create("gristmill"), "w+b", buffering=0)
    else:
        file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - the caller closes it
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]
    return file


def _send(line: socket.socket, data: bytes) -> None:
    line.sendall(_LENGTH.pack(len(data)) + data)


def _receive(line: socket.socket) -> bytes:
    """The next message. Raises EOFError at the end of the stream."""
    (length,) = _LENGTH.unpack(_exactly(line, _LENGTH.size))
    return _exactly(line, length)


def _exactly(line: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        more = line.recv(count - len(data))
        if not more:
            raise EOFError
        data += more
    return bytes(data)
