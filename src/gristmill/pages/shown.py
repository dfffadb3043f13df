"""What the pages show of jobs and their runs, as frozen values made of what `gristmill up` has stored."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta, timezone, tzinfo
from urllib.parse import quote

from gristmill.observe import units
from gristmill.observe.standing import UNREAD, WHICH
from gristmill.schedule.calendar import next_tick
from gristmill.schedule.contract import RETRY, RUN, Happening, Run, stamp
from gristmill.schedule.entry import Scheduled
from gristmill.schedule.jobs import Folder
from gristmill.schedule.listing import when
from gristmill.schedule.processes import last_words
from gristmill.schedule.state import State
from gristmill.values import dataclass

MOST_FAILED = 20  # runs that need a person, on one page
MOST_RUNS = 100  # of a job's history, on one page
LOG_BYTES = 12_000  # of the end of a log


@dataclass(frozen=True)
class Source:
    """Where the pages look: the jobs as they were last read, the folder of the state, the files of jobs and logs, what
    was told lately, what ails `up`, and how it is woken. All may be called from any thread.
    """

    folder: Callable[[], Folder]
    state: str
    path: Callable[[str], str]
    log_of: Callable[[Run], str]
    told: Callable[[], Sequence[tuple[datetime, Happening]]]
    ill: Callable[[], str]
    nudge: Callable[[], None]
    now: Callable[[], datetime]


@dataclass(frozen=True)
class Line:
    """A run in a few words. `tone` is the class of its colour."""

    run: Run
    of: str
    state: str
    tone: str
    took: str
    reason: str
    words: str
    address: str
    log: str
    deadline: str = ""

    @property
    def why(self) -> str:
        """Why it ended so, and the last message of its log."""
        return ": ".join(part for part in (self.reason, self.words) if part)

    @property
    def retry(self) -> bool:
        """Whether it is a retry of dead letters."""
        return self.run.what == RETRY


@dataclass(frozen=True)
class JobShown:
    """A job: when it runs, its next time, how the last run ended (or what goes on), and why it cannot be run."""

    name: str
    address: str
    when: str = ""
    next: str = ""
    till: str = ""
    deadline: str = ""
    last: Line | None = None
    going: Line | None = None
    waiting: Line | None = None
    bad: str = ""


def jobs(source: Source, state: State) -> list[JobShown]:
    """All jobs of the folder, by name."""
    now, folder = source.now(), source.folder()
    unfinished = state.unfinished()
    found = []
    for name, told in folder.jobs.items():
        mine = [run for run in unfinished if run.job == name]
        going = next((run for run in mine if run.state == "running"), None)
        waiting = next((run for run in mine if run.state == "due"), None)
        last = next((run for run in state.last(name, 8) if run.state not in ("due", "running", "covered")), None)
        found.append(_job(source, name, told, now, last, going, waiting))
    found += [JobShown(name, address(name), bad=why) for name, why in folder.bad.items()]
    return sorted(found, key=lambda job: job.name)


def _job(
    source: Source, name: str, told: Scheduled, now: datetime, last: Run | None, going: Run | None, waiting: Run | None
) -> JobShown:
    def shown(run: Run | None) -> Line | None:
        return None if run is None else line(source, run, told)

    tick = next_tick(told, now)
    return JobShown(
        name, address(name), when(told.schedule), "" if tick is None else at(tick, told.schedule.zone),
        "" if tick is None else f"in {rough(tick - now)}", _by(told),
        shown(last), shown(going), shown(waiting),
    )  # fmt: skip


def troubled(source: Source, state: State) -> list[Line]:
    """Runs that need a person, the latest first: those that were given up, and those that are late and not done."""
    late = [run for run in state.unfinished() if run.late]
    return [line(source, run, source.folder().jobs.get(run.job)) for run in [*late, *state.failed(MOST_FAILED)]]


def line(source: Source, run: Run, told: Scheduled | None) -> Line:
    """A run in a few words."""
    now, zone = source.now().timestamp(), timezone.utc if told is None else told.schedule.zone
    state, tone = _state(run, now, zone)
    end = now if run.state == "running" else run.ended
    took = units.seconds(end - run.begun) if run.begun and end and end >= run.begun else ""
    words = last_words(source.log_of(run)) if run.state == "failed" or run.tries else ""
    late = ", late" if run.late else ""
    return Line(
        run, at(run.tick, zone), f"{state}{late}", "bad" if run.late and run.state != "done" else tone, took,
        run.reason, words, run_address(run), source.log_of(run),
        "" if run.deadline is None else at(datetime.fromtimestamp(run.deadline, zone), zone),
    )  # fmt: skip


def _by(told: Scheduled) -> str:
    """By when a job is to be done: `by 06:00`, `within 7h`."""
    if told.deadline is None:
        return ""
    return f"{'by' if ':' in told.deadline else 'within'} {told.deadline}"


def _state(run: Run, now: float, zone: tzinfo) -> tuple[str, str]:
    if run.state == "due":
        if run.next > now:
            again = datetime.fromtimestamp(run.next, zone)
            return f"tried again at {again:%H:%M %Z}", "mid"
        return "waiting for its turn", "mid"
    tones = {"done": "good", "running": "mid", "failed": "bad", "missed": "bad"}
    return {"covered": "left to a later run"}.get(run.state, run.state), tones.get(run.state, "")


def steps(run: Run, path: str, words: str = "", updates: bool = False) -> list[tuple[str, str]]:
    """What a person does about a run that was given up: sentences, each with a command, or "" for none. `words` are the
    last message of its log; `updates` is whether the job follows its source.
    """
    job, tick = shlex.quote(path), shlex.quote(run.key[1])
    command = f"cd {shlex.quote(os.getcwd())} && gristmill {run.what} {job} --scheduled {tick}"
    if run.exit == 2:
        return [(f"Mend what the message names, in {path} or what it reads. Then let it be tried again.", "")]
    if run.exit == 3 and UNREAD in words:
        return [
            ("Nothing new was published; the result before stands, and what was scored is kept.", ""),
            ("Put what cannot be read right, and let it be tried again.", ""),
            ("If it is to leave, publish the others without it, and then let it be tried again here, so that jobs that "
             "come after it run, too:", f"{command} --accept"),
        ]  # fmt: skip
    if run.exit == 3:
        return [
            ("Nothing new was published; the result before stands, and what was scored is kept.", ""),
            ("Look at the report and the dead letters. If all is right after all, publish it as it is, and then let it "
             "be tried again here, so that jobs that come after it run, too:", f"{command} --accept"),
            ("If it is not, mend the source or the job, and let it be tried again.", ""),
        ]  # fmt: skip
    if run.exit == 4 and run.what == RETRY and words and "--accept-code-change" not in words:
        return [
            ("This is not the job that wrote these dead letters: the message says what is other, and the way out.", ""),
            ("Put that back, and retry; or let the next run of the job score them: an update scores dead rows again."
             if updates else "Put that back, and let it be tried again.", ""),
        ]  # fmt: skip
    if run.exit == 4 and run.what == RETRY:
        return [("The code is another one than that which scored the rows. If that is the fix, retry with the code as "
                 "it is now: tick the box beside the button on the page of the dead letters.", "")]  # fmt: skip
    if run.exit == 4 and updates:
        return [
            ("Source, model or code are not those with which this result was begun; the message says which.", ""),
            (f"{WHICH[0].upper()}{WHICH[1:]}.", ""),
        ]
    if run.exit == 4:
        return [
            ("Source, model or code are not those with which this result was begun; the message says which.", ""),
            ("If that is meant, score everything again (the old result stands until it is done):",
             f"{command} --restart"),
            ("If there are only new files, add them:", f"{command} --append"),
        ]  # fmt: skip
    return [("Find the cause in the message and the log. What is scored is kept: tried again, it goes on there.", "")]


def log_end(path: str) -> list[str]:
    """The last lines of a log."""
    try:
        with open(path, "rb") as file:
            size = os.path.getsize(path)
            file.seek(max(0, size - LOG_BYTES))
            lines = file.read(LOG_BYTES).decode("utf-8", "replace").splitlines()
    except OSError:
        return []
    return lines[1:] if size > LOG_BYTES else lines


def forecast(run: Run, now: dict[str, object], at_now: datetime, zone: tzinfo) -> tuple[str, str]:
    """When a run that runs will end, beside its deadline, and the class of the colour; "" if that is not known."""
    eta = now.get("eta")
    if not isinstance(eta, (int, float)):
        return "", ""
    end = at_now + timedelta(seconds=eta)
    text = f"ends about {end.astimezone(zone):%H:%M %Z}, in {rough(timedelta(seconds=eta))}"
    if run.deadline is None:
        return text, ""
    left = run.deadline - end.timestamp()
    due = datetime.fromtimestamp(run.deadline, zone)
    if left >= 0:
        return f"{text}; {rough(timedelta(seconds=left))} before its deadline, {due:%H:%M %Z}", "good"
    return f"{text}; {rough(timedelta(seconds=-left))} after its deadline, {due:%H:%M %Z}", "bad"


def at(tick: datetime, zone: tzinfo) -> str:
    """A time for people: `2026-11-27 23:00 CET`."""
    return f"{tick.astimezone(zone):%Y-%m-%d %H:%M %Z}"


def rough(span: timedelta) -> str:
    """A span of time, to the minute: `3 h 20 min`, `2 d 4 h`, `a few seconds`."""
    seconds = span.total_seconds()
    return units.seconds(max(60, seconds // 60 * 60)) if seconds >= 60 else "less than a minute"


def address(job: str) -> str:
    """The page of a job."""
    return f"/job/{quote(job, safe='')}"


def run_address(run: Run) -> str:
    """The page of a run."""
    return f"{address(run.job)}/{stamp(run.tick)}"


def is_run(run: Run) -> bool:
    """Whether it is a run of the job, and no retry of dead letters."""
    return run.what == RUN
