"""The modules of this folder can be imported by name, here and in workers. Small inputs, in memory where possible."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def apart() -> Iterator[object]:
    """Runs functions in processes apart, each a fork of one that has imported everything and done nothing."""
    from apart import Apart

    with Apart() as running:
        yield running


@pytest.fixture(scope="session")
def another() -> Iterator[object]:
    """A second one, for tests that keep two cores busy."""
    from apart import Apart

    with Apart() as running:
        yield running


@pytest.fixture
def quick() -> Iterator[Path]:
    """A folder in memory where there is one: a thousand runs that sync every file would wait for the disk alone."""
    memory = "/dev/shm"
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as folder:
        yield Path(folder)


@pytest.fixture
def numbers(quick: Path) -> str:
    """200 rows in two Parquet files."""
    from victims import write_input

    return write_input(str(quick / "in"), 200)
