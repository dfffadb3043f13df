"""Where a published row is, and which shard made it of which rows of the source."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from gristmill.arrow.topython import to_rows
from gristmill.commit import nights
from gristmill.commit.documents import RETRIED, Live, TableRecord
from gristmill.commit.generation import Generation, read_plan
from gristmill.commit.publication import Publication
from gristmill.commit.receipt import Part, Receipt
from gristmill.driver.retrydead import DEAD_FILE, letters_table
from gristmill.errors import BadKey, CorruptStore
from gristmill.files.disk import join
from gristmill.result import reading
from gristmill.result.verify import Member
from gristmill.shards.counts import Counts
from gristmill.shards.ranges import inside
from gristmill.sources.formats import SOURCES
from gristmill.stores.contract import Key
from gristmill.stores.lookup import asked, keyed, matching, restored
from gristmill.stores.sinkrows import OF_SINK, own_key
from gristmill.values import dataclass

MOST_TRIED = 20_000_000  # places that are tried for an id, half a minute
MOST_COPIES = 16  # of a row, that are tried
_NUMBER = "\0number"
_POSITION = re.compile(r"(.+):(\d+)", re.DOTALL)
Places = Sequence[tuple[str, np.ndarray]]  # of the rows of a shard, in order: a file, and positions in it


@dataclass(frozen=True)
class Spot:
    """A row of a published file, by its number in that, counted from 0 (None: one of its rows)."""

    live: Live
    number: int | None


@dataclass(frozen=True)
class Origin:
    """Where a row came from: its shard's receipt, and its file and position, as far as these are known."""

    receipt: Receipt
    path: str | None = None
    position: int | None = None


# ---------------------------------------------------------------- by key


def by_key(result: Publication, members: Sequence[Generation], key: Key, columns: tuple[str, ...]) -> Spot | None:
    """The published row of a key, of the latest night that has one. Raises BadKey, BadJob, BadSource if two have it."""
    role = reading.beside(result)
    parts = [f for f in result.live() if f.role == role]
    schema = reading.readable_dataset(result, role).schema
    columns = columns or own_key(result)
    if not columns and len(parts) == 0:
        return None
    wanted = asked([key], keyed(result.root, columns, {f.name: f.type for f in schema}), result.root)
    ages = dict(zip(parts, nights.ages(parts, members), strict=True))
    for age in sorted(set(ages.values()), reverse=True):
        found = [spot for f in parts if ages[f] == age for spot in _in_file(result, f, wanted)]
        if len(found) > 1:
            raise BadKey(f"{result.root}: several rows have {', '.join(columns)} = {key!r}: {OF_SINK}")
        if found:
            return replace(found[0], live=_rows_beside(result, found[0].live))
    return None


def _in_file(result: Publication, f: Live, wanted: pa.Table) -> Iterator[Spot]:
    rows = reading.dataset_of(result.root, result.files, [f], result.body)
    condition = matching(wanted, rows.schema)
    if not rows.head(1, filter=condition).num_rows:
        return
    first = 0
    for batch in rows.scanner(columns=wanted.column_names, batch_readahead=2).to_batches():
        some = pa.Table.from_batches([batch]).append_column(_NUMBER, pa.array(np.arange(first, first + len(batch))))
        first += len(batch)
        some = some.filter(condition)
        for n in range(some.num_rows):
            one = some.slice(n, 1)
            if restored(one.drop_columns([_NUMBER]), wanted, None, result.root, OF_SINK) != [None]:
                yield Spot(f, one[_NUMBER][0].as_py())


def _rows_beside(result: Publication, f: Live) -> Live:
    """The file of vectors beside one of other columns; the file itself of tables."""
    if f.role == "rows":
        return f
    stem = f.name.removesuffix(".ids.parquet")
    return next(v for v in result.live() if v.role == "rows" and v.name.removesuffix(".npy") == stem)


def row_of(result: Publication, spot: Spot) -> Mapping[str, Any] | None:
    """A row as it was published, without vectors of npy files; None if its number is not known."""
    if spot.number is None:
        return None
    role, f = reading.beside(result), spot.live
    if role != "rows":
        stem = f.name.removesuffix(".npy")
        f = next(v for v in result.live() if v.role == role and v.name.removesuffix(".ids.parquet") == stem)
    rows = reading.dataset_of(result.root, result.files, [f], result.body)
    return to_rows(rows.take(pa.array([spot.number])))[0]


# ---------------------------------------------------------------- by position


def as_position(text: Any) -> tuple[str, int] | None:
    """`FILE:POSITION`, as a dead letter tells it; None for any other text."""
    match = _POSITION.fullmatch(text) if isinstance(text, str) else None
    return None if match is None else (match[1], int(match[2]))


