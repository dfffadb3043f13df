"""The flags of the commands: those of a job's options, and others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from gristmill.cli.flags import SECTIONS, Flag, Pair, flags_of, ordered
from gristmill.cli.helptext import GroupedOption
from gristmill.job.prompts import Prompt
from gristmill.job.requests import Requests
from gristmill.job.scores import Score
from gristmill.job.specs import Call, FunctionModel, TextClassifier, TextEmbedder
from gristmill.observe.progress import KINDS

F = TypeVar("F", bound=Callable[..., Any])

COMMON = ordered([
    *(flag for section in SECTIONS if section != "model" for flag in flags_of(section)),
    *(flag for flag in flags_of("model") if flag.help.group),  # --output, of any kind of model
])  # fmt: skip


def _model(*kinds: type[Any]) -> tuple[Flag, ...]:
    return tuple(flag for flag in flags_of("model", *kinds) if not flag.help.group)


EMBED = _model(TextEmbedder)
CLASSIFY = _model(TextClassifier)
APPLY = _model(Call, FunctionModel)
PROMPT = _model(Prompt)
SCORE = _model(Score)
REQUESTS = _model(Requests)
# What run-batch says itself: which columns are read and written, and how.
_SAID = (
    "--source-format",
    "--columns",
    "--delimiter",
    "--keep",
    "--drop",
    "--output",
    "--format",
    "--on-null",
    "--on-nan",
)
BATCH = tuple(flag for flag in COMMON if flag.name not in _SAID)
PREDICT = _model(*(kind for kind in SECTIONS["model"] if hasattr(kind, "suffixes")))
PLACE = tuple(flag for flag in _model() if flag.name in ("--device", "--dtype", "--backend"))  # of any job's model


def option(*names: str, group: str = "Options", **kwargs: Any) -> Callable[[F], F]:
    """An option that is not a field of the job."""
    return click.option(*names, cls=GroupedOption, group=group, **kwargs)


def _all(command: F, decorators: list[Callable[[F], F]]) -> F:
    for decorate in reversed(decorators):
        command = decorate(command)
    return command


def debug(command: F) -> F:
    """`--debug`; `main` looks for it before arguments are parsed, so that it also works for parsing errors."""
    about = "Show the traceback of an error.  [GRISTMILL_DEBUG]"
    return option("--debug", is_flag=True, group="What it shows", help=about)(command)


def as_json(command: F) -> F:
    """`--json`."""
    about = "Print JSON instead of a table"
    return option("--json", "as_json", is_flag=True, group="What it shows", help=about)(command)


def sets(command: F) -> F:
    """`--set`."""
    about = "Set any field of the job, for example running.batch_rows=256 (JSON, or else text)"
    return option("--set", "sets", multiple=True, metavar="A.B=VALUE", group="Job", usual=True, help=about)(command)


def _once(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> str | None:
    if len(values) > 1:
        raise click.UsageError(f"{param.opts[0]} is given {len(values)} times ({', '.join(values)}): give one", ctx)
    return values[0] if values else None


def variables(command: F) -> F:
    """`--var` and `--profile`, which only job files have."""
    return _all(
        command,
        [
            option("--var", "variables", type=Pair(typed=False), multiple=True, group="Job", usual=True,
                    help="Set a variable of the job file"),
            option("--profile", metavar="NAME", group="Job", help="Use a profile of the job file", multiple=True,
                   callback=_once),
        ],
    )  # fmt: skip


def showing(command: F) -> F:
    """The flags of all commands that show progress."""
    return _all(
        command,
        [
            option("--progress", type=click.Choice(KINDS), default="auto", envvar="GRISTMILL_PROGRESS",
                    group="What it shows",
                    help="Progress on stderr: auto is a bar on a terminal, else lines.  [GRISTMILL_PROGRESS]"),
            as_json,
            debug,
        ],
    )  # fmt: skip


def verbs(command: F) -> F:
    """The flags of all commands that run a job."""
    return _all(
        command,
        [
            option("--preview", type=click.IntRange(min=1), metavar="N", group="What it shows", usual=True,
                    help="Score N rows, print them, leave nothing in the sink"),
            option("--save", type=click.Path(dir_okay=False), metavar="JOB.YAML", group="Job", usual=True,
                    help="Also write what was typed as a job file"),
            option("--restart", is_flag=True, group="How it runs", usual=True,
                    help="Start over; the old answers stay readable until the new ones replace them"),
            option("--deliver", "deliver", multiple=True, metavar="URI", group="Output",
                    help="Also bring the published result to this store, for example duckdb:///FILE#table?…; repeated"),
            option("--alert", "alert", multiple=True, metavar="URL", group="What it shows",
                    help="Tell of failures, gates, recoveries: a webhook, mailto:ADDRESS or command:COMMAND; repeated"),
            option("--metrics", "metrics", multiple=True, metavar="FILE|URL", group="What it shows",
                    help="Figures for Prometheus (FILE.prom, a push gateway) or OpenTelemetry (otlp://HOST:4318)"),
            option("--lineage", "lineage", multiple=True, metavar="FILE|URL", group="What it shows",
                    help="OpenLineage events, to an address or the end of a file"),
            option("--append", is_flag=True, group="How it runs", usual=True, help="Score only the files that are new"),
            option("--update", is_flag=True, group="How it runs",
                    help="Score only rows that are new or changed since the last run, by --key, or by their place in "
                    "their file; the others keep their answers"),
            option("--accept", is_flag=True, group="How it runs",
                    help="Publish although a gate did not hold, once you have looked"),
        ],
    )  # fmt: skip
