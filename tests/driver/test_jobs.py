"""Whole jobs on one machine, as a person writes them in Python."""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import functions
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import gristmill as gm
from gristmill.commit.ledger import Ledger
from gristmill.driver import scoring
from gristmill.driver.planning import resolve
from gristmill.driver.run import retry_dead


@pytest.fixture
def numbers(tmp_path: Path) -> str:
    """1,000 rows in three files of several row groups."""
    rng = np.random.default_rng(0)
    for part, (a, b) in enumerate([(0, 400), (400, 401), (401, 1000)]):
        table = pa.table({"id": np.arange(a, b), "x": rng.random(b - a), "day": [f"d{i % 3}" for i in range(a, b)]})
        (tmp_path / "in").mkdir(exist_ok=True)
        pq.write_table(table, tmp_path / "in" / f"{part}.parquet", row_group_size=100)
    return str(tmp_path / "in")


def by_id(table: pa.Table) -> dict[int, float]:
    """The result as id -> y."""
    return dict(zip(table["id"].to_pylist(), table["y"].to_pylist(), strict=True))


@pytest.mark.parametrize(("workers", "shard_rows"), [(0, 7), (1, 1000), (2, 64), (2, "auto")])
def test_output_row_i_is_input_row_i(numbers: str, tmp_path: Path, workers: int, shard_rows: int | str) -> None:
    """The result stands in the source's order with the source's values, whatever the workers and shards."""
    report = gm.apply(
        numbers, tmp_path / "out", fn=functions.double, keep=["id", "x"], workers=workers, shard_rows=shard_rows
    )
    table = report.read().to_table()
    assert table["id"].to_pylist() == list(range(1000))
    assert np.array_equal(table["y"].to_numpy(), table["x"].to_numpy() * 2)
    assert (report.rows_in, report.rows_ok, report.rows_dead, report.rows_filtered) == (1000, 1000, 0, 0)


def test_any_reader_of_parquet_reads_the_sink(numbers: str, tmp_path: Path) -> None:
    """DuckDB and polars read SINK/*.parquet and find exactly the published rows."""
    import duckdb
    import polars as pl

    gm.apply(numbers, tmp_path / "out", fn=functions.double, keep=["id"])
    glob = str(tmp_path / "out" / "*.parquet")
    assert duckdb.sql(f"select count(*), count(distinct id) from '{glob}'").fetchall() == [(1000, 1000)]
    assert pl.read_parquet(glob).height == 1000
    assert pq.read_table(str(tmp_path / "out")).num_rows == 1000


def test_a_second_run_has_nothing_to_do(numbers: str, tmp_path: Path) -> None:
    """Running a finished job again calls the model for no row and says so."""
    log = tmp_path / "calls"
    first = gm.apply(numbers, tmp_path / "out", fn=functions.counted, args={"log": str(log)}, keep=["id"])
    calls = log.read_text()
    again = gm.apply(numbers, tmp_path / "out", fn=functions.counted, args={"log": str(log)}, keep=["id"])
    assert again.state == "nothing to do"
    assert log.read_text() == calls
    assert again.counts == first.counts
    assert sorted(int(i) for line in calls.splitlines() for i in line.split()) == list(range(1000)), "each row once"


def test_another_input_is_refused_and_restart_replaces(numbers: str, tmp_path: Path) -> None:
    """Changed input is exit 4 with the difference; --restart scores anew and removes the old parts."""
    gm.apply(numbers, tmp_path / "out", fn=functions.double, keep=["id"])
    pq.write_table(pa.table({"id": [5000], "x": [1.0], "day": ["d"]}), Path(numbers) / "0.parquet")
    with pytest.raises(gm.PlanChanged, match=r"0\.parquet") as refused:
        gm.apply(numbers, tmp_path / "out", fn=functions.double, keep=["id"])
    assert refused.value.exit_code == 4
    report = gm.apply(numbers, tmp_path / "out", fn=functions.double, keep=["id"], restart=True)
    assert report.generation == 2
    assert report.rows_ok == 601
    assert {p.name.split(".")[1] for p in (tmp_path / "out").glob("*.parquet")} == {"g2"}


def test_other_code_is_refused(numbers: str, tmp_path: Path) -> None:
    """Another function on the same sink is exit 4."""
    gm.apply(numbers, tmp_path / "out", fn=functions.double, keep=["id"])
    with pytest.raises(gm.PlanChanged, match=r"Scorer|double"):
        gm.apply(numbers, tmp_path / "out", fn=functions.Scorer, args={"factor": 2.0}, keep=["id"])


@pytest.mark.parametrize("finished", [True, False])
def test_another_function_of_the_same_module_is_refused(numbers: str, tmp_path: Path, finished: bool) -> None:
    """Its file is the same, its answers are not: on a finished result, and on one that a gate kept unfinished."""
    sink, bad = tmp_path / "out", list(range(0, 1000, 2))
    if finished:
        gm.apply(numbers, sink, fn=functions.picky, args={"bad": []}, keep=["id"])
    else:
        with pytest.raises(gm.GateFailed):
            gm.apply(numbers, sink, fn=functions.picky, args={"bad": bad}, keep=["id"], gates={"min_ok": 0.9})
    with pytest.raises(gm.PlanChanged, match="callable mended is new"):
        gm.apply(numbers, sink, fn=functions.mended, args={"bad": [] if finished else bad}, keep=["id"])
    with pytest.raises(gm.PlanChanged, match="callable picky was given numpy, is given pandas"):
        model = gm.model(functions.picky, bad=[] if finished else bad, batch_format="pandas")
        gm.Job(numbers, model, gm.sink(str(sink), keep=["id"])).run()


def test_append_scores_only_new_files(numbers: str, tmp_path: Path) -> None:
    """Appending reads only files that were not there before, and the result holds both."""
    log = tmp_path / "calls"
    args = {"log": str(log)}
    gm.apply(numbers, tmp_path / "out", fn=functions.counted, args=args, keep=["id"])
    log.unlink()
    pq.write_table(pa.table({"id": [2000, 2001], "x": [1.0, 2.0], "day": ["a", "b"]}), Path(numbers) / "9.parquet")
    with pytest.raises(gm.PlanChanged, match="--append"):
        gm.apply(numbers, tmp_path / "out", fn=functions.counted, args=args, keep=["id"])
    report = gm.apply(numbers, tmp_path / "out", fn=functions.counted, args=args, keep=["id"], append=True)
    assert log.read_text().split() == ["2000", "2001"]
    assert (report.rows_in, report.rows_ok) == (1002, 1002)
    assert report.read().to_table()["id"].to_pylist()[-3:] == [999, 2000, 2001]
    again = gm.apply(numbers, tmp_path / "out", fn=functions.counted, args=args, keep=["id"], append=True)
    assert again.state == "nothing to do"


