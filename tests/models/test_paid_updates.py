"""Updates of prompts that stop before they publish, over a source that changes: what was paid is paid once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import gristmill as gm
from gristmill.errors import PlanChanged, RunFailed
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
