"""How far two profiles of a column are apart. Definitions are those of Evidently (0.7), so that figures can be held
against its own: shares in the same bins, with the same stand-in for empty ones. Each measure also has what chance makes
of it: the figure that two samples of the same rows exceed once in a thousand times.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from gristmill.profiles.profile import ColumnProfile, numbers_of
from gristmill.profiles.sketch import Counted, Ranks
from gristmill.values import dataclass

FEW = 20  # different numbers in the reference up to which each is a bin of its own
EMPTY = 1e-4  # the share that an empty bin counts as in a PSI
Z = 3.09  # standard deviations that chance exceeds once in a thousand times
MOST_NAMED = 5


@dataclass(frozen=True)
class Found:
    """A measure of two columns, what chance makes of it, and what to say of it."""

    figure: float
    chance: float = 0.0
    about: str = ""


Measure = Callable[[ColumnProfile, ColumnProfile], "Found | None"]


def psi(reference: ColumnProfile, current: ColumnProfile) -> Found | None:
    """The population stability index: sum((r - c) * ln(r / c)) over the shares of each bin."""
    shares = binned(reference, current)
    if shares is None:
        return None
    r, c = (_filled(s) for s in shares)
    return Found(float(((r - c) * np.log(r / c)).sum()), _parts(reference, current) * chi_square(len(r) - 1))


def js(reference: ColumnProfile, current: ColumnProfile) -> Found | None:
    """The Jensen-Shannon distance (natural logarithm): the root of the divergence, 0 to 0.83."""
    shares = binned(reference, current)
    if shares is None:
        return None
    r, c = shares
    middle = (r + c) / 2
    terms = [float((s[s > 0] * np.log(s[s > 0] / middle[s > 0])).sum()) for s in (r, c)]
    chance = math.sqrt(_parts(reference, current) * chi_square(len(r) - 1) / 8)
    return Found(math.sqrt(max(0.0, sum(terms) / 2)), chance)


def ks(reference: ColumnProfile, current: ColumnProfile) -> Found | None:
    """The Kolmogorov-Smirnov statistic: the largest difference of the two distribution functions, 0 to 1; of texts,
    those of their lengths.
    """
    if not reference.held or not current.held:
        return None
    a, b = _ranks(reference), _ranks(current)
    points = np.unique(np.concatenate([a.values, b.values]))
    apart = np.abs(a.below(points, inclusive=True) - b.below(points, inclusive=True)).max()
    return Found(float(apart), math.sqrt(math.log(2000) / 2 * _parts(reference, current)))


def nulls(reference: ColumnProfile, current: ColumnProfile) -> Found | None:
    """How much the share of nulls has changed."""
    if not reference.rows or not current.rows:
        return None
    before, now = reference.null_share, current.null_share
    both = (reference.nulls + current.nulls) / (reference.rows + current.rows)
    chance = Z * math.sqrt(both * (1 - both) * (1 / reference.rows + 1 / current.rows))
    return Found(abs(now - before), chance, f"{before:.1%} were null, {now:.1%} are")


def categories(reference: ColumnProfile, current: ColumnProfile) -> Found | None:
    """The share of rows whose value the other side does not have at all, on the side where that is more."""
    if not reference.held or not current.held or reference.counts is None or current.counts is None:
        return None
    (new, share), (gone, lost) = (_alone(one, other) for one, other in ((current, reference), (reference, current)))
    said = [f"{what} {', '.join(names)}" for what, names in (("new:", new), ("gone:", gone)) if names]
    return Found(max(share, lost), math.log(1000) / min(reference.held, current.held), "; ".join(said))


def mean_cosine(reference: ColumnProfile, current: ColumnProfile) -> Found | None:
    """The cosine of the two mean vectors; 1 if they point the same way."""
    if not reference.held or not current.held or not reference.total or not current.total:
        return None
    a, b = reference.mean(), current.mean()
    if len(a) != len(b):
        return Found(-1.0, 1.0, f"vectors had {len(a)} numbers, and have {len(b)}")
    norms = float(np.linalg.norm(a) * np.linalg.norm(b))
    spread = sum(
        max(0.0, p.squares / p.held / max(float(m @ m), 1e-300) - 1) / p.held for p, m in ((reference, a), (current, b))
    )
    return Found(float(a @ b) / norms if norms else 0.0, 1 - min(2.0, Z * spread))


def norm(reference: ColumnProfile, current: ColumnProfile) -> Found | None:
    """As `ks`, of the lengths of vectors."""
    return ks(reference, current)


MEASURES: Mapping[str, Measure] = {
    "psi": psi, "js": js, "ks": ks, "nulls": nulls, "categories": categories, "mean_cosine": mean_cosine, "norm": norm,
}  # fmt: skip


# ---------------------------------------------------------------- shares in bins


def binned(reference: ColumnProfile, current: ColumnProfile) -> tuple[np.ndarray, np.ndarray] | None:
    """The shares of values in each bin, on both sides: see `bins`."""
    found = bins(reference, current)
    return None if found is None else found[1:]


def bins(reference: ColumnProfile, current: ColumnProfile) -> tuple[list[str], np.ndarray, np.ndarray] | None:
    """Each bin, by its value or where it begins, and the shares of values in it, on both sides: one for each value if
    these are texts, booleans, or few numbers; else as many of equal width as Sturges' rule says. None if a side has no
    values.
    """
    if not reference.held or not current.held:
        return None
    r, c = reference.counts, current.counts
    text = reference.kind in ("text", "boolean")
    if r is not None and c is not None and (text or len(r) <= FEW):
        names = sorted({*r, *c})
        return (
            names,
            np.array([r.get(n, 0) for n in names]) / max(1, sum(r.values())),
            np.array([c.get(n, 0) for n in names]) / max(1, sum(c.values())),
        )
    a, b = _ranks(reference), _ranks(current)
    edges = _edges(
        min(a.least, b.least), max(a.most, b.most), a.rows + b.rows, reference.kind == current.kind == "whole"
    )
    return [f"{edge:.4g}" for edge in edges[:-1]], _shares(a, edges), _shares(b, edges)


def _ranks(column: ColumnProfile) -> Ranks | Counted:
    return Ranks(column.sketch) if column.counts is None else Counted(*numbers_of(column.counts, column.kind))


def _edges(least: float, most: float, rows: int, whole: bool) -> np.ndarray:
    """numpy.histogram_bin_edges(…, bins="sturges") of so many numbers."""
    if least == most:
        return np.array([least - 0.5, most + 0.5])
    width = (most - least) / (math.log2(rows) + 1)
    if whole and width < 1:
        width = 1.0
    return np.linspace(least, most, math.ceil((most - least) / width) + 1)


def _shares(ranks: Ranks | Counted, edges: np.ndarray) -> np.ndarray:
    below = ranks.below(edges)
    below[0], below[-1] = 0.0, 1.0
    return np.diff(below)


def _filled(shares: np.ndarray) -> np.ndarray:
    least = shares[shares > 0].min()
    return np.where(shares > 0, shares, least / 10**6 if least <= EMPTY else EMPTY)


def _alone(one: ColumnProfile, other: ColumnProfile) -> tuple[list[str], float]:
    """The most frequent values that only one side has, and the share of its rows with any of them."""
    alone = {name: n for name, n in (one.counts or {}).items() if name not in (other.counts or {})}
    top = sorted(alone, key=lambda name: (-alone[name], name))[:MOST_NAMED]
    return [*map(repr, top), *["…"] * (len(alone) > len(top))], sum(alone.values()) / max(
        1, sum((one.counts or {}).values())
    )


# ---------------------------------------------------------------- chance


def _parts(reference: ColumnProfile, current: ColumnProfile) -> float:
    return 1 / reference.held + 1 / current.held


def chi_square(freedom: int) -> float:
    """What a chi-squared variable exceeds once in a thousand times (Wilson and Hilferty 1931); 0 without freedom."""
    if freedom < 1:
        return 0.0
    part = 2 / (9 * freedom)
    return float(freedom * (1 - part + Z * math.sqrt(part)) ** 3)
