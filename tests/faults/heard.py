"""An observer for tests, which keeps the notes that a run gives."""

from __future__ import annotations

from gristmill.observe.events import Note, Progress


class Heard:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.notes: list[Note] = []
        self.waited: list[str] = []

    def progress(self, now: Progress) -> None:
        """What was waited for."""
        if now.waiting and now.waiting not in self.waited:
            self.waited.append(now.waiting)

    def note(self, note: Note) -> None:
        """Keep it."""
        self.notes.append(note)

    def close(self) -> None:
        """Nothing to close."""

    def deaths(self) -> int:
        """Workers that died, as the run's notes tell."""
        return sum(n.text.startswith("worker ") and " ended (" in n.text for n in self.notes)

    def printed(self) -> str:
        """What user code printed."""
        return "".join(n.text + "\n" for n in self.notes if n.level == "print")
