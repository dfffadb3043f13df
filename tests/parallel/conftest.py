"""The modules of this folder can be imported by name, here and in workers."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def nothing_left_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No worker outlives its map, and no large value stays on disk."""
    monkeypatch.setenv("GRISTMILL_CACHE", str(tmp_path / "cache"))
    before = {p.pid for p in psutil.Process().children(recursive=True)}
    shared = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    yield
    left = [p for p in psutil.Process().children(recursive=True) if p.pid not in before]
    _, alive = psutil.wait_procs(left, 3)
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]
    if os.path.isdir("/dev/shm"):
        assert not [n for n in set(os.listdir("/dev/shm")) - shared if n.startswith("gristmill-map-")]
