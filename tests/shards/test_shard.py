"""Cutting a source into shards, for any files: every selected position in exactly one shard, in order."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.shards.shard import MOST_ROWS, RANGES, Selection, ShardTable, count, cut, rows_between
from gristmill.shards.sourcefiles import FileInfo, SourceFile

SCHEMA = pa.schema([("x", pa.int64())])


@st.composite
def files(draw: st.DrawFn) -> list[FileInfo]:
    """Files of all kinds: row numbers or byte offsets, divisible or not, counted or not, empty ones too."""
    made = []
    for n in range(draw(st.integers(1, 6))):
        cuts = [0, *np.cumsum(draw(st.lists(st.integers(1, 500), max_size=6))).tolist()]
        extent = cuts[-1]
        kind = draw(st.sampled_from(["rows", "bytes", "whole"]))
        counted = kind == "rows" or draw(st.booleans())
        steps = np.diff(cuts)
        rows = None
        if counted:
            rows = steps if kind == "rows" else np.array([draw(st.integers(0, int(s))) for s in steps], dtype=np.int64)
        source = SourceFile(f"f{n}", extent, "")
        made.append(
            FileInfo(source, extent, np.array(cuts, dtype=np.int64), kind != "whole", SCHEMA, rows, row_bytes=7.0)
        )
    return made


@st.composite
def selections(draw: st.DrawFn, infos: list[FileInfo]) -> Selection:
    """Everything, or sorted disjoint ranges of the files that can be cut anywhere."""
    if draw(st.booleans()):
        return Selection.everything(infos)
    ranges = []
    for n, info in enumerate(infos):
        if info.extent == 0:
            continue
        if not info.divisible:
            ranges.append((n, 0, info.extent))
            continue
        edges = sorted(draw(st.sets(st.integers(0, info.extent), max_size=8)))
        ranges += [(n, a, b) for a, b in zip(edges[::2], edges[1::2], strict=False)]
    groups = np.cumsum([draw(st.integers(0, 1)) for _ in ranges], dtype=np.int64) if draw(st.booleans()) else None
    return Selection(np.array(ranges, dtype=np.int64).reshape(-1, 3), groups)


@settings(deadline=None)
@given(st.data(), files(), st.integers(1, 2_000), st.integers(1, 64))
def test_every_position_is_in_exactly_one_shard(
    data: st.DataObject, infos: list[FileInfo], rows_a_shard: int, workers: int
) -> None:
    """The shards' ranges, read one after the other, are the selection: nothing twice, nothing missing, in order."""
    selection = data.draw(selections(infos))
    table = cut(infos, selection, rows_a_shard, workers)
    got = [(f, p) for _, f, a, b, _ in _rows(table) for p in range(a, b)]
    assert got == [(f, p) for f, a, b in selection.ranges.tolist() for p in range(a, b)]
    numbers = table.column("shard").to_pylist()
    assert numbers == sorted(numbers)
    assert sorted(set(numbers)) == list(range(count(table)))
    for _, f, a, b, known in _rows(table):
        assert a < b
        assert (known if known >= 0 else None) == rows_between(infos[f], a, b)
        if not infos[f].divisible:
            assert {a, b} <= set(infos[f].cuts.tolist()), "a file that cannot be cut there was"
    for n in range(count(table) if selection.groups is not None else 0):
        of = {(f, p) for shard, f, a, b, _ in _rows(table) for p in range(a, b) if shard == n}
        whose = zip(selection.ranges.tolist(), selection.groups.tolist(), strict=True)
        assert len({group for (f, a, b), group in whose if any((f, p) in of for p in range(a, b))}) == 1


@settings(deadline=None)
@given(files(), st.integers(1, 2_000), st.integers(1, 8))
def test_a_shard_table_gives_its_shards_back(infos: list[FileInfo], rows_a_shard: int, workers: int) -> None:
    """Shards as objects hold what the table says, pieces file by file."""
    table = cut(infos, Selection.everything(infos), rows_a_shard, workers)
    shards = ShardTable(table, [i.file for i in infos], np.array([i.extent for i in infos]))
    got = [(p.index, a, b) for n in range(len(shards)) for p in shards[n].pieces for a, b in p.ranges]
    assert got == [(f, a, b) for _, f, a, b, _ in _rows(table)]
    assert sum(shards.weight(n) for n in range(len(shards))) == shards.total_weight() == sum(i.extent for i in infos)
    for n in range(len(shards)):
        indexes = [p.index for p in shards[n].pieces]
        assert indexes == sorted(set(indexes))
    known = [shards[n].rows for n in range(len(shards))]
    assert shards.rows() == (None if None in known else sum(k for k in known if k is not None))


@settings(deadline=None)
@given(files(), st.integers(1, 2_000), st.integers(1, 8))
def test_shards_that_begin_inside_a_row_group(infos: list[FileInfo], rows_a_shard: int, workers: int) -> None:
    """Those that begin between two cuts of a file whose positions are row numbers."""
    table = cut(infos, Selection.everything(infos), rows_a_shard, workers)
    shards = ShardTable(table, [i.file for i in infos], np.array([i.extent for i in infos]))
    begins = {n: (f, a) for n, f, a, *_ in reversed(_rows(table))}
    numbered = [i.divisible and i.rows == i.extent for i in infos]
    expected = {n for n, (f, a) in begins.items() if numbered[f] and a not in infos[f].cuts}
    assert list(shards.inside(infos)) == sorted(expected)
    assert len(shards.inside(infos)) == len(expected)
    assert not shards.inside([])


@settings(deadline=None)
@given(st.integers(1, 10**7), st.integers(1, 10**7), st.integers(1, 64))
def test_shards_are_about_as_large_as_asked(extent: int, rows_a_shard: int, workers: int) -> None:
    """No shard of a file that can be cut anywhere is larger than asked by more than a third; they are not many more."""
    info = FileInfo(SourceFile("f", extent, ""), extent, np.array([0, extent]), True, SCHEMA, np.array([extent]))
    rows_a_shard = max(rows_a_shard, extent // 2_000)
    table = cut([info], Selection.everything([info]), rows_a_shard, workers)
    sizes = np.diff([0, *np.cumsum(table.column("rows").to_numpy())])
    most = min(rows_a_shard, MOST_ROWS)
    assert sizes.max() <= most * 4 / 3 + 1
    assert count(table) <= extent / most + 1 + 2 * workers * 8


def _rows(table: pa.Table) -> list[tuple[int, int, int, int, int]]:
    return list(zip(*(table.column(n).to_pylist() for n in table.column_names), strict=True))


@given(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3), max_size=12), st.data())
def test_the_rows_of_some_shards(shards: list[list[int]], data: st.DataObject) -> None:
    """Of few, of most, of all and of none: what each has, added up."""
    rows = [(n, 0, 10 * k, 10 * k + 2 * size, size) for n, sizes in enumerate(shards) for k, size in enumerate(sizes)]
    columns = list(zip(*rows, strict=True)) or [()] * len(RANGES)
    table = pa.table([pa.array(c, f.type) for c, f in zip(columns, RANGES, strict=True)], schema=RANGES)
    found = ShardTable(table, [SourceFile("x", 1, "1")], np.array([1000]))
    some = data.draw(st.lists(st.sampled_from(range(len(shards))), unique=True)) if shards else []
    assert found.rows_in(some) == sum(sum(shards[n]) for n in some)
    assert found.weight_of(some) == sum(found.weight(n) for n in some)
