"""Updates of whole files, of single rows, after a crash, with other code; and what is refused."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import gristmill as gm
from gristmill.cli.app import main
from gristmill.driver import jobsource
from gristmill.errors import BadJob, CorruptStore, GateFailed, PlanChanged


class Asked:
    """Counts what a model is asked, in a file that it appends to."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def rows(self) -> list[str]:
        """What was asked since the last look."""
        found = self.path.read_text().splitlines() if self.path.exists() else []
        self.path.unlink(missing_ok=True)
        return found


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Asked:
    monkeypatch.setenv("UPDATE_ASKED", str(tmp_path / "asked"))
    return Asked(tmp_path / "asked")


def upper(batch: dict[str, Any]) -> dict[str, Any]:
    with open(os.environ["UPDATE_ASKED"], "a") as out:
        out.write("".join(f"{text}\n" for text in batch["text"]))
    if any(text == "bad" for text in batch["text"]) and not os.path.exists(os.environ["UPDATE_ASKED"] + ".mended"):
        raise ValueError("bad")
    return {"shout": np.array([text.upper() for text in batch["text"]])}


def lower(batch: dict[str, Any]) -> dict[str, Any]:
    with open(os.environ["UPDATE_ASKED"], "a") as out:
        out.write("".join(f"{text}\n" for text in batch["text"]))
    return {"shout": np.array([text.lower() for text in batch["text"]])}


def twice(row: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"n": 0}, {"n": 1}]


MODEL = gm.model(upper, takes={"text": "string not null"})


