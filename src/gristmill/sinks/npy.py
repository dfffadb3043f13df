"""Vectors as .npy files, which numpy and every vector index can map into memory, each with a Parquet file of the other
columns in the same order.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import struct
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from gristmill.errors import BadJob, BadOutput, CorruptStore
from gristmill.files.contract import Files
from gristmill.job.formatoptions import known
from gristmill.sinks.contract import Role, WorkFile, Writer
from gristmill.sinks.parquet import MERGED_ROWS, ParquetSink

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["NpySink"]

_HEADER = 128  # bytes, fixed, so that the row count can be written last; numpy wants a multiple of 64


class NpySink:
    """`<stem>.npy`, float32 [rows, width] in order, of the same width throughout a result, and `<stem>.ids.parquet`.
    Option: `vector`, the column to write.
    """

    name = "npy"
    suffixes: tuple[str, ...] = (".npy", ".ids.parquet")
    tables = decimal = False

    def writer(
        self, files: Files, folder: str, stem: str, nonce: str, schema: pa.Schema, options: Mapping[str, Any]
    ) -> Writer:
        known(options, ("vector",), "npy sink")
        return NpyWriter(files, folder, stem, nonce, schema, vector_column(schema, options.get("vector")))

    def stored(self, rows: pa.Table, options: Mapping[str, Any]) -> pa.Schema:
        """The schema with the width of the first vectors, which all vectors of the result must have."""
        import pyarrow as pa
        import pyarrow.compute as pc

        if not rows.num_rows:
            return rows.schema
        name = vector_column(rows.schema, options.get("vector"))
        at, kind = rows.schema.get_field_index(name), rows.column(name).type
        if pa.types.is_fixed_size_list(kind):
            return rows.schema
        widths = sorted(pc.list_value_length(rows.column(name)).drop_null().unique().to_pylist())
        if len(widths) > 1:
            raise BadOutput(f"npy sink: vectors in column {name!r} have different widths: {widths}")
        if not widths:
            raise BadOutput(f"npy sink: column {name!r} has rows without a vector, which a matrix cannot hold")
        return rows.schema.set(at, rows.schema.field(at).with_type(pa.list_(kind.value_type, widths[0])))

    def refused(self, rows: pa.Table, options: Mapping[str, Any]) -> dict[int, tuple[str, str]]:
        """Rows without a whole vector, or with a number that float32 would make infinite."""
        if not rows.num_rows:
            return {}
        name = vector_column(rows.schema, options.get("vector"))
        hole = ("NoVector", f"column {name!r} is null, or has nulls")
        message = f"column {name!r} has a number too large for float32, the type of npy sinks: scale it in a step"
        return {
            **dict.fromkeys(_overflowing(rows.column(name)).tolist(), ("Overflow", message)),
            **dict.fromkeys(_holed(rows.column(name)).tolist(), hole),
        }

    def count(self, path: str, role: Role) -> int:
        """Rows by the header, which must agree with the file's size."""
        return self.shape(path)[0] if role == "rows" else ParquetSink().count(path, role)

    def misfit(self, path: str, schema: pa.Schema, options: Mapping[str, Any]) -> str | None:
        """Vectors of another width than the result's."""
        import pyarrow as pa

        width, kind = self.shape(path)[1], schema.field(vector_column(schema, options.get("vector"))).type
        wrong = pa.types.is_fixed_size_list(kind) and width != kind.list_size
        return f"vectors of width {width}, but those of the result have width {kind.list_size}" if wrong else None

    def dataset(self, system: Any, schema: pa.Schema, sizes: Mapping[str, int]) -> tuple[Any, Any]:
        """The Parquet files beside the vectors."""
        return ParquetSink().dataset(system, schema, sizes)

    def merge(
        self, files: Files, folder: str, parts: Sequence[WorkFile], stem: str, nonce: str, schema: pa.Schema,
        options: Mapping[str, Any],
    ) -> list[WorkFile]:  # fmt: skip
        """The matrices one below the other, as bytes; the other columns through one writer."""
        column = vector_column(schema, options.get("vector"))
        writer = NpyWriter(files, folder, stem, nonce, schema, column)
        try:
            for part in parts:
                with files.local(part.path) as path:
                    if part.role == "rows":
                        writer.copy(path)
                    else:
                        writer.copy_beside(path)
            return writer.close()
        except BaseException:
            writer.abort()
            raise

    def shape(self, path: str) -> tuple[int, int]:
        """Rows and width by the header. Raises CorruptStore if the file's size does not agree."""
        size = os.path.getsize(path)
        with open(path, "rb") as file:
            try:
                version = np.lib.format.read_magic(file)
                shape, fortran, dtype = np.lib.format.read_array_header_1_0(file)
            except ValueError as e:
                raise CorruptStore(f"{path}: not a complete npy file: {e}") from e
            start = file.tell()
        if version != (1, 0) or fortran or len(shape) != 2 or size != start + dtype.itemsize * shape[0] * shape[1]:
            raise CorruptStore(f"{path}: {size} bytes are not {shape} of {dtype}: the file is incomplete")
        return int(shape[0]), int(shape[1])


def _holed(column: pa.ChunkedArray) -> np.ndarray:
    """Row numbers at which a column of lists is null or has a null in its list."""
    import pyarrow.compute as pc

    found = column.is_null().to_numpy()
    vectors = column.combine_chunks().drop_null()
    missing = vectors.flatten().is_null().to_numpy(zero_copy_only=False)
    if missing.any():
        rows = np.flatnonzero(~found)
        found[np.repeat(rows, pc.list_value_length(vectors))[missing]] = True
    return np.flatnonzero(found)


