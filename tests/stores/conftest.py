"""One S3 server for all tests of stores."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from s3server import S3Server


@pytest.fixture(scope="session")
def server(weed: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """SeaweedFS with one bucket, `box`, for as long as the tests run."""
    started = S3Server(weed, tmp_path_factory.mktemp("s3"))
    try:
        yield started
    finally:
        started.stop()
