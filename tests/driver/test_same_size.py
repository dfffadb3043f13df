"""A file that is rewritten in place, as long as before, where no shard has read it: what planning knew of it is not
believed.
"""

from __future__ import annotations

import http.server
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import gristmill as gm
from gristmill.driver import planning
from gristmill.driver.sourcecheck import looked_again
from gristmill.shards.sourcefiles import SourceFile
from gristmill.sources import listing
from gristmill.sources.listing import settled
from gristmill.sources.paths import changed


def stopping(batch: Any) -> dict[str, Any]:
    """A model whose run somebody stops in the middle."""
    stop = Path(os.environ["STOP_AT"])
    if stop.exists() and int(batch["id"].max()) >= int(stop.read_text()):
        raise KeyboardInterrupt
    return {"y": batch["id"] * 2}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a source and the file that says when to stop."""
    monkeypatch.setenv("STOP_AT", str(tmp_path / "stop"))
    (tmp_path / "in").mkdir()
    return tmp_path


def put(place: Path, lines: Sequence[str], form: str = "csv") -> None:
    """The source."""
    (place / "in" / f"a.{form}").write_text("".join(lines))


def stopped(job: gm.Job, place: Path, at: int) -> None:
    """A first run, stopped."""
    (place / "stop").write_text(str(at))
    with pytest.raises(gm.RunFailed):
        job.run()
    (place / "stop").unlink()


def job_of(place: Path, update: bool = False, **source: Any) -> gm.Job:
    """A job over the source."""
    how: dict[str, Any] = {"update": {"key": ["id"]}} if update else {}
    sink = gm.sink(str(place / "out"), keep=["id"])
    return gm.Job(
        gm.source(str(place / "in"), **source), stopping, sink, workers=0, shard_rows=700, batch_rows=100, **how
    )


def lines_of(rows: int) -> list[str]:
    """A table that is cut in several places."""
    return ["id,w\n", *(f"{1_000_000 + n},{'x' * 40}\n" for n in range(rows))]


@pytest.mark.parametrize("update", [False, True])
def test_a_row_that_is_blank_now(update: bool, place: Path) -> None:
    """Nothing was committed: the next run begins anew; a run and a restart counted rows that are no more, for good."""
    lines = lines_of(500)
    put(place, lines)
    job = job_of(place, update)
    stopped(job, place, 1_000_250)
    lines[300] = "\n" * len(lines[300])
    put(place, lines)
    assert job.run().rows_ok == 499
    assert job.run(restart=True).rows_ok == 499


@pytest.mark.parametrize("update", [False, True])
def test_a_row_that_is_blank_where_nothing_was_read(update: bool, place: Path) -> None:
    """Some shards are committed: a restart, or an update, reads the file as it is."""
    lines = lines_of(3000)
    put(place, lines)
    job = job_of(place, update)
    stopped(job, place, 1_002_500)
    assert list(place.glob("out/_gristmill/g*/receipts/*"))
    lines[2900] = "\n" * len(lines[2900])
    put(place, lines)
    if not update:
        with pytest.raises(gm.PlanChanged, match="more or fewer of them"):
            job.run()
    assert job.run(restart=not update).rows_ok == 2999
    assert gm.verify(str(place / "out")).ok


def of_lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Lines of JSON."""
    return [json.dumps(row) + "\n" for row in rows]


OTHERS = {
    "type": ("jsonl", {}, {"x": 1.5}, "column 'x' was int64, and is double now"),
    "condition": ("jsonl", {"where": "x > 0"}, {"x": 1.5}, "column 'x' was int64, and is double now"),
    "name": ("jsonl", {}, {"x": None, "z": 100}, "column 'z' was not there, and is int64 now"),
    "text": ("csv", {}, {"x": "abc"}, "column 'x' was int64, and is string now"),
}


@pytest.mark.parametrize("update", [False, True])
@pytest.mark.parametrize("what", OTHERS)
def test_a_column_that_is_another_where_nothing_was_read(what: str, update: bool, place: Path) -> None:
    """Rows as the file has them now are not dead because others, which were read, were not so."""
    form, how, other, why = OTHERS[what]
    before = [{"id": 1_000_000 + n, "w": "x" * 40, "x": 100} for n in range(3000)]
    after = [row | (other if n >= 2800 else {}) for n, row in enumerate(before)]
    after = [{name: value for name, value in row.items() if value is not None} for row in after]
    if form == "csv":
        texts = (["id,w,x\n", *(f"{r['id']},{r['w']},{r['x']}\n" for r in rows)] for rows in (before, after))
    else:
        texts = (of_lines(rows) for rows in (before, after))
    put(place, next(texts), form)
    model = gm.model(stopping, takes={"id": "int64"}) if what == "condition" else stopping
    more: dict[str, Any] = {"update": {"key": ["id"]}} if update else {}
    keep = ["id"] if what == "condition" else ["id", "x"]
    job = gm.Job(
        gm.source(str(place / "in"), **how), model, gm.sink(str(place / "out"), keep=keep),
        workers=0, shard_rows=700, batch_rows=100, **more,
    )  # fmt: skip
    stopped(job, place, 1_002_500)
    put(place, next(texts), form)
    if not update:
        with pytest.raises(gm.PlanChanged, match=re.escape(why)):
            job.run()
    report = job.run(restart=not update)
    assert (report.rows_ok, report.rows_dead) == (3000, 0)


