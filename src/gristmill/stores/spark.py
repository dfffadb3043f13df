"""Spark tables: unpartitioned Parquet tables of a session's catalog. A result gets a folder beside the table's, which
holds its files and the mark; pointing the table at that folder is the atomic step, of the catalog.

The files are links to those of the sink where Spark reads these as the table's columns, and are written otherwise.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from typing import Any, ClassVar
from urllib.parse import parse_qsl, quote, unquote, urlsplit

import pyarrow as pa

from gristmill.arrow.schemas import storage
from gristmill.errors import BadJob, BadSource, GristmillError
from gristmill.files.disk import LOCAL
from gristmill.job.delivery import STAGING
from gristmill.job.options import EngineSpec, SparkOptions
from gristmill.job.secret import reveal
from gristmill.job.uris import is_local, local_path, redact
from gristmill.process import lasting, machine
from gristmill.process.extras import require
from gristmill.process.sparksession import first_line, session
from gristmill.stores.contract import (
    Housed,
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
from gristmill.stores.lake import (
    SIMPLE,
    Datafile,
    Lake,
    Snapshot,
    column_type,
    labelled,
    losing,
    parquet_about,
    write_parquet,
)
from gristmill.stores.lookup import asked, keyed, matching, restored
from gristmill.stores.onefile import marks_of

MARKS = "_gristmill.json"  # in the folder that the table is pointed at; Spark leaves names alone that begin with _
OTHERS = "_others"  # what Spark writes for it of the rows that were there
_NAME = re.compile(r"[\w-]+(\.[\w-]+){0,2}")
_RESULT = re.compile(r"data-[\w-]+(\.tmp)?")


class Spark:
    """`spark://db.table`, in the session that there is: the engine's, that of the process, or one with a Hive catalog
    that is started for as long as it is needed.
    """

    name: ClassVar[str] = "spark"
    modes: ClassVar[tuple[Mode, ...]] = ("replace", "append", "upsert")
    keyed: ClassVar[bool] = False
    embedded: ClassVar[bool] = False
    in_address: ClassVar[tuple[str, ...] | None] = (STAGING,)
    in_options: ClassVar[tuple[str, ...] | None] = (STAGING,)

    @staticmethod
    def open(place: Place) -> Store:
        """The table, which is made by the first delivery."""
        return SparkTable(place, Table(place))

    @staticmethod
    def reader(place: Place, key: tuple[str, ...]) -> Reader:
        """Asks the catalog for each call where the table is."""
        return TableReader(place, key)

    @staticmethod
    def runs(place: Place) -> str:
        """`TABLE.gristmill/run` in the database's folder, or in that of `storage: {staging: FOLDER}`, which several
        tables may share.
        """
        with contextlib.nullcontext() if STAGING in _said(place) else contextlib.closing(Catalog(place)) as catalog:
            return os.path.join(_home(place, catalog), "run")


_: type[StoreKind] = Spark  # for mypy
__: type[Housed] = Spark


# ---------------------------------------------------------------- the catalog


class Catalog:
    """The catalog that knows a table. A session is held until it is closed, and again from the next call on."""

    def __init__(self, place: Place) -> None:
        require("pyspark", "spark", place.shown)
        self._place = place
        self._holds = ExitStack()
        self._session: Any = None
        self.table = place.uri.partition("://")[2].partition("?")[0]
        if place.name or not _NAME.fullmatch(self.table):
            raise BadJob(
                f"{place.shown}: write a table as spark://db.table, with letters, digits, _ and - in its names"
            )
        self.name = ".".join(f"`{part}`" for part in self.table.split("."))

    @property
    def spark(self) -> Any:
        """The session."""
        if self._session is None:
            self._session = self._holds.enter_context(lasting.held("spark", _started))
        return self._session

    def close(self) -> None:
        """Let go of the session, which ends with the command if it was started for it."""
        self._session = None
        self._holds.close()

    @contextlib.contextmanager
    def said(self) -> Iterator[None]:
        """What Spark refuses, in its own words."""
        try:
            yield
        except (GristmillError, OSError):
            raise
        except Exception as e:  # whatever a catalog raises
            words = self._place.words(ValueError(first_line(e)))
            raise StoreUnavailable(f"{self._place.shown}: Spark says: {words}") from e

    def about(self) -> dict[str, str]:
        """What the catalog says about the table; empty if there is none."""
        with self.said():
            if not self.spark.catalog.tableExists(self.name):
                return {}
            return {row[0]: row[1] for row in self.spark.sql(f"DESCRIBE TABLE EXTENDED {self.name}").collect()}

    def rows(self) -> Any:
        """The table as it is now: a session keeps the list of its files, and others may have written since."""
        self.spark.catalog.refreshTable(self.name)
        return self.spark.table(self.name)

    def folder(self) -> str:
        """The database's folder. Raises BadJob if there is no such database, or it is not on a disk."""
        shown, database = self._place.shown, self.table.rpartition(".")[0]
        with self.said():
            catalog = self.spark.catalog
            database = database or catalog.currentDatabase()
            if not catalog.databaseExists(database):
                raise BadJob(f"{shown}: Spark's catalog has no database {database!r}: create it first")
            where = catalog.getDatabase(database).locationUri
        if urlsplit(where).scheme not in ("", "file"):
            raise BadJob(
                f"{shown}: its database is at {where}: give {STAGING}: FOLDER (of a sink in storage, of a delivery in "
                "options), a folder that all workers and Spark reach"
            )
        return path_of(where)


