"""Planning: from a job to what its workers are given. All static checks are here, before any model is loaded."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from gristmill.commit.inspections import Inspections, looked_at
from gristmill.driver import describing, jobcolumns
from gristmill.driver.apart import Apart, check_other, plain_path
from gristmill.driver.devices import devices
from gristmill.engines import registry as engines
from gristmill.engines.contract import Room
from gristmill.errors import BadJob, BadModel, BadSource, GateFailed, GristmillError
from gristmill.fingerprint import digests as fingerprint
from gristmill.fingerprint.digests import Fingerprint
from gristmill.fingerprint.pins import Approved
from gristmill.job.job import HELD, JobSpec, Sink, Source
from gristmill.job.options import BatchPlan
from gristmill.job.secret import reveal
from gristmill.job.snapshots import is_snapshot
from gristmill.job.specs import EXPORTED, MODELS, ModelSpec, changed
from gristmill.job.uris import file_named, records_of, redact
from gristmill.models.contract import ModelInfo, Place
from gristmill.models.kinds import open_function
from gristmill.models.versions import Registered
from gristmill.process import machine
from gristmill.process.failure import storable
from gristmill.result.reading import Kinds, check_whole, published_alone
from gristmill.shards import shard
from gristmill.shards.shard import Selection
from gristmill.shards.sourcefiles import FileInfo, SourceFile
from gristmill.sinks.contract import SinkFormat
from gristmill.sinks.formats import DEFAULT, SINKS, sink_format
from gristmill.snapshots.pinned import Pin, Pinned, Pinning
from gristmill.sources.contract import Reading, SourceFormat
from gristmill.sources.formats import SOURCES
from gristmill.values import dataclass
from gristmill.worker.batches import CPU_TOKENS, GPU_TOKENS, MOST_ROWS, ONNX_TOKENS, ROWS_WITHOUT_LENGTHS
from gristmill.worker.recipe import LEAST_BEGUN

if TYPE_CHECKING:
    from gristmill.result.reduction import Reducer

SHARD_SECONDS = 30.0  # design §5: the most work a crash can cost, and what each commit covers
LEAST_SHARD = shard.LEAST_ROWS
QUICK_SECONDS, QUICK_ROWS = 0.5, 65_536  # least size of a shard of a cheap function, to keep files few
# Only the function knows how much memory a row takes, so it starts with few rows. A call of some milliseconds cannot
# have filled much memory, whatever it does: batches with quicker calls than this are made larger, as each call costs
# the function and the pipeline some 0.1 ms on top of its rows.
FUNCTION_ROWS, QUICK_CALL = 1024, 0.01
# Of a model of features (scikit-learn, ONNX, TorchScript) on a CPU, which takes 1 to 5 ms a call on top of its rows:
# names and types of some hundred columns are compared, and each tree of a boosted model is called by itself.
QUICK_FEATURES = 0.05
# Of models that answer row by row: rows of a shard, of a window, and that are taken as answered at once.
ROW_SHARD, ROW_WINDOW, ROWS_TAKEN = 4096, 256, 32
# Rows of a shard that is answered in bulk. Providers take 50,000 and more, but what a shard of theirs lacks after a day
# is asked for in another day, and their limits are on what is under way.
BULK_SHARD = 10_000
TEXT_WINDOW = 8192
PLAIN_WINDOW = 16_384
# Measured with MiniLM (91 MB of weights): a worker of ONNX Runtime holds 0.4 GB, one of torch 0.6 GB. While a model is
# being loaded, its weights are in memory twice.
WORKER_BYTES, WEIGHT_COPIES, MEMORY_SHARE = 400 << 20, 2, 0.8
UNTIMED_BYTES = 100 << 20  # design §5: below this nothing is timed


@dataclass(frozen=True)
class Resolved:
    """A job with everything determined that can be without loading a model."""

    job: JobSpec
    fs: Any
    source_format: SourceFormat
    sink_format: SinkFormat
    files: tuple[FileInfo, ...]
    schema: pa.Schema
    selection: Selection
    model: ModelSpec
    info: ModelInfo
    columns: tuple[str, ...] | None
    keep: tuple[str, ...] | None
    place: Place
    workers: int
    gpus: tuple[str, ...]
    fingerprint: Fingerprint
    notes: tuple[str, ...] = ()
    nulls: dict[str, int] = field(default_factory=dict)
    nulls_given: str = ""  # what a function is given for nulls
    differing: GristmillError | None = None  # why no generation may be begun over all of these files
    looked_at: str = ""  # how the files were inspected
    condition: Any = None  # `where`, checked (sources.where.SqlWhere)
    only: Any = None  # a retry's rows (driver.retrydead.Only)
    own: dict[str, pa.Schema] = field(default_factory=dict)  # schemas with which a retry reads some files
    folders: tuple[str, ...] = ()  # columns taken from folder names, of those that are read
    pins: tuple[Pin, ...] = ()  # where a source that is a store is read, and what of it was copied
    more: int = 0  # rows of a store that were counted, and not copied: planned alone
    skipped: tuple[str, ...] = ()  # files left out because they cannot be read, with the reason
    unread: tuple[str, ...] = ()  # their paths
    registered: tuple[Registered, ...] = ()  # the models that a registry names
    approved: tuple[Approved, ...] = ()  # the files of those that arguments are

    @property
    def bytes(self) -> int:
        """Bytes of the source's files; estimated, if these are only the first rows of a store."""
        there = sum(f.file.size if f.bytes is None else f.bytes for f in self.files)
        return round(there * (1 + self.more / max(1, sum(f.extent for f in self.files)))) if self.more else there

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings about the job before it runs."""
        return (*self.notes, *self.left_out)

    @property
    def left_out(self) -> tuple[str, ...]:
        """What is told of files that cannot be read."""
        return tuple(f"skipped a bad file: {file}" for file in self.skipped)

    def of_folders(self, schema: pa.Schema) -> Resolved:
        """The job with this schema; types of columns from folder names are recorded in the fingerprint's options."""
        if not self.folders:
            return self
        told = fingerprint.of_folders({name: str(schema.field(name).type) for name in self.folders})
        options = {**self.fingerprint.options, **told}
        return replace(self, schema=schema, fingerprint=replace(self.fingerprint, options=options))

    @property
    def blank(self) -> bool:
        """Whether the source has neither rows nor columns that names could be checked against."""
        return jobcolumns.is_blank(self.files, self.schema)

    @property
    def whole(self) -> bool:
        """Whether every position of every file is selected."""
        return self.job.source.limit is None and self.job.source.sample is None

    @property
    def rows(self) -> int | None:
        """Source rows selected, or None if only reading can tell."""
        known = [shard.rows_between(self.files[f], a, b) for f, a, b in self.selection.ranges.tolist()]
        return None if any(k is None for k in known) else self._of_all(sum(k for k in known if k is not None))

    def _of_all(self, selected: int) -> int:
        """Rows selected of the whole store, if so many are of its first rows."""
        if not self.more:
            return selected
        copied = sum(f.extent for f in self.files)
        if self.job.source.sample is not None:
            return min(self.job.source.sample, copied + self.more)
        return selected if selected < copied else selected + self.more

    @property
    def estimated_rows(self) -> float:
        """Source rows selected, estimated from sampled row sizes if not known."""
        if self.more and (rows := self.rows) is not None:
            return rows
        spans = self.selection.ranges.tolist()
        return sum(shard.estimated_rows(self.files[f], a, b) for f, a, b in spans)


