"""How far two columns are apart: Evidently's figures for the same values, and those of scipy by the formulas."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from samples import pairs, vectors
from scipy import stats
from scipy.spatial import distance

from gristmill.profiles.columns import profiled
from gristmill.profiles.measures import MEASURES, chi_square
from gristmill.profiles.profile import ColumnProfile, Profile

# Evidently 0.7.23 (numpy 2.4.6) on `samples.pairs`: stattests psi, jensenshannon, and the p-value of ks.
EVIDENTLY = {
    (350, "shifted"): {"psi": 0.3468074485086277, "js": 0.18387327237752643, "ks": 6.581596457085897e-05},
    (350, "same"): {"psi": 0.06986365873799638, "js": 0.08255343939464006, "ks": 0.11356740825362314},
    (350, "whole"): {"psi": 0.8003065103464989, "js": 0.2846595945150428, "ks": 7.96918430785433e-17},
    (350, "stars"): {"psi": 2.278979552379229, "js": 0.3442584445964177, "ks": 9.113368516562756e-14},
    (350, "label"): {"psi": 0.36281067916806226, "js": 0.166521215927167},
    (350, "rare"): {"psi": 3.4075595711453186, "js": 0.40222493363044387},
    (20000, "shifted"): {"psi": 0.209074800427409, "js": 0.1494909375481317, "ks": 9.016072416620986e-220},
    (20000, "same"): {"psi": 0.0014072953736834952, "js": 0.011325187395274312, "ks": 0.953926083641981},
    (20000, "whole"): {"psi": 0.8115435307093889, "js": 0.3045457876515102, "ks": 0.0},
    (20000, "stars"): {"psi": 2.1562827759465906, "js": 0.3321304685509841, "ks": 0.0},
    (20000, "label"): {"psi": 0.40591446618542487, "js": 0.17009840999518452},
    (20000, "rare"): {"psi": 3.492614249618562, "js": 0.40586576039108774},
}
COSINE = 0.14866000413894653  # Evidently's DistanceDriftMethod(dist="cosine") on `samples.vectors`
SKETCHED = 0.05  # what figures of some thousand rows may differ by because sketches hold some hundred values
CASES = [(rows, name) for rows in (350, 20000) for name in ("shifted", "same", "whole", "stars", "label", "rare")]


def column(values: Any, window: int = 5000) -> ColumnProfile:
    """The profile of values, made by windows."""
    if values.ndim == 2:
        values = pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), values.shape[1])
    rows, found = pa.table({"x": values}), Profile()
    for start in range(0, len(rows), window):
        found = found + profiled(rows.slice(start, window), ["x"], found)
    return found.columns["x"]


def figure(name: str, reference: ColumnProfile, current: ColumnProfile) -> float:
    """A measure that there is."""
    found = MEASURES[name](reference, current)
    assert found is not None
    return found.figure


def shares(a: Any, b: Any) -> tuple[np.ndarray, np.ndarray]:
    """The published definition, straight from the values: Sturges' bins over both, or each value if they are few."""
    if a.dtype.kind == "U" or len(np.unique(a)) <= 20:
        keys = np.unique(np.concatenate([a, b]))
        return np.array([(a == k).mean() for k in keys]), np.array([(b == k).mean() for k in keys])
    edges = np.histogram_bin_edges(np.concatenate([a, b]), bins="sturges")
    return np.histogram(a, edges)[0] / len(a), np.histogram(b, edges)[0] / len(b)


@pytest.mark.parametrize(("rows", "name"), CASES)
def test_figures_of_evidently(rows: int, name: str) -> None:
    """PSI and Jensen-Shannon distance are Evidently's: exactly while a sketch holds all values, or values are few."""
    a, b = pairs(rows)[name]
    reference, current = column(a), column(b)
    exact = None not in (reference.counts, current.counts) or max(len(a), len(b)) < 400
    for measure in ("psi", "js"):
        near = {"rel": 1e-9} if exact else {"abs": SKETCHED}
        assert figure(measure, reference, current) == pytest.approx(EVIDENTLY[rows, name][measure], **near), measure


