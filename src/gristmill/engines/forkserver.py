"""The fork server: a process that has imported what workers need, started no thread and opened no device. Its forks
need not import any of that again, and share its pages (benchmarks/start.py).

A forked worker is a child of this process, not of the server: it is born an orphan while this process adopts orphans
(PR_SET_CHILD_SUBREAPER). So its end, exit code and stops are seen as those of any child, and no longer depend on the
server. Linux only; elsewhere workers are fresh interpreters.
"""

from __future__ import annotations

import contextlib
import gc
import glob
import importlib
import io
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from typing import BinaryIO, NoReturn, TextIO

from gristmill.engines import serving
from gristmill.process.interrupts import ENDING
from gristmill.process.spawning import be_named, die_with, mortal
from gristmill.process.startup import pass_signals
from gristmill.values import dataclass

FORK = "GRISTMILL_FORK"  # 0 in the environment: workers are fresh interpreters
IMPORTED = 30.0  # seconds for the imports of a server
BORN = 10.0  # seconds for a fork; a stopped server is ended
IDLE = 30.0  # seconds without requests after which a server ends
POLL = 0.05  # seconds between looks at a process that is waited for with a limit
READY = b"+"
FORK_ONE, IMPORT_MORE = b"f", b"i"  # what it is asked
# pandas takes longer to import than all else that workers import. pyarrow does so when it is given a list of Python,
# which many jobs never do: a server imports it when the first run has ended, for those that come after it.
PANDAS = "gristmill.arrow.pandasahead"
NAME, WORKER = "gristmill-fork", "gristmill-work"  # the processes' names
_SUBREAPER, _IS_SUBREAPER = 36, 37  # prctl(2): PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER
# Prevent numpy and Arrow from starting threads when they are imported.
_NO_THREADS = {"OPENBLAS_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
# What Arrow's C++ allocates by itself, such as the pages of Parquet files, is in the pool that this names when Arrow is
# loaded, whatever pool is set later (worker/heap.py). A build without jemalloc keeps to its default.
_ARROW = {"ARROW_DEFAULT_MEMORY_POOL": "jemalloc"}
# Variables that change while programs run and that no library reads on loading, and those that scikit-learn and torch
# set when they are imported, here as in a worker; forks are given the current ones.
_PASSING = re.compile(
    "_|PWD|OLDPWD|SHLVL|COLUMNS|LINES|PYTEST_CURRENT_TEST|GRISTMILL_(?!FORK).*|[A-Z0-9_]+_(API_KEY|BASE_URL)|"
    "KMP_(DUPLICATE_LIB_OK|INIT_AT_FORK)|TORCHINDUCTOR_CACHE_DIR"
)
_START = (
    "import sys; sys.path[:0] = {path!r}; from gristmill.process.spawning import die_with; die_with({parent}); "
    "from gristmill.engines.forkserver import serve; serve({parent}, {imports!r})"
)


def possible() -> bool:
    """Whether workers can and should be forks here."""
    return sys.platform == "linux" and os.environ.get(FORK, "1") != "0"


class Child:
    """A process forked for this one, with the part of the `subprocess.Popen` interface that engines use."""

    def __init__(self, pid: int, stdin: BinaryIO, stdout: BinaryIO, stderr: BinaryIO) -> None:
        self.pid = pid
        self.stdin, self.stdout, self.stderr = stdin, stdout, stderr
        self.returncode: int | None = None
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it lives."""
        with self._lock:  # else `kill` could hit another process that has reused its id
            if self.returncode is None:
                with contextlib.suppress(ChildProcessError):  # SIGCHLD is ignored here: how it ended is unknown
                    pid, status = os.waitpid(self.pid, os.WNOHANG)
                    self.returncode = os.waitstatus_to_exitcode(status) if pid else None
                    if pid:
                        _known.discard(pid)
                    return self.returncode
                self.returncode = 0
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its exit code. Raises subprocess.TimeoutExpired."""
        until = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if until is None:
                with contextlib.suppress(ChildProcessError):  # another thread has waited for its end
                    os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
            elif time.monotonic() >= until:
                raise subprocess.TimeoutExpired("a worker", timeout or 0.0)
            else:
                time.sleep(min(POLL, max(0.0, until - time.monotonic())))
        return code

    def kill(self) -> None:
        """SIGKILL, unless it has ended."""
        with self._lock:
            if self.returncode is None:
                os.kill(self.pid, signal.SIGKILL)


@dataclass(frozen=True)
class Surroundings:
    """What a process inherits when it starts, its environment included: a server forks only for processes with the
    same.
    """

    path: tuple[str, ...]
    environment: tuple[tuple[str, str], ...]
    limits: tuple[tuple[int, int], ...]
    cores: frozenset[int]
    nice: int
    umask: str
    owner: tuple[int, int]
    process: int

    @classmethod
    def now(cls, path: Sequence[str]) -> Surroundings:
        """The surroundings of a process started by this one now."""
        import resource

        names = sorted(name for name in vars(resource) if name.startswith("RLIMIT_"))
        with open("/proc/self/status", encoding="utf-8", errors="replace") as lines:
            umask = next((line for line in lines if line.startswith("Umask")), "")
        return cls(
            tuple(path),
            tuple(sorted(item for item in os.environ.items() if not _PASSING.fullmatch(item[0]))),
            tuple(resource.getrlimit(getattr(resource, name)) for name in names),
            frozenset(os.sched_getaffinity(0)),
            os.getpriority(os.PRIO_PROCESS, 0),
            umask,
            (os.geteuid(), os.getegid()),
            os.getpid(),
        )


class ForkServer:
    """One server, a child of this process. Make it in a lasting thread (`Spawner`)."""

    def __init__(self, born: Surroundings, imports: Sequence[str]) -> None:
        self.born = born
        self._imports = frozenset(imports)
        self._ended = False
        self._ready = False
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair()
        weakref.finalize(self, self._socket.close)  # also at the interpreter's end, which would otherwise warn
        start = _START.format(path=list(born.path), parent=os.getpid(), imports=tuple(imports))
        with theirs:
            self._popen = subprocess.Popen(
                [*mortal(), sys.executable, "-c", start],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**_ARROW, **os.environ, "PYTHONUNBUFFERED": "1", **_NO_THREADS},
                start_new_session=True,
            )
        _known.add(self._popen.pid)
        threading.Thread(target=self._popen.wait, daemon=True).start()

    def able(self, imports: Sequence[str] = ()) -> bool:
        """Whether it still runs, and has imported these."""
        return not self._ended and self._popen.poll() is None and self._imports.issuperset(imports)

    def fork(self) -> Child | None:
        """A new worker, or None if it cannot be forked: then the server is ended."""
        with self._lock:
            with contextlib.suppress(OSError):  # TimeoutError among them
                self._wait_until_ready()
                return self._forked()
            self.end()
            return None

    def import_more(self) -> None:
        """Have it import what later runs may need, now that one has ended."""
        with self._lock, contextlib.suppress(OSError):  # one that has ended is found out by whoever needs a fork
            if self._ready and PANDAS not in self._imports:
                self._socket.send(IMPORT_MORE)
                self._imports |= {PANDAS}

    def end(self) -> None:
        """End the server; its forks live on."""
        self._ended = True
        self._popen.kill()
        with contextlib.suppress(OSError):
            self._socket.close()

    def _wait_until_ready(self) -> None:
        if not self._ready:
            if self._heard(IMPORTED) != READY:  # it has threads, or could not import
                raise OSError("a fork server that cannot fork")
            self._ready = True

    def _heard(self, limit: float) -> bytes:
        """The server's next message. Raises TimeoutError after `limit` seconds, or soon if this process is to end."""
        began = time.monotonic()
        self._socket.settimeout(POLL)
        while time.monotonic() - began < limit and not ENDING.overdue(began):
            with contextlib.suppress(TimeoutError):
                return self._socket.recv(20)
        raise TimeoutError("a fork server that says nothing")

    def _forked(self) -> Child:
        ours: list[int] = []
        theirs: list[int] = []
        try:
            for number in range(3):
                r, w = os.pipe()
                ours.append(r if number else w)
                theirs.append(w if number else r)
            theirs.append(os.open(".", os.O_PATH))
            with _taking_orphans():
                try:
                    socket.send_fds(self._socket, [FORK_ONE], theirs)
                    pid = int(self._heard(BORN))
                    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # ChildProcessError: it is not ours
                except BaseException:
                    self._end_unborn()
                    raise
                _known.add(pid)
            stdin, stdout, stderr = open(ours[0], "wb"), open(ours[1], "rb"), open(ours[2], "rb")  # noqa: SIM115
            ours.clear()
            return Child(pid, stdin, stdout, stderr)
        except ValueError as e:
            raise OSError("the fork server has ended") from e
        finally:
            for fd in (*ours, *theirs):
                os.close(fd)

    def _end_unborn(self) -> None:
        """End the server and what it has half forked: what was stopped then is nobody's, and would not end with this
        process. Within `_taking_orphans`.
        """
        self.end()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(1.0)  # then its children are this process's
        for _ in range(2):  # the server's child, then that one's
            for pid in _unknown():
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)


