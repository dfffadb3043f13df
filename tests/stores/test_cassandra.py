"""Cassandra, on a driver that stands for one with a server: what is its own about it."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import gristmill as gm


@pytest.fixture
def keyspace(tmp_path: Path) -> Iterator[str]:
    """An empty keyspace."""
    from cassandra.cluster import keyspace_file

    name = f"c{abs(hash(str(tmp_path))):x}"
    keyspace_file(name).touch()
    yield name
    keyspace_file(name).unlink()


def scored(folder: Path, rows: int, times: int = 1) -> str:
    """A sink with as many rows, and answers of its own."""
    table = pa.table({"id": pa.array(range(rows), pa.int64())})
    gates = {"min_rows": 0}  # three rows may follow five thousand

    def fn(batch: dict[str, Any]) -> dict[str, Any]:
        return {"y": batch["id"] * times}

    gm.apply(table, str(folder), fn=fn, keep="id", workers=0, restart=times > 1, gates=gates)
    return str(folder)


def held(keyspace: str, sql: str) -> list[tuple[object, ...]]:
    """What the tables hold."""
    from cassandra.cluster import keyspace_file

    with closing(sqlite3.connect(keyspace_file(keyspace))) as db:
        return db.execute(sql).fetchall()


@pytest.mark.long
def test_rows_are_in_partitions_of_one_place_and_the_others_are_gone(keyspace: str, tmp_path: Path) -> None:
    """About a thousand rows in each; after a few nights, of two sinks, only what the pointer leads to is left."""
    address = f"scylla://db.test/{keyspace}#scores"
    for times in (1, 2, 3):
        gm.deliver(scored(tmp_path / "a", 5000, times), address, key="id")
    counts = [n for (n,) in held(keyspace, "SELECT count(*) FROM scores GROUP BY at, bucket")]
    assert len(counts) == 5 and min(counts) > 800 and sum(counts) == 5000
    assert len(held(keyspace, "SELECT at FROM scores_places")) == 1
    gm.deliver(scored(tmp_path / "b", 5010, 7), address, key="id", mode="upsert")
    gm.deliver(scored(tmp_path / "a", 3, 4), address, key="id", mode="upsert")
    with gm.lookup(address) as lookup:
        assert [lookup.get(i) for i in (2, 3, 5009)] == [{"id": i, "y": i * t} for i, t in ((2, 4), (3, 7), (5009, 7))]
    assert held(keyspace, "SELECT DISTINCT at FROM scores") == held(keyspace, "SELECT at FROM scores_live")
    assert held(keyspace, "SELECT count(*) FROM scores") == [(5010,)]
    assert len(held(keyspace, "SELECT at FROM scores_places")) == 1


def test_a_password_is_nowhere(keyspace: str, tmp_path: Path) -> None:
    """Neither in the sink nor in what is said of a wrong one."""
    from cassandra.cluster import PASSWORD

    sink, address = scored(tmp_path / "out", 3), f"cassandra://me:{PASSWORD}@db.test:9142/{keyspace}#scores"
    gm.deliver(sink, address, key="id")
    assert gm.lookup(address).get(2) == {"id": 2, "y": 2}
    files = [os.path.join(at, name) for at, _, names in os.walk(sink) for name in names]
    assert files and not [file for file in files if PASSWORD.encode() in Path(file).read_bytes()]
    with pytest.raises(gm.BadJob, match=r"cannot be reached: Provided username me and/or password are") as told:
        options = {"username": "me", "password": "ssh-wrong"}
        gm.deliver(sink, gm.to(f"cassandra://db.test/{keyspace}#scores", key="id", options=options))
    assert "ssh-wrong" not in str(told.value)


@pytest.mark.parametrize(
    ("address", "options", "error", "says"),
    [
        ("cassandra://db.test/{}", {}, gm.BadJob, "give a keyspace and a table, as in cassandra://HOST/shop#scores"),
        ("cassandra://db.test#scores", {}, gm.BadJob, "give a keyspace and a table"),
        ("cassandra://db.test/{}#a-b", {}, gm.BadJob, "letters, digits and underscores, at most 36"),
        ("cassandra://db.test/{}#scores", {"pasword": "x"}, gm.BadJob, "no option 'pasword': did you mean 'password'"),
        ("cassandra://db.test/nowhere#scores", {}, gm.BadJob, "Keyspace 'nowhere' does not exist"),
        ("cassandra://other.test/{}#scores", {}, gm.BadJob, "cannot be reached: .*Unable to connect"),
    ],
)
def test_what_cannot_be_opened_is_told_before_scoring(
    keyspace: str, tmp_path: Path, address: str, options: dict[str, str], error: type[Exception], says: str
) -> None:
    """In one line, with the driver's own words, and without a sink."""
    rows, sink = pa.table({"id": [1]}), gm.sink(str(tmp_path / "out"), keep="id")
    with pytest.raises(error, match=says) as told:
        made = gm.to(address.format(keyspace), key="id", options=options)
        gm.Job(rows, lambda batch: {"y": batch["id"]}, sink, workers=0, deliver=[made]).run()
    assert "\n" not in str(told.value) and not list(tmp_path.glob("out/*.parquet"))


def test_nothing_published_is_told(keyspace: str) -> None:
    """To those who look up."""
    with pytest.raises(gm.BadSource, match="nothing is published there"):
        gm.lookup(f"cassandra://db.test/{keyspace}#scores", key="id").get(1)
