"""What every store promises: its readers see the old rows or the new ones, complete and once, whoever is killed."""

from __future__ import annotations

import datetime as dt
import decimal
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import shops
from apart import Apart
from interleaved import interleaved, lines
from shops import Shop

import gristmill as gm
import gristmill.stores.redis
from gristmill.commit.publication import load, published
from gristmill.stores import delivery as deliveries
from gristmill.stores.contract import Load

ROWS = 40


UNIT = np.eye(4, dtype=np.float32)  # vectors that are 1 long, whatever a store makes of them


def scored(batch: dict[str, Any], times: int = 1) -> dict[str, Any]:
    """A number, a text and a vector for each row."""
    return {"y": batch["x"] * times, "label": [f"n{times}" for _ in batch["x"]], "v": vectors(batch)}


def vectors(batch: dict[str, Any]) -> np.ndarray:
    """A vector for each row."""
    return UNIT[(batch["x"] * 4).astype(int) % 4]


def write(folder: Path, first: int, last: int) -> None:
    """Rows with these ids, in a file of their own."""
    folder.mkdir(parents=True, exist_ok=True)
    ids = list(range(first, last))
    table = pa.table({"id": pa.array(ids, pa.int64()), "x": pa.array([i / 4 for i in ids], pa.float64())})
    pq.write_table(table, folder / f"{first:04}.parquet")


def job(folder: Path, times: int = 1, **options: Any) -> gm.Job:
    """The rows of the folder `in`, in the sink `out`, in shards of ten, here."""
    sink = options.pop("sink", None) or gm.sink(str(folder / "out"), keep=["id"])
    model = gm.model(scored, times=times, returns={"y": "float64", "label": "string", "v": "float32[4]"})
    return gm.Job(str(folder / "in"), model, sink, workers=0, shard_rows=10, **options)


def wanted(ids: Any, times: int = 1) -> dict[int, dict[str, Any]]:
    """The rows of such a job."""
    return {i: {"id": i, "y": i / 4 * times, "label": f"n{times}", "v": UNIT[i % 4].tolist()} for i in ids}


def _named(name: str) -> Any:
    marks = [pytest.mark.long, pytest.mark.leaves_children] if name in shops.SLOW else []
    return pytest.param(name, marks=marks)


@pytest.fixture(params=map(_named, shops.SHOPS), scope="session")
def kind(request: pytest.FixtureRequest) -> tuple[str, str]:
    """Each kind of store, and the address of its server, if it has one."""
    server = shops.SERVERS.get(request.param)
    return request.param, request.getfixturevalue(server) if server else ""


@pytest.fixture
def shop(kind: tuple[str, str], tmp_path: Path) -> Iterator[Shop]:
    """A store of that kind, without rows."""
    with shops.SHOPS[kind[0]](kind[1], tmp_path) as made:
        yield made


@pytest.fixture(scope="module")
def nights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sink that has published twice: every row, then every row with other answers."""
    folder = tmp_path_factory.mktemp("nights")
    write(folder / "in", 0, ROWS)
    job(folder).run()
    shutil.copytree(folder / "out", folder / "first")
    job(folder, 2).run(restart=True)
    return folder


@pytest.fixture
def first(nights: Path, tmp_path: Path) -> str:
    """The sink after the first night; `second` makes it that after the second."""
    shutil.copytree(nights / "first", tmp_path / "sink")
    return str(tmp_path / "sink")


def second(nights: Path, sink: str) -> None:
    """The sink after the second night."""
    shutil.rmtree(sink)
    shutil.copytree(nights / "out", sink)


def test_a_run_delivers_and_the_next_replaces(shop: Shop, tmp_path: Path) -> None:
    """Every row, once; the same command again does nothing; a restart's rows take the place of the old ones."""
    write(tmp_path / "in", 0, ROWS)
    address = shop.address("scores")
    report = job(tmp_path, deliver=[gm.to(address, key="id")]).run()
    assert [(d.rows, d.mode) for d in report.deliveries] == [(ROWS, "replace")]
    assert shop.seen("scores") == wanted(range(ROWS))
    again = job(tmp_path, deliver=[gm.to(address, key="id")]).run()
    assert again.state == "nothing to do" and again.deliveries[0].at == report.deliveries[0].at
    shutil.move(tmp_path / "in" / "0000.parquet", tmp_path / "old.parquet")
    write(tmp_path / "in", 5, 25)
    job(tmp_path, 3, deliver=[gm.to(address, key="id")]).run(restart=True)
    assert shop.seen("scores") == wanted(range(5, 25), 3)
    (told,) = gm.status(str(tmp_path / "out"))["deliveries"]
    assert (told["state"], told["generation"], told["rows"]) == ("delivered", 2, 20)
    verdict = gm.verify(job(tmp_path, 3, deliver=[gm.to(address, key="id")]))
    assert verdict.ok and "20 rows of generation 2, as delivered" in verdict.lines[-1]


