"""`run`, `plan` and `schema`: jobs in a file or a module."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

import click

from gristmill.cli import common as words
from gristmill.cli.execute import perform
from gristmill.cli.flags import changes, delivered_to, options
from gristmill.cli.helptext import Command
from gristmill.errors import BadJob
from gristmill.job.job import JobSpec

FLAGS = (*words.PLACE, *words.COMMON)

RUN = """
gristmill run job.yaml
gristmill run job.yaml --var ds=2026-01-01 --profile prod
gristmill run pipeline.py:reviews --limit 1000 --preview 5
gristmill run job.yaml --update --key user_id
gristmill run job.yaml --set running.batch_rows=256 --workers 2
gristmill run nightly.yaml --scheduled 2026-01-01T23:00
"""


def instant(ctx: click.Context, param: click.Parameter, value: str | None) -> datetime | None:
    """A time as it is given to an option, without a time zone if it is given without one."""
    try:
        return None if value is None else datetime.fromisoformat(value.replace("Z", "+00:00"))
    except ValueError:
        raise click.UsageError(
            f"{param.opts[0]} {value}: give a time, for example 2026-01-01T23:00 or 2026-01-01T22:00+00:00", ctx
        ) from None


scheduled = words.option(
    "--scheduled",
    metavar="TIME",
    callback=instant,
    group="Job",
    help="The time that the run was scheduled for: its schedule's variables are of it, its deadline counts from it",
)


@click.command(cls=Command, examples=RUN)
@click.argument("job")
@options(FLAGS)
@words.verbs
@scheduled
@words.sets
@words.variables
@words.showing
def run(job: str, **given: Any) -> int:
    """Run a job, or resume it where it stopped.

    JOB is a job file (job.yaml), FILE.py[:NAME] (the Job named `job` unless NAME is given) or MODULE:NAME. Flags
    override what it says.
    """
    spec = described(job, given)
    if spec.sink is None and not given["preview"]:
        raise BadJob(f"{job}: the job has no sink, so its answers would be lost: give it one, or --preview N")
    return perform(spec, given)


def described(job: str, given: Mapping[str, Any]) -> JobSpec:
    """The job that JOB and the flags describe. Raises BadJob."""
    from gristmill.jobfile.jobfile import check_names
    from gristmill.jobfile.overlay import overlay

    spec = delivered_to(overlay(written(job, given), changes(FLAGS, given)), given)
    check_names(spec)
    return spec


def written(job: str, given: Mapping[str, Any]) -> JobSpec:
    """The job that JOB names, with variables, and as of the time that it was scheduled for, which without an offset is
    one in the time zone of the job's schedule. Raises BadJob.
    """
    from gristmill.jobfile.jobfile import load

    some = {"variables": variables(given), "profile": given["profile"], "sets": given["sets"], "environ": os.environ}
    tick: datetime | None = given.get("scheduled")  # click gives it
    if tick is None or tick.tzinfo is not None:
        return load(job, **some, tick=tick)
    provisional = load(
        job, **some, tick=tick.replace(tzinfo=timezone.utc)
    )  # its variables are of a tick, so it has one
    zone = provisional.schedule.zone if provisional.schedule is not None else timezone.utc
    return provisional if zone is timezone.utc else load(job, **some, tick=tick.replace(tzinfo=zone))


def variables(given: Mapping[str, Any]) -> dict[str, str]:
    """The variables given with --var. Raises BadJob for a name given twice."""
    out: dict[str, str] = {}
    for name, value in given["variables"]:
        if name in out:
            raise BadJob(f"--var {name}={value}: {name} is given twice, first as {out[name]!r}")
        out[name] = value
    return out


# ---------------------------------------------------------------- plan

PLAN = """
gristmill plan job.yaml
gristmill plan job.yaml --var ds=2026-01-01 --json
gristmill plan pipeline.py:reviews
gristmill plan nightly.yaml --scheduled 2026-01-01T23:00
gristmill plan job.yaml --probe --hour-price 2.50
"""


@click.command(cls=Command, examples=PLAN)
@click.argument("job")
@options(FLAGS)
@words.option(
    "--probe",
    is_flag=True,
    group="What it shows",
    help="Score some rows to tell how long it takes, if no earlier run does; nothing is left in the sink",
)
@scheduled
@words.sets
@words.variables
@words.as_json
@words.debug
def plan(job: str, probe: bool, **given: Any) -> int:
    """Say what would run: nothing is written, and without --probe no row is scored. Code is imported, but no model is
    loaded, save those of scikit-learn, which tell their columns so. Estimates are marked as such.

    How long it takes, and costs, is told by how long earlier runs took, and how far off such estimates were.

    Exits as a run would, as far as that can be known: 2 if a delivery does not fit its store, 3 if a gate already
    cannot hold, 4 if the sink holds a result of another job, or of fewer files.
    """
    from gristmill.driver.planprobe import probed
    from gristmill.driver.views import plan as planned

    spec = described(job, given)
    view = planned(spec)
    view = probed(spec, view) if probe else view
    if given["as_json"]:
        sys.stdout.write(json.dumps(view.as_dict(), ensure_ascii=False) + "\n")
    else:
        sys.stdout.write(f"{view}\n")
    return int(view.exit_code)


# ---------------------------------------------------------------- schema

SCHEMA = """
gristmill schema > job.schema.json

# then, as the first line of job.yaml, for editors that speak YAML:
#   # yaml-language-server: $schema=job.schema.json
"""


@click.command(cls=Command, examples=SCHEMA)
@words.debug
def schema(debug: bool) -> int:
    """Print the JSON Schema of job files, so that an editor completes and checks them."""
    from gristmill.jobfile.sections import json_schema

    sys.stdout.write(json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n")
    return 0
