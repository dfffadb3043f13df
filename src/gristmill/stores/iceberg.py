"""Iceberg tables whose files are on this machine, in any catalog that pyiceberg knows. The parts of a result become the
table's data files, and one commit of the catalog makes them visible.

The marks are a property of the table, set in that commit, and of its snapshot: a table that is rolled back keeps its
properties, but has another snapshot. A commit is made on the version that was looked at, or not at all: pyiceberg's own
retries would add the rows of a deliverer that has become stale.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar
from urllib.parse import parse_qsl, urlsplit

import pyarrow as pa

from gristmill.arrow.spilling import tamed
from gristmill.errors import BadJob, BadSource, GristmillError
from gristmill.files.disk import LOCAL
from gristmill.job.uris import is_local, local_path
from gristmill.process.extras import require
from gristmill.process.startup import imported
from gristmill.stores.contract import Key, Load, Mark, Mode, Part, Place, Reader, Store, StoreKind, StoreUnavailable
from gristmill.stores.icebergpast import AFTER, MARKS, SINK, Past, noted
from gristmill.stores.icebergrows import emptied, rows_of
from gristmill.stores.lake import (
    SIMPLE,
    Datafile,
    Lake,
    Snapshot,
    column_type,
    labelled,
    left_out,
    losing,
    padded,
    parquet_about,
    settled,
    write_parquet,
)
from gristmill.stores.lookup import asked, keyed, matching, restored
from gristmill.stores.refused import refuse, without_far
from gristmill.stores.sql import quoted
from gristmill.stores.unmoved import both

PLACES = "gristmill.places"  # the property of a table that has the staging places committed
NO_RETRIES = {"commit.retry.num-retries": "0"}
LISTED = 200  # keys that are asked for one by one, as many as files are pruned by; more are asked for by their range
RESTS = "rest"  # the folder of files that an upsert has rewritten, in the staging place
_SIMPLE = {
    **SIMPLE,
    **dict.fromkeys((pa.int8(), pa.int16(), pa.uint8(), pa.uint16()), pa.int32()),
    **dict.fromkeys((pa.time32("s"), pa.time32("ms"), pa.time64("us")), pa.time64("us")),
}


class Iceberg:
    """`iceberg://CATALOG/namespace.table`: a catalog of pyiceberg's configuration, or one whose properties follow as a
    query (`?uri=…&warehouse=…`) or are the delivery's `options`.
    """

    name: ClassVar[str] = "iceberg"
    modes: ClassVar[tuple[Mode, ...]] = ("replace", "append", "upsert")
    keyed: ClassVar[bool] = False
    embedded: ClassVar[bool] = False
    in_address: ClassVar[tuple[str, ...] | None] = None
    in_options: ClassVar[tuple[str, ...] | None] = None

    @staticmethod
    def open(place: Place) -> Store:
        """The table, which is made by the first delivery; its namespace has to be there."""
        form = Table(place)
        return Lake(place, form, form.folder())

    @staticmethod
    def files(place: Place) -> tuple[str, str] | None:
        """See Filed. What is wrong with an address or a catalog is told where it is opened."""
        try:
            return os.path.split(Table(place).folder())[0], "data/0.parquet"
        except GristmillError:
            return None

    @staticmethod
    def target(place: Place) -> str:
        """See Aimed."""
        return ".".join(named(place))

    @staticmethod
    def reader(place: Place, key: tuple[str, ...]) -> Reader:
        """Opens the newest version for each call."""
        return TableReader(place, key)

    @staticmethod
    def same(read: Place, to: Place) -> bool | None:
        """See Known. Two that are registered with one table's files are two once one of them has changed; if that never
        stands still, they may be one.
        """
        with contextlib.suppress(Exception):  # whatever a catalog's client raises: told where it is opened
            found: tuple[object, object] | None = both(_metadata, read, to) or both(_number, read, to)
            return None if found is None or found[0] is None else found[0] == found[1]
        return None


def _metadata(place: Place) -> tuple[str, str] | None:
    table = loaded(catalog_of(place), named(place))
    return (str(table.metadata.table_uuid), table.metadata_location) if table else None


def _number(place: Place) -> str | None:
    found = _metadata(place)
    return found[0] if found else None


_: type[StoreKind] = Iceberg  # for mypy


class Table:
    """What Iceberg does otherwise than other lakes."""

    name = "Iceberg"
    suffix = ".parquet"
    joins = True
    joint = "/"
    names = True

    def __init__(self, place: Place) -> None:
        self._place = place
        self._name = named(place)
        self._past = Past(place)
        with said(place):
            self._catalog = catalog_of(place)

    def folder(self) -> str:
        with said(self._place):
            found = loaded(self._catalog, self._name)
            location = self._location() if found is None else found.location()
        if not is_local(location) and not location.startswith("file:"):
            raise BadJob(
                f"{self._place.shown}: its files are at {location}, and only tables on this machine's disks are "
                "delivered to: deliver to Parquet files there, and add these"
            )
        return os.path.join(_path(location), "data")

    def _location(self) -> str:
        """Where the table will be."""
        from pyiceberg.exceptions import NoSuchNamespaceError

        try:
            namespace = self._catalog.namespace_from(self._name)
            place = getattr(self._catalog, "_resolve_table_location", None)
            if place is None:
                raise BadJob(
                    f"{self._place.shown}: there is no such table, and its catalog decides where it is: make it there"
                )
            return str(place(None, ".".join(namespace), self._name[-1]))
        except NoSuchNamespaceError:
            raise BadJob(
                f"{self._place.shown}: there is no namespace {'.'.join(self._name[:-1])}: make it in the catalog, or "
                "name another"
            ) from None

    def now(self) -> Snapshot | None:
        with said(self._place):
            table = loaded(self._catalog, self._name)
            if table is None:
                return None
            places = json.loads(table.properties.get(PLACES, "{}"))
            marks, new = self._past.marks(table), MARKS not in table.properties
            version = f"{'.'.join(self._name)} {table.metadata_location}"
            return Snapshot(arrow_schema(table), marks, lambda s: places.get(s, 0), table, version, new)

    def kind(self, kind: pa.DataType) -> pa.DataType | None:
        return column_type(kind, _SIMPLE)

    def retypes(self, now: Snapshot, load: Load, kind: pa.DataType) -> bool:
        return False

    def refused(self, now: Snapshot | None, load: Load) -> str | None:
        """What pyiceberg does otherwise. Trap: files that are added to a table tell their columns by name alone."""
        if now is not None and load.evolve and not load.whole:
            known = {field.name for schema in now.table.metadata.schemas for field in schema.fields}
            again = known.difference(now.schema.names).intersection(load.schema.names)
            if again:
                return (
                    f"column {min(again)!r} was there and has been renamed or dropped: added anew, it would have the "
                    "values of earlier rows: give it another name in a step"
                )
        if now is None or load.mode != "upsert":
            return None
        if not now.table.spec().is_unpartitioned():
            return "is partitioned, and an upsert does not know how: use mode replace or append"
        return losing(now, load)

    def write(
        self,
        now: Snapshot | None,
        path: str,
        parts: Sequence[Part],
        schema: pa.Schema,
        batches: Iterator[pa.RecordBatch],
    ) -> None:
        batches = without_far(batches, self._place.shown, "which pyiceberg does not have")
        apart = now is not None and not now.table.spec().is_unpartitioned()
        write_parquet(path, labelled(parts), schema, self._kept(batches) if apart else batches)

    def _kept(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The same rows. Raises BadJob for one that pyiceberg would change as it divides them by partitions."""
        for batch in batches:
            for name, column in zip(batch.schema.names, batch.columns, strict=True):
                what = f"{self._place.shown}: column {name!r} has a null list or map of structs, which pyiceberg makes "
                what += "an empty one in a table with partitions"
                refuse(batch, emptied(column), what, "replace it in a step, or deliver to a table without partitions")
            yield batch

    def about(self, path: str) -> Datafile:
        return parquet_about(path)

    def count(self) -> int:
        now = self.now()
        with said(self._place):
            return 0 if now is None else int(now.table.scan().count())

    def paths(self, now: Snapshot) -> Iterator[str]:
        with said(self._place):
            tasks, folder = now.table.scan().plan_files(), self.folder()
            return iter([os.path.relpath(_path(task.file.file_path), folder) for task in tasks])

    # ------------------------------------------------ committing

    def commit(
        self, now: Snapshot | None, load: Load, schema: pa.Schema, files: Sequence[Datafile], marks: Sequence[Mark]
    ) -> bool:
        from pyiceberg.exceptions import CommitFailedException, TableAlreadyExistsError, ValidationException

        with said(self._place):
            try:
                self._commit(now, load, schema, files, marks)
            except (CommitFailedException, TableAlreadyExistsError, ValidationException):
                found = loaded(self._catalog, self._name)
                if found is not None and (now is None or found.metadata_location != now.table.metadata_location):
                    return False
                raise
        return True

    def _commit(
        self, now: Snapshot | None, load: Load, schema: pa.Schema, files: Sequence[Datafile], marks: Sequence[Mark]
    ) -> None:
        if now is None:
            transaction = self._catalog.create_table_transaction(self._name, schema)
        else:
            metadata = now.table.metadata
            properties = {**metadata.properties, **NO_RETRIES}
            now.table.metadata = metadata.model_copy(update={"properties": properties})  # as this process sees it
            transaction = now.table.transaction()
        with transaction:
            if now is not None and (new := [f for f in schema if f.name not in now.schema.names]):
                with transaction.update_schema() as columns:
                    columns.union_by_name(pa.schema(new))
            transaction.set_properties(self._properties(now, load, marks))
            self._files(transaction, now, load, schema, files)
            made, bodies = transaction.table_metadata, json.loads(transaction.table_metadata.properties[MARKS])
            after = noted(None if now is None else now.table, bodies, made.snapshots)
            transaction.set_properties({AFTER: after})

    def _properties(self, now: Snapshot | None, load: Load, marks: Sequence[Mark]) -> dict[str, str]:
        """The marks, and how often which staging places were committed, of those that are still there."""
        known = {} if now is None else json.loads(now.table.properties.get(PLACES, "{}"))
        there = {name.rpartition("_")[0] for name in LOCAL.names(self.folder())}
        places = {stage: n for stage, n in known.items() if stage in there}
        places[load.stage] = known.get(load.stage, 0) + 1
        return {MARKS: json.dumps([json.loads(mark.dump()) for mark in marks]), PLACES: json.dumps(places)}

    def _files(
        self, transaction: Any, now: Snapshot | None, load: Load, schema: pa.Schema, files: Sequence[Datafile]
    ) -> None:
        """Add the files, and remove those that they take the place of."""
        from pyiceberg.expressions import AlwaysTrue
        from pyiceberg.io.pyarrow import parquet_files_to_data_files

        said_of = {SINK: load.mark.sink, "gristmill.generation": str(load.mark.generation)}
        said_of[MARKS] = transaction.table_metadata.properties[MARKS]
        paths = [file.path for file in files]
        if now is not None and not now.table.spec().is_unpartitioned():
            self._rows(transaction, now, load, paths, schema, said_of)
            return
        if now is None or (load.mode == "append"):
            transaction.add_files(paths, said_of, check_duplicate_files=False)
            return
        if load.whole:
            old = [task.file for task in now.table.scan().plan_files()]
        else:
            old, rest = self._rewritten(now, load, schema, files)
            paths += rest
        if transaction.table_metadata.name_mapping() is None:
            mapping = transaction.table_metadata.schema().name_mapping.model_dump_json()
            transaction.set_properties({"schema.name-mapping.default": mapping})
        with transaction.update_snapshot(snapshot_properties=said_of).overwrite() as snapshot:
            snapshot.delete_by_predicate(AlwaysTrue())
            for file in old:
                snapshot.delete_data_file(file)
            for file in parquet_files_to_data_files(now.table.io, transaction.table_metadata, iter(paths)):
                snapshot.append_data_file(file)

    @staticmethod
    def _rows(
        transaction: Any, now: Snapshot, load: Load, paths: Sequence[str], schema: pa.Schema, said_of: dict[str, str]
    ) -> None:
        """The rows themselves, which pyiceberg divides by the table's partitions: a commit, whatever its snapshots. It
        asks for all columns by which it does.
        """
        import pyarrow.parquet as pq
        from pyiceberg.expressions import AlwaysTrue

        if load.whole and transaction.table_metadata.current_snapshot() is not None:
            transaction.delete(AlwaysTrue(), snapshot_properties=said_of)
        lacks = left_out(now.schema, schema)
        for rows in (pq.read_table(path).cast(schema) for path in paths) if paths else [schema.empty_table()]:
            full = pa.Table.from_batches(padded(rows.to_batches(), lacks), pa.schema([*schema, *lacks]))
            transaction.append(full, snapshot_properties=said_of)

    def _rewritten(
        self, now: Snapshot, load: Load, schema: pa.Schema, files: Sequence[Datafile]
    ) -> tuple[list[Any], list[str]]:
        """The table's files that have rows of these keys, and new ones of the other rows in them."""
        old: list[Any] = []
        rest: list[str] = []
        if not files:
            return old, rest
        folder = os.path.join(os.path.dirname(files[0].path), RESTS, str(now.table.metadata.current_snapshot_id))
        os.makedirs(folder, exist_ok=True)
        with tamed(imported("duckdb").connect(":memory:", config={"threads": 2})) as db:
            low, high = _keys(db, load.key, files)
            tasks = now.table.scan(row_filter=_between(load.key, low, high, schema)).plan_files()
            for task in tasks:
                rows = _rows_in(now.table, [task], self._place.shown)
                kept = _others(db, load.key, rows)
                if len(kept) == len(rows):
                    continue
                old.append(task.file)
                if len(kept):
                    name = hashlib.sha256(task.file.file_path.encode()).hexdigest()[:24]
                    path = os.path.join(folder, f"{name}.parquet")
                    columns = pa.schema([(f.name, f.type) for f in now.schema])
                    write_parquet(path, RESTS, columns, iter(rows.take(kept).cast(columns).to_batches()))
                    settled(path)
                    rest.append(path)
        LOCAL.sync_folder(folder)
        return old, rest


