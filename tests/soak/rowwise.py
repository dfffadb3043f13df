"""User code of the fuzz: steps and a model whose answer for a row depends on that row alone, in every batch format."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pyarrow as pa


def ids(batch: Any) -> np.ndarray:
    """The ids of any kind of batch."""
    if isinstance(batch, list):
        return np.array([row["id"] for row in batch], dtype=np.int64)
    if isinstance(batch, pa.Table):
        return batch["id"].to_numpy()
    return np.asarray(batch["id"], dtype=np.int64)


def fails(batch: Any, every: int) -> None:
    """Raises where the batch has an id that is a multiple of `every`."""
    if every and (ids(batch) % every == 0).any():
        raise ValueError(f"a multiple of {every}")


def times(batch: Any, name: str, factor: int, every: int = 0) -> dict[str, np.ndarray]:
    """A step that adds (or replaces) a column."""
    fails(batch, every)
    return {name: ids(batch) * factor}


def unless(batch: Any, m: int) -> np.ndarray:
    """A filter function."""
    return ids(batch) % m != 1


def rows_unless(batch: dict[str, np.ndarray], m: int) -> dict[str, np.ndarray]:
    """A step that drops rows by returning `_row`."""
    return {"_row": batch["_row"][batch["id"] % m != 1]}


def rows_twice(batch: dict[str, np.ndarray], m: int) -> dict[str, np.ndarray]:
    """A step that repeats rows by returning `_row`."""
    return {"_row": np.repeat(batch["_row"], np.where(batch["id"] % m == 1, 2, 1))}


def split(row: dict[str, Any], name: str, m: int, every: int = 0) -> list[dict[str, Any]]:
    """A flat_map: id % m rows."""
    fails([row], every)
    return [{name: j} for j in range(row["id"] % m)]


def answer(number: int) -> int:
    """What the model says of an id."""
    return (number * 2_654_435_761 + 17) & 0x7FFFFFFF


def model(batch: Any, shape: str, echo: list[str], every: int = 0, nan: int = 0, stop: str = "") -> Any:
    """The model: `h` is the answer, `f` a float that is NaN for some, and the columns of `echo` as they came."""
    if stop and os.path.exists(stop):
        os.rmdir(stop)
        raise KeyboardInterrupt
    fails(batch, every)
    n = ids(batch)
    h = np.array([answer(i) for i in n.tolist()], dtype=np.int64)
    f = np.where(n % nan == 0, np.nan, n * 0.5) if nan else n * 0.5
    if shape == "rows":
        rows = batch if isinstance(batch, list) else [{}] * len(n)
        return [
            {"h": int(a), "f": float(b), **{f"e_{c}": r[c] for c in echo}} for a, b, r in zip(h, f, rows, strict=True)
        ]
    out: dict[str, Any] = {"h": h, "f": f, **{f"e_{c}": batch[c] for c in echo}}
    if shape == "numpy":
        return out
    if shape == "arrow":
        return pa.table(out)
    if shape == "pandas":
        import pandas

        return pandas.DataFrame(out)
    import polars

    return polars.DataFrame(out)
