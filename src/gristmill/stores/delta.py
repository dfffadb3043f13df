"""Delta Lake tables in a folder of this machine. The parts of a result become the table's data files, and one commit,
with an application transaction for the generation, makes them visible.

The marks are a file in the table's folder, which is named by its content and never changed; the version of the
application `gristmill` says which one holds. Commits have them, too, but a log forgets its commits after a while. A
table that is restored keeps that version, so the marks are then those of the version that it was restored to.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar
from urllib.parse import unquote

import pyarrow as pa

from gristmill.arrow.schemas import plain, storage
from gristmill.errors import BadJob, BadSource
from gristmill.files.disk import LOCAL
from gristmill.process.extras import require
from gristmill.stores.contract import (
    Key,
    Load,
    Mark,
    Mode,
    Part,
    Place,
    Reader,
    Store,
    StoreKind,
    StoreUnavailable,
    fields_but_for_capitals,
    same_but_for_capitals,
)
from gristmill.stores.deltafiles import about_files, rows_among
from gristmill.stores.deltamarks import APP, LOG, OURS, Lost, added_files, files_at, marks_of, noted_files
from gristmill.stores.deltaparts import never_back, refuse_changed
from gristmill.stores.deltastats import statistics
from gristmill.stores.deltatrial import TIMES, has_times, unopened
from gristmill.stores.lake import (
    SIMPLE,
    Datafile,
    Lake,
    Snapshot,
    column_type,
    labelled,
    left_out,
    padded,
    parquet_about,
    parquet_batches,
    write_parquet,
)
from gristmill.stores.lookup import asked, keyed, matching, restored
from gristmill.stores.named import NOTES
from gristmill.stores.refused import without_far
from gristmill.stores.sql import quoted

OLD = 86_400.0  # seconds after which marks that do not hold are removed: long after whoever wrote them has committed
# What a table asks of its writers beyond naming files that hold its columns.
_PLAIN_FEATURES = frozenset({TIMES, "appendOnly", "invariants"})


class Delta:
    """`delta:///PATH`, or `delta://PATH` for a path relative to the current folder."""

    name: ClassVar[str] = "delta"
    modes: ClassVar[tuple[Mode, ...]] = ("replace", "append", "upsert")
    keyed: ClassVar[bool] = False
    embedded: ClassVar[bool] = True
    in_address: ClassVar[tuple[str, ...] | None] = ()
    in_options: ClassVar[tuple[str, ...] | None] = None

    @staticmethod
    def open(place: Place) -> Store:
        """The table, which is made by the first delivery."""
        _package(place)
        _placed(place)
        folder, name = os.path.split(place.path)
        if not os.path.isdir(folder):
            raise BadJob(f"{place.shown}: there is no folder {folder}: make it, or give another path")
        names = _names(place.path)  # looked at once: the table may be made at this moment
        if LOG not in names and not all(map(_ours, names)):
            raise BadJob(
                f"{place.shown}: is a folder with other files in it, and no Delta table: give the path of a table, or "
                "of a folder that does not exist yet"
            )
        return Lake(place, Table(place), os.path.join(folder, name))

    @staticmethod
    def files(place: Place) -> tuple[str, str]:
        """See Filed."""
        return place.path, "part-0.parquet"

    @staticmethod
    def reader(place: Place, key: tuple[str, ...]) -> Reader:
        """Opens the newest version for each call."""
        _package(place)
        _placed(place)
        return TableReader(place, key)


_: type[StoreKind] = Delta  # for mypy


def _package(place: Place) -> Any:
    return require("deltalake", "delta", place.shown)


def _placed(place: Place) -> None:
    if place.name:
        raise BadJob(f"{place.shown}: a Delta table is a folder: leave out #{place.name}, or make it part of the path")
    if re.search("%[0-9a-fA-F]{2}", place.path):
        raise BadJob(f"{place.shown}: {place.path} has a %, and deltalake finds no such folder: give another path")


def _names(path: str) -> list[str]:
    if os.path.exists(path) and not os.path.isdir(path):
        raise BadJob(f"{path}: is a file, and a Delta table is a folder: give another path")
    return LOCAL.names(path)


def _ours(name: str) -> bool:
    return name in (OURS, NOTES) or name.startswith("gm_")


class Table:
    """What Delta does otherwise than other lakes."""

    name = "Delta Lake"
    suffix = ".parquet"
    joins = True
    joint = "/"
    names = True

    def __init__(self, place: Place) -> None:
        self._place = place
        self._marked: tuple[str, tuple[tuple[Mark, ...], str]] = ("", ((), ""))

    def folder(self) -> str:
        return self._place.path

    def now(self) -> Snapshot | None:
        with _said(self._place):
            table = opened(self._place)
            if table is None:
                return None
            version, times = f"{table.metadata().id} {table.version()}", table.transaction_version
            (marks, lost), new = self._marks(table, version), times(APP) is None
            return Snapshot(_schema(table), marks, lambda s: times(s) or 0, table, version, new, lost)

    def _marks(self, table: Any, version: str) -> tuple[tuple[Mark, ...], str]:
        """The marks, or why they are lost, looked for once a version."""
        if version != self._marked[0]:
            try:
                found = marks_of(table, self._place), ""
            except Lost as e:
                found = (), str(e)
            self._marked = (version, found)
        return self._marked[1]

    def kind(self, kind: pa.DataType) -> pa.DataType | None:
        return column_type(kind, _SIMPLE)

    def retypes(self, now: Snapshot, load: Load, kind: pa.DataType) -> bool:
        known = not set(load.schema.names).difference(now.schema.names)
        return known and _plain(now.table) and (not has_times(kind) or TIMES in _read_features(now.table))

    def refused(self, now: Snapshot | None, load: Load) -> str | None:
        """What it asks of writers, deltalake does or refuses."""
        there = [] if now is None else [name for name in now.schema.names if name not in load.schema.names]
        if (why := same_but_for_capitals([*there, *load.schema.names], "Delta Lake")) is not None:
            return why
        for field in load.schema:
            if (why := fields_but_for_capitals(storage(field.type), "Delta Lake")) is not None:
                return f"column {field.name!r}: {why}"
        for name in (n for n in ([] if now is None else _partitions(now.table)) if n in load.schema.names):
            held = self.kind(plain(load.schema.field(name).type))
            if held is not None and (why := never_back(held)) is not None:
                return f"column {name!r}: {why}: cast it to text in a step, and there, or deliver to another table"
        if now is not None and _bound(now.table) and len(new := self._new(now, load)):
            return f"has mapped column names, to which deltalake adds none: add {', '.join(map(repr, new.names))} there"
        raised = now is not None and TIMES in _read_features(now.table)
        if not raised and (why := unopened(self._new(now, load))) is not None:
            return why
        if now is not None and (load.mode == "replace" or load.delete) and _is_set(now.table, "delta.appendOnly"):
            return (
                "is a table of which rows never go (delta.appendOnly): use mode append, or upsert for keys that are new"
            )
        odd = next((name for name in load.schema.names if "`" in name), None)
        if odd is None or load.mode != "upsert":
            return None
        return f"column {odd!r}: an upsert to Delta Lake cannot name it: give it another name, without a backtick"

    def _new(self, now: Snapshot | None, load: Load) -> pa.Schema:
        """The columns that the table gets."""
        new = load.schema if now is None else [f for f in load.schema if load.evolve and f.name not in now.schema.names]
        kinds = ((f.name, self.kind(plain(f.type))) for f in new)
        return pa.schema([(name, kind) for name, kind in kinds if kind is not None])

    def write(
        self,
        now: Snapshot | None,
        path: str,
        parts: Sequence[Part],
        schema: pa.Schema,
        batches: Iterator[pa.RecordBatch],
    ) -> None:
        near = without_far(batches, self._place.shown, "which few readers of Delta Lake have")
        write_parquet(path, labelled(parts), schema, near)

    def about(self, path: str) -> Datafile:
        return parquet_about(path)

    def count(self) -> int:
        now = self.now()
        with _said(self._place):
            return 0 if now is None else _count(now.table)

    def paths(self, now: Snapshot) -> Iterator[str]:
        with _said(self._place):
            return map(unquote, about_files(now.table).column("path").to_pylist())

    # ------------------------------------------------ committing

    def commit(
        self, now: Snapshot | None, load: Load, schema: pa.Schema, files: Sequence[Datafile], marks: Sequence[Mark]
    ) -> bool:
        deltalake = _package(self._place)
        from deltalake.exceptions import CommitFailedError

        if now is not None:
            refuse_changed(_partitions(now.table), files, schema, self._place.shown)
        body = json.dumps([json.loads(mark.dump()) for mark in marks]).encode()
        digest = hashlib.sha256(body).hexdigest()[:15]
        LOCAL.make_folder(os.path.join(self.folder(), OURS))
        LOCAL.write_over(os.path.join(self.folder(), OURS, f"{digest}.json"), body)
        times = 0 if now is None else now.committed(load.stage)
        version = 0 if now is None else now.table.version() + 1  # the client moves on with the commit
        before = None if now is None else now.table.transaction_version(APP)
        said = deltalake.CommitProperties(
            custom_metadata={APP: body.decode()},
            max_commit_retries=0,  # another version is looked at before this is tried again
            app_transactions=[
                deltalake.Transaction(APP, int(digest, 16)),
                deltalake.Transaction(load.stage, times + 1),
            ],
        )
        with _said(self._place):
            try:
                done = self._commit(now, load, schema, files, said)
            except CommitFailedError:
                if self._moved(now):
                    return False
                raise
        if done:
            self._note_files(load, digest, version, before)
        self._forget(f"{digest}.json")
        return done

    def _note_files(self, load: Load, digest: str, version: int, before: int | None) -> None:
        """Note which files a delivery has added, for the time when the log has forgotten its commit; of one that had
        nothing to add those of the delivery before it, by its version of the application.
        """
        nothing = not load.mark.rows and not load.whole and before is not None
        added = noted_files(self.folder(), f"{before:015x}") if nothing else added_files(self.folder(), version)
        if added is not None:
            LOCAL.write_over(files_at(self.folder(), digest), json.dumps(sorted(added)).encode())

    def _forget(self, held: str) -> None:
        """Remove marks that no longer hold, nor will if they are about to be committed."""
        folder = os.path.join(self.folder(), OURS)
        written = os.stat(os.path.join(folder, held)).st_mtime
        for name in LOCAL.names(folder):
            path = os.path.join(folder, name)
            with contextlib.suppress(FileNotFoundError):
                if os.stat(path).st_mtime < written - OLD:
                    LOCAL.remove(path)

    def _moved(self, now: Snapshot | None) -> bool:
        """Whether there is a later version."""
        found = opened(self._place)
        return found is not None and (now is None or found.version() > now.table.version())

    def _commit(
        self, now: Snapshot | None, load: Load, schema: pa.Schema, files: Sequence[Datafile], said: Any
    ) -> bool:
        from deltalake import Schema, write_deltalake
        from deltalake.transaction import create_table_with_add_actions

        if now is None:
            LOCAL.make_folder(self.folder())
            added = [self._added(file, schema) for file in files]
            try:
                create_table_with_add_actions(self.folder(), Schema.from_arrow(schema), added, commit_properties=said)
            except Exception:
                if self._moved(now):
                    return False
                raise
            return True
        mode = "overwrite" if load.mode == "replace" else "append"
        new = [f.name for f in schema if f.name not in now.schema.names]
        times = [f for f in schema if f.name in new and has_times(f.type)]
        if load.mode == "upsert" and times and TIMES not in _read_features(now.table):
            self._add(now, pa.schema(times))
            return False  # the version that has them came first
        if load.mode == "upsert":
            self._merge(now, load, schema, files, said)
        elif new or not _plain(now.table):
            lacks = left_out(now.schema, schema)
            batches = padded(parquet_batches(files, schema), lacks)
            rows = pa.RecordBatchReader.from_batches(pa.schema([*schema, *lacks]), batches)
            merged: Any = "merge" if new else None
            write_deltalake(now.table, rows, mode=mode, schema_mode=merged, commit_properties=said)
        else:
            added = [self._added(file, schema) for file in files]
            kinds = {f.name: f.type for f in schema}
            columns, there = pa.schema([f.with_type(kinds.get(f.name, f.type)) for f in now.schema]), now.table.schema()
            columns = there if columns == now.schema else Schema.from_arrow(columns)
            now.table.create_write_transaction(added, mode, columns, commit_properties=said)
        return True

    @staticmethod
    def _add(now: Snapshot, columns: pa.Schema) -> None:
        """Add columns in a version of their own. Trap: a merge adds times without a zone to a table that does not say
        of itself that it has such, and nobody can open it then.
        """
        from deltalake import CommitProperties, Schema

        once = CommitProperties(max_commit_retries=0)
        now.table.alter.add_columns(list(Schema.from_arrow(columns).fields), commit_properties=once)

    def _merge(self, now: Snapshot, load: Load, schema: pa.Schema, files: Sequence[Datafile], said: Any) -> None:
        """Update and add rows by key. A merge that finds nothing to do makes no version, and the marks need one."""
        rows = pa.RecordBatchReader.from_batches(schema, parquet_batches(files, schema))
        same = " AND ".join(f"t.{quoted(n)} = s.{quoted(n)}" for n in load.key)
        before, new = now.table.version(), any(name not in now.schema.names for name in schema.names)
        merge = now.table.merge(
            rows, same, source_alias="s", target_alias="t", merge_schema=new, commit_properties=said
        )
        merge = merge.when_matched_update_all().when_not_matched_insert_all()
        if load.delete:
            merge = merge.when_not_matched_by_source_delete()
        merge.execute()
        if now.table.version() == before:
            now.table.create_write_transaction([], "append", now.table.schema(), commit_properties=said)

    def _added(self, file: Datafile, schema: pa.Schema) -> Any:
        from deltalake.transaction import AddAction

        name, about = os.path.relpath(file.path, self.folder()).replace(os.sep, "/"), os.stat(file.path)
        said_of = json.dumps(statistics(file.path, schema), ensure_ascii=False)  # deltalake misreads \u escapes
        return AddAction(name, about.st_size, {}, int(about.st_mtime * 1000), True, said_of)


def opened(place: Place) -> Any:
    """The newest version of the table; None if there is none."""
    deltalake = _package(place)
    from deltalake.exceptions import TableNotFoundError

    if not os.path.isdir(os.path.join(place.path, LOG)):
        return None
    try:
        return deltalake.DeltaTable(place.path, storage_options=dict(place.options) or None)
    except TableNotFoundError:
        return None


def _partitions(table: Any) -> list[str]:
    """The columns by which a table is partitioned."""
    return list(table.metadata().partition_columns)


def _plain(table: Any) -> bool:
    """Whether files that hold its columns can be the table's as they are."""
    about, protocol = table.metadata(), table.protocol()
    features = frozenset(protocol.writer_features or ())
    asked_for = any(n.startswith("delta.constraints.") for n in about.configuration)
    changes = _is_set(table, "delta.enableChangeDataFeed")
    strict = any(not f.nullable or f.metadata for f in table.schema().fields)
    simple = features <= _PLAIN_FEATURES if features or protocol.min_writer_version >= 7 else True
    return simple and not (about.partition_columns or asked_for or changes or _mapped(table) or strict)


