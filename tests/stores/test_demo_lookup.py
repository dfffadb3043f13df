"""`make demo-lookup`, with few rows."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[2] / "examples" / "lookups.py"


@pytest.mark.parametrize("server", [pytest.param(True, id="with Redis"), pytest.param(False, id="without Redis")])
@pytest.mark.few(1)
def test_each_answer_is_of_one_night(server: bool, tmp_path: Path) -> None:
    """Every reader sees both nights, none a mixture; without a redis-server there is LMDB alone, which is said."""
    if server and shutil.which("redis-server") is None:
        pytest.skip("there is no redis-server here (Debian's package of that name)")
    environment = dict(os.environ) if server else {**os.environ, "PATH": str(tmp_path)}
    command = [sys.executable, str(DEMO), "--customers", "2000", "--nights", "2", "--seconds", "1"]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=60)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    seen = [line for line in ended.stdout.splitlines() if "of night 1" in line and "of night 2" in line]
    assert len(seen) == (3 if server else 2)
    assert "every answer was of one night alone" in ended.stdout
    assert ("so the scores go to LMDB alone" in ended.stdout) is not server
