"""What is counted and measured of a column while pairs of rows go by: one tally a kind of value, in bounded memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa

from gristmill.arrow.casts import lengths_of, lossless, nearest
from gristmill.arrow.rows import picked
from gristmill.arrow.topython import to_plain
from gristmill.comparison.choice import Chosen
from gristmill.comparison.comparison import Column, Example, Labels, Numbers, Vectors
from gristmill.comparison.quantiles import Spool
from gristmill.comparison.sameness import nulls, same

MOST_PAIRS = 1_000  # different pairs of labels; with more of them a column is no longer one of labels
QUANTILES = (0.01, 0.1, 0.5)
EXACT = 2.0**53  # from here on floats skip whole numbers
FILLS = np.nextafter(0.0, 1.0)  # how far apart two values are that have no distance: shown after all that have one


class Worst:
    """The rows of a column that are furthest apart, at most `most`; of two alike, the one that comes first."""

    def __init__(self, most: int, keys: tuple[str, ...], inputs: tuple[str, ...]) -> None:
        self._most, self._keys, self._inputs = most, keys, inputs
        self._kept: list[tuple[float, Example]] = []

    @property
    def examples(self) -> tuple[Example, ...]:
        """The furthest first."""
        return tuple(example for _, example in self._kept)

    def add(self, apart: np.ndarray, rows: pa.Table, values: tuple[Any, Any] | None, told: np.ndarray | None) -> None:
        """Look at more rows: how far `apart` each is (0: not an example), its keys and inputs, both values, and what to
        tell of the distance (NaN: nothing).
        """
        least = self._kept[-1][0] if len(self._kept) == self._most else 0.0
        at = np.flatnonzero(apart > least)
        if not self._most or not len(at):
            return
        at = np.sort(at[np.argsort(-apart[at], kind="stable")[: self._most]])
        held = {name: to_plain(picked(rows.column(name), at)) for name in (*self._keys, *self._inputs)}
        a, b = ([None] * len(at), [None] * len(at)) if values is None else (to_plain(picked(v, at)) for v in values)
        for i, row in enumerate(at.tolist()):
            key, inputs = ({name: held[name][i] for name in names} for names in (self._keys, self._inputs))
            distance = None if told is None or np.isnan(told[row]) else float(told[row])
            self._kept.append((float(apart[row]), Example(key, a[i], b[i], distance, inputs)))
        self._kept.sort(key=lambda kept: -kept[0])
        del self._kept[self._most :]


class Tally:
    """Of a column of any type: how many values are the same, and how many are null."""

    def __init__(self, chosen: Chosen, worst: Worst) -> None:
        self.chosen, self.worst = chosen, worst
        self.rows = self.equal = 0
        self._null_a = self._null_b = self._null_both = 0

    def add(self, a: pa.ChunkedArray, b: pa.ChunkedArray, rows: pa.Table) -> None:
        """Count more pairs: value i of `a` and of `b`; `rows` has the columns for examples."""
        one, other = whole(a), whole(b)
        none, none_there = nulls(one), nulls(other)
        self.rows += len(one)
        self._null_both += int((none & none_there).sum())
        self._null_a += int((none & ~none_there).sum())
        self._null_b += int((~none & none_there).sum())
        self._measure(one, other, rows)

    def _measure(self, one: pa.Array, other: pa.Array, rows: pa.Table) -> None:
        equal = self._same(*self._as_one_type(one, other))
        self.worst.add((~equal).astype(np.float64), rows, (one, other), None)

    def _as_one_type(self, one: pa.Array, other: pa.Array) -> tuple[pa.Array, pa.Array]:
        return lossless(one, self.chosen.type), lossless(other, self.chosen.type)

    def _same(self, one: pa.Array, other: pa.Array) -> np.ndarray:
        equal = same(one, other)
        self.equal += int(equal.sum())
        return equal

    def column(self) -> Column:
        """What was found."""
        return self._column(self.equal, None)

    def _column(self, agreeing: float, measured: Labels | Numbers | Vectors | None) -> Column:
        c = self.chosen
        kind = "values" if measured is None else c.kind
        return Column(
            c.name, kind, c.types, self.rows, self.equal, agreeing / self.rows if self.rows else None, self._null_a,
            self._null_b, self._null_both, measured, self.worst.examples,
        )  # fmt: skip


# ---------------------------------------------------------------- labels


class LabelTally(Tally):
    """Of labels: how often each stands beside each, as long as they are not too many to be labels."""

    def __init__(self, chosen: Chosen, worst: Worst) -> None:
        super().__init__(chosen, worst)
        self._pairs: Counter[tuple[Any, Any]] | None = Counter()

    def _measure(self, one: pa.Array, other: pa.Array, rows: pa.Table) -> None:
        first, second = self._as_one_type(one, other)
        equal = self._same(first, second)
        self.worst.add((~equal).astype(np.float64), rows, (one, other), None)
        if self._pairs is not None:
            self._pairs.update(_pairs(first, second))
            self._pairs = self._pairs if len(self._pairs) <= MOST_PAIRS else None

    def column(self) -> Column:
        if self._pairs is None:
            return super().column()
        ranked = sorted(self._pairs.items(), key=lambda pair: (-pair[1], repr(pair[0])))
        return self._column(self.equal, Labels(tuple((a, b, n) for (a, b), n in ranked), _kappa(self._pairs)))


def _pairs(one: pa.Array, other: pa.Array) -> dict[tuple[Any, Any], int]:
    coded = [values.dictionary_encode(null_encoding="encode") for values in (one, other)]
    names = [[int(v) if isinstance(v, Decimal) else v for v in to_plain(c.dictionary)] for c in coded]
    first, second = (c.indices.to_numpy().astype(np.int64) for c in coded)
    codes, counts = np.unique(first * len(names[1]) + second, return_counts=True)
    if len(codes) > MOST_PAIRS:
        codes, counts = codes[: MOST_PAIRS + 1], counts[: MOST_PAIRS + 1]  # enough to tell that they are too many
    return {
        (names[0][code // len(names[1])], names[1][code % len(names[1])]): n
        for code, n in zip(codes.tolist(), counts.tolist(), strict=True)
    }


def _kappa(pairs: Mapping[tuple[Any, Any], int]) -> float | None:
    """Cohen's kappa: agreement beyond that of two who label by chance, each as often as it does."""
    rows = sum(pairs.values())
    ours: Counter[Any] = Counter()
    theirs: Counter[Any] = Counter()
    for (a, b), n in pairs.items():
        ours[a] += n
        theirs[b] += n
    chance = sum(n * theirs[label] for label, n in ours.items())
    alike = sum(n for (a, b), n in pairs.items() if a == b)
    return None if chance == rows * rows else (alike * rows - chance) / (rows * rows - chance)


