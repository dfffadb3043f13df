"""A bench: workers of one arrangement, loaded and waiting, which are all given the same trial at the same time."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from gristmill.driver.resolved import Resolved
from gristmill.engines.registry import open_engine
from gristmill.errors import RunFailed
from gristmill.process.messages import DONE, WAIT, Death, Event, Item, Outcome, Signal, Started
from gristmill.values import dataclass
from gristmill.worker.trial import Trial, TrialStages


@dataclass(frozen=True)
class Answer:
    """What all workers together reached: tokens (or rows) per second without padding, and the share that was padding.

    `failed` tells why there is no rate ("memory"); `whole`, that one call held all the rows; `short`, how many these
    are where a call that was to be full is not.
    """

    rate: float
    padding: float
    seconds: float
    failed: str = ""
    whole: bool = False
    short: int = 0


class Bench:
    """Its workers start with the first trial, and have loaded when it begins; always close it."""

    def __init__(self, r: Resolved, stages: TrialStages, path: tuple[str, ...]) -> None:
        self._workers = max(1, r.workers)
        self._feed = _Feed(self._workers)
        engine = open_engine(r.job.engine, self._workers, path, r.place.gpu)
        self._events: Generator[Event, None, None] = engine.run(stages, self._feed)
        self._started = 0

    def measure(self, trial: Trial) -> Answer:
        """Give the trial to every worker and wait for all of them. Raises RunFailed if one fails or dies."""
        self._load()
        self._feed.offer(trial)
        found: list[dict[str, Any]] = []
        while len(found) < self._workers:
            event = self._next()
            if isinstance(event, Outcome):
                found.append(event.value)
        failed = next((str(f["failed"]) for f in found if f.get("failed")), "")
        rate = 0.0 if failed else sum(f["rate"] for f in found)
        whole = all(f.get("whole", False) for f in found)
        short = max(f.get("short", 0) for f in found)
        return Answer(rate, found[0]["padding"], max(f["seconds"] for f in found), failed, whole, short)

    def close(self) -> None:
        self._feed.over = True
        self._events.close()

    def _load(self) -> None:
        while self._started < self._workers:
            self._started += isinstance(self._next(), Started)

    def _next(self) -> Event:
        event = next(self._events, None)
        if event is None:
            raise RunFailed("tune: the workers ended before they had answered")
        if isinstance(event, Outcome) and event.error is not None:
            raise RunFailed(f"tune: {event.error.type}: {event.error.message}")
        if isinstance(event, Death):
            raise RunFailed(f"tune: a worker died: {event.evidence.strip()[-500:] or event.signal or event.exit_code}")
        return event


class _Feed:
    """Gives the current trial to each worker once."""

    def __init__(self, workers: int) -> None:
        self.over = False
        self._workers = workers
        self._offer: Trial | None = None
        self._number = 0
        self._given: set[str] = set()

    def offer(self, trial: Trial) -> None:
        self._offer, self._number, self._given = trial, self._number + 1, set()

    def take(self, worker: str) -> Item | Signal:
        if self.over:
            return DONE
        if self._offer is None or worker in self._given:
            return WAIT
        self._given.add(worker)
        return Item(f"{self._number}:{worker}", self._offer)

    def wanted(self) -> int:
        return self._workers
