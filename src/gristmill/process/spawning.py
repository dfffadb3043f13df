"""Processes that end with the one that started them, whatever their state."""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any


class Spawner:
    """Starts processes from one lasting thread: parent-death signals are sent when the *thread* that forked ends."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], Any]) -> Any:
        """What the function returns or raises, called in that thread."""
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()  # not shared: a signal may interrupt a wait
        self._calls.put((function, answers))
        answer = answers.get()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def close(self) -> None:
        """End the thread, and with it what it has started."""
        self._calls.put(None)
        self._thread.join()

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            function, answers = call
            try:
                answers.put(function())
            except BaseException as e:  # crosses to the caller's thread, where it is raised
                answers.put(e)


@functools.cache
def mortal(by: str = "KILL") -> tuple[str, ...]:
    """The prefix of a command that makes its process die, by that signal, with the thread that starts it, even before
    it runs a line of its own: one stopped while starting could not call `die_with`. Empty if the system has no such
    tool.

    Not done by a function between fork and exec: that would run Python in a copy of a process with threads.
    """
    import shutil  # a worker needs none of these
    import subprocess

    tool = shutil.which("setpriv") if sys.platform == "linux" else None
    if tool is None:
        return ()
    command = (tool, "--pdeathsig", by)  # the process stays the same one; old versions do not know the option
    with contextlib.suppress(OSError):
        known = subprocess.run([*command, "true"], check=False, stdin=subprocess.DEVNULL, capture_output=True)
        return command if known.returncode == 0 else ()
    return ()


@contextlib.contextmanager
def spawning_mortals() -> Iterator[None]:
    """While this lasts, processes that multiprocessing spawns (in whatever library) end with the thread that starts
    them, and do not import the script that runs here: it would run again, unless it has an `if __name__` guard.
    """
    import shlex
    import tempfile
    from multiprocessing import resource_tracker, spawn

    resource_tracker.ensure_running()  # not mortal: it frees what killed processes leave behind
    before, data = spawn.get_executable(), spawn.get_preparation_data
    with tempfile.TemporaryDirectory(prefix="gristmill-spawn-") as folder:
        if mortal():
            path = os.path.join(folder, "python")
            with open(path, "w", encoding="utf-8") as file:
                file.write(f'#!/bin/sh\nexec {shlex.join([*mortal(), os.fsdecode(before)])} "$@"\n')
            os.chmod(path, 0o700)
            if os.access(path, os.X_OK):  # not where nothing may be executed
                spawn.set_executable(path)
        spawn.get_preparation_data = lambda name: {k: v for k, v in data(name).items() if not k.startswith("init_main")}
        try:
            yield
        finally:
            spawn.get_preparation_data = data
            spawn.set_executable(before)


def be_named(name: str) -> None:
    """Set the name that `top` and `ps -o comm` show for this process: up to 15 characters (Linux)."""
    if sys.platform == "linux":
        import ctypes

        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(15, name.encode(), 0, 0, 0)  # PR_SET_NAME


def die_with(parent: int) -> None:
    """Ask the kernel to kill this process when the thread that started it ends, at the latest with its process (Linux);
    elsewhere the end of the pipe from there does that. Called first of all, in case `mortal` is empty.
    """
    if sys.platform != "linux":
        return
    import ctypes

    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(0)
