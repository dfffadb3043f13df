"""`make demo-night`, with few reviews."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import gristmill as gm

DEMO = Path(__file__).parents[2] / "examples" / "nights.py"


@pytest.mark.long
def test_three_nights(tmp_path: Path) -> None:
    """The second night keeps what has not changed, the third is refused and told, and what is published is whole."""
    command = [sys.executable, str(DEMO), "--reviews", "1000"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=240, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert any(line.split()[:2] == ["kept", "900"] for line in ended.stdout.splitlines())
    assert "told of: drift, recovered" in ended.stdout
    scores = gm.read(tmp_path / "demo" / "nights" / "scores").to_table()
    assert sorted(scores["id"].to_pylist()) == list(range(20, 1000))
    assert "<html" in (tmp_path / "demo" / "nights" / "report.html").read_text()
