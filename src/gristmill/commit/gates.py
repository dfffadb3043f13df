"""Gates: what must hold before anything is published. Pure checks of counts; the caller decides what follows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import field
from typing import Any

import pyarrow as pa

from gristmill.errors import BadSource, GateFailed
from gristmill.job.options import Gates
from gristmill.process.contained import called
from gristmill.shards.counts import Counts
from gristmill.sinks.formats import sink_format
from gristmill.values import dataclass

MANY = 100  # rows of which an append has to add some: with fewer, a condition may well have left out all of them
MARGIN = 10  # times as many rows as are foretold may be there


@dataclass(frozen=True)
class Staged:
    """What `audit=` hooks are given: the result as it would be published, before it is. For an append or a retry that
    is the whole result: what was published before and what is added.

    `paths` are the files of its rows, and `ids` those of the other columns beside an npy sink's vectors, one for each;
    `filesystem` is the pyarrow file system that opens them. With `merge`, `files` or
    `partition_by` these are the parts, which are joined afterwards.
    """

    counts: Counts
    paths: tuple[str, ...]
    ids: tuple[str, ...]
    schema: pa.Schema
    format: str
    filesystem: Any
    rows: Callable[[], Any] = field(repr=False)

    def dataset(self) -> Any:
        """The result as a pyarrow Dataset, as `gm.read` will give it. Raises BadSource for an npy sink, which has no
        tables.
        """
        if not sink_format(self.format).tables:
            raise BadSource(
                "an npy sink has no tables to give an audit a dataset of: numpy.load the files in `paths`, in that "
                "order; those in `ids` are Parquet files of the other columns, one for each"
            )
        return self.rows()


def worst(errors: Mapping[str, float]) -> str:
    """The three most frequent errors as " (KeyError: 12, …)"; "" if there are none."""
    top = sorted(errors.items(), key=lambda kv: -kv[1])[:3]
    return " (" + ", ".join(f"{name}: {int(count)}" for name, count in top) + ")" if top else ""


def _why(errors: Mapping[str, float]) -> str:
    """The worst errors, and what to do about NaN or infinite answers and about rows with nulls."""
    keep = (
        "; rows with NaN or infinite answers are published with on_nan keep (--on-nan keep, on_nan='keep'), which "
        "makes it another job"
    )
    told = keep if {"NaN", "Infinite"} & errors.keys() else ""
    if {"NullText", "NullFeature", "NullColumn"} & errors.keys():
        handled = "" if "NullText" in errors else ", or given to a model that handles them with on_null keep"
        told += (
            f"; rows with nulls are left out with on_null skip (--on-null skip, on_null='skip'){handled}; that makes "
            "it another job"
        )
    return worst(errors) + told


def account(counts: Counts, planned: int | None) -> None:
    """The exact accounting that is always on. Raises GateFailed if there are too few rows or too many."""
    wrong = counts.discrepancy()
    if wrong is None and planned is not None and planned != counts.rows_in:
        wrong = f"{planned} rows planned, {counts.rows_in} accounted for"
    if wrong is not None:
        raise GateFailed(f"the counts do not add up: {wrong}; nothing was published", gates=["counts"])


def early(
    gates: Gates, counts: Counts, planned: int, errors: Mapping[str, float], look: str, *, exact: bool = True
) -> None:
    """Raises GateFailed as soon as min_ok can no longer hold, whatever the rest of the `planned` rows may be: so many,
    or if that is not `exact`, far more than there seem to be. `look` says how dead rows can be read.
    """
    dead = counts.all_dead
    possible = planned - counts.filtered - counts.derived_filtered
    if possible > 0 and dead > gates.allowed(possible):
        scored = counts.ok + dead
        hold = "can no longer hold" if exact else "can hardly hold any more"
        what = f"{hold}: {dead:,} of {scored:,} rows so far ({dead / scored:.1%}) are dead letters"
        rest = possible - scored
        whole = f"all {possible:,}" if exact else f"{possible:,}, {MARGIN} times the rows that there seem to be,"
        most = f", and at most {gates.allowed(possible):,} of {whole} may be" if rest > 0 else ""
        ways = _way_out(look, dead, scored, rest)
        raise GateFailed(f"min_ok {gates.min_ok} {what}{most}{_why(errors)}; {ways}", gates=["min_ok"])


def final(gates: Gates, counts: Counts, errors: Mapping[str, float], look: str, adds: bool = False) -> None:
    """Raises GateFailed if the result is empty or too few rows were scored. `look` as for `early`. A run that `adds` to
    a result may add nothing at all: a file without rows, or a few rows that are all filtered out.
    """
    dead = counts.all_dead
    scored = counts.ok + dead
    if counts.ok == 0 and not gates.allow_empty and not (adds and not dead and counts.rows_in < MANY):
        left = ": all were filtered out" if counts.rows_in and not dead else _why(errors)
        none = f"none of {counts.rows_in} rows was scored{left}"
        why = "the source has no rows" if counts.rows_in == 0 else none
        shown = f"{look}; " if dead else ""
        ways = "--allow-empty, gates: {allow_empty: true}; or --accept, accept=True"
        raise GateFailed(f"{why}; nothing was published ({shown}{ways})", gates=["allow_empty"])
    if dead > gates.allowed(scored):
        what = f"does not hold: {counts.ok} of {scored} rows were scored, {dead} are dead letters"
        ways = _way_out(look, dead, scored)
        raise GateFailed(f"min_ok {gates.min_ok} {what}{_why(errors)}; {ways}", gates=["min_ok"])


def _way_out(look: str, dead: int, rows: int, rest: int = 0) -> str:
    """What to do about this many dead rows among those scored so far, with `rest` rows still to come."""
    lower, when = (rows - dead) * 100 // rows / 100, ""
    if rest > 0:  # the rest may do worse by chance (two standard deviations)
        share = dead / rows
        lower = max(0, math.floor(100 * (1 - share - 2 * math.sqrt(share * (1 - share) / rows)))) / 100
        when = ", if the others fail as often,"
    return (
        f"nothing new was published ({look}; --accept, accept=True, publishes it anyway; a lower gate is{when} "
        f"--min-ok {lower}, gates: {{min_ok: {lower}}})"
    )


def warning(gates: Gates, counts: Counts, errors: Mapping[str, float]) -> str | None:
    """A sentence if the share of dead rows is over warn_failed."""
    dead = counts.all_dead
    scored = counts.ok + dead
    return told(counts, errors) if scored and dead / scored > gates.warn_failed else None


def told(counts: Counts, errors: Mapping[str, float]) -> str:
    """How many rows are dead letters, as a sentence."""
    dead = counts.all_dead
    return f"{dead} of {counts.ok + dead} rows ({dead / (counts.ok + dead):.2%}) are dead letters{worst(errors)}"


def refusals(hooks: Iterable[Any], staged: Staged) -> Iterator[str]:
    """Pass the staged result to every hook. Yields the refusals with their reasons: a hook refuses by raising, or by
    returning something false other than None.
    """
    for hook in hooks:
        name = getattr(hook, "__qualname__", repr(hook))
        try:
            refused = f"audit {name} refused the result" if called(hook, staged, use=_refuses) else None
        except Exception as e:
            refused = f"audit {name} refused the result: {type(e).__name__}: {e}"
        if refused is not None:
            yield refused


def _refuses(answer: Any) -> bool:
    value = answer.as_py() if hasattr(answer, "as_py") else answer  # pyarrow's: a null counts, too
    return answer is not None and not value
