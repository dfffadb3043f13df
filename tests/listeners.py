"""Servers that listen to what a run tells: they take it, refuse it, answer too late or never, and keep what came."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
import time
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


@contextmanager
def silent() -> Iterator[tuple[str, threading.Event]]:
    """The host and port of a server that answers nothing, and whether it has been asked; then it hangs up."""
    asked, held = threading.Event(), list[socket.socket]()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    held.append(server.accept()[0])
                    asked.set()

        threading.Thread(target=accept, daemon=True).start()
        yield f"127.0.0.1:{server.getsockname()[1]}", asked
        server.shutdown(socket.SHUT_RDWR)
        for one in held:
            one.close()


@contextmanager
def signalled(asked: threading.Event) -> Iterator[type[Exception]]:
    """A signal comes once something has been asked: the error that it raises in the main thread, within 5 s."""

    class Stopped(Exception): ...

    def stop(*_: object) -> None:
        raise Stopped

    def send() -> None:
        sent.extend([time.monotonic()] if asked.wait(10) else ())
        os.kill(os.getpid(), signal.SIGUSR1)

    sent: list[float] = []
    before = signal.signal(signal.SIGUSR1, stop)
    try:
        threading.Thread(target=send, daemon=True).start()
        yield Stopped
        assert time.monotonic() - sent[0] < 5
    finally:
        signal.signal(signal.SIGUSR1, before)
