"""The modules of this folder can be imported by name, here and in workers."""

from __future__ import annotations

import fcntl
import gc
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from children import below, is_alive, is_kept

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def nothing_left_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No worker outlives its map, and no large value stays on disk."""
    monkeypatch.setenv("GRISTMILL_CACHE", str(tmp_path / "cache"))
    before = {process.pid for process in below()}
    yield
    left = [process for process in below() if process.pid not in before and not is_kept(process)]
    _, alive = psutil.wait_procs(left, 3)
    assert not [p for p in alive if is_alive(p)]
    deadline = time.monotonic() + 3
    while (folders := _abandoned()) and time.monotonic() < deadline:
        gc.collect()  # of an exception that a test has caught: its frames hold the map
        time.sleep(0.05)
    assert not folders


def _abandoned() -> list[str]:
    """Folders of large values that no process holds, or this one: those of tests beside it are held by theirs."""
    mine = {str(Path(file.path).parent) for file in psutil.Process().open_files()}
    found = [str(path) for path in Path("/dev/shm").glob("gristmill-map-*")]
    return [path for path in found if path in mine or _free(Path(path, "lock"))]


def _free(lock: Path) -> bool:
    try:
        with lock.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except FileNotFoundError:  # just made, or just removed
        return False
    return True
