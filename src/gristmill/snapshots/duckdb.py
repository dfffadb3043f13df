"""DuckDB files as a source. Nobody can write such a file while it is open for reading, so it is copied and let go."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import pyarrow as pa

from gristmill.arrow.spilling import batches_of, tamed
from gristmill.errors import BadSource, RunFailed
from gristmill.job.snapshots import near, table_of
from gristmill.process.interrupts import Patience
from gristmill.process.startup import imported
from gristmill.snapshots.contract import DataFile, Piece, Snapshot, SnapshotKind, Wanted
from gristmill.snapshots.sql import counting, read_of, selected
from gristmill.snapshots.times import checked
from gristmill.stores.sql import of_sqlite, quoted

PATIENCE = 20.0  # seconds to wait for a file that another process has open for writing
BATCH_ROWS = 65_536
_BOUNDS = {  # what is at the ends is infinity; 24:00:00 is a time of DuckDB's, and not of Arrow's
    "timestamp": (2 - 2**63, 2**63 - 2),
    "date": (2 - 2**31, 2**31 - 2),
    "time": (0, 86_400_000_000 - 1),
    "decimal": (1 - 10**38, 10**38 - 1),  # HUGEINT
}
_AS_TEXT = frozenset(  # Arrow has no such type, or a part of it
    {"INTERVAL", "TIME WITH TIME ZONE", "BIT", "UHUGEINT", "BIGNUM", "VARINT", "VARIANT"}
)


class DuckDB:
    """`duckdb:///FILE#table`, or `duckdb://FILE#schema.table` for a path relative to the current folder."""

    name: ClassVar[str] = "duckdb"
    queried: ClassVar[bool] = True
    said: ClassVar[tuple[str, ...]] = ()
    embedded: ClassVar[bool] = True
    in_address: ClassVar[tuple[str, ...]] = ()
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
        patience = Patience(PATIENCE)
        while True:
            try:
                place = self._wanted.place
                return tamed(duckdb.connect(place.path, read_only=True, config=dict(place.options)))
            except duckdb.IOException as e:
                if (told := of_sqlite(str(e), self._wanted.shown)) is not None:
                    raise BadSource(told) from e
                if "lock" not in str(e).lower():
                    raise BadSource(f"{self._wanted.shown}: DuckDB says: {self._words(e)}") from e
                if patience.over():
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
        there = self._db.sql(selected(self._wanted))
        columns = dict(zip(there.columns, there.types, strict=True))
        if len(columns) < len(there.columns):
            read_of(self._wanted, there.columns)  # two of one name
        held = {name: self._held(name, kind) for name, kind in columns.items()}
        casts = {name: f"CAST({{}} AS {_braced(held[name])})" for name in columns if held[name] != str(columns[name])}
        sql = selected(self._wanted, list(columns), casts)
        return sql, self._db.sql(f"SELECT * FROM (\n{sql}\n) LIMIT 0").to_arrow_table().schema

    def _held(self, name: str, kind: Any) -> str:
        """A type with text in place of what Arrow has no type for, also inside of lists, structs and maps."""
        if (told := str(kind)) in _AS_TEXT:
            return "VARCHAR"
        if kind.id in ("list", "array"):
            (_, of), *size = kind.children
            return f"{self._held(name, of)}[{size[0][1] if size else ''}]"
        if kind.id == "map":
            return f"MAP({', '.join(self._held(name, of) for _, of in kind.children)})"
        if kind.id == "struct" and all(part for part, _ in kind.children):
            parts = [(part, of, self._held(name, of)) for part, of in kind.children]
            same = all(held == str(of) for _, of, held in parts)
            return told if same else f"STRUCT({', '.join(f'{quoted(part)} {held}' for part, _, held in parts)})"
        if kind.id in ("struct", "tuple", "union") and any(text in told for text in _AS_TEXT):
            raise BadSource(f"{self._wanted.shown}: column {name!r} is {told}: cast it in a query ({name}::VARCHAR)")
        return told

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
            for batch in batches_of(self._db.sql(self._sql), BATCH_ROWS):
                for name, values in zip(batch.schema.names, batch.columns, strict=True):
                    checked(self._wanted, name, values, _BOUNDS)
                yield batch
        except (duckdb.Error, pa.ArrowException, OSError) as e:  # the latter two from within a stream
            raise BadSource(f"{self._wanted.shown}: DuckDB says: {self._words(e)}") from e

    def cancel(self) -> None:
        self._db.interrupt()

    def close(self) -> None:
        self._db.close()


def _braced(text: str) -> str:
    """As `str.format` gives it back."""
    return text.replace("{", "{{").replace("}", "}}")
