"""Alerts of real runs, to real servers: once an incident, whatever hangs, refuses or is killed; the run is unharmed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import gristmill as gm
from callers import eventually
from gristmill.errors import BadJob, GateFailed, GristmillError
from gristmill.observe.incidents import Book
from gristmill.observe.teller import Sign
from listeners import Heard, listening, nobody
from nights import OF_FOUR, ROWS, ailing, ill, run, well, write_rows

SECRET = "s3cr3t-of-the-webhook"


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A source, and a cache of the test's own."""
    monkeypatch.setenv("GRISTMILL_CACHE", str(tmp_path / "cache"))
    return write_rows(tmp_path)


def failing(source: str, sink: Path, **options: Any) -> None:
    """A run whose gate does not hold."""
    with pytest.raises(GateFailed):
        run(source, sink, ill, gates={"min_ok": 0.9}, restart=True, **options)


def open_incidents(sink: Path) -> list[dict[str, Any]]:
    found = json.loads((sink / "_gristmill" / "incidents.json").read_text())["incidents"]
    return [one for one in found if one["over"] is None]


@pytest.mark.long
def test_an_incident_is_told_once_until_it_is_over(source: str, tmp_path: Path) -> None:
    """Two failing nights are one alert, the good one after them says that it is over, and the next failure is new."""
    sink = tmp_path / "out"
    with listening() as heard:
        for _ in range(2):
            failing(source, sink, alerts=heard.url)
        assert heard.kinds() == ["gate"]
        assert "min_ok 0.9" in heard.bodies[0]["text"] and heard.bodies[0]["sink"] == str(sink)
        assert [one["kind"] for one in open_incidents(sink)] == ["gate"]
        for _ in range(2):
            run(source, sink, well, alerts=heard.url, restart=True)
        assert heard.kinds() == ["gate", "recovered"]
        first, second = heard.bodies
        assert (second["of"], second["incident"]) == ("gate", first["incident"])
        assert second["rows"] == {"in": ROWS, "ok": ROWS, "dead": 0, "filtered": 0}
        assert open_incidents(sink) == []
        failing(source, sink, alerts=heard.url)
        assert heard.kinds() == ["gate", "recovered", "gate"]
        assert heard.bodies[2]["incident"] != first["incident"]


def test_only_the_incidents_that_are_asked_for(source: str, tmp_path: Path) -> None:
    """`on` of each says which; who is told of none hears of no recovery either."""
    with listening() as gates, listening() as failures:
        alerts = [{"webhook": gates.url, "on": ["gate"]}, {"webhook": failures.url, "on": ["failed", "recovered"]}]
        failing(source, tmp_path / "out", alerts=alerts)
        run(source, tmp_path / "out", well, alerts=alerts, restart=True)
        assert gates.kinds() == ["gate"]
        assert failures.kinds() == []


def test_dead_rows_that_were_published(source: str, tmp_path: Path) -> None:
    """They are an incident of their own, which lasts while nothing new is scored."""
    sink, options = tmp_path / "out", {"gates": {"min_ok": 0.5, "warn_failed": 0.01}}
    with listening() as heard:
        run(source, sink, ill, alerts=heard.url, **options)
        assert heard.kinds() == ["dead"] and "ValueError" in heard.bodies[0]["text"]
        assert run(source, sink, ill, alerts=heard.url, **options).state == "nothing to do"
        assert heard.kinds() == ["dead"]
        run(source, sink, well, alerts=heard.url, restart=True, **options)
        assert heard.kinds() == ["dead", "recovered"]


