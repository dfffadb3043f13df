"""What became of each source row of a shard, in a file beside its receipt: by this a later run knows whose answers
still hold, although the source that they were made from may be gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import pyarrow as pa

from gristmill.arrow.hashing import DIGEST
from gristmill.commit.generation import Generation
from gristmill.commit.receipt import Part, Receipt
from gristmill.files.contract import Files
from gristmill.files.disk import join
from gristmill.sinks.contract import WorkFile
from gristmill.values import dataclass

FILTERED, EXPANDED, DEAD = 0, 1, 2  # a state: left out by a step, handed on (perhaps as no row), dead in part or whole
KEPT, SCORED = "update:kept", "update:scored"  # figures of a receipt: source rows whose answers were kept, or made
_SCHEMA = pa.schema(
    [
        ("hi", pa.uint64()), ("lo", pa.uint64()), ("key", pa.uint64()), ("state", pa.int8()), ("made", pa.int32()),
        ("rows", pa.int32()), ("copies", pa.list_(pa.string())),
    ]
)  # fmt: skip


@dataclass(frozen=True)
class Fates:
    """Source rows in the order of their shard: `digest` (DIGEST) of what their answers rest on and of their key, `key`
    (uint64) of that alone, `state`, how many rows steps `made` of each, and how many `rows` were written. Arrays of one
    length.
    """

    digest: np.ndarray
    key: np.ndarray
    state: np.ndarray
    made: np.ndarray
    rows: np.ndarray

    def __len__(self) -> int:
        return len(self.state)

    @staticmethod
    def joined(parts: Sequence[Fates]) -> Fates:
        """All of these, in order."""
        return Fates(*(np.concatenate([getattr(p, f.name) for p in parts]) for f in fields(Fates)))

    @staticmethod
    def none() -> Fates:
        """Those of no rows."""
        ints = np.empty(0, np.int32)
        return Fates(np.empty(0, DIGEST), np.empty(0, np.uint64), np.empty(0, np.int8), ints, ints)


def write(files: Files, generation: str, shard: int, nonce: str, found: Fates, copies: pa.Array | None) -> WorkFile:
    """Write a shard's fates; `copies` has the copy text of each row written, for rows that steps made."""
    rows = found.rows.astype(np.int32)
    texts = pa.nulls(len(found), pa.list_(pa.string()))
    if copies is not None:
        texts = pa.ListArray.from_arrays(pa.array(np.concatenate([[0], np.cumsum(rows)]).astype(np.int32)), copies)
    columns = (found.digest["hi"], found.digest["lo"], found.key, found.state, found.made, rows)
    arrays = [pa.array(np.ascontiguousarray(c), f.type) for c, f in zip(columns, _SCHEMA, strict=False)]
    table = pa.Table.from_arrays([*arrays, texts], schema=_SCHEMA)
    path = join(folder(generation), f"{shard:07d}.{nonce}.arrow")
    files.make_folder(folder(generation))
    with files.create(path) as out:
        with pa.ipc.new_file(out, _SCHEMA) as writer:
            writer.write_table(table)
        files.sync(out)
    return WorkFile(path, "", len(found), "fates")


def folder(generation: str) -> str:
    """Where the fates of a generation's shards are, and their answers if these cannot be read from its parts."""
    return join(generation, "fates")


def read(generation: Generation, receipt: Receipt) -> tuple[Fates, pa.ChunkedArray] | None:
    """A shard's fates, and the copy texts of the rows written; None if it has none, or they are damaged: its rows are
    scored again.
    """
    table = None if receipt.fates is None else _table(generation.files, generation.root, receipt.fates)
    if table is None:
        return None
    c = {name: table.column(name) for name in table.column_names}
    digest = np.empty(table.num_rows, DIGEST)
    digest["hi"], digest["lo"] = c["hi"].to_numpy(), c["lo"].to_numpy()
    key, state, made, rows = (c[name].to_numpy() for name in ("key", "state", "made", "rows"))
    return Fates(digest, key, state, made, rows), c["copies"]


def _table(files: Files, root: str, part: Part) -> Any:
    try:
        size, digest = files.digest(join(root, part.work))
        if (size, digest) != (part.bytes, part.sha256):
            return None
        with files.local(join(root, part.work)) as path, pa.memory_map(path) as source:
            return pa.ipc.open_file(source).read_all()
    except FileNotFoundError:
        return None
