"""Postgres, and what speaks its protocol, with vectors of pgvector where the database has it. Rows come by binary COPY
into a table of their own, which gets the target's indices, grants and name; where views, foreign keys or triggers hang
on the target, its rows are replaced instead.
"""

from __future__ import annotations

import contextlib
import re
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import pyarrow as pa

from gristmill.arrow.casts import is_list
from gristmill.arrow.schemas import plain, unwritable
from gristmill.arrow.topython import to_plain
from gristmill.commit.generation import decode_schema
from gristmill.errors import BadJob, BadKey, BadSource
from gristmill.process.extras import require
from gristmill.sinks.jsonread import from_json
from gristmill.stores import pgvector
from gristmill.stores.contract import (
    Key,
    Load,
    Mark,
    Metric,
    Mode,
    Near,
    Place,
    Reader,
    Search,
    Store,
    StoreKind,
    StoreUnavailable,
)
from gristmill.stores.keys import number_text, retold
from gristmill.stores.lookup import as_delivered, asked, covering, keyed, repeated
from gristmill.stores.pgcopy import copied
from gristmill.stores.sql import MARKS, Session, Tables, created, latest, moved, named, quoted
from gristmill.stores.vectors import metric_of, searched

LONGEST = 63  # bytes of a name
CONNECT = 10  # seconds to wait for a server
LOCKED = "30s"  # how long the switch waits for queries that are reading the table; new ones wait behind it
_SIMPLE = {
    pa.bool_(): "boolean",
    **dict.fromkeys((pa.int8(), pa.int16(), pa.uint8()), "smallint"),
    **dict.fromkeys((pa.int32(), pa.uint16()), "integer"),
    **dict.fromkeys((pa.int64(), pa.uint32()), "bigint"),
    pa.uint64(): "numeric(20,0)",
    **dict.fromkeys((pa.float16(), pa.float32()), "real"),
    pa.float64(): "double precision",
    **dict.fromkeys((pa.string(), pa.large_string(), pa.null()), "text"),
    **dict.fromkeys((pa.binary(), pa.large_binary()), "bytea"),
    **dict.fromkeys((pa.date32(), pa.date64()), "date"),
    **dict.fromkeys((pa.time32("s"), pa.time32("ms"), pa.time64("us")), "time without time zone"),
}
_WIDER: Mapping[str, tuple[str, ...]] = {
    "smallint": ("integer", "bigint", "numeric", "real", "double precision"),
    "integer": ("bigint", "numeric", "double precision"),
    "bigint": ("numeric",),
    "numeric(20,0)": ("numeric",),
    "real": ("double precision",),
    "text": ("character varying",),
    "jsonb": ("json",),
}
_VECTOR = 16_000  # numbers that a pgvector column holds at most


class Postgres:
    """`postgresql://USER@HOST/DB#table`, or `#schema.table`; the query is libpq's (`?sslmode=require`)."""

    name: ClassVar[str] = "postgresql"
    modes: ClassVar[tuple[Mode, ...]] = ("replace", "append", "upsert")
    keyed: ClassVar[bool] = False
    embedded: ClassVar[bool] = False

    @staticmethod
    def open(place: Place) -> Store:
        """The table, over a connection that is made now."""
        database = Server(place)
        with database.session(write=False):
            return Tables(place, database)

    @staticmethod
    def reader(place: Place, key: tuple[str, ...]) -> Reader:
        """One connection, which threads take in turns."""
        return ServerReader(place, key)


_: type[StoreKind] = Postgres  # for mypy


def _connected(place: Place) -> Any:
    psycopg = require("psycopg", "postgres", place.shown)
    named(place)
    if any(len(name.encode()) > LONGEST for name in place.name.split(".")):
        raise BadJob(
            f"{place.shown}: Postgres has names of {LONGEST} bytes at most, and cuts others: give another name"
        )
    try:
        options = {"connect_timeout": CONNECT, "application_name": "gristmill", **place.options}
        return psycopg.connect(place.uri, **options)
    except psycopg.Error as e:
        raise StoreUnavailable(f"{place.shown}: cannot be reached: {place.words(e)}") from e


