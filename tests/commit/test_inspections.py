"""What planning found out about files comes back from the plan as it went in."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.commit import generation as generations
from gristmill.commit import inspections
from gristmill.commit.documents import BatchRecord, ModelRecord, PlanDocument, Reads, RunsOn
from gristmill.files.disk import LocalFiles
from gristmill.fingerprint.digests import StoredFingerprint
from gristmill.shards import shard
from gristmill.shards.shard import Selection
from gristmill.shards.sourcefiles import FileInfo, SourceFile

SCHEMAS = [
    pa.schema([("a", pa.int64())]),
    pa.schema([pa.field("a", pa.string(), nullable=False, metadata={b"k": b"v"})], metadata={b"m": b"n"}),
    pa.schema([]),
]


ABOUT = PlanDocument(
    fingerprint=StoredFingerprint(),
    output_schema="",
    answers={},
    made={},
    sink_format="parquet",
    partition_by=(),
    model=ModelRecord("model", "", ""),
    reads=Reads("parquet", None, "", None, {}),
    batch=BatchRecord(1, 1, (), None),
    runs_on=RunsOn("cpu", 1),
    workers=1,
    everything=True,
    created="",
)


@st.composite
def infos(draw: st.DrawFn) -> list[FileInfo]:
    """Files as any format might describe them."""
    found = []
    for n in range(draw(st.integers(0, 5))):
        rows = draw(st.lists(st.integers(0, 1 << 40), max_size=4))
        cuts = np.concatenate([[0], np.cumsum(rows)]).astype(np.int64)
        file = SourceFile(f"/data/ü{n}", int(cuts[-1]), "stamp", draw(st.sampled_from(["", "1:2"])))
        cut_rows = draw(st.sampled_from([None, np.array(rows, dtype=np.int64)]))
        nulls = draw(st.sampled_from([None, {}, {"a": 3}]))
        schema = draw(st.sampled_from(SCHEMAS))
        row_bytes = draw(st.sampled_from([None, 1.5]))
        found.append(FileInfo(file, int(cuts[-1]), cuts, n % 2 == 0, schema, cut_rows, nulls, f"layout{n}", row_bytes))
    return found


def stored(folder: Path, files: list[FileInfo], how: str) -> inspections.Inspections:
    """Written into a plan and read back."""
    generation = generations.claim(LocalFiles(), str(folder), "new")
    shards = shard.cut([], Selection.everything([]), 1)  # how the files are cut is of no matter here
    generations.write_plan(LocalFiles(), generation, ABOUT, files, shards, inspections.as_table(files, how))
    return inspections.of_generations([generation])


@settings(max_examples=30, deadline=None)
@given(files=infos())
def test_everything_comes_back(files: list[FileInfo], tmp_path_factory: object) -> None:
    """Any mixture of files, also none, reads back equal."""
    known = stored(tmp_path_factory.mktemp("sink"), files, "how")  # type: ignore[attr-defined]
    for info in files:
        back = known.of(info.file, "how")
        assert back is not None
        assert (back.file, back.extent, back.divisible) == (info.file, info.extent, info.divisible)
        assert (back.nulls, back.layout, back.row_bytes) == (info.nulls, info.layout, info.row_bytes)
        assert back.schema.equals(info.schema, check_metadata=True)
        np.testing.assert_array_equal(back.cuts, info.cuts)
        assert (back.cut_rows is None) == (info.cut_rows is None)
        if info.cut_rows is not None:
            np.testing.assert_array_equal(back.cut_rows, info.cut_rows)


def test_what_was_touched_or_read_otherwise_is_not_known(tmp_path: Path) -> None:
    """Another size, stamp or inode, other options, or a file system that tells no stamp: the file is opened."""
    info = FileInfo(SourceFile("/a", 5, "s", "t"), 5, np.array([0, 5]), True, SCHEMAS[0])
    how = inspections.looked_at("csv", {"delimiter": ","})
    known = stored(tmp_path, [info], how)
    assert known.of(info.file, how) is not None
    assert known.of(info.file, inspections.looked_at("csv", {"delimiter": ";"})) is None
    for other in ({"size": 6}, {"stamp": "r"}, {"touched": "u"}, {"path": "/b"}, {"stamp": "", "touched": ""}):
        assert known.of(replace(info.file, **other), how) is None


def test_a_damaged_plan_knows_nothing(tmp_path: Path) -> None:
    """What its checksum does not cover is not believed."""
    info = FileInfo(SourceFile("/a", 5, "s", "t"), 5, np.array([0, 5]), True, SCHEMAS[0])
    stored(tmp_path, [info], "how")
    (table,) = (tmp_path / "_gristmill").glob("g*/files.*.arrow")
    table.write_bytes(table.read_bytes()[:-1] + b"x")
    assert inspections.of_generations(generations.generations(str(tmp_path))).of(info.file, "how") is None
