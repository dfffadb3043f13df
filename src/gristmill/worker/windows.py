"""Windows: rows of one shard gathered until there are enough to be ordered by length."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol, TypeVar

from gristmill.values import dataclass


class Sized(Protocol):
    """A chunk of rows that knows its size."""

    @property
    def rows_held(self) -> int: ...

    @property
    def bytes_held(self) -> int: ...


Chunk = TypeVar("Chunk", bound=Sized)


@dataclass(frozen=True)
class WindowSize:
    """A window closes at `rows` or `bytes`, whichever comes first. The first ones are smaller (`first`, then times
    four), so that the model starts while the rest is still being read.
    """

    rows: int
    bytes: int
    first: int


def gather(chunks: Iterable[Chunk], size: WindowSize) -> Iterator[list[Chunk]]:
    """Lists of chunks, each making up a window. Chunks are not cut, so they must be smaller than a window."""
    held: list[Chunk] = []
    rows = held_bytes = 0
    limit = min(size.first, size.rows)
    for chunk in chunks:
        held.append(chunk)
        rows += chunk.rows_held
        held_bytes += chunk.bytes_held
        if rows >= limit or held_bytes >= size.bytes:
            yield held
            held, rows, held_bytes = [], 0, 0
            limit = min(limit * 4, size.rows)
    if held:
        yield held
