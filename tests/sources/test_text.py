"""Whole files as rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import gristmill as gm
from gristmill.errors import BadJob, BadSource, SourceChanged


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    """A folder of text files."""
    (tmp_path / "a.md").write_bytes("héllo\n".encode())
    (tmp_path / "b.md").write_bytes(b"\xef\xbb\xbfmarked")
    (tmp_path / "c.txt").write_bytes(b"")
    return tmp_path


def test_one_row_a_file(notes: Path, planned: Any) -> None:
    """Path and text; an empty file is an empty text, a byte order mark is not part of it."""
    plan = planned(str(notes))
    assert plan.format.name == "text"
    rows = []
    for info in plan.infos:
        plan.infos = [info]
        rows += plan.read().pylist()
    assert rows == [
        {"path": f"{notes}/a.md", "text": "héllo\n"},
        {"path": f"{notes}/b.md", "text": "marked"},
        {"path": f"{notes}/c.txt", "text": ""},
    ]


def test_paths_relative_to_a_folder(notes: Path, planned: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is itself relative to the current folder; a file that is not below it is told."""
    monkeypatch.chdir(notes.parent)
    for base in (notes.name, f"{notes}/", "."):
        plan = planned(str(notes / "a.md"), options={"relative_to": base})
        assert plan.read().pylist()[0]["path"] == ("a.md" if base != "." else f"{notes.name}/a.md")
    for base in (f"file://{notes}", notes):
        assert planned(str(notes / "a.md"), options={"relative_to": base}).read().pylist()[0]["path"] == "a.md"
    assert gm.source("in", options={"relative_to": "."}).options == {"relative_to": str(notes.parent)}
    with pytest.raises(BadSource, match=r"a\.md is not below .*else/ \(relative_to\)"):
        planned(str(notes / "a.md"), options={"relative_to": "else"})
    with pytest.raises(BadJob, match="relative_to is 3: give a folder"):
        planned(str(notes / "a.md"), options={"relative_to": 3})


def test_bytes_are_bytes(notes: Path, planned: Any) -> None:
    """Any file, with format="binary"."""
    (notes / "b.md").write_bytes(b"\xff\x00")
    read = planned(str(notes / "b.md"), format="binary").read()
    assert read.pylist() == [{"path": f"{notes}/b.md", "bytes": b"\xff\x00"}]


def test_text_that_is_none_is_a_bad_row(notes: Path, planned: Any) -> None:
    """With its bytes; it is read only where the text is wanted."""
    (notes / "b.md").write_bytes(b"caf\xe9")
    plan = planned(str(notes / "b.md"))
    (bad,) = plan.read().bad
    assert (bad.position, bad.payload, bad.error) == (0, b"caf\xe9", "UnicodeDecodeError")
    assert plan.read(columns=["path"]).rows.num_rows == 1


def test_ranges_and_conditions(notes: Path, planned: Any) -> None:
    """The one row is at position 0."""
    plan = planned(str(notes / "a.md"))
    assert plan.read([]).rows.num_rows == 0
    assert plan.read([[0, 1]]).position.tolist() == [0]
    assert plan.read(columns=["path"], where="length(text) > 100").filtered == 1


def test_a_file_that_goes_away_is_told(notes: Path, planned: Any) -> None:
    """Fault 27."""
    plan = planned(str(notes / "a.md"))
    (notes / "a.md").unlink()
    with pytest.raises(SourceChanged, match=r"a\.md: gone"):
        plan.read()
    with pytest.raises(BadJob, match="no option 'delimiter'"):
        planned(str(notes / "b.md"), options={"delimiter": ","})
