"""A worker's interpreter: a fork if the platform supports it, else a fresh one. Its imports happen while its run is
planned.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from gristmill.engines import forkserver
from gristmill.engines.forkserver import Child, ForkServer, Surroundings
from gristmill.job.options import EngineSpec
from gristmill.process.spawning import Spawner, mortal
from gristmill.process.startup import import_path, thread_variables
from gristmill.values import dataclass

T = TypeVar("T")
TRIES = 3  # consecutive failures to fork, after which workers are fresh interpreters
MOST = 2  # started ahead: planning takes about as long as the imports of this many
_START = (
    "import sys; sys.path[:0] = {path!r}; from gristmill.process.spawning import die_with; die_with({parent}); "
    "from gristmill.engines.serving import serve; serve({imports!r})"
)


def start(path: Sequence[str], environment: Mapping[str, str], imports: Sequence[str] = ()) -> subprocess.Popen[bytes]:
    """A fresh interpreter that waits for something to serve. `environment` overrides this process's own.

    Call it in a lasting thread (`Spawner`): the kernel ends the interpreter when the thread that started it ends.
    """
    return subprocess.Popen(
        [*mortal(), sys.executable, "-c", _START.format(path=list(path), parent=os.getpid(), imports=tuple(imports))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
        start_new_session=True,  # the driver handles a Ctrl-C at the terminal
    )


# ---------------------------------------------------------------- ahead of time


@dataclass(frozen=True)
class _Spare:
    popen: subprocess.Popen[bytes]
    path: tuple[str, ...]
    threads: Mapping[str, str]


class Spares:
    """Interpreters that are not yet used, or the server that forks them. Whoever starts some ends the rest; a server is
    kept for the next run, and ends by itself.
    """

    def __init__(self) -> None:
        self._kept: list[_Spare] = []
        self._server: ForkServer | None = None
        self._failed = 0
        self._lock = threading.Lock()
        self._spawner: Spawner | None = None
        self._owner = 0  # the process that owns the spares: in a fork of it they are unusable

    def start(self, spec: EngineSpec, cores: int, imports: Sequence[str] = (), most: int = MOST) -> None:
        """Start some for a run on that engine, if it will have workers on this machine and there are none yet. They
        import these modules.

        Libraries read their number of threads on loading, so it has to be guessed: one worker per core.
        """
        workers = spec.workers if isinstance(spec.workers, int) else cores
        if spec.name != EngineSpec.name or workers == 0:  # other engines are not imported yet
            return
        threads = spec.threads if isinstance(spec.threads, int) else max(1, cores // workers)
        path, variables = import_path(), thread_variables(threads)
        with self._lock:
            if self._forks(path, imports) is not None:
                return
            for _ in range(min(workers, most) - len(self._kept)):
                popen = self._started(lambda: start(path, variables, imports))
                self._kept.append(_Spare(popen, path, variables))

    def taken(self, path: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes] | Child:
        """A spare interpreter, or a new one."""
        return self.take(path, environment) or start(path, environment)

    def take(self, path: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes] | Child | None:
        """A spare that imports from `path` and has the right number of threads; None if there is none, or none is still
        running.
        """
        with self._lock:
            if (server := self._forks(path)) is not None:
                if (child := server.fork()) is not None:
                    self._failed = 0
                    return child
                self._failed += 1
            for spare in self._kept if self._owner == os.getpid() else ():
                fits = spare.path == tuple(path) and spare.threads.items() <= environment.items()
                if fits and spare.popen.poll() is None:
                    self._kept.remove(spare)
                    return spare.popen
        return None

    def forks(self, path: Sequence[str], imports: Sequence[str]) -> bool:
        """Whether there is a server that forks workers which import from `path`, and has, or is about to have, these
        modules imported.
        """
        with self._lock:
            server, able = self._server, self._failed < TRIES and forkserver.possible()
            return able and server is not None and server.born == Surroundings.now(path) and server.able(imports)

    def end(self) -> None:
        """End those that were not taken."""
        with self._lock:
            for spare in self._kept if self._owner == os.getpid() else ():
                spare.popen.kill()
                spare.popen.communicate()
            self._kept = []

    def expect_another(self) -> None:
        """A run has ended, and more may follow: what many workers need is imported once for all of them."""
        with self._lock:
            if self._server is not None and self._server.born.process == os.getpid():
                self._server.import_more()

    def _forks(self, path: Sequence[str], imports: Sequence[str] = ()) -> ForkServer | None:
        """The server for workers that import from `path`, started if need be."""
        if self._failed >= TRIES or not forkserver.possible():
            return None
        born = Surroundings.now(path)
        if self._server is None or self._server.born != born or not self._server.able(imports):
            if self._server is not None and self._server.born.process == os.getpid():
                self._server.end()
            self._server = self._started(lambda: ForkServer(born, imports))
        return self._server

    def _started(self, function: Callable[[], T]) -> T:
        """What the function returns when called in a thread that lasts as long as this process."""
        if self._spawner is None or self._owner != os.getpid():
            self._spawner, self._owner, self._kept = Spawner(), os.getpid(), []
        found: T = self._spawner.call(function)
        return found


SPARES = Spares()


def _none_in_a_fork() -> None:
    """In a fork, begin anew: the lock may be held by a thread that the fork lacks, and the spares belong to its
    parent.
    """
    SPARES.__init__()  # type: ignore[misc]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_none_in_a_fork)