class Server:
    """What Postgres does otherwise than other databases."""

    folds: ClassVar[str] = ""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._schema, _, self._table = place.name.rpartition(".")
        self._connection: Any = None
        self._vectors: bool | None = None

    @contextlib.contextmanager
    def session(self, *, write: bool) -> Iterator[Session]:
        """A transaction of the connection, which is made anew if it is lost."""
        psycopg = require("psycopg", "postgres", self._place.shown)
        try:
            if self._connection is None or self._connection.closed:
                self._connection = _connected(self._place)
            with self._connection.transaction():
                made = Transaction(self._connection)
                if not self._schema:
                    found = _schema_of(made, self._table) or made.run("SELECT current_schema()")[0][0]
                    self._schema = found or "public"
                if self._vectors is None:
                    self._vectors = bool(made.run("SELECT 1 FROM pg_extension WHERE extname = 'vector'"))
                yield made
        except psycopg.Error as e:
            self.close()
            raise StoreUnavailable(f"{self._place.shown}: Postgres says: {self._place.words(e)}") from e
        except BaseException:
            self.close()  # in whatever state it is
            raise

    def alone(self, session: Session) -> None:
        session.run("SELECT pg_advisory_xact_lock(hashtextextended(?, 7))", f"gristmill {self.target()}")

    def table(self, name: str) -> str:
        return f"{quoted(self._schema)}.{quoted(name)}"

    def target(self) -> str:
        return self.table(self._table)

    def marked(self) -> str:
        return self._table

    def kind(self, field: pa.Field) -> str:
        where = f"{self._place.shown}: column {field.name!r}"
        if len(field.name.encode()) > LONGEST:
            raise BadJob(
                f"{where}: Postgres has names of {LONGEST} bytes at most, and cuts others: rename it in a step"
            )
        return _kind(field.type, where, bool(self._vectors))

    def holds(self, field: pa.Field, kind: str) -> bool:
        own = self.kind(field)
        wider = kind == own or kind in _WIDER.get(own, ())
        vectors = pa.types.is_fixed_size_list(field.type) and pa.types.is_floating(field.type.value_type)
        return wider or (vectors and kind in (f"vector({field.type.list_size})", "vector", "real[]"))

    # ------------------------------------------------ the table that takes the target's place

    def typed(self, kind: str) -> bool:
        return kind not in ("json", "jsonb")

    def binary(self, kind: str) -> str:
        return ' COLLATE "C"' if _base(kind) in ("text", "character varying") else ""

    def staging(self, session: Session, load: Load, columns: Mapping[str, str]) -> None:
        """A copy of the target without rows and indices, for one that takes its place; else one that is gone after."""
        stage, there = self.table(load.stage), session.columns(self.target())
        if load.mode != "replace":
            own = {name: kind for name, kind in columns.items() if name in load.schema.names}
            listed = ", ".join(f"{quoted(name)} {kind}" for name, kind in own.items())
            session.run(f"CREATE UNLOGGED TABLE {stage} ({listed})")
        elif not there:
            created(session, stage, columns)
        else:
            session.run(f"CREATE TABLE {stage} (LIKE {self.target()} INCLUDING ALL EXCLUDING INDEXES)")
            for name, kind in columns.items():
                if name not in there:
                    session.run(f"ALTER TABLE {stage} ADD COLUMN {quoted(name)} {kind}")

    def ready(self, session: Session, load: Load) -> None:
        """Build the target's indices, and those asked for, on the staging table."""
        stage = self.table(load.stage)
        if session.columns(self.target()) and not self._bound(session):
            there = self._indices(session, load.stage)
            for number, (_, constraint, definition) in enumerate(self._indices(session, self._table).values()):
                name = f"{load.stage}_{number}"
                if name in there:
                    continue
                if constraint:
                    session.run(f"ALTER TABLE {stage} ADD CONSTRAINT {quoted(name)} {constraint}")
                else:
                    unique = "UNIQUE " if definition.startswith("CREATE UNIQUE") else ""
                    using = definition[definition.index(" USING ") :]
                    session.run(f"CREATE {unique}INDEX {quoted(name)} ON {stage}{using}")
        self._index(session, load, load.stage)
        session.run(f"ANALYZE {stage}")

    def matching(self, session: Session, load: Load) -> None:
        """It joins by hashes of the key if it knows how many rows there are, or by an index that the target has."""
        session.run(f"ANALYZE {self.table(load.stage)}")

    def switch(self, session: Session, load: Load) -> None:
        stage, target = self.table(load.stage), self.target()
        session.run(f"SET LOCAL lock_timeout = '{LOCKED}'")
        if not session.columns(target):
            session.run(f"ALTER TABLE {stage} RENAME TO {quoted(self._table)}")
            return
        session.run(f"LOCK TABLE {target} IN ACCESS EXCLUSIVE MODE")
        if self._bound(session):
            moved(session, target, stage, load.schema.names, truncate=not self._referenced(session))
            self.indexed(session, load)
            return
        names = list(self._indices(session, self._table))
        self._grant(session, stage)
        session.run(f"DROP TABLE {target}")
        session.run(f"ALTER TABLE {stage} RENAME TO {quoted(self._table)}")
        there = self._indices(session, self._table)
        for number, name in enumerate(names):
            if (made := f"{load.stage}_{number}") in there:
                session.run(f"ALTER INDEX {self.table(made)} RENAME TO {quoted(name)}")

    def _bound(self, session: Session) -> bool:
        """Whether views, foreign keys, triggers, policies, partitions, publications or rights on columns hang on the
        target, or it is another role's: then it is to stay the table that it is.
        """
        return bool(
            session.run(
                """
                SELECT 1 FROM pg_class c WHERE c.oid = to_regclass(?) AND (
                    c.relkind <> 'r' OR c.relispartition OR c.relrowsecurity OR c.relhassubclass
                    OR c.relowner <> (SELECT oid FROM pg_roles WHERE rolname = current_user)
                    OR EXISTS (SELECT 1 FROM pg_depend d JOIN pg_rewrite r ON r.oid = d.objid
                               WHERE d.classid = 'pg_rewrite'::regclass AND d.refobjid = c.oid AND r.ev_class <> c.oid)
                    OR EXISTS (SELECT 1 FROM pg_constraint f
                               WHERE f.contype = 'f' AND (f.confrelid = c.oid OR f.conrelid = c.oid))
                    OR EXISTS (SELECT 1 FROM pg_trigger g WHERE g.tgrelid = c.oid AND NOT g.tgisinternal)
                    OR EXISTS (SELECT 1 FROM pg_inherits i WHERE i.inhrelid = c.oid)
                    OR EXISTS (SELECT 1 FROM pg_publication_rel p WHERE p.prrelid = c.oid)
                    OR EXISTS (SELECT 1 FROM pg_attribute a WHERE a.attrelid = c.oid AND a.attacl IS NOT NULL))
                """,
                self.target(),
            )
        )

    def _referenced(self, session: Session) -> bool:
        sql = "SELECT 1 FROM pg_constraint WHERE contype = 'f' AND confrelid = to_regclass(?)"
        return bool(session.run(sql, self.target()))

    def _grant(self, session: Session, stage: str) -> None:
        """Give the staging table the rights that others have on the target."""
        rights = session.run(
            "SELECT CASE WHEN a.grantee = 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(a.grantee)) END, "
            "a.privilege_type, a.is_grantable FROM pg_class c, aclexplode(c.relacl) a "
            "WHERE c.oid = to_regclass(?) AND a.grantee <> c.relowner",
            self.target(),
        )
        for grantee, right, further in rights:
            session.run(f"GRANT {right} ON {stage} TO {grantee}{' WITH GRANT OPTION' if further else ''}")

    # ------------------------------------------------ indices

    def _indices(self, session: Session, table: str) -> dict[str, tuple[str, str | None, str]]:
        """The indices of a table by name: their columns, the constraint that they serve, and their definition."""
        rows = session.run(
            "SELECT i.relname, (SELECT string_agg(a.attname, ',' ORDER BY k.n) FROM unnest(x.indkey) WITH ORDINALITY "
            "k(at, n) JOIN pg_attribute a ON a.attrelid = x.indrelid AND a.attnum = k.at), "
            "(SELECT pg_get_constraintdef(c.oid) FROM pg_constraint c WHERE c.conindid = i.oid AND c.contype IN "
            "('p', 'u', 'x') AND c.conrelid = x.indrelid), pg_get_indexdef(i.oid) FROM pg_index x JOIN pg_class i ON "
            "i.oid = x.indexrelid WHERE x.indrelid = to_regclass(?) ORDER BY i.relname",
            self.table(table),
        )
        return {row[0]: (row[1] or "", row[2], row[3]) for row in rows}

    def indexed(self, session: Session, load: Load) -> None:
        self._index(session, load, self._table)

    def _index(self, session: Session, load: Load, table: str) -> None:
        """One for the key, by which rows are looked up and upserted, and those asked for, unless there are such."""
        columns = {columns for columns, _, _ in self._indices(session, table).values()}
        if load.key and ",".join(load.key) not in columns:
            session.run(f"CREATE INDEX ON {self.table(table)} ({', '.join(map(quoted, load.key))})")
        for column, how in load.index.items():
            if column not in columns:
                kind, operators = _method(how, load.schema.field(column).type)
                session.run(f"CREATE INDEX ON {self.table(table)} USING {kind} ({quoted(column)}{operators})")

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


