"""User code of the soak: steps and a model that do what a row's `fate` says, at the stage that it names.

A fate is "ok", "drop" (an SQL filter), "dropf" (a filter function), "split:K", or "STAGE:HARM", with "@PART" where only
that derived row is meant, and "!" where the row is well again once its name stands in the folder `cures`.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from typing import Any

import numpy as np

Columns = dict[str, list[Any]]


class Odd(Exception):
    """Neither pickle nor str can take it."""

    def __reduce__(self) -> Any:
        raise TypeError("not me")

    def __str__(self) -> str:
        raise ValueError("no words")


def _raise(error: BaseException) -> None:
    raise error


def _hold_the_gil() -> None:
    """For good: a signal, which would end a sleep, does not end the wait for a lock that one holds oneself."""
    libc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(128)  # all zero: one as pthread makes it by default
    for _ in range(2):
        libc.pthread_mutex_lock(mutex)


HARM = {
    "raise": lambda: _raise(ValueError("this row is bad")),
    "odd": lambda: _raise(Odd()),
    "sysexit": lambda: sys.exit(4),
    "memory": lambda: _raise(MemoryError("no room")),
    "segv": lambda: ctypes.string_at(0),
    "exit": lambda: os._exit(3),
    "abort": os.abort,
    "hang": lambda: time.sleep(3600),
    "gil": _hold_the_gil,
}
ANSWERS = {"nan": float("nan"), "inf": float("inf")}


def due(fate: str, stage: str, row: int, part: int, cures: str) -> str | None:
    """What harm is to be done for a row at a stage."""
    if not fate.startswith(stage + ":"):
        return None
    harm = fate[len(stage) + 1 :]
    if harm.endswith("!"):
        if os.path.exists(os.path.join(cures, str(row))):
            return None
        harm = harm[:-1]
    harm, _, at = harm.partition("@")
    return harm if not at or int(at) == part else None


def _columns(batch: Any) -> Columns:
    """Plain lists of whatever kind of batch it is."""
    if isinstance(batch, list):
        return {name: [row[name] for row in batch] for name in batch[0]}
    if hasattr(batch, "to_pydict"):
        return batch.to_pydict()  # type: ignore[no-any-return]
    if hasattr(batch, "to_dict"):
        frame = batch.to_dict(as_series=False) if hasattr(batch, "lazy") else batch.to_dict("list")
        return {name: [None if v is None or v != v else v for v in values] for name, values in frame.items()}
    return {name: array.tolist() for name, array in batch.items()}


def _suffer(c: Columns, stage: str, cures: str) -> list[str | None]:
    parts = c.get("part") or [0] * len(c["id"])
    harms = [due(f, stage, i, p, cures) for f, i, p in zip(c["fate"], c["id"], parts, strict=True)]
    for harm in harms:
        if harm in HARM:
            HARM[harm]()
    return harms


def before(batch: Any, cures: str) -> dict[str, np.ndarray]:
    """A step on source rows: adds b."""
    c = _columns(batch)
    _suffer(c, "before", cures)
    return {"b": np.array(c["x"], dtype=np.float64) + 0.5}


def admitted(batch: Any) -> np.ndarray:
    """A filter function."""
    return np.array([f != "dropf" for f in _columns(batch)["fate"]])


def expand(row: dict[str, Any], cures: str) -> list[dict[str, Any]]:
    """A flat_map: one row, K, or none."""
    harm = due(row["fate"], "expand", row["id"], 0, cures)
    if harm in HARM:
        HARM[harm]()
    return [{"part": part} for part in range(copies(row["fate"]))]


def copies(fate: str) -> int:
    """How many rows a row becomes in a flat_map."""
    return int(fate[6:]) if fate.startswith("split:") else 3 if "@" in fate else 1


def after(batch: Any, cures: str) -> dict[str, np.ndarray]:
    """A step on derived rows: adds c."""
    c = _columns(batch)
    _suffer(c, "after", cures)
    return {"c": np.array(c["part"], dtype=np.float64) * 10.0}


class Scorer:
    """The model. `shape` is the kind of batch that it returns; "views" returns views of a buffer that it uses again."""

    def __init__(self, version: int, cures: str, log: str, pace: float, shape: str) -> None:
        self.version, self.cures, self.log, self.pace, self.shape = version, cures, log, pace, shape
        self._y, self._vec = np.zeros(4096), np.zeros((4096, 4), dtype=np.float32)

    def __call__(self, batch: Any) -> Any:
        c = _columns(batch)
        rows = len(c["id"])
        parts = c.get("part") or [0] * rows
        fd = os.open(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(fd, "".join(f"{i} {p}\n" for i, p in zip(c["id"], parts, strict=True)).encode())
        os.close(fd)
        time.sleep(self.pace)
        harms = _suffer(c, "model", self.cures)
        y = np.array(c["x"], dtype=np.float64) * 2.0 + np.array(parts, dtype=np.float64) + float(self.version)
        for name in ("b", "c"):
            y = y + np.array(c[name], dtype=np.float64) if name in c else y
        for row, harm in enumerate(harms):
            y[row] = ANSWERS.get(harm or "", y[row])
        w = np.array(c["id"], dtype=np.int64) * self.version
        texts = np.array([f"{s}|{p}" for s, p in zip(c["s"], parts, strict=True)], dtype=object)
        vec = np.stack([c["x"], parts, np.full(rows, self.version), np.arange(4)[np.array(parts) % 4]], axis=1)
        return self._shaped({"y": y, "w": w, "t": texts, "vec": vec.astype(np.float32)})

    def _shaped(self, out: dict[str, np.ndarray]) -> Any:
        rows = len(out["y"])
        if self.shape == "views":
            self._y[:rows], self._vec[:rows] = out["y"], out["vec"]
            return {**out, "y": self._y[:rows], "vec": self._vec[:rows]}
        if self.shape == "numpy":
            return out
        lists = {name: values.tolist() for name, values in out.items()}
        if self.shape == "rows":
            return [dict(zip(lists, values, strict=True)) for values in zip(*lists.values(), strict=True)]
        import pyarrow as pa

        table = pa.table({**lists, "vec": pa.array(lists["vec"], pa.list_(pa.float32(), 4))})
        if self.shape == "arrow":
            return table
        if self.shape == "pandas":
            return table.to_pandas()
        import polars

        return polars.from_arrow(table)


def post(batch: Any, cures: str) -> dict[str, np.ndarray]:
    """A step after the model: adds z."""
    c = _columns(batch)
    _suffer(c, "post", cures)
    return {"z": np.array(c["y"], dtype=np.float64) + 0.25}
