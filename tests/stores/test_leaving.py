"""Fault 70: a run whose store is away is out soon after it was asked to end, with the right exit code."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gristmill.files.roots import opened
from s3server import S3Server, Troubled

RUN = """
import sys, time
import gristmill as gm

def slow(batch):
    time.sleep(0.2)
    return {"twice": batch["id"] * 2}

storage = {"access_key": "AKIAME", "secret_key": "hu/sh+word", "endpoint_override": sys.argv[2], "scheme": "http"}
job = gm.Job(sys.argv[1], slow, gm.sink(sys.argv[3], storage=storage), shard_rows=50, workers=int(sys.argv[4]))
try:
    job.run()
except gm.Interrupted as e:
    sys.exit(e.exit_code)
"""

LAST = """
import contextlib, sys, threading, time
import gristmill as gm
from gristmill.files.roots import opened

storage = {"access_key": "AKIAME", "secret_key": "hu/sh+word", "endpoint_override": sys.argv[1], "scheme": "http"}
root, files = opened("s3://box/none", storage)

def asks():
    while True:
        with contextlib.suppress(OSError):
            files.look(root + "/none")

class Slow:
    def __del__(self, sleep=time.sleep):
        sleep(0.3)  # within the end of the interpreter

kept = Slow()
for _ in range(16):
    threading.Thread(target=asks, daemon=True).start()
time.sleep(0.5)
"""


def left(server: S3Server, folder: Path, workers: int, kind: str, signals: int) -> tuple[int, float, str]:
    """Exit code, seconds to leave and words of a run that is asked to end so many times while the store is away."""
    pq.write_table(pa.table({"id": np.arange(6000)}), folder / "a.parquet")
    proxy = Troubled(server.address, kinds=(kind,))
    (folder / "run.py").write_text(RUN)
    command = [sys.executable, str(folder / "run.py"), str(folder / "a.parquet"), proxy.address]
    command += [f"s3://box/{folder.name}", str(workers)]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    root, files = opened(f"s3://box/{folder.name}", server.storage())
    try:
        while not any("/receipts/" in name for name in files.below(root, "none")):
            assert run.poll() is None
            time.sleep(0.1)
        proxy.every = 1  # from here on nobody answers
        time.sleep(2.0)
        asked = time.monotonic()
        for _ in range(signals):
            run.send_signal(signal.SIGTERM)
            time.sleep(1.0)
        said = run.communicate(timeout=60)[0]
        return run.returncode, time.monotonic() - asked, said
    finally:
        run.kill()
        proxy.close()


@pytest.mark.long
@pytest.mark.parametrize(("workers", "kind"), [(2, "silent"), (2, "503"), (0, "silent")])
def test_fault_70_a_run_leaves_a_store_that_is_away(server: S3Server, tmp_path: Path, workers: int, kind: str) -> None:
    """One SIGTERM: out within 20 s with 143, whether the store refuses or says nothing at all."""
    code, seconds, said = left(server, tmp_path, workers, kind, 1)
    assert code == 143, said
    assert seconds < 20


@pytest.mark.long
def test_fault_70_a_second_signal_ends_it_at_once(server: S3Server, tmp_path: Path) -> None:
    """Also where the driver itself waits for the store, in the goodbye of its lease."""
    code, seconds, said = left(server, tmp_path, 2, "silent", 2)
    assert code == 143, said
    assert seconds < 10


@pytest.mark.long
def test_a_script_ends_as_its_last_request_does(server: S3Server, tmp_path: Path) -> None:
    """The interpreter ends while others still ask the store: no thread of the store's comes into Python then, which
    aborted one script in twenty-five.
    """
    (tmp_path / "last.py").write_text(LAST)
    began = time.monotonic()
    for _ in range(5):
        command = [sys.executable, str(tmp_path / "last.py"), server.address]
        run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert (run.returncode, run.stderr) == (0, "")
    assert time.monotonic() - began < 40
