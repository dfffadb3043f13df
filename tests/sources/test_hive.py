"""Columns that stand in the names of a source's folders."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

import gristmill as gm
from gristmill.errors import BadSource, PlanChanged
from gristmill.sinks.partition import NULL

INF = {"2147483648": 2**31, "-7": -7, "0": 0}


def seen(batch: dict[str, np.ndarray]) -> dict[str, list[str]]:
    """The columns that a function is given, and the type of each."""
    told = ",".join(f"{n}:{batch[n].dtype.kind}" for n in sorted(batch))
    return {"seen": [told] * len(batch["id"])}


def write(folder: Path, name: str, rows: Mapping[str, list[Any]], form: str) -> None:
    """One file of a source."""
    path = folder / f"{name}.{form}"
    path.parent.mkdir(parents=True, exist_ok=True)
    if form == "parquet":
        pq.write_table(pa.table(dict(rows)), path)
    elif form == "csv":
        pd.DataFrame(rows).to_csv(path, index=False)
    else:
        pd.DataFrame(rows).to_json(path, orient="records", lines=True)


def source(root: Path, folders: list[str], form: str = "parquet", each: int = 40) -> str:
    """A folder with a file in each of some folders below it: ids that go on, and x."""
    for n, folder in enumerate(folders):
        ids = list(range(n * each, (n + 1) * each))
        write(root, f"{folder}/f{n}", {"id": ids, "x": [i % 7 for i in ids]}, form)
    return str(root)


def run(uri: Any, sink: Path, fn: Any = seen, **options: Any) -> pa.Table:
    """What a job keeps of a source, in the order of ids."""
    verbs = {"append": options.pop("append", False)}
    into = {n: options.pop(n) for n in ("keep", "evolve", "row_id", "key") if n in options}
    given = {n: options.pop(n) for n in ("where", "columns", "types", "format", "limit", "storage") if n in options}
    uris = uri if isinstance(uri, list) else [str(uri)]
    options = {"workers": 0, **options}
    gm.Job(gm.source(*uris, **given), gm.model(fn), gm.sink(str(sink), **into), **options).run(**verbs)
    return gm.read(str(sink)).to_table().sort_by("id")


@pytest.mark.long
@pytest.mark.parametrize("form", ["parquet", "csv", "jsonl"])
def test_the_columns_are_those_that_pyarrow_gives(tmp_path: Path, form: str) -> None:
    """Values percent-decoded, null under Hive's name; whole numbers where all are, else text; given to the function,
    kept, in conditions, with the columns named in any order, and read back as such.
    """
    days = ["2026-01-01", quote("a/b=c% é", safe=""), NULL, "01"]
    folders = [f"day={d}/k={k}" for d in days for k in ("2147483648", "-7", "0")]
    root = source(tmp_path / "in", folders, form)
    if form == "parquet":
        kinds = pa.schema([("day", pa.string()), ("k", pa.int64())])
        wanted = ds.dataset(root, partitioning=ds.partitioning(kinds, flavor="hive")).to_table().sort_by("id")
    else:
        names = [d for d in ["2026-01-01", "a/b=c% é", None, "01"] for _ in range(120)]
        ids = list(range(480))
        wanted = pa.table({"id": ids, "x": [i % 7 for i in ids], "day": names, "k": [*INF.values()] * 4 * 40})
        wanted = wanted.set_column(3, "k", pa.array(np.tile(np.repeat([*INF.values()], 40), 4)))
    got = run(root, tmp_path / "all", keep=["id", "x", "day", "k"])
    assert got.select(["id", "x", "day", "k"]).equals(wanted.select(["id", "x", "day", "k"]))
    assert set(got["seen"].to_pylist()) == {"day:O,id:i,k:i,x:i"}
    some = run(root, tmp_path / "some", where="day = '01' AND x > 3 AND k < 0", columns=["k", "id"], keep=["k", "id"])
    assert some["id"].to_pylist() == [i for i in range(400, 440) if i % 7 > 3]
    assert set(some["seen"].to_pylist()) == {"id:i,k:i"}
    limited = run(root, tmp_path / "limit", where="day IS NULL AND k = 0", limit=5, keep=["id", "day"], workers=1)
    assert limited["id"].to_pylist() == [320, 321, 322, 323, 324]
    alone = run(root, tmp_path / "alone", fn=whole, columns=["k"], where="k <> 0", keep=["k"], row_id="id")
    assert sorted(alone["k"].to_pylist()) == [-7] * 160 + [2**31] * 160


def whole(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """k is all that there is, and a whole number."""
    if sorted(batch) != ["k"]:
        raise AssertionError(sorted(batch))
    return {"y": batch["k"] * 2}


def test_what_is_given_is_no_column(tmp_path: Path) -> None:
    """The folder that is given, what stands before a glob's wildcards, and files given one by one; a glob counts from
    its wildcard on.
    """
    root = source(tmp_path / "run=9" / "in", ["lang=en/day=1", "lang=de/day=2"])
    files = sorted(str(p) for p in Path(root).rglob("*.parquet"))
    for name, uri, columns in [
        ("folder", f"{root}/lang=en", "day:i,id:i,x:i"),
        ("both", [f"{root}/lang=en", f"{root}/lang=de/"], "day:i,id:i,x:i"),
        ("glob", f"{root}/lang=*/day=1/*.parquet", "day:i,id:i,lang:O,x:i"),
        ("tree", f"{root}/**/*.parquet", "day:i,id:i,lang:O,x:i"),
        ("root", root, "day:i,id:i,lang:O,x:i"),
        ("fixed", f"{root}/lang=en/day=1/*.parquet", "id:i,x:i"),
        ("files", files, "id:i,x:i"),
    ]:
        assert set(run(uri, tmp_path / name, keep=["id"])["seen"].to_pylist()) == {columns}, name


def test_types_are_stable_or_as_told(tmp_path: Path) -> None:
    """One name that is no number written as one makes all text; `types=` overrules, and refuses what does not fit."""
    for n, other in enumerate(["07", "+7", "1e3", "", str(2**63), "-0", "1_0"]):
        root = source(tmp_path / f"in{n}", ["k=1", f"k={other}", f"k={NULL}"], each=2)
        got = run(root, tmp_path / f"out{n}", keep=["id", "k"])
        assert got["k"].type == pa.string()
        assert got["k"].to_pylist() == ["1", "1", other, other, None, None]
    got = run(tmp_path / "in0", tmp_path / "told", keep=["id", "k"], types={"k": "int8"})
    assert (got["k"].type, got["k"].to_pylist()) == (pa.int8(), [1, 1, 7, 7, None, None])
    for form in ("csv", "jsonl"):
        root = source(tmp_path / form, ["day=2026-01-01", "day=2026-02-01"], form)
        got = run(root, tmp_path / f"{form}.out", keep=["id", "day", "x"], types={"day": "date32", "x": "float64"})
        assert got.schema.field("day").type == pa.date32()
        assert got["day"][0].as_py() == datetime.date(2026, 1, 1)
        assert got.schema.field("x").type == pa.float64()
    with pytest.raises(BadSource, match=r"its folder says k=1_0, which is not of type int64.*types=\{'k': 'string'\}"):
        run(tmp_path / "in6", tmp_path / "no", types={"k": "int64"})


def test_a_column_that_the_file_has_too_is_refused_where_it_is_read(tmp_path: Path) -> None:
    """With ways out, which help: other columns can be read, and the folders given one by one. So is one that two
    folders name, and a file beside the folders, which has no such column.
    """
    write(tmp_path, "in/lang=en/a", {"id": [1, 2], "lang": ["de", "fr"]}, "parquet")
    for options in ({}, {"columns": ["id"], "where": "lang = 'en'"}):
        with pytest.raises(BadSource, match=r"column 'lang' is in a folder's name \(lang=en\) and also in the file"):
            run(tmp_path / "in", tmp_path / "no", **options)
    assert run(tmp_path / "in", tmp_path / "one", columns=["id"], keep=["id"])["id"].to_pylist() == [1, 2]
    got = run(tmp_path / "in/lang=en", tmp_path / "two", keep=["id", "lang"])
    assert got["lang"].to_pylist() == ["de", "fr"]
    with pytest.raises(BadSource, match=r"\(a=1\) and also in a=2"):
        run(source(tmp_path / "twice", ["a=1/a=2"]), tmp_path / "no")
    root = source(tmp_path / "mixed", ["k=1", "."])
    with pytest.raises(BadSource, match=r"column 'k' is missing in .*f1.parquet.*--evolve"):
        run(root, tmp_path / "no")
    got = run(root, tmp_path / "evolved", keep=["id", "k"], evolve=True)
    assert got["k"].to_pylist() == [1] * 40 + [None] * 40


def test_a_sink_as_a_source_has_the_types_that_gm_read_gives(tmp_path: Path) -> None:
    """Every type that may name folders, text that looks like numbers too; also where a folder above it is given."""
    columns = {
        "zip": pa.array(["12", "7", None, "12"]),
        "flag": pa.array([True, None, False, True]),
        "small": pa.array([1, 2, 3, 1], pa.int8()),
        "real": pa.array([0.1, 1e-30, 2.0, 0.1], pa.float32()),
        "day": pa.array([datetime.date(2026, 1, 1)] * 4),
        "at": pa.array([datetime.datetime(2026, 1, 1, 1, 2, 3, 4)] * 4, pa.timestamp("us", "Europe/Berlin")),
        "time": pa.array([datetime.time(1, 2, 3, 4)] * 4, pa.time64("us")),
    }
    rows = pa.table({"id": [0, 1, 2, 3], **columns})
    first = str(tmp_path / "sinks/run=3/first")
    for form in ("parquet", "jsonl"):
        into = gm.sink(first + form, format=form, keep=rows.column_names, partition_by=list(columns))
        gm.Job(rows, gm.model(seen), into, workers=0).run()
        wanted = gm.read(first + form).to_table().sort_by("id").select(rows.column_names)
        assert wanted.schema.types == rows.schema.types
        again = run(first + form, tmp_path / f"again.{form}", fn=twice, keep=rows.column_names)
        assert again.select(rows.column_names).equals(wanted)
    above = run(tmp_path / "sinks/**/*.parquet", tmp_path / "above", fn=twice, keep=["id", "run", "zip", "small"])
    assert above.schema.types[:4] == [pa.int64(), pa.int64(), pa.string(), pa.int8()]
    assert (above["run"].to_pylist(), above["zip"].to_pylist()) == ([3] * 4, ["12", "7", None, "12"])


def twice(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A number of its own."""
    return {"y": batch["id"] * 2}


