"""What a run reports as JSON, one object per line: for log collectors, and for programs that watch a run."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from typing import Any, TextIO

from gristmill.errors import BadJob
from gristmill.job.uris import local_path
from gristmill.observe.events import Note, Progress
from gristmill.observe.report import Report
from gristmill.observe.streams import Sturdy

EVERY_S = 5.0  # seconds between two progress lines of one phase: a day of running stays under 20,000 lines


def record(event: str, values: Mapping[str, Any]) -> str:
    """One line: the time (UTC, RFC 3339), the event's name, its values. Values without a JSON form become text."""
    now = datetime.now(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return json.dumps({"time": now, "event": event, **_finite(values)}, default=str, ensure_ascii=False)


def _finite(value: Any) -> Any:
    """The value, with floats rounded to 4 decimal places; NaN and infinity, which JSON lacks, become null."""
    if isinstance(value, float):
        return round(value, 4) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value


def of_progress(now: Progress) -> str:
    """A progress line."""
    return record("progress", dataclasses.asdict(now))


def of_note(note: Note) -> str:
    """A line for a note; its fields are beside level and text."""
    return record("note", {**note.fields, "level": note.level, "text": note.text})


def of_report(report: Report) -> str:
    """The last line of a run: its report."""
    return record("report", report.as_dict())


class JsonLines:
    """An observer that writes JSON lines: each note, and progress at phase changes and every few seconds."""

    def __init__(self, stream: TextIO | Sturdy, clock: Callable[[], float], every: float = EVERY_S) -> None:
        self._stream = stream
        self._clock = clock
        self._every = every
        self._doing: tuple[str, ...] = ()
        self._last = -math.inf

    def progress(self, now: Progress) -> None:
        """A line, unless the last one of the same phase was written a moment ago."""
        at = self._clock()
        if now.doing == self._doing and at - self._last < self._every:
            return
        self._doing, self._last = now.doing, at
        self._write(of_progress(now))

    def note(self, note: Note) -> None:
        self._write(of_note(note))

    def _write(self, line: str) -> None:
        self._stream.write(line + "\n")
        self._stream.flush()

    def close(self) -> None:
        """Does nothing: whoever opened the stream closes it."""


class JsonLog(JsonLines):
    """JSON lines appended to a file of their own. Raises BadJob if it cannot be opened."""

    def __init__(self, path: str, clock: Callable[[], float], every: float = EVERY_S) -> None:
        try:
            self._file = open(local_path(path), "a", encoding="utf-8", errors="replace")  # noqa: SIM115
        except OSError as e:
            raise BadJob(f"log {path}: cannot be written: {e.strerror}: give another file") from None
        super().__init__(Sturdy(self._file), clock, every)

    def close(self) -> None:
        """Close the file. A full disk does not fail the run: the log's lines are lost."""
        super().close()
        try:
            self._file.close()
        except OSError:
            return
