"""Endpoints that fail, refuse or answer oddly: what that costs, and when the run ends."""

from __future__ import annotations

import asyncio
import re
import socket
import subprocess
import sys
import time
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import gristmill as gm
from gristmill.errors import BadModel, RunFailed
from gristmill.models.desk import Desk
from gristmill.models.replies import after_of
from llmserver import KEY, ChatServer

pytestmark = pytest.mark.filterwarnings("ignore::gristmill.GristmillWarning")


def asked(rows: int, sink: Path, text: str = "row", **more: Any) -> gm.Report:
    table = pa.table({"id": range(rows), "text": [f"{text} {n}" for n in range(rows)]})
    return gm.prompt(table, sink, prompt="{{ text }}", model="m", keep=["id"], **{"workers": 1, **more})


def answers(sink: Path) -> list[str]:
    rows = sorted(gm.read(str(sink)).to_table().to_pylist(), key=lambda row: row["id"])
    return [row["answer"] for row in rows]


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"retry-after": "1732528230000"}, 86_400.0), ({"retry-after": "9" * 25}, 86_400.0),
        ({"retry-after-ms": "inf"}, None), ({"retry-after-ms": "nan"}, None), ({"retry-after-ms": "-5"}, None),
        ({"retry-after": "-5"}, None), ({"retry-after": "soon"}, None), ({"retry-after": "\N{SUPERSCRIPT TWO}"}, None),
        ({"retry-after": "Fri, 31 Dec 9999 23:59:59 GMT"}, 86_400.0), ({"retry-after": ""}, None),
        ({"retry-after": formatdate(0, usegmt=True)}, 0.0), ({"retry-after-ms": "1500"}, 1.5), ({}, None),
    ],
)  # fmt: skip
def test_a_time_to_wait_is_one(headers: dict[str, str], seconds: float | None) -> None:
    """A day at most; what is no time to come is none."""
    assert after_of(headers) == seconds


@pytest.mark.long
@pytest.mark.parametrize("limits", [{}, {"requests_per_minute": 6000}])
def test_an_absurd_time_to_wait_ends_the_run(chat: ChatServer, tmp_path: Path, limits: dict[str, Any]) -> None:
    """Soon, with the time in words, and nothing that was answered is lost."""
    chat.set(busy=0.1, retry_after="1732528230000", latency=0.02)
    begun = time.monotonic()
    with pytest.raises(
        RunFailed, match=r"asks to be left alone until 20\d\d-.* \(86,\d+ s\), which is longer than batch"
    ):
        asked(200, tmp_path / "out", concurrency=4, batch_timeout=10.0, **limits)
    assert time.monotonic() - begun < 20.0
    chat.set(busy=0.0)
    assert asked(200, tmp_path / "out", concurrency=4, batch_timeout=10.0, **limits).rows_ok == 200
    assert max(chat.told()["answered"].values()) == 1


def test_replies_that_hold_nothing_are_counted_and_asked_for_once_more(chat: ChatServer, tmp_path: Path) -> None:
    """They are paid for: after the second one the row is a dead letter, and max_cost sees both."""
    chat.set(empties="filtered")
    price = {"input": "1/token", "output": "0/token"}
    rows = pa.table(
        {"id": range(30), "text": ["a filtered text" if n % 10 == 5 else f"row {n} it is" for n in range(30)]}
    )
    ask: dict[str, Any] = {"prompt": "{{ text }}", "model": "m", "keep": ["id"], "workers": 1, "price": price}
    report = gm.prompt(rows, tmp_path / "out", gates={"min_ok": 0}, **ask)
    assert (report.rows_ok, report.rows_dead) == (27, 3)
    assert {letter["message"] for letter in gm.dead(str(tmp_path / "out")).to_pylist()} == {"a reply without choices"}
    assert chat.told()["requests"] == 33 == report.used["requests"]
    assert report.used["cost"] == 27 * 4 + 6 * 3
    with pytest.raises(RunFailed, match="max_cost 30"):
        asked(30, tmp_path / "more", "a filtered text of", max_cost=30.0, price=price, concurrency=1)
    assert chat.told()["requests"] - 33 <= 6


