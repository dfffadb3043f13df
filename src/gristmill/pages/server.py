"""A small HTTP server with limits: so many requests at once, so long each, each in a thread that nobody waits for. One
request a connection; nothing is logged, since addresses may have a token in them.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from gristmill.errors import BadJob
from gristmill.pages.access import Listen
from gristmill.values import dataclass

AT_ONCE = 32  # requests; those beyond are turned away
SILENCE_S = 10.0  # seconds that a client may say nothing, or take nothing
LONGEST_S = 60.0  # seconds that a request may take, its client's slowness included
MOST_BODY = 4096  # bytes of a form: a few fields
LOOKS_S = 1.0  # seconds between two looks for requests that take too long


@dataclass(frozen=True)
class Request:
    """What is asked for. `path` is decoded, in parts; names of headers are in lower case."""

    method: str
    path: tuple[str, ...]
    query: Mapping[str, str] = field(default_factory=dict)
    form: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)

    def header(self, name: str) -> str:
        """A header's value, "" if there is none."""
        return self.headers.get(name, "")


@dataclass(frozen=True)
class Response:
    """What is answered."""

    body: bytes = b""
    status: int = HTTPStatus.OK
    type: str = "text/html; charset=utf-8"
    headers: tuple[tuple[str, str], ...] = ()


Answer = Callable[[Request], Response]


class PageServer(ThreadingHTTPServer):
    """Answers requests until it is closed; `tidy` is called about every second. Raises BadJob if it cannot listen."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 16

    def __init__(self, at: Listen, tidy: Callable[[], None]) -> None:
        self.answer: Answer = lambda request: Response(status=HTTPStatus.SERVICE_UNAVAILABLE)
        self._tidy = tidy
        self._room = threading.BoundedSemaphore(AT_ONCE)
        self._open: dict[socket.socket, float] = {}
        self._lock = threading.Lock()
        try:
            found = socket.getaddrinfo(at.host, at.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
            self.address_family = found[0]
            super().__init__(found[4][:2], _Handler)  # type: ignore[arg-type]
        except OSError as e:
            raise BadJob(
                f"--listen {at.host}:{at.port}: cannot listen there ({e.strerror}): give another one"
            ) from None

    def serve(self) -> None:
        """Answer, from a thread of its own."""
        threading.Thread(target=self.serve_forever, args=(LOOKS_S,), daemon=True, name="pages").start()

    def server_bind(self) -> None:
        """As usual, but asks no name server for a name."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer a request in a thread, or turn it away."""
        if not self._room.acquire(blocking=False):
            self.shutdown_request(request)
            return
        with self._lock:
            self._open[request] = time.monotonic()
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """In the thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._lock:
                self._open.pop(request, None)
            self._room.release()

    def service_actions(self) -> None:
        """End requests that take too long."""
        with self._lock:
            late = [one for one, begun in self._open.items() if time.monotonic() - begun > LONGEST_S]
        for one in late:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        self._tidy()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is nobody's matter; anything else is an error of ours."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    """Reads one request, and writes what is answered."""

    timeout = SILENCE_S
    server: PageServer
    server_version, sys_version = "gristmill", ""

    def do_GET(self) -> None:
        """A page."""
        self._send(self._answered(b""))

    def do_HEAD(self) -> None:
        """A page without its body."""
        self._send(self._answered(b""), body=False)

    def do_POST(self) -> None:
        """A form."""
        said = self.headers.get("Content-Length", "")
        if not said and not self.headers.get("Transfer-Encoding"):
            self._send(Response(b"a form says how long it is\n", HTTPStatus.LENGTH_REQUIRED, "text/plain"))
            return
        if not said.isdecimal() or int(said) > MOST_BODY or self.headers.get("Transfer-Encoding"):
            self._send(Response(b"a form is not as long as that\n", HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "text/plain"))
            return
        self._send(self._answered(self.rfile.read(int(said))))

    def _answered(self, body: bytes) -> Response:
        at = urlsplit(self.path)
        request = Request(
            "GET" if self.command == "HEAD" else self.command,
            tuple(unquote(part) for part in at.path.split("/") if part),
            dict(parse_qsl(at.query)), dict(parse_qsl(body.decode("utf-8", "replace"))),
            {name.lower(): value for name, value in self.headers.items()},
        )  # fmt: skip
        try:
            return self.server.answer(request)
        except Exception:
            self._send(Response(b"an error of gristmill's own: its terminal, or log, has more\n", 500, "text/plain"))
            raise

    def _send(self, answered: Response, *, body: bool = True) -> None:
        self.send_response(answered.status)
        self.send_header("Content-Type", answered.type)
        self.send_header("Content-Length", str(len(answered.body)))
        self.send_header("Connection", "close")
        for name, value in answered.headers:
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(answered.body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""
