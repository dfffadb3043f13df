"""The pages of `gristmill up`, by HTTP and in a real browser, over real jobs: what failed and what to do, retries,
runs while they run, what must not be seen, and clients that hang.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from served import JOB, TICK, Served, serving

import gristmill as gm
from browser import browsing, needs_browser
from gristmill.pages import asking
from gristmill.pages.asking import Asking, Unseen

HOSTILE = "<script>document.title='no'</script><img src=x onerror=\"document.title='no'\">'&{{7*7}}"
SECRET = "s3cr3t-Value-Of-A-Key"
TOKEN = "0123456789abcdef0123456789abcdef"
MODEL = f"""
import time
FIXED = False
def score(batch):
    bad = [t for t in batch["text"] if t == "bad"]
    if bad and not FIXED:
        raise ValueError({HOSTILE!r})
    return {{"size": [len(t) for t in batch["text"]]}}
def slow(batch):
    time.sleep(0.2)
    return {{"size": [len(t) for t in batch["text"]]}}
class Keyed:
    def __init__(self, key): self.key = key
    def __call__(self, batch): raise ValueError("refused with key " + self.key)
"""
KEYED = JOB.replace('"m:{function}"', '"m:Keyed", args: {{key: "${{env:API_KEY}}"}}')


def write(name: str, source: str, function: str = "score", more: str = "", text: str = JOB) -> None:
    Path(f"jobs/{name}.yaml").write_text(text.format(name=name, source=source, function=function, more=more))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for jobs, whose rows are all good, in part bad, or too often so."""
    for folder in ("in", "jobs"):
        (tmp_path / folder).mkdir()
    monkeypatch.setenv("GRISTMILL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("API_KEY", SECRET)
    monkeypatch.delenv("GRISTMILL_TOKEN", raising=False)
    monkeypatch.chdir(tmp_path)
    Path("m.py").write_text(MODEL)
    for name, every in (("good", 1000), ("some", 150), ("many", 3)):
        texts = ["bad" if n % every == every - 1 else "fine" for n in range(300)]
        pq.write_table(pa.table({"id": range(300), "text": texts}), f"in/{name}.parquet")
    return tmp_path


@contextlib.contextmanager
def up(*arguments: str, **env: str) -> Iterator[Served]:
    """`up`, for which the night of 1 January 2026 is due."""
    with serving("--since", "2026-01-01", *arguments, env={**os.environ, **env}) as served:
        yield served


def ended(served: Served, *jobs: str) -> None:
    """Wait until these jobs have run."""
    for job in jobs:
        served.until(lambda found: " done" in found.words or " failed" in found.words, f"/job/{job}.yaml")


@pytest.mark.long
def test_what_failed_and_what_to_do(place: Path) -> None:
    """The first page says what a person has to look at; the run's page why, and the command that publishes it."""
    write("good", "good")
    write("broken", "many")
    Path("jobs/typo.yaml").write_text('schedule: "0 99 * * *"\nsource: x\n')
    with up() as served:
        ended(served, "good", "broken")
        found = served.page().words
        assert "2 things to look at" in found and "broken.yaml failed" in found and "bad hour" in found
        assert served.ask("/healthz").text == "ok\n"
        run = served.page(f"/job/broken.yaml/{TICK}").words
        assert "min_ok 0.99 can no longer hold" in run and "--scheduled 2026-01-01T23:00:00+00:00 --accept" in run
        assert "done" in served.page(f"/job/good.yaml/{TICK}").words
        report = served.page(f"/job/good.yaml/{TICK}/report")
        assert "done and published" in report.words and "Throughput" in report.words
        assert served.ask("/job/none.yaml").status == served.ask("/job/good.yaml/20260102T230000Z").status == 404
        assert served.ask("/job/..%2F..%2Fetc%2Fpasswd").status == served.ask("/job/good.yaml/x/report").status == 404


@pytest.mark.long
def test_a_failed_run_is_tried_again_by_its_button(place: Path) -> None:
    """After a fix; what a person does by hand is what `--again` does."""
    write("n", "many", more="gates: {min_ok: 0.99}")
    with up() as served:
        page = served.until(lambda found: "Try it again" in found.words, "/job/n.yaml")
        write("n", "many", more="gates: {min_ok: 0.5}")
        time.sleep(0.1)
        sent = served.ask("/job/n.yaml/again", "POST", {"form": page.form})
        assert (sent.status, sent.headers["location"]) == (303, "/job/n.yaml")
        served.until(lambda found: " done" in found.words, "/job/n.yaml", 20)
    assert gm.read("out/n/2026-01-01").count_rows() == 200


def test_dead_letters_are_shown_and_scored_again(place: Path) -> None:
    """By kind, with examples; the button puts them into the queue of `up`, and they join the published rows."""
    write("n", "some")
    with up() as served:
        ended(served, "n")
        dead = served.page(f"/job/n.yaml/{TICK}/dead")
        assert "ValueError 2 rows" in dead.words and HOSTILE in dead.words and HOSTILE not in dead.text
        retry = f"/job/n.yaml/{TICK}/retry-dead"
        assert served.ask(retry, "POST", {"form": "0" * 64}).status == 403
        assert served.ask(retry, "POST", {"form": dead.form}, Origin="http://evil.example").status == 403
        assert served.ask(retry, "POST", {"form": dead.form, "x": "y" * 5000}).status == 413
        Path("m.py").write_text(MODEL.replace("FIXED = False", "FIXED = True"))
        assert served.ask(retry, "POST", {"form": dead.form}).status == 303
        failed = served.until(lambda found: "Retry failed" in found.words, f"/job/n.yaml/{TICK}/dead", 30)
        assert "code" in failed.words
        assert "What failed: the retry of its dead letters" in served.page(f"/job/n.yaml/{TICK}").words
        began = time.monotonic()
        assert served.ask(retry, "POST", {"form": dead.form, "code": "1"}).status == 303
        served.until(lambda found: "There are none." in found.words, f"/job/n.yaml/{TICK}/dead", 30)
        assert time.monotonic() - began < 25, "it is started at once, not at the next look"
        served.until(lambda found: "All is well" in found.words)
        history = served.page("/job/n.yaml").words
        assert "done dead letters" in history
    assert gm.read("out/n/2026-01-01").count_rows() == 300


@pytest.mark.long
def test_a_run_while_it_runs(place: Path) -> None:
    """How far it is, how fast, when it ends beside its deadline; the page loads itself anew, and then no more."""
    write("n", "good", "slow", 'deadline: "400d"')
    with up() as served:
        path = f"/job/n.yaml/{TICK}"
        found = served.until(lambda page: "rows/s" in page.words and "ends about" in page.words, path)
        assert "of 300 rows" in found.words and 'http-equiv="refresh" content="3"' in found.text
        assert "before its deadline" in found.words
        assert "Running now" in served.page().words
        figures = served.page("/metrics").text
        assert 'gristmill_running{job_name="n.yaml",model="m:slow"} 1.0' in figures
        assert 'gristmill_rows_planned{job_name="n.yaml",model="m:slow"} 300.0' in figures
        done = served.until(lambda page: "300 rows in" in page.words, path)
        assert "http-equiv" not in done.text


@pytest.mark.long
def test_what_is_late(place: Path) -> None:
    """It has to be looked at although it runs; its page says by when it should have been done."""
    write("n", "good", "slow", "deadline: 2h")
    with up() as served:
        found = served.until(lambda page: "running, late" in page.words).words
        assert "1 thing to look at" in found and "Its deadline, 2026-01-02 01:00 UTC, has passed." in found
        assert "within 2h" in found
        page = served.page(f"/job/n.yaml/{TICK}").words
        assert "It is late Its deadline, 2026-01-02 01:00 UTC, has passed. It goes on until it is done." in page


@pytest.mark.long
def test_figures_are_those_that_jobs_tell(place: Path) -> None:
    """`/metrics` in Prometheus' own parser: names as those of `metrics:`, a series a job."""
    from prometheus_client.parser import text_string_to_metric_families

    write("good", "good")
    write("broken", "many")
    with up() as served:
        ended(served, "good", "broken")
        first = served.page("/metrics").text
        assert 'job_name="good.yaml"' in first
        assert not re.search(r'gristmill_rows{job_name="good.*outcome="ok"} 0.0', first), "not known yet is not 0"
        text = served.until(lambda page: page.text.count('outcome="ok"') == 2, "/metrics").text
        families = text_string_to_metric_families(text)
        found = {
            (s.name, s.labels["job_name"], s.labels.get("outcome", "")): s.value for f in families for s in f.samples
        }
    assert found["gristmill_rows", "good.yaml", "ok"] == 300
    assert found["gristmill_run_exit_code", "good.yaml", ""] == 0
    assert found["gristmill_run_exit_code", "broken.yaml", ""] == 3
    assert time.time() - found["gristmill_published_timestamp_seconds", "good.yaml", ""] < 600
    assert ("gristmill_published_timestamp_seconds", "broken.yaml", "") not in found


@pytest.mark.long
def test_no_secret_is_on_any_page(place: Path) -> None:
    """Neither a job's, though its error says it, nor the token; and what a job's file is called is text."""
    write("keyed", "good", text=KEYED)
    write("<b>&'", "some")
    with up(GRISTMILL_TOKEN=TOKEN) as served:
        served.headers["Authorization"] = f"Bearer {TOKEN}"
        named = "/job/%3Cb%3E%26%27.yaml"
        for path in ("/job/keyed.yaml", named):
            served.until(lambda found: " done" in found.words or " failed" in found.words, path)
        paths = ["/", "/metrics"]
        for job in ("/job/keyed.yaml", named):
            paths += [job, *(f"{job}/{TICK}{more}" for more in ("", "/report", "/dead"))]
        for path in paths:
            text = served.ask(path).text
            assert SECRET not in text and TOKEN not in text, path
            if path == "/metrics":
                continue
            assert "<b>&'" not in text and "<script" not in text and 'onerror="' not in text, path
        assert "<b>&'.yaml" in served.page().words
    said = Path("up.log").read_text()
    assert TOKEN not in said and SECRET not in said


@pytest.mark.long
def test_the_token_is_asked_for(place: Path) -> None:
    """Nothing is shown without it; once in an address, a cookie is enough; the code of jobs does not see it."""
    Path("m.py").write_text(
        "import os\ndef score(b):\n    assert 'GRISTMILL_TOKEN' not in os.environ\n    return {'n': b['id']}"
    )
    write("n", "good")
    with up(GRISTMILL_TOKEN=TOKEN) as served:
        for path in ("/", "/metrics", "/job/n.yaml", "/nothing"):
            refused = served.ask(path)
            assert refused.status == 401 and "n.yaml" not in refused.words
        assert served.ask("/?token=wrong").status == 401
        assert served.ask("/job/n.yaml/again", "POST", {"form": "", "token": TOKEN}).status == 401
        entered = served.ask(f"/job/n.yaml?token={TOKEN}")
        assert (entered.status, entered.headers["location"]) == (303, "/job/n.yaml")
        cookie = entered.headers["set-cookie"].partition(";")[0]
        assert served.ask("/", Cookie=cookie).status == 200
        served.headers["Cookie"] = cookie
        served.until(lambda found: " done" in found.words, "/job/n.yaml")
        assert served.ask(f"//evil.example?token={TOKEN}").headers["location"].startswith("/")
        for path in ("//evil.example", "/%5Cevil.example", "/\\evil.example"):
            to = served.ask(f"{path}?token={TOKEN}").headers["location"]
            assert to.startswith("/") and not to.startswith(("//", "/\\")), to
        assert served.ask("/", Host="scores.example.org").status == 200


def test_other_names_are_not_answered_without_a_token(place: Path) -> None:
    """DNS rebinding: what a page from elsewhere asks for under its own name is refused, even the health."""
    with up() as served:
        for path in ("/", "/healthz", "/metrics"):
            assert served.ask(path, Host="evil.example").status == 421
        found = served.page()
        assert "default-src 'none'" in found.headers["content-security-policy"]
        assert found.headers["cache-control"] == "no-store" and found.headers["x-content-type-options"] == "nosniff"


@pytest.mark.long
def test_clients_that_hang_slow_nothing(place: Path) -> None:
    """More of them than are let in: the run ends as ever, those beyond are turned away, then pages are answered."""
    write("n", "good", "slow")
    with up() as served, contextlib.ExitStack() as stack:
        for n in range(60):
            one = stack.enter_context(socket.create_connection(("127.0.0.1", served.port)))
            one.sendall(
                b"GET / HTTP/1.1\r\nHost: localhost\r\nX: "
                if n % 2
                else b"POST / HTTP/1.1\r\nContent-Length: 9\r\n\r\n"
            )
        with pytest.raises(OSError):
            served.ask("/healthz")
        log, end = Path("up.log"), time.monotonic() + 60
        while "done in" not in log.read_text():
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.1)
        end = time.monotonic() + 30
        while True:  # those that hang are given up by and by
            with contextlib.suppress(OSError):
                assert " done" in served.page().words
                break
            assert time.monotonic() < end


