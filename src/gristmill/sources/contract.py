"""The contract of a source format: which rows are at which positions of a file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
from gristmill.shards.sourcefiles import FileInfo, SourceFile
from gristmill.values import dataclass


@dataclass(frozen=True)
class BadRow:
    """A record that cannot be read as a row: its position, its raw bytes, and what is wrong with it."""

    position: int
    payload: bytes
    error: str
    message: str


@dataclass(frozen=True)
class Block:
    """Rows read from one file: `rows` and their `position` (int64, same length), the number that `where` left out, and
    the bad records.
    """

    rows: pa.Table
    position: np.ndarray
    filtered: int = 0
    bad: tuple[BadRow, ...] = ()


class Where(Protocol):
    """A row condition. `columns` are those it reads; `mask` returns one bool per row, with null as false. `close` is
    for whoever made it.
    """

    columns: tuple[str, ...]

    def mask(self, rows: pa.Table) -> np.ndarray: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Reading:
    """What to read from a file: the wanted columns (None: all), their planned types, a condition, and the size of a
    block in bytes. With `damaged`, rows that a format can count but not decode are bad records, not an error.
    """

    columns: tuple[str, ...] | None
    schema: pa.Schema
    where: Where | None = None
    block_bytes: int = 16 << 20
    options: Mapping[str, Any] = field(default_factory=dict)
    damaged: bool = False


class SourceFormat(Protocol):
    """One file format as a source. It is made without arguments and can be pickled, as workers receive it.

    `name` is the name under which it is registered. Files that end in one of `suffixes` (".csv") are read in this
    format by default and, if it is `compressed`, also with .gz, .zst or .bz2 after the suffix. Files are opened by
    `sources.paths.open_input`, with `fs`.
    """

    name: str
    suffixes: tuple[str, ...]
    compressed: bool
    by_bytes: bool
    """Whether a position is the byte offset at which a row's record begins, and is shown to people as such."""
    written: bool
    """Whether all values are stored as text, so that declaring a text column as text changes nothing."""
    typed: bool
    """Whether columns have types of their own, which every value matches."""

    def inspect(self, file: SourceFile, fs: Any, options: Mapping[str, Any]) -> FileInfo:
        """What planning needs, from metadata where possible. Raises BadSource, naming the file."""
        ...

    def read(self, info: FileInfo, fs: Any, ranges: np.ndarray, reading: Reading) -> Iterator[Block]:
        """The rows at the positions in `ranges` (int64 [k, 2], sorted, disjoint, half open), in order of position.

        A record belongs to the range in which it starts. Memory is bounded by a few blocks. Every record that starts in
        a range is in exactly one block: as a row, as `filtered`, or as `bad`.
        """
        ...


@runtime_checkable
class Whole(Protocol):
    """A SourceFormat that also says whether a file is one row, which its name belongs to: then hard links to it are
    rows of their own.
    """

    whole: bool


@runtime_checkable
class Numbered(Protocol):
    """A SourceFormat that also says whether a position is the row's number in its file, so that ranges count rows."""

    numbered: bool
