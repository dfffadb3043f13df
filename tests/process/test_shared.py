"""What the workers of a machine share while they run: numbers, one after the other, and the shares of who is there."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from gristmill.process import shared
from gristmill.process.shared import Shared


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder for temporary files of the test's own."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)


OTHER = (
    "import sys; from gristmill.process.shared import Shared; other = Shared('r', 0.5, 4);"
    "print(1, flush=True); sys.stdin.read()"
)


def test_shares_of_who_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed worker's goes with it, whoever takes its place; another run has numbers of its own."""
    monkeypatch.setattr(shared, "LOOK", 0.0)
    own = Shared("r", 0.25, 4)
    for _ in range(2):
        command = [sys.executable, "-c", OTHER]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
            assert other.stdout is not None and other.stdout.readline()
            with own.locked() as there:
                assert there == 0.75
            other.kill()
        with own.locked() as there:
            assert there == 0.25
    own.close()
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    another = Shared("s", 0.25, 4)
    assert list(another.numbers) == [0.0] * 4


def test_changes_are_made_one_after_the_other(tmp_path: Path) -> None:
    """None is lost."""
    count = (
        "import sys; from gristmill.process.shared import Shared; own = Shared('r', 0.1, 2); done = 0\n"
        "while done < 2000:\n"
        "    with own.locked() as there:\n"
        "        if there: own.numbers[1] += 1; done += 1\n"
    )
    own = Shared("r", 0.1, 2)
    runs = [subprocess.Popen([sys.executable, "-c", count]) for _ in range(3)]
    assert [run.wait() for run in runs] == [0, 0, 0]
    assert own.numbers[1] == 6000


def test_whoever_is_stopped_with_the_lock_holds_nobody_up(tmp_path: Path) -> None:
    """For longer than a moment: the others are told that nothing is to be changed."""
    own, other = Shared("r", 0.5, 2), Shared("r", 0.5, 2)
    with other.locked():
        begun = time.monotonic()
        with own.locked() as there:
            assert there == 0 and time.monotonic() - begun < 1.0
    with own.locked() as there:
        assert there == 1.0


def test_what_killed_runs_left_is_removed(tmp_path: Path) -> None:
    """By the next worker of any run; not what others use."""
    own = Shared("mine", 0.5, 2)
    with subprocess.Popen([sys.executable, "-c", OTHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline()
        other.kill()
    Shared("s", 0.5, 2).close()
    left = sorted(path.name for path in tmp_path.rglob("*") if path.is_file())
    assert len(left) == 2 and all(name.startswith("mine.") for name in left)
    own.close()


def test_the_numbers_have_their_place_on_the_disk(tmp_path: Path) -> None:
    """Before they are written to: there is no hole, which a full disk could not fill when somebody counts."""
    own = Shared("r", 0.5, 4096)
    (numbers,) = tmp_path.rglob("*.numbers")
    assert numbers.stat().st_size == 8 * 4096 <= 512 * numbers.stat().st_blocks
    other = Shared("r", 0.5, 8192)
    assert numbers.stat().st_size == 8 * 8192 and set(other.numbers) == {0.0}
    other.close()
    own.close()
