"""The files that hold the rows of a source that is a store: its own, or copies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from gristmill.shards.sourcefiles import SourceFile
from gristmill.sources.paths import Storage
from gristmill.values import dataclass

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["Pin", "Pinned"]


@dataclass(frozen=True)
class Pin:
    """What a run reads of one address: `id` is that of what is wanted there, `version` that of the snapshot, `copy` the
    name of the folder with the rows if they were copied, `told` and `at` are for people.
    """

    id: str
    version: str
    told: str
    at: str
    copy: str = ""


@dataclass(frozen=True)
class Pinned:
    """A source at its snapshots: files of one format (`form`), in order, the types of columns that are constant in
    each, by path, the pins that lead there again, and notes on what the source names `twice`. `more` are rows of the
    stores that the files do not have, for those who only look.
    """

    storage: Storage
    files: tuple[SourceFile, ...]
    kinds: Mapping[str, Mapping[str, pa.DataType]]
    pins: tuple[Pin, ...]
    twice: tuple[str, ...] = ()
    more: int = 0
    form: str = "parquet"
