"""Postgres, and what speaks its protocol, as a source. A table is read in ranges of its pages, by connections of their
own that all see one snapshot; anything else by one statement. Rows come by binary COPY, as Arrow columns.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.compute as pc

from gristmill.errors import BadSource, RunFailed
from gristmill.job.snapshots import near, table_of
from gristmill.process.away import says_away
from gristmill.process.extras import require
from gristmill.snapshots.contract import DataFile, Piece, Snapshot, SnapshotKind, Wanted
from gristmill.snapshots.sql import counting, read_of, selected
from gristmill.snapshots.times import checked
from gristmill.stores.pgsession import CONNECT
from gristmill.stores.sql import quoted
from gristmill.values import dataclass

RANGE = 128 << 20  # bytes of a table that are read by one statement, and become one file
_TEXTS = frozenset(("json", "jsonb", "name"))  # as they are, but not as these types
_SAME = _TEXTS | {"int2", "int4", "int8", "float4", "float8", "bool", "text", "varchar", "bpchar", "bytea", "date",
                  "time", "timestamp", "timestamptz"}  # fmt: skip
# From 4713 BC on. What the driver gives for infinity, and for times too late for it, has wrapped around below that.
_BOUNDS = {
    "timestamp": (-210_866_803_200_000_000, 2**63 - 1),
    "date": (-2_440_588, 2**31 - 1),
    "time": (0, 86_399_999_999),
}
_DEEP = "gristmill: of more dimensions"
_BEGIN = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"


class Postgres:
    """`postgresql://USER@HOST/DB#table`, or `#schema.table`; the address's query is libpq's (`?sslmode=require`)."""

    name: ClassVar[str] = "postgresql"
    queried: ClassVar[bool] = True
    said: ClassVar[tuple[str, ...]] = ()
    embedded: ClassVar[bool] = False
    marks: ClassVar[tuple[tuple[str, ...], ...]] = ()

    @staticmethod
    def open(wanted: Wanted, version: str) -> Snapshot:
        """The database, with a snapshot that it keeps until the rows have been copied."""
        return Rows(wanted)


_: type[SnapshotKind] = Postgres  # for mypy


@dataclass(frozen=True)
class Column:
    """How a column is asked for, with {} for its name, the type that it becomes (None for the one it comes in), and
    whether it holds arrays, which the driver would flatten if they have more than one dimension.
    """

    asked: str
    kind: pa.DataType | None = None
    array: bool = False


class Rows:
    """A table or a query, at the snapshot of one transaction."""

    version = told = ""

    def __init__(self, wanted: Wanted) -> None:
        self._psycopg = require("psycopg", "postgres", wanted.shown)
        self._adbc = require("adbc_driver_postgresql.dbapi", "postgres", wanted.shown)
        self._wanted = wanted
        given = {"connect_timeout": CONNECT, "application_name": "gristmill", **wanted.place.options}
        try:
            self._info = self._psycopg.conninfo.make_conninfo(wanted.place.uri, **given)
        except self._psycopg.ProgrammingError as e:  # an option that it does not know
            raise BadSource(f"{wanted.shown}: Postgres' client says: {wanted.words(e)}") from e
        self._idle: list[Reader] = []
        self._running: set[int] = set()  # the server's processes that are reading
        self._held = self._connected()
        try:
            self._held.execute(_BEGIN)
            self._held.execute("SET LOCAL idle_in_transaction_session_timeout = 0")
            self._relation = self._found() if wanted.query is None else ("", 0, 0)
            self._columns = self._described()
            self._snapshot = self._run("SELECT pg_export_snapshot()")[0][0]
            self.schema = self._schema()
        except (self._psycopg.Error, self._adbc.Error) as e:
            said = self._said(e)
            self.close()
            raise said from e
        except BaseException:
            self.close()
            raise

    def _connected(self) -> Any:
        try:
            return self._psycopg.connect(self._info, autocommit=True)
        except self._psycopg.Error as e:
            words = f"{self._wanted.shown}: cannot be reached: {self._wanted.words(e)}"
            if not says_away(str(e)):
                raise BadSource(f"{words}: check the address, and the user and password in it") from e
            raise RunFailed(f"{words}: run again when the server answers") from e

    def _said(self, error: BaseException) -> BadSource | RunFailed:
        """The server's words; whether it can be asked at all decides what is to be done about it."""
        words = _short(f"{self._wanted.shown}: Postgres says: {self._wanted.words(error)}")
        try:
            self._held.execute("ROLLBACK")
        except self._psycopg.Error:
            return RunFailed(f"{words}: run again when the server answers")
        return BadSource(words)

    def _run(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        found: list[tuple[Any, ...]] = self._held.execute(sql, values or None).fetchall()
        return found

    # ------------------------------------------------ what is there

    def _found(self) -> tuple[str, int, int]:
        """The kind of relation, and how many pages it has, of how many bytes."""
        schema, table = table_of(self._wanted)
        name = ".".join(quoted(n) for n in (schema, table) if n)
        rows = self._run(
            "SELECT c.relkind::text, pg_relation_size(c.oid), current_setting('block_size')::bigint, "
            "coalesce(a.amname, '') FROM pg_class c LEFT JOIN pg_am a ON a.oid = c.relam WHERE c.oid = to_regclass(%s)",
            name,
        )
        if not rows:
            there = [row[0] for row in self._run(
                "SELECT table_name FROM information_schema.tables WHERE table_schema = coalesce(%s, current_schema())",
                schema or None,
            )]  # fmt: skip
            raise BadSource(f"{self._wanted.shown}: there is no table {table!r}{near(table, there)}")
        kind, size, block, method = rows[0]
        return (kind, size // block, block) if kind in ("r", "m") and method == "heap" else (kind, 0, block)

    def _described(self) -> Mapping[str, Column]:
        """The columns that are read, and how."""
        cursor = self._held.execute(f"{selected(self._wanted)} LIMIT 0")
        there = {c.name: c for c in cursor.description}
        names = read_of(self._wanted, [c.name for c in cursor.description])
        oids = sorted({there[n].type_code for n in names})
        sql = (
            "SELECT t.oid, CASE WHEN t.typtype = 'd' THEN b.typname ELSE t.typname END, t.typtype::text, "
            "coalesce(e.typname, ''), coalesce(e.typtype::text, '') FROM pg_type t LEFT JOIN pg_type b ON b.oid = "
            "t.typbasetype LEFT JOIN pg_type e ON e.oid = t.typelem AND t.typcategory = 'A' WHERE t.oid = ANY(%s)"
        )
        kinds = {row[0]: row[1:] for row in self._run(sql, oids)}
        return {name: _column(there[name], *kinds[there[name].type_code]) for name in names}

    def _schema(self) -> pa.Schema:
        with self._reading() as reader:
            reader.cursor.execute(f"{self._statement()} LIMIT 0")
            found = reader.cursor.fetch_record_batch()
            empty = pa.Table.from_batches(list(found), found.schema)
        return pa.schema([(n, _typed(empty[n].combine_chunks(), c).type) for n, c in self._columns.items()])

    def _statement(self) -> str:
        asked = {name: c.asked for name, c in self._columns.items()}
        deep = [f"coalesce(array_ndims({quoted(name)}) > 1, false)" for name, c in self._columns.items() if c.array]
        more = [f"{' OR '.join(deep)} AS {quoted(_DEEP)}"] if deep else []
        return selected(self._wanted, list(self._columns), asked, more)

    def count(self) -> int | None:
        try:
            return int(self._run(counting(self._wanted))[0][0])
        except self._psycopg.Error as e:
            raise self._said(e) from e

    # ------------------------------------------------ rows

    @contextlib.contextmanager
    def _reading(self) -> Iterator[Reader]:
        """A connection that sees the snapshot and that nobody else reads by; one that failed is closed."""
        try:
            reader = self._idle.pop()
        except IndexError:
            reader = Reader(self._adbc, self._info, self._snapshot)
        try:
            yield reader
        except BaseException:
            reader.close()
            raise
        self._idle.append(reader)

    def files(self) -> Sequence[DataFile] | None:
        return None

    def pieces(self) -> Sequence[Piece]:
        sql = self._statement()
        _, pages, block = self._relation
        step = max(1, RANGE // block) if block else 0
        if not pages:
            return [partial(self._read, sql)]
        starts = range(0, pages, step)
        ranges = [f"ctid >= '({at},0)'::tid AND ctid < '({at + step},0)'::tid" for at in starts]
        ranges[-1] = f"ctid >= '({starts[-1]},0)'::tid"
        return [partial(self._read, f"{sql} WHERE {where}") for where in ranges]

    def _read(self, sql: str) -> Iterator[pa.RecordBatch]:
        try:
            with self._reading() as reader:
                self._running.add(reader.process)
                try:
                    reader.cursor.execute(sql)
                    for batch in reader.cursor.fetch_record_batch():
                        yield self._batch(batch)
                finally:
                    self._running.discard(reader.process)
        except (self._adbc.Error, pa.ArrowException, OSError) as e:  # the latter two from within a stream
            raise self._said(e) from e

    def _batch(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        arrays = []
        if _DEEP in batch.schema.names and pc.any(batch.column(_DEEP)).as_py():
            names = [name for name, column in self._columns.items() if column.array]
            raise BadSource(
                f"{self._wanted.shown}: arrays of more than one dimension in {', '.join(map(repr, names))}: ask for "
                "to_json(…) of them in a query"
            )
        for name, column in self._columns.items():
            try:
                arrays.append(_typed(batch.column(name), column))
                checked(self._wanted, name, arrays[-1], _BOUNDS)
            except pa.ArrowException as e:
                raise BadSource(f"{self._wanted.shown}: column {name!r}: {e}: cast it in a query") from e
        return pa.record_batch(arrays, names=list(self._columns))

    def cancel(self) -> None:
        with contextlib.suppress(self._psycopg.Error):  # the server is away, and so are its statements
            for process in list(self._running):
                self._held.execute("SELECT pg_cancel_backend(%s)", (process,))

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()
        self._held.close()


class Reader:
    """A connection that sees the exported snapshot."""

    def __init__(self, adbc: Any, info: str, snapshot: str) -> None:
        self._connection = adbc.connect(info, autocommit=True)
        self.cursor = self._connection.cursor()
        try:
            self.cursor.execute(_BEGIN)
            self.cursor.execute(f"SET TRANSACTION SNAPSHOT '{snapshot}'")
            # Rows in the order of the table's pages, so that a copy that is made again is the same.
            self.cursor.execute("SET LOCAL synchronize_seqscans = off")
            self.cursor.execute("SET LOCAL max_parallel_workers_per_gather = 0")
            self.cursor.execute("SELECT pg_backend_pid()")
            self.process: int = self.cursor.fetchone()[0]
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self.cursor.close()
        self._connection.close()


def _column(about: Any, kind: str, sort: str, element: str, element_sort: str) -> Column:
    """How values of a type are read. Types that Arrow does not have come as the text that Postgres writes."""
    if kind in _SAME:
        return Column("{}", pa.string() if kind in _TEXTS else None)
    if kind == "numeric":
        return Column("{}::text", _decimal(about))
    if kind == "oid":
        return Column("{}::bigint")
    if kind in ("vector", "halfvec"):
        size = about._fmod if about._fmod > 0 else 0
        return Column("{}::real[]", pa.list_(pa.float32(), size) if size else pa.list_(pa.float32()))
    if element in _SAME - _TEXTS:
        return Column("{}", array=True)
    if element:
        return Column("{}::text[]", array=True)
    if sort == "c" or kind == "record":
        return Column("to_json({})::text")
    return Column("{}::text")


def _decimal(about: Any) -> pa.DataType | None:
    """The type of a numeric with a precision; text for one that may have any number of digits."""
    digits, scale = about.precision, about.scale
    if digits is None or scale is None or digits > 76 or not 0 <= scale <= digits:
        return None
    return pa.decimal128(digits, scale) if digits <= 38 else pa.decimal256(digits, scale)


def _typed(values: pa.Array, column: Column) -> pa.Array:
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    if isinstance(values, pa.ExtensionArray):
        values = values.storage
    return values if column.kind is None else values.cast(column.kind)


def _short(words: str) -> str:
    """What the server says, without the statement that the driver repeats."""
    return words.partition(" Query was:")[0]
