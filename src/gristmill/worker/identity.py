"""Who a row is: its place in the source and, if steps made several rows of one, its places among those. Assigned when a
row is made and never renumbered, so that a row keeps it whatever becomes of the others.
"""

from __future__ import annotations

import marshal
from collections.abc import Mapping, Sequence
from datetime import date, time
from decimal import Decimal
from itertools import pairwise
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import pyarrow as pa

from gristmill.arrow.rows import run_of
from gristmill.arrow.topython import to_plain
from gristmill.values import dataclass

Row = tuple[str, int, str]  # path, position, copy

SINGLE = -1  # in a path: this step made only one row of the row
_ODD = np.uint32(0x9E3779B1)  # 2^32 over the golden ratio: spreads neighbouring numbers


class Copy(NamedTuple):
    """One row that a step made: its numbers in the expansions that led to it, how many rows the last one made from the
    same row, and the digest of its content when it was made.
    """

    path: tuple[int, ...]
    of: int
    digest: int

    @property
    def text(self) -> str:
        """As in dead letters: "2", or "2.0" for the first row made of the third."""
        return ".".join(map(str, self.path))

    @staticmethod
    def read(text: str, of: int, digest: str) -> Copy:
        """From a dead letter's `copy`, `copies` and `digest`."""
        return Copy(tuple(map(int, text.split("."))), of, int(digest, 16))


@dataclass(frozen=True)
class Copies:
    """The copies of rows that steps have made. Arrays of one length; a column of `path` (int32) for each step that made
    several rows of one, SINGLE for rows where it did not; `of` (int32) and `digest` (uint32) as in Copy.
    """

    path: np.ndarray
    of: np.ndarray
    digest: np.ndarray

    def take(self, index: np.ndarray | slice) -> Copies:
        """The copies at `index`."""
        return Copies(self.path[index], self.of[index], self.digest[index])

    @property
    def made(self) -> np.ndarray:
        """Which rows a step has made; the others are still source rows."""
        return np.asarray((self.path != SINGLE).any(axis=1))

    def at(self, row: int) -> Copy | None:
        """One row's copy; None for a source row."""
        path = tuple(n for n in self.path[row].tolist() if n != SINGLE)
        return Copy(path, int(self.of[row]), int(self.digest[row])) if path else None

    @staticmethod
    def none(rows: int) -> Copies:
        """The copies for this many source rows."""
        return Copies(np.empty((rows, 0), np.int32), np.zeros(rows, np.int32), np.zeros(rows, np.uint32))

    @staticmethod
    def joined(parts: Sequence[Copies]) -> Copies:
        """All of these copies, in order."""
        most = max(p.path.shape[1] for p in parts)
        paths = [np.pad(p.path, ((0, 0), (0, most - p.path.shape[1])), constant_values=SINGLE) for p in parts]
        return Copies(
            np.concatenate(paths), np.concatenate([p.of for p in parts]), np.concatenate([p.digest for p in parts])
        )

    @staticmethod
    def expanded(
        before: Copies | None, origin: np.ndarray, digest: np.ndarray, rows: int, step: int, always: bool
    ) -> Copies:
        """The copies after step number `step` of `rows` rows: its row i came from row `origin[i]` and has content
        `digest[i]`. A row of which it made a single row keeps its identity, unless `always`.
        """
        before = Copies.none(rows) if before is None else before
        number, of = numbered(origin, rows)
        of = of[origin]
        several = np.ones(len(origin), dtype=bool) if always else of > 1
        old = before.take(origin)
        mixed = (old.digest * _ODD + np.uint32(step + 1)) * _ODD ^ digest
        path = np.concatenate([old.path, np.where(several, number, SINGLE)[:, None]], axis=1).astype(np.int32)
        return Copies(path, np.where(several, of, old.of).astype(np.int32), np.where(several, mixed, old.digest))


@dataclass(frozen=True)
class Identity:
    """Who rows are: number of their piece in the shard, position in that file, and their copies if steps made any.
    Arrays of one length.
    """

    piece: np.ndarray
    position: np.ndarray
    copies: Copies | None = None

    def take(self, index: np.ndarray) -> Identity:
        """The identities at `index`."""
        where = run_of(index)
        copies = None if self.copies is None else self.copies.take(where)
        return Identity(self.piece[where], self.position[where], copies)

    def copy(self, row: int) -> Copy | None:
        """One row's copy; None for a source row."""
        return None if self.copies is None else self.copies.at(row)

    def copy_texts(self) -> list[str]:
        """The text of each row's copy; "" for a source row."""
        if self.copies is None:
            return [""] * len(self.piece)
        paths = self.copies.path.tolist()
        return [".".join([str(n) for n in path if n != SINGLE]) for path in paths]

    def places(self, paths: Sequence[str]) -> list[Row]:
        """Each row by the file of its piece, position and copy text, which are the same in every task. For looking up
        single rows, never for processing all of them.
        """
        files = [paths[p] for p in self.piece.tolist()]
        return list(zip(files, self.position.tolist(), self.copy_texts(), strict=True))

    @staticmethod
    def none() -> Identity:
        """The identity of no rows."""
        return Identity(np.empty(0, dtype=np.int32), np.empty(0, dtype=np.int64))

    @staticmethod
    def joined(parts: Sequence[Identity]) -> Identity:
        """All of these identities, in order."""
        piece, position = (np.concatenate([getattr(p, n) for p in parts]) for n in ("piece", "position"))
        if all(p.copies is None for p in parts):
            return Identity(piece, position)
        return Identity(piece, position, Copies.joined([p.copies or Copies.none(len(p.piece)) for p in parts]))


