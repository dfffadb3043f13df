"""Sinks that are a store to which rows are appended: the folder of their runs alone knows which are there. It is found
again, or missed before anything is appended twice.
"""

from __future__ import annotations

import os
import re
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import shops

import gristmill as gm
from gristmill.driver import run

CALLS: list[int] = []
RETURNS = {"y": "int64", "v": "float32[2]"}


def scored(batch: dict[str, Any]) -> dict[str, Any]:
    """The model, which counts its rows."""
    CALLS.extend(batch["id"].tolist())
    return {"y": batch["id"] * 2, "v": [[1.0, float(i)] for i in batch["id"]]}


def job(folder: Path, uri: str, *ids: int, **storage: str) -> gm.Job:
    """The rows of a folder, with a file of these ids; what is new is appended."""
    (folder / "in").mkdir(exist_ok=True)
    pq.write_table(pa.table({"id": pa.array(ids, pa.int64())}), folder / "in" / f"{ids[0]}.parquet")
    sink = gm.sink(uri, keep=["id"], options={"mode": "append"}, storage=storage)
    return gm.Job(str(folder / "in"), gm.model(scored, returns=RETURNS), sink, workers=0, on_new_files="append")


def rows(store: str, file: Path) -> list[int]:
    """The ids in the table labels of a file."""
    if store == "sqlite":
        with closing(sqlite3.connect(file)) as db:
            return sorted(row[0] for row in db.execute("SELECT id FROM labels"))
    import duckdb

    with duckdb.connect(str(file), read_only=True) as client:
        return sorted(row[0] for row in client.execute("SELECT id FROM labels").fetchall())


def hidden(folder: Path) -> list[str]:
    """The folders beside a file."""
    return sorted(path.name for path in folder.glob(".*.gristmill"))


