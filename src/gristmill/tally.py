"""The tally of a run: what its events add up to, for progress and reports. Committed rows and those on their way
apart.
"""

from __future__ import annotations

import time
from typing import Any

from gristmill.gating import summed
from gristmill.observe.report import Counts
from gristmill.plan.contracts import Death, Event, Outcome, Started, Tick
from gristmill.plan.shard import ShardTable


class Tally:
    """Counts rows and shards of this run as events come in. `shards` None until the plan stands."""

    def __init__(self) -> None:
        self.counts = Counts()
        self.figures: dict[str, float] = {}
        self.errors: dict[str, float] = {}
        self.resumed = 0
        self.first_start: float | None = None
        self._shards: ShardTable | None = None
        self._rows_resumed = 0
        self._weight = 0
        self._weights = 1
        self._committed = 0
        self._begun = time.monotonic()
        self._ticking: dict[str, int] = {}
        self._workers: set[str] = set()

    def begin(self, shards: ShardTable, done: set[int]) -> dict[str, Any]:
        """The plan stands; `done` are shards committed by earlier runs. Returns the changes for Progress."""
        self._shards = shards
        self.resumed = len(done)
        if shards.rows() is not None:
            self._rows_resumed = sum(shards[n].rows or 0 for n in done)
        self._weight = sum(shards.weight(n) for n in done)
        self._weights = shards.total_weight() or 1
        self._begun = time.monotonic()
        return {
            "phase": "running",
            "shards_total": len(shards),
            "shards_done": len(done),
            "shards_resumed": len(done),
            "rows_total": shards.rows(),
            "rows_done": self._rows_resumed,
            "share": self._weight / self._weights,
        }

    def hear(self, event: Event) -> dict[str, Any]:
        """Take an event in; the changes for Progress, empty where it changes nothing."""
        if isinstance(event, Started):
            self._workers.add(event.worker)
            self.first_start = self.first_start or time.monotonic()
        elif isinstance(event, Death):
            self._workers.discard(event.worker)
            for key in event.keys:
                self._ticking.pop(key, None)
        elif isinstance(event, Tick):
            if not event.key.startswith("probe"):
                self._ticking[event.key] = self._ticking.get(event.key, 0) + event.rows
        elif isinstance(event, Outcome):
            self._ticking.pop(event.key, None)
            if event.error is None and not event.key.startswith("probe"):
                self._commit(event.value)
        else:
            return {}
        return self._changes()

    def _commit(self, value: dict[str, Any]) -> None:
        assert self._shards is not None
        self._committed += 1
        self._weight += self._shards.weight(value["shard"])
        self.counts = self.counts + Counts(*value["counts"])
        self.figures = summed([self.figures, value["figures"]])
        self.errors = summed([self.errors, value["errors"]])

    def _changes(self) -> dict[str, Any]:
        changes: dict[str, Any] = {"workers": len(self._workers)}
        if self._shards is None:
            return changes
        fresh = self.counts.rows_in + sum(self._ticking.values())
        rate = fresh / max(1e-9, time.monotonic() - self._begun)
        share = min(1.0, self._weight / self._weights)
        total = self._shards.rows()
        left: float | None = None
        if total is not None:
            left = max(0, total - self._rows_resumed - fresh)
        elif self.counts.rows_in:
            left = self.counts.rows_in * (1 - share) / max(share, 1e-9)
        c = self.counts
        return {
            **changes,
            "shards_done": self.resumed + self._committed,
            "rows_done": self._rows_resumed + fresh,
            "rows_ok": c.ok,
            "rows_dead": c.dead + c.derived_dead,
            "rows_filtered": c.filtered + c.derived_filtered,
            "rows_per_second": rate,
            "eta": left / rate if left is not None and rate > 0 else None,
            "share": share,
        }
