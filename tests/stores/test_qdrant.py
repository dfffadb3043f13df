"""Qdrant over HTTP: its client speaks to a server that has the API, and keeps points in the client's local mode."""

from __future__ import annotations

import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
import pytest
from qdrantserver import KEY, serving

import gristmill as gm
from gristmill.stores.qdrant import Client, Collections

pytestmark = pytest.mark.filterwarnings("ignore:Api key is used with an insecure connection")

ROWS, WIDTH = 600, 8


def as_it_is(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The model answers with what it is given."""
    return batch


def night(folder: Path, label: str, deliver: Any, **options: Any) -> gm.Report:
    """A run whose rows have this label."""
    vectors = np.random.default_rng(3).normal(size=(ROWS, WIDTH)).astype(np.float32)
    rows = pa.table({
        "id": pa.array(range(ROWS)),
        "label": [label] * ROWS,
        "v": pa.array(vectors.tolist(), pa.list_(pa.float32(), WIDTH)),
    })  # fmt: skip
    model = gm.model(as_it_is, batch_format="arrow")
    return gm.Job(rows, model, gm.sink(str(folder / "out")), workers=0, deliver=[deliver]).run(**options)


@pytest.mark.long
def test_over_http(tmp_path: Path) -> None:
    """Delivered, replaced, merged and looked up by a key; what was replaced is removed, and the secret said nowhere."""
    with serving() as (server, seen):
        to = gm.to(f"{server}?api_key={KEY}#near", key="id", index={"v": {"metric": "l2"}})
        night(tmp_path, "first", to)
        with gm.lookup(f"{server}?api_key={KEY}#near") as lookup:
            row = lookup.get(7)
            assert row is not None and row["label"] == "first"
            assert [one["id"] for one in lookup.get_many([599, 0])] == [599, 0]  # type: ignore[index]
            assert lookup.get_many([-1, ROWS]) == [None, None]
            near = lookup.nearest(row["v"], 3)
            assert near[0]["id"] == 7 and near.metric == "l2" and near[0]["_distance"] == pytest.approx(0, abs=1e-5)
            night(tmp_path, "second", to, restart=True)
            assert lookup.nearest(row["v"], 1)[0]["label"] == "second" and lookup.generation == 2
            removed = [line for line in seen if line.startswith("DELETE")]
            assert len(removed) == 1
            upsert = gm.to(f"{server}?api_key={KEY}#near", mode="upsert", key="id", index={"v": {"metric": "l2"}})
            night(tmp_path / "other", "third", upsert)
            assert lookup.get(7)["label"] == "third"  # type: ignore[index]
        assert KEY not in "".join(p.read_text("latin-1") for p in tmp_path.rglob("*") if p.is_file())


def test_what_a_server_says(tmp_path: Path) -> None:
    """A key that does not suffice, a server that is not there, and a name that is a collection: in one line."""
    with serving() as (server, _):
        with pytest.raises(gm.BadJob, match="Qdrant says: Unexpected Response: 403"):
            night(tmp_path, "a", gm.to(f"{server}?api_key=wrong#near", key="id"))
        with (
            gm.lookup(f"{server}?api_key={KEY}#none") as lookup,
            pytest.raises(gm.BadSource, match="nothing is published"),
        ):
            lookup.get(1)
        night(tmp_path / "b", "b", gm.to(f"{server}?api_key={KEY}#near", key="id"))
        there, vectors = "theirs", {"size": WIDTH, "distance": "Cosine"}
        url = server.replace("qdrant", "http", 1)
        assert httpx.put(f"{url}/collections/{there}", json={"vectors": vectors}, headers={"api-key": KEY}).is_success
        with pytest.raises(gm.BadJob, match="is a collection, and the name has to be an alias"):
            gm.deliver(str(tmp_path / "b" / "out"), f"{server}?api_key={KEY}#{there}", key="id")
        at = gm.lookup(f"{server}?api_key={KEY}#near")
    with at, pytest.raises(gm.RunFailed, match="cannot be reached"):
        at.get(1)


@pytest.fixture
def loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> gm.Delivery:
    """A place in which the first night is published, and the second staged. The sink of the first is `copy`."""
    to = gm.to(f"qdrant://{tmp_path}/qdrant#near", key="id")
    night(tmp_path, "first", to)
    shutil.copytree(tmp_path / "out", tmp_path / "copy")
    with monkeypatch.context() as stopped:
        stopped.setattr(Collections, "publish", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            night(tmp_path, "second", to, restart=True)
    return to


def label(to: gm.Delivery) -> Any:
    """That of the rows that are there, all of them."""
    with gm.lookup(to) as lookup:
        (label,) = {row and row["label"] for row in lookup.get_many(list(range(ROWS)))}
        return label


def collections(to: gm.Delivery) -> list[str]:
    """The names of all that are there."""
    with closing(Collections(to.place)) as store:
        return store.names()


def test_a_collection_that_is_wanted_while_it_is_about_to_be_removed(
    loaded: gm.Delivery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who would publish it loads another one."""
    call, first = Client.call, [True]

    def late(self: Client, name: str, *given: Any, **named: Any) -> Any:
        if name == "delete_collection" and first and first.pop():
            gm.deliver(str(tmp_path / "out"), loaded)
            assert label(loaded) == "second"
        return call(self, name, *given, **named)

    monkeypatch.setattr(Client, "call", late)
    gm.deliver(str(tmp_path / "copy"), loaded)
    assert not first and label(loaded) == "second" and len(collections(loaded)) == 1


@pytest.mark.parametrize("mode", ["replace", "upsert"])
def test_a_collection_that_goes_while_it_is_about_to_be_published(
    mode: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether somebody is about to publish the first result of all or a later one: readers see what they saw, and the
    next delivery brings the rows anew.
    """
    to = gm.to(f"qdrant://{tmp_path}/qdrant#near", mode=mode, key="id")
    switched = Collections._switched
    for number, before in enumerate((None, "first")):
        first = [True]

        def late(self: Any, load: Any, *given: Any, first: list[bool] = first) -> bool:
            if first and first.pop():
                with closing(Collections(to.place)) as other:
                    other.drop(load, this=True)
            return switched(self, load, *given)

        monkeypatch.setattr(Collections, "_switched", late)
        with pytest.raises(gm.RunFailed, match="what was staged is not there any more: run again"):
            night(tmp_path, "first" if before is None else "second", to, restart=bool(number))
        if before is None:
            assert not collections(to)
        else:
            assert label(to) == before and len(collections(to)) == 1
        gm.deliver(str(tmp_path / "out"), to)
        assert label(to) == ("first" if before is None else "second") and len(collections(to)) == 1


def test_a_collection_that_is_published_while_it_is_about_to_go(
    loaded: gm.Delivery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever wanted to remove it has said so, and takes its turn too late: it stays."""
    switched, renamed, halves = Collections._switched, Collections._renamed, [0, 1]

    def late(self: Any, load: Any, *given: Any) -> bool:
        done: list[bool] = []

        def too_late(self_: Any, *names: Any) -> bool:
            if halves:
                halves.clear()
                done.append(switched(self, load, *given))
            return renamed(self_, *names)

        monkeypatch.setattr(Collections, "_switched", switched)
        monkeypatch.setattr(Collections, "_renamed", too_late)
        with closing(Collections(loaded.place)) as other:
            other.drop(load, this=True)
        return done[0]

    monkeypatch.setattr(Collections, "_switched", late)
    gm.deliver(str(tmp_path / "out"), loaded)
    assert not halves and label(loaded) == "second" and len(collections(loaded)) == 1
    monkeypatch.undo()
    night(tmp_path, "third", loaded, restart=True)
    assert label(loaded) == "third" and len(collections(loaded)) == 1
