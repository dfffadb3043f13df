"""The rows of two results joined by key columns: which row of one belongs to which of the other. DuckDB joins keys and
row numbers, within bounded memory and else on disk; the values that are compared never pass through it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa

from gristmill.arrow.casts import Lossy, lossless
from gristmill.arrow.rows import picked
from gristmill.arrow.spilling import spilling_to
from gristmill.arrow.topython import to_plain
from gristmill.comparison.side import Side
from gristmill.errors import BadJob, RunFailed
from gristmill.process.startup import imported

MEMORY = "256MB"  # of keys and row numbers; more are held on disk
STEP = 1 << 20  # row numbers that are looked at together

Key = Mapping[str, Any]


class Join:
    """The pairs of rows with equal keys. A null is equal to a null, NaN to NaN. `folder` is for what does not fit into
    MEMORY. Raises BadJob for keys that repeat within a result, and for values without a counterpart in the other's
    type (0.5 among whole numbers), and RunFailed if memory and disk do not suffice.
    """

    def __init__(self, a: Side, b: Side, keys: Mapping[str, pa.DataType], folder: str) -> None:
        self._keys, self._folder = keys, folder
        self._db = spilling_to(folder, MEMORY)
        self._sides = {"a": a, "b": b}
        try:
            for table, side in self._sides.items():
                self._load(table, side)
                self._check_apart(table, side)
            equal = " AND ".join(f"a.k{i} IS NOT DISTINCT FROM b.k{i}" for i in range(len(keys)))
            self._all(f"CREATE TABLE pairs AS SELECT a.n AS a, b.n AS b FROM a JOIN b ON {equal} ORDER BY a.n")
            self.matched = self._number("SELECT count(*) FROM pairs")
            self.in_order = self._rising()
            if not self.in_order:
                self._all("CREATE TABLE pairs_by_b AS SELECT a, b FROM pairs ORDER BY b")
        except BaseException:
            self._db.close()
            raise

    def __enter__(self) -> Join:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._db.close()

    def matches(self, of: str, first: int, past: int) -> tuple[np.ndarray, np.ndarray]:
        """The pairs whose row of side `of` ("a" or "b") is from `first` to before `past`, in its order: the numbers of
        these rows and of the others, int64 [n] each.
        """
        table, other = ("pairs", "b") if of == "a" else ("pairs" if self.in_order else "pairs_by_b", "a")
        found = self._columns(
            f"SELECT {of}, {other} FROM {table} WHERE {of} >= {first} AND {of} < {past} ORDER BY {of}"
        )
        return found[of], found[other]

    def alone(self, of: str, most: int) -> tuple[int, list[Key]]:
        """How many rows of a side have no counterpart, and the keys of the first `most` of them."""
        count = self._number(f"SELECT count(*) FROM {of}") - self.matched
        if not count or not most:
            return count, []
        numbers = self._columns(f"SELECT n FROM {of} ANTI JOIN pairs ON {of}.n = pairs.{of} ORDER BY n LIMIT {most}")[
            "n"
        ]
        return count, self._keys_at(self._sides[of], numbers)

    # ------------------------------------------------------------ inside

    def _load(self, table: str, side: Side) -> None:
        """Read the keys into a table, with the number of each row."""
        schema = pa.schema([("n", pa.int64()), *((f"k{i}", _known(k)) for i, k in enumerate(self._keys.values()))])
        made = f"CREATE TABLE {table} AS SELECT * FROM read"
        for rows in itertools.chain([schema.empty_table()], self._numbered(side)):
            self._db.register("read", rows)
            self._all(made)
            self._db.unregister("read")
            made = f"INSERT INTO {table} SELECT * FROM read"

    def _numbered(self, side: Side) -> Iterator[pa.Table]:
        for first, rows in side.stream(list(self._keys)):
            columns = {"n": pa.array(np.arange(first, first + rows.num_rows))}
            for i, (name, kind) in enumerate(self._keys.items()):
                try:
                    columns[f"k{i}"] = lossless(rows.column(name), kind).cast(_known(kind))
                except Lossy as e:
                    raise BadJob(
                        f"--on {name}: it is {rows.schema.field(name).type} in {side.name} and compared as {kind}, in "
                        f"which not every key has a value: {e}"
                    ) from None
            yield pa.table(columns)

    def _check_apart(self, table: str, side: Side) -> None:
        """Raises BadJob if two rows of a side have the same key."""
        names = ", ".join(f"k{i}" for i in range(len(self._keys)))
        groups = f"SELECT min(n) AS n, count(*) AS rows FROM {table} GROUP BY {names} HAVING count(*) > 1"
        found = self._all(f"SELECT coalesce(sum(rows), 0), min(n), arg_min(rows, n) FROM ({groups})")[0]
        if not found[0]:
            return
        (key,) = self._keys_at(side, np.array([found[1]]))
        told = ", ".join(f"{name}={value!r}" for name, value in key.items())
        others = [name for name in side.schema.names if name not in self._keys]
        way = f"add a column to --on (on=) that tells them apart: it also has {', '.join(others)}"
        raise BadJob(
            f"{side.name}: {int(found[0]):,} rows share their key with another: {told} is that of {int(found[2]):,}; "
            + (way if others else "it has no other column")
        )

    def _keys_at(self, side: Side, numbers: np.ndarray) -> list[Key]:
        """The keys of some rows, by their numbers in rising order, as they are in the result."""
        found: list[Key] = []
        for first, rows in side.stream(list(self._keys)):
            if len(found) == len(numbers):
                break
            here = numbers[(numbers >= first) & (numbers < first + rows.num_rows)] - first
            if len(here):
                some = picked(rows, here)
                columns = [to_plain(some.column(name)) for name in self._keys]
                found += [dict(zip(self._keys, values, strict=True)) for values in zip(*columns, strict=True)]
        return found

    def _rising(self) -> bool:
        """Whether the rows that belong together are in the same order in both results."""
        last = -1
        rows = self._number("SELECT count(*) FROM a")
        for first in range(0, rows, STEP):
            _, b = self.matches("a", first, first + STEP)
            if len(b) and (b[0] < last or bool((np.diff(b) < 0).any())):
                return False
            last = int(b[-1]) if len(b) else last
        return True

    def _columns(self, sql: str) -> dict[str, np.ndarray]:
        with self._told():
            found = self._db.execute(sql).fetchnumpy()
        return {name: np.asarray(values, dtype=np.int64) for name, values in found.items()}

    def _all(self, sql: str) -> list[tuple[Any, ...]]:
        with self._told():
            found: list[tuple[Any, ...]] = self._db.execute(sql).fetchall()
        return found

    @contextmanager
    def _told(self) -> Iterator[None]:
        """What DuckDB raises where memory or disk do not suffice, as RunFailed."""
        try:
            yield
        except imported("duckdb").Error as e:
            names = " and ".join(side.name for side in self._sides.values())
            raise RunFailed(
                f"{names}: their keys could not be joined in {MEMORY} of memory and the temporary folder "
                f"{self._folder} (TMPDIR names another): {type(e).__name__}: {str(e).splitlines()[0]}"
            ) from e

    def _number(self, sql: str) -> int:
        return int(self._all(sql)[0][0])


def _known(kind: pa.DataType) -> pa.DataType:
    """The type in which DuckDB is given a key: for times their numbers, as it would round nanoseconds."""
    t = pa.types
    if t.is_float16(kind):
        return pa.float32()
    return {32: pa.int32(), 64: pa.int64()}[kind.bit_width] if t.is_temporal(kind) else kind
