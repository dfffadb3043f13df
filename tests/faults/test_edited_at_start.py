"""A script or module that is saved while it is being imported: its old functions are not taken for the new text."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

TEXT = """
import pathlib, sys
edit = pathlib.Path(__file__).parent / "edit"
if edit.exists():  # as an editor does, while slow imports run
    pathlib.Path(__file__).write_text(edit.read_text())
    edit.unlink()
def score(batch):
    return {"y": [FACTOR * x for x in batch["x"]]}
"""
JOB = """
import gristmill as gm
job = gm.Job("in.parquet", gm.model(score), "out", workers=0)
if __name__ == "__main__":
    print(job.run().state)
"""


@pytest.mark.few(2)
@pytest.mark.parametrize("place", ["script", "module"])
@pytest.mark.parametrize("edit", ["answers", "comments"])
def test_saved_while_it_is_imported(tmp_path: Path, place: str, edit: str) -> None:
    """What answers otherwise is refused before a row is scored, naming the file; a comment is none; again is well."""
    pq.write_table(pa.table({"x": list(range(20))}), tmp_path / "in.parquet")
    text = TEXT + JOB if place == "script" else TEXT
    file = tmp_path / ("job.py" if place == "script" else "scoring.py")
    (tmp_path / "job.py").write_text("from scoring import score" + JOB)
    file.write_text(text.replace("FACTOR", "2"))
    new = text.replace("FACTOR", "3") if edit == "answers" else "# A comment.\n\n" + text.replace("FACTOR", "2")
    (tmp_path / "edit").write_text(new)
    command = [sys.executable, "job.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    if edit == "comments":
        assert done.returncode == 0, done.stderr
        return
    assert done.returncode != 0
    assert f"{file.name} was changed after this process imported it" in done.stderr
    assert not (tmp_path / "out" / "_SUCCESS").exists()
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
