"""The profile of some rows: counts of every column, and of those asked for also what their values are like. Profiles
merge: that of all rows is the sum of those of any parts, up to the errors of sketches and of float sums.
"""

from __future__ import annotations

import base64
import functools
import operator
from collections.abc import Iterable, Mapping
from dataclasses import field, replace
from typing import Literal

import numpy as np

from gristmill.profiles.sketch import Sketch, merged, repeated
from gristmill.values import dataclass

Kind = Literal["", "whole", "number", "text", "boolean", "vector", "other"]
MOST: Mapping[str, int] = {"text": 1000, "boolean": 2, "whole": 64, "number": 64}  # different values that are counted
LONG = 256  # bytes: with a longer text, a column is no category


@dataclass(frozen=True)
class ColumnProfile:
    """A column of `rows` rows, of which `nulls` are null. `kind` is "" if its values were not looked at.

    Values are either all counted (`counts`, by their text), while few are different, or in `sketch`: numbers, lengths
    of texts in bytes, norms of vectors. `total` is the sum of the vectors (float64, base64), `squares` that of their
    squared norms. `strange` values are neither null nor counted: NaN, infinite, or vectors with such numbers.
    """

    rows: int = 0
    nulls: int = 0
    kind: Kind = ""
    strange: int = 0
    counts: Mapping[str, int] | None = None
    sketch: Sketch = field(default_factory=dict)
    total: str | None = None
    squares: float = 0.0

    @property
    def held(self) -> int:
        """How many rows have an ordinary value."""
        return self.rows - self.nulls - self.strange

    @property
    def null_share(self) -> float:
        """The share of nulls."""
        return self.nulls / self.rows if self.rows else 0.0

    def mean(self) -> np.ndarray:
        """The mean vector, float64 [width]."""
        return vector(self.total or "") / max(1, self.held)

    def __add__(self, other: ColumnProfile) -> ColumnProfile:
        rows, nulls = self.rows + other.rows, self.nulls + other.nulls
        for one, rest in ((self, other), (other, self)):
            if one.nulls == one.rows:  # it has no values
                return replace(rest, rows=rows, nulls=nulls, kind=rest.kind or one.kind)
        if not self.kind or not other.kind:
            return ColumnProfile(rows, nulls)
        kind = self.kind if self.kind == other.kind else _wider(self.kind, other.kind)
        if kind == "other":
            return ColumnProfile(rows, nulls, kind)
        made = ColumnProfile(rows, nulls, kind, self.strange + other.strange)
        if kind == "vector":
            sums = [vector(one.total or "") for one in (self, other) if one.total]
            if len({len(v) for v in sums}) > 1:
                return replace(made, kind="other")
            total = None if not sums else text_of(np.sum(sums, axis=0))
            squares = self.squares + other.squares
            return replace(made, sketch=merged(self.sketch, other.sketch), total=total, squares=squares)
        counts = _counted(self.counts, other.counts, kind)
        if counts is not None:
            return replace(made, counts=counts)
        return replace(made, sketch=merged(sketch_of(self), sketch_of(other)))


@dataclass(frozen=True)
class Profile:
    """How many of `rows` rows are null in each of their columns, and more about those whose values were looked at."""

    rows: int = 0
    nulls: Mapping[str, int] = field(default_factory=dict)
    columns: Mapping[str, ColumnProfile] = field(default_factory=dict)

    def __add__(self, other: Profile) -> Profile:
        """The profile of the rows of both. Of a column that only one side knows nothing is known of both."""
        if not self.rows or not other.rows:
            return self if self.rows or not other.rows else other
        nulls = {n: count + other.nulls[n] for n, count in self.nulls.items() if n in other.nulls}
        both = {n: self._column(n) + other._column(n) for n in nulls if n in self.columns or n in other.columns}
        return Profile(self.rows + other.rows, nulls, {n: c for n, c in both.items() if c.kind})

    def _column(self, name: str) -> ColumnProfile:
        return self.columns.get(name) or ColumnProfile(self.rows, self.nulls[name])

    def read_as(self, names: Iterable[str]) -> Profile:
        """The profile of the same rows as `gm.read` gives them with these columns: those that they lack are null."""
        lacks = {name: self.rows for name in names if name not in self.nulls}
        return replace(self, nulls={**self.nulls, **lacks}) if lacks else self

    def beside(self, other: Profile) -> Profile:
        """This profile, with what another one of the same rows knows of columns that this one has not looked at."""
        return replace(self, nulls={**other.nulls, **self.nulls}, columns={**other.columns, **self.columns})

    def null_share(self, name: str) -> float:
        """The share of nulls in a column."""
        return self.nulls[name] / self.rows if self.rows else 0.0


def summed(parts: Iterable[Profile | None]) -> Profile | None:
    """The profile of all rows; None if that of some is not known."""
    known = list(parts)
    some = [p for p in known if p is not None]
    return functools.reduce(operator.add, some, Profile()) if len(some) == len(known) else None


def vector(text: str) -> np.ndarray:
    """A vector that was stored as text, float64 [width]."""
    return np.frombuffer(base64.b64decode(text), dtype="<f8")


def text_of(values: np.ndarray) -> str:
    """A vector as text."""
    return base64.b64encode(np.ascontiguousarray(values, dtype="<f8").tobytes()).decode()


def numbers_of(counts: Mapping[str, int], kind: Kind) -> tuple[np.ndarray, np.ndarray]:
    """What a sketch would have of counted values, ascending, and how often each occurs."""
    measured = [len(name.encode("utf-8", "surrogatepass")) if kind == "text" else float(name) for name in counts]
    values = np.array(measured, dtype=np.float64)
    order = np.argsort(values, kind="stable")
    return values[order], np.fromiter(counts.values(), dtype=np.int64, count=len(counts))[order]


def sketch_of(column: ColumnProfile) -> Sketch:
    """The sketch of a column of numbers or texts, also if its values were counted."""
    return column.sketch if column.counts is None else repeated(*numbers_of(column.counts, column.kind))


def _counted(a: Mapping[str, int] | None, b: Mapping[str, int] | None, kind: Kind) -> dict[str, int] | None:
    if a is None or b is None:
        return None
    both = dict(a)
    for name, count in b.items():
        both[name] = both.get(name, 0) + count
    return both if len(both) <= MOST[kind] else None


def _wider(a: Kind, b: Kind) -> Kind:
    return "number" if {a, b} == {"whole", "number"} else "other"
