"""Stages and a feed that know nothing of shards: what an engine is tried with."""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from gristmill.process.messages import DONE, WAIT, Death, Emit, Event, Failure, Item, Left, Outcome


@dataclass(frozen=True)
class Stages:
    """Workers that do what an item says. `harm` is done while they are opened; they may be silent for `silence` s."""

    harm: str = ""
    silence: float = math.inf

    def environment(self, index: int) -> Mapping[str, str]:
        return {"WORKER_INDEX": str(index)}

    def open(self, name: str, emit: Emit) -> Worker:
        if self.harm == "raise":
            raise ValueError("cannot be opened")
        if self.harm == "exit":
            os._exit(9)
        return Worker(name, self.silence)


class Worker:
    """Does items: ("echo", value), ("print", text), ("die", how), ("sleep", seconds), ("leave", ""), ("big", bytes)."""

    def __init__(self, name: str, silence: float = math.inf) -> None:
        self.name = name
        self.silence = lambda: silence
        self.stopping = threading.Event()

    def work(self, items: Iterator[Item], emit: Emit) -> None:
        for item in items:
            what, value = item.value
            if what == "die":
                os.kill(os.getpid(), value) if isinstance(value, int) else os._exit(3)
            elif what == "print":
                print(value)
                print(value, file=sys.stderr)
            elif what == "sleep":
                self.stopping.wait(value)
            elif what == "busy":
                time.sleep(value)
            elif what == "ignore":
                signal.pause()
            elif what == "fail":
                emit(Outcome(self.name, item.key, None, Failure("other", "E", "no")))
                continue
            elif what == "leave":
                emit(Outcome(self.name, item.key, "left"))
                emit(Left(self.name, reason="asked to"))
                return
            if self.stopping.is_set():
                return
            emit(Outcome(self.name, item.key, b"x" * value if what == "big" else (value, os.getpid())))

    def stop(self) -> None:
        self.stopping.set()


@dataclass
class Feed:
    """Hands out items in order; those of a dead worker again, without what killed it."""

    items: list[tuple[str, Any]]
    workers: int = 2
    given: int = 0
    again: list[int] = field(default_factory=list)
    at: dict[str, list[int]] = field(default_factory=dict)
    ended: dict[int, Any] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)

    def take(self, worker: str) -> Any:
        number = self.again.pop(0) if self.again else self.given
        if number == self.given:
            if self.given >= len(self.items):
                return WAIT if any(self.at.values()) else DONE
            self.given += 1
        self.at.setdefault(worker, []).append(number)
        return Item(str(number), self.items[number])

    def wanted(self) -> int:
        return 0 if len(self.ended) == len(self.items) else self.workers

    def on(self, event: Event) -> None:
        """Take note."""
        self.events.append(event)
        if isinstance(event, Outcome) and event.key:
            self.at[event.worker].remove(int(event.key))
            self.ended[int(event.key)] = event.value if event.error is None else event.error
        elif isinstance(event, (Death, Left)):
            lost = self.at.pop(event.worker, [])
            if isinstance(event, Death) and lost and self.items[lost[0]][0] in ("die", "ignore"):
                self.ended[lost.pop(0)] = "died"
            self.again += lost

    def deaths(self) -> list[Death]:
        return [e for e in self.events if isinstance(e, Death)]
