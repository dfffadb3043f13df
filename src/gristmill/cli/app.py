"""The group of commands: each is imported only when it is called, so that --help and --version are instant."""

from __future__ import annotations

import importlib
import io
import os
import sys
from typing import Any

import click

from gristmill import __version__
from gristmill.cli.ending import USAGE, end, ended, plain_warnings, say
from gristmill.cli.helptext import unwrapped
from gristmill.errors import GristmillError, Interrupted, nearest
from gristmill.process.startup import hold_standard_streams

# Name, module and function, line in --help.
COMMANDS: dict[str, tuple[str, str]] = {
    "embed": ("score", "Text to vectors: adds the column `embedding`"),
    "classify": ("score", "Text to labels: adds `label` and `score`"),
    "predict": ("score", "Features to predictions: scikit-learn, ONNX, TorchScript"),
    "prompt": ("score", "Prompts to answers: a language model behind an endpoint"),
    "score": ("score", "Log-probabilities of given texts after a prompt"),
    "run-batch": ("score", "OpenAI's batch files to an endpoint, as vLLM's run-batch"),
    "apply": ("score", "Your own function or class on every batch of rows"),
    "run": ("job", "Run a job: job.yaml, FILE.py[:NAME] or MODULE:NAME"),
    "plan": ("job", "Show what a job would do: shards, rows, bytes, null counts"),
    "tune": ("tune", "Measure which batch sizes are fastest, on the job's own rows"),
    "status": ("sink", "Show how far a run is, from any terminal"),
    "report": ("report", "What was run and what came of it, as a page, text or JSON"),
    "dead": ("sink", "Show the dead letters of a sink"),
    "retry-dead": ("sink", "Score the dead letters again, usually after a fix"),
    "verify": ("sink", "Recount and re-hash what is published"),
    "deliver": ("deliver", "Bring a published result to a store: a database, a key-value file"),
    "lookup": ("deliver", "Show the published rows of keys"),
    "compare": ("compare", "Show where two results differ: two prompts, models or nights"),
    "diff": ("compare", "Tell what changed between two results: rows, columns, model, code"),
    "prove": ("prove", "Show which input, model, code and run made an answer, and prove it"),
    "approve": ("models", "Approve a version of a model, by its digest, in models.yaml"),
    "models": ("models", "List the models of models.yaml, and what they are approved for"),
    "up": ("up", "Run the job files of a folder when their schedules say so"),
    "export": ("export", "A job's schedule for cron, systemd, Kubernetes, Airflow or Dagster"),
    "schema": ("job", "JSON Schema of job files, for editors"),
}

EPILOG = """\
Examples:

  gristmill embed 'reviews/*.parquet' emb/ --text text --model models/minilm
  gristmill apply rows.parquet scores/ --fn scoring:Scorer --arg threshold=0.3 --keep id
  gristmill run job.yaml --var ds=2026-01-01 --profile prod
  gristmill status emb/

Running a command again is always right: unfinished, it resumes; finished, it says so and exits 0.

Exit codes: 0 done or nothing to do; 1 failed, can be resumed; 2 bad usage or bad job, nothing was run; 3 a gate did not
hold, nothing new published; 4 input, model or code are not those of the plan; 75 another run holds the sink; 130, 143
stopped by SIGINT, SIGTERM, can be resumed.

Environment: GRISTMILL_PROGRESS (auto, bar, lines, json, off) is --progress, GRISTMILL_DEBUG=1 is --debug,
GRISTMILL_ENGINE (local, ray, spark) is the engine of jobs that name none, GRISTMILL_CACHE the folder for downloaded and
converted models, GRISTMILL_TOKEN the token of the pages of up; NO_COLOR turns colours off.
"""


class Commands(click.Group):
    """The commands, found by name; only the one that is called is imported."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"gristmill.cli.{COMMANDS[cmd_name][0]}")
        command: click.Command = getattr(module, cmd_name.replace("-", "_"))
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            near = nearest(args[0], COMMANDS)
            hint = f"did you mean {near!r}?" if near else f"the commands are {', '.join(COMMANDS)}"
            raise click.UsageError(f"no command {args[0]!r}: {hint}", ctx)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            return 0  # the reader has enough, as with `| head`; the work is done
        except Interrupted as e:  # click would turn it into another error
            say(str(e))
            return e.exit_code
        except GristmillError as e:
            command = self.get_command(ctx, ctx.invoked_subcommand or "")
            if command is not None and (more := _ways(str(e), command)):
                e.args = (f"{e}{more}", *e.args[1:])
            raise

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        unwrapped(EPILOG, formatter)


def _ways(message: str, command: click.Command) -> str:
    from gristmill.cli.flags import ways  # only now: it imports all options that a job may have

    return ways(message, command.params)


def _version(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        click.echo(f"gristmill {__version__}")
        ctx.exit()


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_version, help="Show the version.")
def gristmill() -> None:
    """Batch inference as a job: every row scored, or accounted for, exactly once."""


def main(arguments: list[str]) -> int:
    """Parse, run, and report how it ended; returns the exit code. Never raises."""
    # The folder a command is started in is importable, as with `python -m`; a worker is given the same path.
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    hold_standard_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a character is no reason to stop
    debug = "--debug" in arguments or os.environ.get("GRISTMILL_DEBUG", "") not in ("", "0")
    try:
        if not arguments:
            click.echo(gristmill.get_help(click.Context(gristmill, info_name="gristmill")), err=True)
            return ended(USAGE)
        with plain_warnings():
            result: Any = gristmill.main(arguments, prog_name="gristmill", standalone_mode=False)
    except BaseException as error:
        return ended(end(error, debug))
    return ended(int(result or 0))
