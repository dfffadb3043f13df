"""Blocks of records into blocks of rows. A whole block is parsed at once; a record that stops it is found by halving,
so that good blocks cost nothing extra and a bad record costs only itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from gristmill.arrow.rows import picked
from gristmill.sources.contract import BadRow, Block, Reading, Where
from gristmill.sources.lines import Lines

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["assembled", "blanked", "kept", "not_utf8", "wanted"]

Bad = dict[int, BadRow]  # by the record's place in its block


def wanted(reading: Reading) -> tuple[list[str], pa.Schema]:
    """The names of the wanted columns, and the schema to parse: those columns and the ones that the condition reads."""
    import pyarrow as pa

    names = list(reading.schema.names if reading.columns is None else reading.columns)
    asked = () if reading.where is None else reading.where.columns
    return names, pa.schema([reading.schema.field(n) for n in dict.fromkeys([*names, *asked])])


def assembled(
    found: Lines,
    bad: Bad,
    reading: Reading,
    table: Callable[[np.ndarray], pa.Table | None],
    single: Callable[[int], pa.Table | BadRow],
) -> Block:
    """Every record as a row, filtered, or bad.

    Records in `bad` are already known to be bad, and blanked. `table` parses everything from the first to the last of
    the given records, and returns None if one of them stops it; `single` examines such a record.
    """
    import pyarrow as pa

    names, schema = wanted(reading)
    good = np.setdiff1d(np.arange(len(found)), list(bad)) if bad else np.arange(len(found))
    tables, index = [], []
    for part, rows in _halved(good, table):
        made = single(int(part[0])) if rows is None else rows
        if isinstance(made, BadRow):
            bad[int(part[0])] = made
            continue
        tables.append(made)
        index.append(part)
    position = found.position[np.concatenate(index)] if index else found.position[:0]
    tables = tables or [pa.Table.from_batches([], schema)]
    rows = tables[0] if len(tables) == 1 else pa.concat_tables(tables)
    rows, position, filtered = kept(rows, position, reading.where, names)
    return Block(rows, position, filtered, tuple(bad[i] for i in sorted(bad)))


def kept(
    rows: pa.Table, position: np.ndarray, where: Where | None, names: Sequence[str]
) -> tuple[pa.Table, np.ndarray, int]:
    """The columns `names` of the rows for which `where` holds, their positions, and how many rows it left out."""
    if where is None or not len(position):
        return rows.select(list(names)), position, 0
    holds = np.flatnonzero(where.mask(rows))
    rows = rows.select(list(names))
    if len(holds) == len(position):
        return rows, position, 0
    return picked(rows, holds), position[holds], len(position) - len(holds)


def not_utf8(found: Lines) -> list[int]:
    """Records that are not UTF-8. The block is checked as one piece of text, and halved if it is not valid."""
    import pyarrow as pa

    if not len(found):
        return []
    edges = pa.py_buffer(np.append(found.start, found.stop[-1:]).astype(np.int64))
    text = pa.Array.from_buffers(pa.large_string(), len(found), [None, edges, pa.py_buffer(found.data)])
    out: list[int] = []
    todo = [(0, len(found))]
    while todo:
        first, last = todo.pop()
        try:
            text.slice(first, last - first).validate(full=True)
        except pa.ArrowInvalid:
            half = (first + last) // 2
            if last - first == 1:
                out.append(first)
            else:
                todo += [(first, half), (half, last)]
    return out


def blanked(found: Lines, which: Iterable[int], fill: bytes) -> Lines:
    """The records, with those in `which` overwritten by `fill`, so that the rest can be parsed in one piece."""
    which = list(which)
    if not which:
        return found
    data = bytearray(found.data)
    for i in which:
        first, last = int(found.start[i]), int(found.stop[i])
        data[first:last] = fill * (last - first)
    return Lines(bytes(data), found.start, found.stop, found.position)


def _halved(
    part: np.ndarray, table: Callable[[np.ndarray], pa.Table | None]
) -> Iterator[tuple[np.ndarray, pa.Table | None]]:
    """`part` (indices of records) in pieces that parse, in order, each with its table; None for a single record that
    does not parse. `table` returns as many rows as records, or None if something stops it.
    """
    todo = [part] if len(part) else []
    while todo:
        at = todo.pop()
        rows = table(at)
        if rows is not None and rows.num_rows == len(at):
            yield at, rows
        elif len(at) == 1:
            yield at, None
        else:
            half = len(at) // 2
            todo += [at[half:], at[:half]]
