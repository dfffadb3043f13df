"""What is known of a sink and of the runs on it, as frozen values: all that its report shows, whoever draws it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, field
from typing import Any

from gristmill.commit.documents import Drifted
from gristmill.observe.report import Row, WorkerPace
from gristmill.values import dataclass

MOST_NIGHTS = 10  # generations that a result is shown beside


@dataclass(frozen=True)
class Slow:
    """A shard, and how long its rows took, in seconds of its worker."""

    shard: int
    seconds: float
    rows: int = 0
    worker: str = ""
    source: str = ""
    start: int = 0
    stop: int = 0


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run on a sink: when it was, who ran what, how it ended. Times are seconds since 1970; `pace` has seconds
    since the run began, and the source rows that were done by then. `phases` are the seconds of each, which add up to
    `seconds`, and `threads` what those of all workers did with their time. A run that is still "running" and whose
    process is gone was killed.
    """

    run: str
    generation: int
    kind: str
    state: str
    started: float
    seconds: float = 0.0
    host: str = ""
    pid: int = 0
    version: str = ""
    command: tuple[str, ...] = ()
    folder: str = ""
    engine: str = ""
    workers: int = 0
    model: str = ""
    error: str = ""
    exit_code: int | None = None
    rows: int = 0
    rows_ok: int = 0
    rows_dead: int = 0
    rows_filtered: int = 0
    shards: int = 0
    shards_done: int = 0
    busy: float | None = None
    padding: float | None = None
    used: Mapping[str, float] = field(default_factory=dict)
    pace: tuple[tuple[float, int], ...] = ()
    slowest: tuple[Slow, ...] = ()
    per_worker: tuple[WorkerPace, ...] = ()
    notes: tuple[str, ...] = ()
    drift: tuple[Drifted, ...] = ()
    phases: Mapping[str, float] = field(default_factory=dict)
    threads: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    @property
    def rows_per_second(self) -> float:
        """Its throughput, start and end included."""
        return self.rows / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True)
class Night:
    """A generation as it was published: the counts of the whole result then. `updated` has how many source rows were
    "kept", "scored" and, if that is known, "gone", for an update; `used` is what it asked of endpoints.
    """

    generation: int
    published: str
    seconds: float
    rows_in: int
    rows_ok: int
    rows_dead: int
    rows_filtered: int
    model: str
    digest: str
    errors: Mapping[str, int] = field(default_factory=dict)
    updated: Mapping[str, int] = field(default_factory=dict)
    used: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Drift:
    """A column, held against that of another result: its figures with their limits, the shares of its values in both,
    by bin or category, where they are known, and the first figure in the generations before, oldest first, each with
    its verdict.
    """

    column: str
    figures: tuple[Drifted, ...]
    bins: tuple[str, ...] = ()
    before: tuple[float, ...] = ()
    now: tuple[float, ...] = ()
    past: tuple[tuple[int, float, str], ...] = ()


@dataclass(frozen=True)
class Example:
    """A dead letter, for people."""

    where: str
    stage: str
    message: str
    payload: str = ""


@dataclass(frozen=True)
class Kind:
    """An error, how many rows have it, and some of them."""

    error: str
    rows: int
    examples: tuple[Example, ...] = ()


@dataclass(frozen=True)
class Incident:
    """An alert that is open; `since` is seconds since 1970."""

    kind: str
    text: str
    since: float


@dataclass(frozen=True)
class Way:
    """What a person does about a run that failed, as a sentence, and the command for it; "" if none is known, as that
    of a run from Python.
    """

    text: str
    command: str = ""

    def __str__(self) -> str:
        return self.text + (f": {self.command}" if self.command else "")


@dataclass(frozen=True)
class Standing:
    """The state of a sink in a few words, why it is no better, and the way on; None if there is nothing to do."""

    words: str
    why: str = ""
    way: Way | None = None


@dataclass(frozen=True, kw_only=True)
class SinkFacts:
    """A sink: its state now (as `gristmill status` has it), how things stand, what is published, and the generations
    and runs before, newest last. `rows` are the counts as lines of a report, `digests` what identifies model, data and
    code; `job` is the job file that published last, if one is known.
    """

    sink: str
    state: str
    at: float
    version: str
    now: Mapping[str, Any] = field(default_factory=dict)
    standing: Standing = Standing("")
    rows: tuple[Row, ...] = ()
    nights: tuple[Night, ...] = ()
    runs: tuple[Run, ...] = ()
    kinds: tuple[Kind, ...] = ()
    letters: str = ""  # why dead letters are not shown
    digests: tuple[tuple[str, str], ...] = ()
    inputs: tuple[tuple[str, str], ...] = ()
    columns: tuple[tuple[str, str], ...] = ()
    deliveries: tuple[str, ...] = ()
    incidents: tuple[Incident, ...] = ()
    drift: tuple[Drift, ...] = ()
    job: str = ""
    folder: str = ""

    @property
    def last(self) -> Run | None:
        """The last run that scored something, or else the last one."""
        return next((run for run in reversed(self.runs) if run.rows), self.runs[-1] if self.runs else None)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        found = asdict(self)
        for run, told in zip(self.runs, found["runs"], strict=True):
            told["rows_per_second"] = round(run.rows_per_second, 2)
            for worker, of in zip(run.per_worker, told["per_worker"], strict=True):
                of["rows_per_second"] = round(worker.rows_per_second, 2)
        return found


class Pace:
    """How many rows were done when: a bounded number of points, over a run of any length. When there are too many every
    second one goes, and from then on half as many are taken.
    """

    MOST = 160

    def __init__(self) -> None:
        self._points: list[tuple[float, int]] = []
        self._every = 0.5  # seconds

    def take(self, seconds: float, rows: int) -> None:
        """Take a point, if it is time for one."""
        if self._points and (seconds - self._points[-1][0] < self._every or rows < self._points[-1][1]):
            return
        self._points.append((round(seconds, 2), rows))
        if len(self._points) > self.MOST:
            self._points = self._points[::2]
            self._every *= 2

    def points(self, seconds: float, rows: int) -> tuple[tuple[float, int], ...]:
        """All points, the last one being how it ended."""
        before = [point for point in self._points if point[0] < seconds and point[1] <= rows]
        return (*before, (round(seconds, 2), rows))
