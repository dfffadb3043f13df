"""The jobs of a folder: when they run next, and how they ended."""

from __future__ import annotations

import contextlib
import os
from datetime import datetime, tzinfo
from typing import Any

from gristmill.job.schedule import Schedule
from gristmill.observe import units
from gristmill.observe.tables import Table
from gristmill.schedule.calendar import next_tick
from gristmill.schedule.contract import RUN, Run
from gristmill.schedule.jobs import JobFiles
from gristmill.schedule.state import State
from gristmill.values import dataclass


@dataclass(frozen=True)
class Listed:
    """A job file with a schedule, or one that cannot be run: then `bad` says why."""

    job: str
    schedule: Schedule | None = None
    next: datetime | None = None
    last: Run | None = None
    bad: str = ""

    def as_row(self) -> tuple[str, str, str, str]:
        """A line of `table`."""
        if self.schedule is None:
            return self.job, "cannot be run", "", self.bad
        following = "" if self.next is None else f"{self.next:%Y-%m-%d %H:%M %Z}"
        return self.job, when(self.schedule), following, _ended(self.last, self.schedule.zone) if self.last else ""

    def as_dict(self) -> dict[str, Any]:
        """For programs: times as ISO 8601, None for what there is not."""
        if self.schedule is None:
            return {"job": self.job, "bad": self.bad}
        run, zone = self.last, self.schedule.zone
        last = None if run is None else {
            "tick": run.tick.astimezone(zone).isoformat(), "state": run.state, "exit": run.exit, "late": run.late,
            "reason": run.reason or None, "attempts": run.attempts, "begun": _instant(run.begun, zone),
            "ended": _instant(run.ended, zone), "next_try": _instant(run.next, zone) if run.state == "due" else None,
        }  # fmt: skip
        following = None if self.next is None else self.next.isoformat()
        return {"job": self.job, "when": when(self.schedule), "next": following, "last": last}


def listed(files: JobFiles, folder: str, now: datetime) -> tuple[Listed, ...]:
    """Each job file with a schedule, and each that cannot be run. Raises BadJob if the state in `folder` is that of
    other jobs.
    """
    found, jobs = files.read(now), []
    with contextlib.ExitStack() as stack:
        state = None
        if os.path.exists(os.path.join(folder, "up.sqlite")):
            state = stack.enter_context(contextlib.closing(State(folder)))
            state.refuse_others(files.folder)
        for name, told in found.jobs.items():
            last = [run for run in state.last(name, 2) if run.what == RUN] if state is not None else []
            jobs.append(Listed(name, told.schedule, next_tick(told, now), last[0] if last else None))
    return (*jobs, *(Listed(name, bad=why) for name, why in found.bad.items()))


def table(files: JobFiles, jobs: tuple[Listed, ...], now: datetime) -> Table:
    """A line for each of them."""
    if not jobs:
        return Table((), (), title=outlook(files, now))
    title = f"{files.folder}: {sum(job.schedule is not None for job in jobs)} with a schedule"
    return Table(("job", "when", "next", "last"), tuple(job.as_row() for job in jobs), title=title)


def when(schedule: Schedule) -> str:
    """When a job runs, in a few words."""
    if schedule.cron is not None:
        return f"{schedule.cron} {schedule.timezone}"
    return f"after {', '.join(schedule.after)}" if schedule.after else f"files {', '.join(schedule.files)}"


def outlook(files: JobFiles, now: datetime) -> str:
    """What a folder has, and when something runs next, as a line."""
    found = files.read(now)
    bad = f", {units.plural(len(found.bad), 'file')} that cannot be run" if found.bad else ""
    if not found.jobs:
        return f"{files.folder}: no job file with a schedule that can be run is here{bad}: nothing runs until one is"
    times = [(tick, name) for name, told in found.jobs.items() if (tick := next_tick(told, now)) is not None]
    tick, name = min(times, default=(None, ""))
    following = "" if tick is None else f"; next {name} at {tick:%Y-%m-%d %H:%M %Z}"
    return f"{files.folder}: {units.plural(len(found.jobs), 'job')} with a schedule{bad}{following}"


def _instant(seconds: float | None, zone: tzinfo) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, zone).isoformat(timespec="seconds")


def _ended(run: Run, zone: tzinfo) -> str:
    more = f" ({run.reason})" if run.reason else ""
    late = ", late" if run.late else ""
    if run.state == "due" and run.tries:
        more = f" to be tried again at {datetime.fromtimestamp(run.next, zone):%H:%M}{more}"
    return f"{run.tick.astimezone(zone):%Y-%m-%d %H:%M %Z} {run.state}{late}{more}"
