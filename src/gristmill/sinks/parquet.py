"""Parquet files as a sink: zstd, row groups of a size that suits readers, vectors as fixed-size lists."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gristmill.arrow import nullvectors
from gristmill.arrow.casts import fitted, lossless
from gristmill.arrow.schemas import plain, real, unwritable, wider
from gristmill.errors import BadJob, CorruptStore
from gristmill.files.contract import Files
from gristmill.job.formatoptions import known
from gristmill.sinks.contract import Role, WorkFile, Writer
from gristmill.sinks.workfile import Guarded

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["ParquetSink", "holdable", "read_as"]

GROUP_BYTES = 32 << 20  # a writer holds a group in memory twice
GROUP_ROWS = 122_880  # what DuckDB writes by default: readers skip and parallelise by group
MERGED_ROWS = 65_536  # held at once while parts are merged
_CODECS = ("zstd", "snappy", "gzip", "lz4", "brotli", "none")


class ParquetSink:
    """One Parquet file per shard. Options: `compression` (default zstd), `compression_level`, `row_group_rows`, and
    `timestamps`, a unit ("us", "ms") to which timestamps are truncated.
    """

    name = "parquet"
    suffixes: tuple[str, ...] = (".parquet",)
    tables = True
    decimal = False

    def writer(
        self, files: Files, folder: str, stem: str, nonce: str, schema: pa.Schema, options: Mapping[str, Any]
    ) -> Writer:
        known(options, ("compression", "compression_level", "row_group_rows", "timestamps"), "parquet sink")
        codec = str(options.get("compression", "zstd")).lower()
        if codec not in _CODECS:
            raise BadJob(f"parquet sink compression is {codec!r}: it must be one of {', '.join(_CODECS)}")
        return ParquetWriter(files, folder, stem, nonce, schema, codec, options)

    def stored(self, rows: pa.Table, options: Mapping[str, Any]) -> pa.Schema:
        """The schema that reads back unchanged: encodings as what they hold, except dictionaries of text, which get
        room for any number of values. Raises BadJob for what a Parquet file cannot hold.
        """
        import pyarrow as pa

        fields = list(holdable(rows.schema, "a parquet sink"))
        for i, field in enumerate(rows.schema):
            if pa.types.is_dictionary(field.type) and pa.types.is_string(fields[i].type):
                fields[i] = field.with_type(pa.dictionary(pa.int32(), pa.string(), field.type.ordered))
        return pa.schema(fields)

    def refused(self, rows: pa.Table, options: Mapping[str, Any]) -> dict[int, tuple[str, str]]:
        """Rows without a vector in a column of vectors, where pyarrow could not read them back."""
        return {} if nullvectors.READS_BACK else _without_vector(rows)

    def count(self, path: str, role: Role) -> int:
        """Rows by the footer; raises CorruptStore if there is no readable one."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            return int(pq.read_metadata(path).num_rows)
        except (pa.ArrowException, OSError) as e:
            raise CorruptStore(f"{path}: not a complete Parquet file: {' '.join(str(e).split())}") from e

    def misfit(self, path: str, schema: pa.Schema, options: Mapping[str, Any]) -> str | None:
        """A column that differs from the result's schema as Parquet gives it back."""
        import pyarrow.parquet as pq

        result = read_as(schema)
        for column in pq.read_schema(path):
            if column.name not in result.names:
                return f"has column {column.name!r}, which the result does not have"
            wanted = result.field(column.name).type
            if column.type != wanted and not _same_values(column.type, wanted):
                return f"column {column.name!r} is {column.type}, but in the result it is {wanted}"
        return None

    def dataset(self, system: Any, schema: pa.Schema, sizes: Mapping[str, int]) -> tuple[Any, Any]:
        """As pyarrow reads them, with the checksums of pages that this sink has written."""
        import pyarrow.dataset as ds

        checked = ds.ParquetFragmentScanOptions(page_checksum_verification=True)
        return ds.ParquetFileFormat(default_fragment_scan_options=checked), system

    def merge(
        self, files: Files, folder: str, parts: Sequence[WorkFile], stem: str, nonce: str, schema: pa.Schema,
        options: Mapping[str, Any],
    ) -> list[WorkFile]:  # fmt: skip
        """Through one writer, some rows at a time."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        writer = self.writer(files, folder, stem, nonce, schema, options)
        try:
            for part in parts:
                with files.local(part.path) as path, pq.ParquetFile(path) as file:
                    for batch in file.iter_batches(batch_size=MERGED_ROWS):
                        writer.write(pa.Table.from_batches([batch]))
            return writer.close()
        except BaseException:
            writer.abort()
            raise


class ParquetWriter:
    """Gathers rows into row groups of 32 MB or 122,880 rows, so that small writes do not make small groups."""

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
                write_page_checksum=True,
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
        """Write the held rows as row groups."""
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
    """A dictionary column without null as one of its texts, which pyarrow's writer does not handle."""
    import pyarrow as pa

    if not any(c.dictionary.null_count for c in column.chunks):
        return column
    return pa.chunked_array([lossless(lossless(c, pa.string()), c.type) for c in column.chunks], column.type)


