"""`status`, `dead`, `verify` and `retry-dead`: what a sink contains."""

from __future__ import annotations

import base64
import json
import os
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import click

from gristmill.cli import common as words
from gristmill.cli.ending import say
from gristmill.cli.execute import print_rows, shown, typed
from gristmill.cli.helptext import Command
from gristmill.cli.job import scheduled, variables, written
from gristmill.errors import BadJob
from gristmill.files.contract import Files
from gristmill.job.job import JobSpec
from gristmill.job.uris import file_of, redact
from gristmill.observe import units
from gristmill.observe.events import Observer
from gristmill.observe.report import Report, asked, store_line
from gristmill.shards.counts import Counts

# ---------------------------------------------------------------- status

STATUS = """
gristmill status emb/
gristmill status job.yaml --var ds=2026-01-01
gristmill status emb/ --json
watch gristmill status emb/
"""


@click.command(cls=Command, examples=STATUS)
@click.argument("target", metavar="SINK|JOB")
@words.sets
@words.variables
@words.as_json
@words.debug
def status(target: str, **given: Any) -> int:
    """Say how far a run is, or what is published, from the sink's files alone, while it runs or after."""
    from gristmill.driver.views import stands

    now = stands(*place(target, given))
    if given["as_json"]:
        sys.stdout.write(json.dumps(now, default=str, ensure_ascii=False) + "\n")
    else:
        for name, text in status_lines(now):
            sys.stdout.write(f"{name:<10}{text}\n")
    return 0


def place(target: str, given: Mapping[str, Any]) -> tuple[str, Files]:
    """The sink's root and file layer: from a path or URI directly, or from a job. Raises BadJob."""
    from gristmill.driver.opening import sink_place

    spec = named(target, given)
    if spec is None:
        return _existing(target)
    if spec.sink is None:
        raise BadJob(f"{target}: the job has no sink")
    return sink_place(spec.sink)


def named(target: str, given: Mapping[str, Any]) -> JobSpec | None:
    """The named job; None for a sink."""
    from gristmill.jobfile.jobfile import is_job, load

    if "://" in target or not is_job(target):
        told = {"--var": given["variables"], "--profile": given["profile"], "--set": given["sets"]}
        if said := [flag for flag, value in told.items() if value]:
            apply = "apply" if len(said) > 1 else "applies"
            raise BadJob(f"{target} is a sink; {' and '.join(said)} only {apply} to a job: name the job")
        return None
    return load(target, variables=variables(given), profile=given["profile"], sets=given["sets"], environ=os.environ)


def status_lines(now: Mapping[str, Any]) -> list[tuple[str, str]]:
    """A state for a person, as labels and texts."""
    from gristmill.observe.facts import Standing, Way
    from gristmill.observe.standing import staged_lines, standing_lines

    state = str(now.get("state"))
    told = now["standing"]
    stands = Standing(told["words"], told["why"], Way(**told["way"]) if told["way"] else None)
    lines = [("sink", str(now.get("sink"))), *standing_lines(stands)]
    if state == "running" and now.get("phase") not in (None, "running"):
        lines.append(("phase", str(now["phase"])))
    if now.get("waiting"):
        lines.append(("waiting", str(now["waiting"])))
    if now.get("shards_total"):
        done, total = now.get("shards_done", 0), now["shards_total"]
        lines.append(("shards", f"{done:,} of {total:,} ({units.percent(done / total)})"))
    lines += _rows(now)
    lines += [("not read", file) for file in now.get("skipped", ())]
    if now.get("rows_per_second"):
        left = f", {units.clock(now['eta'])} left" if now.get("eta") is not None else ""
        lines.append(("speed", f"{units.rate(now['rows_per_second'])}{left}"))
    if now.get("used"):
        lines.append(("asked", asked(now["used"])))
    if now.get("workers"):
        lines.append(("workers", units.count(now["workers"])))
    if now.get("held_by"):
        lines.append(("held by", _holder(now["held_by"])))
    if state != "done" and (published := now.get("published")):
        lines.append(("published", f"{published['rows_ok']:,} rows ok, {published['rows_dead']:,} dead, from before"))
    lines += [("store", store_line(one)) for one in now.get("deliveries", ())]
    lines += staged_lines(str(now.get("sink")), now)
    if now.get("seconds_ago") is not None:
        lines.append(("as of", f"{units.seconds(now['seconds_ago'])} ago"))
    return lines


