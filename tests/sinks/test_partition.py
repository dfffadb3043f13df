"""Hive folders."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gristmill as gm
from gristmill.errors import BadJob
from gristmill.files.disk import LocalFiles
from gristmill.sinks import partition
from gristmill.sinks.formats import sink_format
from gristmill.sinks.partition import folder_name, partitioned

ROWS = pa.table(
    {
        "id": np.arange(1200),
        "day": [["2026-01-01", "a/b=c%", None, "é x"][i % 4] for i in range(1200)],
        "k": pa.array([i % 3 for i in range(1200)], pa.int8()),
        "text": [f"text {i}" for i in range(1200)],
    }
)


def test_one_file_a_partition_read_by_other_tools(scratch: Any) -> None:
    """Names are escaped as Hive does, null has Hive's name; the columns are in the folders and not in the files."""
    form = pickle.loads(pickle.dumps(partitioned(sink_format("parquet"), ("day", "k"))))
    folder, files = scratch.written(form, ROWS, pieces=7)
    names = sorted(f.publish for f in files)
    days = ("2026-01-01", "__HIVE_DEFAULT_PARTITION__", "a%2Fb%3Dc%25", "é x")
    assert names == sorted(f"day={d}/k={k}/part-0000003.g1.parquet" for d in days for k in range(3))
    assert len({f.path for f in files}) == len({Path(f.path).parent / Path(f.path).name for f in files}) == 12
    assert {Path(f.path).parent for f in files} == {folder.parent / "work"}
    assert all(form.count(f.path, f.role) == f.rows == 100 for f in files)
    keys = pa.schema([("day", pa.string()), ("k", pa.int8())])
    read = ds.dataset(folder, partitioning=ds.partitioning(keys, flavor="hive")).to_table()
    assert read.sort_by("id").select(ROWS.column_names).to_pylist() == ROWS.to_pylist()
    files_read = f"read_parquet('{folder}/**/*.parquet', hive_partitioning=true)"
    day = "nullif(day, '__HIVE_DEFAULT_PARTITION__')"  # which older versions of DuckDB do not know
    sql = f"SELECT id, {day}, k::TINYINT k, text FROM {files_read} ORDER BY id"
    assert duckdb.sql(sql).fetchall() == [tuple(r.values()) for r in ROWS.to_pylist()]
    one = ds.dataset(folder / "day=2026-01-01" / "k=0").to_table()
    assert one.column_names == ["id", "text"]
    assert one["id"].to_pylist() == sorted(one["id"].to_pylist())


@pytest.mark.parametrize("name", ["jsonl", "npy"])
def test_other_formats(scratch: Any, name: str) -> None:
    """Also one with two files a partition."""
    rows = ROWS.append_column("v", pa.FixedSizeListArray.from_arrays(np.zeros(2400, dtype=np.float32), 2))
    form = partitioned(sink_format(name), ("k",))
    assert (form.name, form.suffixes[0]) == (name, f".{name}")
    _, files = scratch.written(form, rows, pieces=3)
    wanted = [f"k={k}/part-0000003.g1.{name}" for k in range(3)]
    assert [f.publish for f in files if f.role == "rows"] == wanted
    assert [form.count(f.path, f.role) for f in files] == [400] * (6 if name == "npy" else 3)


