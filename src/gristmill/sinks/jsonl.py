"""JSON Lines as a sink, plain or compressed."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gristmill.arrow.casts import fitted
from gristmill.arrow.topython import not_text
from gristmill.errors import BadJob, CorruptStore
from gristmill.files.contract import Files
from gristmill.job.formatoptions import known
from gristmill.sinks.contract import Role, WorkFile, Writer
from gristmill.sinks.jsonsizes import MOST, too_long
from gristmill.sinks.jsontext import json_lines
from gristmill.sinks.jsonyears import BEYOND, beyond_calendar
from gristmill.sinks.workfile import Guarded

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
_MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5": "zstd"}  # a work file ends in .tmp, so its first bytes tell its codec
_READ = 4 << 20


class JsonlSink:
    """One file of JSON objects per shard. Option: `compression` (gz or zst; default none)."""

    name = "jsonl"
    suffixes: tuple[str, ...] = (".jsonl", ".jsonl.gz", ".jsonl.zst")
    tables = decimal = True
    raw: frozenset[str] = frozenset()  # columns in which text is JSON already

    def writer(
        self, files: Files, folder: str, stem: str, nonce: str, schema: pa.Schema, options: Mapping[str, Any]
    ) -> Writer:
        known(options, ("compression",), f"{self.name} sink")
        codec = str(options.get("compression") or "none").lower()
        if codec not in _CODECS:
            raise BadJob(f"{self.name} sink compression is {codec!r}: it must be gz, zst or none")
        return JsonlWriter(files, folder, stem, nonce, schema, *_CODECS[codec], self.raw)

    def stored(self, rows: pa.Table, options: Mapping[str, Any]) -> pa.Schema:
        """The schema without encodings. Raises BadJob for intervals, unions, and structs with duplicate names."""
        from gristmill.sinks.jsonread import stored

        return stored(rows.schema)

    def refused(self, rows: pa.Table, options: Mapping[str, Any]) -> dict[int, tuple[str, str]]:
        """Rows that JSON cannot hold: text that is not UTF-8, years that ISO 8601 cannot write, lines too long."""
        long = f"as JSON it takes more than {MOST:,} bytes, which no line can have: use parquet, or leave a column out"
        found = dict.fromkeys(too_long(rows), ("TooLong", long))
        found |= dict.fromkeys(beyond_calendar(rows), ("YearBeyond", f"it holds a date or time {BEYOND}"))
        wrong = ("NotText", "it holds text that is not valid UTF-8, which JSON cannot hold")
        return found | dict.fromkeys(not_text(rows), wrong)

    def count(self, path: str, role: Role) -> int:
        """Lines; raises CorruptStore if the last one is cut off or the file cannot be decompressed."""
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

    def misfit(self, path: str, schema: pa.Schema, options: Mapping[str, Any]) -> str | None:
        """Always None: a line has whatever types it is read with."""
        return None

    def dataset(self, system: Any, schema: pa.Schema, sizes: Mapping[str, int]) -> tuple[Any, Any]:
        """Files that appear to pyarrow as Arrow's own."""
        import pyarrow.dataset as ds

        from gristmill.sinks.jsonread import as_arrow

        return ds.IpcFileFormat(), as_arrow(system, schema, sizes, self.raw)

    def merge(
        self, files: Files, folder: str, parts: Sequence[WorkFile], stem: str, nonce: str, schema: pa.Schema,
        options: Mapping[str, Any],
    ) -> list[WorkFile]:  # fmt: skip
        """Concatenates the parts, compressed ones too, as gzip and zstd files may be joined."""
        name = parts[0].publish.rpartition("/")[2] if parts else ".jsonl"
        suffix = name[name.index(".jsonl") :]
        path = os.path.join(folder, f"{stem}{suffix}.{nonce}.tmp")
        with files.create(path) as out:
            for part in parts:
                with files.local(part.path) as local, open(local, "rb") as source:
                    shutil.copyfileobj(source, out, 1 << 20)
            files.sync(out)
        return [WorkFile(path, f"{stem}{suffix}", sum(p.rows for p in parts))]


class JsonlWriter:
    """Writes rows as they come."""

    def __init__(
        self, files: Files, folder: str, stem: str, nonce: str, schema: pa.Schema, suffix: str, codec: str | None,
        raw: frozenset[str],
    ) -> None:  # fmt: skip
        import pyarrow as pa

        self._files = files
        self._publish = f"{stem}.jsonl{suffix}"
        self._path = os.path.join(folder, f"{self._publish}.{nonce}.tmp")
        self._schema = schema
        self._raw = raw
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
        for piece in json_lines(rows, self._raw):
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
