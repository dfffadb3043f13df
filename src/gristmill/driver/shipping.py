"""What the workers of a resolved job are given, and the checks on the first rows that one of them scored."""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from gristmill.arrow.hashing import kinds_of
from gristmill.arrow.schemas import real, wider
from gristmill.commit import generation as generations
from gristmill.commit.documents import Matched, ModelRecord, RunsOn
from gristmill.commit.publication import Publication
from gristmill.driver.backends import text_model
from gristmill.driver.jobcolumns import implied
from gristmill.driver.resolved import Resolved
from gristmill.errors import BadJob, PlanChanged, did_you_mean
from gristmill.files.contract import Files
from gristmill.fingerprint import digests
from gristmill.fingerprint.pins import named_pins, pins
from gristmill.job.job import Sink
from gristmill.job.options import BatchPlan
from gristmill.job.secret import secrets_in
from gristmill.job.specs import Call, ModelSpec, changed
from gristmill.process.pickling import by_value, from_value
from gristmill.result.reading import beside, readable_dataset
from gristmill.shards import shard
from gristmill.shards.shard import Piece, Selection, Shard
from gristmill.sinks.formats import DEFAULT, sink_format
from gristmill.sources.formats import damaged, format_options
from gristmill.worker.matching import Matching
from gristmill.worker.recipe import Output, Reader, Recipe


def recipe(r: Resolved, sink: Sink, files: Files, batch: BatchPlan, run: str = "") -> Recipe:
    """What the workers of a resolved job are given; `run` tells a run from others (else it is one of its own)."""
    job = r.job
    leave = tuple(r.info.columns or ())
    output = Output(r.keep, leave, sink.row_id, sink.key, sink.model_version, model_version(r), sink.drop, implied(job))
    code, secret = r.fingerprint.code, (*secrets_in(job), *secrets_in(r.model))  # of the environment, too
    return Recipe(
        reader(r),
        job.steps, _pinned(r), job.post,
        output,
        replace(sink, storage={}), r.sink_format, r.place, job.running, job.nulls, job.on_nan, batch,
        files=files, secrets=secret, pins=pins(code),
        named=(*named_pins(code, secret, r.fingerprint.looked), *r.approved),
        held=r.fingerprint.held, run=run or secrets.token_hex(6), profiled=tuple(job.gates.drift or ()),
        matching=matching(r),
    )  # fmt: skip


def matching(r: Resolved) -> Matching | None:
    """How an update tells rows; None if the job has none. Answers rest on the columns that the model and conditions
    read; on all, where code gets all.
    """
    from gristmill.sources.where import columns_of

    job, read = r.job, r.columns or tuple(r.schema.names)
    if job.update is None or job.sink is None:
        return None
    sink = job.sink
    opaque = bool(job.post) or any(step.expression is None for step in job.steps)
    columns = read
    if not opaque and r.info.columns is not None:
        conditions = [columns_of(s.expression, r.schema) for s in job.steps if s.expression is not None]
        named = {*r.info.columns, *(n for c in conditions for n in c)}
        columns = tuple(n for n in read if n in named)
    beside = sink.joins or bool(sink.sort_by) or r.sink_format.name != DEFAULT
    copied = opaque and bool(sink.key)
    made: Literal["", "made", "copied"] = "" if sink.row_id is None else "copied" if copied else "made"
    key = job.update_key if all(n in read for n in job.update_key) else ()  # the sink's may be made by steps
    return Matching(key, columns, opaque, beside, made)


def matched(r: Resolved) -> Matched | None:
    """How an update tells rows, as a plan stores it."""
    if (how := matching(r)) is None:
        return None
    kinds = kinds_of(pa.schema([r.schema.field(n) for n in dict.fromkeys((*how.key, *how.columns))]))
    return Matched(how.key, how.columns, tuple((name, kind) for name, kind in kinds))


def as_sent(recipe: Recipe) -> Recipe:
    """The recipe with the arguments of functions as other processes would be sent them. What pickle leaves out of an
    object does not count as part of the job, so it must not reach the model in this process either. Arguments that
    cannot be pickled stay as they are.
    """
    steps, post = (tuple(_arguments_sent(step) for step in steps) for steps in (recipe.steps, recipe.post))
    return replace(recipe, steps=steps, post=post, model=_arguments_sent(recipe.model))


def _arguments_sent(spec: Any) -> Any:
    call = getattr(spec, "call", None)
    if not isinstance(call, Call) or not call.args:
        return spec
    args = {}
    for name, value in call.args.items():
        try:
            args[name] = from_value(by_value(value))
        except Exception:  # whatever pickling calls: with processes, the job would be refused
            args[name] = value
    return changed(spec, call=replace(call, args=args))


def reader(r: Resolved) -> Reader:
    """How the job's source is read."""
    where = None if r.blank else r.job.source.where
    return Reader(
        r.source_format, r.fs, r.columns, r.schema, where, format_options(r.job.source), damaged(r.job.source), r.own
    )


