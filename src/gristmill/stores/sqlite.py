"""SQLite files. SQLite has four types, so some values are text: times in ISO 8601, decimals, and nested values as JSON;
vectors of float32 are their bytes, as extensions for vectors expect them. `gm.lookup` gives all of them back as they
were.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import re
import sqlite3
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import pyarrow as pa

from gristmill.arrow.schemas import storage
from gristmill.arrow.topython import to_plain
from gristmill.commit.generation import decode_schema
from gristmill.errors import BadJob, BadSource
from gristmill.files.disk import which_file
from gristmill.files.sqlitelog import at_once, patient
from gristmill.job.uris import in_uri
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
    refuse_ours,
)
from gristmill.stores.keys import number_text, retold
from gristmill.stores.lookup import SCANNED, asked, keyed, refused_as, repeated, widest
from gristmill.stores.refused import AS_TEXT, refuse_far, refuse_hollow, refuse_nan
from gristmill.stores.sql import (
    MARKS,
    PARTS,
    WITH_TABLES,
    Nothing,
    Session,
    Which,
    as_staged,
    defined,
    folded,
    moved,
    not_sqlite,
    quoted,
    refuse_view,
    told_apart,
    told_by,
    witness,
)
from gristmill.stores.sqlitetypes import affinity, as_values, is_vector, key_type, restored, sql_type
from gristmill.stores.tablemarks import last_mark
from gristmill.stores.tables import Tables
from gristmill.stores.vectors import columns_in, nearest_of_all, searched
from gristmill.values import dataclass

PATIENCE = 20.0  # seconds to wait for a lock of another connection
PAGE = 16_384  # bytes of a page in files that we make: a vector fits in one, and there are fewer to write
CACHE = 64 << 20  # bytes of pages that a writer keeps: with SQLite's own 2 MB, 600,000 rows by key take twice the time
APPLICATION = 0x67_72_69_73  # what such a file says of who made it
BINARY = " COLLATE BINARY"  # values are compared as they are
OURS = "gm_"  # what the names of our indices begin with
_NAME = "name = ? COLLATE NOCASE"
_NAMED = f"type IN ('table', 'view') AND {_NAME}"
_LOCKED = "is locked"  # how what SQLITE_BUSY and SQLITE_LOCKED say ends, before what is told of a table
_MALFORMED, _STRANGE = "database disk image is malformed", "file is not a database"
_WITNESS = re.compile(r"\(/\* (gristmill [0-9a-f]+) \*/ ")  # where the columns begin, which no ALTER TABLE touches
_GENERATED = (2, 3)  # what `table_xinfo` says of such columns: virtual, stored


class SQLite:
    """`sqlite:///FILE#table`, or `sqlite://FILE#table` for a path relative to the current folder."""

    name: ClassVar[str] = "sqlite"
    modes: ClassVar[tuple[Mode, ...]] = ("replace", "append", "upsert")
    keyed: ClassVar[bool] = False
    embedded: ClassVar[bool] = True
    in_address: ClassVar[tuple[str, ...] | None] = ()
    in_options: ClassVar[tuple[str, ...] | None] = ()

    @staticmethod
    def open(place: Place) -> Store:
        """The table; its file is made when the first rows are staged. Once there are rows to read it has a write-ahead
        log, so that readers never wait.
        """
        _named(place)
        folder = os.path.dirname(place.path)
        if not os.path.isdir(folder):
            raise BadJob(f"{place.shown}: there is no folder {folder}: make it, or give another path")
        return Tables(place, File(place))

    @staticmethod
    def reader(place: Place, key: tuple[str, ...]) -> Reader:
        """A connection for each thread, kept open."""
        _named(place)
        return FileReader(place, key)


_: type[StoreKind] = SQLite  # for mypy


def _named(place: Place) -> None:
    if not place.name:
        raise BadJob(f"{place.shown}: name a table: {place.shown}#scores")
    refuse_ours(place, place.name, f"({MARKS}|{PARTS})$")


class File:
    """What SQLite does otherwise than other databases."""

    folds: ClassVar[str] = "SQLite"

    def __init__(self, place: Place) -> None:
        self._place = place
        self._connection: sqlite3.Connection | None = None
        self._inode: tuple[int, int] | None = None  # of the file that it has open

    @contextlib.contextmanager
    def session(self, *, write: bool) -> Iterator[Session]:
        """To look makes no file."""
        if not write and not os.path.exists(self._place.path):
            yield Nothing()
            return
        try:
            if self._connection is not None and self._inode != which_file(self._place.path):
                self.close()  # the file was replaced: what is written into it would be seen by nobody
            if self._connection is None:
                self._connection, self._inode = _opened(self._place, write=True)
            self._connection.execute("BEGIN IMMEDIATE" if write else "BEGIN")
            yield Transaction(self._connection, self._place)
            self._connection.execute("COMMIT")
        except BaseException as e:
            self.close()  # which rolls back
            if isinstance(e, sqlite3.Error):
                raise _told(self._place, e) from e
            raise

    def alone(self, session: Session, *, ours: bool = False) -> None:
        """A file has one writer at a time."""

    def table(self, name: str) -> str:
        return quoted(name)

    def target(self) -> str:
        return quoted(self._place.name)

    def which(self, session: Session) -> Which:
        return _which(session, self._place.name)

    def keep(self, session: Session, load: Load) -> None:
        """A file has one writer at a time."""

    def named(self, session: Session, name: str) -> str:
        return quoted(name)

    def create(self, session: Session, table: str, columns: Mapping[str, str]) -> None:
        session.run(f"CREATE TABLE {table} (/* {witness()} */ {defined(columns)})")

    def kind(self, field: pa.Field) -> str:
        return sql_type(field.type, f"{self._place.shown}: column {field.name!r}")

    def holds(self, field: pa.Field, kind: str) -> bool:
        """By the affinity that SQLite gives to the words of a type: it decides how values are changed."""
        own, there = self.kind(field), affinity(kind)
        if own == "REAL":
            return there == "REAL"
        if own == "INTEGER":
            exact = pa.types.is_boolean(field.type) or (pa.types.is_integer(field.type) and field.type.bit_width <= 32)
            return there in ("INTEGER", "NUMERIC") or (there == "REAL" and exact)
        return there in (own, "BLOB")

    def drops(self, session: Session, load: Load, column: str) -> bool:
        """Indices of others are told by `_bound`."""
        return sqlite3.sqlite_version_info >= (3, 35) and not self._bound(session)

    def freed(self, session: Session, load: Load, columns: Collection[str]) -> None:
        for name, indexed in self._indices_of(session, self._place.name).items():
            if not set(indexed).isdisjoint(columns):
                session.run(f"DROP INDEX {quoted(name)}")

    def still(self, session: Session) -> None:
        """A file has one writer at a time."""

    def typed(self, kind: str) -> bool:
        return False  # any value may be in any column

    def binary(self, kind: str) -> str:
        return BINARY

    def generated(self, session: Session) -> Collection[str]:
        rows = session.run(f"PRAGMA table_xinfo({self.target()})")
        return [row[1] for row in rows if row[6] in _GENERATED]

    def meddles(self, session: Session, load: Load) -> bool:
        own = session.run(f"SELECT sql FROM sqlite_master WHERE {_NAMED}", self._place.name)
        return bool(self._triggers(session)) or any("CONFLICT" in sql.upper() for (sql,) in own)

    def brief(self, session: Session) -> None:
        """Every statement has the same patience, and readers do not wait."""

    def settled(self, session: Session) -> None:
        """Nothing is put off, as foreign keys are not enforced."""

    def _triggers(self, session: Session) -> list[tuple[Any, ...]]:
        """The target's triggers: name and SQL."""
        sql = "SELECT name, sql FROM sqlite_master WHERE type = 'trigger' AND tbl_name = ? COLLATE NOCASE"
        return session.run(f"{sql} ORDER BY rowid", self._place.name)

    def fits(self, session: Session, load: Load) -> None:
        """Whoever may write the file may write the table, and foreign keys are not enforced. A view takes rows by its
        triggers alone, and a STRICT table what its columns are.
        """
        kinds = session.run(f"SELECT 1 FROM sqlite_master WHERE type = 'view' AND {_NAME}", self._place.name)
        if kinds and (load.mode != "append" or load.key or load.index or not self._triggers(session)):
            refuse_view(self._place.shown)
        if self._strict(session):
            for field in (f for f in load.schema if not pa.types.is_null(f.type)):
                there = session.columns(self.target()).get(field.name, "")
                if there.upper() == "BLOB" and (own := self.kind(field)) != "BLOB":
                    raise BadJob(
                        f"{self._place.shown}: column {field.name!r} is BLOB in a STRICT table, which takes none of "
                        f"the result's {field.type}: make the column {own} there, or cast the values in a step"
                    )

    def _strict(self, session: Session) -> bool:
        """Whether the target's columns take values of their types alone."""
        sql = "SELECT 1 FROM pragma_table_list WHERE schema = 'main' AND name = ? COLLATE NOCASE AND strict"
        return sqlite3.sqlite_version_info >= (3, 37) and bool(session.run(sql, self._place.name))

    def staging(self, session: Session, load: Load, columns: Mapping[str, str]) -> None:
        self.create(session, self.table(load.stage), columns)

    def ready(self, session: Session, load: Load) -> None:
        """Indices are on the staging table when it takes the target's place."""
        self._indices(session, load, load.stage, load.stage)

    def matching(self, session: Session, load: Load) -> None:
        """The table that is looked through has an index of the key: SQLite makes none by itself for NOT EXISTS."""
        if load.delete or self.meddles(session, load):  # then rows of others are counted
            self._indices(session, load, load.stage, load.stage)
        if session.columns(self.target()):
            self.indexed(session, load)

    def switch(self, session: Session, load: Load) -> bool:
        """Rename the staging table; where indices, constraints or triggers of others hang on the target, or it has
        other columns by now, its rows are replaced.
        """
        stage, target = self.table(load.stage), self.target()
        there = session.columns(target)
        if there and (self._bound(session) or not as_staged(session, target, stage, load.schema.names)):
            triggers = self._triggers(session)  # what they do when rows go is not done: the rows do not go
            emptied = [f"DROP TRIGGER {quoted(name)}" for name, _ in triggers]
            emptied += [f"DELETE FROM {target}", *(sql for _, sql in triggers)]
            moved(session, self, stage, load, self._place.shown, emptied=emptied)
        else:
            session.run(f"DROP TABLE IF EXISTS {target}")
            session.run(f"ALTER TABLE {stage} RENAME TO {target}")
        self.indexed(session, load)
        return False  # foreign keys are not enforced

    def _bound(self, session: Session) -> bool:
        """Whether the target has more than columns, and than indices of ours."""
        own = session.run(f"SELECT sql FROM sqlite_master WHERE {_NAMED}", self._place.name)[0][0]
        if _WITNESS.sub("(", own, count=1).partition("(")[2] != f"{defined(session.columns(self.target()))})":
            return True
        named = "tbl_name = ? COLLATE NOCASE AND type IN ('index', 'trigger')"
        sql = f"SELECT 1 FROM sqlite_master WHERE {named} AND name NOT GLOB ?"
        return bool(session.run(sql, self._place.name, f"{OURS}*"))

    def indexed(self, session: Session, load: Load) -> None:
        self._indices(session, load, self._place.name, f"{OURS}{self._place.name}")

    def _indices(self, session: Session, load: Load, table: str, prefix: str) -> None:
        """One for the key, by which rows are looked up and upserted, and those asked for, unless there are such."""
        for columns in ([load.key] if load.key else []) + [(column,) for column in load.index]:
            if columns not in self._indices_of(session, table).values():
                name, listed = f"{prefix}_{'_'.join(columns)}", ", ".join(map(quoted, columns))
                name = _free(session, name, table, columns)
                session.run(f"CREATE INDEX {quoted(name)} ON {quoted(table)} ({listed})")

    def _indices_of(self, session: Session, table: str) -> dict[str, tuple[str, ...]]:
        """The columns of a table's indices by their names."""
        names = [row[1] for row in session.run(f"PRAGMA index_list({quoted(table)})")]
        return {n: tuple(row[2] for row in session.run(f"PRAGMA index_info({quoted(n)})")) for n in names}

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.closing(connection):
                _logged(connection)