@pytest.mark.parametrize(("rows", "name"), CASES)
def test_figures_by_the_formulas(rows: int, name: str) -> None:
    """The same by numpy and scipy from the values themselves; and what Evidently printed follows from the formulas."""
    a, b = pairs(rows)[name]
    reference, current = column(a), column(b)
    r, c = shares(a, b)
    assert distance.jensenshannon(r, c) == pytest.approx(EVIDENTLY[rows, name]["js"], rel=1e-9)
    assert figure("js", reference, current) == pytest.approx(distance.jensenshannon(r, c), abs=SKETCHED)
    for s in (r, c):
        s[s == 0] = s[s > 0].min() / 10**6 if s[s > 0].min() <= 1e-4 else 1e-4
    assert ((r - c) * np.log(r / c)).sum() == pytest.approx(EVIDENTLY[rows, name]["psi"], rel=1e-9)
    if a.dtype.kind == "U":
        return
    tested = stats.ks_2samp(a, b)
    assert tested.pvalue == pytest.approx(EVIDENTLY[rows, name]["ks"], rel=1e-6)
    assert figure("ks", reference, current) == pytest.approx(tested.statistic, abs=1e-9 if len(b) < 400 else SKETCHED)


def test_vectors() -> None:
    """The cosine of the means is Evidently's; norms are compared as numbers are."""
    a, b = vectors()
    reference, current = column(a, 128), column(b, 64)
    assert 1 - figure("mean_cosine", reference, current) == pytest.approx(COSINE, abs=1e-6)
    norms = [np.linalg.norm(v.astype("float64"), axis=1) for v in (a, b)]
    assert figure("norm", reference, current) == pytest.approx(stats.ks_2samp(*norms).statistic, abs=1e-9)
    found = MEASURES["mean_cosine"](reference, column(b[:, :8]))
    assert found is not None and found.figure == -1 and found.about == "vectors had 16 numbers, and have 8"


def test_nulls_and_categories() -> None:
    """The change in the share of nulls; the share of rows with a value that the other side lacks, by name."""
    a, b = column(np.array(["x"] * 90 + ["y"] * 10)), column(np.array(["x"] * 70 + ["z"] * 30))
    found = MEASURES["categories"](a, b)
    assert found is not None and (found.figure, found.about) == (0.3, "new: 'z'; gone: 'y'")
    some = [profiled(pa.table({"x": pa.array(v)}), ["x"]).columns["x"] for v in (["x"] * 4, ["x", None, None, "x"])]
    nulls = MEASURES["nulls"](*some)
    assert nulls is not None and (nulls.figure, nulls.about) == (0.5, "0.0% were null, 50.0% are")


@pytest.mark.parametrize("rows", [60, 300, 3000])
def test_chance_explains_what_equal_rows_differ_by(rows: int) -> None:
    """Two samples of the same rows are almost never further apart than chance makes them; of 200 at most two are."""
    r, beyond = np.random.default_rng(rows), dict.fromkeys(("psi", "js", "ks", "nulls", "norm", "mean_cosine"), 0)
    for _ in range(200):
        a, b = (column(r.normal(size=rows)) for _ in range(2))
        labels = [column(np.array(list("abcdefgh"))[r.integers(0, 8, rows)]) for _ in range(2)]
        vs = [column(r.normal(0.3, 1, (rows, 8))) for _ in range(2)]
        for name in ("psi", "js"):
            found = MEASURES[name](*labels)
            beyond[name] += found is not None and found.figure > found.chance
        for name, pair in (("ks", (a, b)), ("norm", vs)):
            found = MEASURES[name](*pair)
            beyond[name] += found is not None and found.figure > found.chance
        found = MEASURES["mean_cosine"](*vs)
        beyond["mean_cosine"] += found is not None and found.figure < found.chance
    assert max(beyond.values()) <= 2, beyond
    for freedom in (1, 7, 40, 900):
        assert chi_square(freedom) == pytest.approx(stats.chi2.ppf(0.999, freedom), rel=0.04)


def test_no_values_no_figure() -> None:
    """A column without values on a side is judged by its nulls alone."""
    none, some = (profiled(pa.table({"x": pa.array(v, "float64")}), ["x"]).columns["x"] for v in ([None], [1.0]))
    assert [name for name in MEASURES if MEASURES[name](none, some) is not None] == ["nulls"]
