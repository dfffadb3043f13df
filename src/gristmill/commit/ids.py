"""Row ids of a result: whether any of them repeats, as it does where `key` is not unique."""

from __future__ import annotations

import json
import os
import tempfile

import pyarrow as pa

from gristmill.commit.publication import Publication
from gristmill.commit.reading import readable_dataset
from gristmill.plan.processes import imported

MEMORY = "256MB"  # what counting holds at once; more ids are counted on disk


def said(result: Publication) -> str | None:
    """What is to be said of ids that other rows of the result have, too; None where each is one row's alone.

    Only ids made from `key` can repeat. Reads their column, a batch at a time, and holds at most MEMORY of it. Where it
    cannot be found out, for want of memory or room on disk, says why. The result stands.
    """
    options = result.body["fingerprint"]["options"]
    column, key = (json.loads(options.get(f"sink.{name}", "null")) for name in ("row_id", "key"))
    if not key or column is None:
        return None
    duckdb = imported("duckdb")
    try:
        rows = readable_dataset(result, "ids" if result.body["sink_format"] == "npy" else "rows")
        if column not in rows.schema.names:
            return None
        repeats = _repeats(rows.scanner(columns=[column]).to_reader())
    except (duckdb.Error, OSError, pa.ArrowException) as e:
        return f"whether row ids repeat was not found out: {type(e).__name__}: {e}"
    said = f"row ids repeat: {repeats:,} {'row has' if repeats == 1 else 'rows have'} the id of another row"
    return f"{said}; the key ({', '.join(key)}) is not unique" if repeats else None


def _repeats(ids: pa.RecordBatchReader) -> int:
    """Rows less distinct ids; `ids` has one column."""
    duckdb = imported("duckdb")
    with tempfile.TemporaryDirectory(prefix="gristmill-") as spill:
        config: dict[str, str | bool | int | float | list[str]] = {
            "memory_limit": MEMORY,
            "temp_directory": spill,
            "threads": min(4, os.cpu_count() or 1),
        }
        with duckdb.connect(":memory:", config=config) as connection:
            connection.register("ids", ids)
            name = ids.schema.names[0].replace('"', '""')
            found = connection.execute(
                f'select coalesce(sum(n - 1), 0) from (select count(*) n from ids group by "{name}")'
            ).fetchone()
    return int(found[0]) if found is not None else 0
