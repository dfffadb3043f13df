"""Lance tables as a source: at one version, copied, as only Lance reads its files."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from typing import ClassVar

import pyarrow as pa

from gristmill.arrow.schemas import plain
from gristmill.errors import BadJob, BadSource, GristmillError, RunFailed
from gristmill.job.snapshots import near
from gristmill.process.extras import require
from gristmill.snapshots.contract import DataFile, Piece, Snapshot, SnapshotKind, Wanted
from gristmill.snapshots.lakes import gone, pinned
from gristmill.snapshots.sql import read_of

BATCH_ROWS = 8192
_AWAY = re.compile(r"connect|timed? ?out|dns|unavailable|reset|50[0234]", re.IGNORECASE)
_MISSING = re.compile(r"not found|no such file", re.IGNORECASE)
_END = ".lance"


class Lance:
    """`lance:///FOLDER#table`, the table of a LanceDB database, or `lance:///FOLDER.lance`; `lance+s3://BUCKET/FOLDER`
    (and other object stores); `?version=5` for another than the latest.
    """

    name: ClassVar[str] = "lance"
    queried: ClassVar[bool] = False
    said: ClassVar[tuple[str, ...]] = ("version",)
    embedded: ClassVar[bool] = True
    in_address: ClassVar[tuple[str, ...]] = ("ddbTableName",)
    marks: ClassVar[tuple[tuple[str, ...], ...]] = (("_versions", "data"),)

    @staticmethod
    def open(wanted: Wanted, version: str) -> Snapshot:
        """The table at a version."""
        asked = wanted.said.get("version", "")
        if asked and not asked.isdigit():
            raise BadJob(f"{wanted.shown}: version is {asked!r}: give the number of a version")
        number, _, of = version.partition(" ")
        return Version(wanted, int(number or asked or 0), of)


_: type[SnapshotKind] = Lance  # for mypy


class Version:
    """One version of a table, 0 for the latest. `of` is when it was made, if it has been read before: a table that is
    made again has other times.
    """

    def __init__(self, wanted: Wanted, version: int, of: str = "") -> None:
        lance = require("lance", "lance", wanted.shown)
        self._wanted, self._pinned, self.told = wanted, bool(of), f"version {version}"
        place = wanted.place
        options = {name: str(value) for name, value in place.options.items()}
        remote = "+" in place.uri.partition("://")[0]
        inner = place.uri.partition("+")[2].rstrip("/") if remote else place.path
        at = f"{inner}/{place.name}{_END}" if place.name else inner
        if not remote and not os.path.isdir(at):
            there = os.listdir(inner) if place.name and os.path.isdir(inner) else []
            found = [name.removesuffix(_END) for name in there if name.endswith(_END)]
            what = f"there is no table {place.name!r}{near(place.name, found)}" if place.name else "there is no folder"
            raise BadSource(f"{wanted.shown}: {what}")
        try:
            self._table = lance.dataset(at, version=version or None, storage_options=options or None)
            made = {v["version"]: v["timestamp"] for v in self._table.versions()}
            names = read_of(wanted, self._table.schema.names)
            kinds = [(name, plain(self._table.schema.field(name).type)) for name in names]
        except (OSError, ValueError, RuntimeError) as e:
            raise self._said(e) from e
        self.schema, now = pa.schema(kinds), made[self._table.version].isoformat()
        self.told = f"version {self._table.version}"
        if of and now != of:
            raise gone(wanted, self.told, f"another table is there now (that version is of {now}, and was of {of})")
        self.version = pinned(str(self._table.version), now)

    def _said(self, error: BaseException) -> GristmillError:
        if isinstance(error, GristmillError):
            return error
        words = self._wanted.words(error)
        if self._pinned and _MISSING.search(words):
            return gone(self._wanted, self.told, words)
        if isinstance(error, OSError) and _AWAY.search(words):
            return RunFailed(f"{self._wanted.shown}: cannot be reached: {words}: run again when the store answers")
        return BadSource(f"{self._wanted.shown}: cannot be read as a Lance table: {words}")

    def files(self) -> Sequence[DataFile] | None:
        return None

    def count(self) -> int | None:
        try:
            return int(self._table.count_rows())
        except (OSError, ValueError, RuntimeError) as e:
            raise self._said(e) from e

    def pieces(self) -> Sequence[Piece]:
        return [self._read]

    def _read(self) -> Iterator[pa.RecordBatch]:
        """Fragment by fragment, in the order of the rows, without those that are deleted."""
        names = self.schema.names
        try:
            for batch in self._table.scanner(names, batch_size=BATCH_ROWS, scan_in_order=True).to_batches():
                arrays = [batch.column(name).cast(self.schema.field(name).type) for name in names]
                yield pa.record_batch(arrays, schema=self.schema)
        except (OSError, ValueError, RuntimeError) as e:
            raise self._said(e) from e

    def cancel(self) -> None:
        """It ends with the batch at hand."""

    def close(self) -> None:
        """Nothing is held."""
