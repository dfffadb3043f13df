"""`up`: runs the job files of a folder when their schedules say so."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
from collections import deque
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from typing import Any

import click

from gristmill.cli import common as words
from gristmill.cli.helptext import Command
from gristmill.cli.job import instant
from gristmill.errors import BadJob, Interrupted, SinkBusy, did_you_mean

TOKEN = "GRISTMILL_TOKEN"
UP = """
gristmill up jobs/
gristmill up jobs/ --list
gristmill up jobs/ --at-once 2 --events up.jsonl
gristmill up jobs/ --once --since 2026-01-01
gristmill up jobs/ --again nightly.yaml
gristmill up jobs/ --again nightly.yaml --once
gristmill up jobs/ --listen 8080
GRISTMILL_TOKEN=$(cat token) gristmill up jobs/ --listen 0.0.0.0:8080

# nightly.yaml says when:
#   schedule: {cron: "0 23 * * *", timezone: Europe/Berlin}
#   deadline: "06:00"
"""


@click.command(cls=Command, examples=UP)
@click.argument("folder")
@words.option("--once", is_flag=True, group="How it runs", help="Run what is due now, and end; exit 1 if a run failed")
@words.option(
    "--at-once",
    "most",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    metavar="N",
    group="How it runs",
    help="Runs at once, at most",
)
@words.option(
    "--since",
    metavar="TIME",
    callback=instant,
    group="How it runs",
    help="For jobs that are new here, also make up for the times since then, in the time zone of their schedule unless "
    "one is given (default: from now on)",
)
@words.option(
    "--state",
    metavar="FOLDER",
    group="How it runs",
    help="Where it notes what it has run, and the logs (default: FOLDER/.gristmill)",
)
@words.option(
    "--list",
    "listing",
    is_flag=True,
    group="What it shows",
    help="Show the jobs, when they run next, and how they ended, instead of running them",
)
@words.option(
    "--json", "as_json", is_flag=True, group="What it shows", help="With --list: print JSON, a line for a job"
)
@words.option(
    "--again",
    metavar="JOB",
    multiple=True,
    group="How it runs",
    help="Instead, let the runs of a job be tried again at once that were given up or wait for their next try: by the "
    "one that is up, or with --once here",
)
@words.option(
    "--events", metavar="FILE", group="What it shows", help="Also write what happens to this file, as JSON lines"
)
@words.option(
    "--listen",
    metavar="[HOST:]PORT",
    group="What it shows",
    help="Serve pages there, for browsers: jobs, history, runs while they run, reports, dead letters; and /metrics, "
    "/healthz. Beyond this machine (0.0.0.0:8080) a token is needed.  [GRISTMILL_TOKEN]",
)
@words.option(
    "--token-file",
    metavar="FILE",
    group="What it shows",
    help="The token that the pages ask for is in this file",
)
@words.debug
def up(
    folder: str, once: bool, listing: bool, as_json: bool, again: tuple[str, ...], state: str | None, **given: Any
) -> int:
    """Run the job files in FOLDER that have a `schedule:`, each time that it says so, until it is stopped.

    Jobs run as `gristmill run JOB` does in the current folder, one after the other. A run that fails with exit 1 is
    tried again and resumes; with 2, 3 or 4 a person has to look. Nothing is lost when this is stopped or killed: runs
    are resumed, and times that have passed are made up for, at the next start.
    """
    from gristmill.schedule.jobs import JobFiles

    at = _listening(given.pop("listen"), given.pop("token_file"))
    if os.path.isfile(folder):
        raise BadJob(
            f"{folder}: is a file, and its folder is what is run: gristmill up {os.path.dirname(folder) or '.'} "
            f"(gristmill run {folder} runs the job alone, now)"
        )
    if not os.path.isdir(folder):
        raise BadJob(f"{folder}: there is no such folder: give the one with the job files")
    where = state or os.path.join(folder, ".gristmill")
    if as_json and not listing:
        raise BadJob("--json is for --list; what happens while jobs run is written as JSON by --events FILE")
    files = JobFiles(folder, os.environ)
    if listing:
        _show(files, where, as_json)
        return 0
    if again:
        _again(files, where, again, once)
        if not once:
            return 0
    return _run(files, where, once, given, at)


def _show(files: Any, where: str, as_json: bool) -> None:
    from gristmill.schedule.listing import listed, table

    now = datetime.now(timezone.utc)
    jobs = listed(files, where, now)
    if not as_json:
        return table(files, jobs, now).show(sys.stdout)
    for job in jobs:
        sys.stdout.write(json.dumps(job.as_dict(), ensure_ascii=False) + "\n")


def _listening(listen: str | None, file: str | None) -> tuple[Any, str] | None:
    """Where the pages are, and their token; None for none. Raises BadJob."""
    from gristmill.pages.access import listen_of

    token = os.environ.get(TOKEN, "").strip()
    if file is not None:
        try:
            with open(file, encoding="utf-8") as opened:
                token = opened.read(4096).strip()
        except (OSError, UnicodeDecodeError) as e:
            raise BadJob(f"--token-file {file}: cannot be read: {getattr(e, 'strerror', e)}") from None
        if not token:
            raise BadJob(f"--token-file {file}: is empty: openssl rand -hex 16 makes a token")
    if listen is None:
        if file is not None:
            raise BadJob("--token-file is for pages: say where they are, with --listen PORT")
        return None
    return listen_of(listen, token), token


def _run(files: Any, where: str, once: bool, given: dict[str, Any], at: tuple[Any, str] | None) -> int:
    from gristmill.schedule.held import held
    from gristmill.schedule.listing import outlook
    from gristmill.schedule.processes import Processes, last_words
    from gristmill.schedule.state import State
    from gristmill.schedule.up import Up

    environ = {name: value for name, value in os.environ.items() if name != TOKEN}  # it is not for the code of jobs
    world = Processes(os.path.join(where, "logs"), environ)
    lately: deque[tuple[datetime, Any]] = deque(maxlen=50)
    with held(files.folder, where), contextlib.closing(State(where)) as state, _told(given["events"], lately) as tell:
        state.belong(files.folder)
        told = Up(
            files, state, world, tell, at_once=given["most"], since=given["since"],
            words=lambda run: last_words(world.log_of(run)),
        )  # fmt: skip
        with world.caught(), _pages(at, told, files, where, world, lately, environ):
            sys.stderr.write(f"gristmill up: {outlook(files, datetime.now(timezone.utc))}\n")
            sys.stderr.flush()
            if once:
                codes = told.once()
            else:
                told.forever()
        if world.stopping is not None:
            raise Interrupted("stopped: nothing is lost, start it again", exit_code=128 + world.stopping)
    return 1 if any(codes) else 0


@contextlib.contextmanager
def _pages(
    at: tuple[Any, str] | None, up: Any, files: Any, where: str, world: Any, lately: Any, environ: dict[str, str]
) -> Iterator[None]:
    """While inside, the pages are served."""
    if at is None:
        yield
        return
    from gristmill.pages.live import live
    from gristmill.pages.shown import Source

    source = Source(
        lambda: up.folder,
        where,
        files.path,
        world.log_of,
        lambda: tuple(lately),
        lambda: up.ill,
        world.nudge,
        world.now,
    )
    with live(*at, source, environ) as url:
        sys.stderr.write(f"gristmill up: pages at {url}\n")
        sys.stderr.flush()
        yield


@contextlib.contextmanager
def _told(log: str | None, lately: deque[tuple[datetime, Any]]) -> Iterator[Callable[[Any], None]]:
    """What is told what happens: stderr, and the log."""
    from gristmill.observe.jsonlog import record
    from gristmill.observe.streams import Sturdy

    try:
        file = open(log, "a", encoding="utf-8", errors="replace") if log else None  # noqa: SIM115
    except OSError as e:
        raise BadJob(f"--events {log}: cannot be written: {e.strerror}: give another file") from None
    lines, out = Sturdy(sys.stderr), None if file is None else Sturdy(file)

    def tell(now: Any) -> None:
        at = datetime.now().astimezone()
        lately.append((at, now))
        lines.write(f"{at:%Y-%m-%d %H:%M:%S} {'warning: ' if now.grave else ''}{now.text}\n")
        lines.flush()
        if out is not None:
            tick = None if now.tick is None else now.tick.isoformat()
            out.write(record(now.kind, {"job": now.job, "tick": tick, "text": now.text, **now.fields}) + "\n")
            out.flush()

    try:
        yield tell
    finally:
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()


def _again(files: Any, where: str, names: tuple[str, ...], once: bool) -> None:
    from gristmill.jobfile.suffixes import SUFFIXES
    from gristmill.schedule.state import State

    now = datetime.now(timezone.utc)
    found = files.read(now)
    with contextlib.closing(State(where)) as state:
        state.belong(files.folder)
        for name in names:
            job = os.path.basename(name)
            job = next((one for one in (job, *(job + suffix for suffix in SUFFIXES)) if one in found.jobs), job)
            if job not in found.jobs:
                near = did_you_mean(job, found.jobs)
                why = found.bad.get(job) or f"no job with a schedule in {files.folder} is called so{near}"
                raise BadJob(f"--again {name}: {why}")
            count = state.again(job, now.timestamp())
            which = f"{count} run{'' if count == 1 else 's'}"
            what = f"{which} to be tried again: {_by_whom(files.folder, where, once)}"
            sys.stdout.write(f"{job}: {what if count else 'no run of it was given up, or waits to be tried again'}\n")
            sys.stdout.flush()


def _by_whom(folder: str, where: str, once: bool) -> str:
    from gristmill.schedule.held import held

    if once:
        return "now"
    try:
        with held(folder, where):
            return f"no gristmill up runs here now: gristmill up {shlex.quote(folder)} --once does it"
    except SinkBusy:
        return "the gristmill up that runs here begins within half a minute"
