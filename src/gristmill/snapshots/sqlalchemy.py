"""Any database that SQLAlchemy has a dialect for, as a source: one statement of one transaction, whose rows come as
Python values.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import pyarrow as pa

from gristmill.errors import BadSource, MissingExtra, RunFailed
from gristmill.job.snapshots import near, table_of
from gristmill.process.extras import require
from gristmill.snapshots.contract import DataFile, Piece, Snapshot, SnapshotKind, Wanted
from gristmill.snapshots.rows import as_batch
from gristmill.snapshots.sql import read_of
from gristmill.snapshots.sqlite import declared_kind

BATCH_ROWS = 16_384
_STEADY = "REPEATABLE READ"  # in these a transaction then sees one snapshot; in others a statement does, or locks
_KNOWN = ("mysql", "mariadb", "postgresql")
_MYSQL = ("mysql", "mariadb")  # whose usual driver is built from source
_DRIVERS = {
    **dict.fromkeys(_MYSQL, "pymysql"),
    "oracle": "oracledb",
    "mssql": "pyodbc",
    "snowflake": "snowflake-sqlalchemy",
    "bigquery": "sqlalchemy-bigquery",
    "trino": "'trino[sqlalchemy]'",
}


class SQLAlchemy:
    """`mysql+pymysql://…#table`, or `sqlalchemy+DIALECT://…` for any dialect; the rest is SQLAlchemy's own URL."""

    name: ClassVar[str] = "sqlalchemy"
    queried: ClassVar[bool] = True
    said: ClassVar[tuple[str, ...]] = ()
    embedded: ClassVar[bool] = False
    marks: ClassVar[tuple[tuple[str, ...], ...]] = ()

    @staticmethod
    def open(wanted: Wanted, version: str) -> Snapshot:
        """The database, with a transaction of its own."""
        return Rows(wanted)


_: type[SnapshotKind] = SQLAlchemy  # for mypy


