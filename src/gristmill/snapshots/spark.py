"""Spark tables as a source: the files of a plain Parquet table, and the rows of everything else, as a session has them
when it is opened.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Sequence
from hashlib import sha256
from typing import Any, ClassVar

import pyarrow as pa

from gristmill.errors import BadSource, SourceChanged
from gristmill.snapshots.contract import DataFile, Piece, Snapshot, SnapshotKind, Wanted
from gristmill.snapshots.lakes import whole
from gristmill.snapshots.sql import read_of
from gristmill.stores.spark import Catalog, is_plain, is_view, path_of, schema_of


class Spark:
    """`spark://db.table`: a table, or a view, in the session that there is, or one that is started to read it."""

    name: ClassVar[str] = "spark"
    queried: ClassVar[bool] = False
    said: ClassVar[tuple[str, ...]] = ()
    embedded: ClassVar[bool] = False
    marks: ClassVar[tuple[tuple[str, ...], ...]] = ()

    @staticmethod
    def open(wanted: Wanted, version: str) -> Snapshot:
        """The table as it is now. Raises SourceChanged for an earlier one, as a run that goes on knows rows by their
        places in its copy, and Spark gives them in another order each time.
        """
        if version:
            raise SourceChanged(
                f"{wanted.shown}: the copy that was made for the run is gone, and the rows of another would "
                "stand in another order: use --restart (restart=True) to score everything anew"
            )
        return Now(wanted)


_: type[SnapshotKind] = Spark  # for mypy


class Now:
    """A table as it is when it is opened."""

    told = ""
    _count: int | None

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
                self.version, self._count = self._content() if self._files is None else ("", None)
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

    def _content(self) -> tuple[str, int]:
        """What the rows are, by the sum of their 64-bit hashes, and how many: Spark gives them in another order each
        time.
        """
        from pyspark.sql import functions as f

        micro = "yyyy-MM-dd'T'HH:mm:ss.SSSSSS"  # Spark's default stops at milliseconds
        text = f.to_json(f.struct("*"), {"timestampFormat": f"{micro}XXX", "timestampNTZFormat": micro})
        row = f.xxhash64(text).cast("decimal(38,0)")
        total, count = self._rows.agg(f.sum(row), f.count(f.lit(1))).first()
        content = json.dumps([self._rows.schema.json(), str(total), count])
        return sha256(content.encode()).hexdigest()[:16], count

    def files(self) -> Sequence[DataFile] | None:
        return self._files

    def count(self) -> int | None:
        if self._count is None:
            with self._catalog.said():
                self._count = int(self._rows.count())
        return self._count

    def pieces(self) -> Sequence[Piece]:
        return [self._read]

    def _read(self) -> Iterator[pa.RecordBatch]:
        names = read_of(self._wanted, self.schema.names)
        schema = pa.schema([self.schema.field(name) for name in names])
        rows, found = self._rows.select(*[f"`{name.replace('`', '``')}`" for name in names]), 0
        for (packed,) in self._said_while(_streams(rows)):
            with pa.ipc.open_stream(packed) as stream:
                for batch in stream:
                    found += batch.num_rows
                    yield batch.cast(schema)
        if found != self.count():
            raise BadSource(
                f"{self._wanted.shown}: it changes while it is read: {found:,} rows of {self.count():,} came"
            )

    def _said_while(self, rows: Iterator[Any]) -> Iterator[Any]:
        with self._catalog.said():
            yield from rows

    def cancel(self) -> None:
        """It ends with the batch at hand."""

    def close(self) -> None:
        self._catalog.close()


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
