"""Row ids of a result: whether any repeats, as they do if `key` is not unique."""

from __future__ import annotations

import json

import pyarrow as pa

from gristmill.arrow.spilling import apart, spilling
from gristmill.commit.publication import Publication
from gristmill.process.startup import imported
from gristmill.result.reading import beside, readable_dataset

MEMORY = "256MB"  # memory for counting; more ids are counted on disk


def said(result: Publication) -> str | None:
    """A message about ids shared by several rows of the result; None if each id belongs to one row.

    Only ids made from `key` can repeat. Reads their column, a batch at a time, and holds at most MEMORY of it. If the
    check fails for lack of memory or disk space, the message says so. The result is not affected.
    """
    options = result.body.fingerprint.options
    column, key = (json.loads(options.get(f"sink.{name}", "null")) for name in ("row_id", "key"))
    if not key or column is None:
        return None
    duckdb = imported("duckdb")
    try:
        rows = readable_dataset(result, beside(result))
        if column not in rows.schema.names:
            return None
        repeats = _repeats(rows.scanner(columns=[column]).to_reader())
    except (duckdb.Error, OSError, pa.ArrowException) as e:
        return f"could not check whether row ids repeat: {type(e).__name__}: {e}"
    said = f"row ids repeat: {repeats:,} {'row has' if repeats == 1 else 'rows have'} the id of another row"
    return f"{said}; the key ({', '.join(key)}) is not unique" if repeats else None


def _repeats(ids: pa.RecordBatchReader) -> int:
    """Rows minus distinct ids; `ids` has one column."""
    with spilling(MEMORY) as connection:
        connection.register("ids", ids)
        name = ids.schema.names[0].replace('"', '""')
        query = f'select coalesce(sum(n - 1), 0) from (select count(*) n from ids group by "{name}")'
        found = apart(lambda: connection.execute(query).fetchone(), connection)
    return int(found[0]) if found is not None else 0
