"""Sinks that are a store: the folder of their runs is all that knows which rows were appended. If it is gone, another
sink begins in its place, and would bring all of them again.
"""

from __future__ import annotations

import os

from gristmill.commit.documents import Delivered
from gristmill.commit.generation import Generation, generations
from gristmill.errors import BadJob
from gristmill.files.contract import Files
from gristmill.job.delivery import Delivery, Place, beside, is_hidden
from gristmill.stores.contract import Mark, Store
from gristmill.stores.receipts import is_of, receipts
from gristmill.stores.results import identity

_WAYS = (
    "deliver once with mode replace; or, if those are another job's (such as one on another machine, whose folder has "
    "this path there), or rows are to come beside all of them, name a folder of its own (storage: {staging: "
    "FOLDER}) or say --restart once (restart=True)"
)


def refuse_lost(delivery: Delivery, root: str, files: Files, store: Store) -> None:
    """Raises BadJob if a sink that is a store is to append there for the first time, and another has that had the same
    folder: it was lost, or is another job's on another machine. Nothing that lasts tells these apart: containers have
    new names. A folder beside a file is that of its table wherever the file was brought, whatever they are called now.
    Whoever began a result there by --restart has said that it is to come beside the others: so it is until it is there.
    """
    if not (delivery.is_sink and delivery.mode == "append" and hasattr(store, "marks")):
        return
    there, sink = store.marks(), identity(root, files).name
    if any(mark.sink == sink for mark in there):
        return
    lost = [mark for mark in there if mark.home and _is_at(mark.home, root, delivery.place)]
    began = _restarted(root, files) if lost else []
    came = next((r for g in reversed(began) for r in receipts(g) if r.rows and is_of(r, delivery.place)), None)
    if not lost or (began and came is None) or not (rows := store.count(None)):
        return
    raise BadJob(f"deliver {delivery.shown}: holds {rows:,} rows, {_told(max(lost, key=_when), root, came)}")


def _told(last: Mark, root: str, came: Delivered | None) -> str:
    """What is wrong, and the ways out: `came` is what the folder has delivered since, of which there is no mark."""
    if came is not None:
        return (
            f"and no mark of generation {came.generation}, which was delivered there at {came.at}, but of what came "
            f"before it (the last at {last.at}): were marks of an earlier time restored? Which rows are there cannot "
            f"be told, and rows are not appended twice: restore the later marks; or {_WAYS}"
        )
    whose = (
        f"some of which a sink with this folder delivered (the last at {last.at}), but its folder, which knows which,"
    )
    if last.home != root and os.path.dirname(last.home) == os.path.dirname(root) and os.path.isdir(last.home):
        return (
            f"{whose} is {last.home}; rows are not appended twice: if the table or its file was renamed, give it the "
            f"name {root}; or {_WAYS}"
        )
    moved = "" if last.home == root else f" (it was {last.home})"
    return f"{whose} is lost: {root}{moved}; rows are not appended twice: bring it back; or {_WAYS}"


def _is_at(home: str, root: str, place: Place) -> bool:
    """Whether the folder of a sink of the same store was where this one is."""
    own = beside(place)
    return _same(home, root) or (own is not None and _same(own, root) and is_hidden(home, place))


def _same(one: str, other: str) -> bool:
    return one == other or ("://" not in one + other and os.path.realpath(one) == os.path.realpath(other))


def _restarted(root: str, files: Files) -> list[Generation]:
    """What the folder has since the last --restart there; nothing if there was none."""
    claims = generations(root, files)
    begun = next((g.number for g in reversed(claims) if g.kind == "restart"), None)
    return [] if begun is None else [g for g in claims if g.number >= begun and not g.lost]


def _when(mark: Mark) -> tuple[int, str]:
    return mark.turn, mark.at
