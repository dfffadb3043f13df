"""Lance tables in a folder of this machine, as LanceDB has them. The parts of a result become data files of the table
(small ones together), a fragment each, and one commit makes them visible.

The marks are a property of that commit, and metadata of the table's schema, which outlasts the commits that a table
forgets. A commit is made on the version that was looked at, or not at all.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field, replace
from typing import Any, ClassVar

import pyarrow as pa

from gristmill.arrow.schemas import is_string, unwritable
from gristmill.errors import BadJob, BadSource, GristmillError
from gristmill.files.disk import LOCAL
from gristmill.process.extras import require
from gristmill.stores.contract import Key, Load, Mark, Mode, Part, Place, Reader, Store, StoreKind, StoreUnavailable
from gristmill.stores.lake import Datafile, Lake, Snapshot, datafile, labelled
from gristmill.stores.lookup import asked, keyed, matching, restored
from gristmill.values import dataclass

NOTE = "gristmill"  # of a commit and of a schema: what is in it of deliveries
PART = "gristmill.part"
BATCH = 8192  # rows of a data file that are read together
VERSIONS, DATA = "_versions", "data"
_MADE_FIRST = {DATA, "_transactions"}  # what stands in the folder of a table before its first version does
LISTED = 1000  # keys that are asked for one by one, for which an index is used; for more the key columns are read
_LEAST = -(2**63)
_REFUSED = (
    pa.types.is_union,
    pa.types.is_interval,
    pa.types.is_map,
    pa.types.is_list_view,
    pa.types.is_large_list_view,
    *(getattr(pa.types, name) for name in ("is_decimal32", "is_decimal64") if hasattr(pa.types, name)),  # pyarrow 18
)
# Of what lists of a fixed size are.
_OF_FIXED = (pa.types.is_primitive, pa.types.is_decimal, pa.types.is_fixed_size_binary, pa.types.is_fixed_size_list)
# Columns that every table has.
_OWN = ("_rowid", "_rowaddr", "_rowoffset", "_row_created_at_version", "_row_last_updated_at_version")


class Lance:
    """`lance:///FOLDER#table`, or `lance://FOLDER#table` for a path relative to the current folder: the table of a
    LanceDB database. Without `#table` the folder is the table.
    """

    name: ClassVar[str] = "lance"
    modes: ClassVar[tuple[Mode, ...]] = ("replace", "append", "upsert")
    keyed: ClassVar[bool] = False
    embedded: ClassVar[bool] = True
    in_address: ClassVar[tuple[str, ...] | None] = ()
    in_options: ClassVar[tuple[str, ...] | None] = ()

    @staticmethod
    def open(place: Place) -> Store:
        """The table, which is made by the first delivery, with the folder of its database."""
        _package(place)
        path = _path(place)
        if not os.path.isdir(above := os.path.dirname(place.path)):
            raise BadJob(f"{place.shown}: there is no folder {above}: make it, or give another path")
        names = set(LOCAL.names(path) if os.path.isdir(path) else ())  # once: the table may be made at this moment
        if VERSIONS not in names and names - _MADE_FIRST:
            raise BadJob(f"{place.shown}: {path} has other files in it, and is no Lance table: give another path")
        return Lake(place, Table(place), path)

    @staticmethod
    def files(place: Place) -> tuple[str, str]:
        """See Filed."""
        return _path(place), f"{DATA}/0.lance"

    @staticmethod
    def reader(place: Place, key: tuple[str, ...]) -> Reader:
        """Opens the newest version for each call."""
        _package(place)
        return TableReader(place, key)


_: type[StoreKind] = Lance  # for mypy


def _package(place: Place) -> Any:
    return require("lance", "lance", place.shown)


def _path(place: Place) -> str:
    """The folder of the table."""
    if os.sep in place.name or place.name.startswith("."):
        raise BadJob(f"{place.shown}: {place.name!r} is no name of a table: give letters, digits, - and _")
    return os.path.join(place.path, f"{place.name}.lance") if place.name else place.path


class Table:
    """What Lance does otherwise than other lakes."""

    name = "Lance"
    suffix = ".lance"
    joins = True
    joint = "-"
    names = True

    def __init__(self, place: Place) -> None:
        self._place = place
        self._path = _path(place)

    def folder(self) -> str:
        return os.path.join(self._path, DATA)

    def now(self) -> Snapshot | None:
        with said(self._place):
            table = opened(self._place)
            if table is None:
                return None
            note = note_of(table)
            schema = pa.schema([pa.field(f.name, f.type, f.nullable) for f in table.schema])
            marks, version = marks_of(note, self._place), str(table.version)
            return Snapshot(schema, marks, lambda s: note.places.get(s, 0), table, version)

    def kind(self, kind: pa.DataType) -> pa.DataType | None:
        if isinstance(kind, pa.JsonType):
            return kind.storage_type  # Lance would write the texts anew, and does not read them back
        return None if unwritable(kind) or not _held(kind) else pa.int32() if pa.types.is_null(kind) else kind

    def retypes(self, now: Snapshot, load: Load, kind: pa.DataType) -> bool:
        """By writing over the table, which keeps no indices, and nothing that is noted of a column."""
        noted = any(field.metadata for field in now.table.schema)
        return set(load.schema.names) == set(now.schema.names) and not noted and not now.table.describe_indices()

    def refused(self, now: Snapshot | None, load: Load) -> str | None:
        if (odd := next((n for n in load.schema.names if "." in n), None)) is not None:
            return f"column {odd!r}: Lance takes it for a field inside a column: give it another name, without a dot"
        if (odd := next((n for n in load.schema.names if n in _OWN), None)) is not None:
            return f"column {odd!r}: Lance has a column of that name of its own: give it another name"
        key = load.key if load.mode == "upsert" else ()
        if (odd := next((n for n in key if n == "*" or set(n) & set('"`')), None)) is not None:
            return f"column {odd!r}: Lance does not find keys of that name: give it another one, without quotes"
        if now is not None and now.table.data_storage_version in ("0.1", "legacy"):
            return "is in the oldest format of Lance, which takes no files made elsewhere: rewrite it"
        return None

    def write(
        self,
        now: Snapshot | None,
        path: str,
        parts: Sequence[Part],
        schema: pa.Schema,
        batches: Iterator[pa.RecordBatch],
    ) -> None:
        from lance.file import LanceFileWriter

        with said(self._place):
            writer = LanceFileWriter(path, schema, version=None if now is None else now.table.data_storage_version)
            writer.add_schema_metadata(PART, labelled(parts))
            for batch in batches:
                writer.write_batch(batch)
            writer.close()

    def about(self, path: str) -> Datafile:
        from lance.file import LanceFileReader

        with said(self._place):
            about = LanceFileReader(path).metadata()
            return datafile(path, about.schema.metadata[PART.encode()].decode(), about.num_rows)

    def count(self) -> int:
        now = self.now()
        with said(self._place):
            return 0 if now is None else int(now.table.count_rows())

    def paths(self, now: Snapshot) -> Iterator[str]:
        with said(self._place):
            fragments = now.table.get_fragments()
            return iter([file.path for fragment in fragments for file in fragment.metadata.files])

    # ------------------------------------------------ committing

    def commit(
        self, now: Snapshot | None, load: Load, schema: pa.Schema, files: Sequence[Datafile], marks: Sequence[Mark]
    ) -> bool:
        lance = _package(self._place)
        from lance.commit import CommitConflictError

        with said(self._place):
            try:
                table = None if now is None else self._with_columns(now, schema)
                at, version = (self._path, 0) if table is None else (table, table.version)
                noted = self._noted(now, version + 1, load, marks)
                operation = self._operation(table, load, schema, files, noted)
                transaction = lance.Transaction(version, operation, transaction_properties=noted)
                done = lance.LanceDataset.commit(at, transaction, max_retries=0)
            except (CommitConflictError, OSError):
                found = opened(self._place)
                if found is not None and (table is None or found.version > table.version):
                    return False
                raise
            if not isinstance(operation, lance.LanceOperation.Overwrite | lance.LanceOperation.Merge):
                done.update_schema_metadata(noted)
            if table is not None and table.describe_indices():
                done.optimize.optimize_indices()  # which are not of the new rows before
        return True

    @staticmethod
    def _with_columns(now: Snapshot, schema: pa.Schema) -> Any:
        """The table with the new columns, null in all rows: a version of their own, as data files name columns by the
        numbers that a table gives them. Trap: a table of no rows is false.
        """
        if new := [f for f in schema if f.name not in now.schema.names]:
            now.table.add_columns(pa.schema(new))
        return now.table

    @staticmethod
    def _noted(now: Snapshot | None, version: int, load: Load, marks: Sequence[Mark]) -> dict[str, str]:
        """What a version notes of deliveries."""
        places = {} if now is None else dict(note_of(now.table).places)
        places[load.stage] = places.get(load.stage, 0) + 1
        bodies = [json.loads(mark.dump()) for mark in marks]
        return {NOTE: json.dumps({"version": version, "marks": bodies, "places": places})}

    def _operation(
        self, table: Any, load: Load, schema: pa.Schema, files: Sequence[Datafile], noted: dict[str, str]
    ) -> Any:
        """What is to be committed. Rows that are added come with the note in the schema; others, which may come twice,
        in a kind of commit that keeps indices.
        """
        from lance import LanceOperation
        from lance.schema import LanceSchema

        if table is None or any(f.type != table.schema.field(f.name).type for f in schema):
            numbers = _numbers(LanceSchema.from_pyarrow(schema).fields())
            known = {} if table is None else table.schema.metadata or {}
            about = schema.with_metadata({**known, **{name.encode(): body.encode() for name, body in noted.items()}})
            return LanceOperation.Overwrite(about, [self._first(f, numbers) for f in files])
        there = table.get_fragments()
        lacks = bool(files) and any(name not in schema.names for name in table.schema.names)
        if load.mode == "upsert" and (lacks or not load.delete):  # rows that stay keep what the result lacks
            merge = table.merge_insert(list(load.key)).when_matched_update_all().when_not_matched_insert_all()
            if load.delete:
                merge = merge.when_not_matched_by_source_delete()
            rows = pa.RecordBatchReader.from_batches(schema, self._batches(files, schema))
            return merge.execute_uncommitted(rows)[0].operation if files else LanceOperation.Update()
        new = [self._added(table, file) for file in files]
        if load.mode != "append":
            gone = [fragment.fragment_id for fragment in there]
            return LanceOperation.Update(removed_fragment_ids=gone, new_fragments=new)
        known = [fragment.fragment_id for fragment in there]
        known += [n for index in table.describe_indices() for segment in index.segments for n in segment.fragment_ids]
        for number, fragment in enumerate(new, max(known, default=-1) + 1):
            fragment.id = number
        return LanceOperation.Merge([*(f.metadata for f in there), *new], _with_metadata(table.lance_schema, noted))

    def _added(self, table: Any, file: Datafile) -> Any:
        """A data file as a fragment of a table."""
        from lance.fragment import DataFile, FragmentMetadata

        return FragmentMetadata(0, [DataFile.create(table, os.path.basename(file.path))], file.rows)

    def _first(self, file: Datafile, numbers: Sequence[int]) -> Any:
        """A data file as a fragment of a table that is not there yet, whose columns will have these numbers."""
        from lance.file import LanceFileReader
        from lance.fragment import DataFile, FragmentMetadata

        about, columns = LanceFileReader(file.path).metadata(), list(range(len(numbers)))
        versions = about.major_version, about.minor_version
        size = os.path.getsize(file.path)
        made = DataFile(os.path.basename(file.path), list(numbers), columns, *versions, file_size_bytes=size)
        return FragmentMetadata(0, [made], file.rows)

    @staticmethod
    def _batches(files: Sequence[Datafile], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        from lance.file import LanceFileReader

        for file in files:
            for batch in LanceFileReader(file.path).read_all(batch_size=BATCH).to_batches():
                yield batch.replace_schema_metadata(None).cast(schema)


def _numbers(fields: Sequence[Any]) -> list[int]:
    """The numbers of the columns that files have: those of values, not of structs and lists."""
    return [n for f in fields for n in (_numbers(f.children()) or [f.id()])]


def _with_metadata(schema: Any, metadata: Mapping[str, str]) -> Any:
    """Lance's schema, which has the numbers of columns, with more metadata; it can only be made from its parts."""
    make, (before, *fields) = schema.__reduce__()
    added = {name: list(value.encode()) for name, value in metadata.items()}
    return make(json.dumps({**json.loads(before), **added}), *fields)


