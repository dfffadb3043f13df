"""Fault 72: folders for files on their way to a store, where many processes of one machine make and sweep them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

RACER = """
import os, sys, tempfile
from gristmill.plan.scratch import Scratch
tempfile.tempdir = sys.argv[1]
sys.stdin.readline()
for n in range(60):
    scratch = Scratch()
    with open(scratch.path("part"), "w") as out:
        out.write("here")
    scratch._folder._lock.close()  # as if this process were gone
"""


def test_fault_72_many_processes_make_and_sweep_at_once(tmp_path: Path) -> None:
    """Eight processes make 60 folders each: every one stands as long as its process holds it; of those that were left
    behind, the next one to come leaves none.
    """
    command = [sys.executable, "-c", RACER, str(tmp_path)]
    racers = [subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(8)]
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    said = [racer.communicate(timeout=120)[1] for racer in racers]
    assert [racer.returncode for racer in racers] == [0] * 8, said
    (tmp_path / "gristmill-scratch-killed").mkdir()
    last = subprocess.run([*command[:2], RACER.replace("60", "1"), str(tmp_path)], input="go\n", text=True)
    assert last.returncode == 0
    assert os.listdir(tmp_path) == []
