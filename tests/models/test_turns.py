"""Limits that several workers of a machine keep together: when each of them sends."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gristmill.models.pace import Beat

SENDER = """
import asyncio, sys, time
from gristmill.models.ending import Ending
from gristmill.models.turns import Turns

async def sent(count, pause):
    turns = Turns(6000, None, 1 / 3, Ending())
    turns.share_in("r")
    for _ in range(count):
        await turns.take(1.0)
        print(time.monotonic(), flush=True)
        await asyncio.sleep(pause)

asyncio.run(sent(int(sys.argv[1]), float(sys.argv[2])))
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder for temporary files of the test's own."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))


def began(count: int, pause: float = 0.0) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SENDER, str(count), str(pause)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def times(run: subprocess.Popen[str]) -> list[float]:
    return [float(line) for line in run.communicate()[0].splitlines()]


def most(sent: list[float]) -> int:
    """In any second."""
    sent = sorted(sent)
    return max(sum(begun <= at < begun + 1 for at in sent[n : n + 200]) for n, begun in enumerate(sent))


@pytest.mark.long
def test_three_send_no_more_than_one_may(tmp_path: Path) -> None:
    """However unequal what they have to send; once two are done, the third has all that it can use, up to its share
    of those that are there.
    """
    runs = [began(250), began(100), began(50, pause=0.05)]
    sent = [times(run) for run in runs]
    assert [len(some) for some in sent] == [250, 100, 50]
    assert most([at for some in sent for at in some]) <= 101


@pytest.mark.long
def test_an_idle_one_leaves_its_share(tmp_path: Path) -> None:
    """It is there, and has nothing to send; one that is killed is not there, and nobody has its share."""
    idle = [began(2, pause=1000.0), began(2, pause=1000.0)]
    for one in idle:
        assert one.stdout is not None and one.stdout.readline()
    try:
        alone = times(began(300))
        assert 290 / (alone[-1] - alone[0]) > 80 and most(alone) <= 101
    finally:
        for one in idle:
            one.kill()
            one.communicate()
    alone = times(began(100))
    assert 95 / (alone[-1] - alone[0]) < 40


def test_one_that_is_stopped_holds_nobody_up(tmp_path: Path) -> None:
    """Wherever it is."""
    other = began(100_000)
    assert other.stdout is not None and other.stdout.readline()
    other.send_signal(signal.SIGSTOP)
    try:
        begun = time.monotonic()
        assert len(times(began(100))) == 100 and time.monotonic() - begun < 20.0
    finally:
        other.kill()
        other.communicate()


@pytest.mark.parametrize("workers", [2, 8, 40])
@pytest.mark.parametrize("rate", [60, 120, 3000])
def test_turns_that_are_given_back_are_nobody_elses(workers: int, rate: int) -> None:
    """Several workers have their turns at once, and a part of them is not sent after all: no second has more than its
    share of the rate.
    """
    for seed, unused in enumerate([0.1, 0.5, 0.9]):
        drawn, beat, now = random.Random(seed), Beat(rate), 1.0
        sent: list[float] = []
        turns = [beat.turn(now) for _ in range(workers)]
        while now < 15.0:
            turn = min(turns)
            turns.remove(turn)
            now = max(now, turn) + 1e-5
            beat.left(turn, now)
            if drawn.random() < unused:
                beat.unsent(now)
            else:
                sent.append(now)
            turns.append(beat.turn(now))
        assert (1 - unused) * rate / 60 * 10 < len(sent) and most(sent) <= rate / 60


def test_a_turn_of_long_ago_is_not_given_back() -> None:
    """What others have sent since is not taken for it."""
    beat, other = Beat(600), Beat(600)
    first, *_ = [(beat.turn(1.0), other.turn(1.0))[0] for _ in range(60)]
    beat.unsent(first)
    assert [beat.turn(1.0) for _ in range(30)] == [other.turn(1.0) for _ in range(30)]