@pytest.mark.parametrize("store", ["sqlite", "duckdb"])
def test_a_table_has_one_folder_however_it_is_spelled(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In other letters, with its schema, by a link to the file or to the file's folder: rows are appended once."""
    monkeypatch.chdir(tmp_path)
    os.symlink("real", "linked")
    Path("real").mkdir()
    os.symlink("real/r.db", "current")
    spellings = ["real/r.db#labels", "real/r.db#Labels", "current#labels", "linked/r.db#LABELS"]
    spellings += ["real/r.db#main.labels", "current#Main.Labels"] * (store == "duckdb")
    for night, uri in enumerate(spellings, 1):
        job(tmp_path, f"{store}://{uri}", night).run()
        assert rows(store, Path("real/r.db")) == list(range(1, night + 1))
    assert hidden(tmp_path) == [] and hidden(tmp_path / "real") == [".r.db-labels.gristmill"]


@pytest.mark.parametrize("name", [".r.db-Labels.gristmill", ".current-labels.gristmill"])
def test_a_folder_that_an_earlier_version_named(name: str, tmp_path: Path) -> None:
    """By the address as it was spelled then: the runs go on there."""
    job(tmp_path, f"sqlite://{tmp_path}/r.db#labels", 1).run()
    os.symlink("r.db", tmp_path / "current")
    (tmp_path / ".r.db-labels.gristmill").rename(tmp_path / name)
    file = "current" if name.startswith(".current") else "r.db"
    job(tmp_path, f"sqlite://{tmp_path}/{file}#labels", 2).run()
    assert rows("sqlite", tmp_path / "r.db") == [1, 2] and hidden(tmp_path) == [name]


@pytest.mark.parametrize("name", ["labels", "Labels"])
def test_a_file_that_is_moved_and_leaves_a_link(name: str, tmp_path: Path) -> None:
    """Its folder stays beside the link, or beside one that leads to that."""
    address = f"sqlite://{tmp_path}/r.db#{name}"
    job(tmp_path, address, 1).run()
    for night, folder in enumerate(("big", "bigger"), 2):
        (tmp_path / folder).mkdir()
        (tmp_path / "r.db").rename(tmp_path / folder / "r.db")
        os.symlink(f"{folder}/r.db", tmp_path / "r.db")
        os.symlink("r.db", tmp_path / f"link{night}")
        job(tmp_path, address if night == 2 else address.replace("r.db", "link2"), night).run()
        if night == 2:
            (tmp_path / "r.db").unlink()
            (tmp_path / "big" / "r.db").rename(tmp_path / "r.db")
    assert rows("sqlite", tmp_path / "bigger" / "r.db") == [1, 2, 3]
    assert hidden(tmp_path) == [".r.db-labels.gristmill"] and not hidden(tmp_path / "big")


# ---------------------------------------------------------------- folders that are lost


@pytest.fixture(params=["sqlite", "duckdb", "postgresql", "delta", "iceberg", "lance"])
def shop(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[shops.Shop]:
    """Each kind of store to which rows are appended, without rows."""
    server = shops.SERVERS.get(request.param)
    with shops.SHOPS[request.param](request.getfixturevalue(server) if server else "", tmp_path) as made:
        yield made


def test_a_folder_that_is_lost(shop: shops.Shop, tmp_path: Path) -> None:
    """It is told before anything is scored, and nothing is appended; brought back, the runs go on."""
    at, staging = shop.address("scores"), shop.staging(tmp_path)
    job(tmp_path, at, 1, 2, **staging).run()
    folder = Path(gm.status(job(tmp_path, at, 1, 2, **staging))["sink"])
    folder.rename(tmp_path / "kept")
    CALLS.clear()
    told = rf"holds 2 rows, .* is lost: {re.escape(str(folder))}; rows are not appended twice: bring it back; or "
    with pytest.raises(gm.BadJob, match=told):
        job(tmp_path, at, 3, **staging).run()
    assert not CALLS and not folder.exists() and sorted(shop.seen("scores") or ()) == [1, 2]
    (tmp_path / "kept").rename(folder)
    job(tmp_path, at, 3, **staging).run()
    assert sorted(shop.seen("scores") or ()) == [1, 2, 3]


@pytest.mark.parametrize("way", ["another folder", "restart", "replace", "emptied"])
def test_ways_out(way: str, tmp_path: Path) -> None:
    """What a person says is meant is done, and later nights go on from there."""
    at, file = f"sqlite://{tmp_path}/r.db#labels", tmp_path / "r.db"
    job(tmp_path, at, 1).run()
    shutil.rmtree(tmp_path / ".r.db-labels.gristmill")
    storage = {"staging": str(tmp_path / "other")} if way == "another folder" else {}
    if way == "replace":
        once = gm.sink(at, keep=["id"])
        gm.Job(f"{tmp_path}/in", gm.model(scored, returns=RETURNS), once, workers=0).run()
    elif way == "emptied":
        with closing(sqlite3.connect(file)) as db, db:
            db.execute("DELETE FROM labels")
    job(tmp_path, at, 2, **storage).run(restart=way == "restart")
    before = [] if way in ("replace", "emptied") else [1]
    assert rows("sqlite", file) == sorted([*before, 1, 2])
    job(tmp_path, at, 3, **storage).run()
    assert rows("sqlite", file) == sorted([*before, 1, 2, 3])


@pytest.mark.parametrize("killed", [True, False], ids=["killed", "away"])
def test_a_restart_that_was_meant_and_did_not_get_there(
    killed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The nights after it bring its rows, as was said, and once they are there a lost folder is refused again."""
    (db := tmp_path / "db").mkdir()
    at, staging, publish = f"sqlite://{db}/r.db#labels", {"staging": f"{tmp_path}/runs"}, run.published
    job(tmp_path, at, 1, **staging).run()
    shutil.rmtree(tmp_path / "runs")

    def stopped(scoring: Any) -> Any:
        if killed:
            raise KeyboardInterrupt
        db.rename(tmp_path / "away")
        db.write_text("")
        return publish(scoring)

    with monkeypatch.context() as late, pytest.raises((KeyboardInterrupt, gm.GristmillError)):
        late.setattr(run, "published", stopped)
        job(tmp_path, at, 2, **staging).run(restart=True)
    if not killed:
        db.unlink()
        (tmp_path / "away").rename(db)
    job(tmp_path, at, 3, **staging).run()
    assert rows("sqlite", db / "r.db") == [1, 1, 2, 3]
    shutil.rmtree(tmp_path / "runs")
    with pytest.raises(gm.BadJob, match="is lost"):
        job(tmp_path, at, 4, **staging).run()


def test_a_restart_that_was_delivered_is_over(tmp_path: Path) -> None:
    """What was said then does not hold once marks of an earlier time are there: which rows are is not known."""
    at = f"sqlite://{tmp_path}/r.db#labels"
    job(tmp_path, at, 1).run()
    with closing(sqlite3.connect(tmp_path / "r.db")) as db:
        marks = db.execute("SELECT * FROM gristmill_marks").fetchall()
    shutil.rmtree(tmp_path / ".r.db-labels.gristmill")
    job(tmp_path, at, 2).run(restart=True)
    with closing(sqlite3.connect(tmp_path / "r.db")) as db, db:
        db.execute("DELETE FROM gristmill_marks")
        db.executemany("INSERT INTO gristmill_marks VALUES (?, ?, ?, ?)", marks)
    for uri in (at, at.replace("#labels", "#Labels")):
        with pytest.raises(gm.BadJob, match=r"holds 3 rows, and no mark of generation 1, which was .* restored\?"):
            job(tmp_path, uri, 3).run()
    job(tmp_path, at, 3).run(restart=True)
    job(tmp_path, at, 4).run()
    assert rows("sqlite", tmp_path / "r.db") == [1, 1, 1, 2, 2, 3, 4]


@pytest.mark.parametrize("name", ["r.db", "renamed.db"])
def test_a_file_that_is_brought_elsewhere_alone(name: str, tmp_path: Path) -> None:
    """Its folder stays behind: what is expected is told, and where it was."""
    job(tmp_path, f"sqlite://{tmp_path}/r.db#labels", 1).run()
    (tmp_path / "two").mkdir()
    shutil.copy(tmp_path / "r.db", tmp_path / "two" / name)
    told = rf"{tmp_path}/two/\.{name}-labels\.gristmill \(it was {tmp_path}/\.r\.db-labels\.gristmill\)"
    with pytest.raises(gm.BadJob, match=told):
        job(tmp_path, f"sqlite://{tmp_path}/two/{name}#labels", 2).run()
    assert rows("sqlite", tmp_path / "two" / name) == [1]


@pytest.mark.parametrize("store", ["sqlite", "duckdb", "lance"])
def test_a_table_that_is_renamed(store: str, tmp_path: Path) -> None:
    """With its address: its folder, which is called by the earlier name, is told; renamed, the runs go on there."""
    at = f"{store}://{tmp_path}/r.db#"
    job(tmp_path, f"{at}labels", 1, 2).run()
    if store == "sqlite":
        with closing(sqlite3.connect(tmp_path / "r.db")) as db:
            db.execute("ALTER TABLE labels RENAME TO renamed")
    elif store == "duckdb":
        import duckdb

        with duckdb.connect(str(tmp_path / "r.db")) as client:
            client.execute("ALTER TABLE labels RENAME TO renamed")
    else:
        (tmp_path / "r.db" / "labels.lance").rename(tmp_path / "r.db" / "renamed.lance")
    before, now = tmp_path / ".r.db-labels.gristmill", tmp_path / ".r.db-renamed.gristmill"
    CALLS.clear()
    with pytest.raises(gm.BadJob, match=rf"holds 2 rows, .* is {before}; .* renamed, give it the name {now}; or "):
        job(tmp_path, f"{at}renamed", 3).run()
    assert not CALLS and hidden(tmp_path) == [before.name]
    before.rename(now)
    job(tmp_path, f"{at}renamed", 3).run()
    with gm.lookup(f"{at}renamed", key="id") as lookup:
        assert [row and row["y"] for row in lookup.get_many([1, 2, 3, 4])] == [2, 4, 6, None]
    job(tmp_path, f"{at}labels", 4).run()  # another table


def test_jobs_that_share_a_table(tmp_path: Path) -> None:
    """Each with its folder, also one beside the file; so may a table have rows that nobody delivered."""
    file = tmp_path / "r.db"
    with closing(sqlite3.connect(file)) as db, db:
        db.execute("CREATE TABLE labels (id INTEGER, y INTEGER, v BLOB)")
        db.execute("INSERT INTO labels VALUES (100, 200, NULL)")
    for night in range(2):
        for number, staging in enumerate(({}, {"staging": f"{tmp_path}/a"}, {"staging": f"{tmp_path}/b"})):
            (folder := tmp_path / str(number)).mkdir(exist_ok=True)
            job(folder, f"sqlite://{file}#labels", 10 * number + night, **staging).run()
    assert rows("sqlite", file) == [0, 1, 10, 11, 20, 21, 100]


def test_jobs_on_two_machines_whose_folders_have_one_path(tmp_path: Path) -> None:
    """Nothing tells that the first one's was not lost: it may be another job's, which is said once."""
    at, runs = f"sqlite://{tmp_path}/r.db#labels", tmp_path / "runs"
    machines = [tmp_path / "one", tmp_path / "two"]

    def night(number: int, ids: int, **run: Any) -> None:
        (folder := machines[number]).mkdir(exist_ok=True)
        if (folder / "runs").exists():
            (folder / "runs").rename(runs)
        try:
            job(folder, at, ids, staging=str(runs)).run(**run)
        finally:
            if runs.exists():
                runs.rename(folder / "runs")

    night(0, 1)
    with pytest.raises(gm.BadJob, match=rf"is lost: {runs}; .* if those are another job's .* or say --restart once"):
        night(1, 11)
    night(1, 11, restart=True)
    for number, ids in ((0, 2), (1, 12), (0, 3)):
        night(number, ids)
    assert rows("sqlite", tmp_path / "r.db") == [1, 2, 3, 11, 12]


def test_staging_folders_that_are_called_as_hidden_ones(shop: shops.Shop, tmp_path: Path) -> None:
    """They are of two jobs all the same."""
    for number in range(2):
        (folder := tmp_path / str(number)).mkdir()
        job(folder, shop.address("scores"), number, staging=f"{tmp_path}/.r{number}.gristmill").run()
    assert sorted(shop.seen("scores") or ()) == [0, 1]


def test_a_spelled_sink_of_this_kind_is_looked_at(tmp_path: Path) -> None:
    """Calls that take the sink's address find the folder as runs do."""
    job(tmp_path, f"sqlite://{tmp_path}/r.db#labels", 1).run()
    assert gm.read(f"sqlite://{tmp_path}/r.db#LABELS").to_table()["id"].to_pylist() == [1]