def _pinned(r: Resolved) -> ModelSpec:
    """The model spec with the digest found at plan time: a worker loads exactly that, or stops."""
    if not r.info.digest or not hasattr(r.model, "sha256"):
        return r.model
    return changed(r.model, sha256=r.info.digest)


def runs_on(r: Resolved) -> RunsOn:
    """What the model runs on: device and threads of a worker, plus backend and precision for models that have them."""
    found = RunsOn(r.place.device, r.place.threads)
    if r.info.exportable:
        found = replace(found, backend=r.place.backend, dtype=text_model(r).dtype)
    return found


def model_record(r: Resolved) -> ModelRecord:
    """What a plan records of the model."""
    first, *others = r.registered or (None,)
    return ModelRecord(r.job.model.name, r.info.digest, model_version(r), first, tuple(others))


def model_version(r: Resolved) -> str:
    """The model's version: the digest of its files; of its code if it has no files; of both if its files name code. Of
    one that a registry names, its name there, its version, and the digest that was approved, before that of code.
    """
    if r.registered:
        named = " ".join(f"{one.label} sha256:{one.digest}" for one in r.registered)
        return f"{named} code:{_version(r)}" if r.info.code or r.info.call else named
    return _version(r)


def _version(r: Resolved) -> str:
    if r.info.digest and not r.info.code:
        return r.info.digest
    code = digests.compared(r.fingerprint.code)
    return digests.digest_of([r.info.digest, code] if r.info.digest else code)


def pieces(r: Resolved, most: int | None) -> tuple[Piece, ...]:
    """The first selected ranges of the source, enough for `most` rows; all of them if None."""
    out: list[Piece] = []
    rows = 0.0
    for index, start, stop in r.selection.ranges.tolist():
        f = r.files[index]
        if out and out[-1].index == index:
            out[-1] = replace(out[-1], ranges=(*out[-1].ranges, (start, stop)))
        else:
            out.append(Piece(index, f.file, f.extent, ((start, stop),)))
        rows += shard.estimated_rows(f, start, stop)
        if most is not None and rows >= most:
            break
    return tuple(out)


def spread(r: Resolved, most: int, only: Shard | None = None) -> tuple[tuple[Piece, ...], tuple[tuple[int, int], ...]]:
    """At most so many rows from all over the selected ranges of the source, or over those of `only` one shard: pieces,
    and how many rows of each (Task.some).
    """
    selection, number = r.selection, {f.file.path: n for n, f in enumerate(r.files)}
    if only is not None:
        ranges = [(number[p.file.path], a, b) for p in only.pieces for a, b in p.ranges]
        selection = Selection(np.array(ranges, dtype=np.int64).reshape(-1, 3))
    found = shard.spread(r.files, selection, most)
    pieces = [Piece(n, r.files[n].file, r.files[n].extent, ((a, b),)) for n, a, b, _, _ in found]
    return tuple(pieces), tuple((rows, of) for *_, rows, of in found)


def check_columns(r: Resolved, sink: Sink, answer: dict[str, Any]) -> None:
    """Raises BadJob if a name that only the first rows could show (a function's results) is duplicated or missing."""
    if not answer["schema"]:
        return
    names = generations.decode_schema(answer["schema"]).names
    for dropped in sink.drop:
        if dropped not in answer["columns"] and dropped not in answer["answers"]:  # which a step left out
            near = did_you_mean(dropped, [*answer["columns"], *answer["answers"]])
            raise BadJob(
                f"drop names column {dropped!r}, which no row has: they have {', '.join(answer['columns'])}{near}"
            )
    kept = [n for n in (r.keep or ()) if n in answer["results"] and n not in implied(r.job)]
    doubled = kept or [n for n in names if names.count(n) > 1]
    if doubled:
        raise BadJob(
            f"column {doubled[0]!r} would appear twice in the output: {r.model.name} returns it and keep carries it "
            "over; return only the columns that it adds, rename one (output=), or leave it out of keep"
        )
    for option, name in (("row_id", sink.row_id), ("model_version", sink.model_version)):
        if name in answer["results"]:
            raise BadJob(f"{option} names column {name!r}, which {r.model.name} returns: give another name")
    missing = [n for n in (*(r.keep or ()), *sink.partition_by, *sink.sort_by) if n not in names]
    if missing:
        there, near = ", ".join(names), did_you_mean(missing[0], names)
        raise BadJob(
            f"keep, partition_by or sort_by names column {missing[0]!r}, which is no output column: there are "
            f"{there}{near}"
        )


