"""What shards of a plan inherit: answers that were given for shards of earlier generations which are given up, and not
committed by these. A table beside the plan says of which.
"""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa

from gristmill.commit.documents import TableRecord
from gristmill.commit.generation import Generation, whole_table
from gristmill.files.disk import join
from gristmill.values import dataclass

TABLE = "inherited"
INHERITED = pa.schema([("shard", pa.int64()), ("generation", pa.string()), ("of", pa.int64())])


@dataclass(frozen=True)
class Inherited:
    """A shard of an earlier generation, whose `folder` has its journal: nobody else takes answers from that."""

    folder: str
    shard: int


def read(generation: Generation, tables: Mapping[str, TableRecord]) -> dict[int, tuple[Inherited, ...]]:
    """What each shard of a generation's plan inherits. Raises CorruptStore."""
    if TABLE not in tables:
        return {}
    found: dict[int, tuple[Inherited, ...]] = {}
    for row in whole_table(generation, tables[TABLE]).to_pylist():
        folder = join(generation.folder.rpartition("/")[0], row["generation"])
        found[row["shard"]] = (*found.get(row["shard"], ()), Inherited(folder, row["of"]))
    return found
