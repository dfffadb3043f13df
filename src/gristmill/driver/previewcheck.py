"""What a run would refuse that a preview does not meet by scoring rows as the run does: its sink, the result that it is
held against, indices and deliveries.
"""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa

from gristmill.commit import generation as generations
from gristmill.commit import publication
from gristmill.driver import delivering, drifting, opening
from gristmill.errors import BadJob
from gristmill.files.disk import LOCAL
from gristmill.job.job import JobSpec
from gristmill.job.uris import is_local
from gristmill.sinks.formats import DEFAULT, sink_format
from gristmill.stores import sinkindex


def refuse_unready(spec: JobSpec) -> None:
    """Raises BadJob for what a run refuses before any row is read, as far as it is on this machine."""
    if spec.sink is not None and is_local(opening.sink_root(spec.sink)):
        opening.look_at_sink(spec)
    if spec.gates.against is not None and is_local(spec.gates.against):
        drifting.named(spec)


def refuse_unfit(spec: JobSpec, previewed: str) -> None:
    """Raises BadJob for what the job asks for and the rows of a preview, published in the folder `previewed`, show to
    be impossible. The run of these rows has looked at their columns, the folders and order of its sink, and the gates.
    A store that is not there now is none of that, and nothing is changed in one.
    """
    shown = publication.latest(previewed, LOCAL)
    if shown is None or spec.sink is None or shown.body.unseen:
        return
    rows = _without_prompt(spec, generations.decode_schema(shown.body.output_schema))
    about = replace(shown.body, output_schema=generations.encode_schema(rows))
    if spec.sink.index:
        tables = sink_format(spec.sink.format or DEFAULT).tables
        sinkindex.check(rows, spec.sink.index, tables, spec.sink.uri)
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
