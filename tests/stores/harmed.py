"""Deliveries in a process apart that is killed at one of its steps: the data of a crash is the number of a line that is
run in the stores' code.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import gristmill as gm
from gristmill.driver import delivering

STORES = str(Path(delivering.__file__).parents[1] / "stores")


def deliver(sink: str, to: str, at: int | None, **options: Any) -> None:
    """`gm.deliver`, killed before line number `at` of the stores' code; without `at`, prints how many lines ran."""
    lines = 0

    def traced(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal lines
        if not frame.f_code.co_filename.startswith(STORES):
            return None
        if event == "line":
            lines += 1
            if lines == at:
                os.kill(os.getpid(), signal.SIGKILL)
        return traced

    threading.settrace(traced)
    sys.settrace(traced)
    try:
        gm.deliver(sink, to, **options)
    finally:
        sys.settrace(None)
    print(f"lines {lines}")
