"""The command line: the only place that reads arguments and the environment."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import signal
import sys
import threading
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

from gristmill.process.interrupts import Postponed


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code (contract §1). `arguments` default to those of the process."""
    from gristmill.cli.app import main as click_main

    if arguments is not None:
        return click_main(list(arguments))
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupted)
    code = click_main(sys.argv[1:])
    if "obstore" in sys.modules or code in _STOPPED or _unanswered():
        _leave(code)
    if "duckdb" not in sys.modules:  # which complains on stderr about everything that is not collected
        gc.freeze()  # the interpreter's last collection would visit every module: a twentieth of a second
    return code


def _interrupted(number: int, frame: FrameType | None) -> None:
    """Ctrl-C as in plain Python, except in the middle of an import."""
    if not _postponed(number, frame):
        raise KeyboardInterrupt


def _unanswered() -> bool:
    """Whether a thread is still in a call to a store that has been given up."""
    calls = sys.modules.get("gristmill.process.blockingcalls")
    return calls is not None and calls.unanswered()


_postponed = Postponed()
_STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM)


def _leave(code: int) -> NoReturn:
    """End as the interpreter does, but without tearing it down: during that, threads of the library for object stores
    still release Python values, and one finished command in fifteen ended with SIGABRT. So may one that a signal
    stopped while a thread was importing a library, and one with a thread that comes back from a library's C code.
    """
    getattr(threading, "_shutdown", lambda: None)()  # as the interpreter does first: it has no public name
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(code)