def opened(place: Place) -> Any:
    """The newest version of the table; None if there is none."""
    path = _path(place)
    return _package(place).dataset(path) if os.path.isdir(os.path.join(path, VERSIONS)) else None


@dataclass(frozen=True)
class Note:
    """What a version says of deliveries: since which it holds, the bodies of marks, and staging places committed."""

    version: int = 0
    marks: Sequence[Mapping[str, Any]] = ()
    places: Mapping[str, int] = field(default_factory=dict)


def note_of(table: Any) -> Note:
    """The note of the last delivery that is in the table: that of its commit, if nobody has written it into the schema
    yet. A table that was restored has the marks of the version that it was restored to. What came before a version that
    has been cleaned up, as one that is kept by a tag, says nothing of what is there now.
    """
    from lance import LanceOperation

    note = _schema_note(table)
    for version in range(table.version, note.version, -1):
        transaction = _committed(table, version)
        if transaction is None and version not in (kept := _versions(table)):
            return replace(note, places={**_places(table, kept, version), **note.places})
        if transaction is not None and isinstance(transaction.operation, LanceOperation.Restore):
            return _restored_note(table, note, version, transaction.operation.version)
        if transaction is not None and (later := (transaction.transaction_properties or {}).get(NOTE)):
            return Note(**json.loads(later))
    return note


