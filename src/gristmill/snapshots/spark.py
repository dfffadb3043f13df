"""Spark tables as a source: the files of a plain Parquet table, and the rows of everything else, as a session has them
when it is opened.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import pyarrow as pa

from gristmill.errors import BadSource
from gristmill.snapshots.contract import DataFile, Piece, Snapshot, SnapshotKind, Wanted
from gristmill.snapshots.lakes import whole
from gristmill.snapshots.sql import read_of
from gristmill.stores.spark import Catalog, is_plain, is_view, path_of, quoted, schema_of


class Spark:
    """`spark://db.table`: a table, or a view, in the session that there is, or one that is started to read it."""

    name: ClassVar[str] = "spark"
    queried: ClassVar[bool] = False
    said: ClassVar[tuple[str, ...]] = ()
    embedded: ClassVar[bool] = False
    in_address: ClassVar[tuple[str, ...]] = ()
    marks: ClassVar[tuple[tuple[str, ...], ...]] = ()

    @staticmethod
    def open(wanted: Wanted, version: str) -> Snapshot:
        """The table as it is now: it has no versions."""
        return Now(wanted)


_: type[SnapshotKind] = Spark  # for mypy


class Now:
    """A table as it is when it is opened."""

    version = told = ""

    def __init__(self, wanted: Wanted) -> None:
        self._wanted = wanted
        self._catalog = catalog = Catalog(wanted.place)
        try:
            about = catalog.about()
            if not about:
                raise BadSource(f"{wanted.shown}: Spark's catalog has no such table{self._near()}")
            with catalog.said():
                self._rows = catalog.rows()
                self.schema = schema_of(self._rows)
                self._files = self._own() if is_plain(about) and not is_view(about) else None
        except BaseException:
            catalog.close()
            raise

    def _near(self) -> str:
        spark = self._catalog.spark
        database = self._catalog.table.rpartition(".")[0] or spark.catalog.currentDatabase()
        if not spark.catalog.databaseExists(database):
            return f": it has no database {database!r}"
        names = [t.name for t in spark.catalog.listTables(database)]
        return f": {database} holds {', '.join(names[:8]) or 'none'}"

    def _own(self) -> list[DataFile] | None:
        """The table's files, unless columns were added or changed since one was written."""
        files = [DataFile(path_of(file)) for file in sorted(self._rows.inputFiles())]
        return files if files and whole(self._wanted, files, self.schema, times=False) else None

    def files(self) -> Sequence[DataFile] | None:
        return self._files

    def count(self) -> int | None:
        with self._catalog.said():
            return int(self._rows.count())

    def pieces(self) -> Sequence[Piece]:
        return [self._read]

    def _read(self) -> Iterator[pa.RecordBatch]:
        names = read_of(self._wanted, self.schema.names)
        schema = pa.schema([self.schema.field(name) for name in names])
        with self._catalog.said():
            rows = _ordered(self._rows.select(*map(quoted, names)))
        for (packed,) in self._said_while(_streams(rows)):
            with pa.ipc.open_stream(packed) as stream:
                for batch in stream:
                    yield batch.cast(schema)

    def _said_while(self, rows: Iterator[Any]) -> Iterator[Any]:
        with self._catalog.said():
            yield from rows

    def cancel(self) -> None:
        """It ends with the batch at hand."""

    def close(self) -> None:
        self._catalog.close()


def _ordered(rows: Any) -> Any:
    """Rows in an order of their own: Spark gives them in another one each time."""
    from pyspark.sql import functions as f

    micro = "yyyy-MM-dd'T'HH:mm:ss.SSSSSS"  # Spark's default stops at milliseconds
    options = {"timestampFormat": f"{micro}XXX", "timestampNTZFormat": micro, "timeZone": "UTC"}
    text = f.to_json(f.struct(*map(quoted, rows.columns)), options)
    return rows.orderBy(f.xxhash64(text), text)


def _streams(rows: Any) -> Iterator[Any]:
    """Rows as Arrow streams, a partition in memory at a time. Spark's Python workers pack them: the function is sent
    there whole, as it is of no module.
    """

    def packed(batches: Iterator[Any]) -> Iterator[Any]:
        import pyarrow as pa

        for batch in batches:
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, batch.schema) as writer:
                writer.write_batch(batch)
            yield pa.record_batch([pa.array([sink.getvalue().to_pybytes()], pa.binary())], names=["rows"])

    with warnings.catch_warnings():  # of a pandas that Spark does not know yet, and that takes no part in this
        warnings.simplefilter("ignore", FutureWarning)
        made = rows.mapInArrow(packed, "rows binary")
    yield from made.toLocalIterator()
