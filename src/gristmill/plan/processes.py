"""What an interpreter of a worker is started with: where it imports from, how many threads its libraries have, and
which signals it does not heed.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType

ENDING = (signal.SIGINT, signal.SIGTERM)


def import_path() -> tuple[str, ...]:
    """Where this process imports from, for those that it starts."""
    return tuple(p or os.getcwd() for p in sys.path)


def thread_variables(count: int) -> dict[str, str]:
    """Variables that tell libraries how many threads to have; most read them when they are loaded."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")
    return dict.fromkeys(names, str(count))


def heed_no_signals() -> None:
    """Let SIGINT and SIGTERM pass: ending this process is for its driver. Called in the main thread.

    They are caught, not ignored: what is ignored stays so in every child, and user code could not end its own.
    """
    for number in ENDING:
        signal.signal(number, _pass)
        if sys.platform != "win32":
            signal.siginterrupt(number, False)  # native code that waits goes on waiting
    if hasattr(os, "register_at_fork"):
        # Held back meanwhile, or one that comes early would be caught in the child, too.
        os.register_at_fork(before=_hold, after_in_parent=_release, after_in_child=_heed)


def _pass(number: int, frame: FrameType | None) -> None:
    """A handler that does nothing."""


_forking = threading.local()


def _hold() -> None:
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)


def _release() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _heed() -> None:
    if signal.getsignal(signal.SIGINT) is _pass:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGTERM) is _pass:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _release()
