"""The engines that the suite runs on, each as it is started for tests and named in a job. A new one is a line here."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Place:
    """An engine that is there to be used. `engine` are the fields of its EngineSpec as plain values, `env` the
    variables that a process apart needs to use it.
    """

    name: str
    engine: dict[str, Any]
    env: dict[str, str] = field(default_factory=dict)


@contextlib.contextmanager
def _local() -> Iterator[Place]:
    yield Place("local", {"name": "local", "workers": 2})


_STARTED: dict[str, Callable[[], contextlib.AbstractContextManager[Place]]] = {"local": _local}
NAMES = list(_STARTED)
OURS = ("local",)  # engines all of whose processes are gristmill's own


def started(name: str) -> contextlib.AbstractContextManager[Place]:
    """The engine, running while inside."""
    return _STARTED[name]()