class Rows:
    """A table or a query of one connection."""

    version = told = ""
    schema: pa.Schema | None = None

    def __init__(self, wanted: Wanted) -> None:
        self._wanted, self._made = wanted, list[str]()
        self._sa = require("sqlalchemy", "sql", wanted.shown)
        self._db = self._connected()
        try:
            self._result, self._names, self._kinds = self._asked()
        except self._sa.exc.DBAPIError as e:
            self.close()
            raise BadSource(f"{wanted.shown}: the database says: {wanted.words(e.orig or e)}") from e
        except BaseException:
            self.close()
            raise
        kinds = [kind for kind in self._kinds if kind is not None]
        if len(kinds) == len(self._names):
            self.schema = pa.schema(list(zip(self._names, kinds, strict=True)))

    def _connected(self) -> Any:
        exc, wanted, place = self._sa.exc, self._wanted, self._wanted.place
        try:
            url = self._sa.make_url(place.uri.removeprefix("sqlalchemy+"))
            engine = self._sa.create_engine(url, connect_args=dict(place.options), poolclass=self._sa.pool.NullPool)
        except (exc.NoSuchModuleError, ImportError) as e:
            raise MissingExtra(
                f"{wanted.shown}: needs a package for this database: {wanted.words(e)}{_driver(place.uri)}"
            ) from e
        except exc.ArgumentError as e:
            raise BadSource(f"{self._wanted.shown}: {wanted.words(e)}") from e
        try:
            opened = engine.connect().execution_options(stream_results=True)
        except exc.DBAPIError as e:
            words = wanted.words(e.orig or e)
            raise RunFailed(
                f"{self._wanted.shown}: cannot be reached: {words}: check the address, and the user and password in "
                "it, and run again when the server answers"
            ) from e
        if engine.dialect.name in _KNOWN:
            opened.rollback()  # what connecting has begun
            opened = opened.execution_options(isolation_level=_STEADY)
        return opened

    def _asked(self) -> tuple[Any, list[str], list[pa.DataType | None]]:
        """The rows as they come, and the columns with their types, as far as they are known before."""
        if self._wanted.query is not None:
            result = self._db.exec_driver_sql(self._wanted.query)
            if not result.returns_rows:
                raise BadSource(f"{self._wanted.shown}: the query gives no rows")
            names = read_of(self._wanted, there := list(result.keys()))
            places = [there.index(name) for name in names]
            return result.columns(*places), names, [None] * len(names)
        schema, name = table_of(self._wanted)
        table = self._table(schema, name)
        names = read_of(self._wanted, [c.name for c in table.columns])
        columns = [table.columns[n] for n in names]
        read = [exact(self._sa, self._db.dialect, column) for column in columns]
        t = self._sa.types
        plain = (t.String, t.Integer, t.Float, t.LargeBinary, t.NullType)
        self._made = [name for name, column in zip(names, read, strict=True) if not isinstance(column.type, plain)]
        return self._db.execute(self._sa.select(*read)), names, [self._kind(c.type) for c in columns]

    def _table(self, schema: str, name: str) -> Any:
        try:
            with warnings.catch_warnings():  # of a type that the dialect does not know: values tell it
                warnings.simplefilter("ignore", self._sa.exc.SAWarning)
                return self._sa.Table(name, self._sa.MetaData(), schema=schema or None, autoload_with=self._db)
        except self._sa.exc.NoSuchTableError as e:
            looked = self._sa.inspect(self._db)
            there = [*looked.get_table_names(schema or None), *looked.get_view_names(schema or None)]
            raise BadSource(f"{self._wanted.shown}: there is no table {name!r}{near(name, there)}") from e

    def _kind(self, declared: Any) -> pa.DataType | None:
        """The type of a column's values; None for one that only they tell."""
        if self._db.dialect.name == "sqlite":
            return declared_kind(str(declared))
        sa = self._sa.types
        if isinstance(declared, sa.Numeric) and not isinstance(declared, sa.Float):
            digits, scale = declared.precision, declared.scale
            return pa.decimal128(digits, scale) if digits and scale is not None and digits <= 38 else None
        if isinstance(declared, sa.DateTime):
            return pa.timestamp("us", "UTC" if declared.timezone else None)
        if isinstance(declared, sa.Integer):
            return pa.uint64() if getattr(declared, "unsigned", False) else pa.int64()
        kinds = [
            (sa.Boolean, pa.bool_()),
            (sa.Float, pa.float64()),
            ((sa.String, sa.JSON, sa.Uuid), pa.string()),
            (sa.LargeBinary, pa.binary()),
            (sa.Date, pa.date32()),
            (sa.Time, pa.time64("us")),
        ]
        return next((kind for of, kind in kinds if isinstance(declared, of)), None)

    def files(self) -> Sequence[DataFile] | None:
        return None

    def count(self) -> int | None:
        """Of a table, by a connection of its own: this one is giving rows."""
        if self._wanted.query is not None:
            return None
        with contextlib.closing(self._connected()) as another:
            schema, name = table_of(self._wanted)
            table = self._sa.table(name, schema=schema or None)
            try:
                return int(another.execute(self._sa.select(self._sa.func.count()).select_from(table)).scalar_one())
            except self._sa.exc.DBAPIError as e:
                words = self._wanted.words(e.orig or e)
                raise BadSource(f"{self._wanted.shown}: the database says: {words}") from e

    def pieces(self) -> Sequence[Piece]:
        return [self._read]

    def _read(self) -> Iterator[pa.RecordBatch]:
        try:
            rows = self._result.fetchmany(BATCH_ROWS)
            yield as_batch(self._wanted, self._names, rows, self._kinds)
            while rows := self._result.fetchmany(BATCH_ROWS):
                yield as_batch(self._wanted, self._names, rows, self._kinds)
        except self._sa.exc.DBAPIError as e:
            words = self._wanted.words(e.orig or e)
            raise BadSource(f"{self._wanted.shown}: the database says: {words}") from e
        except (ValueError, TypeError, LookupError, ArithmeticError) as e:  # of what makes Python values of stored ones
            which = " or ".join(map(repr, self._made)) or "one"
            raise BadSource(
                f"{self._wanted.shown}: column {which} has a value that is not one of its type: "
                f"{self._wanted.words(e)}: cast it in a query"
            ) from e

    def cancel(self) -> None:
        """By the driver, if it can: it ends with the batch at hand otherwise."""
        with contextlib.suppress(Exception):
            self._db.connection.dbapi_connection.cancel()

    def close(self) -> None:
        self._db.close()


def _driver(uri: str) -> str:
    """How to get what a database needs."""
    dialect, _, driver = uri.removeprefix("sqlalchemy+").partition("://")[0].partition("+")
    if dialect not in _DRIVERS or (driver and driver not in _DRIVERS[dialect]):
        return ""
    written = "" if driver or dialect not in _MYSQL else f", and write {dialect}+{_DRIVERS[dialect]}://…"
    return f": pip install {_DRIVERS[dialect]}{written}"


def exact(sa: Any, dialect: Any, column: Any) -> Any:
    """A column, asked for so that SQLAlchemy does not make other values of those that are stored: it rounds floats to
    ten digits if the dialect has them as decimals, parses JSON, and has more types than SQLite.
    """
    t, declared = sa.types, column.type
    if dialect.name == "sqlite" or isinstance(declared, (t.Boolean, t.Enum)):
        return sa.type_coerce(column, t.NullType())
    if isinstance(declared, t.Float):
        return sa.type_coerce(column, t.Float(asdecimal=False))
    return sa.cast(column, t.Text()) if isinstance(declared, t.JSON) else column