def _started(engine: EngineSpec | None) -> AbstractContextManager[Any]:
    """A session as the engine would start it. Tables outlive it only in a catalog that is not in memory."""
    options = SparkOptions() if engine is None else replace(engine, options=reveal(engine.options)).own()
    if options.session is None:
        options = replace(options, conf={"spark.sql.catalogImplementation": "hive", **options.conf})
    workers = engine.workers if engine is not None else 0
    return session(options, workers if isinstance(workers, int) and workers else machine.cores())


def _home(place: Place, catalog: Catalog | None) -> str:
    """The folder of a table's results."""
    table = place.uri.partition("://")[2].partition("?")[0]
    if catalog is not None and STAGING not in _said(place):
        return os.path.join(catalog.folder(), f"{table.rpartition('.')[2]}.gristmill")
    given = str(_said(place)[STAGING])
    if not is_local(given):
        raise BadJob(
            f"{place.shown}: {STAGING} is {redact(given)}: give a folder on a disk, which results are linked in"
        )
    return os.path.join(os.path.abspath(local_path(given)), f"{table}.gristmill")


def _said(place: Place) -> dict[str, Any]:
    """The options of a delivery, and those in the address."""
    return {**dict(parse_qsl(urlsplit(place.uri).query)), **place.options}


def path_of(uri: str) -> str:
    """The path of a file on this machine, or its address as pyarrow opens it."""
    if uri.startswith("/"):
        return uri
    if (parts := urlsplit(uri)).scheme == "file":
        return unquote(parts.path)
    return re.sub(r"^s3[an]://", "s3://", unquote(uri))


def uri_of(path: str) -> str:
    """What Spark calls a file."""
    return "file://" + quote(path)


def is_view(about: dict[str, str]) -> bool:
    """Whether a table that the catalog says this of has no rows of its own."""
    return about.get("Type") == "VIEW"


def is_plain(about: dict[str, str]) -> bool:
    """Whether a table's rows are those of its Parquet files and nothing else."""
    hive = about.get("Provider", "").lower() == "hive" and "Parquet" in about.get("Serde Library", "")
    return (about.get("Provider", "").lower() == "parquet" or hive) and "# Partition Information" not in about


def schema_of(rows: Any) -> pa.Schema:
    """The columns of a DataFrame as Arrow has them. Raises BadSource for a type that it does not have."""
    from pyspark.sql.pandas.types import to_arrow_schema

    zoned = {"timezone": "UTC"} if "timezone" in inspect.signature(to_arrow_schema).parameters else {}
    return to_arrow_schema(rows.schema, **zoned).remove_metadata()


# ---------------------------------------------------------------- the store


class SparkTable(Lake):
    """A table as a store."""

    def __init__(self, place: Place, form: Table) -> None:
        super().__init__(place, form, form.folder())
        self._table = form

    def check(self, load: Load) -> None:
        if (why := same_but_for_capitals(load.schema.names, "Spark")) is not None:
            raise BadJob(f"{self._place.shown}: {why}")
        for field in load.schema:
            if (why := fields_but_for_capitals(storage(field.type), "Spark")) is not None:
                raise BadJob(f"{self._place.shown}: column {field.name!r}: {why}")
        super().check(load)

    def drop(self, load: Load, *, this: bool = False) -> None:
        super().drop(load, this=this)
        with self._alone():
            self._table.forget()

    def close(self) -> None:
        super().close()
        self._table.catalog.close()


