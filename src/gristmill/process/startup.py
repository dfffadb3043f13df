"""How a worker's interpreter is set up: where it imports from, how many threads its libraries have, which signals it
does not heed, that it prints whole lines, when it began; and that it is a worker, so that importing a module starts
nothing twice, and no process that user code forks continues as the worker.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Generator, Iterator
from types import FrameType, TracebackType
from typing import Any, NoReturn, TextIO, TypeVar

from gristmill.errors import BadJob, RunFailed
from gristmill.job.options import ENGINE
from gristmill.process.forks import never_destroyed
from gristmill.process.interrupts import ENDING as ASKED
from gristmill.process.interrupts import SOON, free_imports
from gristmill.process.pickling import WAYS, by_value

ENDING = (signal.SIGINT, signal.SIGTERM)
_SPAWNED = "__mp_main__"  # the script's name in processes spawned by multiprocessing, which no other process can import
T = TypeVar("T")
R = TypeVar("R")


def import_path() -> tuple[str, ...]:
    """Where this process imports from, to be passed to those that it starts."""
    return tuple(p or os.getcwd() for p in sys.path)


def hold_standard_streams() -> None:
    """Open the null device where a launcher has closed standard input, output or error: otherwise the next opened file,
    perhaps a part of the result, would receive what libraries print.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
    for name, number in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            stream = open(number, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115 - it stays open
            setattr(sys, name, stream)


def imported(name: str) -> Any:
    """Import a module in a thread, in which no signals are handled: for modules, such as pybind11's, that abort the
    process if a signal's exception hits their import. Raises ImportError, and KeyboardInterrupt if it takes long and
    this process was asked to end.
    """
    if name not in sys.modules:
        free_imports()
        begun = time.monotonic()
        thread = threading.Thread(target=_import, args=(name,), daemon=True)
        try:
            thread.start()
            while thread.is_alive():
                thread.join(0.5)
                if ASKED.overdue(begun):  # a signal's exception was lost, and perhaps a lock with it
                    raise KeyboardInterrupt
        except BaseException:
            with contextlib.suppress(RuntimeError):  # the thread was not started
                thread.join(SOON)  # ending the interpreter in the middle of an import aborts
            raise
    return importlib.import_module(name)


def _import(name: str) -> None:
    with contextlib.suppress(ImportError):  # raised again by the caller's import
        importlib.import_module(name)


_worker = False


def become_worker() -> None:
    """Called before any user code is read: this process does what it is sent. Maps started in it run within it."""
    global _worker  # noqa: PLW0603
    _worker = True
    os.environ.pop(ENGINE, None)


def starting(what: str) -> None:
    """Called before a map or a job (`what`) starts anything, perhaps at the top level of a module.

    A worker that imports the module would start it again, and so would its workers. So functions of a module that is
    being imported are shipped by value, like those of a script, and workers need not import it (nor a script in a
    process that multiprocessing started). A worker that does so anyway (its function was given by name) raises BadJob,
    naming the line.
    """
    hold_standard_streams()
    modules = list(_importing())
    if modules and _worker:
        name, file, line = modules[0]
        raise BadJob(
            f"{file}, line {line}: {what} is started when module {name} is imported, and workers import it too: put "
            'this under `if __name__ == "__main__":`, or in a function'
        )
    shipped = [sys.modules[name] for name, _, _ in modules]
    if _SPAWNED in sys.modules:
        shipped.append(sys.modules[_SPAWNED])
    if shipped:
        import cloudpickle

        for module in shipped:
            cloudpickle.register_pickle_by_value(module)


def packed(work: Any) -> bytes:
    """What workers are sent, pickled. Raises BadJob if it cannot be pickled."""
    try:
        return by_value(work)
    except Exception as e:
        raise BadJob(
            f"the job cannot be sent to workers ({type(e).__name__}: {e}): a function of a script or notebook is sent "
            f"with everything it refers to; {WAYS}"
        ) from e


def _importing() -> Iterator[tuple[str, str, int]]:
    """The modules whose import led to this call, innermost first: name, file and line."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        name = str(frame.f_globals.get("__name__"))
        if frame.f_code.co_name == "<module>" and name != "__main__":
            spec = getattr(sys.modules.get(name), "__spec__", None)
            if getattr(spec, "_initializing", False):  # importlib's own flag
                yield name, frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back


class UserCode:
    """Wraps each call of user code. A process forked by the call that returns from it like the caller ends here: it is
    not the caller, and has nothing to send, write or do.
    """

    def __enter__(self) -> None:
        self._process = os.getpid()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if os.getpid() != self._process:
            _end_of_a_child(error)


def of_this_process(made: Generator[T, None, R], what: str) -> Generator[T, None, R]:
    """The same generator, but inert in a fork: there it is neither closed, which would end workers and remove files of
    this process, nor continued.
    """
    process = os.getpid()
    _made.add(made)
    try:
        while True:
            try:
                found = next(made)
            except StopIteration as e:
                return e.value  # type: ignore[no-any-return]
            yield found
            if os.getpid() != process:
                raise RunFailed(f"{what} belongs to the process that began it, and cannot go on in a fork of it")
    finally:
        if os.getpid() == process:
            made.close()


_made: weakref.WeakSet[Generator[Any, None, Any]] = weakref.WeakSet()


def _leave_all() -> None:
    """Keep these generators alive until the interpreter exits, which would otherwise close unreferenced ones."""
    for made in list(_made):
        never_destroyed(made)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_all)


def _end_of_a_child(error: BaseException | None) -> NoReturn:
    code = 0
    if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
        code = error.code or 0
    elif error is not None:
        code = 1
        with contextlib.suppress(Exception):
            if isinstance(error, SystemExit):
                print(error.code, file=sys.stderr)
            else:
                import traceback

                traceback.print_exception(type(error), error, error.__traceback__)
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code & 0xFF)


def thread_variables(count: int) -> dict[str, str]:
    """Variables that tell libraries how many threads to use; most read them on loading."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")
    return dict.fromkeys(names, str(count))