_orphanage = threading.Lock()
_known: set[int] = set()  # processes of ours below this one that somebody looks after


def _unknown() -> list[int]:
    """Children of this process that a server has forked, and that nobody knows; none where the kernel lists none."""
    found = []
    for listed in glob.glob("/proc/self/task/*/children"):
        with contextlib.suppress(OSError), open(listed, encoding="ascii") as children:
            found += [int(pid) for pid in children.read().split() if int(pid) not in _known]
    return [pid for pid in found if _name_of(pid) in (NAME, WORKER)]


def _name_of(pid: int) -> str:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as name:
        return name.read().strip()
    return ""


def _free_in_a_fork() -> None:
    """In a fork, replace the lock: the thread that holds it does not exist there."""
    global _orphanage  # noqa: PLW0603
    _orphanage = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_free_in_a_fork)


@contextlib.contextmanager
def _taking_orphans() -> Iterator[None]:
    """While inside, orphans below this process become its children. Raises OSError if the kernel does not
    support this.
    """
    import ctypes

    prctl = ctypes.CDLL(None, use_errno=True).prctl
    with _orphanage:
        before = ctypes.c_int(0)
        prctl(_IS_SUBREAPER, ctypes.byref(before), 0, 0, 0)
        if prctl(_SUBREAPER, 1, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "PR_SET_CHILD_SUBREAPER")
        try:
            yield
        finally:
            prctl(_SUBREAPER, before.value, 0, 0, 0)


