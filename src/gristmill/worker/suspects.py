"""Suspects: rows noted in the store before user code gets them, so that what kills a worker is known afterwards.

A careful attempt at a shard writes the rows of each batch before predicting it, and source rows before their steps. The
next attempt finds what a dead worker had noted and takes it apart, in halves, until one row alone has killed two
workers: that row is a dead letter.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np

from gristmill.commit.store import LOCAL, join
from gristmill.plan.contracts import Files
from gristmill.worker.prepare import Identity
from gristmill.worker.recipe import Task

PROBE = "probe"
DEATHS_ALONE = 2  # design §6: a row is dead only after it has killed two workers alone in its batch

Row = tuple[int, int, int]  # piece, position, copy


@dataclass(frozen=True)
class Group:
    """Rows that were in one batch when a worker died, and how often they have killed one."""

    rows: tuple[Row, ...]
    deaths: int


class Suspects:
    """The notes of one shard, in two small files: what is suspected, and what is being predicted now.

    `blame` says whether the death before this attempt was the rows' doing; if not, what was at hand is innocent. What
    is suspected under the name `heir_of` is taken over where there are no notes yet.
    """

    def __init__(self, folder: str, name: str, blame: bool, heir_of: str | None = None, files: Files = LOCAL) -> None:
        self._files = files
        self._folder, self._name, self._blame, self._heir_of = folder, name, blame, heir_of
        self._state = join(folder, f"{name}.json")
        self._now = join(folder, f"{name}.now.json")
        files.make_folder(folder)
        self.groups = _read(files, self._state)
        if not self.groups and heir_of is not None:
            self.groups = _read(files, join(folder, f"{heir_of}.json"))
        at_hand = _read(files, self._now)
        if at_hand and blame:
            self._accuse(at_hand[0])
        self.clear()

    def apart(self, stage: str) -> Suspects:
        """The notes on the same rows at another stage of the way: what kills there is taken apart by itself."""
        heir_of = None if self._heir_of is None else f"{self._heir_of}.{stage}"
        return Suspects(self._folder, f"{self._name}.{stage}", self._blame, heir_of, self._files)

    @property
    def dead(self) -> list[Group]:
        """Single rows that have killed often enough."""
        return [g for g in self.groups if len(g.rows) == 1 and g.deaths >= DEATHS_ALONE]

    @property
    def open(self) -> list[Group]:
        """Groups still to be tried apart from the others."""
        return [g for g in self.groups if len(g.rows) > 1 or g.deaths < DEATHS_ALONE]

    def note(self, identity: Identity, rows: np.ndarray) -> None:
        """Say which rows go next to user code. Survives the death of the process; power loss costs only a repeat."""
        self._write(self._now, [Group(tuple(identity.take(rows).places()), 1)])

    def clear(self) -> None:
        """Nothing is at hand."""
        self._files.remove(self._now)

    def _accuse(self, culprit: Group) -> None:
        """Take the rows at hand out of the groups they are in and put them back, halved if they are several."""
        rows = set(culprit.rows)
        before = max((g.deaths for g in self.groups if set(g.rows) == rows and len(rows) == 1), default=0)
        kept = [Group(left, g.deaths) for g in self.groups if (left := tuple(r for r in g.rows if r not in rows))]
        if len(culprit.rows) == 1:
            self.groups = [*kept, Group(culprit.rows, before + 1)]
        else:
            half = len(culprit.rows) // 2
            self.groups = [Group(culprit.rows[:half], 0), Group(culprit.rows[half:], 0), *kept]
        self._write(self._state, self.groups)

    def _write(self, path: str, groups: list[Group]) -> None:
        self._files.note(path, json.dumps([{"rows": g.rows, "deaths": g.deaths} for g in groups]).encode())


def of_task(task: Task, files: Files = LOCAL) -> Suspects:
    """The notes on a task's shard. The first shard takes over what is known of the first rows, which were probed."""
    folder = join(task.folder, "suspects")
    if task.kind == "probe":
        return Suspects(folder, PROBE, task.blame, files=files)
    return Suspects(folder, f"{task.shard.number:07d}", task.blame, PROBE if task.shard.number == 0 else None, files)


def _read(files: Files, path: str) -> list[Group]:
    try:
        return [Group(tuple(tuple(r) for r in g["rows"]), g["deaths"]) for g in json.loads(files.read(path))]
    except (FileNotFoundError, ValueError):
        return []
