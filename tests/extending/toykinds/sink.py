"""A sink format: Feather files, which are Arrow's own."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds

from gristmill.arrow.casts import fitted
from gristmill.arrow.schemas import plain
from gristmill.errors import CorruptStore
from gristmill.files.contract import Files
from gristmill.job.formatoptions import known
from gristmill.sinks.contract import Role, SinkFormat, WorkFile, Writer
from gristmill.sinks.workfile import Guarded


class Feather:
    """One file a shard. Option: `compression`, lz4 or zstd."""

    name = "feather"
    suffixes: tuple[str, ...] = (".feather",)
    tables = True  # gm.read gives its rows
    decimal = False  # numbers are stored as they are, not as text

    def stored(self, rows: pa.Table, options: Mapping[str, Any]) -> pa.Schema:
        """The schema that its files can hold: without encodings."""
        return pa.schema([f.with_type(plain(f.type)) for f in rows.schema])

    def refused(self, rows: pa.Table, options: Mapping[str, Any]) -> dict[int, tuple[str, str]]:
        """Rows that it cannot hold, by number: none."""
        return {}

    def writer(
        self, files: Files, folder: str, stem: str, nonce: str, schema: pa.Schema, options: Mapping[str, Any]
    ) -> Writer:
        """Writes one shard."""
        known(options, ("compression",), "feather sink")
        return FeatherWriter(files, folder, stem, nonce, schema, options.get("compression"))

    def count(self, path: str, role: Role) -> int:
        """Rows in a finished file, read back from it."""
        try:
            with pa.OSFile(path) as file, pa.ipc.open_file(file) as reader:
                return sum(reader.get_batch(n).num_rows for n in range(reader.num_record_batches))
        except pa.ArrowException as e:
            raise CorruptStore(f"{path}: not a whole Feather file: {e}") from e

    def misfit(self, path: str, schema: pa.Schema, options: Mapping[str, Any]) -> str | None:
        """For verify: a column that is not of the result's type."""
        with pa.OSFile(path) as file, pa.ipc.open_file(file) as reader:
            wrong = [f for f in reader.schema if f.name not in schema.names or f.type != schema.field(f.name).type]
        return f"column {wrong[0].name!r} is {wrong[0].type}, which is not the result's" if wrong else None

    def dataset(self, system: Any, schema: pa.Schema, sizes: Mapping[str, int]) -> tuple[Any, Any]:
        """How pyarrow reads its files."""
        return ds.IpcFileFormat(), system

    def merge(
        self, files: Files, folder: str, parts: Sequence[WorkFile], stem: str, nonce: str, schema: pa.Schema,
        options: Mapping[str, Any],
    ) -> list[WorkFile]:  # fmt: skip
        """Parts as one file, a batch at a time."""
        writer = self.writer(files, folder, stem, nonce, schema, options)
        try:
            for part in parts:
                with files.local(part.path) as path, pa.OSFile(path) as file, pa.ipc.open_file(file) as reader:
                    for number in range(reader.num_record_batches):
                        writer.write(pa.Table.from_batches([reader.get_batch(number)]))
            return writer.close()
        except BaseException:
            writer.abort()
            raise


_: type[SinkFormat] = Feather  # for mypy


class FeatherWriter:
    """Work files end in `.<nonce>.tmp`; `close` syncs, and says under which name they are published."""

    def __init__(
        self, files: Files, folder: str, stem: str, nonce: str, schema: pa.Schema, compression: str | None
    ) -> None:
        self._files = files
        self._schema = schema
        self._publish = f"{stem}.feather"
        self._path = os.path.join(folder, f"{self._publish}.{nonce}.tmp")
        self._rows = 0
        self._file = files.create(self._path)
        self._guarded = Guarded(self._file)  # so that pyarrow does not close it before it is synced
        options = pa.ipc.IpcWriteOptions(compression=compression)
        self._writer = pa.ipc.new_file(pa.PythonFile(self._guarded, mode="w"), schema, options=options)

    def write(self, rows: pa.Table) -> None:
        """Some rows more."""
        self._writer.write_table(fitted(rows, self._schema))
        self._rows += rows.num_rows

    def close(self) -> list[WorkFile]:
        """The finished files."""
        self._writer.close()
        self._files.sync(self._file)
        self._file.close()
        return [WorkFile(self._path, self._publish, self._rows)]

    def abort(self) -> None:
        """Removes what was written; never raises."""
        self._guarded.drop()
        with contextlib.suppress(Exception):
            self._file.close()
        with contextlib.suppress(Exception):
            self._files.remove(self._path)
