"""Files that changed between two runs of an update are cut where they can be cut now."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import csv

import gristmill as gm

SCRIPT = """
import asyncio, gristmill as gm
async def answer(row):
    await asyncio.sleep(0.1)
    with open("calls", "a") as out:
        out.write(f"{row['id']}\\n")
    return {"y": row["id"] * 2}
if __name__ == "__main__":
    import job
    model = gm.model(job.answer, concurrency=8)
    gm.Job(gm.source("in.%s"), model, gm.sink("out", keep=["id", "w"]), update={"key": ["id"]}, workers=1).run()
"""


@pytest.mark.parametrize("form", ["csv", pytest.param("csv.gz", marks=pytest.mark.long)])
def test_a_line_that_became_shorter(form: str, tmp_path: Path) -> None:
    """A run was killed before it committed; then the end of its shard is inside a row: no row is read in two halves."""
    (tmp_path / "job.py").write_text(SCRIPT % form)
    rows = [(1_200_000 + i, 55 if i == 0 else 5) for i in range(200)]

    def write() -> None:
        text = "id,w\n" + "".join(f"{a},{b}\n" for a, b in rows)
        if form == "csv":
            (tmp_path / "in.csv").write_text(text)
        else:
            (tmp_path / "in.csv.gz").write_bytes(gzip.compress(text.encode()))

    write()
    command, calls = [sys.executable, "job.py"], tmp_path / "calls"
    first = subprocess.Popen(command, cwd=tmp_path, start_new_session=True, stderr=subprocess.DEVNULL)
    until = time.monotonic() + 60
    while not calls.exists() or calls.read_text().count("\n") < 80:  # more than the first rows
        assert first.poll() is None and time.monotonic() < until
        time.sleep(0.02)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    rows[0] = (1_200_000, 7)
    rows += [(1_200_200 + i, 6) for i in range(5)]
    write()
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = gm.read(str(tmp_path / "out")).to_table()
    assert sorted(zip(*(found[name].to_pylist() for name in ("id", "w", "y")), strict=True)) == [
        (a, b, 2 * a) for a, b in rows
    ]


def doubled(batch: Any) -> dict[str, Any]:
    """A model."""
    return {"y": batch["id"] * 2}


@pytest.mark.parametrize("form", ["csv", "jsonl.gz"])
@pytest.mark.parametrize("some", [{"limit": 37}, {"sample": 13}, {"where": "id % 3 = 0", "limit": 50}])
def test_what_is_selected_ends_where_it_will(form: str, some: dict[str, Any], tmp_path: Path) -> None:
    """A limit or a sample ends between two rows, wherever files can be cut otherwise; the next night changes them."""
    for night in range(2):
        table = pa.table({"id": range(6000 - night), "w": [f"{i}{'!' * night}" for i in range(6000 - night)]})
        if form == "csv":
            csv.write_csv(table, tmp_path / "in.csv")
        else:
            lines = "".join(f"{json.dumps(row)}\n" for row in table.to_pylist())
            (tmp_path / "in.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
        source = gm.source(str(tmp_path / f"in.{form}"), **some)
        job = gm.Job(
            source, doubled, gm.sink(str(tmp_path / "out"), keep=["id", "w"]), update={"key": ["id"]}, workers=0
        )
        job.run()
        new = gm.Job(source, doubled, gm.sink(str(tmp_path / f"new{night}"), keep=["id", "w"]), workers=0).run()
        assert gm.read(str(tmp_path / "out")).to_table().equals(gm.read(new).to_table())


def test_a_limit_that_ends_later_in_a_file_that_is_as_it_was(tmp_path: Path) -> None:
    """A shard that ended with a limit, inside what can be cut only whole, is read again where the limit ends later."""
    folder = tmp_path / "in"
    folder.mkdir()

    def put(name: str, begin: int, end: int) -> None:
        csv.write_csv(pa.table({"id": range(begin, end)}), folder / name)

    put("b.csv", 10_000, 14_000)
    sink = gm.sink(str(tmp_path / "out"), keep=["id"])
    job = gm.Job(gm.source(str(folder), limit=1500), doubled, sink, update={"key": ["id"]}, workers=0, shard_rows=200)
    for rows in (1000, 700, 900):
        put("a.csv", 0, rows)
        job.run()
        found = gm.read(str(tmp_path / "out")).to_table().column("id").to_pylist()
        assert sorted(found) == [*range(rows), *range(10_000, 11_500 - rows)]
