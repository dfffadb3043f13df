"""Looking rows up in Postgres, by key and by vector; also in tables that others made."""

from __future__ import annotations

import datetime as dt
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from gristmill.arrow.casts import Lossy, clothed
from gristmill.arrow.schemas import plain, storage
from gristmill.arrow.topython import from_plain, to_plain
from gristmill.commit.generation import decode_schema
from gristmill.errors import BadJob, BadKey, BadSource
from gristmill.process.extras import require
from gristmill.sinks.jsonread import from_json
from gristmill.stores import pgtable, pgvector
from gristmill.stores.contract import Key, Mark, Metric, Near, Place, Search, StoreUnavailable
from gristmill.stores.keys import number_text, retold
from gristmill.stores.lookup import as_delivered, asked, covering, keyed, refused_as, repeated
from gristmill.stores.pgsession import Transaction, base, connected, schema_of
from gristmill.stores.pgtimes import read_far
from gristmill.stores.sql import MARKS, quoted
from gristmill.stores.tablemarks import last_mark
from gristmill.stores.vectors import columns_in, searched
from gristmill.values import dataclass

Found = TypeVar("Found")
# The types of values in columns; keys of columns that others made with another one are given as text.
_HELD = {
    "smallint": pa.int16(), "integer": pa.int32(), "bigint": pa.int64(), "boolean": pa.bool_(), "real": pa.float32(),
    "double precision": pa.float64(), "date": pa.date32(), "bytea": pa.binary(),
    "timestamp without time zone": pa.timestamp("us"), "timestamp with time zone": pa.timestamp("us", "UTC"),
    "time without time zone": pa.time64("us"), "interval": pa.duration("us"),
}  # fmt: skip
_MICROSECOND = dt.timedelta(microseconds=1)
_WHOLE = {"character": "bpchar", "bit": "bit varying"}  # types that are of length 1 where none is said
_TEXTS = ("text", "character varying", "character", "citext", "name")


@dataclass(frozen=True)
class There:
    """The table that is read: how it is named in SQL, its columns, its mark, and the schema that was delivered."""

    table: str
    columns: Mapping[str, str]
    mark: Mark | None
    schema: pa.Schema
    shown: str

    def kind(self, name: str) -> pa.DataType | None:
        """The type that a column was delivered with; None for one of others."""
        return self.schema.field(name).type if name in self.schema.names else None

    def key_type(self, name: str) -> pa.DataType:
        """The type by which keys of a column are read."""
        kind, column = self.kind(name), self.columns[name]
        if kind is None or self.by_text(name):
            return pa.uuid() if column == "uuid" else _HELD.get(base(column), pa.string())
        held = pa.decimal128(38, 0) if pa.types.is_integer(storage(kind)) and base(column) == "numeric" else None
        held = _HELD.get(column, held)
        return kind if held is None else covering(kind, held)

    def by_text(self, name: str) -> bool:
        """Whether keys of a column are compared by the server as numbers with all their digits: it may have others than
        were delivered.
        """
        kind, column = self.kind(name), self.columns[name]
        if base(column) != "numeric" or kind is None:
            return base(column) == "numeric"
        own = storage(kind)
        return bool(pa.types.is_decimal(own)) and column != f"numeric({own.precision},{own.scale})"

    @property
    def listed(self) -> str:
        """The columns in SQL, of the table `t`, as they are read."""
        return ", ".join(f"t.{quoted(n)}{_read_as(kind)}" for n, kind in self.columns.items())

    def rows(self, found: Sequence[Sequence[Any]]) -> list[dict[str, Any]]:
        """Rows of these columns, as they were delivered."""
        made = {}
        for i, (name, column) in enumerate(self.columns.items()):
            with refused_as(self.shown, name, kind := self.kind(name)):
                made[name] = _restored([row[i] for row in found], kind, column)
        return [dict(zip(made, values, strict=True)) for values in zip(*made.values(), strict=True)]


