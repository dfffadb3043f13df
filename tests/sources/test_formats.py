"""Which format a source or sink has, and the one schema of its files."""

from __future__ import annotations

import gzip
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import gristmill as gm
from gristmill.errors import BadJob, BadSource
from gristmill.job.job import source
from gristmill.shards.sourcefiles import SourceFile
from gristmill.sinks.formats import sink_format
from gristmill.sources.formats import _OURS, SOURCES, source_format, suffix_of


def by_suffix(*names: str, **options: Any) -> str:
    return source_format(source("x", **options), [SourceFile(n, 1, "") for n in names]).name


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("/a/b.parquet", "parquet"),
        ("/a/b.v2.PARQUET", "parquet"),
        ("b.jsonl", "jsonl"),
        ("b.ndjson.gz", "jsonl"),
        ("b.jsonl.zst", "jsonl"),
        ("b.csv", "csv"),
        ("b.csv.bz2", "csv"),
        ("b.tsv", "tsv"),
        ("b.md", "text"),
        ("b.png", "binary"),
        ("https://h/b.csv?version=1.2", "csv"),
        ("what?.parquet", "parquet"),
        ("a::b.jsonl", "jsonl"),
        ("https://h/a.csv?key=b.parquet", "csv"),
        ("zip://a.jsonl::file:///b.zip", "jsonl"),
    ],
)
def test_the_suffix_tells(name: str, form: str) -> None:
    """In any case, compressed or not."""
    assert by_suffix(name) == form


def test_format_overrules_the_suffix() -> None:
    """A file may be called anything."""
    assert by_suffix("events.log", format="jsonl") == "jsonl"
    assert by_suffix("a.csv", "b.weird", format="tsv") == "tsv"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("a.parqet", r"\.parqet.*did you mean \.parquet"),
        ("a.xyz", r"'\.xyz' is not a known format.*give format="),
        ("README", "there is no suffix to tell the format by"),
        ("a.json", "format='jsonl'"),
        ("a.parquet.gz", r"\.parquet\.gz"),
        ("a.csv.zip", r"a\.csv\.zip: an archive: as zip://::PATH all files in it are read"),
    ],
)
def test_an_unknown_suffix_is_named_with_the_way_out(name: str, said: str) -> None:
    """With a suggestion where one is near."""
    with pytest.raises(BadSource, match=said):
        by_suffix(name)


def test_a_zip_archive_is_no_table() -> None:
    """Whatever the format is said to be; as one row, its bytes, it can be read."""
    with pytest.raises(BadSource, match="as zip://::PATH all files in it are read"):
        by_suffix("a.csv.zip", format="csv")
    assert by_suffix("a.csv.zip", format="binary") == "binary"


def test_several_formats_need_to_be_told_apart() -> None:
    """Nothing is left out silently."""
    with pytest.raises(BadSource, match=r"several formats: parquet \(a\.parquet\), csv \(b\.csv\)"):
        by_suffix("a.parquet", "b.csv", "c.csv")
    with pytest.raises(BadSource, match=r"select one, as in '\*\.csv\.gz', or give"):
        by_suffix("a.csv.gz", "b.jsonl")


@pytest.mark.parametrize("name", ["a.json", "a.json.gz"])
def test_a_list_of_json_is_told_as_such(name: str, tmp_path: Path) -> None:
    """As pandas writes one: no format makes records of it; a file of lines is told the format."""
    put = gzip.open if name.endswith(".gz") else open
    for content, said in ((b'\n [{"x": 1}]', r"looks like one JSON document, .*jq -c"), (b'{"x": 1}\n', "format=")):
        with put(tmp_path / name, "wb") as file:
            file.write(content)
        with pytest.raises(BadSource, match=said):
            gm.apply(str(tmp_path / name), str(tmp_path / "out"), fn=dict, workers=0)


