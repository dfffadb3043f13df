"""What user code prints, put together into lines: `print` writes its parts one by one, and workers write at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from gristmill.observe.events import Note

MOST_HELD = 10_000  # characters of an unfinished line; a progress bar of the user's own never ends one


class PrintedLines:
    """Notes of level "print" in, the same as whole lines out, kept apart by worker; other notes pass."""

    def __init__(self) -> None:
        self._held: dict[str, Note] = {}

    def whole(self, note: Note) -> Iterator[Note]:
        """The notes that can be shown now."""
        if note.level != "print":
            yield note
            return
        worker = str(note.fields.get("worker", ""))
        held = self._held.pop(worker, None)
        *lines, rest = ((held.text if held else "") + note.text).split("\n")
        if len(rest) > MOST_HELD:
            lines, rest = [*lines, rest], ""
        if rest:
            self._held[worker] = replace(note, text=rest)
        for line in lines:
            yield replace(note, text=line)

    def rest(self) -> list[Note]:
        """What was printed without a line's end, at the end of a run."""
        held, self._held = list(self._held.values()), {}
        return held
