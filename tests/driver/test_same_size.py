"""A file that is rewritten in place, as long as before, where no shard has read it: what planning knew of it is not
believed.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import gristmill as gm


def stopping(batch: Any) -> dict[str, Any]:
    """A model whose run somebody stops in the middle."""
    stop = Path(os.environ["STOP_AT"])
    if stop.exists() and int(batch["id"].max()) >= int(stop.read_text()):
        raise KeyboardInterrupt
    return {"y": batch["id"] * 2}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a source and the file that says when to stop."""
    monkeypatch.setenv("STOP_AT", str(tmp_path / "stop"))
    (tmp_path / "in").mkdir()
    return tmp_path


def put(place: Path, lines: Sequence[str], form: str = "csv") -> None:
    """The source."""
    (place / "in" / f"a.{form}").write_text("".join(lines))


def stopped(job: gm.Job, place: Path, at: int) -> None:
    """A first run, stopped."""
    (place / "stop").write_text(str(at))
    with pytest.raises(gm.RunFailed):
        job.run()
    (place / "stop").unlink()


def job_of(place: Path, update: bool = False, **source: Any) -> gm.Job:
    """A job over the source."""
    how: dict[str, Any] = {"update": {"key": ["id"]}} if update else {}
    sink = gm.sink(str(place / "out"), keep=["id"])
    return gm.Job(
        gm.source(str(place / "in"), **source), stopping, sink, workers=0, shard_rows=700, batch_rows=100, **how
    )


def lines_of(rows: int) -> list[str]:
    """A table that is cut in several places."""
    return ["id,w\n", *(f"{1_000_000 + n},{'x' * 40}\n" for n in range(rows))]


@pytest.mark.parametrize("update", [False, True])
def test_a_row_that_is_blank_now(update: bool, place: Path) -> None:
    """Nothing was committed: the next run begins anew; a run and a restart counted rows that are no more, for good."""
    lines = lines_of(500)
    put(place, lines)
    job = job_of(place, update)
    stopped(job, place, 1_000_250)
    lines[300] = "\n" * len(lines[300])
    put(place, lines)
    assert job.run().rows_ok == 499
    assert job.run(restart=True).rows_ok == 499


@pytest.mark.parametrize("update", [False, True])
def test_a_row_that_is_blank_where_nothing_was_read(update: bool, place: Path) -> None:
    """Some shards are committed: a restart, or an update, reads the file as it is."""
    lines = lines_of(3000)
    put(place, lines)
    job = job_of(place, update)
    stopped(job, place, 1_002_500)
    assert list(place.glob("out/_gristmill/g*/receipts/*"))
    lines[2900] = "\n" * len(lines[2900])
    put(place, lines)
    if not update:
        with pytest.raises(gm.PlanChanged, match="more or fewer of them"):
            job.run()
    assert job.run(restart=not update).rows_ok == 2999
    assert gm.verify(str(place / "out")).ok


def of_lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Lines of JSON."""
    return [json.dumps(row) + "\n" for row in rows]


OTHERS = {
    "type": ("jsonl", {}, {"x": 1.5}, "column 'x' was int64, and is double now"),
    "condition": ("jsonl", {"where": "x > 0"}, {"x": 1.5}, "column 'x' was int64, and is double now"),
    "name": ("jsonl", {}, {"x": None, "z": 100}, "column 'z' was not there, and is int64 now"),
    "text": ("csv", {}, {"x": "abc"}, "column 'x' was int64, and is string now"),
}


@pytest.mark.parametrize("update", [False, True])
@pytest.mark.parametrize("what", OTHERS)
def test_a_column_that_is_another_where_nothing_was_read(what: str, update: bool, place: Path) -> None:
    """Rows as the file has them now are not dead because others, which were read, were not so."""
    form, how, other, why = OTHERS[what]
    before = [{"id": 1_000_000 + n, "w": "x" * 40, "x": 100} for n in range(3000)]
    after = [row | (other if n >= 2800 else {}) for n, row in enumerate(before)]
    after = [{name: value for name, value in row.items() if value is not None} for row in after]
    if form == "csv":
        texts = (["id,w,x\n", *(f"{r['id']},{r['w']},{r['x']}\n" for r in rows)] for rows in (before, after))
    else:
        texts = (of_lines(rows) for rows in (before, after))
    put(place, next(texts), form)
    model = gm.model(stopping, takes={"id": "int64"}) if what == "condition" else stopping
    more: dict[str, Any] = {"update": {"key": ["id"]}} if update else {}
    keep = ["id"] if what == "condition" else ["id", "x"]
    job = gm.Job(
        gm.source(str(place / "in"), **how), model, gm.sink(str(place / "out"), keep=keep),
        workers=0, shard_rows=700, batch_rows=100, **more,
    )  # fmt: skip
    stopped(job, place, 1_002_500)
    put(place, next(texts), form)
    if not update:
        with pytest.raises(gm.PlanChanged, match=re.escape(why)):
            job.run()
    report = job.run(restart=not update)
    assert (report.rows_ok, report.rows_dead) == (3000, 0)


def test_rows_beyond_a_limit_that_is_lifted(place: Path) -> None:
    """Nothing to do for the rows of a limit says nothing of those behind it."""
    lines = lines_of(3000)
    put(place, lines)
    job_of(place, update=True, limit=1000).run()
    lines[2000:2002] = [lines[2000].rstrip("\n") + "y" * len(lines[2001]) + "\n"]
    put(place, lines)
    assert job_of(place, update=True, limit=1000).run().rows_ok == 1000
    assert job_of(place, update=True).run().rows_ok == 2999


def test_folders_whose_files_are_touched_go_on(place: Path) -> None:
    """What planning adds to the columns of a file, such as those of its folder, is no other type."""
    for lang in ("de", "en"):
        (place / "in" / f"lang={lang}").mkdir()
        (place / "in" / f"lang={lang}" / "a.csv").write_text("".join(lines_of(2000)))
    job = job_of(place)
    stopped(job, place, 1_001_500)
    for file in place.glob("in/*/a.csv"):
        os.utime(file, (5, 5))
    report = job.run()
    assert (report.rows_ok, report.rows_dead) == (4000, 0)
