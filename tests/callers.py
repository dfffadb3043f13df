"""Callers in threads, for tests of what happens when many call at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

PATIENCE_S = 30.0


def at_once(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Each call's result, or the exception it raised, from threads that start together. Fails if one does not end."""
    outcomes: list[Any] = [TimeoutError("the call did not end")] * len(calls)
    start = threading.Barrier(len(calls))

    def run(place: int) -> None:
        start.wait(PATIENCE_S)
        try:
            outcomes[place] = calls[place]()
        except BaseException as error:
            outcomes[place] = error

    threads = [threading.Thread(target=run, args=(place,), daemon=True) for place in range(len(calls))]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + PATIENCE_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    assert not any(thread.is_alive() for thread in threads), "a caller hangs"
    return outcomes


def eventually(holds: Callable[[], Any], within: float = 10.0) -> bool:
    """Whether it holds at last."""
    deadline = time.monotonic() + within
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True
