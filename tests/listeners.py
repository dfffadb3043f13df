"""Servers that listen to what a run tells: they take it, refuse it, answer too late or never, and keep what came."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Heard:
    """A server's address, and what it was told; `answer` is its status, 0 to never answer."""

    url: str
    answer: int = 200
    requests: list[tuple[str, str, dict[str, str], bytes]] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    @property
    def bodies(self) -> list[Any]:
        """What was taken, as JSON."""
        return [json.loads(body) for *_, body in self.requests]

    def kinds(self) -> list[str]:
        """The kinds of the alerts that came."""
        return [body["kind"] for body in self.bodies]


@contextmanager
def listening(answer: int = 200) -> Iterator[Heard]:
    """A server on this machine."""
    heard = Heard("", answer)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            heard.requests.append((self.command, self.path, dict(self.headers), body))
            if heard.answer == 0:
                heard.over.wait(60)
                return
            self.send_response(heard.answer)
            if heard.answer in (301, 302, 307):
                self.send_header("Location", heard.url + "/elsewhere")
            self.end_headers()

        do_PUT = do_GET = do_POST

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    heard.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield heard
    finally:
        heard.over.set()
        server.shutdown()
        server.server_close()
        thread.join()


def nobody() -> str:
    """An address on this machine at which nothing listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"
