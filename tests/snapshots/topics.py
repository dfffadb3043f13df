"""The job of the tests of topics, which a process apart runs, too."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import gristmill as gm

KEPT = ["id", "_partition", "_offset"]


def made(client: dict[str, Any], name: str, partitions: int) -> None:
    """A new topic."""
    from confluent_kafka.admin import AdminClient, NewTopic

    admin = AdminClient(client)  # which has to live until the topic is made
    admin.create_topics([NewTopic(name, partitions, 1)])[name].result()


def doubled(batch: dict[str, Any], pause: float = 0.0) -> dict[str, Any]:
    """A number for each row."""
    time.sleep(pause)
    return {"double": batch["id"] * 2}


def job(
    address: str, sink: str | Path, pause: float = 0.0, storage: dict[str, Any] | None = None, **more: Any
) -> gm.Job:
    """All columns, in small shards, here."""
    model = gm.model(doubled, pause=pause, returns={"double": "int64"})
    source = gm.source(address, storage=storage or {}, **more)
    return gm.Job(source, model, gm.sink(str(sink), keep=KEPT), workers=0, shard_rows=20, gates={"min_ok": 0.3})


def picky(batch: dict[str, Any], fixed: str) -> dict[str, Any]:
    """A number for each row, but for one that is refused until a file is there."""
    if 13 in batch["id"] and not Path(fixed).exists():
        raise ValueError("unlucky")
    return {"double": batch["id"] * 2}
