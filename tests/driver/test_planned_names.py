"""What planning finds out before any worker starts: code that is not there, names that no row can have."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import gristmill as gm

ROWS = [{"id": i, "origin": "AB"[i % 2], "x": float(i)} for i in range(20)]


def half(batch: dict[str, Any]) -> dict[str, Any]:
    """A function of a batch."""
    return {"y": batch["x"] / 2}


def tagged(batch: dict[str, Any]) -> dict[str, Any]:
    """A step that adds a column."""
    return {**batch, "tag": ["t"] * len(next(iter(batch.values())))}


async def waiting(batch: dict[str, Any]) -> dict[str, Any]:
    """Not a step."""
    return batch


def job(out: Path, **options: Any) -> gm.Job:
    sink = {name: options.pop(name) for name in ("partition_by", "keep") if name in options}
    model = gm.model(half, returns=options.pop("returns", None))
    rows = out.with_name("rows.jsonl")
    rows.write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    return gm.Job(str(rows), model, gm.sink(str(out), **sink), workers=0, **options)


@pytest.mark.parametrize("where", ["steps", "post"])
@pytest.mark.parametrize(
    ("step", "said"),
    [
        (gm.step(f"{__name__}:tagd"), "has no 'tagd'; did you mean 'tagged'"),
        (gm.step("nowhere.at:all"), "there is no module 'nowhere.at'"),
        (gm.step(tagged, size=3), "tagged has no argument 'size'"),
        (gm.step(waiting), "waiting is an async function"),
    ],
)
def test_a_step_that_cannot_be_called(where: str, step: Any, said: str, tmp_path: Path) -> None:
    """The plan refuses it as the run does, in the same words, and the run makes no folder."""
    wrong = job(tmp_path / "out", **{where: [step]})
    for command in (wrong.plan, wrong.run):
        with pytest.raises(gm.BadModel, match=said):
            command()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "noted"),
    [
        ({"partition_by": ["orgin"], "returns": {"y": "float64"}}, None),
        ({"partition_by": ["orgin"]}, "partition_by names column 'orgin'.*did you mean 'origin'"),
        (
            {"partition_by": ["orgin"], "returns": {"y": "float64"}, "steps": [tagged]},
            "partition_by names column 'orgin'",
        ),
        ({"keep": ["orgin"], "steps": [tagged]}, "keep names column 'orgin'.*did you mean 'origin'"),
        ({"keep": ["tag", "origin"], "partition_by": ["origin"], "steps": [tagged]}, ""),
        ({"partition_by": ["tag"], "returns": {"y": "float64"}, "post": [tagged]}, ""),
    ],
)
def test_a_name_that_nothing_may_have(options: dict[str, Any], noted: str | None, tmp_path: Path) -> None:
    """It is refused where all names are known; where code may make it, it is noted if it is nearly one of the source's,
    and one that a step makes is no reason for a note.
    """
    made = job(tmp_path / "out", **options)
    if noted is None:
        with pytest.raises(gm.BadJob, match=r"partition_by names column 'orgin'.*did you mean 'origin'"):
            made.plan()
    elif noted:
        assert re.search(noted, "\n".join(made.plan().notes))
        with pytest.raises(gm.BadJob, match="orgin"):
            made.run()
    else:
        assert made.plan().notes == () and made.run().rows_ok == 20


def test_several_columns_in_one_text(tmp_path: Path) -> None:
    """As they are typed after a flag; elsewhere they are a list."""
    with pytest.raises(gm.BadSource, match=r"keep names column 'id, origin'.*several are a list: \[id, origin\]"):
        job(tmp_path / "out", keep="id, origin").plan()
