"""What a page says is to be done about a run that was given up."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path

from gristmill.observe.standing import UNREAD
from gristmill.pages.shown import steps
from gristmill.schedule.contract import RETRY, Run
from gristmill.schedule.entry import scheduled

NIGHT = datetime(2026, 1, 1, 23, tzinfo=timezone.utc)
JOB = "source: in/\nmodel: {call: 'fn:score'}\nsink: out/\nschedule: '0 23 * * *'\n"


def test_new_files_are_appended_to_no_update(tmp_path: Path) -> None:
    """An update refuses --append: of one that was refused the page names no command that would be, too."""
    said = {}
    for name, more in (("plain", ""), ("update", "update: true\n")):
        (tmp_path / name).write_text(JOB + more)
        told = scheduled(str(tmp_path / name), NIGHT, {})
        assert told is not None
        said[name] = str(steps(Run(name, NIGHT, state="failed", exit=4), name, "", told.updates))
    assert "--append" in said["plain"] and "--append" not in said["update"] and "message names" in said["update"]


def test_a_file_that_cannot_be_read_comes_first() -> None:
    """To accept its loss is the second way."""
    run = Run("n.yaml", NIGHT, state="failed", exit=3)
    found = steps(run, "n.yaml", f"in/b.parquet {UNREAD} the result has rows of it", True)
    assert found[1][0].startswith("Put what cannot be read right") and found[2][1].endswith("--accept")
    assert steps(run, "n.yaml", "min_ok", True)[1][1].endswith("--accept")


def test_a_retry_of_another_job_is_told_by_its_message() -> None:
    """Only where the code alone is another is there a box to tick; of other differences the page says what helps."""
    run = Run("n.yaml", NIGHT, state="failed", exit=4, what=RETRY)
    code = (
        "out: this is not the job that wrote these dead letters:\n  code: fn:score\nuse retry-dead --accept-code-change"
    )
    other = "out: this is not the job that wrote these dead letters:\n  input: a.parquet is another\ngristmill run"
    assert "tick the box" in str(steps(run, "n.yaml", code, True))
    for updates in (True, False):
        said = str(steps(run, "n.yaml", other, updates))
        assert "tick the box" not in said and "message says" in said
        assert ("update scores dead rows again" in said) == updates
