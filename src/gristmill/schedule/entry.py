"""A job file with a schedule, as those see it who run it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from datetime import datetime

from gristmill.errors import nearest
from gristmill.job.schedule import Schedule
from gristmill.job.synonyms import meant
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


_KEYS = re.compile(rb"(?m)^['\"]?(\w+)['\"]?[ \t]*:")


def _mistyped(text: bytes) -> bool:
    """Whether the text looks like a job with a schedule under another name: left out, it would never run, untold."""
    keys = {key.decode("ascii", "replace") for key in _KEYS.findall(text)}
    mine = [field.name for field in fields(Schedule) if field.name != "vars"]  # which a job has, too
    return {"source", "model"} <= keys and any(
        key != "schedule" and (key in mine or nearest(key, ["schedule"]) or meant(key, mine)) for key in keys
    )


def scheduled(path: str, now: datetime, environ: Mapping[str, str]) -> Scheduled | None:
    """The job in a file, checked as for a run at that time; None if it is not one with a schedule. Raises BadJob."""

    with open(path, "rb") as file:
        text = file.read(MOST_BYTES + 1)
    mistyped = _mistyped(text)
    if len(text) > MOST_BYTES or (b"schedule" not in text and not mistyped):  # nothing that is no job is read further
        return None
    document = normal(read_document(text, path))
    if document.value.get("schedule") is None:
        if mistyped:
            read_job_file(path, environ=environ)  # says how the key is called
        return None
    spec = read_job_file(path, environ=environ, tick=now)
    assert spec.schedule is not None
    each = spec.schedule.each_counts(known_to(document))
    stops, updates = spec.on_deadline == "stop", spec.update is not None
    return Scheduled(spec.schedule, each, spec.deadline, stops, spec.source.uri, updates)
