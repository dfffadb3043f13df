"""Lines of a text file by byte ranges: where each begins and ends, found with numpy, a block at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from gristmill.io.ranges import as_ranges
from gristmill.io.stream import Stream

__all__ = ["BOM", "ENDLESS", "Lines", "lines", "pieces", "sample_ranges", "split"]

BOM = b"\xef\xbb\xbf"
ENDLESS = 1 << 62  # the extent of a file that is read to find its extent
_BEYOND = 1 << 16  # bytes read past a range's end for the rest of its last line; longer ones are read on
_MANY = 4096  # pieces of short ranges that are joined to one block
_SPACE = np.zeros(256, dtype=bool)
_SPACE[[9, 13, 32]] = True  # what JSON skips between values, but the newline


@dataclass(frozen=True)
class Lines:
    """Lines that are not blank: `data[start:stop]` each, without white space around it, and where the line begins in
    the file (`position`). All int64."""

    data: bytes
    start: np.ndarray
    stop: np.ndarray
    position: np.ndarray

    def __len__(self) -> int:
        return len(self.position)

    def line(self, i: int) -> bytes:
        """One line's bytes."""
        return self.data[int(self.start[i]) : int(self.stop[i])]

    def head(self, count: int) -> Lines:
        """The lines within the first `count` bytes, at least one."""
        most = max(1, int(np.searchsorted(self.stop, count, side="right")))
        if most >= len(self):
            return self
        return Lines(self.data[: int(self.stop[most - 1])], self.start[:most], self.stop[:most], self.position[:most])


def lines(stream: Stream, ranges: np.ndarray, extent: int, block_bytes: int) -> Iterator[Lines]:
    """The lines that start in `ranges`, in blocks of about `block_bytes` (a longer line makes a longer block).

    `extent` is where the file ends, as planned. Short ranges are joined, so that a block is worth parsing.
    """
    held: list[Lines] = []
    size = 0
    for start, stop in as_ranges(ranges).tolist():
        for data, at in pieces(stream, start, min(stop, extent), extent, block_bytes):
            found = split(data, at)
            if not len(found):
                continue
            if not held and len(data) * 2 > block_bytes:
                yield found
                continue
            held.append(found)
            size += len(data)
            if size >= block_bytes or len(held) >= _MANY:
                yield _joined(held)
                held, size = [], 0
    if held:
        yield _joined(held)


def split(data: bytes, at: int) -> Lines:
    """The lines of `data`, which begins at offset `at` of the file, with the start of a line."""
    octets = np.frombuffer(data, dtype=np.uint8)
    ends = np.flatnonzero(octets == 10)
    if len(data) and (not len(ends) or ends[-1] != len(data) - 1):
        ends = np.append(ends, len(data))  # the last line of a file may have no newline
    position = np.empty(len(ends), dtype=np.int64)
    position[:1] = 0
    position[1:] = ends[:-1] + 1
    start, stop = position, ends
    if at == 0 and data.startswith(BOM):
        start = position.copy()
        start[0] = 3
    start, stop = _stripped(octets, start, stop)
    full = start < stop
    if not full.all():
        start, stop, position = start[full], stop[full], position[full]
    return Lines(data, start, stop, position + at)


def _stripped(octets: np.ndarray, start: np.ndarray, stop: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Starts and stops without the white space at both ends, for the few lines that have some."""
    some = np.flatnonzero(start < stop)
    some = some[_SPACE[octets[start[some]]] | _SPACE[octets[stop[some] - 1]]]
    if not len(some):
        return start, stop
    start, stop = start.copy(), stop.copy()
    left = some[_SPACE[octets[start[some]]]]
    for _ in range(64):
        if not len(left):
            break
        start[left] += 1
        left = left[start[left] < stop[left]]
        left = left[_SPACE[octets[start[left]]]]
    right = some[start[some] < stop[some]]
    right = right[_SPACE[octets[stop[right] - 1]]]
    for _ in range(64):
        if not len(right):
            break
        stop[right] -= 1
        right = right[start[right] < stop[right]]
        right = right[_SPACE[octets[stop[right] - 1]]]
    for i in np.union1d(left, right).tolist():  # a long run of spaces
        kept = np.flatnonzero(~_SPACE[octets[start[i] : stop[i]]])
        stop[i] = start[i] + (kept[-1] + 1 if len(kept) else 0)
        start[i] += kept[0] if len(kept) else 0
    return start, stop


def pieces(stream: Stream, start: int, stop: int, extent: int, block_bytes: int) -> Iterator[tuple[bytes, int]]:
    """Whole lines that start in [start, stop), as bytes with their offset."""
    at = start if start == 0 else _line_start(stream, start, stop)
    while at < stop:
        data, last = _whole_lines(stream, at, stop, extent, block_bytes)
        if data:
            yield data, at
        if last:
            return
        at += len(data)


def _line_start(stream: Stream, start: int, stop: int) -> int:
    """Where the first line at or after `start` begins; at least `stop` where none does before it."""
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


def _whole_lines(stream: Stream, at: int, stop: int, extent: int, block_bytes: int) -> tuple[bytes, bool]:
    """Lines from `at` on, about a block of them, and whether the last one that starts before `stop` is among them."""
    parts: list[bytes] = []
    size, count = 0, min(block_bytes, stop - at + _BEYOND)
    while True:
        data = stream.read(at + size, min(count, extent - at - size)) if at + size < extent else b""
        if not data:
            return b"".join(parts), True
        last = data.find(b"\n", max(0, stop - 1 - at - size))
        if last < 0:
            last_of_all = False
            last = data.rfind(b"\n")
        else:
            last_of_all = True
        if last >= 0:
            parts.append(data[: last + 1] if last + 1 < len(data) else data)
            return (parts[0] if len(parts) == 1 else b"".join(parts)), last_of_all
        parts.append(data)
        size += len(data)
        count = max(block_bytes, 1 << 20)


def _joined(held: list[Lines]) -> Lines:
    if len(held) == 1:
        return held[0]
    shift = np.cumsum([0] + [len(h.data) + 1 for h in held[:-1]])
    return Lines(
        b"\n".join(h.data for h in held),
        np.concatenate([h.start + s for h, s in zip(held, shift, strict=True)]),
        np.concatenate([h.stop + s for h, s in zip(held, shift, strict=True)]),
        np.concatenate([h.position for h in held]),
    )


def sample_ranges(extent: int, count: int) -> np.ndarray:
    """Ranges of about `count` bytes together at the start, the middle and the end of a file."""
    if extent <= count:
        return np.array([[0, extent]], dtype=np.int64)
    third = max(1, count // 3)
    middle = extent // 2
    return as_ranges(np.array([[0, third], [middle, middle + third], [extent - third, extent]], dtype=np.int64))
