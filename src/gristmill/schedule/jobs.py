"""The job files of a folder that have a schedule, read again when they change. One that cannot be run keeps none of the
others from running.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from datetime import datetime

from gristmill.errors import BadJob, GristmillError, did_you_mean
from gristmill.jobfile.suffixes import SUFFIXES
from gristmill.schedule.entry import Scheduled, scheduled
from gristmill.values import dataclass

Stamp = tuple[int, int, int]


@dataclass(frozen=True)
class Folder:
    """What was found: jobs by the name of their file, and why others cannot be run."""

    jobs: Mapping[str, Scheduled]
    bad: Mapping[str, str]


class JobFiles:
    """The job files in a folder, not in those below it: these may hold data."""

    def __init__(self, folder: str, environ: Mapping[str, str]) -> None:
        self.folder = folder
        self._environ = environ
        self._known: dict[str, tuple[Stamp, Scheduled | None, str]] = {}

    def path(self, job: str) -> str:
        """The path of a job's file."""
        return os.path.join(self.folder, job)

    def read(self, now: datetime) -> Folder:
        """What is there now. Raises BadJob if the folder cannot be read."""
        try:
            there = sorted(e.name for e in os.scandir(self.folder) if e.name.endswith(SUFFIXES) and e.is_file())
        except OSError as e:
            raise BadJob(f"{self.folder}: cannot be read ({e.strerror}): give the folder with the job files") from None
        before = {name: stamp for name, (stamp, _, _) in self._known.items()}
        self._known = {name: self._one(name, now) for name in there if not name.startswith(".")}
        if before != {name: stamp for name, (stamp, _, _) in self._known.items()}:
            for name, (_, told, why) in list(self._known.items()):
                if why or (told is not None and told.schedule.after):  # it has the time zone of those before it
                    del self._known[name]
                    self._known[name] = self._one(name, now)
        jobs = {name: told for name, (_, told, _) in self._known.items() if told is not None}
        bad = {name: why for name, (_, _, why) in self._known.items() if why}
        while wrong := _unfitting({name: told for name, told in jobs.items() if name not in bad}, bad):
            bad |= wrong
        return Folder({name: told for name, told in jobs.items() if name not in bad}, bad)

    def _one(self, name: str, now: datetime) -> tuple[Stamp, Scheduled | None, str]:
        path = self.path(name)
        try:
            found = os.stat(path)
            stamp = (found.st_mtime_ns, found.st_size, found.st_ino)
            if name in self._known and self._known[name][0] == stamp:
                return self._known[name]
            return stamp, scheduled(path, now, self._environ), ""
        except GristmillError as e:
            return stamp, None, " ".join(str(e).split("\n"))
        except OSError as e:
            return (0, 0, 0), None, f"{path}: cannot be read: {e.strerror}"


def upstream(told: Scheduled, jobs: Collection[str]) -> list[str]:
    """The jobs that one comes after, by the names of their files, which may be given without a suffix."""
    return [next((n for n in (name, *(name + s for s in SUFFIXES)) if n in jobs), name) for name in told.schedule.after]


def _unfitting(jobs: Mapping[str, Scheduled], bad: Collection[str]) -> dict[str, str]:
    """Why jobs that come after others cannot do so, where those that are `bad` cannot be run."""
    found: dict[str, str] = {}
    for name, told in jobs.items():
        above = upstream(told, [*jobs, *bad])
        if missing := [n for n in above if n not in jobs]:
            cannot = f"{name}: it runs after {missing[0]}, which "
            near = did_you_mean(missing[0], jobs)
            found[name] = cannot + ("cannot be run" if missing[0] in bad else f"is no job with a schedule here{near}")
        elif _circle(name, jobs):
            found[name] = f"{name}: it runs after itself, by way of {', '.join(above)}: give one of them a time"
        elif len({_times(n, jobs) for n in above}) > 1:
            found[name] = (
                f"{name}: it runs after {' and '.join(above)}, which do not run at the same times, so that none of "
                "their runs belong together: give them the same schedule, or let one of them run after the other"
            )
    return found


def _circle(name: str, jobs: Mapping[str, Scheduled]) -> bool:
    seen: set[str] = set()
    waiting = upstream(jobs[name], jobs)
    while waiting:
        one = waiting.pop()
        if one == name:
            return True
        if one in jobs and one not in seen:
            seen.add(one)
            waiting += upstream(jobs[one], jobs)
    return False


def _times(name: str, jobs: Mapping[str, Scheduled], seen: frozenset[str] = frozenset()) -> str:
    """What tells when a job runs, or that which it comes after at last."""
    told = jobs[name]
    above = [n for n in upstream(told, jobs) if n in jobs and n not in seen]
    if above:
        return _times(above[0], jobs, seen | {name})
    return f"{told.schedule.fields} {told.schedule.timezone}" if told.schedule.cron else f"files of {name}"
