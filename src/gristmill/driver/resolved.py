"""A job as planning has resolved it."""

from __future__ import annotations

from dataclasses import field, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from gristmill.driver import jobcolumns
from gristmill.errors import GristmillError
from gristmill.fingerprint import digests as fingerprint
from gristmill.fingerprint.digests import Fingerprint
from gristmill.fingerprint.pins import Approved
from gristmill.job.job import JobSpec
from gristmill.job.specs import ModelSpec
from gristmill.models.contract import ModelInfo, Place
from gristmill.models.versions import Registered
from gristmill.shards import shard
from gristmill.shards.shard import Selection
from gristmill.shards.sourcefiles import FileInfo
from gristmill.sinks.contract import SinkFormat
from gristmill.snapshots.pinned import Pin
from gristmill.sources.contract import SourceFormat
from gristmill.values import dataclass

if TYPE_CHECKING:
    pass


@dataclass(frozen=True)
class Resolved:
    """A job with everything determined that can be without loading a model."""

    job: JobSpec
    fs: Any
    source_format: SourceFormat
    sink_format: SinkFormat
    files: tuple[FileInfo, ...]
    schema: pa.Schema
    selection: Selection
    model: ModelSpec
    info: ModelInfo
    columns: tuple[str, ...] | None
    keep: tuple[str, ...] | None
    place: Place
    workers: int
    gpus: tuple[str, ...]
    fingerprint: Fingerprint
    notes: tuple[str, ...] = ()
    nulls: dict[str, int] = field(default_factory=dict)
    nulls_given: str = ""  # what a function is given for nulls
    differing: GristmillError | None = None  # why no generation may be begun over all of these files
    looked_at: str = ""  # how the files were inspected
    condition: Any = None  # `where`, checked (sources.where.SqlWhere)
    only: Any = None  # a retry's rows (driver.retrydead.Only)
    own: dict[str, pa.Schema] = field(default_factory=dict)  # schemas with which a retry reads some files
    folders: tuple[str, ...] = ()  # columns taken from folder names, of those that are read
    pins: tuple[Pin, ...] = ()  # where a source that is a store is read, and what of it was copied
    more: int = 0  # rows of a store that were counted, and not copied: planned alone
    skipped: tuple[str, ...] = ()  # files left out because they cannot be read, with the reason
    unread: tuple[str, ...] = ()  # their paths
    registered: tuple[Registered, ...] = ()  # the models that a registry names
    approved: tuple[Approved, ...] = ()  # the files of those that arguments are

    @property
    def bytes(self) -> int:
        """Bytes of the source's files; estimated, if these are only the first rows of a store."""
        there = sum(f.file.size if f.bytes is None else f.bytes for f in self.files)
        return round(there * (1 + self.more / max(1, sum(f.extent for f in self.files)))) if self.more else there

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings about the job before it runs."""
        return (*self.notes, *self.left_out)

    @property
    def left_out(self) -> tuple[str, ...]:
        """What is told of files that cannot be read."""
        return tuple(f"skipped a bad file: {file}" for file in self.skipped)

    def of_folders(self, schema: pa.Schema) -> Resolved:
        """The job with this schema; types of columns from folder names are recorded in the fingerprint's options."""
        if not self.folders:
            return self
        told = fingerprint.of_folders({name: str(schema.field(name).type) for name in self.folders})
        options = {**self.fingerprint.options, **told}
        return replace(self, schema=schema, fingerprint=replace(self.fingerprint, options=options))

    @property
    def blank(self) -> bool:
        """Whether the source has neither rows nor columns that names could be checked against."""
        return jobcolumns.is_blank(self.files, self.schema)

    @property
    def whole(self) -> bool:
        """Whether every position of every file is selected."""
        return self.job.source.limit is None and self.job.source.sample is None

    @property
    def rows(self) -> int | None:
        """Source rows selected, or None if only reading can tell."""
        known = [shard.rows_between(self.files[f], a, b) for f, a, b in self.selection.ranges.tolist()]
        return None if any(k is None for k in known) else self._of_all(sum(k for k in known if k is not None))

    def _of_all(self, selected: int) -> int:
        """Rows selected of the whole store, if so many are of its first rows."""
        if not self.more:
            return selected
        copied = sum(f.extent for f in self.files)
        if self.job.source.sample is not None:
            return min(self.job.source.sample, copied + self.more)
        return selected if selected < copied else selected + self.more

    @property
    def estimated_rows(self) -> float:
        """Source rows selected, estimated from sampled row sizes if not known."""
        if self.more and (rows := self.rows) is not None:
            return rows
        spans = self.selection.ranges.tolist()
        return sum(shard.estimated_rows(self.files[f], a, b) for f, a, b in spans)
