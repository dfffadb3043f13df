"""Every exception a user can meet, as one tree; the end that a signal asked for, which is no Exception; and the one
warning.

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
    "BatchFailed",
    "BatcherClosed",
    "CallTimeout",
    "CorruptStore",
    "GateFailed",
    "GristmillError",
    "GristmillWarning",
    "Interrupted",
    "MissingExtra",
    "PlanChanged",
    "QueueFull",
    "RemoteError",
    "RunFailed",
    "SinkBusy",
    "SourceChanged",
    "WorkerLost",
    "WrongOutput",
]


class GristmillError(Exception):
    """Base of all errors of this package. `exit_code` is what the command line returns for it."""

    exit_code: int = 1

    def __init__(self, message: str, *, report: Any = None) -> None:
        super().__init__(message)
        self.report = report


class GristmillWarning(UserWarning):
    """What the command line would warn of, from Python: above all, that rows are dead letters."""


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


class RemoteError(RunFailed):
    """An exception in a worker that cannot be raised again as what it was: its type, text and traceback as text."""


class CallTimeout(GristmillError, TimeoutError):
    """A call took longer than its `timeout`."""


class QueueFull(GristmillError, RuntimeError):
    """A call was refused: `max_queue` items wait already, and `when_full="refuse"`."""


class BatcherClosed(GristmillError, RuntimeError):
    """A call came after `close()`, or was still waiting when the batcher was closed with `cancel=True`."""


class WrongOutput(GristmillError, ValueError):
    """A batch function returned something that is not one result per item."""


class BatchFailed(GristmillError, RuntimeError):
    """A batch function ended with what is no ordinary error (SystemExit, KeyboardInterrupt, StopIteration, a
    cancellation), which would end its caller's thread or loop: it is this error's `__cause__`.
    """


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


class Interrupted(KeyboardInterrupt):
    """The run was stopped by a signal; running it again resumes it. 130 for SIGINT, 143 for SIGTERM.

    A script that catches the errors of one job (`except Exception`) to go on with the next is ended all the same.
    """

    exit_code: int = 130

    def __init__(self, message: str, *, exit_code: int = 130, report: Any = None) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.report = report


class Ended(Interrupted, SystemExit):
    """One that ends a script: where nobody catches it, with its exit code and without a traceback. Not for sessions in
    which a person types, whose interpreter it would end.
    """

    def __init__(self, message: str, *, exit_code: int = 130, report: Any = None) -> None:
        super().__init__(message, exit_code=exit_code, report=report)
        self.code = exit_code
