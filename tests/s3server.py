"""A real S3 server on a folder, which can be stopped and started again, and small servers that misbehave."""

from __future__ import annotations

import http.client
import http.server
import json
import random
import re
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.fs as pafs

KEY, SECRET = "AKIAME", "hu/sh+word"


# Not the generator that tests seed, which draws the same ports again and again.
_CHANCE = random.SystemRandom()


def free_ports(*names: str) -> dict[str, int]:
    """By name a port that nothing listens on, nor on the one 10,000 above, where the server puts its second one; all
    are apart from each other, and both below those that the kernel gives to connections (32,768 and up).
    """
    found: dict[str, int] = {}
    while len(found) < len(names):
        port = _CHANCE.randrange(20_000, 22_700)
        if port in found.values():
            continue
        with socket.socket() as one, socket.socket() as other:
            try:
                one.bind(("127.0.0.1", port))
                other.bind(("127.0.0.1", port + 10_000))
            except OSError:
                continue
        found[names[len(found)]] = port
    return found


class S3Server:
    """SeaweedFS with one bucket, `box`."""

    def __init__(self, weed: Path, folder: Path) -> None:
        who = {"name": "me", "credentials": [{"accessKey": KEY, "secretKey": SECRET}], "actions": ["Admin"]}
        (folder / "s3.json").write_text(json.dumps({"identities": [who]}))
        self._weed, self._folder = weed, folder
        for attempt in range(4):
            ports = free_ports(*(f"-{name}.port" for name in ("s3", "master", "filer", "volume", "admin")))
            self._command = self._on(ports)
            self.address = f"127.0.0.1:{ports['-s3.port']}"
            try:
                self.start()
                self._make_bucket()
                break
            except OSError:  # another process was quicker at one of the ports, and the server ended or waits
                self.stop()
                if attempt == 3:
                    raise

    def _on(self, ports: dict[str, int]) -> list[str]:
        folder = self._folder
        command = [str(self._weed), "mini", "-dir", str(folder / "data"), "-ip", "127.0.0.1", "-ip.bind", "127.0.0.1"]
        command += [f"{name}={port}" for name, port in ports.items()]
        return [*command, "-s3.config", str(folder / "s3.json"), "-admin.ui=false", "-webdav=false"]

    def _make_bucket(self) -> None:
        fs = pafs.S3FileSystem(
            access_key=KEY, secret_key=SECRET, endpoint_override=self.address, scheme="http", allow_bucket_creation=True
        )
        deadline = time.monotonic() + 30
        while True:
            try:
                fs.create_dir("box")
                return
            except OSError:  # it listens before it can store
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise
                time.sleep(0.2)

    def start(self) -> None:
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)
        deadline = time.monotonic() + 30
        while True:
            try:
                urllib.request.urlopen(f"http://{self.address}/healthz", timeout=1).close()
                return
            except urllib.error.HTTPError:
                return
            except OSError as error:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    said = (self._folder / "log").read_text(errors="replace")[-2000:]
                    raise OSError(
                        f"the S3 server at {self.address} does not answer ({error}); it said: {said}"
                    ) from None
                time.sleep(0.1)

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:  # it waits for connections that are kept open
            self._process.kill()
            self._process.wait()

    def storage(self, address: str = "") -> dict[str, Any]:
        """Options of a source or a sink."""
        where = address or self.address
        return {"access_key": KEY, "secret_key": SECRET, "endpoint_override": where, "scheme": "http"}


class Forgetful:
    """A store in memory that takes every PUT, whatever its conditions are."""

    def __init__(self) -> None:
        objects: dict[str, bytes] = {}

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_PUT(self) -> None:
                objects[self.path] = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                self._answer(200, b"")

            def do_GET(self) -> None:
                if "list-type" in self.path:
                    self._answer(200, b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>")
                else:
                    self._answer(200 if self.path in objects else 404, objects.get(self.path, b""))

            do_HEAD = do_GET

            def do_DELETE(self) -> None:
                objects.pop(self.path, None)
                self._answer(204, b"")

            def _answer(self, status: int, body: bytes) -> None:
                self.send_response(status)
                self.send_header("ETag", '"e"')
                self.send_header("Last-Modified", "Sat, 21 Nov 2026 08:00:00 GMT")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            def log_message(self, *_: Any) -> None: ...

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class Troubled:
    """A proxy in front of a server, which counts requests and answers every so manyth one of those that are `wanted`
    with an error status, late, cut off, or not at all: after the server has done what was asked ("lost") or before
    ("silent"). What the server answers is passed on as `told`.
    """

    KINDS = ("503", "lost", "429", "late")

    def __init__(
        self,
        address: str,
        every: int = 0,
        kinds: tuple[str, ...] = KINDS,
        wanted: str = "",
        told: Callable[[bytes], bytes] = bytes,
    ) -> None:
        self.seen: Counter[str] = Counter()
        self.troubles: Counter[str] = Counter()
        self.every, self.kinds, self.wanted = every, kinds, re.compile(wanted)
        self._over = threading.Event()
        counted = 0
        lock, outer = threading.Lock(), self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _pass(self) -> None:
                nonlocal counted
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                with lock:
                    outer.seen[self.command] += 1
                    trouble, every = "", outer.every
                    if every and outer.wanted.search(f"{self.command} {self.path} {dict(self.headers)}"):
                        counted += 1
                        trouble = outer.kinds[(counted // every) % len(outer.kinds)] if counted % every == 0 else ""
                    outer.troubles[trouble] += 1
                if trouble == "silent":
                    outer._over.wait()
                    self.close_connection = True
                    return
                if trouble.isdigit():
                    codes = {
                        "409": "ConditionalRequestConflict",
                        "403": "AccessDenied",
                        "404": "NoSuchBucket",
                        "503": "SlowDown",
                        "429": "SlowDown",
                    }
                    code = codes.get(trouble, "Refused")
                    text = f"<Error><Code>{code}</Code><Message>trouble</Message></Error>".encode()
                    self._answer(int(trouble), {"Content-Type": "application/xml"}, text)
                    return
                if trouble == "late":
                    time.sleep(1.0)
                server = http.client.HTTPConnection(address, timeout=60)
                server.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
                for name, value in self.headers.items():
                    server.putheader(name, value)
                server.endheaders(body or None)
                answer = server.getresponse()
                data = told(answer.read())
                server.close()
                if trouble == "cut" and self.command != "HEAD":
                    self.send_response_only(answer.status)
                    for name, value in answer.getheaders():
                        if name.lower() not in ("connection", "transfer-encoding", "content-length"):
                            self.send_header(name, value)
                    self.send_header("Content-Length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data[: len(data) // 2])
                if trouble in ("lost", "cut"):
                    self.close_connection = True
                    self.connection.shutdown(socket.SHUT_RDWR)
                    return
                self._answer(answer.status, dict(answer.getheaders()), data)

            do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = _pass

            def _answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
                self.send_response_only(status)
                for name, value in headers.items():
                    if name.lower() not in ("connection", "transfer-encoding", "content-length"):
                        self.send_header(name, value)
                length = headers.get("Content-Length", str(len(body))) if self.command == "HEAD" else str(len(body))
                self.send_header("Content-Length", length)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            def log_message(self, *_: Any) -> None: ...

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.address = f"127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        """Answer nobody any more."""
        self._over.set()
        self._server.shutdown()
        self._server.server_close()