def _rows(now: Mapping[str, Any]) -> list[tuple[str, str]]:
    if now.get("state") == "done":
        counts = Counts(**now["counts"])
        if counts.expanded != counts.derived:  # two levels, each with its own sum
            went_on = f"{counts.expanded:,} went on, {counts.dead:,} dead, {counts.filtered:,} filtered"
            became = f"{counts.ok:,} ok, {counts.derived_dead:,} dead, {counts.derived_filtered:,} filtered"
            return [("rows", f"{counts.rows_in:,}: {went_on}"), ("made", f"{counts.derived:,}: {became}")]
        of = f"{now['rows_in']:,}"
    elif "rows_done" not in now or now.get("phase") in ("planning", "loading"):
        return []
    else:
        of = f"{now['rows_done']:,}" + (f" of {now['rows_total']:,}" if now.get("rows_total") else "")
    parts = f"{now['rows_ok']:,} ok, {now['rows_dead']:,} dead, {now['rows_filtered']:,} filtered"
    return [("rows", f"{of}: {parts}")]


def _holder(holder: Any) -> str:
    if isinstance(holder, Mapping) and {"pid", "host", "started"} <= holder.keys():
        return f"process {holder['pid']} on {holder['host']}, since {holder['started']}"
    return str(holder)


# ---------------------------------------------------------------- dead

DEAD = """
gristmill dead emb/
gristmill dead job.yaml
gristmill dead emb/ --by error
gristmill dead emb/ --limit 3 --traceback
gristmill dead emb/ --json --limit 0 > dead.jsonl
"""


@click.command(cls=Command, examples=DEAD)
@click.argument("target", metavar="SINK|JOB")
@words.option("--by", type=click.Choice(["error", "source", "stage", "step", "shard"]),
              help="Count the dead letters by this column instead of listing them")  # fmt: skip
@words.option("--limit", type=click.IntRange(min=0), default=20, show_default=True, metavar="N",
              help="Show at most N; 0 shows all")  # fmt: skip
@words.option("--traceback", "tracebacks", is_flag=True, help="Show each one's traceback")
@words.sets
@words.variables
@words.as_json
@words.debug
def dead(target: str, by: str | None, limit: int, tracebacks: bool, **given: Any) -> int:
    """Show the rows that could not be scored: where each was, what it contained, and what was wrong."""
    sink, as_json = redact(target), given["as_json"]
    letters = _letters(sink, *place(target, given))
    most = limit or letters.num_rows
    if by is not None:
        return _grouped(letters, by, most, as_json)
    if as_json:
        print_rows(letters.slice(0, most))
        return 0
    if letters.num_rows == 0:
        sys.stdout.write(f"{sink}: no dead letters\n")
        return 0
    _listed(letters.slice(0, most), tracebacks)
    if letters.num_rows > most:
        sys.stdout.write(f"({most:,} of {letters.num_rows:,}: --limit 0 shows all, --by error counts them)\n")
    return 0


_RUNS = {
    "append": "a run with --append",
    "restart": "a run with --restart",
    "retry-dead": "a retry-dead",
    "update": "an update",
    "new": "a run",
}


def _letters(sink: str, root: str, files: Files) -> Any:
    """The dead letters of an unfinished run, if it has any, with a note; else those of the published result."""
    from gristmill.commit.publication import success
    from gristmill.result.reading import committed_letters, dead, unfinished

    begun, body = unfinished(root, files), success(root, files)
    if begun is None:
        return dead(root, files)
    letters = committed_letters(begun)
    if body is None:
        say(f"{sink}: nothing is published: these are the dead letters so far of a run that has not finished")
        return letters
    if not letters.num_rows:
        return dead(root, files)
    of_before = f" (which has {body.rows_dead:,} of its own: gm.dead({sink!r}))" if body.rows_dead else ""
    say(
        f"{sink}: these are the dead letters so far of {_RUNS[begun.kind]} that has not finished; they are not "
        f"in the published result{of_before}"
    )
    return letters


