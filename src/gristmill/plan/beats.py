"""Signs of life: a process at work says every now and then that it is there, and for how long it may be silent. Who
started it gives it up when it was silent for longer: it is stopped, stuck in the kernel, or out of reach.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from gristmill.plan.contracts import Alive, Emit

LOADING = 600.0  # seconds of silence while imports and models are loaded, which may hold the GIL: a batch's own limit
STOPPED = 600.0  # seconds that a stopped process is given to be continued, where its calls may take for ever
OFTEN, SELDOM = 1.0, 10.0  # seconds between two signs; many workers with long limits should not keep a driver busy


def patience(limit: float) -> float:
    """Seconds to wait for a process that may be silent for `limit`: more, so that its own watch ends it first, with the
    place where it hangs, if it can.
    """
    return 1.1 * limit + 5.0


def give_signs(name: str, opened: Sequence[Any], emit: Emit) -> None:
    """From now on, in a thread: that the worker `name`, which is in `opened` when it is loaded, is alive."""
    threading.Thread(target=_give_signs, args=(name, opened, emit), daemon=True).start()


def sign(name: str, opened: Sequence[Any]) -> Alive | None:
    """A worker says with `silence()` for how long it may be silent; for None there is no sign to give."""
    if not opened:
        return Alive(name, LOADING)
    limit = opened[0].silence() if hasattr(opened[0], "silence") else math.inf
    return None if limit is None else Alive(name, limit)


def _give_signs(name: str, opened: Sequence[Any], emit: Emit) -> None:
    with contextlib.suppress(OSError):  # nobody listens any more
        while True:
            alive = sign(name, opened)
            if alive is not None:
                emit(alive)
            time.sleep(OFTEN if not opened or alive is None else min(SELDOM, max(OFTEN, alive.limit / 60)))


class Vigil:
    """For how long processes have been silent. No clock of its own: who asks says what time it is.

    Who watches may be held up itself, while signs wait to be heard: of the time between two looks only `STEP` seconds
    count.
    """

    STEP = 1.0

    def __init__(self) -> None:
        self._limits: dict[str, float] = {}
        self._silent: dict[str, float] = {}
        self._looked: float | None = None
        self._lock = threading.Lock()

    def watch(self, name: str) -> None:
        """Begin to wait for this process, if that has not begun."""
        with self._lock:
            self._silent.setdefault(name, 0.0)

    def heard(self, name: str, limit: float | None = None) -> None:
        """A sign of life, after which `limit` seconds of silence are allowed; None: as many as before."""
        with self._lock:
            if name in self._silent:
                self._silent[name] = 0.0
            if limit is not None:
                self._limits[name] = limit

    def rest(self, name: str) -> None:
        """It need not be heard, for now."""
        with self._lock:
            self._silent.pop(name, None)

    def forget(self, name: str) -> None:
        """It has ended."""
        with self._lock:
            self._silent.pop(name, None)
            self._limits.pop(name, None)

    def late(self, now: float, limits: Mapping[str, float] | None = None) -> list[tuple[str, float]]:
        """Who has been silent for too long, and for how many seconds. `limits` are lower ones for some."""
        with self._lock:
            passed = 0.0 if self._looked is None else min(self.STEP, now - self._looked)
            self._looked = now
            self._silent = {name: silent + passed for name, silent in self._silent.items()}
            return [(n, s) for n, s in self._silent.items() if s > patience(self._limit(n, limits or {}))]

    def _limit(self, name: str, limits: Mapping[str, float]) -> float:
        return min(self._limits.get(name, LOADING), limits.get(name, math.inf))
