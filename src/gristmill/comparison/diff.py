"""What changed between two results, such as two nights: rows that are new, gone, or answered otherwise, joined as
`compare` joins them, and what differs of columns, model, code and input.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, field
from typing import Any, TextIO

import numpy as np
import pyarrow as pa

from gristmill.arrow.casts import lengths_of, lossless
from gristmill.arrow.rows import picked
from gristmill.arrow.topython import to_plain
from gristmill.commit.generation import generations, stored_inputs
from gristmill.commit.publication import Publication
from gristmill.comparison.choice import Chosen, compared, keys_of
from gristmill.comparison.compare import EXAMPLES, TOLERANCE, check_numbers
from gristmill.comparison.comparison import key_text, plain_values
from gristmill.comparison.join import Join
from gristmill.comparison.pairing import pairs
from gristmill.comparison.sameness import nulls, same
from gristmill.comparison.side import Side
from gristmill.comparison.tallies import floats, whole
from gristmill.errors import CorruptStore
from gristmill.fingerprint import digests
from gristmill.observe import units
from gristmill.observe.streams import PIPE_WIDTH, is_terminal, width_of
from gristmill.observe.tables import Table, cell
from gristmill.process.scratch import passing
from gristmill.values import dataclass

MOST_NAMED = 3  # files that are named, of those that are new, gone or written anew


@dataclass(frozen=True)
class Changed:
    """A row that is answered otherwise: its key, and both answers in each column that differs."""

    key: Mapping[str, Any]
    before: Mapping[str, Any]
    after: Mapping[str, Any]


@dataclass(frozen=True)
class Diff:
    """Two results, of which `b` is the later one, joined by the columns `on`. Rows are `new` in b, `gone` from a, or in
    both: `changed` or `same`; `columns` counts changed rows by column, and `about` tells, in lines, what differs but
    the rows. Examples are the first rows of each sort.
    """

    a: str
    b: str
    on: tuple[str, ...]
    rows_a: int
    rows_b: int
    new: int
    gone: int
    changed: int
    same: int
    columns: Mapping[str, int]
    about: tuple[str, ...]
    new_rows: tuple[Mapping[str, Any], ...] = ()
    gone_rows: tuple[Mapping[str, Any], ...] = ()
    changed_rows: tuple[Changed, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON, in which NaN and infinities are text, times ISO 8601, and bytes base64."""
        made: dict[str, Any] = plain_values(asdict(self))
        return made

    def __str__(self) -> str:
        """What the command line shows."""
        return "\n".join([*_head(self), *(line for t in _tables(self) for line in ["", t.plain(PIPE_WIDTH)])])


def diff(
    a: Side,
    b: Side,
    on: Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
    *,
    tolerance: float = TOLERANCE,
    examples: int = EXAMPLES,
) -> Diff:
    """What changed from one result to another: see `gm.diff`. Raises BadJob and BadSource."""
    check_numbers(tolerance, examples)
    keys = keys_of(a, b, on)
    chosen, left_out = compared(a, b, tuple(keys), columns)
    with passing() as folder, Join(a, b, keys, folder) as join:
        tally = _Tally(tuple(keys), chosen, tolerance, examples)
        names = [c.name for c in chosen]
        for ours, theirs in pairs(a, b, join, ((*keys, *names), names), folder):
            tally.add(ours, theirs)
        gone, gone_rows = join.alone("a", examples)
        new, new_rows = join.alone("b", examples)
        about = (*_columns(a, b), *_jobs(a.result, b.result), *_inputs(a.result, b.result))
        return Diff(
            a.name, b.name, tuple(keys), a.count, b.count, new, gone, tally.changed, join.matched - tally.changed,
            dict(tally.counts), about, tuple(new_rows), tuple(gone_rows), tuple(tally.examples), left_out,
        )  # fmt: skip


class _Tally:
    """Rows that differ in some column, while pairs of rows go by."""

    def __init__(self, keys: tuple[str, ...], chosen: Sequence[Chosen], tolerance: float, most: int) -> None:
        self._keys, self._chosen, self._tolerance, self._most = keys, chosen, tolerance, most
        self.changed = 0
        self.counts = Counter({c.name: 0 for c in chosen})
        self.examples: list[Changed] = []

    def add(self, ours: pa.Table, theirs: pa.Table) -> None:
        differ = {c.name: ~_alike(c, ours.column(c.name), theirs.column(c.name), self._tolerance) for c in self._chosen}
        anywhere = np.logical_or.reduce([*differ.values(), np.zeros(ours.num_rows, dtype=bool)])
        self.changed += int(anywhere.sum())
        for name, found in differ.items():
            self.counts[name] += int(found.sum())
        at = np.flatnonzero(anywhere)[: self._most - len(self.examples)]
        if len(at):
            keys = [to_plain(picked(ours.column(name), at)) for name in self._keys]
            values = {
                c.name: tuple(to_plain(picked(whole(t.column(c.name)), at)) for t in (ours, theirs))
                for c in self._chosen
            }
            for i, row in enumerate(at.tolist()):
                names = [name for name, found in differ.items() if found[row]]
                before, after = ({name: values[name][side][i] for name in names} for side in (0, 1))
                self.examples.append(Changed(dict(zip(self._keys, (k[i] for k in keys), strict=True)), before, after))


