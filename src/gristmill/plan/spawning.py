"""Processes that end with the one that started them, whatever state they are in."""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any


class Spawner:
    """Starts processes from one thread that lasts: parent-death signals are sent when the *thread* that forked ends."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], Any]) -> Any:
        """What the function returns or raises, called in that thread."""
        self._calls.put(function)
        answer = self._answers.get()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def close(self) -> None:
        """End the thread, and with it what it has started."""
        self._calls.put(None)
        self._thread.join()

    def _serve(self) -> None:
        while (function := self._calls.get()) is not None:
            try:
                self._answers.put(function())
            except BaseException as e:  # crosses to the caller's thread, where it is raised
                self._answers.put(e)


@functools.cache
def mortal() -> tuple[str, ...]:
    """What stands before a command so that its process dies with the thread that starts it, before it has run a line of
    its own: one that is stopped while it starts could not say `die_with`. Empty where the system has no such tool.

    Not a function to be called between fork and exec: that runs Python in a copy of a process with threads.
    """
    import shutil  # a worker needs none of these
    import subprocess

    tool = shutil.which("setpriv") if sys.platform == "linux" else None
    if tool is None:
        return ()
    command = (tool, "--pdeathsig", "KILL")  # the process stays the same one; old versions do not know the option
    with contextlib.suppress(OSError):
        known = subprocess.run([*command, "true"], check=False, stdin=subprocess.DEVNULL, capture_output=True)
        return command if known.returncode == 0 else ()
    return ()


def die_with(parent: int) -> None:
    """Ask the kernel for a kill when the thread that started this process ends, at the latest with its process (Linux);
    elsewhere the end of the pipe from there does it. Said first of all, for where `mortal` is empty.
    """
    if sys.platform != "linux":
        return
    import ctypes

    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(0)