def _schema_note(table: Any) -> Note:
    said_of = (table.schema.metadata or {}).get(NOTE.encode())
    return Note() if said_of is None else Note(**json.loads(said_of))


def _versions(table: Any) -> list[int]:
    """Those that have not been cleaned up, the latest first."""
    return sorted((about["version"] for about in table.versions()), reverse=True)


def _places(table: Any, kept: Sequence[int], before: int) -> Mapping[str, int]:
    """The staging places committed before a version, by the latest one that tells: they are the table's own while it
    is kept.
    """
    for version in (v for v in kept if v < before):
        transaction = _committed(table, version)
        said_of = None if transaction is None else (transaction.transaction_properties or {}).get(NOTE)
        note = Note(**json.loads(said_of)) if said_of else _schema_note(table.checkout_version(version))
        if note.places:
            return note.places
    return {}


def _committed(table: Any, version: int) -> Any:
    """The transaction that made a version; None if that has been cleaned up, or made by others in a way that cannot be
    read. Trap: pylance fails with a TypeError at a compaction for which it has rewritten indices.
    """
    with contextlib.suppress(OSError, ValueError, TypeError):
        return table.read_transaction(version)
    return None


def _restored_note(table: Any, note: Note, version: int, to: int) -> Note:
    """The note of a version that restored an earlier one; `note` is that of its schema, if the earlier one has been
    cleaned up. Staging places that were committed before stay the table's own.
    """
    places = dict(note.places)
    for earlier in (to, version - 1):
        with contextlib.suppress(OSError, ValueError):
            found = note_of(table.checkout_version(earlier))
            note = found if earlier == to else note
            places.update(found.places)
    return replace(note, places=places)