def added_schema(base: pa.Schema, probed: pa.Schema, sink: Sink) -> pa.Schema:
    """The schema of a run whose rows are added to a result with the schema `base`, given the schema `probed` of its
    first rows: the base's, which values must fit without loss (the first rows' do if their types are the base's; others
    are checked as they are written). If the sink evolves, types are widened, and a column that only one side has is
    null for the other's rows.

    Raises PlanChanged, naming what differs.
    """
    fields, lines = [], []
    evolves = not sink.evolve  # whether --evolve would help
    for old in base:
        if old.name not in probed.names:
            lines += [] if sink.evolve else [f"column: {old.name} is gone (was {old.type})"]
            fields.append(old)
            continue
        now = probed.field(old.name).type
        both = wider(old.type, now)
        if both is None and sink.evolve and old.name not in sink.partition_by:
            both = real(old.type, now)  # each value is checked, those of the result by `check_exact`
        if both is not None and sink.evolve and _other_digits(old.type, both):
            _check_digits(old, both, sink)
        evolves = evolves and (both is not None or real(old.type, now) is not None)
        free = sink.evolve or pa.types.is_null(old.type)  # a column of nulls alone has no type to keep
        if both is None or (both != old.type and not free):
            lines.append(f"column: {old.name} was {old.type}, is {now}")
        fields.append(old.with_type(both) if free and both is not None else old)
    for new in probed:
        if new.name not in base.names:
            lines += [] if sink.evolve else [f"column: {new.name} is new ({new.type})"]
            fields.append(new)
    if lines:
        why = ", which no single type can hold without loss" if sink.evolve else ""
        raise PlanChanged(
            f"{sink.uri}: the rows of this run have other columns than the result that they would be added to:\n"
            f"{digests.listed(lines)}{why}\nuse --restart (restart=True) to score everything anew"
            + ("" if not evolves else ", or --evolve (evolve=True) to widen types and add columns for all rows")
        )
    return pa.schema(fields)


def _check_digits(old: pa.Field, both: pa.DataType, sink: Sink) -> None:
    """Raises PlanChanged if a column whose floats would be widened is published as text."""
    key = old.name in sink.partition_by
    if key or sink_format(sink.format or DEFAULT).decimal:
        where = "the names of folders (partition_by)" if key else f"{sink.format} files"
        raise PlanChanged(
            f"{sink.uri}: column {old.name!r} was {old.type}, would be {both}: {where} hold its published values with "
            f"the few digits that tell values of {old.type} apart, which read back as other numbers of the wider type: "
            f"--evolve cannot widen it; give {old.type} (a step can cast it), or use --restart (restart=True) to score "
            "everything anew"
        )


def _other_digits(kind: pa.DataType, wider: pa.DataType) -> bool:
    """Whether floats written as text from one type read back as other numbers in the wider type."""
    t = pa.types
    if t.is_nested(kind) and kind.num_fields == wider.num_fields:
        return any(_other_digits(kind.field(i).type, wider.field(i).type) for i in range(kind.num_fields))
    return t.is_floating(kind) and not t.is_float64(kind) and t.is_float64(wider)


def check_exact(base: Publication, schema: pa.Schema, uri: str) -> None:
    """Raises PlanChanged if a column's new type cannot hold each of its values in the result: floats for whole numbers,
    and finer times, which cover a shorter range.
    """
    then = generations.decode_schema(base.body.output_schema)
    names = [f.name for f in schema if f.name in then.names and not _holds(f.type, then.field(f.name).type)]
    if not names:
        return
    for batch in readable_dataset(base, beside(base)).to_batches(columns=names):
        for name in names:
            try:
                batch.column(name).cast(schema.field(name).type)
            except pa.ArrowInvalid as e:
                raise PlanChanged(
                    f"{uri}: column {name!r} was {then.field(name).type}, is {schema.field(name).type}, which cannot "
                    f"hold every value of the result exactly ({e}): --evolve cannot widen it; give "
                    f"{then.field(name).type}, or use --restart (restart=True) to score everything anew"
                ) from None


def _holds(wider: pa.DataType, kind: pa.DataType) -> bool:
    """Whether a type that another was widened to can hold every possible value of it."""
    t = pa.types
    if t.is_nested(kind):
        return all(_holds(wider.field(i).type, kind.field(i).type) for i in range(kind.num_fields))
    return kind == wider or not (t.is_timestamp(kind) or (t.is_integer(kind) and t.is_floating(wider)))


def foreknown(r: Resolved) -> bool:
    """Whether the output's columns are known before any row is scored: no code has a say in them."""
    code = any(step.kind != "filter" for step in r.job.steps) or bool(r.job.post)
    return not code and (r.info.schema is not None or r.info.outputs == ())


def schema_without_rows(r: Resolved) -> pa.Schema:
    """The output schema if no row came out, as far as it is known."""
    names = r.keep if r.keep is not None else tuple(n for n in r.schema.names if n not in (r.info.columns or ()))
    fields = [*(r.schema.field(n) for n in names if n in r.schema.names), *(r.info.schema or ())]
    sink = r.job.sink
    if sink is None:
        return pa.schema(fields)
    if sink.row_id is not None:
        fields.insert(0, pa.field(sink.row_id, pa.string()))
    if sink.model_version is not None:
        fields.append(pa.field(sink.model_version, pa.dictionary(pa.int32(), pa.string())))
    return pa.schema([f for f in fields if f.name not in sink.drop])
