"""Records of a text file by byte ranges: where each begins and ends is found with numpy, a block at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from gristmill.errors import BadSource
from gristmill.shards.ranges import as_ranges
from gristmill.sources.stream import Stream
from gristmill.values import dataclass

__all__ = ["ENDLESS", "Lines", "Piece", "joined", "newlines", "pieces", "sample_ranges", "selected"]

BOM = b"\xef\xbb\xbf"
ENDLESS = 1 << 62  # the extent of a file that is read to find its extent
MOST = 1 << 30  # bytes of one record: Arrow's strings end at 2 GB, and escapes can double a text
_BEYOND = 1 << 16  # bytes read past a range's end for the rest of its last record; longer ones need more
_MANY = 4096  # pieces of short ranges that are joined into one block

Ends = Callable[[bytes], np.ndarray]  # where records end in bytes that begin with one: indices of newlines, sorted


@dataclass(frozen=True)
class Lines:
    """Records that are not blank: each is `data[start:stop]`, and begins at `position` in the file; int64."""

    data: bytes
    start: np.ndarray
    stop: np.ndarray
    position: np.ndarray

    def __len__(self) -> int:
        return len(self.position)

    def line(self, i: int) -> bytes:
        """One record's bytes."""
        return self.data[int(self.start[i]) : int(self.stop[i])]

    def head(self, count: int) -> Lines:
        """The records within the first `count` bytes, at least one."""
        most = max(1, int(np.searchsorted(self.stop, count, side="right")))
        if most >= len(self):
            return self
        return Lines(self.data[: int(self.stop[most - 1])], self.start[:most], self.stop[:most], self.position[:most])


def cuts_of(found: Lines, end: int, every: int = 1 << 16) -> tuple[np.ndarray, np.ndarray]:
    """Places to cut a file while it is read through: starts of records about `every` bytes apart, then `end`, the end
    of what was read. And the number of records before each of them.

    This close because a shard of a slow model over a small file is a few records; still, 10 GB have only 160,000.
    """
    first = int(found.position[0]) if len(found) else end
    marks = np.searchsorted(found.position, np.arange(first + every, end, every))
    marks = np.unique(marks[(marks > 0) & (marks < len(found))])
    return np.append(found.position[marks], end), np.diff(np.concatenate([[0], marks, [len(found)]]))


@dataclass(frozen=True)
class Piece:
    """Whole records as bytes, at offset `at` of the file. `ends` are the indices just after each record's content."""

    data: bytes
    at: int
    ends: np.ndarray

    def lines(self) -> Lines:
        """The records that are not blank, without a byte order mark or the carriage return before a newline."""
        position = np.empty(len(self.ends), dtype=np.int64)
        position[:1] = 0
        position[1:] = self.ends[:-1] + 1
        start = position
        if self.at == 0 and self.data.startswith(BOM) and len(start):
            start = position.copy()
            start[0] = 3
        octets = np.frombuffer(self.data, dtype=np.uint8)
        stop = self.ends - ((self.ends > start) & (octets[self.ends - 1] == ord("\r"))) if len(octets) else self.ends
        full = start < stop
        if not full.all():
            start, stop, position = start[full], stop[full], position[full]
        return Lines(self.data, start, stop, position + self.at)


def newlines(data: bytes) -> np.ndarray:
    """Every newline ends a record."""
    return np.flatnonzero(np.frombuffer(data, dtype=np.uint8) == 10)


def selected(
    stream: Stream, ranges: np.ndarray, extent: int, block_bytes: int, ends: Ends = newlines, anywhere: bool = True
) -> Iterator[Lines]:
    """The records that start in `ranges`, in blocks of about `block_bytes` (a longer record makes a longer block).

    `extent` is where the file ends, as planned. Short ranges are joined, so that a block is worth parsing. Unless
    ranges may begin `anywhere`, each begins where a record does.
    """
    held: list[Lines] = []
    size = 0
    for start, stop in as_ranges(ranges).tolist():
        stop = min(stop, extent)
        first = start if start == 0 or not anywhere else _line_start(stream, start, stop)
        for piece in pieces(stream, first, stop, extent, block_bytes, ends):
            found = piece.lines()
            if not len(found):
                continue
            if not held and len(found.data) * 2 > block_bytes:
                yield found
                continue
            held.append(found)
            size += len(found.data)
            if size >= block_bytes or len(held) >= _MANY:
                yield joined(held)
                held, size = [], 0
    if held:
        yield joined(held)


def pieces(
    stream: Stream, start: int, stop: int, extent: int, block_bytes: int, ends: Ends = newlines
) -> Iterator[Piece]:
    """All records that start in [start, stop), where one begins at `start`; about a block in each piece."""
    at = start
    while at < stop:
        piece, last = _piece(stream, at, stop, extent, block_bytes, ends)
        if len(piece.ends):
            yield piece
        if last:
            return
        at += len(piece.data)


def _piece(stream: Stream, at: int, stop: int, extent: int, block_bytes: int, ends: Ends) -> tuple[Piece, bool]:
    """Whole records from `at` on, and whether the last one that starts before `stop` is among them."""
    data, count = b"", min(block_bytes, stop - at + _BEYOND)
    while True:
        more = stream.read(at + len(data), min(count, extent - at - len(data))) if at + len(data) < extent else b""
        data = data + more if data else more
        over = not more or at + len(data) >= extent
        mark = len(BOM) if at == 0 and data.startswith(BOM) else 0  # elsewhere it is a character like others
        found = ends(data[mark:]) + mark if mark else ends(data)
        if over and data and (not len(found) or found[-1] != len(data) - 1):
            found = np.append(found, len(data))  # the last record of a file may have no newline
        if len(found) or over:
            before = 1 + int(np.searchsorted(found, stop - at - 1, side="left"))  # those that start before `stop`
            last = before <= len(found) or over
            found = found[:before]
            kept = min(int(found[-1]) + 1, len(data)) if len(found) else 0
            return Piece(data if kept == len(data) else data[:kept], at, found), last
        if len(data) > MOST:
            raise BadSource(
                f"{stream.path}: the record at byte {at} is over {MOST >> 20} MB: is a quote left open there?"
            )
        count = max(len(data), 1 << 20)


def _line_start(stream: Stream, start: int, stop: int) -> int:
    """Where the first line at or after `start` begins; at least `stop` if none begins before it."""
    at, count = start - 1, 256
    while at < stop:
        data = stream.read(at, count)
        found = data.find(b"\n")
        if found >= 0:
            return at + found + 1
        if not data:
            return stop
        at += len(data)
        count = min(count * 16, 1 << 22)
    return stop


def joined(held: Sequence[Lines]) -> Lines:
    """Several groups of records as one."""
    if len(held) == 1:
        return held[0]
    shift = np.cumsum([0] + [len(h.data) + 1 for h in held[:-1]])
    return Lines(
        b"\n".join(h.data for h in held),
        np.concatenate([h.start + s for h, s in zip(held, shift, strict=True)]),
        np.concatenate([h.stop + s for h, s in zip(held, shift, strict=True)]),
        np.concatenate([h.position for h in held]),
    )


_SPREAD = 16


def sample_ranges(extent: int, count: int) -> np.ndarray:
    """Ranges of about `count` bytes in total, spread over a file from its start to its end."""
    if extent <= count:
        return np.array([[0, extent]], dtype=np.int64)
    each = max(1, count // _SPREAD)
    starts = np.unique(np.linspace(0, extent - each, num=_SPREAD).astype(np.int64))
    return as_ranges(np.stack([starts, starts + each], axis=1))
