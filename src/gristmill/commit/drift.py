"""Gates that compare what is about to be published with an earlier result: rows, columns, nulls, and the values of the
columns that a job names. Pure checks of counts and profiles; the caller decides what follows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from gristmill.commit.documents import Drifted
from gristmill.errors import BadJob, did_you_mean
from gristmill.job.drift import Limits, limits_of, measures_of
from gristmill.job.options import Gates
from gristmill.profiles.columns import kind_of
from gristmill.profiles.measures import MEASURES
from gristmill.profiles.profile import ColumnProfile, Profile
from gristmill.values import dataclass

FEW = 100  # rows under which shares of rows and of nulls are not compared: a few rows may be anything


@dataclass(frozen=True)
class Side:
    """One of the two results that are compared: what messages call it, its rows, columns and profile, if that is known.
    `added` are the rows that its last run added to it; None if that made all of it.
    """

    name: str
    rows: int
    schema: pa.Schema
    profile: Profile | None
    added: int | None = None


@dataclass(frozen=True)
class Finding:
    """Something that is not as it was before, as a sentence; with `failed`, nothing may be published. `gates` names
    what does not hold; `drifts` is whether that is the drift of values.
    """

    text: str
    failed: bool = False
    gates: tuple[str, ...] = ()
    drifts: bool = False


def of_rows(gates: Gates, before: Side, now: Side) -> Iterator[Finding]:
    """Far fewer rows than before, or far more. Those that a run adds are compared with those that the last one added,
    which is for a warning only: what comes every night is not alike.
    """
    added = now.added is not None
    rows, then = (now.added, before.added) if added else (now.rows, before.rows)
    if rows is None or then is None or then < FEW:
        return
    few = rows < gates.min_rows * then
    what = f"{rows:,} rows{' are added' if added else ''}, and {before.name} {'added' if added else 'has'} {then:,}"
    if few and not added:
        yield Finding(f"min_rows {gates.min_rows:g} does not hold: {what}", True, ("min_rows",))
    elif few or (not added and (rows < gates.warn_rows * then or gates.warn_rows * rows > then)):
        yield Finding(what)


def of_columns(before: Side, now: Side) -> Iterator[Finding]:
    """Columns that are gone, or of another type."""
    gone = [n for n in before.schema.names if n not in now.schema.names]
    if gone:
        yield Finding(f"column {gone[0]!r} is gone, which {before.name} has{_others(gone)}")
    both = [n for n in before.schema.names if n in now.schema.names and _of(before, n) != _of(now, n)]
    if both:
        first = f"column {both[0]!r} is {_of(now, both[0])}"
        yield Finding(f"{first}, and was {_of(before, both[0])} in {before.name}{_others(both)}")


def of_nulls(gates: Gates, before: Side, now: Side) -> Iterator[Finding]:
    """Columns with a larger share of nulls than before."""
    old, new = before.profile, now.profile
    if old is None or new is None or old.rows < FEW or new.rows < FEW:
        return
    risen = {n: new.null_share(n) - old.null_share(n) for n in new.nulls if n in old.nulls and n in now.schema.names}
    for failed in (True, False):
        limit = gates.max_nulls if failed else gates.warn_nulls
        worst = sorted((n for n in risen if risen[n] > limit), key=lambda n: -risen[n])
        if worst:
            name = worst[0]
            shares = f"{new.null_share(name):.1%} of column {name!r} are null, and {old.null_share(name):.1%} were"
            held = f"max_nulls {limit:g} does not hold: " if failed else ""
            yield Finding(
                f"{held}{shares} in {before.name}{_others(worst)}", failed, tuple(f"max_nulls of {n}" for n in worst)
            )
            return


def _of(side: Side, name: str) -> pa.DataType:
    return side.schema.field(name).type


def _others(names: list[str]) -> str:
    return f"; so are {', '.join(names[1:6])}{', …' * (len(names) > 6)}" if len(names) > 1 else ""


# ---------------------------------------------------------------- values


def check(drift: Mapping[str, Any] | None, columns: Mapping[str, pa.DataType | None]) -> None:
    """Raises BadJob if a job wants to compare a column that its rows do not have, or in a way that the column's type
    has not. A type may be unknown (None).
    """
    for name, said in limits_of(drift).items():
        if name not in columns:
            raise BadJob(
                f"gates.drift names column {name!r}, which is neither written nor read: there are {', '.join(columns)}"
                f"{did_you_mean(name, columns)}"
            )
        if (kind := columns[name]) is not None and not pa.types.is_null(kind):
            measures_of(name, said, kind_of(kind))


def of_values(gates: Gates, before: Profile, now: Profile, name: str) -> Iterator[Drifted]:
    """How far the columns that a job names are from those before (the result called `name`), measure by measure."""
    for column, said in limits_of(gates.drift).items():
        if column in before.columns and column in now.columns:
            pair = before.columns[column], now.columns[column]
            for measure, limits in _measures(column, said, pair):
                found = MEASURES[measure](*pair)
                if found is not None:
                    beyond = [limits.beyond(found.figure, limit, found.chance) for limit in (limits.warn, limits.fail)]
                    verdict = "failed" if beyond[1] else "warned" if beyond[0] else "held"
                    about = (found.figure, limits.warn, limits.fail, found.chance)
                    yield Drifted(column, measure, *about, verdict, name, found.about)  # type: ignore[arg-type]


def _measures(
    column: str, said: Mapping[str, Limits] | None, pair: tuple[ColumnProfile, ColumnProfile]
) -> list[tuple[str, Limits]]:
    """What is measured of a column; one that has become of another kind has nothing but nulls in common."""
    kinds = {one.kind for one in pair if one.held or one.kind != "other"}
    alike = len(kinds) == 1 or kinds == {"whole", "number"}
    kind = next(iter(sorted(kinds))) if alike else "other"
    known = (
        measures_of(column, said, kind) if alike or said is None else {n: v for n, v in said.items() if n == "nulls"}
    )
    return list(known.items())


def of_drift(figures: Sequence[Drifted]) -> Iterator[Finding]:
    """The measures that are beyond a limit, those that failed and those that warn in a sentence each."""
    for verdict in ("failed", "warned"):
        some = [_told(d) for d in figures if d.verdict == verdict]
        if some:
            text = f"drift from {figures[0].against}: {'; '.join(some)}"
            yield Finding(text, verdict == "failed", _names(figures, verdict), drifts=True)


def warned(figures: Sequence[Drifted]) -> tuple[str, ...]:
    """What is told of figures that are beyond a limit, and are published all the same."""
    return _names(figures, "warned", "failed")


def refused(figures: Sequence[Drifted]) -> tuple[str, ...]:
    """What is told of figures of which some are refused: more than that they are beyond a limit."""
    return (*(f"refused {name}" for name in _names(figures, "failed")), *warned(figures))


def _names(figures: Sequence[Drifted], *verdicts: str) -> tuple[str, ...]:
    return tuple(f"{d.measure} of {d.column}" for d in figures if d.verdict in verdicts)


def _told(found: Drifted) -> str:
    """`score: psi 0.41 (limit 0.25)`."""
    limit = found.fail if found.verdict == "failed" else found.warn
    more = f"; {found.about}" if found.about else ""
    return f"{found.column}: {found.measure} {found.figure:.3g} (limit {limit:g}{more})"


def unknown(gates: Gates, before: Profile, now: Profile) -> list[str]:
    """Columns that a job names and of whose values one of the profiles knows nothing."""
    return [n for n in gates.drift or () if n not in before.columns or n not in now.columns]
