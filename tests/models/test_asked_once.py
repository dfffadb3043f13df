"""A row costs one request, whatever is wrong with it or with its neighbours: its answer or its refusal is known."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import gristmill as gm
from llmserver import KEY, ChatServer

pytestmark = pytest.mark.filterwarnings("ignore::gristmill.GristmillWarning")


@pytest.fixture
def chat(monkeypatch: pytest.MonkeyPatch) -> Iterator[ChatServer]:
    """A server, its address and its key in the environment."""
    with ChatServer() as server:
        monkeypatch.setenv("OPENAI_API_KEY", KEY)
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        yield server


def table(rows: int, odd: Any = "") -> pa.Table:
    """Rows of different texts, some of them with more words."""
    return pa.table({"id": range(rows), "text": [f"row {n} {odd(n) if odd else ''}".strip() for n in range(rows)]})


def prompted(source: Any, sink: Path, **options: Any) -> Any:
    """A run."""
    options = {"prompt": "{{ text }}", "model": "m", "keep": ["id"], "workers": 1, "gates": {"min_ok": 0}, **options}
    return gm.prompt(source, sink, **options)


def test_a_text_that_no_column_holds_costs_no_other_row(chat: ChatServer, tmp_path: Path) -> None:
    """Half a pair of surrogates, as an answer that was cut may end: its neighbours are not asked again."""
    chat.set(odd={"message": {"role": "assistant", "content": "smile \ud83d"}})
    report = prompted(table(1000, lambda n: "odd" if n == 777 else ""), tmp_path / "out")
    assert (report.rows_ok, report.rows_dead) == (999, 1)
    assert chat.told()["requests"] == 1000


def test_equal_rows_are_samples_of_their_own(chat: ChatServer, tmp_path: Path) -> None:
    """Also those of other shards, which the first row's answer is none for."""
    rows = pa.table({"id": range(600), "text": ["the same"] * 600})
    prompted(rows, tmp_path / "out", shard_rows=100)
    assert chat.told()["requests"] == 600 == collections.Counter(chat.told()["answered"]).total()


def test_a_stretch_of_refused_rows_is_refused_once(chat: ChatServer, tmp_path: Path) -> None:
    """Whole shards of them: what is tried beside them, to learn whether the endpoint works, is a handful."""
    report = prompted(table(900, lambda n: "is too long" * (300 <= n < 600)), tmp_path / "out", shard_rows=100)
    assert (report.rows_ok, report.rows_dead) == (600, 300)
    assert 900 <= chat.told()["requests"] <= 960