class Table:
    """What Spark tables do otherwise than lakes: they have no versions but the place of their files."""

    name = "Spark tables"
    suffix = ".parquet"
    joins = False
    joint = "/"
    names = False

    def __init__(self, place: Place) -> None:
        self._place = place
        self.catalog = Catalog(place)
        self._home = _home(place, self.catalog)

    def folder(self) -> str:
        return self._home

    def now(self) -> Snapshot | None:
        about = self.catalog.about()
        if not about:
            return None
        with self.catalog.said():
            schema = schema_of(self.catalog.spark.table(self.catalog.name))
        at = _location(about)
        return Snapshot(schema, marks(at, self._place), lambda stage: 0, about, at or "")

    def kind(self, kind: pa.DataType) -> pa.DataType | None:
        return column_type(kind, _SIMPLE)

    def retypes(self, now: Snapshot, load: Load, kind: pa.DataType) -> bool:
        return False

    def refused(self, now: Snapshot | None, load: Load) -> str | None:
        if now is None or (is_plain(now.table) and not is_view(now.table)):
            return losing(now, load) if now is not None and load.mode == "upsert" else None
        kind = "a view" if is_view(now.table) else f"{now.table.get('Provider')}, or partitioned"
        return (
            f"is {kind}; only unpartitioned Parquet tables are replaced in one step: deliver to another table, or "
            "insert there from the sink's files"
        )

    def write(
        self,
        now: Snapshot | None,
        path: str,
        parts: Sequence[Part],
        schema: pa.Schema,
        batches: Iterator[pa.RecordBatch],
    ) -> None:
        (part,) = parts
        if os.path.isfile(part.path) and _is_as_written(part, schema):
            with contextlib.suppress(FileNotFoundError):  # of an attempt that was interrupted
                os.remove(path)
            with contextlib.suppress(OSError):  # another disk, or one without links
                os.link(part.path, path)
                LOCAL.write_over(_note(path), json.dumps({"part": part.id, "rows": part.rows}).encode())
                return
        write_parquet(path, labelled(parts), schema, batches)

    def about(self, path: str) -> Datafile:
        try:
            with open(_note(path), "rb") as file:
                said = json.load(file)
        except FileNotFoundError:
            return parquet_about(path)
        return Datafile(path, {said["part"]: said["rows"]}, said["rows"])

    def count(self) -> int:
        if not self.catalog.about():
            return 0
        with self.catalog.said():
            return int(self.catalog.rows().count())

    def paths(self, now: Snapshot) -> Iterator[str]:
        return iter(())

    # ------------------------------------------------ committing

    def commit(
        self, now: Snapshot | None, load: Load, schema: pa.Schema, files: Sequence[Datafile], marks: Sequence[Mark]
    ) -> bool:
        before = None if now is None else _location(now.table)
        looked = self._files() if now is not None and not load.whole else []
        folder = os.path.join(self._home, f"data-g{load.mark.generation:04d}-{secrets.token_hex(8)}")
        made = f"{folder}.tmp"
        LOCAL.make_folder(made)
        others = self._without(load, schema, files, made) if looked and files and load.mode == "upsert" else looked
        for path in (*others, *(file.path for file in files)):
            self._give(path, made)
        LOCAL.remove_folder(os.path.join(made, OTHERS))
        said = {"marks": [json.loads(mark.dump()) for mark in marks], "before": before, "table": _whose(before)}
        LOCAL.write_over(os.path.join(made, MARKS), json.dumps(said).encode())
        LOCAL.sync_folder(made)
        LOCAL.rename(made, folder)
        LOCAL.sync_folder(self._home)
        if not self._point_at(folder, now, schema, looked):
            LOCAL.remove_folder(folder)
            return False
        return True

    def _files(self) -> list[str]:
        """The files that are the table's rows now."""
        with self.catalog.said():
            return sorted(path_of(file) for file in self.catalog.rows().inputFiles())

    def _without(self, load: Load, schema: pa.Schema, files: Sequence[Datafile], made: str) -> list[str]:
        """Files, of Spark's making, with the table's rows whose key is not in the staged files."""
        from pyspark.sql.pandas.types import from_arrow_schema

        target = os.path.join(made, OTHERS)
        with self.catalog.said():
            read = self.catalog.spark.read.schema(from_arrow_schema(schema, True))
            keys = read.parquet(*[uri_of(file.path) for file in files]).select(*map(quoted, load.key))
            there = self.catalog.rows()
            rows = there.join(keys, list(load.key), "left_anti").select(*map(quoted, there.columns))
            rows.write.parquet(uri_of(target))
        return [os.path.join(target, name) for name in LOCAL.names(target) if name.endswith(self.suffix)]

    def _give(self, path: str, folder: str) -> None:
        """Give a file of this or another folder a name in one; a copy has it, if that is on another disk."""
        if "://" in path:
            raise StoreUnavailable(
                f"{self._place.shown}: its rows are at {path}, and a table that is appended to is linked: use replace, "
                "or copy it to one on a disk"
            )
        name = os.path.basename(path)
        if os.path.exists(target := os.path.join(folder, name)):  # one of the same name, of a folder in the table's
            target = os.path.join(folder, f"{secrets.token_hex(8)}-{name}")
        try:
            os.link(path, target)
        except OSError:
            shutil.copyfile(path, target)
        with open(target, "rb") as file:  # Spark does not see to that
            LOCAL.sync(file)

    def _point_at(self, folder: str, now: Snapshot | None, schema: pa.Schema, looked: Sequence[str]) -> bool:
        """The atomic step. False if the table is not as it was looked at any more."""
        from pyspark.sql.pandas.types import from_arrow_schema

        catalog, about = self.catalog, self.catalog.about()
        spark, columns = catalog.spark, from_arrow_schema(schema, True)
        with catalog.said():
            if now is None:
                if about:
                    return False
                spark.catalog.createTable(catalog.name, path=uri_of(folder), source="parquet", schema=columns)
                return True
            new = [f for f in columns if f.name not in now.schema.names]
            if new:  # readers see them, without values, before they have some
                added = ", ".join(f"{quoted(f.name)} {f.dataType.simpleString()}" for f in new)
                spark.sql(f"ALTER TABLE {catalog.name} ADD COLUMNS ({added})")
            if _location(about) != _location(now.table) or (looked and self._files() != list(looked)):
                return False
            spark.sql(f"ALTER TABLE {catalog.name} SET LOCATION '{uri_of(folder)}'")
            spark.catalog.refreshTable(catalog.name)
        return True

    def forget(self) -> None:
        """Remove all results but the table's own and the one before, which queries may be reading, and those of another
        table, which was renamed.
        """
        location = _location(self.catalog.about())
        if location is None or os.path.dirname(location) != self._home:
            return
        said = _said_in(location)
        for path in (os.path.join(self._home, name) for name in LOCAL.names(self._home) if _RESULT.fullmatch(name)):
            ours = path.endswith(".tmp") or _said_in(path).get("table") == said.get("table")
            if ours and path not in (location, said.get("before")):
                LOCAL.remove_folder(path)


