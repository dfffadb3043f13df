"""Facts of this machine and its signals: cores, GPUs, kills for lack of memory, requests to stop."""

from __future__ import annotations

import contextlib
import glob
import os
import platform
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

from gristmill.errors import Ended, Interrupted
from gristmill.process.interrupts import ENDING, Postponed
from gristmill.process.messages import Death


def cores() -> int:
    """Cores this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not available on every system
        return os.cpu_count() or 1


def memory() -> int:
    """Bytes of memory this process may use: the machine's, or its control group's limit if that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 8 << 30
    try:
        with open("/sys/fs/cgroup/memory.max") as file:
            limit = file.read().strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdigit() else total


def name() -> str:
    """What the machine computes with: its processor's name and cores, and its GPUs' names."""
    found = [f"{_processor()} x {cores()}"]
    for folder in sorted(glob.glob("/proc/driver/nvidia/gpus/*/information")):
        with contextlib.suppress(OSError), open(folder) as file:
            found += [line.partition(":")[2].strip() for line in file if line.startswith("Model:")]
    return ", ".join(found)


def _processor() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def gpus() -> tuple[str, ...]:
    """Ids of the NVIDIA GPUs this process may use, found without loading a GPU library."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return tuple(v.strip() for v in visible.split(",") if v.strip())
    try:
        return tuple(str(i) for i in range(len(os.listdir("/proc/driver/nvidia/gpus"))))
    except OSError:
        return ()


class OutOfMemory:
    """Whether the kernel has killed for lack of memory since last asked (Linux), counted for this process's control
    group if possible: the rest of the machine is no evidence. The kernel names no process: of two workers that end at
    once, one killed by the kernel and one by somebody else, the wrong one may be blamed.
    """

    def __init__(self, root: str = "/") -> None:
        self._counter = _kills_counter(root)
        self._seen = self._count()

    def __call__(self, death: Death) -> bool:
        now = self._count()
        more, self._seen = now > self._seen, now
        return more

    def _count(self) -> int:
        return _kills(self._counter) or 0


def _kills_counter(root: str) -> str:
    """The file that counts kills for lack of memory: the control group's, whether the group or the machine ran short;
    otherwise the machine's own.
    """
    groups = os.path.join(root, "sys/fs/cgroup")
    with contextlib.suppress(OSError), open(os.path.join(root, "proc/self/cgroup")) as file:
        for line in file:
            _, kinds, below = line.strip().split(":", 2)
            if kinds and "memory" not in kinds.split(","):
                continue
            above, name = (groups, "memory.events") if not kinds else (f"{groups}/memory", "memory.oom_control")
            for folder in (above + below, above):  # in a container `below` may be the name used outside
                if _kills(found := os.path.join(folder, name)) is not None:
                    return found
    return os.path.join(root, "proc/vmstat")


def _kills(path: str) -> int | None:
    """The `oom_kill` counter in a file; None if it has none."""
    with contextlib.suppress(OSError), open(path) as file:
        for line in file:
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return None


class Stops:
    """SIGINT and SIGTERM during a run: while it heeds them, the first asks it to end; otherwise, and the second time,
    they end it at once, except that what must be left in order is.

    `number` is the signal that asked, or None. Outside the main thread, signals are not caught.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self._heeded = False
        self._postponed = Postponed()

    @contextlib.contextmanager
    def caught(self) -> Iterator[None]:
        """While inside, signals are handled here; the previous handlers are restored afterwards.

        What a signal raises in the middle of an import may surface as any error, or not at all. Raises Interrupted.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        # A handler set from outside Python, which Python could not restore, is left alone.
        numbers = [n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) is not None]
        before: dict[int, Any] = {int(n): signal.signal(n, self._on) for n in numbers}
        try:
            yield
        except (Exception, KeyboardInterrupt) as e:
            if self.number is None or isinstance(e, Interrupted):
                raise
            raise self.interrupted() from e
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            ENDING.over()

    @contextlib.contextmanager
    def heeded(self) -> Iterator[None]:
        """While inside, the caller keeps checking `number`. Raises Interrupted at the end for a signal not yet acted
        on.
        """
        self._heeded = True
        try:
            yield
        finally:
            self._heeded = False
        if self.number is not None:
            raise self.interrupted()

    def interrupted(self) -> Interrupted:
        """The error for the requested end."""
        assert self.number is not None
        return _ended(self.number, "stopped by {}: run the same command again to resume")

    def _on(self, number: int, frame: FrameType | None) -> None:
        if self._postponed(number, frame):
            return
        ENDING.begin()
        if not self._heeded:
            self.number = number
            raise self.interrupted()
        if self.number is not None:
            raise _ended(number, "stopped at once by a second {}")
        self.number = number


def _ended(number: int, how: str) -> Interrupted:
    typed = hasattr(sys, "ps1") or sys.flags.interactive  # an interactive session continues, a script does not
    return (Interrupted if typed else Ended)(how.format(signal.Signals(number).name), exit_code=128 + number)
