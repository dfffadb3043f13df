"""Calls that block in C, and the main thread that hears signals meanwhile."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time

import pytest

from gristmill.process import blockingcalls
from gristmill.process.blockingcalls import heard
from gristmill.process.interrupts import ENDING

BLOCKED = """
import ctypes, sys
from gristmill import cli
from gristmill.process import blockingcalls
from gristmill.process.blockingcalls import heard
def forever():
    print("asked", flush=True)
    ctypes.CDLL(None).sleep(60)
try:
    heard(forever)
except KeyboardInterrupt:
    assert cli._unanswered()
    cli._leave(7)
"""


def test_an_answer_and_an_error_are_those_of_the_call() -> None:
    """As if it had been called here; in another thread, where no signal is heard, it is."""
    assert heard(lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        heard(lambda: 1 // 0)
    seen: list[threading.Thread] = []
    caller = threading.Thread(target=lambda: seen.append(heard(threading.current_thread)))
    caller.start()
    caller.join()
    assert seen == [caller]
    assert heard(threading.current_thread) is not threading.main_thread()


@pytest.mark.skipif(sys.platform == "win32", reason="libc's sleep")
def test_a_process_ends_at_a_signal_though_a_call_goes_on() -> None:
    """The thread that is still in C holds up neither the signal nor the end."""
    child = subprocess.Popen([sys.executable, "-c", BLOCKED], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stdout.readline() == "asked\n"
    child.send_signal(signal.SIGINT)
    assert child.wait(10) == 7
    child.stdout.close()


def test_a_call_is_left_once_the_process_is_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the seconds that such a process has for anything outside."""
    monkeypatch.setattr("gristmill.process.interrupts.SOON", 0.1)
    over = threading.Event()
    ENDING.begin()
    try:
        with pytest.raises(InterruptedError, match="before this process had to end"):
            heard(lambda: over.wait(30))
        assert blockingcalls.unanswered()
    finally:
        ENDING.over()
        over.set()
    until = time.monotonic() + 5
    while blockingcalls.unanswered() and time.monotonic() < until:
        time.sleep(0.01)
    assert not blockingcalls.unanswered()
