"""Delta tables as a source: at one version, read from its own files where these alone are the rows."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import pyarrow as pa

from gristmill.arrow.schemas import plain
from gristmill.errors import BadJob, BadSource, PlanChanged, RunFailed
from gristmill.process.blockingcalls import heard
from gristmill.process.extras import require
from gristmill.sinks.partition import NULL
from gristmill.snapshots.contract import DataFile, Piece, Snapshot, SnapshotKind, Wanted
from gristmill.snapshots.lakes import gone, pinned, whole
from gristmill.snapshots.sql import read_of
from gristmill.stores.sql import quoted

_AWAY = re.compile(r"connect|timed? ?out|dns|unavailable|reset|50[0234]", re.IGNORECASE)
_MISSING = re.compile(r"not found|no such file|no files in log|not the same as the specified", re.IGNORECASE)


class Delta:
    """`delta:///PATH`, `delta+s3://BUCKET/PATH` (and other object stores), or a folder with a `_delta_log`;
    `?version=5` for another than the latest.
    """

    name: ClassVar[str] = "delta"
    queried: ClassVar[bool] = False
    said: ClassVar[tuple[str, ...]] = ("version",)
    embedded: ClassVar[bool] = True
    in_address: ClassVar[tuple[str, ...]] = ()
    marks: ClassVar[tuple[tuple[str, ...], ...]] = (("_delta_log",),)

    @staticmethod
    def open(wanted: Wanted, version: str) -> Snapshot:
        """The table at a version, by its log."""
        asked = wanted.said.get("version", "")
        if asked and not asked.isdigit():
            raise BadJob(f"{wanted.shown}: version is {asked!r}: give the number of a version")
        number, _, table = version.partition(" ")
        asked = number or asked
        return Version(wanted, int(asked) if asked else None, table)


_: type[SnapshotKind] = Delta  # for mypy


class Version:
    """One version of a table, whose id is `of` if it has been read before."""

    def __init__(self, wanted: Wanted, version: int | None, of: str = "") -> None:
        deltalake = require("deltalake", "delta", wanted.shown)
        self._wanted, self._pinned, self.told = wanted, bool(of), f"version {version}"
        self._errors = (deltalake.exceptions.DeltaError, OSError, ValueError)
        place = wanted.place
        inner = place.uri.partition("+")[2] if "+" in place.uri.partition("://")[0] else place.path
        options = {name: str(value) for name, value in place.options.items()}
        try:
            self._table = heard(lambda: deltalake.DeltaTable(inner, version=version, storage_options=options or None))
            number, table = str(self._table.version()), str(self._table.metadata().id)
            self.schema = pa.schema(pa.schema(self._table.schema()).remove_metadata())
        except self._errors as e:
            raise self._said(e) from e
        if of and table != of:
            raise gone(wanted, self.told, f"another table is there now (its id is {table}, and was {of})")
        self.version, self.told = pinned(number, table), f"version {number}"

    def _said(self, error: BaseException) -> BadSource | RunFailed | PlanChanged:
        words = self._wanted.words(error)
        if isinstance(error, OSError) and _AWAY.search(words):
            return RunFailed(f"{self._wanted.shown}: cannot be reached: {words}: run again when the store answers")
        if self._pinned and (isinstance(error, FileNotFoundError) or _MISSING.search(words)):
            return gone(self._wanted, self.told, words)
        return BadSource(f"{self._wanted.shown}: cannot be read as a Delta table: {words}")

    def files(self) -> Sequence[DataFile] | None:
        """The files of the version, unless rows of them are deleted, or columns have other names or types there."""
        table = self._table
        try:
            if (table.metadata().configuration.get("delta.columnMapping.mode") or "none") != "none":
                return None
            features = table.protocol().reader_features or ()
            if "deletionVectors" in features and pa.table(table.deletion_vectors()).num_rows:
                return None
            files = self._listed()
            return files if files is not None and whole(self._wanted, files, self.schema) else None
        except (*self._errors, BadSource) as e:
            raise self._said(e) from e

    def _listed(self) -> list[DataFile] | None:
        """The files with the values of their partition; None if a value is not the same as text."""
        added = pa.table(self._table.get_add_actions(flatten=True))
        names = self._table.metadata().partition_columns
        constants = [[_text(v, self.schema.field(n).type) for v in added[f"partition.{n}"].to_pylist()] for n in names]
        if any(value is False for column in constants for value in column):
            return None
        uris = self._table.file_uris()
        paths = added["path"].to_pylist()
        ends = {path.rpartition("/")[2]: i for i, path in enumerate(paths)}
        if len(ends) < len(paths) or any(uri.rpartition("/")[2] not in ends for uri in uris):
            return None  # names that cannot be told apart
        found = []
        for uri in uris:
            i = ends[uri.rpartition("/")[2]]
            here = os.path.join(self._wanted.place.path, paths[i])
            named = here if not os.path.exists(uri) and os.path.exists(here) else uri  # which quotes a local folder
            found.append(DataFile(named, {n: c[i] for n, c in zip(names, constants, strict=True)}))
        return found

    def pieces(self) -> Sequence[Piece]:
        return [self._read]

    def _read(self) -> Iterator[pa.RecordBatch]:
        deltalake = require("deltalake", "delta", self._wanted.shown)
        names = read_of(self._wanted, self.schema.names)
        try:
            engine = deltalake.QueryBuilder()
            engine.execute("SET datafusion.execution.target_partitions = 1")  # file by file: else in any order
            engine.register("rows", self._table)
            columns = ", ".join(map(quoted, names))
            for batch in pa.RecordBatchReader.from_stream(engine.execute(f'SELECT {columns} FROM "rows"')):
                arrays = [c.cast(plain(c.type)) for c in batch.columns]
                yield pa.record_batch(arrays, names=batch.schema.names).select(names)
        except self._errors as e:
            raise self._said(e) from e

    def cancel(self) -> None:
        """It ends with the batch at hand."""

    def close(self) -> None:
        """Nothing is held."""


def _text(value: Any, kind: pa.DataType) -> Any:
    """A value as text that gives it back; False if none does."""
    if value is None:
        return None
    scalar = pa.scalar(value, kind)
    try:
        text = str(pa.array([scalar]).cast(pa.string())[0].as_py())
        return text if text != NULL and pa.array([text]).cast(kind)[0].equals(scalar) else False
    except (pa.ArrowException, NotImplementedError):
        return False
