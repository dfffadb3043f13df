"""What looking up has in common in all stores: keys as given become the key columns' values, and what a store gives
back becomes rows as they were delivered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from gristmill.arrow.casts import Lossy, lossless
from gristmill.errors import BadJob, did_you_mean

if TYPE_CHECKING:
    from gristmill.stores.contract import Mark

Row = dict[str, Any]


def keyed(shown: str, key: Sequence[str], types: Mapping[str, pa.DataType]) -> dict[str, pa.DataType]:
    """The key columns with their types. Raises BadJob if none are known, or one is not there."""
    if not key:
        raise BadJob(
            f"{shown}: was not delivered with a key: say by which columns to look up, for example key='id' (--key id); "
            f"it has {', '.join(types)}"
        )
    for name in key:
        if name not in types:
            raise BadJob(f"{shown}: has no column {name!r}{did_you_mean(name, types)}: it has {', '.join(types)}")
    return {name: types[name] for name in key}


def asked(keys: Sequence[tuple[Any, ...]], columns: Mapping[str, pa.DataType], shown: str) -> pa.Table:
    """The keys as a table of the key columns, one row each. Raises BadJob for a key that is none."""
    for key in keys:
        if len(key) != len(columns):
            names = ", ".join(columns)
            raise BadJob(f"{shown}: key {key if len(key) != 1 else key[0]!r}: the key has {len(columns)} columns: {names}")
    made = {}
    for place, (name, kind) in enumerate(columns.items()):
        values = [key[place] for key in keys]
        made[name] = _as(values, kind, name, shown)
    return pa.table(made)


def _as(values: list[Any], kind: pa.DataType, name: str, shown: str) -> pa.Array:
    """Values of a key column; texts are parsed, as they come from a command line."""
    try:
        texts = bool(values) and all(isinstance(v, str) for v in values)
        if texts and not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
            return pa.array(values, pa.string()).cast(kind)
        if pa.types.is_string(kind) or pa.types.is_large_string(kind):
            return pa.array([v if v is None or isinstance(v, str) else str(v) for v in values], kind)
        return pa.array(values, kind)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as e:
        raise BadJob(f"{shown}: column {name!r} is {kind}, and a key is not: {e}") from None


def restored(found: pa.Table, keys: pa.Table, mark: Mark | None) -> list[Row | None]:
    """For each key the row found for it, in the types that were delivered."""
    if mark is not None:
        found = delivered(found, mark)
    names = keys.column_names
    by_key = {tuple(row[n] for n in names): row for row in found.to_pylist()}
    cast = pa.table({n: keys.column(n).cast(found.schema.field(n).type) for n in names})
    return [by_key.get(key) for key in zip(*(cast.column(n).to_pylist() for n in names), strict=True)]


def delivered(found: pa.Table, mark: Mark) -> pa.Table:
    """Rows of a store with the types of the schema that they were delivered with, as far as values allow."""
    from gristmill.commit.generation import decode_schema

    columns, schema = {}, decode_schema(mark.schema)
    for name in found.column_names:
        column = found.column(name)
        kind = schema.field(name).type if name in schema.names else column.type
        columns[name] = column if column.type == kind else _cast(column, kind)
    return pa.table(columns)


def _cast(column: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    try:
        return lossless(column, kind)
    except Lossy:  # others have written here, too
        return column
    except pa.ArrowException:
        return pa.chunked_array([pa.array(column.to_pylist(), kind)])
