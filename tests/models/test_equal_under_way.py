"""Equal requests are asked once, but what a batch under way says of one row says nothing of another's."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from gristmill.models.paid import Paid
from gristmill.models.replies import UnderWay


def test_a_row_that_waits_for_one_in_a_batch_under_way_asks_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """The row that found its request in a batch is told so; the equal one of another shard is answered."""
    asked: list[str] = []

    async def new(self: Paid, body: Any, tokens: float, path: str, bill: Any) -> dict[str, Any]:
        asked.append(bill.name)
        await asyncio.sleep(0.01)  # both are here by then
        if bill.name == "first":
            raise UnderWay
        return {"answered": bill.name}

    monkeypatch.setattr(Paid, "_new", new)
    paid = Paid.__new__(Paid)
    paid._spec, paid._cache, paid._once = SimpleNamespace(dedupe=True), None, None  # type: ignore[assignment]
    paid._known, paid._sizes, paid._remembered = {}, {}, 0

    async def both() -> list[Any]:
        bills = [SimpleNamespace(name=name, trial=False, keys=[]) for name in ("first", "second")]
        rows = [paid.ask({"text": "a"}, 1.0, bill) for bill in bills]  # type: ignore[arg-type]
        return await asyncio.gather(*rows, return_exceptions=True)

    first, second = asyncio.run(both())
    assert isinstance(first, UnderWay)
    assert second == {"answered": "second"}
    assert asked == ["first", "second"]
