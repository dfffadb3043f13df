"""The files of a job's source: listed, looked at, and which of their rows are selected."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from gristmill.commit.inspections import Inspections
from gristmill.driver.apart import Apart
from gristmill.errors import BadJob, BadSource
from gristmill.job.job import HELD, JobSpec, Source
from gristmill.job.secret import reveal
from gristmill.job.uris import redact
from gristmill.process.failure import storable
from gristmill.result.chained import Chained, answered, published_alone
from gristmill.result.published import Kinds
from gristmill.shards import shard
from gristmill.shards.shard import Selection
from gristmill.shards.sourcefiles import FileInfo, SourceFile
from gristmill.snapshots.pinned import Pinned
from gristmill.sources.contract import Reading, SourceFormat

_MADE = 315_619_200  # 1980-01-02: ZIP archives know no earlier day


def listed(
    source: Source, planned: frozenset[str], apart: Apart | None
) -> tuple[Any, list[SourceFile], Mapping[str, Kinds], list[str]]:
    """The files of a source (of one result, if it is a sink; listed again if one was published meanwhile, or for files
    so new that their times do not tell yet), the types by path of columns in a sink's folder names, and notes on files
    with two names, which go by those that are `planned`, and on files of sinks that are left out. Raises BadJob if the
    job's sink is found among them.
    """
    from gristmill.sources import openreaders, paths
    from gristmill.sources.formats import is_whole
    from gristmill.sources.listing import settled

    openreaders.close_all()
    revealed = replace(source, uri=reveal(source.uri), storage=reveal(source.storage))
    fs: Any = None
    before: Mapping[str, Any] | None = None
    doubled: list[str] = []
    found: Chained | None = None

    def alone(storage: Any, files: list[SourceFile], links: dict[str, str]) -> list[SourceFile]:
        nonlocal found
        found = published_alone(storage, files, links)
        return found.files

    def look() -> list[SourceFile]:
        nonlocal fs
        doubled.clear()
        met = None if apart is None else apart.met
        fs, files = paths.resolve(revealed, doubled.append, planned, met, partial(is_whole, source), alone)
        return files

    while True:
        files = settled(look(), look)
        assert found is not None
        if not found.sinks or found.sinks == before:
            break
        before = found.sinks
    if apart is not None:
        with answered():
            apart.found(found.of())
    found.refuse(source.uri, set(fs.named))
    return fs, files, found.kinds, [*doubled, *found.notes()]


def pinned(source: Source, folder: str | None, first: int | None) -> Pinned:
    """A source that is a store as it is now, for those who only look; only its first rows, if it can be counted."""
    if folder is None:
        raise BadJob(f"{', '.join(map(redact, source.uri))}: a store is read by a run: it cannot be planned alone")
    from gristmill.snapshots.pinning import Pinning

    with contextlib.closing(Pinning(source, folder)) as pinning:
        return pinning.pinned(lambda _: None, first)


def held(job: JobSpec, folder: str | None) -> Source:
    """An in-memory source as a Parquet file named by its content, so that running again finds the same input."""
    import hashlib

    import pyarrow.parquet as pq

    from gristmill.arrow.casts import fitted
    from gristmill.sinks.parquet import holdable
    from gristmill.sources.memory import as_table

    if folder is None:
        raise BadJob("a source in memory needs a run: it cannot be planned alone")
    table = as_table(job.source.data, getattr(job.model, "text", None) or "value")
    table = fitted(table, holdable(table.schema, "a source in memory"))
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd", row_group_size=131_072)
    content = sink.getvalue()
    # A name that no glob for data matches: the folder may be in a sink.
    path = Path(folder) / f"{hashlib.sha256(content).hexdigest()[:32]}.table"
    if not path.exists() or path.read_bytes() != content:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{secrets.token_hex(4)}.tmp")
        try:
            temporary.write_bytes(content)
            os.utime(temporary, (_MADE, _MADE))  # the name tells the content: a new file of that name is the same input
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    return replace(job.source, uri=(HELD + path.name,), storage={HELD: folder}, data=None, format="parquet")


def inspected(
    source: Source, form: SourceFormat, fs: Any, listed: Sequence[SourceFile], how: str, known: Inspections
) -> tuple[list[FileInfo], dict[str, str]]:
    """What planning must know of each file, and by path why others cannot be read, which a job may leave out."""
    from gristmill.sources.formats import format_options

    options = format_options(source)
    files, bad = list[FileInfo](), dict[str, str]()
    for file in listed:
        try:
            if (name := storable(file.path)) != file.path:
                raise BadSource(f"{name}: the file's name is not UTF-8, which a plan cannot hold: rename it")
            files.append(known.of(file, how) or _looked_at(form, file, fs, options))
        except BadSource as e:
            if source.on_bad_file == "fail":
                raise
            bad[file.path] = str(e)
    if not files:
        raise BadSource(
            f"{', '.join(source.uri)}: none of {len(listed)} files can be read: {next(iter(bad.values()), '')}"
        )
    return files, bad


def _looked_at(form: SourceFormat, file: SourceFile, fs: Any, options: Mapping[str, Any]) -> FileInfo:
    """What planning must know of a file. Raises BadSource also for what its format stumbles over unprepared."""
    try:
        return form.inspect(file, fs, options)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as e:
        raise BadSource(f"{file.path}: cannot be read ({type(e).__name__}: {e})") from e


def selected(source: Source, form: SourceFormat, fs: Any, files: list[FileInfo], reading: Reading) -> Selection:
    """Everything, or the first `limit` rows, or a sample; with a condition, of the rows that satisfy it."""
    everything = Selection.everything(files)
    if source.limit is None and source.sample is None:
        return everything
    needed = reading.where.columns if reading.where is not None else tuple(reading.schema.names[:1])
    reading = replace(reading, columns=tuple(needed))
    with contextlib.nullcontext() if reading.where is None else contextlib.closing(reading.where):
        if source.limit is not None:
            return _limited(form, fs, files, everything, reading, source.limit)
        return _sampled(form, fs, files, everything, reading, source.sample or 0, source.seed)


def _limited(
    form: SourceFormat, fs: Any, files: list[FileInfo], all_of: Selection, reading: Reading, limit: int
) -> Selection:
    ranges, left = [], limit
    for index, start, stop in all_of.ranges.tolist():
        if left <= 0:
            break
        known = shard.rows_between(files[index], start, stop)
        if reading.where is None and known is not None and (known <= left or known == stop - start):
            take = min(known, left)
            ranges.append((index, start, stop if take == known else start + take))
            left -= take
            continue
        end = start
        for block in form.read(files[index], fs, np.array([[start, stop]]), reading):
            bad = np.array([b.position for b in block.bad], dtype=np.int64)
            places = np.sort(np.concatenate([block.position, bad])) if reading.where is None else block.position
            if len(places):
                end = int(places[min(left, len(places)) - 1]) + 1
            left -= min(left, len(places))
            if left == 0:
                break
        else:
            end = stop
        ranges.append((index, start, end))
    return Selection(np.array(ranges, dtype=np.int64).reshape(-1, 3))


def _sampled(
    form: SourceFormat, fs: Any, files: list[FileInfo], all_of: Selection, reading: Reading, size: int, seed: int
) -> Selection:
    parts = []
    for index, start, stop in all_of.ranges.tolist():
        if reading.where is None and shard.rows_between(files[index], start, stop) == stop - start:
            places = np.arange(start, stop, dtype=np.int64)
        else:
            blocks = form.read(files[index], fs, np.array([[start, stop]]), reading)
            places = np.concatenate([np.empty(0, dtype=np.int64), *(b.position for b in blocks)])
        parts.append(np.stack([np.full(len(places), index, dtype=np.int64), places], axis=1))
    rows = np.concatenate(parts) if parts else np.empty((0, 2), dtype=np.int64)
    chosen = np.sort(np.random.default_rng(seed).choice(len(rows), size=min(size, len(rows)), replace=False))
    rows = rows[chosen]
    if len(rows) == 0:
        return Selection(np.empty((0, 3), dtype=np.int64))
    breaks = np.flatnonzero((np.diff(rows[:, 0]) != 0) | (np.diff(rows[:, 1]) != 1)) + 1
    firsts = rows[np.concatenate([[0], breaks])]
    lasts = rows[np.concatenate([breaks - 1, [len(rows) - 1]])]
    return Selection(np.column_stack([firsts, lasts[:, 1] + 1]))
