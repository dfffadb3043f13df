"""The moment at which a process ends itself, with the stacks of its threads written, whatever it is doing then."""

from __future__ import annotations

import datetime
import faulthandler
import math
import os
import time
from collections.abc import Callable

from gristmill.process.ownstderr import Known, descriptor

SPARE = 1.0  # seconds for the timer to do it first


class Deadline:
    """faulthandler's timer, which also ends a hang that holds the GIL. There is one in a process, and user code may
    cancel it or use it for itself: `enforce`, called from another thread from time to time, then ends a hang that
    leaves it the GIL. The stacks go to `file`, or to standard error, wherever `sys.stderr` leads by now.
    """

    def __init__(self, file: int | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._file = None if file is None else Known.of(file)
        self._clock = clock  # as it was on import: user code may replace `time.monotonic`, too
        self._seconds = 0.0
        self._at = math.inf

    def set(self, seconds: float) -> None:
        """The process ends so many seconds from now."""
        self._seconds, self._at = seconds, self._clock() + seconds
        faulthandler.dump_traceback_later(seconds, exit=True, file=self._out())

    def clear(self) -> None:
        """It does not end."""
        self._at = math.inf
        faulthandler.cancel_dump_traceback_later()

    def enforce(self) -> None:
        """End the process if it should have ended by now."""
        if self._clock() > self._at + SPARE:
            out = self._out()
            os.write(out, f"Timeout ({datetime.timedelta(seconds=self._seconds)})!\n".encode())
            faulthandler.dump_traceback(file=out, all_threads=True)
            os._exit(1)

    def _out(self) -> int:
        return descriptor() if self._file is None or not self._file.ours() else self._file.fd
