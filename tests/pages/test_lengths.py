"""Forms whose length is not as it should be."""

from __future__ import annotations

import socket

import pytest

from gristmill.pages.access import Listen
from gristmill.pages.server import PageServer


@pytest.mark.parametrize(
    ("headers", "status"),
    [("", 411), ("Content-Length: 99999999\r\n", 413), ("Content-Length: x\r\n", 413)],
)
def test_a_form_says_how_long_it_is(headers: str, status: int) -> None:
    """One without a length is asked for it; one that is too long is refused, and none of it is read."""
    server = PageServer(Listen("127.0.0.1", 0), lambda: None)
    server.serve()
    try:
        with socket.create_connection(server.server_address[:2], timeout=10) as client:
            client.sendall(f"POST / HTTP/1.1\r\nHost: here\r\n{headers}\r\n".encode())
            assert client.recv(100).split()[1] == str(status).encode()
    finally:
        server.shutdown()
        server.server_close()
