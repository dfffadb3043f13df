"""The job of the crash tests, as a function that runs in a process apart: a whole run in one process (workers=0)."""

from __future__ import annotations

from typing import Any

import victims
from recording import Harm, Recorded

import gristmill as gm
from gristmill.driver.opening import Verbs
from gristmill.driver.run import finish


def filtered(rows: int) -> list[int]:
    """Ids that the job's step leaves out."""
    return [i for i in range(rows) if i % 10 == 7]


def run(
    source: str,
    sink: str,
    log: str,
    journal: str,
    harm: dict[str, Any] | None = None,
    bad: tuple[int, ...] = (13, 41),
    layout: dict[str, Any] | None = None,
    fn: str = "scored",
    reduce: str | None = None,
    **verbs: Any,
) -> None:
    """Shards of 20 rows, some rows filtered, some dead, on a recorded file layer; `layout` are options of the sink."""
    job = gm.Job(
        source,
        gm.model(getattr(victims, fn), log=log, bad=list(bad)),
        gm.sink(sink, keep=["id"], **(layout or {})),
        steps=[gm.step(victims.odd)],
        workers=0,
        shard_rows=20,
        gates={"min_ok": 0.0},
        reduce=reduce,
    )
    finish(job.spec, Verbs(**verbs), files=Recorded(journal, Harm(**harm) if harm else None))