def _method(how: Any, kind: pa.DataType) -> tuple[str, str]:
    """An index's method and operators: `hnsw`, `{kind: hnsw, metric: l2}`, `{kind: hnsw, ops: halfvec_l2_ops}`."""
    about = {"kind": how} if isinstance(how, str) else dict(how) if isinstance(how, Mapping) else {"kind": "btree"}
    method = str(about.get("kind", "btree"))
    ops = about.get("ops", "")
    if not ops and method in ("hnsw", "ivfflat") and is_list(kind):
        ops = pgvector.OPERATORS[metric_of(about.get("metric", "cosine"), "index")]
    if not (method.isidentifier() and (not ops or str(ops).isidentifier())):
        raise BadJob(f"index {how!r}: give a method of Postgres, such as btree or hnsw")
    return method, f" {ops}" if ops else ""


class Transaction:
    """Statements of one transaction."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def run(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        cursor = self._connection.execute(_placed(sql) if values else sql, values or None)
        return cursor.fetchall() if cursor.description is not None else []

    def insert(self, table: str, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> int:
        kinds, names = self.columns(table), ", ".join(map(quoted, schema.names))
        with self._connection.cursor() as cursor:
            with cursor.copy(f"COPY {table} ({names}) FROM STDIN (FORMAT BINARY)") as copy:
                for data in copied(batches, kinds):
                    copy.write(data)
            return int(cursor.rowcount)

    def columns(self, table: str) -> dict[str, str]:
        sql = (
            "SELECT attname, format_type(atttypid, atttypmod) FROM pg_attribute WHERE attrelid = to_regclass(?) AND "
            "attnum > 0 AND NOT attisdropped AND attgenerated = '' ORDER BY attnum"
        )
        return dict(self.run(sql, table))

    def tables(self, prefix: str) -> list[str]:
        sql = (
            "SELECT quote_ident(n.nspname) || '.' || quote_ident(c.relname), format('%I.%I', n.nspname, c.relname) "
            "FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace "
            "WHERE c.relkind = 'r' AND starts_with(c.relname, ?)"
        )
        names = (row[0].rpartition(".") for row in self.run(sql, prefix))
        return [f"{_bare(schema)}.{_bare(name)}" for schema, _, name in names]


def _placed(sql: str) -> str:
    """A statement with the client's places for values; a question mark in a name is none."""
    return re.sub(r'"(?:[^"]|"")*"|\?', lambda found: "%s" if found[0] == "?" else found[0], sql.replace("%", "%%"))


