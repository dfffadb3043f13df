"""What the workers of a resolved job are given, and what the first rows that one of them scored must look like."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pyarrow as pa

from gristmill.commit import generation as generations
from gristmill.commit.publication import Publication
from gristmill.commit.reading import readable_dataset
from gristmill.errors import BadJob, PlanChanged
from gristmill.io.registry import damaged, format_options, sink_format
from gristmill.io.schema import real, wider
from gristmill.models.pins import named_pins, pins
from gristmill.plan import fingerprint, shard
from gristmill.plan.contracts import Files
from gristmill.plan.job import Sink
from gristmill.plan.options import BatchPlan
from gristmill.plan.secret import secrets_in
from gristmill.plan.shard import Piece
from gristmill.plan.specs import FunctionModel, TextClassifier, TextEmbedder
from gristmill.planning import Resolved
from gristmill.worker.recipe import Output, Reader, Recipe


def recipe(r: Resolved, sink: Sink, files: Files, batch: BatchPlan) -> Recipe:
    """What the workers of a resolved job are given."""
    job = r.job
    leave = tuple(r.info.columns or ())
    code, secret = r.fingerprint.code, tuple(secrets_in(job))
    return Recipe(
        reader(r),
        job.steps, _pinned(r), job.post,
        Output(r.keep, leave, sink.row_id, sink.key, sink.model_version, model_version(r), sink.drop),
        replace(sink, storage={}), r.sink_format, r.place, job.running, job.nulls, job.on_nan, batch,
        files=files, secrets=secret, pins=pins(code), named=named_pins(code, secret, r.fingerprint.looked),
        held=r.fingerprint.held,
    )  # fmt: skip


def reader(r: Resolved) -> Reader:
    """How the job's source is read."""
    where = None if r.blank else r.job.source.where
    return Reader(
        r.source_format, r.fs, r.columns, r.schema, where, format_options(r.job.source), damaged(r.job.source), r.own
    )


def _pinned(r: Resolved) -> Any:
    """The model spec with the digest found at plan time: a worker loads exactly that, or stops."""
    if isinstance(r.model, FunctionModel) or not r.info.digest:
        return r.model
    return replace(r.model, sha256=r.info.digest)


def runs_on(r: Resolved) -> dict[str, Any]:
    """What the model runs on: device and threads of a worker, and for models that have them backend and precision."""
    found = {"device": r.place.device, "threads": r.place.threads}
    if isinstance(r.model, (TextEmbedder, TextClassifier)):
        found.update(backend=r.model.backend, dtype=r.model.dtype)
    return found


def model_version(r: Resolved) -> str:
    """The model's version: the digest of its files; of its code where it has none, and of both where they name some."""
    if r.info.digest and not r.info.code:
        return r.info.digest
    code = fingerprint.compared(r.fingerprint.code)
    return fingerprint.digest_of([r.info.digest, code] if r.info.digest else code)


def pieces(r: Resolved, most: int | None) -> tuple[Piece, ...]:
    """The first selected ranges of the source, enough for `most` rows; all of them for None."""
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


def check_columns(r: Resolved, sink: Sink, answer: dict[str, Any]) -> None:
    """Names that only the first rows could tell (a function's results) must not stand twice, nor be missing."""
    if not answer["schema"]:
        return
    names = generations.decode_schema(answer["schema"]).names
    for dropped in sink.drop:
        if dropped not in answer["columns"]:
            raise BadJob(f"drop names column {dropped!r}, which no row has: they have {', '.join(answer['columns'])}")
    kept = [n for n in (r.keep or ()) if n in answer["results"]]
    doubled = kept or [n for n in names if names.count(n) > 1]
    if doubled:
        raise BadJob(
            f"column {doubled[0]!r} would stand twice in the output: {r.model.name} returns it and keep carries it "
            "over; rename one (output=) or leave it out of keep"
        )
    for option, name in (("row_id", sink.row_id), ("model_version", sink.model_version)):
        if name in answer["results"]:
            raise BadJob(f"{option} names column {name!r}, which {r.model.name} returns: give another name")
    missing = [n for n in (*(r.keep or ()), *sink.partition_by) if n not in names]
    if missing:
        there = ", ".join(names)
        raise BadJob(f"keep or partition_by names column {missing[0]!r}, which is in no output row: there are {there}")


