"""Signs of life: a working process reports from time to time that it is alive, and for how long it may be silent.
Whoever started it gives it up after a longer silence: it is stopped, stuck in the kernel, or out of reach.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from gristmill.process.messages import Alive, Emit

LOADING = 600.0  # seconds of silence while imports and models, which may hold the GIL, are loaded: as for a batch
STOPPED = 600.0  # seconds within which a stopped process must be continued, if its calls may take for ever
OFTEN, SELDOM = 1.0, 10.0  # seconds between two signs; many workers with long limits should not keep a driver busy


def patience(limit: float) -> float:
    """Seconds to wait for a process that may be silent for `limit`: more than that, so that its own watch can end it
    first and report where it hangs.
    """
    return 1.1 * limit + 5.0


def give_signs(name: str, opened: Sequence[Any], emit: Emit) -> None:
    """From now on, emit signs of life of the worker `name` from a thread; `opened` contains the worker once it is
    loaded.
    """
    threading.Thread(target=_give_signs, args=(name, opened, emit), daemon=True).start()


def sign(name: str, opened: Sequence[Any]) -> Alive | None:
    """The sign of life to give now: a worker's `silence()` says how long it may be silent; None: no sign."""
    if not opened:
        return Alive(name, LOADING)
    limit = opened[0].silence() if hasattr(opened[0], "silence") else math.inf
    return None if limit is None else Alive(name, limit)


def _give_signs(name: str, opened: Sequence[Any], emit: Emit) -> None:
    with contextlib.suppress(OSError):  # nobody is listening any more
        while True:
            alive = sign(name, opened)
            if alive is not None:
                emit(alive)
            time.sleep(OFTEN if not opened or alive is None else min(SELDOM, max(OFTEN, alive.limit / 60)))


class Vigil:
    """Tracks how long processes have been silent. It has no clock of its own: the caller passes the time.

    The watcher may itself be held up while signs wait to be heard: of the time between two looks, only `STEP` seconds
    count.
    """

    STEP = 1.0

    def __init__(self) -> None:
        self._limits: dict[str, float] = {}
        self._silent: dict[str, float] = {}
        self._looked: float | None = None
        self._lock = threading.Lock()

    def watch(self, name: str) -> None:
        """Start watching this process, unless already watched."""
        with self._lock:
            self._silent.setdefault(name, 0.0)

    def heard(self, name: str, limit: float | None = None) -> None:
        """A sign of life, after which `limit` seconds of silence are allowed; None: the limit stays."""
        with self._lock:
            if name in self._silent:
                self._silent[name] = 0.0
            if limit is not None:
                self._limits[name] = limit

    def rest(self, name: str) -> None:
        """This process need not give signs for now."""
        with self._lock:
            self._silent.pop(name, None)

    def forget(self, name: str) -> None:
        with self._lock:
            self._silent.pop(name, None)
            self._limits.pop(name, None)

    def late(self, now: float, limits: Mapping[str, float] | None = None) -> list[tuple[str, float]]:
        """Processes that have been silent for too long, with the seconds. `limits` are lower limits for some."""
        with self._lock:
            passed = 0.0 if self._looked is None else min(self.STEP, now - self._looked)
            self._looked = now
            self._silent = {name: silent + passed for name, silent in self._silent.items()}
            return [(n, s) for n, s in self._silent.items() if s > patience(self._limit(n, limits or {}))]

    def _limit(self, name: str, limits: Mapping[str, float]) -> float:
        return min(self._limits.get(name, LOADING), limits.get(name, math.inf))
