"""What sources that are lakes share: which table a version is of, and whether its files alone are the rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from gristmill.errors import PlanChanged
from gristmill.job.job import Source
from gristmill.process.pool import Pool
from gristmill.snapshots.contract import DataFile, Wanted
from gristmill.sources import paths

AT_ONCE = 16
_ID = b"PARQUET:field_id"


def pinned(number: str, table: str) -> str:
    """A version as it is noted: also of which table, as one that is made again counts its versions from the start."""
    return f"{number} {table}"


def gone(wanted: Wanted, told: str, why: str) -> PlanChanged:
    """What there is to say if a version that was noted cannot be read any more."""
    return PlanChanged(
        f"{wanted.shown}: {told}, which what is in the sink was read at, is gone: {why}: if it can be brought back, do "
        "that and run again; else use --restart (restart=True) to read the store as it is now"
    )


def whole(wanted: Wanted, files: Sequence[DataFile], schema: pa.Schema, *, times: bool = True) -> bool:
    """Whether each file has just the columns of a table that are not constant in it, of the same types: columns may
    have been added, renamed or widened since it was written. Files that only the client's options open are not asked.
    A table may name a file twice, whose rows are then two each; a source reads a file once.
    Without `times`, all sorts of timestamps are one: as INT96, files do not tell which.
    """
    if len({file.uri for file in files}) < len(files):
        return False
    if not files or (wanted.place.options and any("://" in file.uri for file in files)):
        return not files
    storage, listed = paths.resolve(Source(tuple(file.uri for file in files)))
    constant = {paths.redact(file.uri): file.constant for file in files}

    def alike(path: str) -> bool:
        with paths.open_input(storage, path) as opened:
            found = pq.read_schema(opened)
        own = {f.name: f for f in schema if f.name not in constant[path]}
        return set(found.names) == set(own) and all(_same(f, own[f.name], times) for f in found)

    with Pool(AT_ONCE) as pool:
        return all(pool.map(alike, [file.path for file in listed]))


def _same(one: pa.Field, other: pa.Field, times: bool) -> bool:
    ids = [(f.metadata or {}).get(_ID) for f in (one, other)]
    return (None in ids or ids[0] == ids[1]) and _bare(one.type, times) == _bare(other.type, times)


def _bare(kind: pa.DataType, times: bool) -> Any:
    """A type without what differs between writers: the names inside lists, and the room for offsets."""
    t = pa.types
    if t.is_timestamp(kind) and not times:
        return "time"
    if t.is_large_string(kind) or t.is_string_view(kind):
        return pa.string()
    if t.is_large_binary(kind) or t.is_binary_view(kind):
        return pa.binary()
    if t.is_list(kind) or t.is_large_list(kind):
        return ("list", _bare(kind.value_type, times))
    if t.is_map(kind):
        return ("map", _bare(kind.key_type, times), _bare(kind.item_type, times))
    if t.is_struct(kind):
        return ("struct", *((f.name, _bare(f.type, times), (f.metadata or {}).get(_ID)) for f in kind))
    return kind