def _schema_of(session: Transaction, table: str) -> str:
    """The schema in which a name without one is found; "" if it is not there."""
    sql = "SELECT n.nspname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = to_regclass(?)"
    found = session.run(sql, quoted(table))
    return str(found[0][0]) if found else ""


def _bare(name: str) -> str:
    return name if name.startswith('"') else quoted(name)


def _kind(kind: pa.DataType, where: str, vectors: bool) -> str:
    """The SQL type that holds all values of an Arrow type. Raises BadJob."""
    t, bare = pa.types, plain(kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind)
    if bare in _SIMPLE:
        return _SIMPLE[bare]
    if t.is_timestamp(bare) and bare.unit != "ns":
        return f"timestamp {'with' if bare.tz else 'without'} time zone"
    if t.is_duration(bare) and bare.unit != "ns":
        return "interval"
    if t.is_fixed_size_binary(bare):
        return "bytea"
    if t.is_decimal(bare) and bare.scale >= 0:
        return f"numeric({bare.precision},{bare.scale})"
    if t.is_fixed_size_list(bare) and bare.value_type == pa.float32() and vectors and bare.list_size <= _VECTOR:
        return f"vector({bare.list_size})"
    if is_list(bare) and (inner := _SIMPLE.get(bare.value_type)) is not None and not t.is_null(bare.value_type):
        return f"{'numeric' if inner.startswith('numeric') else inner}[]"
    if t.is_nested(bare) and unwritable(bare) is None:
        return "jsonb"
    raise BadJob(
        f"{where} is {kind}, which Postgres cannot hold without loss: cast it in a step (times to microseconds), or "
        "leave it out (drop=)"
    )