def numbered(origin: np.ndarray, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """For each row, its number among the rows of the same origin, in order: 0, 1, …; for each of the `rows` origins,
    how many rows it has.
    """
    of = np.bincount(origin, minlength=rows)
    order = np.argsort(origin, kind="stable")
    number = np.empty(len(origin), dtype=np.int64)
    number[order] = np.arange(len(origin)) - np.repeat(np.cumsum(of) - of, of)
    return number, of


# ---------------------------------------------------------------- values


def said(column: pa.ChunkedArray) -> list[Any]:
    """What each value of a column says, for JSON: independent of the rows beside it, different for different values."""
    kind = column.type
    alone = pa.types.is_integer(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind)
    return to_plain(column) if alone else [_plain(value) for value in to_plain(column)]


# ---------------------------------------------------------------- digests


def digest_of_row(row: Mapping[str, Any]) -> int:
    """A checksum of a row of plain values and arrays, the same in every process and on every machine."""
    return _checksum(row)


def _checksum(value: Any) -> int:
    value = _plain(value)
    try:
        return crc32(marshal.dumps(value, 2))  # version 2: later ones depend on how often a value is referenced
    except ValueError:  # an object of an unknown class
        return crc32(repr(value).encode("utf-8", "surrogatepass"))


def _plain(value: Any) -> Any:
    """A value reduced to what it says, however it is stored: the rows beside it may have given a whole number a float
    type, a Decimal more digits, a struct a null field, a day a time.
    """
    if value is None or isinstance(value, (str, bytes, bool)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, Decimal):
        if value == value.to_integral_value():
            return int(value)
        return float(value) if Decimal(float(value)) == value else f"{value:f}".rstrip("0")
    if isinstance(value, float):
        return int(value) if value.is_integer() else value
    if isinstance(value, Mapping):
        return sorted((str(k), _plain(v)) for k, v in value.items() if v is not None)
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, np.ndarray):
        held = value.dtype.kind in "bf" or (value.dtype.kind in "iu" and (abs(value.astype(np.float64)) < 2**53).all())
        return _of_array(value) if held else _plain(value.tolist())
    if isinstance(value, np.generic):
        return _plain(value.item())
    if isinstance(value, (date, time)):
        return value.isoformat().removesuffix("T00:00:00")
    return value


def _of_array(value: np.ndarray) -> tuple[tuple[int, ...], bytes]:
    return value.shape, (value.astype(np.float64) + 0.0).tobytes()


def digests_of(rows: pa.Table) -> np.ndarray:
    """A checksum of each row's values (uint32), independent of the rows beside it: also if a null, a fraction or a
    field among them has changed a column's type.
    """
    total = np.zeros(rows.num_rows, dtype=np.uint32)
    for name, column in zip(rows.column_names, rows.columns, strict=True):
        total += _digests(column) * np.uint32(crc32(name.encode()) | 1)
    return total


def _digests(column: pa.ChunkedArray) -> np.ndarray:
    """A checksum of each value, 0 for nulls."""
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    kind = column.type
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind):
        found = _spread(column.cast(pa.float64(), safe=False).fill_null(0.0).to_numpy())
    elif pa.types.is_decimal(kind):  # Arrow's own cast rounds differently for different scales
        found = _spread(np.array([0.0 if v is None else float(v) for v in column.to_pylist()]))
    elif pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        found = _of_times(column)
    elif pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_binary(kind):
        found = _of_texts(column)
    else:
        found = np.array([_checksum(v) for v in to_plain(column)], dtype=np.uint32)
    return np.asarray(np.where(column.is_valid().to_numpy(), found | np.uint32(1), np.uint32(0)))


def _spread(values: np.ndarray) -> np.ndarray:
    values = values + 0.0  # -0.0 is 0.0
    bits = np.where(np.isnan(values), np.nan, values).view(np.uint64)
    return np.asarray((((bits ^ (bits >> np.uint64(32))) * np.uint64(_ODD)) >> np.uint64(16)).astype(np.uint32))


def _of_times(column: pa.ChunkedArray) -> np.ndarray:
    """A checksum of each instant, whatever its unit."""
    days = pa.types.is_date32(column.type)
    unit = "s" if days else getattr(column.type, "unit", "ms")
    counts = (column.cast(pa.int32()) if days else column).cast(pa.int64()).fill_null(0).to_numpy()
    per = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[unit]
    seconds, rest = np.divmod(counts * 86_400 if days else counts, per)
    return np.asarray(_spread(seconds.astype(np.float64)) * _ODD + _spread(rest * (10**9 / per)))


def _of_texts(column: pa.ChunkedArray) -> np.ndarray:
    found: list[int] = []
    for chunk in column.cast(pa.large_binary()).chunks:
        _, offsets, data = chunk.buffers()
        ends = np.frombuffer(offsets, np.int64)[chunk.offset : chunk.offset + len(chunk) + 1].tolist()
        view = memoryview(data or b"")
        found += [crc32(view[start:end]) for start, end in pairwise(ends)]
    return np.array(found, dtype=np.uint32)
