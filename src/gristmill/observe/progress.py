"""Observers that show a run while it is running: a bar on a terminal, plain lines elsewhere, JSON lines, or nothing.

None of them can stop a run: a stream that fails (a closed pipe, a terminal that went away) is given up quietly.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, TextIO, cast

from gristmill.observe import units
from gristmill.observe.events import ENDED, Note, Observer, Progress, Silent
from gristmill.observe.streams import Sturdy, is_terminal
from gristmill.observe.tables import clean, clip, columns

Kind = Literal["auto", "bar", "lines", "json", "off"]
KINDS: tuple[Kind, ...] = ("auto", "bar", "lines", "json", "off")

FIRST_LINE_S = 5.0  # seconds between two plain lines at first; the gap grows, so that a long run's log stays short
MOST_LINE_S = 60.0
REDRAW_S = 0.1
BAR_AFTER_S = 0.3  # a run that ends sooner shows no bar: drawing it costs more than it tells
LEAST_BAR, MOST_BAR = 8, 40  # columns
ROOMY = 60  # columns from which the count has a unit


def make_observer(kind: Kind, stream: TextIO | None, clock: Callable[[], float] = time.monotonic) -> Observer:
    """The observer that `kind` names, writing to `stream`; "auto" is a bar on a terminal and lines elsewhere, "off"
    shows only warnings.
    """
    if stream is None:
        return Silent()
    if kind == "off":
        return Warnings(stream, clock)
    if kind == "json":
        from gristmill.observe.jsonlog import JsonLines

        return JsonLines(Sturdy(stream), clock)
    if kind == "bar" or (kind == "auto" and is_terminal(stream)):
        return Bar(stream, clock)
    return Lines(stream, clock)


class Several:
    """Several observers as one."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = tuple(observers)

    def progress(self, now: Progress) -> None:
        for observer in self._observers:
            observer.progress(now)

    def note(self, note: Note) -> None:
        for observer in self._observers:
            observer.note(note)

    def close(self) -> None:
        for observer in self._observers:
            observer.close()


# ---------------------------------------------------------------- plain lines

_LEVELS = {"warning": "warning: ", "error": "error: "}


def note_text(note: Note) -> str:
    """A note as people read it: printed text as it is, the rest with its level."""
    return note.text if note.level == "print" else _LEVELS.get(note.level, "") + note.text


