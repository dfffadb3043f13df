"""Options changed between two runs of one sink: found, named, and never mixed."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jobs
import pytest
from apart import Apart

import gristmill as gm
from gristmill.job.job import Sink

CHANGES = [
    pytest.param({"format": "jsonl"}, {"options": {"compression": "gzip"}}, "sink.options", id="jsonl gzip"),
    pytest.param({"options": {"compression": "zstd"}}, {"options": {"compression": "gzip"}}, "gzip", id="parquet"),
    pytest.param({"options": {"row_group_rows": 10}}, {"options": {}}, "row_group_rows", id="row groups"),
    pytest.param({}, {"dead_payload": 10}, "sink.dead_payload was not given, is 10", id="dead letters"),
]


def sink(root: Path, **options: Any) -> Sink:
    """A sink that keeps ids and x."""
    return Sink(str(root), keep=("id", "x"), **options)


@pytest.mark.parametrize(("before", "after", "says"), CHANGES)
def test_fault_46_options_of_a_finished_sink(
    numbers: str, quick: Path, before: dict[str, Any], after: dict[str, Any], says: str
) -> None:
    """A rerun with another option of the sink is refused with the difference, and works again with the old one."""
    first = sink(quick / "out", **before)
    jobs.run(numbers, first, "scored", workers=0)
    with pytest.raises(gm.PlanChanged, match="sink") as refused:
        jobs.run(numbers, dataclasses.replace(first, **after), "scored", workers=0)
    assert says in str(refused.value) and refused.value.exit_code == 4
    assert jobs.run(numbers, first, "scored", workers=0).state == "nothing to do"


def part_done(source: str, root: str, how: dict[str, Any]) -> None:
    """In a process apart: a run that is killed at its fourth receipt."""
    harm = {"at": 3, "kind": "kill", "ops": ["link"], "path": "receipts"}
    journal = f"{root}.journal"
    jobs.run(source, sink(Path(root), **how), "scored", workers=0, shard_rows=20, journal=journal, harm=harm)


@pytest.mark.parametrize(("before", "after", "says"), CHANGES)
def test_fault_46_options_of_an_unfinished_sink(
    numbers: str, quick: Path, apart: Apart, before: dict[str, Any], after: dict[str, Any], says: str
) -> None:
    """Some shards are committed: the rest is not written in another way. With the old options the run goes on."""
    killed = apart.run("test_options:part_done", source=numbers, root=str(quick / "out"), how=before)
    assert killed.code == -9, killed.printed
    committed = len(list(quick.glob("out/_gristmill/g*/receipts/*.json")))
    assert 0 < committed < 10
    first = sink(quick / "out", **before)
    with pytest.raises(gm.PlanChanged) as refused:
        jobs.run(numbers, dataclasses.replace(first, **after), "scored", workers=0, shard_rows=20)
    assert says in str(refused.value) and refused.value.exit_code == 4
    report = jobs.run(numbers, first, "scored", workers=0, shard_rows=20)
    assert (report.rows_ok, report.shards_resumed) == (200, committed)
    assert gm.verify(quick / "out").ok
