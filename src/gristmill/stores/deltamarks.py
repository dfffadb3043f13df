"""Which deliveries a Delta table has: the marks, a file in the table's folder of which the version of the application
`gristmill` says the name, and beside it which files that delivery has added.

A table that is restored keeps the version of the application. As long as the log has the commits since, they tell that
it was; then only the files tell that are still the table's. Marks that nothing tells of are doubtful.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import hashlib
import json
import os
from collections.abc import Sequence
from typing import Any
from urllib.parse import unquote

from gristmill.process.extras import require
from gristmill.stores.contract import Mark, Place, StoreUnavailable
from gristmill.stores.deltafiles import about_files

APP = "gristmill"  # the application whose version says which marks hold
OURS = "_gristmill"  # the folder of marks; Delta leaves names alone that begin with _
LOG = "_delta_log"


class Lost(StoreUnavailable):
    """What says which deliveries a table has is not there any more."""


def files_at(folder: str, digest: str) -> str:
    """Where it is noted which files the delivery with these marks has added."""
    return os.path.join(folder, OURS, f"{digest}.files.json")


def added_files(folder: str, version: int) -> set[str] | None:
    """The paths of the files that a commit has added, in the table's folder; None if the log has forgotten it."""
    try:
        with open(os.path.join(folder, LOG, f"{version:020}.json"), encoding="utf-8") as file:
            said = [json.loads(line) for line in file]
    except FileNotFoundError:
        return None
    return {unquote(entry["add"]["path"]) for entry in said if "add" in entry}


def noted_files(folder: str, digest: str) -> set[str] | None:
    """What is noted; None if nothing is, as the delivery was interrupted."""
    try:
        with open(files_at(folder, digest), encoding="utf-8") as file:
            return set(json.load(file))
    except FileNotFoundError:
        return None


def marks_of(table: Any, place: Place) -> tuple[Mark, ...]:
    """The marks that hold in the newest version. Raises Lost if they are not to be found."""
    version = table.transaction_version(APP)
    if version is None:
        return ()
    for most in (1, 16, None):
        for entry in (entries := table.history(most)):
            if _marks_in(entry) is not None:
                return _marks_named(version, table, place)
            if entry.get("operation") == "RESTORE":
                return _restored_marks(version, table, place)
        if most is None or len(entries) < most:
            break
    return _marks_believed(version, table, place)


def _marks_in(entry: dict[str, Any]) -> str | None:
    """The marks that a commit wrote."""
    return said if isinstance(said := entry.get(APP), str) else None


def _restored_marks(version: int, table: Any, place: Place) -> tuple[Mark, ...]:
    """The marks that held in the version to which the table was restored; `version` is that of the application."""
    from deltalake.exceptions import DeltaError

    entries, at = {entry["version"]: entry for entry in table.history()}, table.version()
    while (entry := entries.get(at)) is not None:
        if (found := _marks_in(entry)) is not None:
            return tuple(Mark.load(json.dumps(body).encode(), place.shown) for body in json.loads(found))
        at = _restored_to(entry, place) if entry.get("operation") == "RESTORE" else at - 1
    if at < 0:
        return ()
    try:
        before = _version(place, at)
    except DeltaError:  # the log has forgotten it
        return _doubtful(_marks_named(version, table, place))
    named = before.transaction_version(APP)
    try:
        return () if named is None else _marks_believed(named, before, place)
    except Lost:  # a later delivery has removed them, as they did not hold any more
        return _doubtful(_marks_named(version, table, place))


def _marks_believed(version: int, table: Any, place: Place) -> tuple[Mark, ...]:
    """The marks of a table whose log has forgotten how it came to be. Trap: one that was restored before that keeps the
    version of the application: those of a delivery that has no file in it any more are doubtful.
    """
    marks = _marks_named(version, table, place)
    there = {unquote(path) for path in about_files(table).column("path").to_pylist()}
    if (added := noted_files(place.path, f"{version:015x}")) is not None:
        return marks if added & there else _doubtful(marks)
    own = f"_{marks[0].name.replace('-', '_')}_" if marks else ""
    return (
        marks if any(path.startswith("gm_") and own in path.partition("/")[0] for path in there) else _doubtful(marks)
    )


def _doubtful(marks: Sequence[Mark]) -> tuple[Mark, ...]:
    return tuple(dataclasses.replace(mark, doubtful=True) for mark in marks)


def _restored_to(entry: dict[str, Any], place: Place) -> int:
    """The version that a commit restored, which it names by its number or by a time."""
    said = entry.get("operationParameters", {})
    if (number := said.get("version")) is not None:
        return int(number)
    time = said.get("datetime") or said.get("timestamp")
    when = dt.datetime.fromtimestamp(int(time) / 1000, dt.timezone.utc) if str(time).isdigit() else str(time)
    return int(_version(place, when).version())


def _version(place: Place, which: Any) -> Any:
    table = require("deltalake", "delta", place.shown).DeltaTable(
        place.path, storage_options=dict(place.options) or None
    )
    table.load_as_version(which)
    return table


def _marks_named(version: int, table: Any, place: Place) -> tuple[Mark, ...]:
    digest = f"{version:015x}"
    try:
        with open(os.path.join(place.path, OURS, f"{digest}.json"), "rb") as file:
            found = json.load(file)
    except FileNotFoundError:
        said = (entry[APP] for entry in table.history() if isinstance(entry.get(APP), str))
        found = next((json.loads(s) for s in said if hashlib.sha256(s.encode()).hexdigest()[:15] == digest), None)
        if found is None:
            raise Lost(
                f"{place.shown}: {OURS}/{digest}.json is missing there, which says what was delivered: restore it, or "
                "deliver to another table, or once with mode replace"
            ) from None
    return tuple(Mark.load(json.dumps(body).encode(), place.shown) for body in found)
