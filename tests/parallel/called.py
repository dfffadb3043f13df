"""Functions that are mapped."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any


def double(x: Any) -> Any:
    """Twice."""
    return x * 2


def noted(x: int, log: str) -> int:
    """Writes a line for each call."""
    with open(log, "a") as out:
        out.write(f"{x} {os.getpid()}\n")
    return x * 10


def slow(x: float) -> float:
    """Sleeps so many seconds."""
    time.sleep(x)
    return x


def unheard(x: float, how: str) -> float:
    """Takes the streams and the timer of its process away, and sleeps so many seconds."""
    print("heard")
    if how == "none":
        sys.stdout = sys.stderr = None  # type: ignore[assignment]
    elif how == "closed":
        sys.stdout.close()
        sys.stderr.close()
    elif how == "timer":
        faulthandler.cancel_dump_traceback_later()
    time.sleep(x)
    return x


def slowly(x: Any) -> Any:
    """The input itself, after a moment."""
    time.sleep(0.05)
    return x


def stops(x: int, folder: str, times: int = 1) -> int:
    """The process is stopped in the first `times` calls for input 3."""
    tries = len(list(Path(folder).iterdir())) if x == 3 else times
    if tries < times:
        Path(folder, str(tries)).touch()
        os.kill(os.getpid(), signal.SIGSTOP)
    return x * 10


def holds(seconds: int, marker: str) -> int:
    """Sleeps so long without letting other threads of its process run."""
    import ctypes

    Path(marker).write_text(str(os.getpid()))
    ctypes.PyDLL(None).sleep(seconds)
    return seconds


def kept(x: int) -> tuple[int, int]:
    """Loads something once a worker, kept on the function."""
    if not hasattr(kept, "_model"):
        kept._model = {"pid": os.getpid(), "loads": 0}  # type: ignore[attr-defined]
        kept._model["loads"] += 1  # type: ignore[attr-defined]
    return kept._model["pid"], kept._model["loads"]  # type: ignore[attr-defined]


def dies(x: int, bad: list[int], how: str = "kill") -> int:
    """Ends its process for some inputs."""
    if x in bad:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "segfault":
            import ctypes

            ctypes.string_at(0)
        os._exit(7)
    return x


def fails_until(x: int, folder: str, times: int) -> int:
    """Raises the first `times` times it is called for an input."""
    tries = len(list(Path(folder).glob(f"{x}.*")))
    Path(folder, f"{x}.{tries}").touch()
    if tries < times:
        raise ConnectionError(f"try {tries}")
    return x


class OwnError(Exception):
    """An exception that needs two arguments, so that pickle cannot make it again from its message."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code


def raises(x: int) -> int:
    """Different exceptions by input."""
    if x == 1:
        raise KeyError("one")
    if x == 2:
        raise OwnError(2, "two")
    if x == 3:
        raise SystemExit(3)
    if x == 4:
        raise ValueError(threading.Lock())  # holds what cannot be pickled
    if x == 5:
        return lambda: x  # type: ignore[return-value]
    if x == 6:
        return threading.Lock()  # type: ignore[return-value]
    return x


def kept_alone(x: Any) -> Any:
    """The input itself."""
    return x


class Unreadable:
    """Can be pickled, and not be read again."""

    def __reduce__(self) -> Any:
        return (int, ("no number",))


def unreadable(x: int) -> Any:
    """Something that cannot be read again for 7."""
    return Unreadable() if x == 7 else x


def terminated(x: int) -> int:
    """How a program ended that was asked to."""
    process = subprocess.Popen(["sleep", "60"])
    process.terminate()
    return process.wait()


def forked(x: int) -> int | None:
    """How a forked process ended that was asked to at once."""
    process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    process.start()
    process.terminate()
    process.join()
    return process.exitcode


def pooled(x: int) -> list[int]:
    """A pool, which terminates its processes."""
    with multiprocessing.get_context("fork").Pool(2) as pool:
        return pool.map(abs, [-1, 2])


def forks(x: int, how: str) -> tuple[int, int]:
    """The child comes out of the call in some way; the worker gives its exit code."""
    child = os.fork()
    if child == 0:
        print("printed by the child")
        if how == "raises":
            raise RuntimeError("raised by the child")
        if how == "exits":
            raise SystemExit(3)
        return -1, -1
    for _ in range(500):
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return x, os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return x, -1


def prints_bytes(x: int) -> None:
    """To standard output as bytes, also by pieces of a character, between text."""
    import io
    import sys

    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    print("text", end=" ")
    assert sys.stdout.buffer.write(b"bytes\n") == 6
    sys.stdout.buffer.write(b"a line\n\xc3")
    sys.stdout.buffer.write(memoryview(b"\xa9 \xff\n"))
    wrapped = io.TextIOWrapper(sys.stdout.buffer, encoding="utf-8")
    print("wrapped", file=wrapped, flush=True)
    del wrapped
    sys.stdout.buffer.write(b"end \xc3")


def buffered(x: int, kind: str) -> Any:
    """The same object each time, with other values."""
    import numpy as np

    held: dict[str, Any] = vars(buffered).setdefault(
        "held",
        {
            "array": np.zeros(3),
            "large": np.zeros(1 << 18),
            "dict": {},
            "nested": ({"rows": [0]}, 1),
            "bytearray": bytearray(8),
            "view": memoryview(bytearray(8)),
            "own": Box([0]),
        },
    )
    value = held[kind]
    if kind in ("array", "large"):
        value[:] = x
    elif kind == "dict":
        value["x"] = x
    elif kind == "nested":
        value[0]["rows"][0] = x
    elif kind == "own":
        value.rows[0] = x
    else:
        value[:] = x.to_bytes(8, "little")
    return bytes(value) if kind == "view" else value


class Box:
    """An object of a class of its own."""

    def __init__(self, rows: list[int]) -> None:
        self.rows = rows

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Box) and self.rows == other.rows

    __hash__ = None  # type: ignore[assignment]


def grows(shared: Any, x: int) -> int:
    """How long the list was made, which each call has for itself."""
    rows = shared.rows if isinstance(shared, Box) else shared
    rows.append(x)
    return len(rows)


def doubled_in_place(array: Any) -> float:
    """Changes what it was given."""
    array *= 2
    return float(array[0])
