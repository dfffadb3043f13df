"""Pairs of rows side by side, in bounded memory: rows of one result in its order, and beside each the row of the other
that belongs to it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import numpy as np
import pyarrow as pa

from gristmill.arrow.rows import picked
from gristmill.comparison.join import Join
from gristmill.comparison.side import Side

Tables = Iterator[pa.Table]

PIECE_BYTES = 64e6  # stored bytes of the rows that are put in order together
MOST_PIECES = 256  # files open at once

_PLACE = "place"  # of a row of b: the number of the row of a beside it


def pairs(
    a: Side, b: Side, join: Join, columns: tuple[Sequence[str], Sequence[str]], folder: str
) -> Iterator[tuple[pa.Table, pa.Table]]:
    """The joined rows in the order of `a`: some rows of `a` and as many of `b`, row i belonging to row i, with the
    `columns` of each. If `b` has another order, its rows are put in that of `a` through files in `folder`.
    """
    ours = (picked(rows, numbers - first) for first, numbers, rows in _matched(a, "a", join, columns[0]))
    theirs = _in_order(b, join, columns[1]) if join.in_order else _reordered(a, b, join, columns[1], folder)
    return _side_by_side(ours, theirs)


def _matched(side: Side, of: str, join: Join, columns: Sequence[str]) -> Iterator[tuple[int, np.ndarray, pa.Table]]:
    for first, rows in side.stream(columns):
        numbers, _ = join.matches(of, first, first + rows.num_rows)
        if len(numbers):
            yield first, numbers, rows


def _in_order(b: Side, join: Join, columns: Sequence[str]) -> Tables:
    return (picked(rows, numbers - first) for first, numbers, rows in _matched(b, "b", join, columns))


def _side_by_side(ours: Tables, theirs: Tables) -> Iterator[tuple[pa.Table, pa.Table]]:
    """Two streams of the same rows, cut at the same places."""
    one = other = None
    while True:
        one = next(ours, None) if one is None or not one.num_rows else one
        other = next(theirs, None) if other is None or not other.num_rows else other
        if one is None or other is None:
            return
        rows = min(one.num_rows, other.num_rows)
        yield one.slice(0, rows), other.slice(0, rows)
        one, other = one.slice(rows), other.slice(rows)


def _reordered(a: Side, b: Side, join: Join, columns: Sequence[str], folder: str) -> Tables:
    """The rows of `b` in the order of those of `a`: each is written to the file of its piece of `a`, and the pieces are
    put in order one after the other.
    """
    stored = sum(f.bytes for f in b.result.live() if f.role == "rows")
    pieces = int(min(MOST_PIECES, max(1, stored // PIECE_BYTES)))
    each = max(1, -(-a.count // pieces))
    names = [os.path.join(folder, f"piece-{i}.arrow") for i in range(pieces)]
    with ExitStack() as opened:
        writers: dict[int, pa.ipc.RecordBatchStreamWriter] = {}
        for first, rows in b.stream(columns):
            numbers, places = join.matches("b", first, first + rows.num_rows)
            for piece in np.unique(places // each).tolist():
                mine = places // each == piece
                some = picked(rows, numbers[mine] - first).append_column(_PLACE, pa.array(places[mine]))
                if piece not in writers:
                    writers[piece] = opened.enter_context(pa.ipc.new_stream(names[piece], some.schema))
                writers[piece].write_table(some)
    for piece in sorted(writers):
        with pa.OSFile(names[piece]) as source:
            rows = pa.ipc.open_stream(source).read_all()
        order = np.argsort(rows.column(_PLACE).to_numpy(), kind="stable")
        yield picked(rows.drop_columns([_PLACE]), order)
        os.remove(names[piece])
