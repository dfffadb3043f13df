"""Sources already in memory (tables, data frames and lists) as one Arrow table; and the index of their answers."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from gristmill.arrow.casts import Lossy
from gristmill.arrow.frompython import from_polars, from_python, is_from, pandas_array, tensor_to_numpy
from gristmill.errors import BadSource, GristmillWarning
from gristmill.job.job import JobSpec, no_source

# A reader yields its rows once, and a job may look at its source many times: the rows are kept as long as the reader
# is.
_READ: weakref.WeakKeyDictionary[pa.RecordBatchReader, pa.Table] = weakref.WeakKeyDictionary()


def as_table(data: Any, column: str) -> pa.Table:
    """An Arrow table from a table, record batch, pandas or polars frame, dict of columns, or list of dicts or values.

    A list of plain values becomes the column `column`. In every form, values keep their kind: a column of two kinds
    (dates and datetimes, numbers and truth values, text and bytes) is refused, at any depth. None is null; NaN stays
    NaN, except in pandas data, where it is null, as pandas has no other mark for a missing value. Raises BadSource,
    also for anything else.
    """
    try:
        if isinstance(data, pa.Table):
            return data
        if isinstance(data, pa.RecordBatch):
            return pa.Table.from_batches([data])
        if isinstance(data, pa.RecordBatchReader):
            if (known := _READ.get(data)) is None:
                known = _READ[data] = data.read_all()
            return known
        if is_from("polars", data, "DataFrame"):
            return _table({name: data[name] for name in data.columns})
        if hasattr(data, "iloc"):
            return _table(_pandas_columns(data if hasattr(data, "columns") else data.to_frame(data.name or column)))
        if hasattr(data, "__arrow_c_stream__"):
            return pa.table(data)
        if isinstance(data, Mapping):
            return _table(data)
        if isinstance(data, (list, tuple)):
            if data and all(isinstance(row, dict) for row in data):
                names = dict.fromkeys(name for row in data for name in row)
                return _table({n: [row.get(n) for row in data] for n in names})
            return _table({column: data})
    except (Lossy, pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as e:
        raise BadSource(f"the {type(data).__name__} given as source cannot be read as a table: {e}") from e
    raise no_source(data)


def with_index(table: pa.Table, rows: Any, job: JobSpec) -> pa.Table:
    """The answers with the index of the DataFrame or Series that they belong to, stored as pyarrow stores one, so that
    `to_pandas` restores it: without it pandas would align them with other rows. If some rows have no answer, or steps
    may have left out or repeated rows, there is no index, and a GristmillWarning says so. The index 0, 1, … is what a
    table has anyway, as long as no rows are left out or repeated.
    """
    if not hasattr(rows, "iloc"):
        return table
    plain, missing = np.array_equal(rows.index, np.arange(len(rows))), len(rows) != table.num_rows
    steps = any(step.kind != "map" for step in job.steps) if plain else bool(job.steps)
    if plain and not ((missing or steps) and job.sink is not None and not (job.sink.keep or job.sink.row_id)):
        return table
    if steps or missing:
        why = "steps may leave rows out or repeat them" if steps else "some rows have no answer"
        text = (
            f"the answers do not carry the index of the {type(rows).__name__}, because {why}: keep a column that "
            "identifies each row"
        )
        warnings.warn(text, GristmillWarning, stacklevel=4)
        return table
    alone = (rows if rows.ndim == 1 else rows.iloc[:, 0]).to_frame("").iloc[:, :0]  # column names are text
    if any(name is not None and str(name) in table.column_names for name in alone.index.names):
        alone = alone.rename_axis([None] * alone.index.nlevels)
    try:
        kept = pa.Table.from_pandas(alone, preserve_index=True)
    except pa.ArrowException as e:
        warnings.warn(f"the answers have no index: {e}", GristmillWarning, stacklevel=4)
        return table
    for level, column in zip(kept.schema, kept.columns, strict=True):
        table = table.append_column(level, column)
    return table.replace_schema_metadata({**(table.schema.metadata or {}), **kept.schema.metadata})


def _table(columns: Mapping[Any, Any]) -> pa.Table:
    """Columns of any kind as a table. Raises Lossy, naming the column, if one cannot be held as it is."""
    found = {}
    for name, values in columns.items():
        try:
            found[str(name)] = _column(values)
        except (Lossy, pa.ArrowException, OverflowError) as e:
            raise Lossy(f"column {name!r}: {e}") from e
    if len(found) < len(columns):
        raise Lossy(f"two columns have the same name ({', '.join(map(str, columns))})")
    return pa.table(found)


def _column(values: Any) -> pa.Array | pa.ChunkedArray:
    if isinstance(values, (pa.Array, pa.ChunkedArray)):
        return values
    if hasattr(values, "iloc"):
        return _pandas_values(values)
    if is_from("polars", values, "Series"):
        return from_polars(values)
    if is_from("torch", values, "Tensor"):
        values = tensor_to_numpy(values)
    if isinstance(values, np.ndarray) and values.dtype.kind != "O" and values.ndim == 1:
        return pa.array(values)
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, (Sequence, np.ndarray)):
        if hasattr(values, "__arrow_array__") or hasattr(values, "__arrow_c_stream__"):
            return pa.chunked_array(values) if hasattr(values, "__arrow_c_stream__") else pa.array(values)
        raise Lossy(f"it is a {type(values).__name__}: give a list or an array")
    return from_python(list(values))


def _pandas_columns(frame: Any) -> dict[str, Any]:
    names = [str(n) for n in frame.columns]
    if len(set(names)) < len(names):
        raise Lossy(f"two columns have the same name ({', '.join(names)})")
    return {n: frame.iloc[:, i] for i, n in enumerate(names)}


def _pandas_values(series: Any) -> pa.Array | pa.ChunkedArray:
    kind = getattr(getattr(series.dtype, "categories", series), "dtype", None)  # of a categorical: its categories'
    if getattr(kind, "name", "") != "object":
        try:
            return pandas_array(series)
        except (pa.ArrowNotImplementedError, pa.ArrowTypeError) as e:
            raise Lossy(f"its type is {series.dtype}, for which Arrow has none: make it numbers or text first") from e
    values = series.to_numpy(dtype=object, copy=True)
    values[series.isna().to_numpy()] = None
    return from_python(list(values))
