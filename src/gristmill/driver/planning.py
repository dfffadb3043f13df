"""Planning: from a job to what its workers are given. All static checks are here, before any model is loaded."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from gristmill.commit.inspections import Inspections, looked_at
from gristmill.driver import describing, jobcolumns, jobfingerprint, jobsource, sizes
from gristmill.driver.apart import Apart, check_other
from gristmill.driver.devices import devices
from gristmill.driver.resolved import Resolved
from gristmill.engines import registry as engines
from gristmill.errors import BadJob, GateFailed, RunFailed, SourceChanged
from gristmill.fingerprint import digests as fingerprint
from gristmill.job.job import HELD, JobSpec, Sink, Source
from gristmill.job.snapshots import is_snapshot
from gristmill.job.uris import redact
from gristmill.models.contract import Place
from gristmill.result.published import Kinds
from gristmill.shards.sourcefiles import FileInfo
from gristmill.sinks.contract import SinkFormat
from gristmill.sinks.formats import DEFAULT, sink_format
from gristmill.snapshots.pinned import Pinned
from gristmill.sources.contract import SourceFormat

if TYPE_CHECKING:
    pass


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
    jobfingerprint.audits(job)
    jobfingerprint.reducer(job)
    source = job.source if job.source.data is None else jobsource.held(job, held_data)
    sink_format = laid_out(sink_format, job.sink)
    if source.data is None and not source.uri[0].startswith(HELD) and is_snapshot(source):
        pinned = pinned or jobsource.pinned(source, held_data, first)
        fs, listed, doubled = pinned.storage, list(pinned.files), list(pinned.twice)
        stored: Mapping[str, Kinds] = pinned.kinds
        source = replace(source, format=pinned.form, storage={})
    else:
        fs, listed, stored, doubled = jobsource.listed(source, known.paths if known else frozenset(), apart)
    source_format = formats.source_format(source, listed, fs)
    how = looked_at(source_format.name, format_options(source))
    with _as_listed():
        files, bad = jobsource.inspected(source, source_format, fs, listed, how, known or Inspections())
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
    from gristmill.sources.schema import check, unfit, unify

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
    typed = [n for n in asked if n in (source.types or ())]
    strange = unfit(seen, typed, some=where is not None)
    inside: tuple[str, ...] = ()
    if folders:
        files, inside = wanted_columns(files, {*asked, *(source.types or ())}, schema)
    differing = jobcolumns.differing(job, seen, schema, reads, where)
    if differing and begins:
        raise differing
    with _as_listed():
        selection = jobsource.selected(
            source, source_format, fs, files, formats.reading(source, columns, schema, where)
        )
    room = engines.room(job.engine)
    at = devices(job, model, info, room)
    dtype, backend = getattr(model, "dtype", "auto"), getattr(model, "backend", "auto")
    place = Place(at.device, dtype, 1, backend, keep_nulls=job.nulls == "keep")
    identity = jobfingerprint.fingerprint_of(
        job, model, info, files, source_format.name, sink_format.name, reads, written
    )
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
        0, at.gpus, identity, (*notes, *warned, *doubts, *strange, *said, *filter(None, [unseen, at.note])),
        nulls, jobcolumns.nulls_given(job, info, read, nulls), differing, how, where, folders=inside,
        more=more, skipped=tuple(bad.values()), registered=named.registered, approved=named.approved,
        unread=tuple(bad),
    )  # fmt: skip
    resolved = resolved.of_folders(schema)
    workers, threads = sizes.workers(resolved, room, at.workers)
    at_once = info.at_once if place.gpu else info.at_once // max(1, workers)
    bulk = -(-info.bulk // max(1, workers))
    rows = 0 if job.running.batch_rows == "auto" else int(job.running.batch_rows)
    place = replace(place, threads=threads, at_once=at_once, limit=job.running.batch_timeout, bulk=bulk, rows=rows)
    resolved = replace(resolved, workers=workers, place=place)
    if whole:
        _check_gates(resolved)
    return resolved


@contextlib.contextmanager
def _as_listed() -> Iterator[None]:
    """Raises RunFailed for a file that goes before there is a plan: the next run lists what is there then."""
    try:
        yield
    except SourceChanged as e:
        if "--restart" in str(e):  # it names another way out
            raise
        raise RunFailed(f"{e}, while the run was being planned: run again") from e


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


# ---------------------------------------------------------------- the model


def _fields(schema: pa.Schema, names: Sequence[str]) -> list[pa.Field]:
    """Those of these columns that the schema has: of hundreds, so its names are not listed for each."""
    known = frozenset(schema.names)
    return [schema.field(n) for n in names if n in known]


def sink_format_of(job: JobSpec) -> SinkFormat:
    """The format of a job's sink, or the default without one. Raises BadJob for an unknown name."""
    return sink_format((job.sink.format if job.sink is not None else None) or DEFAULT)


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