class Lines:
    """A plain line at each new phase, and some between: after 5 s, then less and less often, up to a minute apart."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = Sturdy(stream)
        self._clock = clock
        self._doing: tuple[str, ...] = ()
        self._last = 0.0
        self._gap = FIRST_LINE_S
        self._told = ""

    def progress(self, now: Progress) -> None:
        """A line, if it is time for one. The report, or the error, that follows tells how it ended."""
        at = self._clock()
        if now.doing != self._doing:
            self._doing, self._gap = now.doing, FIRST_LINE_S
            if now.phase in ENDED:
                return
        elif at - self._last < self._gap:
            return
        else:
            self._gap = min(MOST_LINE_S, self._gap * 1.3)
        self._last = at
        said, before = line(now), self._told
        self._told = said
        # The same again is only a sign that it goes on: with since when, or it looks like a mistake.
        self._write(f"{said} … {units.clock(now.elapsed)}" if said == before else said)

    def note(self, note: Note) -> None:
        """The note, unless it is for debugging."""
        if note.level != "debug":
            self._write(note_text(note))

    def _write(self, text: str) -> None:
        self._stream.write(text + "\n")
        self._stream.flush()

    def close(self) -> None:
        """Does nothing: whoever opened the stream closes it."""


class Notes(Lines):
    """Shows notes and prints, but no progress."""

    def progress(self, now: Progress) -> None:
        """Does nothing."""


class Warnings(Notes):
    """Shows warnings and errors, but no progress and no prints."""

    def note(self, note: Note) -> None:
        """Show a warning or an error."""
        if note.level in _LEVELS:
            super().note(note)


def line(now: Progress) -> str:
    """A snapshot as a sentence: `running: 13,905 of 50,000 rows (27 %), 338 rows/s, 1:47 left, 5 dead, 2 workers`."""
    parts = []
    if now.waiting:
        parts.append(
            f"waiting for {clean(now.waiting)}" if not now.waiting.startswith("waiting") else clean(now.waiting)
        )
    if now.phase == "running":
        parts.append(_rows(now))
        if now.rows_per_second > 0:
            parts.append(units.rate(now.rows_per_second))
        if now.eta is not None:
            parts.append(f"{units.clock(now.eta)} left")
        if now.rows_dead:
            parts.append(f"{units.count(now.rows_dead)} dead")
        if now.used:
            parts.append(_asked(now.used))
        if now.workers:
            parts.append(units.plural(now.workers, "worker"))
        if now.shards_resumed and not now.shards_done > now.shards_resumed:
            parts.append(f"{units.plural(now.shards_resumed, 'shard')} done before")
    elif now.phase == "delivering" and now.delivery is not None:
        parts.append(clean(str(now.delivery)))
    elif now.phase == "loading" and now.workers_wanted:
        parts.append(units.plural(now.workers_wanted, "worker"))
    return f"{now.phase}: {', '.join(parts)}" if parts else now.phase


def _rows(now: Progress) -> str:
    if now.rows_total is None:
        return f"{units.plural(now.rows_done, 'row')} ({units.percent(now.share)} of the bytes)"
    return f"{units.count(now.rows_done)} of {units.plural(now.rows_total, 'row')} ({units.percent(done_share(now))})"


def _asked(used: Mapping[str, float]) -> str:
    """What the committed rows took of an endpoint: its price, if that is known, else how many requests."""
    return f"${used['cost']:.2f}" if "cost" in used else units.plural(int(used.get("requests", 0)), "request")


def done_share(now: Progress) -> float:
    """The share of the job that is done, by rows if their number is known."""
    return min(1.0, now.rows_done / now.rows_total) if now.rows_total else now.share


# ---------------------------------------------------------------- the bar


def bar_line(now: Progress, width: int, full: str = "━", empty: str = "╌") -> str:
    """A snapshot in one line of at most `width` columns; the least important parts are left out first."""
    running = now.phase == "running" and not now.waiting
    if now.phase == "delivering" and now.delivery is not None:
        return clip(f"{now.phase}: {clean(str(now.delivery))} … {units.clock(now.elapsed)}", width)
    head = "" if running else clean(now.waiting or now.phase)
    if not running and not now.rows_done:
        return clip(f"{head} … {units.clock(now.elapsed)}", width)
    roomy = width >= ROOMY
    total = "" if now.rows_total is None else units.count(now.rows_total)
    # Growing figures keep their width if there is room, so that the line does not jump.
    done = f"{units.count(now.rows_done):>{len(total) if roomy else 0}}{'/' + total if total else ''}{' rows' * roomy}"
    share = f"{int(done_share(now) * 100):>{3 * roomy}} %"  # rounded down: only all of it is 100 %
    # In the order of the line, each with its rank: rank 0 stays longest.
    parts = [
        (head, 1),
        (share, 0),
        (done, 2),
        (units.short_rate(now.rows_per_second) if running and now.rows_per_second > 0 else "", 4),
        (f"{units.clock(now.eta)} left" if running and now.eta is not None else "", 5),
        (f"{units.count(now.rows_dead)} dead" if now.rows_dead else "", 3),
        (_asked(now.used) if now.used else "", 4),
        (units.plural(now.workers, "worker") if running and now.workers else "", 6),
    ]
    kept = [part for part in parts if part[0]]
    while len(kept) > 1 and _length(kept) > width:
        kept.remove(max(kept, key=lambda part: part[1]))
    room = min(MOST_BAR, width - _length(kept) - 2)
    texts = [text for text, _ in kept]
    if room >= LEAST_BAR:
        filled = int(room * done_share(now))
        texts.insert(1 if head else 0, full * filled + empty * (room - filled))
    return clip("  ".join(texts), width)


def _length(parts: Sequence[tuple[str, int]]) -> int:
    return sum(columns(text) for text, _ in parts) + 2 * (len(parts) - 1)


class Bar:
    """One line at the foot of a terminal, redrawn in place; notes and the prints of user code go above it."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = Sturdy(stream)
        self._clock = clock
        self._begun = clock()
        self._drawn = self._heard = self._begun
        self._now = Progress()
        self._live: Any = None
        self._console: Any = None
        self._style = ("━", "╌") if _can_encode(stream, "━╌…") else ("#", "-")

    def progress(self, now: Progress) -> None:
        """Redraw, at most ten times a second; at a new phase at once."""
        if now.phase in ENDED:
            self.close()
            return
        new_phase = now.doing != self._now.doing
        self._now = now
        at = self._heard = self._clock()
        if at - self._begun < BAR_AFTER_S or self._stream.broken or (at - self._drawn < REDRAW_S and not new_phase):
            return
        self._drawn = at
        if self._live is None:
            self._start()
        self._live.refresh()

    def _start(self) -> None:
        from rich.live import Live

        # Live keeps the line and prints above it; its own thread redraws while the workers are silent, so that the
        # clock keeps running.
        self._live = Live(
            self,
            console=self._open_console(),
            refresh_per_second=2,
            transient=True,
            # What this process itself prints goes above the bar, unless it was redirected on purpose.
            redirect_stdout=is_terminal(sys.stdout),
            redirect_stderr=is_terminal(sys.stderr),
        )
        self._live.start()

    def _open_console(self) -> Any:
        if self._console is None:
            from rich.console import Console

            self._console = Console(
                file=cast("TextIO", self._stream), force_terminal=True, highlight=False, markup=False, emoji=False
            )
            # The cursor is never hidden: a run that is killed could not show it again.
            self._console.show_cursor = lambda show=True: False
        return self._console

    def __rich__(self) -> Any:
        from rich.text import Text

        now = replace(self._now, elapsed=self._now.elapsed + self._clock() - self._heard)
        text = Text(bar_line(now, self._console.width - 1, *self._style), no_wrap=True, overflow="crop")
        text.highlight_regex(f"{self._style[0]}+", "green")
        text.highlight_regex(r"[\d,]+ dead", "red")
        return text

    def note(self, note: Note) -> None:
        """Show the note above the bar."""
        if note.level != "debug":
            self._above(note_text(note))

    def _above(self, text: str) -> None:
        if self._live is None:
            self._stream.write(text + "\n")
            self._stream.flush()
            return
        from rich.text import Text

        self._console.print(Text(text))

    def close(self) -> None:
        """Remove the bar. Can be called again."""
        live, self._live = self._live, None
        if live is not None:
            live.stop()
        self._stream.flush()


def _can_encode(stream: Any, text: str) -> bool:
    try:
        text.encode(getattr(stream, "encoding", None) or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
