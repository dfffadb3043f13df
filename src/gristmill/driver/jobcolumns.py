"""The columns of a job: which of the source's are read, kept, given to the model, and whether those that it names exist
and fit. All of this is checked before any model is loaded.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from gristmill.errors import BadJob, BadSource, did_you_mean, nearest
from gristmill.job.job import JobSpec, Sink, Source
from gristmill.job.namelists import joined, split
from gristmill.models.contract import ModelInfo
from gristmill.observe import units
from gristmill.shards.sourcefiles import FileInfo


def is_blank(files: Sequence[FileInfo], schema: pa.Schema) -> bool:
    """Whether all files are empty and of a format that learns its columns from rows: then any name may be right."""
    return not schema.names and all(f.rows == 0 for f in files)


def condition(source: Source, schema: pa.Schema) -> Any:
    """The source's `where`, which columns of its schema it reads; None without one. Raises BadJob."""
    if source.where is None:
        return None
    from gristmill.sources.where import SqlWhere

    found = SqlWhere(source.where, schema, "where")
    found.close()  # it is evaluated elsewhere
    return found


def null_counts(files: Sequence[FileInfo]) -> dict[str, int]:
    """Null counts by column, for columns that every file gives a count for."""
    counted: dict[str, int] = {}
    known = [f.nulls for f in files]
    if any(n is None for n in known):
        return {}
    names = set.intersection(*(set(n or {}) for n in known)) if known else set()
    for name in sorted(names):
        counted[name] = sum((n or {})[name] for n in known)
    return counted


