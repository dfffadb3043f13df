"""Parquet files as a sink: zstd, row groups that readers like, vectors as fixed-size lists."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gristmill.errors import BadJob, CorruptStore
from gristmill.io.guarded import Guarded
from gristmill.io.lossless import fitted, lossless
from gristmill.io.options import known
from gristmill.io.schema import plain, unwritable
from gristmill.plan.contracts import Files, WorkFile, Writer

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["ParquetSink", "holdable", "read_as"]

GROUP_BYTES = 32 << 20  # a writer holds a group in memory twice
GROUP_ROWS = 122_880  # what DuckDB writes by default: readers skip and parallelise by group
_CODECS = ("zstd", "snappy", "gzip", "lz4", "brotli", "none")


class ParquetSink:
    """One Parquet file a shard. Options: `compression` (default zstd), `compression_level`, `row_group_rows`, and
    `timestamps`, a unit ("us", "ms") that timestamps are cut down to.
    """

    name = "parquet"
    suffix = ".parquet"

    def writer(
        self, files: Files, folder: str, stem: str, nonce: str, schema: pa.Schema, options: Mapping[str, Any]
    ) -> Writer:
        known(options, ("compression", "compression_level", "row_group_rows", "timestamps"), "parquet sink")
        codec = str(options.get("compression", "zstd")).lower()
        if codec not in _CODECS:
            raise BadJob(f"parquet sink compression is {codec!r}: it is one of {', '.join(_CODECS)}")
        return ParquetWriter(files, folder, stem, nonce, schema, codec, options)

    def stored(self, rows: pa.Table, options: Mapping[str, Any]) -> pa.Schema:
        """The schema that reads back as it is: encodings as what they hold, but for columns that are dictionaries of
        text, which have room for any number of values. Raises BadJob for what a Parquet file cannot hold.
        """
        import pyarrow as pa

        fields = list(holdable(rows.schema, "a parquet sink"))
        for i, field in enumerate(rows.schema):
            if pa.types.is_dictionary(field.type) and pa.types.is_string(fields[i].type):
                fields[i] = field.with_type(pa.dictionary(pa.int32(), pa.string(), field.type.ordered))
        return pa.schema(fields)

    def refused(self, rows: pa.Table, options: Mapping[str, Any]) -> dict[int, tuple[str, str]]:
        """None."""
        return {}

    def count(self, path: str, role: str) -> int:
        """Rows by the footer; raises CorruptStore where there is none that can be read."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            return int(pq.read_metadata(path).num_rows)
        except (pa.ArrowException, OSError) as e:
            raise CorruptStore(f"{path}: not a whole Parquet file: {' '.join(str(e).split())}") from e


class ParquetWriter:
    """Gathers rows to row groups of 32 MB or 122,880 rows, so that small writes do not make small groups."""

    def __init__(
        self,
        files: Files,
        folder: str,
        stem: str,
        nonce: str,
        schema: pa.Schema,
        codec: str,
        options: Mapping[str, Any],
    ) -> None:
        import pyarrow.parquet as pq

        self._files = files
        self._path = os.path.join(folder, f"{stem}.parquet.{nonce}.tmp")
        self._publish = f"{stem}.parquet"
        self._schema = schema
        self._group_rows = int(options.get("row_group_rows", GROUP_ROWS))
        if self._group_rows < 1:
            raise BadJob(f"parquet sink row_group_rows is {self._group_rows}: give at least 1")
        self._held: list[pa.Table] = []
        self._held_rows = self._held_bytes = self._rows = 0
        self._file = files.create(self._path)
        self._guarded = Guarded(self._file)
        self._writer: Any = None
        try:
            self._writer = pq.ParquetWriter(
                self._guarded,
                schema,
                compression=codec,
                compression_level=options.get("compression_level"),
                use_dictionary=worth_a_dictionary(schema),
                coerce_timestamps=options.get("timestamps"),
                allow_truncated_timestamps="timestamps" in options,
            )
        except BaseException:
            self.abort()
            raise

    def write(self, rows: pa.Table) -> None:
        import pyarrow as pa

        if rows.schema != self._schema:
            rows = fitted(rows, self._schema)
        for i, field in enumerate(rows.schema):
            if pa.types.is_dictionary(field.type):
                rows = rows.set_column(i, field, _told(rows.column(i)))
        self._held.append(rows)
        self._held_rows += rows.num_rows
        self._held_bytes += rows.nbytes
        self._rows += rows.num_rows
        if self._held_bytes >= GROUP_BYTES or self._held_rows >= self._group_rows:
            self.flush()

    def flush(self) -> None:
        """Write what is held as row groups."""
        import pyarrow as pa

        if self._held_rows:
            self._writer.write_table(pa.concat_tables(self._held), row_group_size=self._group_rows)
        self._held.clear()
        self._held_rows = self._held_bytes = 0

    def close(self) -> list[WorkFile]:
        self.flush()
        self._writer.close()
        self._files.sync(self._file)
        self._file.close()
        return [WorkFile(self._path, self._publish, self._rows)]

    def abort(self) -> None:
        self._held.clear()
        self._guarded.drop()
        with contextlib.suppress(Exception):
            self._writer.close()
        with contextlib.suppress(Exception):
            self._file.close()
        with contextlib.suppress(Exception):
            self._files.remove(self._path)


def _told(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """A dictionary column without null among its texts, which pyarrow's writer does not know."""
    import pyarrow as pa

    if not any(c.dictionary.null_count for c in column.chunks):
        return column
    return pa.chunked_array([lossless(lossless(c, pa.string()), c.type) for c in column.chunks], column.type)


def holdable(schema: pa.Schema, where: str) -> pa.Schema:
    """The schema without encodings and views. Raises BadJob, naming `where`, for what no Parquet file holds."""
    import pyarrow as pa

    fields = []
    for field in schema:
        fields.append(field.with_type(plain(field.type)))
        why = unwritable(field.type)
        try:
            if why is None:
                read_as(pa.schema(fields[-1:]))
        except pa.ArrowException as e:
            why = f"that (pyarrow: {e})"
        if why is not None:
            raise BadJob(
                f"column {field.name!r} is {field.type}, and {where} cannot hold {why}: make it another type, or leave "
                "it out"
            )
    return pa.schema(fields, schema.metadata)


def read_as(schema: pa.Schema) -> pa.Schema:
    """The schema that a file written with this one has: Parquet knows fewer units and layouts than Arrow."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with pa.BufferOutputStream() as out:
        pq.write_table(pa.Table.from_batches([], schema), out)  # schema.empty_table() imports pandas
        return pq.read_schema(pa.BufferReader(out.getvalue()))


def worth_a_dictionary(schema: pa.Schema) -> list[str]:
    """Parquet paths of the columns to try a dictionary on: text, and what is a dictionary already. For floats it only
    costs time (measured: design, section 8)."""
    import pyarrow as pa

    t = pa.types

    def texts(kind: pa.DataType) -> bool:
        return bool(t.is_string(kind) or t.is_large_string(kind) or t.is_string_view(kind) or t.is_dictionary(kind))

    out = []
    for field in schema:
        if texts(field.type):
            out.append(field.name)
        elif (t.is_list(field.type) or t.is_large_list(field.type)) and texts(field.type.value_type):
            out.append(f"{field.name}.list.element")
    return out
