"""A worker's end of its pipes: what runs in a process that was started or forked to serve."""

from __future__ import annotations

import contextlib
import gc
import importlib
import itertools
import os
import pickle
import queue
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from traceback import format_exception
from types import ModuleType
from typing import Any, BinaryIO, NoReturn

from gristmill.process.interrupts import ENDING
from gristmill.process.liveness import give_signs, sign
from gristmill.process.messages import CLOSED, Elsewhere, Event, Item, Outcome, Portion, Started, Taken
from gristmill.process.ownstderr import flush, keep, say
from gristmill.process.pickling import from_value
from gristmill.process.startup import become_worker, heed_no_signals, print_whole_lines

GRACE = 10.0  # seconds between asking a worker to stop and killing it (contract: out within 12 s)
WITHDRAWN = -1  # number of a portion that says that no more of its item will come
HEADER = struct.Struct("<Q")


def send(pipe: BinaryIO, message: Any) -> None:
    """One length-prefixed pickle."""
    data = pickle.dumps(message, protocol=5)
    pipe.write(HEADER.pack(len(data)) + data)
    pipe.flush()


def receive(pipe: BinaryIO) -> Any:
    """The next message. Raises EOFError at the end of the stream."""
    header = pipe.read(HEADER.size)
    if len(header) < HEADER.size:
        raise EOFError
    length = HEADER.unpack(header)[0]
    data = pipe.read(length)
    if len(data) < length:  # the sender was killed midway
        raise EOFError
    return pickle.loads(data)


def serve(imports: Sequence[str] = (), *, forked: bool = False) -> NoReturn:
    """A worker's whole life: open the stages, work until told to end. Runs in the interpreter's main thread.

    One that was started ahead does its `imports` while it is not yet needed.
    """
    gc.disable()  # nothing that imports and models leave is garbage, and looking for it takes a twelfth of a short run
    commands, reports = _own_pipes()
    keep()
    print_whole_lines()
    heed_no_signals()
    for module in imports:
        importlib.import_module(module)
    try:
        name, variables, payload = receive(commands)
    except EOFError:
        os._exit(0)
    begun = time.monotonic()
    for gone in os.environ.keys() - variables.keys():
        del os.environ[gone]
    os.environ.update(variables)
    if forked:
        _refresh()
    become_worker()
    lock = threading.Lock()

    def emit(event: Event) -> None:
        with lock:
            try:
                send(reports, event)
            except BrokenPipeError:
                raise  # the driver is gone
            except (OSError, ValueError) as e:  # in whichever thread: nobody would hear of it, and wait
                say(f"a worker cannot report any more ({e}): was its pipe closed by user code?")
                os._exit(CLOSED)

    items: queue.SimpleQueue[Item | None] = queue.SimpleQueue()
    opened: list[Any] = []

    def unread(error: BaseException) -> NoReturn:  # later messages would never be done
        from gristmill.process.failure import failure_of

        say("".join(format_exception(error)))
        with contextlib.suppress(OSError):
            emit(Outcome(name, "", None, failure_of(error)))
        os._exit(1)

    told = (commands, items, opened, lambda key: emit(Taken(name, key)), unread)
    threading.Thread(target=_obey, args=told, daemon=True).start()
    code = 0
    give_signs(name, opened, emit)
    try:
        worker = from_value(payload).open(name, emit)
        opened.append(worker)
        gc.freeze()
        gc.enable()
        host = os.uname().nodename if hasattr(os, "uname") else os.environ.get("COMPUTERNAME", "")
        emit(Started(name, time.monotonic() - begun, {"host": host}))
        if (alive := sign(name, opened)) is not None:  # loading had another limit
            emit(alive)
        worker.work(iter(items.get, None), emit)
    except BrokenPipeError:
        code = 0  # the driver is gone
    except BaseException as e:  # reported with its traceback: a worker never dies silently
        from gristmill.process.failure import failure_of

        with contextlib.suppress(OSError):
            emit(Outcome(name, "", None, failure_of(e, "load" if not opened else "other")))
        code = 1 if not opened else 70
    flush()
    os._exit(code)  # user threads and C++ teardown must not keep a finished worker alive


def _own_pipes() -> tuple[BinaryIO, BinaryIO]:
    """The protocol's own copies of stdin and stdout; from then on user code prints to stderr and reads empty input."""
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
    # The driver closed its end: it has all the outcomes it wants, or is dead. Stop soon, or at once if still loading.
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
    """The portions of one item, made elsewhere, in the order of their numbers, in whatever order they arrive."""

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


def _refresh() -> None:
    """In a fork, renew what libraries took from the server's environment or seeded at random."""
    if hasattr(time, "tzset"):
        time.tzset()
    if (random := sys.modules.get("numpy.random")) is not None:  # Python reseeds its own in each fork
        random.seed()
    if (arrays := sys.modules.get("numpy")) is not None:
        _set_blas_threads(arrays)
    if (torch := sys.modules.get("torch")) is not None and (threads := os.environ.get("OMP_NUM_THREADS")):
        torch.set_num_threads(int(threads))  # it has read the server's when it was imported


_BLAS = ("scipy_openblas_set_num_threads64_", "openblas_set_num_threads64_", "openblas_set_num_threads")


def _set_blas_threads(numpy: ModuleType) -> None:
    """Use as many threads as the environment says: the server has one, as more would be lost in a fork."""
    import ctypes

    core = getattr(numpy, "_core", None) or numpy.core
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(core._multiarray_umath.__file__)  # also finds symbols of the libraries it is linked with
        for name in _BLAS:
            if hasattr(library, name):
                getattr(library, name)(int(os.environ.get("OPENBLAS_NUM_THREADS") or len(os.sched_getaffinity(0))))
