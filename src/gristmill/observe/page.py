"""The report of a sink as one page: a function from frozen values to HTML, with no script and nothing to fetch, in
which whatever a row, an error or a job contains is text.
"""

from __future__ import annotations

import functools
import shlex
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from gristmill.observe import charts, units
from gristmill.observe.facts import Drift, Night, SinkFacts
from gristmill.observe.report import DIGEST, asked
from gristmill.observe.standing import staged_lines
from gristmill.observe.tables import clean

_TONES = {"done": "good", "nothing to do": "good", "running": "mid", "unfinished": "mid", "stopped": "mid"}


def page(facts: SinkFacts, above: Sequence[tuple[str, str]] = ()) -> str:
    """The report as HTML. `above` are pages that it is one of, as texts with their addresses, where it is served."""
    run = facts.last
    night = facts.nights[-1] if facts.nights else None
    bars = [
        (str(n.generation), (("ok", n.rows_ok), ("dead", n.rows_dead), ("filtered", n.rows_filtered)))
        for n in facts.nights
    ]
    text: str = _template().render(
        f=facts,
        above=above,
        run=run,
        night=night,
        rates=[] if run is None else charts.rates(run.pace),
        night_bars=bars,
        changes=_changes(facts.nights),
        updates=any(n.updated for n in facts.nights),
        command=shlex.join(run.command) if run is not None and run.command else "",
    )
    return text


@functools.cache
def _template() -> Any:
    import jinja2

    loader = jinja2.PackageLoader("gristmill.observe", ".")
    around = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    around.filters |= {"shell": lambda text: shlex.quote(clean(text)), "pytext": repr}
    around.globals |= {
        "units": units, "charts": charts, "asked": asked, "clock": clock, "short": short, "tone": tone,
        "past_bars": past_bars, "staged_lines": staged_lines,
    }  # fmt: skip
    return around.get_template("page.html")


def past_bars(drift: Drift) -> list[tuple[str, tuple[tuple[str, float], ...]]]:
    """The figures of the generations before as columns, coloured by their verdicts."""
    return [(str(generation), ((verdict, abs(figure)),)) for generation, figure, verdict in drift.past]


def clock(at: float) -> str:
    """A time of this machine, to the minute: `2026-11-27 23:00`."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(at))


def short(digest: str) -> str:
    """Enough of a digest to tell it from others."""
    return digest.removeprefix("sha256:")[:DIGEST]


def tone(state: str) -> str:
    """The colour of a state."""
    return _TONES.get(state, "bad" if state in ("failed", "gate failed", "killed") else "")


def _changes(nights: Sequence[Night]) -> dict[int, str]:
    """By generation, how many rows more or fewer than the one before are ok: `+2.1 %`."""
    found = {night.generation: "" for night in nights}
    for before, now in pairwise(nights):
        if before.rows_ok and now.rows_ok != before.rows_ok:
            share = now.rows_ok / before.rows_ok - 1
            found[now.generation] = f"{'+' if share > 0 else '−'}{units.percent(abs(share))}"
    return found
