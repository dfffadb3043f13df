"""What is to be sent to one place, sent by a thread of its own: giving it something never waits and never fails."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

MOST = 100  # things that may wait; of a place that takes minutes for each, older ones are lost first


class Outbox:
    """A bounded queue before `send`, which gets each thing and the time (of time.monotonic) until which it may try;
    what that raises is kept as words. With `latest` only the newest thing waits. The thread starts with the first one.
    """

    def __init__(
        self, name: str, send: Callable[[Any, float], None], *, within: float, latest: bool = False, most: int = MOST
    ) -> None:
        self.name = name
        self._send, self._within = send, within
        self._things: deque[Any] = deque(maxlen=1 if latest else most)
        self._latest = latest
        self._news = threading.Condition()
        self._thread: threading.Thread | None = None
        self._sending = self._closed = False
        self._until = float("inf")
        self._lost = 0
        self._wrong = ""

    def put(self, thing: Any) -> None:
        """Have it sent, in order, after what waits already."""
        with self._news:
            if self._closed:
                return
            self._lost += not self._latest and len(self._things) == self._things.maxlen
            self._things.append(thing)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"gristmill {self.name}", daemon=True)
                self._thread.start()
            self._news.notify_all()

    def close(self, until: float) -> list[str]:
        """Wait until everything is sent, or until `until`; returns what went wrong, in words. The thread may be left
        behind, in a request that nobody answers: it ends with that, or with the process.
        """
        with self._news:
            self._closed, self._until = True, until
            self._news.notify_all()
            while self._things or self._sending:
                left = until - time.monotonic()
                if left <= 0:
                    waiting = len(self._things) + self._sending
                    self._things.clear()
                    return [f"{self.name}: no answer in time, {waiting} not sent{self._after()}"]
                self._news.wait(left)
            lost = [f"{self.name}: {self._lost} not sent, as it is too slow"] if self._lost else []
            return lost + ([f"{self.name}: {self._wrong}"] if self._wrong else [])

    def _after(self) -> str:
        return f" (before that: {self._wrong})" if self._wrong else ""

    def _run(self) -> None:
        while True:
            with self._news:
                while not self._things:
                    if self._closed:
                        return
                    self._news.wait()
                thing, self._sending = self._things.popleft(), True
                until = min(time.monotonic() + self._within, self._until)
            try:
                self._send(thing, until)
                wrong = ""
            except Exception as e:  # whatever a client, a server or a command does is told, and is nothing to the run
                wrong = " ".join(str(e).split()) or type(e).__name__
            with self._news:
                self._sending = False
                self._wrong = wrong
                self._news.notify_all()