def test_errors_are_of_all_dead_rows_after_append_and_retry(numbers: str, tmp_path: Path) -> None:
    """Errors by kind add up to the dead rows: of both files after an append, of those still dead after a retry."""

    def job(*bad: int) -> gm.Job:
        model, sink = gm.model(functions.picky, bad=bad), gm.sink(str(tmp_path / "out"), keep=["id"])
        return gm.Job(numbers, model, sink, workers=0)

    first = job(3, 500, 2001).run()
    assert (first.rows_dead, first.errors) == (2, {"ValueError": 2})
    pq.write_table(pa.table({"id": [2000, 2001], "x": [1.0, 2.0], "day": ["a", "b"]}), Path(numbers) / "9.parquet")
    added = job(3, 500, 2001).run(append=True)
    assert (added.rows_dead, added.errors) == (3, {"ValueError": 3})
    assert job(3, 500, 2001).run().errors == {"ValueError": 3}
    now = gm.status(str(tmp_path / "out"))
    assert now["published"]["errors"] == {"ValueError": 3} and now["shards_total"] == first.shards + 1
    still = retry_dead(job(2001).spec, accept_code_change=True)
    assert (still.rows_dead, still.errors) == (1, {"ValueError": 1})
    assert gm.status(str(tmp_path / "out"))["published"]["errors"] == {"ValueError": 1}


def test_one_bad_row_alone_is_a_dead_letter(numbers: str, tmp_path: Path) -> None:
    """Rows that raise are dead letters with identity, payload and error; all others are scored."""
    bad = [3, 500, 999]
    report = gm.apply(numbers, tmp_path / "out", fn=functions.picky, args={"bad": bad}, keep=["id"])
    assert (report.rows_ok, report.rows_dead) == (997, 3)
    letters = report.dead().to_pylist()
    assert sorted(json.loads(x["payload"])["id"] for x in letters) == bad
    assert {x["error"] for x in letters} == {"ValueError"}
    assert all("row " in x["message"] and "picky" in x["traceback"] for x in letters)
    assert sorted(set(range(1000)) - set(by_id(report.read().to_table()))) == bad


def test_dead_letters_are_scored_again_after_a_fix(numbers: str, tmp_path: Path) -> None:
    """retry-dead with changed code needs to be told so, then scores the dead rows alone, as a new generation."""

    job = gm.Job(numbers, gm.model(functions.picky, bad=[3, 500]), gm.sink(str(tmp_path / "out"), keep=["id"]))
    assert job.run().rows_dead == 2
    fixed = gm.Job(numbers, gm.model(functions.mended, bad=[3, 500]), gm.sink(str(tmp_path / "out"), keep=["id"]))
    with pytest.raises(gm.PlanChanged, match="accept-code-change"):
        retry_dead(fixed.spec)
    report = retry_dead(fixed.spec, accept_code_change=True)
    assert (report.rows_in, report.rows_ok, report.rows_dead) == (1000, 1000, 0)
    assert sorted(by_id(report.read().to_table())) == list(range(1000))
    assert gm.verify(str(tmp_path / "out")).ok
    assert fixed.run().state == "nothing to do"


def test_a_row_that_is_mended_in_its_file(tmp_path: Path) -> None:
    """retry-dead cannot know it again; an update, which is named, scores it."""
    path = tmp_path / "rows.csv"

    def job(**more: Any) -> gm.Job:
        model, sink = gm.model(functions.picky, bad=[2]), gm.sink(str(tmp_path / "out"), keep=["id"])
        return gm.Job(str(path), model, sink, workers=0, **more)

    path.write_text("id,x\n1,1.0\n2,2.0\n")
    assert job().run().rows_dead == 1
    path.write_text("id,x\n1,1.0\n3,2.0\n")
    with pytest.raises(
        gm.PlanChanged, match=r"put it back.* --restart .*, or run the job with --update \(update=True\)"
    ):
        retry_dead(job().spec)
    assert job(update=True).run().rows_dead == 0


def test_a_file_that_cannot_be_opened_is_named_in_its_dead_letter(tmp_path: Path) -> None:
    """Not by where its bytes were in memory, which differs from row to row."""
    (tmp_path / "photos").mkdir()
    for name in ("a.png", "b.png"):
        (tmp_path / "photos" / name).write_bytes(b"none")
    sink = gm.sink(str(tmp_path / "out"), keep=["path"])
    report = gm.Job(
        str(tmp_path / "photos"), functions.opened, sink, workers=0, gates={"min_ok": 0, "allow_empty": True}
    ).run()
    messages = report.dead().column("message").to_pylist()
    assert sorted(messages) == [
        f"cannot identify {str(tmp_path / 'photos' / n)!r} of <object object>" for n in ("a.png", "b.png")
    ]
    assert "object at 0x" not in "".join(report.dead().column("traceback").to_pylist())


def test_rows_that_fail_without_a_sink_are_told(numbers: str) -> None:
    """A table has no place for dead letters: a warning says how many there are, and why."""
    with pytest.warns(UserWarning, match=r"2 of 1000 rows could not be scored.*ValueError: 2.*row 3 is bad"):
        table = gm.apply(numbers, fn=functions.picky, args={"bad": [3, 500]}, workers=0)
    assert table.num_rows == 998
    with pytest.raises(gm.GateFailed, match=r"could not be scored.*row 0 is bad; .*gates="):
        gm.apply(numbers, fn=functions.picky, args={"bad": list(range(0, 1000, 5))}, workers=0, gates={"min_ok": 0.9})


def test_a_word_that_fails_is_retried_without_its_neighbours(tmp_path: Path) -> None:
    """After flat_map, only the dead copies are scored again; counts of source and derived rows both add up."""

    texts = ["one two three", "", "four bad five", "bad"]
    pq.write_table(pa.table({"text": texts}), tmp_path / "in.parquet")
    sink = gm.sink(str(tmp_path / "out"), keep=["word"])
    model = gm.model(functions.picky_words, bad="bad")
    half = {"min_ok": 0.5}
    report = gm.Job(str(tmp_path / "in.parquet"), model, sink, steps=[gm.flat_map(functions.split)], gates=half).run()
    assert (report.rows_in, report.rows_ok, report.rows_dead) == (4, 5, 2)
    assert (report.counts.expanded, report.counts.derived) == (4, 7)
    fixed = gm.Job(str(tmp_path / "in.parquet"), gm.model(functions.picky_words, bad="none"), sink,
                   steps=[gm.flat_map(functions.split)])  # fmt: skip
    report = retry_dead(fixed.spec, accept_code_change=True)
    assert (report.rows_in, report.rows_ok, report.rows_dead) == (4, 7, 0)
    assert sorted(report.read().to_table()["word"].to_pylist()) == sorted(" ".join(texts).split())