def resolve(
    job: JobSpec,
    held_data: str | None = None,
    known: Inspections | None = None,
    *,
    begins: bool = True,
    texts: Sequence[str] = (),
    written: Collection[str] = (),
    pinned: Pinned | None = None,
    first: int | None = None,
) -> Resolved:
    """Open the source's metadata, check everything that can be checked, and fingerprint the job.

    `held_data` is a folder that in-memory sources are written to, and stores are copied to, of which `pinned` has what
    is read, if that is decided; for those who only look, the `first` rows are enough of a store that can be counted.
    `known` is what an earlier plan recorded about the
    files: only files touched since are opened. Files that differ in a column that is read are refused if a generation
    `begins`; otherwise the error is left in `Resolved.differing` for a run that may find it resumes a plan. So is any
    other error that is due only to files not in `known`. `texts` are columns that the result to be added to has read as
    text; `written` are paths that the code is known to write itself. Raises BadJob and its subclasses, GateFailed if
    null counts already break a gate.
    """
    from gristmill.sources import formats
    from gristmill.sources.formats import format_options
    from gristmill.sources.schema import as_text

    sink_format = sink_format_of(job)
    apart = None if job.sink is None else Apart(job, sink_format)
    if job.sink is not None and apart is not None:
        check_other(job.source, job.sink)
        apart.check()
    audits(job)
    reducer(job)
    source = job.source if job.source.data is None else _held(job, held_data)
    sink_format = laid_out(sink_format, job.sink)
    if source.data is None and not source.uri[0].startswith(HELD) and is_snapshot(source):
        pinned = pinned or _pinned(source, held_data, first)
        fs, listed, doubled = pinned.storage, list(pinned.files), list(pinned.twice)
        stored: Mapping[str, Kinds] = pinned.kinds
        source = replace(source, format=pinned.form, storage={})
    else:
        fs, listed, stored, doubled = _listed(source, known.paths if known else frozenset(), apart)
    source_format = formats.source_format(source, listed)
    how = looked_at(source_format.name, format_options(source))
    files, bad = _inspected(source, source_format, fs, listed, how, known or Inspections())
    files = as_text(files, texts)
    folders = any(f.folders for f in listed)
    if folders:
        from gristmill.sources.hive import with_columns

        files = with_columns(files, source.types, stored)
    described = partial(
        _described,
        job,
        source,
        fs,
        source_format,
        sink_format,
        how,
        doubled,
        bad,
        folders,
        written,
        0 if pinned is None else pinned.more,
    )
    try:
        return replace(described(files, files, begins), pins=() if pinned is None else pinned.pins)
    except (BadJob, GateFailed) as e:
        before = [] if begins or known is None else [f for f in files if known.has(f.file.path, how)]
        if not before or len(before) == len(files):
            raise
        with contextlib.suppress(BadJob, GateFailed):
            pins = () if pinned is None else pinned.pins
            return replace(described(files, before, False), differing=e, pins=pins)
        raise


