"""Vectors of texts from an endpoint: many texts a request, each row's own answer, paid once."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import gristmill as gm
from gristmill.errors import BadJob, BadModel, PlanChanged, RunFailed
from gristmill.models.bill import Bill
from gristmill.models.embeddings import Together, _One, _Payers
from gristmill.models.ending import Ending
from gristmill.models.keeping import Keeping
from gristmill.models.replies import Refused
from gristmill.models.spending import Spending, Stake
from llmserver import KEY, ChatServer

ROWS = 1000
pytestmark = pytest.mark.filterwarnings("ignore::gristmill.GristmillWarning")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ChatServer]:
    """A server, whose key is in the environment."""
    with ChatServer() as server:
        monkeypatch.setenv("OPENAI_API_KEY", KEY)
        monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
        yield server


def table(rows: int = ROWS) -> pa.Table:
    return pa.table({"id": range(rows), "text": [f"row {n}" + " word" * (n % 7) for n in range(rows)]})


def vectors(sink: Any, column: str = "embedding") -> dict[int, list[float]]:
    """By the row's number, each once."""
    found = gm.read(str(sink)).to_table().to_pylist()
    assert len({row["id"] for row in found}) == len(found)
    return {row["id"]: row[column] for row in found}


WANTED = {n: [2.0 + n % 7, 0.5] for n in range(ROWS)}


@pytest.mark.few(2)
@pytest.mark.parametrize("encodes", [True, False])
@pytest.mark.parametrize("workers", [0, 2])
def test_every_row_has_its_vector(server: ChatServer, tmp_path: Path, workers: int, encodes: bool) -> None:
    """Of an endpoint that fails now and then, in base64 or as numbers, in whatever order; many texts a request."""
    server.set(busy=0.1, broken=0.05, cut=0.05, latency=0.005, encodes=encodes)
    report = gm.embed(
        table(), tmp_path / "out", text="text", model="m", base_url=server.url, keep=["id"], workers=workers
    )
    assert report.rows_ok == ROWS and vectors(tmp_path / "out") == WANTED
    assert gm.read(tmp_path / "out").schema.field("embedding").type == pa.list_(pa.float32(), 2)
    told = server.told()
    assert set(told["answered"].values()) == {1} and told["statuses"]["200"] <= 24


def test_a_text_that_is_refused_is_a_dead_letter_alone(server: ChatServer, tmp_path: Path) -> None:
    """In the endpoint's words, whatever was in the request with it; nothing is asked for twice."""
    rows = table(300).set_column(
        1, "text", pa.array(["too long" if n in (7, 130, 131) else f"t {n}" for n in range(300)])
    )
    sink = tmp_path / "out"
    report = gm.embed(rows, sink, text="text", model="m", base_url=server.url, keep=["id"], gates={"min_ok": 0.9})
    assert (report.rows_ok, report.rows_dead) == (297, 3)
    dead = {json.loads(d["payload"])["id"]: d for d in gm.dead(str(sink)).to_pylist()}
    assert sorted(dead) == [7, 130, 131]
    assert all("maximum context length is 8 tokens" in d["message"] for d in dead.values())
    told = server.told()
    assert set(told["answered"].values()) == {1} and told["requests"] < 60


def test_requests_have_as_many_texts_as_the_endpoint_takes(server: ChatServer, tmp_path: Path) -> None:
    """`batch_rows`, or as many as it turned out to take."""
    options: dict[str, Any] = {"text": "text", "model": "m", "base_url": server.url, "keep": ["id"]}
    gm.embed(table(), tmp_path / "a", batch_rows=50, **options)
    assert max(len(body["input"]) for body in server.told()["bodies"]) == 50
    server.set(inputs=20)
    gm.embed(table(), tmp_path / "b", concurrency=1, **options)
    assert vectors(tmp_path / "b") == WANTED
    assert server.told()["statuses"]["413"] < 20


def test_vectors_as_asked_for(server: ChatServer) -> None:
    """Dimensions that are asked for, cut, scaled to length 1; text before each; other fields of the request."""
    ask: dict[str, Any] = {"model": "m", "base_url": server.url}
    found = gm.embed(["a b"], dimensions=5, prompt="p: ", request={"input_type": "query"}, **ask)
    assert found["embedding"].to_pylist() == [[3, 0.5, 0, 0, 0]]
    assert server.told()["bodies"][-1] == {
        "model": "m", "input": ["p: a b"], "input_type": "query", "dimensions": 5, "encoding_format": "base64",
    }  # fmt: skip
    found = gm.embed(["a b", "c"], dimensions=5, truncate_dim=2, normalize=True, output="v", **ask)
    assert found.schema.field("v").type == pa.list_(pa.float32(), 2)
    lengths = np.linalg.norm(np.array(found["v"].to_pylist()), axis=1)
    assert lengths == pytest.approx(1, abs=1e-6)
    server.set(chooses=False)
    with pytest.raises(BadModel, match=r"does not take dimensions .*leave it out, or use truncate_dim"):
        gm.embed(["a b"], dimensions=4, **ask)


