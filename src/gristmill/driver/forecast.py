"""How long a run will take, from how long those before it took; and what it costs. Nothing here opens anything."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from gristmill.observe import units
from gristmill.values import dataclass

LAST = 10  # runs that an estimate is made from: what was longer ago may have been another machine, or another load
LEVEL = 5  # of which so many tell how fast it is at present
SPREAD = 1.25  # the rows of the largest over those of the smallest run from which a slope can be told


@dataclass(frozen=True)
class Pace:
    """A run that has published: its source rows as they were planned, its seconds from beginning to end, those before
    the first shard was begun (`ahead`), and what had been foreseen.
    """

    rows: float
    seconds: float
    ahead: float = 0.0
    foreseen: float | None = None
    at: str = ""
    update: bool = False  # whether it kept answers of the result before, and so has a pace of its own

    @property
    def error(self) -> float | None:
        """How far off the estimate was, as a share of what it took."""
        return None if self.foreseen is None or not self.seconds else abs(self.foreseen / self.seconds - 1)


@dataclass(frozen=True)
class Forecast:
    """How long a run over `rows` takes, in seconds, and what that rests on, in words. `error` is by how much estimates
    were off in the past (the median, and the most), `cost` is in dollars. A `bound` is what a run takes at most, which
    scores all rows.
    """

    rows: float
    seconds: float
    by: str
    error: float | None = None
    most: float | None = None
    cost: float | None = None
    bound: bool = False

    def priced(self, an_hour: float | None) -> Forecast:
        """With its cost, by the price of an hour."""
        return self if an_hour is None else replace(self, cost=price(self.seconds, an_hour))

    def said(self) -> str:
        """`about 2 h 5 min for 1,200,000 rows, by the last 7 runs (estimates were 4.0 % off, at most 9.1 %); $5.20`."""
        most = f", at most {units.percent(self.most)}" if self.most is not None else ""
        off = f" (estimates were {units.percent(self.error)} off{most})" if self.error is not None else ""
        cost = "" if self.cost is None else f"; {dollars(self.cost)}"
        rows = units.plural(round(self.rows), "row")
        about = "at most about" if self.bound else "about"
        return f"{about} {units.seconds(rounded(self.seconds))} for {rows}, by {self.by}{off}{cost}"

    def ends(self, begins: datetime) -> datetime:
        """When a run ends that begins then."""
        return begins + timedelta(seconds=self.seconds)


def foreseen(rows: float, runs: Sequence[Pace]) -> Forecast | None:
    """The forecast for a run over so many rows, from runs before it, the latest last; None if there are none.

    What a run takes is a time that does not depend on the rows, and one for each row: as measured in the runs, or, once
    these were of different sizes, by the line through two of them from which all are least off, as shares of what they
    took (which is median regression: one night in which the machine was busy does not move it).
    """
    some = [run for run in runs if run.rows > 0 and run.seconds > 0][-LAST:]
    if not some:
        return None
    near = some[-LEVEL:]
    fixed = statistics.median(run.ahead for run in near)
    each = statistics.median((run.seconds - run.ahead) / run.rows for run in near)
    fixed, each = _line(some) or (fixed, each)
    errors = [run.error for run in some if run.error is not None]
    by = f"the last {len(some)} runs" if len(some) > 1 else "the last run"
    off = (statistics.median(errors) if errors else None, max(errors) if len(errors) > 1 else None)
    return Forecast(rows, fixed + each * rows, by, *off)


def _line(runs: Sequence[Pace]) -> tuple[float, float] | None:
    """Seconds that do not depend on the rows, and those for each row, if runs of different sizes tell."""
    sizes = [run.rows for run in runs]
    if len(runs) < 4 or max(sizes) < SPREAD * min(sizes):
        return None
    best: tuple[float, float, float] | None = None
    for i, a in enumerate(runs):
        for b in runs[i + 1 :]:
            if max(a.rows, b.rows) < SPREAD * min(a.rows, b.rows):
                continue
            each = (b.seconds - a.seconds) / (b.rows - a.rows)
            fixed = a.seconds - each * a.rows
            if each > 0 and fixed >= 0:
                off = sum(abs((fixed + each * run.rows) / run.seconds - 1) for run in runs)
                best = min(best or (off, fixed, each), (off, fixed, each))
    return None if best is None else best[1:]


def by_rate(rows: float, per_second: float, by: str, before: float = 0.0) -> Forecast:
    """The forecast from a measured rate, after so many seconds that are over."""
    return Forecast(rows, before + rows / per_second, by)


def price(seconds: float, an_hour: float) -> float:
    """Dollars for so many seconds."""
    return seconds / 3600 * an_hour


def dollars(cost: float) -> str:
    """`$5.20`, `$0.0042`."""
    return f"${cost:,.2f}" if cost >= 0.095 or cost == 0 else f"${cost:.2g}"


def rounded(seconds: float) -> float:
    """An estimate without figures that it does not have."""
    return seconds if seconds < 10 else float(f"{seconds:.2g}") if seconds < 60 else round(seconds / 60) * 60
