"""A store to read from: the rows of such a JSON file, `shelf:///FILE`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

import pyarrow as pa

from gristmill.errors import BadSource
from gristmill.snapshots.contract import DataFile, Piece, Snapshot, SnapshotKind, Wanted


class ShelfRows:
    """All rows, whose addresses are `shelf:///FILE`."""

    name: ClassVar[str] = "shelf"
    queried: ClassVar[bool] = False
    said: ClassVar[tuple[str, ...]] = ()
    embedded: ClassVar[bool] = True
    marks: ClassVar[tuple[tuple[str, ...], ...]] = ()

    @staticmethod
    def open(wanted: Wanted, version: str) -> Snapshot:
        """The file as it is now: it is read as a whole, once."""
        return Read(wanted)


_: type[SnapshotKind] = ShelfRows  # for mypy


class Read:
    """What was read of a file. It is not kept anywhere else, so that there is no version to come back to."""

    version = told = ""

    def __init__(self, wanted: Wanted) -> None:
        file = Path(wanted.place.path)
        if not file.exists():
            raise BadSource(f"{wanted.shown}: there is no file {file}")
        rows = list(json.loads(file.read_text())["rows"].values())
        self._rows = pa.Table.from_pylist(rows).select(wanted.columns or list(rows[0]))
        self.schema: pa.Schema | None = self._rows.schema

    def files(self) -> Sequence[DataFile] | None:
        """They are not Parquet files: Gristmill copies what `pieces` read."""
        return None

    def pieces(self) -> Sequence[Piece]:
        """All rows as one piece."""
        return [self._read]

    def _read(self) -> Iterator[pa.RecordBatch]:
        yield from self._rows.to_batches()

    def cancel(self) -> None:
        """No read takes long."""

    def close(self) -> None:
        """Nothing is held."""