def test_appended_folders_fit_the_result_or_are_refused(tmp_path: Path) -> None:
    """New folders of the same type are added and nothing else is read; one that makes whole numbers text is refused,
    and so is a result that was made without the columns.
    """
    root, sink = source(tmp_path / "in", ["k=1", "k=2"]), tmp_path / "out"
    run(root, sink, keep=["id", "k"])
    write(tmp_path, "in/k=3/more", {"id": [900], "x": [1]}, "parquet")
    assert run(root, sink, keep=["id", "k"], append=True)["k"].to_pylist() == [1] * 40 + [2] * 40 + [3]
    assert gm.verify(str(sink), source=True).ok
    write(tmp_path, "in/k=a/more", {"id": [901], "x": [1]}, "parquet")
    with pytest.raises(PlanChanged, match=r"folders: k=… in their names was int64, is string, .*source.types.k=string"):
        run(root, sink, keep=["id", "k"], append=True)
    # Where the column is not read, its type is nobody's matter.
    run(root, tmp_path / "x", columns=["id"], keep=["id"])
    write(tmp_path, "in/k=b/more", {"id": [902], "x": [1]}, "parquet")
    assert run(root, tmp_path / "x", columns=["id"], keep=["id"], append=True).num_rows == 83
    folders = sorted(str(p) for p in Path(root).iterdir())
    run(folders, tmp_path / "apart", keep=["id"])
    with pytest.raises(PlanChanged, match=r"source.folders was not given"):
        run(root, tmp_path / "apart", keep=["id"])


