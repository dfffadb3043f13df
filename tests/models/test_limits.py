"""What requests may cost and take, and what an endpoint says it has room for: held before they are sent."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gristmill as gm
from gristmill.commit import once
from gristmill.commit.allowance import Allowance
from gristmill.commit.journal import Journal
from gristmill.driver.tally import Tally
from gristmill.errors import RunFailed
from gristmill.files.disk import LOCAL
from gristmill.models import endpoint, prompt, spending, usual
from gristmill.models.bill import Bill
from gristmill.models.contract import Place, Told
from gristmill.models.ending import Ending
from gristmill.models.endpoint import Endpoint
from gristmill.models.outcomes import may_be_billed
from gristmill.models.paid import Paid, endpoint_of
from gristmill.models.purse import Purse
from gristmill.models.spending import _money
from gristmill.models.turns import Turns
from gristmill.models.usual import most_tokens
from gristmill.observe.events import Progress, Silent
from llmserver import KEY, ChatServer

pytestmark = pytest.mark.filterwarnings("ignore::gristmill.GristmillWarning")


def table(rows: int) -> pa.Table:
    return pa.table({"id": range(rows), "text": [f"row {n} is here" for n in range(rows)]})


@pytest.mark.long
def test_rows_that_are_longer_than_those_before_cross_no_max_cost(chat: ChatServer, tmp_path: Path) -> None:
    """Each request is reserved by its own length: many are in flight when the long ones come."""
    chat.set(answer="never", latency=0.01)
    texts = [f"short {n} text" for n in range(300)] + [f"long {n} " + "text " * 398 for n in range(100)]
    ask: dict[str, Any] = {"prompt": "{{ text }}", "model": "m", "keep": ["id"], "workers": 1, "concurrency": 32}
    price = {"input": "1/1K", "output": "0/token"}  # 0.90 for all short ones, 0.40 for each long one
    with pytest.raises(RunFailed, match=r"max_cost 3: \$.* are spent, and what comes next might cost"):
        gm.prompt(pa.table({"id": range(400), "text": texts}), tmp_path / "out", price=price, max_cost=3.0, **ask)
    spent = sum(len(text.split()) for text in chat.told()["answered"]) / 1000
    assert 2.0 < spent <= 3.0


def test_what_all_prompts_have_crosses_no_max_cost(chat: ChatServer, tmp_path: Path) -> None:
    """As templates of chats, schemas and images: long rows do not tell what short ones take."""
    chat.set(answer="never", latency=0.1, fixed=100)
    texts = [f"{n} " + "text " * 400 for n in range(20)] + [f"r {n}" for n in range(200)]
    ask: dict[str, Any] = {"prompt": "{{ text }}", "model": "m", "keep": ["id"], "workers": 1, "concurrency": 100}
    price = {"input": "1/token", "output": "0/token"}
    with pytest.raises(RunFailed, match="max_cost 12000"):
        gm.prompt(pa.table({"id": range(220), "text": texts}), tmp_path / "out", price=price, max_cost=12_000.0, **ask)
    spent = sum(100 + len(text.split()) for text in chat.told()["answered"])
    assert 10_000 < spent <= 12_000


@given(
    st.integers(0, 500), st.floats(0.3, 3.0), st.lists(st.floats(1.0, 2000.0), min_size=1, max_size=40),
    st.floats(1.0, 2000.0),
)  # fmt: skip
def test_prompts_are_not_taken_to_be_less_than_they_are(
    fixed: int, slope: float, sizes: list[float], size: float
) -> None:
    """Whatever part all have besides their length, and whichever lengths were answered."""
    known = usual.Usual()
    for one in sizes:
        known.add(one, fixed + slope * one, 1.0, None)
    assert known.tokens(size, None)[0] >= (fixed + slope * size) * (1 - 1e-6)


@pytest.mark.few(3)
@pytest.mark.parametrize("usage", [{}, {"total_tokens": 9}, {"prompt_tokens": "4", "completion_tokens": "5"}, None])
@pytest.mark.parametrize("most", [5, None])
def test_max_cost_holds_where_the_endpoint_tells_no_usage(
    chat: ChatServer, tmp_path: Path, capfd: pytest.CaptureFixture[str], usage: Any, most: int | None
) -> None:
    """By the length of prompts and the most that answers may be, or theirs: said once, as costs are estimates then."""
    chat.set(odd={"usage": usage})
    ask: dict[str, Any] = {"prompt": "odd {{ text }}", "model": "m", "keep": ["id"], "workers": 1, "max_tokens": most}
    price = {"input": "0.01/token", "output": "0.01/token"}
    with pytest.raises(RunFailed, match="max_cost 2"):
        gm.prompt(table(60), tmp_path / "out", price=price, max_cost=2.0, **ask)
    assert 10 <= chat.told()["requests"] <= 22  # of 8 or 9 tokens, without max_tokens with what is around an answer
    assert gm.status(tmp_path / "out")["used"]["cost"] <= 2.0
    assert capfd.readouterr().err.count("their cost is an estimate") == 1


def test_max_cost_holds_where_answers_take_more_than_max_tokens(chat: ChatServer, tmp_path: Path) -> None:
    """As where thoughts are billed beside what max_tokens limits: the first answer shows it."""
    chat.set(latency=0.05, odd={"usage": {"prompt_tokens": 4, "completion_tokens": 200}})
    ask: dict[str, Any] = {"prompt": "odd {{ text }}", "model": "m", "keep": ["id"], "workers": 1, "max_tokens": 20}
    price = {"input": "0/token", "output": "1/token"}
    with pytest.raises(RunFailed, match="max_cost 4000"):
        gm.prompt(table(200), tmp_path / "out", price=price, max_cost=4000.0, concurrency=200, **ask)
    assert 2000 <= 200 * chat.told()["requests"] <= 4000


@pytest.mark.parametrize(
    ("body", "most"),
    [
        ({"max_tokens": 5}, 5),
        ({"max_tokens": 5, "n": 3}, 15),
        ({"max_tokens": 5, "n": 2, "best_of": 4}, 20),
        ({"max_tokens": 5, "prompt": ["a", "b", "c"], "best_of": 2}, 30),
        ({"max_tokens": 5, "prompt": [[1, 2], [3]]}, 10),
        ({"max_tokens": 5, "prompt": [1, 2, 3]}, 5),
        ({"n": 3}, None),
    ],
)
def test_the_most_that_a_request_makes(body: dict[str, Any], most: int | None) -> None:
    """Of all its answers, those that are only compared (best_of) too, to all its prompts."""
    assert most_tokens(body) == most


@pytest.mark.parametrize("failure", ["nonsense", "gateway"])
def test_what_may_be_billed_without_an_answer_counts(chat: ChatServer, tmp_path: Path, failure: str) -> None:
    """A reply that cannot be read, and a proxy that did not wait for one: in max_cost, and in what is told."""
    chat.set(**{failure: 0.6})
    price = {"input": "0/token", "output": "0.01/token"}
    ask: dict[str, Any] = {"prompt": "{{ text }}", "model": "m", "keep": ["id"], "workers": 1, "max_tokens": 4}
    with pytest.raises(RunFailed, match="max_cost 1"):
        gm.prompt(table(60), tmp_path / "out", price=price, max_cost=1.0, **ask)
    told = chat.told()
    assert told["requests"] > 1.2 * sum(told["answered"].values())
    assert 20 <= told["requests"] <= 25
    assert gm.status(tmp_path / "out")["used"]["cost"] == pytest.approx(0.04 * told["requests"])


@pytest.mark.parametrize(
    ("status", "reply", "billed"),
    [
        (None, None, True), (200, None, True), (200, {"choices": None}, True), (200, {"error": {"code": 1}}, False),
        (202, None, True), (408, None, True), (504, None, True), (524, None, True), (502, None, True),
        (429, None, False), (500, None, False), (503, None, False), (529, None, False), (522, None, False),
    ],
)  # fmt: skip
def test_which_failures_may_be_billed(status: int | None, reply: Any, billed: bool) -> None:
    """Those after which an answer may have been computed, which nobody saw."""
    assert may_be_billed(status, reply) == billed


@pytest.mark.long
def test_a_limit_of_tokens_holds_without_max_tokens(chat: ChatServer) -> None:
    """Answers are taken to be as long as those before, from the first one on."""
    chat.set(latency=0.1, odd={"usage": {"prompt_tokens": 2, "completion_tokens": 500}})
    begun = time.monotonic()
    gm.prompt(
        table(8), prompt="odd {{ text }}", model="m", tokens_per_minute=60_000, workers=0, concurrency=32, keep=["id"]
    )
    assert (
        3.5 < time.monotonic() - begun < 9.0
    )  # 4,016 tokens, of 1,000 a second; the last one's time is not waited for


def test_dollars_are_told_however_few() -> None:
    """Nothing that costs something is told as nothing."""
    assert [_money(d) for d in (0.0, 1.5, 0.005, 0.0000123, 0.0175)] == [
        "0.0000",
        "1.5000",
        "0.0050",
        "0.000012",
        "0.0175",
    ]


@pytest.mark.long
@given(steps=st.lists(st.tuples(st.integers(0, 2), st.floats(0.1, 20), st.floats(0.0, 1.0)), max_size=60))
def test_reservations_are_within_the_total(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[int, float, float]]
) -> None:
    """Of all workers together, whatever is reserved, cheaper than that, and given back."""
    folder = str(tmp_path_factory.mktemp("g"))
    purses = [Purse(100.0, 1 / 3) for _ in range(3)]
    flying: list[list[float]] = [[], [], []]
    for purse in purses:
        purse.allowance = Allowance(folder, "r", LOCAL)
    for who, cost, share in steps:
        purse = purses[who]
        if purse.reserve(cost):
            flying[who].append(cost)
        elif flying[who]:
            done = flying[who].pop()
            purse.spent += share * done
            purse.release(done)
        assert sum(p.spent for p in purses) + sum(map(sum, flying)) <= 100.0 + 1e-6
    for purse, left in zip(purses, flying, strict=True):
        for cost in left:
            purse.release(cost)
        purse.close()
    spent = sum(p.spent for p in purses)
    assert Allowance(folder, "r", LOCAL).claim(100.0 - spent - 1e-6, 100.0) > 0 or spent > 99.9


def test_all_that_wait_for_money_hear_at_once_that_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other workers may leave some, for which one request waits a while; the others do not wait again."""
    monkeypatch.setattr(spending, "PATIENCE", 0.3)
    spec = gm.Prompt("x", "m", base_url="http://127.0.0.1:1", price={"input": "1/1K", "output": "1/1K"}, max_cost=1.0)

    async def told() -> list[Any]:
        asker = Paid(spec, 0.5, endpoint_of(spec, 0.5, 8, 60.0))
        asker.spending.of(Allowance(str(tmp_path), "r", LOCAL))
        return await asyncio.gather(*(asker.spending.keep(lambda: 2.0) for _ in range(50)), return_exceptions=True)

    begun = time.monotonic()
    assert all(isinstance(error, RunFailed) and "max_cost 1" in str(error) for error in asyncio.run(told()))
    assert 0.3 < time.monotonic() - begun < 5.0


