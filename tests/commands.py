"""Commands in processes of their own, which begin as forks of one that has imported what commands need: an interpreter
that starts takes most of the time of a short command. For tests of what a command does; how it starts is tested apart.
"""

from __future__ import annotations

import array
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_SERVER = """
import sys
sys.path.insert(0, {tests!r})
from commands import serve
serve({fd})
"""
_IMPORTS = (
    "gristmill.cli.app",
    "gristmill.cli.job",
    "gristmill.cli.lastjob",
    "gristmill.cli.score",
    "gristmill.cli.sink",
    "gristmill.driver.run",
    "gristmill.engines.local",
    "gristmill.fingerprint.code",
    "gristmill.fingerprint.loadedmodules",
    "gristmill.jobfile.jobfile",
    "gristmill.jobfile.sections",
    "gristmill.models.batchfunction",
    "gristmill.observe.jsonlog",
    "gristmill.sources.parquet",
    "gristmill.sources.schema",
    "gristmill.driver.views",
    "gristmill.worker.stages",
    "gristmill.arrow.pandasahead",
    "importlib.metadata",
    "email.parser",
    "yaml",
)


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str


class Commands:
    """Starts commands, one after the other."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            script = _SERVER.format(tests=str(Path(__file__).parent), fd=theirs.fileno())
            # One thread each, so that no library has begun threads, which a fork would lack.
            env = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
            self._server = subprocess.Popen([sys.executable, "-c", script], pass_fds=[theirs.fileno()], env=env)

    def run(self, arguments: tuple[str, ...], folder: Path, env: Mapping[str, str], timeout: float) -> Ended:
        """`python -m gristmill` with these arguments, started in a folder, ended. Raises TimeoutError."""
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            told = json.dumps([arguments, str(folder), dict(env)]).encode()
            self._socket.settimeout(timeout)
            socket.send_fds(self._socket, [len(told).to_bytes(4, "little") + told], [out.fileno(), err.fileno()])
            code = int.from_bytes(self._socket.recv(4), "little", signed=True)
            texts = []
            for file in (out, err):
                file.seek(0)
                texts.append(file.read().decode(errors="replace").replace("\r\n", "\n"))
            return Ended(code, *texts)

    def close(self) -> None:
        """End the process that they are forks of."""
        self._socket.close()
        self._server.wait(10)


def serve(fd: int) -> None:
    """Fork for each command that is asked for, until nobody can ask any more."""
    import importlib

    for name in _IMPORTS:
        importlib.import_module(name)
    with socket.socket(fileno=fd) as asked:
        while True:
            head, ancillary, _, _ = asked.recvmsg(4, socket.CMSG_LEN(8))
            if not head:
                return
            fds = array.array("i", ancillary[0][2])
            told = b""
            while len(told) < int.from_bytes(head, "little"):
                told += asked.recv(1 << 16)
            pid = os.fork()
            if not pid:
                asked.close()
                _command(*json.loads(told), *fds)
            for number in fds:
                os.close(number)
            asked.sendall(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]).to_bytes(4, "little", signed=True))


def _command(arguments: list[str], folder: str, env: dict[str, str], out: int, err: int) -> None:
    import runpy

    os.chdir(folder)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = ["gristmill", *arguments]
    sys.path[0] = folder
    code = 1
    try:
        runpy.run_module("gristmill", run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else 1 if e.code else 0
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code & 0xFF)