def nulls_given(job: JobSpec, info: ModelInfo, given: list[pa.Field], nulls: dict[str, int]) -> str:
    """What a function on arrays is given for nulls of the source's numbers; "" if there are none, or only the rows can
    tell.
    """
    if info.call is None or info.call.batch_format != "numpy" or job.source.where:
        return ""
    from gristmill.models.takes import takes_of

    takes = takes_of(info.call)
    reads = {f.name for f in given} if info.columns is None else {*info.columns}
    reads -= set() if job.nulls == "keep" else {*info.filled}
    whole: list[str] = []
    real: list[str] = []
    for f in given:
        kind = (takes.types.get(f.name) if takes is not None else None) or f.type
        if f.name in reads and nulls.get(f.name) and (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
            (whole if pa.types.is_integer(kind) else real).append(f.name)
    files = "" if job.source.limit is None and job.source.sample is None else " in the files"
    said = [
        f"{_counted(names, nulls)}{files}: {info.name} gets {value} for them ({way})"
        for names, value, way in (
            (whole, "None", f"takes={{{whole[0]!r}: 'float64'}} gives NaN" if whole else ""),
            (real, "NaN", "declared not null in takes=, on_null decides"),
        )
        if names
    ]
    return "; ".join(said) + (", where no step changes them" if said and job.steps else "")


def _counted(names: list[str], nulls: dict[str, int]) -> str:
    more = f", and {units.plural(len(names) - 3, 'other column has', 'other columns have')} some" if names[3:] else ""
    return ", ".join(f"{n} has {units.plural(nulls[n], 'null')}" for n in names[:3]) + more


def check_on_null(job: JobSpec, info: ModelInfo, schema: pa.Schema) -> None:
    """Raises BadJob if on_null is given and there is no column to whose nulls it could apply."""
    if job.on_null in (None, "keep") or info.filled:
        return
    if info.call is None:
        why, way = "answers rows with nulls itself", "leave it out, or leave such rows out with where"
    else:
        why = "declares none of its columns not null" if info.columns else "does not say which columns it reads"
        column = next(iter(info.columns or schema.names), "x")
        kind = f"{_declared(schema, column)} not null"
        way = (
            f"say takes={{{column!r}: {kind!r}}} (takes: {{{column}: {kind}}}) with each column that it reads, or use "
            "where"
        )
    raise BadJob(f"on_null is {job.on_null!r}, and {info.name} {why}, so it would change nothing: {way}")


def _declared(schema: pa.Schema, column: str) -> str:
    """A column's own type as `takes=` writes it; "any" if it cannot."""
    from gristmill.arrow.typetext import parse_type

    try:
        found = str(schema.field(column).type)
        return found if parse_type(found) == schema.field(column).type else "any"
    except (KeyError, ValueError):
        return "any"


def widened(schema: pa.Schema, job: JobSpec) -> pa.Schema | None:
    """The schema that the model will see; None if steps may change it, so that only the run can tell."""
    if any(s.kind != "filter" for s in job.steps):
        return None
    if job.source.columns is None:
        return schema
    missing = [c for c in job.source.columns if c not in schema.names]
    if missing:
        raise _no_column(missing[0], schema, "columns=")
    return pa.schema([schema.field(c) for c in job.source.columns])


def check_calls(job: JobSpec) -> None:
    """Look for what the steps call, as workers will. Raises BadModel."""
    from gristmill.models.calls import found

    for step in (*job.steps, *job.post):
        if step.call is not None:
            found(step.call)


def check_steps(job: JobSpec, schema: pa.Schema) -> None:
    """Check what the first steps declare to take, and conditions, as far as the source's schema still holds. Raises
    BadModel, BadJob.
    """
    from gristmill.models.takes import takes_of
    from gristmill.sources.where import columns_of

    if job.source.columns is not None:
        schema = pa.schema([schema.field(c) for c in job.source.columns if c in schema.names])
    for step in job.steps:
        takes = None if step.call is None else takes_of(step.call)
        if takes is not None:
            takes.check(schema)
        if step.expression is not None:
            columns_of(step.expression, schema, "filter")
        if step.kind != "filter":
            return


def _no_column(
    name: str, schema: pa.Schema, what: str, whose: str = "the source does not have: it has", more: str = ""
) -> BadSource:
    hint = did_you_mean(name, schema.names) or more
    if len(parts := split(name)) > 1 and all(part in schema.names for part in parts):
        hint = f"; several are a list: [{', '.join(parts)}]"
    return BadSource(f"{what} names column {name!r}, which {whose} {', '.join(schema.names)}{hint}")


def check_update(job: JobSpec, schema: pa.Schema) -> None:
    """Raises BadSource if a column that an update matches rows by is not read of the source."""
    if job.update is None:
        return
    columns = schema.names if job.source.columns is None else job.source.columns
    there = pa.schema([schema.field(name) for name in columns if name in schema.names])
    for name in job.update.key:
        if name not in there.names:
            raise _no_column(name, there, "the update's key")


def kept_columns(job: JobSpec, info: ModelInfo, schema: pa.Schema, blank: bool = False) -> tuple[str, ...] | None:
    """The columns carried over; None for all except the model's own; of a `blank` source there are none to ask for.
    Raises BadJob for a name that clashes.
    """
    sink = None if blank else job.sink
    given = None if sink is None else sink.keep
    steps = any(s.kind != "filter" for s in job.steps)
    keep = given if given is not None else None if info.keeps_columns else ()
    if keep is not None and sink is not None:  # columns that name folders are carried over, too
        keep = (*keep, *(n for n in implied(job) if n not in (info.outputs or ())))
    if not steps and sink is not None:
        _check_names(job, sink, info, schema)
    names = list(keep) if keep is not None else [n for n in schema.names if n not in (info.columns or ())]
    added = [*(info.outputs or ()), *(n for n in (sink and sink.row_id, sink and sink.model_version) if n)]
    for name in added:
        if names.count(name) + added.count(name) > 1:
            flag = next((f for f in ("row_id", "model_version") if sink and getattr(sink, f) == name), "output")
            others = ",".join(n for n in names if n != name)
            if keep is not None and not steps and name not in schema.names and name in (info.outputs or ()):
                raise BadJob(
                    f"keep names column {name!r}, which {info.name} returns, and which is written anyway: leave it out "
                    f"of keep (--keep {others or repr('')})"
                )
            raise BadJob(
                f"column {name!r} would appear twice in the output: rename the new one (--{flag.replace('_', '-')} "
                f"NAME, {flag}=) or leave the old one out (--keep {others or repr('')})"
            )
    return keep


def _of_index(data: Any, name: str) -> str:
    """What to do about a name that the index of a DataFrame has."""
    if not hasattr(data, "iloc") or name not in data.index.names:
        return ""
    return f"; {name!r} is the index of the {type(data).__name__}, which is no column: give .reset_index()"


def implied(job: JobSpec) -> tuple[str, ...]:
    """Columns that are kept because they name folders, or rows are sorted by them."""
    sink = job.sink
    if sink is None:
        return ()
    named = dict.fromkeys((*sink.partition_by, *sink.sort_by))
    return tuple(n for n in named if n not in (*(sink.keep or ()), sink.row_id, sink.model_version))


def _check_names(job: JobSpec, sink: Sink, info: ModelInfo, schema: pa.Schema) -> None:
    """Check that columns named by the sink exist. Rows may be partitioned by results, too; those of a function and of
    post steps only the run can tell.
    """
    there = schema if job.source.columns is None else pa.schema([schema.field(n) for n in job.source.columns])
    for what, names, more in (("keep", sink.keep or (), info.outputs or ()), ("key", sink.key, ())):
        for name in names:
            if name not in there.names and name not in more:
                own = "; what the model returns is written anyway, without keep"
                hint = own if what == "keep" and info.outputs is None else ""
                raise _no_column(name, there, what, more=_of_index(job.source.data, name) or hint)
    for name in sink.drop:
        if name not in there.names and not job.post and name not in (info.outputs or (name,)):
            raise _no_column(
                name,
                pa.schema([*there, *((n, pa.null()) for n in info.outputs or ())]),
                "drop",
                "neither source nor model has: there are",
            )
    here = (sink.row_id, sink.model_version)  # made neither by the source nor by the model
    for what, names in (("partition_by", sink.partition_by), ("sort_by", sink.sort_by), ("index", sink.index)):
        for name in names:
            if name not in (*there.names, *here, *(info.outputs or (name,))) and not job.post:
                raise _no_column(name, there, what)


def doubtful(job: JobSpec, info: ModelInfo, schema: pa.Schema) -> list[str]:
    """A line for each name that the sink has and only the run can find, and that is nearly a column of the source. Rows
    are sorted by the model's own columns as a rule.
    """
    sink, outputs = job.sink, info.outputs or ()
    options = ("keep", "key", "partition_by", "index")
    named = [] if sink is None else [(what, getattr(sink, what) or ()) for what in options]
    lines = []
    for what, names in named:
        for name in names:
            near = nearest(name, schema.names)
            if near and name not in (*schema.names, *outputs, sink and sink.row_id, sink and sink.model_version):
                lines.append(
                    f"{what} names column {name!r}, which the source does not have: the job's own code has to make it; "
                    f"or did you mean {near!r}?"
                )
    return lines


def read_columns(
    job: JobSpec, info: ModelInfo, keep: tuple[str, ...] | None, schema: pa.Schema
) -> tuple[str, ...] | None:
    """The columns that are read of the source; None for all."""
    unknown = any(s.expression is None for s in job.steps) or (job.steps and not schema.names)
    if unknown or keep is None or info.columns is None:
        return job.source.columns
    known = frozenset(schema.names)
    wanted = [n for n in dict.fromkeys(_named(job, info, keep, schema)) if n in known]
    return tuple(wanted) or tuple(schema.names[:1])


def _named(job: JobSpec, info: ModelInfo, keep: Sequence[str], schema: pa.Schema) -> list[str]:
    """The source columns that the job names: to carry over, for the model, ids, conditions."""
    from gristmill.sources.where import columns_of

    conditions = [columns_of(s.expression, schema) for s in job.steps if s.expression is not None]
    keys = (*(job.sink.key if job.sink else ()), *job.update_key)
    return [*keep, *(info.columns or ()), *keys, *(n for c in conditions for n in c)]


DIFFERING = 3  # columns that are told with their files: where one is missing, others of its file often are


def differing(
    job: JobSpec, files: Sequence[FileInfo], schema: pa.Schema, reads: list[str], where: Any
) -> BadSource | None:
    """The error for files that differ in columns that are read, with the ways out; None if they do not differ."""
    from gristmill.sources.schema import apart, unify

    asked = [*reads, *(() if where is None else where.columns)]
    found = apart(schema, asked)
    if not found:
        return None
    problems = list(found.values())
    more = f"; and {len(problems) - DIFFERING} more columns" if len(problems) > DIFFERING else ""
    ways = ["name only files that belong together"]
    alike = [n for n in reads if n not in found]
    if alike and job.source.data is None and not {*found} & {*(job.sink.keep if job.sink and job.sink.keep else ())}:
        listed = shlex.quote(joined(alike)) if len(alike) <= 20 else "…"
        ways.append(f"leave out what is not read by naming the other columns (--columns {listed}, columns=)")
    if job.sink is not None and not apart(unify(files, evolve=True), asked):
        ways.append(
            "--evolve (evolve=True), which fills missing columns with null and lets whole numbers become floats"
        )
    return BadSource(f"the files of the source differ: {'; '.join(problems[:DIFFERING])}{more}: {'; or '.join(ways)}")