def _which(session: Session, name: str, known: tuple[str, Sequence[str]] | None = None) -> Which:
    """By the witness in its SQL: a root page is used again, and VACUUM gives others. `known` was told before."""

    def having(told: str) -> Sequence[str]:
        return [folded(table) for table in _with_witness(session, told.split(maxsplit=1)[0])]

    def elsewhere(told: str) -> bool:
        has = having(told)
        return bool(has) and folded(name) not in has  # a copy of the target has its witness, too

    now, others = known or _witness_of(session, name)
    return Which(folded(name), now, quoted(MARKS), elsewhere, others=others, having=having)


def _witness_of(session: Session, name: str) -> tuple[str, Sequence[str]]:
    """What tells the table of a name, and the names of copies to which somebody has given that as well."""
    own = session.run(f"SELECT sql FROM sqlite_master WHERE type = 'table' AND {_NAME}", name)
    found = _WITNESS.search(own[0][0]) if own else None
    if not found:
        return "", ()
    word = found[1].split()[1]
    others = [table for table in map(folded, _with_witness(session, word)) if table != folded(name)]
    return told_by(word, shared=bool(others)), others


def _with_witness(session: Session, word: str) -> list[str]:
    """The tables with a witness: a file may have thousands of others, whose SQL stays where it is."""
    sql = "SELECT name, sql FROM sqlite_master WHERE type = 'table' AND instr(sql, ?)"
    each = ((table, _WITNESS.search(text)) for table, text in session.run(sql, f"(/* gristmill {word} */ "))
    return [table for table, found in each if found and found[1].split()[1] == word]


