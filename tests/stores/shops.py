"""The stores of the suite that every store passes: how each is begun, addressed, and seen by clients of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gristmill as gm

Row = dict[str, Any]


@dataclass(frozen=True)
class Shop:
    """A store under test. `address` gives that of a table of this name; `seen` the rows that any client sees there, by
    their ids, and None if there is nothing.
    """

    name: str
    address: Callable[[str], str]
    seen: Callable[[str], dict[int, Row] | None]
    clear: Callable[[str], None]

    def staging(self, folder: Path) -> dict[str, str]:
        """What a sink that is this store says of its folder: nothing, if the store is a file."""
        return {} if self.name not in SERVERS else {"staging": str(folder / "staging")}


@contextmanager
def duckdb(server: str, folder: Path) -> Iterator[Shop]:
    """A file."""
    import duckdb as client

    file = folder / "shop.duckdb"

    def seen(table: str) -> dict[int, Row] | None:
        if not file.exists():
            return None
        with client.connect(str(file), read_only=True) as db:
            if not db.execute("SELECT 1 FROM duckdb_tables() WHERE table_name = ?", [table]).fetchall():
                return None
            return {row["id"]: row for row in db.table(table).to_arrow_table().to_pylist()}

    def clear(table: str) -> None:
        file.unlink(missing_ok=True)

    yield Shop("duckdb", lambda table: f"duckdb://{file}#{table}", seen, clear)


@contextmanager
def sqlite(server: str, folder: Path) -> Iterator[Shop]:
    """A file."""
    import sqlite3

    file = folder / "shop.sqlite"

    def seen(table: str) -> dict[int, Row] | None:
        if not file.exists():
            return None
        with closing(sqlite3.connect(file)) as db:
            db.row_factory = sqlite3.Row
            if not db.execute("SELECT 1 FROM sqlite_master WHERE name = ?", [table]).fetchall():
                return None
            return {row["id"]: dict(row) for row in db.execute(f'SELECT * FROM "{table}"')}

    def clear(table: str) -> None:
        for path in folder.glob("shop.sqlite*"):
            path.unlink()

    yield Shop("sqlite", lambda table: f"sqlite://{file}#{table}", seen, clear)


@contextmanager
def lmdb(server: str, folder: Path) -> Iterator[Shop]:
    """A file a table."""
    import lmdb as client
    import msgpack

    from gristmill.stores.lmdb import MARKS, opened

    def seen(table: str) -> dict[int, Row] | None:
        environment = opened(gm.to(f"lmdb://{folder}/{table}?key=id").place)  # a process opens a file once
        if environment is None:
            return None
        with environment.begin() as transaction:
            rows = [msgpack.unpackb(value) for key, value in transaction.cursor() if key != MARKS]
        return {row["id"]: row for row in rows}

    def clear(table: str) -> None:
        for path in folder.glob(f"{table}*"):
            path.unlink()

    assert client.version() >= (0, 9)
    yield Shop("lmdb", lambda table: f"lmdb://{folder}/{table}", seen, clear)


@contextmanager
def postgres(server: str, folder: Path) -> Iterator[Shop]:
    """A schema of its own in a database."""
    import psycopg
    from psycopg.rows import dict_row

    schema = f"s{abs(hash(str(folder))):x}"
    with psycopg.connect(server, autocommit=True, row_factory=dict_row) as db:
        db.execute(f"CREATE SCHEMA {schema}")

        def seen(table: str) -> dict[int, Row] | None:
            if not db.execute("SELECT to_regclass(%s) AS found", [f"{schema}.{table}"]).fetchone()["found"]:
                return None
            return {row["id"]: row for row in db.execute(f"SELECT * FROM {schema}.{table}").fetchall()}

        def clear(table: str) -> None:
            db.execute(f"DROP SCHEMA {schema} CASCADE")
            db.execute(f"CREATE SCHEMA {schema}")

        yield Shop("postgresql", lambda table: f"{server}#{schema}.{table}", seen, clear)
        db.execute(f"DROP SCHEMA {schema} CASCADE")


@contextmanager
def redis(server: str, folder: Path) -> Iterator[Shop]:
    """A database of a server, empty before and after."""
    import msgpack
    import redis as client

    with client.Redis.from_url(f"{server}/3") as db:
        db.flushdb()

        def seen(table: str) -> dict[int, Row] | None:
            at, buckets = db.hmget(table, "at", "buckets")
            if at is None:
                return None
            found = [db.hgetall(f"{at.decode()}:{n}") for n in range(int(buckets))]
            rows = [msgpack.unpackb(value) for one in found for value in one.values()]
            return {row["id"]: row for row in rows}

        yield Shop("redis", lambda table: f"{server}/3#{table}", seen, lambda table: db.flushdb())
        db.flushdb()


SERVERS = {"postgresql": "postgres", "redis": "redis_server"}  # the fixtures of those that have one
SHOPS: dict[str, Callable[[str, Path], Any]] = {
    "duckdb": duckdb,
    "sqlite": sqlite,
    "lmdb": lmdb,
    "postgresql": postgres,
    "redis": redis,
}