# ---------------------------------------------------------------- numbers


class NumberTally(Tally):
    """Of numbers: their differences, as float64."""

    def __init__(self, chosen: Chosen, worst: Worst, path: str, tolerance: float) -> None:
        super().__init__(chosen, worst)
        self._tolerance = tolerance
        self._spool = Spool(path)
        self._moments = Moments()
        self._sum, self._max, self._within, self._infinite = 0.0, 0.0, 0, 0
        self._nan_a = self._nan_b = self._nan_both = 0

    def _measure(self, one: pa.Array, other: pa.Array, rows: pa.Table) -> None:
        there = ~(nulls(one) | nulls(other))
        x, y = floats(one), floats(other)
        equal = self._equal(one, other, x, y)
        self.equal += int(equal.sum())
        nan, nan_there = np.isnan(x) & there, np.isnan(y) & there
        self._nan_both += int((nan & nan_there).sum())
        self._nan_a += int((nan & ~nan_there).sum())
        self._nan_b += int((~nan & nan_there).sum())
        finite = np.isfinite(x) & np.isfinite(y) & there
        self._infinite += int((there & ~finite & ~nan & ~nan_there).sum())
        with np.errstate(over="ignore", invalid="ignore"):
            apart = np.where(finite, np.abs(x - y), np.nan)
        self._within += int((equal | (apart <= self._tolerance)).sum())
        self._spool.add(apart[finite])
        with np.errstate(over="ignore"):
            self._sum += float(apart[finite].sum())
        self._max = max(self._max, float(apart[finite].max(initial=0.0)))
        self._moments.add(x[finite], y[finite])
        self.worst.add(np.where(equal, 0.0, np.where(apart > 0, apart, FILLS)), rows, (one, other), apart)

    def _equal(self, one: pa.Array, other: pa.Array, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        if pa.types.is_decimal(self.chosen.type):
            return same(*self._as_one_type(one, other))
        equal = np.where(nulls(one) | nulls(other), nulls(one) & nulls(other), (x == y) | (np.isnan(x) & np.isnan(y)))
        if pa.types.is_integer(one.type) or pa.types.is_integer(other.type):
            for i in np.flatnonzero(equal & (np.abs(x) >= EXACT)).tolist():  # Python compares these exactly
                equal[i] = one[i].as_py() == other[i].as_py()
        return np.asarray(equal, dtype=bool)

    def column(self) -> Column:
        n = self._spool.count
        return self._column(self._within, Numbers(
            n, self._sum / n if n else None, self._spool.quantiles([0.5])[0] if n else None, self._max if n else None,
            self._moments.correlation(), self._tolerance, self._within, self._nan_a, self._nan_b, self._nan_both,
            self._infinite,
        ))  # fmt: skip


class Moments:
    """Means and co-moments of pairs of numbers, merged batch by batch (Chan, Golub and LeVeque, 1983)."""

    def __init__(self) -> None:
        self._n = 0
        self._mean = np.zeros(2)
        self._about = np.zeros((2, 2))  # sums of products of distances from the means

    def add(self, x: np.ndarray, y: np.ndarray) -> None:
        """More pairs, [n] each, finite."""
        if not len(x):
            return
        with np.errstate(over="ignore", invalid="ignore"):
            both = np.stack([x, y])
            mean = both.mean(axis=1)
            apart, n = mean - self._mean, self._n + len(x)
            centred = both - mean[:, None]
            self._about += centred @ centred.T + np.outer(apart, apart) * (self._n * len(x) / n)
            self._mean, self._n = self._mean + apart * (len(x) / n), n

    def correlation(self) -> float | None:
        """Pearson's; None if a side does not vary, or if its numbers are too large to tell."""
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            spread = np.sqrt(self._about[0, 0]) * np.sqrt(self._about[1, 1])
            found = float(np.clip(self._about[0, 1] / spread, -1, 1))
        return found if np.isfinite(spread) and spread > 0 and np.isfinite(found) else None


# ---------------------------------------------------------------- vectors


class VectorTally(Tally):
    """Of vectors: their cosines, as float64. A null within a vector is NaN."""

    def __init__(self, chosen: Chosen, worst: Worst, path: str) -> None:
        super().__init__(chosen, worst)
        self._spool = Spool(path)
        self._sum, self._min, self._agreeing = 0.0, 1.0, 0.0
        self._undefined = self._lengths_differ = 0

    def _measure(self, one: pa.Array, other: pa.Array, rows: pa.Table) -> None:
        there = ~(nulls(one) | nulls(other))
        alike = there & (lengths_of(one) == lengths_of(other))
        cosine = np.full(len(one), np.nan)
        equal = nulls(one) & nulls(other)
        at = np.flatnonzero(alike)
        cosine[at], equal[at] = _cosines(picked(one, at), picked(other, at))
        defined = ~np.isnan(cosine)
        self.equal += int(equal.sum())
        self._lengths_differ += int((there & ~alike).sum())
        self._undefined += int((there & ~defined).sum())
        self._spool.add(cosine[defined])
        self._sum += float(cosine[defined].sum())
        self._min = min(self._min, float(cosine[defined].min(initial=1.0)))
        self._agreeing += float(cosine[defined].sum()) + int((equal & ~defined).sum())
        apart = np.where(defined, 1 - cosine, FILLS)
        self.worst.add(np.where(equal, 0.0, apart), rows, None, cosine)

    def column(self) -> Column:
        n = self._spool.count
        quantiles = dict(zip(QUANTILES, self._spool.quantiles(QUANTILES), strict=True)) if n else {}
        return self._column(self._agreeing, Vectors(
            n, self._sum / n if n else None, self._min if n else None, quantiles, self._undefined, self._lengths_differ
        ))  # fmt: skip


def _cosines(one: pa.Array, other: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """For vectors of equal lengths, none null: the cosine of each pair, NaN where it has none, and whether the two are
    the same.
    """
    lengths = lengths_of(one)
    x, y = floats(one.flatten()), floats(other.flatten())
    found, equal = np.full(len(lengths), np.nan), np.ones(len(lengths), dtype=bool)
    some = np.flatnonzero(lengths)
    if len(some):
        starts = (np.cumsum(lengths) - lengths)[some]
        with np.errstate(all="ignore"):
            products = [np.add.reduceat(p, starts) for p in (x * y, x * x, y * y)]
            cosine = products[0] / (np.sqrt(products[1]) * np.sqrt(products[2]))
        found[some] = np.clip(np.where(np.isfinite(cosine), cosine, np.nan), -1, 1)
        differ = (x != y) & ~(np.isnan(x) & np.isnan(y))
        equal[some] = ~np.logical_or.reduceat(differ, starts)
    return found, equal


# ---------------------------------------------------------------- values


def whole(column: pa.ChunkedArray) -> pa.Array:
    """A column in one piece, decoded."""
    made = column.combine_chunks()
    return made.storage if hasattr(made, "storage") else made


def floats(values: pa.Array) -> np.ndarray:
    """Numbers as float64, [n]; null is NaN."""
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    if pa.types.is_float16(values.type):
        values = values.cast(pa.float32())
    if pa.types.is_decimal(values.type):
        values = nearest(values, pa.float64())
    made = values if pa.types.is_float64(values.type) else values.cast(pa.float64(), safe=False)
    return np.asarray(made.to_numpy(zero_copy_only=False), dtype=np.float64)


def tally_of(chosen: Chosen, worst: Worst, path: str, tolerance: float) -> Tally:
    """The tally of a column; numbers that it keeps are in a file at `path`."""
    if chosen.kind == "numbers":
        return NumberTally(chosen, worst, path, tolerance)
    if chosen.kind == "vectors":
        return VectorTally(chosen, worst, path)
    return LabelTally(chosen, worst) if chosen.kind == "labels" else Tally(chosen, worst)
