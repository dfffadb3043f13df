"""Threads that do work for a caller, as the standard library's pool does, which takes none once the main thread has
ended: a job may go on in another thread then, as long as that is no daemon.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class Pool:
    """At most `threads` at once. A thread ends when nothing is left to do, so that a pool that nobody closes keeps no
    process alive. As a context manager it waits for all work under way, and drops what has not begun if it is left by
    an error. The process waits for the threads of a pool before it ends, unless they are `daemon`.
    """

    def __init__(self, threads: int, name: str = "gristmill-pool", daemon: bool = False) -> None:
        self._most, self._name, self._daemon = threads, name, daemon
        self._left: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._running: set[threading.Thread] = set()
        self._lock = threading.Lock()

    def submit(self, work: Callable[..., T], *args: Any) -> Future[T]:
        """Do it as soon as a thread is free."""
        future: Future[T] = Future()
        with self._lock:
            self._left.append((future, lambda: work(*args)))
            if len(self._running) < self._most:
                thread = threading.Thread(target=self._work, name=self._name, daemon=self._daemon)
                self._running.add(thread)
                try:
                    thread.start()
                except BaseException:
                    self._running.discard(thread)
                    raise
        return future

    def map(self, work: Callable[[Any], T], items: Iterable[Any]) -> Iterator[T]:
        """The results in the order of the items, all of which are given to the threads at once."""
        return _results(deque(self.submit(work, item) for item in items))

    def cancel(self) -> None:
        """Drop what has not begun."""
        with self._lock:
            dropped = [future for future, _ in self._left]
            self._left.clear()
        for future in dropped:
            if future.cancel():
                future.set_running_or_notify_cancel()  # whoever waits for it is told only now

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if kind is not None:
            self.cancel()
        for thread in tuple(self._running):
            thread.join()

    def _next(self) -> tuple[Future[Any], Callable[[], Any]] | None:
        with self._lock:
            if self._left:
                return self._left.popleft()
            self._running.discard(threading.current_thread())
            return None

    def _work(self) -> None:
        while (found := self._next()) is not None:
            _do(*found)
            del found  # a result that nobody wants any more is not held until there is more to do


def _do(future: Future[Any], work: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(work())
    except BaseException as e:
        future.set_exception(e)


def _results(futures: deque[Future[T]]) -> Iterator[T]:
    try:
        while futures:
            yield futures.popleft().result()
    finally:
        for each in futures:
            each.cancel()