def _path(location: str) -> str:
    """Where that is on this machine."""
    return local_path(location.removeprefix("file:") if not location.startswith("file://") else location)


def _rows_in(table: Any, tasks: Iterable[Any], shown: str, only: Any = None) -> pa.Table:
    """The rows of some of a table's files; without some that the filter `only` leaves out."""
    from pyiceberg.io.pyarrow import schema_to_pyarrow

    columns = schema_to_pyarrow(table.schema(), include_field_ids=False)
    few = [batch.cast(columns) for batch in rows_of(table.metadata, table.io, table.schema(), tasks, shown, only)]
    return pa.Table.from_batches(few, columns)


def _keys(db: Any, key: Sequence[str], files: Sequence[Datafile]) -> tuple[Any, Any]:
    """Put the keys of staged files into a table; the lowest and the highest of the first of their columns."""
    names = ", ".join(f"{quoted(name)} AS k{n}" for n, name in enumerate(key))
    db.execute(f"CREATE TEMP TABLE keys AS SELECT {names} FROM read_parquet(?)", [[file.path for file in files]])
    ends = db.sql("SELECT min(k0) AS low, max(k0) AS high FROM keys").to_arrow_table()
    return ends["low"][0], ends["high"][0]


def _others(db: Any, key: Sequence[str], rows: pa.Table) -> pa.ChunkedArray:
    """The numbers of the rows that have none of the keys."""
    names = [f"k{n}" for n in range(len(key))]
    numbered = rows.select(list(key)).rename_columns(names).append_column("n", pa.array(range(len(rows)), pa.int64()))
    db.register("there", numbered)
    try:
        sql = f"SELECT n FROM there ANTI JOIN keys USING ({', '.join(names)}) ORDER BY n"
        return db.sql(sql).to_arrow_table().column("n")
    finally:
        db.unregister("there")


