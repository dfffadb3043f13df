"""Failures and deaths as text, so that they cross any boundary, whatever an exception's class is or does."""

from __future__ import annotations

import os
import re
import signal
import sys
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from gristmill import errors
from gristmill.process.messages import CLOSED, Death, Failure, FailureKind

if TYPE_CHECKING:
    import pyarrow as pa

LATE = "a call took longer than its limit"
LATE_LOAD = "imports and the model took longer to load than their limit"
LATE_BY = 1.02  # a worker's watch ends it at its limit times this
_DUMP = re.compile(r"^Timeout \((\d+):(\d\d):(\d\d(?:\.\d+)?)\)!$", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)  # as faulthandler writes them
_CALLED = re.compile(r'  File "(.+?)", line \d+')  # as tracebacks have them
_STACKS = re.compile(r'^(?:(?:Current )?[Tt]hread 0x.*|  File ".*|  \.\.\.|  <.*|)$')
_OTHERS = ("/site-packages/", "/dist-packages/", "/lib/python3.", os.path.dirname(os.path.dirname(__file__)) + os.sep)
_BEGINS = "Traceback (most recent call last):\n"
TRACE = 16_000  # characters of a traceback that are kept, the last ones: the user's own frames


class SomeFailed(Exception):
    """Some rows of a batch were answered with an exception each, the others with values. Raised by Model.predict and
    steps.

    `table` has only the others, in order; `failed` has the exceptions by number of the answer, and `lost` what else was
    in those answers. They were `raised` by a call for each row, which may be the fault of what is called; otherwise a
    call that worked has returned them.
    """

    def __init__(
        self,
        table: pa.Table,
        failed: Mapping[int, BaseException],
        lost: pa.Table | None = None,
        raised: bool = False,
    ) -> None:
        super().__init__(f"{len(failed)} rows failed")
        self.table = table
        self.failed = failed
        self.lost = lost
        self.raised = raised


class Outside(Exception):
    """Somebody outside refuses or does not answer: the message is all that there is to know, and no code has failed."""


class Unasked(Exception):
    """A row was not asked for, as all before it have failed, the last one so."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(str(cause))
        self.cause = cause


class EarlierFailure(Exception):
    """What a row raised in an earlier attempt, as text: it is not tried again."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


def storable(text: str) -> str:
    """`text` as UTF-8 can hold it: lone surrogates, which file names and JSON may have, are escaped."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode("utf-8")


def failure_of(error: BaseException, kind: FailureKind = "other") -> Failure:
    """An exception as a Failure; never raises, whatever the exception's own methods do."""
    if isinstance(error, Unasked):
        error = error.cause
    if isinstance(error, EarlierFailure):
        return replace(error.failure, kind=kind)
    try:
        message = str(error)
    except Exception as e:
        message = f"<{type(error).__name__} whose message cannot be shown: {type(e).__name__}>"
    try:
        frames = [] if isinstance(error, Outside) else traceback.format_exception(error)
        trace = "".join(frames)[-TRACE:]
    except Exception as e:
        trace = f"<no traceback: {type(e).__name__}>"
    return Failure(
        kind,
        storable(_name(type(error))),
        storable(message[:4000]),
        storable(trace),
        _ours(type(error)),
    )


def own_frames(text: str) -> str:
    """`text` without the frames of its tracebacks that lead to the user's own code; all are kept where none is."""
    parts = text.split(_BEGINS)
    return _BEGINS.join([parts[0], *map(_from_own, parts[1:])])


def _from_own(trace: str) -> str:
    """What follows the first line of a traceback: frames of some lines each, the exception, and more text."""
    lines = trace.splitlines(keepends=True)
    end = next((i for i, line in enumerate(lines) if not line.startswith("  ")), len(lines))
    own = (i for i, line in enumerate(lines[:end]) if (frame := _CALLED.match(line)) and _users(frame[1]))
    return "".join(lines[next(own, 0) :])


def _users(path: str) -> bool:
    """Whether a file is neither of this package, nor installed, nor of Python itself."""
    return not path.startswith("<frozen ") and not any(part in path for part in _OTHERS)


def _name(kind: type[BaseException]) -> str:
    """A class as people know it: those of this package by their names alone, wherever they are."""
    module = str(kind.__module__)
    plain = module in ("builtins", "__main__") or module.startswith("gristmill.")
    return kind.__qualname__ if plain else f"{module}.{kind.__qualname__}"


def _ours(kind: type[BaseException]) -> str:
    """The gristmill.errors name for a class of this package (GristmillError for internal ones); "" for any other class,
    whatever its name. A subclass defined elsewhere belongs to its author.
    """
    where = str(kind.__module__)
    if not where.startswith("gristmill.") or getattr(sys.modules.get(where), kind.__qualname__, None) is not kind:
        return ""
    names = {found: name for name, found in vars(errors).items() if isinstance(found, type)}
    return next((names[c] for c in kind.__mro__ if c in names), "GristmillError")


def ended(death: Death, late: str) -> str:
    """How a worker ended, in words: `late` if its own watch ended it ("": it had none)."""
    if death.lost:
        return death.lost
    if death.signal is not None:
        try:
            return signal.Signals(death.signal).name
        except ValueError:
            return f"signal {death.signal}"
    if late and "Timeout (" in death.evidence:
        return late + _late(death.evidence)
    if death.exit_code == CLOSED:
        return "its code closed file descriptors, or wrote to some, that it had not opened"
    return f"exit code {death.exit_code}"


def _late(evidence: str) -> str:
    """The limit in seconds, and where the user's code was then, from the stacks that a watch dumps."""
    if (dumped := _DUMP.search(evidence)) is None:
        return ""
    hours, minutes, seconds = (float(part) for part in dumped.groups())
    limit = f" of {(hours * 3600 + minutes * 60 + seconds) / LATE_BY:.3g} s"
    frames = _FRAME.finditer(evidence, dumped.end())
    own = next((f for f in frames if f[1][:1] != "<" and _users(f[1])), None)
    return limit if own is None else f"{limit}, at {own[1]}:{own[2]} in {own[3]}"


class Unstacked:
    """What workers print, without the stacks of all threads that a watch dumps before it ends its worker: the death
    reported afterwards has what matters.
    """

    def __init__(self) -> None:
        self._dumping: set[str] = set()

    def lines(self, worker: str, text: str) -> Iterator[str]:
        """The lines to show."""
        for line in text.removesuffix("\n").split("\n"):
            if _DUMP.match(line):
                self._dumping.add(worker)
            elif worker not in self._dumping or not _STACKS.match(line):
                yield line
