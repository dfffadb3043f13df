"""What takes seconds to start, and stays from its first use in a command to the command's end, such as a session of
Spark: several steps of a command need it, and none of them knows which is the last.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from gristmill.job.options import EngineSpec

_lock = threading.RLock()
_inside: list[EngineSpec | None] = []  # what each that is inside has said
_started: dict[str, Any] = {}
_ends = ExitStack()


@contextlib.contextmanager
def during(engine: EngineSpec | None = None) -> Iterator[None]:
    """What is started while inside stays until the last one is left, of all that are inside in this process. `engine`
    is that of the job, whose options a store of the same name is reached by.
    """
    with _lock:
        _inside.append(engine)
    try:
        yield
    finally:
        with _lock:
            _inside.remove(engine)
            if not _inside:
                _started.clear()
                _ends.close()


@contextlib.contextmanager
def held(name: str, start: Callable[[EngineSpec | None], AbstractContextManager[Any]]) -> Iterator[Any]:
    """The thing of that name, started unless it is there. `start` is given the engine of that name that a job runs on,
    if there is one.
    """
    with during():
        with _lock:
            if name not in _started:
                engine = next((e for e in reversed(_inside) if e is not None and e.name == name), None)
                _started[name] = _ends.enter_context(start(engine))
        yield _started[name]
