"""What a sink holds when runs of different meaning follow each other: claims, restarts, appends, late drivers.

In the calling process where the process is not the point: an operation that fails there is a run that ends there.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import duckdb
import jobs
import numpy as np
import oracles
import polars as pl
import processes
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import victims

import gristmill as gm
from gristmill.commit import publication
from gristmill.driver import run as driver
from gristmill.errors import BadJob, CorruptStore, PlanChanged, RunFailed

BEFORE_PLAN = {"at": 0, "kind": "ENOSPC", "ops": ["create"], "path": "plan.json"}
BEFORE_PUBLISHING = {"at": 0, "kind": "ENOSPC", "ops": ["create"], "path": "/published/"}


def run(source: Any, root: Any, *, harm: dict[str, Any] | None = None, **given: Any) -> gm.Report:
    """Shards of 10 rows in this process; with `harm`, an operation fails and so does the run."""
    verbs = {n: given.pop(n) for n in ("restart", "append", "retry", "accept_code_change") if n in given}
    arguments = {"fn": "scored", "workers": 0, "shard_rows": 10, "verbs": verbs, "gates": {"min_ok": 0.0}, **given}
    if harm is None:
        spec = jobs.job(source, root, **{n: v for n, v in arguments.items() if n != "verbs"}).spec
        return (
            driver.retry_dead(spec, **{n: v for n, v in verbs.items() if n != "retry"})
            if "retry" in verbs
            else (driver.run(spec, **verbs))
        )
    journal = f"{root}.journal" if isinstance(root, str) else f"{root.uri}.journal"
    with pytest.raises(RunFailed):
        jobs.run(source, root, journal=journal, harm=harm, **arguments)
    return None  # type: ignore[return-value]


def more(source: str, rows: range, name: str = "z.parquet") -> None:
    """Another file for the source."""
    pq.write_table(victims.table(len(rows), rows.start), os.path.join(source, name))


def sound(root: str, rows: int, dead: int = 0) -> None:
    """All rows once, and verify agrees."""
    assert sorted(oracles.ok_ids(root) + oracles.dead_ids(root)) == list(range(rows))
    assert len(oracles.dead_ids(root)) == dead
    oracles.tidy(root)


@pytest.fixture
def source(quick: Path) -> str:
    """30 rows in one file."""
    return victims.write_input(str(quick / "in"), 30, files=1)


@pytest.fixture
def root(quick: Path) -> str:
    """The sink."""
    return str(quick / "out")


@pytest.mark.parametrize("verb", ["restart", "append"])
def test_fault_42_a_verb_killed_before_its_plan_keeps_its_meaning(source: str, root: str, verb: str) -> None:
    """The claim says which code the verb was for: other code is refused (exit 4), the same goes on."""
    run(source, root)
    meant: dict[str, Any] = {"args": {"bad": [3]}} if verb == "restart" else {}
    if verb == "append":
        more(source, range(30, 40))
    run(source, root, harm=BEFORE_PLAN, **{verb: True}, **meant)
    for again in ({}, {verb: True}) if verb == "append" else ({},):
        with pytest.raises(PlanChanged, match=r"of a different job"):
            run(source, root, args={"bad": [5]}, **again)
    report = run(source, root, **meant)
    assert report.generation == 2 and report.state == "done"
    sound(root, 40 if verb == "append" else 30, dead=verb == "restart")
    assert len(set(gm.read(root).to_table()["id"].to_pylist())) == report.rows_ok


def test_fault_42_a_restart_killed_before_its_plan_when_its_source_is_written_again(source: str, root: str) -> None:
    """The same rows at another time, of which nothing was scored, are what it was for; other files are not."""
    run(source, root)
    run(source, root, harm=BEFORE_PLAN, restart=True)
    victims.write_input(source, 30, files=1)
    (name,) = os.listdir(source)
    os.utime(os.path.join(source, name), (1e9, 1e9))
    more(source, range(30, 40))
    with pytest.raises(PlanChanged, match="has other files than before"):
        run(source, root)
    os.unlink(os.path.join(source, "z.parquet"))
    report = run(source, root)
    assert (report.generation, report.state) == (2, "done")
    sound(root, 30)


def test_fault_42_a_new_run_killed_before_its_plan_binds_nobody(source: str, root: str) -> None:
    """It has scored nothing: the job may be changed and run."""
    run(source, root, harm=BEFORE_PLAN)
    run(source, root, args={"bad": [5]})
    sound(root, 30, dead=1)


@pytest.mark.long
@pytest.mark.parametrize("at", ["published", "_SUCCESS"])
@pytest.mark.parametrize("then", ["append", "restart"])
def test_fault_48_a_driver_that_comes_late_publishes_nothing(source: str, root: str, at: str, then: str) -> None:
    """A driver stopped while it publishes (before the publication is created; before `_SUCCESS` says so), its lease
    lost, another run finished meanwhile: continued, it changes nothing that a reader sees.
    """
    run(source, root)
    more(source, range(30, 40))
    op = ["create"] if at == "published" else ["replace"]
    harm = {"at": 0, "kind": "stop", "ops": op, "path": f"/{at}"}
    arguments: dict[str, Any] = {"fn": "scored", "workers": 0, "shard_rows": 10, "gates": {"min_ok": 0.0}}
    journal = f"{root}.journal"
    late = processes.start(
        "jobs:run", source=source, sink=root, journal=journal, harm=harm, verbs={"append": True}, **arguments
    )
    stopped = Path(journal, "stopped")
    processes.until(lambda: stopped.exists() and stopped.read_text())
    zombie = psutil.Process(int(stopped.read_text()))
    try:
        processes.until(lambda: zombie.status() == psutil.STATUS_STOPPED)
        os.unlink(os.path.join(root, "_gristmill", "lock"))  # a lease that was lost, as on a share that went away
        run(source, root, **{then: True})
        if then == "restart":
            run(source, root, restart=True)
        newest = publication.published(root)
        before = gm.read(root).to_table()
    finally:
        zombie.send_signal(18)  # SIGCONT
    assert processes.gone([zombie], 20)
    processes.killed(late)
    assert publication.published(root).body == newest.body
    assert gm.read(root).to_table().equals(before)
    assert json.loads(Path(root, "_SUCCESS").read_text())["publication"] == newest.number
    sound(root, 40)
    assert run(source, root).state == "nothing to do"


def test_fault_48_a_generation_is_listed_once(source: str, root: str) -> None:
    """Publishing the same append again, from the plan on, finds that it is published."""
    run(source, root)
    more(source, range(30, 40))
    run(source, root, append=True)
    Path(root, "_SUCCESS").write_bytes(Path(root, "_gristmill/published/0000001.json").read_bytes())
    assert gm.read(root).count_rows() == 40, "readers go by what was created last"
    assert run(source, root).state == "nothing to do"
    assert json.loads(Path(root, "_SUCCESS").read_text())["generations"] == [1, 2]
    sound(root, 40)


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_fault_49_a_sink_inside_another_is_left_alone(source: str, root: str, form: str) -> None:
    """Restarts, appends and verify of the outer one do not see the inner one's files."""
    inner = os.path.join(root, "inner", "deeper")
    outer = gm.sink(root, keep=["id"], format=form)
    run(source, outer)
    run(source, gm.sink(inner, keep=["id"], format=form))
    for verb in ("restart", "restart", "restart"):
        run(source, outer, **{verb: True})
        sound(inner, 30)
        sound(root, 30)