def _free(session: Session, name: str, table: str, columns: Sequence[str]) -> str:
    """A name for an index that nothing has: one goes with its table, which somebody may rename to keep it."""
    other = told_apart(name, table, columns)
    names = itertools.chain([name, other], (f"{other}_{n}" for n in itertools.count(1)))
    return next(one for one in names if not session.run(f"SELECT 1 FROM sqlite_master WHERE {_NAME}", one))


class Transaction:
    """Statements of one transaction."""

    def __init__(self, connection: sqlite3.Connection, place: Place) -> None:
        self._connection = connection
        self._place = place

    def run(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        return self._connection.execute(sql, values).fetchall()

    def changed(self, sql: str) -> int:
        return self._connection.execute(sql).rowcount

    def many(self, sql: str, at_once: int) -> Iterator[list[tuple[Any, ...]]]:
        """The rows of a query, some at a time."""
        cursor = self._connection.execute(sql)
        while rows := cursor.fetchmany(at_once):
            yield rows

    def insert(self, table: str, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> int:
        names, marks = ", ".join(map(quoted, schema.names)), ", ".join("?" * len(schema.names))
        sql, rows = f"INSERT INTO {table} ({names}) VALUES ({marks})", 0
        for batch in batches:
            refuse_nan(batch, self._place.shown, "which SQLite stores as null")
            refuse_far(batch, self._place.shown, AS_TEXT)
            for vectors in (f.name for f in schema if is_vector(storage(f.type))):
                refuse_hollow(batch, vectors, self._place.shown)
            columns = [as_values(batch.column(i)) for i in range(len(schema))]
            self._connection.executemany(sql, zip(*columns, strict=True))
            rows += batch.num_rows
        return rows

    def columns(self, table: str) -> dict[str, str]:
        return {row[1]: row[2] for row in self.run(f"PRAGMA table_info({table})")}

    def tables(self, prefix: str) -> list[str]:
        sql = "SELECT name FROM sqlite_master WHERE type = 'table' AND name GLOB ?"
        return [quoted(row[0]) for row in self.run(sql, f"{prefix}*")]


def _connected(place: Place, *, write: bool) -> sqlite3.Connection:
    new = not os.path.exists(place.path)
    mode = "rwc" if write else "ro"
    uri = f"file:{in_uri(place.path)}?mode={mode}"
    connection = patient(uri, PATIENCE)
    if write:
        if new:
            connection.execute(f"PRAGMA page_size = {PAGE}")
            connection.execute(f"PRAGMA application_id = {APPLICATION}")
        else:
            _logged(connection)
        connection.execute(f"PRAGMA cache_size = -{CACHE >> 10}")
        connection.execute("PRAGMA legacy_alter_table = ON")  # views mean a table by its name, whatever is renamed
    return connection


def _opened(place: Place, *, write: bool) -> tuple[sqlite3.Connection, tuple[int, int] | None]:
    """A connection, and which file it has open."""
    while True:
        before, connection = which_file(place.path), _connected(place, write=write)
        if (found := which_file(place.path)) == before or (before is None and write):
            return connection, found
        connection.close()  # another file got the name meanwhile, and which of them this is nobody tells


def _told(place: Place, error: sqlite3.Error) -> BadJob | StoreUnavailable:
    """What is raised for an error of SQLite."""
    told = f"{place.shown}: SQLite says: {place.words(error)}"
    strange = _STRANGE in str(error)
    if strange or _MALFORMED in str(error):
        why = f"SQLite says: {place.words(error)}{not_sqlite(str(error), place.shown)}"
        return damaged(place.shown, why, strange=strange, what=WITH_TABLES)
    if isinstance(error, (sqlite3.IntegrityError, sqlite3.DataError)):  # of values that it refuses
        return BadJob(told)
    return (
        StoreBusy(told)
        if isinstance(error, sqlite3.OperationalError) and _LOCKED in str(error)
        else StoreUnavailable(told)
    )


def _logged(connection: sqlite3.Connection) -> None:
    """Give a file that we made a write-ahead log as soon as rows are published in it. Before, nobody waits for them,
    and all would be written twice. Whoever has the file at this moment puts it off to the next delivery.
    """

    def one(sql: str) -> Any:
        return next(iter(connection.execute(sql).fetchone() or ()), None)

    with contextlib.suppress(sqlite3.Error), at_once(connection):  # an error meets the next statement as well
        if connection.in_transaction or one("PRAGMA application_id") != APPLICATION:
            return
        if one("PRAGMA journal_mode") == "delete" and one(f"SELECT 1 FROM {quoted(MARKS)} LIMIT 1"):
            connection.execute("PRAGMA journal_mode = WAL")


@dataclass(frozen=True)
class There:
    """The table that is read: how it is named in SQL, its columns, its mark, and the schema that was delivered."""

    table: str
    names: Sequence[str]
    mark: Mark | None
    schema: pa.Schema
    shown: str

    def kind(self, name: str) -> pa.DataType | None:
        """The type that a column was delivered with; None for one of others."""
        return self.schema.field(name).type if name in self.schema.names else None

    @property
    def floats(self) -> dict[str, pa.DataType]:
        """Columns of floats as they were delivered: all are held as the widest."""
        return {f.name: f.type for f in self.schema if pa.types.is_floating(storage(f.type))}

    def key_type(self, name: str, declared: str) -> pa.DataType:
        """The type by which keys of a column are read."""
        kind = self.kind(name)
        return key_type(declared) if kind is None else widest(kind)

    def columns(self, rows: Sequence[Sequence[Any]]) -> dict[str, Any]:
        """The values of each column, as they were delivered."""
        made = {}
        for at, name in enumerate(self.names):
            kind, values = self.kind(name), [row[at] for row in rows]
            with refused_as(self.shown, name, kind):
                made[name] = values if kind is None else restored(values, kind)
        return made

    def rows(self, found: Sequence[Sequence[Any]]) -> list[dict[str, Any]]:
        """Rows as they were delivered."""
        made = {n: to_plain(c) if isinstance(c, pa.Array) else c for n, c in self.columns(found).items()}
        return [dict(zip(made, values, strict=True)) for values in zip(*made.values(), strict=True)]

    def batches(self, transaction: Transaction) -> Iterator[pa.RecordBatch]:
        """All rows, of the columns that were delivered."""
        for rows in transaction.many(f"SELECT * FROM {self.table}", SCANNED):
            yield pa.RecordBatch.from_pydict({n: c for n, c in self.columns(rows).items() if self.kind(n) is not None})


class FileReader:
    """Looks rows up in a table of a file, through a connection of each thread."""

    def __init__(self, place: Place, key: tuple[str, ...]) -> None:
        self._place = place
        self._key = key
        self._own = threading.local()
        self._all: list[sqlite3.Connection] = []

    def _connection(self) -> sqlite3.Connection:
        """That of this thread, to the file that has the name now."""
        inode = which_file(self._place.path)
        if inode is None:
            raise BadSource(f"{self._place.shown}: there is no such file: deliver a result there first")
        found, of = getattr(self._own, "open", (None, None))
        if found is not None and of != inode:
            with contextlib.suppress(ValueError):  # all are closed
                self._all.remove(found)
            found.close()
            found = None
        if found is None:
            self._own.open = found, _ = _opened(self._place, write=False)
            self._own.told = None, None  # which table has the name: as long as the file's schema is of one version
            self._all.append(found)
        return found

    def find(self, keys: Sequence[Key]) -> tuple[Mark | None, list[dict[str, Any] | None]]:
        with self._snapshot() as transaction:
            there = self._there(transaction)
            return there.mark, self._found(transaction, there, keys)

    def nearest(self, search: Search) -> Near:
        """Every vector is read."""
        with self._snapshot() as transaction:
            there = self._there(transaction)
            column = searched(columns_in(there.schema), search, self._place.shown)
            near = nearest_of_all(there.batches(transaction), column, search, self._place.shown)
        return dataclasses.replace(near, mark=there.mark)

    @contextlib.contextmanager
    def _snapshot(self) -> Iterator[Transaction]:
        try:
            connection = self._connection()
            connection.execute("BEGIN")
            try:
                yield Transaction(connection, self._place)
            finally:
                connection.execute("ROLLBACK")
        except sqlite3.Error as e:
            raise _told(self._place, e) from e

    def _there(self, transaction: Transaction) -> There:
        table = quoted(self._place.name)
        names = list(transaction.columns(table))
        if not names:
            raise BadSource(f"{self._place.shown}: has no such table: deliver a result there first")
        version = transaction.run("PRAGMA schema_version")[0][0]
        if getattr(self._own, "told", (None, None))[0] != version:
            self._own.told = version, _witness_of(transaction, self._place.name)
        mark = last_mark(transaction, _which(transaction, self._place.name, self._own.told[1]), self._place.shown)
        schema = decode_schema(mark.held) if mark is not None else pa.schema([])
        return There(table, names, mark, schema, self._place.shown)

    def _found(self, transaction: Transaction, there: There, keys: Sequence[Key]) -> list[dict[str, Any] | None]:
        declared = transaction.columns(there.table)
        shown, kinds = self._place.shown, {n: there.key_type(n, declared[n]) for n in there.names}
        wanted = keyed(shown, self._key or (there.mark.key if there.mark else ()), kinds)
        own = [n for n in wanted if there.kind(n) is None and affinity(declared[n]) == "NUMERIC"]
        keys = retold(keys, list(wanted), dict.fromkeys(own, number_text)) if own else keys
        asked_for = asked(keys, wanted, shown, texts=there.floats)
        columns = [as_values(asked_for.column(n).combine_chunks()) for n in wanted]
        # By an index of the columns' collations, and as they are.
        same = (f"{quoted(n)} = ?{i} AND {quoted(n)}{BINARY} = ?{i}" for i, n in enumerate(wanted, 1))
        sql = f"SELECT * FROM {there.table} WHERE {' AND '.join(same)} LIMIT 2"
        each = [list(transaction.run(sql, *key)) for key in zip(*columns, strict=True)]
        if (twice := next((place for place, rows in enumerate(each) if len(rows) > 1), None)) is not None:
            raise repeated(shown, list(wanted), [to_plain(column.slice(twice, 1))[0] for column in asked_for.columns])
        found = iter(there.rows([row for rows in each for row in rows]))
        return [next(found) if rows else None for rows in each]

    def close(self) -> None:
        while self._all:
            self._all.pop().close()
        self._own = threading.local()
