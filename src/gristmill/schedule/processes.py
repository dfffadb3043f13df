"""The world as it is: the machine's clock, and runs as processes of their own, whose output is in files. They end with
the process that started them, in order: as if they were told to stop.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from types import FrameType
from typing import IO

from gristmill.process.spawning import mortal
from gristmill.schedule.contract import RUN, Run, stamp

LEAVING = 20.0  # seconds that runs have to stop: their own limit is 12
LOOK = 0.5  # seconds between looks where the system does not tell that a process has ended
KEPT = 60  # logs of a job that are kept
BEGINS = "gristmill up: attempt "  # the line of a log at which an attempt begins
SAYS = "gristmill: "  # the beginning of a message; the lines that follow, up to one of another kind, belong to it
MOST_LINES = 30  # of a message: differences are listed one a line
BLANK = "\n"  # a run that was killed may have left half a line


class Processes:
    """Runs and their ends; `caught` signals ask to stop, a second one ends the runs at once."""

    def __init__(self, logs: str, environ: dict[str, str]) -> None:
        self._logs = logs
        self._environ = environ
        self._going: dict[tuple[str, str, str], tuple[Run, subprocess.Popen[bytes]]] = {}
        self._asked: list[int] = []
        self._nudged = False
        self._wake, self._woken = os.pipe()
        for end in (self._wake, self._woken):
            os.set_blocking(end, False)

    @property
    def stopping(self) -> int | None:
        """The signal by which somebody asked to stop."""
        return self._asked[0] if self._asked else None

    def nudge(self) -> None:
        """Wake whoever waits, because there is something new to do; from any thread."""
        self._nudged = True
        with contextlib.suppress(BlockingIOError):
            os.write(self._woken, b"n")

    def now(self) -> datetime:
        """The present."""
        return datetime.now(timezone.utc)

    @contextlib.contextmanager
    def caught(self) -> Iterator[None]:
        """While inside, signals ask to stop."""
        before = {n: signal.signal(n, self._on) for n in (signal.SIGINT, signal.SIGTERM)}
        woken = signal.set_wakeup_fd(self._woken, warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(woken)
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on(self, number: int, frame: FrameType | None) -> None:
        self._asked.append(number)
        if len(self._asked) > 1:
            self._send(signal.SIGKILL)

    # ------------------------------------------------ runs

    def start(self, run: Run, path: str, tick: str) -> None:
        """Begin the command. Its output is appended to the log of the tick."""
        command = [*mortal("TERM"), sys.executable, "-m", "gristmill", run.what, path, "--scheduled", tick]
        with self._log(run) as out:
            out.write(f"{BLANK if out.tell() else ''}{BEGINS}{run.attempts}\n".encode())
            out.flush()
            process = subprocess.Popen(
                [*command, "--progress", "lines", *run.options.split()], stdin=subprocess.DEVNULL, stdout=out,
                stderr=subprocess.STDOUT, env=self._environ, start_new_session=True,
            )  # fmt: skip
        self._going[run.key] = run, process

    def log_of(self, run: Run) -> str:
        """The path of a run's log."""
        kind = "" if run.what == RUN else f".{run.what}"
        return os.path.join(self._logs, run.job, f"{stamp(run.tick)}{kind}.log")

    def _log(self, run: Run) -> IO[bytes]:
        path = self.log_of(run)
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            for old in sorted(os.listdir(os.path.dirname(path)))[:-KEPT]:
                os.unlink(os.path.join(os.path.dirname(path), old))
            return open(path, "ab")
        except OSError:  # a full disk is no reason not to run: the run says what it needs
            return open(os.devnull, "wb")

    def wait(self, seconds: float) -> Sequence[tuple[Run, int]]:
        """Wait until a run ends, or somebody asks to stop, or nudges."""
        until = time.monotonic() + seconds
        while not (ended := self._ended()) and self.stopping is None and not self._nudged:
            left = until - time.monotonic()
            if left <= 0:
                break
            self._sleep(left)
        self._nudged = False
        return ended

    def _sleep(self, seconds: float) -> None:
        """Until something happens that may be of interest; at most so long."""
        opened = []
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake, selectors.EVENT_READ)
            for _, process in self._going.values():
                with contextlib.suppress(OSError, AttributeError):  # no such thing here: then by looking
                    opened.append(os.pidfd_open(process.pid))
                    selector.register(opened[-1], selectors.EVENT_READ)
            told = len(opened) == len(self._going)
            selector.select(seconds if told else min(seconds, LOOK))
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake, 4096)
        for end in opened:
            os.close(end)

    def _ended(self) -> list[tuple[Run, int]]:
        found = [
            (key, run, code) for key, (run, process) in self._going.items() if (code := process.poll()) is not None
        ]
        for key, _, _ in found:
            del self._going[key]
        return [(run, code) for _, run, code in found]

    def stop(self) -> Sequence[tuple[Run, int]]:
        """Ask all runs to stop, and wait until they have, LEAVING seconds at most: then they are ended."""
        self._send(signal.SIGTERM)
        ended, until = self._ended(), time.monotonic() + LEAVING
        while self._going and time.monotonic() < until:
            self._sleep(min(1.0, max(0.0, until - time.monotonic())))
            ended += self._ended()
        self._send(signal.SIGKILL)
        for run, process in self._going.values():
            ended.append((run, process.wait()))
        self._going.clear()
        return ended

    def _send(self, number: int) -> None:
        for _, process in self._going.values():
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)

    def close(self) -> None:
        """Close what is open."""
        for end in (self._wake, self._woken):
            os.close(end)


def last_words(path: str) -> str:
    """The last message of the last attempt in the log of a run, with the lines that follow it; "" if there is none."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.path.getsize(path) - 20_000))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return ""
    attempt = max((n for n, line in enumerate(lines) if line.startswith(BEGINS)), default=-1)
    first = max((n for n, line in enumerate(lines) if n > attempt and line.startswith(SAYS)), default=None)
    return "" if first is None else "\n".join(lines[first : first + MOST_LINES]).removeprefix(SAYS).rstrip()
