"""`export`: a job's schedule for the schedulers that people have."""

from __future__ import annotations

import os
import sys
from datetime import datetime, timezone

import click

from gristmill.cli import common as words
from gristmill.cli.helptext import Command
from gristmill.errors import BadJob

EXPORT = """
gristmill export cron nightly.yaml
# into the crontab that is there: crontab -l > crontab.txt, then this, then crontab crontab.txt
gristmill export cron nightly.yaml --into crontab.txt
gristmill export systemd nightly.yaml
gristmill export kubernetes nightly.yaml --image registry.example.com/scores:7 > cronjob.yaml
gristmill export airflow nightly.yaml > dags/nightly.py
gristmill export dagster nightly.yaml > definitions.py
"""


@click.command(cls=Command, examples=EXPORT)
@click.argument("target", type=click.Choice(["cron", "systemd", "kubernetes", "airflow", "dagster"]))
@click.argument("job")
@words.option(
    "--image",
    metavar="IMAGE",
    default="",
    group="How it runs",
    help="For Kubernetes: the image that has gristmill, the job file and the job's code",
)
@words.option(
    "--into",
    metavar="CRONTAB",
    group="How it runs",
    help="For cron: write it into this file, a crontab, in place of what an earlier export of the job wrote there; "
    "other lines stay as they are",
)
@words.debug
def export(target: str, job: str, image: str, into: str | None, debug: bool) -> int:
    """Write the `schedule:` of a job file in the words of another scheduler, to standard output.

    Each runs `gristmill run JOB --scheduled TIME` in the current folder, tries again what can be resumed (exit 1) and
    nothing that a person has to look at (2, 3, 4).
    """
    from gristmill.job.secret import secrets_in
    from gristmill.jobfile.jobfile import read_job_file
    from gristmill.schedule.entry import scheduled
    from gristmill.schedule.exports import Exported, exported, in_crontab

    if into is not None and target != "cron":
        raise BadJob(f"--into {into}: is for cron; what {target} wants is written to standard output")
    now = datetime.now(timezone.utc)
    told = scheduled(job, now, os.environ) if os.path.isfile(job) else None
    spec = read_job_file(job, environ=os.environ, tick=None if told is None else now)  # tells what is wrong with it
    if told is None:
        raise BadJob(f'{job}: it has no schedule: give it one, for example schedule: "0 23 * * *"')
    names = {name for secret in secrets_in(spec) for name in _names(str(secret))}
    found = Exported(job, told, os.getcwd(), sys.executable, image, tuple(sorted(names)))
    if into is None:
        sys.stdout.write(exported(target, found))
        return 0
    try:
        before = ""
        if os.path.exists(into):
            with open(into, encoding="utf-8") as file:
                before = file.read()
        made = in_crontab(before, found)
        with open(into, "w", encoding="utf-8") as file:
            file.write(made)
    except (OSError, UnicodeDecodeError) as e:
        raise BadJob(f"--into {into}: {getattr(e, 'strerror', e)}") from None
    return 0


def _names(text: str) -> list[str]:
    """The environment variables that a secret is made of."""
    import re

    return re.findall(r"\$\{env:([^}]+)\}", text)