@pytest.mark.parametrize("end", ["?api-version=1", "/?api-version=1"])
@pytest.mark.few(1)
def test_an_address_may_have_a_query(chat: ChatServer, tmp_path: Path, end: str) -> None:
    """It is sent with each request, behind the path, as gateways want their version."""
    asked(3, tmp_path / "out", base_url=chat.url + end)
    assert answers(tmp_path / "out") == ["<row 0>", "<row 1>", "<row 2>"]
    assert chat.told()["queries"] == {"api-version=1": 3}
    chat.set(key="sk-another")
    with pytest.raises(BadModel, match="the endpoint refuses the key: 401"):
        asked(3, tmp_path / "b", base_url=chat.url + end)
    with pytest.raises(BadModel, match=r"/v2/chat/completions\?api-version=1"):
        asked(3, tmp_path / "c", base_url=chat.url.replace("/v1", "/v2") + end)


def test_no_key_is_sent_to_another_address(chat: ChatServer, tmp_path: Path) -> None:
    """A redirect is told, without what it may hold of secrets, and not followed."""
    with ChatServer() as other:
        chat.set(moved=other.url)
        with pytest.raises(BadModel, match=f"307, a redirect to {other.url}/chat/completions: it is not followed") as e:
            asked(5, tmp_path / "out")
        assert KEY not in str(e.value) and other.told()["requests"] == 0


def test_a_desk_follows_no_redirect(chat: ChatServer) -> None:
    """Nor does what asks for batches."""
    with ChatServer() as other:
        chat.set(moved=other.url)

        async def call() -> None:
            desk = Desk(chat.url, {"x-api-key": KEY}, timeout=5.0, limit=5.0)
            try:
                await desk.once("POST", "chat/completions", data=b"{}", headers={"content-type": "application/json"})
            finally:
                await desk.close()

        with pytest.raises(BadModel, match=f"a redirect to {other.url}/chat/completions"):
            asyncio.run(call())
        assert other.told()["requests"] == 0


@pytest.mark.few(2)
@pytest.mark.parametrize("status", [400, 403])
@pytest.mark.parametrize("after", [0, 30])
def test_an_address_that_refuses_what_others_answer_costs_no_row(
    chat: ChatServer, tmp_path: Path, status: int, after: int
) -> None:
    """Its requests are asked elsewhere, and it is left out, though it is the quickest."""
    chat.set(latency=0.02)
    with ChatServer(turns=[after, status, status]) as other:
        report = asked(200, tmp_path / "out", base_url=f"{chat.url},{other.url}", concurrency=8)
        assert report.rows_ok == 200 and other.told()["requests"] < after + 60
    assert answers(tmp_path / "out") == [f"<row {n}>" for n in range(200)]


def test_what_all_addresses_refuse_is_the_rows_own_matter(chat: ChatServer, tmp_path: Path) -> None:
    """Also many in a row: what was answered is asked for now and then, and shows that the endpoint is well."""
    rows = pa.table({"id": range(300), "text": [f"{'too long' if 50 <= n < 200 else 'row'} {n}" for n in range(300)]})
    with ChatServer() as other:
        report = gm.prompt(
            rows, tmp_path / "out", prompt="{{ text }}", model="m", keep=["id"], workers=1, gates={"min_ok": 0},
            base_url=f"{chat.url},{other.url}", concurrency=8,
        )  # fmt: skip
        assert (report.rows_ok, report.rows_dead) == (150, 150)
        assert chat.told()["requests"] + other.told()["requests"] < 150 + 2 * 150 + 20


