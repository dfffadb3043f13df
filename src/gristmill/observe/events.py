"""What a run reports while running: progress snapshots and notes. Logic calls an Observer; only observers print."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any, Literal, Protocol

from gristmill.observe import units
from gristmill.values import dataclass

Phase = Literal[
    "planning", "loading", "running", "publishing", "delivering", "done", "failed", "gate failed", "stopped"
]
ENDED = ("done", "failed", "gate failed", "stopped")


@dataclass(frozen=True)
class Loaded:
    """How far a delivery to one store is: it looks what is to be brought, loads rows where no reader sees them, or
    makes them visible; `rows` are loaded, `of` so many (0: that is not known yet).
    """

    to: str
    step: Literal["looking", "loading", "switching"] = "looking"
    rows: int = 0
    of: int = 0

    def __str__(self) -> str:
        """`120,000 of 600,000 rows (20 %) to sqlite:///s.sqlite#t`."""
        to = {"looking": "for", "loading": "to", "switching": "in"}[self.step]
        return f"{self.brief} {to} {self.to}"

    @property
    def brief(self) -> str:
        """The same without the store's name."""
        if self.step == "looking":
            return "looking what is to be brought"
        if self.step == "switching":
            return f"making {units.plural(self.of, 'row')} visible"
        share = units.percent(self.rows / self.of if self.of else 1.0)
        return f"{units.count(self.rows)} of {units.plural(self.of, 'row')} ({share})"


@dataclass(frozen=True)
class Progress:
    """How far a run is. Rows are source rows unless stated; totals are None if only reading will tell.

    `rows_done` counts committed rows and those scored since (`ticking`); `rows_ok`, `rows_dead` and `rows_filtered`
    count the committed ones, and `used` is what these took of an endpoint (models.contract.USED). `share` (0..1) is by
    bytes if the number of rows is unknown. Times are in seconds. `gate` tells which gate did not hold, and the way out;
    `delivery` how far that to a store is, in the phase of that name.
    """

    phase: Phase = "planning"
    sink: str = ""
    model: str = ""
    generation: int = 0
    shards_total: int = 0
    shards_done: int = 0
    shards_resumed: int = 0
    rows_total: int | None = None
    rows_done: int = 0
    rows_ok: int = 0
    rows_dead: int = 0
    rows_filtered: int = 0
    share: float = 0.0
    rows_per_second: float = 0.0
    eta: float | None = None
    elapsed: float = 0.0
    workers: int = 0
    workers_wanted: int = 0
    waiting: str = ""
    gate: str = ""
    used: Mapping[str, float] = field(default_factory=dict)
    delivery: Loaded | None = None

    @property
    def doing(self) -> tuple[str, ...]:
        """What it does, of which a person wants to hear at once when that changes."""
        about = () if self.delivery is None else (self.delivery.to, self.delivery.step)
        return (self.phase, self.waiting, *about)


@dataclass(frozen=True)
class Note:
    """Something worth a line: a retry, a warning, a line that user code printed. `fields` are for JSON logs."""

    level: Literal["debug", "info", "warning", "error", "print"]
    text: str
    fields: Mapping[str, Any] = field(default_factory=dict)


class Observer(Protocol):
    """Receives what a run reports. Called from the driver's one thread, often; must be quick and must not raise."""

    def progress(self, now: Progress) -> None: ...

    def note(self, note: Note) -> None: ...

    def close(self) -> None: ...


class Silent:
    """An observer that reports nothing."""

    def progress(self, now: Progress) -> None:
        """Do nothing."""

    def note(self, note: Note) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""
