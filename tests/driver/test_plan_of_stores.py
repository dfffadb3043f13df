"""What `gristmill plan` tells of stores, and that it ends as the run would."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import gristmill as gm
from gristmill.cli.app import main
from gristmill.driver import views
from gristmill.snapshots import pinning

ROWS = 40


def doubled(batch: dict[str, Any]) -> dict[str, Any]:
    """A number for each row."""
    return {"y": batch["x"] * 2}


def tripled(batch: dict[str, Any]) -> dict[str, Any]:
    """Another number for each row."""
    return {"y": batch["x"] * 3}


def letters(batch: dict[str, Any]) -> dict[str, Any]:
    """A text for each row."""
    return {"y": [str(x) for x in batch["x"]]}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with rows in files and in a database."""
    monkeypatch.chdir(tmp_path)
    os.mkdir("in")
    pq.write_table(pa.table({"id": range(ROWS), "x": [n / 4 for n in range(ROWS)]}), "in/a.parquet")
    with closing(sqlite3.connect("rows.sqlite")) as db:
        db.execute("CREATE TABLE rows (id INTEGER, x REAL)")
        db.executemany("INSERT INTO rows VALUES (?, ?)", [(n, n / 4) for n in range(ROWS)])
        db.commit()
    return tmp_path


def job(source: Any = "in", fn: Any = doubled, **options: Any) -> gm.Job:
    """The rows, here; the model says what it returns."""
    said = {"returns": options.pop("returns", {"y": "float64"}), "takes": options.pop("takes", None)}
    return gm.Job(source, gm.model(fn, **said), gm.sink("out", keep=["id"]), workers=0, shard_rows=10, **options)


def everything(folder: Path) -> dict[str, int]:
    """All files, and when they were written."""
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def ending(made: gm.Job) -> int:
    """How its run ends, as a command would."""
    try:
        made.run()
    except gm.GristmillError as e:
        return e.exit_code
    return 0


STORES = ["duckdb://s.duckdb#scores", "sqlite://s.sqlite#scores", "lmdb://s.lmdb"]


def test_what_is_in_the_stores(folder: Path) -> None:
    """Nothing yet, then the rows and generation that are there; a plan leaves no trace."""
    made = job(deliver=[gm.to(store, key="id") for store in STORES])
    before = everything(folder)
    found = made.plan()
    assert [(str(d), d.problem) for d in found.deliveries] == [
        (f"{d.to}: replace, nothing is there yet", "") for d in found.deliveries
    ]
    assert everything(folder) == before and not os.path.exists("out")
    made.run()
    before = everything(folder)
    found = made.plan()
    assert [str(d) for d in found.deliveries] == [f"{d.to}: replaces 40 rows of generation 1" for d in found.deliveries]
    assert found.exit_code == 0 and everything(folder) == before
    other = job(fn=letters, returns={"y": "string"}, deliver=[gm.to(STORES[0], mode="append")])
    assert "appends to 40 rows of generation 1" in str(other.plan().deliveries[0])


