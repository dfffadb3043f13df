"""What is shown of a row, and checked, as frozen values; and the same as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, field
from typing import Any, Literal

from gristmill.commit.documents import ModelRecord, Sealed
from gristmill.commit.merkle import Step
from gristmill.observe import units
from gristmill.observe.report import DIGEST
from gristmill.observe.tables import cell
from gristmill.values import dataclass

SHOWN = 200  # columns of a value of the row


@dataclass(frozen=True)
class Check:
    """Something that was computed again, and what that showed."""

    what: str
    ok: bool
    told: str


@dataclass(frozen=True)
class Input:
    """What a row was made of: a file of the source, with its size and stamp as planned, and the digest of what the
    shard read of it. `position` is the row's place; None where only all `ranges` that the shard read are known.
    """

    path: str
    position: int | None
    ranges: tuple[tuple[int, int], ...]
    size: int
    stamp: str
    digest: str


@dataclass(frozen=True)
class Run:
    """What scored a row: a generation by number, folder and verb, when it was planned and published ("" where the sink
    does not tell it any more), and on what it ran.
    """

    generation: int
    folder: str
    verb: str
    planned: str
    published: str
    runs_on: Mapping[str, str | int]


@dataclass(frozen=True)
class Maker:
    """Who made an answer that updates have kept since: a generation, when its result was published, and the last run on
    it, by id and host; "" where the sink does not tell it any more. If it is not `certain`, it may be a generation
    before that one. `code` is the digest of that generation's code if it is not that of the proof: retry-dead was told
    to accept the other.
    """

    generation: int
    certain: bool
    published: str
    run: str
    host: str
    code: str = ""


@dataclass(frozen=True)
class Path:
    """From a plan and a receipt, by their leaves, to the root of the generation, and on to that of the result."""

    plan: str
    receipt: str
    plan_steps: tuple[Step, ...]
    receipt_steps: tuple[Step, ...]
    generation: Sealed
    generation_steps: tuple[Step, ...]


@dataclass(frozen=True)
class Proof:
    """What made the answer of a row, and whether that was shown. `row` is as it was published; of a dead letter, whose
    `outcome` is "dead", it is that. "unknown" is a row of the source that may have been left out. `file` has it as row
    `number`, counted from 0; None if it is one of its rows. `joined` is the receipt of that file where the parts of
    several shards were joined; `code` is the digest of all code, which has so many `code_parts`. `made_by` is who made
    an answer that the run has only kept, as an update does if model, code and the row's inputs are the same.
    """

    sink: str
    outcome: Literal["answer", "dead", "unknown"]
    row: Mapping[str, Any] | None
    file: str
    number: int | None
    file_sha256: str
    shard: int
    receipt: str
    inputs: tuple[Input, ...]
    model: ModelRecord
    code: str
    code_parts: int
    run: Run
    checks: tuple[Check, ...]
    root: str | None
    path: Path | None = None
    joined: str | None = None
    made_by: Maker | None = None
    notes: tuple[str, ...] = field(default=())

    @property
    def ok(self) -> bool:
        """Whether everything that was computed again is what the root stands for."""
        return all(check.ok for check in self.checks)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"ok": self.ok, **asdict(self)}

    def __str__(self) -> str:
        """What the command line shows."""
        return "\n".join(_lines(self))


def _lines(p: Proof) -> list[str]:
    what = {"answer": "row", "dead": "dead", "unknown": "row"}[p.outcome]
    number = "one of its rows" if p.number is None else f"row {units.count(p.number)}"
    told = ", ".join(f"{name}={cell(value, SHOWN)}" for name, value in (p.row or {}).items())
    lines = [
        (what, told or "(its columns were not read)"),
        ("file", f"{p.file}, {number}, sha256 {_short(p.file_sha256)}"),
    ]
    lines.append(("shard", f"{p.shard} of generation {p.run.generation}, receipt {_short(p.receipt)}"))
    for one in p.inputs:
        lines.append(("input", f"{one.path}, {_where(one)}, digest of what was read {_short(one.digest)}"))
    lines.append(("model", f"{p.model.name}, {_short(p.model.digest) or 'no files'}"))
    lines += [("version", f"{one}, sha256 {_short(one.digest)}") for one in p.model.named]
    lines.append(("code", f"{_short(p.code)}, of {units.plural(p.code_parts, 'part')}"))
    on = ", ".join(f"{name} {value}" for name, value in p.run.runs_on.items())
    when = f", published {p.run.published}" if p.run.published else ""
    lines.append(("run", f"{p.run.folder} ({p.run.verb}), planned {p.run.planned}{when}; {on}"))
    if p.made_by is not None:
        lines.append(("made by", _maker(p.made_by)))
    lines.append(("root", p.root or "none: published by an earlier version"))
    lines += [("note", note) for note in p.notes]
    for check in p.checks:
        bad = "unknown" if p.outcome == "unknown" and check.what == "row" else "WRONG"
        lines.append(("ok" if check.ok else bad, f"{check.what}: {check.told}"))
    return [f"{name:<10}{text}" for name, text in lines] + ["proved" if p.ok else "NOT proved"]


def _maker(one: Maker) -> str:
    when = f", published {one.published}" if one.published else ""
    run = f", run {one.run} on {one.host}" if one.run else ""
    before = "" if one.certain else ", or one before it, of which the sink has nothing any more"
    since = "kept since, as input, model and code are the same"
    if one.code:
        since = (
            f"by code {_short(one.code)}; kept since, as the code above was accepted (retry-dead --accept-code-change)"
        )
    return f"generation {one.generation}{when}{run}{before}; {since}"


def _where(one: Input) -> str:
    if one.position is not None:
        return f"position {units.count(one.position)}"
    spans = [f"{units.count(a)} to {units.count(b)}" for a, b in one.ranges[:3]]
    return f"one of positions {', '.join(spans)}" + (", …" if len(one.ranges) > 3 else "")


def _short(digest: str) -> str:
    return digest.removeprefix("sha256:")[:DIGEST]


def failed(checks: Sequence[Check]) -> list[str]:
    """What was wrong, as lines."""
    return [f"{check.what}: {check.told}" for check in checks if not check.ok]
