"""Two that stage the same parts, as the thread beside a run does that is late, or a process that was suspended; and
files of theirs that are not whole.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import gristmill as gm
from gristmill.commit.publication import published
from gristmill.stores import delivery as deliveries
from gristmill.stores.contract import Overtaken, Part
from gristmill.stores.results import Result

ROWS = 60
STORES = {
    "lmdb": "lmdb://s.lmdb",
    "usearch": "usearch://s.usearch",
    "faiss": "faiss://s.faiss",
    "delta": "delta://lake",
    "lance": "lance://lance#scores",
}


def scored(batch: dict[str, Any]) -> dict[str, Any]:
    """A number, and a vector, for each row."""
    return {"y": batch["id"] * 2.0, "v": np.stack([batch["id"], np.ones(len(batch["id"]))], 1).astype("f4")}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a result in it."""
    monkeypatch.chdir(tmp_path)
    model = gm.model(scored, returns={"y": "float64", "v": "float32[2]"})
    gm.Job(pa.table({"id": list(range(ROWS))}), model, gm.sink("out", keep="id"), workers=0).run()
    return tmp_path


def begun(to: gm.Delivery) -> deliveries.Loading:
    """A delivery of the result."""
    return deliveries.Loading(to, Result.of(published("out")), deliveries.opened(to))


def suspended(part: Part, reached: Callable[[], None]) -> Part:
    """A part of whose rows the half are written, when `reached` is called."""

    def batches() -> Iterator[pa.RecordBatch]:
        for batch in part.batches():
            yield batch.slice(0, len(batch) // 2)
            reached()
            yield batch.slice(len(batch) // 2)

    return Part(part.id, part.rows, part.path, batches)


def slowed(monkeypatch: pytest.MonkeyPatch, store: Any, reached: Callable[[], None]) -> None:
    """The store's next parts are suspended at the half of their rows."""
    stage = store.stage
    monkeypatch.setattr(store, "stage", lambda load, parts: stage(load, [suspended(p, reached) for p in parts]))


@pytest.mark.parametrize("name", STORES)
def test_one_finishes_a_part_that_another_is_at(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither takes the other's file away, or gives it its name before it is whole."""
    to = gm.to(STORES[name], key="id")
    late, at_half, go = begun(to), threading.Event(), threading.Event()

    def reached() -> None:
        at_half.set()
        go.wait(30)

    slowed(monkeypatch, late._store, reached)
    failed: list[Exception] = []

    def stage() -> None:
        try:
            late.stage(published("out").live())
        except Exception as e:
            failed.append(e)

    thread = threading.Thread(target=stage)
    thread.start()
    assert at_half.wait(30)
    other = begun(to)
    other.stage(published("out").live())
    go.set()
    thread.join()
    late._store.close()
    assert failed == []
    assert other.finish(published("out").live()).rows == ROWS
    other._store.close()
    with gm.lookup(to) as lookup:
        assert [row["y"] for row in lookup.get_many(list(range(ROWS)))] == [2.0 * n for n in range(ROWS)]
    assert gm.verify("out").ok


@pytest.mark.parametrize("name", STORES)
def test_the_other_one_publishes_meanwhile(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And takes away what was staged: who is late is told so, if it had any, and finds the result there."""
    to = gm.to(STORES[name], key="id")
    late, done = begun(to), []

    def reached() -> None:
        if not done:
            done.append(True)
            late._store.close()
            gm.deliver("out", to)

    slowed(monkeypatch, late._store, reached)
    told = nullcontext() if name == "lance" else pytest.raises(Overtaken, match="not there any more: run again")
    with closing(late._store), told:
        late.stage(published("out").live())
    assert gm.deliver("out", to).rows == ROWS and gm.verify("out").ok


@pytest.mark.parametrize("name", STORES)
@pytest.mark.parametrize("left", [0, 0.5, "a hole"])
def test_a_staged_file_that_cannot_be_read(name: str, left: Any, folder: Path) -> None:
    """Is none: its part is staged again, and the store is not stuck for good."""
    to = gm.to(STORES[name], key="id")
    loading = begun(to)
    with closing(loading._store) as store:
        loading.stage(published("out").live())
        load = deliveries.load_of(to, Result.of(published("out")))
        assert list(store.staged(load).values()) == [ROWS]
    (path,) = (p for p in folder.rglob("*gm_*") for p in ([p] if p.is_file() else p.glob("*")) if p.is_file())
    data = path.read_bytes()
    path.write_bytes(bytes(len(data)) if left == "a hole" else data[: int(len(data) * left)])
    assert gm.deliver("out", to).rows == ROWS and gm.verify("out").ok
    with gm.lookup(to) as lookup:
        assert lookup.get(ROWS - 1)["y"] == 2.0 * (ROWS - 1)  # type: ignore[index]