def test_texts_that_are_refused_stop_no_vectors(chat: ChatServer, tmp_path: Path) -> None:
    """A request with some is sent in halves: however many are refused then, the endpoint is well."""
    rows = pa.table({"id": range(200), "text": [f"{'too long' if 50 <= n < 150 else 'row'} {n}" for n in range(200)]})
    report = gm.embed(
        rows, tmp_path / "out", model="m", base_url=chat.url, text="text", keep=["id"], gates={"min_ok": 0}, workers=1
    )
    assert (report.rows_ok, report.rows_dead) == (100, 100)


@pytest.mark.long
def test_a_model_that_is_gone_in_the_middle_ends_the_run_soon(chat: ChatServer, tmp_path: Path) -> None:
    """It refuses all that it is asked: what it answered before is asked once more, and then nothing."""
    chat.set(turns=[100, 400, 400])
    with pytest.raises(RunFailed, match="refuses every request now, also one that it has answered before: 400"):
        asked(2000, tmp_path / "out", concurrency=16)
    assert chat.told()["requests"] < 400  # of 2,000; how many are on their way then is the machine's affair
    chat.set(turns=[])
    assert asked(2000, tmp_path / "out", concurrency=16).rows_ok == 2000
    assert max(chat.told()["answered"].values()) == 1


@pytest.mark.long
def test_an_endpoint_that_dies_and_refuses_trials_ends_the_run_soon(chat: ChatServer, tmp_path: Path) -> None:
    """To refuse the smallest request is no sign of life once others were answered."""
    chat.set(turns=[100, 500, 400])
    begun = time.monotonic()
    with pytest.raises(RunFailed, match="no answer from"):
        asked(400, tmp_path / "out", concurrency=8, batch_timeout=4.0, timeout=1.0)
    assert time.monotonic() - begun < 20.0 and chat.told()["requests"] < 1500


@pytest.mark.long
def test_a_wrong_model_is_told_without_a_traceback(chat: ChatServer, tmp_path: Path) -> None:
    """Nobody's code has failed."""
    chat.set(turns=[0, 400, 400])
    pq.write_table(pa.table({"text": [f"row {n}" for n in range(100)]}), tmp_path / "rows.parquet")
    line = ["prompt", str(tmp_path / "rows.parquet"), str(tmp_path / "out"), "--prompt", "{{ text }}", "--model", "m"]
    done = subprocess.run([sys.executable, "-m", "gristmill", *line], capture_output=True, text=True)
    assert done.returncode == 1 and "400: model 'm' does not exist" in done.stderr
    assert "Traceback" not in done.stderr and "File" not in done.stderr


@pytest.mark.long
def test_a_job_that_was_answered_before_waits_for_its_endpoint(chat: ChatServer, tmp_path: Path) -> None:
    """One that is away when the job goes on is no wrong address: running again may cure it, which exit 1 says."""
    chat.set(turns=[100, 400, 400])
    with pytest.raises(RunFailed, match="refuses every request now"):
        asked(400, tmp_path / "out", concurrency=4, shard_rows=50)
    with pytest.raises(
        RunFailed, match=r"no answer to a row's .*: it has answered this job before: run again once it does"
    ):
        asked(400, tmp_path / "out", concurrency=4, shard_rows=50, base_url="http://127.0.0.1:9/v1")
    with pytest.raises(RunFailed, match="is this the endpoint"):
        asked(400, tmp_path / "b", concurrency=4, shard_rows=50, base_url="http://127.0.0.1:9/v1")


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("status", "said"), [(401, "the key"), (404, "the address or the model"), (402, "the account")]
)
@pytest.mark.parametrize("after", [0, 30])
def test_an_address_that_refuses_everything_is_left_out(
    chat: ChatServer, tmp_path: Path, status: int, said: str, after: int
) -> None:
    """Its key, account or model: the others answer its rows, and it is told once, whoever is asked first."""
    chat.set(latency=0.01)
    with ChatServer(turns=[after, status, status]) as other:
        report = asked(200, tmp_path / "out", base_url=f"{other.url},{chat.url}", concurrency=8, workers=2)
        assert report.rows_ok == 200 and other.told()["requests"] < after + 40
        told = [note for note in report.notes if "left out" in note]
        assert len(told) == 1 and told[0].startswith(f"{other.url} refuses {said}: {status}: model 'm' does not exist")


