"""Whether this process was asked to end: who waits for something outside, a store that is away, then gives up soon.
And how the signals that ask for it are kept out of imports.
"""

from __future__ import annotations

import _imp
import _thread
import signal
import threading
import time
from types import FrameType

SOON = 3.0  # seconds: out within 12 s, of which workers may take most


class Ending:
    """Asked for by a signal in a driver, by the driver in its workers."""

    def __init__(self) -> None:
        self._since: float | None = None

    def begin(self) -> None:
        """From now on nothing outside is waited for any longer than SOON seconds."""
        if self._since is None:
            self._since = time.monotonic()

    def over(self) -> None:
        """The run that was to end has ended; this process goes on."""
        self._since = None

    def overdue(self, began: float) -> bool:
        """Whether to give up what `began` then, on the monotonic clock."""
        return self._since is not None and time.monotonic() - max(self._since, began) > SOON


ENDING = Ending()


class Postponed:
    """Signals that come while the import system is at work: what a handler raises there leaves its locks taken for
    good, and an import in another thread would wait for ever.
    """

    def __init__(self) -> None:
        self._times = 0

    def __call__(self, number: int, frame: FrameType | None) -> bool:
        """Whether a handler is to do nothing, as the signal comes again in a hundredth of a second; for a second at
        most. Called in the main thread.
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
    """Let go of the import system's lock where this thread, which imports nothing now, has left it taken: a signal's
    exception may come between any two steps.
    """
    while _imp.lock_held():
        try:
            _imp.release_lock()
        except RuntimeError:  # another thread has it
            return