def _location(about: dict[str, str]) -> str | None:
    """Where the files of a table are."""
    return path_of(about["Location"]) if about.get("Location") else None


def _said_in(location: str | None) -> dict[str, Any]:
    try:
        with open(os.path.join(location or "", MARKS), "rb") as file:
            return dict(json.load(file))
    except FileNotFoundError:
        return {}


def _whose(location: str | None) -> str | None:
    """What the results of a table say that they are of, whatever it is called: as that in a folder does, if any."""
    said = _said_in(location)
    return said.get("table") if said else secrets.token_hex(8)


def marks(location: str | None, place: Place) -> tuple[Mark, ...]:
    """What is said, in the folder that a table is pointed at, of the rows in it."""
    found = _said_in(location).get("marks", [])
    return tuple(marks_of(json.dumps(found).encode(), place.shown))


def _note(path: str) -> str:
    """What is said of a link, as the file is the sink's own."""
    return re.sub(r"(\.[0-9a-f]{8}\.tmp|\.parquet)$", "", path) + ".json"


def _is_as_written(part: Part, schema: pa.Schema) -> bool:
    """Whether a part's file holds its rows and no others, in columns as they would be written with this schema."""
    import pyarrow.parquet as pq

    try:
        own = pq.read_metadata(part.path)
    except pa.ArrowException:  # of another format
        return False
    made = io.BytesIO()
    pq.ParquetWriter(made, schema, store_schema=False).close()
    return own.num_rows == part.rows and bool(own.schema.equals(pq.ParquetFile(made).schema))


def quoted(name: str) -> str:
    """A column's name in an expression."""
    return "`" + name.replace("`", "``") + "`"


_SIMPLE = {**SIMPLE, pa.int8(): pa.int8(), pa.int16(): pa.int16(), pa.uint8(): pa.int16(), pa.uint16(): pa.int32()}


# ---------------------------------------------------------------- looking up


class TableReader:
    """Looks rows up in the files of the table, without a query of Spark."""

    def __init__(self, place: Place, key: tuple[str, ...]) -> None:
        self._place, self._key = place, key
        self._catalog = Catalog(place)

    def find(self, keys: Sequence[Key]) -> tuple[Mark | None, list[dict[str, Any] | None]]:
        import pyarrow.dataset as ds

        place, about = self._place, self._catalog.about()
        if not about:
            raise BadSource(f"{place.shown}: Spark's catalog has no such table: deliver a result there first")
        if is_view(about) or not is_plain(about):
            raise BadJob(f"{place.shown}: is no unpartitioned Parquet table: rows are looked up in those alone")
        found = marks(_location(about), place)
        mark = found[0] if found else None
        with self._catalog.said():
            schema = schema_of(self._catalog.spark.table(self._catalog.name))
            rows = ds.dataset(_location(about), schema=schema, format="parquet")
            wanted = keyed(place.shown, self._key or (mark.key if mark else ()), {f.name: f.type for f in schema})
            asked_for = asked(keys, wanted, place.shown, mark)
            table = rows.to_table(filter=matching(asked_for, schema)) if keys else schema.empty_table()
        return mark, restored(table, asked_for, mark, place.shown)

    def close(self) -> None:
        self._catalog.close()
