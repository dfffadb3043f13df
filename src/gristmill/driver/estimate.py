"""What a job whose rows are requests will take, estimated from some of its rows."""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa

from gristmill.driver.resolved import Resolved
from gristmill.driver.shipping import pieces, reader
from gristmill.errors import BadSource
from gristmill.models import kinds
from gristmill.worker.pieces import blocks, reading

PLACES, EACH = 5, 50  # how many rows are read, at how many places of the source


def estimate(r: Resolved, left: float | None = None) -> Mapping[str, float]:
    """Requests, tokens and dollars (models.contract.USED) of all rows, or of about so many that are `left`, if they are
    like those looked at; empty where that cannot be told: for models without requests, and where steps make the rows.
    """
    if r.job.steps or not kinds.estimates(r.model):
        return {}
    try:
        read, rows = _some(r)
    except BadSource:  # for the run to tell, where a damaged file may be left out
        return {}
    if not read:
        return {}
    every = r.rows if r.rows is not None else r.estimated_rows
    share = (every if left is None else min(left, every)) / read
    return {name: value * share for name, value in kinds.estimate(r.model, rows).items()}


def _some(r: Resolved) -> tuple[int, pa.Table]:
    """How many rows were read, and those of them that the condition keeps."""
    how = reader(r)
    all_pieces = pieces(r, None)
    read, found = 0, []
    for piece in all_pieces[:: -(-len(all_pieces) // PLACES)] if all_pieces else ():
        with reading(how, piece.file.path) as wanted:
            block = next(iter(blocks(how, wanted, piece)), None)
        if block is not None:
            rows = block.rows.slice(0, EACH)
            filtered = block.filtered * rows.num_rows / max(1, block.rows.num_rows)
            read += round(rows.num_rows + filtered) or block.filtered
            found.append(rows)
    return read, pa.concat_tables(found, promote_options="default") if found else pa.table({})