def test_queries_are_embedded_alike(server: ChatServer) -> None:
    """In this process, without a job; what is refused is raised."""
    with gm.TextEmbedder("m", "text", base_url=server.url).open() as model:  # type: ignore[attr-defined]
        assert model.encode("a b c").tolist() == [3, 0.5] and model.encode(["a", "b c"]).tolist() == [
            [1, 0.5],
            [2, 0.5],
        ]
        with pytest.raises(Exception, match="maximum context length"):
            model.encode(["a", "too long"])


def test_nulls_and_empty_texts(server: ChatServer, tmp_path: Path) -> None:
    """A null is a dead letter, or left out, or an empty text; bytes are text."""
    rows = pa.table({"id": [1, 2], "text": pa.array([b"a b", None])})
    ask: dict[str, Any] = {"text": "text", "model": "m", "base_url": server.url, "keep": ["id"]}
    gm.embed(rows, tmp_path / "dead", gates={"min_ok": 0}, **ask)
    assert vectors(tmp_path / "dead") == {1: [2, 0.5]} and gm.dead(tmp_path / "dead").num_rows == 1
    gm.embed(rows, tmp_path / "kept", on_null="keep", **ask)
    assert vectors(tmp_path / "kept") == {1: [2, 0.5], 2: [0, 0.5]}


@pytest.mark.long
def test_paid_once_and_counted(server: ChatServer, tmp_path: Path) -> None:
    """Equal texts once, texts of other runs from the cache, tokens and dollars of all requests; max_cost stops."""
    rows = pa.table({"id": range(600), "text": [f"row {n % 200}" for n in range(600)]})
    ask: dict[str, Any] = {
        "text": "text", "model": "m", "base_url": server.url, "keep": ["id"], "dedupe": True,
        "cache": str(tmp_path / "cache"), "price": {"input": "1/token"},
    }  # fmt: skip
    report = gm.embed(rows, tmp_path / "a", **ask)
    told = server.told()
    assert set(told["answered"].values()) == {1} and len(told["answered"]) == 200
    assert report.used == {
        "requests": told["requests"], "prompt_tokens": 400, "completion_tokens": 0, "cost": pytest.approx(400),
    }  # fmt: skip
    assert gm.embed(rows, tmp_path / "b", **ask).rows_ok == 600 and server.told()["requests"] == told["requests"]
    rows = pa.table({"id": range(600), "text": [f"other {n}" for n in range(600)]})
    ask = {**ask, "dedupe": False, "cache": None, "max_cost": 300, "concurrency": 1, "batch_rows": 10, "workers": 1}
    with pytest.raises(RunFailed, match="max_cost 300"):
        gm.embed(rows, tmp_path / "c", **ask)
    spent = sum(server.told()["answered"].values()) - 200
    assert 100 <= spent <= 150
    assert gm.embed(rows, tmp_path / "c", **{**ask, "max_cost": 3000}).rows_ok == 600
    assert sum(server.told()["answered"].values()) == 200 + 600  # what the first run was answered is kept


class Costs:
    """What may be spent, $100 at a dollar a token, and what requests that are begun may cost of it."""

    def __init__(self) -> None:
        spec = gm.TextEmbedder("m", "text", base_url="http://nobody/v1", price={"input": "1/token"}, max_cost=100.0)
        self.ending = Ending()
        self.spending = Spending(spec, 1.0, self.ending)

    def stake(self, tokens: float) -> Stake:
        return Stake(self.spending, Keeping(self.ending), Bill({}), tokens, None)


def test_no_request_waits_with_a_part_of_its_money() -> None:
    """Two that each wait for that of many texts would hold each other up, and the run would stop with money left."""

    async def kept() -> None:
        costs, loop = Costs(), asyncio.get_running_loop()
        flying = [costs.stake(5.0) for _ in range(10)]
        for stake in flying:
            await stake.again()
        texts = [[_One({}, 4.0, costs.stake(4.0), loop.create_future()) for _ in range(20)] for _ in range(2)]
        waits = [asyncio.ensure_future(_Payers(some, lambda _: None).again()) for some in texts]
        for stake in flying:
            await asyncio.sleep(0.01)
            stake.end()
        first = (await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED))[0]
        for one in texts[waits.index(first.pop())]:
            assert one.payer is not None
            one.payer.end()
        await asyncio.gather(*waits)

    asyncio.run(kept())


