"""What a comparison of two results found, as frozen values; and the same as text."""

from __future__ import annotations

import base64
import datetime
import math
from collections.abc import Mapping, Sequence
from dataclasses import field, fields, is_dataclass
from typing import Any, Literal, TextIO

import numpy as np

from gristmill.observe import units
from gristmill.observe.streams import PIPE_WIDTH, is_terminal, width_of
from gristmill.observe.tables import Table, cell, clean, columns
from gristmill.values import dataclass

TEXT_WIDTH = 120  # columns of a comparison as text
MOST_SHOWN = 8  # labels of a confusion table; the others are one line and one column
KEY_WIDTH = 200  # columns of a value of a key
LABEL_WIDTH = 16  # columns of a label in a confusion table

Kind = Literal["labels", "numbers", "vectors", "values"]


@dataclass(frozen=True)
class Example:
    """A row whose answers differ: its key, both answers, how far apart they are (absolute difference of numbers, cosine
    of vectors; None if there is none), and the columns kept of what the model read. Vectors are left out.
    """

    key: Mapping[str, Any]
    a: Any
    b: Any
    difference: float | None = None
    inputs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Labels:
    """How often each label of one result stands beside each of the other: (a, b, rows), the most frequent first; null
    is a label. `kappa` is Cohen's, None if there is only one label.
    """

    pairs: tuple[tuple[Any, Any, int], ...]
    kappa: float | None


@dataclass(frozen=True)
class Numbers:
    """Absolute differences of the rows in which both numbers are finite (`compared`); None without such rows.

    `within` counts rows no further apart than `tolerance`, or the same: null beside null, NaN beside NaN, one infinity
    beside itself. `infinite` are rows with an infinity, and no NaN or null. `correlation` is Pearson's; None if it does
    not exist, as when a side does not vary.
    """

    compared: int
    mean: float | None
    median: float | None
    max: float | None
    correlation: float | None
    tolerance: float
    within: int
    nan_only_a: int
    nan_only_b: int
    nan_both: int
    infinite: int


@dataclass(frozen=True)
class Vectors:
    """Cosines of the rows in which both vectors have one (`compared`); None without such rows. `quantiles` by share:
    0.01 is the cosine below which one row in a hundred lies. `undefined` are rows of two vectors without a cosine: of
    different lengths (`lengths_differ`), of length zero, or not finite.
    """

    compared: int
    mean: float | None
    min: float | None
    quantiles: Mapping[float, float]
    undefined: int
    lengths_differ: int


@dataclass(frozen=True)
class Column:
    """One column of the rows in both results. `equal` counts rows that are the same exactly.

    `agreement`, 0 to 1, is the share of rows with the same label or value, or of numbers within the tolerance; of
    vectors the mean cosine, in which a row that has none counts 1 if both are the same, else 0. None without rows.

    `kind` "values" are compared for equality alone: nested ones, times, bytes, and texts or whole numbers of too many
    sorts to be labels.
    """

    name: str
    kind: Kind
    types: tuple[str, str]
    rows: int
    equal: int
    agreement: float | None
    null_only_a: int
    null_only_b: int
    null_both: int
    measured: Labels | Numbers | Vectors | None
    examples: tuple[Example, ...]


