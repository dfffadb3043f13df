"""The soak, the fuzz, the races and the readers for some seconds each, as they are run for hours."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


def _run(folder: Path, *arguments: str) -> str:
    path = os.pathsep.join([str(TESTS), *sys.path])
    done = subprocess.run(
        [sys.executable, "-m", "soak", *arguments, "--seed", "smoke", "--folder", str(folder)],
        env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.long
@pytest.mark.leaves_children
def test_a_siege(tmp_path: Path) -> None:
    """A sink is made, added to, begun anew and retried under signals; every row is there once."""
    said = _run(tmp_path, "soak", "--times", "1", "--without", "long")
    assert "0 of" in said and "signals" in said


@pytest.mark.long
def test_some_cases(tmp_path: Path) -> None:
    """Random schemas, files, steps and options: every row ends as the reference says."""
    assert "0 of" in _run(tmp_path, "fuzz", "--times", "25")


@pytest.mark.long
def test_a_race(tmp_path: Path) -> None:
    """Ten drivers at once: one result, and each row's answer from one of them."""
    assert "0 broken" in _run(tmp_path, "races", "--times", "10")


@pytest.mark.long
def test_some_reads(tmp_path: Path) -> None:
    """Readers while a result is replaced see whole results."""
    assert "0 wrong" in _run(tmp_path, "readers", "--times", "200")
