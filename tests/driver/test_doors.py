"""One job file by several doors: a script that runs, a module, a file that the command is given."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

JOB = """
import gristmill as gm
import numpy as np
W = np.array([2, 3])
class Config:
    def __init__(self):
        self.words = {"a", "b"}
C = Config()
def f(batch):
    return {"y": batch["x"] * W[0] + len(C.words)}
job = gm.Job(source="in.parquet", model=gm.model(f), sink="out", workers=0)
if __name__ == "__main__":
    print(job.run().state)
"""


@pytest.mark.long
@pytest.mark.parametrize("doors", [("job.py", "-m gristmill run job.py"), ("-m pkg.job", "-c pkg")])
def test_the_same_file_by_another_door(tmp_path: Path, doors: tuple[str, str]) -> None:
    """What was done is done; with comments put in it still is, with another array it is not."""
    (tmp_path / "pkg").mkdir()
    pq.write_table(pa.table({"x": list(range(20))}), tmp_path / "in.parquet")
    script = tmp_path / ("pkg/job.py" if "pkg" in doors[0] else "job.py")
    script.write_text(JOB)

    def run(door: str) -> subprocess.CompletedProcess[str]:
        arguments = ["-c", "import pkg.job; print(pkg.job.job.run().state)"] if door.startswith("-c") else door.split()
        path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
        command = [sys.executable, *arguments]
        environment = {**os.environ, "PYTHONPATH": path}
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)

    assert run(doors[0]).returncode == 0
    second = run(doors[1])
    assert second.returncode == 0, second.stderr
    assert "nothing to do" in second.stdout + second.stderr
    script.write_text("# A comment.\n\n" + JOB.replace("def f", "# and one\ndef f"))
    assert "nothing to do" in run(doors[0]).stdout
    script.write_text(JOB.replace("[2, 3]", "[3, 3]"))
    refused = run(doors[1])
    assert refused.returncode != 0
    assert f"module {'pkg.' * ('pkg' in doors[0])}job: W changed" in refused.stderr
