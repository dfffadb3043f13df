"""Values by which a Delta table is partitioned, and what they read back as: deltalake writes them as texts into the log
and as names of folders, and not every value is the same again.

So each value that a delivery brings is tried in a table of its own before the commit: some readers fail at a log with a
value that they cannot read, and with it the whole table is lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from gristmill.sinks.partition import NULL
from gristmill.stores.deltatrial import folder
from gristmill.stores.lake import Datafile
from gristmill.stores.refused import refuse

WAY = "drop such rows, replace the value in a step, or deliver to a table without that partition"


def never_back(kind: pa.DataType) -> str | None:
    """Why no value of a type can be one of a partition; None if some can."""
    if pa.types.is_binary(kind) or pa.types.is_nested(kind):
        return f"the table is partitioned by it, and deltalake does not give {kind} back from the names of partitions"
    return None


def refuse_changed(names: Sequence[str], files: Sequence[Datafile], schema: pa.Schema, shown: str) -> None:
    """Raises BadJob for a row with a value in one of these columns that a partition would not give back."""
    for name in (n for n in names if n in schema.names and not _safe(schema.field(n).type)):
        kind = schema.field(name).type
        values = pc.unique(pa.chunked_array([b.column(name) for b in _batches(files, [name], schema)], kind)).sort()
        reserved = values.filter(pc.equal(values, NULL)) if pa.types.is_string(kind) else values[:0]
        wrong = reserved if len(reserved) else _first_changed(values)
        for batch in _batches(files, schema.names, schema) if len(wrong) else ():
            what = f"{shown}: column {name!r} has a value that a partition of a Delta table does not give back"
            refuse(batch, pc.is_in(batch.column(name), value_set=wrong), what, WAY, [name])


def _safe(kind: pa.DataType) -> bool:
    """Whether all values of a type are the same again."""
    return bool(pa.types.is_integer(kind) or pa.types.is_boolean(kind))


def _batches(files: Sequence[Datafile], names: Sequence[str], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    import pyarrow.parquet as pq

    for file in files:
        with pq.ParquetFile(file.path) as reader:
            for batch in reader.iter_batches(columns=list(names)):
                yield batch.select(list(names)).cast(pa.schema([schema.field(name) for name in names]))


def _first_changed(values: pa.Array) -> pa.Array:
    """The first value that is not given back, alone; none if all are."""
    if not len(values) or not _changed(values):
        return values[:0]
    while len(values) > 1:
        half = values[: len(values) // 2]
        values = half if _changed(half) else values[len(half) :]
    return values


def _changed(values: pa.Array) -> bool:
    """Whether a table that is partitioned by these values does not have them all, or cannot be made or read."""
    import deltalake

    with folder() as path:
        rows = pa.table({"p": values, "n": pa.array(range(len(values)), pa.int64())})
        try:
            schema = deltalake.Schema.from_arrow(rows.schema)
            deltalake.DeltaTable.create(path, schema, partition_by=["p"])
            deltalake.write_deltalake(path, rows, mode="append")
            found = deltalake.DeltaTable(path).to_pyarrow_table().sort_by("n")["p"].combine_chunks()
        except (deltalake.exceptions.DeltaError, pa.ArrowException, OSError, ValueError):
            return True
        same = _equal(found.cast(values.type), values)
        return len(found) != len(values) or not pc.all(same, min_count=0).as_py()


def _equal(one: pa.Array, other: pa.Array) -> pa.Array:
    """Whether values are the same, NaN and null too."""
    alike = pc.fill_null(pc.equal(one, other), False)
    alike = pc.or_(alike, pc.and_(one.is_null(), other.is_null()))
    if pa.types.is_floating(one.type):
        alike = pc.or_(alike, pc.fill_null(pc.and_(pc.is_nan(one), pc.is_nan(other)), False))
    return alike
