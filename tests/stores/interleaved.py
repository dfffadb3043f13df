"""Two deliverers at once, as data: the number of the line of the stores' code before which the first one stands still
while the second one does all that it has to do.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from harmed import PACKAGE

WAIT = 0.4  # seconds for which the first one stands still: the second may be waiting for what it holds


def _lines(function: Callable[[], Any], reached: Callable[[int], None]) -> None:
    """Call a function in this thread; `reached` is given the number of each line before it runs."""
    stores, lines = str(PACKAGE / "stores"), 0

    def traced(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal lines
        if not frame.f_code.co_filename.startswith(stores):
            return None
        if event == "line":
            lines += 1
            reached(lines)
        return traced

    sys.settrace(traced)
    try:
        function()
    finally:
        sys.settrace(None)


def lines(function: Callable[[], Any]) -> int:
    """How many lines of the stores' code a function runs in this thread."""
    ran = [0]
    _lines(function, ran.append)
    return ran[-1]


def interleaved(first: Callable[[], Any], at: int, second: Callable[[], Any]) -> list[Exception]:
    """Call the first function up to line number `at`, the second one, and the rest of the first one. What they raise,
    if they do.
    """
    failed: list[Exception] = []
    begun = threading.Event()

    def tried(function: Callable[[], Any]) -> None:
        try:
            function()
        except Exception as e:
            failed.append(e)
        finally:
            begun.set()

    def after() -> None:
        begun.wait()
        tried(second)

    def reached(number: int) -> None:
        if number == at:
            begun.set()
            other.join(WAIT)

    other = threading.Thread(target=after)
    other.start()
    tried(lambda: _lines(first, reached))
    other.join()
    return failed
