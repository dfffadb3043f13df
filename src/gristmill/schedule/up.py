"""The loop of `gristmill up`: claims ticks that have come, starts their runs, and stores how they ended. It holds no
truth: what is done is in the sinks, and what was claimed in the state, so that it may be killed at any moment.

A tick is claimed, and its run stored as running, before the run starts. A run that is stored as running when `up`
begins was cut off with it: it is started again, as the same run, and resumes.
"""

from __future__ import annotations

import shlex
import sqlite3
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta, tzinfo

from gristmill.errors import BadJob, RunFailed
from gristmill.schedule import arrivals, calendar, queueing
from gristmill.schedule.contract import RETRY, Happening, Run, World
from gristmill.schedule.entry import Scheduled
from gristmill.schedule.jobs import Folder, JobFiles, upstream
from gristmill.schedule.state import State, is_damaged

LOOK = timedelta(seconds=30)  # between two looks at the folder, at files that may have arrived, and at the state
FORGETS = timedelta(days=1)
STUCK = 120.0  # seconds since the last look, of which there is one every LOOK, after which something is wrong


class Up:
    """Runs the jobs of a folder. `tell` is told what happens; `words` gives the last message of a run. `since` without
    a time zone is in that of each job's schedule.
    """

    def __init__(
        self,
        files: JobFiles,
        state: State,
        world: World,
        tell: Callable[[Happening], None],
        *,
        at_once: int = 1,
        since: datetime | None = None,
        words: Callable[[Run], str] = lambda run: "",
    ) -> None:
        self._files, self._state, self._world, self._tell = files, state, world, tell
        self._at_once, self._since, self._words = at_once, since, words
        self._jobs: Mapping[str, Scheduled] = {}
        self._bad: Mapping[str, str] = {}
        self._next: dict[str, tuple[Scheduled, datetime | None]] = {}
        self._looked: datetime | None = None
        self._forgot: datetime | None = None
        self._ended: list[tuple[Run, int]] = []  # runs that have ended and are not stored yet
        self._state_bad = False
        self._told: set[tuple[str, ...]] = set()  # runs of which something grave was told
        self._codes: list[int] = []
        self._stepped = time.monotonic()

    @property
    def folder(self) -> Folder:
        """The jobs as they were last read; from any thread."""
        return Folder(self._jobs, self._bad)

    @property
    def ill(self) -> str:
        """Why nothing would be started now; "" if all is well. From any thread."""
        ago = time.monotonic() - self._stepped
        if ago > STUCK:
            return f"it has not looked for what there is to do for {ago:.0f} s"
        return "the state cannot be written, so that nothing is started: is the disk full?" if self._state_bad else ""

    # ------------------------------------------------ the loop

    def forever(self) -> int:
        """Run until somebody asks to stop; returns the number of the signal."""
        self._resume()
        while self._world.stopping is None:
            self._ended += self._world.wait(self.step())
        self._stop()
        return self._world.stopping

    def once(self) -> list[int]:
        """Run what is due now, each run once, and return their exit codes. Runs that are to be tried again later stay
        due; of those that failed before, and still wait, that is told, and the code is theirs. A job file that cannot
        be run counts as failed: what it was to do is not done.
        """
        self._resume()
        until = self._world.now()
        waiting = [run for run in self._state.unfinished() if run.state == "due" and run.next > until.timestamp()]
        while self._world.stopping is None:
            self.step(until)
            if not self._ended and not any(run.state == "running" for run in self._state.unfinished()):
                self._tell_waiting(waiting)
                self._codes += [queueing.UNREADABLE] * len(self._bad)
                return self._codes
            self._ended += self._world.wait(LOOK.total_seconds())
        self._stop()
        return self._codes

    def _tell_waiting(self, since: Sequence[Run]) -> None:
        left = {run.key for run in self._state.unfinished() if run.state == "due"}
        for run in since:
            if run.key in left and run.job in self._jobs:
                again = datetime.fromtimestamp(run.next, self._zone(run))
                self._happens(
                    "waiting",
                    f"{self._named(run)}: {run.reason}, and waits until {again:%Y-%m-%d %H:%M %Z} to be tried again: "
                    f"gristmill up {shlex.quote(self._files.folder)} --once --again {shlex.quote(run.job)} does it now",
                    run, exit=run.exit,
                )  # fmt: skip
                self._codes.append(run.exit or queueing.FAILED)

    def step(self, until: datetime | None = None) -> float:
        """Do what there is to do now, with ticks up to `until`; returns in how many seconds there may be more."""
        self._stepped = time.monotonic()
        try:
            wait = self._step(until)
        except (sqlite3.Error, RunFailed) as e:
            if not self._state_bad:
                bad = f"the state cannot be written ({e}): nothing is started until it can; no run is lost"
                self._happens("state", self._state.damaged(e) if is_damaged(e) else bad)
            self._state_bad = True
            return LOOK.total_seconds()
        if self._state_bad:
            self._state_bad = False
            self._happens("mended", "the state can be written again")
        return wait

    def _step(self, until: datetime | None) -> float:
        now = self._world.now()
        self._store_ends(now)
        if self._looked is None or abs(now - self._looked) >= LOOK:
            self._look(now)
        self._claim(now if until is None else until, now)
        unfinished = self._state.unfinished()
        for run in queueing.superseded(unfinished, dict(self._jobs), now.timestamp()):
            self._state.update(run, "due")
        self._tell_late(self._state.unfinished(), now)
        limit = now if until is None else until
        for run in queueing.startable(self._state.unfinished(), self._jobs, limit.timestamp(), self._at_once):
            self._start(run, now)
        times: list[float | None] = [tick.timestamp() for _, tick in self._next.values() if tick is not None]
        left = self._state.unfinished()
        times += [run.next for run in left if run.state == "due" and run.next > now.timestamp()]
        times += [run.deadline for run in left if run.deadline is not None and not run.late]
        return queueing.sooner(times, now.timestamp(), LOOK)

    def _look(self, now: datetime) -> None:
        try:
            found = self._files.read(now)
        except BadJob as e:
            if self._looked is None:
                raise
            self._away(str(e))
            self._looked = now
            return
        self._told.discard(("", "folder"))
        for name, why in found.bad.items():
            if self._bad.get(name) != why:
                self._happens("bad", f"{why}; it does not run until that is mended", name)
        for name in self._bad:
            if name not in found.bad and name in found.jobs:
                self._happens("mended", f"{name}: can be run again", name)
        gone = [name for name in self._jobs if name not in found.jobs and name not in found.bad]
        for name in gone:
            self._happens("bad", f"{name}: is gone, or has no schedule any more: it runs no longer", name)
        if self._looked is None and self._since is not None:
            self._tell_known(found.jobs)
        self._jobs, self._bad, self._looked = found.jobs, found.bad, now
        self._next = {name: at for name, at in self._next.items() if name in found.jobs and at[0] == found.jobs[name]}
        if self._forgot is None or now - self._forgot > FORGETS:
            self._state.forget(now.timestamp())
            self._forgot = now
        self._arrivals(now)

    def _tell_known(self, jobs: Iterable[str]) -> None:
        """Of which jobs no time is made up for, though a `since` is given."""
        if known := [name for name in jobs if self._state.since(name) is not None]:
            some = ", ".join(known[:3]) + (f" and {len(known) - 3} more" if len(known) > 3 else "")
            job = shlex.quote(self._files.path(known[0]))
            text = f"--since is for jobs that are new here, and {some} {'are' if len(known) > 1 else 'is'} known"
            self._happens("since", f"{text}: gristmill run {job} --scheduled TIME runs one of its times by hand")

    def _away(self, why: str) -> None:
        """The folder, which was there, cannot be read: what was read of it counts until it can."""
        if ("", "folder") not in self._told:
            self._told.add(("", "folder"))
            self._happens("bad", f"{why}; its jobs go on as they were")

    # ------------------------------------------------ ticks

    def _claim(self, until: datetime, now: datetime) -> None:
        for name, told in self._jobs.items():
            if told.schedule.cron is not None:
                self._claim_times(name, told, until, now)
        for name, told in self._jobs.items():
            if told.schedule.after:
                self._claim_after(name, told, now)

    def _claim_times(self, name: str, told: Scheduled, until: datetime, now: datetime) -> None:
        at = self._next.get(name)
        if at is not None and (at[1] is None or at[1] > until):
            return
        since = self._known(name, f"{told.schedule.fields} {told.schedule.timezone}", now)
        due = calendar.due_runs(name, told, since, until)
        if due.runs:
            self._claimed(self._state.claim(due.runs, due.runs[-1].tick))
        if due.left_out:
            text = f"{name}: {due.left_out:,} earlier times were missed, more than are made up for: they are left out"
            self._happens("left out", text, name, left_out=due.left_out)
        self._next[name] = told, calendar.next_tick(told, max(since, until))

    def _known(self, name: str, said: str, now: datetime) -> datetime:
        """Up to when the ticks of a job are claimed: for one that is new, or has another schedule, up to now."""
        found = self._state.since(name)
        if found is not None and found[1] == said:
            return found[0]
        since = now if found is not None or self._since is None else self._since
        if since.tzinfo is None:
            since = since.replace(tzinfo=self._jobs[name].schedule.zone)
        self._state.know(name, since, said)
        return since

    def _claim_after(self, name: str, told: Scheduled, now: datetime) -> None:
        above = upstream(told, self._jobs)
        since = self._known(name, f"after {' '.join(sorted(above))}", now)
        done = [self._state.done_since(one, since) for one in above]
        ready = set.intersection(*(set(ticks) for ticks in done)) - self._state.claimed(name)
        if ready:
            ticks = [datetime.fromisoformat(tick) for tick in sorted(ready)]
            runs = [replace(run, state="due", ended=None) for run in calendar.as_runs(name, told, ticks, now)]
            self._claimed(self._state.claim(runs, since))

    def _arrivals(self, now: datetime) -> None:
        for name, told in self._jobs.items():
            if not (paths := told.schedule.files):
                continue
            since = self._known(name, f"files {' '.join(paths)}", now)
            found = self._state.since(name)
            try:
                there = arrivals.listed(paths, now.timestamp())
            except Exception as e:  # a store that is away, whatever its library raises: looked at again
                if (name, "files") not in self._told:
                    self._told.add((name, "files"))
                    self._happens("bad", f"{name}: the files that it waits for cannot be listed: {e}", name)
                continue
            self._told.discard((name, "files"))
            before = b"" if found is None else found[2]
            if arrivals.new(before, there):
                run = Run(name, now.replace(microsecond=0))
                run = replace(run, deadline=calendar.deadline_of(told, run.tick))
                self._claimed(self._state.claim([run], max(since, run.tick), there))

    def _claimed(self, runs: Sequence[Run]) -> None:
        for run in runs:
            if run.state == "missed":
                self._happens(
                    "missed", f"{self._named(run)}: nobody was there, and catch_up is none: it is not run", run
                )

    # ------------------------------------------------ runs

    def _resume(self) -> None:
        """Runs that were going on when `up` ended are due again."""
        for run in self._state.unfinished():
            if run.state == "running":
                self._state.update(replace(run, state="due", next=self._world.now().timestamp()), "running")

    def _start(self, run: Run, now: datetime) -> None:
        going = replace(run, state="running", attempts=run.attempts + 1, begun=now.timestamp(), exit=None, reason="")
        if not self._state.update(going, "due"):
            return
        zone = self._jobs[run.job].schedule.zone
        try:
            self._world.start(going, self._files.path(run.job), run.tick.astimezone(zone).isoformat())
        except OSError as e:
            self._ended.append((going, queueing.FAILED))
            self._happens("retry", f"{self._named(run)}: cannot be started: {e.strerror}", run)
            return
        again = "" if going.attempts == 1 else f", attempt {going.attempts}"
        self._happens("started", f"{self._named(run)}: started{again}", run, attempt=going.attempts)

    def _store_ends(self, now: datetime, *, stopping: bool = False) -> None:
        while self._ended:
            run, code = self._ended[0]
            told = self._jobs.get(run.job)
            stored = next((r for r in self._state.unfinished() if r.key == run.key), run)  # it may have been told late
            after = queueing.after(
                replace(stored, attempts=run.attempts), code, told, now.timestamp(), stopping=stopping
            )
            self._state.update(after, "running")
            self._ended.pop(0)
            self._codes.append(code)
            self._tell_end(after, code, now)

    def _tell_end(self, run: Run, code: int, now: datetime) -> None:
        name, fields = self._named(run), {"exit": code, "attempt": run.attempts}
        took = now.timestamp() - (run.begun or now.timestamp())
        if run.state == "done":
            again = run.late or run.tries > 0 or run.key in self._told
            self._happens(
                "recovered" if again else "done", f"{name}: done in {took:.0f} s", run, **fields, seconds=took
            )
            self._told.discard(run.key)
            return
        said = self._words(run)
        more = f": {said}" if said else ""
        if run.state == "failed":
            self._told.add(run.key)
            text = f"{name}: {run.reason} (exit {code}), so it is not tried again{more}"
            self._happens("failed", text, run, **fields)
        elif run.reason != "stopped":
            if run.reason.startswith("another") and run.key in self._told:
                return
            self._told.add(run.key)
            wait = run.next - now.timestamp()
            self._happens(
                "retry", f"{name}: {run.reason} (exit {code}), tried again in {wait:.0f} s{more}", run, **fields
            )

    def _tell_late(self, unfinished: Sequence[Run], now: datetime) -> None:
        late: dict[str, list[Run]] = {}
        for run in unfinished:
            if run.deadline is None or run.late or run.deadline > now.timestamp():
                continue
            if self._state.update(replace(run, late=True), run.state):
                late.setdefault(run.job, []).append(run)
        for runs in late.values():
            run, more = runs[-1], len(runs) - 1
            what = "it is running" if run.state == "running" else "it is not running"
            end = datetime.fromtimestamp(run.deadline or 0.0, self._zone(run))
            others = f"; so {'is 1 earlier run' if more == 1 else f'are {more} earlier runs'}" if more else ""
            text = f"{self._named(run)}: late: its deadline ({end:%Y-%m-%d %H:%M %Z}) has passed, and {what}{others}"
            self._happens("late", text, run, deadline=end.isoformat(), earlier=more)

    def _stop(self) -> None:
        """Stop all runs, which are due again at the next start."""
        now = self._world.now()
        self._ended += self._world.stop()
        stopped = len(self._ended)
        try:
            self._store_ends(self._world.now(), stopping=True)
        except sqlite3.Error as e:  # they are resumed all the same, as those that were running when up ended
            self._happens("state", f"the state cannot be written ({e}): no run is lost")
        runs = "1 run was stopped and resumes" if stopped == 1 else f"{stopped} runs were stopped and resume"
        took = (self._world.now() - now).total_seconds()
        self._happens("stopping", f"stopped in {took:.0f} s; {runs} at the next start")

    # ------------------------------------------------ telling

    def _zone(self, run: Run) -> tzinfo | None:
        told = self._jobs.get(run.job)
        return None if told is None else told.schedule.zone

    def _named(self, run: Run) -> str:
        at = run.tick.astimezone(self._zone(run))
        return f"{run.job} of {at:%Y-%m-%d %H:%M %Z}{', its dead letters' if run.what == RETRY else ''}"

    def _happens(self, kind: str, text: str, of: Run | str = "", **fields: object) -> None:
        if isinstance(of, Run):
            more = {"what": of.what} if of.what == RETRY else {}
            self._tell(Happening(kind, text, of.job, of.tick, {**fields, **more}))
        else:
            self._tell(Happening(kind, text, of, None, fields))
