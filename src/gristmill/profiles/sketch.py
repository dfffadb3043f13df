"""Quantile sketches of numbers, as values that merge: KLL (Karnin, Lang, Liberty 2016), by Apache DataSketches.

A sketch is a mapping from a unit to a serialised KLL of values, each of which stands for that many rows. Few values are
in unit 1, all of them. Of many at a time, every UNIT-th by rank is taken, as KLL itself would do once more, which costs
a sort instead of eight times the work.
"""

from __future__ import annotations

import base64
import functools
import random
from collections.abc import Mapping
from typing import Any

import numpy as np

from gristmill.process.extras import require

Sketch = Mapping[str, str]

_CHANCE = random.Random()  # its own: a function of the user may have seeded the one that all share

K = 800  # rank errors under 0.5 % (99 % confidence, as DataSketches gives it), in 20 kB
UNIT = 8
POINTS = 2001  # quantiles at which two sketches are compared, more than a sketch holds items
MANY = 4096  # values from which every UNIT-th is taken: what is left out moves ranks by less than 0.2 % of these


def library() -> Any:
    """DataSketches. Raises MissingExtra."""
    return require("datasketches", "drift", "a profile for gates: {drift: …}")


def sketched(values: np.ndarray, unit: int = 1) -> Sketch:
    """The sketch of finite numbers, each of which stands for `unit` rows."""
    if not len(values):
        return {}
    if len(values) < MANY:
        return {str(unit): _of(values)}
    ranked = np.sort(values)
    whole = 1 + (len(ranked) - 2) // UNIT * UNIT  # the least and the greatest are kept
    first = _CHANCE.randrange(UNIT)  # so that errors of many windows cancel out
    rest = np.concatenate([ranked[:1], ranked[whole:]])
    return {str(UNIT * unit): _of(ranked[1 + first : whole : UNIT]), str(unit): _of(rest)}


def repeated(values: np.ndarray, counts: np.ndarray) -> Sketch:
    """The sketch of numbers that occur so many times each."""
    unit, made, left = 1, dict[str, str](), counts
    while left.sum() > MANY:
        unit, left = unit * UNIT, left // UNIT
    while unit and counts.sum():
        if (some := counts // unit).sum():
            made[str(unit)] = _of(np.repeat(values, some))
        counts, unit = counts % unit, unit // UNIT
    return made


def merged(a: Sketch, b: Sketch) -> Sketch:
    """The sketch of both."""
    made = dict(a)
    for unit, text in b.items():
        if unit in made:
            both = _read(made[unit])
            both.merge(_read(text))
            made[unit] = _text(both)
        else:
            made[unit] = text
    return made


class Ranks:
    """The share of a sketch's values up to a number. `values` are some from all over it, ascending, or all if they are
    few; `least` and `most` are exact.
    """

    def __init__(self, sketch: Sketch) -> None:
        self._parts = [(int(unit), _read(text)) for unit, text in sketch.items()]
        self.rows = sum(unit * part.n for unit, part in self._parts)
        self.least = float(min(part.get_min_value() for _, part in self._parts))
        self.most = float(max(part.get_max_value() for _, part in self._parts))

    @functools.cached_property
    def values(self) -> np.ndarray:
        """Values at which the share changes."""
        shares = np.linspace(0, 1, POINTS)
        return np.unique(np.concatenate([part.get_quantiles(shares) for _, part in self._parts]))

    def below(self, points: np.ndarray, inclusive: bool = False) -> np.ndarray:
        """The share of values below each of these points, with those that equal it if `inclusive`."""
        some, place = np.unique(points, return_inverse=True)
        total = np.zeros(len(some))
        for unit, part in self._parts:
            # Its iterator would give items with weights, but wrong ones where a level is empty (datasketches 5.2).
            total += unit * part.n * np.asarray(part.get_cdf(some, inclusive)[:-1])
        shares: np.ndarray = total[place] / self.rows
        return shares


class Counted:
    """As Ranks, of ascending values that were all counted."""

    def __init__(self, values: np.ndarray, counts: np.ndarray) -> None:
        self.values, self.rows = values, int(counts.sum())
        self._sums = np.concatenate([[0], np.cumsum(counts)]) / self.rows
        self.least, self.most = float(values[0]), float(values[-1])

    def below(self, points: np.ndarray, inclusive: bool = False) -> np.ndarray:
        """The share of values below each of these points, with those that equal it if `inclusive`."""
        shares: np.ndarray = self._sums[np.searchsorted(self.values, points, "right" if inclusive else "left")]
        return shares


def _of(values: np.ndarray) -> str:
    made = library().kll_doubles_sketch(K)
    made.update(np.array(values, dtype=np.float64))  # it takes no array that is read-only
    return _text(made)


def _text(sketch: Any) -> str:
    return base64.b64encode(sketch.serialize()).decode()


def _read(text: str) -> Any:
    return library().kll_doubles_sketch.deserialize(base64.b64decode(text))
