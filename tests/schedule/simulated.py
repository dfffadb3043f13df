"""A world with a clock of its own, in which runs take as long as a test says, and `up` may be killed at any moment."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from gristmill.schedule.contract import Happening, Run
from gristmill.schedule.jobs import JobFiles
from gristmill.schedule.state import State
from gristmill.schedule.up import Up

JOB = """
vars: {{ds: ""}}
source: "in/${{ds}}.parquet"
model: {{call: "m:f"}}
sink: {{uri: "out/{name}/${{ds}}/"}}
{more}
"""


class Killed(BaseException):
    """The process is gone."""


class Simulated:
    """A clock that jumps, and runs that end by it: `code(run)` says how each ends, `takes` seconds after it began."""

    def __init__(self, start: datetime, code: Callable[[Run], int] = lambda run: 0, takes: float = 3600.0) -> None:
        self.at = start
        self.code, self.takes = code, takes
        self.going: dict[tuple[str, str, str], tuple[Run, datetime]] = {}
        self.started: list[tuple[str, str]] = []
        self.published: Counter[tuple[str, str]] = Counter()
        self.most = 0
        self.until: datetime | None = None
        self.stopping: int | None = None

    def now(self) -> datetime:
        return self.at

    def start(self, run: Run, path: str, tick: str) -> None:
        assert run.key not in self.going, "two runs of one tick at once"
        assert run.job not in [job for job, *_ in self.going], "two runs of one job at once"
        assert datetime.fromisoformat(tick) == run.tick and Path(path).name == run.job
        self.going[run.key] = run, self.at + timedelta(seconds=self.takes)
        self.started.append(run.key[:2])
        self.most = max(self.most, len(self.going))

    def wait(self, seconds: float) -> Sequence[tuple[Run, int]]:
        end = min([self.at + timedelta(seconds=seconds), *(until for _, until in self.going.values())])
        self.at = max(end, self.at)
        if self.until is not None and self.at >= self.until:
            self.stopping = 15
        return self.ended()

    def ended(self) -> list[tuple[Run, int]]:
        found = [(run, self.code(run)) for run, until in self.going.values() if until <= self.at]
        for run, code in found:
            del self.going[run.key]
            if code == 0 and not self.published[run.key[:2]]:  # else the sink says: nothing to do
                self.published[run.key[:2]] += 1
        return found

    def stop(self) -> Sequence[tuple[Run, int]]:
        found = [(run, 143) for run, _ in self.going.values()]
        self.going.clear()
        return found

    def die(self) -> None:
        """All processes are gone: those that had just ended, too, and nobody has heard of it."""
        self.ended()
        self.going.clear()


class Mortal:
    """An object whose calls may be the last thing that a process does: before or after it, by chance."""

    def __init__(self, of: Any, chance: Callable[[], bool], names: Sequence[str]) -> None:
        self._of, self._chance, self._names = of, chance, names

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._of, name)
        if name not in self._names:
            return found

        def call(*args: Any, **options: Any) -> Any:
            if self._chance():
                raise Killed
            made = found(*args, **options)
            if self._chance():
                raise Killed
            return made

        return call


def write(folder: Path, name: str = "n", more: str = 'schedule: "0 23 * * *"') -> Path:
    """A job file."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.yaml"
    path.write_text(JOB.format(name=name, more=more))
    return path


def utc(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=timezone.utc)


def run(
    folder: Path, world: Simulated, until: str, *, chance: Callable[[], bool] | None = None, **options: Any
) -> list[Happening]:
    """`up` until a time of the world's clock, started again whenever it is killed; what it told."""
    told: list[Happening] = []
    world.until, world.stopping = utc(until), None
    kill = chance or (lambda: False)
    while world.stopping is None:
        state = State(str(folder / ".gristmill"))
        try:
            whole = Mortal(state, kill, ("claim", "update", "know"))
            hands = world if chance is None else Mortal(world, kill, ("start",))
            Up(JobFiles(str(folder), {}), whole, hands, told.append, **options).forever()  # type: ignore[arg-type]
        except Killed:
            world.die()
            world.at += timedelta(seconds=random.Random(str(world.at)).choice([1, 60, 3600, 40 * 3600]))
            if world.at >= world.until:
                world.stopping = 9
        finally:
            state.close()
    return told


def runs(folder: Path, job: str = "n.yaml") -> list[Run]:
    """All runs of a job, the oldest first."""
    state = State(str(folder / ".gristmill"))
    try:
        return state.last(job, 1000)[::-1]
    finally:
        state.close()
