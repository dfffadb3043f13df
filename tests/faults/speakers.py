"""User code whose runs are watched: models that take their time, print a lot, stop or die in the middle."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import numpy as np

Batch = dict[str, np.ndarray]


def scored(batch: Batch, seconds: float = 0.0) -> Batch:
    """A row-wise answer, after some time."""
    time.sleep(seconds)
    return {"y": batch["x"] * 2.0}


def noisy(batch: Batch, name: str) -> Batch:
    """Long lines to both streams, in several writes each; more than are passed on a second."""
    for i in range(300):
        print(name, "out", i, "x" * 150, "ä" * 20, "end")
        print(name, "err", i, "x" * 150, "ä" * 20, "end", file=sys.stderr)
    return {"x": batch["x"]}


class Speaks:
    """Ends its process while it is loaded, telling why in a line that it does not end."""

    def __init__(self) -> None:
        os.write(2, b"its last words")
        os._exit(3)

    def __call__(self, batch: Batch) -> Batch:
        return batch


def same(batch: Batch) -> Batch:
    """A step that changes nothing."""
    return {"x": batch["x"]}


def thrice(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Three rows of one; none of some."""
    return [{"x": row["x"] + k} for k in range(3 if row["id"] % 5 else 0)]


def dies_at(batch: Batch, bad: list[int], seconds: float) -> Batch:
    """Ends its process at some rows."""
    time.sleep(seconds)
    if set(bad) & set(batch["id"].tolist()):
        os._exit(3)
    return {"y": batch["x"]}


def stops_at(batch: Batch, row: int, unless: str, seconds: float = 0.01) -> Batch:
    """Breaks its contract at a row, which stops the job, unless there is that folder."""
    time.sleep(seconds)
    if row in batch["id"].tolist() and not os.path.exists(unless):
        return {"y": batch["x"][:-1]}
    return {"y": batch["x"]}


def picky(batch: Batch, bad: list[int]) -> Batch:
    """Raises for a batch that holds a bad row."""
    for i in batch["id"].tolist():
        if i in bad:
            raise ValueError(f"row {i} is bad")
    return {"y": batch["x"]}
