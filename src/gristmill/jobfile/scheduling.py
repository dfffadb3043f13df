"""What a job file's `schedule:` says of its variables: the time of a run is in them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from typing import Any

from gristmill.errors import BadJob
from gristmill.job.annotations import options_of
from gristmill.job.schedule import Schedule
from gristmill.jobfile.document import MOST_BYTES, Document, read_document
from gristmill.jobfile.merging import normal
from gristmill.jobfile.suffixes import SUFFIXES
from gristmill.jobfile.variables import references, variables_of

_TAKEN = {"timezone": "UTC", "shift": None}  # a run after others is for their time, so that it says it as they do


def inherited(document: Document) -> Document:
    """The document of a job that runs after others with their time zone and their shift, where it says none itself.
    The others are files in its folder; one that is not there, or cannot be read, says nothing. Raises BadJob if they
    differ.
    """
    return _inherited(document, frozenset())


def _inherited(document: Document, seen: frozenset[str]) -> Document:
    said = document.value.get("schedule")
    if not isinstance(said, dict) or not said.get("after") or all(name in said for name in _TAKEN):
        return document
    seen |= {os.path.realpath(document.name)}
    above = {one.name: _said(one, seen) for one in _above(document, said["after"], seen)}
    taken: dict[str, Any] = {}
    for name, usual in _TAKEN.items():
        found = {path: one.get(name) or usual for path, one in above.items()}
        if name in said or not found:
            continue
        if len(set(map(str, found.values()))) > 1:
            each = " and ".join(f"{'none' if value is None else value} ({path})" for path, value in found.items())
            raise BadJob(
                f"{document.place(('schedule', 'after'))}: schedule after: the {name} of the jobs before it differs, "
                f"{each}: say which is that of its variables, with {name} under schedule"
            )
        taken[name] = next(iter(found.values()))
    return replace(document, value={**document.value, "schedule": {**said, **taken}})


def _said(document: Document, seen: frozenset[str]) -> dict[str, Any]:
    said = _inherited(document, seen).value.get("schedule")
    return said if isinstance(said, dict) else {}


def _above(document: Document, after: Any, seen: frozenset[str]) -> Iterator[Document]:
    folder = os.path.dirname(document.name)
    for name in [after] if isinstance(after, str) else after if isinstance(after, list) else ():
        for path in (os.path.join(folder, f"{name}{suffix}") for suffix in ("", *SUFFIXES)):
            if path.endswith(SUFFIXES) and os.path.isfile(path):
                if os.path.realpath(path) not in seen and (found := _read(path)) is not None:
                    yield found
                break


def _read(path: str) -> Document | None:
    try:
        with open(path, "rb") as file:
            return normal(read_document(file.read(MOST_BYTES + 1), path))
    except (BadJob, OSError):  # whoever runs that job tells it
        return None


def schedule_of(document: Document) -> Schedule | None:
    """The schedule of a document, of which no variable is filled in. Raises BadJob, with the place."""
    said = document.value.get("schedule")
    if not isinstance(said, dict) or any(name not in options_of(Schedule) for name in said):
        return None  # the check of the whole document tells more
    try:
        return Schedule(**said)
    except BadJob as e:
        raise BadJob(f"{document.place(('schedule',))}: {e}") from None


def variables_at(document: Document, tick: datetime) -> dict[str, str]:
    """The variables that the run of a tick is given. Raises BadJob if the document has no schedule."""
    schedule = schedule_of(document)
    if schedule is None:
        if document.value.get("schedule") is not None:
            return {}
        raise BadJob(f"--scheduled: {document.name} has no schedule: give its variables with --var NAME=VALUE")
    return schedule.variables(tick, known_to(document))


def told(document: Document) -> dict[str, str]:
    """The variables that the schedule itself names, with how they were given."""
    schedule = schedule_of(document)
    names = (schedule.vars or {}) if schedule is not None else {}
    return {name: f"{document.place(('schedule', 'vars', name))}: schedule.vars {name}" for name in names}


def known_to(document: Document) -> set[str]:
    """The variables that a document declares or uses."""
    return {*variables_of(document), *references(document)}