def test_rows_beyond_a_limit_that_is_lifted(place: Path) -> None:
    """Nothing to do for the rows of a limit says nothing of those behind it."""
    lines = lines_of(3000)
    put(place, lines)
    job_of(place, update=True, limit=1000).run()
    lines[2000:2002] = [lines[2000].rstrip("\n") + "y" * len(lines[2001]) + "\n"]
    put(place, lines)
    assert job_of(place, update=True, limit=1000).run().rows_ok == 1000
    assert job_of(place, update=True).run().rows_ok == 2999


def test_folders_whose_files_are_touched_go_on(place: Path) -> None:
    """What planning adds to the columns of a file, such as those of its folder, is no other type."""
    for lang in ("de", "en"):
        (place / "in" / f"lang={lang}").mkdir()
        (place / "in" / f"lang={lang}" / "a.csv").write_text("".join(lines_of(2000)))
    job = job_of(place)
    stopped(job, place, 1_001_500)
    for file in place.glob("in/*/a.csv"):
        os.utime(file, (5, 5))
    report = job.run()
    assert (report.rows_ok, report.rows_dead) == (4000, 0)


class Web:
    """A web server with one file, `content`, of which it tells the size, and when it was written if `times`."""

    def __init__(self, times: bool) -> None:
        self.content, self.when = b"", 0.0
        web = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                content = web.content
                first, _, last = self.headers.get("Range", "bytes=0-").partition("=")[2].partition("-")
                part = content[int(first) : int(last or len(content)) + 1]
                self.send_response(206 if "Range" in self.headers else 200)
                if "Range" in self.headers:
                    end = int(first) + len(part) - 1
                    self.send_header("Content-Range", f"bytes {first}-{end}/{len(content)}")
                self.send_header("Accept-Ranges", "bytes")
                self.send_header("Content-Length", str(len(part)))
                if times:
                    self.send_header("Last-Modified", self.date_time_string(int(web.when)))
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(part)

            do_HEAD = do_GET

            def log_message(self, *_: Any) -> None: ...

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}/a.csv"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def put(self, lines: Sequence[str], when: float | None = None) -> None:
        """Write the file, now or at another time by the server's clock."""
        self.content, self.when = "".join(lines).encode(), time.time() if when is None else when

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def web(request: pytest.FixtureRequest) -> Iterator[Web]:
    """A web server."""
    pytest.importorskip("aiohttp")
    made = Web(request.param)
    yield made
    made.close()


@pytest.mark.parametrize("web", [True], indirect=True)
def test_a_file_of_a_web_server_that_is_written_again_at_once(web: Web) -> None:
    """It tells whole seconds: a plan waits until that of the file is over, so that what is written then has another
    time; and so does who looks again at a file that was touched. Rows of two contents were published.
    """
    time.sleep(1.02 - time.time() % 1)
    web.put(lines_of(10))
    r = planning.resolve(gm.Job(web.url, stopping).spec)
    assert changed(r.fs, r.files[0].file) is None
    web.put(lines_of(10))
    assert "GMT when planned" in str(changed(r.fs, r.files[0].file))
    again = looked_again(r)
    web.put(lines_of(10))
    assert "GMT when planned" in str(changed(r.fs, again.files[0].file))


@pytest.mark.parametrize("web", [True], indirect=True)
def test_a_file_that_is_written_again_and_again(web: Web, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the plan waited, too, and then in the second that it listed at last: its time does not tell it, and what
    was read of it is read again.
    """
    old, new = ([line.replace("x", k) for line in lines_of(100)] for k in "ab")
    later = int(time.time()) + 1000  # by the server's clock

    def written_meanwhile(found: list[SourceFile], again: Callable[[], list[SourceFile]]) -> list[SourceFile]:
        def once_more() -> list[SourceFile]:
            nonlocal later
            web.put(old, later := later + 1)
            return again()

        return settled(found, once_more)

    web.put(old)
    sink = gm.sink(str(place / "out"), keep=["w"])
    job = gm.Job(web.url, stopping, sink, workers=0, update={"key": ["id"]})
    with monkeypatch.context() as patched:
        patched.setattr(listing, "settled", written_meanwhile)
        job.run()
    web.put(new, later)
    assert job.run().updated["scored"] == 100
    assert set(gm.read(str(place / "out")).to_table()["w"].to_pylist()) == {"b" * 40}


@pytest.mark.parametrize("web", [False], indirect=True)
def test_a_header_that_is_another_where_only_sizes_are_told(web: Web, tmp_path: Path) -> None:
    """Columns of the second file were read under the names that the first had at their places."""
    sink = gm.sink(str(tmp_path / "out"), keep=["id", "xx"])
    job = gm.Job(web.url, lambda batch: {"y": batch["id"] * 2}, sink, workers=0)
    for header, line in (("id,xx\n", "{},77\n"), ("xx,id\n", "77,{}\n")):
        web.put([header, *(line.format(1000 + n) for n in range(50))])
        rows = job.run(restart=True).read().to_table().to_pylist()
        assert [(row["id"], row["xx"]) for row in rows] == [(1000 + n, 77) for n in range(50)]
