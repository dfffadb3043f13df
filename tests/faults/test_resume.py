"""What resuming costs: of the input, only what is unfinished is read again."""

from __future__ import annotations

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
    """Of 100 files, all but one scored: the resumed run reads rows of that one; of the others at most the footer."""
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
    sizes = {p.name: p.stat().st_size for p in (quick / "in").iterdir()}
    whole = [name for name, count in read(first).items() if count > sizes[name] // 2]
    assert len(whole) == FILES, "the first run read them all, so that reading is seen here"
    assert [name for name, count in read(again).items() if count > sizes[name] // 2] == [f"{FILES - 1:03d}.parquet"]
    assert len(oracles.ok_ids(root)) == FILES * ROWS
