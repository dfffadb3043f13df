"""Files of a source as a plan knows them.

A position is a row's place in its file, in the file's own unit: a row number (Parquet), the byte offset at which the
record starts (JSONL, CSV; in the decompressed stream for compressed files), or 0 for formats with one row per file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import TYPE_CHECKING

from gristmill.values import dataclass

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of a source as a listing shows it. `path` has no secrets in it; `stamp` changes with the content.

    `touched` also changes when something else about the file does (its owner, a link to it): as long as it is the same,
    earlier findings about the file's content still hold. It does not identify the content. `folders` are those named
    `name=value` that the file is in, below the path that the source names, as in `day=2026-01-01/lang=en`.
    """

    path: str
    size: int
    stamp: str
    touched: str = field(default="", compare=False)
    folders: str = ""


@dataclass(frozen=True, slots=True)
class FileInfo:
    """What planning must know of one file.

    `extent` is where the file ends, in positions. `cuts` are the positions (sorted int64, the first is where it begins,
    0 but for a range of a topic, the last `extent`) where it can be cut at no cost; if `divisible`, any position
    between will do, too. `cut_rows[i]` is the number of rows between `cuts[i]` and `cuts[i + 1]`; None if only reading
    could tell (plain JSONL). `nulls` counts nulls by column if the format knows. `layout` is a digest of the file's
    inner structure, which size and time could miss. `row_bytes` is a sampled mean of positions per row, for formats
    that cannot count without reading. `bytes` is an estimate where the size of a file does not count bytes.
    """

    file: SourceFile
    extent: int
    cuts: np.ndarray
    divisible: bool
    schema: pa.Schema
    cut_rows: np.ndarray | None = None
    nulls: Mapping[str, int] | None = None
    layout: str = ""
    row_bytes: float | None = None
    bytes: int | None = None

    def can_be_cut(self, at: int) -> bool:
        """Whether the file as it is now can be cut at a position, as one of another content need not be."""
        if self.divisible:
            return True
        spot = int(self.cuts.searchsorted(at))
        return spot < len(self.cuts) and int(self.cuts[spot]) == at

    @property
    def rows(self) -> int | None:
        """Rows in the file, or None if only reading could tell."""
        return None if self.cut_rows is None else int(self.cut_rows.sum())
