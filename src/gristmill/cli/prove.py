"""`prove`: what made the answer of a row, and the proof of it."""

from __future__ import annotations

import json
import sys
from typing import Any

import click

from gristmill.cli import common as words
from gristmill.cli.flags import listed
from gristmill.cli.helptext import Command
from gristmill.cli.sink import named, place
from gristmill.errors import PlanChanged
from gristmill.job.uris import generation_named, redact

PROVE = """
gristmill prove scores/ --row 4711 --key customer_id
gristmill prove scores/ --row reviews/2026-01-01.parquet:1204
gristmill prove scores/ --row 9f86d081884c7d659a2feaa0c55ad015
gristmill prove job.yaml --row 4711 --source --root 0c4d1f…
gristmill prove scores/ --row '["de", 17]' --key lang,id --json > proof.json
"""


@click.command(cls=Command, examples=PROVE)
@click.argument("target", metavar="SINK|JOB")
@words.option("--row", required=True, metavar="KEY|FILE:POSITION",
              help="Its row_id or key (of several columns a JSON list), or its place in the source")  # fmt: skip
@words.option("--key", "columns", multiple=True, metavar="A,B",
              help="The columns that KEY is of (default: the key or row_id of the job)")  # fmt: skip
@words.option("--root", metavar="DIGEST", help="Compare the root with one that you have kept elsewhere")
@words.option("--source", is_flag=True, help="Also read the source again, and compare it with what the shard read")
@words.sets
@words.variables
@words.as_json
@words.debug
def prove(target: str, row: str, columns: tuple[str, ...], root: str | None, source: bool, **given: Any) -> int:
    """Show which input, model, code and run made the answer of a row, and prove it: the row's file, the receipt of its
    shard and the plan are hashed again, and have to lead to the root of the result.

    The root is in _SUCCESS. Whoever keeps it elsewhere (--root) need not trust the machine that ran. Exits 4 if
    anything is not as it was published.
    """
    from gristmill.cli.deliver import key_of
    from gristmill.commit.staged import result_named
    from gristmill.proof.prove import Asked
    from gristmill.proof.prove import prove as proved

    job = named(target, given)
    sink, generation = (target, None) if job is not None else generation_named(target)
    at, files = place(sink, given)
    result = result_named(at, files, generation)
    of_job: Any = source if job is None or not source else job.source
    found = proved(result, redact(target), Asked(key_of(row), listed(columns), root, of_job))
    if given["as_json"]:
        sys.stdout.write(json.dumps(found.as_dict(), default=str, ensure_ascii=False) + "\n")
    else:
        sys.stdout.write(f"{found}\n")
    return 0 if found.ok else PlanChanged.exit_code
