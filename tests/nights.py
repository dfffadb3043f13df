"""Small nightly jobs, in this process, for tests of what a run tells: one that goes well, and one that fails on some
rows. They are apart from the tests, so that comparing their code does not go through all that a test imports.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import gristmill as gm

ROWS = 40
OF_FOUR = ROWS // 4  # rows that `ill` fails on


def well(batch: dict[str, Any]) -> dict[str, Any]:
    """Scores every row."""
    return {"score": batch["x"] * 2}


def ill(batch: dict[str, Any]) -> dict[str, Any]:
    """Fails on some rows."""
    if (batch["x"] % 4 == 0).any():
        raise ValueError("of four")
    return {"score": batch["x"] * 2}


def ailing(batch: dict[str, Any]) -> dict[str, Any]:
    """Fails on some rows until the environment says that it is cured."""
    return well(batch) if os.environ.get("CURED") else ill(batch)


def more(batch: dict[str, Any]) -> dict[str, Any]:
    """A step that changes a column."""
    return {**batch, "x": batch["x"] + 1}


def write_rows(folder: Path) -> str:
    """A source with `x`, and `y`, which is null in five rows."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table({"x": range(ROWS), "y": [None if n < 5 else n for n in range(ROWS)]})
    pq.write_table(table, folder / "rows.parquet")
    return str(folder / "rows.parquet")


def run(source: str, sink: Path, function: Any, **options: Any) -> gm.Report:
    """A run in this process."""
    return gm.apply(source, str(sink), fn=function, workers=0, **{"keep": ["x"], **options})
