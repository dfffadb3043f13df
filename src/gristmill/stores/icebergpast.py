"""Which deliveries an Iceberg table has, by its past: the marks of the last one that its current snapshot comes from.

A snapshot says which one was before it, until that is expired: then earlier metadata files of the table tell, and then
what files the snapshot has. A delivery that nothing tells of may be there (others have rewritten its files) or not (the
table was rolled back): its marks are doubtful.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from gristmill.stores.contract import Mark, Place
from gristmill.values import dataclass

# Properties of a table: the marks; the deliveries by the latest snapshot before each.
MARKS, AFTER = "gristmill.marks", "gristmill.after"
SINK = "gristmill.sink"  # what the summary of a delivery's snapshot has


@dataclass(frozen=True)
class Delivery:
    """A delivery as a table notes it: the turn of the latest snapshot that was there before it, the marks that held
    then, and the ids of its snapshots (none: those were not noted).
    """

    turn: list[int]
    marks: list[dict[str, Any]]
    snapshots: tuple[int, ...] = ()

    def dump(self) -> list[Any]:
        """As the property has it."""
        return [self.turn, self.marks, list(self.snapshots)]


class Past:
    """The marks of a table's newest version, which are looked for once a version."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._known: tuple[str, tuple[Mark, ...]] | None = None

    def marks(self, table: Any) -> tuple[Mark, ...]:
        """The marks, those of the last delivery first."""
        if self._known is None or self._known[0] != table.metadata_location:
            self._known = (table.metadata_location, _marks(table, self._place))
        return self._known[1]


def noted(table: Any, marks: list[dict[str, Any]], made: Any) -> str:
    """The property AFTER, with a delivery to `table` (None: it was not there) that has `made` these snapshots."""
    before = [] if table is None else table.metadata.snapshots
    known = {snapshot.snapshot_id for snapshot in before}
    ids = tuple(s.snapshot_id for s in made if s.snapshot_id not in known)
    last = Delivery(max(map(_turn, before), default=[]), marks, ids)
    return json.dumps([one.dump() for one in (*([] if table is None else _asked(table)), last)])


def _marks(table: Any, place: Place) -> tuple[Mark, ...]:
    at = table.metadata.current_snapshot()
    if at is None:
        return _loaded(json.loads(table.properties.get(MARKS, "[]")), place)
    known = {snapshot.snapshot_id: snapshot for snapshot in table.metadata.snapshots}
    first = _back(at, known)
    before = [] if _ours(first) else _before(first, _deliveries(table))
    found, told = _ancestor(table, first, known) if before else (first, True)
    if _ours(found):
        return _loaded(json.loads(found.summary.additional_properties[MARKS]), place)
    return () if told else _by_files(table, first, before, place)


def _loaded(marks: list[dict[str, Any]], place: Place) -> tuple[Mark, ...]:
    return tuple(Mark.load(json.dumps(one).encode(), place.shown) for one in marks)


def _back(at: Any, known: dict[int, Any]) -> Any:
    """The last delivery's snapshot that a snapshot comes from, or the first one that is known to come before it."""
    while not _ours(at) and (before := known.get(at.parent_snapshot_id)) is not None:
        at = before
    return at


def _ancestor(table: Any, at: Any, known: dict[int, Any]) -> tuple[Any, bool]:
    """The same by the table's earlier versions, too, and whether these told. Trap: where pyiceberg expires snapshots,
    those that came after them begin as if they were the first; other clients leave the number of one that is gone.
    """
    for snapshots in _older(table):
        if at.parent_snapshot_id is None and all(one.snapshot_id != at.snapshot_id for one in snapshots):
            return at, True  # it was made without any before it
        for one in snapshots:
            if one.snapshot_id not in known or known[one.snapshot_id].parent_snapshot_id is None:
                known[one.snapshot_id] = one
        if _ours(at := _back(known[at.snapshot_id], known)):
            return at, True
    return at, False


def _older(table: Any) -> Iterator[Sequence[Any]]:
    """The snapshots of a table's earlier versions, the last one first, as far as their files are there."""
    from pyiceberg.serializers import FromInputFile

    for entry in reversed(table.metadata.metadata_log):
        file = table.io.new_input(entry.metadata_file)
        if not file.exists():
            return
        yield FromInputFile.table_metadata(file).snapshots


def _by_files(table: Any, first: Any, deliveries: Sequence[Delivery], place: Place) -> tuple[Mark, ...]:
    """The marks by what files the `first` known snapshot has: those of the last of the `deliveries`, which are in
    order, the last one first, that brought any. What later ones changed of them is doubtful.
    """
    later: dict[str, dict[str, Any]] = {}
    there = _adders(table, first)
    for one in deliveries:
        if there.isdisjoint(one.snapshots):
            for body in reversed(one.marks):
                later.setdefault(body["sink"], body)
            continue
        sure = {body["sink"]: body for body in one.marks}
        break
    else:
        sure = {}
    changed = {sink: body for sink, body in later.items() if sure.get(sink) != body}
    doubtful = [replace(mark, doubtful=True) for mark in _loaded(list(changed.values()), place)]
    return (*doubtful, *_loaded([body for sink, body in sure.items() if sink not in changed], place))


def _adders(table: Any, snapshot: Any) -> set[int]:
    """The snapshots that have added files, or lists of them, which this one has."""
    manifests = snapshot.manifests(table.io)
    found = {manifest.added_snapshot_id for manifest in manifests}
    for manifest in manifests:
        found.update(entry.snapshot_id for entry in manifest.fetch_manifest_entry(table.io))
    return found


def _ours(snapshot: Any) -> bool:
    """Whether a delivery made a snapshot, which has the marks then."""
    return snapshot.summary is not None and SINK in snapshot.summary.additional_properties


def _deliveries(table: Any) -> list[Delivery]:
    """The deliveries that are noted, in order."""
    found = json.loads(table.properties.get(AFTER, "null"))
    if found and not isinstance(found[0], list):  # an earlier version noted the last one's turn
        return [Delivery(found, json.loads(table.properties.get(MARKS, "[]")))]
    return [Delivery(turn, marks, tuple(*ids)) for turn, marks, *ids in found or []]


def _before(snapshot: Any, deliveries: list[Delivery]) -> list[Delivery]:
    """The deliveries before a snapshot, the last one first."""
    return [one for one in reversed(deliveries) if one.turn < _turn(snapshot)]


def _asked(table: Any) -> list[Delivery]:
    """The deliveries that are still the last one before a snapshot of others."""
    deliveries = _deliveries(table)
    lasts = [_before(at, deliveries)[:1] for at in table.metadata.snapshots if not _ours(at)]
    return [one for one in deliveries if [one] in lasts]


def _turn(snapshot: Any) -> list[int]:
    """By which of two snapshots the later one is greater; tables of the first format number none."""
    return [snapshot.sequence_number or 0, snapshot.timestamp_ms]