def test_sinks() -> None:
    """By name, by suffix, parquet where nothing is said; wrong names have a suggestion."""
    names = [sink_format(n).name for n in ("jsonl", "npy", "out/", "a/b.jsonl", "s3://x/y.npy", "out.v2")]
    assert names == ["jsonl", "npy", "parquet", "jsonl", "npy", "parquet"]
    with pytest.raises(BadJob, match="'parquet'"):
        sink_format("parqet")
    with pytest.raises(BadJob, match="'jsonl'"):
        source_format(source("x", format="jsonll"), [])
    assert suffix_of("a/b.c.JSONL.gz") == ".jsonl.gz"


def test_suffixes_are_those_of_the_formats() -> None:
    """The table that saves importing all formats says what they say themselves."""
    assert {suffix: n for n in SOURCES.ours for suffix in SOURCES.get(n).suffixes} == _OURS


def schemas(scratch: Any, planned: Any, *fields: list[tuple[str, Any]]) -> pa.Schema:
    return files(scratch, planned, *fields).schema


def files(scratch: Any, planned: Any, *fields: list[tuple[str, Any]]) -> Any:
    folder = scratch.folder()
    for i, each in enumerate(fields):
        pq.write_table(pa.table({n: pa.array([], t) for n, t in each}), folder / f"{i}.parquet")
    return planned(str(folder))


@pytest.mark.parametrize(
    ("one", "other", "both"),
    [
        (pa.int32(), pa.int64(), pa.int64()),
        (pa.null(), pa.string(), pa.string()),
        (pa.float32(), pa.float64(), pa.float64()),
        (pa.int32(), pa.float64(), pa.float64()),
        (pa.uint32(), pa.int32(), pa.int64()),
        (pa.string(), pa.dictionary(pa.int32(), pa.string()), pa.string()),
        (pa.list_(pa.int32()), pa.list_(pa.int64()), pa.list_(pa.int64())),
        (pa.timestamp("ms"), pa.timestamp("us"), pa.timestamp("us")),
        (pa.decimal128(5, 2), pa.decimal128(7, 3), pa.decimal128(7, 3)),
    ],
)
def test_types_that_lose_nothing_are_widened(scratch: Any, planned: Any, one: Any, other: Any, both: Any) -> None:
    """Whichever file comes first."""
    for pair in ((one, other), (other, one)):
        assert schemas(scratch, planned, [("a", pair[0])], [("a", pair[1])]).field("a").type == both


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (pa.int64(), pa.string()),
        (pa.int64(), pa.float64()),
        (pa.uint64(), pa.int64()),
        (pa.list_(pa.float32(), 3), pa.list_(pa.float32(), 4)),
        (pa.timestamp("us"), pa.timestamp("us", "UTC")),
    ],
)
def test_types_that_cannot_be_one_are_named_with_column_and_files(
    scratch: Any, planned: Any, one: Any, other: Any
) -> None:
    """Fault 13, when planning."""
    (problem,) = files(scratch, planned, [("a", one)], [("a", other)]).apart.values()
    assert re.search(r"column 'a' is .* in .*0\.parquet, .* in .*1\.parquet", problem)


def test_a_column_missing_in_some_files_is_named_with_them(scratch: Any, planned: Any) -> None:
    """Fault 13; and all that is wrong at once."""
    a, b, c = ("a", pa.int64()), ("b", pa.int64()), ("b", pa.string())
    apart = files(scratch, planned, [a, b], [a], [a, c]).apart
    assert list(apart) == ["b"] and re.search(r"column 'b' is missing in .*1\.parquet, of 3 files", apart["b"])


def test_a_difference_matters_only_in_the_columns_asked_for(scratch: Any, planned: Any) -> None:
    """`apart` looks at those; with `evolve` what a file lacks is null, and whole numbers are floats."""
    from gristmill.sources.schema import apart, unify

    b = [("b", pa.int64())]
    found = files(scratch, planned, [("a", pa.int64()), *b], [("a", pa.float64()), ("c", pa.string()), *b])
    assert not apart(found.schema, ["b"]) and apart(found.schema, ["a", "c"]).keys() == {"a", "c"}
    evolved = unify(found.infos, evolve=True)
    assert not apart(evolved, evolved.names) and evolved.field("a").type == pa.float64()
