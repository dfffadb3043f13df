"""A job's schedule in the words of other schedulers: crontab, systemd, Kubernetes, Airflow, Dagster.

Each runs `gristmill run JOB --scheduled TIME`, so that variables and deadline are those of the time that was meant,
also when it is tried again. All but cron try again what can be resumed (exit 1), and nothing that a person has to look
at (2, 3, 4).
"""

from __future__ import annotations

import calendar
import json
import os
import re
import shlex
from collections.abc import Callable, Mapping
from typing import Any

from gristmill.errors import BadJob
from gristmill.job.schedule import Schedule
from gristmill.schedule.entry import Scheduled
from gristmill.values import dataclass

LOOKED_AT = (2, 3, 4)  # exit codes after which a person has to look
PLAUSIBLE = 600_000  # minutes: a time that a run was scheduled for is no more than that ago
DAYS = ("Sun", "Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")


@dataclass(frozen=True)
class Exported:
    """A job file with its schedule, and where it is to be run: `python` in `folder`, or an `image` of containers.
    `secrets` are names of environment variables that it needs.
    """

    job: str
    told: Scheduled
    folder: str
    python: str
    image: str = ""
    secrets: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """A name of lower-case letters, digits and hyphens."""
        stem = re.sub(r"[^a-z0-9]+", "-", os.path.splitext(os.path.basename(self.job))[0].lower()).strip("-")
        return stem[:50].strip("-") or "job"

    @property
    def schedule(self) -> Schedule:
        """When it runs."""
        return self.told.schedule

    @property
    def command(self) -> list[str]:
        """The command, but for `--scheduled`."""
        return [self.python, "-m", "gristmill", "run", self.job, "--progress", "lines"]


def exported(target: str, job: Exported) -> str:
    """The text for a scheduler. Raises BadJob for a job without times."""
    if job.schedule.cron is None:
        what = "after other jobs" if job.schedule.after else "when files arrive"
        raise BadJob(f"{job.job}: it runs {what}, and only times can be told to {target}: gristmill up runs it")
    if target == "kubernetes" and not job.image:
        raise BadJob("--image is missing: name the image that has gristmill, the job file and the job's code")
    return TARGETS[target](job)


def _crontab(job: Exported) -> str:
    return _block(job, '""')


def _block(job: Exported, zone_before: str) -> str:
    """The lines of a crontab between marks. In cronie, CRON_TZ is that of all lines below it: the one before is given
    back.
    """
    zone = job.schedule.timezone
    date = f"$(TZ={zone} date +\\%Y-\\%m-\\%dT\\%H:\\%M)"
    command = " ".join([*map(_percent, map(shlex.quote, job.command)), "--scheduled", f'"{date}"'])
    log = _percent(shlex.quote(f"{job.name}.log"))
    begin, end = _marks(job)
    return (
        f"{begin}\n"
        f"# Times are of {zone}: where cron does not know CRON_TZ (cronie does, Debian's cron does not), the time\n"
        "# zone of the machine has to be that one. Nothing is tried again, and no time is made up for: up, or\n"
        "# systemd, does that.\n"
        f"{_needed(job, 'lines NAME=value above give it, as cron has nothing of the environment of a shell')}"
        f"CRON_TZ={zone}\n"
        f"{job.schedule.fields} cd {_percent(shlex.quote(job.folder))} && {command} >> {log} 2>&1\n"
        f"CRON_TZ={zone_before}\n"
        f"{end}\n"
    )


def _marks(job: Exported) -> tuple[str, str]:
    which = f"gristmill export cron {shlex.quote(job.job)} in {shlex.quote(job.folder)}"
    return f"# begin: {which}", f"# end: {which}"