def test_looked_up_by_key(shop: Shop, first: str) -> None:
    """One row, many rows in the order asked for, and none for a key that is not there."""
    gm.deliver(first, shop.address("scores"), key="id")
    rows = wanted(range(ROWS))
    with gm.lookup(shop.address("scores")) as lookup:
        assert lookup.get(7) == rows[7]
        assert lookup.get("7") == rows[7]
        assert lookup.get(ROWS) is None
        assert lookup.get_many([3, ROWS, 0, 3]) == [rows[3], None, rows[0], rows[3]]
        assert lookup.get_many([]) == []
        none = [2**70, -(2**70), 7.5, float("nan"), None]
        assert lookup.get_many([3, *none, 7.0, {"id": 0}]) == [rows[3], *[None] * 5, rows[7], rows[0]]
        for key, why in ((True, "give a number"), ({"ids": 7}, "did you mean 'id'"), ((7, 7), "has 1 column: id")):
            with pytest.raises(gm.BadKey, match=why):
                lookup.get_many([3, key])
        assert lookup.generation == 1


@pytest.mark.few(2)
def test_appended_rows_come_once(shop: Shop, tmp_path: Path) -> None:
    """Those of each night, also of one whose delivery failed, and whether or not a command is repeated."""
    if "append" not in deliveries.STORES.get(shop.name).modes:
        with pytest.raises(gm.BadJob, match="mode is 'append': it must be one of"):
            gm.to(shop.address("scores"), mode="append", key="id")
        return
    made = gm.to(shop.address("scores"), mode="append", key="id")
    for night in range(4):
        write(tmp_path / "in", 10 * night, 10 * (night + 1))
        options = {} if night == 1 else {"deliver": [made]}  # of the second night, nothing is delivered at first
        report = job(tmp_path, on_new_files="append", **options).run()
        assert report.state == "done"
        assert shop.seen("scores") == wanted(range(10 if night < 2 else 10 * (night + 1)))
    assert gm.deliver(str(tmp_path / "out"), made).rows == 10
    assert shop.seen("scores") == wanted(range(40))
    with gm.lookup(shop.address("scores"), key="id") as rows:
        assert [row and row["id"] for row in rows.get_many([3, 3, 99, 39])] == [3, 3, None, 39]
    write(tmp_path / "in", 35, 45)
    job(tmp_path, on_new_files="append", deliver=[gm.to(shop.address("scores"), mode="append")]).run()
    with gm.lookup(shop.address("scores"), key="id") as rows:
        assert rows.get_many([3, 44])[1]["id"] == 44
        with pytest.raises(gm.BadSource, match="several rows have id = 36, and a lookup finds one a key: deliver with"):
            rows.get_many([3, 36])


@pytest.mark.few(2)
def test_appended_by_key_without_the_earlier_ones(shop: Shop, tmp_path: Path) -> None:
    """Rows that are left out, as later ones have their keys, are missed neither at once nor by a later append."""
    if "append" not in deliveries.STORES.get(shop.name).modes:
        return
    made = gm.to(shop.address("scores"), mode="append", key="id")
    for first in (0, 5, 15):  # the first night is delivered with the second, which has half of its keys
        write(tmp_path / "in", first, first + 10)
        nightly = job(tmp_path, on_new_files="append", deliver=[made] if first else [])
        nightly.run()
        if first:
            assert shop.seen("scores") == wanted(range(first + 10))
            assert gm.verify(nightly).ok
            assert nightly.run().state == "nothing to do"
            assert gm.deliver(str(tmp_path / "out"), made).rows
    if shop.lose is not None:
        shop.lose("scores")
        assert any("holds 24 rows, but 25 were" in line for line in gm.verify(nightly).lines)


@pytest.mark.few(3)
@pytest.mark.parametrize("mode", ["replace", "upsert", "append"])
def test_rows_that_went_missing(shop: Shop, tmp_path: Path, mode: str) -> None:
    """`verify` tells, also of rows of earlier nights; `deliver` brings them again, unless others would be repeated; a
    run does so where the rows are the sink's alone.
    """
    if mode not in deliveries.STORES.get(shop.name).modes or shop.lose is None:
        return
    address, sink = shop.address("scores"), str(tmp_path / "out")
    made = gm.to(address, mode=mode, key="id")
    for night in range(2):
        write(tmp_path / "in", 10 * night, 10 * (night + 1))
        job(tmp_path, on_new_files="append", deliver=[made]).run()
    found = wanted(range(20))
    for command in ("deliver", "run"):
        shop.lose("scores")
        assert shop.seen("scores") == {i: row for i, row in found.items() if i != 3}
        nightly = job(tmp_path, on_new_files="append", deliver=[made])
        verdict = gm.verify(nightly)
        assert not verdict.ok and any("holds 19 rows, but 20 were" in line for line in verdict.lines)
        if mode != "replace":
            with pytest.warns(
                gm.GristmillWarning, match="holds 19 rows, but 20 were delivered: others have taken rows out"
            ):
                nightly.run()
        if mode == "append":
            with pytest.raises(gm.BadJob, match="would repeat the others"):
                gm.deliver(sink, made)
            return
        gm.deliver(sink, made) if command == "deliver" else nightly.run()
        if command == "run" and mode == "upsert":  # what others removed from a table that is not the sink's alone
            assert 3 not in (shop.seen("scores") or {})
            return
        assert shop.seen("scores") == found
        assert gm.verify(nightly).ok
    assert gm.deliver(sink, made).rows == 20
    assert shop.seen("scores") == found


