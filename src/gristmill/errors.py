"""Every exception a user can meet, as one tree; the stop by a signal, which is not an Exception; and the one warning.

Each class carries the exit code that the command line ends with. An error's message names the value received, where
it was, and the way out; `report` is set if a run happened before the error.
"""

from __future__ import annotations

import contextlib
import difflib
import sys
import threading
from collections.abc import Iterable, Sequence
from typing import Any

__all__ = [
    "BadJob",
    "BadKey",
    "BadModel",
    "BadOutput",
    "BadSource",
    "BatchFailed",
    "BatcherClosed",
    "CallTimeout",
    "CorruptStore",
    "DeadlineMissed",
    "GateFailed",
    "GristmillError",
    "GristmillWarning",
    "Interrupted",
    "MissingExtra",
    "NewerFormat",
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
    """Base of all errors of this package. `exit_code` is what the command line returns for it, and `incident` the kind
    of alert that a run makes which ends with it ("": none).
    """

    exit_code: int = 1
    incident: str = "failed"

    def __init__(self, message: str, *, report: Any = None) -> None:
        super().__init__(message)
        self.report = report


class GristmillWarning(UserWarning):
    """What the command line would warn of, from Python: above all, that rows are dead letters."""


class BadJob(GristmillError):
    """The job cannot run as it is written; nothing was run. Of a delivery: the published result does not fit the store,
    and to try again does not help.
    """

    exit_code = 2


class BadSource(BadJob):
    """A source file, folder or column is missing, unreadable or of the wrong type."""


class BadModel(BadJob):
    """What was given as a model is not a model, or does not fit the source."""


class BadKey(BadJob):
    """A key of a lookup is none: it names other columns than the key has, or a value is of another type."""


class MissingExtra(BadJob):
    """A package that this job needs is not installed; the message holds the install command."""


class RunFailed(GristmillError):
    """The run stopped before it published; running it again resumes it."""

    exit_code = 1


class WorkerLost(RunFailed):
    """Workers die faster than they can be replaced."""


class RemoteError(RunFailed):
    """An exception in a worker that cannot be raised again as itself: its type, message and traceback as text."""


class CallTimeout(GristmillError, TimeoutError):
    """A call took longer than its `timeout`."""


class QueueFull(GristmillError, RuntimeError):
    """A call was refused: `max_queue` items are already waiting, and `when_full="refuse"`."""


class BatcherClosed(GristmillError, RuntimeError):
    """A call came after `close()`, or was still waiting when the batcher was closed with `cancel=True`."""


class WrongOutput(GristmillError, ValueError):
    """A batch function returned something that is not one result per item."""


class BatchFailed(GristmillError, RuntimeError):
    """A batch function raised something that would end its caller's thread or loop (SystemExit, KeyboardInterrupt,
    StopIteration, a cancellation), which is this error's `__cause__`.
    """


class CorruptStore(RunFailed):
    """A plan or a published file does not match its checksum."""


class NewerFormat(GristmillError):
    """A document of a sink, or a file of saved results, has a format from a later version that this version does not
    know.
    """

    exit_code = 2


# Said of a function that returned more rows, or fewer.
ONE_FOR_EACH = "it must return one row for each (steps that do not: gm.flat_map, which makes several, and gm.filter)"


class BadOutput(RunFailed):
    """A function returned something other than one row per row: the job stops, and no rows are silently dropped."""


class GateFailed(GristmillError):
    """A gate did not hold; nothing new was published. `gates` names those that did not, and what each is about."""

    exit_code = 3
    incident = "gate"

    def __init__(self, message: str, *, report: Any = None, gates: Sequence[str] = ()) -> None:
        super().__init__(message, report=report)
        self.gates = tuple(gates)


class DeadlineMissed(GateFailed):
    """The deadline has passed and `on_deadline` is stop: nothing new was published, and what was scored is kept."""


class PlanChanged(GristmillError):
    """Input, model or code are not those of the plan that this sink holds."""

    exit_code = 4


class SourceChanged(PlanChanged):
    """A source file changed while the run was reading it."""


class SinkBusy(GristmillError):
    """Another run holds this sink."""

    incident = ""

    exit_code = 75


class Interrupted(KeyboardInterrupt):
    """The run was stopped by a signal; running it again resumes it. 130 for SIGINT, 143 for SIGTERM.

    It is not an Exception, so it also ends a script that catches the errors of one job (`except Exception`) to continue
    with the next.
    """

    exit_code: int = 130

    def __init__(self, message: str, *, exit_code: int = 130, report: Any = None) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.report = report


class Ended(Interrupted, SystemExit):
    """A stop that, if not caught, ends a script with its exit code and without a traceback. Not for interactive
    sessions, whose interpreter it would end.
    """

    _told = False

    @property
    def code(self) -> int:  # type: ignore[override]  # what an interpreter asks for before it exits
        """The exit code. Asked for the first time, says on standard error why the script ends."""
        if not self._told:
            self._told = True
            with contextlib.suppress(Exception):  # whatever a script has made of the stream: its exit code is this
                print(f"gristmill: {self}", file=sys.stderr)
        return self.exit_code


NEAR = 0.7  # how alike names of other lengths must be for one to be suggested: at 0.6 "nope" is taken for "np"


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The closest match for `name` among `names`, ignoring case; None if none is close."""
    by_fold = {n.casefold(): n for n in names}
    asked = name.casefold()
    # Of short names: letters in another order, a wrong one, one twice.
    swapped = [known for known in by_fold if sorted(known) == sorted(asked)]
    alike = [k for k in difflib.get_close_matches(asked, by_fold) if len(k) == len(asked) or set(k) == set(asked)]
    close = difflib.get_close_matches(asked, by_fold, 1, NEAR) or swapped or alike
    return by_fold[close[0]] if close else None


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """ "; did you mean 'text'?", or nothing."""
    names = list(names)
    close = nearest(name, names)
    return undivided(names) or ("" if close is None else f"; did you mean {close!r}?")


MARKS = (b"\t", b";", b"|")  # what separates the fields of CSV files, if not commas


def undivided(names: Iterable[str]) -> str:
    """What to ask about a single column that is called like several, as the header of a CSV file in which another
    delimiter separates them; else nothing.
    """
    names = tuple(names)
    mark = next((m for m in map(bytes.decode, MARKS) if m in names[0].strip(m)), None) if len(names) == 1 else None
    if mark is None:
        return ""
    shown = repr("tab" if mark == "\t" else mark)
    return f"; is the delimiter {shown}? (--delimiter {shown}, options={{'delimiter': {shown}}})"


def in_one_line(error: BaseException) -> str:
    """A message whose lines are told apart where there is one line for it."""
    lines = [" ".join(line.split()) for line in str(error).splitlines()]
    said = [line for line in lines if line]
    parts = [line if line.endswith((".", ":", ";", ",")) else f"{line};" for line in said[:-1]]
    return " ".join([*parts, *said[-1:]])


def after_main_thread(error: RuntimeError, where: str) -> RunFailed | None:
    """The error to raise instead of one that Python raised because the main thread has ended; None if it is another.
    Python then refuses the standard library's pools of threads (to import their module, and any work for them), of
    which nothing of ours needs one, but other libraries may; Python 3.12 refuses all new threads.
    """
    text = str(error)
    if "interpreter shutdown" not in text and ("shutdown" not in text or threading.main_thread().is_alive()):
        return None
    early = "import gristmill in the main thread, or " if "register" in text else ""
    return RunFailed(
        f"{where}, in thread {threading.current_thread().name!r}: {text}: the program's main thread has ended, and "
        f"Python refuses this from then on: {early}let the main thread wait for this one, with .join()",
        report=getattr(error, "report", None),
    )
