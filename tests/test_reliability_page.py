"""docs/reliability.md names a test for each fault of the catalogue, and those tests are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PAGE = (HERE.parent / "docs" / "reliability.md").read_text()
ROW = re.compile(r"^\| (\d+)a? \|.*\| ([^|]+) \|$", re.MULTILINE)


def named() -> list[tuple[int, str]]:
    """Fault and file, once for each file that a row names."""
    return [(int(n), name.strip()) for n, names in ROW.findall(PAGE) for name in names.split(",")]


def test_every_fault_has_a_row() -> None:
    """From 1 to 82, but 33, which needs the database that sinks cannot be yet."""
    assert {n for n, _ in named()} == set(range(1, 83)) - {33}


@pytest.mark.parametrize(("number", "name"), [(n, f) for n, f in named() if n > 40])
def test_the_files_that_are_named_test_it(number: int, name: str) -> None:
    """Each file that a row of the second chapter names has a test of that fault, or explores the protocol."""
    if name in ("protocol", "fingerprint/test_digests", "arrow/test_casts"):
        assert (HERE / name).exists() or (HERE / f"{name}.py").exists()
    else:
        assert f"def test_fault_{number}_" in (HERE / f"{name}.py").read_text()


READ = re.compile(r"^\| [^|]+ \| [^|]+ \| ([a-z]+/test_[^|]+) \|$", re.MULTILINE)


def test_the_files_of_what_was_found_by_reading_are_there() -> None:
    """Each row names files of tests."""
    chapter = PAGE.partition("### Found by reading")[2].partition("\n## ")[0]
    names = [name.strip() for row in READ.findall(chapter) for name in row.split(",")]
    assert len(names) > 20
    assert [name for name in names if not (HERE / f"{name}.py").exists()] == []
