"""A model and a step whose answers tell whose they are, made to fail or to stop a run by files in a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def copied(row: dict[str, Any]) -> list[dict[str, Any]]:
    """A row as one, two or three, by its number."""
    return [{"c": c} for c in range(row["x"] % 3 + 1)]


def answer(x: int, c: int = 0) -> int:
    """What the model says of a row."""
    return 7 * x + c


def scored(rows: list[dict[str, Any]], state: str) -> list[Any]:
    """`answer` of each row. In the folder `state`, "bad" holds numbers of rows that fail, and "left" how many calls are
    made until the run is stopped.
    """
    left = Path(state) / "left"
    if left.exists():
        now = int(left.read_text()) - 1
        left.write_text(str(now))
        if now < 0:
            return []  # a broken contract: it ends the run
    bad = set(map(int, (Path(state) / "bad").read_text().split()))
    if failing := bad & {r["x"] for r in rows}:
        raise ValueError(f"cannot score {min(failing)}")
    return [{"y": answer(r["x"], r.get("c", 0))} for r in rows]