def test_fault_56_a_restart_over_an_unfinished_append_begins_from_nothing(source: str, root: str) -> None:
    """Also where a committed file of the append is lost."""
    run(source, root)
    more(source, range(30, 50))
    run(source, root, harm=BEFORE_PUBLISHING, append=True)
    (lost, *_) = Path(root, "_gristmill").glob("g0002-*/work/part-*")
    lost.unlink()
    report = run(source, root, restart=True)
    assert (report.generation, report.shards_resumed) == (3, 0)
    sound(root, 50)


def test_fault_56_a_restart_goes_on_with_itself_unless_it_has_lost_a_file(source: str, root: str) -> None:
    """The same command again resumes the restart; with a committed file gone it begins anew instead of failing."""
    run(source, root)
    run(source, root, harm=BEFORE_PUBLISHING, restart=True)
    report = run(source, root, restart=True)
    assert (report.generation, report.shards_resumed) == (2, report.shards)
    run(source, root, harm=BEFORE_PUBLISHING, restart=True)
    (lost, *_) = Path(root, "_gristmill").glob("g0003-*/work/part-*")
    lost.unlink()
    assert run(source, root, restart=True).generation == 4
    sound(root, 30)


@pytest.mark.parametrize("append", [False, True])
def test_fault_57_an_unfinished_plan_is_finished_as_it_was(source: str, root: str, append: bool) -> None:
    """A new file has come since: the plan is finished without it; then it is appended, or said how it can be."""
    run(source, root, harm=BEFORE_PUBLISHING)
    more(source, range(30, 40))
    report = run(source, root, append=append)
    if not append:
        assert any("run again with --append" in note for note in report.notes)
        sound(root, 30)
        run(source, root, append=True)
    sound(root, 40)
    assert publication.published(root).generations == [1, 2]


