"""Updates of prompts that stop before they publish, over a source that changes: what was paid is paid once."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import gristmill as gm
from gristmill.cli.app import main
from gristmill.errors import BadJob, PlanChanged, RunFailed
from llmserver import KEY, ChatServer

pytestmark = pytest.mark.filterwarnings("ignore::gristmill.GristmillWarning")
PRICE = {"input": "1/token", "output": "0/token"}  # four dollars a row


@pytest.fixture
def chat(monkeypatch: pytest.MonkeyPatch) -> Iterator[ChatServer]:
    """A server, its address and its key in the environment."""
    with ChatServer() as server:
        monkeypatch.setenv("OPENAI_API_KEY", KEY)
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        yield server


def night(tmp_path: Path, number: int, rows: int = 60) -> None:
    """A source of three files; the first row is another one each night."""
    (tmp_path / "in").mkdir(exist_ok=True)
    texts = [f"night {number} is here", *(f"row {n} is here" for n in range(1, rows))]
    for file in range(3):
        ids = list(range(file * rows // 3, (file + 1) * rows // 3))
        pq.write_table(pa.table({"id": ids, "text": [texts[n] for n in ids]}), tmp_path / "in" / f"{file}.parquet")


def run(tmp_path: Path, **more: Any) -> gm.Report:
    model = gm.Prompt("{{ text }}", "m", price=PRICE, max_tokens=5, **more)
    sink = gm.sink(str(tmp_path / "out"), keep=["id"])
    how: dict[str, Any] = {"workers": 1, "shard_rows": 10, "update": {"key": ["id"]}}
    return gm.Job(str(tmp_path / "in"), model, sink, **how).run()


def test_paid_answers_are_not_given_up_for_a_change(chat: ChatServer, tmp_path: Path) -> None:
    """Where the source has changed since, a run is refused, which says all that was paid, with committed shards."""
    night(tmp_path, 1)
    with pytest.raises(RunFailed, match="max_cost 100"):
        run(tmp_path, max_cost=100.0)
    asked = chat.told()["requests"]
    night(tmp_path, 2)
    said = rf"the source is not as it was .* with {asked} answers of an endpoint for \${4 * asked}\.0000"
    with pytest.raises(PlanChanged, match=said):
        run(tmp_path, max_cost=100.0)
    assert chat.told()["requests"] == asked


def test_what_a_result_took_is_told_once_it_is_published(
    chat: ChatServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """By the report, in the terminal and as a page, and by status."""
    night(tmp_path, 1)
    gm.prompt(tmp_path / "in", tmp_path / "out", prompt="{{ text }}", model="m", keep=["id"], price=PRICE, workers=0)
    out = str(tmp_path / "out")
    assert gm.status(out)["used"]["cost"] == 240.0
    said = "60 requests, 240 tokens in, 240 out, $240.0000"
    for typed in (["status", out], ["report", out]):
        assert main(typed) == 0 and re.search(rf"asked +{re.escape(said)}", capfd.readouterr().out)
    assert main(["report", out, "-o", str(tmp_path / "page.html")]) == 0
    assert f"Asked: {said}" in (tmp_path / "page.html").read_text()


def test_new_files_beside_an_unfinished_run_have_no_max_cost_of_their_own(chat: ChatServer, tmp_path: Path) -> None:
    """A command that finishes a plan and then appends spends it once."""
    job: dict[str, Any] = {"prompt": "{{ text }}", "model": "m", "keep": ["id"], "price": PRICE, "max_tokens": 5}
    job |= {"workers": 1, "shard_rows": 10, "on_new_files": "append", "concurrency": 4}

    def asks(**more: Any) -> gm.Report:
        return gm.prompt(str(tmp_path / "in"), str(tmp_path / "out"), **job, **more)

    night(tmp_path, 1)
    with pytest.raises(RunFailed, match="max_cost 160"):
        asks(max_cost=160.0)
    before = chat.told()["requests"]
    ids = list(range(100, 160))
    pq.write_table(pa.table({"id": ids, "text": [f"row {n} is here" for n in ids]}), tmp_path / "in" / "new.parquet")
    with pytest.raises(RunFailed, match=r"max_cost 160: \$1[3-6]\d\.\d+ are spent, and what comes next might cost"):
        asks(max_cost=160.0)
    assert 120 <= 4 * (chat.told()["requests"] - before) <= 160
    assert asks().rows_ok == 120 and chat.told()["requests"] == 120


def test_a_price_without_a_unit_is_told_which(chat: ChatServer) -> None:
    """With the price as it would be written."""
    for price in ({"input": 0.20, "output": "1/1M"}, {"input": "$0.2", "output": "1/1M"}):
        with pytest.raises(BadJob, match=r"without a unit: \$?0\.2/1M is for a million tokens"):
            gm.Prompt("{{ text }}", "m", price=price)  # type: ignore[arg-type]