@pytest.mark.parametrize("dies", [True, False])
def test_what_a_dead_worker_had_kept_free_is_not_told_as_spent(tmp_path: Path, dies: bool) -> None:
    """What those spent that have ended, in this run or an earlier part of it, is."""
    spec = gm.Prompt(
        "x", "m", base_url="http://127.0.0.1:1", price={"input": "1/token", "output": "0/token"}, max_cost=100.0
    )

    def worker() -> spending.Spending:
        found = spending.Spending(spec, 1.0, Ending())
        found.of(Allowance(str(tmp_path), "r", LOCAL))
        return found

    async def stopped() -> str:
        Allowance(str(tmp_path), "r", LOCAL).begin(20.0)
        first, second = worker(), worker()
        await first.keep(lambda: 70.0)
        first.spend(30.0, kept=30.0)
        if not dies:
            first.close()
        assert second.more(5.0)
        with pytest.raises(RunFailed) as e:
            await second.keep(lambda: 60.0)
        return str(e.value)

    assert (", or kept free by a worker that died" in asyncio.run(stopped())) is dies


def test_what_workers_have_kept_free_that_are_there_is_not_said_to_be_of_one_that_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody can tell: of several workers the others are named, too."""
    monkeypatch.setattr(spending, "PATIENCE", 0.2)
    monkeypatch.setattr(spending, "LOOK", 0.05)
    spec = gm.Prompt(
        "x", "m", base_url="http://127.0.0.1:1", price={"input": "1/token", "output": "0/token"}, max_cost=100.0
    )

    async def stopped() -> str:
        first, second = (spending.Spending(spec, 0.5, Ending()) for _ in range(2))
        for worker in (first, second):
            worker.of(Allowance(str(tmp_path), "r", LOCAL))
        await first.keep(lambda: 70.0)
        with pytest.raises(RunFailed) as e:
            await second.keep(lambda: 60.0)
        return str(e.value)

    assert ", or kept free by other workers, or by one that died, and what comes next" in asyncio.run(stopped())


@pytest.mark.long
def test_a_request_that_waits_long_for_its_turn_is_asked_once(
    chat: ChatServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another worker has the same one to ask meanwhile: the claim lasts as long as the wait of whoever has it."""
    monkeypatch.setattr(once, "LATE", 0.4)
    chat.set(latency=2.0)
    spec = gm.Prompt("x", "m", base_url=chat.url, api_key=KEY, dedupe=True)

    async def told() -> list[Any]:
        workers = [Paid(spec, 0.5, endpoint_of(spec, 0.5, 8, 60.0)) for _ in range(2)]
        journal = Journal(str(tmp_path), 0, "r", "1", LOCAL, once=lambda: once.Once(str(tmp_path), "r"))
        for worker in workers:
            worker.shares(journal)
        body = {"model": "m", "messages": [{"role": "user", "content": "row 1"}]}
        try:
            return await asyncio.gather(*(worker.ask(body, 4.0, Bill({})) for worker in workers))
        finally:
            for worker in workers:
                await worker.aclose()

    first, other = asyncio.run(told())
    assert first == other and chat.told()["requests"] == 1


