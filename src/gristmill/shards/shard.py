"""Shards: descriptions of which rows of which files are scored and committed together, and how a source is cut into
them.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from gristmill.shards.numbers import Numbers
from gristmill.shards.sourcefiles import FileInfo, SourceFile
from gristmill.values import dataclass

MOST_ROWS = 1_000_000
LEAST_ROWS = 256  # in a shard that may hold more: with fewer, a commit and a file cost more than they protect
SHARDS_PER_WORKER = 8  # design: a shard is at most 1/(8 x workers) of the job, so that workers end together


@dataclass(frozen=True)
class Piece:
    """Ranges of one file: positions [k, 2] as a tuple of pairs, sorted, disjoint, half open."""

    index: int
    file: SourceFile
    extent: int
    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Shard:
    """One unit of work, retry and commit. `rows` is None if only reading can tell."""

    number: int
    pieces: tuple[Piece, ...]
    rows: int | None = None

    def passed(self, row: tuple[int, int] | None) -> int:
        """Positions up to and including a row, given as number of its piece and position; None for "no row yet"."""
        if row is None:
            return 0
        piece, position = row
        before = sum(b - a for p in self.pieces[:piece] for a, b in p.ranges)
        return before + sum(min(b, position + 1) - a for a, b in self.pieces[piece].ranges if a <= position)

    def holding(self) -> Callable[[tuple[str, int]], bool]:
        """Whether a row, given as file and position, is in this shard."""
        ranges: dict[str, list[tuple[int, int]]] = {}
        for piece in self.pieces:
            ranges.setdefault(piece.file.path, []).extend(piece.ranges)
        return lambda row: any(a <= row[1] < b for a, b in ranges.get(row[0], ()))


RANGES = pa.schema(
    [("shard", pa.int64()), ("file", pa.int32()), ("start", pa.int64()), ("stop", pa.int64()), ("rows", pa.int64())]
)


@dataclass(frozen=True)
class Selection:
    """Which positions of which files a job reads: `ranges` is int64 [k, 3] of file, start, stop in plan order. No shard
    has ranges of two `groups` (int64 [k]), if there are any.
    """

    ranges: np.ndarray
    groups: np.ndarray | None = None

    @staticmethod
    def everything(files: Sequence[FileInfo]) -> Selection:
        """The selection of every position in every file."""
        rows = [(i, int(f.cuts[0]), f.extent) for i, f in enumerate(files) if f.extent > f.cuts[0]]
        return Selection(np.array(rows, dtype=np.int64).reshape(-1, 3))


def rows_between(info: FileInfo, start: int, stop: int) -> int | None:
    """Rows at positions [start, stop) if the plan can tell: between cuts, or if positions are row numbers."""
    if info.cut_rows is None:
        return None
    if info.divisible and info.rows == info.extent:  # positions are row numbers
        return stop - start
    first, last = np.searchsorted(info.cuts, [start, stop])
    on_cuts = first < len(info.cuts) and last < len(info.cuts) and info.cuts[first] == start and info.cuts[last] == stop
    return int(info.cut_rows[first:last].sum()) if on_cuts else None


def estimated_rows(info: FileInfo, start: int, stop: int) -> float:
    """Rows at positions [start, stop), from counts if there are any, else from the bytes of a sampled row. A range has
    a row: that of one that was drawn, or is repeated, may be all of it.
    """
    known = info.rows
    if info.extent == 0 or stop <= start or known == 0:
        return 0.0
    total = known if known is not None else info.extent / max(info.row_bytes or 200.0, 1.0)
    return max(1.0, total * (stop - start) / info.extent)


def cut(files: Sequence[FileInfo], selection: Selection, rows_a_shard: int, workers: int = 1) -> pa.Table:
    """The shard table (schema RANGES), in the order of the selection: every selected position in exactly one shard.

    Shards hold about `rows_a_shard` rows; the last ones are smaller, so that workers end together. Cuts prefer the
    places where a file can be cut at no cost (row groups), when one is near.
    """
    weights = np.array([estimated_rows(files[f], a, b) for f, a, b in selection.ranges.tolist()], dtype=float)
    remaining = float(weights.sum())
    least = max(min(rows_a_shard, LEAST_ROWS), min(rows_a_shard, MOST_ROWS) / 4)
    out = [array(kind) for kind in "qiqqq"]  # the columns of RANGES: no object a range
    shard, held = 0, 0.0
    groups = np.zeros(len(weights), np.int64) if selection.groups is None else selection.groups
    begins = np.diff(groups, prepend=groups[:1]) != 0
    for (index, start, stop), weight, new in zip(selection.ranges.tolist(), weights.tolist(), begins, strict=True):
        if new and held:
            shard, held = shard + 1, 0.0
        info, at = files[index], start
        density = max(weight, 1e-9) / (stop - start)
        while at < stop:
            size = max(least, min(rows_a_shard, MOST_ROWS, remaining / (2 * workers)))
            end = _end(info, at, stop, room=(size - held) / density, slack=size / density / 3)
            if end <= at:  # nothing of this piece fits into the current shard
                shard, held = shard + 1, 0.0
                continue
            known = rows_between(info, at, end)
            for column, value in zip(out, (shard, index, at, end, -1 if known is None else known), strict=True):
                column.append(value)
            held += (end - at) * density
            remaining -= (end - at) * density
            at = end
            if held >= size * 0.99:
                shard, held = shard + 1, 0.0
    columns = [pa.Array.from_buffers(f.type, len(c), [None, pa.py_buffer(c)]) for c, f in zip(out, RANGES, strict=True)]
    return pa.table(columns, schema=RANGES)


def _end(info: FileInfo, at: int, stop: int, room: float, slack: float) -> int:
    """Where a shard ends that is at `at` and has about `room` positions left; `at` if a new shard should start
    there.
    """
    if stop - at <= room + min(slack, room):
        return stop
    whole = room >= slack * 3 * 0.999  # the shard is empty: something must go into it
    nearest = _nearest_cut(info, at, stop, at + room, slack)
    if nearest is not None:
        return nearest
    if info.divisible:
        return min(stop, at + max(1, round(room))) if room >= 1 or whole else at
    after = info.cuts[np.searchsorted(info.cuts, at, side="right") :]
    before = after[after <= at + room]
    if len(before):
        return min(stop, int(before[-1]))
    return min(stop, int(after[0])) if whole else at


def _nearest_cut(info: FileInfo, at: int, stop: int, wanted: float, slack: float) -> int | None:
    spot = int(np.searchsorted(info.cuts, wanted))
    near = [int(c) for c in info.cuts[max(0, spot - 1) : spot + 1] if at < c <= stop and abs(c - wanted) <= slack]
    return min(near, key=lambda c: abs(c - wanted)) if near else None


def spread(files: Sequence[FileInfo], selection: Selection, most: int) -> list[tuple[int, int, int, int, int]]:
    """Places all over a selection, evenly by rows: file, start and stop of a range, and how many rows of it are meant
    out of about how many. In all no more than `most` rows.
    """
    ranges = selection.ranges
    weights = np.array([estimated_rows(files[f], a, b) for f, a, b in ranges.tolist()], dtype=float)
    if not len(ranges) or most < 1:
        return []
    ends = np.cumsum(np.maximum(weights, 1e-9))
    points = (np.arange(most) + 0.5) / most * ends[-1]
    found: list[tuple[int, int, int, int, int]] = []
    for number in np.unique(chosen := np.searchsorted(ends, points, side="right").clip(max=len(ends) - 1)).tolist():
        (index, start, stop), weight = ranges[number].tolist(), max(float(weights[number]), 1e-9)
        info = files[index]
        density = weight / (stop - start)
        inside = start + (points[chosen == number] - (ends[number] - weight)) / density
        if info.divisible:
            places = np.unique(inside.astype(np.int64).clip(start, stop - 1))
        else:
            cuts = np.unique([start, *info.cuts[(info.cuts > start) & (info.cuts < stop)]])
            places = np.unique(cuts[np.searchsorted(cuts, inside, side="right") - 1])
        until = np.append(places[1:], stop)
        each = np.bincount((np.searchsorted(places, inside, side="right") - 1).clip(min=0), minlength=len(places))
        for at, end, rows in zip(places.tolist(), until.tolist(), each.tolist(), strict=True):
            have = math.ceil((end - at) * density)
            found.append((index, at, end, min(max(1, rows), have), 1 if info.divisible else have))
    return found


def count(table: pa.Table) -> int:
    """Number of shards in a shard table."""
    return 0 if table.num_rows == 0 else int(table.column("shard")[-1].as_py()) + 1


class ShardTable:
    """A shard table with its files: gives single shards without holding them all as objects."""

    def __init__(self, table: pa.Table, files: Sequence[SourceFile], extents: np.ndarray) -> None:
        self.table = table.combine_chunks()
        self.files = files
        self.extents = extents
        self._columns = {n: table.column(n).to_numpy() for n in table.column_names}
        self._bounds = np.searchsorted(self._columns["shard"], np.arange(count(table) + 1))

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def __getitem__(self, number: int) -> Shard:
        a, b = int(self._bounds[number]), int(self._bounds[number + 1])
        pieces = tuple(self._pieces(a, b))
        return Shard(number, pieces, self.rows_of(number))

    def of(self, files: Mapping[str, SourceFile]) -> ShardTable:
        """The same shards with the given files, by path; other files stay as planned."""
        return ShardTable(self.table, [files.get(f.path, f) for f in self.files], self.extents)

    def reading(self, paths: Collection[str] | None) -> list[int]:
        """Numbers of the shards that read one of these files; of all shards for None."""
        if paths is None:
            return list(range(len(self)))
        wanted = [i for i, f in enumerate(self.files) if f.path in paths]
        found: list[int] = np.unique(self._columns["shard"][np.isin(self._columns["file"], wanted)]).tolist()
        return found

    def paths_of(self, numbers: np.ndarray) -> set[str]:
        """Paths of the files that these shards read."""
        read = np.unique(self._columns["file"][np.isin(self._columns["shard"], numbers)])
        return {self.files[i].path for i in read.tolist()}

    def inside(self, files: Sequence[FileInfo]) -> Numbers:
        """Numbers of the shards that begin between two cuts of a file in which positions are row numbers: such a file
        is decoded from the cut on.
        """
        first = self._bounds[:-1][np.diff(self._bounds) > 0]
        first = first[self._columns["start"][first] > 0]
        if not len(first):  # as of a hundred thousand small files
            return Numbers()
        known = {f.file.path: f for f in files if f.divisible and f.rows == f.extent}
        first = first[np.argsort(self._columns["file"][first], kind="stable")]
        begins = self._columns["start"][first]
        edges = np.flatnonzero(np.diff(self._columns["file"][first], prepend=-1, append=-1)).tolist()
        found = np.zeros(len(first), np.bool_)
        for a, b in pairwise(edges):
            info = known.get(self.files[int(self._columns["file"][first[a]])].path)
            if info is not None:
                at = np.searchsorted(info.cuts, begins[a:b]).clip(max=len(info.cuts) - 1)
                found[a:b] = info.cuts[at] != begins[a:b]
        return Numbers.of(self._columns["shard"][first[found]])

    def ranges(self) -> np.ndarray:
        """All ranges in plan order, in the form of a Selection."""
        return np.column_stack([self._columns[name] for name in ("file", "start", "stop")]).astype(np.int64)

    def _pieces(self, a: int, b: int) -> Iterator[Piece]:
        c = self._columns
        files = c["file"][a:b]
        edges = [0, *(np.flatnonzero(np.diff(files)) + 1).tolist(), b - a] if b > a else []
        for first, last in pairwise(edges):
            index = int(files[first])
            spans = zip(
                c["start"][a + first : a + last].tolist(), c["stop"][a + first : a + last].tolist(), strict=True
            )
            yield Piece(index, self.files[index], int(self.extents[index]), tuple(spans))

    def rows(self) -> int | None:
        """Rows in all shards, or None if only reading can tell."""
        rows = self._columns["rows"]
        return None if (rows < 0).any() else int(rows.sum())

    def rows_of(self, number: int) -> int | None:
        """Rows in a shard, or None if only reading can tell."""
        rows = self._columns["rows"][int(self._bounds[number]) : int(self._bounds[number + 1])]
        return None if (rows < 0).any() else int(rows.sum())

    def total_weight(self) -> int:
        """Positions in all shards."""
        return int((self._columns["stop"] - self._columns["start"]).sum())

    def weight_of(self, numbers: Sequence[int] | np.ndarray) -> int:
        """Positions in some shards."""
        return int(self._sums(self._columns["stop"] - self._columns["start"], numbers))

    def rows_in(self, numbers: Sequence[int] | np.ndarray) -> int:
        """Rows in some shards, where those in all are known."""
        return int(self._sums(self._columns["rows"], numbers))

    def _sums(self, values: np.ndarray, numbers: Sequence[int] | np.ndarray) -> Any:
        of = np.asarray(numbers, np.int64)
        if 2 * len(of) > len(self):  # nearly all, as a rule: the others are few
            others = np.ones(len(self), np.bool_)
            others[of] = False
            return values.sum() - self._sums(values, np.flatnonzero(others))
        if not len(of):
            return 0
        before = np.concatenate(([0], np.cumsum(values)))
        return (before[self._bounds[of + 1]] - before[self._bounds[of]]).sum()

    def weight(self, number: int) -> int:
        """Positions in a shard: the measure of progress if rows are not known."""
        a, b = int(self._bounds[number]), int(self._bounds[number + 1])
        return int((self._columns["stop"][a:b] - self._columns["start"][a:b]).sum())
