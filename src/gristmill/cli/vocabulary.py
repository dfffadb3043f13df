"""The flags of the commands, by what they are about. A flag's path says where it goes in a job, and its help."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from gristmill.cli.flags import Flag, Pair
from gristmill.cli.shape import Option
from gristmill.observe.progress import KINDS

F = TypeVar("F", bound=Callable[..., Any])

SOURCE = (
    Flag("--where", "source.where", "Source", "SQL"),
    Flag("--columns", "source.columns", "Source"),
    Flag("--limit", "source.limit", "Source"),
    Flag("--sample", "source.sample", "Source"),
    Flag("--seed", "source.seed", "Source"),
    Flag("--source-format", "source.format", "Source", "NAME"),
    Flag("--delimiter", "source.options.delimiter", "Source", "CHAR"),
    Flag("--on-bad-file", "source.on_bad_file", "Source"),
    Flag("--on-new-files", "job.on_new_files", "Source"),
)
OUTPUT = (
    Flag("--keep", "sink.keep", "Output"),
    Flag("--drop", "sink.drop", "Output"),
    Flag("--output", "model.output", "Output", "NAME"),
    Flag("--format", "sink.format", "Output", "NAME"),
    Flag("--partition-by", "sink.partition_by", "Output"),
    Flag("--merge", "sink.merge", "Output"),
    Flag("--row-id", "sink.row_id", "Output", "NAME"),
    Flag("--key", "sink.key", "Output"),
    Flag("--model-version", "sink.model_version", "Output", "NAME"),
    Flag("--overwrite", "sink.overwrite", "Output"),
    Flag("--evolve", "sink.evolve", "Output"),
)
FAILURES = (
    Flag("--on-null", "job.on_null", "Rows that fail"),
    Flag("--on-nan", "job.on_nan", "Rows that fail"),
    Flag("--min-ok", "gates.min_ok", "Rows that fail"),
    Flag("--warn-failed", "gates.warn_failed", "Rows that fail"),
    Flag("--allow-empty", "gates.allow_empty", "Rows that fail"),
)
RUNNING = (
    Flag("--engine", "engine.name", "How it runs", "NAME"),
    Flag("--workers", "engine.workers", "How it runs"),
    Flag("--gpus", "engine.gpus", "How it runs"),
    Flag("--threads", "engine.threads", "How it runs"),
    Flag("--steps-workers", "engine.steps_workers", "How it runs"),
    Flag("--batch-tokens", "running.batch_tokens", "How it runs"),
    Flag("--batch-rows", "running.batch_rows", "How it runs"),
    Flag("--batch-timeout", "running.batch_timeout", "How it runs", "SECONDS"),
    Flag("--shard-rows", "running.shard_rows", "How it runs"),
    Flag("--worker-memory", "running.worker_memory", "How it runs", "BYTES"),
)
LOG = (Flag("--log", "running.log", "What it shows", "FILE"),)
COMMON = (*SOURCE, *OUTPUT, *FAILURES, *RUNNING, *LOG)

PLACE = (
    Flag("--device", "model.device", "Model", "NAME"),
    Flag("--dtype", "model.dtype", "Model", "NAME"),
    Flag("--backend", "model.backend", "Model", "NAME"),
)
TEXT = (
    Flag("--text", "model.text", "Model", "COLUMN"),
    *PLACE,
    Flag("--max-length", "model.max_length", "Model"),
    Flag("--sha256", "model.sha256", "Model", "DIGEST"),
    Flag("--trust-remote-code", "model.trust_remote_code", "Model"),
)
EMBED = (
    *TEXT,
    Flag("--prompt", "model.prompt", "Model", "TEXT"),
    Flag("--prompt-name", "model.prompt_name", "Model", "NAME"),
    Flag("--pooling", "model.pooling", "Model", "NAME"),
    Flag("--normalize", "model.normalize", "Model"),
    Flag("--truncate-dim", "model.truncate_dim", "Model"),
)
CLASSIFY = (*TEXT, Flag("--all-scores", "model.all_scores", "Model"))
APPLY = (
    Flag("--arg", "model.args", "Model"),
    Flag("--batch-format", "model.batch_format", "Model"),
    Flag("--returns", "model.returns", "Model", "NAME=TYPE"),
)


def option(*names: str, group: str = "Options", **kwargs: Any) -> Callable[[F], F]:
    """An option that is no field of the job."""
    return click.option(*names, cls=Option, group=group, **kwargs)


def _all(command: F, decorators: list[Callable[[F], F]]) -> F:
    for decorate in reversed(decorators):
        command = decorate(command)
    return command


def debug(command: F) -> F:
    """`--debug`; `main` looks for it before arguments are parsed, so that it works for errors of parsing too."""
    about = "Show the traceback of an error.  [GRISTMILL_DEBUG]"
    return option("--debug", is_flag=True, group="What it shows", help=about)(command)


def as_json(command: F) -> F:
    """`--json`."""
    about = "Print JSON instead of a table"
    return option("--json", "as_json", is_flag=True, group="What it shows", help=about)(command)


def sets(command: F) -> F:
    """`--set`."""
    about = "Set any field of the job, for example running.batch_rows=256 (JSON, or else text)"
    return option("--set", "sets", multiple=True, metavar="A.B=VALUE", group="Job", help=about)(command)


def variables(command: F) -> F:
    """`--var` and `--profile`, which only job files have."""
    return _all(
        command,
        [
            option("--var", "variables", type=Pair(typed=False), multiple=True, group="Job",
                    help="Set a variable of the job file"),
            option("--profile", metavar="NAME", group="Job", help="Use a profile of the job file"),
        ],
    )  # fmt: skip


def showing(command: F) -> F:
    """What all commands that show progress have."""
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
    """What all commands that run a job have."""
    return _all(
        command,
        [
            option("--preview", type=click.IntRange(min=1), metavar="N", group="What it shows",
                    help="Score N rows, print them, leave nothing in the sink"),
            option("--save", type=click.Path(dir_okay=False), metavar="JOB.YAML", group="Job",
                    help="Also write what was typed as a job file"),
            option("--restart", is_flag=True, group="How it runs",
                    help="Begin anew; the old answers stay readable until new ones replace them"),
            option("--append", is_flag=True, group="How it runs", help="Score only the files that are new"),
            option("--accept", is_flag=True, group="How it runs",
                    help="Publish although a gate does not hold, after you have looked"),
        ],
    )  # fmt: skip
