"""The command as a subprocess in a folder of its own, with a little data and a module of functions."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from commands import Commands, Ended

SCORING = '''\
"""Functions as a person writes them."""
import os
import time

import numpy as np


def double(batch, factor=2):
    return {"score": batch["x"] * factor}


def bad(batch):
    if (batch["x"] == 7).any():
        raise ValueError("seven is not allowed")
    return {"score": batch["x"]}


def loud(batch):
    for n in batch["x"]:
        print("scoring", int(n))
    return {"score": batch["x"]}


def chatty(batch):
    time.sleep(0.1)
    print("batch of", len(batch["x"]), "rows")
    return {"score": batch["x"]}


class Slow:
    def __init__(self, seconds=0.01):
        self.seconds = seconds

    def __call__(self, batch):
        time.sleep(self.seconds * len(batch["x"]))
        return {"score": batch["x"]}


def leaky(batch, token=""):
    raise PermissionError("401 for token " + token)
'''


@dataclass(frozen=True)
class Folder:
    """A folder that commands are started in."""

    path: Path
    commands: Commands

    def start(self, *arguments: str, env: Mapping[str, str] | None = None, **options: object) -> subprocess.Popen[str]:
        """The command, running."""
        made: subprocess.Popen[str] = subprocess.Popen(
            [sys.executable, "-m", "gristmill", *arguments],
            cwd=self.path,
            env={**os.environ, **(env or {})},
            text=True,
            **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options},  # type: ignore[call-overload]
        )
        return made

    def run(self, *arguments: str, env: Mapping[str, str] | None = None) -> Ended:
        """The command, ended."""
        return self.commands.run(arguments, self.path, {**os.environ, **(env or {})}, timeout=120)

    def fresh(self, *arguments: str, env: Mapping[str, str] | None = None) -> Ended:
        """The command in an interpreter that starts for it, ended."""
        process = self.start(*arguments, env=env)
        out, err = process.communicate(timeout=120)
        return Ended(process.returncode, out, err)

    def apply(self, function: str, sink: str = "out", *more: str) -> Ended:
        """`apply` on the rows, in one process: the quickest real run there is."""
        return self.run(
            "apply", "rows.parquet", sink, "--fn", f"scoring:{function}", "--keep", "id", "--workers", "0", *more
        )


@pytest.fixture(scope="session")
def commands() -> Iterator[Commands]:
    """Where commands are forked from."""
    made = Commands()
    yield made
    made.close()


@pytest.fixture
def folder(tmp_path: Path, commands: Commands) -> Folder:
    """rows.parquet (id, x, t; 60 rows) and scoring.py."""
    (tmp_path / "scoring.py").write_text(SCORING)
    n = range(60)
    table = pa.table({"id": list(n), "x": [float(i) for i in n], "t": [f"text {i}" for i in n]})
    pq.write_table(table, tmp_path / "rows.parquet")
    return Folder(tmp_path, commands)


@pytest.fixture
def sink_with_dead(folder: Folder) -> Folder:
    """A sink `out` with 59 rows and one dead letter."""
    done = folder.apply("bad")
    assert done.code == 0 and "gristmill dead out" in done.out
    return folder