def _between(key: Sequence[str], low: Any, high: Any, schema: pa.Schema) -> Any:
    """A filter of pyiceberg for the files that may have keys in a range."""
    from pyiceberg.expressions import AlwaysTrue, And, GreaterThanOrEqual, LessThanOrEqual

    if not (_literal(schema.field(key[0]).type) and low.is_valid):
        return AlwaysTrue()
    return And(GreaterThanOrEqual(key[0], low.as_py()), LessThanOrEqual(key[0], high.as_py()))


def _literal(kind: pa.DataType) -> bool:
    """Whether pyiceberg takes a column's values in filters as Python has them, and compares them as we do."""
    return bool(pa.types.is_integer(kind) or pa.types.is_string(kind))


# ---------------------------------------------------------------- catalogs


def named(place: Place) -> tuple[str, ...]:
    """The table's identifier. Raises BadJob for an address that has none."""
    require("pyiceberg", "iceberg", place.shown)
    parts = urlsplit(place.uri)
    name = tuple(parts.path.strip("/").split("."))
    if not parts.netloc or len(name) < 2 or not all(name) or place.name:
        raise BadJob(f"{place.shown}: name a catalog and a table: iceberg://CATALOG/namespace.table")
    return name


def catalog_of(place: Place) -> Any:
    """The catalog that an address names."""
    from pyiceberg.catalog import load_catalog

    parts = urlsplit(place.uri)
    return load_catalog(parts.netloc, **dict(parse_qsl(parts.query)), **{k: str(v) for k, v in place.options.items()})


