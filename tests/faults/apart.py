"""Running functions in processes of their own, quickly: each is a fork of a process that has imported everything."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

READY = (
    "pyarrow.dataset", "pyarrow.parquet", "importlib.metadata", "concurrent.futures", "gristmill.api",
    "gristmill.driver.run",
    "gristmill.driver.retrydead", "gristmill.engines.local", "gristmill.sources.parquet", "gristmill.sinks.parquet",
    "gristmill.sources.formats", "gristmill.sources.paths", "gristmill.models.function", "gristmill.models.conversion",
    "gristmill.fingerprint.code", "gristmill.models.kinds", "gristmill.models.returns", "gristmill.models.outofmemory",
)  # fmt: skip


@dataclass(frozen=True)
class Ended:
    """How a process ended: its exit status (negative: the signal), and what it printed."""

    code: int
    printed: str


class Apart:
    """The process that is forked. `run` calls `module:function` with keyword arguments (plain values) and waits."""

    def __enter__(self) -> Apart:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)

    def run(self, function: str, **arguments: Any) -> Ended:
        """Call it in a fork and wait for its end."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([function, arguments]) + "\n")
        self._process.stdin.flush()
        return Ended(**json.loads(self._process.stdout.readline()))


def _serve() -> None:
    for name in READY:
        importlib.import_module(name)
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        function, arguments = json.loads(line)
        out, into = os.pipe()
        if (pid := os.fork()) == 0:
            os.dup2(into, 1)
            os.dup2(into, 2)
            os.close(out)
            os._exit(_called(function, arguments))
        os.close(into)
        with os.fdopen(out, errors="replace") as printed:
            text = printed.read()
        _, status = os.waitpid(pid, 0)
        answers.write(json.dumps({"code": os.waitstatus_to_exitcode(status), "printed": text}) + "\n")
        answers.flush()


def _called(function: str, arguments: dict[str, Any]) -> int:
    module, _, name = function.partition(":")
    try:
        getattr(importlib.import_module(module), name)(**arguments)
        code = 0
    except BaseException as e:
        traceback.print_exc()
        code = getattr(e, "exit_code", 99)
    sys.stdout.flush()
    sys.stderr.flush()
    return code


if __name__ == "__main__":
    _serve()
