"""Which runs start now, and what follows from how one ended. Pure: it is told the time."""

from __future__ import annotations

import signal
from collections.abc import Collection, Sequence
from dataclasses import replace
from datetime import timedelta

from gristmill.schedule.contract import RUN, Run
from gristmill.schedule.entry import Scheduled

LONGEST = 3600.0  # seconds between two tries at most
BUSY = 30.0  # seconds until a run is tried again whose sink another one holds
STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM)
FAILED, UNREADABLE, HELD = 1, 2, 75  # exit codes


def startable(unfinished: Sequence[Run], jobs: Collection[str], now: float, at_once: int) -> list[Run]:
    """The runs to start: in order, as many as may run at once, and one of a job."""
    going = [run for run in unfinished if run.state == "running"]
    busy, room = {run.job for run in going}, at_once - len(going)
    chosen: list[Run] = []
    waiting = {*busy}
    for run in sorted((run for run in unfinished if run.state == "due"), key=lambda run: (run.tick, run.job)):
        if run.job in waiting or run.job not in jobs:
            continue
        waiting.add(run.job)  # the nights of a job keep their order: none overtakes one that is tried again
        if run.next <= now and len(chosen) < room:
            chosen.append(run)
    return chosen


def superseded(unfinished: Sequence[Run], told: dict[str, Scheduled], now: float) -> list[Run]:
    """Runs that need not start, because the run of a later tick of the job is due, too, and stands for them."""
    newest: dict[str, Run] = {}
    for run in unfinished:
        if run.what == RUN and run.state == "due" and (run.job not in newest or newest[run.job].tick < run.tick):
            newest[run.job] = run
    out = []
    for run in unfinished:
        if run.what != RUN or run.state != "due" or run.job not in told or told[run.job].each:
            continue
        if newest[run.job] != run:
            reason = f"the run of {newest[run.job].tick.isoformat()} stands for it"
            out.append(replace(run, state="covered", ended=now, reason=reason))
    return out


def after(run: Run, code: int, told: Scheduled | None, now: float, *, stopping: bool = False) -> Run:
    """The run after it has ended with this exit code: done, due again (at once, or later), or failed."""
    ended = replace(run, exit=code, ended=now)
    if code == 0:
        return replace(ended, state="done", reason="")
    if stopping and (code in STOPPED or code < 0):
        return replace(ended, state="due", next=now, ended=None, reason="stopped")
    if code == HELD:
        return replace(ended, state="due", next=now + BUSY, ended=None, reason="another run holds its sink")
    if code != FAILED and code not in STOPPED and code > 0:
        return replace(ended, state="failed", reason=_WHY.get(code, f"exit code {code}"))
    tries = run.tries + 1
    retries, first = (0, 0.0) if told is None else (told.schedule.retries, told.schedule.first_retry.total_seconds())
    how = f"was ended by signal {-code}" if code < 0 else "was stopped" if code in STOPPED else "failed"
    if told is not None and tries > retries:
        often = f"failed, {tries} times" if tries > 1 else how
        last = f", the last time {how.removeprefix('was ')}" if tries > 1 and how != "failed" else ""
        return replace(ended, state="failed", tries=tries, reason=f"{often}{last}")
    wait = min(LONGEST, first * 2 ** min(tries - 1, 20))
    return replace(ended, state="due", tries=tries, next=now + wait, ended=None, reason=how)


_WHY = {
    2: "the job, or its source, is not as it has to be",
    3: "a gate did not hold, or its deadline has passed",
    4: "input, model or code are not those of its plan",
}


def sooner(times: Sequence[float | None], now: float, most: timedelta) -> float:
    """Seconds until the first of these times, or `most`."""
    some = [t - now for t in times if t is not None]
    return max(0.0, min([most.total_seconds(), *some]))
