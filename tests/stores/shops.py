"""The stores of the suite that every store passes: how each is begun, addressed, and seen by clients of its own."""

from __future__ import annotations

import json
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import gristmill as gm
from gristmill.job.delivery import STORES

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
    lose: Callable[[str], None] | None  # what an operator does who removes the row with id 3; None: nobody can
    odd: Mapping[str, Any] = field(default_factory=dict)  # options of a delivery that gives vectors back as they were
    files: str = ""  # a folder for the sink's files, if the store is not a file itself
    join: str = ""  # what a process apart needs to reach the store, beside its address

    def staging(self, folder: Path) -> dict[str, str]:
        """What a sink that is this store says of its folder: nothing, if the store is a file."""
        at = self.files or ("" if STORES.get(self.name).embedded else str(folder / "staging"))
        return {"staging": at} if at else {}


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

    def lose(table: str) -> None:
        with client.connect(str(file)) as db:
            db.execute(f"DELETE FROM {table} WHERE id = 3")

    yield Shop("duckdb", lambda table: f"duckdb://{file}#{table}", seen, clear, lose)


@contextmanager
def sqlite(server: str, folder: Path) -> Iterator[Shop]:
    """A file."""
    file = folder / "shop.sqlite"

    def seen(table: str) -> dict[int, Row] | None:
        if not file.exists():
            return None
        with closing(sqlite3.connect(file)) as db:
            db.row_factory = sqlite3.Row
            if not db.execute("SELECT 1 FROM sqlite_master WHERE name = ?", [table]).fetchall():
                return None
            rows = db.execute(f'SELECT * FROM "{table}"')
            return {row["id"]: {**row, "v": np.frombuffer(row["v"], "<f4").tolist()} for row in rows}

    def clear(table: str) -> None:
        for path in folder.glob("shop.sqlite*"):
            path.unlink()

    def lose(table: str) -> None:
        with closing(sqlite3.connect(file)) as db, db:
            db.execute(f"DELETE FROM {table} WHERE id = 3")

    yield Shop("sqlite", lambda table: f"sqlite://{file}#{table}", seen, clear, lose)


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

    def lose(table: str) -> None:
        script = (
            "import lmdb, msgpack, sys\n"
            "from gristmill.stores.lmdb import MARKS\n"
            "db = lmdb.open(sys.argv[1], subdir=False, map_size=1 << 30)\n"
            "with db.begin(write=True) as t:\n"
            "    found = [k for k, v in t.cursor() if k != MARKS and msgpack.unpackb(v).get('id') == 3]\n"
            "    assert [t.delete(k) for k in found] == [True]\n"
        )
        subprocess.run([sys.executable, "-c", script, str(folder / table)], check=True)  # a process opens a file once

    assert client.version() >= (0, 9)
    yield Shop("lmdb", lambda table: f"lmdb://{folder}/{table}", seen, clear, lose)


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
            rows = db.execute(f"SELECT * FROM {schema}.{table}").fetchall()
            return {row["id"]: {**row, "v": json.loads(row["v"])} for row in rows}

        def clear(table: str) -> None:
            db.execute(f"DROP SCHEMA {schema} CASCADE")
            db.execute(f"CREATE SCHEMA {schema}")

        def lose(table: str) -> None:
            db.execute(f"DELETE FROM {schema}.{table} WHERE id = 3")

        yield Shop("postgresql", lambda table: f"{server}#{schema}.{table}", seen, clear, lose)
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

        def lose(table: str) -> None:
            at, buckets = db.hmget(table, "at", "buckets")
            for n in range(int(buckets)):
                for key, value in db.hgetall(f"{at.decode()}:{n}").items():
                    if msgpack.unpackb(value)["id"] == 3:
                        db.hdel(f"{at.decode()}:{n}", key)

        yield Shop("redis", lambda table: f"{server}/3#{table}", seen, lambda table: db.flushdb(), lose)
        db.flushdb()


