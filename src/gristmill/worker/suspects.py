"""Suspects: rows noted in the store before user code gets them, so that it is known afterwards what killed a worker.

A careful attempt at a shard notes the rows of each call beforehand, at every stage: steps, preparation for the model,
model, post steps. The attempt after a death splits what the dead one had noted in halves, until a single row alone has
killed two workers: that row becomes a dead letter.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import pyarrow as pa

from gristmill.errors import CorruptStore
from gristmill.files.contract import Files
from gristmill.files.disk import LOCAL, join
from gristmill.files.document import Document
from gristmill.process.failure import LATE
from gristmill.values import dataclass
from gristmill.worker.bisection import DeadRow, Stage
from gristmill.worker.identity import Identity, Row
from gristmill.worker.recipe import Task
from gristmill.worker.steps import Applied, LoadedStep

PROBE = "probe"
DEATHS_ALONE = 2  # design §6: a row is dead only after it has killed two workers alone in its batch
AT_ONCE = 128  # rows of one call: 7 halvings find the row that kills, each costing a worker with its model


@dataclass(frozen=True)
class Group:
    """Rows that were in one call when a worker died, how often they have killed a worker, and how the last one died."""

    rows: tuple[Row, ...]
    deaths: int
    how: str = ""


class Suspects:
    """The notes of one shard: suspects, by stage, in a file that attempts hand on; the current call in a file of this
    attempt alone. `paths` name the files of the shard's pieces.

    `blame` names the attempt whose death its rows caused, and `how` says how it died: only what that attempt had noted
    is accused, not the notes of a run that was killed or of a worker that comes back. The suspects noted under the name
    `heir_of` are taken over if there are no notes yet. `begins` is called after each note: the time of what is noted
    begins then, and not with the reading of rows before it.
    """

    def __init__(
        self,
        folder: str,
        name: str,
        attempt: str,
        paths: Sequence[str],
        blame: str = "",
        heir_of: str | None = None,
        files: Files = LOCAL,
        how: str = "",
        begins: Callable[[], None] = lambda: None,
    ) -> None:
        self._files = files
        self._begins = begins
        self._paths = paths
        self._state = join(folder, f"{name}.json")
        self._now = join(folder, f"{name}.{attempt}.json")
        files.make_folder(folder)
        known = _read(files, self._state)
        if known is None and heir_of is not None:
            known = _read(files, join(folder, f"{heir_of}.json"))
        self._groups: dict[str, list[Group]] = known or {}
        self._at_hand: tuple[str, set[Row]] | None = None
        if blame:
            noted = join(folder, f"{name}.{blame}.json")
            for stage, (culprit,) in (_read(files, noted) or {}).items():
                self._accuse(stage, culprit.rows, how)
            files.remove(noted)

    def places(self, identity: Identity) -> list[Row]:
        """The rows as named in these notes."""
        return identity.places(self._paths)

    def dead(self, stage: str) -> list[Group]:
        """Single rows that have killed often enough to be dead."""
        return [g for g in self._of(stage) if len(g.rows) == 1 and g.deaths >= DEATHS_ALONE]

    def open(self, stage: str) -> list[Group]:
        """Groups still to be tried separately."""
        return [g for g in self._of(stage) if len(g.rows) > 1 or g.deaths < DEATHS_ALONE]

    def note(self, stage: str, identity: Identity, rows: np.ndarray) -> None:
        """Note which rows go to user code next. Survives the death of the process; power loss costs only a repeat."""
        self._forgive()
        places = self.places(identity.take(rows))
        self._at_hand = stage, set(places)
        self._files.note(self._now, SuspectNotes({stage: (Group(tuple(places), 1),)}).dump())
        self._begins()

    def clear(self) -> None:
        """The call returned: nothing is in user code, and the rows that were are no longer suspect."""
        self._forgive()
        self._files.remove(self._now)

    def runs(self, stage: str, identity: Identity) -> Iterator[tuple[int, int, Group | None]]:
        """All rows in runs of neighbours, each suspect group separate: first, last, and what is known of a row that is
        not to be tried again. Each run is noted before it is yielded; at least one run, even without rows.
        """
        groups, count = self._of(stage), len(identity.piece)
        number = {row: n for n, g in enumerate(groups, 1) for row in g.rows}
        mark = np.array(
            [number.get(row, 0) for row in self.places(identity)] if groups else [0] * count, dtype=np.int64
        )
        dead = {n: g for n, g in enumerate(groups, 1) if len(g.rows) == 1 and g.deaths >= DEATHS_ALONE}
        edges = sorted({0, *range(0, count, AT_ONCE), *(np.flatnonzero(np.diff(mark)) + 1).tolist(), count})
        for first, last in itertools.pairwise(edges if count else [0, 0]):
            killed = dead.get(int(mark[first])) if count else None
            if killed or not count:
                yield first, last, killed
                continue
            self.note(stage, identity, np.arange(first, last))
            yield first, last, None
            self.clear()

    def apart(
        self, stage: str, step: LoadedStep, who: Identity, rows: pa.Table, apply: Callable[[pa.Table], Applied]
    ) -> Applied:
        """What `apply`, which runs `step` and perhaps more, makes of the rows, called with one run at a time; rows that
        have killed two workers are dead instead.
        """
        step.made_ready(rows.schema)  # nobody is to blame for what that takes
        parts, dead = [], []
        for first, last, killed in self.runs(stage, who):
            if killed:
                dead.append(killer(first, step.stage, killed, step.step.name))
            else:
                parts.append(apply(rows.slice(first, last - first)).moved(first))
        return step.together(parts, rows, dead)

    # ------------------------------------------------ what is known

    def _of(self, stage: str) -> list[Group]:
        return self._groups.get(stage, [])

    def _accuse(self, stage: str, culprits: tuple[Row, ...], how: str) -> None:
        """Take these rows out of their groups and put them back as new ones, halved if there are several."""
        rows = set(culprits)
        before = max((g.deaths for g in self._of(stage) if set(g.rows) == rows and len(rows) == 1), default=0)
        half = len(culprits) // 2
        found = [Group(culprits[:half], 0), Group(culprits[half:], 0)] if half else [Group(culprits, before + 1, how)]
        self._groups[stage] = [*found, *self._without(stage, rows)]
        self._keep()

    def _forgive(self) -> None:
        """The noted rows did not kill the worker: they are suspects no more."""
        if self._at_hand is None:
            return
        (stage, rows), self._at_hand = self._at_hand, None
        if any(not rows.isdisjoint(g.rows) for g in self._of(stage)):
            self._groups[stage] = self._without(stage, rows)
            self._keep()

    def _keep(self) -> None:
        groups = {stage: tuple(some) for stage, some in self._groups.items()}
        self._files.note(self._state, SuspectNotes(groups).dump())

    def _without(self, stage: str, rows: set[Row]) -> list[Group]:
        left = [Group(tuple(r for r in g.rows if r not in rows), g.deaths, g.how) for g in self._of(stage)]
        return [g for g in left if g.rows]


def killer(row: int, stage: Stage, known: Group, step: str = "") -> DeadRow:
    """The dead row for one that was alone in a call when workers died."""
    return DeadRow(row, stage, *death_of(known), step=step)


def death_of(known: Group) -> tuple[str, str]:
    """The error of a row that has killed workers, and the message: that it took too long, or how they died."""
    if known.how.startswith(LATE):
        return "CallTimeout", f"{known.how}; {known.deaths} times, alone in its batch"
    how = f" ({known.how})" if known.how else ""
    return "WorkerDied", f"killed its worker {known.deaths} times{how}, alone in its batch"


def of_task(task: Task, files: Files = LOCAL, begins: Callable[[], None] = lambda: None) -> Suspects:
    """The notes on a task's shard. The first shard takes over those of the probe, which scored its first rows. `begins`
    as for Suspects.
    """
    folder = join(task.folder, "suspects")
    name = task.kind if task.kind != "score" else f"{task.shard.number:07d}"
    heir_of = PROBE if task.kind == "score" and task.shard.number == 0 else None
    # Once a file has been written anew, what stood at a position in it is no suspect.
    paths = [f"{p.file.path} {p.file.stamp}" for p in task.shard.pieces]
    return Suspects(folder, name, task.attempt, paths, task.blame, heir_of, files, task.how, begins)


@dataclass(frozen=True)
class SuspectNotes(Document, what="note of suspects", sealed=False):
    """A file of `suspects/`: suspects, or the rows of the current call, by stage."""

    groups: Mapping[str, tuple[Group, ...]]


def _read(files: Files, path: str) -> dict[str, list[Group]] | None:
    try:
        known = SuspectNotes.load_from(path, files).groups
    except (FileNotFoundError, CorruptStore):
        return None
    return {stage: list(some) for stage, some in known.items()}