def test_fault_57_an_append_too(source: str, root: str) -> None:
    """An unfinished append is finished as it was; what came after it is a further one."""
    run(source, root)
    more(source, range(30, 40), "a.parquet")
    run(source, root, harm=BEFORE_PUBLISHING, append=True)
    more(source, range(40, 60), "b.parquet")
    run(source, root, append=True)
    sound(root, 60)
    assert publication.published(root).generations == [1, 2, 3]


def test_fault_61_readers_of_the_result_before_read_on(source: str, root: str) -> None:
    """A Dataset made before a restart reads its rows after it; a loop of readers never misses a file."""
    run(source, root)
    old = gm.read(root)
    wanted = old.to_table()
    run(source, root, args={"bad": [3]}, restart=True)
    assert old.to_table().equals(wanted)
    assert duckdb.sql(f"select count(*) from '{root}/*.parquet'").fetchall() == [(29,)], (
        "visible names are the newest's"
    )
    over, seen = threading.Event(), set()

    def reads() -> None:
        while not over.is_set():
            seen.add(gm.read(root).to_table().num_rows)

    reader = threading.Thread(target=reads)
    reader.start()
    for number in range(8):
        run(source, root, args={"bad": [3] if number % 2 else [4, 5]}, restart=True)
    over.set()
    reader.join()
    assert seen == {29, 28}
    work = Path(root, "_gristmill").glob("g*/work/part-*")
    assert {p.parent.parent.name[:5] for p in work} == {"g0009", "g0010"}, "this result and the one before, no more"
    with pytest.raises(gm.BadSource, match="a later result has replaced these rows since they were opened: read again"):
        old.to_table()


@pytest.mark.parametrize("harm", ["claim", "success", "publication", "both", "writable"])
def test_fault_63_nothing_torn_jams_a_sink(source: str, root: str, harm: str) -> None:
    """`--restart` always works, and whatever can be read still is."""
    run(source, root)
    torn = {
        "claim": ["_gristmill/generations/0001.json"],
        "success": ["_SUCCESS"],
        "publication": ["_gristmill/published/0000001.json"],
        "both": ["_SUCCESS", "_gristmill/published/0000001.json"],
        "writable": [],
    }
    for name in torn[harm]:
        path = Path(root, name)
        path.write_bytes(path.read_bytes()[:40])
    if harm == "writable":
        Path(root, f"_gristmill/writable.{os.getpid()}.tmp").touch()
    if harm in ("success", "publication", "writable"):
        assert run(source, root).state == "nothing to do"
        assert gm.read(root).count_rows() == 30
    run(source, root, args={"bad": [3]}, restart=True)
    sound(root, 30, dead=1)


def test_fault_63_a_table_in_memory_whose_copy_was_emptied(root: str) -> None:
    """The copy beside the plan is written again."""
    table = victims.table(30)
    run(table, root, harm=BEFORE_PUBLISHING)
    (copy,) = Path(root, "_gristmill/inputs").iterdir()
    copy.write_bytes(b"")
    run(table, root)
    sound(root, 30)


