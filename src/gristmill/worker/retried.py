"""What a retry looks for: the dead rows of its source rows, made again by the steps and recognised by copy and digest.
All other rows that the steps make from these are alive in the result, and are dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gristmill.errors import PlanChanged, RunFailed
from gristmill.shards.shard import Piece
from gristmill.sources.contract import Block
from gristmill.worker.identity import SINGLE, Copies, Copy, Identity

# The dead rows still to be made from a row, by the rest of their paths. None for a row that is one of them, or that
# died as a source row: it is processed like any row.
Sought = dict[tuple[int, ...], Copy] | None


class Lost(Exception):
    """Row number `row` of a table is no longer made as it was: its dead `copy` is not found. `how` says why."""

    def __init__(self, row: int, copy: Copy, how: str) -> None:
        super().__init__(how)
        self.row, self.copy, self.how = row, copy, how


class Seeking:
    """What is still to be made from each row of a table on its way through the steps."""

    def __init__(self, sought: Sequence[Sought]) -> None:
        self._sought = list(sought)

    @property
    def ways(self) -> np.ndarray:
        """Rows that are not dead rows themselves, but from which dead rows are still to be made."""
        return np.array([s is not None for s in self._sought], dtype=bool)

    def of(self, row: int) -> list[Copy]:
        """The dead rows that were to be made from a row."""
        return list((self._sought[row] or {}).values())

    def after(self, origin: np.ndarray) -> Seeking:
        """What is sought after a step has kept these rows."""
        return Seeking([self._sought[i] for i in origin.tolist()])

    def made(self, origin: np.ndarray, copies: Copies, step: str) -> tuple[Seeking, np.ndarray]:
        """What is sought after an expanding step, and the numbers of the rows that continue. Raises Lost if a dead row
        is not among those it made.
        """
        kept, sought = [], []
        numbers: dict[int, set[int]] = {}
        for row, (source, number) in enumerate(zip(origin.tolist(), copies.path[:, -1].tolist(), strict=True)):
            wanted = self._sought[source]
            if wanted is not None and number != SINGLE:
                numbers.setdefault(source, set()).add(number)
                wanted = {path[1:]: copy for path, copy in wanted.items() if path[0] == number}
                if not wanted:
                    continue
                if () in wanted:
                    _check(source, wanted[()], copies.at(row), step)
                    wanted = None
            kept.append(row)
            sought.append(wanted)
        for source, found in numbers.items():
            for path, copy in (self._sought[source] or {}).items():
                if path[0] not in found:
                    raise Lost(source, copy, _counted(copy, path, step, len(found)))
        return Seeking(sought), np.array(kept, dtype=np.int64)

    def gone(self, lost: np.ndarray, step: str) -> None:
        """Raises Lost if a row that a step dropped was on the way to a dead one."""
        for row in np.flatnonzero(lost).tolist():
            for path, copy in (self._sought[row] or {}).items():
                raise Lost(row, copy, _counted(copy, path, step, 0))

    def ended(self) -> None:
        """Called after all steps. Raises Lost if a dead row was not made."""
        for row, wanted in enumerate(self._sought):
            for copy in (wanted or {}).values():
                raise Lost(row, copy, f"a step made {copy.of} rows of it, and no step does now")


def _check(source: int, dead: Copy, made: Copy | None, step: str) -> None:
    if made is None or made.digest != dead.digest:
        now = 0 if made is None else made.of
        raise Lost(
            source, dead, f"{step} made {dead.of} rows of it and makes {now} now, and this one is a different row"
        )


def _counted(dead: Copy, path: tuple[int, ...], step: str, now: int) -> str:
    then = f"made {dead.of} rows of it and " if len(path) == 1 else ""
    return f"{step} {then}makes {now} now"


class Retried:
    """The dead rows of a retried shard. `only` says which they are (gristmill.driver.retrydead.Only)."""

    def __init__(self, only: Any, pieces: Sequence[Piece]) -> None:
        self._wanted = [only.wanted(p.file.path) for p in pieces]
        self._pieces = pieces
        self._read = self._ways = 0

    def seeking(self, who: Identity) -> Seeking:
        """What is sought from these rows of the source."""
        return Seeking([self._wanted[p].get(n) for p, n in zip(who.piece.tolist(), who.position.tolist(), strict=True)])

    def read(self, number: int, block: Block) -> None:
        """Count the records of piece `number`."""
        wanted = self._wanted[number]
        self._read += block.rows.num_rows + block.filtered + len(block.bad)
        self._ways += sum(wanted.get(p) is not None for p in block.position.tolist())

    def check(self) -> None:
        """Called after the last block. Raises RunFailed if a record of a dead row was not read again."""
        asked = [w.get(start) for w, p in zip(self._wanted, self._pieces, strict=True) for start, _ in p.ranges]
        ways = sum(sought is not None for sought in asked)
        if (len(asked), ways) != (self._read, self._ways):
            raise RunFailed(
                f"{self._read} of {len(asked)} records with dead letters were read again, and of those that a step "
                f"expanded {self._ways} of {ways}: the source does not read as it did; use --restart (restart=True)"
            )


def refused(lost: Lost, path: str, position: int) -> PlanChanged:
    """The error for a dead row that the steps no longer make."""
    return PlanChanged(
        f"{path} at {position}: the steps make other rows of it than they did: {lost.how}. Copy {lost.copy.text} is "
        "a dead letter and cannot be scored again; nothing was published. Restore the step that made it, or use "
        "--restart (restart=True) to score everything again"
    )