def loaded(catalog: Any, name: tuple[str, ...]) -> Any:
    """The newest version of a table; None if there is none."""
    from pyiceberg.exceptions import NoSuchTableError

    try:
        return catalog.load_table(name)
    except NoSuchTableError:
        return None


def arrow_schema(table: Any) -> pa.Schema:
    """The columns as the files have them."""
    from pyiceberg.io.pyarrow import schema_to_pyarrow

    found = schema_to_pyarrow(table.schema(), include_field_ids=False)
    return pa.schema([pa.field(f.name, column_type(f.type, _SIMPLE) or f.type, f.nullable) for f in found])


@contextlib.contextmanager
def said(place: Place) -> Iterator[None]:
    """What the catalog or pyiceberg refuses, in their own words."""
    from gristmill.errors import GristmillError

    try:
        yield
    except GristmillError:
        raise
    except Exception as e:  # catalogs raise what their clients do
        raise StoreUnavailable(f"{place.shown}: Iceberg says: {place.words(e)}") from e


class TableReader:
    """Looks rows up in the newest version, in the files that may have them by its statistics."""

    def __init__(self, place: Place, key: tuple[str, ...]) -> None:
        self._place = place
        self._key = key
        self._name = named(place)
        self._past = Past(place)
        with said(place):
            self._catalog = catalog_of(place)

    def find(self, keys: Sequence[Key]) -> tuple[Mark | None, list[dict[str, Any] | None]]:
        place = self._place
        with said(place):
            table = loaded(self._catalog, self._name)
            if table is None:
                raise BadSource(f"{place.shown}: there is no such table: deliver a result there first")
            mark = next(iter(self._past.marks(table)), None)
            schema = arrow_schema(table)
            wanted = keyed(place.shown, self._key or (mark.key if mark else ()), {f.name: f.type for f in schema})
            asked_for = asked(keys, wanted, place.shown, mark)
            found = schema.empty_table() if not keys else self._found(table, asked_for, schema, place.shown)
        return mark, restored(found, asked_for, mark, self._place.shown)

    @staticmethod
    def _found(table: Any, keys: pa.Table, schema: pa.Schema, shown: str) -> pa.Table:
        import pyarrow.compute as pc
        from pyiceberg.expressions import AlwaysTrue, In

        name = keys.column_names[0]
        values = pc.drop_null(keys.column(name))
        some: Any = AlwaysTrue()
        if "." in name:  # a filter would look for a field inside a column
            pass
        elif _literal(values.type) and len(values) <= LISTED:
            some = In(name, set(values.to_pylist()))
        else:
            ends = pc.min_max(values) if _literal(values.type) else {"min": None, "max": None}
            some = _between([name], ends["min"], ends["max"], schema)
        tasks = table.scan(row_filter=some).plan_files()
        return _rows_in(table, tasks, shown, some).cast(schema).filter(matching(keys, schema))

    def close(self) -> None:
        """Nothing is held open."""