def _mapped(table: Any) -> bool:
    """Whether its files have other names of columns than the table."""
    return bool(table.metadata().configuration.get("delta.columnMapping.mode", "none") != "none")


def _bound(table: Any) -> bool:
    """Whether it has mapped names to which deltalake adds none: to tables that do not say so to readers it does."""
    return _mapped(table) and (table.protocol().min_reader_version < 3 or "columnMapping" in _read_features(table))


def _is_set(table: Any, option: str) -> bool:
    return str(table.metadata().configuration.get(option, "")).lower() == "true"


def _count(table: Any) -> int:
    """Rows, by the log where it tells them of every file."""
    rows = about_files(table)
    if rows.num_rows and (rows.column("num_records").null_count or "deletionVectors" in _read_features(table)):
        return sum(batch.num_rows for batch in pa.RecordBatchReader.from_stream(table.scan(columns=[])))
    return sum(rows.column("num_records").to_pylist()) if rows.num_rows else 0


def _read_features(table: Any) -> Sequence[str]:
    return table.protocol().reader_features or ()


def _schema(table: Any) -> pa.Schema:
    """The columns as the files have them."""
    return pa.schema(table.schema().to_arrow())


@contextlib.contextmanager
def _said(place: Place) -> Iterator[None]:
    """What Delta refuses, in its own words."""
    from deltalake.exceptions import DeltaError

    try:
        yield
    except (DeltaError, OSError, ValueError) as e:
        told = f"{place.shown}: Delta Lake says: {place.words(e)}"
        lasting = any(words in str(e) for words in ("validation check", "table is append-only"))
        raise (BadJob(told) if lasting else StoreUnavailable(told)) from e


_SIMPLE = {**SIMPLE, pa.int8(): pa.int8(), pa.int16(): pa.int16(), pa.uint8(): pa.int16(), pa.uint16(): pa.int32()}


class TableReader:
    """Looks rows up in the newest version, in the files that may have them by the log's statistics."""

    def __init__(self, place: Place, key: tuple[str, ...]) -> None:
        self._place = place
        self._key = key

    def find(self, keys: Sequence[Key]) -> tuple[Mark | None, list[dict[str, Any] | None]]:
        place = self._place
        with _said(place):
            table = opened(place)
            if table is None:
                raise BadSource(f"{place.shown}: there is no Delta table: deliver a result there first")
            mark = next(iter(marks_of(table, place)), None)
            schema = _schema(table)
            wanted = keyed(place.shown, self._key or (mark.key if mark else ()), {f.name: f.type for f in schema})
            asked_for = asked(keys, wanted, place.shown, mark)
            some = matching(asked_for, schema)
            found = rows_among(table, asked_for, schema, some) if keys else schema.empty_table()
        return mark, restored(found, asked_for, mark, self._place.shown)

    def close(self) -> None:
        """Nothing is held open."""
