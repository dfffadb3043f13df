"""Deliveries in a process apart that is killed at one of its steps: the data of a crash is the number of a line that is
run in the stores' code.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import gristmill as gm
from gristmill.driver import delivering

PACKAGE = Path(delivering.__file__).parents[1]


@contextlib.contextmanager
def killed_at(at: int | None, *places: str) -> Iterator[None]:
    """This process is killed before line number `at` of the code in these files and folders of the package; without
    `at`, it prints how many lines ran.
    """
    lines, prefixes = 0, tuple(str(PACKAGE / place) for place in places)

    def traced(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal lines
        if not frame.f_code.co_filename.startswith(prefixes):
            return None
        if event == "line":
            lines += 1
            if lines == at:
                os.kill(os.getpid(), signal.SIGKILL)
        return traced

    threading.settrace(traced)
    sys.settrace(traced)
    try:
        yield
    finally:
        sys.settrace(None)
    print(f"lines {lines}")


def deliver(sink: str, to: str, at: int | None, join: str = "", **options: Any) -> None:
    """`gm.deliver`, killed before line number `at` of the stores' code; in the session of Spark that `join` names."""
    if join:
        import sparkjoin

        sparkjoin.join(join)
    with killed_at(at, "stores"):
        gm.deliver(sink, to, **options)