def test_what_does_not_fit_in_memory_waits_on_disk(scratch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many partitions of a large shard: the same files, in order, and nothing else left in the work folder."""
    monkeypatch.setattr(partition, "HELD_BYTES", 20_000)
    rows = pa.table(
        {
            "p": [f"p{i % 97}" for i in range(20_000)],
            "i": np.arange(20_000),
            "d": pa.array([f"d{i % 5}" for i in range(20_000)]).dictionary_encode(),
        }
    )
    folder, files = scratch.written(partitioned(sink_format("parquet"), ("p",)), rows, pieces=50)
    assert len(files) == 97
    assert sorted(p.name for p in (folder.parent / "work").iterdir()) == sorted(Path(f.path).name for f in files)
    for file in files:
        number = int(file.publish.partition("/")[0].removeprefix("p=p"))
        table = ds.dataset(folder / file.publish).to_table()
        assert table["i"].to_pylist() == list(range(number, 20_000, 97))
        assert table["d"].to_pylist() == [f"d{i % 5}" for i in range(number, 20_000, 97)]


def test_abort_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With rows in memory, on disk, and in files that were finished."""
    monkeypatch.setattr(partition, "HELD_BYTES", 1000)
    form = partitioned(sink_format("parquet"), ("k",))
    for close in (False, True):
        writer = form.writer(LocalFiles(), str(tmp_path), "part", "n", ROWS.schema, {})
        writer.write(ROWS)
        writer.write(ROWS)
        if close:
            writer.close()
        writer.abort()
        assert list(tmp_path.iterdir()) == []


def test_no_rows(scratch: Any) -> None:
    """No partition, no file."""
    assert scratch.written(partitioned(sink_format("parquet"), ("k",)), ROWS.slice(0, 0))[1] == []


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        (("dya",), "'dya', which is neither an output column nor one of the source"),
        (("v",), "does not read back unchanged from a folder's name"),
        (("k", "v"), "every output|a folder's name"),
    ],
)
def test_columns_that_cannot_partition_are_refused(scratch: Any, columns: tuple[str, ...], said: str) -> None:
    """Before a row is written."""
    rows = pa.table({"k": [1], "v": [[1]]})
    with pytest.raises(BadJob, match=said):
        scratch.written(partitioned(sink_format("parquet"), columns), rows)
    with pytest.raises(BadJob, match="every output column"):
        scratch.written(partitioned(sink_format("parquet"), ("k",)), rows.select(["k"]))


def test_a_column_without_a_name_is_refused_when_planning(tmp_path: Path) -> None:
    """No reader of folders finds it again, a job over the result included."""
    rows = pa.table({"id": [1, 2], "": ["p", "q"]})
    sink = gm.sink(str(tmp_path / "out"), keep=["id", ""], partition_by=[""])
    with pytest.raises(gm.BadJob, match="partition_by names '', a column without a name"):
        gm.Job(rows, lambda batch: {"y": batch["id"]}, sink, workers=0).plan()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.none() | st.text(max_size=10), min_size=1, max_size=20))
def test_a_folder_name_is_one_component_and_comes_back(values: list[str | None]) -> None:
    """Whatever the text: no slash, no other partition's name, undone by percent-decoding."""
    from urllib.parse import unquote

    for value in values:
        try:
            (value or "").encode()
        except UnicodeEncodeError:
            continue
        name = folder_name({"c": value})
        assert "/" not in name
        assert "\x00" not in name
        assert name.startswith("c=")
        back = unquote(name[2:])
        assert back == (value or "__HIVE_DEFAULT_PARTITION__")


@pytest.mark.parametrize("columns", [("a", "b"), ("b", "a"), ("a", "b", "c", "d", "e")])
def test_partitions_in_the_order_of_their_first_rows(columns: tuple[str, ...]) -> None:
    """Of several columns, too, so that it does not depend on where windows are cut."""
    chance = np.random.default_rng(3)
    rows = pa.table({name: chance.integers(0, 40, 3000) for name in "abcde"})
    wanted: dict[str, list[int]] = {}
    for number, row in enumerate(rows.to_pylist()):
        wanted.setdefault("/".join(f"{name}={row[name]}" for name in columns), []).append(number)
    found = {folder: index.tolist() for folder, index in partition.divided(rows, columns)}
    assert found == wanted and list(found) == list(wanted)


def test_partitions_of_columns_with_many_values() -> None:
    """The product of how many does not fit into 64 bits."""
    count = 1 << 13
    chance = np.random.default_rng(3)
    rows = pa.table({name: chance.permutation(count) for name in "abcde"})
    found = dict(partition.divided(rows, tuple("abcde")))
    assert len(found) == count and all(len(index) == 1 for index in found.values())
