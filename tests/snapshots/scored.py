"""The job of the suite, which a process apart runs, too."""

from __future__ import annotations

import time
from typing import Any

import wells

import gristmill as gm


def twice(batch: dict[str, Any], pause: float) -> dict[str, Any]:
    """A number for each row."""
    time.sleep(pause)
    return {"double": batch["id"] * 2}


def job(address: str, sink: str, storage: dict[str, Any], pause: float = 0.0, **options: Any) -> gm.Job:
    """All rows with all columns, in shards of ten, here."""
    source = gm.source(address, storage=storage, **options)
    keep = [name for name in wells.TYPES.names if source.query is None or name == "id"]
    model = gm.model(twice, pause=pause, returns={"double": "int64"})
    return gm.Job(source, model, gm.sink(sink, keep=keep), workers=0, shard_rows=10, gates={"allow_empty": True})


def run(address: str, sink: str, storage: dict[str, Any], pause: float) -> None:
    """Run it."""
    job(address, sink, storage, pause).run()
