"""Runs of jobs in processes that a test can do harm to: started, looked at, signalled, waited for."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from children import is_alive, is_worker

HERE = Path(__file__).parent


def start(function: str, env: dict[str, str] | None = None, **arguments: Any) -> subprocess.Popen[str]:
    """`module:function` of this folder, with plain arguments, in a fresh interpreter; exits as the command would."""
    module, _, name = function.partition(":")
    code = f"""
import json, sys
sys.path[:0] = {[str(HERE), str(HERE.parent)]!r}
import {module}
from gristmill.errors import GristmillError
try:
    {module}.{name}(**json.loads({json.dumps(arguments)!r}))
except GristmillError as e:
    print(f"{{type(e).__name__}}: {{e}}", file=sys.stderr)
    sys.exit(e.exit_code)
"""
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, **(env or {})},
    )  # fmt: skip


def until(true: Callable[[], Any], seconds: float = 60.0) -> Any:
    """Wait for something to be true, and return it."""
    deadline = time.monotonic() + seconds
    while not (found := true()):
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)
    return found


def workers_of(pid: int) -> list[psutil.Process]:
    """The worker processes of a run."""
    try:
        children = psutil.Process(pid).children()
    except psutil.NoSuchProcess:
        return []
    return [p for p in children if is_worker(p)]


def gone(processes: list[psutil.Process], seconds: float = 12.0) -> bool:
    """Whether all have ended within `seconds`."""
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    return not [p for p in alive if is_alive(p)]


def receipts_in(root: str) -> int:
    """How many shards are committed."""
    return len(list(Path(root).glob("_gristmill/g*/receipts/*.json")))


def killed(process: subprocess.Popen[str]) -> None:
    """SIGKILL to the driver alone."""
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=20)