@pytest.mark.few(4)
def test_upserted_by_key(shop: Shop, first: str, nights: Path, tmp_path: Path) -> None:
    """Rows of other sinks stay, and how many is told; those of this one change and come; with delete, those of no key
    here go.
    """
    address = shop.address("scores")
    write(tmp_path / "in", ROWS - 5, ROWS + 5)
    job(tmp_path, 7).run()
    assert gm.deliver(str(tmp_path / "out"), address, mode="upsert", key="id").beyond == 0
    assert shop.seen("scores") == wanted(range(ROWS - 5, ROWS + 5), 7)
    assert gm.deliver(first, address, mode="upsert", key="id").beyond == 5
    assert shop.seen("scores") == {**wanted(range(ROWS, ROWS + 5), 7), **wanted(range(ROWS))}
    second(nights, first)
    assert gm.deliver(first, address, mode="upsert", key="id", delete=True).beyond is None
    assert shop.seen("scores") == wanted(range(ROWS), 2)


def fragile(batch: dict[str, Any], fixed: str) -> dict[str, Any]:
    """The same as `scored`, but of numbers below 0 only once there is a file of this name."""
    if (batch["x"] < 0).any() and not Path(fixed).exists():
        raise ValueError("below 0")
    return scored(batch)


@pytest.mark.few(4)
def test_an_upsert_that_deletes_takes_the_marks_of_others_along(shop: Shop, first: str, tmp_path: Path) -> None:
    """A sink whose rows another one's delivery removed brings all of them again, and `verify` asks for them."""
    upsert = gm.to(shop.address("scores"), mode="upsert", key="id")
    write(tmp_path / "in", 100, 110)
    job(tmp_path, 7, deliver=[upsert]).run()
    gm.deliver(first, shop.address("scores"), mode="upsert", key="id", delete=True)
    assert shop.seen("scores") == wanted(range(ROWS))
    write(tmp_path / "in", 110, 112)
    nightly = job(tmp_path, 7, on_new_files="append", deliver=[upsert])
    assert not gm.verify(nightly).ok
    (receipt,) = nightly.run().deliveries
    assert receipt.rows == 12
    assert shop.seen("scores") == {**wanted(range(ROWS)), **wanted(range(100, 112), 7)}
    assert gm.verify(nightly).ok