def test_fault_64_a_manifest_of_others_is_not_overwritten(source: str, root: str) -> None:
    """npy's manifest.parquet stands at the sink's root: a user's file of that name is refused, also beside a result."""
    npy = gm.sink(root, keep=["id"], format="npy")
    run(source, gm.sink(root, keep=["id"]))
    mine = pa.table({"mine": [1]})
    pq.write_table(mine, os.path.join(root, "manifest.parquet"))
    with pytest.raises(BadJob, match=r"manifest\.parquet: gristmill did not write it"):
        run(source, npy, fn="vector", keep=None, restart=True)
    assert pq.read_table(os.path.join(root, "manifest.parquet"), partitioning=None).equals(mine)


def test_fault_64_the_manifest_goes_with_its_result(source: str, root: str) -> None:
    """npy, then parquet by --restart: the manifest is a file of the result before, and goes."""
    run(source, gm.sink(root, keep=["id"], format="npy"), fn="vector")
    assert gm.verify(root).ok
    manifest = pq.read_table(os.path.join(root, "manifest.parquet"), partitioning=None)
    assert sum(manifest["rows"].to_pylist()) == 30
    rows = [np.load(os.path.join(root, p)) for p in manifest["output_path"].to_pylist()]
    assert np.concatenate(rows).shape == (30, 2)
    run(source, gm.sink(root, keep=["id"]), restart=True)
    assert not os.path.exists(os.path.join(root, "manifest.parquet"))
    sound(root, 30)


def test_fault_75_status_tells_of_the_live_result_beside_the_run(source: str, root: str) -> None:
    """While a restart is under way over a published result, both have their figures."""
    run(source, root)
    run(source, root, harm=BEFORE_PUBLISHING, args={"bad": [3]}, restart=True)
    now = gm.status(root)
    assert now["state"] == "unfinished" and now["generation"] == 2
    assert now["published"]["rows_ok"] == 30 and now["published_generation"] == 1
    assert now["rows_ok"] == 29 and now["shards_done"] == now["shards_total"] > 1


def test_fault_77_globs_for_data_find_the_result_alone(root: str) -> None:
    """DuckDB, polars and pyarrow by `**/*.parquet`, after a table in memory, dead letters and a retry."""
    table = victims.table(30)
    run(table, root, args={"bad": [3, 4]})
    run(table, root, retry=True, accept_code_change=True, args={"bad": [4]})
    assert gm.read(root).count_rows() == 29
    assert duckdb.sql(f"select count(*) from '{root}/**/*.parquet'").fetchall() == [(29,)]
    assert pl.read_parquet(f"{root}/**/*.parquet").height == 29
    assert sum(pq.read_metadata(p).num_rows for p in Path(root).glob("**/*.parquet")) == 29
    suffixes = {p.suffix for p in Path(root, "_gristmill").rglob("*") if p.is_file()}
    assert not suffixes & {".parquet", ".jsonl", ".npy", ".csv"}


def typed(batch: dict[str, Any], late: dict[str, Any], after: int = 30) -> list[dict[str, Any]]:
    """Rows of one kind up to an id, of another from there on."""
    return [{"a": int(i), "b": "x"} if i < after else dict(late) for i in batch["id"].tolist()]


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("late", "wanted"),
    [
        ({"a": 1, "b": "y"}, "fits"),
        ({"a": 1, "b": None}, "fits"),
        ({"a": 1.0, "b": "y"}, "fits"),
        ({"a": None, "b": None}, "fits"),
        ({"a": 1}, "refused"),
        ({"a": 1, "b": "y", "c": 1.5}, "refused"),
        ({"a": "one", "b": "y"}, "refused"),
        ({"a": 1.5, "b": "y"}, "refused"),
    ],
)
@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_fault_47_the_schema_of_a_result_binds_what_is_added(
    source: str, root: str, late: dict[str, Any], wanted: str, form: str
) -> None:
    """Appended rows with other columns or types are refused by their first rows, before anything of them is written;
    nulls fit any type; with `evolve` columns and wider types are there for all.
    """

    def append(**more: Any) -> gm.Report:
        sink = gm.sink(root, keep=["id"], format=form, **more)
        return gm.Job(source, gm.model(typed, late=late), sink, workers=0, shard_rows=10).run(append=True)

    append()
    more(source, range(30, 40))
    if wanted == "fits":
        append()
    else:
        with pytest.raises(PlanChanged, match="other columns than the result"):
            append()
        assert gm.read(root).count_rows() == 30
        if late.get("a") not in ("one", 1.5):  # no type holds these and 64-bit integers
            append(evolve=True)
    rows = sorted(gm.read(root).to_table().to_pylist(), key=lambda r: r["id"])
    if late.get("a") in ("one", 1.5):
        assert len(rows) == 30
    else:
        names = {"id", "a", "b", *late}
        assert rows[:30] == [{**dict.fromkeys(names), "id": i, "a": i, "b": "x"} for i in range(30)]
        assert rows[30:] == [{**dict.fromkeys(names), "id": i, **late} for i in range(30, 40)]
    assert gm.verify(root).ok
    assert gm.read(root).schema.field("id").type == pa.int64()


