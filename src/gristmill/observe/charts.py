"""Small charts as SVG, drawn from numbers alone: no script, no font, no colour of their own but the page's."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from markupsafe import Markup, escape

from gristmill.observe import units

WIDTH, HEIGHT = 640, 160
MOST_POINTS = 60  # of a line: more than can be told apart on a telephone
LEFT, RIGHT, TOP, BOTTOM = 64, 8, 10, 22


def line(points: Sequence[tuple[float, float]], label: str) -> Markup:
    """A line over time, in seconds, from zero, with the greatest value beside it."""
    if len(points) < 2:
        return Markup("")
    end, top = max(x for x, _ in points) or 1.0, max(y for _, y in points) or 1.0
    path = " ".join(f"{_x(x / end):.1f},{_y(y / top):.1f}" for x, y in points)
    base = _y(0)
    area = f"{_x(points[0][0] / end):.1f},{base:.1f} {path} {_x(points[-1][0] / end):.1f},{base:.1f}"
    texts = [
        _text(LEFT - 6, TOP + 8, f"{_short(top)}/s", "end"), _text(LEFT - 6, base, "0", "end"),
        _text(LEFT, HEIGHT - 6, "0 s"), _text(WIDTH - RIGHT, HEIGHT - 6, units.seconds(end), "end"),
    ]  # fmt: skip
    drawn = f'<polygon class="area" points="{area}"/><polyline class="line" points="{path}"/>'
    return _svg(f"{_grid()}{drawn}{''.join(texts)}", label)


def columns(bars: Sequence[tuple[str, Sequence[tuple[str, float]]]], label: str) -> Markup:
    """Stacked columns: each has a name, and its parts, from the bottom, with the class that colours them."""
    if not bars:
        return Markup("")
    top = max(sum(value for _, value in parts) for _, parts in bars) or 1.0
    room = (WIDTH - LEFT - RIGHT) / max(len(bars), 4)
    drawn = []
    for i, (name, parts) in enumerate(bars):
        at, below = LEFT + i * room + room * 0.15, 0.0
        for kind, value in parts:
            high = (HEIGHT - TOP - BOTTOM) * value / top
            high = max(high, 1.5) if value else 0.0  # a few dead rows of a million are to be seen
            y = max(TOP - 2.0, _y(below / top) - high)
            drawn.append(_bar(kind, at, y, room * 0.7, high))
            below += value
        drawn.append(_text(at + room * 0.35, HEIGHT - 6, name, "middle"))
    greatest = [_text(LEFT - 6, TOP + 8, _short(top), "end"), _text(LEFT - 6, _y(0), "0", "end")]
    return _svg(f"{_grid()}{''.join(drawn)}{''.join(greatest)}", label)


def shares(bins: Sequence[str], before: Sequence[float], now: Sequence[float], label: str) -> Markup:
    """Two sets of shares (0..1), bin by bin, side by side."""
    if not bins:
        return Markup("")
    top = max([*before, *now, 1e-9])
    room = (WIDTH - LEFT - RIGHT) / len(bins)
    drawn = []
    for i, name in enumerate(bins):
        for j, (kind, value) in enumerate((("before", before[i]), ("now", now[i]))):
            high = (HEIGHT - TOP - BOTTOM) * value / top
            x = LEFT + i * room + room * (0.1 + 0.4 * j)
            drawn.append(_bar(kind, x, _y(0) - high, room * 0.38, high))
        if len(bins) <= 12:
            drawn.append(_text(LEFT + (i + 0.5) * room, HEIGHT - 6, name[:12], "middle"))
    greatest = [_text(LEFT - 6, TOP + 8, units.percent(top), "end"), _text(LEFT - 6, _y(0), "0", "end")]
    return _svg(f"{_grid()}{''.join(drawn)}{''.join(greatest)}", label)


def rates(pace: Sequence[tuple[float, int]]) -> list[tuple[float, float]]:
    """Throughput over time, from how many rows were done when: rows a second, at the end of each stretch of time."""
    if len(pace) < 2:
        return []
    step = -(-len(pace) // MOST_POINTS)
    kept = [*pace[::step], pace[-1]]
    found = [(t, (n - before) / (t - since)) for (since, before), (t, n) in pairwise(kept) if t > since]
    return [(kept[0][0], 0.0), *found]


def _x(share: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * share


def _y(share: float) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share


def _grid() -> str:
    lines = (
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{_y(s):.1f}" y2="{_y(s):.1f}"/>' for s in (0, 0.5, 1)
    )
    return "".join(lines)


def _bar(kind: str, x: float, y: float, wide: float, high: float) -> str:
    return f'<rect class="{escape(kind)}" x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{high:.1f}"/>'


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _short(n: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if n >= size:
            return f"{n / size:.3g} {unit}"
    return f"{n:.3g}"


def _svg(inside: str, label: str) -> Markup:
    return Markup(
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}"><title>{escape(label)}</title>'
        f"{inside}</svg>"
    )
