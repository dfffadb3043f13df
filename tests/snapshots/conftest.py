"""The server of the tests of sources that are stores."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import storeservers

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """The address of a Postgres server's database, with pgvector."""
    with storeservers.postgres() as address:
        yield address