def in_crontab(text: str, job: Exported) -> str:
    """A crontab with the lines of a job, in the place of those that an earlier export has written there, or at its end.
    Raises BadJob for a job without times, and where the lines of before do not end.
    """
    exported("cron", job)
    begin, end = _marks(job)
    lines = text.splitlines()
    at, rest = len(lines), list[str]()
    if begin in lines:
        at = lines.index(begin)
        if end not in lines[at:]:
            raise BadJob(f"the crontab has {begin!r} and no {end!r} after it: take these lines out by hand")
        rest = lines[lines.index(end, at) + 1 :]
    zones = [line.split("=", 1)[1].strip() for line in lines[:at] if re.match(r"\s*CRON_TZ\s*=", line)]
    before, after = ("".join(f"{line}\n" for line in some) for some in (lines[:at], rest))
    return before + _block(job, zones[-1] if zones else '""') + after


def _needed(job: Exported, how: str) -> str:
    """A comment on the environment variables that a job needs."""
    return f"# It needs {', '.join(job.secrets)} in its environment: {how}.\n" if job.secrets else ""


def _percent(text: str) -> str:
    """A percent sign ends the command in a crontab."""
    return text.replace("%", "\\%")


# ---------------------------------------------------------------- systemd


def _systemd(job: Exported) -> str:
    zone, first = job.schedule.timezone, round(job.schedule.first_retry.total_seconds())
    script = (
        f'tick="$(TZ={zone} date +%Y-%m-%dT%H:%M)"; wait={first}; tries=0; '
        f'while :; do {shlex.join(job.command)} --scheduled "$tick"; code=$?; '
        f"[ $code = 1 ] && [ $tries -lt {job.schedule.retries} ] || exit $code; "
        "sleep $wait; tries=$((tries + 1)); wait=$((wait * 2)); done"
    )
    times = "\n".join(f"OnCalendar={one} {zone}" for one in on_calendar(job.schedule))
    secrets = "".join(f"# EnvironmentFile with {name}=… is needed\n" for name in job.secrets)
    return f"""\
# /etc/systemd/system/gristmill-{job.name}.service
[Unit]
Description=gristmill run {_unit(job.job)}

[Service]
Type=oneshot
WorkingDirectory={_unit(job.folder)}
{secrets}# The time that it is for is the one at which it is started: also if that is late, after the machine was off.
ExecStart=/bin/sh -c {_quoted(_unit(script))}
TimeoutStartSec=infinity
TimeoutStopSec=20

# /etc/systemd/system/gristmill-{job.name}.timer
[Unit]
Description=When gristmill runs {_unit(job.job)}

[Timer]
{times}
AccuracySec=1s
Persistent={"false" if job.schedule.catch_up == "none" else "true"}

[Install]
WantedBy=timers.target
"""


def _unit(text: str) -> str:
    """Text in a unit, in which percent signs begin specifiers."""
    return text.replace("%", "%%")


