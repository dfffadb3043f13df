"""Comparing two results: choose keys and columns, join the rows, and tally pairs of rows as they go by."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from typing import Any

from gristmill.comparison.choice import Chosen, compared, keys_of
from gristmill.comparison.comparison import Comparison, share
from gristmill.comparison.join import Join
from gristmill.comparison.pairing import pairs
from gristmill.comparison.side import Side
from gristmill.comparison.tallies import Tally, Worst, tally_of
from gristmill.errors import BadJob, GateFailed
from gristmill.observe import units
from gristmill.process.scratch import passing

TOLERANCE = 1e-5  # within which one float32 model on two machines or backends answers the same
EXAMPLES = 5


def check_numbers(tolerance: float, examples: int) -> None:
    """Raises BadJob for numbers that no comparison can have."""
    check_number("tolerance", tolerance, math.inf, "a number of at least 0")
    check_number("examples", examples, math.inf, "a whole number of at least 0", int)


def compare(
    a: Side,
    b: Side,
    on: Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
    *,
    tolerance: float = TOLERANCE,
    examples: int = EXAMPLES,
    min_agreement: float | None = None,
) -> Comparison:
    """Two results held against each other: see `gm.compare`. `min_agreement` is looked at by `check`, but refused here,
    before anything is read. Raises BadJob and BadSource.
    """
    check_numbers(tolerance, examples)
    if min_agreement is not None:
        check_number("min_agreement", min_agreement, 1, "a number from 0 to 1, such as 0.95")
    keys = keys_of(a, b, on)
    chosen, left_out = compared(a, b, tuple(keys), columns)
    with passing() as folder, Join(a, b, keys, folder) as join:
        tallies = _tallied(a, b, join, tuple(keys), chosen, folder, tolerance, examples)
        only_a, missing_in_b = join.alone("a", examples)
        only_b, missing_in_a = join.alone("b", examples)
        return Comparison(
            a.name, b.name, tuple(keys), a.count, b.count, join.matched, only_a, only_b, tuple(missing_in_b),
            tuple(missing_in_a), tuple(tally.column() for tally in tallies), left_out,
        )  # fmt: skip


def check_number(name: str, value: Any, most: float, way: str, *kinds: type) -> None:
    """Raises BadJob for an option that is no number from 0 to `most`."""
    number = isinstance(value, kinds or (int, float)) and not isinstance(value, bool)
    if not number or not 0 <= value <= most or math.isinf(value):
        raise BadJob(f"--{name.replace('_', '-')} ({name}=) is {value!r}: give {way}")


def _tallied(
    a: Side, b: Side, join: Join, keys: tuple[str, ...], chosen: Sequence[Chosen], folder: str, tolerance: float,
    examples: int,
) -> list[Tally]:  # fmt: skip
    names = [c.name for c in chosen]
    inputs = _inputs(a, {*keys, *names})
    tallies = [
        tally_of(c, Worst(examples, keys, inputs), os.path.join(folder, f"column-{i}"), tolerance)
        for i, c in enumerate(chosen)
    ]
    for ours, theirs in pairs(a, b, join, ((*keys, *names, *inputs), names), folder):
        for tally in tallies:
            tally.add(ours.column(tally.chosen.name), theirs.column(tally.chosen.name), ours)
    return tallies


def _inputs(a: Side, used: set[str]) -> tuple[str, ...]:
    """The columns kept of what the model of `a` read, for examples: its text, or what its prompt names."""
    text, prompt = a.option("model.text"), str(a.option("model.prompt") or "")
    return tuple(
        name
        for name in a.schema.names
        if name not in used and (name == text or re.search(rf"(?<!\w){re.escape(name)}(?!\w)", prompt))
    )


def check(found: Comparison, least: float | None) -> None:
    """Raises GateFailed, with the comparison as its `report`, if a column's agreement is less than `least`."""
    if least is None or not (wrong := found.below(least)):
        return
    if not found.matched:
        raise GateFailed(f"no row of {found.a} is in {found.b}: nothing agrees", report=found)
    told = ", ".join(f"{c.name} {share(c.agreement)}" for c in wrong)
    raise GateFailed(
        f"agreement of {told} in {units.plural(found.matched, 'row')}: at least {share(least)} was asked for",
        report=found,
    )
