"""Reading the source again: if a file may have been touched since its shards read it, the digests in their receipts
decide whether it is still the same. `verify --source` does so for every file.

A local file may have been touched if its modification time differs, or the change time of its inode, which a rewrite
cannot set back; a file in a store that reports neither is judged by its ETag, version or time of writing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from gristmill.commit import inspections
from gristmill.commit import receipt as receipts
from gristmill.commit.documents import Reads
from gristmill.commit.generation import (
    Generation,
    Plan,
    decode_schema,
    encode_schema,
    held_inputs,
    read_plan,
    stored_inputs,
    stored_reads,
)
from gristmill.commit.ledger import Ledger
from gristmill.driver.jobsource import selected
from gristmill.driver.resolved import Resolved
from gristmill.errors import BadSource, GristmillError
from gristmill.fingerprint import digests
from gristmill.job.job import COPY, HELD, Source
from gristmill.job.secret import reveal
from gristmill.job.snapshots import is_snapshot, kind_of
from gristmill.observe import units
from gristmill.process import machine
from gristmill.process.pool import Pool
from gristmill.shards.shard import Piece
from gristmill.shards.sourcefiles import FileInfo, SourceFile
from gristmill.sources import openreaders, paths
from gristmill.sources.formats import format_options, source_format
from gristmill.sources.formats import reading as reading_of
from gristmill.sources.listing import settled
from gristmill.values import dataclass
from gristmill.worker import pieces
from gristmill.worker.recipe import Reader

_NAMED = 5  # files that were touched, of which more are told in one line
Tell = Callable[[str], None]


# ---------------------------------------------------------------- how a plan's shards read


def described(reader: Reader) -> Reads:
    """A reader as a plan stores it: without the file system, whose credentials must not be stored."""
    return Reads(
        reader.format.name,
        None if reader.columns is None else tuple(reader.columns),
        encode_schema(reader.schema),
        reader.where,
        json.loads(json.dumps(dict(reader.options), default=str)),
        tuple((encode_schema(schema), tuple(paths)) for schema, paths in _grouped(reader.own)),
    )


def _reader(plan: Plan, fs: Any) -> Reader:
    told = plan.about.reads
    form = source_format(Source((".",), format=told.format), plan.shards.files)
    schema, own = decode_schema(told.schema), _own(told)
    return Reader(form, fs, told.columns, schema, told.where, told.options, own=own)


def _own(told: Reads) -> dict[str, pa.Schema]:
    found: dict[str, pa.Schema] = {}
    for text, paths_so in told.own:
        found.update(dict.fromkeys(paths_so, decode_schema(text)))
    return found


def _grouped(own: Mapping[str, pa.Schema]) -> list[tuple[pa.Schema, list[str]]]:
    found: list[tuple[pa.Schema, list[str]]] = []
    for path, schema in own.items():
        alike = next((paths_so for other, paths_so in found if other is schema), None)
        if alike is None:
            found.append((schema, [path]))
        else:
            alike.append(path)
    return found


# ---------------------------------------------------------------- files that may have been touched


def reconciled(r: Resolved, members: Sequence[Generation], stored: Mapping[str, str], tell: Tell) -> dict[str, str]:
    """`stored`, the digests of planned inputs by path, in the form in which they are compared with the job's.

    Files of the planned size that may have been touched (any file, if the listing gives only sizes) are read again
    where shards have read them. If all those shards find the rows they read, the file is the planned one: it gets the
    job's digest and is noted, so that the next run need not read it. Otherwise its digest is made unlike any other, and
    includes the reason.
    """
    known = inspections.last_seen(members)
    touched = {
        f.file.path: f
        for f in r.files
        if f.file.path in stored
        and f.file.path in known
        and f.file.size == known[f.file.path][0]
        and (_seen(f.file) != known[f.file.path] or not (f.file.stamp or f.file.touched))
    }
    out = dict(stored)
    if touched:
        planned = inspections.planned_files(members)
        same = {path: f for path, f in touched.items() if _laid_out_alike(f, planned[path])}
        unlike = _of_other_types(r, members, same, planned)
        reasons = _differing(_readings(members, r.fs, same), tell)
        if not r.whole and _chosen_otherwise(r, members):
            reasons = {**dict.fromkeys(same, "with its present content, other rows would be selected"), **reasons}
        reasons = {**unlike, **reasons}
        for path, f in same.items():
            digest = digests.input_digest(f)
            if path in reasons and _seen(f.file)[:2] == known[path][:2]:
                reasons[path] += ", though its size and time are those of the plan"
            out[path] = digests.other_content(digest, reasons[path]) if path in reasons else digest
        for path in touched.keys() - same.keys():
            out[path] = digests.other_content(
                stored[path],
                "its rows begin at other positions than planned, or there are more or fewer of them: it was rewritten",
            )
        inspections.note_same(members[-1], [f.file for path, f in same.items() if path not in reasons])
    now = {f.file.path: f for f in r.files}
    for path in inspections.noted_same(members):
        if path in now and path in stored and path not in touched and _seen(now[path].file) == known[path]:
            out[path] = digests.input_digest(now[path])
    return out


def _chosen_otherwise(r: Resolved, members: Sequence[Generation]) -> bool:
    """Whether a sample or limit selects other rows than the plans: it may depend on rows that no shard read."""
    planned = [read_plan(member).shards for member in members if member.kind != "retry-dead"]
    then = [span for table in planned for span in _spans([f.path for f in table.files], table.ranges())]
    return bool(planned) and then != _spans([f.file.path for f in r.files], r.selection.ranges)


def _spans(paths: Sequence[str], ranges: np.ndarray) -> list[tuple[str, int, int]]:
    """Ranges of files, int64 [k, 3], with adjacent ones joined."""
    index, start, stop = ranges.T
    begins = np.ones(len(ranges), dtype=bool)
    begins[1:] = (np.diff(index) != 0) | (start[1:] != stop[:-1])
    ends = np.roll(begins, -1)
    names = [paths[i] for i in index[begins]]
    return list(zip(names, start[begins].tolist(), stop[ends].tolist(), strict=True))


def _seen(file: SourceFile) -> tuple[int, str, str]:
    return file.size, file.stamp, file.touched


def _laid_out_alike(now: FileInfo, planned: FileInfo) -> bool:
    """Whether the plan's ranges, including those that no shard has read yet, begin and end at row boundaries, and have
    as many rows as planned.
    """
    counts, then = now.cut_rows, planned.cut_rows
    return (
        (now.layout, now.extent) == (planned.layout, planned.extent)
        and np.array_equal(now.cuts, planned.cuts)
        and (counts is then if counts is None or then is None else np.array_equal(counts, then))
    )


def _of_other_types(
    r: Resolved, members: Sequence[Generation], files: Mapping[str, FileInfo], planned: Mapping[str, FileInfo]
) -> dict[str, str]:
    """Why files of which shards are still to be read are not those planned, by path: a plan reads columns by the types
    that they had, and rows of another type would be dead.
    """
    reasons: dict[str, str] = {}
    for member in members:
        plan = read_plan(member)
        left = plan.shards.paths_of(Ledger.of(member).missing(len(plan.shards)))
        for path in left & files.keys():
            now, then = files[path].schema, planned[path].schema
            columns = plan.about.reads.columns
            asked = () if r.condition is None else r.condition.columns
            for name in dict.fromkeys([*then.names, *now.names] if columns is None else [*columns, *asked]):
                was, kind = (s.field(name).type if name in s.names else None for s in (then, now))
                as_text = name in r.fingerprint.texts and was == pa.string()
                if kind != was and not as_text and name not in r.folders:
                    words = ("not there" if k is None else str(k) for k in (was, kind))
                    reasons[path] = "column {!r} was {}, and is {} now: it was rewritten".format(name, *words)
    return reasons


def with_files(plan: Plan, r: Resolved) -> Plan:
    """The plan with its files as they are now, after they were found to be the planned ones: from here on, any further
    touch is noticed.
    """
    now = {f.file.path: f.file for f in r.files}
    return replace(plan, shards=plan.shards.of(now))


def as_planned(r: Resolved, plan: Plan) -> Resolved:
    """The job with the column types that the plan has read: files that appeared since may have others."""
    told = plan.about.reads
    return replace(r, schema=decode_schema(told.schema), own=_own(told))


def owned(r: Resolved, members: Sequence[Generation], wanted: Set[str]) -> Resolved:
    """The job with each of the `wanted` files read with the schema of the first of `members` to read it: files that
    appeared later may have changed types.
    """
    own: dict[str, pa.Schema] = {}
    for member in members:
        schema = decode_schema(stored_reads(member).schema)
        if member.kind != "retry-dead" and schema != r.schema:
            own.update(dict.fromkeys(wanted & stored_inputs(member).keys() - own.keys(), schema))
    return replace(r, own=own)


def looked_again(r: Resolved) -> Resolved:
    """The job with its files as they are at this moment. Raises BadSource if one can no longer be read, SourceChanged
    if one is gone.
    """
    options, files = format_options(r.job.source), []

    def look() -> list[SourceFile]:
        return [paths.look(r.fs, info.file) for info in r.files]

    for info, now in zip(r.files, settled(look(), look), strict=True):
        same = _seen(now) == _seen(info.file)
        files.append(info if same else r.source_format.inspect(now, r.fs, options))
    inputs = {f.file.path: digests.input_digest(f) for f in files}
    reads = reading_of(r.job.source, r.columns, r.schema, r.condition)
    selection = selected(r.job.source, r.source_format, r.fs, files, reads)
    return replace(r, files=tuple(files), selection=selection, fingerprint=replace(r.fingerprint, inputs=inputs))


# ---------------------------------------------------------------- reading what shards read


@dataclass(frozen=True)
class _Again:
    """A piece that a committed shard read: what it read then, and how to read it now."""

    generation: int
    shard: int
    piece: Piece
    digest: str
    reader: Reader

    def wrong(self) -> str | None:
        """What differs now, in words; None if nothing does."""
        where = f"shard {self.shard} of generation {self.generation}"
        try:
            # The file as it is now: a reader of the planned one may still be open, and would read what is deleted.
            piece = replace(self.piece, file=paths.look(self.reader.fs, self.piece.file))
            if self.reader.format.by_bytes and piece.file.size != self.piece.file.size:
                # The last record may have become longer: it ends where the file ends.
                now = self.reader.format.inspect(piece.file, self.reader.fs, self.reader.options)
                piece = replace(piece, extent=max(piece.extent, now.extent))
            with pieces.reading(self.reader, piece.file.path) as wanted:
                if pieces.digest_of(self.reader, replace(wanted, damaged=True), piece) == self.digest:
                    return None
                pieces.digest_of(self.reader, wanted, piece)  # raises, saying where the file is damaged
        except GristmillError as e:
            return f"what {where} read of it can no longer be read: {e}"
        return f"it does not hold what {where} read of it"


def _readings(members: Sequence[Generation], fs: Any, files: Mapping[str, FileInfo] | None) -> Iterator[_Again]:
    """What the committed shards of these generations read of these files, or of all files."""
    for member in members:
        plan = read_plan(member)
        if files is not None:
            plan = replace(plan, shards=plan.shards.of({path: f.file for path, f in files.items()}))
        standing, reader = receipts.listed(member.receipts, member.files), _reader(plan, fs)
        for number in plan.shards.reading(None if files is None else files.keys()):
            done = receipts.valid(standing.get(number, []), member.files)
            if done is None:
                continue
            for piece, digest in zip(plan.shards[number].pieces, done.read, strict=True):
                if files is None or piece.file.path in files:
                    yield _Again(member.number, number, piece, digest, reader)


def _differing(readings: Iterator[_Again], tell: Tell | None = None) -> dict[str, str]:
    """For each file that no longer holds what was read of it, the reason, by path."""
    todo = list(readings)
    counts: dict[str, int] = {}
    for again in todo:
        counts[again.piece.file.path] = counts.get(again.piece.file.path, 0) + 1
    if tell is not None and len(counts) > _NAMED:  # members of an archive, or a folder that was copied
        tell(
            f"{next(iter(counts))} and {len(counts) - 1:,} other files were touched since they were read: what "
            "committed shards read of them is read again"
        )
    elif tell is not None:
        for path, count in counts.items():
            shards = units.plural(count, "committed shard")
            tell(f"{path} was touched since it was read: what {shards} read of it is read again")
    reasons: dict[str, str] = {}
    with Pool(machine.cores()) as pool:
        for again, wrong in zip(todo, pool.map(_Again.wrong, todo), strict=True):
            if wrong is not None:
                reasons.setdefault(again.piece.file.path, wrong)
    return reasons


def verify(members: Sequence[Generation], source: Source | None = None) -> tuple[list[str], list[str]]:
    """Read again what every shard of some generations read. Returns a line for each file that has changed, and one for
    each generation of which that cannot be known. Files are opened by the paths in the plans, or as the job's `source`
    says.
    """
    openreaders.close_all()
    found: list[str] = []
    unknown: list[str] = []
    for member in members:
        files = [f.path for f in read_plan(member).shards.files]
        if (gone := _removed(member, files)) is not None:
            unknown.append(gone)
            continue
        readings = _readings([member], _mounted(member, files, source), None)
        found += [f"{path}: {why}" for path, why in _differing(readings).items()]
    return found, unknown


def _mounted(member: Generation, files: Sequence[str], source: Source | None) -> Any:
    """The file system that opens the files of a plan."""
    if all(path.startswith(HELD) for path in files):
        return paths.mounted(files, {HELD: held_inputs(member.root, member.files)})
    # A store is read from its files, which are opened by other means, unless these have its own address.
    stored = source is not None and is_snapshot(source)
    own = not stored or all(kind_of(path, Source((path,))) for path in files)
    return paths.mounted(*((reveal(source.uri), reveal(source.storage)) if source and own else (files, {})))


@dataclass(frozen=True)
class ReadAgain:
    """A piece of a shard, read again: what is `wrong` with it, if anything is, and the positions of its rows."""

    path: str
    wrong: str | None
    positions: np.ndarray


def read_again(member: Generation, number: int, source: Source | None = None) -> list[ReadAgain]:
    """The pieces of a committed shard, each read again as the shard read it. Raises BadSource for a copy of a store
    that is gone, and CorruptStore.
    """
    openreaders.close_all()
    plan = read_plan(member)
    files = [f.path for f in plan.shards.files]
    if (gone := _removed(member, files)) is not None:
        raise BadSource(gone)
    reader = _reader(plan, _mounted(member, files, source))
    done = receipts.valid(receipts.listed(member.receipts, member.files).get(number, []), member.files)
    found = []
    for piece, digest in zip(plan.shards[number].pieces, () if done is None else done.read, strict=False):
        wrong = _Again(member.number, number, piece, digest, reader).wrong()
        places = np.empty(0, dtype=np.int64)
        if wrong is None:
            with pieces.reading(reader, piece.file.path) as wanted:
                read = [b.position for b in pieces.blocks(reader, replace(wanted, damaged=True), piece)]
            places = np.concatenate([places, *read])
        found.append(ReadAgain(piece.file.path, wrong, places))
    return found


def _removed(member: Generation, files: Sequence[str]) -> str | None:
    """What there is to say if what was copied from a store, for a generation to read, is gone."""
    folder = held_inputs(member.root, member.files)
    copies = {path.removeprefix(HELD).partition("/")[0] for path in files if f"{COPY}/" in path}
    if all(os.path.isdir(os.path.join(folder, name)) for name in copies):
        return None
    return (
        f"source: generation {member.number} read a copy of a store, which was removed when the result was published: "
        "what the store held then cannot be read again, and was not compared"
    )
