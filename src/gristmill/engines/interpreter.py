"""A worker's interpreter: how it is started, also ahead of time, so that its imports go on while its run is planned."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gristmill.plan.options import EngineSpec
from gristmill.plan.processes import import_path, thread_variables
from gristmill.plan.spawning import Spawner, mortal

MOST = 2  # started ahead: planning takes as long as the imports of about so many
_START = (
    "import sys; sys.path[:0] = {path!r}; from gristmill.plan.spawning import die_with; die_with({parent}); "
    "from gristmill.engines.local import serve; serve({imports!r})"
)


def start(path: Sequence[str], environment: Mapping[str, str], imports: Sequence[str] = ()) -> subprocess.Popen[bytes]:
    """A fresh interpreter that waits for what to serve. `environment` goes over this process's own.

    Call it in a thread that lasts (`Spawner`): the kernel ends it when the thread that started it ends.
    """
    return subprocess.Popen(
        [*mortal(), sys.executable, "-c", _START.format(path=list(path), parent=os.getpid(), imports=tuple(imports))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
        start_new_session=True,  # a Ctrl-C at the terminal is the driver's to handle
    )


# ---------------------------------------------------------------- ahead of time


@dataclass(frozen=True)
class _Spare:
    popen: subprocess.Popen[bytes]
    path: tuple[str, ...]
    threads: Mapping[str, str]


class Spares:
    """Interpreters that nobody has a use for yet. Whoever starts some ends the rest."""

    def __init__(self) -> None:
        self._kept: list[_Spare] = []
        self._lock = threading.Lock()
        self._spawner: Spawner | None = None
        self._owner = 0  # the process whose spares these are: a fork of it inherits them as values only

    def start(self, spec: EngineSpec, cores: int, imports: Sequence[str] = (), most: int = MOST) -> None:
        """Some for a run on that engine, if it will have workers on this machine, unless they are there. They import
        these modules.

        Libraries read how many threads to have when they are loaded, so that this has to be guessed: a worker a core.
        """
        workers = spec.workers if isinstance(spec.workers, int) else cores
        if spec.name != "local" or workers == 0:
            return
        threads = spec.threads if isinstance(spec.threads, int) else max(1, cores // workers)
        path, variables = import_path(), thread_variables(threads)
        with self._lock:
            if self._spawner is None or self._owner != os.getpid():
                self._spawner, self._owner, self._kept = Spawner(), os.getpid(), []
            for _ in range(min(workers, most) - len(self._kept)):
                popen = self._spawner.call(lambda: start(path, variables, imports))
                self._kept.append(_Spare(popen, path, variables))

    def take(self, path: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes] | None:
        """One that imports from there and has as many threads; None where there is none, or none that still runs."""
        with self._lock:
            for spare in self._kept if self._owner == os.getpid() else ():
                fits = spare.path == tuple(path) and spare.threads.items() <= environment.items()
                if fits and spare.popen.poll() is None:
                    self._kept.remove(spare)
                    return spare.popen
        return None

    def end(self) -> None:
        """End those that are left."""
        with self._lock:
            for spare in self._kept if self._owner == os.getpid() else ():
                spare.popen.kill()
                spare.popen.communicate()
            self._kept = []


SPARES = Spares()
