"""What a worker prints, as whole lines: bytes in as its pipe delivers them, text of finished lines out. Lines have a
limit, and so has the amount passed on per second.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

LONGEST = 64_000  # bytes of one line that are shown
A_SECOND = 64_000  # bytes passed on per second: a flood must cost the driver nothing
LAST = 20  # this many of the last lines left out are shown when the worker ends: they may say why


class Overheard:
    """Lines of one worker. A line is passed on when it is complete, or when the worker ends; if a progress bar has
    overwritten itself (carriage returns), the last state is the line. What is left out is mentioned.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since = clock()
        self._allowance = A_SECOND
        self._begun = b""
        self._beyond = 0  # bytes of the current line that are not kept
        self._left_out = 0
        self._last: deque[bytes] = deque(maxlen=LAST)
        self._lock = threading.Lock()  # another thread gives up a pipe that a grandchild holds open

    def heard(self, data: bytes) -> str:
        """The text of the lines completed by this data, each with its line end."""
        with self._lock:
            *ended, rest = data.split(b"\n")
            out: list[str] = []
            if self._clock() - self._since > 1.0:
                self._allowance, self._since = A_SECOND, self._clock()
                out += self._gap()
            for line in ended:
                self._hold(line)
                out += self._passed(self._ended())
            self._hold(rest)
            return "".join(out)

    def rest(self) -> str:
        """What remains at the worker's end: the last of the lines left out, and the incomplete line."""
        with self._lock:
            kept, self._left_out = list(self._last), max(0, self._left_out - len(self._last))
            out = [*self._gap(), *(_text(line) for line in kept)]
            if self._begun or self._beyond:
                out.append(_text(self._ended()))
            return "".join(out)

    def _hold(self, data: bytes) -> None:
        line = self._begun + data
        if len(line) > LONGEST:
            line = line[line.rstrip(b"\r").rfind(b"\r") + 1 :]
        self._begun = line[:LONGEST]
        self._beyond += len(line) - len(self._begun)

    def _ended(self) -> bytes:
        line = self._begun.rstrip(b"\r")
        line = line[line.rfind(b"\r") + 1 :]
        if self._beyond:
            line = line.decode("utf-8", "ignore").encode() + f"… ({self._beyond:,} bytes more)".encode()
        self._begun, self._beyond = b"", 0
        return line

    def _passed(self, line: bytes) -> list[str]:
        if len(line) > self._allowance:
            self._allowance = 0
            self._left_out += 1
            self._last.append(line)
            return []
        self._allowance -= len(line) + 1
        return [_text(line)]

    def _gap(self) -> list[str]:
        left_out, self._left_out = self._left_out, 0
        self._last.clear()
        return [f"… ({left_out:,} lines left out: more than {A_SECOND:,} bytes a second)\n"] if left_out else []


def _text(line: bytes) -> str:
    return line.decode("utf-8", "replace") + "\n"
