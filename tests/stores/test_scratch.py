"""Fault 72: folders for files on their way to a store, where many processes of one machine make and sweep them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from gristmill.files.objectstore import ObjectFiles
from gristmill.process.scratch import SCRATCH, Scratch

RACER = """
import os, sys, tempfile
from gristmill.process.scratch import Scratch
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


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_fork_has_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a process and one that it forks put there does not meet, and is swept when both are gone."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    scratch = Scratch()
    scratch.path("before")
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            theirs = Path(scratch.path("part"))
            theirs.write_text("theirs")
            os.write(writing, str(theirs).encode())
        finally:
            os._exit(0)
    mine = Path(scratch.path("part"))
    mine.write_text("mine")
    theirs = Path(os.read(reading, 4096).decode())
    os.waitpid(child, 0)
    assert (mine.read_text(), theirs.read_text()) == ("mine", "theirs")
    assert scratch._folder is not None
    scratch._folder.remove()
    Scratch().path("part")
    assert not theirs.exists()


def test_one_folder_is_of_all_stores_of_a_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """However many buckets are opened: each folder is an open file and stays until the process ends."""
    monkeypatch.setattr(SCRATCH, "_folder", None)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for n in range(20):
        with ObjectFiles(f"s3://bucket{n}/", {}).create(f"s3://bucket{n}/part") as out:
            out.write(b"here")
    (folder,) = tmp_path.iterdir()
    assert len(list(folder.glob("*-part"))) == 20
    assert SCRATCH._folder is not None
    SCRATCH._folder.remove()


def test_a_fork_while_another_thread_makes_the_folder() -> None:
    """Has a folder of its own, and waits for nobody: the thread that held the guard is not there."""
    with SCRATCH._guard:
        pid = os.fork()
        if not pid:
            os._exit(0 if SCRATCH._guard.acquire(timeout=10) and SCRATCH._folder is None else 1)
    assert os.waitpid(pid, 0)[1] == 0


@pytest.mark.parametrize("gone", ["the folder", "its lock, and then an empty folder", "TMPDIR"])
def test_a_folder_that_somebody_removes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, gone: str) -> None:
    """Those who tidy up temporary folders do: what stands in a store is not said to be missing."""
    from obstore.store import MemoryStore

    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr(SCRATCH, "_folder", None)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    files = ObjectFiles("s3://box/", {})
    files._opened = MemoryStore()
    files.write_over("s3://box/a", b"rows")
    assert files.digest("s3://box/a")[0] == 4
    (folder,) = temporary.iterdir()
    if gone == "the folder":
        shutil.rmtree(folder)
    elif gone == "TMPDIR":
        shutil.rmtree(temporary)
        with pytest.raises(OSError, match="temporary folder is gone") as refused:
            files.digest("s3://box/a")
        assert not isinstance(refused.value, FileNotFoundError)
        return
    else:
        (folder / "lock").unlink()
        with files.create("s3://box/b") as out:
            out.write(b"more")
        other = [sys.executable, "-c", RACER.replace("60", "1"), str(temporary)]
        assert subprocess.run(other, input="go\n", text=True).returncode == 0
        assert not folder.exists()
        files.settle(["s3://box/b"])
    assert files.digest("s3://box/a")[0] == 4
    assert SCRATCH._folder is not None
    SCRATCH._folder.remove()


def test_a_copy_that_is_removed_while_it_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its object is there, and is not said to be missing; an object that is missing is."""
    from obstore.store import MemoryStore

    monkeypatch.setattr(SCRATCH, "_folder", None)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    files = ObjectFiles("s3://box/", {})
    files._opened = MemoryStore()
    files.write_over("s3://box/a", b"rows")
    with pytest.raises(OSError, match="removed while it was read") as gone, files.local("s3://box/a") as copy:
        os.unlink(copy)
        Path(copy).read_bytes()
    assert not isinstance(gone.value, FileNotFoundError)
    with pytest.raises(FileNotFoundError), files.local("s3://box/b"):
        pass
    assert SCRATCH._folder is not None
    SCRATCH._folder.remove()
