"""The report of a run that has ended, built from what it tallied and published."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from gristmill.commit import receipt as receipts
from gristmill.commit.live import LiveFiles
from gristmill.commit.publication import published
from gristmill.driver import budgets, shipping
from gristmill.driver.choice import Chosen
from gristmill.driver.opening import Opened
from gristmill.driver.probe import Planned
from gristmill.driver.scoring import Scored, Scoring
from gristmill.driver.tally import Tallied
from gristmill.models.versions import Registered
from gristmill.observe.report import Report
from gristmill.shards.counts import Counts, summed
from gristmill.values import dataclass


@dataclass(frozen=True)
class Whole:
    """A live result over all its generations, as `_SUCCESS` describes it."""

    counts: Counts
    errors: Mapping[str, float]
    shards: int
    generations: Sequence[int]
    live: LiveFiles


SHORT = 1.0  # seconds of all workers together: with less, shares of their time show only their start


def stopped(scoring: Scoring) -> Report | None:
    """The report of a run that has not published: what it and the runs before it have committed, and what was asked
    for all else. None if it had no plan, and nobody was asked.
    """
    from gristmill.commit import journal

    at, kept = scoring.at, dict[str, float]()
    with contextlib.suppress(OSError):  # a courtesy, of a run that may have failed because the sink cannot be read
        done = receipts.listed(at.generation.receipts, at.files)
        for number in scoring.tally.unheard(done):
            if (found := receipts.valid(done[number], at.files)) is not None:
                scoring.tally.found(number, found)
        kept = journal.answered(at.generation.folder, at.files, done)
    report = _so_far(at, scoring.tally.sums())
    if not kept:
        return report if isinstance(at, Planned) else None
    return replace(report, used=summed([report.used, kept]))


def _so_far(at: Chosen, sums: Tallied) -> Report:
    r = at.resolved
    return Report(
        sink=at.sink.uri,
        opened=(at.root, at.files),
        state=at.log.phase,
        generation=at.generation.number,
        counts=sums.counts,
        shards=0 if at.plan is None else len(at.plan.shards),
        shards_done=sums.shards_done,
        shards_resumed=sums.resumed,
        seconds=at.log.seconds,
        model=at.spec.model.name,
        digest=r.info.digest,
        workers=r.workers,
        engine=at.spec.engine.name,
        rows_run=sums.rows_run,
        used=sums.used,
        per_worker=sums.per_worker,
        errors={k: int(v) for k, v in sums.errors.items() if v},
        notes=tuple(at.log.notes),
        skipped=r.skipped,
        format=r.sink_format.name,
        details={"runs_on": _runs_on(at, sums), "batch": vars(budgets.stored(at.batch)), **_registered(r.registered)},
    )


def _registered(models: Sequence[Registered]) -> dict[str, Any]:
    if not models:
        return {}
    others = [vars(one) for one in models[1:]]
    return {"registered": vars(models[0]), **({"registered_too": others} if others else {})}


def _runs_on(at: Chosen, sums: Tallied) -> dict[str, str | int]:
    info = at.resolved.info
    if not info.asks:
        return shipping.runs_on(at.resolved).told()
    off = {"put_off": sums.put_off} if sums.put_off and not info.bulk else {}
    return {"endpoint": info.asks, "at_once": 0 if info.bulk else sums.flying, **off}


def held_back(scored: Scored) -> Report:
    """The report of a run that has scored all rows, and that a gate holds back."""
    return replace(_so_far(scored, scored.sums), state="gate failed")


def finished(scored: Scored, whole: Whole) -> Report:
    """The report of a run that has published; `whole` is all of the live result."""
    report, own = _so_far(scored, scored.sums), scored.sums.figures
    time = sum(w.seconds for w in report.per_worker)
    figures = scored.receipts.sums.figures
    padded = figures.get("padded", 0.0)
    busy = own.get("model_seconds", 0.0) / max(SHORT, time)
    root = published(scored.root, scored.files).body.root
    return replace(
        report,
        state="done",
        details={**report.details, "root": root},
        counts=whole.counts,
        files=len(whole.live),
        bytes_out=whole.live.total("bytes"),
        model_seconds=figures.get("model_seconds", 0.0),
        busy=min(1.0, busy) if time >= SHORT else None,
        held_back=_held_back(own, time) if time >= SHORT else {},
        padding=1 - figures["tokens"] / padded if padded else None,
        tokens=int(figures["tokens"]) if figures.get("tokens") else None,
        errors={k: int(v) for k, v in whole.errors.items()},
    )


def untouched(at: Opened) -> Report:
    """The report of a run that found its result published."""
    result = published(at.root, at.files)
    body, live = result.body, result.live()
    return Report(
        sink=at.sink.uri,
        opened=(at.root, at.files),
        state="nothing to do",
        generation=body.generation,
        counts=Counts(*body.counts_list),
        shards=body.shards,
        shards_done=body.shards,
        shards_resumed=body.shards,
        seconds=at.log.seconds,
        model=body.model.name,
        digest=body.model.digest,
        workers=0,
        engine=at.spec.engine.name,
        files=len(live),
        bytes_out=sum(f.bytes for f in live),
        errors=body.errors,
        notes=tuple(at.log.notes),
        skipped=tuple(body.skipped),
        format=body.sink_format,
        details={**_registered(body.model.named), "root": body.root},
    )


def _held_back(figures: Mapping[str, float], total: float) -> dict[str, float]:
    """Shares of the workers' time (`total`, in seconds) in which the model was idle, by what it waited for."""
    waited = {what: figures.get(f"waited:{what}", 0.0) / max(total, 1e-9) for what in ("rows", "writing")}
    rest = 1 - figures.get("model_seconds", 0.0) / max(total, 1e-9) - sum(waited.values())
    return {**waited, "start and end": max(0.0, rest)}
