"""JSON Lines as a source, plain or compressed: one object per line. pyarrow parses whole blocks; only what it refuses
is looked at line by line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from gristmill.errors import BadSource
from gristmill.job.formatoptions import known
from gristmill.shards.sourcefiles import FileInfo, SourceFile
from gristmill.sources.contract import Block, Reading
from gristmill.sources.jsonrecords import Objects, trimmed, wire_of
from gristmill.sources.jsontypes import infer
from gristmill.sources.lines import ENDLESS, Lines, cuts_of, pieces, sample_ranges, selected
from gristmill.sources.paths import Storage
from gristmill.sources.schema import from_names
from gristmill.sources.stream import Stream, compressed, opened

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["JsonlSource", "looked_at"]

_PIECE = 2 << 20  # decompressed bytes read at a time
_SAMPLE = 2 << 20  # bytes that types are inferred from; option sample_bytes


class JsonlSource:
    """One JSON object per line; a position is the byte at which the line begins. Blank lines are not rows.

    Types are inferred from a sample spread over the file; `types` fixes them. A line is a bad row if it is not a JSON
    object, not UTF-8, or not of the types; if it has a number that a column of floats would round (a whole number
    beyond 2^53, unless `types` asks for floats) or make infinite; or if it has a value under a key that had none in the
    sample, and so has no column. If `columns` are named, other keys are left out. A missing key is null.
    """

    name = "jsonl"
    suffixes: tuple[str, ...] = (".jsonl", ".ndjson", ".jsonlines")
    compressed = by_bytes = True
    written = typed = False

    def inspect(self, file: SourceFile, fs: Storage, options: Mapping[str, Any]) -> FileInfo:
        """Plain files: from the sample. Compressed ones are read through once, for counts and places to cut."""
        known(options, ("types", "sample_bytes"), "jsonl source")
        types = from_names(options.get("types"), file.path)
        for name, kind in types.items():
            wire_of(name, kind)
        most = max(1, int(options.get("sample_bytes", _SAMPLE)))
        return looked_at(file, fs, lambda sample: infer(file.path, sample, types), most)

    def read(self, info: FileInfo, fs: Storage, ranges: np.ndarray, reading: Reading) -> Iterator[Block]:
        """Blocks of about `block_bytes` of text; a longer line is a block of its own, at a few times its size."""
        objects = Objects(reading)
        with opened(info.file, fs) as stream:
            for found in selected(stream, ranges, info.extent, reading.block_bytes):
                yield objects.block(found)


Typed = Callable[[list[Lines]], "pa.Schema"]


def looked_at(file: SourceFile, fs: Storage, typed: Typed, most: int = _SAMPLE) -> FileInfo:
    """What planning needs of a file of lines, whose columns are told by some of them. Raises BadSource."""
    with opened(file, fs) as stream:
        if stream.read(0, 2) in (b"\xff\xfe", b"\xfe\xff"):
            raise BadSource(f"{file.path}: UTF-16 text: convert it to UTF-8")
        if compressed(file.path) is None:
            return _sampled(file, stream, typed, most)
        return _read_through(file, stream, typed, most)


def _sampled(file: SourceFile, stream: Stream, typed: Typed, most: int) -> FileInfo:
    sample = [trimmed(s) for s in selected(stream, sample_ranges(file.size, most), file.size, most)]
    empty = file.size == 0
    return FileInfo(
        file=file,
        extent=file.size,
        cuts=np.unique(np.array([0, file.size], dtype=np.int64)),
        divisible=True,
        schema=typed([s for s in sample if len(s)]),
        cut_rows=np.zeros(0, dtype=np.int64) if empty else None,
        row_bytes=_row_bytes(sample),
    )


def _read_through(file: SourceFile, stream: Stream, typed: Typed, most: int) -> FileInfo:
    cuts, rows, sample = [np.zeros(1, dtype=np.int64)], [np.zeros(0, dtype=np.int64)], []
    for number, piece in enumerate(pieces(stream, 0, ENDLESS, ENDLESS, _PIECE)):
        found = trimmed(piece.lines())
        places, counts = cuts_of(found, piece.at + len(piece.data))
        cuts.append(places)
        rows.append(counts)
        if len(found) and number & (number - 1) == 0:  # the first piece, then pieces at doubling distances
            sample.append(found.head(most if number == 0 else most // 8))
    return FileInfo(
        file=file,
        extent=int(cuts[-1][-1]),
        cuts=np.concatenate(cuts),
        divisible=False,
        schema=typed(sample),
        cut_rows=np.concatenate(rows),
        row_bytes=_row_bytes(sample),
    )


def _row_bytes(sample: list[Lines]) -> float | None:
    count = sum(len(s) for s in sample)
    return sum(int((s.stop - s.start).sum()) + len(s) for s in sample) / count if count else None
