"""Which row is which from one run to the next: by its key, or else by its place, and by what its answers rest on. Of a
job with `update`, each source row's fate is recorded for the next run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field, replace
from typing import Literal

import numpy as np
import pyarrow as pa

from gristmill.arrow.hashing import rough, row_digests
from gristmill.commit import fates
from gristmill.commit.fates import Fates
from gristmill.job.job import HELD
from gristmill.values import dataclass
from gristmill.worker.identity import Identity

_PATH, _POSITION = "\0path", "\0position"  # no column of a source has such a name


@dataclass(frozen=True)
class Matching:
    """How rows are matched: by `key` columns, or their place if there are none; `columns` are those that answers rest
    on.

    `opaque`: steps or post steps are code, and may make any column anew. `beside`: answers are written to a file of
    their own, too, as those of a row cannot be found in the sink's files. An `id` is written that is made of a row's
    place or key, or copied with the answers, if only the code knows its key.
    """

    key: tuple[str, ...]
    columns: tuple[str, ...]
    opaque: bool = False
    beside: bool = False
    id: Literal["", "made", "copied"] = ""

    def taken_over(
        self, schema: pa.Schema, results: Sequence[str], row_id: str | None, version: str | None
    ) -> list[str]:
        """The columns of a row with this output schema that are kept with its answers; all others are made of the
        source as it is now. `results` are the model's columns.
        """
        made = {version} if self.id == "copied" else {version, row_id}
        return [n for n in schema.names if n not in made and (self.opaque or n in results)] + (
            [row_id] if self.id == "copied" and row_id is not None and not self.opaque else []
        )

    def identified(self, rows: pa.Table, who: Identity, paths: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """For each source row the digest of its key and what its answers rest on, and 64 bits of the key alone."""
        if self.key:
            by = rows.select(list(self.key))
        else:
            names = pa.array(["" if path.startswith(HELD) else path for path in paths], pa.string())
            piece = pa.DictionaryArray.from_arrays(pa.array(who.piece.astype(np.int32)), names)
            by = pa.table({_PATH: piece.cast(pa.string()), _POSITION: pa.array(who.position.astype(np.int64))})
        every = by
        for name in self.columns:
            if name not in every.column_names:
                every = every.append_column(rows.schema.field(name), rows.column(name))
        return row_digests(every, repr(self.key)), rough(by)


@dataclass
class Following:
    """The source rows of one attempt at a shard, numbered in order as they are read."""

    matching: Matching
    seen: int = 0

    def begin(self, rows: pa.Table, who: Identity, paths: Sequence[str]) -> tuple[np.ndarray, Fates]:
        """Numbers for the next rows, and their fates as long as nothing has become of them."""
        digest, key = self.matching.identified(rows, who, paths)
        numbers = np.arange(self.seen, self.seen + rows.num_rows)
        self.seen += rows.num_rows
        state = np.full(rows.num_rows, fates.EXPANDED, np.int8)
        zero = np.zeros(rows.num_rows, np.int32)
        return numbers, Fates(digest, key, state, zero, zero)


@dataclass
class Record:
    """The fates of a shard's source rows, put together as its windows are written."""

    parts: list[Fates] = field(default_factory=list)
    made: list[np.ndarray] = field(default_factory=list)  # numbers of source rows, once for each row made of one
    written: list[np.ndarray] = field(default_factory=list)
    died: list[np.ndarray] = field(default_factory=list)
    copies: list[pa.Array] = field(default_factory=list)

    def finished(self) -> tuple[Fates, pa.Array | None]:
        """The fates of all rows, and the copy texts of those written, if steps made any."""
        whole = Fates.joined(self.parts) if self.parts else Fates.none()
        made, rows = (_counts(some, len(whole)) for some in (self.made, self.written))
        state = whole.state.copy()
        for numbers in self.died:
            state[numbers] = fates.DEAD
        whole = replace(whole, state=state, made=whole.made + made, rows=whole.rows + rows)
        texts = pa.concat_arrays(self.copies) if self.copies else pa.array([], pa.string())
        return whole, texts if pa.compute.any(pa.compute.not_equal(texts, "")).as_py() else None


def _counts(numbers: Sequence[np.ndarray], rows: int) -> np.ndarray:
    total = np.zeros(rows, np.int32)
    for some in numbers:
        total += np.bincount(some, minlength=rows).astype(np.int32)
    return total
