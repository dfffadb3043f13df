"""The job that last published a sink, as a job file inside the sink, so that `retry-dead SINK` needs no other.

It is a copy for convenience: the plan's fingerprint decides whether a job is the same. Secrets stand in it as
`${env:NAME}`, as everywhere.
"""

from __future__ import annotations

import contextlib
import os

from gristmill.errors import BadJob
from gristmill.plan.job import JobSpec


def _path(root: str) -> str:
    return os.path.join(root, "_gristmill", "job.yaml")


def remember(spec: JobSpec, root: str) -> None:
    """Write the job beside the plans. A job that only Python can hold leaves none, and takes an older one away."""
    from gristmill.plan.jobfile import dump

    path = _path(root)
    with contextlib.suppress(OSError):  # a convenience: what is published is published
        try:
            text = f"# What last published this sink; started in {os.getcwd()}\n{dump(spec)}"
        except BadJob:
            os.remove(path)
            return
        with open(path + ".tmp", "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(path + ".tmp", path)


def recall(root: str) -> JobSpec:
    """The job that last published the sink. Raises BadJob where none is known."""
    from gristmill.plan.jobfile import read_job_file

    if not os.path.exists(_path(root)):
        raise BadJob(
            f"{root}: the job that wrote it is not known here (it was run from Python): give it with --job JOB"
        )
    return read_job_file(_path(root), environ=os.environ)
