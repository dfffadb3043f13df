"""A job of very many shards of a row each, in the calling process: `python ones.py ROWS.parquet SINK`.

With STOP_AT in the environment it is killed with the row of that number, as by a machine that goes away.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any


def double(batch: dict[str, Any]) -> dict[str, Any]:
    """A row-wise function."""
    if batch["x"].max() >= float(os.environ.get("STOP_AT", "inf")):
        os.kill(os.getpid(), signal.SIGKILL)
    return {"y": batch["x"] * 2.0}


if __name__ == "__main__":
    import gristmill as gm

    gm.Job(sys.argv[1], double, gm.sink(sys.argv[2], keep=["x"]), workers=0, shard_rows=1).run()