@pytest.mark.long
def test_a_run_stops_once_no_address_is_left(chat: ChatServer, tmp_path: Path) -> None:
    """Before anything was answered that is a bad job (exit 2), and else one that can be gone on with (exit 1)."""
    with ChatServer(key="sk-another") as other:
        urls = {"base_url": f"{other.url},{chat.url}", "concurrency": 4}
        chat.set(turns=[60, 404, 404])
        with pytest.raises(
            RunFailed, match=rf"refuses the .* now: .*; so do all addresses: {other.url} refuses the key"
        ):
            asked(200, tmp_path / "out", **urls)
        with pytest.raises(BadModel, match=r"refuses .*so do all addresses: http://"):
            asked(200, tmp_path / "b", **urls)
        chat.set(turns=[])
        assert asked(200, tmp_path / "out", **urls).rows_ok == 200
    assert max(chat.told()["answered"].values()) == 1


@pytest.mark.parametrize("timeout", [0.2, 60.0])
@pytest.mark.few(1)
def test_an_endpoint_that_answers_nothing_is_told(tmp_path: Path, timeout: float) -> None:
    """Who was asked, for what, for how long, and what to do; exit 1, as it may be there later."""
    with socket.create_server(("127.0.0.1", 0)) as silent:  # which takes connections, and says nothing
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/v1"
        where = rf"{url}/chat/completions: no answer to a row's request \(asked .*no answer within [\d.]+ s \(timeout\)"
        what = (
            r".*\), nor to the smallest there is \(one token of model 'm'\) in \d+ s: is this the endpoint \(base_url\)"
        )
        with pytest.raises(RunFailed, match=rf"{where}{what}\? If it is slow, give a longer timeout") as e:
            asked(5, tmp_path / "out", base_url=url, timeout=timeout, batch_timeout=4.0)
        assert e.value.exit_code == 1
    assert not (tmp_path / "out" / "_SUCCESS").exists()


def test_an_endpoint_that_is_not_there_yet(chat: ChatServer, tmp_path: Path) -> None:
    """Refused connections are no slow answers; exit 1, and with the address put right the same job goes on."""
    with pytest.raises(RunFailed, match=r"is this the endpoint \(base_url\)\? Run again once it answers$") as e:
        asked(5, tmp_path / "out", base_url="http://127.0.0.1:9/v1", batch_timeout=4.0)
    assert e.value.exit_code == 1
    assert asked(5, tmp_path / "out", base_url=chat.url).rows_ok == 5


def test_the_report_tells_who_was_asked(chat: ChatServer, tmp_path: Path) -> None:
    """Instead of this machine's threads: the addresses without secrets, and how many requests were in flight."""
    chat.set(latency=0.05)
    url = chat.url.replace("://", "://user:sesame-street@")
    chat.set(key=None)
    report = asked(100, tmp_path / "out", base_url=url, concurrency=8)
    assert report.details["runs_on"]["at_once"] == chat.told()["most"] == 8
    on = next(line for line in str(report).splitlines() if line.startswith("on "))
    assert on.endswith(f"{chat.url.partition('://')[2]}, up to 8 requests at a time") and "sesame" not in str(report)
    chat.set(busy=0.2)
    told = str(asked(100, tmp_path / "later", base_url=url, concurrency=8))
    found = re.search(r"up to 8 requests at a time, (\d+) put off \(429, 503\)", told)
    assert found and 0 < int(found[1]) <= chat.told()["statuses"]["429"]
