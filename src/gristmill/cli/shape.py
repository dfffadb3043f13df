"""How --help looks: options in groups, examples as they are typed."""

from __future__ import annotations

import textwrap
from typing import Any

import click

GROUPS = ("Model", "Source", "Output", "Rows that fail", "How it runs", "What it shows", "Job", "Options")


class Option(click.Option):
    """A click option with the group that --help lists it under."""

    def __init__(self, *args: Any, group: str = "Options", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group = group


class Command(click.Command):
    """A command whose --help has grouped options and ends in examples."""

    def __init__(self, *args: Any, examples: str = "", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.examples = examples

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            if isinstance(parameter, click.Argument):
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


def unwrapped(text: str, formatter: click.HelpFormatter) -> None:
    """Write text as it stands: lines that are to be copied must not be wrapped."""
    formatter.write_paragraph()
    for line in text.rstrip("\n").split("\n"):
        formatter.write(line + "\n")
