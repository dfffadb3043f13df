"""`gristmill compare` as a person runs it: what it prints, at 80 columns too, and how it ends."""

from __future__ import annotations

import io
import json
import os
import re
from typing import Any

import pytest

import gristmill as gm
from gristmill.comparison.comparison import Comparison, show

Folder = Any  # conftest.Folder


def whole(batch: dict[str, Any]) -> dict[str, Any]:
    """A model."""
    return {"label": ["even" if x % 2 == 0 else "odd" for x in batch["x"]], "score": batch["x"] / 60}


def short(batch: dict[str, Any]) -> dict[str, Any]:
    """Another one."""
    return {"label": ["even" if x % 2 == 0 or x == 7 else "odd" for x in batch["x"]], "score": batch["x"] / 61}


@pytest.fixture
def sinks(folder: Folder) -> Folder:
    """Sinks a (60 rows) and b (58 of them) of two functions that differ in one label."""
    for sink, function, where in (("a", whole, None), ("b", short, "id > 1")):
        rows = str(folder.path / "rows.parquet")
        gm.apply(rows, str(folder.path / sink), fn=function, keep=["id", "t"], where=where, workers=0)
    return folder


def test_two_sinks_are_compared(sinks: Folder) -> None:
    """Counts, agreement, the confusion of labels, differences and examples; the same as from Python, and as JSON."""
    done = sinks.run("compare", "a", "b", "--on", "id", "--examples", "2")
    assert (done.code, done.err) == (0, "")
    lines = ("in both   58", "only in a  2  id=0; id=1", "only in b  0", "label     98.28 %  57 equal, 1 differ")
    for line in (*lines, "even     29    0", "odd       1   28"):
        assert re.search(rf"^{re.escape(line)} *$", done.out, re.MULTILINE), done.out
    assert re.search(r"^7 +odd +even *$", done.out, re.MULTILINE), done.out
    found = gm.compare(sinks.path / "a", sinks.path / "b", "id", examples=2)
    told = json.loads(sinks.run("compare", "a", "b", "--on", "id", "--examples", "2", "--json").out)
    assert told == json.loads(json.dumps({**found.as_dict(), "a": "a", "b": "b"}))
    assert told["columns"][0]["agreement"] == 57 / 58


def test_a_gate_exits_with_three(sinks: Folder) -> None:
    """After all has been printed; with less asked for, with 0."""
    line = ("compare", "a", "b", "--on", "id", "--columns", "label", "--min-agreement")
    low, enough = sinks.run(*line, "0.99"), sinks.run(*line, "0.95")
    assert low.code == 3 and "agreement of label 98.28 % in 58 rows: at least 99.00 %" in low.err
    assert enough.code == 0 and enough.out == low.out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("a", "b"), "give --on (on=), the columns that tell their rows apart: both have id, t"),
        (("a", "nowhere", "--on", "id"), "nowhere: there is no such sink"),
        (("a", "b", "--on", "label"), "60 rows share their key with another: label='even' is that of 30; add a column"),
        (("a", "b", "--on", "id", "--columns", "lable"), "did you mean 'label'?"),
        (("a", "b", "--on", "id", "--min-agreement", "95"), "is 95.0: give a number from 0 to 1"),
        (("a",), "missing argument 'SINK_B'"),
    ],
)
def test_mistakes_are_one_message(sinks: Folder, arguments: tuple[str, ...], said: str) -> None:
    """Exit 2, nothing printed."""
    done = sinks.run("compare", *arguments)
    assert (done.code, done.out, "Traceback" in done.err) == (2, "", False) and said in done.err


class Screen(io.StringIO):
    """A terminal 80 columns wide."""

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        raise OSError


def test_eighty_columns_cut_nothing(sinks: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines that fit, and every figure of a wider one."""
    monkeypatch.setenv("COLUMNS", "80")
    found = gm.compare(sinks.path / "a", sinks.path / "b", "id")
    screen = Screen()
    show(Comparison(**{**vars(found), "a": "a", "b": "b"}), screen)
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue()).split(os.linesep)
    assert max(map(len, lines)) <= 80
    text = " ".join(" ".join(lines).split())
    figures = set(re.findall(r"[\d.,]+\d", str(found).partition("by ")[2]))
    assert len(figures) > 20 and {f for f in figures if f not in text} == set() and "…" not in text
