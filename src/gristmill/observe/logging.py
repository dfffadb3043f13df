"""The observers of a run together: whoever is watching, and its log file. Secrets reach neither."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from gristmill.observe.events import Note, Observer, Progress
from gristmill.observe.progress import Several
from gristmill.plan.secret import Secret, scrub


@contextmanager
def logged(observer: Observer, log: str | None, secrets: Sequence[Secret] = ()) -> Iterator[Observer]:
    """`observer`, and a file of JSON lines beside it where `log` names one; both are closed in the end.

    Raises BadJob where the file cannot be opened.
    """
    if log:
        from gristmill.observe.jsonlog import JsonLog

        observer = Several([observer, JsonLog(log, time.monotonic)])
    try:
        yield Scrubbed(observer, secrets) if secrets else observer
    finally:
        observer.close()


class Scrubbed:
    """An observer that takes the values of secrets out of what libraries and the user's code say."""

    def __init__(self, observer: Observer, secrets: Sequence[Secret]) -> None:
        self._observer = observer
        self._secrets = list(secrets)

    def progress(self, now: Progress) -> None:
        """As it is: it holds names and figures."""
        self._observer.progress(now)

    def note(self, note: Note) -> None:
        """Its text without secrets; fields are names and figures, too."""
        self._observer.note(Note(note.level, scrub(note.text, self._secrets), note.fields))

    def close(self) -> None:
        """Close the observer behind."""
        self._observer.close()
