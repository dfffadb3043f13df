"""SQLite files that others have, or that get another file's name: restored from a backup, made anew, locked."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import gristmill as gm
from gristmill.stores import sqlite


def same(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The model answers with what it is given."""
    return batch


def night(folder: Path, label: str, **options: Any) -> gm.Report:
    """A run of two rows with this label, which replace those of the night before."""
    rows = pa.table({"id": [1, 2], "label": [label] * 2})
    model, to = gm.model(same, batch_format="arrow"), gm.to(f"sqlite://{folder}/shop.sqlite#t", key="id")
    return gm.Job(rows, model, gm.sink(str(folder / "out")), workers=0, deliver=[to]).run(restart=True, **options)


def label(lookup: Any) -> str:
    """What a lookup finds."""
    found: str = lookup.get(1)["label"]
    return found


def restored(folder: Path, backup: Path, *, anew: bool) -> None:
    """The file of a backup takes the place of the one that is there, which is removed first or replaced."""
    for name in ("-wal", "-shm"):
        (folder / f"shop.sqlite{name}").unlink(missing_ok=True)
    if anew:
        (folder / "shop.sqlite").unlink()
        shutil.copy(backup, folder / "shop.sqlite")
    else:
        shutil.copy(backup, folder / "made")
        os.replace(folder / "made", folder / "shop.sqlite")


@pytest.mark.parametrize("anew", [True, False])
def test_a_lookup_of_a_file_that_was_restored(anew: bool, tmp_path: Path) -> None:
    """It finds what is in the file that has the name now, in each thread, and what comes later."""
    night(tmp_path, "first")
    shutil.copy(tmp_path / "shop.sqlite", tmp_path / "backup")
    with gm.lookup(f"sqlite://{tmp_path}/shop.sqlite#t") as lookup:
        found: list[str] = []
        going, seen = threading.Semaphore(0), threading.Semaphore(0)

        def looking() -> None:
            for _ in range(4):
                going.acquire()
                found.append(label(lookup))
                seen.release()

        thread = threading.Thread(target=looking)
        thread.start()
        steps = (
            lambda: None,
            lambda: night(tmp_path, "second"),
            lambda: restored(tmp_path, tmp_path / "backup", anew=anew),
            lambda: night(tmp_path, "third"),
        )
        for number, step in enumerate(steps):
            step()
            going.release()
            seen.acquire()
            assert label(lookup) == found[number] == ("first", "second", "first", "third")[number]
        thread.join()
        os.remove(tmp_path / "shop.sqlite")
        with pytest.raises(gm.BadSource, match="there is no such file"):
            lookup.get(1)


def test_a_file_that_is_replaced_while_it_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is opened once more: nobody keeps the old one for the new one."""
    night(tmp_path, "first")
    shutil.copy(tmp_path / "shop.sqlite", tmp_path / "backup")
    night(tmp_path, "second")
    connected, first = sqlite._connected, [True]

    def late(place: Any, *, write: bool) -> sqlite3.Connection:
        found = connected(place, write=write)
        if not write and first and first.pop():
            restored(tmp_path, tmp_path / "backup", anew=False)
        return found

    monkeypatch.setattr(sqlite, "_connected", late)
    with gm.lookup(f"sqlite://{tmp_path}/shop.sqlite#t") as lookup:
        assert label(lookup) == "first"


def test_a_file_that_is_restored_while_rows_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They do not go to the one that nobody sees any more: that is told, or they are in the one that is seen."""
    night(tmp_path, "first")
    shutil.copy(tmp_path / "shop.sqlite", tmp_path / "backup")
    publish, first = sqlite.Tables.publish, [True]

    def late(self: Any, load: Any) -> None:
        if first and first.pop():
            restored(tmp_path, tmp_path / "backup", anew=False)
        publish(self, load)

    monkeypatch.setattr(sqlite.Tables, "publish", late)
    with contextlib.suppress(gm.RunFailed):
        night(tmp_path, "second")
        with gm.lookup(f"sqlite://{tmp_path}/shop.sqlite#t") as lookup:
            assert label(lookup) == "second"
    gm.deliver(str(tmp_path / "out"), f"sqlite://{tmp_path}/shop.sqlite#t", key="id")
    with gm.lookup(f"sqlite://{tmp_path}/shop.sqlite#t") as lookup:
        assert label(lookup) == "second"


@pytest.fixture
def locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[sqlite3.Connection]:
    """A connection that has the file for itself."""
    monkeypatch.setattr(sqlite, "PATIENCE", 0.3)
    path = tmp_path / "shop.sqlite"
    with contextlib.closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False)) as other:
        other.execute("CREATE TABLE other (a)")
        other.execute("BEGIN EXCLUSIVE")
        other.execute("INSERT INTO other VALUES (1)")
        yield other


def test_a_file_that_is_locked_when_a_night_begins(locked: sqlite3.Connection, tmp_path: Path) -> None:
    """Its rows are scored, and brought once it is free; if it is not, that is exit 1, and the next run brings them."""
    with pytest.raises(gm.RunFailed, match="database is locked"):
        night(tmp_path, "first")
    assert gm.read(str(tmp_path / "out")).to_table().num_rows == 2
    locked.execute("ROLLBACK")
    to = f"sqlite://{tmp_path}/shop.sqlite#t"
    assert gm.deliver(str(tmp_path / "out"), to, key="id").rows == 2
    with gm.lookup(to) as lookup:
        assert label(lookup) == "first"