def _described(
    job: JobSpec,
    source: Source,
    fs: Any,
    source_format: SourceFormat,
    sink_format: SinkFormat,
    how: str,
    notes: Sequence[str],
    bad: Mapping[str, str],
    folders: bool,
    written: Collection[str],
    more: int,
    files: list[FileInfo],
    seen: list[FileInfo],
    begins: bool,
) -> Resolved:
    """The job over the files, with the columns and types of the `seen` ones."""
    from gristmill.fingerprint.code import not_compared
    from gristmill.models import kinds as models
    from gristmill.models import registrations
    from gristmill.sources import formats
    from gristmill.sources.hive import wanted_columns
    from gristmill.sources.schema import check, unify

    whole = seen is files
    schema = unify(seen, job.sink is not None and job.sink.evolve)
    blank = jobcolumns.is_blank(seen, schema)
    jobcolumns.check_calls(job)
    if not blank:
        jobcolumns.check_steps(job, schema)
        jobcolumns.check_update(job, schema)
    named = registrations.found(job.model)
    named = named or registrations.Found(job.model)
    model, warned = models.resolve(named.spec), (*models.remarks(named.spec), *registrations.moving(job.model))
    info = describing.described(model, None if blank else jobcolumns.widened(schema, job), job.engine)
    named.check_loaded(info.digests)
    jobcolumns.check_on_null(job, info, schema)
    keep = jobcolumns.kept_columns(job, info, schema, blank)
    columns = jobcolumns.read_columns(job, info, keep, schema)
    where = None if blank else jobcolumns.condition(source, schema)
    reads = list(columns or schema.names)
    asked = [*reads, *(() if where is None else where.columns)]
    check(schema, asked)
    inside: tuple[str, ...] = ()
    if folders:
        files, inside = wanted_columns(files, {*asked, *(source.types or ())}, schema)
    differing = jobcolumns.differing(job, seen, schema, reads, where)
    if differing and begins:
        raise differing
    selection = selected(source, source_format, fs, files, formats.reading(source, columns, schema, where))
    room = engines.room(job.engine)
    at = devices(job, model, info, room)
    dtype, backend = getattr(model, "dtype", "auto"), getattr(model, "backend", "auto")
    place = Place(at.device, dtype, 1, backend, keep_nulls=job.nulls == "keep")
    identity = fingerprint_of(job, model, info, files, source_format.name, sink_format.name, reads, written)
    identity = fingerprint.of_approved(identity, named.arguments, [one.name for one in named.approved])
    if source_format.written:
        text = (f.name for f in _fields(schema, reads) if f.type == pa.string())
        identity = replace(identity, texts=tuple(sorted(text)))
    unseen = not_compared(dict(identity.code))
    nulls = jobcolumns.null_counts(seen)
    read = _fields(schema, reads)  # an empty file has no known names
    doubts = [] if blank else jobcolumns.doubtful(job, info, schema)
    said = info.notes if any(nulls.get(c, 1) for c in info.columns or ()) else ()
    resolved = Resolved(
        job, fs, source_format, sink_format, tuple(files), schema, selection, model, info, columns, keep, place,
        0, at.gpus, identity, (*notes, *warned, *doubts, *said, *filter(None, [unseen, at.note])),
        nulls, jobcolumns.nulls_given(job, info, read, nulls), differing, how, where, folders=inside,
        more=more, skipped=tuple(bad.values()), registered=named.registered, approved=named.approved,
        unread=tuple(bad),
    )  # fmt: skip
    resolved = resolved.of_folders(schema)
    workers, threads = _workers(resolved, room, at.workers)
    at_once = info.at_once if place.gpu else info.at_once // max(1, workers)
    bulk = -(-info.bulk // max(1, workers))
    rows = 0 if job.running.batch_rows == "auto" else int(job.running.batch_rows)
    place = replace(place, threads=threads, at_once=at_once, limit=job.running.batch_timeout, bulk=bulk, rows=rows)
    resolved = replace(resolved, workers=workers, place=place)
    if whole:
        _check_gates(resolved)
    return resolved


# ---------------------------------------------------------------- the source


def _listed(
    source: Source, planned: frozenset[str], apart: Apart | None
) -> tuple[Any, list[SourceFile], dict[str, Kinds], list[str]]:
    """The files of a source (of one result, if it is a sink; listed again if one was published meanwhile), the types by
    path of columns in a sink's folder names, and notes on files with two names, which go by those that are `planned`.
    Raises BadJob if the job's sink is found among them.
    """
    from gristmill.sources import openreaders, paths

    openreaders.close_all()
    revealed = replace(source, uri=reveal(source.uri), storage=reveal(source.storage))
    before = None
    while True:
        doubled: list[str] = []
        fs, listed = paths.resolve(revealed, doubled.append, planned, None if apart is None else apart.met)
        alone, stored, sinks = published_alone(listed)
        if not sinks or sinks == before:
            break
        before = sinks
    check_whole(alone, sinks)
    if not alone:
        raise BadSource(f"{', '.join(source.uri)}: it is the sink of a run that has published nothing yet")
    return fs, alone, stored, doubled


def _pinned(source: Source, folder: str | None, first: int | None) -> Pinned:
    """A source that is a store as it is now, for those who only look; only its first rows, if it can be counted."""
    if folder is None:
        raise BadJob(f"{', '.join(map(redact, source.uri))}: a store is read by a run: it cannot be planned alone")
    with contextlib.closing(Pinning(source, folder)) as pinning:
        return pinning.pinned(lambda _: None, first)


def laid_out(form: SinkFormat, sink: Sink | None) -> SinkFormat:
    """The format with the order and folders that a sink asks for. Raises BadJob for files that cannot have them."""
    if sink is None:
        return form
    if sink.joins and not form.tables and sink.sort_by:
        raise BadJob(
            f"sink {redact(sink.uri)}: sort_by beside partition_by, files or merge is for tables, and the files of a "
            f"{form.name} sink are none: leave one of them out"
        )
    by = tuple(name for name in sink.sort_by if name not in sink.partition_by)
    if by:
        from gristmill.sinks.ordered import ordered

        form = ordered(form, by)
    if sink.partition_by:
        from gristmill.sinks.partition import partitioned

        form = partitioned(form, sink.partition_by)
    return form


def _held(job: JobSpec, folder: str | None) -> Source:
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
            os.utime(temporary, (0, 0))  # the name identifies the content: a new file of that name is the same input
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    return replace(job.source, uri=(HELD + path.name,), storage={HELD: folder}, data=None, format="parquet")


def _inspected(
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


# ---------------------------------------------------------------- the model


def _fields(schema: pa.Schema, names: Sequence[str]) -> list[pa.Field]:
    """Those of these columns that the schema has: of hundreds, so its names are not listed for each."""
    known = frozenset(schema.names)
    return [schema.field(n) for n in names if n in known]


def _workers(r: Resolved, room: Room, gpu_workers: int) -> tuple[int, int]:
    """How many workers, and threads for each: one process per GPU if there are any, otherwise one per core."""
    wanted: Any = r.job.engine.workers
    if isinstance(wanted, tuple):
        wanted = wanted[1]
    if wanted == "auto":
        on_gpus = r.place.gpu or r.job.engine.gpus not in ("auto", 0)  # a function's, if the job says so
        wanted = gpu_workers if on_gpus else min(room.workers, _fit_memory(r, room))
        # One process keeps that many rows in flight, or computes with all cores; with GPUs, each has its own.
        if r.estimated_rows <= LEAST_SHARD or (r.info.at_once and not r.place.gpu):
            wanted = 1
    if r.info.at_once:
        wanted = min(int(wanted), r.info.at_once)
    count, threads = int(wanted), r.job.engine.threads
    if threads == "auto":
        return count, room.threads or max(1, machine.cores() // max(1, count))
    return count, int(threads)


def _fit_memory(r: Resolved, room: Room) -> int:
    """Workers whose models fit into this machine's memory together: fewer for large models, with more threads each."""
    if room.grows or room.threads is not None:  # its scheduler divides another machine's memory
        return room.workers
    each = WORKER_BYTES + WEIGHT_COPIES * r.info.weight_bytes
    return max(1, int(MEMORY_SHARE * machine.memory() // each))


def budget_of(r: Resolved) -> BatchPlan:
    """What a call may hold, by default or as the job says; nothing tried or remembered (gristmill.driver.budgets)."""
    text, own = r.info.by_tokens, r.info.call is not None
    running = r.job.running
    if r.info.at_once:
        taken = ROWS_TAKEN if running.batch_rows == "auto" else int(running.batch_rows)
        return BatchPlan(CPU_TOKENS, taken, max(ROW_WINDOW, taken))
    tokens = running.batch_tokens
    if tokens == "auto":
        on_cpu = ONNX_TOKENS if r.place.backend in EXPORTED else CPU_TOKENS
        tokens = GPU_TOKENS if r.place.gpu else on_cpu
    rows = running.batch_rows
    quick = None
    if rows == "auto":
        quick = QUICK_CALL if own else None if text or r.place.gpu else QUICK_FEATURES
        rows = MOST_ROWS if text else FUNCTION_ROWS if own else ROWS_WITHOUT_LENGTHS * 32
    window = TEXT_WINDOW if text else max(PLAIN_WINDOW, int(rows))
    return BatchPlan(int(tokens), int(rows), window, text, quick=quick)


# ---------------------------------------------------------------- shards, fingerprint, gates


def shard_rows(r: Resolved, rows_per_second: float | None) -> int:
    """Rows per shard: about half a minute of one worker, at most 1/(8 x workers) of the job (or 1/(8 x step processes),
    as each of these prepares one shard).
    """
    fixed = r.job.running.shard_rows
    if fixed != "auto":
        return int(fixed)
    at_once = max(1, r.workers) * max(1, r.job.engine.steps_workers)
    share = r.estimated_rows / (shard.SHARDS_PER_WORKER * at_once)
    quick = 0.0 if rows_per_second is None else min(rows_per_second * QUICK_SECONDS, QUICK_ROWS)
    least = LEAST_SHARD if r.info.by_tokens else 4 * LEAST_SHARD
    if r.job.engine.steps_workers:  # whoever asks for these has rows that are slow to prepare
        least = LEAST_SHARD // 16
    rows = max(share, least, quick)
    if r.info.bulk:
        rows = BULK_SHARD
    elif r.info.at_once:
        rows = min(max(share, LEAST_BEGUN), ROW_SHARD)
    elif rows_per_second is not None and r.bytes > UNTIMED_BYTES:
        rows = min(rows, max(1.0, rows_per_second * SHARD_SECONDS))
    return int(min(max(1, round(rows)), shard.MOST_ROWS))


def sink_format_of(job: JobSpec) -> SinkFormat:
    """The format of a job's sink, or the default without one. Raises BadJob for an unknown name."""
    return sink_format((job.sink.format if job.sink is not None else None) or DEFAULT)


def fingerprint_of(
    job: JobSpec,
    model: ModelSpec,
    info: ModelInfo,
    files: Sequence[FileInfo],
    source_format: str,
    sink_format: str,
    reads: Sequence[str] = (),
    written: Collection[str] = (),
) -> Fingerprint:
    """Everything that shapes the output, as digests. `model` is the job's model as resolved, `reads` the columns that
    are read, and `written` what the code itself writes, which does not count as part of a folder.
    """
    from gristmill.fingerprint import code
    from gristmill.fingerprint.modelfiles import Looked, real_places

    calls = {f"{name}[{n}]": s.call for name in ("steps", "post") for n, s in enumerate(getattr(job, name))}
    calls["model"] = info.call
    digests: dict[str, str] = {}
    held: list[Any] = []
    looked: dict[str, Looked] = {}
    own = not_folders(job, files) | real_places(written)
    looks = [(place, code.digests(call, held, looked, own)) for place, call in calls.items() if call is not None]
    registered, versions = others(model, source_format, sink_format)
    looks.append(("model", code.digests_of_code((*info.code, *registered), held, looked, own)))
    for place, found in looks:
        for name, digest in found.items():
            # Modules are shared by all steps; a lambda, an argument or a closure belongs to one step.
            digests[
                name if name.startswith(("module ", "version of ", fingerprint.PACKAGE)) else f"{place}: {name}"
            ] = digest
    digests |= versions
    described = replace(job, model=_as_asked(job, model, info))
    options = fingerprint.options_of(described, source_format, sink_format)
    return Fingerprint(
        fingerprint.in_order(options, job.source, [f.file.path for f in files]),
        dict(info.digests),
        digests,
        {f.file.path: fingerprint.input_digest(f) for f in files},
        fingerprint.digest_of(list(reads)) if reads else "",
        tuple(held),
        looked=looked,
    )


def others(model: ModelSpec, source_format: str, sink_format: str) -> tuple[list[Any], dict[str, str]]:
    """What other packages have registered of a job's model and formats, which counts as user code: classes and
    functions, and the packages' versions.
    """
    code: list[Any] = []
    versions: dict[str, str] = {}
    kind = MODELS.name_of(type(model)) or ""
    for registry, name in ((MODELS, kind), (SOURCES, source_format), (SINKS, sink_format)):
        if (package := registry.package_of(name)) is not None:
            versions[f"version of {package[0]}"] = package[1]
            code += [registry.get(name), *([open_function(model)] if registry is MODELS else [])]
    return code, versions


def not_folders(job: JobSpec, files: Sequence[FileInfo]) -> frozenset[str]:
    """Real paths that do not count as part of a folder named by an argument: what the job writes, and its source, which
    is compared separately.
    """
    from gristmill.fingerprint.modelfiles import MOST_FILES

    uris = [] if job.sink is None else [job.sink.uri, *([records_of(job.sink.uri)] if file_named(job.sink.uri) else [])]
    uris += [*job.source.uri, *([job.running.log] if job.running.log else [])]
    plain = {path for uri in uris if "://" not in (path := plain_path(str(reveal(uri))))}
    read = [f.file.path for f in files if "://" not in f.file.path] if len(files) <= MOST_FILES else []
    real = {folder: os.path.join(os.path.realpath(folder), "") for folder in set(map(os.path.dirname, read))}
    whole = tuple(os.path.join(path, "") for path in plain)
    names = ((real[os.path.dirname(path)], os.path.basename(path)) for path in read)
    return frozenset(plain).union(folder + name for folder, name in names if not folder.startswith(whole))


def _as_asked(job: JobSpec, model: ModelSpec, info: ModelInfo) -> ModelSpec:
    """The model with its precision resolved, but the backend as the job has it: "auto" may become either, for the same
    values (gristmill.driver.backends), and the plan stores which.
    """
    asked: Any = job.model
    return changed(model, backend=asked.backend) if info.exportable else model


def reducer(job: JobSpec) -> Reducer | None:
    """What makes the final files of a job, imported if given by name; None if nothing does. Raises BadJob."""
    if job.reduce is None:
        return None
    from gristmill.fingerprint import code
    from gristmill.process.targets import import_target
    from gristmill.result.reduction import Reducer

    try:
        call = import_target(job.reduce) if isinstance(job.reduce, str) else job.reduce
    except BadModel as e:
        raise BadJob(f"reduce: {e}") from e
    if not callable(call):
        raise BadJob(f"reduce: {job.reduce} is a {type(call).__name__}, not a function of rows and a folder")
    name = job.reduce if isinstance(job.reduce, str) else getattr(call, "__qualname__", type(call).__qualname__)
    digests = fingerprint.compared(code.digests_of_code((call,), [], {}, frozenset()))
    return Reducer(name, call, fingerprint.digest_of(digests))


def audits(job: JobSpec) -> list[Any]:
    """The functions that audit the staged result, imported if given by name. Raises BadJob."""
    from gristmill.process.targets import import_target

    hooks = []
    for hook in job.audit:
        try:
            hooks.append(import_target(hook) if isinstance(hook, str) else hook)
        except BadModel as e:
            raise BadJob(f"audit: {e}") from e
        if not callable(hooks[-1]):
            raise BadJob(f"audit: {hook} is a {type(hooks[-1]).__name__}, not a function of the staged result")
    return hooks


def _check_gates(r: Resolved) -> None:
    rows = r.rows
    columns = r.info.filled
    if r.job.nulls != "dead" or r.job.steps or rows is None or r.job.source.where:
        return
    if r.job.source.limit is not None or r.job.source.sample is not None:
        return
    nulls = {c: n for c in columns if (n := r.nulls.get(c, 0))}
    least, most = max(nulls.values(), default=0), min(sum(nulls.values()), rows)  # one row may have several nulls
    if rows and least > r.job.gates.allowed(rows):
        some = f"{least}" if least == most else f"{least} to {most}"
        raise GateFailed(
            f"{some} of {rows} rows are null in {', '.join(nulls)}, so at most {(rows - least) / rows:.4f} of them "
            f"can be scored, under min_ok {r.job.gates.min_ok}: give nulls to the model, if it takes them (on_null: "
            "keep), leave such rows out (where, on_null: skip), or lower the gate "
            f"(--min-ok {(shown := (rows - most) * 100 // rows / 100)}, gates={{'min_ok': {shown}}})",
            gates=["min_ok"],
        )
