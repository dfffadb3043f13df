"""DuckDB files as a source. Nobody can write such a file while it is open for reading, so it is copied and let go."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import pyarrow as pa

from gristmill.arrow.spilling import quiet
from gristmill.errors import BadSource, RunFailed
from gristmill.job.snapshots import near, table_of
from gristmill.process.startup import imported
from gristmill.snapshots.contract import DataFile, Piece, Snapshot, SnapshotKind, Wanted
from gristmill.snapshots.sql import counting, selected
from gristmill.snapshots.times import checked

PATIENCE = 20.0  # seconds to wait for a file that another process has open for writing
BATCH_ROWS = 65_536
_BOUNDS = {"timestamp": (2 - 2**63, 2**63 - 2), "date": (2 - 2**31, 2**31 - 2)}  # what is at the ends is infinity
_AS_TEXT = (
    "INTERVAL",
    "TIME WITH TIME ZONE",
    "BIT",
    "UHUGEINT",
    "BIGNUM",
    "VARINT",
)  # Arrow has no such type, or a part


class DuckDB:
    """`duckdb:///FILE#table`, or `duckdb://FILE#schema.table` for a path relative to the current folder."""

    name: ClassVar[str] = "duckdb"
    queried: ClassVar[bool] = True
    said: ClassVar[tuple[str, ...]] = ()
    embedded: ClassVar[bool] = True
    marks: ClassVar[tuple[tuple[str, ...], ...]] = ()

    @staticmethod
    def open(wanted: Wanted, version: str) -> Snapshot:
        """The file, open for reading, with a transaction of its own."""
        if not os.path.isfile(wanted.place.path):
            raise BadSource(f"{wanted.shown}: there is no file {wanted.place.path}")
        return Rows(wanted)


_: type[SnapshotKind] = DuckDB  # for mypy


class Rows:
    """A table or a query of one connection."""

    version = told = ""

    def __init__(self, wanted: Wanted) -> None:
        duckdb = imported("duckdb")
        self._wanted, self._words = wanted, wanted.place.words
        self._db = self._connected(duckdb)
        try:
            self._db.execute("SET TimeZone = 'UTC'; BEGIN TRANSACTION READ ONLY")
            self._sql, self.schema = self._prepared()
        except duckdb.Error as e:
            self._db.close()
            raise BadSource(f"{wanted.shown}: DuckDB says: {self._words(e)}") from e
        except BaseException:
            self._db.close()
            raise

    def _connected(self, duckdb: Any) -> Any:
        until = time.monotonic() + PATIENCE
        while True:
            try:
                place = self._wanted.place
                return quiet(duckdb.connect(place.path, read_only=True, config=dict(place.options)))
            except duckdb.IOException as e:
                if "lock" not in str(e).lower():
                    raise BadSource(f"{self._wanted.shown}: DuckDB says: {self._words(e)}") from e
                if time.monotonic() > until:
                    raise RunFailed(
                        f"{self._wanted.shown}: another process has it open for writing: wait for it, or stop it, and "
                        f"run again (DuckDB says: {self._words(e)})"
                    ) from e
                time.sleep(0.1)
            except duckdb.Error as e:
                raise BadSource(f"{self._wanted.shown}: DuckDB says: {self._words(e)}") from e

    def _prepared(self) -> tuple[str, pa.Schema]:
        """The statement that gives the rows, and their types."""
        query = self._wanted.query
        if query is None:
            schema, table = table_of(self._wanted)
            there = [row[0] for row in self._db.execute("SELECT table_name FROM information_schema.tables "
                     "WHERE table_schema = ?", [schema or "main"]).fetchall()]  # fmt: skip
            if table.lower() not in [name.lower() for name in there]:
                raise BadSource(f"{self._wanted.shown}: there is no table {table!r}{near(table, there)}")
        columns = {n: k for n, k, *_ in self._db.execute(f"DESCRIBE {selected(self._wanted)}").fetchall()}
        texts = {n: "{}::VARCHAR" for n, kind in columns.items() if kind.startswith(_AS_TEXT) and "[" not in kind}
        sql = selected(self._wanted, list(columns), texts)
        return sql, self._db.sql(f"SELECT * FROM (\n{sql}\n) LIMIT 0").to_arrow_table().schema

    def files(self) -> Sequence[DataFile] | None:
        return None

    def count(self) -> int | None:
        duckdb = imported("duckdb")
        try:
            return int(self._db.sql(counting(self._wanted)).fetchall()[0][0])
        except duckdb.Error as e:
            raise BadSource(f"{self._wanted.shown}: DuckDB says: {self._words(e)}") from e

    def pieces(self) -> Sequence[Piece]:
        return [self._read]

    def _read(self) -> Iterator[pa.RecordBatch]:
        duckdb = imported("duckdb")
        try:
            for batch in self._db.sql(self._sql).to_arrow_reader(BATCH_ROWS):
                for name, values in zip(batch.schema.names, batch.columns, strict=True):
                    checked(self._wanted, name, values, _BOUNDS)
                yield batch
        except (duckdb.Error, pa.ArrowException, OSError) as e:  # the latter two from within a stream
            raise BadSource(f"{self._wanted.shown}: DuckDB says: {self._words(e)}") from e

    def cancel(self) -> None:
        self._db.interrupt()

    def close(self) -> None:
        self._db.close()