def shard_of(member: Member, path: str, position: int) -> tuple[str, int] | None:
    """The file that a path, or the end of one, names in a plan, and the shard that read this position of it. Raises
    BadKey if several files have such a name.
    """
    named = [n for n, f in enumerate(member.plan.shards.files) if f.path == path]
    named = named or [n for n, f in enumerate(member.plan.shards.files) if f.path.endswith("/" + path.lstrip("./"))]
    if len(named) > 1:
        several = ", ".join(member.plan.shards.files[n].path for n in named[:3])
        raise BadKey(f"{path}:{position}: several files of the source are named so: {several}: give more of the path")
    if not named:
        return None
    table = member.plan.shards.table
    file, start, stop = (table.column(n).to_numpy() for n in ("file", "start", "stop"))
    here = np.flatnonzero((file == named[0]) & (start <= position) & (position < stop))
    if not len(here):
        return None
    return member.plan.shards.files[named[0]].path, int(table.column("shard")[int(here[0])].as_py())


def spot_of(result: Publication, member: Member, origin: Origin, places: Places | None) -> list[Spot]:
    """The published rows that a shard may have made of a row of the source: one with its number, if that is known."""
    part = next((p for p in origin.receipt.parts if p.role == "rows"), None)
    if part is None:
        return []
    found = [(f, shift) for f, shift in _files_of(result, member, origin.receipt) if f.role == "rows"]
    assert origin.path is not None and origin.position is not None
    if places is not None and not any(p == origin.path and bool(np.any(at == origin.position)) for p, at in places):
        return []
    numbers = None if places is None else _numbered(result, member, origin.receipt, places)
    if numbers is not None and len(found) == 1 and not _sorted(member):
        (f, shift) = found[0]
        at = numbers.get((origin.path, origin.position))
        return [] if at is None else [Spot(f, None if shift is None else shift + at)]
    if _hashed(member):
        wanted = {_id(origin.path, origin.position, copy) for copy in ("0", *map(str, range(1, MOST_COPIES)))}
        columns = (_hashed(member) or "",)
        spots = [
            replace(spot, live=f)
            for f, _ in found
            for key in sorted(wanted)
            for spot in _in_file(result, f, asked([(key,)], keyed(result.root, columns, _types(result)), result.root))
        ]
        if spots or not _made_several(member):
            return spots
    return [Spot(f, None) for f, _ in found]


def is_there(member: Member, receipt: Receipt, places: Places | None) -> bool:
    """Whether each of a shard's rows of the source, unless it is dead, became a row that is published: none was left
    out by a condition, a step, or for a null.
    """
    return places is not None and not Counts(*receipt.counts).all_filtered and not _made_several(member)


def _made_several(member: Member) -> bool:
    """Whether steps may have made several rows of one, or none."""
    options = member.plan.about.fingerprint.options
    numbers = {name.partition("]")[0] for name in options if name.startswith("steps[")}
    return any(json.loads(options.get(f"{step}].kind", "null")) != "filter" for step in numbers)


def _types(result: Publication) -> dict[str, pa.DataType]:
    return {f.name: f.type for f in reading.readable_dataset(result, reading.beside(result)).schema}


def _files_of(result: Publication, member: Member, receipt: Receipt) -> Iterator[tuple[Live, int | None]]:
    """The published files that have rows of a shard, and at which row its own begin, if that is known."""
    live = {f.name: f for f in result.live() if f.generation == member.generation.number}
    for part in receipt.parts:
        if part.publish in live:
            yield live[part.publish], 0
            continue
        for joined in member.joined:
            held = parts_in(member, joined)
            if any(p.publish == part.publish for _, p in held):
                before = itertools.takewhile(lambda one, name=part.publish: one[1].publish != name, held)  # type: ignore[misc]
                shift = None if _sorted(member) else sum(p.rows for _, p in before)
                yield from ((live[p.publish], shift) for p in joined.parts if p.publish in live and p.role == part.role)


# ---------------------------------------------------------------- from a row to its shard


def parts_in(member: Member, joined: Receipt) -> list[tuple[Receipt, Part]]:
    """The parts with rows that were joined to a file, in order, each with the receipt of its shard. An earlier version
    did not say which: all.
    """
    every = [(r, p) for _, r in sorted(member.done.items()) for p in r.parts if p.role == "rows"]
    return [(r, p) for r, p in every if not joined.of or p.publish in joined.of]