@pytest.mark.long
@pytest.mark.parametrize("limit", [{"requests_per_minute": 300}, {"tokens_per_minute": 2000}])
def test_a_key_that_is_refused_ends_what_a_limit_holds_back(
    chat: ChatServer, tmp_path: Path, limit: dict[str, int]
) -> None:
    """Whoever waits for its turn is not asked any more: neither later nor now."""
    chat.set(turns=[5, 401, 401])
    ask: dict[str, Any] = {"prompt": "{{ text }}", "model": "m", "keep": ["id"], "workers": 1, "concurrency": 100}
    begun = time.monotonic()
    with pytest.raises(RunFailed, match="the endpoint refuses the key now"):
        gm.prompt(table(150), tmp_path / "out", **limit, **ask)
    assert chat.told()["requests"] <= 7 and time.monotonic() - begun < 20.0


@pytest.mark.long
def test_an_address_that_rests_holds_no_other_up(chat: ChatServer, tmp_path: Path) -> None:
    """It asks for a minute, or fails without a word: the others answer all at once, and it is asked a few times."""
    with ChatServer(busy=1.0, retry_after=60) as resting, ChatServer(broken=1.0) as broken, ChatServer(cut=1.0) as cut:
        urls = ",".join((resting.url, broken.url, chat.url, cut.url))
        begun = time.monotonic()
        report = gm.prompt(
            table(600), tmp_path / "out", prompt="{{ text }}", model="m", keep=["id"], base_url=urls, workers=1
        )
        assert report.rows_ok == 600 and time.monotonic() - begun < 20
        assert resting.told()["requests"] < 20 and max(broken.told()["requests"], cut.told()["requests"]) < 60