def test_what_does_not_fit(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A column of another type, a key that is not there, a store that is away: told, and the run ends alike."""
    job(deliver=[gm.to(STORES[1])]).run()
    shutil.rmtree("out")
    for made, said in (
        (job(fn=letters, returns={"y": "string"}, deliver=[gm.to(STORES[0]), gm.to(STORES[1], mode="append")]), "'y'"),
        (job(deliver=[gm.to("lmdb://s.lmdb", key="idd")]), "key names column 'idd', which the result does not have"),
        (job(deliver=[gm.to("redis://127.0.0.1:9/0#scores", key="id")]), "run again once"),
    ):
        found, code = made.plan(), 1 if said == "run again once" else 2  # which may be there later
        assert found.exit_code == code and said in found.problems[0] and len(found.problems) == 1
        assert ending(made) == code
        assert not os.path.exists("out/_SUCCESS")
        shutil.rmtree("out", ignore_errors=True)
    Path("job.yaml").write_text(
        "source: in\nmodel: {call: 'fn:doubled', returns: {y: float64}}\nsink: {uri: out, keep: [id]}\n"
        "deliver: [{to: 'lmdb://s.lmdb', key: [idd]}]\nengine: {workers: 0}\n"
    )
    Path("fn.py").write_text("def doubled(batch):\n    return {'y': batch['x'] * 2}\n")
    assert main(["plan", "job.yaml"]) == 2
    assert "problem  deliver lmdb://" in capsys.readouterr().out
    assert main(["plan", "job.yaml", "--json"]) == 2
    (told,) = json.loads(capsys.readouterr().out)["deliveries"]
    assert told["rows"] == 0 and "idd" in told["problem"]


def test_columns_that_only_the_run_can_tell() -> None:
    """Of a function that does not say what it returns nothing is checked, until its result is there."""
    made = job(returns=None, deliver=[gm.to("lmdb://s.lmdb", key="y")])
    assert made.plan().exit_code == 0 and ending(made) == 2
    job(returns=None).run(restart=True)
    found = made.plan()
    assert found.exit_code == 2 and "key column 'y' is double" in found.problems[0]


def test_it_ends_as_the_run(folder: Path) -> None:
    """4 for a result of another job and for new files that nobody said what to do about; 3 for gates."""
    assert job().plan().exit_code == 0
    job().run()
    assert job().plan().exit_code == 0
    changed = job(fn=tripled)
    found = changed.plan()
    assert found.exit_code == 4 and "holds a result of a different job" in found.problems[0]
    assert "--restart" in found.problems[0] and ending(changed) == 4
    pq.write_table(pa.table({"id": [98, 99], "x": [None, 1.0]}), "in/b.parquet")
    before = everything(folder)
    assert job().plan().exit_code == 4
    assert job(on_new_files="append").plan().exit_code == 0
    assert everything(folder) == before
    assert ending(job()) == 4
    shutil.rmtree("out")
    strict = job(takes={"x": "float64 not null"}, gates={"min_ok": 1})
    assert strict.plan().exit_code == 3 and ending(strict) == 3


def test_a_gate_that_held_a_run_back() -> None:
    """All rows are scored, too many are dead: 3, until a lower gate is given."""

    def odd(batch: dict[str, Any]) -> dict[str, Any]:
        if (batch["id"] % 10 == 1).any():
            raise ValueError("ones")
        return {"y": batch["x"]}

    strict = job(fn=odd, gates={"min_ok": 0.92}, batch_rows=1)
    assert ending(strict) == 3
    found = strict.plan()
    assert "4 of 4 shards done" in found.sink
    assert found.exit_code == 3 and "4 are dead letters" in found.problems[0] and ending(strict) == 3
    lower = job(fn=odd, gates={"min_ok": 0.5}, batch_rows=1)
    assert lower.plan().exit_code == 0 and ending(lower) == 0


def test_an_unfinished_run_of_another_job() -> None:
    """It is refused, too."""

    def failing(batch: dict[str, Any]) -> dict[str, Any]:
        if batch["id"][0] >= 20:
            raise ValueError("no more")
        return {"y": batch["x"]}

    first = job(fn=failing, gates={"min_ok": 1})
    assert ending(first) in (1, 3)
    assert first.plan().exit_code == 0
    found = job().plan()
    assert found.exit_code == 4 and "an unfinished run of a different job" in found.problems[0]
    assert ending(job()) == 4


@pytest.mark.parametrize(
    ("how", "rows"),
    [
        ({}, ROWS),
        ({"limit": 30}, 30),
        ({"limit": 5}, 5),
        ({"sample": 7}, 7),
        ({"sample": 35}, 35),
        ({"query": "SELECT id, x FROM rows WHERE id >= 10 ORDER BY id -- not the first"}, 30),
    ],
)
def test_a_source_is_counted(how: dict[str, Any], rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a table only the first rows are copied, and all are counted, with a limit, a sample or a query as the run."""
    monkeypatch.setattr(views, "COPIED", 10)
    copied: list[int] = []
    whole = pinning.copied

    def noted(*given: Any) -> tuple[str, int]:
        name, count = whole(*given)
        copied.append(count)
        return name, count

    monkeypatch.setattr(pinning, "copied", noted)
    made = job(gm.source("sqlite://rows.sqlite" if "query" in how else "sqlite://rows.sqlite#rows", **how))
    found = made.plan()
    assert found.rows == rows and max(copied) <= 10 and found.shards == -(-rows // 10)
    assert found.problems == [] and not os.path.exists("out")
    assert made.run().rows_in == rows


def test_a_sink_of_a_counted_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether its rows are still the same only a run can tell; another function it is told now."""
    monkeypatch.setattr(views, "COPIED", 10)
    made = job("sqlite://rows.sqlite#rows")
    made.run()
    found = made.plan()
    assert found.exit_code == 0 and "whether its rows are those that are there now" in found.sink
    assert job("sqlite://rows.sqlite#rows", fn=tripled).plan().exit_code == 4
    assert "bytes, shards and nulls are by the first 10 of them" in " ".join(found.notes)