@contextmanager
def indexfile(name: str, folder: Path) -> Iterator[Shop]:
    """A file a table, which the library opens as its own."""
    from gristmill.stores.indexread import opened

    engine: Any = STORES.get(name).engine

    def seen(table: str) -> dict[int, Row] | None:
        to = gm.to(f"{name}://{folder}/{table}?key=id")
        file = opened(to.place, engine, index=True)
        if file is None:
            return None
        with gm.lookup(to) as lookup:
            keys = [key.decode() for _, batch in file.numbered() for key in batch["k"].to_pylist()]
            assert own(str(folder / table)) == len(keys)
            return {row["id"]: row for row in lookup.get_many(keys)}

    def own(path: str) -> int:
        if name == "usearch":
            from usearch.index import Index

            return len(Index.restore(path, view=True))
        import faiss

        return int(faiss.read_index(path).ntotal)

    def clear(table: str) -> None:
        for path in folder.glob(f"{table}*"):
            path.unlink()

    yield Shop(name, lambda table: f"{name}://{folder}/{table}", seen, clear, None)


def usearch(server: str, folder: Path) -> Any:
    """Index files of USearch."""
    return indexfile("usearch", folder)


def faiss(server: str, folder: Path) -> Any:
    """Index files of FAISS."""
    return indexfile("faiss", folder)


@contextmanager
def qdrant(server: str, folder: Path) -> Iterator[Shop]:
    """A folder in the client's local mode, which has the calls of a server, not its engine."""
    from qdrant_client import QdrantClient

    home = folder / "qdrant"

    def seen(table: str) -> dict[int, Row] | None:
        client = QdrantClient(path=str(home))
        try:
            if not any(alias.alias_name == table for alias in client.get_aliases().aliases):
                return None
            found, _ = client.scroll(table, limit=10_000, with_vectors=True)
            return {p.payload["id"]: {**p.payload, **(p.vector or {})} for p in found}
        finally:
            client.close()

    def clear(table: str) -> None:
        shutil.rmtree(home, ignore_errors=True)

    def lose(table: str) -> None:
        client = QdrantClient(path=str(home))
        client.delete(table, [3])
        client.close()

    odd = {"index": {"vector": {"metric": "l2"}}}  # by cosine, vectors are made 1 long
    yield Shop("qdrant", lambda table: f"qdrant://{home}#{table}", seen, clear, lose, odd, str(folder / "staging"))


@contextmanager
def delta(server: str, folder: Path) -> Iterator[Shop]:
    """A folder a table."""
    from deltalake import DeltaTable

    def seen(table: str) -> dict[int, Row] | None:
        at = folder / table
        if not DeltaTable.is_deltatable(str(at)):
            return None
        return {row["id"]: row for row in DeltaTable(str(at)).to_pyarrow_table().to_pylist()}

    def clear(table: str) -> None:
        shutil.rmtree(folder / table, ignore_errors=True)

    def lose(table: str) -> None:
        DeltaTable(str(folder / table)).delete("id = 3")

    yield Shop("delta", lambda table: f"delta://{folder}/{table}", seen, clear, lose)


@contextmanager
def iceberg(server: str, folder: Path) -> Iterator[Shop]:
    """A namespace of a catalog in a SQLite file."""
    from pyiceberg.catalog import load_catalog
    from pyiceberg.exceptions import NoSuchTableError

    about = {"type": "sql", "uri": f"sqlite:///{folder}/catalog.sqlite", "warehouse": f"file://{folder}/lake"}
    catalog = load_catalog("shop", **about)
    catalog.create_namespace("nights")

    def seen(table: str) -> dict[int, Row] | None:
        try:
            found = catalog.load_table(("nights", table))
        except NoSuchTableError:
            return None
        return {row["id"]: row for row in found.scan().to_arrow().to_pylist()}

    def clear(table: str) -> None:
        with suppress(NoSuchTableError):
            catalog.drop_table(("nights", table))
        shutil.rmtree(folder / "lake" / "nights" / table, ignore_errors=True)

    def lose(table: str) -> None:
        catalog.load_table(("nights", table)).delete("id == 3")

    query = "&".join(f"{name}={value}" for name, value in about.items())
    yield Shop("iceberg", lambda table: f"iceberg://shop/nights.{table}?{query}", seen, clear, lose)
    catalog.close()


