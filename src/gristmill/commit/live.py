"""The files of a result, or of what may become one. Of very many no object each is held: they are columns, in blocks
that are compressed, of which one at a time is looked at.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, overload

import pyarrow as pa

from gristmill.commit.documents import Live

LISTED = pa.schema(
    [
        ("name", pa.string()),
        ("work", pa.string()),
        ("rows", pa.int64()),
        ("bytes", pa.int64()),
        ("sha256", pa.string()),
        ("role", pa.string()),
        ("generation", pa.int64()),
        ("shard", pa.int64()),
    ]
)
PACKED = pa.ipc.IpcWriteOptions(compression="zstd")


class Columns:
    """A block of live files as columns, made by `make` when they are looked at: a record batch of the schema LISTED."""

    def __init__(self, make: Callable[[], pa.RecordBatch], rows: int | None = None) -> None:
        self.batch = make
        if rows is not None:
            self.rows = rows

    @staticmethod
    def packed(batch: pa.RecordBatch) -> Columns:
        """A block that holds these columns, compressed."""
        return Columns(functools.partial(unpacked, pack(batch)), batch.num_rows)

    @functools.cached_property
    def rows(self) -> int:
        """How many files they are."""
        return int(self.batch().num_rows)

    @functools.cached_property
    def roles(self) -> frozenset[str]:
        """The roles that they have."""
        return frozenset(self.batch().column("role").to_pylist())

    def tuples(self, names: Sequence[str]) -> Iterator[tuple[Any, ...]]:
        """Some columns, row by row."""
        batch = self.batch()
        return zip(*(batch.column(name).to_pylist() for name in names), strict=True)

    def of(self, roles: frozenset[str]) -> Columns:
        """Those with these roles."""
        if self.roles <= roles:
            return self
        batch = self.batch()
        mask = pa.array([role in roles for role in batch.column("role").to_pylist()], pa.bool_())
        return Columns.packed(batch.filter(mask))


class LiveFiles(Sequence[Live]):
    """Files in their order, as a sequence. What is done with all of very many takes `tuples`, `of` or `total`: with
    these, no object is made for each.
    """

    def __init__(self, blocks: Iterable[Columns | tuple[Live, ...]] = ()) -> None:
        self.blocks = tuple(blocks)

    @staticmethod
    def listed(files: Iterable[Live]) -> LiveFiles:
        """These files."""
        return files if isinstance(files, LiveFiles) else LiveFiles([tuple(files)])

    @staticmethod
    def stored(data: bytes) -> LiveFiles:
        """Those of a table that `write` wrote. Raises pyarrow.ArrowInvalid."""
        reader = pa.ipc.open_file(pa.py_buffer(data))
        return LiveFiles(Columns(functools.partial(reader.get_batch, n)) for n in range(reader.num_record_batches))

    def write(self, out: Any) -> None:
        """Write them as a table to an open file."""
        with pa.ipc.new_file(out, LISTED, options=PACKED) as writer:
            for block in self.blocks:
                writer.write_batch(_batch(block) if isinstance(block, tuple) else block.batch())

    def __len__(self) -> int:
        return sum(len(block) if isinstance(block, tuple) else block.rows for block in self.blocks)

    def __iter__(self) -> Iterator[Live]:
        for block in self.blocks:
            yield from block if isinstance(block, tuple) else itertools.starmap(Live, block.tuples(LISTED.names))

    @overload
    def __getitem__(self, at: int) -> Live: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Live]: ...
    def __getitem__(self, at: int | slice) -> Live | Sequence[Live]:
        return list(self)[at]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(a == b for a, b in zip(self, other))  # noqa: B905

    __hash__ = None  # type: ignore[assignment]

    def __add__(self, more: Iterable[Live]) -> LiveFiles:
        return LiveFiles([*self.blocks, *LiveFiles.listed(more).blocks])

    def tuples(self, *names: str) -> Iterator[tuple[Any, ...]]:
        """These fields of each."""
        for block in self.blocks:
            if isinstance(block, tuple):
                yield from (tuple(getattr(f, name) for name in names) for f in block)
            else:
                yield from block.tuples(names)

    def of(self, *roles: str) -> LiveFiles:
        """Those with one of these roles."""
        wanted = frozenset(roles)
        some = (
            tuple(f for f in block if f.role in wanted) if isinstance(block, tuple) else block.of(wanted)
            for block in self.blocks
            if isinstance(block, tuple) or block.roles & wanted
        )
        return LiveFiles(some)

    def but(self, *roles: str) -> LiveFiles:
        """Those with none of these roles."""
        return self.of(*self.roles.difference(roles))

    @property
    def roles(self) -> frozenset[str]:
        """The roles that they have."""
        return frozenset[str]().union(
            *(frozenset(f.role for f in b) if isinstance(b, tuple) else b.roles for b in self.blocks)
        )

    def total(self, name: str) -> int:
        """The sum of a field of numbers."""
        return sum(value for (value,) in self.tuples(name))


def pack(batch: pa.RecordBatch) -> pa.Buffer:
    """A record batch, compressed."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=PACKED) as writer:
        writer.write_batch(batch)
    return sink.getvalue()


def unpacked(data: pa.Buffer) -> pa.RecordBatch:
    """What was packed."""
    with pa.ipc.open_stream(data) as reader:
        return reader.read_next_batch()


def _batch(files: Sequence[Live]) -> pa.RecordBatch:
    columns = [pa.array([getattr(f, field.name) for f in files], field.type) for field in LISTED]
    return pa.RecordBatch.from_arrays(columns, schema=LISTED)