def _alike(chosen: Chosen, a: pa.ChunkedArray, b: pa.ChunkedArray, tolerance: float) -> np.ndarray:
    """Whether answers are the same, or numbers no further apart than the tolerance, in vectors each of them."""
    one, other = whole(a), whole(b)
    if chosen.kind == "numbers":
        return same_numbers(one, other, tolerance)
    if chosen.kind != "vectors":
        return same(lossless(one, chosen.type), lossless(other, chosen.type))
    alike = nulls(one) & nulls(other)
    at = np.flatnonzero(~nulls(one) & ~nulls(other) & (lengths_of(one) == lengths_of(other)))
    x, y = picked(one, at), picked(other, at)
    inner = same_numbers(x.flatten(), y.flatten(), tolerance)
    ends = np.cumsum(lengths_of(x))
    wrong = np.concatenate(([0], np.cumsum(~inner)))
    alike[at] = wrong[ends] == wrong[ends - lengths_of(x)]
    return np.asarray(alike)


def same_numbers(one: pa.Array, other: pa.Array, tolerance: float) -> np.ndarray:
    """Whether numbers are no further apart; null is as null, and NaN as NaN."""
    x, y, none, none_there = floats(one), floats(other), nulls(one), nulls(other)
    with np.errstate(over="ignore", invalid="ignore"):
        near = (x == y) | (np.isnan(x) & np.isnan(y)) | (np.abs(x - y) <= tolerance)
    return np.asarray(np.where(none | none_there, none & none_there, near))


# ---------------------------------------------------------------- what differs but the rows


def _columns(a: Side, b: Side) -> Iterator[str]:
    for name in dict.fromkeys([*a.schema.names, *b.schema.names]):
        kinds = [side.schema.field(name).type if name in side.schema.names else None for side in (a, b)]
        if kinds[0] is None:
            yield f"column: {name} is new ({kinds[1]})"
        elif kinds[1] is None:
            yield f"column: {name} is gone (was {kinds[0]})"
        elif kinds[0] != kinds[1]:
            yield f"column: {name} was {kinds[0]}, is {kinds[1]}"


def _jobs(a: Publication, b: Publication) -> Iterator[str]:
    """What differs of model, options and code."""
    one, other = (r.body.model.named for r in (a, b))
    if [m.label for m in one] != [m.label for m in other]:
        was, now = (" and ".join(map(str, r.body.model.named)) or r.body.model.name for r in (a, b))
        yield f"model: was {was}, is {now}"
    elif not one and a.body.model.name != b.body.model.name:
        yield f"model: was {a.body.model.name}, is {b.body.model.name}"
    yield from digests.between(a.body.fingerprint, b.body.fingerprint)


def _inputs(a: Publication, b: Publication) -> Iterator[str]:
    """Which files of the source are new, gone, or were written anew."""
    one, other = (_files_read(r) for r in (a, b))
    if one is None or other is None:
        yield "input: a plan is damaged, so that the files that were read are not known"
        return
    told = {
        "new": [p for p in other if p not in one],
        "gone": [p for p in one if p not in other],
        "written anew": [p for p in one if p in other and _content(one[p]) != _content(other[p])],
    }
    for what, paths in told.items():
        if paths:
            more = ", …" if len(paths) > MOST_NAMED else ""
            yield f"input: {units.plural(len(paths), 'file')} {what}: {', '.join(paths[:MOST_NAMED])}{more}"


def _content(digest: str) -> Any:
    return json.loads(digest)[:3]


def _files_read(result: Publication) -> dict[str, str] | None:
    found: dict[str, str] = {}
    try:
        for g in generations(result.root, result.files):
            if g.number in result.generations and g.kind != "retry-dead":
                found |= stored_inputs(g)
    except (CorruptStore, FileNotFoundError):
        return None
    return found


# ---------------------------------------------------------------- as text


def show(found: Diff, stream: TextIO) -> None:
    """Write a diff for a person. Raises what writing to the stream raises."""
    stream.write("\n".join(_head(found)) + "\n")
    for table in _tables(found):
        stream.write("\n")
        if is_terminal(stream):
            table.show(stream)
        else:
            stream.write(table.plain(width_of(stream)) + "\n")


def _head(found: Diff) -> list[str]:
    lines = [f"{name:<10}{text}" for name, text in (("a", found.a), ("b", found.b), ("by", ", ".join(found.on)))]
    counts = (
        ("same", found.same, ()), ("changed", found.changed, ()), ("new", found.new, found.new_rows),
        ("gone", found.gone, found.gone_rows),
    )  # fmt: skip
    figure = max(len(units.count(n)) for _, n, _ in counts)
    for name, n, keys in counts:
        told = [key_text(key) for key in keys] + (["…"] if n > len(keys) > 0 else [])
        lines.append(f"{name:<10}{units.count(n):>{figure}}  {'; '.join(told)}".rstrip())
    lines += [f"left out  {name}: {why}" for name, why in found.left_out.items()]
    return [*lines, *found.about]


def _tables(found: Diff) -> list[Table]:
    tables = []
    if found.changed:
        counts = tuple((name, units.count(n)) for name, n in found.columns.items())
        tables.append(Table(("column", "changed"), counts, frozenset({1})))
    if found.changed_rows:
        rows = [
            (key_text(c.key) if n == 0 else "", name, cell(c.before[name]), cell(c.after[name]))
            for c in found.changed_rows
            for n, name in enumerate(c.before)
        ]
        tables.append(Table(("row", "column", "a", "b"), tuple(rows), title="rows that are answered otherwise"))
    return tables
