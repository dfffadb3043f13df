"""Memory is bounded by windows, whatever the input."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

COMMAND = [sys.executable, "-m", "gristmill", "apply"]


def peak(command: list[str], cwd: Path) -> int:
    """Sum of the peak resident sets of a command and all its children, in bytes, as the kernel counts them."""
    peaks: dict[int, int] = {}
    process = subprocess.Popen(command, cwd=cwd, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    watched = psutil.Process(process.pid)
    while process.poll() is None:
        try:
            for p in (watched, *watched.children(recursive=True)):
                for line in Path(f"/proc/{p.pid}/status").read_text().splitlines():
                    if line.startswith("VmHWM"):
                        peaks[p.pid] = int(line.split()[1]) * 1024
        except (psutil.Error, OSError):
            pass
        time.sleep(0.01)
    assert process.returncode == 0, process.stderr.read() if process.stderr else ""
    return sum(peaks.values())


@pytest.mark.long
def test_ten_times_the_rows_need_no_more_memory(tmp_path: Path) -> None:
    """Driver and workers together: 10 times the rows, at most 1.3 times the peak (1.0 where nothing else runs): a short
    job may end before each of its processes was looked at.
    """
    (tmp_path / "fns.py").write_text("def f(b):\n    return {'y': b['c0'] * 2 + b['c7']}\n")
    rng = np.random.default_rng(0)
    peaks = []
    for name, groups in (("one", 10), ("ten", 100)):
        columns = {f"c{i}": rng.random(50_000, dtype=np.float32) for i in range(8)}
        table = pa.table(columns)
        with pq.ParquetWriter(tmp_path / f"{name}.parquet", table.schema) as writer:
            for _ in range(groups):
                writer.write_table(table)
        options = ["--fn", "fns:f", "--keep", "c0", "--workers", "2", "--progress", "off"]
        command = [*COMMAND, f"{name}.parquet", f"out-{name}", *options]
        peaks.append(peak(command, tmp_path))
    assert peaks[1] <= 1.3 * peaks[0], (
        f"{peaks[0] / 1e6:.0f} MB for 500,000 rows, {peaks[1] / 1e6:.0f} MB for 5,000,000"
    )
