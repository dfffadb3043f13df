"""SQLite files as a source. Columns have the types that the table declares; others, and those of expressions, the types
of their values.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar
from urllib.parse import quote

import pyarrow as pa

from gristmill.errors import BadSource
from gristmill.files.sqlitelog import patient
from gristmill.job.snapshots import near, table_of
from gristmill.snapshots.contract import DataFile, Piece, Snapshot, SnapshotKind, Wanted
from gristmill.snapshots.rows import as_batch
from gristmill.snapshots.sql import counting, selected
from gristmill.stores.sql import not_sqlite

BATCH_ROWS = 16_384
PATIENCE = 20.0  # seconds to wait for a file that another process is writing
# What a declared type holds, by a part of its name, as SQLite itself decides: https://sqlite.org/datatype3.html
_KINDS = (
    ("BOOL", pa.bool_()),
    ("INT", pa.int64()),
    *((part, pa.string()) for part in ("CHAR", "CLOB", "TEXT", "JSON", "DATE", "TIME")),
    ("BLOB", pa.binary()),
    *((part, pa.float64()) for part in ("REAL", "FLOA", "DOUB")),
)


class SQLite:
    """`sqlite:///FILE#table`, or `sqlite://FILE#table` for a path relative to the current folder."""

    name: ClassVar[str] = "sqlite"
    queried: ClassVar[bool] = True
    said: ClassVar[tuple[str, ...]] = ()
    embedded: ClassVar[bool] = True
    in_address: ClassVar[tuple[str, ...]] = ()
    marks: ClassVar[tuple[tuple[str, ...], ...]] = ()

    @staticmethod
    def open(wanted: Wanted, version: str) -> Snapshot:
        """The file, in a transaction of its own."""
        if not os.path.isfile(wanted.place.path):
            raise BadSource(f"{wanted.shown}: there is no file {wanted.place.path}")
        return Rows(wanted)


_: type[SnapshotKind] = SQLite  # for mypy


class Rows:
    """A table or a query of one connection."""

    version = told = ""

    def __init__(self, wanted: Wanted) -> None:
        self._wanted = wanted
        address = f"file:{quote(wanted.place.path)}?mode=ro"
        self._db = patient(address, PATIENCE)
        try:
            self._names, self._kinds = self._columns()
            self._db.execute("BEGIN")
            self._db.execute("SELECT count(*) FROM sqlite_master").fetchall()  # the snapshot is that of the first look
        except sqlite3.Error as e:
            self._db.close()
            raise self._said(e) from e
        except BaseException:
            self._db.close()
            raise
        kinds = [kind for kind in self._kinds if kind is not None]
        typed = len(kinds) == len(self._names)
        self.schema = pa.schema(list(zip(self._names, kinds, strict=True))) if typed else None

    def _columns(self) -> tuple[list[str], list[pa.DataType | None]]:
        """The columns that are read, with their declared types."""
        if self._wanted.query is None:
            schema, table = table_of(self._wanted)
            master = f'"{schema}".sqlite_master' if schema else "sqlite_master"
            there = [row[0] for row in self._db.execute(f"SELECT name FROM {master} WHERE type IN ('table', 'view')")]
            if table.lower() not in [name.lower() for name in there]:
                raise BadSource(f"{self._wanted.shown}: there is no table {table!r}{near(table, there)}")
        # A view tells the declared types of its columns, also for a query; the temporary schema is in memory.
        self._db.execute(f"CREATE TEMP VIEW gristmill_rows AS {selected(self._wanted)}")
        about = self._db.execute("PRAGMA temp.table_info(gristmill_rows)").fetchall()
        self._sql = selected(self._wanted, [row[1] for row in about])
        self._db.execute("DROP VIEW temp.gristmill_rows")
        declared = {row[1]: declared_kind(row[2]) for row in about}
        names = list(declared) if self._wanted.columns is None else list(self._wanted.columns)
        return names, [declared[name] for name in names]

    def files(self) -> Sequence[DataFile] | None:
        return None

    def count(self) -> int | None:
        try:
            return int(self._db.execute(counting(self._wanted)).fetchall()[0][0])
        except sqlite3.Error as e:
            raise self._said(e) from e

    def pieces(self) -> Sequence[Piece]:
        return [self._read]

    def _read(self) -> Iterator[pa.RecordBatch]:
        try:
            cursor = self._db.execute(self._sql)
            rows = cursor.fetchmany(BATCH_ROWS)
            yield as_batch(self._wanted, self._names, rows, self._kinds)
            while rows := cursor.fetchmany(BATCH_ROWS):
                yield as_batch(self._wanted, self._names, rows, self._kinds)
        except sqlite3.Error as e:
            raise self._said(e) from e

    def _said(self, error: BaseException) -> BadSource:
        other = not_sqlite(str(error), self._wanted.shown)
        return BadSource(f"{self._wanted.shown}: SQLite says: {self._wanted.words(error)}{other}")

    def cancel(self) -> None:
        self._db.interrupt()

    def close(self) -> None:
        self._db.close()


def declared_kind(declared: str) -> Any:
    """The type of a column's values by the type that its table declares; None for one that only they tell."""
    return next((kind for part, kind in _KINDS if part in declared.upper()), None)
