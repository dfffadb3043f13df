"""Every exception a user can meet, as one tree.

Each class carries the exit code that the command line ends with. An error's message names the value received, where
it stood, and the way out; `report` is set where a run happened before the error.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "BadJob",
    "BadModel",
    "BadOutput",
    "BadSource",
    "CorruptStore",
    "GateFailed",
    "GristmillError",
    "Interrupted",
    "MissingExtra",
    "PlanChanged",
    "RunFailed",
    "SinkBusy",
    "SourceChanged",
    "WorkerLost",
]


class GristmillError(Exception):
    """Base of all errors of this package. `exit_code` is what the command line returns for it."""

    exit_code: int = 1

    def __init__(self, message: str, *, report: Any = None) -> None:
        super().__init__(message)
        self.report = report


class BadJob(GristmillError):
    """The job cannot run as it is written; nothing was run."""

    exit_code = 2


class BadSource(BadJob):
    """A source file, folder or column is missing, unreadable or of the wrong type."""


class BadModel(BadJob):
    """What was given as a model is not one, or does not fit the source."""


class MissingExtra(BadJob):
    """A package that this job needs is not installed; the message holds the install command."""


class RunFailed(GristmillError):
    """The run stopped before it published; running it again resumes it."""

    exit_code = 1


class WorkerLost(RunFailed):
    """Workers die faster than they can be replaced."""


class CorruptStore(RunFailed):
    """A plan or a published file is not what its checksum says."""


class BadOutput(RunFailed):
    """A function returned something that cannot be one row per row: the job stops, nothing is zipped short."""


class GateFailed(GristmillError):
    """A gate did not hold; nothing new was published."""

    exit_code = 3


class PlanChanged(GristmillError):
    """Input, model or code are not those of the plan that this sink holds."""

    exit_code = 4


class SourceChanged(PlanChanged):
    """A source file changed while the run was reading it."""


class SinkBusy(GristmillError):
    """Another run holds this sink."""

    exit_code = 75


class Interrupted(GristmillError):
    """The run was stopped by a signal; running it again resumes it. 130 for SIGINT, 143 for SIGTERM."""

    exit_code = 130

    def __init__(self, message: str, *, exit_code: int = 130, report: Any = None) -> None:
        super().__init__(message, report=report)
        self.exit_code = exit_code