# ---------------------------------------------------------------- in the server


def serve(driver: int, imports: Sequence[str]) -> NoReturn:
    """A server's whole life: import, then fork on request, until the driver ends or makes no more requests."""
    pass_signals()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a driver that ignores it passes that on: then nobody can wait
    be_named(NAME)
    gc.disable()  # see gristmill.engines.serving
    asked = socket.socket(fileno=os.dup(0))
    for module in imports:
        importlib.import_module(module)
    _settle()
    asked.sendall(READY)
    with selectors.DefaultSelector() as selector:
        selector.register(asked, selectors.EVENT_READ)
        while selector.select(IDLE):
            said, files, _, _ = socket.recv_fds(asked, 1, 4)
            if not said:
                break
            if said == IMPORT_MORE:
                importlib.import_module(PANDAS)
                _settle()
                continue
            pid = _forked(files, driver)
            if pid == 0:
                asked.close()
                selector.close()
                serving.serve(forked=True)
            for fd in files:
                os.close(fd)
            asked.sendall(str(pid).encode())
    os._exit(0)


def _settle() -> None:
    """After imports. Threads are lost in a fork, and their locks stay held for ever: with any, this process ends."""
    if len(os.listdir("/proc/self/task")) > 1:
        os._exit(1)
    gc.freeze()


def _forked(files: Sequence[int], driver: int) -> int:
    """The process id of a worker with these files as its standard streams and working directory; 0 in that worker."""
    told, tell = os.pipe()
    if middle := os.fork():
        os.close(tell)
        os.waitpid(middle, 0)  # from here on the worker is the driver's
        with open(told, "rb") as pid:
            return int(pid.read())
    middle = os.getpid()
    try:
        if os.fork():
            os._exit(0)
    except OSError:  # no room for another process: the driver will find that, too
        os._exit(1)
    os.close(told)
    be_named(WORKER)
    os.setsid()  # the driver handles a Ctrl-C at the terminal
    for number, (fd, name) in enumerate(zip(files, ("stdin", "stdout", "stderr"), strict=False)):
        os.dup2(fd, number)
        stream = _stream(number, getattr(sys, name))
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    os.fchdir(files[3])
    for fd in files:
        os.close(fd)
    while os.getppid() == middle:
        time.sleep(0.0005)
    die_with(driver)
    os.write(tell, str(os.getpid()).encode())  # only once it is sure to end with the driver
    os.close(tell)
    return 0


def _stream(number: int, like: TextIO) -> TextIO:
    """A standard stream as in a fresh, unbuffered interpreter; the server's own is of another kind of file."""
    raw = open(number, "wb" if number else "rb", buffering=0, closefd=False)  # noqa: SIM115 - it stays open
    return io.TextIOWrapper(raw, like.encoding, like.errors, write_through=True)
