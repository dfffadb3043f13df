"""The examples of docs/steps.md, from Python and as the job files beside them."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

import gristmill as gm

PAGE = Path(__file__).parents[2] / "docs" / "steps.md"


@pytest.mark.filterwarnings("ignore::gristmill.GristmillWarning")
def test_the_examples_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, minilm: Path) -> None:
    """Each job publishes what it says, and its job file the same."""
    image = pytest.importorskip("PIL.Image")
    monkeypatch.chdir(tmp_path)
    for folder in ("manuals", "photos", "models"):
        (tmp_path / folder).mkdir()
    shutil.copytree(minilm, "models/minilm")
    Path("manuals/long.md").write_text(" ".join(f"word{n}\n" for n in range(250)))
    Path("manuals/short.txt").write_text("one two")
    Path("manuals/empty.txt").write_text(" \n")
    for n, colour in enumerate(("#ff0000", "#0000ff")):
        image.new("RGB", (9, 7), colour).save(f"photos/{n}.png")
    Path("photos/torn.png").write_bytes(Path("photos/0.png").read_bytes()[:40])
    blocks = re.findall(r"^```(python|yaml)\n(.*?)^```", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert [kind for kind, _ in blocks] == ["python", "yaml"] * 2
    found: list[Any] = []
    for kind, text in blocks:
        sink = "chunks" if "chunks/" in text else "colours"
        if kind == "python":
            module = "steps.py" if sink == "chunks" else "images.py"
            Path(module).write_text(text.rpartition("\n\n\ngm.Job(")[0] + "\n")
            exec(compile(text, "steps.md", "exec"), {"__name__": "page"})  # each as it stands
        else:
            shutil.rmtree(sink)
            Path("job.yaml").write_text(text)
            assert gm.load_job("job.yaml").run().state == "done"
            assert gm.read(sink).to_table().equals(found[-1])
        found.append(gm.read(sink).to_table())
    chunks, colours = found[1].to_pylist(), found[3].to_pylist()
    assert [(Path(c["path"]).name, c["chunk"], len(c["text"].split())) for c in chunks] == [
        ("long.md", 0, 100), ("long.md", 1, 100), ("long.md", 2, 50), ("short.txt", 0, 2),
    ]  # fmt: skip
    assert [c["colour"] for c in colours] == [[255, 0, 0], [0, 0, 255]]
