"""The simulated world is importable from the tests of this folder."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def looks_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated days are short, if it looks at the folder every ten minutes of them."""
    monkeypatch.setattr("gristmill.schedule.up.LOOK", timedelta(minutes=10))
