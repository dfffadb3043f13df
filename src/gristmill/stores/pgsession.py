"""A connection to Postgres, and statements of one transaction."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pyarrow as pa

from gristmill.errors import BadJob
from gristmill.process.extras import require
from gristmill.stores.contract import Place, StoreUnavailable
from gristmill.stores.pgcopy import copied
from gristmill.stores.refused import AS_TEXT, refuse_endless, without_far, without_zero_bytes
from gristmill.stores.sql import named, quoted

LONGEST = 63  # bytes of a name
CONNECT = 10  # seconds to wait for a server


def connected(place: Place) -> Any:
    """A connection to the database of a place. Raises BadJob, MissingExtra, StoreUnavailable."""
    psycopg = require("psycopg", "postgres", place.shown)
    named(place)
    if any(len(name.encode()) > LONGEST for name in place.name.split(".")):
        raise BadJob(
            f"{place.shown}: Postgres has names of {LONGEST} bytes at most, and cuts others: give another name"
        )
    try:
        options = {"connect_timeout": CONNECT, "application_name": "gristmill", **place.options}
        return psycopg.connect(place.uri, **options)
    except psycopg.ProgrammingError as e:  # an option that it does not know
        raise BadJob(f"{place.shown}: Postgres' client says: {place.words(e)}") from e
    except psycopg.Error as e:
        raise StoreUnavailable(f"{place.shown}: cannot be reached: {place.words(e)}") from e


class Transaction:
    """Statements of one transaction."""

    def __init__(self, connection: Any, shown: str) -> None:
        self._connection = connection
        self._shown = shown

    def run(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        cursor = self._connection.execute(_placed(sql) if values else sql, values or None)
        return cursor.fetchall() if cursor.description is not None else []

    def changed(self, sql: str) -> int:
        return int(self._connection.execute(sql).rowcount)

    def insert(self, table: str, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> int:
        kinds, names = self.columns(table), ", ".join(map(quoted, schema.names))
        batches = without_zero_bytes(batches, self._shown, "which Postgres does not take")
        batches = without_far(batches, self._shown, AS_TEXT, [n for n, kind in kinds.items() if "json" in kind])
        batches = _near(batches, [n for n in schema.names if base(kinds[n]) == "vector"], self._shown)
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


def _near(batches: Iterable[pa.RecordBatch], vectors: Sequence[str], shown: str) -> Iterator[pa.RecordBatch]:
    """The same batches. Raises BadJob for a vector that pgvector does not take."""
    for batch in batches:
        for name in vectors:
            refuse_endless(batch, name, shown)
        yield batch


def _placed(sql: str) -> str:
    """A statement with the client's places for values; a question mark in a name is none."""
    return re.sub(r'"(?:[^"]|"")*"|\?', lambda found: "%s" if found[0] == "?" else found[0], sql.replace("%", "%%"))


def schema_of(session: Transaction, table: str) -> str:
    """The schema in which a name without one is found; "" if it is not there."""
    sql = "SELECT n.nspname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = to_regclass(?)"
    found = session.run(sql, quoted(table))
    return str(found[0][0]) if found else ""


def _bare(name: str) -> str:
    return name if name.startswith('"') else quoted(name)


def base(kind: str) -> str:
    """A column's type without its lengths: `timestamp(3) with time zone` is `timestamp with time zone`."""
    return re.sub(r"\([^)]*\)", "", kind)