@dataclass(frozen=True)
class Comparison:
    """Two results, joined by the key columns `on`. `matched` rows are in both; `only_a` and `only_b` count the others,
    and `missing_in_b` and `missing_in_a` are the first keys of these. `left_out` names columns that could not be
    compared, with the reason.
    """

    a: str
    b: str
    on: tuple[str, ...]
    rows_a: int
    rows_b: int
    matched: int
    only_a: int
    only_b: int
    missing_in_b: tuple[Mapping[str, Any], ...]
    missing_in_a: tuple[Mapping[str, Any], ...]
    columns: tuple[Column, ...]
    left_out: Mapping[str, str] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Column:
        """A column by its name. Raises KeyError."""
        return {c.name: c for c in self.columns}[name]

    def below(self, share: float) -> tuple[Column, ...]:
        """The columns whose agreement is less than `share`, or that no row of both results has."""
        return tuple(c for c in self.columns if c.agreement is None or c.agreement < share)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON, in which NaN and infinities are text, times ISO 8601, and bytes base64."""
        made: dict[str, Any] = plain_values(self)
        return made

    def __str__(self) -> str:
        """What the command line shows."""
        return "\n".join(_texts(self, TEXT_WIDTH))

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # what IPython and notebooks show
        printer.text(str(self))


def plain_values(value: Any) -> Any:
    """Plain values for JSON, in which NaN and infinities are text, times ISO 8601, and bytes base64."""
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain_values(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {name if isinstance(name, str) else str(name): plain_values(held) for name, held in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_values(held) for held in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, (bytes, bytearray)):
        return base64.b64encode(value).decode()
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return str(value)


# ---------------------------------------------------------------- as text


def show(found: Comparison, stream: TextIO) -> None:
    """Write a comparison for a person. Raises what writing to the stream raises."""
    if not is_terminal(stream):
        stream.write("\n".join(_texts(found, PIPE_WIDTH)) + "\n")
        return
    stream.write("\n".join(_head(found, width_of(stream))) + "\n\n")
    for part in _tables(found, width_of(stream) - 2):
        part.show(stream)


def _texts(found: Comparison, width: int) -> list[str]:
    lines = _head(found, width)
    for table in _tables(found, width):
        lines += ["", *table.plain(width).split("\n")]
    return lines


def _head(found: Comparison, width: int) -> list[str]:
    """What was compared, and which rows are in both."""
    named = ("a", found.a), ("b", found.b), ("by", ", ".join(found.on))
    lines = [f"{name:<10}{clean(text)}" for name, text in named]  # names are to be copied: uncut at any width
    counts = [("in both", found.matched, ()), ("only in a", found.only_a, found.missing_in_b)]
    counts.append(("only in b", found.only_b, found.missing_in_a))
    figure = max(len(units.count(n)) for _, n, _ in counts)
    for name, n, keys in counts:
        line, told = f"{name:<10}{units.count(n):>{figure}}", [key_text(key) for key in keys]
        told += ["…"] if n > len(keys) > 0 else []
        inline = f"{line}  {'; '.join(told)}".rstrip()
        lines += [inline] if columns(inline) <= width else [line, *(f"{'':<10}{key}" for key in told)]
    lines += [f"left out  {clean(name)}: {why}" for name, why in found.left_out.items()]
    return lines


def key_text(key: Mapping[str, Any]) -> str:
    """A row's key, for a person."""
    return ", ".join(f"{name}={cell(_whole(value), KEY_WIDTH)}" for name, value in key.items())


def _whole(value: Any) -> Any:
    return repr(value) if isinstance(value, float) else value  # four digits would be another key


def _tables(found: Comparison, width: int) -> list[Table]:
    tables = [_summary(found)]
    for column in found.columns:
        if isinstance(column.measured, Labels) and column.rows:
            tables.append(_confusion(column, column.measured, width))
        if column.examples:
            tables.append(_examples(column))
    return tables


def _summary(found: Comparison) -> Table:
    rows = [
        (c.name if i == 0 else "", share(c.agreement) if i == 0 else "", line)
        for c in found.columns
        for i, line in enumerate(_measures(c))
    ]
    return Table(("column", "agreement", ""), tuple(rows), frozenset({1}))


def _measures(column: Column) -> list[str]:
    """A column's figures, as lines of at most 50 columns."""
    if not column.rows:
        return ["no row is in both"]
    lines = []
    m = column.measured
    if isinstance(m, Numbers):
        lines.append(f"{units.count(m.within)} rows within {m.tolerance:g}, {units.count(column.equal)} equal")
        if m.compared:
            lines.append(f"difference mean {_figure(m.mean)}, median {_figure(m.median)}")
            lines.append(f"difference max {_figure(m.max)}, correlation {_figure(m.correlation)}")
        lines += _counts("NaN", m.nan_only_a, m.nan_only_b, m.nan_both)
        lines += [f"infinite: {units.plural(m.infinite, 'row')}"] if m.infinite else []
    elif isinstance(m, Vectors):
        lines.append(f"{units.plural(column.equal, 'row')} equal")
        if m.compared:
            lines.append(f"cosine mean {_figure(m.mean)}, min {_figure(m.min)}")
            lines += [f"cosine of {_lowest(s)} at most {_figure(q)}" for s, q in m.quantiles.items()]
        if m.undefined:
            of = f", {units.count(m.lengths_differ)} of other lengths" if m.lengths_differ else ""
            lines.append(f"no cosine: {units.plural(m.undefined, 'row')}{of}")
    else:
        lines.append(f"{units.count(column.equal)} equal, {units.count(column.rows - column.equal)} differ")
        lines += [f"kappa {_figure(m.kappa)}"] if isinstance(m, Labels) and m.kappa is not None else []
    return lines + _counts("null", column.null_only_a, column.null_only_b, column.null_both)