def test_steps_and_post_steps(numbers: str, tmp_path: Path) -> None:
    """Filters, batch steps that say which rows they kept, and post steps; filtered rows are counted."""
    report = gm.Job(
        numbers,
        functions.double,
        gm.sink(str(tmp_path / "out"), keep=["id", "x"]),
        steps=[gm.filter("id < 900"), functions.every_third, functions.plus_one],
        post=[functions.plus_one],
        shard_rows=100,
    ).run()
    table = report.read().to_table()
    assert (report.rows_in, report.rows_ok, report.rows_filtered) == (1000, table.num_rows, 1000 - table.num_rows)
    assert all(i < 900 for i in table["id"].to_pylist())
    assert np.allclose(table["y"].to_numpy(), table["x"].to_numpy() * 2 + 1)


@pytest.mark.parametrize("condition", ["nocol > 1", "day > 1 and", "length(x) > 1"])
def test_a_filter_that_cannot_hold_is_refused_when_planning(numbers: str, tmp_path: Path, condition: str) -> None:
    """As `where`: also after other filters, and not after a step that may bring the column."""
    filters = [gm.filter("id < 900"), gm.filter(condition)]
    job = gm.Job(numbers, functions.double, str(tmp_path / "out"), steps=filters, workers=0)
    for refused in (job.run, job.plan):
        with pytest.raises(gm.BadJob, match=re.escape(condition)):
            refused()
    assert not (tmp_path / "out").exists()
    gm.Job(numbers, functions.double, str(tmp_path / "out"), steps=[functions.plus_one, *filters], workers=0).plan()


@pytest.mark.parametrize(("key", "steps"), [("where", []), ("filter", [gm.filter("idd < 900")])])
def test_a_condition_is_told_by_its_key(key: str, steps: list, numbers: str, tmp_path: Path) -> None:
    """With what there is instead of a column that there is not."""
    source = gm.source(numbers, where="idd < 900" if key == "where" else None)
    with pytest.raises(gm.BadJob, match=rf"{key}: condition 'idd < 900': there is no column 'idd'; .*mean 'id'\?$"):
        gm.Job(source, functions.double, str(tmp_path / "out"), steps=steps, workers=0).run()


def test_a_step_that_drops_rows_silently_stops_the_job(numbers: str, tmp_path: Path) -> None:
    """A changed row count is an error that names the step and both counts, never a shorter result."""
    with pytest.raises(gm.BadOutput, match=r"drops was given \d+ rows and returned \d+"):
        gm.Job(numbers, functions.double, str(tmp_path / "out"), steps=[functions.drops]).run()
    with pytest.raises(gm.BadOutput, match=r"short.*\d+ rows.*\d+"):
        gm.apply(numbers, tmp_path / "out2", fn=functions.short)
    assert not list(tmp_path.glob("out*/*.parquet"))


def test_a_class_is_built_once_a_worker(numbers: str, tmp_path: Path) -> None:
    """Each worker builds the class once, however many shards it scores."""
    log = tmp_path / "built"
    gm.apply(
        numbers, tmp_path / "out", fn=functions.Scorer, args={"factor": 3.0, "log": str(log)}, shard_rows=50, workers=2
    )
    built = log.read_text().split()
    assert len(built) == len(set(built)) <= 2


def test_an_instance_is_refused(numbers: str, tmp_path: Path) -> None:
    """Passing an instance is an error that shows the line to write."""
    with pytest.raises(gm.BadModel, match=r"gm\.model\(Scorer"):
        gm.apply(numbers, tmp_path / "out", fn=functions.Scorer(2.0))


def test_row_ids_are_stable_and_unique(numbers: str, tmp_path: Path) -> None:
    """The same row has the same id whatever the shards; ids differ between rows and between copies."""
    ids = []
    for run, rows in enumerate((64, 333)):
        sink = gm.sink(str(tmp_path / f"out{run}"), keep=["id"], row_id="rid")
        table = gm.Job(numbers, functions.double, sink, shard_rows=rows).run().read().to_table()
        ids.append(dict(zip(table["id"].to_pylist(), table["rid"].to_pylist(), strict=True)))
    assert ids[0] == ids[1]
    assert len(set(ids[0].values())) == 1000


def test_rows_of_csv_with_line_breaks_in_quotes(tmp_path: Path) -> None:
    """A CSV file is cut into shards between records, never inside a quoted text, plain and compressed alike."""
    import csv
    import gzip

    texts = [f'line {i}\nwith a "quote", a comma\r\nand {"x" * (i % 500)}' for i in range(4000)]
    with open(tmp_path / "in.csv", "w", newline="") as out:
        csv.writer(out).writerows([["id", "word"], *enumerate(texts)])
    (tmp_path / "in.csv.gz").write_bytes(gzip.compress((tmp_path / "in.csv").read_bytes()))
    for name in ("in.csv", "in.csv.gz"):
        report = gm.apply(
            tmp_path / name, tmp_path / f"{name}-out", fn=functions.word_length, keep=["id", "word"], shard_rows=300
        )
        table = report.read().to_table()
        assert report.shards > 5
        assert table["id"].to_pylist() == list(range(4000))
        assert table["word"].to_pylist() == texts
        assert table["letters"].to_pylist() == [len(t) for t in texts]


def test_model_version_names_the_code_that_scored_a_row(numbers: str, tmp_path: Path) -> None:
    """The column holds one digest, the same for the same function and another for other arguments."""
    found = []
    for run, factor in enumerate((2.0, 2.0, 3.0)):
        sink = gm.sink(str(tmp_path / f"out{run}"), keep=["id"], model_version="version")
        table = gm.Job(numbers, gm.model(functions.Scorer, factor=factor), sink).run().read().to_table()
        (version,) = set(table["version"].to_pylist())
        found.append(version)
    assert found[0] == found[1] != found[2]
    assert len(found[0]) == 64


def test_a_name_that_would_stand_twice_is_refused(numbers: str, tmp_path: Path) -> None:
    """A result column with the name of a kept one is exit 2, and nothing is published."""
    with pytest.raises(gm.BadJob, match="'x' would appear twice"):
        gm.Job(numbers, gm.model(functions.double, output="x"), gm.sink(str(tmp_path / "out"), keep=["x"])).run()
    with pytest.raises(gm.BadJob, match="'id' would appear twice"):
        gm.Job(numbers, functions.double, gm.sink(str(tmp_path / "out2"), keep=["id"], row_id="id")).run()
    with pytest.raises(
        gm.BadJob, match=r"keep names column 'y', which double returns, and which is written anyway: leave"
    ):
        model = gm.model(functions.double, returns={"y": "float64"})
        gm.Job(numbers, model, gm.sink(str(tmp_path / "out2"), keep=["id", "y"])).run()
    for name in ("row_id", "model_version"):
        with pytest.raises(gm.BadJob, match=f"{name} names column 'y', which double returns"):
            gm.Job(numbers, functions.double, gm.sink(str(tmp_path / "out3"), **{name: "y"})).run()