class WholeLines(io.TextIOWrapper):
    """A text stream that writes a thread's line in one piece, when it ends or is flushed: `print` writes its parts one
    by one, and a worker's threads and processes share one pipe.
    """

    def __init__(self, stream: TextIO) -> None:
        self._begun: dict[int, str] = {}  # by thread
        self._of = stream  # when it is collected, it closes what is below both
        super().__init__(stream.buffer, stream.encoding, stream.errors, write_through=True)

    def write(self, text: str) -> int:
        head, newline, tail = (self._begun.pop(threading.get_ident(), "") + text).rpartition("\n")
        if tail:
            self._begun[threading.get_ident()] = tail
        if newline:
            super().write(head + newline)
        return len(text)

    def flush(self) -> None:
        if begun := self._begun.pop(threading.get_ident(), ""):
            super().write(begun)
        super().flush()


def print_whole_lines() -> None:
    """Replace this process's stdout and stderr with such streams, for good: one that user code has replaced would be
    collected and close what `sys.__stderr__` writes to.
    """
    for name in ("stdout", "stderr"):
        stream = WholeLines(getattr(sys, name))
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def heed_no_signals() -> None:
    """Let SIGINT and SIGTERM pass: the driver ends this process. Called in the main thread.

    They are caught, not ignored: children inherit ignored signals, and user code could not end its own.
    """
    pass_signals()
    if hasattr(os, "register_at_fork"):
        # Blocked meanwhile: an early one would otherwise be caught in the child, too.
        os.register_at_fork(before=_hold, after_in_parent=_release, after_in_child=_heed)


def pass_signals() -> None:
    """As `heed_no_signals`, for a process whose forks are workers, too."""
    for number in ENDING:
        signal.signal(number, _pass)
        if sys.platform != "win32":
            signal.siginterrupt(number, False)  # native code continues waiting


def _pass(number: int, frame: FrameType | None) -> None:
    """A handler that does nothing."""


_forking = threading.local()


def _hold() -> None:
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)


def _release() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _heed() -> None:
    if signal.getsignal(signal.SIGINT) is _pass:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGTERM) is _pass:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _release()


_IMPORTED = time.time()


@functools.lru_cache(maxsize=1)
def began() -> float:
    """When this process began or, if the system does not tell, when this module was imported."""
    with contextlib.suppress(OSError, AttributeError, ValueError), open("/proc/self/stat") as file:
        ticks = int(file.read().rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
        return min(_IMPORTED, time.time() - age)
    return _IMPORTED
