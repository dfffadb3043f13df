"""Files of stores that were copied or restored in part, and tables that take fewer types than others."""

from __future__ import annotations

import datetime as dt
import os
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pytest

import gristmill as gm

LOOKUP = "import gristmill as gm, sys; print(gm.lookup(sys.argv[1], 'id').get(1999))"


def same(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The rows as they are."""
    return batch


def job(folder: Path, to: gm.Delivery, **more: pa.Array) -> gm.Job:
    """Rows with a vector and a text, and `more` columns."""
    ids = range(2000)
    vectors = pa.array([[float(i), 1.0] for i in ids], pa.list_(pa.float32(), 2))
    rows = pa.table({"id": list(ids), "v": vectors, "text": [f"text {i}" for i in ids], **more})
    model = gm.model(same, batch_format="arrow")
    return gm.Job(rows, model, gm.sink(str(folder / "out")), workers=0, deliver=[to])


@pytest.mark.parametrize(
    ("store", "told"),
    [
        (
            "lmdb",
            r"has [\d,]+ bytes of [\d,]+, as a file that was copied or restored in part: restore it, or remove it",
        ),
        ("usearch", "or lacks its end, as one that was copied or restored in part: .* remove it and deliver again"),
        ("faiss", "or lacks its end, as one that was copied or restored in part: .* remove it and deliver again"),
    ],
)
@pytest.mark.parametrize("left", [0.1, 0.9])
@pytest.mark.few(3)
def test_a_file_of_which_a_part_is_left(store: str, told: str, left: float, tmp_path: Path) -> None:
    """A lookup and the next delivery tell it, and the way out, and no process ends by a signal; without the file all is
    brought again.
    """
    made, path = gm.to(f"{store}://{tmp_path}/s", key="id"), tmp_path / "s"
    job(tmp_path, made).run()
    os.truncate(path, int(path.stat().st_size * left))
    looked = subprocess.run([sys.executable, "-c", LOOKUP, made.to], capture_output=True, text=True, check=False)
    assert looked.returncode == 1 and "copied or restored" in looked.stderr
    for _ in range(2):
        with pytest.raises(gm.BadJob, match=told):
            job(tmp_path, made).run(restart=True)
    path.unlink()
    gm.deliver(str(tmp_path / "out"), made)
    with gm.lookup(made, "id") as lookup:
        assert lookup.get(1999)["text"] == "text 1999"


LITTLE = [(store, left) for store in ("lmdb", "duckdb") for left in (0, 1, 100, 0.5)]


@pytest.mark.parametrize(("store", "left"), [*LITTLE, ("sqlite", 100), ("sqlite", 0.5)])
@pytest.mark.few(4)
def test_a_little_of_a_file(store: str, left: float, tmp_path: Path) -> None:
    """A lookup and a delivery say the same, with exit 2 and the way out; SQLite takes an empty file for a new one."""
    to, path = gm.to(f"{store}://{tmp_path}/s{'' if store == 'lmdb' else '#t'}", key="id"), tmp_path / "s"
    job(tmp_path, to).run()
    os.truncate(path, path.stat().st_size // 2 if left == 0.5 else int(left))
    told = r"(as a file that|or) was copied or restored in part: .* or remove it .*run again, or gristmill deliver"
    with pytest.raises(gm.BadJob, match=told), gm.lookup(to) as lookup:
        lookup.get(1999)
    with pytest.raises(gm.BadJob, match=told):
        gm.deliver(str(tmp_path / "out"), to)


@pytest.mark.parametrize("store", ["lmdb", "usearch", "faiss"])
def test_a_file_that_is_restored_in_place(store: str, tmp_path: Path) -> None:
    """Written over by its backup, of the same inode: an open lookup reads what is there now, as it was delivered."""
    to, path = gm.to(f"{store}://{tmp_path}/s", key="id"), tmp_path / "s"
    job(tmp_path, to, day=pa.array([dt.date(2026, 1, 1)] * 2000)).run()
    kept = shutil.copyfile(path, tmp_path / "kept")
    rows = pa.table({"id": [1, 5000], "v": pa.array([[0.0, 1.0]] * 2, pa.list_(pa.float32(), 2))})
    with gm.lookup(to) as lookup:
        first = lookup.get(1999)
        gm.Job(rows, gm.model(same, batch_format="arrow"), str(tmp_path / "other"), workers=0, deliver=[to]).run()
        assert lookup.get_many([1999, 5000]) == [None, {"id": 5000, "v": [0.0, 1.0]}]
        before = path.stat().st_ino
        shutil.copyfile(kept, path)
        assert path.stat().st_ino == before and lookup.get_many([1999, 5000]) == [first, None]


@pytest.mark.parametrize("mode", ["replace", "append", "upsert"])
@pytest.mark.few(1)
def test_a_strict_table_of_sqlite(mode: str, tmp_path: Path) -> None:
    """A column of bytes there takes no text, which is told before anything is scored; one of texts does."""
    to = gm.to(f"sqlite://{tmp_path}/s.sqlite#scores", mode=mode, key="id")
    for kind in ("BLOB", "TEXT"):
        with closing(sqlite3.connect(tmp_path / "s.sqlite")) as db, db:
            db.execute("DROP TABLE IF EXISTS scores")
            db.execute(f"CREATE TABLE scores (id INTEGER, v BLOB, text {kind}) STRICT")
        if kind == "BLOB":
            with pytest.raises(gm.BadJob, match=r"'text' is BLOB in a STRICT table, .*: make the column TEXT there"):
                job(tmp_path, to).run()
            assert gm.status(str(tmp_path / "out")).get("rows") is None
        else:
            assert job(tmp_path, to).run().deliveries[0].rows == 2000
