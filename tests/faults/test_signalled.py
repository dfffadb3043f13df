"""Signals that come where nobody waits for them, and what libraries make of what their handler raises."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
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


NIGHT = """
import os, sys
sys.path.insert(0, {here!r})
import gristmill as gm
import victims

for sink in sys.argv[2:]:
    try:
        gm.Job(sys.argv[1], gm.model(victims.{model}), sink, workers=0, audit=[victims.{audit}]).run()
    except Exception as e:
        print("goes on after", type(e).__name__)
    except gm.Interrupted as e:
        print("report of", e.report.rows_in, e.exit_code)
        raise
"""


@pytest.mark.few(2)
@pytest.mark.parametrize("when", ["scoring", "publishing"])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_fault_26_a_signal_ends_a_script_of_many_jobs(
    numbers: str, quick: Path, number: int, code: int, when: str
) -> None:
    """A script that goes on after a job that failed (`except Exception`) does not go on after Ctrl-C or SIGTERM, whose
    exit code it has, without a traceback; no further job is begun.
    """
    script = night(when)
    done = subprocess.run(
        [sys.executable, "-c", script, numbers, str(quick / "one"), str(quick / "two")],
        env={**os.environ, "SIGNAL": str(int(number))}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    assert "goes on" not in done.stdout and "Traceback" not in done.stderr, done.stdout + done.stderr
    assert done.stdout.endswith(f" {code}\n")
    assert not (quick / "two").exists()


def test_fault_26_a_session_goes_on_after_ctrl_c(numbers: str, quick: Path) -> None:
    """Where a person types, Ctrl-C ends the run and not the interpreter."""
    done = subprocess.run(
        [sys.executable, "-i", "-c", night("scoring"), numbers, str(quick / "one")],
        env={**os.environ, "SIGNAL": str(int(signal.SIGINT))}, input="print('still here')\nexit(7)\n",
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 7 and "still here" in done.stdout, done.stdout + done.stderr
    assert "stopped by SIGINT" in done.stderr


def night(when: str) -> str:
    """Jobs one after the other, of which the first gets a signal in the middle."""
    model, audit = ("signalled", "content") if when == "scoring" else ("scored", "signalling")
    return NIGHT.format(here=str(Path(victims.__file__).parent), model=model, audit=audit)


CLASS = """
import sys
from gristmill.cli import ending

class Field:
    def __set_name__(self, owner, name):
        raise KeyboardInterrupt  # what a signal raises while a class is made

try:
    class Made:
        field = Field()
except BaseException as error:
    sys.exit(ending.end(error, debug=False))
"""


def test_fault_26_a_signal_while_a_class_is_made() -> None:
    """Python makes another error of the interrupt, which is one all the same."""
    ended = subprocess.run([sys.executable, "-c", CLASS], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr.startswith("gristmill: interrupted")) == (130, True), ended.stderr


STRUCK = """
import _imp, os, signal, sys
from gristmill.cli import main

who, at, seen = sys.argv.pop(1), int(sys.argv.pop(1)), 0

def strike(frame, event, arg):
    global seen
    ours = event == "c_return" and arg is _imp.acquire_lock and who in repr(signal.getsignal(signal.SIGINT))
    seen += ours
    if ours and seen == at:
        sys.setprofile(None)
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(100):
            pass

sys.setprofile(strike)
sys.exit(main())
"""


@pytest.mark.few(2)
@pytest.mark.parametrize(("who", "at"), [("Stops", 1), ("Stops", 5), ("Stops", 20), ("_interrupted", 1)])
def test_fault_26_a_signal_in_the_middle_of_an_import(numbers: str, quick: Path, who: str, at: int) -> None:
    """What it raises comes after the import system has let go of its locks, for which another thread's import waits."""
    line = [sys.executable, "-c", STRUCK, who, str(at), "apply", numbers, str(quick / "out"), "--fn", "victims:scored"]
    ended = subprocess.run(
        [*line, "--where", "x < 50", "--workers", "0"], cwd=quick, capture_output=True, text=True, timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])},
    )  # fmt: skip
    assert ended.returncode == 130, ended.stderr
    said = "stopped by SIGINT" in ended.stderr  # also where the run had begun to listen by then
    assert said or (who != "Stops" and "interrupted" in ended.stderr), ended.stderr


def test_fault_26_a_lock_that_a_signal_left_taken() -> None:
    """C++ code that imports may throw away what a signal raised, the lock still taken: no thread waits for it."""
    left = "import _imp; _imp.acquire_lock(); from gristmill.process import startup; print(startup.imported('wave'))"
    ended = subprocess.run([sys.executable, "-c", left], capture_output=True, text=True, timeout=60)
    assert ended.stdout.startswith("<module 'wave'"), ended.stderr
