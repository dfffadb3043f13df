"""The forecast of a plan by some rows that are scored now."""

from __future__ import annotations

import time
from dataclasses import replace

from gristmill.driver.forecast import by_rate
from gristmill.driver.planview import PlanView
from gristmill.driver.views import UNGATED, preview
from gristmill.job.job import JobSpec
from gristmill.observe import units
from gristmill.observe.events import Note, Progress


def probed(spec: JobSpec, view: PlanView, rows: int = 256) -> PlanView:
    """The plan with a forecast from some rows that are scored now, where earlier runs tell nothing."""
    if view.forecast is not None or not view.rows or view.idle:
        return view
    begun = time.monotonic()
    waits = Waits()
    found = preview(replace(spec, running=replace(spec.running, log=None), gates=UNGATED, deliver=()), rows, waits)
    if not found.rate:
        return view
    start = max(0.0, time.monotonic() - begun - min(rows, view.rows) / found.rate)  # planning, workers, the model
    per_second = found.rate * max(1, view.workers)
    forecast = by_rate(view.rows, per_second, f"{units.plural(rows, 'row')} of a probe{waits.told()}", start)
    return replace(view, forecast=forecast.priced(spec.running.hour_price))


class Waits:
    """An observer that notes how long rows waited for somebody who did not answer: that says nothing of the others."""

    def __init__(self) -> None:
        self._seconds, self._last, self._why, self._waiting = 0.0, 0.0, "", False

    def progress(self, now: Progress) -> None:
        """Count the time since the last one, if there was something to wait for."""
        self._seconds += now.elapsed - self._last if self._waiting else 0.0
        self._last, self._waiting = now.elapsed, bool(now.waiting)
        self._why = now.waiting or self._why

    def note(self, note: Note) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""

    def told(self) -> str:
        """That there was such a time, and how long at least; "" if there was none."""
        if not self._why:
            return ""
        return f", in which it waited for at least {units.seconds(self._seconds)} ({self._why}): less if it need not"
