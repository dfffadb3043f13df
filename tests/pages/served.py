"""`gristmill up` as a process of its own that serves its pages, and a client of them."""

from __future__ import annotations

import contextlib
import html
import http.client
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlencode, urlsplit

JOB = """
vars: {{ds: ""}}
source: "in/{source}.parquet"
model: {{call: "m:{function}"}}
sink: {{uri: "out/{name}/${{ds}}/", keep: [id]}}
engine: {{workers: 1}}
running: {{shard_rows: 50, batch_rows: 10}}
schedule: {{cron: "0 23 1 1 *", backoff: 1s}}
{more}
"""
TICK = "20260101T230000Z"


@dataclass(frozen=True)
class Answer:
    """What was answered."""

    status: int
    text: str
    headers: Mapping[str, str]

    @property
    def words(self) -> str:
        """The text of a page, without elements and entities."""
        body = re.sub(r"<style>.*?</style>", "", self.text, flags=re.DOTALL)
        return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", body)).split())

    @property
    def form(self) -> str:
        """What the forms of a page send along."""
        found = re.search(r'name="form" value="([0-9a-f]+)"', self.text)
        assert found is not None, self.text
        return found[1]


@dataclass
class Served:
    """Pages at an address, as somebody sees them who has these headers."""

    url: str
    process: subprocess.Popen[str]
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def port(self) -> int:
        port = urlsplit(self.url).port
        assert port is not None
        return port

    def ask(self, path: str, method: str = "GET", form: Mapping[str, str] | None = None, **headers: str) -> Answer:
        """One request; names of headers with _ for -."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        sent = {**self.headers, **{name.replace("_", "-"): value for name, value in headers.items()}}
        body = None if form is None else urlencode(form)
        if form is not None:
            sent["Content-Type"] = "application/x-www-form-urlencoded"
        try:
            connection.request(method, path, body, sent)
            found = connection.getresponse()
            return Answer(found.status, found.read().decode(), {k.lower(): v for k, v in found.getheaders()})
        finally:
            connection.close()

    def page(self, path: str = "/") -> Answer:
        """A page that is there."""
        found = self.ask(path)
        assert found.status == 200, (path, found.status, found.words)
        return found

    def until(self, holds: Callable[[Answer], bool], path: str = "/", seconds: float = 90.0) -> Answer:
        """The page, once something holds of it."""
        end = time.monotonic() + seconds
        while (found := self.ask(path)).status != 200 or not holds(found):  # 404 until the folder was read
            assert time.monotonic() < end, found.words
            time.sleep(0.2)
        return found


@contextlib.contextmanager
def serving(*arguments: str, env: Mapping[str, str] | None = None) -> Iterator[Served]:
    """`gristmill up jobs` in the current folder, with pages, while inside."""
    command = [sys.executable, "-m", "gristmill", "up", "jobs", "--listen", "127.0.0.1:0", *arguments]
    with open("up.log", "w") as log:
        process = subprocess.Popen(command, stderr=log, env=env, text=True)
    try:
        end, url = time.monotonic() + 60, None
        while url is None:
            said = Path("up.log").read_text()
            assert process.poll() is None and time.monotonic() < end, said
            url = re.search(r"pages at (\S+)", said)
            time.sleep(0.05)
        yield Served(url[1], process)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)