def marks_of(note: Note, place: Place) -> tuple[Mark, ...]:
    """The marks of what is in a version, that of the last delivery first."""
    return tuple(Mark.load(json.dumps(body).encode(), place.shown) for body in note.marks)


@contextlib.contextmanager
def said(place: Place) -> Iterator[None]:
    """What Lance refuses, in its own words."""
    try:
        yield
    except (OSError, ValueError, RuntimeError) as e:
        if isinstance(e, GristmillError):
            raise
        raise StoreUnavailable(f"{place.shown}: Lance says: {place.words(e)}") from e
    except BaseException as e:
        if type(e).__name__ != "PanicException":
            raise
        raise BadJob(f"{place.shown}: Lance fails: {place.words(e)}") from e  # Rust's, which is no Exception


def _held(kind: pa.DataType) -> bool:
    """Whether Lance holds values of a type, at any depth. Lists of a fixed size that are of others than numbers and the
    like make it panic, or cannot be read together with other columns.
    """
    if any(is_one(kind) for is_one in _REFUSED):
        return False
    if pa.types.is_fixed_size_list(kind) and not any(is_one(kind.value_type) for is_one in _OF_FIXED):
        return False
    return all(_held(kind.field(n).type) for n in range(kind.num_fields))


def _named(name: str) -> str:
    """A column in a filter."""
    return "`" + name.replace("`", "``") + "`"


def _literals(values: pa.ChunkedArray) -> Iterator[str]:
    """Numbers and texts in a filter."""
    for value in values.to_pylist():
        yield (
            "NULL" if value is None else "'" + value.replace("'", "''") + "'" if isinstance(value, str) else str(value)
        )


class TableReader:
    """Looks rows up in the newest version, by an index of the key column if there is one."""

    def __init__(self, place: Place, key: tuple[str, ...]) -> None:
        self._place = place
        self._key = key

    def find(self, keys: Sequence[Key]) -> tuple[Mark | None, list[dict[str, Any] | None]]:
        place = self._place
        with said(place):
            table = opened(place)
            if table is None:
                raise BadSource(f"{place.shown}: there is no such table: deliver a result there first")
            mark = next(iter(marks_of(note_of(table), place)), None)
            types = {f.name: f.type for f in table.schema}
            wanted = keyed(place.shown, self._key or (mark.key if mark else ()), types)
            asked_for = asked(keys, wanted, place.shown, mark)
            found = self._found(table, asked_for) if keys else table.schema.empty_table()
        return mark, restored(found, asked_for, mark, self._place.shown)

    @staticmethod
    def _found(table: Any, keys: pa.Table) -> pa.Table:
        kinds = [field.type for field in keys.schema]
        written = keys.num_rows <= LISTED and all(pa.types.is_integer(k) or is_string(k) for k in kinds)
        # Lance reads the least whole number as a float.
        if written and not any(_LEAST in keys.column(n).to_pylist() for n in keys.column_names):
            some = (f"{_named(n)} IN ({', '.join(_literals(keys.column(n)))})" for n in keys.column_names)
            return table.to_table(filter=" AND ".join(some))
        places: list[int] = []
        first = 0
        for batch in table.scanner(columns=keys.column_names).to_batches():  # in the order of the rows
            numbered = pa.table(batch).append_column("", pa.array(range(first, first + batch.num_rows), pa.int64()))
            places += numbered.filter(matching(keys, numbered.schema)).column("").to_pylist()
            first += batch.num_rows
        return table.take(places)

    def close(self) -> None:
        """Nothing is held open."""
