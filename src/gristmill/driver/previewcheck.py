"""What a run would refuse of the rows that a preview shows: gates, sink and deliveries that do not fit them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pyarrow as pa

from gristmill.commit import drift, publication
from gristmill.commit import generation as generations
from gristmill.driver import delivering, opening
from gristmill.errors import BadJob
from gristmill.files.disk import LOCAL
from gristmill.job.job import JobSpec
from gristmill.sinks.formats import DEFAULT, sink_format
from gristmill.stores import sinkindex


def refuse_unfit(spec: JobSpec, previewed: str) -> None:
    """Raises BadJob for what the job asks for and the rows of a preview, published in the folder `previewed`, show to
    be impossible. A store that is not there now is none of that, and nothing is changed in one.
    """
    shown = publication.latest(previewed, LOCAL)
    if shown is None or spec.sink is None or shown.body.unseen:
        return
    rows = _without_prompt(spec, generations.decode_schema(shown.body.output_schema))
    plan = generations.read_plan(generations.generations(previewed)[-1])
    source = generations.decode_schema(plan.about.reads.schema)
    there: dict[str, Any] = {field.name: field.type for field in (*source, *rows)}
    for option, names in (("partition_by", spec.sink.partition_by), ("sort_by", spec.sink.sort_by)):
        if not spec.steps and (missing := [n for n in names if n not in there]):  # steps make others
            known = ", ".join(there)
            raise BadJob(f"{option} names column {missing[0]!r}, which is no output column: there are {known}")
    kept = [name for name in spec.sink.partition_by if name not in rows.names]  # a preview has no folders
    if any(name not in source.names for name in kept):  # made by steps: a run tells their types
        return
    rows = pa.schema([*rows, *(source.field(name) for name in kept)])
    about = replace(shown.body, output_schema=generations.encode_schema(rows))
    if spec.sink.index:
        tables = sink_format(spec.sink.format or DEFAULT).tables
        sinkindex.check(rows, spec.sink.index, tables, spec.sink.uri)
    if not spec.steps:  # whose columns are not told here
        drift.check(spec.gates.drift, {**dict.fromkeys(spec.sink.drop), **there})
    if not spec.deliver:
        return
    root, files = opening.sink_place(spec.sink)
    claimed = generations.generations(root, files) if files.holds(generations.meta(root)) else []
    number = 1 + max([0, *(one.number for one in claimed)])
    generation = generations.Generation(root, number, "planned", "new", files=files)
    for found in delivering.foreseen(spec.deliver, spec.source, generation, (number,), about):
        if found.problem and found.exit_code == BadJob.exit_code:
            raise BadJob(found.problem)


def _without_prompt(spec: JobSpec, rows: pa.Schema) -> pa.Schema:
    """The columns that the job itself writes: a preview shows prompts as they were sent, too."""
    if getattr(spec.model, "keep_prompt", True):
        return rows
    sent = f"{getattr(spec.model, 'output', '')}_prompt"
    return pa.schema([field for field in rows if field.name != sent])
