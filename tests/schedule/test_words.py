"""What is told of a run that has ended: the last message of its last attempt, and how often it failed."""

from __future__ import annotations

import time
from datetime import datetime, timezone
from pathlib import Path

import pytest

from gristmill.schedule import processes, queueing
from gristmill.schedule.contract import Run
from gristmill.schedule.entry import scheduled
from gristmill.schedule.processes import Processes, last_words

NIGHT = datetime(2026, 1, 1, 23, tzinfo=timezone.utc)
JOB = "source: in/\nmodel: {call: 'fn:score'}\nsink: out/\nschedule: {cron: '0 23 * * *', retries: 2}\n"


def test_a_message_has_the_lines_that_follow(tmp_path: Path) -> None:
    """A refusal lists what differs below its first line, and the ways out below that."""
    log = tmp_path / "a.log"
    log.write_text("12 rows\ngristmill: out: the job is another:\n  input: a.parquet is new\nuse --append\n")
    assert last_words(str(log)) == "out: the job is another:\n  input: a.parquet is new\nuse --append"


def test_an_earlier_attempt_has_no_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All attempts write to one log; one that was killed said nothing, whatever the one before it had said."""
    monkeypatch.setattr(processes, "mortal", lambda name: ["sh", "-c", "exit 1", "--"])
    world = Processes(str(tmp_path), {})
    try:
        log = Path(world.log_of(Run("n.yaml", NIGHT)))
        log.parent.mkdir(parents=True)
        log.write_text("gristmill: no space left\n half a li")
        world.start(Run("n.yaml", NIGHT, attempts=2), "n.yaml", NIGHT.isoformat())
        until = time.monotonic() + 30
        while not world.wait(1.0):
            assert time.monotonic() < until
        assert last_words(str(log)) == "" and "attempt 2" in log.read_text().splitlines()[-1]
        with log.open("a") as out:
            out.write("gristmill: of the second\n")
        assert last_words(str(log)) == "of the second"
    finally:
        world.close()


def test_a_run_that_was_given_up_says_how_it_ended_last(tmp_path: Path) -> None:
    """The count is of all its ends, and the signal is that of the last."""
    (tmp_path / "n.yaml").write_text(JOB)
    told = scheduled(str(tmp_path / "n.yaml"), NIGHT, {})
    run = Run("n.yaml", NIGHT, state="running")
    for code in (1, 1, -9):
        run = queueing.after(run, code, told, 0.0)
    assert (run.state, run.reason) == ("failed", "failed, 3 times, the last time ended by signal 9")