def _overflowing(column: pa.ChunkedArray) -> np.ndarray:
    """Row numbers at which a column of lists has a finite value that is not finite as float32."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if not pa.types.is_float64(column.type.value_type):
        return np.empty(0, dtype=np.int64)
    vectors = column.combine_chunks().drop_null()
    values = vectors.flatten().to_numpy(zero_copy_only=False)  # null is NaN
    with np.errstate(over="ignore"):
        beyond = np.isinf(values.astype(np.float32)) & ~np.isinf(values)
    rows = np.flatnonzero(column.is_valid().to_numpy())
    return np.unique(np.repeat(rows, pc.list_value_length(vectors))[beyond])


def vector_column(schema: pa.Schema, asked: str | None) -> str:
    """The column of vectors: the one asked for, else the only one there is. Raises BadJob, naming the candidates."""
    import pyarrow as pa

    t = pa.types
    found: list[str] = [
        f.name
        for f in schema
        if (t.is_fixed_size_list(f.type) or t.is_list(f.type) or t.is_large_list(f.type))
        and t.is_floating(f.type.value_type)
    ]
    if asked is not None:
        if asked not in found:
            raise BadJob(f"npy sink vector is {asked!r}: the vector columns are {', '.join(found) or 'none'}")
        return asked
    if len(found) == 1:
        return found[0]
    if not found:
        raise BadJob(f"npy sink: no column holds vectors of floats; the columns are {', '.join(schema.names)}")
    raise BadJob(f"npy sink: columns {', '.join(found)} hold vectors: name one with the sink option vector=")


class NpyWriter:
    """Writes vectors as they come, and at the end the header, which holds their number."""

    def __init__(self, files: Files, folder: str, stem: str, nonce: str, schema: pa.Schema, column: str) -> None:
        import pyarrow as pa

        self._files = files
        self._publish = f"{stem}.npy"
        self._path = os.path.join(folder, f"{self._publish}.{nonce}.tmp")
        self._column = column
        kind = schema.field(column).type
        if not pa.types.is_fixed_size_list(kind):
            raise BadOutput(
                f"npy sink: the width of the vectors in column {column!r} is not known, as none of the first rows was "
                f"scored: declare it with returns={{{column!r}: 'float32[384]'}}, and start over with --restart "
                "(restart=True)"
            )
        self._width: int = kind.list_size
        self._others = [f for f in schema if f.name != column]
        self._rows = self._beside = 0
        ids = pa.schema(self._others or [("row", pa.int64())])
        self._ids = ParquetSink().writer(files, folder, f"{stem}.ids", nonce, ids, {})
        try:
            self._file = files.create(self._path)
            self._file.write(b"\0" * _HEADER)
        except BaseException:
            self._ids.abort()
            raise

    def write(self, rows: pa.Table) -> None:
        import pyarrow as pa

        for chunk in rows.column(self._column).chunks:
            if not len(chunk):
                continue
            self._file.write(self._vectors(chunk).data)
        if self._others:
            self._ids.write(rows.select([f.name for f in self._others]))
        else:
            self._ids.write(pa.table({"row": pa.array(np.arange(self._rows, self._rows + rows.num_rows))}))
        self._rows += rows.num_rows

    def copy(self, path: str) -> None:
        """Add the vectors of a finished file, whose other columns `copy_beside` adds."""
        self._rows += NpySink().shape(path)[0]
        with open(path, "rb") as source:
            source.seek(_HEADER)
            shutil.copyfileobj(source, self._file, 1 << 20)

    def copy_beside(self, path: str) -> None:
        """Add the other columns of a finished file; numbers of rows, where there are none, go on."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=MERGED_ROWS):
                rows = pa.Table.from_batches([batch])
                if not self._others:
                    rows = pa.table({"row": pa.array(np.arange(self._beside, self._beside + rows.num_rows))})
                self._ids.write(rows)
                self._beside += rows.num_rows

    def _vectors(self, chunk: pa.Array) -> np.ndarray:
        """The rows' vectors one after the other, float32 [rows * width]."""
        if chunk.null_count:
            raise BadOutput(f"npy sink: column {self._column!r} has rows without a vector, which a matrix cannot hold")
        values = chunk.flatten()
        if values.null_count:
            raise BadOutput(f"npy sink: vectors in column {self._column!r} contain nulls")
        return np.ascontiguousarray(values.to_numpy(zero_copy_only=False), dtype="<f4")

    def close(self) -> list[WorkFile]:
        self._file.seek(0)
        self._file.write(_header(self._rows, self._width))
        self._files.sync(self._file)
        self._file.close()
        ids = [WorkFile(f.path, f.publish, f.rows, "ids") for f in self._ids.close()]
        return [WorkFile(self._path, self._publish, self._rows), *ids]

    def abort(self) -> None:
        with contextlib.suppress(Exception):
            self._file.close()
        with contextlib.suppress(Exception):
            self._files.remove(self._path)
        self._ids.abort()


def _header(rows: int, width: int) -> bytes:
    """A version 1.0 header, padded to its fixed length."""
    text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({rows}, {width}), }}".encode("ascii")
    room = _HEADER - 10
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", room) + text.ljust(room - 1) + b"\n"
