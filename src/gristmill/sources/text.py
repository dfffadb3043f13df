"""Whole files as rows: one row per file, with its path and its text or bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from gristmill.errors import BadJob, BadSource
from gristmill.job.formatoptions import known
from gristmill.shards.ranges import within
from gristmill.shards.sourcefiles import FileInfo, SourceFile
from gristmill.sources.blocks import kept, wanted
from gristmill.sources.contract import BadRow, Block, Reading
from gristmill.sources.paths import Storage, open_input

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["BinarySource", "TextSource"]

_MOST = (1 << 31) - 1  # bytes of one value in Arrow


class TextSource:
    """Columns `path` and `text`; the position is 0. A file that is not UTF-8 is a bad row. Option: relative_to, the
    folder that paths are shown relative to.
    """

    name = "text"
    suffixes: tuple[str, ...] = (".txt", ".md", ".rst", ".text", ".log", ".html", ".htm", ".xml", ".tex")
    compressed = by_bytes = written = False
    typed = whole = True
    column = "text"

    def inspect(self, file: SourceFile, fs: Storage, options: Mapping[str, Any]) -> FileInfo:
        """Without opening the file. Raises BadSource if it is not below `relative_to`."""
        known(options, ("relative_to",), f"{self.name} source")
        _shown(file.path, options)
        return FileInfo(
            file=file,
            extent=1,
            cuts=np.array([0, 1], dtype=np.int64),
            divisible=False,
            schema=self._schema(),
            cut_rows=np.array([1], dtype=np.int64),
            nulls={"path": 0, self.column: 0},
        )

    def read(self, info: FileInfo, fs: Storage, ranges: np.ndarray, reading: Reading) -> Iterator[Block]:
        """One block of one row, or of one bad row. The file is opened only if its content is wanted."""
        import pyarrow as pa

        position = np.zeros(1, dtype=np.int64)
        if not within(np.asarray(ranges, dtype=np.int64).reshape(-1, 2), position).any():
            return
        names, schema = wanted(reading)
        values: dict[str, Any] = {"path": _shown(info.file.path, reading.options)}
        if self.column in schema.names:
            with open_input(fs, info.file.path) as file:
                content: bytes = file.read()
            try:
                values[self.column] = self._value(content)
            except _Unreadable as e:
                bad = BadRow(0, content, e.error, str(e))
                yield Block(schema.empty_table().select(names), position[:0], 0, (bad,))
                return
        rows = pa.Table.from_pylist([{n: values.get(n) for n in schema.names}], schema=schema)
        rows, position, filtered = kept(rows, position, reading.where, names)
        yield Block(rows, position, filtered)

    def _schema(self) -> pa.Schema:
        import pyarrow as pa

        return pa.schema([("path", pa.string()), (self.column, pa.string())])

    def _value(self, content: bytes) -> Any:
        if len(content) > _MOST:
            raise _Unreadable("TooLarge", f"{len(content)} bytes are more than a column can hold (2 GB)")
        try:
            return content.decode("utf-8-sig")
        except UnicodeDecodeError as e:
            raise _Unreadable("UnicodeDecodeError", f"not UTF-8: byte 0x{e.object[e.start]:02x} at {e.start}") from None


class BinarySource(TextSource):
    """Columns `path` and `bytes`; the position is 0."""

    name = "binary"
    suffixes: tuple[str, ...] = (
        ".jpg", ".jpeg", ".png", ".gif", ".webp", ".bmp", ".tif", ".tiff", ".wav", ".mp3", ".flac", ".ogg", ".mp4",
        ".pdf",
    )  # fmt: skip
    column = "bytes"

    def _schema(self) -> pa.Schema:
        import pyarrow as pa

        return pa.schema([("path", pa.string()), (self.column, pa.binary())])

    def _value(self, content: bytes) -> Any:
        if len(content) > _MOST:
            raise _Unreadable("TooLarge", f"{len(content)} bytes are more than a column can hold (2 GB)")
        return content


def _shown(path: str, options: Mapping[str, Any]) -> str:
    base = options.get("relative_to")
    if base is None:
        return path
    if not isinstance(base, str):
        raise BadJob(f"source option relative_to is {base!r}: give a folder, as text")
    top = base.rstrip("/") + "/"
    if not path.startswith(top):
        raise BadSource(f"{path} is not below {top} (relative_to): give a folder that all files of the source lie in")
    return path[len(top) :]


class _Unreadable(Exception):
    def __init__(self, error: str, message: str) -> None:
        super().__init__(message)
        self.error = error
