"""Rows in the order of some of their columns, ascending, nulls last, equal ones as they came. More than memory holds is
sorted in files: DuckDB is given the keys and says which piece of the order a row is in; rows themselves stay Arrow's.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from gristmill.arrow.rows import picked
from gristmill.arrow.schemas import plain
from gristmill.arrow.spilling import apart, spilling_to

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

__all__ = ["Sorting", "in_order", "sortable"]

HELD_BYTES = 64 << 20  # of rows in memory; also the size of a piece
MEMORY = "256MB"  # for sorting keys
MOST_PIECES = 256  # files that are open at once


def sortable(kind: pa.DataType) -> bool:
    """Whether values of a type have an order that every reader agrees on: numbers, text, bytes, times, truth values."""
    import pyarrow as pa

    t, kind = pa.types, plain(kind)
    if t.is_decimal(kind):
        return bool(kind.precision <= 38)
    tests = (
        t.is_boolean, t.is_integer, t.is_floating, t.is_string, t.is_large_string, t.is_binary, t.is_large_binary,
        t.is_fixed_size_binary, t.is_date, t.is_time, t.is_timestamp, t.is_duration, t.is_null,
    )  # fmt: skip
    return any(test(kind) for test in tests)


def in_order(rows: pa.Table, columns: Sequence[str]) -> pa.Table:
    """The rows sorted by these columns."""
    import pyarrow.compute as pc

    keys = _keys(rows, columns)
    by = [(name, "ascending") for name in keys.column_names]
    return picked(rows, pc.sort_indices(keys, sort_keys=by))


class Sorting:
    """Takes tables of one schema and gives their rows back in order, once. Close it: it may have files."""

    def __init__(self, columns: Sequence[str]) -> None:
        self._columns = tuple(columns)
        self._held: list[pa.Table] = []
        self._held_bytes = self._bytes = self._rows = 0
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._db: Any = None
        self._spill: Any = None

    def add(self, rows: pa.Table) -> None:
        """Add rows, which are after those added before them."""
        if not rows.num_rows:
            return
        self._held.append(rows)
        self._held_bytes += rows.nbytes
        if self._held_bytes > HELD_BYTES:
            self._flush()

    def sorted(self) -> Iterator[pa.Table]:
        """All rows in order, in tables of bounded size."""
        import pyarrow as pa

        if self._db is None:
            held, self._held = self._held, []
            if held:
                yield in_order(pa.concat_tables(held), self._columns)
            return
        self._flush()
        self._spill.close()
        for path in self._pieces():
            with pa.OSFile(path) as file, pa.ipc.open_stream(file) as stream:
                rows = stream.read_all()
            os.unlink(path)
            yield in_order(rows, self._columns)

    def close(self) -> None:
        """Remove what was written."""
        self._held = []
        for opened in (self._spill, self._db):
            if opened is not None:
                opened.close()
        if self._folder is not None:
            self._folder.cleanup()
        self._spill = self._db = self._folder = None

    def _flush(self) -> None:
        """Move the rows in memory to a file, and their keys to DuckDB."""
        import numpy as np
        import pyarrow as pa

        if not self._held:
            return
        rows = pa.concat_tables(self._held).combine_chunks()
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="gristmill-")
            self._db = spilling_to(self._folder.name, MEMORY, threads=2)
            self._spill = pa.ipc.new_stream(self._path("rows"), rows.schema)
        self._spill.write_table(rows)
        keys = _keys(rows, self._columns)
        numbers = np.arange(self._rows, self._rows + rows.num_rows)
        self._db.register("read", keys.add_column(0, "n", pa.array(numbers)))
        made = "INSERT INTO keys" if self._rows else "CREATE TABLE keys AS"
        self._db.execute(f"{made} SELECT * FROM read")
        self._db.unregister("read")
        self._rows += rows.num_rows
        self._bytes += self._held_bytes
        self._held, self._held_bytes = [], 0

    def _pieces(self) -> list[str]:
        """Files with the rows of one piece of the order each, in which they are as they came."""
        import numpy as np
        import pyarrow as pa

        count = min(MOST_PIECES, self._bytes // HELD_BYTES + 1)
        self._place(-(-self._rows // count))
        writers: dict[int, Any] = {}
        first = 0
        try:
            with pa.OSFile(self._path("rows")) as file, pa.ipc.open_stream(file) as stream:
                for batch in stream:
                    places = self._places(first, first + batch.num_rows)
                    first += batch.num_rows
                    rows = pa.Table.from_batches([batch])
                    for piece in np.unique(places).tolist():
                        if piece not in writers:
                            writers[piece] = pa.ipc.new_stream(self._path(f"piece{piece}"), rows.schema)
                        writers[piece].write_table(picked(rows, np.flatnonzero(places == piece)))
        finally:
            for writer in writers.values():
                writer.close()
        os.unlink(self._path("rows"))
        return [self._path(f"piece{piece}") for piece in sorted(writers)]

    def _place(self, rows: int) -> None:
        """Note for each row which piece of so many `rows` it is in."""
        names = [f"{name} ASC NULLS LAST" for name in (f"k{i}" for i in range(len(self._columns)))]
        steps = (
            f"CREATE TABLE ranked AS SELECT n FROM keys ORDER BY {', '.join([*names, 'n'])}",
            "DROP TABLE keys",
            f"CREATE TABLE placed AS SELECT n, rowid // {rows} AS piece FROM ranked ORDER BY n",
            "DROP TABLE ranked",
        )
        apart(lambda: [self._db.execute(step) for step in steps], self._db)

    def _places(self, first: int, past: int) -> np.ndarray:
        """The pieces of the rows from `first` to before `past`: int64 [n]."""
        import numpy as np

        found = self._db.execute(f"SELECT piece FROM placed WHERE n >= {first} AND n < {past} ORDER BY n").fetchnumpy()
        return np.asarray(found["piece"], dtype=np.int64)

    def _path(self, name: str) -> str:
        assert self._folder is not None
        return os.path.join(self._folder.name, name)


def _keys(rows: pa.Table, columns: Sequence[str]) -> pa.Table:
    """The columns to sort by, as k0, k1, …, in types that Arrow and DuckDB sort alike: times as their numbers, as
    DuckDB would round nanoseconds, and one zero.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    t, found = pa.types, {}
    for number, name in enumerate(columns):
        column = rows.column(name)
        kind = plain(column.type)
        if t.is_null(kind):
            kind = pa.int8()
        column = column.cast(kind)
        if t.is_temporal(kind):
            column = column.cast({32: pa.int32(), 64: pa.int64()}[kind.bit_width])
        elif t.is_float16(kind):
            column = column.cast(pa.float32())
        elif t.is_decimal(kind):
            column = _whole_numbers(column.cast(pa.decimal128(kind.precision, kind.scale)))
        elif t.is_fixed_size_binary(kind):
            column = column.cast(pa.binary())
        if t.is_floating(column.type):
            column = pc.add(column, pa.scalar(0.0, column.type))  # -0.0 becomes 0.0
        found[f"k{number}"] = column
    return pa.table(found)


def _whole_numbers(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Decimals of 128 bits without their point, which are in the same order; DuckDB does not know every scale."""
    import pyarrow as pa

    kind = pa.decimal128(column.type.precision, 0)
    chunks = [pa.Array.from_buffers(kind, len(c), c.buffers(), offset=c.offset) for c in column.chunks]
    return pa.chunked_array(chunks, kind)
