"""Calls made from inside a batch function, and whether waiting for them could never end.

A function that calls itself, or whose callee calls it back, would wait for the very batch that is running it. Every run
of a batch knows which lanes it waits for; a call that would close a circle is not queued but run in place, as an
ordinary nested call would be.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

_inside: ContextVar[Run | None] = ContextVar("gristmill_batch", default=None)
_circles = threading.RLock()  # re-entrant: a finalizer may run a nested call during the search for a circle


class Lane(Protocol):
    """A queue and its driver, which runs one batch at a time."""

    run: Run | None


class Run:
    """One batch that a lane is running."""

    __slots__ = ("lane", "waits_for")

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.waits_for: list[Lane] = []


@contextmanager
def running(lane: Lane) -> Iterator[None]:
    """Marks what the lane does next in this thread or task, and in those it starts, as the run of one batch."""
    run = lane.run = Run(lane)
    token = _inside.set(run)
    try:
        yield
    finally:
        _inside.reset(token)
        lane.run = None


def inside() -> Run | None:
    """The run of a batch that this code belongs to, if that run has not ended."""
    run = _inside.get()
    return run if run is not None and run.lane.run is run else None


@contextmanager
def waiting(run: Run, lane: Lane) -> Iterator[bool]:
    """While `run` waits for `lane`; yields False, and notes nothing, if `lane` itself waits for `run`."""
    with _circles:
        free = not _leads_to(lane, run)
        if free:
            run.waits_for.append(lane)
    try:
        yield free
    finally:
        if free:
            with _circles:
                run.waits_for.remove(lane)


def _leads_to(lane: Lane, target: Run) -> bool:
    seen: set[int] = set()
    lanes: list[Any] = [lane]
    while lanes:
        run = lanes.pop().run
        if run is target:
            return True
        if run is not None and id(run) not in seen:
            seen.add(id(run))
            lanes.extend(run.waits_for)
    return False


def after_fork() -> None:
    """In a child process: no other thread exists that could release the lock."""
    global _circles  # noqa: PLW0603
    _circles = threading.RLock()
