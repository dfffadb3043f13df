"""The job that last published a sink, as a job file inside the sink, so that `retry-dead SINK` needs no other.

It is a copy for convenience: the plan's fingerprint decides whether a job is the same. Secrets stand in it as
`${env:NAME}`, as everywhere; a job that seems to hold one as it is (a password in a URI, a token) is not copied.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import Any

from gristmill.errors import BadJob
from gristmill.plan.contracts import Files
from gristmill.plan.job import JobSpec
from gristmill.plan.secret import SECRET_NAME, Secret

STARTED_IN = "; started in "


def _path(root: str) -> str:
    return f"{root}/_gristmill/job.yaml"


def remember(spec: JobSpec, root: str, files: Files) -> None:
    """Write the job beside the plans. A job that cannot be written leaves none, and takes an older one away."""
    from gristmill.plan.jobfile import dump

    path = _path(root)
    with contextlib.suppress(OSError):  # a convenience: what is published is published
        try:
            if _holds_secret(spec):
                raise BadJob("a secret stands in the job")
            text = f"# What last published this sink{STARTED_IN}{os.getcwd()}\n{dump(spec)}"
        except BadJob:
            files.remove(path)
            return
        files.note(path, text.encode())


def _holds_secret(spec: JobSpec) -> bool:
    from gristmill.io.redact import redact

    uris = [*spec.source.uri, *([spec.sink.uri] if spec.sink else [])]
    if any(redact(uri) != uri for uri in uris):
        return True
    held: list[Any] = [spec.source.storage, spec.source.options, spec.engine.options]
    held += [spec.sink.storage, spec.sink.options] if spec.sink else []
    calls = [getattr(spec.model, "call", None), *(step.call for step in (*spec.steps, *spec.post))]
    return any(_named_secret(value) for value in [*held, *(call.args for call in calls if call is not None)])


def _named_secret(value: Any) -> bool:
    """Whether a mapping, or one in it, has plain text under a name that says that it is a secret."""
    if isinstance(value, Mapping):
        return any(
            (SECRET_NAME.search(str(key)) and isinstance(item, str) and not isinstance(item, Secret))
            or _named_secret(item)
            for key, item in value.items()
        )
    return isinstance(value, (list, tuple)) and any(_named_secret(item) for item in value)


def recall(root: str, files: Files) -> tuple[JobSpec, str]:
    """The job that last published the sink, and the folder that it was started in, where its relative paths and its
    modules are. Raises BadJob where none is known.
    """
    from gristmill.plan.jobfile import read_job_file

    try:
        with files.local(_path(root)) as path:
            with open(path, encoding="utf-8") as file:
                folder = file.readline().rstrip("\n").partition(STARTED_IN)[2]
            return read_job_file(path, environ=os.environ), folder
    except FileNotFoundError:
        raise BadJob(
            f"{root}: the job that wrote it is not known here (it was run from Python, or has a secret): give it with "
            "--job JOB, or call gm.retry_dead(job)"
        ) from None
