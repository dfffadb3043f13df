"""What holds without a word in the job: at most one row in a hundred may fail, and a failure in a thousand is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import gristmill as gm
from gristmill.cli import main


def failing(batch: Any, most: int = 0) -> Any:
    """Rows below `most` raise, each for itself."""
    if (batch["id"] < most).any():
        raise ValueError("not this one")
    return {"y": batch["id"] * 2.0}


def job(folder: Path, rows: int, dead: int, **options: Any) -> gm.Job:
    """So many rows, of which the first fail."""
    pq.write_table(pa.table({"id": np.arange(rows)}), folder / "in.parquet")
    sink = gm.sink(str(folder / "out"), keep=["id"])
    return gm.Job(str(folder / "in.parquet"), gm.model(failing, most=dead), sink, workers=0, batch_rows=64, **options)


@pytest.mark.parametrize(
    ("rows", "dead", "holds"), [(5, 1, True), (99, 1, True), (99, 2, False), (300, 3, True), (300, 4, False)]
)
def test_min_ok_is_a_hundredth(tmp_path: Path, rows: int, dead: int, holds: bool) -> None:
    """99 % must be scored; of fewer than a hundred rows one may be lost."""
    if holds:
        assert job(tmp_path, rows, dead).run().rows_dead == dead
        return
    with pytest.raises(gm.GateFailed, match=r"min_ok 0\.99"):
        job(tmp_path, rows, dead).run()
    assert not (tmp_path / "out" / "_SUCCESS").exists()


def test_failures_are_told_in_every_form(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """2 dead rows of 1,000: a warning in Python, in the log, in the report's notes and on the command line."""
    with pytest.warns(gm.GristmillWarning, match=r"2 of 1000 rows \(0\.20%\) are dead letters \(ValueError: 2\)"):
        report = job(tmp_path, 1000, 2, log=str(tmp_path / "run.jsonl")).run()
    told = "2 of 1000 rows (0.20%) are dead letters (ValueError: 2)"
    assert told in report.notes and told in report.as_dict()["notes"]
    events = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert [e["level"] for e in events if e.get("text") == told] == ["warning"]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fails.py").write_text(
        "def fails(batch):\n    if (batch['id'] < 2).any():\n        raise ValueError('no')\n"
        "    return {'y': batch['id']}\n"
    )
    assert main(["apply", "in.parquet", "cli", "--fn", "fails.py:fails", "--workers", "0"]) == 0
    assert told in capsys.readouterr().err


def test_one_in_ten_thousand_is_no_warning_of_a_run(tmp_path: Path) -> None:
    """Below `warn_failed` the run has no note of it; the rows are in the report all the same."""
    with pytest.warns(gm.GristmillWarning, match="1 of 10000 rows"):  # Python tells of every dead row
        report = job(tmp_path, 10_000, 1).run()
    assert report.notes == () and report.rows_dead == 1
