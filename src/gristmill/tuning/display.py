"""A sweep's findings for people: tables with the curve drawn in them, and a picture of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gristmill.errors import BadJob
from gristmill.observe import units
from gristmill.observe.tables import Table
from gristmill.process.extras import require
from gristmill.tuning.sweep import Measured, Tuned

BAR = 30  # columns of the longest bar


def tables(found: Tuned) -> list[Table]:
    """One table of arrangements, if there was a choice, and one of budgets: the bars are the curve."""
    out = []
    if found.arrangements:
        default = f"at {found.default:,} {found.unit} a batch"
        out.append(_table(found, found.arrangements, "workers x threads", lambda m: str(m.arrangement), default))
    title = f"{found.model} with {found.best}"
    out.append(_table(found, found.budgets, f"{found.unit} a batch", lambda m: f"{m.budget:,}", title))
    return out


def _table(found: Tuned, lines: Sequence[Measured], first: str, name: Any, title: str) -> Table:
    best = max(m.rate for m in lines)
    rows = []
    for m in lines:
        bar = "█" * max(1, round(BAR * m.rate / best)) if m.rate else ""
        rows.append((name(m), _rate(m, found.unit), f"{m.padding:.1%}", bar, _remark(found, m, best)))
    return Table((first, f"{found.unit}/s", "padding", "", ""), tuple(rows), frozenset({0, 1, 2}), title)


def _rate(m: Measured, unit: str) -> str:
    return f"no {m.failed}" if m.failed else units.short_rate(m.rate).removesuffix("/s")


def _remark(found: Tuned, m: Measured, best: float) -> str:
    said = []
    if m in found.arrangements:
        said += ["best"] if m.rate == best else []
        said += ["now"] if m.arrangement == found.default_arrangement else []
    else:
        said += ["the knee"] if m.budget == found.knee else []
        said += ["best"] if m.rate == best else []
        said += ["the default"] if m.budget == found.default else []
    return ", ".join(said)


def as_dict(found: Tuned) -> dict[str, Any]:
    """Plain values for JSON."""

    def line(m: Measured) -> dict[str, Any]:
        told = {"workers": m.arrangement.workers, "threads": m.arrangement.threads, "backend": m.arrangement.backend}
        figures = {"budget": m.budget, "rate": round(m.rate, 2), "padding": round(m.padding, 4), "failed": m.failed}
        return {**told, "dtype": m.arrangement.dtype, **figures}

    return {
        "model": found.model,
        "unit": found.unit,
        "arrangements": [line(m) for m in found.arrangements],
        "budgets": [line(m) for m in found.budgets],
        "knee": found.knee,
        "default": found.default,
        "workers": found.best.workers,
        "threads": found.best.threads,
        "backend": found.best.backend,
        "notes": list(found.notes),
    }


def plot(found: Tuned, path: str) -> None:
    """The curve as a picture (PNG, SVG or PDF, by suffix). Raises MissingExtra without matplotlib, BadJob for a path
    that cannot be written.
    """
    require("matplotlib", "plot", "a picture of the curve")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    ran = [m for m in found.budgets if m.rate > 0]
    figure = Figure(figsize=(7, 4), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot([m.budget for m in ran], [m.rate for m in ran], marker="o")
    axes.axvline(found.knee, linestyle="--", color="grey")
    axes.annotate(f"knee {found.knee:,}", (found.knee, 0), xytext=(4, 6), textcoords="offset points")
    axes.set_xscale("log", base=2)
    axes.set_xticks([m.budget for m in ran], [f"{m.budget:,}" for m in ran])
    axes.set_ylim(bottom=0)
    axes.set_xlabel(f"{found.unit} a batch")
    axes.set_ylabel(f"{found.unit} a second, padding left out")
    axes.set_title(f"{found.model} with {found.best}", fontsize=9)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as e:
        raise BadJob(f"--plot {path}: cannot be written: {e}") from None
