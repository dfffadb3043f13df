"""Iceberg tables as a source: at one snapshot, read from its own files where these alone are the rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import pyarrow as pa

from gristmill.errors import BadJob, BadSource, PlanChanged, RunFailed
from gristmill.job.snapshots import near
from gristmill.process.away import is_away
from gristmill.process.extras import require
from gristmill.snapshots.contract import DataFile, Piece, Snapshot, SnapshotKind, Wanted
from gristmill.snapshots.lakes import gone, pinned, whole
from gristmill.stores.icebergrows import rows_of


class Iceberg:
    """`iceberg://CATALOG/namespace.table`, of a catalog that PyIceberg knows (its file or environment, or the source's
    `storage`), or `iceberg:///PATH/metadata/NAME.metadata.json` (`iceberg+s3://BUCKET/…`); `?snapshot=ID`
    or `?ref=BRANCH` for another than the current one.
    """

    name: ClassVar[str] = "iceberg"
    queried: ClassVar[bool] = False
    said: ClassVar[tuple[str, ...]] = ("snapshot", "ref")
    embedded: ClassVar[bool] = False
    in_address: ClassVar[tuple[str, ...]] = ()
    marks: ClassVar[tuple[tuple[str, ...], ...]] = ()

    @staticmethod
    def open(wanted: Wanted, version: str) -> Snapshot:
        """The table at a snapshot."""
        return Taken(wanted, version)


_: type[SnapshotKind] = Iceberg  # for mypy


class Taken:
    """One snapshot of a table."""

    def __init__(self, wanted: Wanted, version: str) -> None:
        require("pyiceberg", "iceberg", wanted.shown)
        from pyiceberg.io.pyarrow import schema_to_pyarrow

        self._wanted = wanted
        table = _table(wanted)
        number, _, of = version.partition(" ")
        number = number or self._chosen(table)
        self.told = f"snapshot {number}" if number else "no snapshot: it is empty"
        here = str(table.metadata.table_uuid)
        if of and here != of:
            raise gone(wanted, self.told, f"another table is there now (its uuid is {here}, and was {of})")
        if of and table.snapshot_by_id(int(number)) is None:
            raise gone(wanted, self.told, "the table has expired it")
        self._pinned, self.version = bool(of), pinned(number, here) if number else ""
        columns = ("*",) if wanted.columns is None else tuple(wanted.columns)
        try:
            self._scan = table.scan(snapshot_id=int(number) if number else None, selected_fields=columns)
            self.schema = schema_to_pyarrow(table.scan(snapshot_id=self._scan.snapshot_id).projection())
        except (ValueError, OSError) as e:
            raise BadSource(f"{wanted.shown}: {wanted.words(e)}") from e

    def _chosen(self, table: Any) -> str:
        said = self._wanted.said
        if "ref" in said:
            refs = table.refs()
            if said["ref"] not in refs:
                raise BadSource(
                    f"{self._wanted.shown}: there is no branch or tag {said['ref']!r}: it has {', '.join(refs)}"
                )
            return str(refs[said["ref"]].snapshot_id)
        if "snapshot" in said:
            if not said["snapshot"].isdigit() or table.snapshot_by_id(int(said["snapshot"])) is None:
                ids = ", ".join(str(s.snapshot_id) for s in table.snapshots()[-5:])
                raise BadSource(f"{self._wanted.shown}: there is no such snapshot: the latest are {ids or 'none'}")
            return said["snapshot"]
        current = table.current_snapshot()
        return "" if current is None else str(current.snapshot_id)

    def files(self) -> Sequence[DataFile] | None:
        """The data files, unless rows of them are deleted, or columns have other names or types there."""
        try:
            tasks = list(self._scan.plan_files())
        except (ValueError, OSError) as e:
            raise self._said(e) from e
        if any(task.delete_files or str(task.file.file_format).rpartition(".")[2] != "PARQUET" for task in tasks):
            return None
        files = [DataFile(_local(task.file.file_path)) for task in tasks]
        try:
            return files if whole(self._wanted, files, self.schema) else None
        except (OSError, BadSource) as e:
            raise self._said(e) from e

    def pieces(self) -> Sequence[Piece]:
        return [self._read]

    def _read(self) -> Iterator[pa.RecordBatch]:
        from pyiceberg.io.pyarrow import schema_to_pyarrow

        scan, shown = self._scan, self._wanted.shown
        try:
            tasks = sorted(scan.plan_files(), key=lambda task: str(task.file.file_path))  # else as manifests name them
            schema = schema_to_pyarrow(scan.projection())
            rows = rows_of(scan.table_metadata, scan.io, scan.projection(), tasks, shown)
            yield from pa.RecordBatchReader.from_batches(schema, rows).cast(schema)
        except (ValueError, OSError) as e:
            raise self._said(e) from e

    def _said(self, error: BaseException) -> BadSource | PlanChanged | RunFailed:
        words = self._wanted.words(error)
        missing = isinstance(error, FileNotFoundError) or isinstance(error.__cause__, FileNotFoundError)
        if self._pinned and (missing or "no such file" in words.lower()):
            return gone(self._wanted, self.told, words)
        if is_away(error):
            return RunFailed(f"{self._wanted.shown}: {words}: run again when the store answers")
        return BadSource(f"{self._wanted.shown}: {words}")

    def cancel(self) -> None:
        """It ends with the batch at hand."""

    def close(self) -> None:
        """Nothing is held."""


def _table(wanted: Wanted) -> Any:
    from pyiceberg.catalog import load_catalog
    from pyiceberg.exceptions import NoSuchNamespaceError, NoSuchTableError, RESTError
    from pyiceberg.table import StaticTable

    place, options = wanted.place, {n: str(v) for n, v in wanted.place.options.items()}
    catalog, _, name = place.uri.partition("://")[2].partition("/")
    try:
        if name.endswith(".metadata.json"):
            return StaticTable.from_metadata(place.uri.removeprefix("iceberg+") if catalog else place.path, options)
        if not catalog or "." not in name:
            raise BadJob(f"{wanted.shown}: name a catalog and a table: iceberg://CATALOG/namespace.table")
        there = load_catalog(catalog, **options)
    except (ValueError, OSError, RESTError) as e:
        words = f"{wanted.shown}: the catalog cannot be opened: {wanted.words(e)}"
        raise (RunFailed(f"{words}: run again when it answers") if is_away(e) else BadSource(words)) from e
    try:
        return there.load_table(name)
    except (NoSuchTableError, NoSuchNamespaceError) as e:
        space, _, alone = name.rpartition(".")
        names = [n[-1] for n in there.list_tables(space)] if _has(there, name) else []
        raise BadSource(f"{wanted.shown}: there is no table {alone!r} in {space!r}{near(alone, names)}") from e
    except Exception as e:  # whatever a catalog's client raises
        raise RunFailed(f"{wanted.shown}: the catalog says: {wanted.words(e)}: run again when it answers") from e


def _has(catalog: Any, name: str) -> bool:
    return tuple(name.rpartition(".")[0].split(".")) in catalog.list_namespaces()


def _local(path: str) -> str:
    """A file of this machine as a path: what follows file: is one, in which nothing is quoted."""
    if path.startswith("file:"):
        return "/" + path.removeprefix("file:").lstrip("/")
    return path
