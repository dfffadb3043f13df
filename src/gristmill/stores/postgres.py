"""Postgres, and what speaks its protocol, with vectors of pgvector where the database has it. Rows come by binary COPY
into a table of their own, which gets the target's indices, grants and name; where views, foreign keys or triggers hang
on the target, its rows are replaced instead.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, ClassVar

import pyarrow as pa

from gristmill.arrow.casts import is_list
from gristmill.arrow.schemas import storage, unwritable
from gristmill.errors import BadJob
from gristmill.process.extras import require
from gristmill.stores import pgidentity, pgindex, pgtable, pgvector, references, tablemarks
from gristmill.stores.contract import STAGED, Load, Mode, Place, Reader, Store, StoreKind, StoreUnavailable
from gristmill.stores.pgread import ServerReader
from gristmill.stores.pgsession import LONGEST, Transaction, base, connected, schema_of
from gristmill.stores.sql import (
    MARKS,
    PARTS,
    Session,
    Which,
    defined,
    extended,
    holds_decimals,
    merged,
    moved,
    quoted,
)
from gristmill.stores.tables import Tables

LOCKED = "30s"  # how long a step waits for those who read the table, or write to it; new ones wait behind it
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
_OWN = ("ctid", "xmin", "xmax", "cmin", "cmax", "tableoid")
_VECTORS = (pa.float16(), pa.float32())  # whose values numbers of pgvector are
_VECTOR = 16_000  # numbers that a pgvector column holds at most


class Postgres:
    """`postgresql://USER@HOST/DB#table`, or `#schema.table`; the query is libpq's (`?sslmode=require`)."""

    name: ClassVar[str] = "postgresql"
    modes: ClassVar[tuple[Mode, ...]] = ("replace", "append", "upsert")
    keyed: ClassVar[bool] = False
    embedded: ClassVar[bool] = False
    in_address: ClassVar[tuple[str, ...] | None] = None
    in_options: ClassVar[tuple[str, ...] | None] = None

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

    @staticmethod
    def same(read: Place, to: Place) -> bool | None:
        """See Known."""
        return pgidentity.same(read, to)


_: type[StoreKind] = Postgres  # for mypy


def _lasting(error: Any) -> bool:
    """Whether the same statements meet the same error again, as values, rights or the table have to be changed."""
    psycopg = require("psycopg", "postgres", "postgresql")
    known = psycopg.errors
    if isinstance(error, psycopg.IntegrityError):  # in the catalog it is of two that create one table at once
        return bool(error.diag.schema_name != "pg_catalog")
    lasting = (known.ProgramLimitExceeded, known.InsufficientPrivilege, known.DependentObjectsStillExist)
    kinds = (known.UndefinedObject, known.DatatypeMismatch)  # such as operators of an index
    return isinstance(error, (psycopg.DataError, psycopg.NotSupportedError, *lasting, *kinds))


