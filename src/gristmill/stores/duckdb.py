"""DuckDB files. One process at a time may write such a file, and none may read it meanwhile, so it is held for a moment
only, and whoever finds it taken waits a while.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import pyarrow as pa

from gristmill.arrow.batches import regrouped
from gristmill.arrow.spilling import batches_of, given, tamed
from gristmill.commit.generation import decode_schema
from gristmill.errors import BadJob, BadSource
from gristmill.process.interrupts import Patience
from gristmill.process.startup import imported
from gristmill.stores import references
from gristmill.stores.contract import (
    Key,
    Load,
    Mark,
    Mode,
    Near,
    Place,
    Reader,
    Search,
    Store,
    StoreBusy,
    StoreKind,
    StoreUnavailable,
    damaged,
)
from gristmill.stores.ducktypes import column_type, holds
from gristmill.stores.gate import Gate
from gristmill.stores.keys import retold, uuid_text
from gristmill.stores.lookup import SCANNED, asked, delivered, keyed, restored
from gristmill.stores.refused import without_repeats
from gristmill.stores.sql import (
    MARKS,
    ROWS,
    WITH_TABLES,
    Nothing,
    Session,
    Which,
    as_staged,
    defined,
    extended,
    folded,
    merged,
    moved,
    named,
    of_sqlite,
    quoted,
    refuse_view,
    told_apart,
    witness,
    witnessed,
)
from gristmill.stores.tablemarks import last_mark
from gristmill.stores.tables import Tables
from gristmill.stores.vectors import columns_in, nearest_of_all, searched

PATIENCE = 20.0  # seconds to wait for a file that another process has open
HOLD = 2.0  # seconds after which a file is let go between two transactions, so that readers get at it
GROUP = 122_880, 16 << 20  # rows that it writes at a time; bytes that are copied for that at most
BREATH = 0.02  # seconds for which it is let go
_ROWS = ("SELECT", "INSERT", "UPDATE", "DELETE")  # statements that change no table's columns
_WITNESS = "gristmill [0-9a-f]+"  # the comment of a table that we made
_COMMENT = f"NOT regexp_full_match(comment, '{_WITNESS}')"  # of others
_NO_FILE, _DAMAGED = "not a valid DuckDB database file", ("Could not read enough bytes", "Corrupt database file")
_STRANGE = ("INTERVAL", "BIT", "BIGNUM", "TIME WITH TIME ZONE")  # types whose values Arrow does not have as they are


class DuckDB:
    """`duckdb:///FILE#table`, or `duckdb://FILE#schema.table` for a path relative to the current folder."""

    name: ClassVar[str] = "duckdb"
    modes: ClassVar[tuple[Mode, ...]] = ("replace", "append", "upsert")
    keyed: ClassVar[bool] = False
    embedded: ClassVar[bool] = True
    in_address: ClassVar[tuple[str, ...] | None] = ()
    in_options: ClassVar[tuple[str, ...] | None] = None

    @staticmethod
    def open(place: Place) -> Store:
        """The table; its file is made when the first rows are staged."""
        _named(place)
        folder = os.path.dirname(place.path)
        if not os.path.isdir(folder):
            raise BadJob(f"{place.shown}: there is no folder {folder}: make it, or give another path")
        return Tables(place, File(place))

    @staticmethod
    def reader(place: Place, key: tuple[str, ...]) -> Reader:
        """Opens the file for each call, so that it is free in between."""
        _named(place)
        return FileReader(place, key)


_: type[StoreKind] = DuckDB  # for mypy


def _named(place: Place) -> None:
    named(place)
    if "?" in place.path:
        raise BadJob(f"{place.shown}: {place.path} has a ? in it, with which DuckDB loses its log: give another path")


class File:
    """What DuckDB does otherwise than other databases."""

    folds: ClassVar[str] = "DuckDB"

    def __init__(self, place: Place) -> None:
        self._place = place
        schema, _, self._table = place.name.rpartition(".")
        self._schema = schema or "main"
        self._gate = Gate(place.path, place.shown, PATIENCE)
        self._held: Any = None
        self._known: dict[str, dict[str, str]] = {}  # of tables that were looked at, the columns
        self._spelled = False
        self._since = 0.0

    @contextlib.contextmanager
    def session(self, *, write: bool) -> Iterator[Session]:
        """To look makes no file."""
        duckdb = imported("duckdb")
        if not write and not os.path.exists(self._place.path):
            yield Nothing()
            return
        if self._held is not None and time.monotonic() - self._since > HOLD:
            self.close()
            time.sleep(BREATH)
        if self._held is None:
            self._gate.hold()
            try:
                self._held, self._since = connected(self._place, read_only=False), time.monotonic()
            except BaseException:
                self._gate.release()
                raise
            self._spelled = False
        try:
            self._held.begin()
            if not self._spelled:
                self._schema, self._table = spelled(self._held, self._schema, self._table)
                self._spelled = True
            if write and self._schema != "main":
                self._held.execute(f"CREATE SCHEMA IF NOT EXISTS {quoted(self._schema)}")
            yield Transaction(self._held, self._schema, self._place.shown, self._known)
            self._held.commit()
        except BaseException as e:
            self.close()  # which rolls back
            if isinstance(e, duckdb.Error):
                told = f"{self._place.shown}: DuckDB says: {self._place.words(e)}"
                _refuse_damaged(self._place, e)
                lasting = isinstance(e, (duckdb.DataError, duckdb.IntegrityError))  # of values that it refuses
                raise (BadJob(told) if lasting else StoreUnavailable(told)) from e
            raise

    def alone(self, session: Session, *, ours: bool = False) -> None:
        """A file has one writer at a time."""

    def table(self, name: str) -> str:
        return f"{quoted(self._schema)}.{quoted(name)}"

    def target(self) -> str:
        return self.table(self._table)

    def which(self, session: Session) -> Which:
        return _which(session, self._schema, self._table)

    def keep(self, session: Session, load: Load) -> None:
        """A file has one writer at a time."""

    def named(self, session: Session, name: str) -> str:
        schema, _, table = name.rpartition(".")
        return ".".join(map(quoted, spelled(self._held, schema or "main", table)))

    def create(self, session: Session, table: str, columns: Mapping[str, str]) -> None:
        session.run(f"CREATE TABLE {table} ({defined(columns)})")
        session.run(f"COMMENT ON TABLE {table} IS '{witness()}'")

    def kind(self, field: pa.Field) -> str:
        return column_type(field.type, f"{self._place.shown}: column {field.name!r}")

    def holds(self, field: pa.Field, kind: str) -> bool:
        return holds(self._held, kind, field.type, f"{self._place.shown}: column {field.name!r}")

    def drops(self, session: Session, load: Load, column: str) -> bool:
        """None can, of a table with indices or constraints: none but those that are built anew may be there."""
        where, at = "schema_name = ? AND table_name = ?", (self._schema, self._table)
        own = "column_name = ? AND (column_default IS NOT NULL OR comment IS NOT NULL)"
        return not (
            self._indices(session) - self._asked(session, load).items()
            or session.run(f"SELECT 1 FROM duckdb_constraints() WHERE {where} LIMIT 1", *at)
            or session.run(f"SELECT 1 FROM duckdb_columns() WHERE {where} AND {own} LIMIT 1", *at, column)
        )

    def freed(self, session: Session, load: Load, columns: Collection[str]) -> None:
        """All of them: to what is to be altered in its own transaction, an index that goes is still there."""
        for name, _ in self._indices(session):
            session.run(f"DROP INDEX {self.table(name)}")

    def still(self, session: Session) -> None:
        """A file has one writer at a time."""

    def typed(self, kind: str) -> bool:
        return True

    def binary(self, kind: str) -> str:
        return " COLLATE C" if kind == "VARCHAR" else ""

    def generated(self, session: Session) -> Collection[str]:
        """By the table's SQL, as earlier versions of DuckDB do not tell it otherwise."""
        own = self._defined(session).get(self._table, "")
        if "GENERATED ALWAYS" not in own:
            return ()
        columns = session.columns(self.target()).items()
        return [name for name, kind in columns if re.search(_as_generated(name, kind), own)]

    def meddles(self, session: Session, load: Load) -> bool:
        """DuckDB has no triggers, and its constraints refuse."""
        return False

    def brief(self, session: Session) -> None:
        """One process at a time has the file, and what it waits for is bounded."""

    def settled(self, session: Session) -> None:
        """Nothing is put off."""

    def fits(self, session: Session, load: Load) -> None:
        """A view takes no rows; other tables may refer to this one."""
        sql = "SELECT view_name FROM duckdb_views() WHERE database_name = current_database() AND schema_name = ?"
        if any(folded(name) == folded(self._table) for (name,) in session.run(sql, self._schema)):
            refuse_view(self._place.shown)
        if load.mode != "append" and session.columns(self.target()):
            self._referring(session, load)

    def staging(self, session: Session, load: Load, columns: Mapping[str, str]) -> None:
        self.create(session, self.table(load.stage), columns)

    def ready(self, session: Session, load: Load) -> None:
        """Nothing: a table with indices cannot be renamed."""

    def matching(self, session: Session, load: Load) -> None:
        """Nothing: it joins by hashes of the key."""

    def switch(self, session: Session, load: Load) -> bool:
        """Rename the staging table; where indices or constraints hang on the target, or it has other columns by now,
        its rows are replaced; where others refer to them by key, so that only rows that go are deleted.
        """
        stage, target = self.table(load.stage), self.target()
        found = self._referring(session, load) if session.columns(target) else []
        if not session.columns(target):
            session.run(f"ALTER TABLE {stage} RENAME TO {quoted(self._table)}")
        elif found:
            references.refuse_referenced(session, self, found, load, self._place.shown)
            extended(session, target, stage, load.schema.names)
            merged(session, self, stage, load, self._place.shown, delete=True)
            session.run(f"DROP TABLE {stage}")
        elif self._bound(session, load) or not as_staged(session, target, stage, load.schema.names):
            moved(session, self, stage, load, self._place.shown)
        else:
            session.run(f"DROP TABLE {target}")
            session.run(f"ALTER TABLE {stage} RENAME TO {quoted(self._table)}")
        self.indexed(session, load)
        return bool(found)

    def _referring(self, session: Session, load: Load) -> list[references.Reference]:
        """The foreign keys of other tables that refer to the target. Raises BadJob if its rows cannot be updated by the
        key that they refer to.
        """
        rows = session.run(
            "SELECT constraint_name, table_name, referenced_column_names, constraint_column_names FROM "
            "duckdb_constraints() WHERE constraint_type = 'FOREIGN KEY' AND schema_name = ? AND referenced_table = ?",
            *(self._schema, self._table),
        )
        found = [
            references.Reference(name, self.table(table), table == self._table, tuple(here), tuple(there), "r")
            for name, table, here, there in rows
        ]
        if all(reference.own for reference in found):
            return []
        if load.mode == "replace":
            references.refuse_unkeyed(found, load, self._place.shown)
        columns, fixed = session.columns(self.target()), self._indexed(session).union(load.index)
        for name in load.schema.names:
            kind = columns.get(name, "")
            if name not in load.key and ("]" in kind or "MAP(" in kind or name in fixed):
                raise BadJob(
                    f"{self._place.shown}: {found[0]}, and DuckDB does not update column {name!r} ({kind}) in such a "
                    "table, as it has an index or lists: leave it out of the result (drop=), or deliver to another one"
                )
        return found

    def _indexed(self, session: Session) -> set[str]:
        """The columns of the target that have an index or are unique. Trap: there, and in columns of lists, DuckDB
        updates a value by taking its row out and putting it back, for which a foreign key does not let it.
        """
        where, at = "schema_name = ? AND table_name = ?", (self._schema, self._table)
        unique = f"SELECT unnest(constraint_column_names) FROM duckdb_constraints() WHERE {where} AND constraint_type"
        rows = session.run(f"{unique} IN ('UNIQUE', 'PRIMARY KEY')", *at)
        texts = session.run(f"SELECT expressions FROM duckdb_indexes() WHERE {where}", *at)
        named = " ".join(row[0] for row in texts)
        return {row[0] for row in rows}.union(
            n for n in session.columns(self.target()) if n in re.findall(r"\w+", named)
        )

    def _bound(self, session: Session, load: Load) -> bool:
        """Whether the target has indices, constraints, defaults, collations, comments or the like, which a rename would
        lose.
        """
        defined = self._defined(session)
        before, _, staged = defined[load.stage].partition(load.stage)
        own = defined[self._table].removeprefix(before)
        own = own.removeprefix(quoted(self._table) if own.startswith('"') else self._table)
        if not staged.startswith((own, f"{own.removesuffix(');')}, ")):
            return True
        where, of_column = "schema_name = ? AND table_name = ?", "(column_default IS NOT NULL OR comment IS NOT NULL)"
        at = (self._schema, self._table)
        return bool(
            session.run(f"SELECT 1 FROM duckdb_indexes() WHERE {where} LIMIT 1", *at)
            or session.run(f"SELECT 1 FROM duckdb_constraints() WHERE {where} LIMIT 1", *at)
            or session.run(f"SELECT 1 FROM duckdb_columns() WHERE {where} AND {of_column} LIMIT 1", *at)
            or session.run(f"SELECT 1 FROM duckdb_tables() WHERE {where} AND {_COMMENT} LIMIT 1", *at)
        )  # fmt: skip

    def _defined(self, session: Session) -> dict[str, str]:
        """The SQL of the tables beside the target, by name."""
        sql = "SELECT table_name, sql FROM duckdb_tables() WHERE database_name = current_database() AND schema_name = ?"
        return dict(session.run(sql, self._schema))

    def indexed(self, session: Session, load: Load) -> None:
        for name, column in self._asked(session, load).items():
            session.run(f"CREATE INDEX IF NOT EXISTS {quoted(name)} ON {self.target()} ({quoted(column)})")

    def _asked(self, session: Session, load: Load) -> dict[str, str]:
        """The indices that are asked for: columns by names, which are those of a schema."""
        sql = "SELECT index_name, table_name FROM duckdb_indexes() WHERE database_name = current_database() AND"
        of = {folded(name): table for name, table in session.run(f"{sql} schema_name = ?", self._schema)}
        names = {column: f"{self._table}_{column}" for column in load.index}
        return {
            told_apart(n, self._table, (c,)) if of.get(folded(n), self._table) != self._table else n: c
            for c, n in names.items()
        }

    def _indices(self, session: Session) -> set[tuple[str, str]]:
        """The names of the target's indices, each with its column; with none, if it is more than an index of one."""
        sql = "SELECT index_name, is_unique, expressions FROM duckdb_indexes() WHERE schema_name = ? AND table_name = ?"
        rows = session.run(f"{sql} AND database_name = current_database()", self._schema, self._table)
        columns = {text: name for name in session.columns(self.target()) for text in _as_expressions(name)}
        return {(name, "" if unique else columns.get(told, "")) for name, unique, told in rows}

    def close(self) -> None:
        held, self._held = self._held, None
        self._known.clear()
        if held is not None:
            held.close()
        self._gate.release()


