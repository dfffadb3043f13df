"""Open readers kept for the next call: a worker reads many shards of a file; continuing is cheaper than reopening."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Generic, Protocol, TypeVar

from gristmill.process.forks import never_destroyed

__all__ = ["Waiting", "close_all", "forgotten"]


class _Closes(Protocol):
    def close(self) -> None: ...


T = TypeVar("T", bound=_Closes)
K = TypeVar("K")
V = TypeVar("V")


class Waiting(Generic[T]):
    """Keeps the last few readers open. Whoever takes one has it alone until it is put back. Threads may share this."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._begin()
        _all.append(self)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[Hashable, T] = OrderedDict()

    def leave(self) -> None:
        """In a fork, which shares each open file and its offset with its parent: forget the readers, without closing
        them, as that might wait for threads that do not exist here.
        """
        never_destroyed(self._kept)
        self._begin()

    def take(self, key: Hashable, open_: Callable[[], T]) -> T:
        """The reader kept under `key`, else a new one."""
        with self._lock:
            found = self._kept.pop(key, None)
        return open_() if found is None else found

    def put(self, key: Hashable, reader: T) -> None:
        """Keep a reader for later; surplus ones are closed."""
        with self._lock:
            before = self._kept.pop(key, None)
            self._kept[key] = reader
            dropped = [self._kept.popitem(last=False)[1] for _ in range(len(self._kept) - self._most)]
        for old in [*dropped, *([] if before is None else [before])]:
            old.close()

    def clear(self) -> None:
        with self._lock:
            dropped = list(self._kept.values())
            self._kept.clear()
        for old in dropped:
            old.close()


def forgotten(found: dict[K, V]) -> dict[K, V]:
    """What was found in files, kept until readers are closed."""
    _found.append(found)
    return found


def close_all() -> None:
    """Close the kept readers, and forget what was found in files, so that they are opened anew: one whose listing shows
    nothing but its size may have been replaced.
    """
    for waiting in _all:
        waiting.clear()
    for found in _found:
        found.clear()


def _leave_all() -> None:
    for waiting in _all:
        waiting.leave()


_all: list[Waiting[Any]] = []
_found: list[dict[Any, Any]] = []
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_all)
