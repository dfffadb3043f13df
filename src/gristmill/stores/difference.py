"""What an update changed: the rows of a result that are not, value for value, rows of the one before, so that a store
that has those and is updated by key gets only these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from gristmill.arrow.hashing import row_digests
from gristmill.arrow.spilling import batches_of, given, spilling
from gristmill.commit.documents import Live
from gristmill.commit.generation import Generation
from gristmill.commit.publication import Publication, load
from gristmill.stores.contract import Load, Mark

__all__ = ["before", "changed"]

BATCH_ROWS = 65_536
MEMORY = "256MB"
_PAIR = pa.schema([("hi", pa.uint64()), ("lo", pa.uint64())])

RowsOf = Callable[[Sequence[Live]], Any]


def before(generation: Generation, wanted: Load, there: Mark | None) -> Publication | None:
    """The result that a store has, by a mark of this sink's own, and that this generation is an update of; None if all
    rows are to be brought: the store has something else, or rows that are gone are to go there, too.
    """
    if generation.kind != "update" or wanted.mode != "upsert" or wanted.delete or there is None:
        return None
    found = load(generation.root, generation.predecessor, generation.files)
    if found is None or len(found.generations) != 1 or tuple(found.generations) != there.generations:
        return None
    mark = wanted.mark
    same = (there.mode, there.key, there.schema) == (mark.mode, mark.key, mark.schema)
    return found if same and found.generations == [there.generation] and not there.older else None


def changed(files: Sequence[Live], rows_of: RowsOf, old: Sequence[Live], old_rows_of: RowsOf) -> dict[str, np.ndarray]:
    """For each file which of its rows are not in the `old` ones. Files that both have are not read."""
    both = {f.sha256 for f in old if f.role == "rows"} & {f.sha256 for f in files}
    masks = {f.name: np.zeros(f.rows, bool) for f in files}
    left = [f for f in files if f.sha256 not in both]
    if not left:
        return masks
    ends = np.cumsum([f.rows for f in left])
    with spilling(MEMORY) as connection:
        was = _pairs(old_rows_of([f for f in old if f.role == "rows" and f.sha256 not in both]))
        with given(connection, old=(_PAIR, was), new=(_PAIR, _pairs(rows_of(left)))):
            connection.execute("CREATE TABLE known AS SELECT DISTINCT hi, lo FROM old")
            connection.execute("CREATE TABLE given AS SELECT hi, lo, row_number() OVER () - 1 AS n FROM new")
        found = connection.sql("SELECT n FROM given ANTI JOIN known USING (hi, lo)")
        for batch in batches_of(found, BATCH_ROWS):
            rows = batch["n"].to_numpy()
            numbers = np.searchsorted(ends, rows, side="right")
            for number in np.unique(numbers).tolist():
                f = left[number]
                masks[f.name][rows[numbers == number] - (ends[number] - f.rows)] = True
    return masks


def _pairs(rows: Any) -> Iterator[pa.RecordBatch]:
    for batch in rows.scanner(batch_size=BATCH_ROWS).to_batches():
        digests = row_digests(pa.Table.from_batches([batch]), "delivered")
        columns = [pa.array(np.ascontiguousarray(digests[half])) for half in ("hi", "lo")]
        yield pa.record_batch(columns, schema=_PAIR)
