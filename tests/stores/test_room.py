"""Stores that are short of room: what interrupted deliveries left goes before the next one brings anything."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import redis
import shops

import gristmill as gm
from gristmill.stores import delivery as deliveries
from gristmill.stores.qdrant import Collections
from gristmill.stores.redishashes import Hashes


class Killed(BaseException):
    """What nobody catches to tidy up."""


def killed(*_: Any, **__: Any) -> Any:
    """Something that never ends."""
    raise Killed


def scored(batch: dict[str, Any]) -> dict[str, Any]:
    """The model."""
    return {"y": [f"{n:060}" for n in batch["id"]], "v": np.eye(4, dtype=np.float32)[batch["id"] % 4]}


def night(folder: Path, ids: range, *deliver: gm.Delivery, name: str = "out") -> str:
    """A run over these rows; the sink's folder."""
    model, rows = gm.model(scored, returns={"y": "string", "v": "float32[4]"}), pa.table({"id": pa.array(ids)})
    sink = gm.sink(str(folder / name), keep=["id"])
    gm.Job(rows, model, sink, workers=0, deliver=list(deliver)).run(restart=True)
    return str(folder / name)


def test_what_an_earlier_night_had_staged(shop: shops.Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is gone when the next night's first rows come, which may find no room beside it."""
    to = gm.to(shop.address("room"), key="id")
    with closing(deliveries.opened(to)) as store:
        kind, loads = type(store), []
    with monkeypatch.context() as patched:
        patched.setattr(kind, "publish", lambda self, load: loads.append(load) or killed())
        with pytest.raises(Killed):
            night(tmp_path, range(20), to)
    stage, left = kind.stage, []

    def staged(self: Any, load: Any, parts: Any) -> None:
        left.append(dict(self.staged(loads[0])))
        stage(self, load, parts)

    monkeypatch.setattr(kind, "stage", staged)
    night(tmp_path, range(10), to)
    if shop.name == "cassandra":  # of two who deliver, the later one could not tell that what it publishes is gone
        assert left[0]
    else:
        assert left[0] == {}
    assert sorted(shop.seen("room") or ()) == list(range(10))
    shop.clear("room")


@pytest.mark.parametrize("kind", ["lmdb", "usearch", "delta", "lance"])
def test_files_that_were_begun(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a delivery of the same rows that was killed: they go, and the parts that are whole are not staged again."""
    to = gm.to(f"{kind}://{tmp_path}/store", key="id")
    with closing(deliveries.opened(to)) as store:
        owner = type(store)
    with monkeypatch.context() as patched:
        patched.setattr(owner, "publish", killed)
        with pytest.raises(Killed):
            night(tmp_path, range(20), to)
    (whole,) = (path for path in tmp_path.rglob("*") if ".gm_" in str(path) or "/gm_" in str(path) if path.is_file())
    begun = whole.with_name(f"{whole.name}.0123abcd.tmp")
    shutil.copy(whole, begun)
    os.utime(begun, (0, 0))  # by somebody who may be at it, one would stay
    count, seen = owner.count, []

    def counted(self: Any, load: Any) -> int:
        seen.append((begun.exists(), whole.exists()))
        return int(count(self, load))

    monkeypatch.setattr(owner, "count", counted)
    monkeypatch.setattr(owner, "stage", killed)
    gm.deliver(str(tmp_path / "out"), to)
    assert seen[0] == (False, True)
    with gm.lookup(to) as lookup:
        assert None not in lookup.get_many(list(range(20)))


@pytest.mark.parametrize(("kind", "ours"), [("lmdb", "onefile.LOCAL"), ("delta", "lake.settled")])
def test_a_disk_that_is_full(kind: str, ours: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a part is staged: nothing of it stays."""
    sink, to = night(tmp_path, range(20)), gm.to(f"{kind}://{tmp_path}/store", key="id")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    name = f"gristmill.stores.{ours}"
    monkeypatch.setattr(f"{name}.sync" if ours.endswith("LOCAL") else name, full)
    with pytest.raises((gm.RunFailed, OSError), match="No space left"):
        gm.deliver(sink, to)
    assert not [path for path in tmp_path.rglob("*.tmp") if "out" not in path.parts]


@pytest.fixture
def db(redis_server: str) -> Iterator[Any]:
    """A database, empty before and after, of a server with as much memory as it wants in the end."""
    with redis.Redis.from_url(f"{redis_server}/5") as client:
        client.flushdb()
        yield client
        client.config_set("maxmemory", 0)
        client.flushdb()


def states(db: Any) -> list[str]:
    """What Redis has places for."""
    return sorted(state.decode().partition(" ")[0] for state in db.hvals("room:stages"))


def test_a_merge_that_was_killed_in_a_server_short_of_memory(
    db: Any, redis_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its copy of what is published goes before the next one is made, for which there is no memory beside it; also if
    there is none at all. Nor does one stay that there was no memory for.
    """
    to = gm.to(f"{redis_server}/5#room", mode="upsert", key="id")
    empty = db.info("memory")["used_memory"]
    night(tmp_path, range(20_000), to)
    used = db.info("memory")["used_memory"]
    sink = night(tmp_path, range(5), name="other")
    with monkeypatch.context() as patched:
        patched.setattr(Hashes, "take", killed)
        with pytest.raises(Killed):
            gm.deliver(sink, to)
    assert states(db) == ["live", "merging", "staging"]
    db.config_set("maxmemory", db.info("memory")["used_memory"] - 100_000)
    with pytest.raises(gm.RunFailed, match="maxmemory"):
        gm.deliver(sink, to)
    assert states(db) == ["live", "staging"]
    db.config_set("maxmemory", int(used + 1.5 * (used - empty)))
    assert gm.deliver(sink, to).rows == 5 and states(db) == ["live"]


def test_a_merged_collection_of_qdrant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a delivery that failed, or was killed, while it put the points of both results together."""
    to = gm.to(f"qdrant://{tmp_path}/q#room", mode="upsert", key="id")
    night(tmp_path, range(20), to)
    sink = night(tmp_path, range(5), name="other")
    merged, put, found = Collections._merged, Collections._put, []

    def there(self: Any, *given: Any) -> str:
        found.append(len(self.names()))
        return merged(self, *given)

    monkeypatch.setattr(Collections, "_merged", there)
    for error in (Killed, ZeroDivisionError):

        def failing(self: Any, name: str, points: Any, error: type[BaseException] = error) -> None:
            if name.endswith("_m"):
                raise error
            put(self, name, points)

        monkeypatch.setattr(Collections, "_put", failing)
        with pytest.raises(error):
            gm.deliver(sink, to)
    with closing(Collections(to.place)) as store:
        assert len(store.names()) == 2
    monkeypatch.setattr(Collections, "_put", put)
    assert gm.deliver(sink, to).rows == 5 and found == [2, 2, 2]


@pytest.mark.parametrize(("kind", "fails"), [("lmdb", "onefile.locked_folder"), ("delta", "lake.settled")])
def test_a_store_whose_disk_is_full_beside_another(
    kind: str, fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one, which is elsewhere, gets the rows; the message names the store that does not."""

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(f"gristmill.stores.{fails}", full)
    to, other = (gm.to(at, key="id") for at in (f"{kind}://{tmp_path}/store", f"sqlite://{tmp_path}/s.sqlite#room"))
    with pytest.raises(gm.RunFailed, match=rf"^{to.shown}: .*No space left on device;\nthe result is published"):
        night(tmp_path, range(20), to, other)
    with gm.lookup(other) as lookup:
        assert None not in lookup.get_many(list(range(20)))


def test_rows_of_the_sink_that_cannot_be_read(tmp_path: Path) -> None:
    """Are no fault of the store that reads them."""
    sink = night(tmp_path, range(20))
    (part,) = Path(sink).glob("*.parquet")
    for path in Path(sink).rglob("part-*"):
        path.unlink()
    with pytest.raises((gm.GristmillError, OSError)) as told:
        gm.deliver(sink, f"lance://{tmp_path}/store")
    assert part.name in str(told.value) and "lance:" not in str(told.value)
