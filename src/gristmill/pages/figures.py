"""`/metrics`: the figures of all jobs for Prometheus, under the names that jobs themselves use (observe/figures.py)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from gristmill.observe.figures import Figures
from gristmill.pages.asking import Asking, Unseen
from gristmill.pages.shown import Source
from gristmill.schedule.contract import RUN, Run
from gristmill.schedule.state import State

OF_SINK = ("rows", "generation", "rows_per_second", "shards", "shards_done", "workers")  # what only sinks tell
BUDGET_S = 4.0  # seconds of an answer that are spent on looking into sinks: Prometheus waits for 10


class Scrapes:
    """Makes the figures. Those of a run that has ended are looked up in its sink once; of many, some at each answer,
    and those that are not known yet are left out.
    """

    def __init__(self, source: Source, asking: Asking) -> None:
        self._source, self._asking = source, asking
        self._known: dict[str, tuple[tuple[object, ...], Mapping[str, Any]]] = {}

    def text(self) -> bytes:
        """All figures in Prometheus' text form. Raises MissingExtra."""
        from gristmill.observe.metrics import exposed
        from gristmill.process.extras import require

        require("prometheus_client", "metrics", "/metrics")
        until, found = time.monotonic() + BUDGET_S, []
        state = State(self._source.state)
        try:
            for job in self._source.folder().jobs:
                runs = [run for run in state.last(job, 8) if run.what == RUN and run.begun is not None]
                if runs:
                    found.append(self._of(runs[0], until))
        finally:
            state.close()
        return exposed(tuple(found))

    def _of(self, run: Run, until: float) -> Figures:
        sink = self._sink(run, until)
        going = run.state == "running"
        begun = run.begun or 0.0
        end = self._source.now().timestamp() if going else run.ended or begun
        rows = {name: int(sink.get(f"rows_{name}") or 0) for name in ("ok", "dead", "filtered")}
        return Figures(
            run.job, _text(sink, "model"), int(sink.get("generation") or sink.get("published_generation") or 0), going,
            rows, sink.get("rows_total"), float(sink.get("rows_per_second") or 0.0) if going else 0.0,
            int(sink.get("shards_total") or 0), int(sink.get("shards_done") or 0), int(sink.get("workers") or 0),
            max(0.0, end - begun), begun, None if going else run.ended, None if going else run.exit, _published(sink),
            () if sink else OF_SINK,
        )  # fmt: skip

    def _sink(self, run: Run, until: float) -> Mapping[str, Any]:
        key = (run.tick, run.state, run.attempts, run.ended)
        known = self._known.get(run.job)
        if known is not None and known[0] == key and run.state != "running":
            return known[1]
        if time.monotonic() > until:
            return {} if known is None else known[1]
        told = self._source.folder().jobs.get(run.job)
        if told is None:
            return {}
        try:
            tick = run.tick.astimezone(told.schedule.zone).isoformat()
            found: Mapping[str, Any] = self._asking.ask(
                "now", self._source.path(run.job), tick, wait=max(0.0, until - time.monotonic())
            )
        except Unseen:
            return {} if known is None else known[1]
        self._known[run.job] = key, found
        return found


def _text(sink: Mapping[str, Any], name: str) -> str:
    value = sink.get(name) or (sink.get("published") or {}).get(name) or ""
    return str(value.get("name", "") if isinstance(value, dict) else value)


def _published(sink: Mapping[str, Any]) -> float | None:
    said = (sink.get("published") or {}).get("published")
    try:
        return None if not said else datetime.strptime(str(said), "%Y-%m-%dT%H:%M:%S%z").timestamp()
    except ValueError:
        return None
