"""The report of a sink for a terminal: the facts of its page, as labels and texts."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping

from gristmill.observe import units
from gristmill.observe.facts import Kind, Night, Run, SinkFacts
from gristmill.observe.page import clock, short
from gristmill.observe.report import asked
from gristmill.observe.standing import Line, staged_lines, standing_lines

MOST_RUNS, MOST_SLOW = 5, 3


def lines(facts: SinkFacts) -> list[Line]:
    """All that is known, in the order of the page."""
    return [*_state(facts), *_counts(facts), *_errors(facts), *_work(facts), *_made_of(facts)]


def _state(facts: SinkFacts) -> Iterator[Line]:
    yield "sink", facts.sink
    yield from standing_lines(facts.standing)
    yield from staged_lines(facts.sink, facts.now)
    yield from (("incident", f"{one.kind} since {clock(one.since)}: {one.text}") for one in facts.incidents)


def _counts(facts: SinkFacts) -> Iterator[Line]:
    yield from ((name, f"{figure}  {remark}".rstrip()) for name, figure, remark in facts.rows)
    if facts.nights and facts.nights[-1].used:
        yield "asked", asked(facts.nights[-1].used)
    yield from ((f"gen. {night.generation}", _night(night)) for night in reversed(facts.nights))
    for d in facts.drift:
        yield "drift", f"{d.column}: " + ", ".join(f"{g.measure} {g.figure:.3g} ({g.verdict})" for g in d.figures)


def _night(night: Night) -> str:
    counts = f"{night.rows_ok:,} ok, {night.rows_dead:,} dead, {night.rows_filtered:,} filtered"
    model = f"{night.model} {short(night.digest)}".rstrip()
    if night.updated:
        counts += f" ({', '.join(f'{n:,} {name}' for name, n in night.updated.items())})"
    took = f"{units.seconds(night.seconds)}{f' ({asked(night.used)})' if night.used else ''}"
    return f"{night.published[:16].replace('T', ' ')}  {counts}, in {took}, {model}"


def _errors(facts: SinkFacts) -> Iterator[Line]:
    yield from (("error", _kind(kind)) for kind in facts.kinds)
    if facts.letters:
        yield "errors", facts.letters


def _kind(kind: Kind) -> str:
    first = f": {kind.examples[0].where}: {kind.examples[0].message}" if kind.examples else ""
    return f"{kind.error}, {units.plural(kind.rows, 'row')}{first}"


def _work(facts: SinkFacts) -> Iterator[Line]:
    run = facts.last
    if run is not None:
        yield from _times(run)
        for s in run.slowest[:MOST_SLOW]:
            took = f"shard {s.shard}: {units.seconds(s.seconds)}, {units.plural(s.rows, 'row')}"
            yield "slow", f"{took}, {s.source} {s.start:,}-{s.stop:,}"
        for w in run.per_worker:
            name = f"{w.worker} {w.host}".rstrip()
            yield "worker", f"{name}: {units.short_rate(w.rows_per_second)}, {units.plural(w.rows, 'row')}"
    yield from (("run", _run(one)) for one in facts.runs[::-1][:MOST_RUNS])


def _times(run: Run) -> Iterator[Line]:
    """Where the time went: the phases of the run, and the work of each thread of its workers, with its share of their
    time together. Each line adds up to its first figure.
    """
    if run.phases:
        yield "time", f"{_seconds(sum(run.phases.values()))}: {_parts(run.phases)}"
    for name, took in run.threads.items():
        yield f"  {name}", f"{_seconds(sum(took.values()))}: {_parts(took)}"


def _parts(took: Mapping[str, float]) -> str:
    total = sum(took.values()) or 1.0
    waits = [what for what in took if what.startswith("waiting")]  # last, as what is left
    shown = [*(what for what in took if what not in waits), *waits]
    return ", ".join(f"{what} {_seconds(took[what])} ({took[what] / total:.0%})" for what in shown)


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds < 100 else units.seconds(seconds)


def _run(one: Run) -> str:
    why = f": {one.error}" if one.error else ""
    took = one.state  # one that was killed did not say after how long, and how many rows
    if one.seconds:
        took = f"{one.state} after {units.seconds(one.seconds)}, {units.plural(one.rows, 'row')}"
    return f"{clock(one.started)}  {took}{why}"


def _made_of(facts: SinkFacts) -> Iterator[Line]:
    yield from ((name, text) for name, text in facts.digests if not name.startswith(("code ", "option ")))
    yield from (("delivered", text) for text in facts.deliveries)
    run = facts.last
    if run is not None and run.command:
        yield "again", f"cd {shlex.quote(run.folder)} && {shlex.join(run.command)}"
