"""Which night a row is of: the generation that read it from the source. One that was dead then, and was scored later,
is older than one that was read in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from gristmill.commit import receipt as receipts
from gristmill.commit.documents import Live
from gristmill.commit.generation import Generation, read_plan, sources_of

__all__ = ["Age", "ages", "of_shards"]

Age = tuple[int, int]  # the generation that read a file's rows, and the one that scored them


def of_shards(generation: Generation, members: Sequence[Generation]) -> list[int]:
    """For each shard of a retry the generation that read its rows first, of those that are members of the result.
    Raises CorruptStore if a plan is damaged.
    """
    nights, shards = sources_of(members), read_plan(generation).shards
    return [min(nights.get(p.file.path, generation.number) for p in shards[n].pieces) for n in range(len(shards))]


def ages(live: Sequence[Live], members: Sequence[Generation]) -> list[Age]:
    """How old the rows of each file are, later ones being greater. Raises CorruptStore if a plan is damaged."""
    retries = {g.number: g for g in members if g.kind == "retry-dead" and not g.lost}

    @cache
    def of(number: int) -> list[int]:
        return of_shards(retries[number], members)

    @cache
    def joined(number: int) -> dict[int, list[int]]:
        return _joined(retries[number])

    def read_in(f: Live) -> int:
        if f.generation not in retries:
            return f.generation
        nights = of(f.generation)
        if f.shard < len(nights):
            return nights[f.shard]
        # Of one night, but for those that an earlier version joined.
        return min(nights[n] for n in joined(f.generation).get(f.shard) or range(len(nights)))

    return [(read_in(f), f.generation) for f in live]


def _joined(generation: Generation) -> dict[int, list[int]]:
    """The shards whose parts are in each file that was joined."""
    shards = {
        part.publish: shard
        for shard, receipt in receipts.standing(generation.receipts, generation.files).items()
        for part in receipt.parts
    }
    files = receipts.standing(generation.joined, generation.files)
    return {number: [shards[name] for name in receipt.of if name in shards] for number, receipt in files.items()}
