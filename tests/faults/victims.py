"""User code as fault tests hand it to jobs: models that log whom they were called for, and models that do harm."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from typing import Any

import numpy as np

Batch = dict[str, np.ndarray]


def _log(log: str | None, batch: Batch) -> None:
    if log is not None:
        fd = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(fd, (" ".join(str(int(i)) for i in batch["id"]) + "\n").encode())
        os.close(fd)


def _answer(batch: Batch) -> Batch:
    return {"y": batch["x"] * 2.0 + batch["id"]}


def scored(batch: Batch, log: str | None = None, bad: tuple[int, ...] = ()) -> Batch:
    """A row-wise answer; raises for bad rows."""
    _log(log, batch)
    for i in batch["id"].tolist():
        if i in bad:
            raise ValueError(f"row {i} is bad")
    return _answer(batch)


def slow(batch: Batch, log: str | None = None, seconds: float = 0.01) -> Batch:
    """The same, taking its time."""
    _log(log, batch)
    time.sleep(seconds)
    return _answer(batch)


def segfault() -> None:
    """A real one."""
    ctypes.string_at(0)


def hold_the_gil() -> None:
    """Sleep for an hour without letting any other thread run."""
    ctypes.PyDLL(None).usleep(3600 * 1_000_000)
    while True:
        ctypes.PyDLL(None).usleep(900_000_000)


HARM = {
    "segfault": segfault,
    "exit": lambda: os._exit(3),
    "sysexit": lambda: sys.exit(4),
    "gil": hold_the_gil,
    "hang": lambda: time.sleep(3600),
    "abort": os.abort,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "interrupt": lambda: _raise(KeyboardInterrupt()),
    "memory": lambda: _raise(MemoryError("no room")),
}


def _raise(error: BaseException) -> None:
    raise error


def harmful(batch: Batch, bad: dict[str, str], log: str | None = None) -> Batch:
    """Does harm for the rows in `bad` (id -> what)."""
    _log(log, batch)
    for i in batch["id"].tolist():
        if str(i) in bad:
            HARM[bad[str(i)]]()
    return _answer(batch)


def once(batch: Batch, marker: str, at: int, what: str, log: str | None = None) -> Batch:
    """Does harm at row `at`, once: the file `marker` tells that it has."""
    _log(log, batch)
    if at in batch["id"].tolist() and not os.path.exists(marker):
        open(marker, "w").close()
        HARM[what]()
    return _answer(batch)


def fails_from(batch: Batch, marker: str) -> Batch:
    """Works until the file `marker` is there, then fails for every row."""
    if os.path.exists(marker):
        raise RuntimeError("the licence has expired")
    return _answer(batch)


def always_fails(batch: Batch, log: str | None = None) -> Batch:
    """A model that is broken."""
    _log(log, batch)
    raise RuntimeError("no weights in here")


def odd(batch: Batch) -> Batch:
    """A step that lets even ids through."""
    return {"_row": batch["_row"][batch["id"] % 10 != 7]}


def table(rows: int, start: int = 0) -> Any:
    """`rows` rows of id and x."""
    import pyarrow as pa

    ids = np.arange(start, start + rows)
    return pa.table({"id": ids, "x": np.sqrt(ids.astype(np.float64))})


def write_input(folder: str, rows: int, files: int = 2) -> str:
    """`rows` rows as several Parquet files."""
    import pyarrow.parquet as pq

    os.makedirs(folder, exist_ok=True)
    bounds = [rows * i // files for i in range(files + 1)]
    for n, (a, b) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
        pq.write_table(table(b - a, a), os.path.join(folder, f"{n}.parquet"))
    return folder
