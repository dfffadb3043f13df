"""Results that are one file: what is staged for one stays while the file is made, whoever comes meanwhile."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import gristmill as gm
from gristmill.stores import delivery as deliveries
from gristmill.stores import onefile

KINDS = ["lmdb", "usearch", "faiss"]


def scored(batch: dict[str, Any]) -> dict[str, Any]:
    """The model."""
    return {"y": batch["id"] * 2, "v": [[float(n), 1.0] for n in batch["id"]]}


def job(folder: Path, *deliver: gm.Delivery) -> gm.Job:
    """The rows of a folder."""
    model, sink = gm.model(scored, returns={"y": "int64", "v": "float32[2]"}), gm.sink(f"{folder}/out", keep=["id"])
    return gm.Job(f"{folder}/in", model, sink, workers=0, deliver=list(deliver))


def write(folder: Path, name: str, ids: range) -> None:
    """A file of the source."""
    (folder / "in").mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"id": list(ids)}), folder / "in" / f"{name}.parquet")


def seen(to: gm.Delivery, ids: range) -> int:
    """How many of these rows are there."""
    with gm.lookup(to) as lookup:
        return sum(row is not None for row in lookup.get_many(list(ids)))


def meanwhile(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, what: Callable[[], Any], *, after: bool) -> None:
    """Something happens right before a function, or after it, the first time."""
    function, first = getattr(owner, name), [True]

    def late(*given: Any, **named: Any) -> Any:
        now = bool(first and first.pop())
        if now and not after:
            what()
        found = function(*given, **named)
        if now and after:
            what()
        return found

    monkeypatch.setattr(owner, name, late)


def forms(kind: str) -> Any:
    """What builds the file."""
    from gristmill.stores.indexfile import Built
    from gristmill.stores.lmdb import Sorted

    return Sorted if kind == "lmdb" else Built


@pytest.mark.parametrize("mode", ["upsert", "replace"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("step", ["counted", "building"])
def test_another_deliverer_drops_what_is_staged(
    step: str, kind: str, mode: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of the sink, whose result is there already, within the last step of this one: all rows are in the file."""
    to = gm.to(f"{kind}://{tmp_path}/file", mode=mode, key="id")
    write(tmp_path, "a", range(50))
    job(tmp_path, to).run()
    shutil.copytree(tmp_path / "out", tmp_path / "copy")
    write(tmp_path, "b", range(50, 60))
    where = (onefile, "refuse_gone") if step == "counted" else (forms(kind), "build")
    meanwhile(monkeypatch, *where, lambda: gm.deliver(str(tmp_path / "copy"), to), after=step == "counted")
    job(tmp_path, to).run(append=True)
    assert seen(to, range(60)) == 60
    assert not [path.name for path in tmp_path.iterdir() if ".gm_" in path.name]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_staged_is_taken_away_while_the_file_is_made(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By somebody who locks nothing: that is told, the old rows stay, and the next delivery brings the new ones."""
    to = gm.to(f"{kind}://{tmp_path}/file", mode="upsert", key="id")
    write(tmp_path, "a", range(50))
    job(tmp_path, to).run()
    write(tmp_path, "b", range(50, 60))
    job(tmp_path).run(append=True)

    def removed() -> None:
        (staged,) = (path for path in tmp_path.iterdir() if ".gm_" in path.name)
        shutil.rmtree(staged)

    with monkeypatch.context() as patched:
        meanwhile(patched, onefile, "refuse_gone", removed, after=True)
        patched.setattr(deliveries, "ATTEMPTS", 1)
        with pytest.raises(gm.RunFailed, match="not there any more: run again"):
            gm.deliver(str(tmp_path / "out"), to)
    assert seen(to, range(60)) == 50
    gm.deliver(str(tmp_path / "out"), to)
    assert seen(to, range(60)) == 60


def sink(folder: Path, first: int, to: gm.Delivery | None = None) -> str:
    """The folder of a sink with ten rows."""
    write(folder, "a", range(first, first + 10))
    job(folder, *([] if to is None else [to])).run()
    return str(folder / "out")


def by(address: str, metric: str) -> gm.Delivery:
    """An upsert into an index by this metric."""
    return gm.to(address, mode="upsert", key="id", index={"v": {"metric": metric}})


@pytest.mark.parametrize("kind", ["usearch", "faiss"])
def test_two_sinks_by_different_metrics(kind: str, tmp_path: Path) -> None:
    """One file has one: that is told before the rows of one sink are searched by the other's. A sink alone may change
    its own.
    """
    address = f"{kind}://{tmp_path}/file"
    own = sink(tmp_path / "own", 0, by(address, "l2"))
    gm.deliver(own, by(address, "cosine"))
    with pytest.raises(gm.BadJob, match="is an index by cosine with rows of other sinks, and would become one by l2"):
        sink(tmp_path / "other", 10, by(address, "l2"))
    sink(tmp_path / "third", 20, by(address, "cosine"))
    with gm.lookup(address) as lookup:
        assert lookup.nearest([1.0, 1.0], 1).metric == "cosine"
    assert seen(by(address, "cosine"), range(30)) == 20


@pytest.mark.parametrize("kind", ["usearch", "faiss", "qdrant"])
def test_another_sink_comes_first_with_another_metric(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After this one has looked: it is refused in its last step."""
    from gristmill.stores.qdrant import Collections

    address = f"{kind}://{tmp_path}/file" + "#near" * (kind == "qdrant")
    own, other = sink(tmp_path / "own", 0), sink(tmp_path / "other", 10)
    with monkeypatch.context() as patched:
        owner = Collections if kind == "qdrant" else onefile.OneFile
        meanwhile(patched, owner, "publish", lambda: gm.deliver(other, by(address, "l2")), after=False)
        with pytest.raises(gm.BadJob, match=r"is an index by l2 with rows of other sinks|has other vectors"):
            gm.deliver(own, by(address, "cosine"))
    assert seen(by(address, "l2"), range(20)) == 10


def _staging(folder: Path) -> list[int]:
    """The permissions of staging places."""
    return [path.stat().st_mode & 0o777 for path in folder.iterdir() if ".gm_" in path.name and path.is_dir()]


@pytest.mark.parametrize("kind", KINDS)
def test_the_file_keeps_its_permissions_and_owner(kind: str, tmp_path: Path) -> None:
    """The next night's file is as private as the one before was made, and so are the rows that are staged for it."""
    to, file = gm.to(f"{kind}://{tmp_path}/file", key="id"), tmp_path / "file"
    write(tmp_path, "a", range(5))
    job(tmp_path, to).run()
    file.chmod(0o600)
    if os.getuid() == 0:
        os.chown(file, 1234, 4321)
    before, inode = file.stat(), file.stat().st_ino
    write(tmp_path, "b", range(5, 9))
    modes: list[int] = []
    with pytest.MonkeyPatch.context() as patched:
        meanwhile(patched, forms(kind), "build", lambda: modes.extend(_staging(tmp_path)), after=False)
        job(tmp_path, to).run(append=True)
    now = file.stat()
    assert (now.st_mode, now.st_uid, now.st_gid) == (before.st_mode, before.st_uid, before.st_gid)
    assert now.st_ino != inode and modes == [0o700]
    assert seen(to, range(9)) == 9
