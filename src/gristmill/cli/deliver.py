"""`deliver` and `lookup`: a published result in a store, and its rows by key."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, get_args

import click

from gristmill.cli import common as words
from gristmill.cli.ending import hide, say
from gristmill.cli.execute import shown_by
from gristmill.cli.flags import click_type, listed
from gristmill.cli.helptext import Command
from gristmill.cli.sink import named, place
from gristmill.errors import BadJob
from gristmill.job.annotations import options_of
from gristmill.job.delivery import Delivery, is_store
from gristmill.job.secret import secrets_in
from gristmill.job.uris import redact
from gristmill.observe import units
from gristmill.observe.report import others
from gristmill.stores.contract import DISTANCE, Metric

if TYPE_CHECKING:
    from gristmill.stores.lookup import Lookup

DELIVER = """
gristmill deliver scores/ lmdb:///data/scores.lmdb --key id
gristmill deliver scores/ duckdb:///data/scores.duckdb#scores --key id
gristmill deliver scores/ postgresql://db/shop#scores --mode upsert --key id
gristmill deliver emb/ usearch:///data/emb.usearch --key id
gristmill deliver job.yaml

# then, by the key of the delivery: gristmill lookup lmdb:///data/scores.lmdb 17
"""
_FILES = {  # of stores, by how they are named as a rule
    ".lmdb": "lmdb://{}", ".usearch": "usearch://{}", ".faiss": "faiss://{}", ".duckdb": "duckdb://{}#TABLE",
    ".sqlite": "sqlite://{}#TABLE", ".db": "sqlite://{}#TABLE",
}  # fmt: skip
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
@words.option("--take-over", is_flag=True, default=False,
              help="Also in place of a later result of a copy of the sink, as after a backup was restored")  # fmt: skip
@words.sets
@words.variables
@words.showing
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
    watching = shown_by(given["progress"])
    receipts = delivered(*place(target, given), redact(target), wanted, say, watching, given["take_over"])
    for receipt in receipts:
        if given["as_json"]:
            sys.stdout.write(json.dumps(vars(receipt), ensure_ascii=False) + "\n")
        else:
            how = f"of generation {receipt.generation} by {receipt.mode} in {units.seconds(receipt.seconds)}"
            rows = f"{units.plural(receipt.rows, 'row')} {how}{others(receipt.beyond)}"
            sys.stdout.write(f"{receipt.to}: {rows}\n")
    return 0


LOOKUP = """
gristmill lookup lmdb:///data/scores.lmdb 17 42
gristmill lookup duckdb:///data/scores.duckdb#scores 17
gristmill lookup usearch:///data/emb.usearch --nearest question.npy -k 5
gristmill lookup scores/ 17 --key id

# the stores are those of: gristmill deliver scores/ lmdb:///data/scores.lmdb --key id
"""


@click.command(cls=Command, examples=LOOKUP)
@click.argument("target", metavar="SINK|STORE")
@click.argument("keys", metavar="[KEY...]", nargs=-1)
@words.option("--key", "columns", multiple=True, metavar="A,B",
              help="The columns to look up by (default: those of the delivery, or of the sink's index); of several, a "
                   "key is a JSON list")  # fmt: skip
@words.option("--nearest", metavar="FILE.npy|JSON",
              help="Instead of keys: the rows nearest to a vector (a JSON list), or to each of a file")  # fmt: skip
@words.option("-k", "count", type=click.IntRange(1), default=10, show_default=True, help="How many rows are nearest")
@words.option("--column", help="The column of vectors (default: the only one)")
@words.option("--metric", type=click.Choice(get_args(Metric)), help="How far apart vectors are (default: the index's)")
@words.sets
@words.variables
@words.option(
    "--json", "as_json", is_flag=True, group="What it shows", help="As it is: what is found is printed as JSON"
)
@words.debug
def lookup(target: str, keys: tuple[str, ...], columns: tuple[str, ...], nearest: str | None, **given: Any) -> int:
    """Show the published row of each key, or the rows nearest to a vector, as JSON lines, all of one generation. Exits
    1 if a key has no row.
    """
    from gristmill.stores.lookup import in_store
    from gristmill.stores.sinkrows import in_sink

    if bool(keys) == (nearest is not None):
        raise BadJob("lookup: give keys, or --nearest with a vector")
    by = listed(columns)
    if not is_store(target) and os.path.isfile(target) and (kind := _FILES.get(os.path.splitext(target)[1])):
        raise BadJob(f"{redact(target)}: a store is named by its address: {kind.format(redact(target))}")
    with in_store(target, by) if is_store(target) else in_sink(*place(target, given), by) as looking:
        if nearest is not None:
            return _nearest(looking, nearest, redact(target), **given)
        rows = looking.get_many([key_of(text) for text in keys])
    _write(row for row in rows if row is not None)
    missing = [text for text, row in zip(keys, rows, strict=True) if row is None]
    if missing:
        say(f"{redact(target)}: has no row for {', '.join(missing)}")
    return 1 if missing else 0


def _write(rows: Iterable[Mapping[str, Any]]) -> None:
    for row in rows:
        sys.stdout.write(json.dumps(row, default=str, ensure_ascii=False) + "\n")


def _nearest(
    looking: Lookup, given: str, shown: str, count: int, column: str | None, metric: Metric | None, **_: Any
) -> int:
    """Rows nearest to each vector; of several, a row says which of them it is near to."""
    vectors = _vectors(given)
    several = vectors.ndim == 2
    if several:
        found = looking.nearest_many(vectors, count, column=column, metric=metric)
    else:
        found = [looking.nearest(vectors, count, column=column, metric=metric)]
    for number, near in enumerate(found):
        _write({"_vector": number, **row} if several else row for row in near)
    if found:
        say(f"{shown}: {units.plural(sum(map(len, found)), 'row')}, {DISTANCE} is {found[0].metric}")
    return 0


def _vectors(given: str) -> Any:
    """Vectors as typed: a JSON list, or a file of numbers as numpy saves them, or of JSON."""
    import numpy as np

    try:
        if given.endswith(".npy"):
            return np.load(given, allow_pickle=False)
        if not given.lstrip().startswith("["):
            with open(given, encoding="utf-8") as file:
                given = file.read()
        return np.asarray(json.loads(given), np.float32)
    except (OSError, ValueError, TypeError) as e:
        raise BadJob(f"--nearest {given[:80]}: give a JSON list of numbers, or a .npy file: {e}") from None


def key_of(text: str) -> Any:
    """A key as typed: a JSON list for several columns, else the text itself, which becomes a value of its column, as a
    number of a list does.
    """
    if text.startswith("["):
        try:
            found = json.loads(text, parse_int=str, parse_float=str)
        except ValueError:
            return text
        return tuple(found)
    return text
