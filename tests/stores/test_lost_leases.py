"""Fault 48: whoever holds a sink can tell that it has lost it, and replacing a file tells whose turn it was."""

from __future__ import annotations

import json
import os
import pydoc
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import gristmill as gm
from gristmill.errors import Interrupted, SinkBusy
from gristmill.files import heartbeat
from gristmill.files.contract import Files
from gristmill.files.disk import LOCAL
from gristmill.files.roots import opened
from s3server import S3Server, Troubled

Place = Callable[[str], tuple[str, Files]]


@pytest.fixture(params=["disk", "store"])
def place(request: pytest.FixtureRequest, tmp_path: Path, server: S3Server) -> Place:
    """A folder on a disk or in a store, by name."""
    if request.param == "disk":
        return lambda name: (str(tmp_path / name), LOCAL)
    return lambda name: opened(f"s3://box/{name}", server.storage())


def test_fault_48_a_lease_is_held_until_its_file_is_gone(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Held while it stands, lost for ever once it was removed, also where a new one stands there."""
    monkeypatch.setattr(heartbeat, "LOOK", 0.0)
    root, files = place("gone")
    with files.lease("gone", f"{root}/_gristmill", lambda _: None) as lease:
        assert lease.held()
        for name in files.names(f"{root}/_gristmill"):
            files.remove(f"{root}/_gristmill/{name}")
        assert not lease.held()
        with files.lease("gone", f"{root}/_gristmill", lambda _: None) as other:
            assert not lease.held()
            assert other.held()


@pytest.mark.long
def test_fault_48_a_lease_that_was_taken_over_is_lost_at_once(server: S3Server) -> None:
    """A driver that stood still (here: whose beats are far apart) sees another's nonce before its next beat, and leaves
    the other's lease alone.
    """
    root, files = opened("s3://box/taken-over", server.storage())
    path = f"{root}/_gristmill/lease.json"
    with files.lease("taken-over", f"{root}/_gristmill", lambda _: None) as lease:
        assert lease.held()
        _, version = files.look(path)
        assert files.swap(path, b'{"nonce": "another"}', version)
        time.sleep(heartbeat.LOOK + 0.1)
        assert not lease.held()
    assert json.loads(files.read(path)) == {"nonce": "another"}


@pytest.mark.parametrize("found", [b"", b"[]", b'{"nonce": "another"}'])
def test_a_lease_that_tells_nobody_is_taken_over_once_it_stands_still(
    found: bytes, server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever wrote it: its age decides, and what is said of it names what it does not tell with a question mark."""
    monkeypatch.setattr(heartbeat, "STALE", 0.5)
    monkeypatch.setattr(heartbeat, "LOOK", 0.1)
    root, files = opened(f"s3://box/strange-{len(found)}", server.storage())
    files.write_new(f"{root}/_gristmill/lease.json", found)
    said: list[str] = []
    with files.lease("strange", f"{root}/_gristmill", said.append) as lease:
        assert lease.held()
    assert said == ["process ? on ?, started ? may hold this sink: checking whether it is alive, for up to a minute"]


@pytest.mark.long
def test_fault_48_a_store_that_is_away_has_given_the_sink_to_nobody(server: S3Server) -> None:
    """While nobody answers the lease counts as held, and asking takes seconds, not minutes."""
    proxy = Troubled(server.address)
    root, files = opened("s3://box/away", server.storage(proxy.address))
    with pytest.raises(Interrupted), files.lease("away", f"{root}/_gristmill", lambda _: None) as lease:
        proxy.close()
        time.sleep(heartbeat.LOOK + 0.1)
        began = time.monotonic()
        assert lease.held()
        assert time.monotonic() - began < 20  # three minutes is what others wait
        assert lease.held()  # not asked again so soon
        began = time.monotonic()
        raise Interrupted("asked to end")
    assert time.monotonic() - began < 20  # nor does the goodbye wait


def test_swap_replaces_what_was_looked_at(place: Place) -> None:
    """The version that stands is replaced, an older one is not."""
    root, files = place("swap")
    path = f"{root}/_SUCCESS"
    assert files.write_new(path, b"one")
    data, version = files.look(path)
    assert data == b"one"
    assert files.swap(path, b"two", version)
    assert not files.swap(path, b"three", version)
    assert files.look(path)[0] == b"two"
    with pytest.raises(FileNotFoundError):
        files.look(f"{root}/none")


@pytest.mark.long
def test_of_many_swaps_of_one_version_one_wins(place: Place) -> None:
    """Eight threads count up together: no step is lost."""
    root, files = place("count")
    path = f"{root}/count"
    assert files.write_new(path, b"0")

    def up(_: Any) -> None:
        for _ in range(5):
            while True:
                data, version = files.look(path)
                # A store takes bytes that are already there for its own attempt's, so that each writes its own.
                if files.swap(path, b"%d %s" % (int(data.split()[0]) + 1, os.urandom(4).hex().encode()), version):
                    break

    racers = [threading.Thread(target=up, args=(n,)) for n in range(8)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join()
    assert int(files.read(path).split()[0]) == 40


def test_a_lease_of_an_earlier_process_of_the_same_number_is_free(server: S3Server) -> None:
    """A container that is started again has the number of the one that was killed (1), on the same kernel: its lease
    is taken at once, as that process is gone.
    """
    root, files = opened("s3://box/again", server.storage())
    folder = f"{root}/_gristmill"
    with files.lease("again", folder, lambda _: None):
        about = json.loads(files.read(f"{folder}/lease.json"))
        assert files.holder(folder) is not None
    files.write_over(f"{folder}/lease.json", json.dumps({**about, "began": 1, "nonce": "of then"}).encode())
    assert files.holder(folder) is None
    begun = time.monotonic()
    with files.lease("again", folder, lambda _: None) as lease:
        assert lease.held() and time.monotonic() - begun < 5


@pytest.mark.long
@pytest.mark.parametrize("how", ["away", "forbidden"])
def test_a_lease_that_could_not_be_removed_is_nobody_s(
    server: S3Server, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that held it goes on, a notebook's: its next run begins at once, and nobody is told that one runs."""
    proxy = Troubled(server.address)
    root, files = opened(f"s3://box/left-{how}", server.storage(proxy.address))
    if how == "forbidden":
        monkeypatch.setattr(type(files), "remove", _refused)
    with pytest.raises(Interrupted), files.lease("left", f"{root}/_gristmill", lambda _: None):
        proxy.close()
        raise Interrupted("stopped")
    root, files = opened(f"s3://box/left-{how}", server.storage())
    assert files.look(f"{root}/_gristmill/lease.json")
    assert heartbeat.beating(files, f"{root}/_gristmill") is None
    said: list[str] = []
    with files.lease("left", f"{root}/_gristmill", said.append) as lease:
        assert lease.held()
        with pytest.raises(SinkBusy), files.lease("left", f"{root}/_gristmill", said.append):
            pass
    assert said == []


def _refused(files: Any, path: str) -> None:
    raise PermissionError("403")


def _doubled(batch: dict[str, Any]) -> dict[str, Any]:
    return {"twice": batch["id"] * 2, "part": batch["id"] % 3}


def _counted(rows: pa.RecordBatchReader, folder: str) -> None:
    Path(folder, "n.txt").write_text(str(sum(batch.num_rows for batch in rows)))


LATE = {
    "joins": ("gristmill.commit.merge.Joining._standing", {"files": 2}),
    "partitions": ("gristmill.commit.merge.Joining._standing", {"partition_by": ["part"], "files": 1}),
    "index": ("gristmill.stores.sinkindex.made", {"index": ["id"]}),
    "settles": ("gristmill.commit.publish._unlisted", {}),
}


@pytest.mark.parametrize("case", LATE)
@pytest.mark.few(2)
def test_a_driver_that_comes_late_removes_nothing_of_what_another_published(
    case: str, server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Suspended (here: held up) where it joins, makes an index or settles, while another run takes its lease, publishes
    and, where the first one had published, makes an index and reduces: all of that stays.
    """
    monkeypatch.setattr(heartbeat, "LOOK", 0.0)
    name, options = LATE[case]
    root, files = opened(f"s3://box/late-{case}", server.storage())
    late: list[str] = []

    def job(**more: Any) -> gm.Job:
        keyed = {**options, **({"index": ["id"]} if more else {})}
        sink = gm.sink(root, keep=["id"], storage=server.storage(), **keyed)
        return gm.Job(pa.table({"id": range(600)}), _doubled, sink, shard_rows=100, workers=0, **more)

    where, _, function = name.rpartition(".")
    plain = pydoc.locate(name)
    assert callable(plain)

    def held_up(*given: Any, **named: Any) -> Any:
        if not late:
            late.append(name)
            files.remove(f"{root}/_gristmill/lease.json")
            job(**({"reduce": _counted} if case == "settles" else {})).run()
        return plain(*given, **named)

    monkeypatch.setattr(pydoc.locate(where), function, held_up)
    if case == "settles":
        job().run()  # it had published before
    else:
        with pytest.raises(SinkBusy):
            job().run()
    found = gm.verify(root, storage=server.storage())
    assert found.ok, found.lines
    assert sorted(gm.read(root, storage=server.storage()).to_table()["id"].to_pylist()) == list(range(600))
