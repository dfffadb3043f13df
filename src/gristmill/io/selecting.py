"""Which rows of a block a condition keeps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from gristmill.plan.contracts import Where

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["kept"]


def kept(
    rows: pa.Table, position: np.ndarray, where: Where | None, names: Sequence[str]
) -> tuple[pa.Table, np.ndarray, int]:
    """The columns `names` of the rows for which `where` holds, their positions, and how many rows it left out."""
    if where is None or not len(position):
        return rows.select(list(names)), position, 0
    holds = np.flatnonzero(where.mask(rows))
    rows = rows.select(list(names))
    if len(holds) == len(position):
        return rows, position, 0
    return rows.take(holds), position[holds], len(position) - len(holds)
