"""The observers of a run combined: whoever is watching, and its log file. Neither sees secrets."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from gristmill.errors import BadJob
from gristmill.job.secret import Secret, scrub
from gristmill.observe.events import Note, Observer, Progress
from gristmill.observe.progress import Several


def check(observer: object) -> None:
    """Raises BadJob for what is no observer: only objects that have its methods can be told anything."""
    lacking = [name for name in ("progress", "note", "close") if not callable(getattr(observer, name, None))]
    if lacking or isinstance(observer, type):
        what = "it is a class: give one made of it" if not lacking else f"it has no {' and no '.join(lacking)}"
        raise BadJob(
            f"observer is {observer!r}: give an object with the methods progress(now), note(note) and close(); {what}"
        )


@contextmanager
def logged(observer: Observer, log: str | None, secrets: Sequence[Secret] = ()) -> Iterator[Observer]:
    """`observer`, and also a file of JSON lines if `log` names one; both are closed at the end.

    Raises BadJob if the file cannot be opened.
    """
    if log:
        from gristmill.observe.jsonlog import JsonLog

        observer = Several([observer, JsonLog(log, time.monotonic)])
    try:
        yield Scrubbed(observer, secrets) if secrets else observer
    finally:
        observer.close()


class Scrubbed:
    """An observer that removes the values of secrets from what libraries and the user's code report."""

    def __init__(self, observer: Observer, secrets: Sequence[Secret]) -> None:
        self._observer = observer
        self._secrets = list(secrets)

    def progress(self, now: Progress) -> None:
        """Passed on as it is: it holds names and figures."""
        self._observer.progress(now)

    def note(self, note: Note) -> None:
        """Passed on without secrets in its text; its fields hold names and figures, too."""
        self._observer.note(Note(note.level, scrub(note.text, self._secrets), note.fields))

    def close(self) -> None:
        self._observer.close()


class Unpublished:
    """Passes on all but what tells of publishing: a preview publishes nothing that anybody sees."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer

    def progress(self, now: Progress) -> None:
        """As of the observer."""
        if now.phase != "publishing":
            self._observer.progress(now)

    def note(self, note: Note) -> None:
        """As of the observer."""
        self._observer.note(note)

    def close(self) -> None:
        """As of the observer."""
        self._observer.close()
