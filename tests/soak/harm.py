"""Signals to the processes of a run at random moments, and a watch that nothing is left running."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Sequence
from random import Random

import psutil

from soak.witness import Broken

TAG = "GRISTMILL_SOAK_TAG"  # in the environment of every process of a siege
# Seconds that a run may take before it counts as hanging. A row that hangs is found in nine deaths, each after 20 times
# the slowest call seen: 18 to 44 s where others keep the machine busy, which is no hang.
LONGEST = 900.0
FROZEN = 60.0  # seconds after which a worker that was stopped for good goes on, should it not be given up
GRACE = 13.0  # seconds in which a run must be gone after a signal (12 s are promised)

# who is hit, by what: how often
HITS = {
    ("worker", "KILL"): 8, ("worker", "TERM"): 1, ("worker", "INT"): 1, ("worker", "PAUSE"): 2, ("worker", "STOP"): 1,
    ("driver", "KILL"): 4, ("driver", "TERM"): 2, ("driver", "INT"): 2, ("driver", "PAUSE"): 1,
    ("all", "KILL"): 3, ("all", "TERM"): 1, ("all", "INT"): 1, ("all", "PAUSE"): 1,
}  # fmt: skip


class Harm:
    """Harasses runs: each wait and each hit is drawn from `chance`; at most `most` signals."""

    def __init__(self, chance: Random, most: int, without: Sequence[str]) -> None:
        self.done: Counter[str] = Counter()
        self.log: list[str] = []
        self._chance, self._left = chance, most
        self._stopped: dict[int, float] = {}
        self._hits = {hit: n for hit, n in HITS.items() if hit[1] not in without and hit[0] not in without}

    def attend(self, runs: Sequence[subprocess.Popen[bytes]], slowest: float) -> None:
        """Wait for the runs to end, and hit them meanwhile. Raises Broken for one that does not end."""
        begun = time.monotonic()
        while alive := [r for r in runs if r.poll() is None]:
            if time.monotonic() - begun > LONGEST:
                raise Broken(f"a run does not end in {LONGEST:g} s; {' '.join(self.log[-6:])}")
            self._continue()
            if self._left <= 0:
                time.sleep(0.05)
                continue
            _until(lambda: all(r.poll() is not None for r in runs), self._chance.uniform(0.05, slowest))
            who, what = self._chance.choices(list(self._hits), list(self._hits.values()))[0]
            victim = self._chance.choice(alive)
            if victim.poll() is None:
                self._hit(victim, who, what)

    def _hit(self, run: subprocess.Popen[bytes], who: str, what: str) -> None:
        workers = sorted(_below(run.pid), key=lambda p: p.pid)
        aim = {"worker": workers[:], "driver": [], "all": workers}[who]
        if who == "worker":
            if not workers:
                return
            aim = [self._chance.choice(workers)]
        pids = [p.pid for p in aim] + [run.pid] * (who != "worker")
        self._left -= 1
        self.done[f"{what} {who}"] += 1
        self.log.append(f"{what}-{who}")
        send(pids, {"PAUSE": "STOP"}.get(what, what))
        if what == "STOP":
            self._stopped |= dict.fromkeys(pids, time.monotonic())
        if what == "PAUSE":
            _until(lambda: False, self._chance.choice([0.1, 0.5, 3.0]))
            send(pids, "CONT")
        if who == "driver" and what in ("TERM", "INT"):
            if self._chance.random() < 0.2:  # an impatient person
                _until(lambda: run.poll() is not None, self._chance.uniform(0.0, 0.5))
                send(pids, what)
            if not _until(lambda: run.poll() is not None, GRACE):
                raise Broken(f"{what} to the driver, and it is not gone after {GRACE:g} s")

    def _continue(self) -> None:
        """A worker at work that stops is given up in seconds, one that is loading in ten minutes: too long to wait."""
        for pid in [pid for pid, at in self._stopped.items() if time.monotonic() - at > FROZEN]:
            send([pid], "CONT")
            del self._stopped[pid]


def send(pids: Sequence[int], what: str) -> None:
    """A signal by its short name, to those that are still there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, getattr(signal, f"SIG{what}"))


def _below(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _command(process: psutil.Process) -> str:
    """Of a process between fork and exec, its parent's."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _until(true: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def tagged(tag: str) -> list[psutil.Process]:
    """Processes of a siege, by their environment; those that have ended and wait for their parent do not count."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(TAG) == tag and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def nothing_left(tag: str, log: Sequence[str]) -> None:
    """Raises Broken, and ends them, where processes of a siege outlive its runs."""
    if _until(lambda: not tagged(tag), GRACE):
        return
    # One that was stopped between fork and exec has not run a line yet: it could not ask to end with its parent.
    send([p.pid for p in tagged(tag) if p.status() == psutil.STATUS_STOPPED and "-m gristmill " in _command(p)], "CONT")
    if _until(lambda: not tagged(tag), 1.0):
        return
    left = tagged(tag)
    shown = [" ".join(p.cmdline())[:150] for p in left if p.is_running()]
    send([p.pid for p in left], "KILL")
    raise Broken(f"{len(left)} processes outlive their run by {GRACE:g} s, after {list(log)}: {shown}")