def quarters(batch: list[dict[str, Any]], mended: str) -> list[Any]:
    """Fractions up to an id, whole numbers from there on, which at last no fraction holds; row 4 fails at first."""
    found: list[Any] = [
        {"y": i / 4 if i < 30 and i != 4 else i // 4 + (2**53 if i > 40 else 0)} for i in (r["id"] for r in batch)
    ]
    return [
        ValueError("four") if row["id"] == 4 and not Path(mended).exists() else y
        for row, y in zip(batch, found, strict=True)
    ]


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_fault_47_whole_numbers_are_added_to_fractions_where_each_is_one(source: str, root: str, form: str) -> None:
    """By an append and a retry whose rows all happen to be whole; what a fraction cannot hold is refused."""
    mended = Path(root).with_name("mended")
    model = gm.model(quarters, batch_format="rows", mended=str(mended))
    sink = gm.sink(root, keep=["id"], format=form)
    job = gm.Job(source, model, sink, workers=0, shard_rows=10, gates={"min_ok": 0.5})
    with pytest.warns(gm.GristmillWarning):
        job.run()
    mended.mkdir()
    driver.retry_dead(job.spec)
    more(source, range(30, 40), "b.parquet")
    job.run(append=True)
    rows = sorted(gm.read(root).to_table().to_pylist(), key=lambda r: r["id"])
    assert rows == [{"id": i, "y": i / 4 if i < 30 else i // 4} for i in range(40)]
    assert gm.read(root).schema.field("y").type == pa.float64()
    more(source, range(40, 50), "c.parquet")
    with pytest.raises(PlanChanged, match="y was double, is int64"):
        job.run(append=True)
    assert gm.verify(root, deep=True).ok


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("form", ["parquet", "jsonl"])
@pytest.mark.few(3)
def test_fault_47_times_are_made_finer_where_each_can_be(quick: Path, root: str, form: str, nested: bool) -> None:
    """Nanoseconds reach to 2262: added to microseconds only where the result has none beyond."""
    (quick / "times").mkdir()

    def written(name: str, ids: list[int], times: pa.Array) -> None:
        if nested:
            times = pa.StructArray.from_arrays([pa.array([[t] for t in times], pa.list_(times.type))], ["seen"])
        pq.write_table(pa.table({"id": ids, "until": times}), quick / "times" / name)

    def added() -> None:
        sink = gm.sink(root, keep=["id", "until"], format=form, evolve=True)
        gm.Job(f"{quick}/times/*.parquet", lambda b: {"y": b["id"]}, sink, workers=0).run(append=True)

    far = 253_402_214_400 * 10**6  # the last day of 9999
    written("a.parquet", [1, 2], pa.array([1704067200000000, None], pa.timestamp("us")))
    added()
    written("b.parquet", [3], pa.array([1735689600000000001], pa.timestamp("ns")))
    added()
    assert gm.read(root).count_rows() == 3 and gm.verify(root, deep=True).ok
    shutil.rmtree(root)
    written("b.parquet", [3], pa.array([far], pa.timestamp("us")))
    added()
    written("c.parquet", [4], pa.array([1735689600000000001], pa.timestamp("ns")))
    with pytest.raises(PlanChanged, match=r"'until' was .*\[us\].*, is .*\[ns\]"):
        added()
    assert gm.read(root).to_table().num_rows == 3 and gm.verify(root, deep=True).ok


def nothing_yet(batch: dict[str, Any], cured: bool = False) -> list[Any]:
    """Every row is refused, or none."""
    return [{"y": float(i)} if cured else ValueError("not yet") for i in batch["id"].tolist()]


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_fault_47_a_result_without_rows_binds_nobody(source: str, root: str, form: str) -> None:
    """Every row dead, published all the same; retried with columns that nobody knew, ids and versions among them."""

    def job(cured: bool) -> gm.Job:
        sink = gm.sink(root, keep=["id"], row_id="rid", model_version="v", format=form)
        gates = {"min_ok": 0.0, "allow_empty": True}
        return gm.Job(source, gm.model(nothing_yet, cured=cured), sink, workers=0, shard_rows=10, gates=gates)

    assert job(False).run().rows_dead == 30
    driver.retry_dead(job(True).spec, accept_code_change=True)
    assert gm.read(root).schema.names == ["rid", "id", "y", "v"]
    sound(root, 30)


def nulls_at_first(batch: dict[str, Any], after: int = 30) -> list[dict[str, Any]]:
    """A column of nulls up to an id, of numbers from there on."""
    return [{"y": None if i < after else i + 0.5} for i in batch["id"].tolist()]


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_fault_47_a_column_of_nulls_takes_the_type_that_comes(source: str, root: str, form: str) -> None:
    """Nulls alone fix no type: what is appended does, without --evolve."""
    sink = gm.sink(root, keep=["id"], format=form)
    job = gm.Job(source, gm.model(nulls_at_first), sink, workers=0, shard_rows=10)
    job.run()
    more(source, range(30, 40))
    job.run(append=True)
    rows = sorted(gm.read(root).to_table().to_pylist(), key=lambda r: r["id"])
    assert rows == [{"id": i, "y": None if i < 30 else i + 0.5} for i in range(40)]
    assert gm.verify(root, deep=True).ok, gm.verify(root, deep=True).lines


@pytest.mark.long
def test_a_retry_of_rows_that_fail_again_ends(source: str, root: str) -> None:
    """Every row that is retried fails as before, in the way that makes a model doubted: they stay dead letters, as the
    model still works for the others.
    """
    bad = {"bad": {str(i): "memory" for i in range(0, 30, 3)}}
    run(source, root, fn="harmful", args=bad)
    sound(root, 30, dead=10)
    for _ in range(2):
        report = run(source, root, fn="harmful", args=bad, retry=True)
        assert (report.rows_ok, report.rows_dead) == (20, 10)
    sound(root, 30, dead=10)


def nightly(source: str, root: str, **more: Any) -> gm.Job:
    """A job that appends what is new, with the usual gate."""
    return gm.Job(
        source,
        gm.model(victims.scored, bad=more.pop("bad", [])),
        gm.sink(root, keep=["id"]),
        workers=0,
        shard_rows=10,
        on_new_files="append",
        **more,
    )


def test_a_night_without_rows_is_no_failure(source: str, root: str) -> None:
    """A file without rows is appended as such, and the next night goes on."""
    nightly(source, root).run()
    more(source, range(30, 30), "a.parquet")
    assert nightly(source, root).run().rows_ok == 30
    more(source, range(30, 40), "b.parquet")
    nightly(source, root).run()
    sound(root, 40)


@pytest.mark.parametrize("cure", ["another file", "removed", "replaced", "retry"])
@pytest.mark.few(2)
def test_an_append_whose_gate_fails_jams_nothing(source: str, root: str, cure: str) -> None:
    """It fails again as long as nothing changes; with the bad file gone or replaced, or good ones beside it, the append
    begins anew over the source as it is; the dead letters of what is published can be retried meanwhile.
    """
    nightly(source, root, bad=[3]).run()
    arguments: dict[str, Any] = {"fn": "scored", "args": {"bad": [3]}, "on_new_files": "append", "gates": {}}
    name = os.path.join(source, "a.parquet")
    poison = pa.table({"id": np.arange(30, 50), "x": pa.array([None] * 20, pa.float64())})
    pq.write_table(poison, name)
    for _ in range(2):
        with pytest.raises(gm.GateFailed):
            run(source, root, **arguments)
    if cure == "another file":
        more(source, range(50, 2550), "b.parquet")
        run(source, root, **arguments, batch_rows=500)
        assert gm.read(root).count_rows() == 29 + 2500 and gm.dead(root).num_rows == 21
    elif cure == "removed":
        os.unlink(name)
        assert run(source, root, **arguments).state == "nothing to do"
    elif cure == "replaced":
        more(source, range(30, 50), "a.parquet")
        run(source, root, **arguments)
        sound(root, 50, dead=1)
    else:
        os.unlink(name)
        run(source, root, retry=True, accept_code_change=True)
        sound(root, 30)
    assert gm.verify(root).ok


def test_an_abandoned_restart_leaves_the_result_as_it_is(source: str, root: str) -> None:
    """Begun with other code and let be: with the code put back there is nothing to do, and its own code goes on."""
    run(source, root)
    some = {"at": 1, "kind": "ENOSPC", "ops": ["create"], "path": "/receipts/", "times": 999}
    run(source, root, harm=some, args={"bad": [3]}, restart=True)
    assert run(source, root).state == "nothing to do"
    with pytest.raises(PlanChanged, match="an unfinished run of a different job here"):
        run(source, root, args={"bad": [4]})
    assert run(source, root, args={"bad": [3]}).generation == 2
    sound(root, 30, dead=1)


def test_an_abandoned_restart_that_had_linked_its_files_is_given_up(source: str, root: str) -> None:
    """Else who reads by a glob would find two results: they go, and with them what they are names of."""
    run(source, root)
    run(source, root, harm=BEFORE_PUBLISHING, args={"bad": [3]}, restart=True)
    assert not gm.verify(root).ok
    assert run(source, root).state == "nothing to do"
    sound(root, 30)
    assert run(source, root, args={"bad": [3]}, restart=True).generation == 3
    sound(root, 30, dead=1)


def test_a_first_run_that_has_committed_nothing_binds_nobody(source: str, root: str) -> None:
    """Also where its plan stands."""
    run(source, root, harm={"at": 0, "kind": "ENOSPC", "ops": ["create"], "path": "/receipts/", "times": 999})
    run(source, root, args={"bad": [5]})
    sound(root, 30, dead=1)


def test_a_retry_does_not_mind_files_that_came_since(source: str, root: str) -> None:
    """They are appended another time."""
    run(source, root, args={"bad": [3]})
    more(source, range(30, 40))
    run(source, root, retry=True, accept_code_change=True)
    sound(root, 30)
    run(source, root, append=True)
    sound(root, 40)


def test_a_sink_that_was_copied_without_its_records(source: str, root: str, quick: Path) -> None:
    """It can be read and, by --restart, replaced: its _SUCCESS says which files are its own, and nothing of them stays.
    A file that it does not list so is somebody's, and stays.
    """
    run(source, root, args={"bad": [3]})
    copy = str(quick / "copy")
    shutil.copytree(root, copy, ignore=shutil.ignore_patterns("_gristmill"))
    assert gm.read(copy).count_rows() == 29
    theirs = Path(copy, "part-0000001.g1.parquet")
    ours = theirs.read_bytes()
    for content in (ours + b"changed", None):
        if content is not None:
            theirs.write_bytes(content)
            with pytest.raises(BadJob, match=r"1 files that gristmill did not write \(part-0000001") as refused:
                run(source, copy, restart=True)
            assert "--overwrite (overwrite=True)" in str(refused.value) and theirs.read_bytes() == content
            theirs.write_bytes(ours)
    with pytest.raises(CorruptStore, match=r"--restart \(restart=True\)"):
        run(source, copy)
    shutil.rmtree(Path(copy, "_gristmill"))
    run(source, copy, restart=True)
    sound(copy, 30)
