"""Where Redis has rows: deliverers that were suspended meanwhile, and results that outgrow the hashes they are in."""

from __future__ import annotations

import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import redis

import gristmill as gm
from gristmill.stores import delivery as deliveries
from gristmill.stores.redis import Server

pytestmark = pytest.mark.usefixtures("db")


@pytest.fixture
def db(redis_server: str) -> Iterator[Any]:
    """A database, empty before and after."""
    with redis.Redis.from_url(f"{redis_server}/4") as client:
        client.flushdb()
        yield client
        client.flushdb()


@pytest.fixture
def address(redis_server: str) -> str:
    """That of a prefix in it."""
    return f"{redis_server}/4#scores"


def twice(batch: dict[str, Any]) -> dict[str, Any]:
    """The model."""
    return {"y": batch["id"] * 2}


def job(folder: Path, *deliver: gm.Delivery) -> gm.Job:
    """The rows of a folder."""
    model, sink = gm.model(twice, returns={"y": "int64"}), gm.sink(str(folder / "out"), keep=["id"])
    return gm.Job(str(folder / "in"), model, sink, workers=0, deliver=list(deliver))


def write(folder: Path, name: str, ids: range) -> None:
    """A file of the source."""
    (folder / "in").mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"id": list(ids)}), folder / "in" / f"{name}.parquet")


def hashes(db: Any) -> list[int]:
    """How many rows are in each hash that readers look into."""
    at, count = db.hmget("scores", "at", "buckets")
    return [db.hlen(f"{at.decode()}:{n}") for n in range(int(count))]


def seen(address: str, ids: range) -> int:
    """How many of these rows readers find, each with its own value."""
    with gm.lookup(address) as lookup:
        return sum(
            row is not None and row["y"] == 2 * n for n, row in zip(ids, lookup.get_many(list(ids)), strict=True)
        )


def kept(db: Any) -> set[str]:
    """Keys that stay for good, but for those of hashes that readers look into."""
    live = db.hget("scores", "at").decode()
    return {key.decode() for key in db.scan_iter() if db.ttl(key) == -1 and not key.decode().startswith(f"{live}:")}


def late(monkeypatch: pytest.MonkeyPatch, name: str, meanwhile: Callable[[], Any]) -> None:
    """The first call of a method is suspended while something happens."""
    method, first = getattr(Server, name), [True]

    def suspended(self: Server, *given: Any, **named: Any) -> Any:
        if first and first.pop():
            meanwhile()
        return method(self, *given, **named)

    monkeypatch.setattr(Server, name, suspended)


