"""Functions that keep a log of their own and read a file where there is one, in processes that are killed too."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import gristmill as gm
from gristmill.job.specs import FunctionModel


class Told:
    """Doubles, or says what a file does where there is one; notes rows in a log; fails for those below 0."""

    def __init__(self, overrides: str | None = None, log: str | None = None, seconds: float = 0.0) -> None:
        path = None if overrides is None else Path(overrides)
        self.told = json.loads(path.read_text()) if path is not None and path.exists() else {}
        self.log, self.seconds = log, seconds
        if log is not None:
            Path(log).parent.mkdir(exist_ok=True)
            open(log, "a").close()

    def __call__(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        time.sleep(self.seconds * len(rows))
        if self.log is not None:
            with open(self.log, "a") as file:
                file.writelines(f"{row['x']}\n" for row in rows)
        if "-" not in self.told and any(row["x"] < 0 for row in rows):
            raise ValueError("below 0")
        return [{"y": self.told.get(str(row["x"]), row["x"] * 2)} for row in rows]


def doubling(**arguments: Any) -> FunctionModel:
    """`Told` as a model."""
    return gm.model(Told, batch_format="rows", **arguments)


def told(folder: str, seconds: float = 0.0) -> gm.Job:
    """A job of `Told` in a folder."""
    model = doubling(overrides=f"{folder}/conf/o.json", log=f"{folder}/logs/calls.log", seconds=seconds)
    sink = gm.sink(f"{folder}/out", keep=["x"])
    return gm.Job(f"{folder}/in", model, sink, workers=1, shard_rows=5, batch_rows=5, gates={"min_ok": 0.0})


def slow(log: str, x: int) -> int:
    """Doubles, and notes it."""
    time.sleep(0.05)
    with open(log, "a") as file:
        file.write(f"{x}\n")
    return x * 2