class ServerReader:
    """Looks rows up in a table."""

    def __init__(self, place: Place, key: tuple[str, ...]) -> None:
        self._place = place
        self._key = key
        self._lock = threading.Lock()
        self._connection: Any = None
        self._finds = ""  # a statement, with which each transaction begins
        self._unmoved: set[tuple[str, ...]] = set()  # see `pgtable.which`

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
                        self._connection = connected(self._place)
                        read_far(self._connection)
                        self._connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
                    session = Transaction(self._connection, self._place.shown)
                    if fresh:
                        with self._connection.transaction():
                            _, self._finds = pgvector.installed(session)
                    with self._connection.transaction():
                        if self._finds:
                            session.run(self._finds)
                        return what(session)
                except psycopg.DataError as e:
                    raise BadKey(f"{self._place.shown}: Postgres says: {self._place.words(e)}") from e
                except psycopg.Error as e:
                    if isinstance(e, undefined := psycopg.errors.UndefinedTable):
                        self._refuse_gone()
                    self._drop()
                    again = (psycopg.OperationalError, undefined)  # the server was restarted; marks were dropped
                    if attempt or fresh or not isinstance(e, again):
                        raise StoreUnavailable(f"{self._place.shown}: Postgres says: {self._place.words(e)}") from e
        raise AssertionError("unreachable")

    def _refuse_gone(self) -> None:
        """Raises BadSource if it is the table that is not there, and not that of marks."""
        with self._connection.transaction():
            found = Transaction(self._connection, self._place.shown).run("SELECT to_regclass(?)", self._table)
        if found[0][0] is None:
            raise BadSource(f"{self._place.shown}: has no such table: deliver a result there first") from None

    @property
    def _table(self) -> str:
        return ".".join(quoted(name) for name in self._place.name.split("."))

    def _there(self, session: Transaction) -> There:
        schema, _, name = self._place.name.rpartition(".")
        table = self._table
        # Before the snapshot is taken: no other table gets this name until the transaction is over.
        session.run(f"LOCK TABLE {table} IN ACCESS SHARE MODE")
        mark = self._mark(session, schema or schema_of(session, name), name)
        schema = decode_schema(mark.held) if mark else pa.schema([])
        return There(table, session.columns(table), mark, schema, self._place.shown)

    def _found(self, session: Transaction, keys: Sequence[Key]) -> tuple[Mark | None, list[dict[str, Any] | None]]:
        there, shown = self._there(session), self._place.shown
        kinds = {n: there.key_type(n) for n in there.columns}
        wanted = keyed(shown, self._key or (there.mark.key if there.mark else ()), kinds)
        if lists := [n for n in wanted if there.columns[n].endswith("[]")]:
            raise BadJob(f"{shown}: column {lists[0]!r} is {there.columns[lists[0]]}: rows are not found by lists")
        own = [n for n in wanted if there.by_text(n)]
        asked_for = asked(retold(keys, list(wanted), dict.fromkeys(own, number_text)) if own else keys, wanted, shown)
        if not keys:
            return there.mark, []
        wants = list(zip(*(_given(asked_for.column(n), there.columns[n]) for n in wanted), strict=True))
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
        bases = [base(there.columns[n]) for n in names]
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
        arrays = columns_in(there.schema).keys() & there.columns.keys() - widths.keys()
        if search.column in arrays or (search.column is None and not widths and arrays):
            name = search.column or min(arrays)
            raise BadJob(
                f"{shown}: column {name!r} has vectors, but is {there.columns[name]}, which nothing is searched by: "
                "it has to be one of pgvector (CREATE EXTENSION vector in the database), and delivered there again"
            )
        column = searched(widths, search, shown)
        metric: Metric = search.metric or pgvector.indexed_by(session, there.table, column) or "cosine"
        found = pgvector.nearest(session, f"{there.table} AS t", f"t.{quoted(column)}", there.listed, search, metric)
        rows = [there.rows([row[1:] for row in one]) for one in found]
        return Near(there.mark, metric, rows, [[float(row[0]) for row in one] for one in found])

    def _mark(self, session: Transaction, schema: str, table: str) -> Mark | None:
        marks, shown = f"{quoted(schema)}.{quoted(MARKS)}", self._place.shown
        pgtable.refuse_rights(session, marks, ("SELECT",), f"{shown}: {MARKS} tells how rows were delivered")
        return last_mark(session, pgtable.which(session, schema, table, shown, unmoved=self._unmoved), shown)

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        self._unmoved.clear()
        if connection is not None:
            connection.close()

    def close(self) -> None:
        with self._lock:
            self._drop()


def _given(values: pa.ChunkedArray, column: str) -> list[Any]:
    """Values of a key column as the client takes them."""
    found = to_plain(values)
    if column == "uuid":
        return [None if value is None else uuid.UUID(bytes=value) for value in found]
    return found


def _read_as(kind: str) -> str:
    """What a column is read as: values of Python, or JSON."""
    if base(kind) == "vector":
        return "::real[]"
    return "::text" if kind in ("json", "jsonb") else ""


def _restored(values: list[Any], kind: pa.DataType | None, column: str) -> list[Any]:
    """Postgres's values as they were delivered; as the column has them, if `kind` does not hold them without loss."""
    if kind is None or column == "uuid":
        return values
    if isinstance(kind, pa.BaseExtensionType):
        return _extended(_restored(values, kind.storage_type, column), kind)
    bare, t = plain(kind), pa.types
    if t.is_nested(bare) and any(isinstance(v, str) for v in values):
        return to_plain(from_json(pa.array(values, pa.string()), bare))
    if t.is_integer(bare) and base(column) == "numeric":
        return [int(v) if v is not None and v == v.to_integral_value() else v for v in values]
    if t.is_decimal(bare):
        return _decimals(values, bare)
    if (held := _values_of(column)) is None:
        return values if t.is_null(bare) else to_plain(pa.array(values, bare))
    return to_plain(as_delivered(pa.chunked_array([_array(values, held)]), bare))


def _array(values: list[Any], kind: pa.DataType) -> pa.Array:
    """Values as Python, or numpy where that has none, as an array."""
    inner = (one for value in values for one in (value if isinstance(value, list) else (value,)))
    if pa.types.is_temporal(getattr(kind, "value_type", kind)) and any(isinstance(one, np.generic) for one in inner):
        return from_plain(values, kind)
    if pa.types.is_duration(kind):  # Arrow fails at the longest
        return pa.array([None if v is None else v // _MICROSECOND for v in values], pa.int64()).cast(kind)
    return pa.array(values, kind)


def _decimals(values: list[Any], kind: pa.DataType) -> list[Any]:
    """Decimals with the digits of a type; as they are, if it does not hold them."""
    try:
        return to_plain(pa.array(values, kind))
    except pa.ArrowInvalid:
        return values


def _extended(values: list[Any], kind: pa.BaseExtensionType) -> list[Any]:
    """Values of a storage as those of an extension type."""
    try:
        return to_plain(clothed(from_plain(values, kind.storage_type), kind))
    except Lossy:  # an earlier delivery had a wider type
        return values


def _values_of(column: str) -> pa.DataType | None:
    """The type that holds all values of a column as they are read; None where these tell it themselves."""
    if base(column) == "vector":
        return pa.list_(pa.float32())
    if column.endswith("[]"):
        inner = _HELD.get(column.removesuffix("[]"))
        return None if inner is None else pa.list_(inner)
    return _HELD.get(column)
