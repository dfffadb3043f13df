"""The report of a run that has ended, from what it tallied and published."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gristmill.commit.publication import Live, published
from gristmill.commit.receipt import Receipt
from gristmill.gating import summed
from gristmill.observe.report import Report
from gristmill.plan.counts import Counts
from gristmill.tally import Tally


@dataclass(frozen=True)
class Whole:
    """A live result over all its generations: what `_SUCCESS` says of it."""

    counts: Counts
    errors: Mapping[str, float]
    shards: int
    generations: Sequence[int]
    live: Sequence[Live]


SHORT = 1.0  # seconds of the workers together: in less, shares of their time tell of their start alone


def finished(so_far: Report, whole: Whole, done: Sequence[Receipt], tally: Tally) -> Report:
    """The report of a run that has published. `whole` is all of the live result, `done` are this generation's
    receipts, of which `tally` saw those that this run made.
    """
    time = sum(w.seconds for w in so_far.per_worker)
    figures = summed({k: v for k, v in x.figures.items() if not k.startswith("input:")} for x in done)
    padded = figures.get("padded", 0.0)
    busy = tally.figures.get("model_seconds", 0.0) / max(SHORT, time)
    return replace(
        so_far,
        state="done",
        counts=whole.counts,
        files=len(whole.live),
        bytes_out=sum(f.bytes for f in whole.live),
        model_seconds=figures.get("model_seconds", 0.0),
        busy=min(1.0, busy) if time >= SHORT else None,
        held_back=_held_back(tally.figures, time) if time >= SHORT else {},
        padding=1 - figures["tokens"] / padded if padded else None,
        tokens=int(figures["tokens"]) if figures.get("tokens") else None,
        errors={k: int(v) for k, v in whole.errors.items()},
    )


def untouched(uri: str, opened: tuple[str, Any], seconds: float, engine: str, notes: Sequence[str]) -> Report:
    """The report of a run that found its result published. `opened` is the sink's root and its file layer."""
    result = published(*opened)
    body, live = result.body, result.live()
    return Report(
        sink=uri,
        opened=opened,
        state="nothing to do",
        generation=body["generation"],
        counts=Counts(*body["counts_list"]),
        shards=body["shards"],
        shards_done=body["shards"],
        shards_resumed=body["shards"],
        seconds=seconds,
        model=body["model"]["name"],
        digest=body["model"]["digest"],
        workers=0,
        engine=engine,
        files=len(live),
        bytes_out=sum(f.bytes for f in live),
        errors=body.get("errors", {}),
        notes=tuple(notes),
        skipped=tuple(body.get("skipped", ())),
        format=body["sink_format"],
    )


def _held_back(figures: Mapping[str, float], total: float) -> dict[str, float]:
    """Shares of the workers' time (`total` in seconds) in which the model was not at work, by what it waited for."""
    waited = {what: figures.get(f"waited:{what}", 0.0) / max(total, 1e-9) for what in ("rows", "writing")}
    rest = 1 - figures.get("model_seconds", 0.0) / max(total, 1e-9) - sum(waited.values())
    return {**waited, "start and end": max(0.0, rest)}
