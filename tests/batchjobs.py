"""Jobs through a batch API of `batchserver`, and what is to be seen of them."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa

import gristmill as gm

PROVIDERS = ["openai", "anthropic"]


def table(rows: int) -> pa.Table:
    return pa.table({"id": range(rows), "text": [f"row {n} is here" for n in range(rows)]})


def asked(rows: Any, sink: Path, provider: str, **more: Any) -> gm.Report:
    return gm.prompt(
        rows, sink, prompt="{{ text }}", model="m", keep=["id"], batch_api=provider, **{"max_tokens": 20, **more}
    )


def answers(sink: Path) -> dict[int, str]:
    """By the row's number, each once."""
    found = gm.read(str(sink)).to_table().to_pylist()
    assert len({row["id"] for row in found}) == len(found)
    return {row["id"]: row["answer"] for row in found}


def once(told: dict[str, Any]) -> None:
    """No request was computed twice, and none had the name of another."""
    assert set(told["computed"].values()) == {1} and set(told["names"].values()) == {1}


def until(true: Callable[[], Any], run: subprocess.Popen[Any]) -> None:
    begun = time.monotonic()
    while not true() and run.poll() is None and time.monotonic() - begun < 60:
        time.sleep(0.02)
