"""The lowest versions that `make test-lowest` installs."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def lowest(root: Path) -> subprocess.CompletedProcess[str]:
    """The script, run in a copy of what it reads."""
    (root / ".ci").mkdir(exist_ok=True)
    shutil.copy(ROOT / ".ci" / "lowest.py", root / ".ci")
    shutil.copy(ROOT / "constraints.txt", root)
    return subprocess.run([sys.executable, root / ".ci" / "lowest.py"], capture_output=True, text=True)


def test_every_dependency_has_a_lower_bound(tmp_path: Path) -> None:
    """One that has none ends `make test-lowest` by its name; torch is that of the pins."""
    pytest.importorskip("tomllib")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    done = lowest(tmp_path)
    assert done.returncode == 0, done.stderr
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    assert [line for line in done.stdout.splitlines() if line in pins and line.startswith("torch==")]
    text = (ROOT / "pyproject.toml").read_text()
    (tmp_path / "pyproject.toml").write_text(text.replace('"click>=8.1"', '"click<9"'))
    done = lowest(tmp_path)
    assert done.returncode == 1 and "'click<9' of pyproject.toml has no lower bound" in done.stderr


def test_of_several_bounds_the_highest(tmp_path: Path) -> None:
    """A package that two extras name, by numbers and not by letters; what is left out is not there."""
    pytest.importorskip("tomllib")
    (tmp_path / "pyproject.toml").write_text(
        '[project]\nname = "ours"\ndependencies = ["a>=2.9"]\n[project.optional-dependencies]\n'
        'x = ["a>=2.10", "vllm>=1", "b[c]>=1.0; sys_platform == \'win32\'"]\nall = ["ours[x]"]\n'
    )
    assert lowest(tmp_path).stdout.split() == ["a==2.10", "b[c]==1.0"]
