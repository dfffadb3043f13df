"""Calls that wait for something outside, in libraries that may do so in C for minutes. Python's handlers of signals run
in the main thread, between two steps of Python: there, such a call would make the process deaf.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from gristmill.process.interrupts import ENDING
from gristmill.process.pool import Pool

_TICK = 0.25  # seconds between two checks whether the process is to end
_NAME = "gristmill-blocking-call"
T = TypeVar("T")


def heard(ask: Callable[[], T]) -> T:
    """What `ask` returns. The main thread hears signals meanwhile, and leaves a call that takes too long once this
    process is to end: it has a thread of its own, which keeps no process alive. Raises InterruptedError.
    """
    if threading.current_thread() is not threading.main_thread():
        return ask()
    from concurrent.futures import wait

    began, asked = time.monotonic(), Pool(1, _NAME, daemon=True).submit(ask)
    while not wait([asked], _TICK).done:
        if ENDING.overdue(began):
            raise InterruptedError(errno.EINTR, "there was no answer before this process had to end")
    return asked.result()


def unanswered() -> bool:
    """Whether a call goes on that nobody waits for any more: its thread must not meet an interpreter that is torn
    down.
    """
    return any(thread.name == _NAME for thread in threading.enumerate())
