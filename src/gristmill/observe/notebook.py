"""A run in a notebook: the bar as an output of the cell, redrawn in place."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from gristmill.observe.events import ENDED, Note, Progress
from gristmill.observe.progress import bar_line, note_text

REDRAW_S = 0.3  # seconds: each redraw is a message to the browser
WIDTH = 100  # columns


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook. Imports nothing: in a kernel, IPython is loaded."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


class Cell:
    """Shows notes and prints as the cell's output, but no progress."""

    def progress(self, now: Progress) -> None:
        """Does nothing."""

    def note(self, note: Note) -> None:
        """Show the note as output of the cell."""
        if note.level != "debug":
            print(note_text(note), file=sys.stdout if note.level == "print" else sys.stderr)

    def close(self) -> None:
        """Does nothing."""


class NotebookBar(Cell):
    """Also shows one line below the cell, which stays with the last figures."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._drawn = -REDRAW_S
        self._phase = ""
        self._last = ""
        self._handle: Any = None

    def progress(self, now: Progress) -> None:
        """Redraw, three times a second; at a new phase at once."""
        at = self._clock()
        if now.phase == self._phase and at - self._drawn < REDRAW_S:
            return
        self._drawn, self._phase = at, now.phase
        text = bar_line(now, WIDTH)
        if now.phase not in ENDED or now.rows_done:
            self._show(text if now.phase != "done" else text.removeprefix("done  "))

    def _show(self, text: str) -> None:
        if text == self._last:
            return
        self._last = text
        from IPython.display import display  # type: ignore[import-not-found,unused-ignore]

        if self._handle is None:
            show: Any = display
            self._handle = show({"text/plain": text}, raw=True, display_id=True)
        else:
            self._handle.update({"text/plain": text}, raw=True)