def added_schema(base: pa.Schema, probed: pa.Schema, sink: Sink) -> pa.Schema:
    """The schema of a run whose rows are added to a result with the schema `base`, from what its first rows have: that
    of the base, which values must fit without loss (the first rows' do where their types are the base's, others are
    compared as they are written). Where the sink evolves, its types are widened and columns that only one of them has
    are null for the other's rows.

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
            both = real(old.type, now)  # of which each value is compared, those of the result by `check_exact`
        if both is not None and sink.evolve and _other_digits(old.type, both):
            _check_digits(old, both, sink)
        evolves = evolves and (both is not None or real(old.type, now) is not None)
        free = sink.evolve or pa.types.is_null(old.type)  # nulls alone have bound nobody
        if both is None or (both != old.type and not free):
            lines.append(f"column: {old.name} was {old.type}, is {now}")
        fields.append(old.with_type(both) if free and both is not None else old)
    for new in probed:
        if new.name not in base.names:
            lines += [] if sink.evolve else [f"column: {new.name} is new ({new.type})"]
            fields.append(new)
    if lines:
        why = ", which no type holds without loss" if sink.evolve else ""
        raise PlanChanged(
            f"{sink.uri}: the rows of this run have other columns than the result that they would be added to:\n"
            f"{fingerprint.listed(lines)}{why}\nuse --restart (restart=True) to score everything anew"
            + ("" if not evolves else ", or --evolve (evolve=True) to widen types and add columns for all rows")
        )
    return pa.schema(fields)


def _check_digits(old: pa.Field, both: pa.DataType, sink: Sink) -> None:
    """Raises PlanChanged where a column whose floats are wider from now on is published as text."""
    key = old.name in sink.partition_by
    if key or sink_format(sink.format or "parquet").name == "jsonl":
        where = "the names of folders (partition_by)" if key else "JSON Lines"
        raise PlanChanged(
            f"{sink.uri}: column {old.name!r} was {old.type}, would be {both}: {where} hold its published values with "
            f"the few digits that tell values of {old.type} apart, which read back as other numbers of the wider type: "
            f"--evolve cannot widen it; give {old.type} (a step can cast it), or use --restart (restart=True) to score "
            "everything anew"
        )


def _other_digits(kind: pa.DataType, wider: pa.DataType) -> bool:
    """Whether text that was written of a type has floats that read as other numbers of the wider type."""
    t = pa.types
    if t.is_nested(kind) and kind.num_fields == wider.num_fields:
        return any(_other_digits(kind.field(i).type, wider.field(i).type) for i in range(kind.num_fields))
    return t.is_floating(kind) and not t.is_float64(kind) and t.is_float64(wider)


def check_exact(base: Publication, schema: pa.Schema, uri: str) -> None:
    """Raises PlanChanged where a column of the result is to have a type that may not hold each of its values: floats
    for whole numbers, and finer times, which reach less far.
    """
    then, role = generations.decode_schema(base.body["output_schema"]), "rows"
    names = [f.name for f in schema if f.name in then.names and not _holds(f.type, then.field(f.name).type)]
    if not names:
        return
    if base.body["sink_format"] == "npy":
        role = "ids"
    for batch in readable_dataset(base, role).to_batches(columns=names):
        for name in names:
            try:
                batch.column(name).cast(schema.field(name).type)
            except pa.ArrowInvalid as e:
                raise PlanChanged(
                    f"{uri}: column {name!r} was {then.field(name).type}, is {schema.field(name).type}, in which not "
                    f"every value of the result is the same ({e}): --evolve cannot widen it; give "
                    f"{then.field(name).type}, or use --restart (restart=True) to score everything anew"
                ) from None


def _holds(wider: pa.DataType, kind: pa.DataType) -> bool:
    """Whether a type that another was widened to holds each of its values, whatever they are."""
    t = pa.types
    if t.is_nested(kind):
        return all(_holds(wider.field(i).type, kind.field(i).type) for i in range(kind.num_fields))
    return kind == wider or not (t.is_timestamp(kind) or (t.is_integer(kind) and t.is_floating(wider)))


def schema_without_rows(r: Resolved) -> pa.Schema:
    """What the output looks like where no row came out, as far as that is known."""
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
