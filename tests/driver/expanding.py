"""Steps that filter and multiply rows by their `key` alone, and fail for some: what comes of a row does not depend on
which others are there. Poison is a list of salts and shares in 60ths. What is made of the row "well" always works.
"""

from __future__ import annotations

from typing import Any
from zlib import crc32

import numpy as np
import pyarrow as pa


def chance(*what: Any) -> int:
    """A number of 0 … 59 that depends on what is given alone."""
    return crc32("/".join(map(str, what)).encode()) % 60


def taste(place: Any, key: str, poison: list[list[Any]]) -> None:
    """Raises where the key is poisoned at this place."""
    if any(poisoned(salt, place, key, share) for salt, share in poison):
        raise ValueError(f"{key} is bad at {place}")


def poisoned(salt: int, place: Any, key: str, share: int) -> bool:
    """Whether a key is, by one salt."""
    return not key.startswith("well") and chance(salt, place, key) < share


def number(what: str, place: int, key: str) -> int:
    """How many rows a step makes of one: none to three."""
    return 1 if key.startswith("well") else chance(what, place, key) % 4


def tasted(batch: dict[str, np.ndarray], place: int, poison: list[list[Any]]) -> dict[str, np.ndarray]:
    """A step that keeps the rows, and writes its place into a column."""
    for key in batch["key"]:
        taste(place, key, poison)
    return {"last": np.full(len(batch["key"]), place)}


def some(batch: dict[str, np.ndarray], place: int, poison: list[list[Any]]) -> np.ndarray:
    """A filter that drops a quarter."""
    for key in batch["key"]:
        taste(place, key, poison)
    return np.array([number("some", place, key) > 0 for key in batch["key"]], dtype=bool)


def pieces(row: dict[str, Any], place: int, poison: list[list[Any]]) -> list[dict[str, Any]]:
    """None to three rows of one."""
    taste(place, row["key"], poison)
    return [{"key": f"{row['key']}.{i}"} for i in range(number("pieces", place, row["key"]))]


def repeated(batch: dict[str, np.ndarray], place: int, poison: list[list[Any]]) -> dict[str, np.ndarray]:
    """A batch step that returns none to three rows of one."""
    rows, keys = [], []
    for row, key in zip(batch["_row"], batch["key"], strict=True):
        taste(place, key, poison)
        for i in range(number("repeated", place, key)):
            rows.append(row)
            keys.append(f"{key}-{i}")
    return {"_row": np.array(rows, dtype=np.int64), "key": np.array(keys, dtype=object)}


def scored(batch: pa.Table, poison: list[list[Any]]) -> dict[str, Any]:
    """A model: the length of the key; NaN for some of those that are poisoned elsewhere."""
    keys = batch["key"].to_pylist()
    for key in keys:
        taste("model", key, poison)
    nan = [any(poisoned(salt, "nan", key, share) for salt, share in poison) for key in keys]
    return {"y": np.array([np.nan if bad else float(len(key)) for key, bad in zip(keys, nan, strict=True)])}


def after(batch: dict[str, np.ndarray], poison: list[list[Any]]) -> dict[str, np.ndarray]:
    """A post step."""
    for key in batch["key"]:
        taste("after", key, poison)
    return {"z": batch["y"] + 1}
