"""A schedule in the words of other schedulers, read by their own parsers where these are here."""

from __future__ import annotations

import ast
import itertools
import shutil
import subprocess
import sys
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
import yaml
from cronsim import CronSim

from gristmill.errors import BadJob
from gristmill.job.schedule import Schedule
from gristmill.schedule.entry import Scheduled
from gristmill.schedule.exports import TARGETS, Exported, exported, in_crontab, on_calendar

ODD = "jobs/100%'s $HOME.yaml"


def made(cron: str = "30 2 * * 1-5", job: str = "jobs/nightly.yaml", **options: object) -> Exported:
    schedule = Schedule(cron, timezone="Europe/Berlin", retries=3)
    given = {"image": "registry/x:1", "secrets": ("DB_PASSWORD",), **options}
    return Exported(job, Scheduled(schedule, True), "/srv/my scores", sys.executable, **given)  # type: ignore[arg-type]


def test_cron() -> None:
    """Its fields are those of a parser of cron; percent signs, which end a command there, are escaped."""
    line = next(one for one in exported("cron", made(job=ODD)).splitlines() if one.startswith("30 2"))
    fields, command = line.split(" cd ", 1)
    assert next(CronSim(fields, datetime(2026, 1, 1))) == datetime(2026, 1, 1, 2, 30)
    assert command.count("%") == command.count("\\%") == 6
    assert '--scheduled "$(TZ=Europe/Berlin date +' in command


def test_a_crontab_keeps_its_other_lines(tmp_path: Path) -> None:
    """An export replaces what an earlier one wrote, and neither takes a line of others, nor changes their time zone."""
    own = "MAILTO=me\nCRON_TZ=Asia/Tokyo\n0 1 * * * backup\n"
    once = in_crontab(own, made())
    assert once.startswith(own) and once.count("gristmill run") == once.count("CRON_TZ=Europe/Berlin") == 1
    assert "DB_PASSWORD" in once
    two = in_crontab(once, made(job="jobs/other.yaml")) + "5 5 * * * mine\n"
    again = in_crontab(two, made("0 4 * * *"))
    assert "30 2 * * 1-5" in again and "\n0 4 * * *" in again  # the other job's, and the new time
    assert [line for line in again.splitlines() if line in two.splitlines()][-1] == "5 5 * * * mine"
    assert in_crontab(again, made("0 4 * * *")) == again
    zone, of = "", {}
    for line in again.splitlines():
        if line.startswith("CRON_TZ="):
            zone = line.partition("=")[2]
        elif line[:1].isdigit():
            of[" ".join(line.split()[:6])] = zone
    assert of["0 1 * * * backup"] == of["5 5 * * * mine"] == "Asia/Tokyo" and of["0 4 * * * cd"] == "Europe/Berlin"
    assert in_crontab("", made()).splitlines()[-2] == 'CRON_TZ=""'
    with pytest.raises(BadJob, match="take these lines out by hand"):
        in_crontab(once.rsplit("# end", 1)[0], made())


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not here")
def test_systemd(tmp_path: Path) -> None:
    """Both units are accepted by systemd-analyze."""
    text = exported("systemd", made())
    service, timer = text.split("# /etc/systemd/system/gristmill-nightly.timer")
    for name, unit in (("service", service), ("timer", timer)):
        (tmp_path / f"gristmill-nightly.{name}").write_text(unit)
    paths = [str(tmp_path / f"gristmill-nightly.{name}") for name in ("service", "timer")]
    found = subprocess.run(["systemd-analyze", "verify", "--man=no", *paths], capture_output=True, text=True)
    assert (found.returncode, found.stderr) == (0, "")


@pytest.mark.long
def test_the_loop_of_the_systemd_unit_tries_again_with_the_same_time(tmp_path: Path) -> None:
    """After exit 1, as often as the job says; not after 3; and however late it is by then."""
    script = tmp_path / "python"
    script.write_text('#!/bin/sh\necho "$@" >> calls\nexit $(cat code)\n')
    script.chmod(0o755)
    schedule = Schedule("0 23 * * *", retries=2, backoff="1s")
    text = exported("systemd", Exported("n.yaml", Scheduled(schedule, True), str(tmp_path), str(script)))
    line = next(line for line in text.splitlines() if line.startswith("ExecStart=/bin/sh -c "))
    quoted = line.removeprefix("ExecStart=/bin/sh -c ")[1:-1]
    command = quoted.replace("%%", "%").replace("$$", "$").replace('\\"', '"').replace("\\\\", "\\")
    for code, calls in ((1, 3), (3, 1), (0, 1)):
        (tmp_path / "calls").unlink(missing_ok=True)
        (tmp_path / "code").write_text(str(code))
        assert subprocess.run(["/bin/sh", "-c", command], cwd=tmp_path).returncode == code
        lines = (tmp_path / "calls").read_text().splitlines()
        assert len(lines) == calls and len(set(lines)) == 1 and "--scheduled 20" in lines[0]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not here")
