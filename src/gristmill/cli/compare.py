"""`compare` and `diff`: where two results differ, and what changed from one to the other."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

from gristmill.cli import common as words
from gristmill.cli.flags import listed
from gristmill.cli.helptext import Command

if TYPE_CHECKING:
    from gristmill.comparison.side import Side

COMPARE = """
gristmill compare prompt-1/ prompt-2/ --on review_id
gristmill compare fp32/ int8/ --on review_id --columns embedding --examples 20
gristmill compare out/@3 out/ --on review_id
gristmill compare days/dt=2026-01-01/ days/dt=2026-01-02/ --on path,chunk --tolerance 0.01
gristmill compare old/ new/ --on id --columns label --min-agreement 0.95
gristmill compare old/ new/ --on id --json > differences.json
"""


def two_results(command: Any) -> Any:
    """What says which rows of which results are held against each other, in which columns."""
    for add in (
        words.option("--columns", multiple=True, metavar="A,B",
                     help="The columns to compare (default: those in which both models answered)"),
        words.option("--on", multiple=True, metavar="A,B",
                     help="What tells rows apart in both (default: row_id, key, or the key of update of both jobs)"),
        click.argument("b", metavar="SINK_B"),
        click.argument("a", metavar="SINK_A"),
    ):  # fmt: skip
        command = add(command)
    return command


@click.command(cls=Command, examples=COMPARE)
@two_results
@words.option("--tolerance", type=float, default=1e-5, show_default=True, metavar="X",
              help="Numbers no further apart agree")  # fmt: skip
@words.option("--min-agreement", type=float, metavar="SHARE",
              help="Exit 3 if less of any of these columns agrees, for example 0.95")  # fmt: skip
@words.option("--examples", type=click.IntRange(min=0), default=5, show_default=True, metavar="N",
              group="What it shows", help="Show N rows that differ, of each column")  # fmt: skip
@words.as_json
@words.debug
def compare(a: str, b: str, **given: Any) -> int:
    """Show where two published results differ: two prompts, two models or two nights over the same rows.

    Rows are joined by the columns of --on. Labels (texts, whole numbers, true and false) are counted in pairs; numbers
    are compared by their difference, vectors by their cosine, everything else for equality. SINK@3 is what generation
    3 of a sink had published, as long as its files are kept: until the next but one is published. SINK@staged is what a
    gate holds back, as it would be published.
    """
    from gristmill.comparison.compare import check
    from gristmill.comparison.compare import compare as compared
    from gristmill.comparison.comparison import show

    one, other = (side(sink) for sink in (a, b))
    keys, names = (listed(given[name]) if given[name] else None for name in ("on", "columns"))
    options = {name: given[name] for name in ("tolerance", "examples", "min_agreement")}
    found = compared(one, other, keys, names, **options)
    with suppress(BrokenPipeError):  # the gate is judged although nobody reads on
        if given["as_json"]:
            sys.stdout.write(json.dumps(found.as_dict(), ensure_ascii=False) + "\n")
        else:
            show(found, sys.stdout)
    check(found, given["min_agreement"])
    return 0


def side(sink: str) -> Side:
    """One of the results: what a sink has published, or what its generation after an @ had."""
    from gristmill.cli.sink import place
    from gristmill.comparison.side import Side
    from gristmill.job.uris import generation_named, redact

    at, generation = generation_named(sink)
    return Side.at(redact(sink), *place(at, {"variables": (), "profile": None, "sets": ()}), generation)


DIFF = """
gristmill diff days/dt=2026-01-01/ days/dt=2026-01-02/ --on user_id
gristmill diff out/@3 out/
gristmill diff out/ out/@staged
gristmill diff old/ new/ --on id --tolerance 0 --examples 20
gristmill diff old/ new/ --on id --json > changes.json
"""


@click.command(cls=Command, examples=DIFF)
@two_results
@words.option("--tolerance", type=float, default=1e-5, show_default=True, metavar="X",
              help="Numbers no further apart are the same answer")  # fmt: skip
@words.option("--examples", type=click.IntRange(min=0), default=5, show_default=True, metavar="N",
              group="What it shows", help="Show N rows of each sort")  # fmt: skip
@words.as_json
@words.debug
def diff(a: str, b: str, **given: Any) -> int:
    """Tell what changed from one result to another, such as two nights: rows that are new, gone, or answered otherwise,
    and what differs of columns, model, code and input.

    Rows are joined by the columns of --on. SINK@3 is what generation 3 of a sink had published, as long as its files
    are kept: until the next but one is published. SINK@staged is what a gate holds back, as it would be published.
    """
    from gristmill.comparison.diff import diff as changes
    from gristmill.comparison.diff import show

    keys, names = (listed(given[name]) if given[name] else None for name in ("on", "columns"))
    found = changes(side(a), side(b), keys, names, tolerance=given["tolerance"], examples=given["examples"])
    with suppress(BrokenPipeError):
        if given["as_json"]:
            sys.stdout.write(json.dumps(found.as_dict(), ensure_ascii=False) + "\n")
        else:
            show(found, sys.stdout)
    return 0
