"""What resuming costs: of the input, only what is unfinished is read again."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import oracles
import pyarrow as pa
import pyarrow.parquet as pq
from apart import Apart

FILES, ROWS = 100, 10_000


def read(log: Path) -> dict[str, int]:
    """Bytes read by file name."""
    found: dict[str, int] = {}
    for line in log.read_text().splitlines():
        path, size = line.rsplit(" ", 1)
        found[Path(path).name] = found.get(Path(path).name, 0) + int(size)
    return found


def test_a_job_that_is_99_percent_done_reads_the_last_percent(quick: Path, apart: Apart) -> None:
    """Of 100 files, all but one scored: the resumed run opens that one and none of the others, not even its footer."""
    (quick / "in").mkdir()
    for n in range(FILES):
        ids = np.arange(n * ROWS, (n + 1) * ROWS)
        x = np.random.default_rng(n).random(ROWS)
        pq.write_table(pa.table({"id": ids, "x": x, "z": x[::-1]}), quick / "in" / f"{n:03d}.parquet")
    root = str(quick / "out")
    arguments = {
        "source": f"counted://{quick / 'in'}", "sink": root, "fn": "scored", "workers": 0, "shard_rows": ROWS,
        "batch_rows": ROWS,
    }  # fmt: skip
    harm = {"at": 0, "kind": "kill", "ops": ["link"], "path": f"{FILES - 1:07d}.json"}
    first, again = quick / "first", quick / "again"
    killed = apart.run("counted:run", log=str(first), journal=str(quick / "journal"), harm=harm, **arguments)
    assert killed.code == -9, killed.printed
    resumed = apart.run("counted:run", log=str(again), **arguments)
    assert resumed.code == 0, resumed.printed
    assert len(read(first)) == FILES, "the first run read them all, so that reading is seen here"
    assert list(read(again)) == [f"{FILES - 1:03d}.parquet"]
    assert len(oracles.ok_ids(root)) == FILES * ROWS


def test_a_file_rewritten_under_its_old_time_is_looked_at_again(quick: Path, apart: Apart) -> None:
    """Same size, same modification time, other rows in other groups: what the plan knew of it is not trusted."""
    (quick / "in").mkdir()
    path = quick / "in" / "a.parquet"
    rows = pa.table({"id": np.arange(1000), "x": np.linspace(0, 1, 1000)})

    def write(first: int) -> None:
        plain = {"compression": "none", "use_dictionary": False, "write_statistics": False}
        with pq.ParquetWriter(path, rows.schema, **plain) as writer:
            writer.write_table(rows[:first])
            writer.write_table(rows[first:])

    write(500)
    root = str(quick / "out")
    assert apart.run("jobs:run", source=str(path), sink=root, fn="scored", workers=0).code == 0
    before = path.stat()
    write(498)
    assert path.stat().st_size == before.st_size, "the two layouts are chosen to be of one size"
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    again = apart.run("jobs:run", source=str(path), sink=root, fn="scored", workers=0)
    assert again.code == 4, again.printed
    assert "a.parquet" in again.printed