@pytest.mark.parametrize(
    ("source", "sink", "says"),
    [
        ({}, {"row_id": "r", "key": ["nope"]}, "key names column 'nope', which the source does not have"),
        ({}, {"keep": ["nope"]}, "keep names column 'nope', which the source does not have.*what the model returns is"),
        ({"columns": ["idd"]}, {}, "columns= names column 'idd', which the source does not have.*did you mean 'id'"),
        ({"columns": ["x"]}, {"keep": ["id"]}, "keep names column 'id', which the source does not have: it has x"),
        ({}, {"merge": True, "partition_by": ["day"]}, "merge and partition_by"),
        ({}, {"merge": True, "files": 2}, "merge, which is one file, and files=2"),
        ({}, {"files": 0}, "files is 0"),
    ],
)
def test_what_a_sink_cannot_have_is_refused_at_once(
    numbers: str, tmp_path: Path, source: dict[str, Any], sink: dict[str, Any], says: str
) -> None:
    """Before any worker starts: no sink is made."""
    with pytest.raises(gm.BadJob, match=says):
        gm.Job(gm.source(numbers, **source), functions.double, gm.sink(str(tmp_path / "out"), **sink)).run()
    assert not (tmp_path / "out").exists()


def test_a_key_that_steps_take_away_is_refused(numbers: str, tmp_path: Path) -> None:
    """Only the first rows tell; they say which columns there are."""
    sink = gm.sink(str(tmp_path / "out"), row_id="r", key=["nope"])
    with pytest.raises(gm.BadJob, match="key names column 'nope': the rows have"):
        gm.Job(numbers, functions.double, sink, steps=[gm.step(functions.plus_one)], workers=0).run()


@pytest.mark.parametrize("within", ["out", "deeper/out"])
def test_a_sink_inside_its_source_is_refused(numbers: str, within: str) -> None:
    """It would be read the next time; below a name that sources leave out it is not."""
    with pytest.raises(gm.BadJob, match="is inside source"):
        gm.apply(numbers, Path(numbers) / within, fn=functions.double, workers=0)
    with pytest.raises(gm.BadJob, match="is inside source"):
        gm.apply(f"{numbers}/**/*.parquet", f"file://{numbers}/{within}", fn=functions.double, workers=0)
    with pytest.raises(gm.BadSource, match=r"\*\*/\*.csv"):  # which no part of the result would match
        gm.apply(f"{numbers}/**/*.csv", Path(numbers) / within, fn=functions.double, workers=0)
    assert gm.apply(numbers, Path(numbers) / "_out", fn=functions.double, workers=0).rows_ok == 1000
    assert gm.apply(numbers, Path(numbers) / "_out", fn=functions.double, workers=0).state == "nothing to do"


@pytest.mark.parametrize(
    ("pattern", "sink", "read"),
    [
        ("*/*.parquet", {}, True),
        ("*", {"format": "jsonl"}, True),
        ("*/[0-9p]*", {}, True),
        ("[a-z]*/*.parquet", {"merge": True}, True),
        ("*/*.parquet", {"format": "jsonl"}, False),
        ("day*/*.parquet", {}, False),
        ("**/day*/*.parquet", {}, False),
        ("*/[0-9p]*", {"merge": True}, False),
        ("*/*.parquet", {"partition_by": ["day"]}, False),
        ("*/*/*.parquet", {"partition_by": ["day"]}, True),
        ("*/*/merged*.parquet", {"partition_by": ["day"]}, True),
        ("*/merged-*.parquet", {"files": 2}, True),
    ],
)
def test_a_sink_that_a_pattern_finds_is_refused(
    numbers: str, tmp_path: Path, pattern: str, sink: dict[str, Any], read: bool
) -> None:
    """Beside the day folders that it names as well, on a disk and in a store; where it finds no part of the result the
    job runs, again and again."""
    deep = pattern.startswith("*/*/")
    day = tmp_path / "data" / "day0" / ("x" if deep else "")
    day.parent.mkdir(parents=True)
    shutil.copytree(numbers, day)
    out = gm.sink(str(tmp_path / "data" / "scored"), keep=["id", "day"], **sink)
    job = gm.Job(f"{tmp_path}/data/{pattern}", functions.double, out, workers=0)
    if not read:
        assert [job.run().rows_ok, job.run(append=True).state] == [1000, "nothing to do"]
        return
    with pytest.raises(gm.BadJob, match="is inside source"):
        job.run()
    with pytest.raises(gm.BadJob, match="is inside source"):
        resolve(gm.Job(f"s3://box/data/{pattern}", functions.double, gm.sink("s3://box/data/scored", **sink)).spec)


def test_where_limit_and_sample(numbers: str, tmp_path: Path) -> None:
    """limit is the first N rows for which where holds; sample draws N of them, the same ones for a seed."""
    table = gm.apply(numbers, fn=functions.double, keep=["id"], where="id % 2 = 1", limit=5)
    assert table["id"].to_pylist() == [1, 3, 5, 7, 9]
    first, again, other = (
        gm.apply(numbers, fn=functions.double, keep=["id"], sample=20, seed=s)["id"].to_pylist() for s in (1, 1, 2)
    )
    assert len(set(first)) == 20
    assert first == again != other


def test_a_sample_of_text_has_shards_like_any_source(tmp_path: Path) -> None:
    """Rows that are drawn among lines of text, whose ends no plan knows, are counted as rows, and not by bytes."""
    (tmp_path / "rows.csv").write_text("id,x\n" + "".join(f"{i},{2 * i}\n" for i in range(20_000)))
    job = gm.Job(
        gm.source(str(tmp_path / "rows.csv"), sample=3000), functions.double, gm.sink(str(tmp_path / "out"), keep="id"),
        workers=0, shard_rows=500,
    )  # fmt: skip
    assert job.plan().rows == 3000
    report = job.run()
    assert report.rows_ok == 3000 and 6 <= report.shards <= 12


@pytest.mark.parametrize("kind", ["list", "arrow", "pandas", "polars", "dict"])
def test_sources_in_memory(kind: str) -> None:
    """Lists, tables and data frames go in, a table in the same order comes out."""
    import pandas as pd
    import polars as pl

    rows = {"id": list(range(50)), "x": [i / 2 for i in range(50)]}
    data = {
        "list": [dict(zip(rows, values, strict=True)) for values in zip(*rows.values(), strict=True)],
        "arrow": pa.table(rows),
        "pandas": pd.DataFrame(rows),
        "polars": pl.DataFrame(rows),
        "dict": rows,
    }[kind]
    table = gm.apply(data, fn=functions.double, keep=["id"])
    assert table["id"].to_pylist() == rows["id"]
    assert table["y"].to_pylist() == [float(i) for i in range(50)]


