"""The jobs of a folder as a table: when they run next, and how they ended."""

from __future__ import annotations

import contextlib
import os
from datetime import datetime, tzinfo

from gristmill.job.schedule import Schedule
from gristmill.observe import units
from gristmill.observe.tables import Table
from gristmill.schedule.calendar import next_tick
from gristmill.schedule.contract import RUN, Run
from gristmill.schedule.jobs import JobFiles
from gristmill.schedule.state import State


def listed(files: JobFiles, folder: str, now: datetime) -> Table:
    """A line for each job file with a schedule, and for each that cannot be run. Raises BadJob if the state in `folder`
    is that of other jobs.
    """
    found, rows = files.read(now), []
    with contextlib.ExitStack() as stack:
        state = None
        if os.path.exists(os.path.join(folder, "up.sqlite")):
            state = stack.enter_context(contextlib.closing(State(folder)))
            state.refuse_others(files.folder)
        for name, told in found.jobs.items():
            last = [run for run in state.last(name, 2) if run.what == RUN] if state is not None else []
            tick = next_tick(told, now)
            following = "" if tick is None else f"{tick:%Y-%m-%d %H:%M %Z}"
            rows.append((name, when(told.schedule), following, _ended(last[0], told.schedule.zone) if last else ""))
    rows += [(name, "cannot be run", "", why) for name, why in found.bad.items()]
    if not rows:
        return Table((), (), title=outlook(files, now))
    title = f"{files.folder}: {len(found.jobs)} with a schedule"
    return Table(("job", "when", "next", "last"), tuple(rows), title=title)


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


def _ended(run: Run, zone: tzinfo) -> str:
    more = f" ({run.reason})" if run.reason else ""
    late = ", late" if run.late else ""
    if run.state == "due" and run.tries:
        more = f" to be tried again at {datetime.fromtimestamp(run.next, zone):%H:%M}{more}"
    return f"{run.tick.astimezone(zone):%Y-%m-%d %H:%M %Z} {run.state}{late}{more}"