# ---------------------------------------------------------------- looking up


Found = TypeVar("Found")
# The types of values in columns; keys of columns that others made with another one are given as text.
_HELD = {
    "smallint": pa.int16(), "integer": pa.int32(), "bigint": pa.int64(), "boolean": pa.bool_(), "real": pa.float32(),
    "double precision": pa.float64(), "date": pa.date32(), "bytea": pa.binary(),
    "timestamp without time zone": pa.timestamp("us"), "timestamp with time zone": pa.timestamp("us", "UTC"),
    "time without time zone": pa.time64("us"), "interval": pa.duration("us"),
}  # fmt: skip
_WHOLE = {"character": "bpchar", "bit": "bit varying"}  # types that are of length 1 where none is said
_TEXTS = ("text", "character varying", "character", "citext", "name")


@dataclass(frozen=True)
class There:
    """The table that is read: how it is named in SQL, its columns, its mark, and the schema that was delivered."""

    table: str
    columns: Mapping[str, str]
    mark: Mark | None
    schema: pa.Schema

    def kind(self, name: str) -> pa.DataType | None:
        """The type that a column was delivered with; None for one of others."""
        return self.schema.field(name).type if name in self.schema.names else None

    def key_type(self, name: str) -> pa.DataType:
        """The type by which keys of a column are read."""
        kind, column = self.kind(name), self.columns[name]
        if kind is None:
            return pa.uuid() if column == "uuid" else _HELD.get(_base(column), pa.string())
        held = pa.decimal128(38, 0) if pa.types.is_integer(plain(kind)) and _base(column) == "numeric" else None
        held = _HELD.get(column, held)
        return kind if held is None else covering(kind, held)

    @property
    def listed(self) -> str:
        """The columns in SQL, of the table `t`, as they are read."""
        return ", ".join(f"t.{quoted(n)}{_read_as(kind)}" for n, kind in self.columns.items())

    def rows(self, found: Sequence[Sequence[Any]]) -> list[dict[str, Any]]:
        """Rows of these columns, as they were delivered."""
        made = {
            name: _restored([row[i] for row in found], self.kind(name), column)
            for i, (name, column) in enumerate(self.columns.items())
        }
        return [dict(zip(made, values, strict=True)) for values in zip(*made.values(), strict=True)]


