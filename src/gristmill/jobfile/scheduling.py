"""What a job file's `schedule:` says of its variables: the time of a run is in them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from typing import Any

from gristmill.errors import BadJob, RunFailed, nearest
from gristmill.job.annotations import options_of
from gristmill.job.schedule import Schedule
from gristmill.jobfile.document import MOST_BYTES, Document, read_document
from gristmill.jobfile.merging import normal
from gristmill.jobfile.suffixes import SUFFIXES
from gristmill.jobfile.variables import references, variables_of

_TAKEN = {"timezone": "UTC", "shift": None}  # a run after others is for their time, so that it says it as they do


def inherited(document: Document, *, needed: bool = False) -> Document:
    """The document of a job that runs after others with their time zone and their shift, where it says none itself.
    The others are files in its folder. Of one that is not there, or cannot be read, or has no schedule nothing is
    known, for a while: where this is `needed`, as for the run of a tick, RunFailed is raised, so that it is tried
    again, and nothing runs for another day than was meant. Raises BadJob if they differ.
    """
    return _inherited(document, needed, frozenset())


def _inherited(document: Document, needed: bool, seen: frozenset[str]) -> Document:
    said = document.value.get("schedule")
    if not isinstance(said, dict) or not said.get("after") or all(name in said for name in _TAKEN):
        return document
    seen |= {os.path.realpath(document.name)}
    above = {one.name: _said(one, needed, seen) for one in _above(document, said["after"], needed, seen)}
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


def _said(document: Document, needed: bool, seen: frozenset[str]) -> dict[str, Any]:
    said = _inherited(document, needed, seen).value.get("schedule")
    return said if isinstance(said, dict) else {}


def _above(document: Document, after: Any, needed: bool, seen: frozenset[str]) -> Iterator[Document]:
    """The documents of the jobs that one runs after, but for those that run after it."""
    folder = os.path.dirname(document.name)
    for name in [after] if isinstance(after, str) else after if isinstance(after, list) else ():
        paths = [os.path.join(folder, f"{name}{suffix}") for suffix in ("", *SUFFIXES)]
        path = next((p for p in paths if p.endswith(SUFFIXES) and os.path.isfile(p)), None)
        if path is not None and os.path.realpath(path) in seen:
            continue
        found = _scheduled(path) if path is not None else f"which is no job file here{_near(name, folder)}"
        if isinstance(found, Document):
            yield found
        elif needed:
            raise RunFailed(
                f"{document.place(('schedule', 'after'))}: it runs after {name}, {found}, so that its time zone and "
                "shift are not known: run again once it can be read, or say both under schedule"
            )


def _scheduled(path: str) -> Document | str:
    """The document of a job with a schedule, or what is wrong with it."""
    try:
        with open(path, "rb") as file:
            found = normal(read_document(file.read(MOST_BYTES + 1), path))
    except BadJob as e:
        return f"which cannot be read: {e}"
    except OSError as e:
        return f"which cannot be read ({path}: {e.strerror})"
    return found if found.value.get("schedule") is not None else "which has no schedule"


def _near(name: str, folder: str) -> str:
    names = [e for e in os.listdir(folder or ".") if e.endswith(SUFFIXES)]
    close = nearest(name, [*names, *(os.path.splitext(e)[0] for e in names)])
    return f" (did you mean {close!r}?)" if close else ""


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
