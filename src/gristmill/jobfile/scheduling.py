"""What a job file's `schedule:` says: of its variables, which the time of a run is in, and to those who run it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Scheduled:
    """A job file that runs by itself: its schedule, its deadline, where its source is; and whether `each` tick has a
    run of its own, rather than the latest one standing for those before it.
    """

    schedule: Schedule
    each: bool
    deadline: str | None = None
    stops: bool = False
    source: tuple[str, ...] = ()


def scheduled(path: str, now: datetime, environ: Mapping[str, str]) -> Scheduled | None:
    """The job in a file, checked as for a run at that time; None if it is not one with a schedule. Raises BadJob."""
    from gristmill.jobfile.document import MOST_BYTES, read_document
    from gristmill.jobfile.jobfile import read_job_file
    from gristmill.jobfile.merging import normal

    with open(path, "rb") as file:
        text = file.read(MOST_BYTES + 1)
    if len(text) > MOST_BYTES or b"schedule" not in text:  # nothing that is no job is read further
        return None
    document = normal(read_document(text, path))
    if document.value.get("schedule") is None:
        return None
    spec = read_job_file(path, environ=environ, tick=now)
    assert spec.schedule is not None
    each = spec.schedule.each_counts(known_to(document))
    return Scheduled(spec.schedule, each, spec.deadline, spec.on_deadline == "stop", spec.source.uri)
