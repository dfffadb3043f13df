"""The tally of a run: its events summed up, for progress and reports. Committed rows and those in progress are kept
separate.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field, replace
from typing import Any

import numpy as np

from gristmill.commit.gates import MARGIN
from gristmill.commit.ledger import Ledger
from gristmill.commit.receipt import Receipt
from gristmill.models.contract import USED
from gristmill.observe.facts import Slow
from gristmill.observe.report import WorkerPace
from gristmill.process.messages import Death, Event, Left, Outcome, Started, Tick, Took
from gristmill.shards.counts import Counts, summed
from gristmill.shards.shard import ShardTable
from gristmill.values import dataclass

MOST_SLOW = 10  # of the slowest shards
LEAST_READ = 100  # rows, before they foretell others


@dataclass(frozen=True)
class Tallied:
    """The sums of a run's events: `counts` and `errors` are of all shards with a receipt, including those `resumed`
    from earlier runs, as is what they `used` of endpoints; `figures` and `rows_run` are of what it scored itself.
    `flying` is how many requests to an endpoint were in flight at most, summed over the workers, and `put_off` how many
    were refused for the moment, as there were too many. `per_worker` has what
    each worker did, in the order in which they started, without those that committed nothing; `slowest` are the shards
    whose rows took longest in the model, the slowest first. `threads` is what the threads of workers that have ended
    did with their time, in seconds.
    """

    counts: Counts
    errors: Mapping[str, float]
    figures: Mapping[str, float]
    used: Mapping[str, float]
    rows_run: int
    flying: int
    shards_done: int
    resumed: int
    per_worker: tuple[WorkerPace, ...]
    slowest: tuple[Slow, ...] = ()
    threads: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    put_off: int = 0


class Tally:
    """Counts rows and shards as events come in, beside what earlier runs have committed; a shard that is scored again
    counts once.

    Progress is in source rows: each shard has as many as were planned, whatever its steps make of them. If only reading
    tells how many, the share is of positions (bytes). Neither goes backwards when an attempt is lost.
    """

    def __init__(self) -> None:
        self.counts = Counts()
        self._figures: dict[str, float] = {}
        self.errors: dict[str, float] = {}
        self._used: dict[str, float] = {}
        self._before: Ledger | None = None  # what earlier runs have committed
        self._rows_run = 0
        self._flying: dict[str, int] = {}  # requests of each worker at most,
        self._put_off: dict[str, int] = {}  # and those that were refused for the moment
        self._resumed = 0
        self._paces: dict[str, WorkerPace] = {}
        self._started: dict[str, float] = {}
        self._threads: dict[str, dict[str, float]] = {}
        self._slowest: list[tuple[float, int, Slow]] = []  # a heap, the quickest of them first
        self._shards: ShardTable | None = None  # until there is a plan
        self._total: int | None = None
        self._done = self._earlier = self._own = np.zeros(0, np.bool_)  # which shards; by whom they were committed
        self._shards_done = 0
        self._rows = self._rows_resumed = 0  # in shards that are done
        self._weight = self._weight_resumed = 0
        self._weights = 1
        self._reached: dict[int, tuple[int, int]] = {}  # rows and positions of unfinished shards, in their best attempt
        self._begun = time.monotonic()
        self._workers: set[str] = set()

    def begin(self, shards: ShardTable, done: Ledger | None) -> dict[str, Any]:
        """The plan is made; `done` is what earlier runs have committed. Returns the changes for Progress."""
        self._shards, self._total, self._before = shards, shards.rows(), done
        self._done, self._earlier, self._own = (np.zeros(len(shards), np.bool_) for _ in range(3))
        if done is not None:
            self._done[done.shards], self._earlier[done.shards] = True, True
            self._resumed = self._shards_done = len(done)
            self.counts, self.errors = done.counts, dict(done.sums.errors)
            self._used = used([done.sums.figures])
            rows = shards.rows_in(done.shards) if self._total is not None else 0
            self._rows = self._rows_resumed = rows
            self._weight = self._weight_resumed = shards.weight_of(done.shards)
        self._weights = shards.total_weight() or 1
        self._begun = time.monotonic()
        return {
            "phase": "running",
            "shards_total": len(shards),
            "shards_resumed": self._resumed,
            "rows_total": self._total,
            **self._changes(),
        }

    def tried(self, figures: Mapping[str, float]) -> None:
        """Count the time of the first rows, scored before there was a plan: their shard need not score them again."""
        self._figures = summed([self._figures, {"model_seconds": figures.get("model_seconds", 0.0)}])

    def hear(self, event: Event) -> dict[str, Any]:
        """Take in an event. Returns the changes for Progress, empty if there are none."""
        now = time.monotonic()
        if isinstance(event, Started):
            self._workers.add(event.worker)
            self._started[event.worker] = now
            self._paces[event.worker] = WorkerPace(event.worker, str(event.about.get("host", "")))
        elif isinstance(event, (Death, Left)):
            self._workers.discard(event.worker)
        elif isinstance(event, Tick):
            self._reach(event)
        elif isinstance(event, Took):
            for name, took in event.threads.items():
                self._threads[name] = summed([self._threads.get(name, {}), took])
        elif isinstance(event, Outcome):
            if event.error is None and not event.key.startswith("probe"):
                self._commit(event)
        else:
            return {}
        if pace := self._paces.get(event.worker):
            self._paces[event.worker] = replace(pace, seconds=now - self._started[event.worker])
        return self._changes()

    def sums(self) -> Tallied:
        """The sums so far."""
        paces = tuple(p for p in self._paces.values() if p.rows)
        return Tallied(
            self.counts, dict(self.errors), dict(self._figures), dict(self._used), self._rows_run,
            sum(self._flying.values()), self._shards_done, self._resumed, paces,
            tuple(one for *_, one in sorted(self._slowest, key=lambda slow: slow[:2], reverse=True)),
            dict(self._threads), sum(self._put_off.values()),
        )  # fmt: skip

    @property
    def rows_done(self) -> int:
        """Source rows in shards that are committed, by this run and those before it."""
        return self._rows

    @property
    def total(self) -> int | None:
        """Source rows in all shards; None if only reading tells."""
        return self._total

    def rows_at_most(self, sampled: Callable[[], float]) -> int | None:
        """Rows in all shards. Where only reading tells, MARGIN times as many as those that were read foretell, or
        those that were `sampled` all over the files when it was planned: rows that come first, and fail, may be the
        longest. None before LEAST_READ are read.
        """
        read = self.counts.rows_in
        if self._total is not None or read < LEAST_READ or not self._weight:
            return self._total
        left = self._weights / self._weight - 1
        return max(read + math.ceil(MARGIN * read * left), math.ceil(MARGIN * sampled()))

    def _reach(self, tick: Tick) -> None:
        if self._shards is None or tick.key.startswith("probe"):
            return
        number = int(tick.key.partition(".")[0])
        planned, rows = self._shards.rows_of(number), tick.rows
        if planned is not None:
            rows = planned * tick.passed // max(1, self._shards.weight(number))
        if not self._done[number]:
            most, passed = self._reached.get(number, (0, 0))
            self._reached[number] = (max(most, rows), max(passed, tick.passed))

    def unheard(self, listed: Iterable[int]) -> list[int]:
        """The shards among these that nobody has told of yet."""
        return [number for number in listed if self._shards is not None and not self._done[number]]

    def found(self, number: int, receipt: Receipt) -> None:
        """Count a shard that was committed as the run ended, before its worker could say so."""
        self._count(number, Counts(*receipt.counts), receipt.figures, receipt.errors)

    def _commit(self, event: Outcome) -> None:
        value, counts = event.value, Counts(*event.value["counts"])
        for known, name in ((self._flying, "flying"), (self._put_off, "put_off")):
            known[event.worker] = max(known.get(event.worker, 0), value[name])
        new = self._count(value["shard"], counts, value["figures"], value["errors"])
        if new and (pace := self._paces.get(event.worker)):
            self._paces[event.worker] = replace(pace, rows=pace.rows + counts.rows_in)
        if new:
            seconds = round(float(value["figures"].get("model_seconds", 0.0)), 3)
            slow = Slow(value["shard"], seconds, counts.rows_in, event.worker)
            change = heapq.heappush if len(self._slowest) < MOST_SLOW else heapq.heappushpop
            change(self._slowest, (seconds, slow.shard, slow))

    def _count(self, number: int, counts: Counts, figures: Mapping[str, float], errors: Mapping[str, float]) -> bool:
        assert self._shards is not None
        if self._own[number]:  # scored again because its receipt did not read back
            return False
        self._own[number] = True
        if self._earlier[number] and self._before is not None:  # so was that of an earlier run
            lost, errors_lost = self._before.said_of(number)
            self.counts = self.counts - lost
            self.errors = summed([self.errors, {name: -n for name, n in errors_lost.items()}])
        self.counts = self.counts + counts
        self._rows_run += counts.rows_in - counts.filtered
        self._figures = summed([self._figures, figures])
        self._used = used([self._used, figures])
        self.errors = summed([self.errors, errors])
        self._reached.pop(number, None)
        if not self._done[number]:
            self._done[number] = True
            self._shards_done += 1
            planned = self._shards.rows_of(number)
            self._rows += counts.rows_in if planned is None else planned
            self._weight += self._shards.weight(number)
        return True

    def _changes(self) -> dict[str, Any]:
        changes: dict[str, Any] = {"workers": len(self._workers)}
        if self._shards is None:
            return changes
        rows = self._rows + sum(rows for rows, _ in self._reached.values())
        weight = self._weight + sum(passed for _, passed in self._reached.values())
        rows = rows if self._total is None else min(rows, self._total)
        share, before = min(1.0, weight / self._weights), self._weight_resumed / self._weights
        if self._total:
            share, before = rows / self._total, self._rows_resumed / self._total
        elapsed = max(1e-9, time.monotonic() - self._begun)
        return {
            **changes,
            **_fates(self.counts),
            "shards_done": self._shards_done,
            "rows_done": rows,
            "rows_per_second": (rows - self._rows_resumed) / elapsed,
            "eta": elapsed * (1 - share) / (share - before) if share > before else None,
            "share": share,
            "used": self._used,
        }


def used(figures: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """What shards with these figures took of endpoints (USED)."""
    return summed({name: each[name] for name in USED if name in each} for each in figures)


def all_committed(shards: ShardTable, counts: Counts) -> dict[str, Any]:
    """The changes for Progress once all shards are committed, with these counts of all their receipts."""
    total = shards.rows()
    rows = counts.rows_in if total is None else total
    return {
        **_fates(counts),
        "shards_done": len(shards),
        "rows_total": rows,
        "rows_done": rows,
        "share": 1.0,
        "eta": None,
    }


def _fates(c: Counts) -> dict[str, int]:
    dead, filtered = c.dead + c.derived_dead, c.filtered + c.derived_filtered
    return {"rows_ok": c.ok, "rows_dead": dead, "rows_filtered": filtered}
