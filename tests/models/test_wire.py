"""Endpoints that lose answers, send them twice or without end, or repeat the key: what is published, and its cost."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pyarrow as pa
import pytest

import gristmill as gm
from gristmill.errors import BadModel, RunFailed
from gristmill.job.prompts import Prompt
from gristmill.job.secret import Secret, unsaid
from gristmill.models import wire
from gristmill.models.asking import reached

pytestmark = pytest.mark.filterwarnings("ignore::gristmill.GristmillWarning")
Says = Callable[[str, asyncio.StreamWriter], Any]
KEY = "sk-very/secret=0123456789"
DOLLAR = {"input": "0.05/token", "output": "0.05/token"}  # for the 10 tokens of a prompt and of an answer


def http(body: Any, status: str = "200 OK", **headers: str) -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    told = {"content-length": str(len(data)), **{name.replace("_", "-"): value for name, value in headers.items()}}
    return "".join([f"HTTP/1.1 {status}\r\n", *(f"{k}: {v}\r\n" for k, v in told.items()), "\r\n"]).encode() + data


def chat(text: str) -> dict[str, Any]:
    usage = {"prompt_tokens": 10, "completion_tokens": 10}
    return {"id": "x", "choices": [{"message": {"content": text}, "finish_reason": "stop"}], "usage": usage}


class Raw:
    """A server that writes whatever `says` writes or returns; None cuts the connection. `asked` are its prompts."""

    def __init__(self) -> None:
        self.says: Says = lambda text, _: http(chat(f"<{text}>"))
        self.asked: Counter[str] = Counter()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=asyncio.run, args=(self._serve(),))

    def __enter__(self) -> Raw:
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()

    async def _serve(self) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        self._ready.set()
        await self._over.wait()
        server.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                length = re.search(r"content-length: (\d+)", head)
                body = json.loads(await reader.readexactly(int(length[1]))) if length else {}
                text = body["messages"][-1]["content"] if "messages" in body else json.dumps(body.get("input"))
                self.asked[text] += 1
                said = self.says(text, writer)
                if isinstance(said, bytes):
                    writer.write(said)
                elif said is None or await said is None:
                    break
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            writer.close()


@pytest.fixture
def raw(monkeypatch: pytest.MonkeyPatch) -> Iterator[Raw]:
    """A server, its address and its key in the environment."""
    with Raw() as server:
        monkeypatch.setenv("OPENAI_API_KEY", KEY)
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        yield server


def prompt(rows: int, **more: Any) -> Any:
    texts = [f"row {n}" for n in range(rows)]
    return gm.prompt(texts, prompt="{{ text }}", model="m", workers=0, gates={"min_ok": 0}, **more)


# ---------------------------------------------------------------- what is lost


@pytest.mark.parametrize("how", ["cut", "late"])
def test_answers_that_are_lost_count_for_max_cost(raw: Raw, how: str) -> None:
    """A request that was sent whole may have to be paid for, each time that it is sent."""

    async def late(writer: asyncio.StreamWriter, text: str) -> bool:
        await asyncio.sleep(1.5)
        writer.write(http(chat(text)))
        return True

    def says(text: str, writer: asyncio.StreamWriter) -> Any:
        if text in ("row 0", "row 1"):
            return http(chat(text))
        return None if how == "cut" else late(writer, text)

    raw.says = says
    with pytest.raises(RunFailed, match=r"max_cost 12: \$1[01].* are spent"):
        prompt(30, max_tokens=10, concurrency=4, timeout=0.5, price=DOLLAR, max_cost=12.0, batch_timeout=10)
    assert 8 <= raw.asked.total() <= 12


def test_the_report_tells_what_lost_answers_may_have_cost(raw: Raw, tmp_path: Path) -> None:
    """Beside what was answered; refusals and connections that were never made are free."""

    def says(text: str, writer: asyncio.StreamWriter) -> Any:
        return None if text == "row 3" and raw.asked[text] < 3 else http(chat(text))

    raw.says = says
    table = pa.table({"text": [f"row {n}" for n in range(6)]})
    ask: dict[str, Any] = {"prompt": "{{ text }}", "model": "m", "max_tokens": 10, "price": DOLLAR}
    used = gm.prompt(table, tmp_path / "out", workers=0, **ask).used
    assert used["requests"] == 6 and used["cost"] == pytest.approx(8.0, abs=0.2)


# ---------------------------------------------------------------- what comes twice, or without end


def test_no_row_gets_the_answer_to_another(raw: Raw) -> None:
    """A server that sends a reply once more on the same connection, when the next request is on its way."""

    async def out(writer: asyncio.StreamWriter, text: str) -> bool:
        if text != "row 3":
            await asyncio.sleep(0.05)
        writer.write(data := http(chat(text)))
        if text == "row 3":
            await asyncio.sleep(0.02)
            writer.write(data)
        return True

    raw.says = lambda text, writer: out(writer, text)
    assert prompt(30, concurrency=4)["answer"].to_pylist() == [f"row {n}" for n in range(30)]


def test_a_connection_that_says_more_than_it_was_asked_is_closed(raw: Raw) -> None:
    """While nothing is asked: the next request has another one."""

    async def out(writer: asyncio.StreamWriter, text: str) -> bool:
        writer.write(http(chat(text)))
        await asyncio.sleep(0.02)
        writer.write(http(chat("too much")))
        return True

    raw.says = lambda text, writer: out(writer, text)

    async def asked() -> list[bytes]:
        found = []
        async with aiohttp.ClientSession(connector=wire.Connector()) as session:
            for n in range(3):
                body = {"messages": [{"content": f"row {n}"}]}
                async with session.post(f"{raw.url}/chat/completions", json=body) as reply:
                    found.append(json.loads(await wire.whole(reply))["choices"][0]["message"]["content"])
                await asyncio.sleep(0.1)
        return found

    assert asyncio.run(asked()) == ["row 0", "row 1", "row 2"]


def test_equal_answers_are_doubted_once(raw: Raw) -> None:
    """Of a server that gives its replies no names, and may mean it."""
    raw.says = lambda text, _: http(chat("yes" if len(text) == 6 else "no"))
    assert prompt(40, concurrency=1)["answer"].to_pylist() == ["no"] * 10 + ["yes"] * 30
    assert raw.asked.total() <= 42


@pytest.mark.parametrize("packed", [True, False])
def test_a_reply_without_end_is_none(raw: Raw, monkeypatch: pytest.MonkeyPatch, packed: bool) -> None:
    """No more is held than an answer can have; the request is sent again."""
    monkeypatch.setattr(wire, "MOST", 1 << 20)
    much = json.dumps(chat("row 2")).encode() + b" " * (1 << 22)

    def says(text: str, _: Any) -> Any:
        if text != "row 2" or raw.asked[text] > 1:
            return http(chat(text))
        return http(gzip.compress(much), content_encoding="gzip") if packed else http(much)

    raw.says = says
    assert prompt(4)["answer"].to_pylist() == [f"row {n}" for n in range(4)]
    assert raw.asked["row 2"] == 2


ODD = ["204 No Content", "408 Late", "424 Failed", "499 Closed", "507 Full", "530 Origin", "599 Network", "999 Odd"]


def test_statuses_of_what_may_be_answered_another_time(raw: Raw) -> None:
    """However odd: only a server that says that it never will is believed."""

    def says(text: str, _: Any) -> Any:
        n = int(text.split()[1])
        if n == len(ODD):
            return http(b"no", "501 Not Implemented")
        odd = n < len(ODD) and raw.asked[text] == 1
        return http(b"" if n == 0 else b"oops", ODD[n]) if odd else http(chat(text))

    raw.says = says
    assert len(prompt(len(ODD) + 2)) == len(ODD) + 1 and raw.asked[f"row {len(ODD)}"] == 1


# ---------------------------------------------------------------- vectors, keys


def test_vectors_of_another_form_are_paid_for(raw: Raw, tmp_path: Path) -> None:
    """As all that was answered: each half of a request that is sent again, too."""
    billed = 0

    def says(text: str, _: Any) -> Any:
        nonlocal billed
        texts = json.loads(text)
        billed += 10 * len(texts)
        vectors = [{"index": n, "embedding": "###" if "bad" in t else [1.0, 2.0]} for n, t in enumerate(texts)]
        return http({"data": vectors, "usage": {"prompt_tokens": 10 * len(texts)}})

    raw.says = says
    model = gm.TextEmbedder("m", "text", base_url=raw.url, price={"input": "0.1/token", "output": "0.1/token"})
    rows = [{"text": "bad one" if n == 40 else f"row {n}"} for n in range(64)]
    report = gm.Job(rows, model, str(tmp_path / "out"), workers=0, gates=gm.Gates(min_ok=0.5)).run()
    assert report.rows_dead == 1 and billed > 640
    assert report.used["prompt_tokens"] == billed and report.used["cost"] == pytest.approx(billed / 10)


def test_a_key_that_is_repeated_with_an_answer(raw: Raw, tmp_path: Path) -> None:
    """Is in nothing that is kept: neither in the output, nor in the cache, nor in what is kept beside it."""
    echo = json.dumps({**chat("fine"), "debug": {"authorization": f"Bearer {KEY}"}}).replace("/", "\\/").encode()
    raw.says = lambda text, _: http(echo)
    body = json.dumps({"messages": [{"role": "user", "content": "row"}]})
    line = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": json.loads(body)}
    (tmp_path / "in.jsonl").write_text(json.dumps(line) + "\n")
    gm.run_batch(
        tmp_path / "in.jsonl", tmp_path / "out", model="m", workers=0, cache=str(tmp_path / "cache"), dedupe=True
    )
    files = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert any(b"${env:OPENAI_API_KEY}" in data for data in files)
    assert not any(form.encode() in data for data in files for form in (KEY, KEY.replace("/", "\\/")))


def test_a_word_that_is_a_key_stays_in_answers() -> None:
    """Servers that want no key are given "none", "EMPTY" or "ollama": that may be an answer."""
    assert unsaid({"text": "none"}, b'{"text": "none"}', [Secret("***", "none")]) == {"text": "none"}


@pytest.mark.parametrize("odd", ["sk-1234567\r\nx: y", "sk-1234567\ty", "sk-\udc80abc"])
def test_a_key_with_a_line_s_end_inside(monkeypatch: pytest.MonkeyPatch, odd: str) -> None:
    """Is told before anything is asked, without the key; the one at its end, as files have it, is left out."""
    monkeypatch.setenv("OPENAI_API_KEY", odd)
    with pytest.raises(BadModel, match="OPENAI_API_KEY of the environment holds a character that no key has") as found:
        reached(Prompt("{{ text }}", "m"))
    assert odd[:8] not in str(found.value)
    with pytest.raises(BadModel, match=r"api_key \(\*\*\*\) holds"):
        reached(Prompt("{{ text }}", "m", api_key=odd))
    monkeypatch.setenv("OPENAI_API_KEY", "sk-1234567\n")
    key = reached(Prompt("{{ text }}", "m")).api_key
    assert isinstance(key, Secret) and key.reveal() == "sk-1234567"


def test_vectors_that_are_lost_end_at_max_cost(raw: Raw, tmp_path: Path) -> None:
    """Also where each request is of many texts, and more of them wait than may be sent."""
    lost = 0

    def says(text: str, _: Any) -> Any:
        nonlocal lost
        texts = json.loads(text)
        if len(texts) > 1:
            lost += len(texts)
            return None
        return http({"data": [{"index": 0, "embedding": [1.0, 2.0]}], "usage": {"prompt_tokens": 10}})

    raw.says = says
    model = gm.TextEmbedder("m", "text", base_url=raw.url, price={"input": "0.1/token", "output": "0/token"},
                            max_cost=60.0, concurrency=2)  # fmt: skip
    rows = [{"text": f"row {n:03}"} for n in range(500)]
    with pytest.raises(RunFailed, match="max_cost 60"):
        gm.Job(rows, model, str(tmp_path / "out"), workers=0, batch_timeout=30).run()
    assert 20 < lost <= 60
