"""What a delivery brings is decided by what it finds in the store: whoever delivers there before its last step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from shops import SHOPS, Shop

import gristmill as gm
from gristmill.commit.publication import published
from gristmill.stores import delivery as deliveries
from gristmill.stores.contract import Store
from gristmill.stores.results import Result

STORES = ["sqlite", "delta", *(pytest.param(n, marks=pytest.mark.long) for n in ("duckdb", "lance", "iceberg", "lmdb"))]


def scored(batch: dict[str, Any]) -> dict[str, Any]:
    """Columns as the shops know them."""
    return {"y": batch["x"] * 2, "v": [[x, 1.0] for x in batch["x"]]}


@pytest.fixture
def shop(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """A store."""
    with SHOPS[request.param]("", tmp_path) as made:
        yield made


def job(folder: Path, *deliver: gm.Delivery, **options: Any) -> gm.Job:
    """The rows of a folder."""
    model = gm.model(scored, returns={"y": "float64", "v": "float32[2]"})
    sink = gm.sink(str(folder / "out"), keep="id")
    return gm.Job(str(folder / "in"), model, sink, workers=0, deliver=list(deliver), **options)


def write(folder: Path, name: str, rows: dict[int, float]) -> None:
    """A file of the source."""
    (folder / "in").mkdir(parents=True, exist_ok=True)
    table = pa.table({"id": list(rows), "x": list(rows.values())})
    pq.write_table(table, folder / "in" / f"{name}.parquet")


def night(first: int) -> dict[int, float]:
    """Five rows."""
    return {n: float(n) for n in range(first, first + 5)}


def overtaken(monkeypatch: pytest.MonkeyPatch, store: Store, by: Callable[[], Any]) -> None:
    """The first delivery is suspended right before its last step, while others deliver."""
    publish, first = type(store).publish, [True]

    def publish_late(self: Store, load: Any) -> None:
        if first.pop() if first else False:
            self.close()
            by()
        publish(self, load)

    monkeypatch.setattr(type(store), "publish", publish_late)


def counted(shop: Shop, to: gm.Delivery, ids: range) -> Counter[int]:
    """How often each row is there, as far as keys and the count of rows tell."""
    seen = shop.seen("scores") or {}
    with closing(deliveries.opened(to)) as store:
        assert store.count(None) == len(seen)
    return Counter(n for n in seen if n in ids)


@pytest.mark.parametrize("shop", STORES, indirect=True)
def test_another_run_appends_first(shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was held up in its delivery and given up for lost: what both would bring is there once."""
    if shop.name == "lmdb":
        pytest.skip("does not append")
    to = gm.to(shop.address("scores"), mode="append")
    results = []
    for number in range(3):
        write(tmp_path, str(number), night(5 * number))
        job(tmp_path, *[to] * (not number)).run(append=True)
        results.append(published(str(tmp_path / "out")))

    def held_up() -> None:
        with closing(deliveries.opened(to)) as late:
            deliveries.Loading(to, Result.of(results[1]), late).finish(results[1].live())

    with closing(deliveries.opened(to)) as store:
        overtaken(monkeypatch, store, held_up)
    gm.deliver(str(tmp_path / "out"), to)
    assert counted(shop, to, range(15)) == dict.fromkeys(range(15), 1)
    assert gm.verify(job(tmp_path, to)).ok


@pytest.mark.parametrize("mode", ["append", "upsert"])
@pytest.mark.parametrize("shop", STORES, indirect=True)
def test_another_sink_replaces_the_rows_first(
    shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: Any
) -> None:
    """Then all of the result is missing, and not only what is new or changed."""
    if shop.name == "lmdb" and mode == "append":
        pytest.skip("does not append")
    update = {"update": {"key": ["id"]}} if mode == "upsert" else {}
    to = gm.to(shop.address("scores"), mode=mode, key="id")
    rows = night(0)
    write(tmp_path, "a", rows)
    job(tmp_path, to, **update).run()
    write(tmp_path / "other", "a", night(100))
    job(tmp_path / "other").run()
    write(tmp_path, "a" if update else "b", rows | {1: 7.0} if update else night(5))
    wanted = rows | {1: 7.0} if update else rows | night(5)
    with closing(deliveries.opened(to)) as store:
        other = gm.to(shop.address("scores"), key="id")
        overtaken(monkeypatch, store, lambda: gm.deliver(str(tmp_path / "other/out"), other))
    job(tmp_path, to, **update).run(append=not update)
    seen = shop.seen("scores") or {}
    assert {n: row["y"] for n, row in seen.items()} == {n: x * 2 for n, x in (wanted | night(100)).items()}
    assert gm.verify(job(tmp_path, to, **update)).ok


@pytest.mark.parametrize("shop", ["sqlite"], indirect=True)
def test_others_come_first_each_time(shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After some attempts that is told; nothing was changed, and the next run delivers."""
    to = gm.to(shop.address("scores"), mode="append")
    write(tmp_path, "a", night(0))
    job(tmp_path, to).run()
    write(tmp_path, "b", night(5))
    job(tmp_path).run(append=True)
    with monkeypatch.context() as patched:

        def overtaken_again(self: Store, load: Any) -> None:
            raise deliveries.Overtaken("others have delivered there while this was being loaded: run again")

        with closing(deliveries.opened(to)) as store:
            patched.setattr(type(store), "publish", overtaken_again)
        with pytest.raises(gm.RunFailed, match="others have delivered there while this was being loaded: run again"):
            job(tmp_path, to).run()
    assert len(shop.seen("scores") or {}) == 5
    job(tmp_path, to).run()
    assert len(shop.seen("scores") or {}) == 10