@pytest.mark.long
def test_an_address_is_used_again_once_it_is_well(chat: ChatServer, tmp_path: Path) -> None:
    """Of two that share the load, one is broken at first."""
    chat.set(latency=0.03)
    with ChatServer(broken=1.0, latency=0.03) as other:
        thread = threading.Timer(1.0, lambda: other.set(broken=0.0))
        thread.start()
        gm.prompt(
            table(3000), tmp_path / "out", prompt="{{ text }}", model="m", keep=["id"], workers=1, concurrency=20,
            base_url=f"{other.url},{chat.url}",
        )  # fmt: skip
        thread.join()
        assert sum(other.told()["answered"].values()) > 300


class Sender:
    """An endpoint.Payer of a request that turns out to cost more as it is to be sent, or that comes from a row which
    is given up then."""

    def __init__(self, dearer: bool = False) -> None:
        self.dearer = dearer

    def still(self) -> bool:
        dearer, self.dearer = self.dearer, False
        return not dearer

    async def again(self) -> None:
        await asyncio.sleep(0.02)

    def lost(self) -> None: ...

    def refused(self, reply: Any) -> None: ...

    def probed(self, path: str, body: Any, reply: Any) -> None: ...


@pytest.mark.parametrize("ends", ["dearer", "cancelled"])
def test_an_address_is_tried_again_whatever_became_of_its_trial(
    chat: ChatServer, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    """The request that was to find out whether it is well again is not sent after all, or never answered."""
    monkeypatch.setattr(endpoint, "MOST", 0.05)

    async def seen(other: ChatServer) -> None:
        spec = gm.Prompt("x", "m", base_url=f"{other.url},{chat.url}", api_key=KEY, concurrency=8)
        client = endpoint_of(spec, 1.0, 8, 20.0)

        def asked(text: str, payer: Sender | None = None) -> asyncio.Task[Any]:
            body = {"model": "m", "messages": [{"role": "user", "content": text}]}
            return asyncio.ensure_future(client.ask(body, 4.0, payer=payer or Sender()))

        left = next(address for address in client._addresses if address.url == other.url)
        try:
            await asked("first")
            other.set(broken=1.0)
            await asyncio.gather(*[asked(f"row {n}") for n in range(8)])
            assert left.failures >= 2
            await asyncio.sleep(max(0.0, left.rests_until - time.monotonic()))
            trial = asked("trial", Sender(dearer=ends == "dearer"))
            if ends == "cancelled":
                other.set(broken=0.0, latency=20.0)
                while not left.flying:
                    await asyncio.sleep(0.01)
                trial.cancel()
            await asyncio.wait([trial])
            other.set(broken=0.0, latency=0.0)
            for n in range(60):
                await asked(f"last {n}")
                await asyncio.sleep(0.005)
        finally:
            await client.close()

    with ChatServer() as other:
        asyncio.run(seen(other))
        assert sum(other.told()["answered"].values()) > 5


def test_a_turn_that_nobody_takes_is_another_ones() -> None:
    """A request that is not sent when its turn has come holds up no other, of a limit of requests or of tokens."""

    async def took(unsent: int) -> float:
        turns, begun = Turns(600, 60_000, 1.0, Ending()), time.monotonic()
        for n in range(unsent + 5):
            number = await turns.take(100.0)
            if n < unsent:
                turns.unsent(number, 100.0)
        cut = asyncio.ensure_future(turns.take(100.0))
        await asyncio.sleep(0)
        cut.cancel()
        await turns.take(100.0)
        return time.monotonic() - begun

    assert asyncio.run(took(8)) < asyncio.run(took(0)) + 0.2 < 1.0


@pytest.mark.long
def test_a_pause_that_is_too_long_stops_the_job(chat: ChatServer, tmp_path: Path) -> None:
    """At once, with the time, and nothing lost."""
    asked: dict[str, Any] = {"prompt": "{{ text }}", "model": "m", "keep": ["id"], "workers": 1}
    chat.set(latency=0.02)
    thread = threading.Timer(2.0, lambda: chat.set(busy=1.0, retry_after=3600))
    thread.start()
    with pytest.raises(RunFailed, match=r"asks to be left alone until 2\d{3}-.* \(3,600 s\), which is longer"):
        gm.prompt(table(20_000), tmp_path / "out", gates={"min_ok": 0}, **asked)
    thread.join()
    assert gm.status(tmp_path / "out")["rows_dead"] == 0


def test_a_short_pause_is_that_of_one_request_until_many_are_to_wait(chat: ChatServer) -> None:
    """A few may be refused by chance: others go on. Once most of them are, it is the endpoint that has too much."""
    chat.set(retry_after=4)

    async def seen() -> None:
        client = endpoint_of(gm.Prompt("x", "m", base_url=chat.url, api_key=KEY, concurrency=16), 1.0, 16, 60.0)

        def asked(text: str) -> asyncio.Task[Any]:
            body = {"model": "m", "messages": [{"role": "user", "content": text}]}
            return asyncio.ensure_future(client.ask(body, 4.0, payer=Sender()))

        async def refused(rows: int, so_far: int) -> list[asyncio.Task[Any]]:
            chat.set(busy=1.0)
            held = [asked(f"held {so_far + n}") for n in range(rows)]
            while chat.told()["statuses"].get("429", 0) < so_far + rows:
                await asyncio.sleep(0.01)
            chat.set(busy=0.0)
            await asyncio.sleep(0.05)
            return held

        try:
            await asked("first")
            held = await refused(1, 0)
            await asyncio.gather(*(asked(f"row {n}") for n in range(40)))
            assert not held[0].done() and client.put_off == 1
            held += await refused(12, 1)
            held.append(asked("last"))
            await asyncio.sleep(0.2)
            assert not any(task.done() for task in held) and client.put_off == 13
        finally:
            for task in held:
                task.cancel()
            await asyncio.wait(held)
            await client.close()

    asyncio.run(seen())


class Shown(Silent):
    """An observer that keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[Progress] = []

    def progress(self, now: Progress) -> None:
        """See Observer."""
        self.told.append(now)


@pytest.mark.long
@pytest.mark.parametrize("how", [{"down": True}, {"broken": 1.0}, {"busy": 1.0}])
def test_an_endpoint_that_is_gone_is_told_and_stops_the_job(
    chat: ChatServer, tmp_path: Path, how: dict[str, Any]
) -> None:
    """Within one batch_timeout, said within seconds; no row is given up, and none counts as done that has no answer."""
    chat.set(latency=0.02)
    seen = Shown()
    job = gm.Job(
        table(20_000), gm.Prompt("{{ text }}", "m"), gm.sink(str(tmp_path / "out"), keep=["id"]), workers=1,
        gates={"min_ok": 0}, batch_timeout=8,
    )  # fmt: skip
    gone = 0.0

    def go() -> None:
        nonlocal gone
        while chat.told()["requests"] < 100:
            time.sleep(0.05)
        gone = time.monotonic()
        chat.set(**how)

    thread = threading.Thread(target=go)
    thread.start()
    with pytest.raises(RunFailed, match=r"no answer from http://127.* for \d+ s .*; what is answered is kept"):
        job.run(observer=seen)
    thread.join()
    assert time.monotonic() - gone < 15
    told = chat.told()
    assert any(now.waiting.startswith("waiting: no answer from http://127.0.0.1") for now in seen.told)
    assert max(now.rows_done for now in seen.told) <= sum(told["answered"].values())
    assert gm.status(tmp_path / "out")["rows_dead"] == 0


@pytest.mark.long
def test_rows_that_are_never_answered_are_dead_letters_alone(chat: ChatServer, tmp_path: Path) -> None:
    """Also the last ones of a run: the endpoint answers the smallest request that there is."""
    chat.set(stuck="row 5 is here")
    ask: dict[str, Any] = {"prompt": "{{ text }}", "model": "m", "workers": 1, "batch_timeout": 3, "timeout": 1}
    report = gm.prompt(table(6), tmp_path / "out", gates={"min_ok": 0.5}, keep=["id"], **ask)
    assert (report.rows_ok, report.rows_dead) == (5, 1)


@pytest.mark.long
@pytest.mark.parametrize("terse", [True, False])
@pytest.mark.parametrize("row", [0, 5])
def test_a_row_that_always_breaks_the_endpoint(chat: ChatServer, tmp_path: Path, row: int, terse: bool) -> None:
    """The first row is no reason to think that nobody is there, nor is the last one, also once it is left alone: the
    endpoint answers the smallest request, or again the first token of what it has answered.
    """
    chat.set(fails=f"row {row} is here", terse=terse)
    ask: dict[str, Any] = {"prompt": "{{ text }}", "model": "m", "workers": 1, "batch_timeout": 3, "timeout": 1}
    if row == 0 and not terse:
        chat.set(fails="row 1 is here")  # somebody has to be answered
    report = gm.prompt(table(6), tmp_path / "out", gates={"min_ok": 0.5}, keep=["id"], **ask)
    assert (report.rows_ok, report.rows_dead) == (5, 1)
    (error,) = gm.dead(tmp_path / "out")["message"].to_pylist()
    assert "the last time: 500: something broke" in error
    if terse:
        options: dict[str, Any] = {"gates": {"min_ok": 0, "allow_empty": True}, "keep": ["id"], **ask}
        assert gm.prompt(table(6).slice(row, 1), tmp_path / "alone", **options).rows_dead == 1


@pytest.mark.long
def test_a_run_that_stops_says_what_it_spent(chat: ChatServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it stops, among the first rows or later, by whatever; in the report, from Python, and in status."""
    monkeypatch.chdir(tmp_path)
    pq.write_table(table(400), "rows.parquet")
    price = {"input": "1/token", "output": "0/token"}  # 4 dollars a row
    line = ["prompt", "rows.parquet", "out", "--prompt", "{{ text }}", "--model", "m", "--workers", "1"]
    line += ["--price", "input=1/token", "--price", "output=0/token", "--shard-rows", "100"]
    for most in ("5", "600"):
        done = subprocess.run(
            [sys.executable, "-m", "gristmill", *line, "--max-cost", most], capture_output=True, text=True
        )
        told = chat.told()["requests"]
        spent = rf"{told} requests?, {4 * told:,} tokens in, {4 * told:,} out, \${4 * told}\.0000"
        assert done.returncode == 1 and re.search(rf"asked  +{spent}, \d+ answers? kept", done.stdout), done.stdout
        state = subprocess.run([sys.executable, "-m", "gristmill", "status", "out"], capture_output=True, text=True)
        assert re.search(rf"asked  +{spent}, \d+ answers? kept", state.stdout), state.stdout
    with pytest.raises(RunFailed) as e:
        gm.prompt("rows.parquet", "b", prompt="{{ text }}", model="m", price=price, max_cost=9.0, workers=0)
    assert e.value.report is not None and dict(e.value.report.used) == {
        "requests": 2, "prompt_tokens": 8, "completion_tokens": 8, "cost": 8.0, "kept": 2
    }  # fmt: skip
    assert gm.prompt("rows.parquet", "b", prompt="{{ text }}", model="m", price=price, workers=0).used["cost"] == 1600


def test_a_shard_that_was_committed_as_the_run_stopped_is_counted(
    chat: ChatServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its worker had no time to say so: its answers were asked for, and are kept."""
    monkeypatch.setattr(Tally, "_commit", lambda self, event: None)
    price, job = {"input": "1/token", "output": "0/token"}, {"prompt": "{{ text }}", "model": "m", "shard_rows": 100}
    with pytest.raises(RunFailed) as e:
        gm.prompt(table(400), tmp_path / "out", price=price, max_cost=600.0, workers=1, **job)
    assert e.value.report is not None and e.value.report.shards_done >= 1
    assert e.value.report.counts.ok == 100 * e.value.report.shards_done
    assert e.value.report.used["requests"] == chat.told()["requests"] > 100


@pytest.mark.parametrize("answer", ["never", "second"])
@pytest.mark.few(1)
def test_first_answers_that_lie_there_from_an_earlier_run_are_counted_once(
    chat: ChatServer, tmp_path: Path, answer: str
) -> None:
    """However many runs stop while their rows are asked once more."""
    chat.set(answer=answer, latency=0.05)
    price = {"input": "1/1K", "output": "0/token"}
    job: dict[str, Any] = {"prompt": "{{ text }}", "model": "m", "returns": {"n": "int64", "word": "string"}}
    for _ in range(3):
        with pytest.raises(RunFailed, match="max_cost 1") as e:
            gm.prompt(table(300), tmp_path / "out", price=price, max_cost=1.0, workers=1, gates={"min_ok": 0}, **job)
        assert e.value.report is not None and e.value.report.used["requests"] == chat.told()["requests"]


def test_what_rows_of_an_attempt_that_is_over_took_is_told(chat: ChatServer, tmp_path: Path) -> None:
    """With the next rows that their worker scores: their answers are no longer kept, and were paid for."""
    chat.set(latency=0.2)
    model = prompt.open_model(gm.Prompt("{{ text }}", "m", dedupe=True), Place(at_once=8))
    rows, journal = model.prepare(table(5)), Journal(str(tmp_path), 0, "run", "attempt", LOCAL)
    try:
        model.begin(rows, np.arange(5), Told(lambda: None, journal))
        journal.close()
        assert model.waiting(rows, 30.0) == 0
        assert model.used(model.prepare(table(0)))["requests"] == 5
        assert model.used(model.prepare(table(0))) == {}
    finally:
        model.close()


@pytest.mark.long
def test_what_unfinished_rows_took_is_told(chat: ChatServer, tmp_path: Path) -> None:
    """A request that is never answered may be on the bill each time that it is sent: in the report as in the error."""
    chat.set(stuck="row 5 is here")
    price, job = {"input": "1/token", "output": "1/token"}, {"prompt": "{{ text }}", "model": "m", "max_tokens": 20}
    with pytest.raises(RunFailed, match=r"max_cost 200: \$[\d.]+ are spent") as e:
        gm.prompt(table(10), tmp_path / "out", price=price, max_cost=200.0, workers=1, timeout=0.5, **job)
    spent = float(str(e.value).partition("$")[2].partition(" ")[0])
    assert e.value.report is not None and e.value.report.used["kept"] == 9
    assert e.value.report.used["cost"] == pytest.approx(spent, abs=1e-3) and spent > 9 * 8 + 3 * 23
    chat.set(stuck=None)
    report = gm.prompt(table(10), tmp_path / "out", price=price, workers=1, **job)
    assert report.used["cost"] == pytest.approx(spent + 8, abs=1e-3) and report.used["requests"] == 10


@pytest.mark.long
@pytest.mark.parametrize("workers", [1, 2])
def test_a_model_that_has_become_wrong_ends_the_next_run_soon(chat: ChatServer, tmp_path: Path, workers: int) -> None:
    """As it would end a first one: no answer fits, and what it answered before is kept."""
    job: dict[str, Any] = {"prompt": "{{ text }}", "model": "m", "keep": ["id"], "workers": workers, "concurrency": 16}
    job |= {"returns": {"n": "int64", "word": "string"}, "shard_rows": 1000, "gates": {"min_ok": 0}}
    chat.set(answer="json", turns=[300, 401, 401])
    with pytest.raises(RunFailed, match="refuses the key now"):
        gm.prompt(table(4000), tmp_path / "out", **job)
    kept = gm.status(tmp_path / "out")["used"]["kept"]
    chat.set(answer="never", turns=[])
    before = chat.told()["requests"]
    with pytest.raises(RunFailed, match="fails on every row tried, 32 from all over the source among them"):
        gm.prompt(table(4000), tmp_path / "out", **job)
    assert chat.told()["requests"] - before < 2 * (100 * workers + 32)
    chat.set(answer="json")
    before = chat.told()["requests"]
    assert gm.prompt(table(4000), tmp_path / "out", **job).rows_ok == 4000
    assert chat.told()["requests"] - before <= 4000 - kept


@pytest.mark.long
def test_many_bad_rows_before_the_first_good_one_are_dead_letters(chat: ChatServer, tmp_path: Path) -> None:
    """Others show that the model works, and the rest of their shard is asked for."""
    rows = pa.table({"id": range(400), "text": [f"{'too long' if 5 <= n < 100 else 'row'} {n}" for n in range(400)]})
    job: dict[str, Any] = {"prompt": "{{ text }}", "model": "m", "keep": ["id"], "workers": 1, "gates": {"min_ok": 0}}
    chat.set(turns=[5, 401, 401])
    with pytest.raises(RunFailed, match="refuses the key now"):
        gm.prompt(rows, tmp_path / "out", concurrency=1, **job)
    chat.set(turns=[])
    report = gm.prompt(rows, tmp_path / "out", concurrency=4, **job)
    assert (report.rows_ok, report.rows_dead) == (305, 95)
    assert sum(chat.told()["answered"].values()) <= 305 + 32 + 10


@pytest.mark.parametrize(
    ("error", "cost"),
    [
        ({"message": "no", "code": "content_filter"}, 0.0),
        ({"message": "no", "code": "content_filter", "innererror": {"content_filter_result": {}}}, 4.0),
        ({"message": "no", "code": "other", "usage": {"prompt_tokens": 7, "completion_tokens": 1}}, 8.0),
    ],
)
def test_refusals_that_are_billed_are_counted(
    chat: ChatServer, tmp_path: Path, error: dict[str, Any], cost: float
) -> None:
    """What the reply tells, or else the prompt that Azure's filter has read: as long as those that were answered."""
    chat.set(refusal={"error": error})
    rows = pa.table({"id": range(20), "text": [f"row {n} is {'filtered' if n == 7 else 'here'}" for n in range(20)]})
    report = gm.prompt(
        rows, tmp_path / "out", prompt="{{ text }}", model="m", keep=["id"], workers=1, gates={"min_ok": 0},
        price={"input": "1/token", "output": "1/token"}, max_tokens=20,
    )  # fmt: skip
    assert (report.rows_ok, report.rows_dead) == (19, 1)
    assert report.used["cost"] - 19 * 8 == pytest.approx(cost, abs=1.5)
    assert (report.used["cost"] == 19 * 8) == (cost == 0)


@pytest.mark.parametrize("idle", [True, False])
@pytest.mark.few(1)
def test_the_limit_is_for_whoever_has_something_to_send(chat: ChatServer, tmp_path: Path, idle: bool) -> None:
    """One of two workers has a shard without a row to ask for: the other one sends all that may be sent, and both
    together never more.
    """
    texts = [None if idle and n >= 600 else f"row {n}" for n in range(1200)]
    chat.set(limit=1000.0)  # a second, of which it counts how many there were
    report = gm.prompt(
        pa.table({"id": range(1200), "text": pa.array(texts, pa.string())}), tmp_path / "out", prompt="{{ text }}",
        model="m", keep=["id"], workers=2, shard_rows=600, requests_per_minute=6000, gates={"min_ok": 0},
    )  # fmt: skip
    told = chat.told()
    assert report.rows_ok == (600 if idle else 1200) and told["requests"] == report.rows_ok
    assert 60 < told["rate"] < 120  # as it counts; test_turns has how many were sent


@pytest.mark.long
def test_what_waits_for_an_address_takes_its_turns_afterwards(
    chat: ChatServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two is broken, and a single request finds out, for two seconds, that the other one is well again: what
    has waited meanwhile does not leave at once.
    """
    sent: list[float] = []

    async def noted(self: Endpoint, *asked: Any) -> dict[str, Any]:
        sent.append(time.monotonic())
        if len(sent) == 20:
            for timer in timers:
                timer.start()
        return await asks(self, *asked)

    asks = Endpoint._sent
    monkeypatch.setattr(Endpoint, "_sent", noted)
    turns: list[dict[str, Any]] = [{"broken": 1.0}, {"broken": 0.0, "latency": 2.0}, {"latency": 0.0}]
    timers = [threading.Timer(at, chat.set, kwargs=told) for at, told in zip((0.0, 0.5, 2.0), turns, strict=True)]
    with ChatServer(broken=1.0) as other:
        report = gm.prompt(
            table(200), tmp_path / "out", prompt="{{ text }}", model="m", keep=["id"], workers=0, concurrency=100,
            base_url=f"{chat.url},{other.url}", requests_per_minute=3600,
        )  # fmt: skip
    for timer in timers:
        timer.join()
    assert report.rows_ok == 200
    assert max(np.diff(sent)) > 1.0  # somebody has waited
    assert max(sum(begun <= at < begun + 1 for at in sent) for begun in sent) <= 60
