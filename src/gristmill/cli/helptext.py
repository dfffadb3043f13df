"""The layout of --help: options in groups, examples as they are typed."""

from __future__ import annotations

import functools
import textwrap
from typing import Any

import click

MANY = 20  # number of options from which --help is short
GROUPS = (
    *("Model", "Source", "Output", "Rows that fail", "Compared with the result before", "How it runs", "What it shows"),
    *("Job", "Options"),
)


class GroupedOption(click.Option):
    """A click option with the group that --help lists it under. For a command with many, --help shows the `usual` ones,
    which most people need, and the required ones; --help-all shows every option.
    """

    def __init__(self, *args: Any, group: str = "Options", usual: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group = group
        self.usual = usual or self.required


class Command(click.Command):
    """A command whose --help has grouped options and ends in examples."""

    def __init__(self, *args: Any, examples: str = "", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.examples = examples

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        made = super().get_params(ctx)
        return [*made, self._all_help] if len(made) > MANY else made

    @functools.cached_property
    def _all_help(self) -> click.Option:
        about = "Show every option and exit."
        told: dict[str, Any] = {"is_flag": True, "is_eager": True, "expose_value": False, "help": about}
        return GroupedOption(["--help-all"], usual=True, callback=_help_all, **told)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        parameters = [p for p in self.get_params(ctx) if isinstance(p, click.Option)]
        short = len(parameters) > MANY and not ctx.meta.get(_ALL)
        for parameter in parameters:
            if short and isinstance(parameter, GroupedOption) and not parameter.usual:
                continue
            record = parameter.get_help_record(ctx)
            if record is not None:
                groups.setdefault(getattr(parameter, "group", "Options"), []).append(record)
        for group in GROUPS:
            if group in groups:
                with formatter.section(group):
                    formatter.write_dl(groups[group], col_max=34)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if self.examples:
            unwrapped("Examples:\n\n" + textwrap.indent(textwrap.dedent(self.examples).strip("\n"), "  "), formatter)


_ALL = "gristmill.help_all"


def _help_all(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        ctx.meta[_ALL] = True
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()


def unwrapped(text: str, formatter: click.HelpFormatter) -> None:
    """Write text as it is: lines to be copied must not be wrapped."""
    formatter.write_paragraph()
    for line in text.rstrip("\n").split("\n"):
        formatter.write(line + "\n")