def _without_vector(rows: pa.Table) -> dict[int, tuple[str, str]]:
    import numpy as np
    import pyarrow as pa

    found: dict[int, tuple[str, str]] = {}
    for name, column in zip(rows.column_names, rows.columns, strict=True):
        mask = nullvectors.missing(column)
        for row in [] if mask is None else np.flatnonzero(mask).tolist():
            why = f"column {name!r} lacks a vector here, and pyarrow {pa.__version__} cannot read Parquet files of that"
            found.setdefault(row, ("NullVector", f"{why}: pip install 'pyarrow>=26', then retry-dead, or format jsonl"))
    return found


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
        except (pa.ArrowException, OSError) as e:  # Parquet's own errors come as OSError, also in memory
            why = f"that (pyarrow: {e})"
        if why is not None:
            raise BadJob(
                f"column {field.name!r} is {field.type}, and {where} cannot hold {why}: cast it to another type, or "
                "leave it out"
            )
    return pa.schema(fields, schema.metadata)


def read_as(schema: pa.Schema) -> pa.Schema:
    """The schema that a file written with this one has: Parquet knows fewer units and layouts than Arrow."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with pa.BufferOutputStream() as out:
        pq.write_table(pa.Table.from_batches([], schema), out)  # schema.empty_table() imports pandas
        return pq.read_schema(pa.BufferReader(out.getvalue()))


def _same_values(stored: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether values of one type, at any depth, read as the other: the same, a wider one, another unit of time."""
    import pyarrow as pa

    t = pa.types
    if stored == wanted or wanted in (wider(stored, wanted), real(stored, wanted)):
        return True
    if t.is_dictionary(stored) or t.is_dictionary(wanted):
        return _same_values(*(k.value_type if t.is_dictionary(k) else k for k in (stored, wanted)))
    if t.is_timestamp(stored) and t.is_timestamp(wanted):
        return bool(stored.tz == wanted.tz)
    if type(stored) is not type(wanted) or stored.num_fields != wanted.num_fields or not stored.num_fields:
        return False
    if t.is_fixed_size_list(stored) and stored.list_size != wanted.list_size:
        return False
    pairs = [(stored.field(i), wanted.field(i)) for i in range(stored.num_fields)]
    named = not t.is_struct(stored) or all(s.name == w.name for s, w in pairs)
    return named and all(_same_values(s.type, w.type) for s, w in pairs)


def worth_a_dictionary(schema: pa.Schema) -> list[str]:
    """Parquet paths of the columns to try a dictionary on: text, and columns that are dictionaries already. For floats
    it only costs time (measured: design, section 8).
    """
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
