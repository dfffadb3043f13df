"""Failures of user code: which rows of a batch cause them, and whether the rows or the model are to blame."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from enum import Enum

import numpy as np
import pyarrow as pa

from gristmill.errors import ONE_FOR_EACH, BadOutput, GristmillError
from gristmill.process.failure import SomeFailed, Unasked, failure_of
from gristmill.process.messages import Failure
from gristmill.values import dataclass

# Design §6: after this many failed rows with no success in between, the model itself is tried again.
DOUBT_AFTER = 20


class ModelBroken(Exception):
    """Every row fails, even one that worked before, or none has worked yet. Carries the last row's failure."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class Stage(str, Enum):
    """Where a row died. Up to BEFORE it counts among the source's rows, from DERIVED on among those for the model."""

    READ = "read"  # its record could not be read
    BEFORE = "before"  # in a step, as a row of the source
    DERIVED = "derived"  # in a step, as one of the rows that an earlier step made from a source row
    MODEL = "model"  # by the model: refused by it, failed in it, or answered with NaN
    AFTER = "after"  # in a post step, or because of its result


@dataclass(frozen=True)
class DeadRow:
    """A row of a table that could not be scored; `step` names the step it died in, "" for the model."""

    row: int
    stage: Stage
    error: str
    message: str
    traceback: str = ""
    step: str = ""


@dataclass(frozen=True)
class Scores:
    """Outcome of scoring some rows: outputs with the rows they belong to, and the rows that failed."""

    outputs: list[tuple[np.ndarray, pa.Table]]
    dead: list[DeadRow]


class Doubt:
    """Counts failed rows with no success in between; when there are many, asks whether anything works.

    `known_good` says whether a row that worked still does; None if none has worked yet and those tried fail, too.
    `proven`: the model works for other rows, so the failures are the rows' own. Lives as long as what it doubts. Of a
    `remote` model each question costs something: it is asked after twice as many rows each time, and one that works no
    more is not this process's fault.
    """

    def __init__(self, known_good: Callable[[], bool | None], remote: bool = False) -> None:
        self._known_good = known_good
        self._remote = remote
        self._in_a_row = 0
        self._after = DOUBT_AFTER
        self.proven = False

    def worked(self) -> None:
        self._in_a_row, self._after = 0, DOUBT_AFTER

    def failed(self, error: BaseException, memory: bool = False) -> Failure:
        """Record that a row failed alone. Raises ModelBroken if the model, not the row, is to blame."""
        failure = failure_of(error, "memory" if memory else "model")
        self._in_a_row += 1
        if memory or self._in_a_row >= self._after:
            works = self._known_good()
            if works is False and self._remote:
                raise ModelBroken(failure) from error
            if works is False:
                raise ModelBroken(replace(failure, kind="sick")) from error
            if works is None and not self.proven:
                raise ModelBroken(failure) from error
            self._in_a_row, self._after = 0, self._after * (2 if self._remote else 1)
        return failure


class Isolation:
    """Scores batches through `call`, bisecting those that raise down to the rows that cause it.

    One bad row in a batch of n costs about 2 log2(n) more calls. `shrink` is called with the rows for which memory ran
    out. `out_of_memory` recognises such errors; `before` is called with the rows of the next call.
    """

    def __init__(
        self,
        call: Callable[[np.ndarray], pa.Table],
        *,
        stage: Stage,
        out_of_memory: Callable[[BaseException], bool],
        doubt: Doubt,
        shrink: Callable[[np.ndarray], None] | None = None,
        before: Callable[[np.ndarray], None] | None = None,
        step: str = "",
    ) -> None:
        self._call = call
        self._stage = stage
        self._step = step
        self._out_of_memory = out_of_memory
        self._shrink = shrink
        self._doubt = doubt
        self._before = before

    def score(self, batch: np.ndarray) -> Scores:
        """Outputs and dead rows of one batch. Raises BadOutput, and ModelBroken if no row is to blame."""
        found = Scores([], [])
        pending = [batch]
        while pending:
            rows = pending.pop()
            if self._before is not None:
                self._before(rows)
            try:
                output = self._call(rows)
            except (GristmillError, KeyboardInterrupt):
                raise
            except SomeFailed as e:
                self._told(rows, e, found)
            except BaseException as e:  # also SystemExit, and panics of extension modules
                if self._out_of_memory(e) and len(rows) > 1:
                    if self._shrink is not None:
                        self._shrink(rows)
                    size = len(rows) // 2
                    pending.extend(rows[i : i + size] for i in reversed(range(0, len(rows), size)))
                elif len(rows) > 1:
                    half = len(rows) // 2
                    pending.extend([rows[half:], rows[:half]])
                else:
                    found.dead.append(self._blame(int(rows[0]), e))
            else:
                self._doubt.worked()
                found.outputs.append((rows, output))
        return found

    def _told(self, rows: np.ndarray, answer: SomeFailed, found: Scores) -> None:
        """Rows that failed alone: nothing is called again for them."""
        worked = np.setdiff1d(np.arange(len(rows)), list(answer.failed))
        if len(worked):
            self._doubt.worked()
            found.outputs.append((rows[worked], answer.table))
        for error in answer.failed.values():
            if isinstance(error, GristmillError):  # which is about more than its row
                raise error
        if any(isinstance(error, Unasked) for error in answer.failed.values()):
            raise ModelBroken(replace(failure_of(next(iter(answer.failed.values())), "model"), step=self._step))
        for i, error in sorted(answer.failed.items()):
            blamed = answer.raised and not len(worked)  # perhaps nothing works any more
            found.dead.append(
                self._blame(int(rows[i]), error) if blamed else told_dead(int(rows[i]), self._stage, error, self._step)
            )

    def _blame(self, row: int, error: BaseException) -> DeadRow:
        try:
            failure = self._doubt.failed(error, self._out_of_memory(error))
        except ModelBroken as e:
            raise ModelBroken(replace(e.failure, step=self._step)) from error
        return DeadRow(row, self._stage, failure.type, failure.message, failure.traceback, self._step)


def told_dead(row: int, stage: Stage, error: BaseException, step: str = "") -> DeadRow:
    """A row that was answered with an exception."""
    failure = failure_of(error, "model")
    return DeadRow(row, stage, failure.type, failure.message, failure.traceback, step)


def length_error(name: str, given: int, returned: int) -> BadOutput:
    """The error for a function that broke the row count."""
    return BadOutput(f"{name} was given {given} rows and returned {returned}: {ONE_FOR_EACH}")
