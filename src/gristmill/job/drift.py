"""Limits of drift gates: which measures there are, and what a job may say of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gristmill.errors import BadJob, did_you_mean
from gristmill.job.annotations import is_of
from gristmill.values import dataclass


@dataclass(frozen=True)
class Limits:
    """What a measure may be: beyond `warn` a run warns, beyond `fail` nothing is published; None is no limit. A measure
    of what two results have in common (`least`) has lower limits, others upper ones.
    """

    warn: float | None
    fail: float | None
    least: bool = False

    def beyond(self, figure: float, limit: float | None, chance: float) -> bool:
        """Whether a figure is beyond one of the limits, and further than chance explains."""
        if limit is None:
            return False
        return figure < min(limit, chance) if self.least else figure > max(limit, chance)


# PSI: the usual rule, under 0.1 no change, over 0.25 a large one. Jensen-Shannon: Evidently warns at 0.1.
DEFAULTS: Mapping[str, Limits] = {
    "psi": Limits(0.1, 0.25),
    "ks": Limits(0.1, 0.2),
    "js": Limits(0.1, 0.2),
    "nulls": Limits(0.01, 0.05),
    "categories": Limits(0.01, 0.1),
    "mean_cosine": Limits(0.9, 0.8, least=True),
    "norm": Limits(0.1, 0.2),
}
# Which measures there are for a kind of column (profiles.columns.kind_of); the first ones are judged by default.
FITTING: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "whole": (("psi", "ks", "nulls"), ("js", "categories")),
    "number": (("psi", "ks", "nulls"), ("js", "categories")),
    "text": (("psi", "js", "categories", "nulls"), ("ks",)),
    "boolean": (("psi", "js", "nulls"), ("categories",)),
    "vector": (("mean_cosine", "norm", "nulls"), ()),
    "other": (("nulls",), ()),
}


def limits_of(drift: Mapping[str, Any] | None) -> Mapping[str, Mapping[str, Limits] | None]:
    """The limits of each column, by measure; None for a column that has the defaults of its kind. Raises BadJob."""
    return {column: _of_column(column, said) for column, said in (drift or {}).items()}


def measures_of(column: str, said: Mapping[str, Limits] | None, kind: str) -> Mapping[str, Limits]:
    """What is measured of a column of this kind. Raises BadJob for a measure that it does not have."""
    usual, others = FITTING[kind]
    if said is None:
        return {name: DEFAULTS[name] for name in usual}
    for name in said:
        if name not in (*usual, *others):
            what = "a column of another type" if kind == "other" else f"a {kind} column"
            raise BadJob(
                f"gates.drift.{column} has {name}, which {what} does not have: give {', '.join((*usual, *others))}"
            )
    return said


def _of_column(column: str, said: Any) -> Mapping[str, Limits] | None:
    if said is None or said is True or said == {}:
        return None
    if not isinstance(said, Mapping):
        raise BadJob(f"gates.drift.{column} is {said!r}: give measures with limits, for example {{psi: 0.25}}, or {{}}")
    for name in said:
        if name not in DEFAULTS:
            names = ", ".join(DEFAULTS)
            raise BadJob(
                f"gates.drift.{column} has no measure {name!r}: there are {names}{did_you_mean(name, DEFAULTS)}"
            )
    return {name: _limits(f"gates.drift.{column}.{name}", given, DEFAULTS[name]) for name, given in said.items()}


def _limits(place: str, given: Any, usual: Limits) -> Limits:
    """A number is the limit beyond which nothing is published. A limit that is not given is the usual one, or the other
    one if that comes first.
    """
    if given is None or given is True or given == {}:
        return usual
    said = {"fail": given} if is_of(given, float) else given
    lowest = -1 if usual.least else 0  # a cosine, or a distance
    if not isinstance(said, Mapping) or not all(
        v is None or (is_of(v, float) and lowest <= v < 1e300) for v in said.values()
    ):
        raise BadJob(
            f"{place} is {given!r}: give a number from {lowest}, or {{warn: {usual.warn:g}, fail: {usual.fail:g}}}"
        )
    if unknown := [name for name in said if name not in ("warn", "fail")]:
        near = did_you_mean(unknown[0], ["warn", "fail"])
        raise BadJob(f"{place} has no limit {unknown[0]!r}: give warn and fail{near}")
    warn, fail = said.get("warn", usual.warn), said.get("fail", usual.fail)
    if warn is None or fail is None:
        return Limits(warn, fail, usual.least)
    if len(said) == 2 and (warn < fail if usual.least else warn > fail):
        order = "at least" if usual.least else "at most"
        raise BadJob(f"{place} warns at {warn:g}, and fails at {fail:g}: warn has to be {order} fail")
    earlier, later = (max, min) if usual.least else (min, max)
    return Limits(
        warn if "warn" in said else earlier(warn, fail), fail if "fail" in said else later(warn, fail), usual.least
    )
