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
MOST_WAITING = 8  # questions that are not answered yet; those beyond are refused
MOST_BYTES = 64 << 20  # of an answer
FRESH_S = {"now": 2.0, "facts": 5.0, "report": 5.0}
HANGS_S = 30.0  # seconds in which a sink that could not be read is not tried again: others wait for it meanwhile
KEPT = 32  # answers

Key = tuple[str, str, str]  # what, job, tick


class Unseen(Exception):
    """A sink that cannot be looked into, and why. It may be `soon`, as it is being read."""

    def __init__(self, text: str, *, soon: bool = False) -> None:
        super().__init__(text)
        self.soon = soon


class _Question:
    """One that is asked, and its answer once it `is_there`."""

    def __init__(self) -> None:
        self.is_there = threading.Event()
        self.found: dict[str, Any] = {}


class Asking:
    """Asks about the sink that a job has for a tick. Methods may be called from any thread."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = dict(environ)
        self._lock = threading.Lock()  # of what is kept and asked, for moments
        self._turn = threading.Lock()  # of the process, which answers one after the other
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False
        self._kept: dict[Key, tuple[float, dict[str, Any]]] = {}  # answers, and until when they are fresh
        self._asked: dict[Key, _Question] = {}

    def ask(
        self, what: str, job: str, tick: str, above: Sequence[tuple[str, str]] = (), wait: float = 2 * PATIENCE_S
    ) -> Any:
        """`what` is "now" (as `gristmill status`), "facts" (SinkFacts as a dict) or "report" (a page, with links to
        what is `above` it). Raises Unseen, also if there is no answer within `wait` seconds; it is kept once it comes.
        """
        key = (what, job, tick)
        with self._lock:
            until, found = self._kept.get(key, (0.0, None))
            if found is not None and time.monotonic() < until:
                return _told(found)
            question = self._asked.get(key)
            if question is None:
                if len(self._asked) >= MOST_WAITING:
                    raise Unseen("too many people are looking at once: look again in a moment", soon=True)
                question = self._asked[key] = _Question()
                threading.Thread(target=self._answered, args=(key, above, question), daemon=True).start()
        if not question.is_there.wait(wait):
            raise Unseen("it is being read, and is shown once that is done", soon=True)
        return _told(question.found)

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
        self._closed = True
        if (process := self._process) is not None:  # whoever waits for an answer hears that there is none
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        with self._turn:
            self._end()

    # ---------------------------------------------------------------- the process

    def _answered(self, key: Key, above: Sequence[tuple[str, str]], question: _Question) -> None:
        """In a thread of its own: have the question answered, and keep the answer."""
        line = json.dumps({"what": key[0], "job": key[1], "tick": key[2], "above": list(above)}).encode() + b"\n"
        fresh = FRESH_S[key[0]]
        try:
            with self._turn:
                question.found = self._said(line)
        except Unseen as e:
            question.found, fresh = {"wrong": str(e)}, HANGS_S
        finally:
            with self._lock:
                self._kept.pop(key, None)
                self._kept[key] = time.monotonic() + fresh, question.found
                for old in list(self._kept)[:-KEPT]:
                    del self._kept[old]
                del self._asked[key]
            question.is_there.set()

    def _said(self, line: bytes) -> dict[str, Any]:
        until = time.monotonic() + PATIENCE_S
        for _ in range(2):  # it may end just while it is asked
            process = self._running()
            assert process.stdin is not None
            try:
                process.stdin.write(line)
                process.stdin.flush()
                answer = self._answer(process, until)
            except TimeoutError:
                self._end()
                raise Unseen(f"the sink could not be read within {PATIENCE_S:.0f} s") from None
            except OSError:  # it has ended
                answer = b""
            if answer:
                found: dict[str, Any] = json.loads(answer)
                return found
            self._end()
        raise Unseen("the process that reads the sink has ended: is there enough memory?")

    def _running(self) -> subprocess.Popen[bytes]:
        if self._closed:
            raise Unseen("gristmill up is stopping")
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


def _told(found: Mapping[str, Any]) -> Any:
    if "found" not in found:
        raise Unseen(found.get("wrong", "there was no answer"))
    return found["found"]