def test_what_is_no_request(place: Path) -> None:
    """Whatever is sent, it is answered or hung up on, nothing is said on the terminal, and the next one is answered."""
    noise = random.Random(1)
    sent = [
        b"\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"GET /" + b"a" * 70_000, b"\x16\x03\x01\x02\x00\x01",
        b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 200 + b"\r\n", b"GET //[::1 HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /job/%00/%ff%fe/x HTTP/1.1\r\nHost: localhost\r\n\r\n", b"PUT / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\n\r\n\xff\xfe\xfd",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nCookie: \xff=;;;=\r\nAuthorization: Bearer \xff\r\n\r\n",
        *(noise.randbytes(200) + b"\r\n\r\n" for _ in range(50)),
    ]  # fmt: skip
    with up() as served:
        for data in sent:
            with contextlib.suppress(ConnectionError), socket.create_connection(("127.0.0.1", served.port)) as one:
                one.settimeout(20)
                one.sendall(data)
                one.shutdown(socket.SHUT_WR)
                while one.recv(65536):
                    pass
        assert "All is well" in served.page().words
    assert Path("up.log").read_text().count("\n") == 4, Path("up.log").read_text()


@pytest.mark.long
def test_a_sink_that_cannot_be_read_holds_up_only_its_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What hangs is given up after a while, and the next question is answered by a new process."""
    monkeypatch.setattr(asking, "PATIENCE_S", 5.0)
    os.mkfifo(tmp_path / "hangs.yaml")
    hangs = ("now", str(tmp_path / "hangs.yaml"), "2026-01-01T23:00:00+00:00")
    (tmp_path / "n.yaml").write_text("source: x\nmodel: {call: m:f}\nsink: none/\n")
    before = set(psutil.Process().children())  # the fork server of an earlier test, for one
    ask = Asking(os.environ)
    try:
        began = time.monotonic()
        with pytest.raises(Unseen, match="being read") as soon:
            ask.ask(*hangs, wait=0.1)
        assert soon.value.soon and time.monotonic() - began < 2, "a page that can do without it does not wait"
        for _ in range(3):  # those who ask meanwhile wait for the same answer, which is kept
            with pytest.raises(Unseen, match="could not be read within 5 s"):
                ask.ask(*hangs)
        assert time.monotonic() - began < 9
        with pytest.raises(Unseen, match="has no schedule"):
            ask.ask("now", str(tmp_path / "n.yaml"), "2026-01-01T23:00:00+00:00")
        assert ask._process is not None
        ask._process.kill()
        with pytest.raises(Unseen, match="has no schedule"):
            ask.ask("facts", str(tmp_path / "n.yaml"), "2026-01-01T23:00:00+00:00")
    finally:
        ask.close()
    assert not set(psutil.Process().children()) - before


def test_addresses_that_cannot_be_listened_at(place: Path) -> None:
    """One line, exit 2: in use, or beyond this machine without a token."""
    import subprocess
    import sys

    command = [sys.executable, "-m", "gristmill", "up", "jobs", "--once", "--listen"]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = subprocess.run([*command, str(port)], capture_output=True, text=True)
        assert found.returncode == 2 and "in use" in found.stderr and found.stderr.count("\n") == 1
    found = subprocess.run([*command, "0.0.0.0:0"], capture_output=True, text=True)
    assert found.returncode == 2 and "GRISTMILL_TOKEN" in found.stderr and found.stderr.count("\n") == 1


# ---------------------------------------------------------------- in a browser

SMALL = """[...document.querySelectorAll('p,span,summary,li,td')]
    .filter(e => parseFloat(getComputedStyle(e).fontSize) < 12).length"""


@pytest.mark.long
@needs_browser
def test_in_a_real_browser(place: Path) -> None:
    """On a telephone and a screen: nothing scrolls sideways, nothing comes from elsewhere, no script; the retry of dead
    letters is a click.
    """
    write("n", "some")
    write("broken", "many")
    with up(GRISTMILL_TOKEN=TOKEN) as served, browsing(place) as browser:
        served.headers["Authorization"] = f"Bearer {TOKEN}"
        ended(served, "n", "broken")
        browser.open(f"{served.url}?token={TOKEN}")
        assert TOKEN not in browser.js("location.href")
        run, broken = f"{served.url}job/n.yaml/{TICK}", f"{served.url}job/broken.yaml/{TICK}"
        for width, dark in ((400, False), (1200, True)):
            browser.width(width, dark=dark)
            for url in (served.url, f"{served.url}job/n.yaml", run, f"{run}/dead", f"{run}/report", broken, f"{run}x"):
                browser.open(url)
                assert browser.js("document.documentElement.scrollWidth") <= width, url
                assert browser.js("document.scripts.length + document.images.length") == 0
                assert browser.js(SMALL) == 0
                background = browser.js("getComputedStyle(document.body).backgroundColor")
                assert (background == "rgb(20, 23, 26)") == dark, url
        browser.width(400)
        browser.open(served.url)
        top = browser.js("document.querySelector('.alarm').getBoundingClientRect().top")
        assert top < 200, "what has to be looked at is seen at once"
        browser.click(".alarm .item a")
        assert "What failed" in browser.js("document.body.innerText")
        high = browser.js("document.querySelector('button').getBoundingClientRect().height")
        assert high >= 40, "a thumb hits it"
        Path("m.py").write_text(MODEL.replace("FIXED = False", "FIXED = True"))
        browser.open(f"{run}/dead")
        browser.js("document.querySelector('input[type=checkbox]').click()")
        browser.click("form button")
        assert browser.js("location.pathname") == f"/job/n.yaml/{TICK}/dead"
        served.until(lambda found: "There are none." in found.words, f"/job/n.yaml/{TICK}/dead", 30)
        assert all(url.startswith((served.url, "data:", "about:")) for url in browser.asked), browser.asked
        assert [text for text in browser.wrong if "404" not in text] == []
    assert gm.read("out/n/2026-01-01").count_rows() == 300