class Server:
    """What Postgres does otherwise than other databases."""

    folds: ClassVar[str] = ""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._schema, _, self._table = place.name.rpartition(".")
        self._connection: Any = None
        self._vectors: bool | None = None
        self._finds = ""  # a statement

    @contextlib.contextmanager
    def session(self, *, write: bool) -> Iterator[Session]:
        """A transaction of the connection, which is made anew if it is lost."""
        psycopg = require("psycopg", "postgres", self._place.shown)
        try:
            if self._connection is None or self._connection.closed:
                self._connection = connected(self._place)
            with self._connection.transaction():
                made = Transaction(self._connection, self._place.shown)
                if not self._schema:
                    found = schema_of(made, self._table) or made.run("SELECT current_schema()")[0][0]
                    self._schema = found or "public"
                if self._vectors is None:
                    self._vectors, self._finds = pgvector.installed(made)
                if self._finds:
                    made.run(self._finds)
                yield made
        except psycopg.Error as e:
            self.close()
            told = f"{self._place.shown}: Postgres says: {self._place.words(e)}"
            raise (BadJob(told) if _lasting(e) else StoreUnavailable(told)) from e
        except BaseException:
            self.close()  # in whatever state it is
            raise

    def alone(self, session: Session, *, ours: bool = False) -> None:
        what = self.table(MARKS) if ours else self.target()
        session.run("SELECT pg_advisory_xact_lock(hashtextextended(?, 7))", f"gristmill {what}")

    def brief(self, session: Session) -> None:
        """Not of `alone`, which waits for deliverers that are loading."""
        session.run(f"SET LOCAL lock_timeout = '{LOCKED}'")

    def table(self, name: str) -> str:
        return f"{quoted(self._schema)}.{quoted(name)}"

    def target(self) -> str:
        return self.table(self._table)

    def which(self, session: Session) -> Which:
        return pgtable.which(session, self._schema, self._table, self._place.shown)

    def keep(self, session: Session, load: Load) -> None:
        """By the lock that the switch takes; else by one that any query takes, which needs no rights but to read."""
        if session.columns(target := self.target()):
            if load.mode == "replace":
                self._shut(session)
            else:
                session.run(f"SELECT FROM {target} LIMIT 0")

    def _shut(self, session: Session) -> bool:
        """Keep out writers of the target, and its readers if nothing hangs on it: whether that is so."""
        alone = not pgtable.hangs(session, self.target())
        session.run(f"LOCK TABLE {self.target()} IN {'ACCESS ' if alone else ''}EXCLUSIVE MODE")
        return alone

    def named(self, session: Session, name: str) -> str:
        schema, _, table = name.rpartition(".")
        return f"{quoted(schema)}.{quoted(table)}" if schema else self.table(table)

    def create(self, session: Session, table: str, columns: Mapping[str, str]) -> None:
        session.run(f"CREATE TABLE {table} ({defined(columns)})")

    def kind(self, field: pa.Field) -> str:
        where = f"{self._place.shown}: column {field.name!r}"
        if len(field.name.encode()) > LONGEST:
            raise BadJob(
                f"{where}: Postgres has names of {LONGEST} bytes at most, and cuts others: rename it in a step"
            )
        if field.name in _OWN:
            raise BadJob(f"{where}: every table of Postgres has a column of that name of its own: rename it in a step")
        return _kind(field.type, where, bool(self._vectors))

    def holds(self, field: pa.Field, kind: str) -> bool:
        own = self.kind(field)
        bare = storage(field.type)
        wider = kind == own or kind in _WIDER.get(own, ()) or (pa.types.is_decimal(bare) and _wider(bare, kind))
        vectors = pa.types.is_fixed_size_list(bare) and bare.value_type in _VECTORS
        return wider or (vectors and kind in (f"vector({bare.list_size})", "vector", "real[]"))

    # ------------------------------------------------ the table that takes the target's place

    def drops(self, session: Session, load: Load, column: str) -> bool:
        target = self.target()
        return pgtable.is_plain(session, target, column) and not pgtable.hangs(session, target)

    def freed(self, session: Session, load: Load, columns: Collection[str]) -> None:
        """Nothing: a column takes its indices along."""

    def still(self, session: Session) -> None:
        session.run(f"LOCK TABLE {self.target()} IN SHARE ROW EXCLUSIVE MODE")

    def typed(self, kind: str) -> bool:
        return kind not in ("json", "jsonb")

    def binary(self, kind: str) -> str:
        as_text = "::text" * (kind == "json")  # which has no equality
        return f'{as_text} COLLATE "C"' if as_text or base(kind) in ("text", "character varying") else ""

    def generated(self, session: Session) -> Collection[str]:
        return pgtable.generated(session, self.target())

    def meddles(self, session: Session, load: Load) -> bool:
        found = pgtable.meddles(session, self.target(), load)
        if found:
            self.still(session)
        return found

    def settled(self, session: Session) -> None:
        """Checks of constraints that are put off; an index is made of a table with none to come."""
        session.run("SET CONSTRAINTS ALL IMMEDIATE")

    def fits(self, session: Session, load: Load) -> None:
        """What is missing, or hangs on the table, and would keep rows from it at the end."""
        shown, target = self._place.shown, self.target()
        pgtable.refuse_schema(session, self._schema, shown)
        for ours in (MARKS, PARTS):
            pgtable.refuse_rights(session, self.table(ours), ("SELECT", "INSERT", "DELETE"), shown)
        for place in tablemarks.left_in(
            session, self.which(session)
        ):  # the table was there, and its marks are to follow
            pgtable.refuse_rights(session, place, ("DELETE",), shown)
        there = session.columns(target)
        for column, how in self._lacking(session, load, self._table).items():
            kind = there.get(column) or self.kind(load.schema.field(column))
            pgindex.refuse_unbuilt(session, column, kind, how, self._place)
        if not there:
            return
        pgtable.refuse_kind(session, target, load, shown)
        if load.mode == "replace" and not pgtable.hangs(session, target):
            return
        found = pgtable.references(session, target) if load.mode == "replace" else []
        references.refuse_unkeyed(found, load, shown)
        rights = ["SELECT", "INSERT"] + ["UPDATE"] * (load.mode == "upsert" or bool(found))
        if load.mode == "replace" and not found and pgtable.keeps_rows(session, target):
            rights.append("TRUNCATE")
        elif load.whole:
            rights.append("DELETE")
        pgtable.refuse_rights(session, target, rights, shown)
        pgtable.refuse_changes(session, target, load, self._lacking(session, load, self._table), shown)

    def staging(self, session: Session, load: Load, columns: Mapping[str, str]) -> None:
        """A copy of the target without rows and indices, for one that takes its place; else one that is gone after."""
        stage, target = self.table(load.stage), self.target()
        there = session.columns(target)
        if load.mode != "replace" or (there and pgtable.hangs(session, target)):
            own = {name: kind for name, kind in columns.items() if name in load.schema.names}
            listed = ", ".join(f"{quoted(name)} {kind}" for name, kind in own.items())
            session.run(f"CREATE UNLOGGED TABLE {stage} ({listed})")
        elif not there:
            self.create(session, stage, columns)
        else:
            session.run(f"CREATE TABLE {stage} (LIKE {target} INCLUDING ALL EXCLUDING INDEXES)")
            for name, kind in columns.items():
                if name in there and kind != there[name]:  # see `Tables._hollow`
                    session.run(f"ALTER TABLE {stage} DROP COLUMN {quoted(name)}")
                if kind != there.get(name):
                    session.run(f"ALTER TABLE {stage} ADD COLUMN {quoted(name)} {kind}")

    def ready(self, session: Session, load: Load) -> None:
        """Build the target's indices, and those asked for, on the staging table."""
        stage = self.table(load.stage)
        if not session.columns(self.target()):
            self._index(session, load, load.stage)
        elif self._takes_its_place(session, load):
            there, staged = self._indices(session, load.stage), session.columns(stage).items()
            gone = {name for name, kind in session.columns(self.target()).items() if (name, kind) not in staged}
            for number, index in enumerate(self._kept(session, load, but=gone).values()):
                name = f"{load.stage}_{number}"
                if name in there:
                    continue
                if index.constraint:
                    session.run(f"ALTER TABLE {stage} ADD CONSTRAINT {quoted(name)} {index.constraint}")
                else:
                    session.run(f"CREATE {index.unique}INDEX {quoted(name)} ON {stage}{index.using}")
            self._index(session, load, load.stage)
        session.run(f"ANALYZE {stage}")

    def matching(self, session: Session, load: Load) -> None:
        """It joins by hashes of the key if it knows how many rows there are, or by an index that the target has."""
        session.run(f"ANALYZE {self.table(load.stage)}")

    def switch(self, session: Session, load: Load) -> bool:
        """A rename, for which readers are kept out, and which only an owner does; where anything hangs on the target,
        or it has become another one since the staging table was made, its rows are replaced, and readers go on.
        """
        stage, target = self.table(load.stage), self.target()
        if not session.columns(target):
            session.run(f"ALTER TABLE {stage} RENAME TO {quoted(self._table)}")
            return False
        alone = self._shut(session)
        names = list(self._kept(session, load))
        if not alone or not self._takes_its_place(session, load) or not self._indices_built(session, load):
            return self._in_place(session, load)
        self._dress(session, stage)
        session.run(f"DROP TABLE {target}")
        session.run(f"ALTER TABLE {stage} RENAME TO {quoted(self._table)}")
        for number, name in enumerate(names):
            session.run(f"ALTER INDEX {self.table(f'{load.stage}_{number}')} RENAME TO {quoted(name)}")
        return False

    def _takes_its_place(self, session: Session, load: Load) -> bool:
        """Whether the staging table can become the target, and nothing is lost."""
        target, stage = self.target(), self.table(load.stage)
        return not pgtable.hangs(session, target) and pgtable.made_like(session, stage, target, load.schema.names)

    def _indices_built(self, session: Session, load: Load) -> bool:
        """Whether the staging table has the indices that the target has now."""
        staged = self._indices(session, load.stage)
        wanted = enumerate(self._kept(session, load).values())
        return all(staged.get(f"{load.stage}_{number}") == index for number, index in wanted)

    def _in_place(self, session: Session, load: Load) -> bool:
        """Replace the target's rows; where others refer to them by key, so that only rows that go are deleted. Whether
        rows were updated so.
        """
        stage, target, shown = self.table(load.stage), self.target(), self._place.shown
        session.run("SET CONSTRAINTS ALL DEFERRED")
        if found := pgtable.references(session, target):
            references.refuse_unkeyed(found, load, shown)
            references.refuse_referenced(session, self, found, load, shown)
            extended(session, target, stage, load.schema.names)
            merged(session, self, stage, load, shown, delete=True)
            session.run(f"DROP TABLE {stage}")
        else:
            emptied = (f"TRUNCATE {target}",) * pgtable.keeps_rows(session, target)
            moved(session, self, stage, load, shown, emptied=emptied)
        self.indexed(session, load)
        return bool(found)

    def _dress(self, session: Session, stage: str) -> None:
        """Give the staging table the rights that others have on the target, no others, and its comment."""
        told = "CASE WHEN a.grantee = 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(a.grantee)) END"
        sql = f"SELECT {told}, a.privilege_type, a.is_grantable FROM pg_class c, aclexplode(c.relacl) a"
        where = "WHERE c.oid = to_regclass(?) AND a.grantee <> c.relowner"
        for grantee in {row[0] for row in session.run(f"{sql} {where}", stage)}:  # as new tables have them by default
            session.run(f"REVOKE ALL ON {stage} FROM {grantee}")
        for grantee, right, further in session.run(f"{sql} {where}", self.target()):
            session.run(f"GRANT {right} ON {stage} TO {grantee}{' WITH GRANT OPTION' if further else ''}")
        comment = session.run("SELECT quote_literal(obj_description(to_regclass(?), 'pg_class'))", self.target())[0][0]
        if comment is not None:
            session.run(f"COMMENT ON TABLE {stage} IS {comment}")

    # ------------------------------------------------ indices

    def _indices(self, session: Session, table: str) -> dict[str, pgindex.Index]:
        return pgindex.indices(session, self.table(table))

    def _lacking(self, session: Session, load: Load, table: str) -> dict[str, tuple[str, str]]:
        """Of the indices asked for those that a table does not have."""
        there = self._indices(session, table).values()
        return {c: how for c, how in pgindex.asked(load).items() if not any(index.serves(c, *how) for index in there)}

    def _kept(self, session: Session, load: Load, but: Collection[str] = ()) -> dict[str, pgindex.Index]:
        """The target's indices but for those of ours of which another kind is asked for now, and those of columns that
        are to go.
        """
        asked, kept = pgindex.asked(load), {}
        for name, index in self._indices(session, self._table).items():
            how = asked.get(index.columns) if re.match(STAGED, name) and not index.constraint else None
            if not set(but).isdisjoint(index.columns.split(",")):
                continue
            if how is None or index.serves(index.columns, *how):
                kept[name] = index
        return kept

    def indexed(self, session: Session, load: Load) -> None:
        if gone := self._indices(session, self._table).keys() - self._kept(session, load).keys():
            session.run(f"DROP INDEX {', '.join(map(self.table, sorted(gone)))}")
        self._index(session, load, self._table)

    def _index(self, session: Session, load: Load, table: str) -> None:
        """One for the key, by which rows are looked up and upserted, and those asked for, unless there are such. Their
        names tell that they are ours: they begin with that of a staging place.
        """
        at, columns = self.table(table), {index.columns for index in self._indices(session, table).values()}
        if load.key and ",".join(load.key) not in columns and pgtable.takes_index(session, at):
            listed = ", ".join(map(quoted, load.key))
            session.run(f"CREATE INDEX {self._free(session, f'{load.stage}_key')} ON {at} ({listed})")
        for column, (method, operators) in self._lacking(session, load, table).items():
            name = self._free(session, f"{load.stage}_of_{list(load.index).index(column)}")
            operators = f" {operators}" if operators else ""
            session.run(f"CREATE INDEX {name} ON {at} USING {method} ({quoted(column)}{operators})")

    def _free(self, session: Session, name: str) -> str:
        """A name, in SQL, that nothing has there: that of an index goes with its table when somebody renames that."""
        taken = "SELECT 1 WHERE to_regclass(?) IS NOT NULL"
        names = itertools.chain([name], (f"{name}_{n}" for n in itertools.count(1)))
        return quoted(next(one for one in names if not session.run(taken, self.table(one))))

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


def _wider(decimals: pa.DataType, kind: str) -> bool:
    """Whether a column of the type `kind` holds all values of a type of decimals."""
    digits = re.fullmatch(r"numeric\((\d+),(\d+)\)", kind)
    return kind == "numeric" or (digits is not None and holds_decimals(int(digits[1]), int(digits[2]), decimals))


def _kind(kind: pa.DataType, where: str, vectors: bool) -> str:
    """The SQL type that holds all values of an Arrow type. Raises BadJob."""
    t, bare = pa.types, storage(kind)
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
    if t.is_fixed_size_list(bare) and bare.value_type in _VECTORS and vectors and bare.list_size <= _VECTOR:
        return f"vector({bare.list_size})"
    if is_list(bare) and (inner := _SIMPLE.get(bare.value_type)) is not None and not t.is_null(bare.value_type):
        return f"{'numeric' if inner.startswith('numeric') else inner}[]"
    if t.is_nested(bare) and unwritable(bare) is None:
        return "jsonb"
    raise BadJob(
        f"{where} is {kind}, which Postgres cannot hold without loss: cast it in a step (times to microseconds), or "
        "leave it out (drop=)"
    )
