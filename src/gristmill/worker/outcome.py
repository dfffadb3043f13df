"""What an item's failure calls for from the driver."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from gristmill.errors import BadModel, BadOutput, GristmillError, MissingExtra, SourceChanged
from gristmill.job.secret import Secret, scrub
from gristmill.models.returns import Undeclared
from gristmill.process.failure import failure_of
from gristmill.process.messages import Elsewhere, Failure, FailureKind
from gristmill.worker.bisection import ModelBroken
from gristmill.worker.shardcommit import Uncounted

if TYPE_CHECKING:
    pass


def classified(error: BaseException) -> Failure:
    """An item's failure with the kind of decision that it calls for from the driver."""
    import errno

    if isinstance(error, (ModelBroken, Elsewhere)) and error.failure is not None:
        return error.failure
    kind: FailureKind = "other"
    if isinstance(error, Undeclared):
        kind = "undeclared"
    elif isinstance(error, BadOutput):
        kind = "output"
    elif isinstance(error, SourceChanged):
        kind = "source"
    elif isinstance(error, (BadModel, MissingExtra)):
        kind = "load"
    elif isinstance(error, Uncounted):
        kind = "uncounted"
    elif isinstance(error, GristmillError):
        kind = "job"
    elif isinstance(error, OSError):
        full = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)
        kind = "space" if error.errno in full else "io"
    elif isinstance(error, MemoryError):
        kind = "memory"
    return failure_of(error, kind)


def scrubbed(failure: Failure, secrets: tuple[Secret, ...]) -> Failure:
    """The failure without the values of secrets, which a library may have put into its message."""
    if not secrets:
        return failure
    return replace(failure, message=scrub(failure.message, secrets), traceback=scrub(failure.traceback, secrets))