FORKS = """
import os, sys
import gristmill as gm

def same(batch):
    return {"y": batch["id"]}

if __name__ == "__main__":
    rows, child = 0, None
    for table in gm.Job(sys.argv[1], same, workers=1, shard_rows=20).stream():
        rows += table.num_rows
        if child is None:
            child = os.fork()
            if not child and sys.argv[2] == "leaves":
                sys.exit(0)
            if child:
                os.waitpid(child, 0)
    print(rows)
"""


@pytest.mark.few(1)
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.parametrize("how", ["leaves", "stays"])
def test_a_fork_in_a_stream_leaves_it_alone(numbers: str, tmp_path: Path, how: str) -> None:
    """A process forked in the loop ends no worker and takes no file away, whether it ends or loops on."""
    script = tmp_path / "forks.py"
    script.write_text(FORKS)
    done = subprocess.run([sys.executable, str(script), numbers, how], capture_output=True, text=True, timeout=60)
    assert done.stdout == "1000\n", done.stderr
    assert ("cannot go on in a fork of it" in done.stderr) == (how == "stays")


def test_stream_gives_tables_in_order_and_can_be_left(numbers: str) -> None:
    """Finished tables come in source order; leaving early stops the workers."""
    job = gm.Job(numbers, functions.double, gm.sink("unused", keep=["id"]), shard_rows=50)
    ids = [i for table in job.stream() for i in table["id"].to_pylist()]
    assert ids == list(range(1000))
    first = list(itertools.islice(job.stream(), 2))
    assert [i for t in first for i in t["id"].to_pylist()] == list(range(sum(t.num_rows for t in first)))
    assert not Path("unused").exists()


def test_a_gate_of_a_stream_names_no_folder_that_is_gone(numbers: str) -> None:
    """What its error says to look with is a run, which keeps dead letters."""
    model = gm.model(functions.picky, bad=list(range(0, 1000, 5)))
    job = gm.Job(numbers, model, gates={"min_ok": 0.9}, workers=0)
    with pytest.raises(gm.GateFailed, match=r"job.run\(\) keeps them, so that you can look at them") as told:
        list(job.stream())
    assert "gristmill-stream-" not in str(told.value)


@pytest.mark.parametrize("how", ["another thread", "side by side", "left"])
def test_a_stream_leaves_signals_to_the_program(numbers: str, how: str) -> None:
    """Between its tables they are the program's, whoever asks for the next one, and however many streams there are."""
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    try:
        own = signal.getsignal(signal.SIGTERM)
        first, second = (gm.Job(numbers, functions.double, shard_rows=50).stream() for _ in range(2))
        tables = [next(first), *([next(second)] if how == "side by side" else [])]
        assert signal.getsignal(signal.SIGTERM) is own
        os.kill(os.getpid(), signal.SIGTERM)
        assert heard == [signal.SIGTERM]
        if how == "another thread":
            with ThreadPoolExecutor(1) as pool:
                tables += pool.submit(list, first).result()
        elif how == "side by side":
            for pair in zip(first, second, strict=True):
                tables += pair
        first.close()
        second.close()
        assert signal.getsignal(signal.SIGTERM) is own
        wanted = {"another thread": 1000, "side by side": 2000, "left": 50}[how]
        assert sum(t.num_rows for t in tables) >= wanted
    finally:
        signal.signal(signal.SIGTERM, before)


def test_preview_leaves_nothing(numbers: str, tmp_path: Path) -> None:
    """A preview shows the first rows scored and leaves no trace in the sink."""
    job = gm.Job(numbers, functions.double, gm.sink(str(tmp_path / "out"), keep=["id"]))
    assert job.preview(3)["id"].to_pylist() == [0, 1, 2]
    assert not (tmp_path / "out").exists()


@pytest.mark.long
def test_a_preview_looks_past_a_filter(numbers: str, tmp_path: Path) -> None:
    """A model that no row of the first reaches would not be tried; where none does at all, it is said."""
    steps = [gm.filter(lambda batch: batch["id"] >= 150)]
    job = gm.Job(gm.source(numbers), _fails, gm.sink(tmp_path / "out", keep=["id"]), steps=steps, workers=0)
    with pytest.raises(gm.RunFailed, match="no such column"):
        job.preview(3)
    given = tmp_path / "given"
    steps.append(gm.flat_map(lambda row: [{"copy": n} for n in range(5)]))
    good = gm.Job(gm.source(numbers), gm.model(_counts, path=str(given)), steps=steps, workers=0)
    assert good.preview(3).num_rows == 3
    assert given.read_text() == "xxx"  # no more rows reach the model than were asked for
    none = gm.Job(gm.source(numbers), _fails, steps=[gm.filter(lambda batch: batch["id"] < 0)], workers=0)
    with pytest.warns(gm.GristmillWarning, match="left out all 1,000 rows that were read: the model was not called"):
        assert none.preview(3).num_rows == 0


def _counts(batch: dict[str, Any], path: str) -> dict[str, Any]:
    with open(path, "a") as file:
        file.write("x" * len(batch["x"]))
    return {"y": batch["x"]}


def _fails(batch: dict[str, Any]) -> Any:
    return batch["no such column"]


