"""Rows that are to be appended where it cannot be told which of them are there already: none are, as no row comes
twice.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import replace

from gristmill.commit.documents import Delivered
from gristmill.commit.generation import generations
from gristmill.errors import BadJob
from gristmill.job.delivery import Delivery, Place, place_of, same_table
from gristmill.stores.contract import Counted, Load, Mark, Store
from gristmill.stores.receipts import is_of, receipts
from gristmill.stores.results import Result
from gristmill.stores.sql import MARKS

_WAYS = "deliver to another table, or once with mode replace, after which only this result is there"
_DATABASES = ("duckdb", "postgresql", "sqlite")  # in which marks are a table
_NOT_TWICE = "and rows are not appended twice"


def refuse_doubtful(delivery: Delivery, result: Result, store: Store, found: Mark | None) -> None:
    """Raises BadJob if rows are to be appended, and what was found there does not tell which ones are there."""
    if (why := doubt(delivery, result, store, found, delivery.shown)) is not None:
        raise BadJob(f"deliver {why}")


def refuse_kept(delivery: Delivery, result: Result, found: Mark | None) -> None:
    """Raises BadJob if rows are to be appended that an update kept, and that were appended before."""
    if found is None or result.generation.name in (found.name, *found.names):
        return
    claims = {g.number: g for g in generations(result.generation.root, result.generation.files) if not g.lost}
    late = [claims[n] for n in result.members if n in claims and n not in found.generations]
    if update := next((g for g in late if g.kind == "update"), None):
        raise BadJob(
            f"deliver {delivery.shown}: generation {update.number} is an update, which keeps rows of earlier ones: to "
            f"append it adds those again to the rows of generation {found.generation} there: let the mode be upsert "
            "with a key, or replace"
        )


def doubt(delivery: Delivery, result: Result, store: Store, found: Mark | None, shown: str) -> str | None:
    """Why it cannot be told which rows of a result were appended, by the mark that was found, and the way out; None if
    it can be.
    """
    if found is None:
        return _unmarked(delivery, result, store, shown)
    if not found.doubtful:
        return None
    copies = store.copies(found) if isinstance(store, Counted) else ()
    told = (
        f"{', '.join(copies)} may be that table, renamed, or a copy of it by its own SQL: deliver there if it was "
        "renamed, drop a copy if its rows are here as well, or "
    )
    return f"{shown}: {untold(found)}, {_NOT_TWICE}: {told if copies else ''}{_WAYS}"


def untold(found: Mark) -> str:
    """What is not known of a doubtful mark's rows."""
    why = "the table was restored to an earlier version, or others have rewritten its files, and it has forgotten which"
    if found.table or found.past:
        why = "the table is another one than they came to (restored, renamed or made anew by others)"
    return (
        f"whether the rows of generation {found.generation} (delivered at {found.at}) are there cannot be told: {why}"
    )


def beside_unmarked(load: Load, store: Store) -> bool:
    """Whether a load comes beside rows of which nothing tells whose they are. Its sink's mark has said so before, if it
    has one: rows need not be counted each night.
    """
    if load.whole or not hasattr(store, "unmarked"):
        return False
    found = load.found
    return found.unmarked if found is not None and not found.doubtful else store.unmarked() > 0


def _unmarked(delivery: Delivery, result: Result, store: Store, shown: str) -> str | None:
    """What is wrong with a table that has rows, and no sign of the deliveries to it; None if nothing is."""
    if not hasattr(store, "unmarked"):
        return None
    claims = generations(result.generation.root, result.generation.files)
    members = [g for g in claims if g.number in result.members and not g.lost]
    found = [receipt for g in reversed(members) for receipt in receipts(g) if receipt.rows]
    last = next((receipt for receipt in found if is_of(receipt, delivery.place)), None)
    if last is None:
        return _renamed(delivery.place, result.sink.name, found, store, shown)
    rows = store.unmarked()
    if not rows and isinstance(store, Counted):
        rows = store.untold(result.sink.name, (last.generation, last.at))
    if not rows:
        return None
    dropped = f", or {MARKS} was dropped or restored" if delivery.place.store in _DATABASES else ""
    return (
        f"{shown}: holds {rows:,} rows, and no mark of a delivery of this sink beside them (the table alone was copied "
        f"or restored{dropped}?), but generation {last.generation} was delivered there at {last.at}: "
        f"which rows are there cannot be told, {_NOT_TWICE}: restore the marks, {_WAYS}"
    )


def _renamed(place: Place, sink: str, found: Iterable[Delivered], store: Store, shown: str) -> str | None:
    """What is wrong with a table that has rows without marks, if it may be one of the same database to which some were
    delivered, as receipts or its marks tell; None if nothing is.
    """
    if not isinstance(store, Counted) or not (rows := store.unmarked()):
        return None
    gone = (receipt for receipt in found if (name := _beside(receipt.to, place)) and store.was(name))
    if (last := next(gone, None)) is not None:
        number, to, at = last.generation, last.to, last.at
    elif (astray := store.astray(sink)) is not None:
        number, to, at = astray[1].generation, f"a table {astray[0]} of this database", astray[1].at
    else:
        return None
    return (
        f"{shown}: holds {rows:,} rows, and no mark of a delivery beside them; generation {number} was "
        f"delivered to {to} at {at}, which is not there any more: if this is that table under another name, "
        f"its rows are there, {_NOT_TWICE}: give it the name that it had, {_WAYS}"
    )


def _beside(to: str, place: Place) -> str:
    """The name of the table of a receipt that is in the database of the place; nothing if it is in another."""
    with contextlib.suppress(BadJob):  # of an address that a secret holds, say
        other = place_of(to)
        return other.name if same_table(replace(other, name=place.name), place) else ""
    return ""


def refuse_mixed(delivery: Delivery, result: Result, found: Mark | None) -> None:
    """Raises BadJob if rows are to be appended to those of a copy of the sink that went its own way, and some of the
    result's are among these: what one of the two has read again would be there twice.
    """
    if found is None or result.shares(found):
        return
    there = found.names or tuple(map(str, found.generations))
    if set(there).isdisjoint(result.names() if found.names else map(str, result.members)):
        return
    raise BadJob(
        f"deliver {delivery.shown}: holds generation {found.generation} ({found.name}) of a copy of this sink that "
        "went its own way (one of the two was restored from a backup?): which rows are there already cannot be told, "
        "and rows are not appended twice: deliver to another place, or once with mode replace (with --take-over "
        "if that is refused), after which only this result is there"
    )