def made_by(member: Member, spot: Spot) -> tuple[list[tuple[Receipt, Spot]], Receipt | None]:
    """The shards that may have made a row, each with the row's number in its part; and the receipt of the file, if
    parts were joined to it.
    """
    for receipt in member.done.values():
        if any(p.publish == spot.live.name for p in receipt.parts):
            return [(receipt, spot)], None
    joined = next((r for r in member.joined if any(p.publish == spot.live.name for p in r.parts)), None)
    if joined is None:
        raise CorruptStore(f"{spot.live.name}: no receipt that reads back commits it")
    held = parts_in(member, joined)
    if spot.number is None or _sorted(member):
        return [(r, replace(spot, number=None)) for r, _ in held], joined
    ends = list(itertools.accumulate(p.rows for _, p in held))
    at = int(np.searchsorted(ends, spot.number, side="right"))
    number = spot.number - (ends[at - 1] if at else 0)
    return [(held[at][0], replace(spot, number=number))], joined


def origin_of(
    result: Publication,
    member: Member,
    receipt: Receipt,
    number: int | None,
    row: Mapping[str, Any],
    places: Places | None,
) -> Origin:
    """Where in the source a row of a shard came from, as far as its id, or the order of rows, tells that."""
    if places is None:
        return Origin(receipt)
    if (column := _hashed(member)) is not None and row.get(column) is not None:
        found = _by_id(str(row[column]), places)
        if found is not None:
            return Origin(receipt, *found)
    if (
        number is not None
        and not _sorted(member)
        and (numbers := _numbered(result, member, receipt, places)) is not None
    ):
        return next((Origin(receipt, *place) for place, n in numbers.items() if n == number), Origin(receipt))
    return Origin(receipt)


def places_of(member: Member, receipt: Receipt) -> Places | None:
    """The positions of the rows that a shard read; None where only reading tells them."""
    name = member.plan.about.reads.format
    if name not in SOURCES or SOURCES.get(name).by_bytes:
        return None
    pieces = member.plan.shards[receipt.shard].pieces
    return [(p.file.path, inside(np.array(p.ranges, dtype=np.int64).reshape(-1, 2))) for p in pieces]


def _by_id(wanted: str, places: Places) -> tuple[str, int] | None:
    rows = sum(len(positions) for _, positions in places)
    for copy in map(str, range(max(1, min(MOST_COPIES, MOST_TRIED // max(1, rows))))):
        for path, positions in places:
            for position in positions.tolist():
                if _id(path, position, copy) == wanted:
                    return path, position
    return None


def _id(path: str, position: int, copy: str) -> str:
    """As worker.shardcommit.row_ids makes it."""
    text = f"{path}\0{position}\0{copy}".encode("utf-8", "surrogatepass")
    return hashlib.blake2b(text, digest_size=16).hexdigest()


def _numbered(
    result: Publication, member: Member, receipt: Receipt, places: Places
) -> dict[tuple[str, int], int] | None:
    """The number in its part of each row that a shard has scored, where each row of the source became one, in order."""
    parts = [p for p in receipt.parts if p.role == "rows"]
    steps = any(name.startswith("steps[") for name in member.plan.about.fingerprint.options)
    if len(parts) != 1 or steps:
        return None
    dead = _dead(result, member)
    alive = [(path, p) for path, positions in places for p in positions.tolist() if (path, p) not in dead]
    return {place: n for n, place in enumerate(alive)} if len(alive) == parts[0].rows else None


def _dead(result: Publication, member: Member) -> set[tuple[str, int]]:
    """Rows of the source that were dead when a generation scored them: letters of the result, and those that later
    retries were about.
    """
    letters = reading.dead_letters(reading.letters_of(result.root, result.live(), result.files), result.files)
    found = set(zip(letters["source"].to_pylist(), letters["position"].to_pylist(), strict=True))
    for other in others(result):
        if other.kind == "retry-dead" and other.number > member.generation.number:
            stored = read_plan(other).about.kept.get(RETRIED, TableRecord(DEAD_FILE, ""))
            table = letters_table(join(other.folder, DEAD_FILE), stored.sha256, result.files)
            found.update(zip(table["source"].to_pylist(), table["position"].to_pylist(), strict=True))
    return found


def others(result: Publication) -> list[Generation]:
    """The generations of a result."""
    from gristmill.commit.generation import generations

    return [g for g in generations(result.root, result.files) if g.number in result.generations]


def _hashed(member: Member) -> str | None:
    """The column with ids that are made of a row's place in the source; None if there is none."""
    options = member.plan.about.fingerprint.options
    column = json.loads(options.get("sink.row_id", "null"))
    return None if "sink.key" in options or column is None else str(column)


def _sorted(member: Member) -> bool:
    return "sink.sort_by" in member.plan.about.fingerprint.options
