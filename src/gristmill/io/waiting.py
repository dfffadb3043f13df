"""Open readers that wait for the next call: a worker reads many shards of a file; going on is cheaper than opening."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, Protocol, TypeVar

__all__ = ["Waiting"]


class _Closes(Protocol):
    def close(self) -> None: ...


T = TypeVar("T", bound=_Closes)


class Waiting(Generic[T]):
    """Keeps the last few readers open. Who takes one has it alone until it is put back; threads may share this."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._kept: OrderedDict[Hashable, T] = OrderedDict()

    def take(self, key: Hashable, open_: Callable[[], T]) -> T:
        """The reader that waits under `key`, else a new one."""
        with self._lock:
            found = self._kept.pop(key, None)
        return open_() if found is None else found

    def put(self, key: Hashable, reader: T) -> None:
        """Let a reader wait; what is too many is closed."""
        with self._lock:
            before = self._kept.pop(key, None)
            self._kept[key] = reader
            dropped = [self._kept.popitem(last=False)[1] for _ in range(len(self._kept) - self._most)]
        for old in [*dropped, *([] if before is None else [before])]:
            old.close()

    def clear(self) -> None:
        """Close all that wait."""
        with self._lock:
            dropped = list(self._kept.values())
            self._kept.clear()
        for old in dropped:
            old.close()
