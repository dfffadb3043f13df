"""Which shards of an update's plan inherit the answers that unfinished runs were given, paid for and did not commit:
each earlier shard has one heir, where most of its rows are likely to be. Rows find their answers by what they are.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from gristmill.commit.generation import Generation, Plan
from gristmill.commit.inherited import INHERITED
from gristmill.driver.resolved import Resolved
from gristmill.values import dataclass

Place = tuple[int, int, int]  # file, start and stop of a range


@dataclass(frozen=True)
class Left:
    """A shard of an earlier plan that is not committed and has answers; `ranges` are those of its rows, by the files of
    the source now.
    """

    generation: Generation
    shard: int
    of: int  # shards of its plan
    ranges: tuple[Place, ...]


def left(r: Resolved, generation: Generation, plan: Plan, committed: Collection[int]) -> list[Left]:
    """The shards of a plan that are not `committed` and of which there are answers."""
    from gristmill.commit import journal

    number = {f.file.path: i for i, f in enumerate(r.files)}
    ends: dict[int, int] = {}
    for file, _, stop in r.selection.ranges.tolist():
        ends[file] = max(stop, ends.get(file, 0))
    found = []
    for n in sorted(journal.shards(generation.folder, generation.files)):
        if n in committed or n >= len(plan.shards):
            continue
        spans = [(number.get(p.file.path, -1), a, b) for p in plan.shards[n].pieces for a, b in p.ranges]
        ranges = [(f, a, min(b, ends[f])) for f, a, b in spans if f in ends and a < ends[f]]
        found.append(Left(generation, n, len(plan.shards), tuple(ranges)))
    return found


def heirs(earlier: Sequence[Left], table: pa.Table, scored: Sequence[int]) -> pa.Table:
    """The heir of each earlier shard (INHERITED) among the shards of a `table` that are `scored`, ascending: that with
    most of its positions, or else, as files have other names each night, the one that is as far on.
    """
    columns = [table.column(name).to_numpy() for name in ("shard", "file", "start", "stop")]
    keep = np.isin(columns[0], np.asarray(scored, np.int64))
    shard, file, start, stop = (column[keep] for column in columns)
    rows: list[tuple[Any, ...]] = []
    for one in earlier if scored else ():
        common = np.zeros(len(shard), np.int64)
        for f, a, b in one.ranges:
            common += np.where(file == f, np.maximum(0, np.minimum(stop, b) - np.maximum(start, a)), 0)
        if len(common) and common.max() > 0:
            heir = int(shard[int(common.argmax())])
        else:
            heir = scored[min(len(scored) - 1, one.shard * len(scored) // max(1, one.of))]
        rows.append((heir, one.generation.name, one.shard))
    arrays = [pa.array([row[n] for row in rows], f.type) for n, f in enumerate(INHERITED)]
    return pa.table(arrays, schema=INHERITED)