@pytest.mark.few(4)
def test_a_clock_that_was_set_back(shop: Shop, first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was delivered last is known by the store, not by a clock: of another machine, or of the hour that comes
    twice in autumn.
    """
    made = gm.to(shop.address("scores"), mode="upsert", key="id")
    write(tmp_path / "in", 100, 110)
    job(tmp_path, 7).run()
    job(tmp_path, 7).run(restart=True)
    (told := [f"2026-10-25T02:{n:02}:00+0100" for n in range(10)]).append("2026-10-25T02:30:00+0200")
    monkeypatch.setattr(deliveries.time, "strftime", lambda _: told.pop())
    for sink, generation in ((first, 1), (str(tmp_path / "out"), 2)):
        said = gm.deliver(sink, made)
        with gm.lookup(shop.address("scores")) as lookup:
            assert lookup.generation == generation
        told[:] = [f"2026-10-25T02:{n:02}:00+0100" for n in range(10)]
    assert said.at.endswith("+0100")


def after_a_drop(store: Any, late: Any, dropped: Load) -> Callable[[Load], None]:
    """The store's own `publish`, before which another deliverer removes what is staged for `dropped`."""
    publish = store.publish

    def published_late(load: Load) -> None:
        store.close()
        late.drop(dropped, this=True)
        late.close()
        publish(load)

    return published_late


@pytest.mark.few(2)
def test_a_result_that_comes_back_while_its_old_rows_go(
    shop: Shop, first: str, nights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was replaced is removed after a while, or by whoever comes next; the same rows brought anew are not."""
    monkeypatch.setattr(gristmill.stores.redis, "GRACE", 1)
    made = gm.to(shop.address("scores"), key="id")
    write(tmp_path / "in", 0, 10)
    job(tmp_path, 7).run()
    one, other = published(first), published(str(tmp_path / "out"))
    gm.deliver(first, made)
    gm.deliver(str(tmp_path / "out"), made)
    gm.deliver(first, made)
    time.sleep(1.5 if shop.name == "redis" else 0)
    assert shop.seen("scores") == wanted(range(ROWS))
    with monkeypatch.context() as stopped:  # before it has removed anything
        store = deliveries.opened(made)
        stopped.setattr(type(store), "drop", lambda *_, **__: None)
        with closing(store):
            deliveries.Loading(made, deliveries.Result.of(other), store).finish(other.live())
    with closing(deliveries.opened(made)) as store, closing(deliveries.opened(made)) as late:
        monkeypatch.setattr(
            store, "publish", after_a_drop(store, late, deliveries.load_of(made, deliveries.Result.of(other)))
        )
        deliveries.Loading(made, deliveries.Result.of(one), store).finish(one.live())
    time.sleep(1.5 if shop.name == "redis" else 0)
    assert shop.seen("scores") == wanted(range(ROWS))


@pytest.mark.few(6)
@pytest.mark.parametrize("mode", ["replace", "upsert"])
def test_what_was_staged_is_gone_when_it_is_to_be_published(
    shop: Shop, first: str, nights: Path, monkeypatch: pytest.MonkeyPatch, mode: Any
) -> None:
    """Counted, and then dropped by another deliverer while this one was suspended: the old rows stay, and the next
    delivery brings the new ones.
    """
    made = gm.to(shop.address("scores"), mode=mode, key="id")
    gm.deliver(first, made)
    shutil.copytree(nights / "out", f"{first}2")
    new = published(f"{first}2")
    with closing(deliveries.opened(made)) as store, closing(deliveries.opened(made)) as late:
        monkeypatch.setattr(
            store, "publish", after_a_drop(store, late, deliveries.load_of(made, deliveries.Result.of(new)))
        )
        with pytest.raises(gm.RunFailed, match="not there any more"):
            deliveries.Loading(made, deliveries.Result.of(new), store).finish(new.live())
    assert shop.seen("scores") == wanted(range(ROWS))
    assert gm.deliver(f"{first}2", made).rows == ROWS
    assert shop.seen("scores") == wanted(range(ROWS), 2)


@pytest.mark.few(2)
def test_of_one_key_the_latest_night_counts(shop: Shop, tmp_path: Path) -> None:
    """Also if the night before was not delivered, and for rows that were dead, which are as old as their night."""
    address, out = shop.address("scores"), str(tmp_path / "out")
    model = gm.model(
        fragile, fixed=str(tmp_path / "fixed"), returns={"y": "float64", "label": "string", "v": "float32[4]"}
    )

    def night(number: int, rows: dict[int, float], *deliver: gm.Delivery) -> gm.Job:
        (tmp_path / "in").mkdir(exist_ok=True)
        table = pa.table({"id": pa.array(rows, pa.int64()), "x": pa.array(rows.values(), pa.float64())})
        pq.write_table(table, tmp_path / "in" / f"{number}.parquet")
        sink = gm.sink(out, keep=["id"])
        options = {"on_new_files": "append", "gates": {"min_ok": 0.1}, "workers": 0, "deliver": list(deliver)}
        return gm.Job(str(tmp_path / "in"), model, sink, **options)

    def seen() -> dict[int, float]:
        return {i: row["y"] for i, row in (shop.seen("scores") or {}).items()}

    night(1, {0: -10.0, 1: 11.0, 2: 12.0}).run()  # the store is away
    upsert = gm.to(address, mode="upsert", key="id")
    nightly = night(2, {0: 20.0, 1: -21.0, 2: 22.0, 3: 23.0}, upsert)
    (receipt,) = nightly.run().deliveries
    assert (receipt.rows, receipt.older) == (4, 1)
    assert seen() == {0: 20.0, 1: 11.0, 2: 22.0, 3: 23.0} and gm.verify(nightly).ok
    (tmp_path / "fixed").touch()
    (receipt,) = gm.retry_dead(nightly, accept_code_change=True).deliveries
    assert (receipt.rows, receipt.older) == (1, 1)
    assert seen() == {0: 20.0, 1: -21.0, 2: 22.0, 3: 23.0} and gm.verify(nightly).ok
    receipt = gm.deliver(out, address, key="id")  # in place of all others
    assert (receipt.rows, receipt.older) == (4, 3)
    assert seen() == {0: 20.0, 1: -21.0, 2: 22.0, 3: 23.0}


@pytest.mark.few(2)
def test_a_retry_that_changes_no_row_delivers_nothing(shop: Shop, tmp_path: Path) -> None:
    """What is dead stays dead: the rows are there, as receipt, `status` and `verify` say, also of the run after; rows
    that somebody took out come again, and those of a retry that mends something.
    """
    made = gm.to(shop.address("scores"), key="id")
    fixed = str(tmp_path / "fixed")
    model = gm.model(fragile, fixed=fixed, returns={"y": "float64", "label": "string", "v": "float32[4]"})
    (tmp_path / "in").mkdir()
    rows = pa.table({"id": pa.array(range(10), pa.int64()), "x": pa.array([-1.0, *(i / 4 for i in range(1, 10))])})
    pq.write_table(rows, tmp_path / "in" / "0.parquet")
    said = {"gates": {"min_ok": 0.1}, "deliver": [made], "workers": 0}
    nightly = gm.Job(str(tmp_path / "in"), model, gm.sink(str(tmp_path / "out"), keep=["id"]), **said)
    (first,) = nightly.run().deliveries
    for command in (gm.retry_dead, gm.retry_dead, gm.Job.run):
        (receipt,) = command(nightly).deliveries
        assert (receipt.at, receipt.rows, receipt.generation) == (first.at, 9, 1)
        assert gm.status(nightly)["deliveries"][0]["state"] == "delivered" and gm.verify(nightly).ok
    if shop.lose is not None:
        shop.lose("scores")
        (receipt,) = gm.retry_dead(nightly).deliveries
        assert receipt.rows == 9 and receipt.generation > 1 and gm.verify(nightly).ok
    assert shop.seen("scores") == wanted(range(1, 10))
    Path(fixed).touch()
    (receipt,) = gm.retry_dead(nightly, accept_code_change=True).deliveries
    assert receipt.rows == 10 and sorted(shop.seen("scores") or ()) == list(range(10)) and gm.verify(nightly).ok


@pytest.mark.few(4)
def test_keys_that_repeat_are_told_before_anything_changes(shop: Shop, first: str, tmp_path: Path) -> None:
    """With the keys; and so is a key with a null in it, and one that is no column."""
    address = shop.address("scores")
    gm.deliver(first, address, key="id")
    folder = tmp_path / "in"
    write(folder, 0, 10)
    shutil.copy(folder / "0000.parquet", folder / "copy.parquet")
    made = job(tmp_path, 5, deliver=[gm.to(address, mode="upsert", key="id")])
    with pytest.raises(gm.GateFailed, match=r"10 keys \(id\) repeat: 0 2 times; 1 2 times; 2 2 times …") as failed:
        made.run()
    assert failed.value.report.rows_ok == 20 and failed.value.exit_code == 3
    with pytest.raises(gm.BadJob, match=r"key names column 'idd'.*did you mean 'id'"):
        gm.deliver(first, address, mode="upsert", key="idd")
    assert shop.seen("scores") == wanted(range(ROWS))
    pq.write_table(pa.table({"id": pa.array([1, None, 3, 3]), "x": [1.0, 2.0, 3.0, 4.0]}), folder / "copy.parquet")
    (folder / "0000.parquet").unlink()
    job(tmp_path, 5).run(restart=True)
    with pytest.raises(
        gm.BadJob, match=r"1 row has a null in its key \(id\)[^;]*first; and 1 key \(id\) repeats: 3 2 times"
    ):
        gm.deliver(str(tmp_path / "out"), address, mode="upsert", key="id")
    assert shop.seen("scores") == wanted(range(ROWS))


def test_a_failed_delivery_scores_nothing_again(shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The result is published, exit code 1; the same command delivers it, and calls no model."""
    write(tmp_path / "in", 0, ROWS)
    made = job(tmp_path, deliver=[gm.to(shop.address("scores"), key="id")])

    def away(*_: Any) -> None:
        raise deliveries.RunFailed("the plug was pulled")

    with monkeypatch.context() as patched:
        patched.setattr(deliveries.Loading, "finish", away)
        with pytest.raises(gm.RunFailed, match="the plug was pulled;\nthe result is published") as failed:
            made.run()
    assert failed.value.exit_code == 1 and failed.value.report.state == "published, but not delivered"
    assert gm.read(str(tmp_path / "out")).count_rows() == ROWS
    assert gm.status(str(tmp_path / "out"))["deliveries"][0]["state"] == "not delivered"
    assert not gm.verify(made).ok
    report = made.run()
    assert report.state == "nothing to do" and report.deliveries[0].rows == ROWS
    assert shop.seen("scores") == wanted(range(ROWS))


def test_a_stale_deliverer_stops(shop: Shop, first: str, nights: Path) -> None:
    """One that was suspended while a later generation was delivered finds that there, at any of its steps."""
    address = shop.address("scores")
    made = gm.to(address, key="id")
    old = published(first)
    store = deliveries.opened(made)
    loading = deliveries.Loading(made, deliveries.Result.of(old), store)
    loading.stage(old.live()[:2])
    store.close()
    shutil.copytree(nights / "out", f"{first}2")
    gm.deliver(f"{first}2", made)
    with pytest.raises(gm.SinkBusy, match=r"holds generation 2 of this sink already, and this is 1") as stopped:
        loading.finish(old.live())
    assert stopped.value.exit_code == 75
    store.close()
    with pytest.raises(gm.SinkBusy):
        gm.deliver(first, made)
    assert shop.seen("scores") == wanted(range(ROWS), 2)
    assert gm.verify(job(Path(first), sink=gm.sink(f"{first}2"), deliver=[made])).ok


@pytest.mark.few(3)
def test_an_empty_result(shop: Shop, first: str, tmp_path: Path) -> None:
    """Replaces the rows by none."""
    gm.deliver(first, shop.address("scores"), key="id")
    write(tmp_path / "in", 0, 3)
    empty = job(tmp_path, steps=[gm.filter("id < 0")], gates={"allow_empty": True})
    assert empty.run().rows_ok == 0
    receipt = gm.deliver(str(tmp_path / "out"), shop.address("scores"), key="id")
    assert receipt.rows == 0 and not shop.seen("scores")
    with gm.lookup(shop.address("scores")) as lookup:
        assert lookup.get(1) is None


ODD = {
    "text": pa.array(["", "ü 雪 🜚 'quoted' \"\\ \n\t", "nul \x00 in it"[:0] + "a\tb", None]),
    "big": pa.array([2**53 + 1, -(2**63), 2**63 - 1, None], pa.int64()),
    "small": pa.array([-128, 127, 0, None], pa.int8()),
    "natural": pa.array([2**32 - 1, 0, 1, None], pa.uint32()),
    "real": pa.array([0.1, -1.5e300, 5e-324, None], pa.float64()),
    "single": pa.array([0.1, 3.4e38, 1e-45, None], pa.float32()),
    "truth": pa.array([True, False, True, None]),
    "money": pa.array([decimal.Decimal("12345678901234567890.1234"), decimal.Decimal("-0.0001"), 0, None],
                      pa.decimal128(30, 4)),
    "day": pa.array([dt.date(2026, 2, 28), dt.date(1, 1, 1), dt.date(9999, 12, 31), None]),
    "clock": pa.array([dt.time(23, 59, 59, 999999), dt.time(0), dt.time(12), None], pa.time64("us")),
    "naive": pa.array([dt.datetime(2026, 3, 29, 2, 30, 0, 1), dt.datetime(1600, 1, 1), dt.datetime(2300, 1, 1), None],
                      pa.timestamp("us")),
    "zoned": pa.array([1743211800000001, -1, 0, None], pa.timestamp("us", "Europe/Berlin")),
    "bytes": pa.array([b"", b"\x00\xff'", b"text", None]),
    "vector": pa.array([[0.1, -2.0, 3e38], [1e-45, 0.0, -0.0], [1.0, 2.0, 3.0], None], pa.list_(pa.float32(), 3)),
    "list": pa.array([[1, None, 2**53 + 1], [], [0], None], pa.list_(pa.int64())),
    "texts": pa.array([["a", "", None, "ü"], [], ["\"'\\"], None], pa.list_(pa.string())),
    "record": pa.array([{"a": 1, "b": ["x", None]}, {"a": None, "b": []}, {"a": -1, "b": None}, None],
                       pa.struct([("a", pa.int64()), ("b", pa.list_(pa.string()))])),
    "nothing": pa.nulls(4, pa.int64()),
}  # fmt: skip


def same(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The rows as they are."""
    return batch


def test_odd_values_come_back_as_they_were(shop: Shop, tmp_path: Path) -> None:
    """Or their column is refused by name before anything is scored."""
    rows = pa.table({"id": pa.array(range(4), pa.int64()), **ODD})
    scored_at: list[str] = []
    for _ in range(len(ODD)):
        try:
            gm.Job(
                rows, gm.model(same, batch_format="arrow"), gm.sink(str(tmp_path / "out")), workers=0,
                deliver=[gm.to(shop.address("odd"), key="id", **shop.odd)],
            ).run()  # fmt: skip
            break
        except gm.BadJob as e:
            name = next(n for n in rows.column_names if f"column '{n}'" in str(e))
            assert str(rows.schema.field(name).type) in str(e)
            scored_at.append(name)
            rows = rows.drop_columns([name])
            shutil.rmtree(tmp_path / "out")
    assert scored_at == REFUSED.get(shop.name, [])
    with gm.lookup(shop.address("odd")) as lookup:
        assert lookup.get_many(range(4)) == rows.to_pylist()
        assert [str(v) for v in lookup.get(0).values()] == [str(v) for v in rows.to_pylist()[0].values()]


REFUSED: dict[str, list[str]] = {"delta": ["clock"], "spark": ["clock"]}


@pytest.mark.parametrize(
    ("mode", "kills"),
    [
        ("replace", 4),
        pytest.param("replace", 40, marks=pytest.mark.long),
        pytest.param("upsert", 20, marks=pytest.mark.long),
    ],
)
@pytest.mark.few(6)
def test_killed_at_any_step(shop: Shop, first: str, nights: Path, apart: Apart, mode: str, kills: int) -> None:
    """Readers see the old rows or the new ones, complete; the next command finishes, and one more changes nothing."""
    address, how = shop.address("scores"), {"key": "id", "mode": mode}
    old, new = wanted(range(ROWS)), wanted(range(ROWS), 2)
    kills = max(2, kills // 5) if shop.name in shops.SLOW else min(kills, shops.KILLS.get(shop.name, kills))

    def begin() -> None:
        shutil.rmtree(first)
        shutil.copytree(nights / "first", first)
        shop.clear("scores")
        gm.deliver(first, address, **how)
        second(nights, first)
        assert shop.seen("scores") == old

    begin()
    whole = apart.run("harmed:deliver", sink=first, to=address, at=None, join=shop.join, **how)
    assert whole.code == 0 and shop.seen("scores") == new, whole.printed
    lines = int(whole.printed.rpartition("lines ")[2])
    for at in range(lines // kills // 2, lines, lines // kills):
        begin()
        ended = apart.run("harmed:deliver", sink=first, to=address, at=at, join=shop.join, **how)
        # How often a lock is looked at differs, so that fewer lines may have run.
        assert ended.code == -9 or int(ended.printed.rpartition("lines ")[2]) < at, ended.printed
        assert shop.seen("scores") in (old, new), f"at line {at}"
        receipt = gm.deliver(first, address, **how)
        assert shop.seen("scores") == new and receipt.generation == 2, f"at line {at}"
        assert gm.deliver(first, address, **how).at == receipt.at


@pytest.mark.few(1)
def test_readers_see_one_generation_at_a_time(shop: Shop, tmp_path: Path) -> None:
    """While results are replaced: each answer is complete and of one night, and later answers are of later nights."""
    write(tmp_path / "in", 0, ROWS)
    made = gm.to(shop.address("scores"), key="id")
    job(tmp_path, 1, deliver=[made]).run()
    seen: list[set[str]] = []
    failed: list[BaseException] = []
    over = threading.Event()

    def read() -> None:
        try:
            with gm.lookup(shop.address("scores")) as lookup:
                last = False
                while not last:
                    last = over.is_set()
                    seen.append({"none" if row is None else row["label"] for row in lookup.get_many(range(ROWS))})
        except BaseException as e:
            failed.append(e)

    reader = threading.Thread(target=read)
    reader.start()
    for night in range(2, 6):
        job(tmp_path, night, deliver=[made]).run(restart=True)
    over.set()
    reader.join()
    if failed:
        raise failed[0]
    assert all(len(labels) == 1 for labels in seen)
    nights = [int(label[1:]) for labels in seen for label in labels]
    assert nights == sorted(nights) and nights[-1] == 5


@pytest.mark.few(2)
def test_columns_that_do_not_fit_are_told_before_scoring(shop: Shop, tmp_path: Path) -> None:
    """A new column, unless the delivery may add it; and one of another type."""
    if deliveries.STORES.get(shop.name).keyed:
        pytest.skip("a key-value store has no columns")
    write(tmp_path / "in", 0, 10)
    made = gm.to(shop.address("scores"), key="id")
    job(tmp_path, deliver=[made]).run()

    def more(batch: dict[str, Any]) -> dict[str, Any]:
        return {"y": batch["x"], "label": ["a"] * len(batch["x"]), "v": vectors(batch), "certainty": batch["x"]}

    def other(batch: dict[str, Any]) -> dict[str, Any]:
        return {"y": [f"text {x}" for x in batch["x"]], "label": ["a"] * len(batch["x"]), "v": vectors(batch)}

    def with_(fn: Any, name: str, to: gm.Delivery) -> gm.Job:
        return gm.Job(str(tmp_path / "in"), fn, gm.sink(str(tmp_path / name), keep="id"), workers=0, deliver=[to])

    with pytest.raises(gm.BadJob, match="has no column 'certainty', which the result has"):
        with_(more, "more", made).run()
    with pytest.raises(gm.BadJob, match=r"column 'y' is .* which does not hold the result's string"):
        with_(other, "other", made).run()
    assert shop.seen("scores") == wanted(range(10))
    assert not list((tmp_path / "more").glob("*.parquet"))
    with_(more, "more", replace(made, evolve=True)).run()
    assert shop.seen("scores")[4] == {"id": 4, "y": 1.0, "label": "a", "v": UNIT[0].tolist(), "certainty": 1.0}


@pytest.mark.few(2)
def test_a_second_sink_that_does_not_fit(shop: Shop, first: str, tmp_path: Path) -> None:
    """Its rows are found by another column, or a column is of another type: told before anything is scored."""
    made = gm.to(shop.address("scores"), mode="upsert", key="id")
    gm.deliver(first, made)
    write(tmp_path / "in", 0, 10)
    names = pa.table({"name": ["1", "b"], "x": [0.5, 1.5]})
    pq.write_table(names, tmp_path / "names.parquet")

    def other(batch: dict[str, Any]) -> dict[str, Any]:
        return {"y": [f"text {x}" for x in batch["x"]], "label": ["a"] * len(batch["x"]), "v": vectors(batch)}

    second = gm.sink(str(tmp_path / "names"), keep="name")
    by_name = gm.Job(str(tmp_path / "names.parquet"), scored, second, workers=0, deliver=[replace(made, key=("name",))])
    with pytest.raises(
        gm.BadJob,
        match=r"has no column 'name'|rows are found by id there, and these have the key name|that the result lacks",
    ):
        by_name.run()
    third = gm.sink(str(tmp_path / "types"), keep="id")
    with pytest.raises(gm.BadJob, match=r"column 'y' is .*(which does not hold the result's string|double there, and)"):
        gm.Job(str(tmp_path / "in"), other, third, workers=0, deliver=[made]).run()
    assert not [*(tmp_path / "names").glob("*.parquet"), *(tmp_path / "types").glob("*.parquet")]
    assert shop.seen("scores") == wanted(range(ROWS))


def test_a_sink_that_is_a_store(shop: Shop, tmp_path: Path) -> None:
    """Is short for a folder and one delivery, which status, verify and read find by the same name."""
    write(tmp_path / "in", 0, 10)
    sink = gm.sink(shop.address("scores"), keep="id", options={"key": "id"}, storage=shop.staging(tmp_path))
    made = job(tmp_path, sink=sink)
    report = made.run()
    assert shop.seen("scores") == wanted(range(10)) and report.deliveries[0].rows == 10
    assert made.run().state == "nothing to do"
    assert gm.verify(made).ok and gm.status(made)["deliveries"][0]["state"] == "delivered"


@pytest.mark.few(4)
def test_delivered_otherwise(shop: Shop, first: str, tmp_path: Path) -> None:
    """The same result by another key is delivered again; so is that of a copy of the sink that went its own way."""
    address = shop.address("scores")
    receipt = gm.deliver(first, address, key="id")
    again = gm.deliver(first, address, key=["label", "id"])
    assert again.key == ("label", "id") and receipt.key == ("id",)
    with gm.lookup(address) as lookup:
        assert lookup.get(("n1", 3)) == wanted([3])[3]
    for copy, times in ((tmp_path / "a", 3), (tmp_path / "b", 4)):
        shutil.copytree(first, copy / "out")
        write(copy / "in", 0, 10)
        job(copy, times).run(restart=True)
        gm.deliver(str(copy / "out"), address, key="id")
        assert shop.seen("scores") == wanted(range(10), times)


def test_a_publication_of_the_same_result(shop: Shop, first: str) -> None:
    """One that gave up an unfinished run is the same result, and not delivered again."""
    from gristmill.commit import publish

    receipt = gm.deliver(first, shop.address("scores"), key="id")
    publish.give_up(published(first))
    assert load(first, 2) is not None
    assert gm.deliver(first, shop.address("scores"), key="id").at == receipt.at


@pytest.mark.parametrize(
    ("mode", "steps"),
    [
        ("upsert", 4),
        ("append", 2),
        pytest.param("upsert", 30, marks=pytest.mark.long),
        pytest.param("append", 20, marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("there", [True, False])
@pytest.mark.few(10)
def test_two_sinks_at_once(shop: Shop, first: str, tmp_path: Path, mode: Any, steps: int, there: bool) -> None:
    """One delivers while another one stands still at any of its steps: the rows of both are there afterwards, and those
    that were there before, or one is told that it has to run again.
    """
    if mode not in deliveries.STORES.get(shop.name).modes:
        return
    made = gm.to(shop.address("scores"), mode=mode, key="id")
    steps = max(2, steps // 5) if shop.name in shops.SLOW else steps
    for name, (low, high) in {"other": (ROWS, ROWS + 10), "before": (100, 110)}.items():
        write(tmp_path / name / "in", low, high)
        job(tmp_path / name, 7).run()
    sinks = {name: published(str(tmp_path / name / "out")) for name in ("other", "before")}
    one, other = published(first), sinks["other"]
    rows = {**wanted(range(ROWS)), **wanted(range(ROWS, ROWS + 10), 7), **(wanted(range(100, 110), 7) if there else {})}

    def begin() -> None:
        shop.clear("scores")
        if there:
            deliveries.deliver(sinks["before"], made)

    begin()
    count = lines(lambda: deliveries.deliver(one, made))
    for at in range(count // steps // 2, count, max(1, count // steps)):
        begin()
        failed = interleaved(lambda: deliveries.deliver(one, made), at, lambda: deliveries.deliver(other, made))
        for e in failed:
            assert isinstance(e, gm.GristmillError) and "run again" in str(e), f"at line {at}: {e!r}"
        if failed:
            deliveries.deliver(one, made)
            deliveries.deliver(other, made)
        assert shop.seen("scores") == rows, f"at line {at}, {failed}"