def _which(session: Session, schema: str, table: str) -> Which:
    """By the witness that is its comment: a table's number is another one whenever the file is opened."""
    sql = "SELECT schema_name, table_name, comment FROM duckdb_tables() WHERE database_name = current_database() AND"
    rows = session.run(f"{sql} regexp_full_match(comment, '{_WITNESS}')")
    there = [(name if of == schema else f"{of}.{name}", comment) for of, name, comment in rows]
    return witnessed(table, there, f"{quoted(schema)}.{quoted(MARKS)}")


def _as_expressions(column: str) -> list[str]:
    """What DuckDB may tell of an index of one column: it quotes the names that are words of its own."""
    plainly = [f"[{column}]"] if re.fullmatch(r"[A-Za-z_]\w*", column, re.ASCII) else []
    return [*plainly, "['" + quoted(column).replace("'", "\\'") + "']"]


class Transaction:
    """Statements of one transaction. `known` are columns of tables, for as long as nobody else can change them: to ask
    the catalog takes milliseconds.
    """

    def __init__(
        self, connection: Any, schema: str, shown: str, known: dict[str, dict[str, str]] | None = None
    ) -> None:
        self._connection = connection
        self._schema = schema
        self._shown = shown
        self._known = {} if known is None else known

    def run(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        if not sql.startswith(_ROWS):
            for table in [t for t in self._known if t[t.index('"."') + 2 :] in sql]:
                del self._known[table]
        rows: list[tuple[Any, ...]] = self._connection.execute(sql, values).fetchall()
        return rows

    def changed(self, sql: str) -> int:
        return int(self.run(sql)[0][0])

    def insert(self, table: str, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> int:
        rows = regrouped(without_repeats(batches, self._shown, "which DuckDB does not take"), *GROUP)
        with given(self._connection, **{ROWS: (schema, rows)}):
            done = self._connection.execute(f"INSERT INTO {table} BY NAME SELECT * FROM {ROWS}").fetchall()
        self._connection.unregister(ROWS)  # it would fail after an error, which closes the connection anyway
        return int(done[0][0])

    def columns(self, table: str) -> dict[str, str]:
        if table not in self._known:
            self._known[table] = self._columns(table)
        return dict(self._known[table])

    def _columns(self, table: str) -> dict[str, str]:
        """They are described: `duckdb_columns()` takes longer, as it looks into every view of DuckDB's own."""
        at = [part.replace('""', '"') for part in table[1:-1].split('"."')]
        of = "database_name = current_database() AND schema_name = ?"
        tables = f"SELECT 1 FROM duckdb_tables() WHERE {of} AND table_name = ?"
        views = f"SELECT 1 FROM duckdb_views() WHERE {of} AND view_name = ?"
        if not self.run(f"{tables} UNION ALL {views}", *at, *at):
            return {}
        return {row[0]: row[1] for row in self.run(f"DESCRIBE {table}")}

    def tables(self, prefix: str) -> list[str]:
        sql = "SELECT table_name FROM duckdb_tables() WHERE schema_name = ? AND starts_with(table_name, ?)"
        return [f"{quoted(self._schema)}.{quoted(row[0])}" for row in self.run(sql, self._schema, prefix)]


def spelled(connection: Any, schema: str, table: str) -> tuple[str, str]:
    """A schema's and a table's name as the database has them; those that are not there as given."""
    schemas = "SELECT schema_name FROM duckdb_schemas() WHERE database_name = current_database()"
    tables = "SELECT table_name FROM duckdb_tables() WHERE database_name = current_database() AND schema_name = ?"
    schema = _same(schema, connection.execute(schemas).fetchall())
    return schema, _same(table, connection.execute(tables, [schema]).fetchall())


def _same(name: str, there: Sequence[tuple[str]]) -> str:
    return next((found for (found,) in there if folded(found) == folded(name)), name)


def connected(place: Place, *, read_only: bool) -> Any:
    """A connection, as soon as no other process has the file. Raises StoreBusy after PATIENCE."""
    duckdb, path, patience, wait = imported("duckdb"), place.path, Patience(PATIENCE), 0.002
    while True:
        try:
            return tamed(duckdb.connect(path, read_only=read_only, config=dict(place.options)))
        except (duckdb.IOException, duckdb.ConnectionException, duckdb.BinderException) as e:
            held = any(text in str(e).lower() for text in ("lock", "conflict", "different configuration"))
            if (told := of_sqlite(str(e), place.shown)) is not None:
                raise BadJob(told) from e
            if not held or patience.over():
                _refuse_damaged(place, e)
                told = f"{place.shown}: cannot be opened: {place.words(e)}"
                raise (StoreBusy(f"{told}: close it there, and run again") if held else StoreUnavailable(told)) from e
            time.sleep(wait)
            wait = min(0.1, wait * 2)
        except duckdb.Error as e:
            _refuse_damaged(place, e)
            raise StoreUnavailable(f"{place.shown}: cannot be opened: {place.words(e)}") from e


def _refuse_damaged(place: Place, error: Exception) -> None:
    """Raises BadJob for what DuckDB says of a file that lacks a part, or is none of its own."""
    strange = _NO_FILE in str(error)
    if strange or any(words in str(error) for words in _DAMAGED):
        raise damaged(place.shown, f"DuckDB says: {place.words(error)}", strange=strange, what=WITH_TABLES) from error


def _as_generated(name: str, kind: str) -> str:
    """How a column that is an expression of others stands in a table's SQL, as a pattern."""
    named = f"(?:{re.escape(name)}|{re.escape(quoted(name))})"
    return rf"[(,] ?{named} {re.escape(kind)}(?: COLLATE \w+)? GENERATED ALWAYS AS"


class FileReader:
    """Looks rows up in a table of a file."""

    def __init__(self, place: Place, key: tuple[str, ...]) -> None:
        self._place = place
        self._key = key
        schema, _, self._table = place.name.rpartition(".")
        self._schema = schema or "main"
        self._gate = Gate(place.path, place.shown, PATIENCE)

    @contextlib.contextmanager
    def _table_there(self) -> Iterator[tuple[Any, str, Mark | None]]:
        """A connection in a transaction, the table in SQL, and its mark."""
        duckdb, place = imported("duckdb"), self._place
        if not os.path.exists(place.path):
            raise BadSource(f"{place.shown}: there is no such file: deliver a result there first")
        self._gate.through()
        with connected(place, read_only=True) as connection:
            try:
                connection.begin()
                schema, name = spelled(connection, self._schema, self._table)
                table, transaction = f"{quoted(schema)}.{quoted(name)}", Transaction(connection, schema, place.shown)
                if not transaction.columns(table):
                    raise BadSource(f"{place.shown}: has no such table: deliver a result there first")
                yield connection, table, last_mark(transaction, _which(transaction, schema, name), place.shown)
            except duckdb.Error as e:
                _refuse_damaged(place, e)
                raise StoreUnavailable(f"{place.shown}: DuckDB says: {place.words(e)}") from e

    def find(self, keys: Sequence[Key]) -> tuple[Mark | None, list[dict[str, Any] | None]]:
        with self._table_there() as (connection, table, mark):
            rows = connection.table(table)
            types = {f.name: f.type for f in rows.limit(0).to_arrow_table().schema}
            wanted = keyed(self._place.shown, self._key or (mark.key if mark else ()), types)
            declared = dict(zip(rows.columns, map(str, rows.types), strict=True))
            if strange := next((n for n in wanted if declared[n] in _STRANGE), None):
                raise BadJob(
                    f"{self._place.shown}: column {strange!r} is {declared[strange]}: rows are not found by such values"
                )
            if own := [n for n in wanted if declared[n] == "UUID"]:
                keys = retold(keys, list(wanted), dict.fromkeys(own, uuid_text))
            asked_for = asked(keys, wanted, self._place.shown, mark)
            connection.register(ROWS, asked_for)
            same = " AND ".join(f"t.{quoted(n)} = a.{quoted(n)}" for n in wanted)
            found = connection.sql(f"SELECT t.* FROM {table} AS t SEMI JOIN {ROWS} AS a ON {same}").to_arrow_table()
            connection.unregister(ROWS)
        return mark, restored(found, asked_for, mark, self._place.shown)

    def nearest(self, search: Search) -> Near:
        """Every vector is read."""
        with self._table_there() as (connection, table, mark):
            rows = batches_of(connection.sql(f"SELECT * FROM {table}"), SCANNED)
            schema = decode_schema(mark.held) if mark is not None else rows.schema
            column = searched(columns_in(schema), search, self._place.shown)
            near = nearest_of_all((_as_delivered(batch, mark) for batch in rows), column, search, self._place.shown)
        return dataclasses.replace(near, mark=mark)

    def close(self) -> None:
        """Nothing is held open."""


def _as_delivered(batch: pa.RecordBatch, mark: Mark | None) -> pa.RecordBatch:
    table = pa.Table.from_batches([batch])
    made = table if mark is None else delivered(table, mark)
    return made.combine_chunks().to_batches()[0] if made.num_rows else batch
