"""The errors of dynamic batching, and how one error of a batch becomes a separate error for each caller."""

from __future__ import annotations

from typing import Any

from gristmill.errors import BatchFailed
from gristmill.process.ownership import own


def ordinary(error: BaseException) -> Exception:
    """The error that callers may be given for what the batch function raised."""
    if isinstance(error, Exception) and not isinstance(error, (StopIteration, StopAsyncIteration)):
        return error
    failed = BatchFailed(f"the batch function raised {type(error).__name__}({str(error)!r}) and gave no results")
    failed.__cause__ = error
    return failed


def personal(error: Exception) -> Exception:
    """A twin of `error`, with its type, arguments, attributes, notes, cause and traceback.

    Each caller of a failed batch raises its own, because raising writes to an exception (its traceback grows), and
    because what one caller adds to it does not concern the others. `__init__` of a class written in Python is not run
    again: its arguments may differ from those that it passes on.
    """
    try:
        twin = _twin(error)
    except Exception:  # a class with an unusual __new__
        twin = BatchFailed(f"{type(error).__name__}: {error}")
        twin.__cause__ = error
        return twin
    twin.__cause__, twin.__context__ = error.__cause__, error.__context__
    twin.__suppress_context__ = error.__suppress_context__
    return twin.with_traceback(error.__traceback__)


def _twin(error: Exception) -> Exception:
    kind: Any = type(error)
    builtin: Any = next(base for base in kind.__mro__ if base.__module__ == "builtins")
    # The built-in base knows what its C fields were built from: the file name of an OSError is not in `args`.
    arguments, *state = builtin.__reduce__(error)[1:]
    twin: Exception = kind.__new__(kind, *arguments)
    builtin.__init__(twin, *arguments)
    twin.args = own(error.args)
    if state:
        BaseException.__setstate__(twin, own(state[0]))
    if notes := getattr(error, "__notes__", None):
        vars(twin)["__notes__"] = list(notes)
    return twin
