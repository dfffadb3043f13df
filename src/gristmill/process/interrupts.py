"""Whether this process was asked to end: then anything that waits for something outside, such as an unreachable store,
gives up soon. Also how signals that ask for the end are kept out of imports.
"""

from __future__ import annotations

import _imp
import _thread
import signal
import threading
import time
from types import FrameType

SOON = 3.0  # seconds: the process must be gone within 12 s, of which workers may take most


class Ending:
    """The request to end: made by a signal in a driver, by the driver in its workers."""

    def __init__(self) -> None:
        self._since: float | None = None

    def begin(self) -> None:
        """From now on, wait for nothing outside longer than SOON seconds."""
        if self._since is None:
            self._since = time.monotonic()

    def over(self) -> None:
        """The run that was to end has ended; the process continues."""
        self._since = None

    def overdue(self, began: float) -> bool:
        """Whether to give up what `began` at that time of the monotonic clock."""
        return self._since is not None and time.monotonic() - max(self._since, began) > SOON


ENDING = Ending()


class Patience:
    """A wait, from now, for what somebody else holds: it is over after some seconds, or soon once this process is to
    end.
    """

    def __init__(self, seconds: float) -> None:
        self._began = time.monotonic()
        self._seconds = seconds

    def over(self) -> bool:
        """Whether to wait no longer."""
        return time.monotonic() - self._began > self._seconds or ENDING.overdue(self._began)


class Postponed:
    """Signals that arrive while the import system is at work are postponed: an exception raised by a handler there
    leaves its locks taken for good, and an import in another thread would wait for ever.
    """

    def __init__(self) -> None:
        self._times = 0

    def __call__(self, number: int, frame: FrameType | None) -> bool:
        """Whether a handler should do nothing now, because the signal is sent again in a hundredth of a second; for a
        second at most. Called in the main thread.
        """
        importing = frame is not None and frame.f_code.co_filename.startswith("<frozen importlib")
        if not (importing or _imp.lock_held()) or self._times >= 100:
            return False
        self._times += 1
        _thread.start_new_thread(_again, (number, threading.get_ident()))
        return True


def _again(number: int, thread: int) -> None:
    time.sleep(0.01)
    signal.pthread_kill(thread, number) if hasattr(signal, "pthread_kill") else signal.raise_signal(number)


def free_imports() -> None:
    """Release the import system's lock if this thread, which is not importing now, still holds it: a signal's exception
    may come between any two steps.
    """
    while _imp.lock_held():
        try:
            _imp.release_lock()
        except RuntimeError:  # another thread has it
            return
