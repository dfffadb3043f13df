"""What a function's arguments name on disk is part of the model: weights that changed are another model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import gristmill as gm


class Weighted:
    """Multiplies by what a file, or a file in a folder, says."""

    def __init__(self, weights: str | Path, log: str | None = None) -> None:
        path = Path(weights)
        self.w = json.loads((path / "model.bin" if path.is_dir() else path).read_text())
        self.log = log

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        if self.log is not None:
            with open(self.log, "a") as file:
                file.write("called\n")
        return {"y": batch["x"] * self.w}


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Three rows in a file."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_text('{"x": 1}\n{"x": 2}\n{"x": 3}\n')
    return tmp_path / "in"


@pytest.mark.parametrize("kind", ["file", "path", "folder", "in a list"])
def test_other_weights_are_another_model(rows: Path, tmp_path: Path, kind: str) -> None:
    """Refused by name on the old answers' sink, and on what is appended to them; the same content is the same model."""
    file = tmp_path / "m" / "model.bin"
    file.parent.mkdir()
    file.write_text("2")
    given: Any = {"file": str(file), "path": file, "folder": str(file.parent), "in a list": [str(file)]}[kind]
    model = gm.model(first, weights=given) if kind == "in a list" else gm.model(Weighted, weights=given)
    job = gm.Job(str(rows), model, str(tmp_path / "out"), workers=0)
    assert job.run().rows_ok == 3
    file.write_text("2")
    assert job.run().state == "nothing to do"
    file.write_text("3")
    (rows / "b.jsonl").write_text('{"x": 4}\n')
    for verbs in ({}, {"append": True}):
        with pytest.raises(gm.PlanChanged, match=r"file .*argument weights .*changed"):
            job.run(**verbs)
    assert job.run(restart=True).rows_ok == 4
    assert sorted(gm.read(str(tmp_path / "out")).to_table()["y"].to_pylist()) == [3, 6, 9, 12]


def first(batch: dict[str, Any], weights: list[str]) -> dict[str, Any]:
    """As `Weighted`, of the first of many."""
    return Weighted(weights[0])(batch)


def test_what_the_code_writes_itself_is_no_other_model(rows: Path, tmp_path: Path) -> None:
    """A file that was not there before the first run."""
    (tmp_path / "m.json").write_text("2")
    model = gm.model(Weighted, weights=str(tmp_path / "m.json"), log=str(tmp_path / "calls.log"))
    job = gm.Job(str(rows), model, str(tmp_path / "out"), workers=0)
    assert job.run().rows_ok == 3
    assert job.run().state == "nothing to do"
    (rows / "b.jsonl").write_text('{"x": 4}\n')
    assert job.run(append=True).rows_ok == 4
    (tmp_path / "calls.log").unlink()
    assert job.run().state == "nothing to do"
    assert job.run(restart=True).rows_ok == 4
    assert job.run().state == "nothing to do"
    (tmp_path / "m.json").write_text("3")
    with pytest.raises(gm.PlanChanged, match=r"file .*m\.json"):
        job.run()


def test_words_are_no_files(rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder or file here that is called as an argument's word does not count."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.json").write_text("2")
    (tmp_path / "mean").mkdir()
    (tmp_path / "sum").write_text("1")
    job = gm.Job(str(rows), gm.model(worded, word="sum", words=["mean"]), str(tmp_path / "out"), workers=0)
    assert job.run().rows_ok == 3
    (tmp_path / "mean" / "a.txt").write_text("more")
    (tmp_path / "sum").write_text("2")
    assert job.run().state == "nothing to do"


def worded(batch: dict[str, Any], word: str, words: list[str]) -> dict[str, Any]:
    """Opens nothing."""
    return {"y": [word + words[0]] * len(batch["x"])}
