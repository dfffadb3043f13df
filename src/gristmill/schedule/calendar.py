"""Which ticks of a job are due, and what is done about those that nobody was there for. Pure: it is told the time."""

from __future__ import annotations

from collections import deque
from datetime import datetime, timedelta

from gristmill.job.schedule import due
from gristmill.schedule.contract import Run
from gristmill.schedule.entry import Scheduled
from gristmill.values import dataclass

MOST_MISSED = 400  # ticks of a job that are made up for: more than a year of nights
THERE = timedelta(minutes=5)  # a tick that was longer ago was missed


@dataclass(frozen=True)
class Due:
    """Ticks that have come: `runs` to be claimed, and how many older ones are left out, up to when."""

    runs: tuple[Run, ...] = ()
    left_out: int = 0


def due_runs(job: str, told: Scheduled, since: datetime, now: datetime) -> Due:
    """The runs of a job whose ticks came after `since`."""
    ticks: deque[datetime] = deque(maxlen=MOST_MISSED)
    count = 0
    for tick in told.schedule.ticks(since):
        if tick > now:
            break
        ticks.append(tick)
        count += 1
    return Due(tuple(as_runs(job, told, list(ticks), now)), count - len(ticks))


def as_runs(job: str, told: Scheduled, ticks: list[datetime], now: datetime) -> list[Run]:
    """A run for each tick, in order, as the schedule says what is made up for."""
    made = []
    for i, tick in enumerate(ticks):
        state, reason = "due", ""
        if told.schedule.catch_up == "none" and now - tick > THERE:
            state, reason = "missed", "nobody was there"
        elif not told.each and i < len(ticks) - 1:
            state, reason = "covered", f"the run of {ticks[-1].isoformat()} stands for it"
        ended = None if state == "due" else now.timestamp()
        made.append(Run(job, tick, state, deadline=deadline_of(told, tick), ended=ended, reason=reason))
    return made


def deadline_of(told: Scheduled, tick: datetime) -> float | None:
    """When the run of a tick must be done, in seconds since 1970."""
    return None if told.deadline is None else due(told.deadline, tick, told.schedule.zone).timestamp()


def next_tick(told: Scheduled, after: datetime) -> datetime | None:
    """The next time of a schedule that has times."""
    return None if told.schedule.cron is None else next(told.schedule.ticks(after), None)