@contextmanager
def lance(server: str, folder: Path) -> Iterator[Shop]:
    """A folder a database, as LanceDB sees it."""
    import lancedb

    def seen(table: str) -> dict[int, Row] | None:
        db = lancedb.connect(str(folder / "lancedb"))
        if table not in db.list_tables().tables:
            return None
        return {row["id"]: row for row in db.open_table(table).to_arrow().to_pylist()}

    def clear(table: str) -> None:
        shutil.rmtree(folder / "lancedb", ignore_errors=True)

    def lose(table: str) -> None:
        lancedb.connect(str(folder / "lancedb")).open_table(table).delete("id = 3")

    yield Shop("lance", lambda table: f"lance://{folder}/lancedb#{table}", seen, clear, lose)


@contextmanager
def cassandra(server: str, folder: Path) -> Iterator[Shop]:
    """A keyspace of a driver that is none, as there is no server to be had."""
    import msgpack
    from cassandra.cluster import keyspace_file

    keyspace = f"s{abs(hash(str(folder))):x}"
    file = keyspace_file(keyspace)
    file.touch()

    def rows(db: sqlite3.Connection, table: str) -> list[tuple[bytes, Row]] | None:
        if not db.execute("SELECT 1 FROM sqlite_master WHERE name = ?", [f"{table}_live"]).fetchall():
            return None
        at = f"SELECT at FROM {table}_live"
        found = db.execute(f"SELECT key, row FROM {table} WHERE at = ({at})").fetchall()
        return [(key, msgpack.unpackb(row)) for key, row in found]

    def seen(table: str) -> dict[int, Row] | None:
        with closing(sqlite3.connect(file)) as db:
            found = rows(db, table)
            return None if found is None else {row["id"]: row for _, row in found}

    def lose(table: str) -> None:
        with closing(sqlite3.connect(file)) as db, db:
            (key,) = [key for key, row in rows(db, table) or () if row["id"] == 3]
            db.execute(f"DELETE FROM {table} WHERE key = ? AND at = (SELECT at FROM {table}_live)", [key])

    def clear(table: str) -> None:
        file.unlink()
        file.touch()

    yield Shop("cassandra", lambda table: f"cassandra://db.test/{keyspace}#{table}", seen, clear, lose)
    file.unlink()


@contextmanager
def spark(server: str, folder: Path) -> Iterator[Shop]:
    """A database of the session that this process has."""
    from pyspark.sql import SparkSession

    session = SparkSession.builder.getOrCreate()
    base = f"s{abs(hash(str(folder))):x}"
    session.sql(f"CREATE DATABASE {base} LOCATION 'file://{folder}/lake'")

    def seen(table: str) -> dict[int, Row] | None:
        if not session.catalog.tableExists(f"{base}.{table}"):
            return None
        session.catalog.refreshTable(f"{base}.{table}")
        return {row["id"]: row.asDict(recursive=True) for row in session.table(f"{base}.{table}").collect()}

    def clear(table: str) -> None:
        session.sql(f"DROP TABLE IF EXISTS {base}.{table}")
        shutil.rmtree(folder / "lake" / f"{table}.gristmill", ignore_errors=True)

    yield Shop("spark", lambda table: f"spark://{base}.{table}", seen, clear, None, join=server)
    session.sql(f"DROP DATABASE {base} CASCADE")


# The fixtures of those that have a server.
SERVERS = {"postgresql": "postgres", "redis": "redis_server", "spark": "spark_session"}
SHOPS: dict[str, Callable[[str, Path], Any]] = {
    "duckdb": duckdb,
    "sqlite": sqlite,
    "lmdb": lmdb,
    "postgresql": postgres,
    "redis": redis,
    "usearch": usearch,
    "faiss": faiss,
    "qdrant": qdrant,
    "delta": delta,
    "iceberg": iceberg,
    "lance": lance,
    "cassandra": cassandra,
    "spark": spark,
}
SLOW = ("spark",)  # stores that take seconds to answer, and leave processes until this one ends
KILLS = {"qdrant": 12}  # at most, of a store whose client, in its local mode, takes seconds for a delivery
