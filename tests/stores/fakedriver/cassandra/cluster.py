"""Sessions, in front of a file of SQLite a keyspace, in a temporary folder that all processes share."""

from __future__ import annotations

import re
import sqlite3
import tempfile
import threading
from collections import namedtuple
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from cassandra import AuthenticationFailed, DriverException, InvalidRequest
from cassandra.query import BatchStatement, BoundStatement, PreparedStatement

PASSWORD = "ssh-cassandra"  # the one that is let in, if there is any


def keyspace_file(keyspace: str) -> Path:
    """The file of a keyspace, which is there if it is one."""
    return Path(tempfile.gettempdir(), f"gristmill-fake-cassandra-{keyspace}.sqlite")


class NoHostAvailable(Exception):
    """No server answers."""


class Cluster:
    """`db.test` is there, and no other host."""

    def __init__(self, contact_points: list[str], port: int, auth_provider: Any = None) -> None:
        self._hosts, self._auth = contact_points, auth_provider
        self._session: Session | None = None

    def connect(self, keyspace: str) -> Session:
        if "db.test" not in self._hosts:
            raise NoHostAvailable("Unable to connect to any servers", dict.fromkeys(self._hosts, "refused"))
        if self._auth is not None and self._auth.password != PASSWORD:
            raise AuthenticationFailed(f"Provided username {self._auth.username} and/or password are incorrect")
        if not (file := keyspace_file(keyspace)).exists():
            raise InvalidRequest(f"Keyspace '{keyspace}' does not exist")
        self._session = Session(file)
        return self._session

    def shutdown(self) -> None:
        if self._session is not None:
            self._session.over = True


class Rows(list[Any]):
    """What a statement gives."""

    was_applied = False

    def one(self) -> Any:
        return self[0] if self else None


class Session:
    """Statements are applied one by one, each as a whole."""

    over = False

    def __init__(self, file: Path) -> None:
        self._file, self._lock = file, threading.Lock()

    def prepare(self, cql: str) -> PreparedStatement:
        table = re.search(r"(?:FROM|INTO|UPDATE) (\w+)", cql)
        assert table is not None, cql
        with self._open() as db:
            return PreparedStatement(cql, self._partition(db, table[1], cql))

    def execute(self, statement: Any, values: Sequence[Any] = ()) -> Rows:
        with self._open() as db:
            if isinstance(statement, BatchStatement):
                for each in statement.statements:
                    self._one(db, each.prepared.cql, each.values)
                return Rows()
            if isinstance(statement, BoundStatement):
                return self._one(db, statement.prepared.cql, statement.values)
            return self._one(db, statement, values)

    def _open(self) -> Any:
        if self.over:
            raise DriverException("Session is already shut down")
        return _Transaction(self._file, self._lock)

    def _partition(self, db: sqlite3.Connection, table: str, cql: str) -> tuple[str, ...]:
        """The columns of a table's partition key. A server wants all of them in a condition."""
        found = db.execute("SELECT partition FROM fake_tables WHERE name = ?", [table.lower()]).fetchone()
        if found is None:
            raise InvalidRequest(f"unconfigured table {table}")
        columns = tuple(found[0].split(","))
        condition = cql.partition(" WHERE ")[2]
        if not cql.startswith("INSERT") and not all(re.search(rf"\b{name} = \?", condition) for name in columns):
            raise InvalidRequest("Cannot execute this query as it might involve data filtering: use ALLOW FILTERING")
        return columns

    def _one(self, db: sqlite3.Connection, cql: str, values: Sequence[Any]) -> Rows:
        if cql.startswith("CREATE TABLE IF NOT EXISTS"):
            return self._create(db, cql)
        if "system_schema.tables" in cql:
            found = db.execute("SELECT name FROM fake_tables WHERE name = ?", [values[1]])
            return _rows(found)
        sql, ends = cql, ""
        if found := re.search(r" IF (NOT EXISTS|EXISTS|at = \?)$", cql):
            sql, ends = cql[: found.start()], found[1]
        if sql.startswith("INSERT"):
            sql = sql.replace("INSERT", "INSERT OR IGNORE" if ends == "NOT EXISTS" else "INSERT OR REPLACE", 1)
        if ends.startswith("at"):
            sql += " AND at = ?"
        try:
            done = db.execute(sql, list(values))
        except sqlite3.Error as e:
            raise InvalidRequest(str(e)) from e
        rows = _rows(done)
        rows.was_applied = done.rowcount > 0
        return rows

    def _create(self, db: sqlite3.Connection, cql: str) -> Rows:
        name = re.match(r"CREATE TABLE IF NOT EXISTS (\w+)", cql)
        key = re.search(r"PRIMARY KEY \((?:\((.*?)\)|(\w+))", cql)
        assert name is not None and key is not None, cql
        partition = (key[1] or key[2]).replace(" ", "")
        db.execute(re.sub(r"PRIMARY KEY \(\((.*?)\)", r"PRIMARY KEY (\1", cql))
        db.execute("INSERT OR IGNORE INTO fake_tables VALUES (?, ?)", [name[1].lower(), partition])
        return Rows()


class _Transaction:
    def __init__(self, file: Path, lock: threading.Lock) -> None:
        self._file, self._lock = file, lock

    def __enter__(self) -> sqlite3.Connection:
        self._lock.acquire()
        self._db = sqlite3.connect(self._file, timeout=30, isolation_level=None)
        self._db.execute("PRAGMA synchronous = OFF")
        self._db.execute("BEGIN IMMEDIATE")
        self._db.execute("CREATE TABLE IF NOT EXISTS fake_tables (name TEXT PRIMARY KEY, partition TEXT)")
        return self._db

    def __exit__(self, kind: Any, *_: Any) -> None:
        self._db.execute("ROLLBACK" if kind else "COMMIT")
        self._db.close()
        self._lock.release()


def _rows(done: sqlite3.Cursor) -> Rows:
    if done.description is None:
        return Rows()
    row = namedtuple("Row", [name for name, *_ in done.description])
    return Rows(row(*values) for values in _values(done))


def _values(done: sqlite3.Cursor) -> Iterator[Any]:
    yield from done.fetchall()


__all__ = ["Cluster", "DriverException", "NoHostAvailable", "Session"]
