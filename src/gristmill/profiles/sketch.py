"""Quantile sketches of numbers, as values that merge: KLL (Karnin, Lang, Liberty 2016), by Apache DataSketches.

A sketch is a mapping from a unit to a serialised KLL of values, each of which stands for that many rows. Few values are
in unit 1, all of them. Of many at a time, every UNIT-th by rank is taken, as KLL itself would do once more, which costs
a sort instead of eight times the work.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np

from gristmill.process.extras import require

Sketch = Mapping[str, str]

K = 400  # rank errors under 0.7 % (99 % confidence, as DataSketches gives it), in 10 kB
UNIT = 8
MANY = 4096  # values from which every UNIT-th is taken: what is left out moves ranks by less than 0.2 % of these


def library() -> Any:
    """DataSketches. Raises MissingExtra."""
    return require("datasketches", "drift", "a profile for gates: {drift: …}")


def sketched(values: np.ndarray) -> Sketch:
    """The sketch of finite numbers."""
    if not len(values):
        return {}
    if len(values) < MANY:
        return {"1": _of(values)}
    ranked = np.sort(values)
    whole = 1 + (len(ranked) - 2) // UNIT * UNIT  # the least and the greatest are kept
    first = int(np.random.default_rng().integers(UNIT))  # so that errors of many windows cancel out
    rest = np.concatenate([ranked[:1], ranked[whole:]])
    return {str(UNIT): _of(ranked[1 + first : whole : UNIT]), "1": _of(rest)}


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
    """A sketch's values in order, and the share of them up to each. `least` and `most` are exact."""

    def __init__(self, sketch: Sketch) -> None:
        parts = [(int(unit), _read(text)) for unit, text in sketch.items()]
        pairs = np.array([(value, unit * weight) for unit, part in parts for value, weight in part], dtype=np.float64)
        ranked = pairs[np.argsort(pairs[:, 0], kind="stable")]
        self.values, weights = ranked[:, 0], ranked[:, 1]
        self.rows = int(weights.sum())
        self._sums = np.concatenate([[0.0], np.cumsum(weights)]) / self.rows
        self.least = float(min(part.get_min_value() for _, part in parts))
        self.most = float(max(part.get_max_value() for _, part in parts))

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
