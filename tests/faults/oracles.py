"""The oracles of the fault catalogue: what must hold after every fault, checked from outside."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa

import gristmill as gm
from gristmill.commit import receipt as receipts
from gristmill.commit.generation import generations, read_plan
from gristmill.commit.publication import latest, load, success
from gristmill.commit.publish import strangers
from gristmill.files.disk import sha256_of


def ok_ids(root: str) -> list[int]:
    """Ids of the published rows."""
    return gm.read(root).to_table()["id"].to_pylist()


def dead_ids(root: str) -> list[int]:
    """Ids of the dead letters."""
    return [json.loads(p)["id"] for p in gm.dead(root)["payload"].to_pylist()]


def nothing_lost_nothing_twice(root: str, ids: list[int], filtered: list[int] | None = None) -> None:
    """(a) The multiset of rows ok, dead and filtered is the input's."""
    gone = filtered or []
    body = success(root)
    assert body is not None
    assert sorted(ok_ids(root) + dead_ids(root) + gone) == sorted(ids)
    assert body.rows_filtered == len(gone)
    assert body.rows_in == len(ids)


def same_values(root: str, wanted: pa.Table) -> None:
    """(b) The published values are those of an uninterrupted run, byte for byte."""
    got = gm.read(root).to_table()
    assert got.schema.equals(wanted.schema)
    assert got.combine_chunks().equals(wanted.combine_chunks())


def committed(root: str, source: str, after: int = 0) -> set[int]:
    """Ids of the rows whose shards have a receipt in a generation after that number."""
    import pyarrow.parquet as pq

    ids: set[int] = set()
    for generation in generations(root):
        if generation.number <= after or not generation.planned:
            continue
        plan = read_plan(generation)
        for number, paths in receipts.listed(generation.receipts).items():
            if receipts.valid(paths) is None:
                continue
            for piece in plan.shards[number].pieces:
                every = pq.read_table(piece.file.path)["id"].to_pylist()
                ids |= {i for a, b in piece.ranges for i in every[a:b]}
    return ids


def called(log: str) -> list[int]:
    """Ids that the model was called for, as often as it was."""
    return [int(i) for i in Path(log).read_text().split()] if os.path.exists(log) else []


def nothing_partial(root: str) -> None:
    """(d) What stands under a final name is whole: a part is what a receipt says, `_SUCCESS` can be read."""
    parts: dict[str, Any] = {}
    for generation in generations(root):
        for folder in (generation.receipts, generation.joined, generation.reduced):
            for receipt in receipts.standing(folder).values():
                parts.update({p.publish: p for p in receipt.parts})
    for name in strangers(root, set()):
        assert name in parts, f"{name} stands in the sink, and no receipt knows it"
        assert sha256_of(os.path.join(root, name)) == parts[name].sha256, f"{name} is not what its receipt says"
    if success(root) is not None:
        gm.read(root).to_table()


def tidy(root: str) -> None:
    """Everything is as published, nothing else stands there, and no work file of a finished generation is left."""
    verdict = gm.verify(root)
    assert verdict.ok, verdict.lines
    result = latest(root)
    assert result is not None
    kept = {f.work for f in result.live()}
    if (before := load(root, result.before)) is not None:
        kept |= {f.work for f in before.live()}
    for generation in generations(root):
        left = os.listdir(generation.work) if os.path.exists(generation.work) else []
        assert {os.path.relpath(os.path.join(generation.work, name), root) for name in left} <= kept
