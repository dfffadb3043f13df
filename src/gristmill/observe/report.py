"""The report of a run: the counts that prove it, its speed, and how to read what it published."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from gristmill.plan.counts import Counts


@dataclass(frozen=True)
class WorkerPace:
    """What one worker did in a run: source rows that it committed, and the seconds from when its model was loaded to
    when it was last heard. `host` is "" where that is not known.
    """

    worker: str
    host: str = ""
    rows: int = 0
    seconds: float = 0.0

    @property
    def rows_per_second(self) -> float:
        """Its own throughput."""
        return self.rows / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True)
class Report:
    """A finished (or stopped) run. `rows_*` and `errors` are over all live generations of the sink (of a run that has
    not published: what it committed itself), `shards` are the run's own; times in seconds, sizes in bytes.

    `padding` is the share of padded tokens that were padding, `busy` the share of the workers' time in the model, and
    `held_back` the shares in which it waited for "rows" (reading, steps, tokenising), for "writing", and the rest;
    nothing where the run was too short to tell.
    """

    sink: str
    state: str
    generation: int
    counts: Counts
    shards: int
    shards_resumed: int
    seconds: float
    model: str
    digest: str
    workers: int
    engine: str = "local"
    files: int = 0
    bytes_out: int = 0
    model_seconds: float = 0.0
    busy: float | None = None
    held_back: Mapping[str, float] = field(default_factory=dict)
    padding: float | None = None
    tokens: int | None = None
    rows_run: int = 0
    shards_done: int = 0
    per_worker: tuple[WorkerPace, ...] = ()
    errors: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    format: str = "parquet"  # of the sink
    details: Mapping[str, Any] = field(default_factory=dict)
    opened: tuple[str, Any] | None = field(default=None, repr=False, compare=False)  # the sink's root and file layer

    @property
    def rows_in(self) -> int:
        """Source rows of the live result."""
        return self.counts.rows_in

    @property
    def rows_ok(self) -> int:
        """Rows scored and written."""
        return self.counts.ok

    @property
    def rows_dead(self) -> int:
        """Rows in the dead letters, source rows and derived ones."""
        return self.counts.dead + self.counts.derived_dead

    @property
    def rows_filtered(self) -> int:
        """Rows left out on purpose by where, filter steps or on_null=skip."""
        return self.counts.filtered + self.counts.derived_filtered

    @property
    def rows_per_second(self) -> float:
        """Source rows that this run itself scored, by its wall time."""
        return self.rows_run / self.seconds if self.seconds > 0 else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        plain = asdict(replace(self, opened=None))
        del plain["opened"]
        paces = [{**asdict(w), "rows_per_second": round(w.rows_per_second, 2)} for w in self.per_worker]
        return {
            **plain,
            "per_worker": paces,
            "rows_in": self.rows_in,
            "rows_ok": self.rows_ok,
            "rows_dead": self.rows_dead,
            "rows_filtered": self.rows_filtered,
            "rows_per_second": round(self.rows_per_second, 2),
        }

    def read(self) -> Any:
        """A pyarrow Dataset of exactly the published parts. Raises BadSource for npy, as gm.read does."""
        from gristmill.commit.reading import read

        return read(*self._place)

    def dead(self) -> Any:
        """The dead letters as an Arrow table; of a run that has not published, those of its committed shards."""
        from gristmill.commit.reading import dead

        return dead(*self._place, generation=self.generation)

    @property
    def _place(self) -> tuple[str, Any]:
        from gristmill.commit.places import opened

        return self.opened or opened(self.sink)
