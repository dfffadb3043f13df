"""A sink that was copied, or restored from a backup, and a store that was given a result of the other one: no row of
its own is taken for one that is there.
"""

from __future__ import annotations

import shutil
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import gristmill as gm
from gristmill.cli.app import main

STORES = {"sqlite": "sqlite://s.sqlite#scores", "duckdb": "duckdb://s.duckdb#scores", "lmdb": "lmdb://s.lmdb"}
OTHERS = {"delta": "delta://lake", "lance": "lance://lance#scores", "usearch": "usearch://s.usearch"}
SOME = [*STORES, *(pytest.param(name, marks=pytest.mark.long) for name in OTHERS)]
Rows = dict[int, float]


def scored(batch: dict[str, Any], times: int = 1) -> dict[str, Any]:
    """A number, and a vector, for each row."""
    return {"y": batch["x"] * times, "v": [[x, 1.0] for x in batch["x"]]}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder."""
    monkeypatch.chdir(tmp_path)
    Path("in").mkdir()
    return tmp_path


def write(name: str, rows: Rows) -> None:
    """A file of the source."""
    pq.write_table(pa.table({"id": list(rows), "x": list(rows.values())}), f"in/{name}.parquet")


def job(*deliver: gm.Delivery, times: int = 1, **options: Any) -> gm.Job:
    """The rows, here."""
    model = gm.model(scored, times=times, returns={"y": "float64", "v": "float32[2]"})
    return gm.Job("in", model, gm.sink("out", keep="id"), workers=0, deliver=list(deliver), **options)


def night(first: int, shift: float = 0.0) -> Rows:
    """Ten rows."""
    return {n: n + shift for n in range(first, first + 10)}


def restored() -> None:
    """The sink as it was when it was copied."""
    shutil.rmtree("out")
    shutil.copytree("backup", "out")


def seen(to: gm.Delivery, rows: Rows) -> Rows:
    """Which of the rows are looked up there."""
    with gm.lookup(to) as lookup:
        found = lookup.get_many(list(rows))
    return {row["id"]: row["y"] for row in found if row is not None}


def ids() -> Counter[int]:
    """How often each row is in the table."""
    with closing(sqlite3.connect("s.sqlite")) as db:
        return Counter(row[0] for row in db.execute("SELECT id FROM scores"))


@pytest.mark.parametrize("delivers", [True, False], ids=["at once", "a night later"])
@pytest.mark.parametrize("name", SOME)
@pytest.mark.few(3)
def test_what_a_restored_sink_adds_comes_to_the_store(name: str, delivers: bool) -> None:
    """Its generation 2 is another than that of the lost sink, whose rows are there under that number."""
    to = gm.to({**STORES, **OTHERS}[name], mode="upsert", key="id")
    write("a", night(0))
    job(to).run()
    shutil.copytree("out", "backup")
    write("b", night(10))
    job(to).run(append=True)
    restored()
    Path("in/b.parquet").unlink()
    rows = {**night(0), **night(20, 0.5)}
    write("c", night(20, 0.5))
    report = job(*[to] * delivers).run(append=True)
    if not delivers:
        rows |= night(30)
        write("d", night(30))
        report = job(to).run(append=True)
    assert any("of a copy of this sink that went its own way" in note for note in report.notes)
    assert seen(to, rows) == rows and gm.verify(job(to)).ok
    assert job(to).run().notes == ()


@pytest.mark.parametrize("delivers", [True, False], ids=["at once", "a night later"])
@pytest.mark.parametrize("name", SOME)
def test_what_a_restored_update_keeps_comes_to_the_store(name: str, delivers: bool) -> None:
    """What changed since its own night before is not all that the store lacks, which has the lost sink's."""
    to = gm.to({**STORES, **OTHERS}[name], mode="upsert", key="id")
    update = {"key": ["id"]}
    write("a", night(0))
    job(to, update=update).run()
    shutil.copytree("out", "backup")
    write("a", night(0) | {1: 100.0})
    job(to, update=update).run()
    restored()
    rows = night(0) | {5: 200.0}
    write("a", rows)
    job(*[to] * delivers, update=update).run()
    if not delivers:
        rows |= {7: 300.0}
        write("a", rows)
        job(to, update=update).run()
    assert seen(to, rows) == rows and gm.verify(job(to, update=update)).ok