def _lowest(part: float) -> str:
    return "half" if part == 0.5 else f"{part * 100:g} %"


def _counts(what: str, a: int, b: int, both: int) -> list[str]:
    told = ((a, "only in a"), (b, "only in b"), (both, "in both"))
    return [f"{what} {where}: {units.plural(n, 'row')}" for n, where in told if n]


def _figure(value: float | None) -> str:
    return "none" if value is None else f"{value:.6g}"


def share(part: float | None) -> str:
    """A share in per cent with two digits, which are never rounded up to a whole: `94.96 %`, `>99.99 %`."""
    if part is None:
        return "none"
    return ">99.99 %" if 0.99995 <= part < 1 else f"{part * 100:.2f} %"


def _confusion(column: Column, measured: Labels, width: int) -> Table:
    """Rows are the labels of a, columns those of b: the most frequent ones, as many as fit the width."""
    weight: dict[Any, int] = {}
    for a, b, n in measured.pairs:
        for label in {a, b}:
            weight[label] = weight.get(label, 0) + n
    ranked = sorted(weight, key=lambda label: -weight[label])
    most = min(MOST_SHOWN, len(ranked))
    while True:
        table = _crossed(column.name, measured, ranked[:most], len(ranked) > most)
        wide = sum(max(columns(row[i]) for row in (table.headers, *table.rows)) + 3 for i in range(len(table.headers)))
        if wide <= width or most == 1:
            return table
        most -= 1


def _crossed(name: str, measured: Labels, shown: Sequence[Any], more: bool) -> Table:
    place = {label: i for i, label in enumerate(shown)}
    size = len(shown) + more
    counts = np.zeros((size, size), dtype=np.int64)
    for a, b, n in measured.pairs:
        counts[place.get(a, size - 1), place.get(b, size - 1)] += n
    told = [cell(_quoted(label), LABEL_WIDTH) for label in shown] + (["(others)"] if more else [])
    rows = tuple((label, *map(units.count, line)) for label, line in zip(told, counts.tolist(), strict=True))
    return Table(("a \\ b", *told), rows, frozenset(range(1, size + 1)), f"{name}: rows by label of a and b")


def _quoted(label: Any) -> Any:
    """A label that cannot be taken for another: the text null, or one of spaces, is quoted."""
    return repr(label) if isinstance(label, str) and (label == "null" or label != label.strip() or not label) else label


def _answer(value: Any) -> str:
    return _figure(value) if isinstance(value, float) else cell(_quoted(value))


def _examples(column: Column) -> Table:
    first = column.examples[0]
    vectors = isinstance(column.measured, Vectors)
    apart = [] if not isinstance(column.measured, (Numbers, Vectors)) else ["cosine" if vectors else "difference"]
    both = [] if vectors else ["a", "b"]
    headers = (*first.key, *both, *apart, *first.inputs)
    rows = []
    for e in column.examples:
        values = [] if vectors else [_answer(e.a), _answer(e.b)]
        rows.append((
            *(cell(_whole(value), KEY_WIDTH) for value in e.key.values()), *values,
            *([_figure(e.difference)] if apart else []),
            *(cell(value, 200) for value in e.inputs.values()),
        ))  # fmt: skip
    which = {"numbers": "rows furthest apart", "vectors": "rows with the lowest cosine"}
    return Table(headers, tuple(rows), title=f"{column.name}: {which.get(column.kind, 'rows that differ')}")