def _existing(sink: str) -> tuple[str, Files]:
    from gristmill.files.roots import opened
    from gristmill.job.delivery import is_store, staging_of

    return _checked(*opened(staging_of(sink, {}) if is_store(sink) else sink))


def _checked(root: str, files: Files) -> tuple[str, Files]:
    if not files.holds(root):
        raise BadJob(f"{redact(root)}: there is no such sink: give the folder that a job writes to, or the job")
    return root, files


def _grouped(letters: Any, by: str, most: int, as_json: bool) -> int:
    from gristmill.observe.tables import Table, clip

    values = [str(value) for value in letters[by].to_pylist()]
    first = dict(zip(reversed(values), reversed(letters["message"].to_pylist()), strict=True))
    ranked = Counter(values).most_common(most)
    if as_json:
        for value, count in ranked:
            row = {by: value, "rows": count, "message": first[value]}
            sys.stdout.write(json.dumps(row, ensure_ascii=False) + "\n")
        return 0
    rows = tuple((value, f"{count:,}", clip(first[value] or "", 200)) for value, count in ranked)
    Table((by, "rows", "for example"), rows, frozenset({1}), f"{units.plural(len(values), 'dead letter')}").show(
        sys.stdout
    )
    return 0


def _listed(letters: Any, tracebacks: bool) -> None:
    """Each dead letter in two or three lines: these are read one by one, and their texts fit no table."""
    from gristmill.observe.streams import width_of
    from gristmill.observe.tables import clean, clip

    width = width_of(sys.stdout)
    for row in letters.to_pylist():
        copy = f" copy {row['copy']} of {row['copies']}" if row["copy"] is not None else ""
        lines = [
            clip(f"{row['source']}{_at(row)}{copy}", width),
            clip(f"  {row['error']}: {row['message']}", width),
            clip(f"  {_payload(row['payload'])}", width),
        ]
        if tracebacks and row.get("traceback"):
            lines += ["    " + clean(line) for line in row["traceback"].rstrip().split("\n")]
        sys.stdout.write("\n".join(lines) + "\n")


def _at(row: dict[str, Any]) -> str:
    """Where a row is in its file: a record of text by its first byte, marked so that no editor takes it for a line."""
    from gristmill.sources.formats import by_bytes

    return f", byte {row['position']:,}" if by_bytes(row["source"]) else f":{row['position']}"


def _payload(payload: str | None) -> str | None:
    """A record that could not be read, decoded if it is text."""
    held = json.loads(payload) if payload and payload.startswith('{"base64": ') else None
    if not isinstance(held, dict) or list(held) != ["base64"] or not isinstance(held["base64"], str):
        return payload
    try:
        return base64.b64decode(held["base64"], validate=True).decode("utf-8")
    except ValueError:
        return payload


# ---------------------------------------------------------------- verify

VERIFY = """
gristmill verify emb/
gristmill verify job.yaml --json
gristmill verify emb/ --deep
gristmill verify job.yaml --source
"""


@click.command(cls=Command, examples=VERIFY)
@click.argument("target", metavar="SINK|JOB")
@words.option("--deep", is_flag=True, group="How it runs", help="Read all values again, as gm.read does")
@words.option(
    "--source",
    is_flag=True,
    group="How it runs",
    help="Also read the source again, and compare it with what every shard read",
)
@words.sets
@words.variables
@words.as_json
@words.debug
def verify(target: str, deep: bool, source: bool, **given: Any) -> int:
    """Recount and re-hash every published file, and compare it with plans, receipts, dead letters and _SUCCESS.

    Exits 1, naming what differs.
    """
    from gristmill.driver.views import verify as verdict_of

    job = named(target, given)
    of_job: Any = source if job is None or not source else job.source
    stores = () if job is None else job.deliver
    verdict = verdict_of(*place(target, given), deep=deep, source=of_job, deliver=stores)
    if given["as_json"]:
        sys.stdout.write(json.dumps(verdict.as_dict(), default=str, ensure_ascii=False) + "\n")
    else:
        sys.stdout.write(f"{verdict}\n")
    return 0 if verdict.ok else 1


