"""The protocol explored: every operation of a command as the one at which it is stopped or ended, another command in
between, on a disk and in an object store; all of it by the code that runs jobs.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from mortal import Mortal
from scenes import Act, Interleaving

from gristmill.engines import local

FIRSTS = {
    "nothing": [Act("run", 1)],
    "result": [Act("restart", 2), Act("retry", 2), Act("retry", 4)],
    "result and a new file": [Act("append", 1), Act("restart", 1)],
    "appended": [Act("retry", 2), Act("restart", 2)],
}
SECONDS = [
    Act("run", 1),
    Act("run", 2),
    Act("append", 1),
    Act("append", 2),
    Act("restart", 2),
    Act("restart", 3),
    Act("retry", 2),
    Act("retry", 3),
]


def interleavings() -> list[Interleaving]:
    """All combinations; with an index some, which stand for the others, as it is one more file."""
    return [
        Interleaving(kind, held, first, second, ends, indexed)
        for kind, (held, firsts), ends in itertools.product(("disk", "store"), FIRSTS.items(), (True, False))
        for first in firsts
        for indexed, seconds in ((False, SECONDS), (True, SECONDS[1::3]))
        for second in seconds
    ]


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder in memory, for commands whose workers can die."""
    where = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=where) as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(local, "_InProcess", Mortal)
        yield Path(folder)


def explore(path: Interleaving, folder: Path, at: int) -> tuple[bool, int]:
    """One of its interleavings in a folder of its own."""
    place = folder / f"{abs(hash((str(path), at)))}"
    try:
        return path.explored(place, at)
    finally:
        Mortal.bury()
        shutil.rmtree(place, ignore_errors=True)


@pytest.mark.few(1)
@pytest.mark.parametrize("seed", range(8))
def test_some_of_all_interleavings(memory: Path, seed: int) -> None:
    """A sample of the exploration below, another one for each seed."""
    chance = random.Random(seed)
    for path in chance.sample(interleavings(), 3):
        at = chance.randrange(60)
        try:
            explore(path, memory, at)
        except AssertionError as e:
            raise AssertionError(f"{path} at operation {at}: {e}") from e


@pytest.mark.soak
@pytest.mark.parametrize("path", interleavings(), ids=str)
def test_all_interleavings(path: Interleaving, memory: Path) -> None:
    """Every operation of the first command, or every STEP-th, as the one at which it is stopped, or ended."""
    total = 0
    for tried, at in enumerate(itertools.count(0, int(os.environ.get("STEP", "1")))):
        try:
            came, operations = explore(path, memory, at)
        except AssertionError as e:
            raise AssertionError(f"{path} at operation {at}: {e}") from e
        total += operations
        if not came:
            print(f"{path}: {tried} interleavings, {total} operations")
            return
