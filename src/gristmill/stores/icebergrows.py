"""Rows of Iceberg's data files, with every null as it is there.

Trap: pyiceberg makes null lists and maps of structs empty, as it reads them and as it divides rows by partitions. So
columns with any are read from the files themselves, by the ids of their fields, beside those that pyiceberg reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gristmill.arrow.casts import entries, fitted, is_list
from gristmill.errors import BadSource

ROWS = 1 << 16  # of a file that are read at once


def hollowed(kind: pa.DataType) -> bool:
    """Whether values of a type have lists or maps of structs in them."""
    if pa.types.is_map(kind):
        return pa.types.is_struct(kind.item_type) or hollowed(kind.key_type) or hollowed(kind.item_type)
    if is_list(kind):
        return pa.types.is_struct(kind.value_type) or hollowed(kind.value_type)
    return pa.types.is_struct(kind) and any(hollowed(field.type) for field in kind)


def emptied(values: pa.Array) -> np.ndarray:
    """Which rows have a null list or map of structs, at any depth: pyiceberg would write them as empty ones."""
    kind = values.type
    if not hollowed(kind):
        return np.zeros(len(values), bool)
    if pa.types.is_struct(kind):
        inner = [emptied(child) for child in values.flatten()]
        return np.asarray(np.asarray(values.is_valid()) & np.any(inner, axis=0))
    found = np.asarray(values.is_null())
    if pa.types.is_map(kind):
        found &= pa.types.is_struct(kind.item_type)
        values = entries(values)
    else:
        found &= pa.types.is_struct(kind.value_type)
    inside = np.asarray(pc.list_parent_indices(values))[emptied(values.flatten())]
    found[inside] = True
    return found


def rows_of(
    metadata: Any, io: Any, projection: Any, tasks: Iterable[Any], shown: str, only: Any = None
) -> Iterator[pa.RecordBatch]:
    """The rows of data files in their order, with the columns of a projection; without some that the filter `only`
    leaves out. Raises BadSource for a file whose lists of structs pyiceberg alone could read.
    """
    from pyiceberg.expressions import AlwaysTrue
    from pyiceberg.io.pyarrow import ArrowScan, schema_to_pyarrow
    from pyiceberg.schema import Schema

    columns = schema_to_pyarrow(projection, include_field_ids=False)
    hollow = [field for field in projection.fields if hollowed(columns.field(field.name).type)]
    others = Schema(*(field for field in projection.fields if field not in hollow))
    scan = ArrowScan(metadata, io, others, AlwaysTrue() if only is None or hollow else only)
    if not hollow:
        yield from scan.to_record_batches(tasks)
        return
    for task in tasks:
        rows = _own(metadata, io, task, hollow, shown)
        for field in scan.to_table([task]).itercolumns() if others.fields else ():
            rows.append(field)
        names = [field.name for field in (*hollow, *others.fields)]
        table = pa.table(dict(zip(names, rows, strict=True))).select(columns.names)
        yield from fitted(table, columns).to_batches(ROWS)


def _own(metadata: Any, io: Any, task: Any, hollow: Sequence[Any], shown: str) -> list[pa.ChunkedArray]:
    """These columns of a file as it has them."""
    import pyarrow.parquet as pq
    from pyiceberg.io.pyarrow import pyarrow_to_schema

    path = task.file.file_path
    if task.delete_files or str(task.file.file_format).rpartition(".")[2] != "PARQUET":
        why = "rows of it are deleted, and are still in it" if task.delete_files else "it is no Parquet file"
        raise _unread(shown, hollow[0], path, why)
    with io.new_input(path).open() as opened, pq.ParquetFile(opened) as file:
        known = pyarrow_to_schema(file.schema_arrow, metadata.name_mapping(), format_version=metadata.format_version)
        there = {field.field_id: field for field in known.fields}
        for field in hollow:
            if field.field_id in there and not _within(there[field.field_id].field_type, field.field_type):
                raise _unread(shown, field, path, "fields of the column had other names or types then")
        read = file.read([there[f.field_id].name for f in hollow if f.field_id in there])
        counted = file.metadata.num_rows
    return [
        read.column(there[f.field_id].name) if f.field_id in there else pa.chunked_array([pa.nulls(counted)])
        for f in hollow
    ]


def _unread(shown: str, field: Any, path: str, why: str) -> BadSource:
    return BadSource(
        f"{shown}: column {field.name!r} has lists or maps of structs, of which pyiceberg makes null ones empty, and "
        f"{path} cannot be read without it: {why}: have the table's files rewritten (compacted), or leave that column "
        "out"
    )


def _within(there: Any, own: Any) -> bool:
    """Whether values of an Iceberg type in a file are of the column's by their names: fields of a struct have the same
    ids, and none that the column lacks.
    """
    if there.is_struct and own.is_struct:
        known = {field.field_id: field for field in own.fields}
        same = [(field, known.get(field.field_id)) for field in there.fields]
        return all(o is not None and f.name == o.name and _within(f.field_type, o.field_type) for f, o in same)
    names = ("key", "value", "element")  # of a map, or a list
    parts = [name for name in names if hasattr(there, f"{name}_type") and hasattr(own, f"{name}_type")]
    if not parts:
        return bool(there == own)
    return all(
        getattr(there, f"{name}_id") == getattr(own, f"{name}_id")
        and _within(getattr(there, f"{name}_type"), getattr(own, f"{name}_type"))
        for name in parts
    )
