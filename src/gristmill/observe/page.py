"""The report of a sink as one page: a function from frozen values to HTML, with no script and nothing to fetch, in which
whatever a row, an error or a job contains is text.
"""

from __future__ import annotations

import functools
import shlex
import time
from collections.abc import Sequence
from typing import Any

from gristmill.observe import charts, units
from gristmill.observe.facts import Night, SinkFacts
from gristmill.observe.report import DIGEST, asked
from gristmill.observe.tables import clean

_STATES = {
    "done": "done and published",
    "running": "running",
    "unfinished": "not finished: run the job again to resume",
    "empty": "nothing was run here",
}
_TONES = {"done": "good", "nothing to do": "good", "running": "mid", "unfinished": "mid", "stopped": "mid"}


def page(facts: SinkFacts) -> str:
    """The report as HTML."""
    run = facts.last
    night = facts.nights[-1] if facts.nights else None
    bars = [(str(n.generation), (("ok", n.rows_ok), ("dead", n.rows_dead), ("filtered", n.rows_filtered))) for n in facts.nights]
    text: str = _template().render(
        f=facts,
        run=run,
        night=night,
        rates=[] if run is None else charts.rates(run.pace),
        night_bars=bars,
        changes=_changes(facts.nights),
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
        "state_words": lambda state: _STATES.get(state, state),
    }  # fmt: skip
    return around.get_template("page.html")


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
    for before, now in zip(nights, nights[1:], strict=False):
        if before.rows_ok and now.rows_ok != before.rows_ok:
            share = now.rows_ok / before.rows_ok - 1
            found[now.generation] = f"{'+' if share > 0 else '−'}{units.percent(abs(share))}"
    return found


def lines(facts: SinkFacts) -> list[tuple[str, str]]:
    """The same for a terminal, as labels and texts."""
    out = [("sink", facts.sink), ("state", _STATES.get(facts.state, facts.state))]
    if facts.state != "done" and facts.now.get("gate"):
        out.append(("gate", str(facts.now["gate"])))
    out += [("incident", f"{one.kind} since {clock(one.since)}: {one.text}") for one in facts.incidents]
    out += [(name, f"{figure}  {remark}".rstrip()) for name, figure, remark in facts.rows]
    for night in reversed(facts.nights):
        parts = f"{night.rows_ok:,} ok, {night.rows_dead:,} dead, {night.rows_filtered:,} filtered"
        took = f"in {units.seconds(night.seconds)}, {night.model} {short(night.digest)}".rstrip()
        out.append(("gen. " + str(night.generation), f"{night.published[:16].replace('T', ' ')}  {parts}, {took}"))
    out += [("drift", f"{d.column}: {d.figure} {d.value:.3g}, {d.verdict}") for d in facts.drift]
    for kind in facts.kinds:
        first = f": {kind.examples[0].where}: {kind.examples[0].message}" if kind.examples else ""
        out.append(("error", f"{kind.error}, {units.plural(kind.rows, 'row')}{first}"))
    run = facts.last
    if run is not None:
        out += [("slow", f"shard {s.shard}: {units.seconds(s.seconds)}, {units.plural(s.rows, 'row')}, {s.source} {s.start:,}-{s.stop:,}") for s in run.slowest[:3]]
        out += [("worker", f"{w.worker} {w.host}: {units.short_rate(w.rows_per_second)}, {units.plural(w.rows, 'row')}") for w in run.per_worker]
    for one in facts.runs[::-1][:5]:
        why = f": {one.error}" if one.error else ""
        out.append(("run", f"{clock(one.started)}  {one.state} after {units.seconds(one.seconds)}, {units.plural(one.rows, 'row')}{why}"))
    out += [(name, text) for name, text in facts.digests if not name.startswith(("code ", "option "))]
    if run is not None and run.command:
        out.append(("again", f"cd {shlex.quote(run.folder)} && {shlex.join(run.command)}"))
    return out
