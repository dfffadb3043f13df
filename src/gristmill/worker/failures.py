"""Failures of user code: which rows of a batch cause one, and whether it is the rows or the model that is broken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from gristmill.batching.policy import Budget
from gristmill.errors import BadOutput, GristmillError
from gristmill.plan.contracts import Failure
from gristmill.plan.failing import failure_of

# Design §6: after this many rows failed with none between them that worked, the model itself is tried again.
DOUBT_AFTER = 20


class ModelBroken(Exception):
    """Every row fails, also one that worked before, or none has worked yet. Carries the last row's failure."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


@dataclass(frozen=True)
class DeadRow:
    """A row of a window that could not be scored."""

    row: int
    stage: str
    error: str
    message: str
    traceback: str = ""


@dataclass(frozen=True)
class Scores:
    """Outcome of scoring some rows: outputs with the rows they belong to, and the rows that failed."""

    outputs: list[tuple[np.ndarray, pa.Table]]
    dead: list[DeadRow]


class Isolation:
    """Scores batches through `call`, bisecting those that raise down to the rows that cause it.

    One bad row in a batch of n costs about 2 log2(n) more calls. `shrink` is told when memory ran out and gives the
    budget to go on with. `out_of_memory` tells such errors from others; `known_good` re-scores a row that worked.
    """

    def __init__(
        self,
        call: Callable[[np.ndarray], pa.Table],
        *,
        stage: str,
        out_of_memory: Callable[[BaseException], bool],
        shrink: Callable[[int], Budget],
        known_good: Callable[[], bool | None],
        proven: bool,
        before: Callable[[np.ndarray], None] | None = None,
    ) -> None:
        self._call = call
        self._stage = stage
        self._out_of_memory = out_of_memory
        self._shrink = shrink
        self._known_good = known_good
        self._proven = proven
        self._before = before
        self._in_a_row = 0

    def score(self, batch: np.ndarray) -> Scores:
        """Outputs and dead rows of one batch. Raises BadOutput, and ModelBroken where no row can be blamed."""
        found = Scores([], [])
        pending = [batch]
        while pending:
            rows = pending.pop()
            try:
                if self._before is not None:
                    self._before(rows)
                output = self._call(rows)
            except GristmillError:
                raise
            except Exception as e:
                if self._out_of_memory(e) and len(rows) > 1:
                    size = self._shrink(len(rows)).rows
                    size = min(size, max(1, len(rows) // 2))
                    pending.extend(rows[i : i + size] for i in reversed(range(0, len(rows), size)))
                elif len(rows) > 1:
                    half = len(rows) // 2
                    pending.extend([rows[half:], rows[:half]])
                else:
                    found.dead.append(self._blame(int(rows[0]), e))
            else:
                self._in_a_row = 0
                found.outputs.append((rows, output))
        return found

    def _blame(self, row: int, error: Exception) -> DeadRow:
        self._in_a_row += 1
        memory = self._out_of_memory(error)
        failure = failure_of(error, "memory" if memory else "model")
        if (self._in_a_row >= DOUBT_AFTER or memory) and not self._proven:
            if not self._known_good():
                raise ModelBroken(failure) from error
            self._in_a_row = 0
        return DeadRow(row, self._stage, failure.type, failure.message, failure.traceback)


def length_error(name: str, given: int, returned: int) -> BadOutput:
    """The error for a function that broke the row count."""
    return BadOutput(f"{name} was given {given} rows and returned {returned}: it must return one row for each")
