"""JSON Lines as a sink, plain or compressed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gristmill.errors import BadJob, CorruptStore
from gristmill.io.guarded import Guarded
from gristmill.io.jsontext import json_lines
from gristmill.io.lossless import fitted
from gristmill.io.options import known
from gristmill.io.plain import not_text
from gristmill.plan.contracts import Files, WorkFile, Writer

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["JsonlSink"]

_CODECS = {
    "none": ("", None),
    "gz": (".gz", "gzip"),
    "gzip": (".gz", "gzip"),
    "zst": (".zst", "zstd"),
    "zstd": (".zst", "zstd"),
}
_MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5": "zstd"}  # a work file's name ends in .tmp: its first bytes tell
_READ = 4 << 20


class JsonlSink:
    """One file of JSON objects a shard. Option: `compression` (gz or zst; default none)."""

    name = "jsonl"
    suffix = ".jsonl"

    def writer(
        self, files: Files, folder: str, stem: str, nonce: str, schema: pa.Schema, options: Mapping[str, Any]
    ) -> Writer:
        known(options, ("compression",), "jsonl sink")
        codec = str(options.get("compression") or "none").lower()
        if codec not in _CODECS:
            raise BadJob(f"jsonl sink compression is {codec!r}: it is gz, zst or none")
        return JsonlWriter(files, folder, stem, nonce, schema, *_CODECS[codec])

    def stored(self, rows: pa.Table, options: Mapping[str, Any]) -> pa.Schema:
        """Without encodings. Raises BadJob for intervals, unions, and structs that name two fields alike."""
        from gristmill.io.jsonread import stored

        return stored(rows.schema)

    def refused(self, rows: pa.Table, options: Mapping[str, Any]) -> dict[int, tuple[str, str]]:
        """Rows with text that is no UTF-8, which no reader of JSON takes."""
        return dict.fromkeys(not_text(rows), ("NotText", "it holds text that is no UTF-8, which JSON cannot hold"))

    def count(self, path: str, role: str) -> int:
        """Lines; raises CorruptStore where the last one is cut off or the file cannot be decompressed."""
        import pyarrow as pa

        with open(path, "rb") as plain:
            codec = _MAGIC.get(plain.read(2))
        lines, last = 0, b"\n"
        try:
            with pa.OSFile(path, "rb") as file:
                stream = file if codec is None else pa.CompressedInputStream(file, codec)
                while data := stream.read(_READ):
                    lines += data.count(b"\n")
                    last = data[-1:]
        except pa.ArrowException as e:
            raise CorruptStore(f"{path}: {e}") from e
        except OSError as e:
            if e.errno is not None:
                raise
            raise CorruptStore(f"{path}: {e}") from e
        if last != b"\n":
            raise CorruptStore(f"{path}: the last line is cut off")
        return lines


class JsonlWriter:
    """Writes rows as they come."""

    def __init__(
        self, files: Files, folder: str, stem: str, nonce: str, schema: pa.Schema, suffix: str, codec: str | None
    ) -> None:
        import pyarrow as pa

        self._files = files
        self._publish = f"{stem}.jsonl{suffix}"
        self._path = os.path.join(folder, f"{self._publish}.{nonce}.tmp")
        self._schema = schema
        self._rows = 0
        self._file = files.create(self._path)
        self._guarded = Guarded(self._file)
        self._stream: Any = None
        if codec is not None:
            self._stream = pa.CompressedOutputStream(pa.PythonFile(self._guarded, mode="w"), codec)

    def write(self, rows: pa.Table) -> None:
        if rows.schema != self._schema:
            rows = fitted(rows, self._schema)
        out = self._file if self._stream is None else self._stream
        for piece in json_lines(rows):
            out.write(piece)
        self._rows += rows.num_rows

    def close(self) -> list[WorkFile]:
        if self._stream is not None:
            self._stream.close()
        self._files.sync(self._file)
        self._file.close()
        return [WorkFile(self._path, self._publish, self._rows)]

    def abort(self) -> None:
        self._guarded.drop()
        with contextlib.suppress(Exception):
            self._file.close()
        with contextlib.suppress(Exception):
            self._files.remove(self._path)