def test_rows_are_not_appended_beside_those_of_a_copy() -> None:
    """The night that was lost with the sink is read again: before it is scored, the way out is told."""
    to = gm.to("sqlite://s.sqlite#scores", mode="append")
    write("a", night(0))
    job(to).run()
    shutil.copytree("out", "backup")
    write("b", night(10))
    job(to).run(append=True)
    restored()
    with pytest.raises(
        gm.BadJob, match=r"holds generation 2 \(g0002-.*: deliver to another place, or once with mode r"
    ):
        job(to).run(append=True)
    assert not list(Path("out").glob("*.g2.*")) and set(ids().values()) == {1}
    job().run(append=True)
    with pytest.raises(gm.BadJob, match="rows are not appended twice"):
        gm.deliver("out", to)
    gm.deliver("out", "sqlite://s.sqlite#scores")
    write("c", night(20))
    job(to).run(append=True)
    assert ids() == dict.fromkeys(range(30), 1)


def test_several_stores_that_are_ahead() -> None:
    """All of them are told, and that the same command does not help: exit 75, as for one."""
    both = [gm.to(STORES[name], mode="upsert", key="id") for name in ("sqlite", "lmdb")]
    write("0", night(0))
    job(*both).run()
    shutil.copytree("out", "backup")
    for times in (2, 3):
        job(*both, times=times).run(restart=True)
    restored()
    with pytest.raises(gm.SinkBusy) as busy:
        job(*both).run()
    told = str(busy.value)
    assert told.count("holds generation 3 of this sink already") == told.count("--take-over") == 2
    assert "the same command" not in told and busy.value.exit_code == 75
    gm.deliver("out", both[0], take_over=True)
    gm.deliver("out", both[1], take_over=True)
    assert seen(both[0], night(0)) == seen(both[1], night(0)) == night(0)


@pytest.mark.parametrize(
    ("way", "mode"), [("deliver", "replace"), ("command", "upsert"), ("restart", "replace"), ("restart", "upsert")]
)
def test_a_backup_of_many_nights_ago_takes_over_at_once(mode: Any, way: str) -> None:
    """A store that is three generations ahead of it; each way that the message names works the first time."""
    to = gm.to("sqlite://s.sqlite#scores", mode=mode, key="id")
    write("a", night(0))
    job(to).run()
    shutil.copytree("out", "backup")
    for times in (2, 3, 4):
        job(to, times=times).run(restart=True)
    restored()
    with pytest.raises(gm.SinkBusy, match=r"holds generation 4 of this sink.* gristmill deliver --take-over") as busy:
        job(to).run()
    assert "--restart" in str(busy.value) and seen(to, night(0)) == {n: n * 4 for n in night(0)}
    with pytest.raises(gm.SinkBusy):
        gm.deliver("out", to)
    if way == "deliver":
        gm.deliver("out", to, take_over=True)
    elif way == "command":
        assert main(["deliver", "out", "sqlite://s.sqlite#scores", "--mode", mode, "--key", "id", "--take-over"]) == 0
    else:
        job(to).run(restart=True)
    assert seen(to, night(0)) == night(0) and gm.verify(job(to)).ok
    write("b", night(10))
    assert not [note for note in job(to).run(append=True).notes if "copy" in note]
    assert seen(to, night(0) | night(10)) == night(0) | night(10)


def test_a_later_result_of_the_same_sink_is_not_taken_over() -> None:
    """That is what a deliverer finds that was suspended, whatever it was told."""
    to = gm.to("sqlite://s.sqlite#scores", key="id")
    write("a", night(0))
    job(to).run()
    shutil.copytree("out", "backup")
    job(to, times=2).run(restart=True)
    shutil.copytree("out/_gristmill/generations", "backup/_gristmill/generations", dirs_exist_ok=True)
    with pytest.raises(gm.SinkBusy, match="another run has delivered meanwhile"):
        gm.deliver("backup", to, take_over=True)
    assert ids() == dict.fromkeys(range(10), 1) and seen(to, night(0))[3] == 6


def test_a_copy_in_the_store_is_told_by_verify() -> None:
    """Under the number that was delivered last, by another name."""
    to = gm.to("sqlite://s.sqlite#scores", key="id")
    write("a", night(0))
    job().run()
    shutil.copytree("out", "backup")
    job(to, times=2).run(restart=True)
    shutil.move("out", "other")
    shutil.copytree("backup", "out")
    job(to, times=3).run(restart=True)
    assert gm.verify("out").ok
    verdict = gm.verify("other")
    assert not verdict.ok and "holds generation 2 of a copy of this sink" in verdict.lines[-1]