def odd(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Fails for odd ids until it is told that it works; k is a whole number."""
    if batch["k"].dtype.kind != "i":
        raise TypeError(batch["k"].dtype)
    if (batch["id"] % 2).any() and "ODD_WORKS" not in os.environ:
        raise ValueError("odd")
    return {"y": batch["k"] + batch["id"]}


def test_what_was_begun_is_finished_with_its_types_whatever_folders_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run whose gate failed is accepted, and its dead rows are scored, beside a new folder that is no number; an
    append to text whose new folders are numbers reads text.
    """
    root, sink = source(tmp_path / "in", ["k=1", "k=2"], each=4), str(tmp_path / "out")
    job = gm.Job(root, gm.model(odd), gm.sink(sink, keep=["id", "k"]), workers=0)
    with pytest.raises(gm.GateFailed):
        job.run()
    write(tmp_path, "in/k=a/more", {"id": [900], "x": [1]}, "parquet")
    assert job.run(accept=True).rows_dead == 4
    monkeypatch.setenv("ODD_WORKS", "1")
    assert gm.retry_dead(job).rows_dead == 0
    got = gm.read(sink).to_table().sort_by("id")
    assert got["k"].to_pylist() == [1] * 4 + [2] * 4
    assert got["y"].to_pylist() == [1, 2, 3, 4, 6, 7, 8, 9]
    root = source(tmp_path / "text", ["k=a"], each=4)
    run(root, tmp_path / "texts", keep=["id", "k"])
    write(tmp_path, "text/k=5/more", {"id": [900], "x": [1]}, "parquet")
    assert run(root, tmp_path / "texts", keep=["id", "k"], append=True)["k"].to_pylist() == ["a"] * 4 + ["5"]


@pytest.mark.few(1)
@pytest.mark.parametrize("form", ["csv", "jsonl"])
def test_where_only_folders_are_asked_for_no_row_fails_to_be_read(tmp_path: Path, form: str) -> None:
    """What counts the rows, of a condition or a limit too, is a column that any value fits."""
    for k in (1, 2):
        write(tmp_path, f"in/k={k}/f", {"n": [1, 2, 3, "many", None] * 8, "t": ["a", "b c", "1", "", None] * 8}, form)
    root, told = str(tmp_path / "in"), {"n": "int64"}
    model = gm.model(whole)

    def ran(name: str, **options: Any) -> gm.Report:
        sink = gm.sink(str(tmp_path / name), keep=["k"])
        return gm.Job(gm.source(root, types=told, columns=["k"], **options), model, sink, workers=0).run()

    for name, options, ok in (
        ("all", {}, 80),
        ("some", {"where": "k = 2"}, 40),
        ("first", {"limit": 50}, 50),
        ("first of some", {"where": "k > 1", "limit": 5}, 5),
        ("sample", {"sample": 60}, 60),
    ):
        report = ran(name, **options)
        assert (report.rows_ok, report.rows_dead) == (ok, 0), name
    read = gm.Job(gm.source(root, types=told), gm.model(seen_n), workers=0, gates=gm.Gates(min_ok=0.1))
    assert sum(t.num_rows for t in read.stream()) == 64


def seen_n(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Of a job that reads the numbers: the rows whose n is none are dead."""
    return {"y": batch["k"]}


def picky(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Knows no German, and is told what to do with null."""
    if "de" in batch["lang"]:
        raise ValueError("no German")
    return {"y": batch["id"]}


def test_dead_rows_show_the_column_and_are_tried_again(tmp_path: Path) -> None:
    """In the payload; a retry gives the same; what was read is what verify finds; nulls are counted."""
    root, sink = source(tmp_path / "in", ["lang=en", "lang=de", f"lang={NULL}"], each=5), str(tmp_path / "out")
    kinds = {"id": "int64", "lang": "string not null"}
    model = gm.model(picky, takes=kinds)
    job = gm.Job(root, model, gm.sink(sink, keep=["id", "lang"]), workers=0, gates=gm.Gates(min_ok=0.1), batch_rows=5)
    assert job.run().rows_dead == 10
    letters = gm.dead(sink).to_pylist()
    assert sorted(str(json.loads(row["payload"])["lang"]) for row in letters) == ["None"] * 5 + ["de"] * 5
    assert gm.verify(sink, source=True).ok
    assert gm.retry_dead(job).rows_dead == 10
    with pytest.raises(gm.GateFailed, match="5 of 15 rows are null in lang"):
        gm.Job(root, model, gm.sink(str(tmp_path / "no")), workers=0, gates=gm.Gates(min_ok=0.9)).run()


def lengths(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The label is there, and answered."""
    return {"label": batch["label"]}


def test_texts_in_folders_by_label(tmp_path: Path, minilm_onnx: Path) -> None:
    """Files that are rows each have their folder's label, which an embedding keeps by default."""
    for n, label in enumerate(["good", "bad", "good"]):
        (tmp_path / f"in/label={label}").mkdir(parents=True, exist_ok=True)
        (tmp_path / f"in/label={label}/{n}.txt").write_text(f"a text, number {n}")
    gm.embed(str(tmp_path / "in"), str(tmp_path / "out"), text="text", model=str(minilm_onnx), workers=0)
    assert "label" in gm.Job(str(tmp_path / "in"), gm.model(lengths), workers=0).preview(3).column_names
    got = gm.read(str(tmp_path / "out")).to_table()
    assert got.column_names == ["path", "label", "embedding"]
    assert all(f"label={row['label']}/" in row["path"] for row in got.select(["path", "label"]).to_pylist())


def test_other_folders_alone_are_another_source(tmp_path: Path) -> None:
    """Where no file of before is left, what differs is told, and --restart scores what is there."""
    source, out = tmp_path / "in", str(tmp_path / "out")
    for day, x in (("a", 1), ("b", 2)):
        (source / f"k={day}").mkdir(parents=True)
        (source / f"k={day}" / "1.csv").write_text(f"x\n{x}\n")
        job = gm.Job(str(source), lambda batch: {"y": batch["x"] * 2}, gm.sink(out, keep=["k"]), workers=0)
        if day == "b":
            (source / "k=a" / "1.csv").unlink()
            for append in (False, True):
                with pytest.raises(PlanChanged, match="is no longer in the source"):
                    job.run(append=append)
        job.run(restart=day == "b")
    assert gm.read(out).to_table().to_pylist() == [{"k": "b", "y": 4}]


CONDITIONS = [
    "n = 1",
    "n <> 1",
    "NOT (n > 1)",
    "n IS NULL OR lang = 'en'",
    "n IN (2, NULL)",
    "coalesce(n, 5) = 5 AND lang > 'E'",
    "lang LIKE '%n' AND day >= DATE '2026-01-02'",
    "lang = 'EN'",
    "day < '2026-01-02'",
    "n = 1 AND id % 2 = 0",
    "lang = 'en' OR id = 3",
    "n / 2 = 0.5",
    "false",
]


@pytest.mark.long
@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_a_condition_on_folders_leaves_out_what_a_filter_would(tmp_path: Path, form: str) -> None:
    """The same rows, and the same number of others, whatever their values: nulls, cases, types; and so in a Delta
    table, if its files are Parquet.
    """
    import duckdb

    kinds = {"n": pa.int64(), "lang": pa.string(), "day": pa.date32()}
    rows, ids = [], iter(range(1000))
    for n in (1, 2, None):
        for lang, day in (("en", "2026-01-01"), ("Zn", "2026-01-02"), (None, "2026-01-02")):
            said = [f"{k}={NULL if v is None else v}" for k, v in
                    {"n": n, "lang": lang, "day": day}.items()]  # fmt: skip
            some = [next(ids) for _ in range(3)]
            write(tmp_path / "in", "/".join([*said, "a"]), {"id": some}, form)
            rows += [{"id": i, "n": n, "lang": lang, "day": datetime.date.fromisoformat(day)} for i in some]
    whole = pa.Table.from_pylist(rows, pa.schema([("id", pa.int64()), *kinds.items()]))
    sources: list[Any] = [gm.source(str(tmp_path / "in"), types=kinds)]
    if form == "parquet":
        lake = pytest.importorskip("deltalake")
        lake.write_deltalake(str(tmp_path / "lake"), whole, partition_by=list(kinds))
        sources.append(gm.source(str(tmp_path / "lake")))
    for n, condition in enumerate(CONDITIONS):
        wanted = [r[0] for r in duckdb.sql(f"SELECT id FROM whole WHERE {condition} ORDER BY id").fetchall()]
        for m, source in enumerate(sources):
            model = gm.model(doubled_ids, returns={"twice": "int64"})
            sink, given = str(tmp_path / f"{n}-{m}"), replace(source, where=condition)
            job = gm.Job(given, model, sink, workers=0, gates={"allow_empty": True})
            report = job.run()
            assert sorted(v // 2 for v in report.read().to_table()["twice"].to_pylist()) == wanted, condition
            assert (report.rows_in, report.rows_filtered) == (len(rows), len(rows) - len(wanted))
            assert n or gm.verify(job, source=True).ok


def doubled_ids(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A number for each row."""
    return {"twice": batch["id"] * 2}


def test_files_whose_folders_leave_them_out_are_not_read(tmp_path: Path) -> None:
    """Only their footers are: their rows may be damaged."""
    for day in (1, 2):
        write(tmp_path / "in", f"day={day}/a", {"id": list(range(5000))}, "parquet")
    file = tmp_path / "in" / "day=1" / "a.parquet"
    data, end = bytearray(file.read_bytes()), pq.read_metadata(file).serialized_size + 8
    data[4 : len(data) - end] = b"\xff" * (len(data) - end - 4)
    file.write_bytes(data)
    found = gm.Job(
        gm.source(str(tmp_path / "in"), where="day = 2"),
        gm.model(doubled_ids, returns={"twice": "int64"}),
        str(tmp_path / "out"),
        workers=0,
    ).run()
    assert (found.rows_ok, found.rows_filtered, found.rows_dead) == (5000, 5000, 0)
