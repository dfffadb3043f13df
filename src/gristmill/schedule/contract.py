"""What passes between the parts of `gristmill up`, and what it needs of the world: a clock, and processes that run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from datetime import datetime, timezone
from typing import Any, Protocol

from gristmill.values import dataclass

RUN, RETRY = "run", "retry-dead"


@dataclass(frozen=True)
class Run:
    """The run of a job for one tick. Its key, job and tick, is claimed before it begins, so that there is one. `what`
    is the command that it is: RUN, or RETRY if somebody has asked that the dead letters of a tick be scored again,
    with its `options`.

    `state` is "due" (to be started at `next`), "running", or how it ended: "done", "failed" (a person has to look),
    "covered" (the run of a later tick did its work) or "missed" (nobody was there, and the job says that it is not to
    be made up for). Times are seconds since 1970.
    """

    job: str
    tick: datetime
    state: str = "due"
    next: float = 0.0
    attempts: int = 0
    tries: int = 0  # of these, those that failed and count towards `retries`
    exit: int | None = None
    begun: float | None = None
    ended: float | None = None
    deadline: float | None = None
    late: bool = False
    reason: str = ""
    what: str = RUN
    options: str = ""

    @property
    def key(self) -> tuple[str, str, str]:
        """What identifies it."""
        return self.job, written(self.tick), self.what


@dataclass(frozen=True)
class Happening:
    """Something that `up` tells: a line for a person, and `fields` for programs, among them `job` and `tick`.

    `kind` is one of started, done, recovered (done, after something that was told), retry, failed, late, missed,
    left out, waiting (what failed before, of `--once`), bad (a job file that cannot be run), mended, state (the state
    cannot be written), stopping.
    """

    kind: str
    text: str
    job: str = ""
    tick: datetime | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)

    @property
    def grave(self) -> bool:
        """Whether a person should look."""
        return self.kind in ("failed", "late", "missed", "left out", "waiting", "bad", "state")


class World(Protocol):
    """The clock and the processes of a machine; tests have a clock of their own."""

    def now(self) -> datetime:
        """The present, in UTC."""
        ...

    def start(self, run: Run, path: str, tick: str) -> None:
        """Begin `gristmill run`, or what else it is, for a tick as it is given to `--scheduled`. Raises OSError."""
        ...

    def wait(self, seconds: float) -> Sequence[tuple[Run, int]]:
        """Wait for so long at most, or until runs end or somebody asks to stop; runs that ended, with exit codes."""
        ...

    def stop(self) -> Sequence[tuple[Run, int]]:
        """Ask all runs to stop, and wait until they have; they can be resumed."""
        ...

    @property
    def stopping(self) -> int | None:
        """The signal by which somebody asked to stop."""
        ...


def written(tick: datetime) -> str:
    """A tick as it is stored, so that texts have the order of times."""
    return tick.astimezone(timezone.utc).isoformat(timespec="seconds")


def stamp(tick: datetime) -> str:
    """A tick in the name of a file or an address: `20260101T220000Z`."""
    return f"{tick.astimezone(timezone.utc):%Y%m%dT%H%M%SZ}"


def tick_of(text: str) -> datetime:
    """The tick of a `stamp`. Raises ValueError."""
    return datetime.strptime(text, "%Y%m%dT%H%M%SZ").replace(tzinfo=timezone.utc)
