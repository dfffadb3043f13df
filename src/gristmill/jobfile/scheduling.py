"""What a job file's `schedule:` says of its variables: the time of a run is in them."""

from __future__ import annotations

from datetime import datetime

from gristmill.errors import BadJob
from gristmill.job.annotations import options_of
from gristmill.job.schedule import Schedule
from gristmill.jobfile.document import Document
from gristmill.jobfile.variables import references, variables_of


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
