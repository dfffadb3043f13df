"""A source format: text files of which every line is a row, with its number."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from gristmill.job.formatoptions import known
from gristmill.shards.ranges import within
from gristmill.shards.sourcefiles import FileInfo, SourceFile
from gristmill.sources.blocks import kept, wanted
from gristmill.sources.contract import BadRow, Block, Reading, SourceFormat
from gristmill.sources.paths import open_input

SCHEMA = pa.schema([("number", pa.int64()), ("line", pa.string())])


class Numbered:
    """Columns `number`, from 1, and `line`; a position is the line's place, from 0. Option: `strip`, the characters
    that are taken off both ends of a line.
    """

    name = "numbered"
    suffixes: tuple[str, ...] = (".num",)
    compressed = False  # .num.gz is not read
    by_bytes = False  # positions are no byte offsets
    written = False  # its columns' types are not told by what is written
    typed = True  # and no value fails to be of its column's type

    def inspect(self, file: SourceFile, fs: Any, options: Mapping[str, Any]) -> FileInfo:
        """For planning: how many rows there are, where the file can be cut, and its columns."""
        known(options, ("strip",), "numbered source")
        with open_input(fs, file.path) as stream:
            rows = len(stream.read().splitlines())
        cuts = np.array([0, rows], dtype=np.int64)
        return FileInfo(file, rows, cuts, divisible=True, schema=SCHEMA, cut_rows=np.array([rows], dtype=np.int64))

    def read(self, info: FileInfo, fs: Any, ranges: np.ndarray, reading: Reading) -> Iterator[Block]:
        """The rows at the positions in `ranges`, in order, as blocks: each is a row, filtered, or bad, exactly once."""
        names, schema = wanted(reading)
        with open_input(fs, info.file.path) as stream:
            lines = stream.read().splitlines()
        places = np.flatnonzero(within(np.asarray(ranges, dtype=np.int64).reshape(-1, 2), np.arange(len(lines))))
        rows: list[dict[str, Any]] = []
        good: list[int] = []
        bad: list[BadRow] = []
        for place in places.tolist():
            try:
                line = lines[place].decode("utf-8").strip(reading.options.get("strip", ""))
            except UnicodeDecodeError as e:
                bad.append(BadRow(place, lines[place], "UnicodeDecodeError", str(e)))
                continue
            good.append(place)
            rows.append({n: v for n, v in {"number": place + 1, "line": line}.items() if n in schema.names})
        table = pa.Table.from_pylist(rows, schema=schema)
        table, position, filtered = kept(table, np.array(good, dtype=np.int64), reading.where, names)
        yield Block(table, position, filtered, tuple(bad))


_: type[SourceFormat] = Numbered  # for mypy, which holds it against the contract
