"""User code as tests hand it to jobs: importable by name, so that workers find it as they would a person's module."""

from __future__ import annotations

import io
import os
import time
from typing import Any

import numpy as np


def double(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Twice x."""
    return {"y": batch["x"] * 2.0}


def opened(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Pictures of which none can be opened, told as libraries of pictures do."""
    for content in batch["bytes"]:
        raise ValueError(f"cannot identify {io.BytesIO(content)!r} of {object()!r}")
    return {"y": batch["path"]}


def counted(batch: dict[str, np.ndarray], log: str) -> dict[str, np.ndarray]:
    """Twice x, and the rows it was called for in a file that outlives the process."""
    with open(log, "a") as file:
        file.write(" ".join(str(int(i)) for i in batch["id"]) + "\n")
    return {"y": batch["x"] * 2.0}


def measured(
    batch: dict[str, np.ndarray], log: str, seconds: float = 0.0, most: int = 1 << 30
) -> dict[str, np.ndarray]:
    """Twice x, how many rows each call was given in a file, after some time; out of memory for more than `most`."""
    rows = len(batch["x"])
    with open(log, "a") as file:
        file.write(f"{rows}\n")
    if rows > most:
        raise MemoryError(f"{rows} rows")
    time.sleep(seconds)
    return {"y": batch["x"] * 2.0}


def picky(batch: dict[str, np.ndarray], bad: list[int]) -> dict[str, np.ndarray]:
    """Raises for a batch that holds a bad row."""
    for i in batch["id"]:
        if int(i) in bad:
            raise ValueError(f"row {int(i)} is bad")
    return {"y": batch["x"] * 2.0}


def mended(batch: dict[str, np.ndarray], bad: list[int]) -> dict[str, np.ndarray]:
    """What `picky` is after a fix."""
    return {"y": batch["x"] * 2.0}


def short(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """One row too few."""
    return {"y": batch["x"][1:]}


def split(row: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each word."""
    return [{"word": w} for w in row["text"].split()]


def word_length(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Letters of each word."""
    return {"letters": np.array([len(w) for w in batch["word"]], dtype=np.int64)}


def picky_words(batch: dict[str, np.ndarray], bad: str) -> dict[str, np.ndarray]:
    """Raises for a bad word."""
    if bad in list(batch["word"]):
        raise ValueError(f"the word {bad!r}")
    return word_length(batch)


def every_third(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A batch step that says which rows it kept."""
    return {"_row": batch["_row"][::3]}


def drops(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A step that silently drops rows."""
    return {"x": batch["x"][:-1]}


def plus_one(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A step before or after the model."""
    name = "y" if "y" in batch else "x"
    return {name: batch[name] + 1.0}


def makes(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A step that makes a column."""
    return {"made": np.arange(len(next(iter(batch.values()))))}


class Scorer:
    """A model built once a worker."""

    def __init__(self, factor: float, log: str | None = None) -> None:
        self.factor = factor
        if log is not None:
            with open(log, "a") as file:
                file.write(f"{os.getpid()}\n")

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {"y": batch["x"] * self.factor}


def refuses(staged: Any) -> bool:
    """An audit that refuses."""
    return False


def looks(staged: Any) -> None:
    """An audit that finds all well."""
    assert staged.counts.ok == staged.counts.rows_in