# ---------------------------------------------------------------- retry-dead

RETRY = """
gristmill retry-dead emb/
gristmill retry-dead job.yaml
gristmill retry-dead scores/ --job job.yaml --accept-code-change
gristmill retry-dead nightly.yaml --scheduled 2026-01-01T23:00
"""


@click.command("retry-dead", cls=Command, examples=RETRY)
@click.argument("target", metavar="SINK|JOB")
@words.option(
    "--job", metavar="JOB", group="Job", help="The job to score them with (default: the one that wrote the sink)"
)
@words.option(
    "--accept-code-change",
    is_flag=True,
    group="How it runs",
    help="Score with the code as it is now, although it has changed",
)
@scheduled
@words.sets
@words.variables
@words.showing
def retry_dead(target: str, job: str | None, accept_code_change: bool, **given: Any) -> int:
    """Score the dead letters of a sink again, usually after a fix; those that now succeed join the published rows,
    after the others and in files of their own.
    """
    from gristmill.driver.run import retry_dead as retried

    spec = _job_of(target, job, given)

    def again(observer: Observer) -> Report:
        return retried(spec, accept_code_change=accept_code_change, observer=observer, typed=typed(spec))

    return shown(spec, given, again)


def _job_of(target: str, job: str | None, given: Mapping[str, Any]) -> JobSpec:
    """The job that wrote the sink: the named one, which must write to this very sink, or the remembered one."""
    from gristmill.cli.lastjob import recall
    from gristmill.commit.publication import success
    from gristmill.driver.opening import sink_place, sink_root
    from gristmill.jobfile.jobfile import is_job
    from gristmill.jobfile.overlay import changes_of, overlay

    if job is None and "://" not in target and is_job(target):
        job, target = target, ""
    if job is None:
        root, files = _existing(target)
        if given["variables"] or given["profile"] or given["scheduled"]:
            raise BadJob("--var, --profile and --scheduled are for a job file: name it with --job")
        if success(root, files) is None:
            raise BadJob(
                f"{root}: nothing is published, so there are no dead letters to score again: run its job "
                "(--accept publishes what a gate held back)"
            )
        known, folder = recall(root, files)
        spec = overlay(_started_in(known, folder, root), changes_of(given["sets"]))
        if spec.sink is not None and not _same(sink_root(spec.sink), root):  # it was moved or copied: use this one
            spec = replace(spec, sink=replace(spec.sink, uri=file_of(root) or root))
        return spec
    spec = written(job, given)
    if spec.sink is None:
        raise BadJob(f"{job}: the job has no sink: name the job that wrote {target or 'one'}")
    if target and not _same(sink_root(spec.sink), meant := sink_root(replace(spec.sink, uri=target))):
        raise BadJob(f"--job {job}: it has the sink {spec.sink.uri}, not {meant}: name the job that wrote that sink")
    _checked(*sink_place(spec.sink))
    return spec


def _started_in(spec: JobSpec, folder: str, root: str) -> JobSpec:
    """The job, with this process in the folder it was started in, where its paths and modules are. Raises BadJob if
    that folder is gone.
    """
    if folder and folder != os.getcwd():
        here = os.getcwd()
        try:
            os.chdir(folder)
        except OSError:
            raise BadJob(
                f"{root}: the job that wrote it was started in {folder}, which does not exist here: give the job with "
                "--job JOB"
            ) from None
        sys.path[:] = [folder if path in ("", here) else path for path in sys.path]
    return spec


def _same(one: str, other: str) -> bool:
    return one == other or ("://" not in one + other and os.path.realpath(one) == os.path.realpath(other))
