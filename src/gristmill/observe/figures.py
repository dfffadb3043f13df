"""What is measured of a job, as frozen values, whoever collects it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any

from gristmill.values import dataclass

OUTCOMES = ("ok", "dead", "filtered")


@dataclass(frozen=True)
class Figures:
    """What is measured of a job: all that the forms below are made of. Times are seconds since 1970. Figures that are
    `unknown` are told nowhere, which is something else than 0.
    """

    job: str
    model: str = ""
    generation: int = 0
    running: bool = False
    rows: Mapping[str, int] = field(default_factory=dict)
    rows_total: int | None = None
    rows_per_second: float = 0.0
    shards: int = 0
    shards_done: int = 0
    workers: int = 0
    seconds: float = 0.0
    started: float = 0.0
    ended: float | None = None
    exit_code: int | None = None
    published: float | None = None
    unknown: tuple[str, ...] = ()

    def values(self) -> dict[str, tuple[str, Mapping[str, float]]]:
        """By name of the metric: its help, and its values by outcome ("" for the only one)."""
        known: dict[str, tuple[str, Any]] = {
            "running": ("1 while the job runs", float(self.running)),
            "generation": ("Number of the generation that the run works on", self.generation),
            "rows_planned": ("Source rows of the run, if they are known", self.rows_total),
            "rows_per_second": ("Source rows a second", self.rows_per_second),
            "shards": ("Shards of the run", self.shards),
            "shards_done": ("Shards that are committed", self.shards_done),
            "workers": ("Workers that have a model", self.workers),
            "run_seconds": ("How long the run has taken", self.seconds),
            "run_started_timestamp_seconds": ("When the run began", self.started),
            "run_ended_timestamp_seconds": ("When the last run ended", self.ended),
            "run_exit_code": ("Exit code of the last run: 0 is well", self.exit_code),
            "published_timestamp_seconds": ("When the result that readers see was published", self.published),
        }
        found: dict[str, tuple[str, Mapping[str, float]]] = {
            f"gristmill_{name}": (text, {"": float(value)})
            for name, (text, value) in known.items()
            if value is not None and name not in self.unknown
        }
        if "rows" in self.unknown:
            return found
        rows = {outcome: float(self.rows.get(outcome, 0)) for outcome in OUTCOMES}
        return {"gristmill_rows": ("Rows of the run, by what became of them", rows), **found}
