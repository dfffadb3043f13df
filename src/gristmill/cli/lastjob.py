"""The job that last published a sink, as a job file inside the sink, so that `retry-dead SINK` needs no other.

It is a copy for convenience: the plan's fingerprint decides whether a job is the same. Secrets appear in it as
`${env:NAME}`, as everywhere; a job that seems to have one in plain text (a password in a URI, a token) is not copied.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gristmill.errors import BadJob
from gristmill.files.contract import Files
from gristmill.files.document import refuse_newer
from gristmill.job.delivery import secret_in
from gristmill.job.job import JobSpec
from gristmill.job.secret import Secret
from gristmill.job.secretnames import names_secret
from gristmill.values import dataclass

FORMAT = 1
_FIRST = re.compile(r"# What last published this sink(?:; format (\d+))?; started in (.*)\n")


@dataclass(frozen=True)
class LastJob:
    """`job.yaml`: the job as a job file, and the folder that it was started in."""

    text: str
    folder: str

    def dump(self) -> bytes:
        """The content of the file in the sink: a job file whose first line is ours."""
        return f"# What last published this sink; format {FORMAT}; started in {self.folder}\n{self.text}".encode()

    @staticmethod
    def load(data: bytes, path: str) -> LastJob:
        """Raises NewerFormat. If the first line is not ours, no folder is known."""
        text = data.decode("utf-8", "replace")
        found = _FIRST.match(text)
        if found is None:
            return LastJob(text, "")
        refuse_newer(path, "remembered job", int(found[1] or 1), FORMAT, "the job itself, with --job JOB")
        return LastJob(text[found.end() :], found[2])


def _path(root: str) -> str:
    return f"{root}/_gristmill/job.yaml"


def remember(spec: JobSpec, root: str, files: Files) -> None:
    """Write the job beside the plans. If it cannot be written, an older one is removed, too."""
    from gristmill.jobfile.writing import dump

    path = _path(root)
    with contextlib.suppress(OSError):  # only a convenience: the result is published anyway
        try:
            if holds_secret(spec):
                raise BadJob("a secret stands in the job")
            # Whoever scores again by hand need not have the secrets of those who are told of the nightly run.
            last = LastJob(dump(replace(spec, alerts=(), metrics=(), lineage=())), os.getcwd())
        except BadJob:
            files.remove(path)
            return
        files.note(path, last.dump())


def holds_secret(spec: JobSpec) -> bool:
    """Whether the job seems to have a secret that is written out."""
    from gristmill.job.uris import redact

    texts = [value for value in vars(spec.model).values() if isinstance(value, str) and value.split() == [value]]
    uris = [*spec.source.uri, *([spec.sink.uri] if spec.sink else []), *texts]
    if any(redact(uri) != uri for uri in uris) or any(secret_in(d.to) for d in spec.deliver):
        return True
    held: list[Any] = [
        spec.source.storage,
        spec.source.options,
        spec.engine.options,
        *(d.options for d in spec.deliver),
    ]
    held.append({name: value for name, value in vars(spec.model).items() if isinstance(value, str)})
    held.append(getattr(spec.model, "request", None))
    held += [spec.sink.storage, spec.sink.options] if spec.sink else []
    calls = [getattr(spec.model, "call", None), *(step.call for step in (*spec.steps, *spec.post))]
    return any(_named_secret(value) for value in [*held, *(call.args for call in calls if call is not None)])


def _named_secret(value: Any) -> bool:
    """Whether a mapping, or one inside it, has plain text, or a number, under a name that says that it is a secret."""
    if isinstance(value, Mapping):
        return any(
            (names_secret(str(key)) and _written_out(item)) or _named_secret(item) for key, item in value.items()
        )
    return isinstance(value, (list, tuple)) and any(_named_secret(item) for item in value)


def _written_out(value: Any) -> bool:
    """Whether a value may be a password as it is: on a command line one of digits is a number."""
    several = value if isinstance(value, (list, tuple)) else [value]
    return any(type(v) is int or (isinstance(v, str) and not isinstance(v, Secret)) for v in several)


def remembered(root: str, files: Files) -> LastJob | None:
    """The job file in a sink, as it is; None if there is none."""
    try:
        return LastJob.load(files.read(_path(root)), _path(root))
    except FileNotFoundError:
        return None


def recall(root: str, files: Files) -> tuple[JobSpec, str]:
    """The job that last published the sink, and the folder it was started in, where its relative paths and its modules
    are. Raises BadJob if none is known.
    """
    from gristmill.jobfile.jobfile import read_job_file

    try:
        last = LastJob.load(files.read(_path(root)), _path(root))
        with files.local(_path(root)) as path:
            return read_job_file(path, environ=os.environ), last.folder
    except FileNotFoundError:
        raise BadJob(
            f"{root}: the job that wrote it is not known here (it was run from Python, or has a secret): give it with "
            "--job JOB, or call gm.retry_dead(job)"
        ) from None
