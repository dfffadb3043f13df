"""Asks the process that looks into sinks (reader.py), which is started when somebody looks, and ended if it takes too
long. Answers are kept for a moment, so that many who look at a run cost as much as one.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

PATIENCE_S = 20.0  # seconds that one look at a sink may take, the start of the process included
LINGERS_S = 60.0  # seconds that the process waits to be asked again
MOST_WAITING = 6  # who are waiting for their turn; others are told to come again
MOST_BYTES = 64 << 20  # of an answer
FRESH_S = {"now": 2.0, "facts": 5.0, "report": 5.0}
KEPT = 32  # answers


class Unseen(Exception):
    """A sink that cannot be looked into, and why."""


class Asking:
    """Asks about the sink that a job has for a tick. Methods may be called from any thread."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = dict(environ)
        self._turn = threading.Lock()
        self._room = threading.BoundedSemaphore(MOST_WAITING)
        self._process: subprocess.Popen[bytes] | None = None
        self._kept: dict[tuple[str, str, str], tuple[float, Any]] = {}

    def ask(self, what: str, job: str, tick: str, above: Sequence[tuple[str, str]] = ()) -> Any:
        """`what` is "now" (as `gristmill status`), "facts" (SinkFacts as a dict) or "report" (a page, with links to
        what is `above` it). Raises Unseen.
        """
        if not self._room.acquire(blocking=False):
            raise Unseen("too many people are looking at once: look again in a moment")
        try:
            with self._turn:
                return self._asked((what, job, tick), above)
        finally:
            self._room.release()

    def tidy(self) -> None:
        """Hear of a process that has ended by itself."""
        if self._turn.acquire(blocking=False):
            try:
                if self._process is not None and self._process.poll() is not None:
                    self._end()
            finally:
                self._turn.release()

    def close(self) -> None:
        """End the process."""
        if (process := self._process) is not None:  # whoever waits for an answer hears that there is none
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        with self._turn:
            self._end()

    # ---------------------------------------------------------------- the process

    def _asked(self, key: tuple[str, str, str], above: Sequence[tuple[str, str]]) -> Any:
        at, found = self._kept.get(key, (float("-inf"), None))
        if time.monotonic() - at > FRESH_S[key[0]]:
            line = json.dumps({"what": key[0], "job": key[1], "tick": key[2], "above": list(above)}).encode() + b"\n"
            found = self._said(line)
            self._kept.pop(key, None)
            self._kept[key] = time.monotonic(), found
            for old in list(self._kept)[:-KEPT]:
                del self._kept[old]
        if "wrong" in found:
            raise Unseen(found["wrong"])
        return found["found"]

    def _said(self, line: bytes) -> dict[str, Any]:
        until = time.monotonic() + PATIENCE_S
        for _ in range(2):  # it may end just while it is asked
            process = self._running()
            assert process.stdin is not None
            try:
                process.stdin.write(line)
                process.stdin.flush()
                answer = self._answer(process, until)
            except OSError as e:
                self._end()
                if isinstance(e, TimeoutError):
                    raise Unseen(f"the sink could not be read within {PATIENCE_S:.0f} s") from None
                continue
            if answer:
                found: dict[str, Any] = json.loads(answer)
                return found
            self._end()
        raise Unseen("the process that reads the sink has ended: is there enough memory?")

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._end()
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "gristmill.pages.reader"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL, env=self._environ, start_new_session=True,
                )  # fmt: skip
            except OSError as e:
                raise Unseen(f"no process can be started to read the sink: {e.strerror}") from None
        return self._process

    @staticmethod
    def _answer(process: subprocess.Popen[bytes], until: float) -> bytes:
        """The line that it answers, b"" if it has ended. Raises TimeoutError."""
        assert process.stdout is not None
        fd, parts, size = process.stdout.fileno(), list[bytes](), 0
        with selectors.DefaultSelector() as selector:
            selector.register(fd, selectors.EVENT_READ)
            while not parts or not parts[-1].endswith(b"\n"):
                if not selector.select(max(0.0, until - time.monotonic())):
                    raise TimeoutError
                got = os.read(fd, 1 << 20)
                size += len(got)
                if not got or size > MOST_BYTES:
                    return b""
                parts.append(got)
        return b"".join(parts)

    def _end(self) -> None:
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        self._process = None
