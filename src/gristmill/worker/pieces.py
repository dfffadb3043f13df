"""Reading a piece of a source, for workers and for comparing the same piece later."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from gristmill.shards.shard import Piece
from gristmill.shards.sourcefiles import FileInfo
from gristmill.sources.contract import Block, Reading
from gristmill.sources.rowdigests import Content
from gristmill.worker.recipe import Reader


@contextmanager
def reading(reader: Reader, path: str = "") -> Iterator[Reading]:
    """What is read of a file, with the condition ready to use while inside."""
    schema, where, columns = reader.own.get(path, reader.schema), None, reader.columns
    if path in reader.own and columns is not None:
        columns = tuple(name for name in columns if name in schema.names)
    if reader.where is not None:
        from gristmill.sources.where import SqlWhere

        where = SqlWhere(reader.where, schema, "where")
    try:
        yield Reading(columns, schema, where, options=reader.options, damaged=reader.damaged)
    finally:
        if where is not None:
            where.close()


def blocks(reader: Reader, wanted: Reading, piece: Piece) -> Iterator[Block]:
    """The rows of a piece. Raises BadSource if they cannot be read, SourceChanged if the file is gone."""
    info = FileInfo(piece.file, piece.extent, np.array([0, piece.extent]), True, wanted.schema)
    ranges = np.array(piece.ranges, dtype=np.int64).reshape(-1, 2)
    yield from reader.format.read(info, reader.fs, ranges, wanted)


def digest_of(reader: Reader, wanted: Reading, piece: Piece) -> str:
    """The digest of what a piece holds now: that in its shard's receipt if the shard read the same."""
    content = Content()
    for block in blocks(reader, wanted, piece):
        content.add(block)
    return content.hexdigest()