class ServerReader:
    """Looks rows up in a table."""

    def __init__(self, place: Place, key: tuple[str, ...]) -> None:
        self._place = place
        self._key = key
        self._lock = threading.Lock()
        self._connection: Any = None

    def find(self, keys: Sequence[Key]) -> tuple[Mark | None, list[dict[str, Any] | None]]:
        return self._reading(lambda session: self._found(session, keys))

    def nearest(self, search: Search) -> Near:
        """By an index of pgvector, if there is one for this metric; else every vector is read."""
        return self._reading(lambda session: self._nearest(session, search))

    def _reading(self, what: Callable[[Transaction], Found]) -> Found:
        """Under one snapshot, over a connection that is made anew if it was lost."""
        psycopg = require("psycopg", "postgres", self._place.shown)
        with self._lock:
            for attempt in range(2):
                fresh = self._connection is None or self._connection.closed
                try:
                    if fresh:
                        self._connection = _connected(self._place)
                        self._connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
                    with self._connection.transaction():
                        return what(Transaction(self._connection))
                except psycopg.errors.UndefinedTable:
                    raise BadSource(f"{self._place.shown}: has no such table: deliver a result there first") from None
                except psycopg.DataError as e:
                    raise BadKey(f"{self._place.shown}: Postgres says: {self._place.words(e)}") from e
                except psycopg.Error as e:
                    self._drop()
                    if attempt or fresh or not isinstance(e, psycopg.OperationalError):  # else the server was restarted
                        raise StoreUnavailable(f"{self._place.shown}: Postgres says: {self._place.words(e)}") from e
        raise AssertionError("unreachable")

    def _there(self, session: Transaction) -> There:
        schema, _, name = self._place.name.rpartition(".")
        before = f"{quoted(schema)}." if schema else ""
        table = f"{before}{quoted(name)}"
        # Before the snapshot is taken: no other table gets this name until the transaction is over.
        session.run(f"LOCK TABLE {table} IN ACCESS SHARE MODE")
        mark = self._mark(session, f"{quoted(schema or _schema_of(session, name))}.{quoted(MARKS)}", name)
        return There(table, session.columns(table), mark, decode_schema(mark.schema) if mark else pa.schema([]))

    def _found(self, session: Transaction, keys: Sequence[Key]) -> tuple[Mark | None, list[dict[str, Any] | None]]:
        there, shown = self._there(session), self._place.shown
        kinds = {n: there.key_type(n) for n in there.columns}
        wanted = keyed(shown, self._key or (there.mark.key if there.mark else ()), kinds)
        if lists := [n for n in wanted if there.columns[n].endswith("[]")]:
            raise BadJob(f"{shown}: column {lists[0]!r} is {there.columns[lists[0]]}: rows are not found by lists")
        own = [n for n in wanted if there.kind(n) is None and _base(there.columns[n]) == "numeric"]
        asked_for = asked(retold(keys, list(wanted), dict.fromkeys(own, number_text)) if own else keys, wanted, shown)
        if not keys:
            return there.mark, []
        wants = list(zip(*(_given(asked_for.column(n), kind) for n, kind in wanted.items()), strict=True))
        # No text here has a zero byte, and the server takes none; nor has a row a null in its key.
        once = [k for k in dict.fromkeys(wants) if not any(v is None or (isinstance(v, str) and "\0" in v) for v in k)]
        rows: dict[tuple[Any, ...], dict[str, Any]] = {}
        if once:
            said = session.run(self._query(there, list(wanted)), *map(list, zip(*once, strict=True)))
            for (number, *_), row in zip(said, there.rows([row[1:] for row in said]), strict=True):
                if (key := once[number - 1]) in rows:
                    raise repeated(shown, list(wanted), key)
                rows[key] = row
        return there.mark, [rows.get(key) for key in wants]

    @staticmethod
    def _query(there: There, names: Sequence[str]) -> str:
        """The rows of some keys, with the numbers of these: the server compares values, as it has types that Python has
        not, and texts as they are, whatever collation their column has.
        """
        bases = [_base(there.columns[n]) for n in names]
        given = ", ".join(f"?::{_WHOLE.get(base, base)}[]" for base in bases)
        heads = ", ".join([*(f"k{i}" for i in range(len(names))), "n"])
        same = [f"t.{quoted(n)} = a.k{i}" for i, n in enumerate(names)]
        texts = [(f"t.{quoted(n)}", f"a.k{i}") for i, n in enumerate(names) if bases[i] in _TEXTS]
        same += [f'{own}::text COLLATE "C" = {asked}::text COLLATE "C"' for own, asked in texts]
        listed = f"unnest({given}) WITH ORDINALITY AS a({heads})"
        return f"SELECT a.n, {there.listed} FROM {there.table} AS t JOIN {listed} ON {' AND '.join(same)}"

    def _nearest(self, session: Transaction, search: Search) -> Near:
        there, shown = self._there(session), self._place.shown
        widths = {n: int(kind[7:-1]) for n, kind in there.columns.items() if kind.startswith("vector(")}
        column = searched(widths, search, shown)
        metric: Metric = search.metric or pgvector.indexed_by(session, there.table, column) or "cosine"
        found = pgvector.nearest(session, f"{there.table} AS t", f"t.{quoted(column)}", there.listed, search, metric)
        rows = [there.rows([row[1:] for row in one]) for one in found]
        return Near(there.mark, metric, rows, [[float(row[0]) for row in one] for one in found])

    def _mark(self, session: Transaction, marks: str, table: str) -> Mark | None:
        return latest(session, marks, table, self._place.shown)

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def close(self) -> None:
        with self._lock:
            self._drop()