def put(folder: Path, name: str, ids: Sequence[int | None], text: Callable[[Any], Any] = str, extra: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rows = {"id": pa.array(ids, pa.int64()), "text": [text(i) for i in ids], "extra": [extra] * len(ids)}
    pq.write_table(pa.table(rows), folder / f"{name}.parquet")


def job(tmp_path: Path, update: Any = None, model: Any = MODEL, **options: Any) -> gm.Job:
    sink = {"keep": ["id", "extra"], **options.pop("sink", {})}
    how = {"workers": 0, "shard_rows": 50, "gates": {"min_ok": 0.5}, **options}
    return gm.Job(str(tmp_path / "in"), model, gm.sink(str(tmp_path / "out"), **sink), update=update, **how)


def rows(tmp_path: Path) -> list[dict[str, Any]]:
    assert gm.verify(str(tmp_path / "out")).ok
    return list(gm.read(str(tmp_path / "out")).to_table().to_pylist())


BY_ID = {"key": ["id"]}


def test_one_file_of_sixty(tmp_path: Path, asked: Asked) -> None:
    """One edited file costs its rows, a deleted one nothing, also for a result that no update has made."""
    for n in range(60):
        put(tmp_path / "in", f"{n:02}", range(n * 100, n * 100 + 100))
    job(tmp_path, None, shard_rows=100).run()
    assert len(asked.rows()) == 6000
    put(tmp_path / "in", "30", range(3000, 3100), lambda i: f"new {i}")
    report = job(tmp_path, True, shard_rows=100).run()
    assert len(asked.rows()) == 100 and report.rows_ok == 6000
    assert (report.updated["kept"], report.updated["scored"]) == (5900, 100)
    os.unlink(tmp_path / "in" / "07.parquet")
    report = job(tmp_path, True, shard_rows=100).run()
    assert asked.rows() == [] and report.rows_ok == 5900
    want = [i for i in range(6000) if not 700 <= i < 800]
    assert [r["id"] for r in rows(tmp_path)] == want
    assert [r["shout"] for r in rows(tmp_path)] == [f"NEW {i}" if 3000 <= i < 3100 else str(i) for i in want]


def rewriting(batch: dict[str, Any]) -> dict[str, Any]:
    at = os.environ["UPDATE_ASKED"]
    if "new 60" in batch["text"] and not os.path.exists(f"{at}.rewritten"):
        Path(f"{at}.rewritten").touch()
        put(Path(at).parent / "other", "b", range(100, 200), lambda i: f"newer {i}")
        os.replace(Path(at).parent / "other" / "b.parquet", Path(at).parent / "in" / "b.parquet")
    return upper(batch)


@pytest.mark.parametrize("first", [True, False])
def test_a_file_that_is_written_anew_while_an_update_runs(tmp_path: Path, asked: Asked, first: bool) -> None:
    """The run can be tried again (exit 1), and the message does not say to score all of it: the same command keeps all
    answers that hold, those of the run that was stopped, too.
    """
    model = gm.model(rewriting, takes={"text": "string not null"})
    for text in (str, "new {}".format):
        put(tmp_path / "in", "a", range(100), text)
        put(tmp_path / "in", "b", range(100, 200), text)
        if text is str and not first:
            job(tmp_path, BY_ID, model).run()
            asked.rows()
    with pytest.raises(gm.RunFailed, match=r"b\.parquet: changed while the run was reading it .*: run again: ") as told:
        job(tmp_path, BY_ID, model).run()
    assert told.value.exit_code == 1 and "--restart" not in str(told.value)
    before = asked.rows()
    report = job(tmp_path, BY_ID, model).run()
    assert report.rows_ok == 200 and not set(before) & set(asked.rows())
    assert {r["shout"] for r in rows(tmp_path)} == {f"NEW {i}" if i < 100 else f"NEWER {i}" for i in range(200)}


def moving(batch: Any) -> Any:
    """The model; the second file gets another name when it is called for rows of the first one."""
    path = Path(os.environ["UPDATE_ASKED"]).parent / "in" / "b.parquet"
    if "0" in batch["text"] and path.exists():
        path.rename(path.with_name("c.parquet"))
    return upper(batch)


def test_a_file_that_is_renamed_while_an_update_runs(tmp_path: Path, asked: Asked) -> None:
    """It can be tried again, and the same command finishes it."""
    for name, ids in ("a", range(100)), ("b", range(100, 200)):
        put(tmp_path / "in", name, ids)
    model = gm.model(moving, takes={"text": "string not null"})
    with pytest.raises(gm.RunFailed, match=r"b\.parquet: gone since it was listed: run again: ") as told:
        job(tmp_path, BY_ID, model).run()
    assert told.value.exit_code == 1
    assert job(tmp_path, BY_ID, model).run().rows_ok == 200


@pytest.mark.parametrize("step", ["inspected", "selected"])
def test_a_file_that_goes_while_a_run_is_planned(
    step: str, tmp_path: Path, asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no plan that it could be put back for: the same command may be run again."""
    put(tmp_path / "in", "a", range(100))
    put(tmp_path / "in", "b", range(100, 200))
    look = getattr(jobsource, step)

    def gone(*args: Any) -> Any:
        (tmp_path / "in" / "b.parquet").unlink(missing_ok=True)
        return look(*args)

    monkeypatch.setattr(jobsource, step, gone)
    source = gm.source(str(tmp_path / "in"), where="id < 150", limit=120)
    job = gm.Job(source, upper, gm.sink(str(tmp_path / "out"), keep=["id"]), workers=0)
    with pytest.raises(gm.RunFailed, match="while the run was being planned: run again"):
        job.run()
    assert not (tmp_path / "out").exists()
    assert job.run().rows_ok == 100


def test_files_taken_over_are_the_same_files(tmp_path: Path, asked: Asked) -> None:
    """What is taken over whole is a second name of the file that there was."""
    for n in range(4):
        put(tmp_path / "in", str(n), range(n * 50, n * 50 + 50))
    job(tmp_path, True).run()
    before = {os.stat(p).st_ino for p in (tmp_path / "out").glob("*.parquet")}
    put(tmp_path / "in", "2", range(100, 150), lambda i: f"new {i}")
    job(tmp_path, True).run()
    after = {os.stat(p).st_ino for p in (tmp_path / "out").glob("*.parquet")}
    assert len(before & after) == 3 and len(after) == 4


def test_by_key_whatever_the_order(tmp_path: Path, asked: Asked) -> None:
    """Rows that moved to other files and places keep their answers; the report says what was scored and is gone."""
    put(tmp_path / "in", "a", range(1000))
    job(tmp_path, BY_ID, shard_rows=100).run()
    asked.rows()
    order = np.random.default_rng(1).permutation(1000).tolist()
    put(tmp_path / "in", "a", [i for i in order[:600] if i != 17], lambda i: f"new {i}" if i % 50 == 0 else str(i))
    put(tmp_path / "in", "b", order[600:], lambda i: f"new {i}" if i % 50 == 0 else str(i))
    gone = 1 if 17 in order[:600] else 0
    report = job(tmp_path, BY_ID, shard_rows=100).run()
    assert sorted(asked.rows()) == sorted(f"new {i}" for i in range(0, 1000, 50))
    assert report.updated == {"kept": 980 - gone, "scored": 20, "gone": gone}
    assert f"kept  {980 - gone:>9}" in str(report) or "kept" in str(report)
    want = {i: f"NEW {i}" if i % 50 == 0 else str(i) for i in order if not (gone and i == 17)}
    assert {r["id"]: r["shout"] for r in rows(tmp_path)} == want
    assert [r["id"] for r in rows(tmp_path)] == [i for i in order if not (gone and i == 17)]


def test_carried_over_columns_are_new(tmp_path: Path, asked: Asked) -> None:
    """A column that the model does not read changes without anything being scored, also if its type changes."""
    put(tmp_path / "in", "a", range(100), extra=1)
    job(tmp_path, BY_ID).run()
    asked.rows()
    put(tmp_path / "in", "a", range(100), extra=2)
    assert job(tmp_path, BY_ID).run().updated == {"kept": 100, "scored": 0, "gone": 0}
    assert asked.rows() == [] and {r["extra"] for r in rows(tmp_path)} == {2}
    table = pq.read_table(tmp_path / "in" / "a.parquet")
    pq.write_table(table.set_column(2, "extra", pa.array(["x"] * 100)), tmp_path / "in" / "a.parquet")
    assert job(tmp_path, BY_ID).run().updated == {"kept": 100, "scored": 0, "gone": 0}
    assert asked.rows() == [] and {r["extra"] for r in rows(tmp_path)} == {"x"}


def test_other_code_scores_all(tmp_path: Path, asked: Asked) -> None:
    """With another model nothing is kept, and the report says why."""
    put(tmp_path / "in", "a", range(100), lambda i: f"Row {i}")
    job(tmp_path, BY_ID).run()
    asked.rows()
    report = job(tmp_path, BY_ID, model=gm.model(lower, takes={"text": "string not null"})).run()
    assert len(asked.rows()) >= 100 and report.updated == {"kept": 0, "scored": 100, "gone": 0}
    assert rows(tmp_path)[3]["shout"] == "row 3"


def test_other_options_score_all(tmp_path: Path, asked: Asked) -> None:
    """An option that shapes the output begins anew; one that takes other rows does not."""
    put(tmp_path / "in", "a", range(100))
    job(tmp_path, BY_ID).run()
    asked.rows()
    source = gm.source(str(tmp_path / "in"), where="id < 60")
    some = gm.Job(source, MODEL, gm.sink(str(tmp_path / "out"), keep=["id", "extra"]), update=BY_ID, workers=0)
    assert some.run().updated == {"kept": 60, "scored": 0, "gone": 40}
    assert asked.rows() == [] and len(rows(tmp_path)) == 60
    job(tmp_path, BY_ID, sink={"keep": ["id"]}).run()
    assert len(asked.rows()) >= 100 and rows(tmp_path)[0].keys() == {"id", "shout"}


def test_dead_rows_are_tried_again(tmp_path: Path, asked: Asked) -> None:
    """What was dead is scored again with the next change, though it is as it was."""
    put(tmp_path / "in", "a", range(100), lambda i: "bad" if i in (3, 77) else str(i))
    with pytest.warns(gm.GristmillWarning):
        assert job(tmp_path, BY_ID).run().rows_dead == 2
    asked.rows()
    put(tmp_path / "in", "b", [200])
    Path(str(asked.path) + ".mended").touch()
    report = job(tmp_path, BY_ID).run()
    assert sorted(set(asked.rows())) == ["200", "bad"]
    assert report.updated == {"kept": 98, "scored": 3, "gone": 0} and report.rows_dead == 0
    assert [r["id"] for r in rows(tmp_path)] == [*range(100), 200]


def test_retried_rows_are_kept(tmp_path: Path, asked: Asked) -> None:
    """A row that retry-dead has scored keeps its answer, and comes back to its place."""
    put(tmp_path / "in", "a", range(100), lambda i: "bad" if i in (3, 77) else str(i))
    with pytest.warns(gm.GristmillWarning):
        job(tmp_path, BY_ID).run()
    Path(str(asked.path) + ".mended").touch()
    gm.retry_dead(job(tmp_path, BY_ID))
    asked.rows()
    put(tmp_path / "in", "b", [200])
    report = job(tmp_path, BY_ID).run()
    assert asked.rows() == ["200"] and report.updated == {"kept": 100, "scored": 1, "gone": 0}
    assert [r["id"] for r in rows(tmp_path)] == [*range(100), 200]


@pytest.mark.parametrize("first", ["few rows", "a limit", "a retry", "a retry with other code", "stopped"])
def test_shards_are_not_as_small_as_those_of_few_rows_before(tmp_path: Path, asked: Asked, first: str) -> None:
    """However few rows the nights before had, an update has about as many shards as a first run."""
    auto: dict[str, Any] = {"shard_rows": "auto", "gates": {"min_ok": 0.0}}
    many = range(5000)
    if first in ("few rows", "a limit"):
        put(tmp_path / "in", "a", range(3) if first == "few rows" else many)
        source = gm.source(str(tmp_path / "in"), limit=10 if first == "a limit" else None)
        gm.Job(source, MODEL, gm.sink(str(tmp_path / "out"), keep=["id", "extra"]), update=BY_ID, workers=0).run()
    elif first == "stopped":
        put(tmp_path / "in", "a", range(3), lambda i: "bad")
        with pytest.raises(GateFailed):
            job(tmp_path, BY_ID, **{**auto, "gates": {"min_ok": 1.0}}).run()
        Path(os.environ["UPDATE_ASKED"] + ".mended").touch()
    else:
        put(tmp_path / "in", "a", many, lambda i: "bad" if i == 42 else str(i))
        job(tmp_path, BY_ID, **auto).run()
        Path(os.environ["UPDATE_ASKED"] + ".mended").touch()
        other = gm.model(lower, takes={"text": "string not null"})
        if first == "a retry":
            assert gm.retry_dead(job(tmp_path, BY_ID, **auto)).rows_ok == 5000
        else:
            assert gm.retry_dead(job(tmp_path, BY_ID, other, **auto), accept_code_change=True).rows_ok == 5000
            put(tmp_path / "in", "a", many, lambda i: f"new {i}")
            assert job(tmp_path, BY_ID, other, **auto).run().shards <= 8
            return
    put(tmp_path / "in", "a", many, lambda i: f"new {i}")
    report = job(tmp_path, BY_ID, **auto).run()
    assert report.rows_ok == 5000 and report.shards <= 8
    assert len(rows(tmp_path)) == 5000


@pytest.mark.parametrize("version", [None, "version"])
def test_code_that_a_retry_was_told_to_accept_keeps_answers(tmp_path: Path, asked: Asked, version: str | None) -> None:
    """An update scores what is new, as whoever accepts it confirms; not where each row names the model's version."""
    put(tmp_path / "in", "a", range(100), lambda i: "bad" if i == 42 else str(i))
    sink = {"sink": {"keep": ["id", "extra"], "model_version": version}}
    job(tmp_path, BY_ID, **sink).run()
    other = gm.model(lower, takes={"text": "string not null"})
    gm.retry_dead(job(tmp_path, BY_ID, other, **sink), accept_code_change=True)
    asked.rows()
    put(tmp_path / "in", "b", range(100, 101))
    report = job(tmp_path, BY_ID, other, **sink).run()
    assert report.rows_ok == 101
    assert len(asked.rows()) == (1 if version is None else 100)
    if version is None:
        told = str(gm.prove(str(tmp_path / "out"), row=3, key=["id"]))
        assert re.search(r"made by .*generation 1.* by code \w+; kept since, as the code above was accepted", told), (
            told
        )
    Path(os.environ["UPDATE_ASKED"] + ".mended").touch()
    assert job(tmp_path, BY_ID, MODEL, **sink).run().rows_ok == 101  # back to the first code: nobody has accepted that
    assert len(set(asked.rows())) == 101


def test_ids_of_copies_do_not_come_from_a_damaged_file(
    tmp_path: Path, asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which copy of its row an answer is of stands beside the answers, damaged while an update was unfinished."""
    put(tmp_path / "in", "a", range(50))
    steps = [gm.flat_map(twice)]

    def made(name: str, **options: Any) -> gm.Job:
        sink = gm.sink(str(tmp_path / name), keep=["id", "n"], row_id="rid")
        return gm.Job(str(tmp_path / "in"), MODEL, sink, steps=steps, workers=0, shard_rows=20, update=True, **options)

    made("out").run()
    put(tmp_path / "in", "a", range(48))
    from gristmill.commit import receipt

    with monkeypatch.context() as killed, pytest.raises(gm.RunFailed):
        killed.setattr(receipt, "commit", lambda *a: 1 / 0)
        made("out").run()
    for told in (tmp_path / "out" / "_gristmill").glob("g0001*/fates/*.arrow"):
        data = bytearray(told.read_bytes())
        data[data.index(b"01010101")] = ord("1")
        told.write_bytes(data)
    made("out").run()
    made("other").run()
    tables = [gm.read(str(tmp_path / name)).to_table() for name in ("out", "other")]
    found = [t.sort_by([("id", "ascending"), ("n", "ascending")])["rid"] for t in tables]
    assert found[0] == found[1]


def test_null_and_repeated_keys(tmp_path: Path, asked: Asked) -> None:
    """Nulls are a key like any other; rows with one key are told apart by what their answers rest on."""
    put(tmp_path / "in", "a", [None, 1, None, 1], str)
    table = pa.table({"id": [None, 1, None, 1], "text": ["p", "q", "r", "q"], "extra": [0, 0, 0, 0]})
    pq.write_table(table, tmp_path / "in" / "a.parquet")
    job(tmp_path, BY_ID).run()
    asked.rows()
    table = pa.table({"id": [None, None, 1, 1, 1], "text": ["r", "new", "q", "q", "q"], "extra": [0, 1, 2, 3, 4]})
    pq.write_table(table, tmp_path / "in" / "a.parquet")
    report = job(tmp_path, BY_ID).run()
    assert asked.rows() == ["new"] and report.updated == {"kept": 4, "scored": 1, "gone": 0}
    assert [r["shout"] for r in rows(tmp_path)] == ["R", "NEW", "Q", "Q", "Q"]


def test_a_table_in_memory(tmp_path: Path, asked: Asked) -> None:
    """Rows in memory are matched by their key, or by their number."""
    made = [{"id": i, "text": str(i)} for i in range(50)]
    for update in (BY_ID, True):
        sink = gm.sink(str(tmp_path / f"out{update is True}"), keep=["id"])
        gm.Job(made, MODEL, sink, update=update, workers=0).run()
        asked.rows()
        other = [*made[:20], {"id": 20, "text": "other"}, *made[21:]]
        assert gm.Job(other, MODEL, sink, update=update, workers=0).run().updated["kept"] == 49
        assert asked.rows() == ["other"]


KILLED = """
import os, signal, sys
import numpy as np
import gristmill as gm

def upper(batch):
    with open(os.environ["UPDATE_ASKED"], "a") as out:
        out.write("".join(f"{text}\\n" for text in batch["text"]))
    if os.path.exists("kill") and any("290" in text for text in batch["text"]):
        os.unlink("kill")
        os.kill(os.getpid(), signal.SIGKILL)
    return {"shout": np.array([text.upper() for text in batch["text"]])}

model = gm.model(upper, takes={"text": "string not null"})
sink = gm.sink("out", keep=["id", "extra"])
job = gm.Job("in", model, sink, update={"key": ["id"]}, workers=0, shard_rows=50)
if "plan" in sys.argv:
    print(gm.plan(job))
else:
    report = job.run()
    print(report.updated, report.shards_resumed)
"""


def test_killed_in_the_middle(tmp_path: Path, asked: Asked) -> None:
    """An update that was killed goes on where it stopped; if the source has changed again, it begins anew. The result
    before stays readable until then.
    """
    (tmp_path / "job.py").write_text(KILLED)

    def run() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "job.py"]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    put(tmp_path / "in", "a", range(400))
    assert run().returncode == 0
    asked.rows()
    put(tmp_path / "in", "a", range(400), lambda i: f"new {i}" if i % 10 == 0 else str(i))
    (tmp_path / "kill").touch()
    assert run().returncode == -signal.SIGKILL
    first = asked.rows()
    assert [r["shout"] for r in gm.read(str(tmp_path / "out")).to_table().to_pylist()] == [str(i) for i in range(400)]
    done = run()
    assert done.returncode == 0, done.stderr
    assert "'kept': 360, 'scored': 40, 'gone': 0" in done.stdout
    assert len(first) + len(asked.rows()) <= 40 + 10 and "new 0" in first
    assert [r["shout"] for r in rows(tmp_path)] == [f"NEW {i}" if i % 10 == 0 else str(i) for i in range(400)]
    put(tmp_path / "in", "a", range(400), lambda i: f"newer {i}" if i % 10 == 0 else str(i))
    (tmp_path / "kill").touch()
    assert run().returncode == -signal.SIGKILL
    put(tmp_path / "in", "a", range(400))
    assert run().returncode == 0
    assert [r["shout"] for r in rows(tmp_path)] == [str(i) for i in range(400)]


def test_damaged_answers_are_not_copied(tmp_path: Path, asked: Asked) -> None:
    """A file of the result that is not what was committed stops an update, which names it."""
    put(tmp_path / "in", "a", range(100))
    job(tmp_path, BY_ID).run()
    part = sorted((tmp_path / "out").glob("*.parquet"))[0]
    data = bytearray(part.read_bytes())
    data[60] ^= 255
    part.write_bytes(bytes(data))
    put(tmp_path / "in", "a", range(100), lambda i: f"new {i}" if i == 5 else str(i))
    with pytest.raises((CorruptStore, gm.GristmillError), match="not what was committed"):
        job(tmp_path, BY_ID).run()


def test_gates_hold_an_update_back(tmp_path: Path, asked: Asked) -> None:
    """An update whose gate does not hold publishes nothing; accepted, it is published without scoring."""
    put(tmp_path / "in", "a", range(100))
    job(tmp_path, BY_ID, gates={"min_ok": 0.99}).run()
    put(tmp_path / "in", "a", range(100), lambda i: "bad" if i < 20 else str(i))
    with pytest.raises(GateFailed):
        job(tmp_path, BY_ID, gates={"min_ok": 0.99}).run()
    assert len(rows(tmp_path)) == 100
    asked.rows()
    with pytest.warns(gm.GristmillWarning):
        report = job(tmp_path, BY_ID, gates={"min_ok": 0.99}).run(accept=True)
    assert report.rows_dead == 20 and len(rows(tmp_path)) == 80


@pytest.mark.parametrize("first", [None, True, {"key": ["extra"]}], ids=str)
def test_another_key_than_before(tmp_path: Path, asked: Asked, first: Any) -> None:
    """Files that are taken over as rows come to be told by another key have no record by it: how many rows are gone is
    told to be unknown, until each was read by it.
    """
    put(tmp_path / "in", "a", range(50))
    put(tmp_path / "in", "b", range(50, 100))
    job(tmp_path, first).run()
    put(tmp_path / "in", "b", range(50, 100), lambda i: f"new {i}" if i == 50 else str(i))
    report = job(tmp_path, BY_ID).run()
    assert report.updated == {"kept": 50, "scored": 50}
    assert any("answers are kept only of whole files that are as they were" in note for note in report.notes)
    put(tmp_path / "in", "b", range(52, 100))
    assert job(tmp_path, BY_ID).run().updated == {"kept": 98, "scored": 0, "gone": 2}  # the same file is left as it was
    put(tmp_path / "in", "a", range(1, 50))
    report = job(tmp_path, BY_ID).run()
    assert report.updated == {"kept": 48, "scored": 49}
    assert any("how many rows are gone is not known" in note for note in report.notes)
    put(tmp_path / "in", "a", range(2, 50))
    assert job(tmp_path, BY_ID).run().updated == {"kept": 96, "scored": 0, "gone": 1}
    assert [r["id"] for r in rows(tmp_path)] == [*range(2, 50), *range(52, 100)]


def _wider(t: pa.Table) -> pa.Table:
    return t.set_column(1, "x", t["x"].cast(pa.int64()))


@pytest.mark.parametrize(
    ("takes", "other", "told"),
    [
        ({"x": "int64"}, _wider, "column 'x' was int32, is int64"),
        (None, _wider, "column 'x' was int32, is int64"),
        (None, lambda t: t.append_column("y", t["x"]), "column 'y' is new"),
        (None, lambda t: t.select(["x", "id", "z"]), "the columns that answers rest on are in another order"),
        (None, lambda t: t.drop_columns(["z"]), "answers rested on z, too"),
        ({"x": "int64"}, lambda t: t.set_column(0, "id", t["id"].cast(pa.int32())), "column 'id' was int64, is int32"),
    ],
)
def test_why_all_rows_are_scored_is_told(tmp_path: Path, takes: Any, other: Any, told: str) -> None:
    """Where answers rest on other columns, or on other types, a note says so; rows whose key has another type are not
    told to be gone.
    """
    made = pa.table({"id": range(20), "x": pa.array(range(20), pa.int32()), "z": [1] * 20})
    (tmp_path / "in").mkdir()
    model = gm.model(_doubled, takes=takes)
    for table in (made, other(made)):
        pq.write_table(table, tmp_path / "in" / "a.parquet")
        report = job(tmp_path, BY_ID, model, sink={"keep": ["id"]}).run()
    assert {**report.updated, "gone": 0} == {"kept": 0, "scored": 20, "gone": 0} and report.updated.get("gone", 0) == 0
    assert any(told in note for note in report.notes), report.notes
    assert ("gone" in report.updated) == ("'id'" not in told)


def _doubled(batch: dict[str, Any]) -> dict[str, Any]:
    return {"s": [x * 2 for x in batch["x"]]}


def test_nested_times_that_python_does_not_have_are_told_apart(tmp_path: Path) -> None:
    """A change of nanoseconds is a change, and years beyond 9999 hold nothing up."""
    (tmp_path / "in").mkdir()
    for third in (3, 2**60, 2**60 + 1):
        counts = pa.array([1, 2, third % 10**9], pa.int64()).view(pa.time64("ns"))
        days = pa.array([1, 2, third], pa.int64()).view(pa.timestamp("us"))
        at = pa.StructArray.from_arrays([counts, days], ["tod", "at"])
        pq.write_table(pa.table({"id": range(3), "at": at}), tmp_path / "in" / "a.parquet")
        report = job(tmp_path, BY_ID, gm.model(_counted, batch_format="arrow"), sink={"keep": ["id"]}).run()
        assert [r["n"] for r in rows(tmp_path)] == [1, 2, third % 10**9]
        assert not report.updated or report.updated["scored"] == 1


def _counted(batch: pa.RecordBatch) -> dict[str, Any]:
    return {"n": pa.table({"at": batch["at"]})["at"].combine_chunks().field(0).view(pa.int64())}


def _odd(row: dict[str, Any]) -> bool:
    return row["id"] % 2 == 1


@pytest.mark.parametrize(
    ("before", "after"), [([1, 2, 3, 4], [1.5, 2.0, 3.0, 4.25]), ([1, 2, 3, 4], ["a", "b", "c", "d"])]
)
@pytest.mark.parametrize("steps", [[], [gm.filter(_odd)]], ids=["answers", "steps"])
def test_where_all_rows_are_scored_columns_have_the_types_of_now(
    tmp_path: Path, steps: list[Any], before: list[Any], after: list[Any]
) -> None:
    """As those of a new result have: nothing has to fit the types of the one before."""
    (tmp_path / "in").mkdir()
    made = gm.model(_doubled)
    for values in (before, after):
        pq.write_table(pa.table({"id": range(4), "x": values}), tmp_path / "in" / "a.parquet")
        report = job(tmp_path, BY_ID, made, sink={"keep": ["id", "x"]}, steps=steps).run()
    assert any("no answer is kept, and all rows are scored: column 'x' was int64" in note for note in report.notes)
    assert report.updated["kept"] == 0
    expected = after[1::2] if steps else after
    assert [(r["x"], r["s"]) for r in rows(tmp_path)] == [(x, x * 2) for x in expected]


def test_answers_that_do_not_fit_earlier_ones(tmp_path: Path) -> None:
    """Are refused, with the column and the way out; that way is one."""
    (tmp_path / "in").mkdir()
    made = gm.model(_halved, takes={"x": "int64"})
    for ids in ([0, 2, 4], [0, 2, 4, 5]):
        pq.write_table(pa.table({"id": ids, "x": ids}), tmp_path / "in" / "a.parquet")
        again = job(tmp_path, BY_ID, made, sink={"keep": ["id"]})
        if len(ids) == 3:
            again.run()
    with pytest.raises(gm.RunFailed, match=r"column 's'.*--restart, restart=True"):
        again.run()
    again.run(restart=True)
    assert [r["s"] for r in rows(tmp_path)] == [0, 1, 2, 2.5]


def _halved(batch: dict[str, Any]) -> dict[str, Any]:
    whole = all(x % 2 == 0 for x in batch["x"])
    return {"s": [int(x) // 2 if whole else float(x) / 2 for x in batch["x"]]}


def test_a_note_stands_once(tmp_path: Path, asked: Asked) -> None:
    """That a file was touched, and is read again for it, is told once in a report."""
    put(tmp_path / "in", "a", range(100))
    job(tmp_path, BY_ID).run()
    put(tmp_path / "in", "a", range(100), lambda i: str({5: 6, 6: 5}.get(i, i)))
    report = job(tmp_path, BY_ID).run()
    assert len([note for note in report.notes if "was touched since it was read" in note]) == 1, report.notes
    assert len(set(report.notes)) == len(report.notes)


def test_rows_name_the_version_of_the_run(tmp_path: Path, asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same files approved as another version: all rows of the next result say that one, kept or scored."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loud").write_text("!")
    put(tmp_path / "in", "a", range(50))
    put(tmp_path / "in", "b", range(50, 100))
    model = gm.model(Loud, weights="registry:loud@batch", takes={"text": "string"})
    for version, ids in (("1", range(50)), ("2", range(1, 50))):
        assert main(["approve", "loud", version, "--for", "batch", "--path", "loud"]) == 0
        put(tmp_path / "in", "a", ids)
        report = job(tmp_path, BY_ID, model, sink={"model_version": "by"}).run()
        assert {row["by"].partition(" ")[0] for row in rows(tmp_path)} == {f"loud/{version}"}
    assert report.updated == {"kept": 99, "scored": 0, "gone": 1}


class Loud:
    """Adds what is in a file."""

    def __init__(self, weights: str) -> None:
        self.mark = Path(weights).read_text()

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {"shout": np.array([text + self.mark for text in batch["text"]])}


@pytest.mark.parametrize(
    "sink", [{}, {"partition_by": ["extra"]}, {"files": 1}, {"merge": True}, {"format": "jsonl"}], ids=str
)
def test_rows_that_are_gone_are_counted_once(tmp_path: Path, asked: Asked, sink: dict[str, Any]) -> None:
    """Of ten rows of each key six are gone, however the files of the sink are joined or divided."""
    for n in (100, 40):
        made = {"id": [i % 10 for i in range(n)], "extra": [i // 10 % 4 for i in range(n)], "text": ["a"] * n}
        (tmp_path / "in").mkdir(exist_ok=True)
        pq.write_table(pa.table(made), tmp_path / "in" / "a.parquet")
        found = job(tmp_path, BY_ID, sink=sink, gates={"min_rows": 0}).run()
    assert found.updated == {"kept": 40, "scored": 0, "gone": 60}


def test_files_that_came_while_a_first_run_was_stopped(tmp_path: Path, asked: Asked) -> None:
    """They are in the result of the command that finishes it: the run goes on as planned, and an update follows."""
    put(tmp_path / "in", "a", range(400))
    (tmp_path / "job.py").write_text(KILLED)
    (tmp_path / "kill").touch()
    run = [sys.executable, "job.py"]
    assert subprocess.run(run, cwd=tmp_path, check=False).returncode == -signal.SIGKILL
    asked.rows()
    put(tmp_path / "in", "b", range(400, 450))
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "'kept': 400, 'scored': 50, 'gone': 0" in done.stdout, done
    assert "appeared after" not in done.stderr
    assert [r["id"] for r in rows(tmp_path)] == list(range(450))
    again = asked.rows()
    assert len(again) == len(set(again)) <= 300 and {str(i) for i in range(400, 450)} <= set(again)
    subprocess.run(run, cwd=tmp_path, check=True)
    assert asked.rows() == []


@pytest.mark.parametrize("ends", ["a gate", "killed"])
@pytest.mark.few(1)
def test_the_first_night_does_not_hold_up_the_next(tmp_path: Path, asked: Asked, ends: str) -> None:
    """A first run that a gate held back, or that was killed, is given up when the source has changed since; with other
    code besides, it is refused.
    """
    put(tmp_path / "in", "a", range(400), lambda i: "bad" if ends == "a gate" and i < 20 else str(i))
    put(tmp_path / "in", "b", range(400, 450))
    strict: dict[str, Any] = {"gates": {"min_ok": 0.99}}
    (tmp_path / "job.py").write_text(KILLED)
    if ends == "a gate":
        with pytest.raises(GateFailed):
            job(tmp_path, BY_ID, **strict).run()
    else:
        (tmp_path / "kill").touch()
        assert subprocess.run([sys.executable, "job.py"], cwd=tmp_path, check=False).returncode == -signal.SIGKILL
    put(tmp_path / "in", "b", range(400, 460))
    if ends == "killed":
        plan = [sys.executable, "job.py", "plan"]
        told = subprocess.run(plan, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
        assert "an unfinished first run over other rows" in told
        done = subprocess.run([sys.executable, "job.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0 and "(generation 1, " in done.stderr, done.stderr
    else:
        with pytest.raises(PlanChanged, match="unfinished run of a different job"):
            job(tmp_path, BY_ID, model=gm.model(lower, takes={"text": "string not null"}), **strict).run()
        put(tmp_path / "in", "a", range(400))
        assert gm.plan(job(tmp_path, BY_ID, **strict)).problems == []
        report = job(tmp_path, BY_ID, **strict).run()
        given_up = re.compile(r"\(generation 1, [0-8] of 9 shards done\) is given up")  # those that were under way
        assert any(map(given_up.search, report.notes)), report.notes
    assert [r["id"] for r in rows(tmp_path)] == list(range(460))
    if ends == "a gate":
        put(tmp_path / "in", "b", range(400, 461))
        assert job(tmp_path, BY_ID, **strict).run().updated == {"kept": 460, "scored": 1, "gone": 0}


def test_what_is_refused(tmp_path: Path, asked: Asked) -> None:
    """Words that contradict an update, and a key that is not there, are refused before anything runs."""
    put(tmp_path / "in", "a", range(10))
    with pytest.raises(BadJob, match="on_new_files append"):
        job(tmp_path, BY_ID, on_new_files="append")
    with pytest.raises(BadJob, match=r"'idd'.*did you mean 'id'"):
        job(tmp_path, {"key": ["idd"]}).run()
    with pytest.raises(BadJob, match="no sink"):
        gm.Job(str(tmp_path / "in"), MODEL, update=True)
    with pytest.raises(BadJob, match="keys"):
        job(tmp_path, {"keys": ["id"]})
    with pytest.raises(BadJob, match="leave out --append"):
        job(tmp_path, BY_ID).run(append=True)
    assert asked.rows() == []


def test_from_the_command_line(tmp_path: Path) -> None:
    """`--update --key id`, and `update:` in a job file, which --save writes."""
    put(tmp_path / "in", "a", range(100))
    (tmp_path / "rules.py").write_text(
        textwrap.dedent(
            """
            def score(batch):
                return {"long": [len(text) for text in batch["text"]]}
            """
        )
    )

    def gristmill(*words: str) -> Any:
        command = [sys.executable, "-m", "gristmill", *words, "--json", "--progress", "off"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    typed = ("apply", "in", "out", "--fn", "rules:score", "--keep", "id", "--update", "--key", "id")
    gristmill(*typed, "--save", "job.yaml")
    assert "key: [id]" in (tmp_path / "job.yaml").read_text() or "- id" in (tmp_path / "job.yaml").read_text()
    put(tmp_path / "in", "a", range(1, 100), lambda i: "longer text" if i == 5 else str(i))
    assert gristmill("run", "job.yaml")["updated"] == {"kept": 98, "scored": 1, "gone": 1}
    put(tmp_path / "in", "a", range(2, 100), lambda i: "longer text" if i == 5 else str(i))
    assert gristmill(*typed)["updated"] == {"kept": 98, "scored": 0, "gone": 1}


@pytest.mark.parametrize("store", ["duckdb", "sqlite"])
def test_stores_get_the_difference(tmp_path: Path, asked: Asked, store: str) -> None:
    """A store that is updated by key is brought the rows that are others, and no more."""
    put(tmp_path / "in", "a", range(100))
    put(tmp_path / "in", "b", range(100, 200))
    uri = f"{store}:///{tmp_path}/s.db#t"
    to = [gm.to(uri, mode="upsert", key=["id"])]
    first = job(tmp_path, BY_ID, deliver=to).run()
    assert [d.rows for d in first.deliveries] == [200]
    put(tmp_path / "in", "a", [*range(1, 100), 300], lambda i: f"new {i}" if i == 50 else str(i))
    second = job(tmp_path, BY_ID, deliver=to).run()
    assert [d.rows for d in second.deliveries] == [2]
    with gm.lookup(uri) as there:
        assert there.get(50)["shout"] == "NEW 50" and there.get(300)["shout"] == "300" and there.get(7)["shout"] == "7"
    os.unlink(tmp_path / "in" / "b.parquet")
    third = job(tmp_path, BY_ID, deliver=to).run()
    assert [d.rows for d in third.deliveries] == [0]
    put(tmp_path / "in", "a", range(1, 100))
    whole = [gm.to(uri, mode="upsert", key=["id"], delete=True)]
    fourth = job(tmp_path, BY_ID, deliver=whole).run()
    assert [d.rows for d in fourth.deliveries] == [99]
    with gm.lookup(uri) as there:
        assert there.get(300) is None and there.get(50)["shout"] == "50"


@pytest.mark.parametrize("how", ["gone", "flipped"])
def test_stores_get_all_rows_where_those_before_cannot_be_read(tmp_path: Path, asked: Asked, how: str) -> None:
    """The result that a store has, from which the difference is taken, is no more than a way to bring less."""
    put(tmp_path / "in", "a", range(100))
    job(tmp_path, BY_ID, deliver=(to := [gm.to(f"sqlite:///{tmp_path}/s.db#t", mode="upsert", key=["id"])])).run()
    put(tmp_path / "in", "a", range(100), lambda i: f"new {i}" if i == 50 else str(i))
    job(tmp_path, BY_ID).run()
    for old in (tmp_path / "out/_gristmill").glob("g0001-*/work/*"):
        data = old.read_bytes()
        old.unlink() if how == "gone" else old.write_bytes(data[:4] + bytes(196) + data[200:])
    report = job(tmp_path, BY_ID, deliver=to).run()
    assert [d.rows for d in report.deliveries] == [100]


def test_gates_compare_all_rows(tmp_path: Path, asked: Asked) -> None:
    """What is compared with the result before is of kept rows and scored ones, also of columns that are not written."""
    put(tmp_path / "in", "a", range(400), lambda i: "ab"[i % 2])
    gates = {"drift": {"text": {"psi": 0.05}, "shout": {"psi": 0.05}}, "min_ok": 0.9}
    job(tmp_path, BY_ID, gates=gates).run()
    put(tmp_path / "in", "a", range(400), lambda i: "c" if i == 7 else "ab"[i % 2])
    report = job(tmp_path, BY_ID, gates=gates).run()
    assert report.updated == {"kept": 399, "scored": 1, "gone": 0}
    assert {d.column for d in report.drift} == {"text", "shout"} and all(d.verdict == "held" for d in report.drift)
    put(tmp_path / "in", "a", range(400), lambda i: "c" if i < 200 else "ab"[i % 2])
    with pytest.raises(GateFailed, match="text"):
        job(tmp_path, BY_ID, gates=gates).run()
    assert len(rows(tmp_path)) == 400


def test_what_plan_says_of_it(tmp_path: Path) -> None:
    """`plan` foresees an update of a source that has changed, and that other code keeps no answer."""
    pq.write_table(pa.table({"id": [1, 2], "x": [1.0, 2.0]}), tmp_path / "in.parquet")

    def job(by: float) -> gm.Job:
        model = gm.model(_times, by=by, returns={"y": "float64"})
        return gm.Job(
            str(tmp_path / "in.parquet"), model, gm.sink(str(tmp_path / "out"), keep=["id"]), update={"key": ["id"]}
        )

    job(2.0).run()
    assert "nothing to do" in gm.plan(job(2.0)).sink and gm.plan(job(2.0)).idle
    pq.write_table(pa.table({"id": [1, 2, 3], "x": [1.0, 2.5, 3.0]}), tmp_path / "in.parquet")
    found = gm.plan(job(2.0))
    assert "which a run updates" in found.sink
    assert found.problems == [] and "no file is as it was" in found.sink
    assert "which a run makes anew: no answer is kept" in gm.plan(job(3.0)).sink


def test_what_plan_says_of_files_that_are_as_they_were(tmp_path: Path, asked: Asked) -> None:
    """How many rows are scored at most; and the columns that are written, the model's version among them."""
    for n in range(3):
        put(tmp_path / "in", str(n), range(n * 50, n * 50 + 50))
    made = job(tmp_path, BY_ID, sink={"model_version": "by", "row_id": "row", "key": ["id"]})
    made.run()
    put(tmp_path / "in", "1", range(50, 90), lambda i: f"new {i}")
    view = made.plan()
    assert "2 of 3 files are as they were, so that at most 40 of 140 rows are scored" in view.sink
    assert [name for name, _ in view.output] == ["row", "id", "extra", "by"]  # and what the function returns


def _times(batch: dict[str, Any], by: float) -> dict[str, Any]:
    return {"y": batch["x"] * by}


@pytest.mark.parametrize("update", [BY_ID, True])
def test_rows_of_a_file_that_cannot_be_read_are_not_gone(tmp_path: Path, asked: Asked, update: Any) -> None:
    """A truncated upload of a file that the result has rows of holds the night back; a person may let them leave."""
    for n in range(3):
        put(tmp_path / "in", str(n), range(n * 50, n * 50 + 50))

    def night(**verbs: Any) -> gm.Report:
        source = gm.source(str(tmp_path / "in"), on_bad_file="skip")
        how: dict[str, Any] = {"workers": 0, "shard_rows": 50, "update": update}
        return gm.Job(source, MODEL, gm.sink(str(tmp_path / "out"), keep=["id"]), **how).run(**verbs)

    night()
    whole = (tmp_path / "in" / "1.parquet").read_bytes()
    (tmp_path / "in" / "1.parquet").write_bytes(whole[: len(whole) // 2])
    put(tmp_path / "in", "2", range(100, 150), lambda i: f"new {i}")
    with pytest.warns(gm.GristmillWarning), pytest.raises(GateFailed, match=r"1\.parquet cannot be read, .* not gone"):
        night()
    assert len(rows(tmp_path)) == 150
    (tmp_path / "in" / "1.parquet").write_bytes(whole)
    asked.rows()  # the night that was held back has asked for what is new
    assert night().updated == {"kept": 150, "scored": 0, "gone": 0} and len(rows(tmp_path)) == 150
    assert asked.rows() == [] and [r["shout"] for r in rows(tmp_path)][100:] == [f"NEW {i}" for i in range(100, 150)]

    (tmp_path / "in" / "1.parquet").write_bytes(whole[: len(whole) // 2])
    with pytest.warns(gm.GristmillWarning), pytest.raises(GateFailed):
        night()
    asked.rows()
    with pytest.warns(gm.GristmillWarning, match="which was accepted"):
        assert night(accept=True).updated == {"kept": 100, "scored": 0, "gone": 50}
    assert asked.rows() == []
    put(tmp_path / "in", "3", [500])
    with pytest.warns(gm.GristmillWarning, match="skipped a bad file"):  # of which the result has no rows any more
        assert night().updated == {"kept": 100, "scored": 1, "gone": 0}


@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize("restart", [False, True])
def test_a_shard_without_a_readable_receipt_may_have_rows(
    tmp_path: Path, asked: Asked, lost: bool, restart: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its rows must not leave with a file that cannot be read, and how many are gone is not known."""
    for n in range(3):
        put(tmp_path / "in", str(n), range(n * 50, n * 50 + 50))
    source = gm.source(str(tmp_path / "in"), on_bad_file="skip")
    how: dict[str, Any] = {"workers": 0, "shard_rows": 50, "update": BY_ID}
    night = gm.Job(source, MODEL, gm.sink(str(tmp_path / "out"), keep=["id"]), **how)
    night.run()
    (receipt,) = (tmp_path / "out" / "_gristmill").glob("g0001*/receipts/0000001.json")
    whole = receipt.read_bytes()
    receipt.unlink() if lost else receipt.write_bytes(whole.replace(b"1", b"2", 1))
    good = cut(tmp_path / "in" / "1.parquet")
    with pytest.warns(gm.GristmillWarning), pytest.raises(GateFailed, match=r"1\.parquet cannot be read"):
        night.run(restart=restart)
    assert gm.read(str(tmp_path / "out")).count_rows() == 150
    (tmp_path / "in" / "1.parquet").write_bytes(good)
    put(tmp_path / "in", "1", range(55, 100))
    if not restart:
        report = night.run()
        told = capfd.readouterr().err
        assert (
            "how many rows are gone is not known: the receipts of shard 1 of generation 1 are damaged or lost" in told
        )
        assert report.updated == {"kept": 100, "scored": 45} and len(rows(tmp_path)) == 145


def weighted(batch: dict[str, Any]) -> dict[str, Any]:
    at = os.environ["UPDATE_ASKED"]
    bad = "bad" in batch["text"]
    if bad and not os.path.exists(f"{at}.mended"):
        raise ValueError("bad")
    return {"shout": np.array(["mended" if bad else t + str(np.load(f"{at}.npy")[0]) for t in batch["text"]])}


def test_weights_that_changed_after_a_retry_are_not_what_it_confirmed(tmp_path: Path, asked: Asked) -> None:
    """The row that was retried had loaded none: all others are scored again, as without the retry."""
    model = gm.model(weighted, takes={"text": "string not null"})
    weights = os.environ["UPDATE_ASKED"] + ".npy"
    np.save(weights, np.array([1]))
    put(tmp_path / "in", "a", range(50), lambda i: "bad" if i == 33 else str(i))
    alone: dict[str, Any] = {"batch_rows": 1}
    job(tmp_path, BY_ID, model, **alone).run()
    Path(os.environ["UPDATE_ASKED"] + ".mended").touch()
    assert gm.retry_dead(job(tmp_path, BY_ID, model, **alone)).rows_ok == 50
    np.save(weights, np.array([2]))
    put(tmp_path / "in", "b", [50])
    job(tmp_path, BY_ID, model, **alone).run()
    assert {r["shout"][-1] for r in rows(tmp_path) if r["id"] != 33} == {"2"}


def dumps(tmp_path: Path, **verbs: Any) -> gm.Report:
    """A night that leaves out files that cannot be read."""
    source = gm.source(str(tmp_path / "in"), on_bad_file="skip", where=verbs.pop("where", None))
    return gm.Job(source, MODEL, gm.sink(str(tmp_path / "out"), keep=["id"]), workers=0, update=BY_ID).run(**verbs)


def cut(path: Path) -> bytes:
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    return whole


def test_rows_may_be_in_an_unreadable_file_of_another_name(tmp_path: Path, asked: Asked) -> None:
    """A dump of several files, named by date, of which one is cut: the rows of last night's are not gone."""
    for n in range(2):
        put(tmp_path / "in", f"01-{n}", range(n * 50, n * 50 + 50))
    dumps(tmp_path)
    for n in range(2):
        (tmp_path / "in" / f"01-{n}.parquet").rename(tmp_path / "in" / f"02-{n}.parquet")
    whole = cut(tmp_path / "in" / "02-1.parquet")
    told = r"02-1\.parquet cannot be read, .* has rows of .*01-0\.parquet, .*01-1\.parquet, no longer in the source"
    with pytest.warns(gm.GristmillWarning), pytest.raises(GateFailed, match=told):
        dumps(tmp_path)
    assert len(rows(tmp_path)) == 100
    (tmp_path / "in" / "02-1.parquet").write_bytes(whole)
    assert dumps(tmp_path).updated == {"kept": 100, "scored": 0, "gone": 0}


def test_rows_may_have_moved_into_an_unreadable_file(tmp_path: Path, asked: Asked) -> None:
    """Out of a file that is still there: if rows are gone, the night is held back; if none is, the file is told."""
    put(tmp_path / "in", "0", range(60))
    dumps(tmp_path)
    put(tmp_path / "in", "0", range(30))
    (tmp_path / "in" / "1.parquet").write_bytes(b"PAR1 cut")
    told = r"1\.parquet cannot be read, and the result has 30 rows that no file which can be read has any more"
    with pytest.warns(gm.GristmillWarning), pytest.raises(GateFailed, match=told):
        dumps(tmp_path)
    assert gm.read(str(tmp_path / "out")).to_table().num_rows == 60
    put(tmp_path / "in", "0", range(60), lambda i: f"new {i}" if i == 50 else str(i))
    with pytest.warns(gm.GristmillWarning):
        assert dumps(tmp_path).rows_ok == 60


def test_a_restart_keeps_rows_of_an_unreadable_file(tmp_path: Path, asked: Asked) -> None:
    """Scoring all anew replaces the result as an update does: it is held back alike, and may be accepted."""
    for n in range(2):
        put(tmp_path / "in", str(n), range(n * 50, n * 50 + 50))
    dumps(tmp_path)
    whole = cut(tmp_path / "in" / "1.parquet")
    with pytest.warns(gm.GristmillWarning), pytest.raises(GateFailed, match=r"1\.parquet cannot be read, .* not gone"):
        dumps(tmp_path, restart=True)
    assert len(rows(tmp_path)) == 100
    (tmp_path / "in" / "1.parquet").write_bytes(whole)
    dumps(tmp_path)
    assert len(rows(tmp_path)) == 100
    cut(tmp_path / "in" / "1.parquet")
    with pytest.warns(gm.GristmillWarning, match="which was accepted"):
        dumps(tmp_path, restart=True, accept=True)
    assert len(rows(tmp_path)) == 50


def test_an_unreadable_file_of_which_all_rows_were_left_out(tmp_path: Path, asked: Asked) -> None:
    """The result has nothing of it, so that the night goes on; of one whose rows were dead it has their letters."""
    put(tmp_path / "in", "0", range(50))
    put(tmp_path / "in", "1", range(1000, 1050))
    dumps(tmp_path, where="id < 1000")
    cut(tmp_path / "in" / "1.parquet")
    put(tmp_path / "in", "2", [50], lambda i: "bad")
    with pytest.warns(gm.GristmillWarning, match="skipped a bad file"):
        assert dumps(tmp_path, where="id < 1000", accept=True).rows_dead == 1
    cut(tmp_path / "in" / "2.parquet")
    with pytest.warns(gm.GristmillWarning), pytest.raises(GateFailed, match=r"has rows of them, which are not gone"):
        dumps(tmp_path, where="id < 1000")


def test_what_retry_dead_says_of_an_update(tmp_path: Path, asked: Asked) -> None:
    """Of one that a gate holds back, or that has not begun, it names the run that goes on with it."""
    put(tmp_path / "in", "a", range(100))
    job(tmp_path, BY_ID, gates={"min_ok": 1.0}).run()
    put(tmp_path / "in", "b", range(100, 105), lambda i: "bad" if i < 103 else str(i))
    held = job(tmp_path, BY_ID, gates={"min_ok": 1.0})
    with pytest.raises(GateFailed):
        held.run()
    with pytest.raises(BadJob, match=r"3 dead rows are those of an update .* gristmill run JOB .* or --accept") as told:
        gm.retry_dead(held)
    assert "--append" not in str(told.value) and "put it back" not in str(told.value)
    with pytest.warns(gm.GristmillWarning):
        held.run(accept=True)
    put(tmp_path / "in", "a", range(50))
    with pytest.raises(PlanChanged, match="use gristmill run JOB") as changed:
        gm.retry_dead(held)
    assert "put it back" not in str(changed.value)
    Path(str(asked.path) + ".mended").touch()
    assert held.run().rows_dead == 0


def test_verify_looks_at_what_updates_need(tmp_path: Path, asked: Asked) -> None:
    """Files by which answers are kept are no part of what readers see: verify says what it costs if they are gone."""
    put(tmp_path / "in", "a", range(200))
    job(tmp_path, BY_ID).run()
    found = gm.verify(str(tmp_path / "out"))
    assert found.ok and len(found.lines) == 1
    first, second, *_ = sorted((tmp_path / "out/_gristmill").glob("g0001-*/fates/*"))
    first.unlink()
    second.write_bytes(second.read_bytes()[:-1])
    found = gm.verify(str(tmp_path / "out"))
    assert found.ok and len(found.lines) == 2
    assert first.name in found.lines[1] and "and 1 more of 4" in found.lines[1] and "2 shards" in found.lines[1]
    asked.rows()
    put(tmp_path / "in", "a", range(200), lambda i: f"new {i}" if i == 150 else str(i))
    job(tmp_path, BY_ID).run()
    assert len(asked.rows()) == 101, "as verify has said"
    assert len(gm.verify(str(tmp_path / "out")).lines) == 1


@pytest.mark.parametrize(
    ("shard", "what", "how", "gone"),
    [
        (1, "fates", "gone", None),
        (1, "fates", "cut", None),
        (1, "answers", "gone", 1),
        (1, "answers", "flipped", 1),
        (2, "fates", "gone", None),
        (2, "fates", "flipped", 1),
        (2, "answers", "cut", None),
        (2, "answers", "flipped", 1),
    ],
)
def test_an_update_does_without_files_that_no_reader_needs(
    tmp_path: Path, asked: Asked, shard: int, what: str, how: str, gone: int | None
) -> None:
    """Where a file that says whose answers hold is damaged, its rows are scored again, as verify says; a shard whose
    file is as it was is taken over, and goes without.
    """
    for name, first in (("a", 0), ("b", 100)):
        put(tmp_path / "in", name, range(first, first + 100))
    sink = {"format": "jsonl"} if what == "answers" else {}
    job(tmp_path, BY_ID, sink=sink).run()
    found = [p for p in (tmp_path / "out/_gristmill").glob("g0001-*/fates/*") if p.name.startswith(f"{shard:07d}")]
    (one,) = [p for p in found if ("answers" in p.name) == (what == "answers")]
    data = bytearray(one.read_bytes())
    data[len(data) // 2] ^= 255
    one.unlink() if how == "gone" else one.write_bytes(data if how == "flipped" else data[:-9])
    assert "except in files that are as they were" in str(gm.verify(str(tmp_path / "out")))
    asked.rows()
    put(tmp_path / "in", "a", [*range(99), 300])
    report = job(tmp_path, BY_ID, sink=sink).run()
    assert asked.rows() == ([*map(str, range(50, 99)), "300"] if shard == 1 else ["300"])
    assert report.updated.get("gone") == gone
    assert {r["id"]: r["shout"] for r in rows(tmp_path)} == {i: str(i) for i in [*range(99), *range(100, 200), 300]}
    put(tmp_path / "in", "b", [*range(100, 199), 400])
    job(tmp_path, BY_ID, sink=sink).run()
    assert asked.rows() == ([*map(str, range(100, 150)), "400"] if shard == 2 else ["400"])


def test_the_report_tells_what_was_kept(tmp_path: Path, asked: Asked) -> None:
    """On its page and in the terminal, for each generation that was an update."""
    from gristmill.driver.history import facts
    from gristmill.files.disk import LOCAL
    from gristmill.observe.factlines import lines
    from gristmill.observe.page import page

    put(tmp_path / "in", "a", range(100))
    job(tmp_path, BY_ID).run()
    assert "kept" not in page(facts(str(tmp_path / "out"), LOCAL)).replace("is not kept", "")
    put(tmp_path / "in", "a", range(1, 100), lambda i: f"new {i}" if i == 50 else str(i))
    job(tmp_path, BY_ID).run()
    known = facts(str(tmp_path / "out"), LOCAL)
    assert known.nights[-1].updated == {"kept": 98, "scored": 1, "gone": 1} and not known.nights[0].updated
    html = page(known)
    for name, n in known.nights[-1].updated.items():
        assert f'<b>{n}</b><span class="soft">{name}</span>' in html
    assert '<td class="num">98</td><td class="num">1</td><td class="num">1</td>' in html
    assert any("(98 kept, 1 scored, 1 gone)" in text for name, text in lines(known) if name == "gen. 2")


def test_prove_names_who_made_a_kept_answer(tmp_path: Path, asked: Asked) -> None:
    """As far back as the sink tells; the run that scored a row itself is not named twice."""
    texts = {i: str(i) for i in range(200)}

    def night(**changes: str) -> None:
        texts.update({int(name[1:]): text for name, text in changes.items()})
        put(tmp_path / "in", "a", list(texts), lambda i: texts[i])
        job(tmp_path, BY_ID).run()

    def made(row: int) -> Any:
        proof = gm.prove(str(tmp_path / "out"), row=row, key=["id"])
        assert proof.ok
        return proof.made_by

    night()
    assert made(3) is None
    night(_3="three", _190="more")
    assert made(3) is None and made(190) is None
    first = made(60)
    assert (first.generation, first.certain) == (1, True) and first.published and first.run
    assert made(4).generation == 1
    night(_7="seven")
    assert made(7) is None
    assert [(made(i).generation, made(i).certain) for i in (3, 190)] == [(2, True)] * 2
    assert (made(60).generation, made(60).certain) == (1, True)
    night(_8="eight")
    later = made(3)
    assert (later.generation, later.certain) == (2, False), "generation 2 is gone, and may have kept it"
    assert "or one before it" in str(gm.prove(str(tmp_path / "out"), row=3, key=["id"]))
    assert (made(7).generation, made(7).certain) == (3, True)


def test_prove_does_not_name_who_made_an_answer_that_was_lost(tmp_path: Path, asked: Asked) -> None:
    """A row whose answers could not be read was scored again, though the index of answers that are kept has it."""
    put(tmp_path / "in", "a", range(100))
    job(tmp_path, BY_ID, sink={"format": "jsonl"}).run()
    (first,) = (tmp_path / "out/_gristmill").glob("g0001-*/fates/0000000.*.answers.arrow")
    data = bytearray(first.read_bytes())
    data[len(data) // 2] ^= 255
    first.write_bytes(data)
    asked.rows()
    put(tmp_path / "in", "a", sorted(range(100), key=lambda i: i % 50))  # each shard has rows of both
    job(tmp_path, BY_ID, sink={"format": "jsonl"}).run()
    assert len(asked.rows()) == 50
    lost, kept = (gm.prove(str(tmp_path / "out"), row=i, key=["id"]).made_by for i in (40, 60))
    assert kept is not None and (kept.generation, kept.certain) == (1, True)
    assert lost is not None and (lost.generation, lost.certain) == (2, False)