@pytest.mark.parametrize("verb", ["preview", "run", "stream", "apply", "retry_dead"])
def test_prints_and_notes_reach_stderr_from_python(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Wherever stderr goes: what the function prints, warns of and logs, and what the run itself notes; no progress."""

    def shows(batch: Any) -> dict[str, Any]:
        print("given", sorted(batch), flush=True)
        print("to stderr", file=sys.stderr, flush=True)
        logging.warning("logged")
        warnings.warn("warned", stacklevel=1)
        if verb == "retry_dead" and 3 in batch["n"].tolist():
            raise ValueError("three")
        return {"m": np.arange(len(batch["n"]))}

    rows = pa.table({"n": pa.array([1, None, 3])})
    job = gm.Job(rows, shows, str(tmp_path / "out"), workers=1)
    if verb == "retry_dead":
        job.run()
        capsys.readouterr()
    if verb == "apply":
        gm.apply(rows, fn=shows, workers=1)
    else:
        {"preview": job.preview, "run": job.run, "stream": lambda: list(job.stream()),
         "retry_dead": lambda: gm.retry_dead(job)}[verb]()  # fmt: skip
    found = capsys.readouterr()
    said = ["given ['n']", "to stderr", "WARNING:root:logged", "UserWarning: warned", "n has 1 null"]
    assert [text for text in said if text not in found.err] == [] == found.out.splitlines(), found
    assert not {"planning", "loading", "publishing"} & set(found.err.splitlines())


def test_reading_after_a_gate_that_did_not_hold_names_status(numbers: str, tmp_path: Path) -> None:
    """Running again may not help: what stopped the run is said there."""

    def fails(batch: Any) -> Any:
        if (batch["id"] < 5).any():
            raise ValueError("too small")
        return {"y": batch["x"]}

    with pytest.raises(gm.GateFailed):
        gm.apply(numbers, tmp_path / "out", fn=fails, workers=0, where="id < 10")
    with pytest.raises(gm.BadSource, match=r"unfinished run here.*`gristmill status .*out` shows how far it got"):
        gm.read(tmp_path / "out")
    assert gm.status(tmp_path / "out")["phase"] == "gate failed"


def test_partitions_and_verify(numbers: str, tmp_path: Path) -> None:
    """Hive folders hold their rows; verify sees a flipped bit and a lost file."""
    out = tmp_path / "out"
    sink = gm.sink(str(out), keep=["id", "day"], partition_by=["day"])
    report = gm.Job(numbers, functions.double, sink, shard_rows=300).run()
    table = report.read().to_table()
    assert sorted(table["id"].to_pylist()) == list(range(1000))
    assert all(d == f"d{i % 3}" for i, d in zip(table["id"].to_pylist(), table["day"].to_pylist(), strict=True))
    assert {p.parent.name for p in out.rglob("merged-*.parquet")} == {"day=d0", "day=d1", "day=d2"}
    assert gm.verify(str(out)).ok
    parts = sorted(out.rglob("merged-*.parquet"))
    data = bytearray(parts[0].read_bytes())
    data[len(data) // 2] ^= 1
    parts[0].chmod(0o644)
    parts[0].write_bytes(data)
    parts[1].unlink()
    verdict = gm.verify(str(out))
    assert not verdict.ok
    assert len(verdict.lines) == 2
    assert any("missing" in line for line in verdict.lines)
    assert any("changed" in line for line in verdict.lines)


def test_merge_gives_one_file_in_plan_order(numbers: str, tmp_path: Path) -> None:
    """merge=True publishes one file with all rows in the order of the source."""
    report = gm.Job(
        numbers, functions.double, gm.sink(str(tmp_path / "out"), keep=["id"], merge=True), shard_rows=100
    ).run()
    files = list((tmp_path / "out").glob("*.parquet"))
    assert len(files) == 1
    assert pq.read_table(files[0])["id"].to_pylist() == list(range(1000))
    assert report.read().to_table().num_rows == 1000


def test_merge_joins_compressed_json_lines(numbers: str, tmp_path: Path) -> None:
    """A merged JSONL sink is one readable file, compressed parts included."""
    import gzip

    sink = gm.sink(str(tmp_path / "out"), keep=["id"], merge=True, format="jsonl", options={"compression": "gz"})
    report = gm.Job(numbers, functions.double, sink, shard_rows=100).run()
    (file,) = (tmp_path / "out").glob("*.jsonl.gz")
    lines = gzip.decompress(file.read_bytes()).splitlines()
    assert [json.loads(line)["id"] for line in lines] == list(range(1000))
    assert report.read().to_table()["id"].to_pylist() == list(range(1000))


def test_an_empty_result_fails_its_gate(tmp_path: Path) -> None:
    """No rows at all is exit 3 unless allow_empty says that it is meant."""
    pq.write_table(pa.table({"x": pa.array([], pa.float64())}), tmp_path / "in.parquet")
    with pytest.raises(gm.GateFailed, match="no rows") as failed:
        gm.apply(tmp_path / "in.parquet", tmp_path / "out", fn=functions.double)
    assert failed.value.exit_code == 3
    report = gm.apply(tmp_path / "in.parquet", tmp_path / "out", fn=functions.double, gates={"allow_empty": True})
    assert report.rows_in == 0


def test_min_ok_stops_the_run_and_accept_publishes(numbers: str, tmp_path: Path) -> None:
    """A gate that cannot hold stops the run with exit 3; --accept publishes after a person has looked."""
    job = gm.Job(
        numbers,
        gm.model(functions.picky, bad=list(range(0, 1000, 40))),
        gm.sink(str(tmp_path / "out"), keep=["id"]),
        gates={"min_ok": 0.99},
    )
    with pytest.raises(gm.GateFailed, match=r"min_ok 0\.99") as failed:
        job.run()
    assert failed.value.report is not None
    assert not list((tmp_path / "out").glob("*.parquet"))
    assert job.run(accept=True).rows_dead == 25


def test_what_is_accepted_after_the_code_was_edited_is_said(numbers: str, tmp_path: Path) -> None:
    """It is the answers of the code before, which nobody can know who does not remember the refusal."""
    rows: dict[str, Any] = {"gates": {"min_ok": 0.9}, "audit": functions.refuses, "workers": 0}
    out, bad = str(tmp_path / "out"), list(range(0, 1000, 40))
    with pytest.raises(gm.GateFailed):
        gm.Job(numbers, gm.model(functions.picky, bad=bad), out, **rows).run()
    edited = gm.Job(numbers, gm.model(functions.mended, bad=bad), out, **rows)
    with pytest.warns(gm.GristmillWarning, match=r"(?s)accepted was scored by the code as it was, not as it is.*picky"):
        report = edited.run(accept=True)
    assert any("scored by the code as it was" in note for note in report.notes)


def test_dead_letters_of_an_unpublished_run_can_be_read(numbers: str, tmp_path: Path) -> None:
    """Those of committed shards, until something is published: then they are that result's, whatever failed since."""
    out = str(tmp_path / "out")

    def job(*bad: int) -> gm.Job:
        model = gm.model(functions.picky, bad=bad)
        return gm.Job(numbers, model, gm.sink(out, keep=["id"]), gates={"min_ok": 0.999}, shard_rows=100, workers=0)

    with pytest.raises(gm.GateFailed, match=f"gristmill dead {out} shows them") as failed:
        job(3, 950).run()
    for letters in (gm.dead(out), failed.value.report.dead()):
        assert [json.loads(x)["id"] for x in letters["payload"].to_pylist()] == [3, 950]
    assert gm.status(out)["phase"] == "gate failed" and "min_ok 0.999" in gm.status(out)["gate"]
    job(3, 950).run(accept=True)
    with pytest.raises(gm.GateFailed, match=f"gristmill dead {out} shows them") as failed:
        job(7, 8).run(restart=True)
    assert [json.loads(x)["id"] for x in failed.value.report.dead()["payload"].to_pylist()] == [7, 8]
    assert [json.loads(x)["id"] for x in gm.dead(out)["payload"].to_pylist()] == [3, 950]


@pytest.mark.parametrize("answer", ["np.bool_", "pyarrow", "0", "async", "array"])
def test_an_audit_refuses_with_whatever_is_false(numbers: str, tmp_path: Path, answer: str) -> None:
    """What comparing a column's mean gives is numpy's or pyarrow's false; a coroutine and an array are no answer."""

    async def later(_: object) -> None: ...

    audits: dict[str, Any] = {
        "np.bool_": lambda staged: staged.dataset().to_table()["y"].to_numpy().mean() < 0,
        "pyarrow": lambda _: pa.scalar(False),
        "0": lambda _: 0,
        "async": later,
        "array": lambda _: np.array([True, True]),
    }
    with pytest.raises(gm.GateFailed, match="refused the result"):
        gm.Job(numbers, functions.double, str(tmp_path / "out"), audit=(audits[answer],)).run()
    passed = (lambda _: None, lambda _: np.True_, lambda _: pa.scalar(True), lambda _: {"rows": 3})
    assert gm.Job(numbers, functions.double, str(tmp_path / "new"), audit=passed).run().rows_ok == 1000


def test_an_audit_can_refuse(numbers: str, tmp_path: Path) -> None:
    """An audit hook sees the staged parts before they are published, and can refuse them."""
    seen = []

    def too_small(staged: object) -> bool:
        seen.append(staged.dataset().count_rows())  # type: ignore[attr-defined]
        return False

    with pytest.raises(gm.GateFailed, match="too_small"):
        gm.Job(numbers, functions.double, str(tmp_path / "out"), audit=(too_small,)).run()
    assert seen == [1000]
    assert not list((tmp_path / "out").glob("*.parquet"))


def test_a_refused_result_is_published_with_accept(numbers: str, tmp_path: Path) -> None:
    """The refusal names the way, which holds for every audit and for a retry, and what was accepted is said."""

    def doubts(staged: Any) -> None:
        raise ValueError("never seen the like")

    flag, out = tmp_path / "fixed", str(tmp_path / "out")

    def some(batch: dict[str, Any]) -> dict[str, Any]:
        if 3 in batch["id"] and not flag.exists():
            raise ValueError("three")
        return {"y": batch["id"]}

    def job(*audits: Any) -> gm.Job:
        return gm.Job(numbers, some, out, workers=0, audit=audits)

    with pytest.raises(gm.GateFailed, match=r"refuses refused the result; nothing .*same job again with --accept"):
        job(functions.refuses, doubts).run()
    report = job(functions.refuses, doubts).run(accept=True)
    assert (report.rows_ok, gm.read(out).count_rows(), gm.verify(out).ok) == (999, 999, True)
    assert [n for n in report.notes if "refused" in n] == [
        "audit refuses refused the result, which was accepted",
        f"audit {doubts.__qualname__} refused the result: ValueError: never seen the like, which was accepted",
    ]
    flag.mkdir()
    with pytest.raises(gm.GateFailed, match="refuses refused the result; nothing"):
        retry_dead(job(functions.refuses).spec)
    assert gm.read(out).count_rows() == 999
    assert job(functions.refuses).run(accept=True).rows_ok == gm.read(out).count_rows() == 1000


@pytest.mark.parametrize("form", ["parquet", "jsonl", "npy"])
def test_an_audit_sees_the_whole_result_that_would_be_published(tmp_path: Path, form: str) -> None:
    """After an append and a retry too: old rows and new, keys of folders included, as they are read afterwards."""
    seen: list[Any] = []
    flag, source, out = tmp_path / "fixed", tmp_path / "in", str(tmp_path / "out")
    source.mkdir()

    def some(batch: dict[str, Any]) -> dict[str, Any]:
        if 7 in batch["id"] and not flag.exists():
            raise ValueError("seven")
        return {"v": np.stack([batch["id"], batch["id"]], axis=1).astype(np.float32)}

    def sees(staged: Any) -> None:
        if form == "npy":
            with pytest.raises(gm.BadSource, match=r"numpy.load the files in `paths`"):
                staged.dataset()
            ids = [pq.read_table(p)["id"].to_pylist() for p in staged.ids]
            assert [np.load(p)[:, 0].tolist() for p in staged.paths] == ids
            found = [i for part in ids for i in part]
        else:
            rows = staged.dataset().to_table()
            assert set(rows.column_names) == {"id", "day", "v"} and None not in rows["day"].to_pylist()
            found = rows["id"].to_pylist()
        seen.append((staged.counts.ok, staged.counts.dead + staged.counts.derived_dead, sorted(found)))

    def job() -> gm.Job:
        sink = gm.sink(out, format=form, keep=["id", "day"], partition_by=["day"])
        return gm.Job(str(source), some, sink, workers=0, audit=sees)

    pq.write_table(pa.table({"id": range(10), "day": ["a", "b"] * 5}), source / "a.parquet")
    job().run()
    pq.write_table(pa.table({"id": range(10, 15), "day": ["a", "c", "a", "c", "b"]}), source / "b.parquet")
    job().run(append=True)
    flag.mkdir()
    retry_dead(job().spec)
    lived = [i for i in range(15) if i != 7]
    assert seen == [(9, 1, lived[:9]), (14, 1, lived), (15, 0, list(range(15)))]


def test_answers_that_are_not_as_declared(tmp_path: Path) -> None:
    """Found with the first rows, before anything is committed, the job is refused, as for other names that it has
    wrong; found later, the run has failed.
    """
    pq.write_table(pa.table({"x": range(300)}), tmp_path / "in.parquet")

    def late(batch: Any) -> Any:
        return {"y" if max(batch["x"]) < 200 else "other": batch["x"]}

    for fn, returns, error, code in (
        (functions.double, {"scor": "float64"}, gm.BadJob, 2),
        (late, {"y": "int64"}, gm.BadOutput, 1),
    ):
        made = gm.Job(str(tmp_path / "in.parquet"), gm.model(fn, returns=returns), str(tmp_path / "o"), workers=0)
        with pytest.raises(error, match=r"returned columns .*; returns= declares") as told:
            made.run(restart=True)
        assert told.value.exit_code == code


def test_an_audit_is_one_function_or_several_and_not_for_previews(numbers: str, tmp_path: Path) -> None:
    """What holds for the whole result need not hold for its first rows; what cannot be called is refused at once."""

    def whole(staged: Any) -> bool:
        return bool(staged.counts.ok == 1000)

    job = gm.Job(numbers, functions.double, str(tmp_path / "out"), audit=whole)
    assert job.preview(5).num_rows == 5
    assert job.run().rows_ok == 1000
    with pytest.raises(gm.BadJob, match="which cannot be called"):
        gm.Job(numbers, functions.double, str(tmp_path / "out"), audit=["whole"])


def test_an_audit_is_named_in_a_job_file(numbers: str, tmp_path: Path) -> None:
    """MODULE:NAME, one or several; imported before anything runs, with a clear error; in the schema, and written."""
    from gristmill.jobfile.sections import json_schema
    from gristmill.jobfile.writing import dump

    body = f"source: '{numbers}'\nmodel: {{call: 'functions:double'}}\nsink: '{tmp_path / 'out'}'\n"
    (tmp_path / "job.yaml").write_text(body + "engine: {workers: 0}\naudit: functions:refuses\n")
    job = gm.load_job(str(tmp_path / "job.yaml"))
    with pytest.raises(gm.GateFailed, match="audit refuses refused the result"):
        job.run()
    (tmp_path / "again.yaml").write_text(dump(job.spec))
    assert gm.load_job(str(tmp_path / "again.yaml")).spec == job.spec
    for audit, says in (("functions:refuse", "has no 'refuse'.*refuses"), ("os:sep", "audit: os:sep is a str"),
                        ("functions", "which cannot be called")):  # fmt: skip
        (tmp_path / "job.yaml").write_text(body + f"audit: ['{audit}']\n")
        with pytest.raises(gm.BadJob, match=says):
            gm.load_job(str(tmp_path / "job.yaml")).run()
    (tmp_path / "job.yaml").write_text(body + "engine: {workers: 0}\naudit: [functions:looks, functions:looks]\n")
    assert gm.load_job(str(tmp_path / "job.yaml")).run().rows_ok == 1000  # what it only looked at goes on
    assert {"type": "string"} in json_schema()["properties"]["audit"]["anyOf"]


def test_scripts_without_a_main_guard_and_from_standard_input(numbers: str, tmp_path: Path) -> None:
    """A job written in a script without `if __name__`, or piped to python, runs once and does not respawn."""
    script = f"""
import gristmill as gm
from gristmill.driver.run import retry_dead
print("once")
def twice(batch):
    return {{"y": batch["x"] * 2}}
print(gm.apply({numbers!r}, {str(tmp_path / "out")!r}, fn=twice, keep=["id"]).rows_ok)
"""
    (tmp_path / "script.py").write_text(script)
    for command, given in (([sys.executable, str(tmp_path / "script.py")], None), ([sys.executable, "-"], script)):
        done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout.split() == ["once", "1000"]
        subprocess.run(["rm", "-r", str(tmp_path / "out")], check=True)


@pytest.mark.long
def test_what_a_script_cannot_send_is_named_with_the_ways_out(tmp_path: Path) -> None:
    """A function of a script that refers to what no pickle holds is refused in words; in a module it works."""
    body = "from functools import singledispatch\n@singledispatch\ndef f(b):\n    return {'y': [1] * len(b['x'])}\n"
    asks = "import gristmill as gm\nprint(gm.apply({'x': [1.0, 2.0]}, fn=lambda b: f(b), workers=1)['y'])\n"
    (tmp_path / "own.py").write_text(body)
    for text, says in (
        (body + asks, "BadJob: the job cannot be sent to workers (TypeError: "),
        ("from own import f\n" + asks, ""),
    ):
        (tmp_path / "script.py").write_text(text)
        done = subprocess.run([sys.executable, tmp_path / "script.py"], capture_output=True, text=True, timeout=60)
        assert (done.returncode, says in done.stderr) == (bool(says), True), done.stderr
        assert not says or "put it in a module of its own" in done.stderr


def test_a_sink_that_is_not_shared_with_the_workers_ends_the_run(
    numbers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Receipts that the driver never sees, as in a folder of each machine's own: told, not scored again for ever."""
    monkeypatch.setattr(scoring, "UNSEEN", 1.0)
    monkeypatch.setattr(scoring.Ledger, "of", staticmethod(lambda generation, *_: Ledger(generation)))
    sink = gm.sink(str(tmp_path / "out"), keep=["id"])
    with pytest.raises(gm.RunFailed, match=r"committed, but no receipt of theirs is in .*: the sink is not shared"):
        gm.Job(numbers, lambda batch: {"y": batch["x"]}, sink, workers=1, shard_rows=300).run()
    monkeypatch.undo()
    assert gm.Job(numbers, lambda batch: {"y": batch["x"]}, sink, workers=1, shard_rows=300).run().rows_ok == 1000


def test_import_is_cheap() -> None:
    """`import gristmill` brings in neither numpy nor pyarrow."""
    code = "import sys, gristmill; print([m for m in ('numpy', 'pyarrow', 'pydantic', 'rich') if m in sys.modules])"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )


def heavy(batch: dict) -> dict:
    """What a worker has imported that a function of numbers has no need of."""
    found = sum(name in sys.modules for name in ("sklearn", "scipy", "onnxruntime", "duckdb", "rich"))
    return {"heavy": np.full(len(batch["x"]), found)}


def test_a_worker_imports_what_it_needs(tmp_path: Path) -> None:
    """None of the libraries of other models and readers, or of the terminal, where only numbers go through."""
    pq.write_table(pa.table({"x": np.arange(400.0)}), tmp_path / "in.parquet", row_group_size=50)
    job = gm.Job(
        str(tmp_path / "in.parquet"), heavy, gm.sink(str(tmp_path / "out"), keep=["x"]), workers=1, shard_rows=50
    )
    assert set(job.run().read().to_table()["heavy"].to_pylist()) == {0}


@pytest.mark.few(1)
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_script_s_functions_run_in_processes_that_multiprocessing_starts(
    numbers: str, tmp_path: Path, method: str
) -> None:
    """With workers, which cannot import the script by the name that it has there; and it is the same job as outside."""
    (tmp_path / "nightly.py").write_text(
        "import gristmill as gm, multiprocessing as mp\n"
        "def f(rows): return [{'y': row['x'] * 2} for row in rows]\n"
        "def inc(x): return x + 1\n"
        "def night(_):\n"
        "    job = gm.Job('in', gm.model(f, batch_format='rows'), gm.sink('out', keep=['id']), workers=1)\n"
        "    return job.run().state, sum(gm.map(inc, range(9), spinner=False))\n"
        "if __name__ == '__main__':\n"
        f"    with mp.get_context('{method}').Pool(1) as pool:\n"
        "        print(pool.map(night, [0])[0], night(0))\n"
    )
    done = subprocess.run([sys.executable, "nightly.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.stdout == "('done', 45) ('nothing to do', 45)\n", done.stderr


def test_a_sink_in_its_source_is_refused_wherever_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a temporary folder of a name such as our own have."""
    with tempfile.TemporaryDirectory(prefix="gristmill-") as folder:
        monkeypatch.chdir(folder)
        os.mkdir("in")
        pq.write_table(pa.table({"x": [1, 2]}), "in/a.parquet")
        for sink in ("in/scored.parquet", "in/scored"):
            with pytest.raises(gm.BadJob, match="is inside source in"):
                gm.Job("in", lambda batch: {"y": batch["x"]}, sink, workers=0).run()
        assert gm.Job("in", lambda batch: {"y": batch["x"]}, workers=0).preview(2)
