"""What a run would refuse of the rows that a preview shows: gates, sink and deliveries that do not fit them."""

from __future__ import annotations

from typing import Any

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
    rows = generations.decode_schema(shown.body.output_schema)
    plan = generations.read_plan(generations.generations(previewed)[-1])
    source = generations.decode_schema(plan.about.reads.schema)
    there: dict[str, Any] = {field.name: field.type for field in (*source, *rows)}
    for option, names in (("partition_by", spec.sink.partition_by), ("sort_by", spec.sink.sort_by)):
        if missing := [n for n in names if n not in there]:
            known = ", ".join(there)
            raise BadJob(f"{option} names column {missing[0]!r}, which is no output column: there are {known}")
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
    for found in delivering.foreseen(spec.deliver, spec.source, generation, (number,), shown.body):
        if found.problem and found.exit_code == BadJob.exit_code:
            raise BadJob(found.problem)
