"""`deliver` and `lookup`: a published result in a store, and its rows by key."""

from __future__ import annotations

import json
import sys
from typing import Any

import click

from gristmill.cli import common as words
from gristmill.cli.ending import hide, say
from gristmill.cli.flags import click_type, listed
from gristmill.cli.helptext import Command
from gristmill.cli.sink import named, place
from gristmill.errors import BadJob
from gristmill.job.annotations import options_of
from gristmill.job.delivery import Delivery, is_store
from gristmill.job.secret import secrets_in
from gristmill.job.uris import redact
from gristmill.observe import units

DELIVER = """
gristmill deliver scores/ duckdb:///data/scores.duckdb#scores
gristmill deliver scores/ lmdb:///data/scores.lmdb --key id
gristmill deliver scores/ postgresql://db/shop#scores --mode upsert --key id
gristmill deliver job.yaml
"""
_FLAGS = {name: options_of(Delivery)[name] for name in ("mode", "key", "evolve", "delete")}


def _flags(command: Any) -> Any:
    for name, option in reversed(_FLAGS.items()):
        assert option.help is not None
        command = words.option(f"--{name}", name, help=option.help.text, **click_type(option))(command)
    return command


@click.command(cls=Command, examples=DELIVER)
@click.argument("target", metavar="SINK|JOB")
@click.argument("uri", metavar="[URI]", required=False)
@_flags
@words.sets
@words.variables
@words.as_json
@words.debug
def deliver(target: str, uri: str | None, **given: Any) -> int:
    """Bring what a sink has published to a store: one step for its readers, and nothing if the store has it already.

    With a job and no URI, to all stores of its `deliver`. Nothing is scored.
    """
    from gristmill.driver.delivering import deliver as delivered

    job = named(target, given)
    said = {name: given[name] for name in _FLAGS if given[name] not in (None, ())}
    if uri is None:
        if job is None or not job.deliver:
            raise BadJob(f"{redact(target)}: name the store to deliver to, or a job that has `deliver`")
        if said:
            raise BadJob(f"--{next(iter(said))} is for a store named here: the job says how it delivers")
        wanted = job.deliver
    else:
        if "key" in said:
            said["key"] = listed(said["key"])
        wanted = (Delivery(uri, **said),)
    hide(list(secrets_in(wanted)) + ([] if job is None else list(secrets_in(job))))
    receipts = delivered(*place(target, given), redact(target), wanted, say)
    for receipt in receipts:
        if given["as_json"]:
            sys.stdout.write(json.dumps(vars(receipt), ensure_ascii=False) + "\n")
        else:
            rows = units.plural(receipt.rows, "row")
            sys.stdout.write(f"{receipt.to}: {rows} of generation {receipt.generation} by {receipt.mode}\n")
    return 0


LOOKUP = """
gristmill lookup lmdb:///data/scores.lmdb 17 42
gristmill lookup scores/ 17 --key id
gristmill lookup duckdb:///data/scores.duckdb#scores 'tt0111161' --json
"""


@click.command(cls=Command, examples=LOOKUP)
@click.argument("target", metavar="SINK|STORE")
@click.argument("keys", metavar="KEY...", nargs=-1, required=True)
@words.option("--key", "columns", multiple=True, metavar="A,B",
              help="The columns to look up by (default: the delivery's); of several, a key is a JSON list")  # fmt: skip
@words.sets
@words.variables
@words.as_json
@words.debug
def lookup(target: str, keys: tuple[str, ...], columns: tuple[str, ...], **given: Any) -> int:
    """Show the published row of each key, as JSON lines, all of one generation. Exits 1 if one has none."""
    from gristmill.stores.lookup import Lookup, in_sink, in_store

    by = listed(columns)
    reader = in_store(target, by) if is_store(target) else in_sink(*place(target, given), by)
    with Lookup(reader) as looking:
        rows = looking.get_many([_key(text) for text in keys])
    for row in rows:
        if row is not None:
            sys.stdout.write(json.dumps(row, default=str, ensure_ascii=False) + "\n")
    missing = [text for text, row in zip(keys, rows, strict=True) if row is None]
    if missing:
        say(f"{redact(target)}: has no row for {', '.join(missing)}")
    return 1 if missing else 0


def _key(text: str) -> Any:
    """A key as typed: a JSON list for several columns, else the text itself, which becomes a value of its column."""
    if text.startswith("["):
        try:
            found = json.loads(text)
        except ValueError:
            return text
        return tuple(found)
    return text
