"""Which generation made an answer that updates have kept since: as far back as the sink still has what tells it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa

from gristmill.commit import fates
from gristmill.commit import receipt as receipts
from gristmill.commit.documents import Success
from gristmill.commit.fates import KEPT
from gristmill.commit.generation import Generation, generations, read_plan, whole_table
from gristmill.commit.keptindex import Kept
from gristmill.commit.publication import Publication, load
from gristmill.commit.receipt import Receipt
from gristmill.driver import runrecord
from gristmill.errors import CorruptStore
from gristmill.files.disk import join
from gristmill.fingerprint import digests
from gristmill.proof.finding import Places
from gristmill.proof.proof import Maker
from gristmill.values import dataclass

_OF_SHARD = re.compile(r"/g(\d+)-[^/]*/fates/(\d+)\.")


class Untold(Exception):
    """What tells it is not there any more."""


@dataclass(frozen=True)
class Row:
    """A source row of a shard, by its number in that, if it is known."""

    generation: int
    shard: int
    number: int | None


def number_of(places: Places | None, path: str | None, position: int | None) -> int | None:
    """The number of a source row in its shard; None if that is not known."""
    begin = 0
    for name, positions in places or ():
        if name == path and position is not None:
            at = (positions == position).nonzero()[0]
            if len(at):
                return begin + int(at[0])
        begin += len(positions)
    return None


def maker(result: Publication, generation: Generation, receipt: Receipt, number: int | None) -> Maker | None:
    """Who made the answer of a row whose shard is of this generation; None if that did itself. If what tells it is gone
    at some point, it is the generation of that point, or one before it.
    """
    if generation.kind != "update" or not receipt.figures.get(KEPT):
        return None
    known = {g.number: g for g in generations(result.root, result.files)}
    row, certain = Row(generation.number, receipt.shard, number), True
    try:
        while (before := _before(known, row)) is not None:
            row = before
    except Untold:
        certain = False
    body = next(publications_of(result, row.generation), None)
    if not certain and row.generation != generation.number and body is not None and not body.updated:
        certain = True  # no update: it scored all its rows
    if certain and row.generation == generation.number:
        return None
    run = next(
        (r for r in reversed(runrecord.listed(result.root, result.files)) if r.generation == row.generation), None
    )
    return Maker(
        row.generation, certain, "" if body is None else body.published, "" if run is None else run.run,
        "" if run is None else run.host, _other_code(known.get(row.generation), generation),
    )  # fmt: skip


def _other_code(then: Generation | None, now: Generation) -> str:
    """The digest of a generation's code as it was `then`; "" if it is the same `now`, or not known any more."""
    if then is None or then.lost or now.lost:
        return ""
    before, since = (digests.compared(g.fingerprint.code) for g in (then, now))
    return "" if before == since else digests.digest_of(before)


def _before(known: dict[int, Generation], row: Row) -> Row | None:
    """The row whose answer this one kept; None if it was scored. Raises Untold."""
    generation = known.get(row.generation)
    if generation is None or generation.lost:
        raise Untold
    try:
        plan = read_plan(generation)
        done = receipts.standing(generation.receipts, generation.files).get(row.shard)
        if done is None:
            raise Untold
        if generation.kind != "update" or not done.figures.get(KEPT):
            return None
        tables = plan.about.kept
        if (adopted := tables.get("adopted")) is not None:
            for one in whole_table(generation, adopted).to_pylist():
                if one["shard"] == row.shard:
                    return Row(one["generation"], one["of"], row.number)
        return _looked_up(generation, done, row, Kept(generation.folder, generation.root, tables, generation.files))
    except (CorruptStore, FileNotFoundError, KeyError, pa.ArrowException):
        raise Untold from None


def _looked_up(generation: Generation, done: Receipt, row: Row, kept: Kept) -> Row | None:
    told = fates.read(generation, done)
    if told is None or row.number is None or row.number >= len(told[0]):
        raise Untold
    index = kept.open()
    at = int(index.find(told[0].digest[row.number : row.number + 1])[0])
    if at < 0:
        return None
    entry = index.entries[at]
    part = index.parts[int(entry["part"])]
    if part["beside"] and _spoilt(generation, part):
        raise Untold  # the row was scored again if this was so then
    found = _OF_SHARD.search(part["fates"])
    if found is None:
        raise Untold
    return Row(int(found[1]), int(found[2]), int(entry["source"]))


def _spoilt(generation: Generation, part: Mapping[str, Any]) -> bool:
    """Whether a file of answers is there and is not what was committed; those of old results are cleared away."""
    try:
        return bool(generation.files.digest(join(generation.root, part["path"]))[1] != part["sha256"])
    except FileNotFoundError:
        return False


def publications_of(result: Publication, generation: int) -> Iterator[Success]:
    """What a generation had published, the latest first."""
    for number in range(result.number, 0, -1):
        one = load(result.root, number, result.files)
        if one is not None and one.generation == generation:
            yield one.body