def test_half_of_a_request_waits_for_no_money_of_the_other() -> None:
    """Which is not sent before: it is kept free once it is to be sent."""

    class Refuses:
        """More than two texts, and takes more for each than was thought."""

        def __init__(self, costs: Costs) -> None:
            self.ending, self._usual = costs.ending, costs.spending._usual

        async def ask(self, body: dict[str, Any], tokens: float, path: str, payer: Any) -> dict[str, Any]:
            if len(body["input"]) > 2:
                self._usual.add(20.0, 45.0, 0.0, None)
                raise Refused("too many", 400, None)
            while not payer.still():
                await payer.again()
            return {"data": [{"embedding": [1.0]} for _ in body["input"]], "usage": {"prompt_tokens": 2}}

    async def answered() -> list[Any]:
        costs = Costs()
        together = Together(cast("Any", Refuses(costs)), 4, 128)

        async def one(n: int) -> dict[str, Any]:
            stake = costs.stake(20.0)
            await stake.again()
            try:
                return await together.ask({"model": "m", "input": f"text {n}"}, 20.0, payer=stake)
            finally:
                stake.end()

        return await asyncio.wait_for(asyncio.gather(*map(one, range(4))), 3.0)

    assert len(asyncio.run(answered())) == 4


def test_what_belongs_to_the_other_kind_is_refused(server: ChatServer) -> None:
    """By name, with the way out, before any request."""
    there: dict[str, Any] = {"base_url": server.url}
    for options, said in (
        ({**there, "pooling": "mean"}, "pooling is for models on this machine, and m is one behind base_url"),
        ({**there, "dtype": "int8"}, "dtype is for models on this machine"),
        ({**there, "backend": "onnx"}, "backend is for models on this machine"),
        ({**there, "device": "cpu"}, "device is for models on this machine"),
        ({**there, "max_length": 8}, "max_length is for .*leave it out, or cut them in a step"),
        ({**there, "request": {"input": "x"}}, "request has 'input'"),
        ({**there, "max_cost": 3.0}, "max_cost needs price"),
        ({**there, "dimensions": 2, "truncate_dim": 3}, "truncate_dim is 3: give 1 or more, and no more than"),
        ({"dimensions": 8}, "dimensions is for endpoints: give base_url, or leave it out"),
        ({"concurrency": 8}, "concurrency is for endpoints"),
        ({"dedupe": True}, "dedupe is for endpoints"),
    ):  # fmt: skip
        with pytest.raises((BadJob, BadModel), match=said):
            gm.embed(["a"], model="m", **options)
    assert server.told()["requests"] == 0
    for options, said in (({"model": "x"}, "404: The model `x` does not exist"), ({"api_key": "no"}, "401: Incorrect")):
        with pytest.raises(BadModel, match=said):
            gm.embed(["a"], **{"model": "m", **there, **options})


@pytest.mark.long
def test_typed_as_a_command_and_as_a_job_file(server: ChatServer, tmp_path: Path) -> None:
    """Another name is another job; another address is not. The plan says what it takes."""
    pq.write_table(table(), tmp_path / "rows.parquet")

    def run(*words: str, code: int = 0) -> str:
        done = subprocess.run([sys.executable, "-m", "gristmill", *words], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == code, done.stderr
        return done.stdout + done.stderr

    embed = ("embed", "rows.parquet", "out", "--text", "text", "--keep", "id", "--base-url")
    run(*embed, server.url, "--model", "m", "--save", "job.yaml")
    assert vectors(tmp_path / "out") == WANTED
    assert "nothing to do" in run(*embed, f"{server.url},{server.url}/", "--model", "m")
    assert "model: name was m, is n" in run(*embed, server.url, "--model", "n", code=PlanChanged.exit_code)
    assert f"model: {{embed: m, text: text, base_url: '{server.url}'}}" in (tmp_path / "job.yaml").read_text()
    (tmp_path / "job.yaml").write_text((tmp_path / "job.yaml").read_text().replace("uri: out", "uri: other"))
    assert re.search("about [78] requests, 5,100 tokens in", run("plan", "job.yaml"))
    run("run", "job.yaml")
    assert vectors(tmp_path / "other") == WANTED