def _base(kind: str) -> str:
    """A column's type without its lengths: `timestamp(3) with time zone` is `timestamp with time zone`."""
    return re.sub(r"\([^)]*\)", "", kind)


def _given(values: pa.ChunkedArray, kind: pa.DataType) -> list[Any]:
    """Values of a key column as the client takes them."""
    found = to_plain(values)
    if isinstance(kind, pa.UuidType):
        return [None if value is None else uuid.UUID(bytes=value) for value in found]
    return found


def _read_as(kind: str) -> str:
    """What a column is read as: values of Python, or JSON."""
    if _base(kind) == "vector":
        return "::real[]"
    return "::text" if kind in ("json", "jsonb") else ""


def _restored(values: list[Any], kind: pa.DataType | None, column: str) -> list[Any]:
    """Postgres's values as they were delivered; as the column has them, if `kind` does not hold them without loss."""
    if kind is None:
        return values
    bare, t = plain(kind), pa.types
    if t.is_nested(bare) and any(isinstance(v, str) for v in values):
        return to_plain(from_json(pa.array(values, pa.string()), bare))
    if t.is_integer(bare) and _base(column) == "numeric":
        return [int(v) if v is not None and v == v.to_integral_value() else v for v in values]
    if (held := _values_of(column)) is None:
        return values if t.is_null(bare) else to_plain(pa.array(values, bare))
    return to_plain(as_delivered(pa.chunked_array([pa.array(values, held)]), bare))


def _values_of(column: str) -> pa.DataType | None:
    """The type that holds all values of a column as they are read; None where these tell it themselves."""
    if _base(column) == "vector":
        return pa.list_(pa.float32())
    if column.endswith("[]"):
        inner = _HELD.get(column.removesuffix("[]"))
        return None if inner is None else pa.list_(inner)
    return _HELD.get(column)
