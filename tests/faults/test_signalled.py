"""Signals that come where nobody waits for them, and what libraries make of what their handler raises."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import victims

import gristmill as gm


def wrapping(number: int):
    """User code that gets the signal and tells of an error of its own instead, as the initialisation of a C module."""

    def audit(staged: object) -> None:
        try:
            os.kill(os.getpid(), number)
            for _ in range(10_000_000):
                pass
        except BaseException as e:
            raise SystemError("a function returned a result with an exception set") from e

    return audit


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_fault_26_a_signal_is_what_ended_the_run(numbers: str, tmp_path: Path, number: int, code: int) -> None:
    """An error that a signal has caused somewhere is told as the signal; the same command goes on."""
    job = gm.Job(numbers, victims.scored, str(tmp_path / "out"), workers=0, audit=[wrapping(number)])
    with pytest.raises(gm.Interrupted) as stopped:
        job.run()
    assert stopped.value.exit_code == code
    assert gm.Job(numbers, victims.scored, str(tmp_path / "out"), workers=0).run().rows_ok == 200