@pytest.mark.parametrize(
    "cron", ["0 23 * * *", "*/15 1-3 * * MON-FRI", "5/20 4 1,15 JAN,MAR *", "0 12 1-7 * 0", "@weekly"]
)
def test_systemd_runs_at_the_times_of_cron(cron: str) -> None:
    """Its own calculator gives the same next ones."""
    expressions = on_calendar(Schedule(cron))
    found: set[str] = set()
    base = "2026-01-31 12:00:00 UTC"
    for one in expressions:
        asked = ["systemd-analyze", "calendar", "--iterations=6", f"--base-time={base}", f"{one} UTC"]
        told = subprocess.run(asked, capture_output=True, text=True)
        assert told.returncode == 0, told.stderr
        lines = [line.split(": ", 1)[1] for line in told.stdout.splitlines() if "elapse:" in line or "Iter." in line]
        found |= {datetime.strptime(line.strip(), "%a %Y-%m-%d %H:%M:%S UTC").isoformat() for line in lines}
    ticks = Schedule(cron).ticks(datetime(2026, 1, 31, 12, tzinfo=timezone.utc))
    assert sorted(found)[:6] == [one.replace(tzinfo=None).isoformat() for one in itertools.islice(ticks, 6)]


def test_kubernetes() -> None:
    """A CronJob whose pod's command gets the time that its name ends in, and tries again only what can be resumed."""
    document = yaml.safe_load(exported("kubernetes", made()))
    assert (document["apiVersion"], document["kind"]) == ("batch/v1", "CronJob")
    spec = document["spec"]
    assert (spec["schedule"], spec["timeZone"], spec["concurrencyPolicy"]) == (
        "30 2 * * 1-5",
        "Europe/Berlin",
        "Forbid",
    )
    inside = spec["jobTemplate"]["spec"]
    assert inside["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"] == [2, 3, 4]
    pod = inside["template"]["spec"]
    assert pod["restartPolicy"] == "Never" and inside["backoffLimit"] == 3
    (container,) = pod["containers"]
    assert {one["name"] for one in container["env"]} == {"JOB_NAME", "DB_PASSWORD"}
    meant = datetime.now(timezone.utc).replace(minute=30, second=0, microsecond=0) - timedelta(days=40)
    shell = [*container["command"], "echo", *container["args"]]

    def scheduled(name: str) -> datetime:
        told = subprocess.run(shell, env={"JOB_NAME": name, "PATH": "/usr/bin:/bin"}, capture_output=True, text=True)
        *_, flag, tick = told.stdout.split()
        assert flag == "--scheduled"
        return datetime.fromisoformat(tick)

    assert scheduled(f"nightly-{meant.timestamp() // 60:.0f}") == meant
    for by_hand in ("nightly-by-hand", "again-1", "nightly-20260101", "007", "nightly-99999999999999999999", "x-", "x"):
        assert abs(scheduled(by_hand) - datetime.now(timezone.utc)) < timedelta(minutes=2), by_hand


@pytest.mark.parametrize("target", ["airflow", "dagster"])
def test_python_for_airflow_and_dagster_is_python(target: str) -> None:
    """Whatever the job's name is; with its times and time zone."""
    for job in ("jobs/nightly.yaml", ODD, "7.yaml"):
        text = exported(target, made(job=job))
        tree = ast.parse(text)
        constants = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
        assert {"30 2 * * 1-5", "Europe/Berlin", job, "/srv/my scores"} <= constants
        compile(tree, "x.py", "exec")


@pytest.mark.parametrize("target", sorted(TARGETS))
def test_what_has_no_times_is_refused(target: str) -> None:
    """With what runs it instead."""
    job = Exported("n.yaml", Scheduled(Schedule(after=("a",)), True), "/", "python", "x")
    with pytest.raises(BadJob, match=f"only times can be told to {target}: gristmill up runs it"):
        exported(target, job)
