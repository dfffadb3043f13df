"""What would run, as values, as text and for JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any

from gristmill.driver.deadline import Deadline, clock, now
from gristmill.driver.delivering import Foreseen
from gristmill.driver.forecast import Forecast
from gristmill.models.contract import ModelInfo
from gristmill.observe import units
from gristmill.values import dataclass

_STORE = ("to", "mode", "rows", "generation", "problem")


@dataclass(frozen=True)
class PlanView:
    """What would run. `rows` and `shards` are estimates if flagged so, and `shards_settled` says what tells how many
    shards there are; sizes are in bytes. `schema` and `nulls` are of
    the columns that are read. `takes` has what requests would take (USED), by some of the rows; `deliveries` is what
    each would find in its store. `problems` would stop the run, which would end with `exit_code`. Rows are counted
    before any `conditions`, which only reading can decide, and nulls in the files, also where only `some` of their rows
    are read. As text it is what `gristmill plan` prints.
    """

    files: int
    rows: int | None
    rows_estimated: bool
    bytes: int
    shards: int
    shards_estimated: bool
    workers: int
    nulls: dict[str, int]
    schema: list[tuple[str, str]]
    output: list[tuple[str, str | None]]
    model: ModelInfo
    backend: str = ""
    notes: tuple[str, ...] = ()
    problems: list[str] = field(default_factory=list)
    sink: str = ""  # what a run would find there
    takes: Mapping[str, float] = field(default_factory=dict)  # by estimate: requests, tokens, dollars
    deliveries: tuple[Foreseen, ...] = ()
    exit_code: int = 0
    forecast: Forecast | None = None  # how long a run takes that begins now, as far as earlier ones tell
    deadline: Deadline | None = None  # of a run that begins now
    idle: bool = False  # whether there is nothing to do
    shards_settled: str = ""
    conditions: bool = False
    some: bool = False

    def __str__(self) -> str:
        return "\n".join(_lines(self))

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        names = ("files", "rows", "rows_estimated", "bytes", "shards", "shards_estimated", "workers", "nulls", "sink")
        out: dict[str, Any] = {name: getattr(self, name) for name in names}
        for name in ("schema", "output"):
            out[name] = [{"name": column, "type": kind} for column, kind in getattr(self, name)]
        return {
            **out,
            "takes": dict(self.takes),
            "forecast": None if self.forecast is None else vars(self.forecast),
            "deadline": None if self.deadline is None else self.deadline.at.isoformat(),
            "model": {"name": self.model.name, "digest": self.model.digest, "backend": self.backend or None},
            "deliveries": [{name: getattr(store, name) for name in _STORE} for store in self.deliveries],
            "notes": list(self.notes),
            "problems": list(self.problems),
        }


def _lines(view: PlanView) -> list[str]:
    about = "about " if view.rows_estimated else ""
    rows = "unknown until read" if view.rows is None else f"{about}{units.count(view.rows)}"
    rows += ", before where and filters" if view.conditions else ""
    shards = units.count(view.shards)
    returns = "" if view.model.outputs is not None else f", and what {view.model.name} returns"
    lines = [
        f"files    {units.count(view.files)}, {units.size(view.bytes)}",
        f"rows     {rows}" + (" (estimated from the size of the first rows)" if view.rows_estimated else ""),
        f"shards   {f'about {shards} ({view.shards_settled})' if view.shards_estimated else shards}",
        f"workers  {units.count(view.workers)}",
        f"model    {view.model.name} {view.model.digest.removeprefix('sha256:')[:12]}".rstrip(),
        *([f"backend  {view.backend}"] if view.backend else []),
        f"reads    {_columns(view.schema)}",
        f"writes   {_columns(view.output)}{returns}",
    ]
    lines += [f"asks     {_takes(view.takes)}"] if view.takes else []
    lines += _on_time(view)
    lines += [f"sink     {view.sink}"] if view.sink else []
    lines += [f"delivers {store}" for store in view.deliveries]
    lines.append(f"nulls    {_nulls(view)}")
    lines += [f"note     {note}" for note in view.notes]
    return lines + [f"problem  {problem}" for problem in view.problems]


def _on_time(view: PlanView) -> list[str]:
    """How long it takes, and whether that is in time, of a run that begins now."""
    found, end, lines = view.forecast, view.deadline, []
    if found is not None:
        lines.append(f"takes    {found.said()}")
    elif view.idle:
        lines.append("takes    nothing: all is done")
    elif view.rows:
        lines.append("takes    not known before a first run: --probe scores some rows to tell")
    if end is not None:
        ends = (
            ""
            if found is None
            else f"; begun now, it ends {'by' if found.bound else 'about'} {clock(found.ends(now()), end.at.tzinfo)}"
        )
        late = ": too late" if found is not None and not found.bound and found.ends(now()) > end.at else ""
        lines.append(f"deadline {end}{ends}{late}")
    return lines


def _takes(takes: Mapping[str, float]) -> str:
    """`about 2,000 requests, 31,000 tokens in, at most 60,000 out, $0.11` by some of the rows."""

    def about(name: str) -> str:
        return units.count(int(float(f"{takes[name]:.2g}")))

    limited = "completion_tokens" in takes
    made = f"at most {about('completion_tokens')} out" if limited else "and the answers (limit them by max_tokens)"
    cost = [f"{'at most' if limited else 'more than'} ${takes['cost']:.2g}"] if "cost" in takes else []
    return ", ".join([f"about {about('requests')} requests", f"{about('prompt_tokens')} tokens in", made, *cost])


def _columns(schema: Sequence[tuple[str, str | None]]) -> str:
    return ", ".join(f"{name}: {kind or 'known when it runs'}" for name, kind in schema) or "nothing known"


def _nulls(view: PlanView) -> str:
    found = ", ".join(f"{name}: {count:,}" for name, count in view.nulls.items() if count)
    if found:
        return f"{found}{', in the files' if view.some else ''}"
    known = [name for name, _ in view.schema if name in view.nulls]
    if len(known) < len(view.schema):
        return f"none in {', '.join(known)}" if known else "known once rows are read"
    return "none"
