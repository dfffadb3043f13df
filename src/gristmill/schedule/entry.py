"""A job file with a schedule, as those see it who run it."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

from gristmill.job.schedule import Schedule
from gristmill.jobfile.document import MOST_BYTES, read_document
from gristmill.jobfile.jobfile import read_job_file
from gristmill.jobfile.merging import normal
from gristmill.jobfile.scheduling import known_to
from gristmill.values import dataclass


@dataclass(frozen=True)
class Scheduled:
    """A job file that runs by itself: its schedule, its deadline, where its source is; whether `each` tick has a run
    of its own, rather than the latest one standing for those before it; and whether it `updates` its result.
    """

    schedule: Schedule
    each: bool
    deadline: str | None = None
    stops: bool = False
    source: tuple[str, ...] = ()
    updates: bool = False


def scheduled(path: str, now: datetime, environ: Mapping[str, str]) -> Scheduled | None:
    """The job in a file, checked as for a run at that time; None if it is not one with a schedule. Raises BadJob."""

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
    stops, updates = spec.on_deadline == "stop", spec.update is not None
    return Scheduled(spec.schedule, each, spec.deadline, stops, spec.source.uri, updates)