def test_one_that_is_suspended_before_it_merges(
    db: Any, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one delivers the same result: readers see all of it from then on, and nothing else is left."""
    to = gm.to(address, mode="upsert", key="id")
    write(tmp_path / "other", "a", range(1000, 1300))
    job(tmp_path / "other", to).run()
    write(tmp_path, "a", range(500))
    job(tmp_path).run()
    shutil.copytree(tmp_path / "out", tmp_path / "copy")
    found: list[int] = []

    def copied() -> None:
        gm.deliver(str(tmp_path / "copy"), to)
        found.append(seen(address, range(1300)))

    late(monkeypatch, "_merged", copied)
    each = redis.client.Pipeline.execute

    def looked(self: Any, *given: Any, **named: Any) -> Any:
        said = each(self, *given, **named)
        if found:
            found.append(sum(hashes(db)))
        return said

    monkeypatch.setattr(redis.client.Pipeline, "execute", looked)
    assert gm.deliver(str(tmp_path / "out"), to).rows == 500
    assert set(found) == {800} and seen(address, range(1300)) == 800
    assert kept(db) == {"scores", "scores:stages"} and db.hlen("scores:stages") == 1


def test_a_place_that_is_published_while_it_is_about_to_be_removed(
    db: Any, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows stay: whoever wanted to remove it looks once more, in the same step in which that would be decided."""
    to = gm.to(address, key="id")
    write(tmp_path, "a", range(500))
    job(tmp_path, to).run()
    shutil.copytree(tmp_path / "out", tmp_path / "copy")
    write(tmp_path, "b", range(500, 600))
    job(tmp_path).run(append=True)
    with closing(deliveries.opened(to)) as store, monkeypatch.context() as stopped:
        stopped.setattr(type(store), "publish", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            gm.deliver(str(tmp_path / "out"), to)
    late(monkeypatch, "_remove", lambda: gm.deliver(str(tmp_path / "out"), to))
    gm.deliver(str(tmp_path / "copy"), to)
    assert seen(address, range(600)) == 600 and sum(hashes(db)) == 600
    assert kept(db) == {"scores", "scores:stages"}


def test_a_place_that_is_going_is_not_published(
    db: Any, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that another deliverer had begun to remove when it was stopped: the rows are brought anew."""
    to = gm.to(address, key="id")
    write(tmp_path, "a", range(500))
    job(tmp_path).run()
    with monkeypatch.context() as stopped:

        def going(self: Any, load: Any) -> None:
            stages = db.hgetall("scores:stages")
            (place,) = stages
            db.hset("scores:stages", place, b"void " + stages[place].partition(b" ")[2])
            stopped.undo()
            self.publish(load)

        stopped.setattr(Server, "publish", going)
        with pytest.raises(gm.RunFailed, match="what was staged is not there any more: run again"):
            gm.deliver(str(tmp_path / "out"), to)
    assert db.hget("scores", "at") is None
    assert gm.deliver(str(tmp_path / "out"), to).rows == seen(address, range(500)) == 500
    assert kept(db) == {"scores", "scores:stages"} and db.hlen("scores:stages") == 1


def test_rows_that_come_after_their_place_was_removed(
    db: Any, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are brought once more, and leave nothing behind."""
    to = gm.to(address, key="id")
    write(tmp_path, "a", range(500))
    job(tmp_path).run()
    begin, first = Server._begin, [True]

    def removed(self: Any, load: Any) -> Any:
        there = begin(self, load)
        if first and first.pop():
            self.drop(load, this=True)
        return there

    monkeypatch.setattr(Server, "_begin", removed)
    assert gm.deliver(str(tmp_path / "out"), to).rows == seen(address, range(500)) == 500
    assert kept(db) == {"scores", "scores:stages"}


@pytest.mark.parametrize("first", [10, 1000])
def test_rows_that_outgrow_their_hashes(first: int, db: Any, address: str, tmp_path: Path) -> None:
    """There are more of them then: each has about as many rows as was meant, whatever the first night brought."""
    to = gm.to(address, mode="upsert", key="id")
    write(tmp_path, "a", range(first))
    job(tmp_path, to).run()
    assert len(hashes(db)) == max(1, first // 100)
    for night, more in enumerate((4000, 10, 300)):
        write(tmp_path, f"b{night}", range(first, first + more))
        job(tmp_path, to).run(append=True)
        first += more
        assert sum(hashes(db)) == first == seen(address, range(first)) and max(hashes(db)) < 250
    write(tmp_path, "c", range(100))
    gm.deliver(str(tmp_path / "out"), gm.to(address, key="id"))
    assert seen(address, range(first)) == first


def test_hashes_that_an_earlier_delivery_made_far_too_large(db: Any, address: str, tmp_path: Path) -> None:
    """All rows are in one: the next delivery has them in as many as there should be, and they are right."""
    to = gm.to(address, mode="upsert", key="id")
    write(tmp_path, "a", range(3000))
    job(tmp_path, to).run()
    at, count = db.hmget("scores", "at", "buckets")
    rows = {key: row for n in range(int(count)) for key, row in db.hgetall(f"{at.decode()}:{n}").items()}
    place = at.decode().split(":")[1]
    db.delete(*(f"{at.decode()}:{n}" for n in range(int(count))))
    db.hset(f"{at.decode()}:0", mapping=rows)
    db.hset("scores", "buckets", 1)
    db.hset("scores:stages", place, "live 1")
    write(tmp_path, "b", range(2990, 3010))
    job(tmp_path, to).run(append=True)
    assert seen(address, range(3010)) == sum(hashes(db)) == 3010 and max(hashes(db)) < 250
    assert kept(db) == {"scores", "scores:stages"}


def test_what_an_earlier_version_left(db: Any, address: str, tmp_path: Path) -> None:
    """It noted in another key how many hashes there are, which may be lost: they go, too, after a while if they were
    live; what is called alike stays.
    """
    write(tmp_path, "a", range(500))
    job(tmp_path, gm.to(address, key="id")).run()
    place = db.hget("scores", "at").decode().split(":")[1]
    once = f"{place[:-8]}0badcafe"
    for name, state in ((once, "live"), (f"{once[:-1]}f", "staging")):
        db.hset("scores:stages", name, state)
        db.hset(f"scores:{name}:r:3", "3", "x")
        db.hset(f"scores:{name}:m:4", "4", "x")
    db.hset(f"theirs:{once}:r:3", "3", "x")
    write(tmp_path, "b", range(500, 600))
    job(tmp_path, gm.to(address, key="id")).run(append=True)
    assert kept(db) == {"scores", "scores:stages", f"theirs:{once}:r:3"}
    assert {n for n in (3, 4) if db.ttl(f"scores:{once}:{'r' if n == 3 else 'm'}:{n}") > 0} == {3, 4}
    assert not db.exists(f"scores:{once[:-1]}f:r:3") and db.hlen("scores:stages") == 1


def test_a_pointer_that_is_renamed_keeps_its_rows(db: Any, address: str, tmp_path: Path) -> None:
    """Later nights bring theirs beside them, and remove only those; renamed back, they are as any others."""
    to = gm.to(address, key="id")
    write(tmp_path, "a", range(500))
    job(tmp_path, to).run()
    db.rename("scores", "scores_old")
    for night in range(1, 3):
        write(tmp_path, f"b{night}", range(500 * night, 500 * night + 100))
        job(tmp_path, to).run(append=True)
        assert seen(address, range(2000)) == sum(hashes(db)) == 500 + 100 * night
        assert seen(f"{address}_old", range(2000)) == 500
    at, count = db.hmget("scores_old", "at", "buckets")
    assert {db.ttl(name) for n in range(int(count)) if db.exists(name := f"{at.decode()}:{n}")} == {-1}
    assert len(kept(db) - {f"{at.decode()}:{n}" for n in range(int(count))}) == 3  # both pointers, and the places
    db.rename("scores_old", "scores")
    write(tmp_path, "c", range(1500, 1600))
    job(tmp_path, to).run(append=True)
    assert seen(address, range(2000)) == sum(hashes(db)) == 800
    assert kept(db) == {"scores", "scores:stages"} and db.hlen("scores:stages") == 1


def test_pointers_that_change_places(db: Any, address: str, tmp_path: Path) -> None:
    """Each keeps its rows under whatever name it has now, while others of that name are brought."""
    to = gm.to(address, key="id")
    for night, name in enumerate(("tmp", "bad")):
        write(tmp_path, f"a{night}", range(100 * night, 100 * night + 100))
        job(tmp_path, to).run(append=True)
        db.rename("scores", name)
    db.rename("tmp", "scores")
    for night in range(2, 4):
        write(tmp_path, f"a{night}", range(100 * night, 100 * night + 100))
        job(tmp_path, to).run(append=True)
        assert (
            seen(address, range(900)) == 100 * night + 100
            and seen(address.replace("#scores", "#bad"), range(900)) == 200
        )
        at = db.hget("bad", "at").decode()
        assert {db.ttl(f"{at}:{n}") for n in range(2)} == {-1}
    assert db.hlen("scores:stages") == 2


def test_rows_whose_pointer_is_gone(db: Any, address: str, tmp_path: Path) -> None:
    """It was removed, here or by the name it was given later, or points elsewhere: they go, too."""
    to = gm.to(address, key="id")
    gone = (
        lambda: db.delete("scores"),
        lambda: db.rename("scores", "scores_old"),
        lambda: db.delete("scores_old"),
        lambda: db.rename("scores", "scores_old"),
        lambda: gm.deliver(str(tmp_path / "out"), gm.to(f"{address}_old", key="id")),
    )
    for night, happens in enumerate(gone):
        write(tmp_path, f"a{night}", range(100 * night, 100 * night + 100))
        job(tmp_path, to).run(append=True)
        happens()
    db.delete("scores_old", "scores_old:stages")
    write(tmp_path, "b", range(900, 950))
    job(tmp_path, to).run(append=True)
    assert {key for key in kept(db) if not key.startswith("scores_old:")} == {"scores", "scores:stages"}
    assert db.hlen("scores:stages") == 1 and seen(address, range(1000)) == 550


@pytest.mark.parametrize(("commands", "keys"), [(["+@all", "-scan"], "*"), (["+@all"], "scores*")])
def test_a_user_who_may_not_look_through_all_keys(
    commands: list[str], keys: str, db: Any, address: str, tmp_path: Path
) -> None:
    """Rows that a key may lead to stay, and a warning says so, until they are removed."""
    db.acl_setuser("narrow", enabled=True, nopass=True, commands=commands, keys=[keys])
    to = gm.to(address.replace("//", "//narrow:x@"), key="id")
    try:
        write(tmp_path, "a", range(100))
        assert not job(tmp_path, to).run().notes
        db.rename("scores", "archive")
        at = db.hget("archive", "at").decode()
        told = rf"rows stay there .* may not see all keys, .* remove them .*\({at[:-2]}:\*\)"
        for ids in (range(100, 200), range(200, 300)):
            write(tmp_path, f"a{ids[0]}", ids)
            assert re.search(told, "".join(job(tmp_path, to).run(append=True).notes))
            assert seen(f"{address[:-6]}archive", range(500)) == 100 and db.ttl(f"{at}:0") == -1
        db.delete("archive", *db.keys(f"{at}:*"))
        assert not job(tmp_path, to).run(restart=True).notes
    finally:
        db.acl_deluser("narrow")
    assert kept(db) == {"scores", "scores:stages"} and db.hlen("scores:stages") == 1


def test_a_key_of_others_where_places_are_noted(db: Any, address: str, tmp_path: Path) -> None:
    """Told before anything is scored, whatever its type is; it keeps what is in it."""
    write(tmp_path, "a", range(5))
    for put in (lambda: db.set("scores:stages", "mine"), lambda: db.hset("scores:stages", "to do", "much")):
        db.flushdb()
        put()
        with pytest.raises(gm.BadJob, match="'scores:stages' is a key that gristmill did not write"):
            job(tmp_path, gm.to(address, key="id")).run()
        assert not list(tmp_path.glob("out/*.parquet"))
    assert db.hgetall("scores:stages") == {b"to do": b"much"}


def test_a_server_that_is_busy_is_there_later(db: Any, address: str, tmp_path: Path) -> None:
    """A script of others keeps it: exit 1, so that the run is tried again, and then delivers."""
    write(tmp_path, "a", range(5))
    to = gm.to(address, key="id")
    limit = db.config_get("busy-reply-threshold")["busy-reply-threshold"]
    db.config_set("busy-reply-threshold", 50)
    other = redis.Redis.from_pool(redis.ConnectionPool(**db.connection_pool.connection_kwargs))

    def keep() -> None:
        with pytest.raises(redis.ResponseError), other:
            other.eval("while true do end", 0)

    keeping = threading.Thread(target=keep)
    keeping.start()
    try:
        time.sleep(0.3)
        with pytest.raises(gm.RunFailed, match="busy running a script"):
            job(tmp_path, to).run()
    finally:
        db.script_kill()
        keeping.join()
        db.config_set("busy-reply-threshold", limit)
    job(tmp_path, to).run()
    assert seen(address, range(5)) == 5