def test_a_run_with_nothing_to_do_tells_what_is_over(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A source that was gone for a night; and dead rows that somebody has scored again without telling anybody."""
    sink, options = tmp_path / "out", {"gates": {"min_ok": 0.5, "warn_failed": 0.01}}
    with listening() as heard:
        night = lambda: run(source, sink, ailing, alerts=heard.url, **options)  # noqa: E731
        night()
        assert heard.kinds() == ["dead"]
        os.rename(source, f"{source}.away")
        with pytest.raises(GristmillError):
            night()
        assert heard.kinds() == ["dead", "failed"]
        os.rename(f"{source}.away", source)
        assert night().state == "nothing to do"
        assert heard.kinds() == ["dead", "failed", "recovered"] and heard.bodies[2]["of"] == "failed"
        monkeypatch.setenv("CURED", "1")
        gm.retry_dead(gm.Job(source, ailing, gm.sink(str(sink), keep=["x"]), workers=0))
        assert night().state == "nothing to do"
        assert heard.kinds()[3:] == ["recovered"] and heard.bodies[3]["of"] == "dead"
    assert open_incidents(sink) == []


def test_two_who_note_incidents_at_once_lose_none(tmp_path: Path) -> None:
    """A run may begin while the one before still tells: each change is made to what the file holds then."""
    path = str(tmp_path / "incidents.json")
    books = [Book("job", path) for _ in range(4)]

    def many(n: int) -> None:
        for k in range(25):
            found = books[n].raised(Sign(f"kind {n} {k}", "text"))
            books[n].told(found, f"who {n}", frozenset({f"who {n}"}))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(many, range(4)))
    known = Book("job", path).mine()
    assert len(known) == 100 and all(len(one.told) == 1 for one in known)


def test_a_job_that_cannot_begin(source: str, tmp_path: Path) -> None:
    """It is told once, and no folder is made to remember that; the first run that works says that it is over."""
    sink = tmp_path / "out"
    with listening() as heard:
        for _ in range(2):
            with pytest.raises(BadJob):
                run(str(tmp_path / "none.parquet"), sink, well, alerts=heard.url)
        assert heard.kinds() == ["failed"] and "none.parquet" in heard.bodies[0]["text"]
        assert not sink.exists()
        run(source, sink, well, alerts=heard.url)
        assert heard.kinds() == ["failed", "recovered"]
        assert open_incidents(sink) == [] and not list((tmp_path / "cache" / "incidents").iterdir())


def test_several_jobs_share_a_file_of_incidents(source: str, tmp_path: Path) -> None:
    """Each has its own incidents in it."""
    with listening() as heard:
        alerts = [{"webhook": heard.url, "state": str(tmp_path / "incidents.json")}]
        failing(source, tmp_path / "a", alerts=alerts)
        failing(source, tmp_path / "b", alerts=alerts)
        failing(source, tmp_path / "a", alerts=alerts)
        run(source, tmp_path / "b", well, alerts=alerts, restart=True)
        assert [(b["kind"], Path(b["job"]).name) for b in heard.bodies] == [
            ("gate", "a"), ("gate", "b"), ("recovered", "b"),
        ]  # fmt: skip
    assert not (tmp_path / "a" / "_gristmill" / "incidents.json").exists()


def harm(how: str, heard: Heard) -> str:
    """An address of somebody who cannot be told."""
    heard.answer = {"hangs": 0, "500": 500, "redirects": 302, "403": 403}.get(how, 200)
    return nobody() if how == "refuses" else heard.url


@pytest.mark.parametrize("how", ["refuses", "500", "403", "redirects", pytest.param("hangs", marks=pytest.mark.long)])
@pytest.mark.few(1)
def test_one_who_cannot_be_told_harms_nothing(how: str, source: str, tmp_path: Path) -> None:
    """The run publishes and ends as without, soon; the others are told; the next run tells what this one could not."""
    sink = tmp_path / "out"
    with listening() as broken, listening() as fine:
        address = harm(how, broken)
        options = {"gates": {"min_ok": 0.5, "warn_failed": 0.01}, "alerts": [f"{address}/{SECRET}", fine.url]}
        began = time.monotonic()
        with pytest.warns(gm.GristmillWarning, match="tried again with the next run") as warned:
            report = run(source, sink, ill, **options)
        assert time.monotonic() - began < 14
        assert report.state == "done" and gm.read(str(sink)).count_rows() == ROWS - OF_FOUR
        assert fine.kinds() == ["dead"]
        assert not any(SECRET in str(w.message) for w in warned)
        assert all("/elsewhere" not in path for _, path, *_ in broken.requests)
        told = open_incidents(sink)[0]["told"]
        assert told == [f"webhook {fine.url}"]
        broken.answer = 200
        broken.requests.clear()
        if how != "refuses":
            run(source, sink, ill, **options)
            assert broken.kinds() == ["dead"] and fine.kinds() == ["dead"]


@pytest.mark.long
def test_errors_keep_their_exit_codes(source: str, tmp_path: Path) -> None:
    """An alert that cannot be sent does not replace what it would tell."""
    with pytest.raises(GateFailed) as caught:
        run(source, tmp_path / "out", ill, gates={"min_ok": 0.9}, alerts=nobody())
    assert caught.value.exit_code == 3


KILLED = """
import sys, time
import gristmill as gm
def slow(batch):
    time.sleep(0.05)
    return {"score": batch["x"]}
if __name__ == "__main__":
    source, sink, url = sys.argv[1:]
    gm.apply(source, sink, fn=slow, workers=1, shard_rows=1, batch_rows=1, alerts=url, lineage=sink + ".jsonl",
             gates={"min_ok": 0.1})
"""


@pytest.mark.long
def test_a_run_that_is_killed_is_told_by_the_next(source: str, tmp_path: Path) -> None:
    """kill -9 in the middle of a run leaves no word; the run that goes on with it tells of it, and that it is over."""
    script, sink = tmp_path / "job.py", tmp_path / "out"
    script.write_text(KILLED)
    with listening() as heard:
        command = [sys.executable, str(script), source, str(sink), heard.url]
        process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL)
        assert eventually(lambda: list((sink / "_gristmill").glob("*/receipts/*.json")), 60)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert heard.kinds() == []
        again = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert again.returncode == 0, again.stderr
        assert heard.kinds() == ["failed", "recovered"]
        assert "ended without a word" in heard.bodies[0]["text"]
    events = [json.loads(line) for line in Path(f"{sink}.jsonl").read_text().splitlines()]
    kinds = [(event["eventType"], event["run"]["runId"]) for event in events]
    assert [kind for kind, _ in kinds] == ["START", "ABORT", "START", "COMPLETE"]
    assert kinds[0][1] == kinds[1][1] != kinds[2][1] == kinds[3][1]


TELLING = """
import sys
import gristmill as gm
def ill(batch):
    raise ValueError("all of them")
if __name__ == "__main__":
    source, sink, url = sys.argv[1:]
    gm.apply(source, sink, fn=ill, workers=0, alerts=url)
"""


@pytest.mark.long
def test_a_kill_while_somebody_is_told(source: str, tmp_path: Path) -> None:
    """The incident is kept before anybody is told: the next run tells it, under the same id, and only once."""
    script, sink = tmp_path / "job.py", tmp_path / "out"
    script.write_text(TELLING)
    with listening(0) as heard:
        command = [sys.executable, str(script), source, str(sink), heard.url]
        process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL)
        assert eventually(lambda: heard.requests, 60)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        (before,) = open_incidents(sink) if (sink / "_gristmill" / "incidents.json").exists() else cached(tmp_path)
        assert before["told"] == []
        heard.answer = 200
        heard.requests.clear()
        for _ in range(2):
            subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=120)
        told = [body for body in heard.bodies if body["incident"] == before["id"]]
        assert len(told) == 1 and len(heard.bodies) == len({body["incident"] for body in heard.bodies})


def cached(tmp_path: Path) -> list[dict[str, Any]]:
    (file,) = (tmp_path / "cache" / "incidents").iterdir()
    found: list[dict[str, Any]] = json.loads(file.read_text())["incidents"]
    return found


def test_slack_gets_its_own_form(source: str, tmp_path: Path) -> None:
    """One text, in which what a row or an error contains is no markup."""
    with listening() as heard:
        with pytest.raises(GristmillError):
            run(
                str(tmp_path / "<!channel>.parquet"), tmp_path / "out", well,
                alerts=[{"webhook": heard.url, "form": "slack"}],
            )  # fmt: skip
        (body,) = heard.bodies
        assert list(body) == ["text"] and body["text"].startswith(":x: *")
        assert "<!channel>" not in body["text"] and "&lt;!channel&gt;" in body["text"]


def test_a_command_gets_the_alert(source: str, tmp_path: Path) -> None:
    """As JSON on its standard input, with its kind in the environment; one that fails is told."""
    target = tmp_path / "told.json"
    script = f"import os, sys; open({str(target)!r}, 'w').write(os.environ['GRISTMILL_ALERT'] + sys.stdin.read())"
    (tmp_path / "page.py").write_text(script)
    failing(source, tmp_path / "out", alerts=[{"command": f"{sys.executable} {tmp_path / 'page.py'}"}])
    assert target.read_text().startswith("gate{") and json.loads(target.read_text()[4:])["kind"] == "gate"
    with (
        pytest.warns(gm.GristmillWarning, match=r"it ended with 3: no such pager;"),
        pytest.raises(GateFailed),
    ):
        run(
            source, tmp_path / "other", ill, gates={"min_ok": 0.9},
            alerts=[{"command": "sh -c 'echo trying >&2; echo no such pager >&2; exit 3'"}],
        )  # fmt: skip


@pytest.mark.long
def test_a_command_that_hangs_is_ended(source: str, tmp_path: Path) -> None:
    """With all that it started, and the run goes on to its end."""
    began = time.monotonic()
    with pytest.warns(gm.GristmillWarning, match="did not end in time|no answer in time"), pytest.raises(GateFailed):
        run(source, tmp_path / "out", ill, gates={"min_ok": 0.9}, alerts=[{"command": "sh -c 'sleep 60 | sleep 61'"}])
    assert time.monotonic() - began < 14


class Post:
    """A mail server's end that keeps what comes."""

    def __init__(self) -> None:
        self.mails: list[Any] = []
        self.logins: list[str] = []

    async def handle_DATA(self, server: Any, session: Any, envelope: Any) -> str:
        self.mails.append(envelope)
        return "250 taken"

    def login(self, server: Any, session: Any, envelope: Any, mechanism: str, data: Any) -> Any:
        """Whoever says who they are is let in."""
        from aiosmtpd.smtp import AuthResult

        self.logins.append(data.password.decode())
        return AuthResult(success=True)


@contextmanager
def mail_server(**options: Any) -> Iterator[tuple[Post, int]]:
    controllers = pytest.importorskip("aiosmtpd.controller", reason="no mail server: install aiosmtpd")
    post, port = Post(), int(nobody().rpartition(":")[2])
    if options:
        options |= {"authenticator": post.login, "auth_required": True}
    server = controllers.Controller(post, hostname="127.0.0.1", port=port, **options)
    server.start()
    try:
        yield post, port
    finally:
        server.stop()


def test_mail(source: str, tmp_path: Path) -> None:
    """By SMTP, to all who are named; a password is not sent in the clear."""
    with mail_server() as (post, port):
        alert = {"email": ["ops@example.org", "me@example.org"], "smtp": f"smtp://127.0.0.1:{port}"}
        failing(source, tmp_path / "out", alerts=[alert])
        (mail,) = post.mails
        assert mail.rcpt_tos == ["ops@example.org", "me@example.org"]
        text = mail.content.decode()
        assert "Subject: [gristmill]" in text and "gate did not hold" in " ".join(text.split())
        secret = {**alert, "smtp": f"smtp://me:{SECRET}@127.0.0.1:{port}"}
        with pytest.warns(gm.GristmillWarning, match="has no STARTTLS") as warned, pytest.raises(GateFailed):
            run(source, tmp_path / "other", ill, gates={"min_ok": 0.9}, alerts=[secret])
        assert len(post.mails) == 1 and not any(SECRET in str(w.message) for w in warned)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl, which makes the server's certificate")
def test_mail_with_a_password(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By STARTTLS, and to nobody whose certificate is not trusted."""
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost", "-addext",
         "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(cert)],
        check=True, capture_output=True,
    )  # fmt: skip
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(cert, key)
    with mail_server(tls_context=tls, require_starttls=True) as (post, port):
        alerts = [{"email": "ops@example.org", "smtp": f"smtp://me:{SECRET}@localhost:{port}"}]
        with pytest.warns(gm.GristmillWarning, match="the mail server did not take it"), pytest.raises(GateFailed):
            run(source, tmp_path / "other", ill, gates={"min_ok": 0.9}, alerts=alerts)
        assert (post.mails, post.logins) == ([], [])
        monkeypatch.setenv("SSL_CERT_FILE", str(cert))
        failing(source, tmp_path / "out", alerts=alerts)
        assert len(post.mails) == 1 and post.logins == [SECRET]


def test_no_secret_stands_anywhere(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in the sink, nor in its report, nor in what is told."""
    from gristmill.cli.app import main

    with listening() as heard, listening() as lineage:
        monkeypatch.setenv("HOOK", f"{heard.url}/{SECRET}")
        (tmp_path / "scoring.py").write_text("def well(batch):\n    return {'score': batch['x']}\n")
        (tmp_path / "job.yaml").write_text(f"""
source: {{uri: {source}, where: "x < 5"}}
model: {{call: "scoring:well"}}
sink: {{uri: {tmp_path / "out"}, keep: [x]}}
engine: {{workers: 0}}
gates: {{min_ok: 0.9}}
alerts: [{{webhook: "${{env:HOOK}}", headers: {{Authorization: "Bearer {SECRET}"}}}}]
lineage: ["{lineage.url}/{SECRET}"]
""")
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["gristmill", "run", "job.yaml", "--alert", f"{heard.url}/{SECRET}/2"])
        assert main(sys.argv[1:]) == 0
        assert main(["report", str(tmp_path / "out"), "-o", str(tmp_path / "out" / "report.html")]) == 0
        assert [path for _, path, *_ in lineage.requests] == [f"/{SECRET}"] * 2
        assert all(SECRET.encode() not in body for *_, body in (*heard.requests, *lineage.requests))
    held = [path for path in (tmp_path / "out").rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
    assert held == []
    (record,) = (tmp_path / "out" / "_gristmill" / "runs").iterdir()
    assert f"--alert {heard.url}" in " ".join(json.loads(record.read_text())["command"])


def test_a_file_that_cannot_be_read_is_told(source: str, tmp_path: Path) -> None:
    """A run that leaves out a bad file publishes the others, and tells so, once, until the file can be read."""
    folder = tmp_path / "in"
    folder.mkdir()
    shutil.copy(source, folder / "a.parquet")
    (folder / "b.parquet").write_bytes(b"PAR1 cut off")
    with listening() as heard:

        def night() -> gm.Report:
            return run(
                gm.source(str(folder), on_bad_file="skip"), tmp_path / "out", well, alerts=heard.url, append=True
            )

        with pytest.warns(gm.GristmillWarning, match="skipped a bad file"):
            assert night().rows_ok == ROWS
        with pytest.warns(gm.GristmillWarning):
            assert night().state == "nothing to do"
        assert heard.kinds() == ["skipped"] and "b.parquet" in heard.bodies[0]["text"]
        shutil.copy(source, folder / "b.parquet")
        assert night().rows_ok == 2 * ROWS
        assert heard.kinds() == ["skipped", "recovered"]


def moved(batch: dict[str, Any]) -> dict[str, Any]:
    """Scores as `well` does, and more by what the environment says."""
    return {"score": batch["x"] * 2 + float(os.environ.get("MOVED", "0"))}


def test_a_refused_night_is_told_though_a_warning_is_open(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drift that was only warned of, and then holds a night back, is told again, once; lighter drift is not."""
    with listening() as heard:

        def night(moved_by: int, fail: float = 1000.0) -> None:
            monkeypatch.setenv("MOVED", str(moved_by))
            gates = {"drift": {"score": {"psi": {"warn": 0.1, "fail": fail}}}}
            run(source, tmp_path / "out", moved, alerts=heard.url, restart=True, gates=gates)

        night(0)
        with pytest.warns(gm.GristmillWarning, match="psi"):
            night(500)
        for moved_by in (1000, 1500):
            with pytest.raises(GateFailed):
                night(moved_by, fail=0.2)
        with pytest.warns(gm.GristmillWarning, match="psi"):
            night(2000)
        assert heard.kinds() == ["drift", "drift"]
        warned, refused = heard.bodies
        assert "nothing new was published" in refused["text"] and "nothing new" not in warned["text"]
        assert refused["incident"] == warned["incident"] and refused["changes"] == 1
        assert refused["run"] != warned["run"]
        (one,) = open_incidents(tmp_path / "out")
        assert "nothing new" not in one["text"]
        night(1000)  # what was staged
        assert heard.kinds() == ["drift", "drift", "recovered"]


def test_what_is_new_of_an_incident_is_told(tmp_path: Path) -> None:
    """Another gate, another file, another exit code, ten times as many dead rows; its text is always that of now."""
    book = Book("job", str(tmp_path / "incidents.json"))
    everybody = frozenset({"me"})

    def told(*signs: Sign) -> list[bool]:
        news = []
        for sign in signs:
            found = book.raised(sign, "run")
            assert (found.text, found.run) == (sign.text, "run")
            news.append("me" not in found.told)
            book.told(found, "me", everybody)
        return news

    gates = [Sign("gate", str(n), what) for n, what in enumerate([("a",), ("a",), ("b",), ("a", "b"), ("b",)])]
    assert told(*gates) == [True, False, True, True, False]
    assert told(*(Sign("dead", str(n), (), n) for n in (3, 2, 20, 500, 30, 500))) == [
        True,
        False,
        False,
        True,
        False,
        False,
    ]
    assert told(*(Sign("failed", f"{n}", (f"exit {n}",)) for n in (1, 1, 4))) == [True, False, True]
    book.raised(Sign("failed", "other", ("exit 2",)), "run")  # and nobody can be told
    book.over(frozenset({"gate", "dead"}))
    (over,) = [one for one in book.mine() if one.over is not None]
    assert "me" in over.known
    book.swept(everybody)
    assert len(book.mine()) == 3  # whoever knew of it as it was is still to be told that it is over


def test_another_file_that_cannot_be_read_is_told(source: str, tmp_path: Path) -> None:
    """A second bad file is news; one that is left of two is none."""
    folder = tmp_path / "in"
    folder.mkdir()
    shutil.copy(source, folder / "a.parquet")
    with listening() as heard, pytest.warns(gm.GristmillWarning):
        for bad in (["b"], ["b"], ["b", "c"], ["c"]):
            for name in ("b", "c"):
                (folder / f"{name}.parquet").unlink(missing_ok=True)
            for name in bad:
                (folder / f"{name}.parquet").write_bytes(b"PAR1 cut off")
            run(gm.source(str(folder), on_bad_file="skip"), tmp_path / "out", well, alerts=heard.url, append=True)
        assert heard.kinds() == ["skipped", "skipped"]
        assert "c.parquet" not in heard.bodies[0]["text"] and "c.parquet" in heard.bodies[1]["text"]


def test_what_is_over_while_something_is_open(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job is well again once nothing is open; before that it is said what is over, and what is not."""
    sink, options = tmp_path / "out", {"gates": {"min_ok": 0.5, "warn_failed": 0.01}}
    with listening() as heard:
        with pytest.raises(BadJob):
            run(str(tmp_path / "none.parquet"), sink, ailing, alerts=heard.url, **options)
        run(source, sink, ailing, alerts=heard.url, **options)
        monkeypatch.setenv("CURED", "1")
        run(source, sink, ailing, alerts=heard.url, restart=True, **options)
        assert heard.kinds() == ["failed", "dead", "recovered", "recovered"]
        first, last = heard.bodies[2:]
        assert first["headline"].endswith("no longer fails; still open: dead") and first["still"] == ["dead"]
        assert last["headline"].endswith("is well again") and last["still"] == []


def test_who_joins_later_is_told_of_the_run_that_it_was(source: str, tmp_path: Path) -> None:
    """An incident that is open names the run that showed it, not the one that tells of it."""
    sink, options = tmp_path / "out", {"gates": {"min_ok": 0.5, "warn_failed": 0.01}}
    with listening() as one, listening() as other:
        run(source, sink, ill, alerts=one.url, **options)
        run(source, sink, ill, alerts=[one.url, other.url], **options)
        assert other.kinds() == ["dead"] and one.kinds() == ["dead"]
        assert other.bodies[0]["run"] == one.bodies[0]["run"] != ""


def test_a_gate_without_dead_rows_points_at_no_dead_letters(source: str, tmp_path: Path) -> None:
    """`gristmill dead` is named where there are some."""
    with listening() as heard:
        failing(source, tmp_path / "dead", alerts=heard.url)
        with pytest.raises(GateFailed):
            run(gm.source(source, where="x < 0"), tmp_path / "none", well, alerts=heard.url)
        assert [body["look"].split()[1] for body in heard.bodies] == ["dead", "status"]
