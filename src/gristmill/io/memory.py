"""Sources that are in memory already: tables, data frames and lists, as one Arrow table."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from gristmill.errors import BadSource
from gristmill.io.lossless import Lossy
from gristmill.io.values import from_python


def as_table(data: Any, column: str) -> pa.Table:
    """An Arrow table from a table, record batch, pandas or polars frame, dict of columns, or list of dicts or values.

    A list of plain values becomes the column `column`. Raises BadSource for anything else.
    """
    try:
        if isinstance(data, pa.Table):
            return data
        if isinstance(data, pa.RecordBatch):
            return pa.Table.from_batches([data])
        if isinstance(data, pa.RecordBatchReader):
            return data.read_all()
        if hasattr(data, "__arrow_c_stream__") and not hasattr(data, "iloc"):
            return pa.table(data)
        if hasattr(data, "iloc"):
            if not hasattr(data, "columns"):
                data = data.to_frame(data.name or column)
            return pa.Table.from_pandas(data, preserve_index=False).replace_schema_metadata(None)
        if isinstance(data, dict):
            return pa.table(data)
        if isinstance(data, (list, tuple)):
            if data and all(isinstance(row, dict) for row in data):
                names = dict.fromkeys(name for row in data for name in row)
                return pa.table({n: from_python([row.get(n) for row in data]) for n in names})
            return pa.table({column: from_python(data)})
    except (Lossy, pa.ArrowInvalid, pa.ArrowTypeError) as e:
        raise BadSource(f"the {type(data).__name__} given as source cannot be read as a table: {e}") from e
    raise BadSource(
        f"source is a {type(data).__name__}: give a path, several, a DataFrame, an Arrow table, or a list of dicts"
    )
