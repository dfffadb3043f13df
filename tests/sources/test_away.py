"""Sources whose server is away: waited for and told as such, whatever the client makes of it; signals are heard."""

from __future__ import annotations

import contextlib
import functools
import http.server
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pyarrow.fs as pafs
import pytest

from gristmill.errors import BadSource, RunFailed
from gristmill.job.job import source
from gristmill.sources import patience
from gristmill.sources.paths import mounted, open_input, resolve
from gristmill.sources.patience import StoreAway
from listeners import nobody, signalled, silent


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is waited for longer than a moment."""
    monkeypatch.setattr(patience.patiently, "__defaults__", (0.3,))


class _Answers(http.server.BaseHTTPRequestHandler):
    def __init__(self, status: int, *args: Any) -> None:
        self._status = status
        super().__init__(*args)

    def do_GET(self) -> None:
        self.send_response(self._status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None: ...


@contextlib.contextmanager
def answering(status: int) -> Iterator[str]:
    """The address of a web server with one answer to everything."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Answers, status)) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("uri", ["{}/x.csv", "{}/x.csv?v=1&X-Amz-Signature=hush", "zip://x.csv::{}/x.zip", "ftp://{}"])
def test_fault_69_a_server_that_is_not_there_is_away(uri: str) -> None:
    """Not "no such file", which is not tried again: whether the client is asked, or asks as it is made."""
    pytest.importorskip("aiohttp")
    address = nobody()
    shown = uri.format(address if "{}/" in uri else f"{address.partition('//')[2]}/x.csv")
    with pytest.raises(RunFailed, match=r"the store did not answer for .*: run again when the store answers") as caught:
        resolve(source(shown))
    assert caught.value.exit_code == 1 and "hush" not in str(caught.value)


def test_what_a_web_server_answers_decides() -> None:
    """A file that is not there, one that may not be read, and a server that is not well."""
    pytest.importorskip("aiohttp")
    for status, kind, said in (
        (404, BadSource, "no such file or folder; check the address"),
        (410, BadSource, "no such file or folder"),
        (403, BadSource, "not readable: 403"),
        (503, RunFailed, "the store did not answer for .*503"),
    ):
        with answering(status) as address, pytest.raises(kind, match=said):
            resolve(source(f"{address}/x.csv"))


def test_an_address_that_is_none_is_told_at_once() -> None:
    """A port that no machine has."""
    pytest.importorskip("aiohttp")
    with pytest.raises(BadSource):
        resolve(source("http://127.0.0.1:99999/x.csv"))


def test_a_file_is_not_gone_because_its_server_is() -> None:
    """A worker opens it after the plan was made."""
    pytest.importorskip("aiohttp")
    url = f"{nobody()}/x.csv"
    with pytest.raises(StoreAway, match="the store did not answer"):
        open_input(mounted([url], {}), url)


def test_where_a_bucket_is_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a region, pyarrow looks it up as it makes the client: what it says without a network, as it said it."""
    answers: list[Any] = [
        OSError(
            "When resolving region for bucket 'b': AWS Error NETWORK_CONNECTION during HeadBucket operation: "
            "curlCode: 6, Could not resolve hostname"
        ),
        (pafs.LocalFileSystem(), "b"),
    ]
    monkeypatch.setattr(pafs, "FileSystem", type("Made", (), {"from_uri": staticmethod(lambda _: made(answers))}))
    mounted(["s3://b/x"], {})
    assert not answers
    answers[:] = [OSError("When resolving region for bucket 'b': AWS Error NETWORK_CONNECTION")] * 100
    with pytest.raises(RunFailed, match=r"s3://b/x: the store did not answer"):
        resolve(source("s3://b/x"))
    answers[:] = [OSError("Bucket 'b' not found")]
    with pytest.raises(BadSource, match="cannot be opened: Bucket 'b' not found"):
        resolve(source("s3://b/x"))


def made(answers: list[Any]) -> Any:
    """The next of the answers: raised, or returned."""
    answer = answers.pop(0)
    if isinstance(answer, Exception):
        raise answer
    return answer


@pytest.mark.parametrize(("uri", "storage", "limit"), [
    ("gs://b/x", {}, 2), ("gcs://b/x?project_id=p", {}, 2), ("gs://b/x?retry_limit_seconds=9", {}, 9),
    ("gs://b/x", {"anonymous": True}, 2),
])  # fmt: skip
def test_googles_client_gives_up_soon(uri: str, storage: dict[str, Any], limit: int) -> None:
    """By itself it tries for 15 minutes, without a word."""
    fs = mounted([uri], storage).mounts[0].listing.inner.fs  # type: ignore[attr-defined]
    assert fs.__reduce__()[1][0]["retry_time_limit"].total_seconds() == limit


@pytest.mark.skipif(sys.platform == "win32", reason="signals to a process")
@pytest.mark.skipif(not hasattr(pafs, "GcsFileSystem"), reason="pyarrow without Google's client")
def test_fault_69_a_signal_is_heard_while_a_client_waits_in_c() -> None:
    """Google's, of a server that does not answer."""
    with silent() as (place, asked), signalled(asked) as stopped, pytest.raises(stopped):
        resolve(source("gs://b/x", storage={"anonymous": True, "endpoint_override": place, "scheme": "http"}))
