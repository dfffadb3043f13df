"""A run's warnings as Python's own warnings: for scripts, in which nobody watches a bar."""

from __future__ import annotations

import sys
import warnings

from gristmill.errors import GristmillWarning
from gristmill.observe.events import Note, Observer, Progress


class Warned:
    """Passes on the notes of a run, and turns its warnings into GristmillWarnings, except those about dead rows, which
    the caller reports when the run has ended.

    If a filter turns warnings into exceptions, the run is not stopped in the middle: `settle` raises the first.
    """

    def __init__(self, behind: Observer) -> None:
        self._behind = behind
        self._raised: GristmillWarning | None = None

    def progress(self, now: Progress) -> None:
        self._behind.progress(now)

    def note(self, note: Note) -> None:
        """Pass the note on, or turn it into a warning."""
        if note.level != "warning":
            self._behind.note(note)
        elif "rows_dead" not in note.fields:
            self.warn(note.text)

    def warn(self, text: str) -> None:
        """Issue a warning, located at the line of the user's code that called."""
        try:
            warnings.warn(text, GristmillWarning, stacklevel=_outside())
        except GristmillWarning as e:
            self._raised = self._raised or e

    def settle(self) -> None:
        if self._raised is not None:
            raise self._raised

    def close(self) -> None:
        self._behind.close()


def _outside() -> int:
    """How many frames up, counting the caller's own as 1, is the first outside this package, and outside what stands
    between two of its frames.
    """
    frame, level = sys._getframe(1), 1
    ours = ("gristmill", "contextlib", "functools")
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ours:
        frame, level = frame.f_back, level + 1
    return level
