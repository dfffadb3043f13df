"""A real S3 server on a folder, which can be stopped and started again, and small servers that misbehave."""

from __future__ import annotations

import http.client
import http.server
import json
import random
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.fs as pafs

KEY, SECRET = "AKIAME", "hu/sh+word"


def free_port() -> int:
    """A port that nothing listens on, and neither on the one 10,000 above, where the server puts its second one."""
    while True:
        port = random.randrange(20_000, 50_000)
        with socket.socket() as one, socket.socket() as other:
            try:
                one.bind(("127.0.0.1", port))
                other.bind(("127.0.0.1", port + 10_000))
            except OSError:
                continue
            return port


class S3Server:
    """SeaweedFS with one bucket, `box`."""

    def __init__(self, weed: Path, folder: Path) -> None:
        who = {"name": "me", "credentials": [{"accessKey": KEY, "secretKey": SECRET}], "actions": ["Admin"]}
        (folder / "s3.json").write_text(json.dumps({"identities": [who]}))
        ports = {f"-{name}.port": free_port() for name in ("s3", "master", "filer", "volume", "admin")}
        self._command = [str(weed), "mini", "-dir", str(folder / "data"), "-ip", "127.0.0.1", "-ip.bind", "127.0.0.1"]
        self._command += [f"{name}={port}" for name, port in ports.items()]
        self._command += ["-s3.config", str(folder / "s3.json"), "-admin.ui=false", "-webdav=false"]
        self.address = f"127.0.0.1:{ports['-s3.port']}"
        self.start()
        fs = pafs.S3FileSystem(
            access_key=KEY, secret_key=SECRET, endpoint_override=self.address, scheme="http", allow_bucket_creation=True
        )
        for attempt in range(50):
            try:
                fs.create_dir("box")
                break
            except OSError:  # it listens before it can store
                if attempt == 49:
                    raise
                time.sleep(0.2)

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 30
        while True:
            try:
                urllib.request.urlopen(f"http://{self.address}/healthz", timeout=1).close()
                return
            except urllib.error.HTTPError:
                return
            except OSError:
                if time.monotonic() > deadline:
                    raise
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
    """A proxy in front of a server, which counts requests and, where there is `trouble`, answers every so manyth one
    with 503 or 429, late, or not at all after the server has done what was asked.
    """

    KINDS = ("503", "lost", "429", "late")

    def __init__(self, address: str, every: int = 0) -> None:
        self.seen: Counter[str] = Counter()
        self.troubles: Counter[str] = Counter()
        lock, outer = threading.Lock(), self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _pass(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                with lock:
                    outer.seen[self.command] += 1
                    count = outer.seen.total()
                    trouble = outer.KINDS[(count // every) % len(outer.KINDS)] if every and count % every == 0 else ""
                    outer.troubles[trouble] += 1
                if trouble in ("503", "429"):
                    text = b"<Error><Code>SlowDown</Code><Message>slow down</Message></Error>"
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
                data = answer.read()
                server.close()
                if trouble == "lost":
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
        self._server.shutdown()
        self._server.server_close()
