"""`tune`: how fast a job's model runs with which batches, on the job's own rows."""

from __future__ import annotations

import json
import sys
from typing import Any

import click

from gristmill.cli import common as words
from gristmill.cli.flags import options
from gristmill.cli.helptext import Command
from gristmill.cli.job import FLAGS, described
from gristmill.errors import BadJob

TUNE = """
gristmill tune job.yaml
gristmill tune job.yaml --write
gristmill tune job.yaml --budgets 512,1024,2048 --rounds 5 --plot curve.png
gristmill tune pipeline.py:reviews --workers 2 --threads 1 --json
"""


@click.command(cls=Command, examples=TUNE)
@click.argument("job")
@words.option("--budgets", metavar="A,B", group="How it runs",
              help="Budgets to try, in padded tokens (or rows, if the model does not batch by tokens)")  # fmt: skip
@words.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True, metavar="N", group="How it runs",
              help="Trials of each budget, in alternation; the median counts")  # fmt: skip
@words.option("--plot", metavar="FILE.PNG", group="What it shows", help="Also draw the curve (gristmill[plot])")
@words.option("--write", is_flag=True, group="Job", help="Write the best values into the job file")
@options(FLAGS)
@words.sets
@words.variables
@words.as_json
@words.debug
def tune(job: str, budgets: str | None, rounds: int, plot: str | None, write: bool, **given: Any) -> int:
    """Measure how fast the job's model runs with batches of different budgets, on real rows of its source.

    Splits of the machine into workers and threads, and backends of the same precision, are compared first if the job
    leaves them open. The knee is the smallest budget within 3 % of the best; later runs on this machine use it
    automatically. Nothing is written to the sink.
    """
    from gristmill.tuning.apply import write as written
    from gristmill.tuning.display import as_dict, tables
    from gristmill.tuning.display import plot as drawn
    from gristmill.tuning.sweep import tune as measured

    spec = described(job, given)
    if plot is not None:
        from gristmill.process.extras import require

        require("matplotlib", "plot", "--plot")  # before minutes are spent
    found = measured(spec, _budgets(budgets), rounds=rounds, say=_say)
    if given["as_json"]:
        sys.stdout.write(json.dumps(as_dict(found), ensure_ascii=False) + "\n")
    else:
        for note in found.notes:
            sys.stdout.write(f"{note}\n")
        for table in tables(found):
            table.show(sys.stdout)
            sys.stdout.write("\n")
        sys.stdout.write(f"knee    {found.knee:,} {found.unit} a batch, with {found.best}\n")
    if plot is not None:
        drawn(found, plot)
    if write:
        changed = written(found, job, given["profile"])
        sys.stderr.write(f"{job}: {', '.join(f'{s}.{k} = {v}' for s, kv in changed.items() for k, v in kv.items())}\n")
    return 0


def _budgets(text: str | None) -> list[int] | None:
    if text is None:
        return None
    parts = [part.strip().replace("_", "") for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdigit() and int(part) > 0 for part in parts):
        raise BadJob(f"--budgets {text}: give whole numbers of at least 1, for example 512,1024,2048")
    return [int(part) for part in parts]


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
