"""How far the values of a result have drifted, as its report shows it: the last figures, the shares of values on both
sides, and the figures of the generations before, which the records of runs keep.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gristmill.commit import publication
from gristmill.commit.documents import Drifted
from gristmill.commit.publication import Publication
from gristmill.commit.receipt import standing
from gristmill.driver import drifting
from gristmill.observe.facts import MOST_NIGHTS, Drift, Run
from gristmill.process.extras import installed
from gristmill.profiles.measures import bins
from gristmill.profiles.profile import ColumnProfile, Profile, summed
from gristmill.result.reading import unfinished

MOST_BINS = 24  # of a category: the most frequent ones


def plots(latest: Publication | None, runs: Sequence[Run]) -> tuple[Drift, ...]:
    """A plot for each column that the last run which compared any has compared."""
    compared = [run for run in runs if run.drift]
    if not compared:
        return ()
    last = compared[-1]
    sides = _sides(latest, last)
    return tuple(
        _plot(column, [d for d in last.drift if d.column == column], sides, compared[-MOST_NIGHTS:])
        for column in dict.fromkeys(d.column for d in last.drift)
    )


def _sides(latest: Publication | None, run: Run) -> tuple[Mapping[str, ColumnProfile], Mapping[str, ColumnProfile]]:
    """The profiles of the columns of the result that this run published, or has staged, and of the one before, if it
    was held against that and both are kept.
    """
    if latest is not None and (staged := _staged(latest, run)) is not None:
        return (drifting.profile_of(latest, ()) or Profile()).columns, staged.columns
    if latest is None or latest.generation != run.generation or run.state != "done" or not installed("datasketches"):
        return {}, {}
    before = publication.load(latest.root, latest.before, latest.files)
    if before is None or f"(generation {before.generation})" not in run.drift[0].against:
        return {}, {}
    then, now = (drifting.profile_of(one, ()) or Profile() for one in (before, latest))
    return then.columns, now.columns


def _staged(latest: Publication, run: Run) -> Profile | None:
    """The profile of the rows that a gate holds back."""
    begun = unfinished(latest.root, latest.files)
    if begun is None or begun.number != run.generation or run.state == "done" or not installed("datasketches"):
        return None
    if f"(generation {latest.generation})" not in run.drift[0].against:
        return None
    return summed(one.profile for one in standing(begun.receipts, latest.files).values())


def _plot(
    column: str,
    figures: Sequence[Drifted],
    sides: tuple[Mapping[str, ColumnProfile], Mapping[str, ColumnProfile]],
    runs: Sequence[Run],
) -> Drift:
    measure = figures[0].measure
    past = {  # of a generation that was accepted after a look, once
        run.generation: (run.generation, d.figure, d.verdict)
        for run in runs
        for d in run.drift
        if (d.column, d.measure) == (column, measure)
    }
    then, now = (side.get(column) for side in sides)
    found = None if then is None or now is None else bins(then, now)
    if found is None:
        return Drift(column, tuple(figures), past=tuple(past.values()))
    names, before, after = found
    order = sorted(range(len(names)), key=lambda i: -max(before[i], after[i]))[:MOST_BINS]
    kept = sorted(order) if len(names) > MOST_BINS else range(len(names))
    return Drift(
        column, tuple(figures), tuple(names[i] for i in kept), tuple(float(before[i]) for i in kept),
        tuple(float(after[i]) for i in kept), tuple(past.values()),
    )  # fmt: skip
