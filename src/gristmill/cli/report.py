"""`report`: what is known of a sink, for somebody who did not run it."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import click

from gristmill.cli import common as words
from gristmill.cli.helptext import Command
from gristmill.cli.sink import place
from gristmill.errors import BadJob

REPORT = """
gristmill report emb/ -o report.html
gristmill report job.yaml --var ds=2026-01-01 -o report.html
gristmill report emb/
gristmill report emb/ --format json > report.json
"""


@click.command(cls=Command, examples=REPORT)
@click.argument("target", metavar="SINK|JOB")
@words.option("-o", "--output", metavar="FILE.html", group="What it shows", usual=True,
              help="Write one page to this file, which needs nothing beside it (-: to standard output)")  # fmt: skip
@words.option("--format", "form", type=click.Choice(["html", "text", "json"]), group="What it shows", usual=True,
              help="What is shown (default: html with -o, else text)")  # fmt: skip
@words.sets
@words.variables
@words.debug
def report(target: str, output: str | None, form: str | None, **given: Any) -> int:
    """Say what was run: counts beside those of earlier generations, throughput, errors with examples, slow shards,
    digests of model and data, and how to run it again. It is read from the sink alone, also while a run goes on.
    """
    from gristmill.cli.lastjob import remembered
    from gristmill.driver.history import facts

    root, files = place(target, given)
    last = remembered(root, files)
    found = facts(root, files, job="" if last is None else last.text, folder="" if last is None else last.folder)
    form = form or ("html" if output else "text")
    if form == "html":
        from gristmill.observe.page import page

        text = page(found)
    elif form == "json":
        text = json.dumps(found.as_dict(), default=str, ensure_ascii=False) + "\n"
    else:
        from gristmill.observe.factlines import lines
        from gristmill.observe.tables import clean

        text = "".join(f"{name:<13} {clean(line)}\n" for name, line in lines(found))
    if output in (None, "-"):
        sys.stdout.write(text)
    else:
        _write(str(output), text)
    return 0


def _write(path: str, text: str) -> None:
    """Write the file in one step, so that whoever opens it meanwhile sees the one before. Raises BadJob."""
    from gristmill.files.disk import LOCAL

    staged = f"{path}.{os.getpid()}.tmp"
    try:
        with open(staged, "w", encoding="utf-8", errors="replace") as file:
            file.write(text)
        LOCAL.take_place(staged, path)
    except OSError as e:
        if os.path.exists(staged):
            os.unlink(staged)
        raise BadJob(f"-o {path}: cannot be written: {e.strerror}: give another file") from None