def _quoted(text: str) -> str:
    """An argument in a unit's command, in which dollar signs begin variables of systemd's own."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("$", "$$") + '"'


def on_calendar(schedule: Schedule) -> list[str]:
    """An expression of cron as systemd's calendar events; where days of the month and of the week are given, any of
    them is enough for cron, and systemd wants both. Raises BadJob for what systemd cannot say.
    """
    minute, hour, day, month, weekday = schedule.fields.split()
    at = f"{_list(hour, 0, 23)}:{_list(minute, 0, 59)}:00"
    months = _list(month, 1, 12, _MONTHS)
    on = "" if weekday.startswith("*") else f"{','.join(_weekdays(weekday))} "
    days = _list(day, 1, 31)
    if not on or day.startswith("*"):
        return [f"{on}*-{months}-{days} {at}"]
    return [f"*-{months}-{days} {at}", f"{on}*-{months}-* {at}"]


_MONTHS = {name.upper(): i + 1 for i, name in enumerate(calendar.month_abbr[1:])}
_NAMES = {name.upper(): i for i, name in enumerate(DAYS[:7])}


def _weekdays(field: str) -> list[str]:
    numbers = sorted({n % 7 for n in _numbers(field, 0, 7, _NAMES)})
    return [DAYS[n] for n in numbers]


def _list(field: str, least: int, most: int, names: Mapping[str, int] | None = None) -> str:
    return "*" if field == "*" else ",".join(f"{n:02}" for n in sorted(set(_numbers(field, least, most, names or {}))))


def _numbers(field: str, least: int, most: int, names: Mapping[str, int]) -> list[int]:
    """The numbers that a field of cron stands for, which was checked before."""
    found: list[int] = []
    for part in field.upper().split(","):
        spelled = re.sub(r"[A-Z]{3}", lambda m: str(names.get(m[0], m[0])), part)
        match = re.fullmatch(r"(?:(\*)|(\d+)(?:-(\d+))?)(?:/(\d+))?", spelled)
        if match is None:
            raise BadJob(f"schedule cron has {part!r}, which systemd cannot say: gristmill up runs it")
        star, first, last, step = match.groups()
        begin = least if star else int(first)
        end = most if star or (last is None and step) else int(last or first)
        found += range(begin, end + 1, int(step or 1))
    return found


# ---------------------------------------------------------------- Kubernetes


def _kubernetes(job: Exported) -> str:
    import yaml

    # The name of a CronJob's job ends in the time that it was scheduled for, in minutes since 1970. One that was made
    # by hand (kubectl create job --from=cronjob/…) has any name: then it is now.
    script = (
        'now=$(($(date +%s) / 60)); at="${JOB_NAME##*-}"; case "$at" in *[!0-9]*|"") at=$now;; esac; '
        f'[ "$at" -gt $((now - {PLAUSIBLE})) ] && [ "$at" -le $((now + 1440)) ] || at=$now; '
        'exec "$@" --scheduled "$(date -u -d "@$((at * 60))" +%Y-%m-%dT%H:%M:%S+00:00)"'
    )
    container: dict[str, Any] = {
        "name": "run",
        "image": job.image,
        "command": ["/bin/sh", "-c", script, "sh"],
        "args": ["python", *job.command[1:]],
        "env": [{"name": "JOB_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['job-name']"}}}],
    }
    if job.secrets:
        keys = [
            {"name": name, "valueFrom": {"secretKeyRef": {"name": f"{job.name}-secrets", "key": name}}}
            for name in job.secrets
        ]
        container["env"] += keys
    rules = [
        {"action": "FailJob", "onExitCodes": {"containerName": "run", "operator": "In", "values": list(LOOKED_AT)}},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]},  # the pod was moved: it resumes
    ]
    pod = {"restartPolicy": "Never", "terminationGracePeriodSeconds": 30, "containers": [container]}
    document = {
        "apiVersion": "batch/v1",
        "kind": "CronJob",
        "metadata": {"name": job.name, "labels": {"app.kubernetes.io/managed-by": "gristmill"}},
        "spec": {
            "schedule": job.schedule.fields,
            "timeZone": "Etc/UTC" if job.schedule.timezone == "UTC" else job.schedule.timezone,
            "concurrencyPolicy": "Forbid",
            "startingDeadlineSeconds": 86400,
            "successfulJobsHistoryLimit": 3,
            "failedJobsHistoryLimit": 7,
            "jobTemplate": {
                "spec": {
                    "backoffLimit": job.schedule.retries,
                    "podFailurePolicy": {"rules": rules},
                    "template": {"spec": pod},
                }
            },
        },
    }
    about = f"# {job.job}, by gristmill export kubernetes; sources and sinks have to be reachable from the pod\n"
    return about + yaml.safe_dump(document, sort_keys=False, width=1000)


# ---------------------------------------------------------------- Airflow and Dagster


def _airflow(job: Exported) -> str:
    s, first = job.schedule, round(job.schedule.first_retry.total_seconds())
    return f'''\
"""{_doc(job.job)}, by gristmill export airflow; for Airflow 2.4 and later, also 3.{_wanted(job)}"""

from __future__ import annotations

import subprocess
from datetime import timedelta

import pendulum

try:
    from airflow.sdk import dag, get_current_context, task
    from airflow.sdk.exceptions import AirflowFailException
except ImportError:  # Airflow 2, and the first of 3
    from airflow.decorators import dag, task
    from airflow.exceptions import AirflowFailException
    from airflow.operators.python import get_current_context

COMMAND = {json.dumps(job.command)}
FOLDER = {json.dumps(job.folder)}
LOOKED_AT = {LOOKED_AT}  # exit codes after which a person has to look; others resume when tried again


@dag(
    dag_id={json.dumps(job.name)},
    schedule={json.dumps(s.fields)},
    start_date=pendulum.datetime(2026, 1, 1, tz={json.dumps(s.timezone)}),
    catchup={job.told.each},
    max_active_runs=1,
)
def job():
    @task(
        retries={s.retries},
        retry_delay=timedelta(seconds={first}),
        retry_exponential_backoff=True,
        max_retry_delay=timedelta(hours=1),
    )
    def run():
        tick = get_current_context()["data_interval_end"].in_timezone({json.dumps(s.timezone)}).isoformat()
        code = subprocess.run([*COMMAND, "--scheduled", tick], cwd=FOLDER).returncode
        if code in LOOKED_AT:
            raise AirflowFailException(f"gristmill run ended with exit code {{code}}: a person has to look")
        if code:
            raise RuntimeError(f"gristmill run ended with exit code {{code}}: it resumes when it is tried again")

    run()


job()
'''


def _dagster(job: Exported) -> str:
    s, name = job.schedule, job.name.replace("-", "_")
    name = f"job_{name}" if name[0].isdigit() else name
    first = round(s.first_retry.total_seconds())
    return f'''\
"""{_doc(job.job)}, by gristmill export dagster.{_wanted(job)}"""

import subprocess

import dagster as dg

COMMAND = {json.dumps(job.command)}
FOLDER = {json.dumps(job.folder)}
LOOKED_AT = {LOOKED_AT}  # exit codes after which a person has to look; others resume when tried again


@dg.op(
    config_schema={{"scheduled": dg.Field(str, is_required=False)}},
    retry_policy=dg.RetryPolicy(max_retries={s.retries}, delay={first}, backoff=dg.Backoff.EXPONENTIAL),
)
def gristmill_run(context):
    tick = context.op_config.get("scheduled")
    command = [*COMMAND, "--scheduled", tick] if tick else COMMAND
    code = subprocess.run(command, cwd=FOLDER).returncode
    if code in LOOKED_AT:
        raise dg.Failure(f"gristmill run ended with exit code {{code}}: a person has to look", allow_retries=False)
    if code:
        raise dg.Failure(f"gristmill run ended with exit code {{code}}: it resumes when it is tried again")


@dg.job
def {name}():
    gristmill_run()


@dg.schedule(
    job={name},
    cron_schedule={json.dumps(s.fields)},
    execution_timezone={json.dumps(s.timezone)},
    default_status=dg.DefaultScheduleStatus.RUNNING,
)
def {name}_schedule(context):
    tick = context.scheduled_execution_time.isoformat()
    config = {{"ops": {{"gristmill_run": {{"config": {{"scheduled": tick}}}}}}}}
    return dg.RunRequest(run_key=tick, run_config=config)


defs = dg.Definitions(jobs=[{name}], schedules=[{name}_schedule])
'''


def _wanted(job: Exported) -> str:
    return f" The workers' environment needs {', '.join(job.secrets)}." if job.secrets else ""


def _doc(text: str) -> str:
    """Text inside a docstring."""
    return text.replace("\\", "/").replace('"', "'")


TARGETS: Mapping[str, Callable[[Exported], str]] = {
    "cron": _crontab,
    "systemd": _systemd,
    "kubernetes": _kubernetes,
    "airflow": _airflow,
    "dagster": _dagster,
}
