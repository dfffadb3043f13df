"""The stores of the suite that every source that is a store passes: how each is filled, with values of all kinds, and
what a run is to read of them.
"""

from __future__ import annotations

import datetime as dt
import io
import json
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

Row = dict[str, Any]
BIG = 2**53 + 1
UTC = dt.timezone.utc
TEXTS = ["plain", "naïve — 日本語 🦀", "", None, 'quo"te, comma\nand line', "\\N", "NULL", "ends with space "]


@dataclass(frozen=True)
class Well:
    """A store under test, empty: `address` names its table, `fill` adds rows in one commit, `seen` is what a run reads
    of a row.
    """

    name: str
    address: str
    fill: Callable[[list[Row]], None]
    seen: Callable[[Row], Row] = dict
    storage: dict[str, Any] = field(default_factory=dict)

    @property
    def database(self) -> str:
        """The address without the table."""
        return self.address.partition("#")[0]


def rows(first: int, last: int) -> list[Row]:
    """Rows with values of many kinds, by their ids."""
    return [
        {
            "id": i,
            "text": TEXTS[i % len(TEXTS)],
            "big": BIG + i if i % 5 else None,
            "real": [0.1 + 0.2, -1e300, None, float("inf")][i % 4],
            "price": Decimal(f"{i}234567890123456.7{i % 10}89") if i % 3 else None,
            "at": dt.datetime(2026, 3, 29, 1, 30, 0, i, UTC) if i % 4 else None,
            "day": dt.date(1969, 12, 1 + i % 31) if i % 6 else None,
            "flag": [True, False, None][i % 3],
            "raw": bytes([0, 255, i % 256]) if i % 4 else None,
            "tags": [["a", None, "ü"], [], None][i % 3],
            "about": {"n": i, "s": "ß"} if i % 2 else None,
            "vector": [i / 2, -1.0, 0.25] if i % 7 else None,
        }
        for i in range(first, last)
    ]


TYPES = pa.schema(
    {
        "id": pa.int64(),
        "text": pa.string(),
        "big": pa.int64(),
        "real": pa.float64(),
        "price": pa.decimal128(38, 4),
        "at": pa.timestamp("us", "UTC"),
        "day": pa.date32(),
        "flag": pa.bool_(),
        "raw": pa.binary(),
        "tags": pa.list_(pa.string()),
        "about": pa.struct({"n": pa.int64(), "s": pa.string()}),
        "vector": pa.list_(pa.float32()),
    }
)


def table(of: list[Row]) -> pa.Table:
    """Rows as Arrow has them."""
    return pa.Table.from_pylist(of, TYPES)


def as_json(value: Any) -> str | None:
    return None if value is None else json.dumps(value, ensure_ascii=False)


@contextmanager
def duckdb(server: str, folder: Path) -> Iterator[Well]:
    """A table of a file."""
    import duckdb as client

    file = folder / "well.duckdb"

    def fill(more: list[Row]) -> None:
        with client.connect(str(file)) as db:
            db.execute("SET TimeZone = 'UTC'")
            added = table(more)  # noqa: F841
            db.execute("CREATE TABLE IF NOT EXISTS rows AS SELECT * FROM added LIMIT 0; INSERT INTO rows FROM added")

    yield Well("duckdb", f"duckdb://{file}#rows", fill)


@contextmanager
def sqlite(server: str, folder: Path) -> Iterator[Well]:
    """A table of a file, with the types that SQLite has."""
    file = folder / "well.sqlite"

    def stored(row: Row) -> Row:
        texts = {"price": row["price"] and str(row["price"]), "at": row["at"] and row["at"].isoformat()}
        day = row["day"] and row["day"].isoformat()
        lists = {name: as_json(row[name]) for name in ("tags", "about", "vector")}
        return {**row, **texts, "day": day, **lists}

    def fill(more: list[Row]) -> None:
        with closing(sqlite3.connect(file)) as db, db:
            db.execute("PRAGMA journal_mode = WAL")  # else writers wait for those who read
            db.execute(
                "CREATE TABLE IF NOT EXISTS rows (id INTEGER PRIMARY KEY, text TEXT, big BIGINT, real REAL, price "
                "TEXT, at TIMESTAMP, day DATE, flag BOOLEAN, raw BLOB, tags JSON, about JSON, vector TEXT)"
            )
            db.executemany(f"INSERT INTO rows VALUES ({', '.join('?' * 12)})", [(*stored(r).values(),) for r in more])

    yield Well("sqlite", f"sqlite://{file}#rows", fill, stored)


@contextmanager
def sqlalchemy(server: str, folder: Path) -> Iterator[Well]:
    """The same file, by SQLAlchemy's dialect."""
    pytest.importorskip("sqlalchemy")
    with sqlite(server, folder) as well:
        file = folder / "well.sqlite"

        def fill(more: list[Row]) -> None:
            with closing(sqlite3.connect(file)) as db, db:
                db.execute(
                    "CREATE TABLE IF NOT EXISTS rows (id INTEGER PRIMARY KEY, text TEXT, big BIGINT, real FLOAT, price "
                    "TEXT, at TEXT, day DATE, flag BOOLEAN, raw BLOB, tags TEXT, about TEXT, vector TEXT)"
                )
            well.fill(more)

        yield Well("sqlalchemy", f"sqlalchemy+sqlite:///{file}#rows", fill, well.seen)


_POSTGRES = (
    "CREATE TABLE IF NOT EXISTS rows (id bigint, text text, big bigint, real double precision, price numeric(38, 4), "
    "at timestamptz, day date, flag boolean, raw bytea, tags text[], about jsonb, vector vector(3))"
)


def _filled(server: str, more: list[Row]) -> None:
    import psycopg

    with psycopg.connect(server) as db:
        db.execute(_POSTGRES)
        values = [(*{**r, "about": as_json(r["about"]), "vector": as_json(r["vector"])}.values(),) for r in more]
        with db.cursor() as cursor:
            cursor.executemany(f"INSERT INTO rows VALUES ({', '.join(['%s'] * 12)})", values)


@contextmanager
def postgres(server: str, folder: Path) -> Iterator[Well]:
    """A table of a server, with pgvector."""
    import psycopg

    pytest.importorskip("adbc_driver_postgresql")
    with psycopg.connect(server) as db:
        db.execute("DROP TABLE IF EXISTS rows")
    seen = lambda row: {**row, "about": row["about"] and as_json(row["about"])}  # noqa: E731
    yield Well("postgres", f"{server}#rows", lambda more: _filled(server, more), seen)


@contextmanager
def dialect(server: str, folder: Path) -> Iterator[Well]:
    """The same table, by SQLAlchemy's dialect, which has no type for vectors."""
    pytest.importorskip("sqlalchemy")
    with postgres(server, folder) as well:
        address = "sqlalchemy+" + server.replace("postgresql://", "postgresql+psycopg://", 1)
        seen = lambda row: {**well.seen(row), "vector": row["vector"] and _vector(row["vector"])}  # noqa: E731
        yield Well("dialect", f"{address}#rows", well.fill, seen)


def _vector(values: list[float]) -> str:
    return f"[{','.join(f'{value:g}' for value in values)}]"


@contextmanager
def delta(server: str, folder: Path) -> Iterator[Well]:
    """A folder, with a partition."""
    lake = pytest.importorskip("deltalake")

    def fill(more: list[Row]) -> None:
        lake.write_deltalake(str(folder / "well"), table(more), mode="append", partition_by=["flag"])

    yield Well("delta", f"delta://{folder}/well", fill)


@contextmanager
def iceberg(server: str, folder: Path) -> Iterator[Well]:
    """A table of a catalog in SQLite."""
    pytest.importorskip("pyiceberg")
    from pyiceberg.catalog import load_catalog

    place = {"type": "sql", "uri": f"sqlite:///{folder}/catalog.db", "warehouse": f"file://{folder}/warehouse"}

    def fill(more: list[Row]) -> None:
        catalog = load_catalog("wells", **place)
        catalog.create_namespace_if_not_exists("deep")
        catalog.create_table_if_not_exists("deep.rows", schema=TYPES).append(table(more))

    yield Well("iceberg", "iceberg://wells/deep.rows", fill, storage=place)


@contextmanager
def datasets(server: str, folder: Path) -> Iterator[Well]:
    """A folder as `Dataset.save_to_disk` writes it: a file for each commit."""
    place = folder / "well"

    def fill(more: list[Row]) -> None:
        place.mkdir(exist_ok=True)
        state = place / "state.json"
        files = json.loads(state.read_text())["_data_files"] if state.exists() else []
        name = f"data-{len(files):05}-of-00002.arrow"
        with pa.ipc.new_stream(str(place / name), TYPES) as writer:
            writer.write_table(table(more), max_chunksize=7)
        state.write_text(json.dumps({"_data_files": [*files, {"filename": name}], "_split": None}))
        (place / "dataset_info.json").write_text("{}")

    yield Well("datasets", str(place), fill)


@contextmanager
def lance(server: str, folder: Path) -> Iterator[Well]:
    """A table of a LanceDB database."""
    client = pytest.importorskip("lance")

    def fill(more: list[Row]) -> None:
        client.write_dataset(table(more), str(folder / "db" / "rows.lance"), mode="append")

    yield Well("lance", f"lance://{folder}/db#rows", fill)


_AVRO: list[dict[str, Any]] = [
    {"name": "id", "type": "long"},
    {"name": "text", "type": ["null", "string"]},
    {"name": "big", "type": ["null", "long"]},
    {"name": "real", "type": ["null", "double"]},
    {"name": "price", "type": ["null", {"type": "bytes", "logicalType": "decimal", "precision": 38, "scale": 4}]},
    {"name": "at", "type": ["null", {"type": "long", "logicalType": "timestamp-micros"}]},
    {"name": "day", "type": ["null", {"type": "int", "logicalType": "date"}]},
    {"name": "flag", "type": ["null", "boolean"]},
    {"name": "raw", "type": ["null", "bytes"]},
    {"name": "tags", "type": ["null", {"type": "array", "items": ["null", "string"]}]},
    {
        "name": "about",
        "type": ["null", {"type": "record", "name": "About",
                          "fields": [{"name": "n", "type": "long"}, {"name": "s", "type": "string"}]}],
    },
    {"name": "vector", "type": ["null", {"type": "array", "items": "float"}]},
]  # fmt: skip


@contextmanager
def kafka(server: str, folder: Path) -> Iterator[Well]:
    """A topic of three partitions, of Avro values."""
    client = pytest.importorskip("confluent_kafka")
    fastavro = pytest.importorskip("fastavro")
    from confluent_kafka.admin import AdminClient, NewTopic

    import storeservers

    schema = {"type": "record", "name": "Row", "fields": _AVRO}
    (folder / "row.avsc").write_text(json.dumps(schema))
    parsed = fastavro.parse_schema(schema)
    with storeservers.tansu() as broker:
        admin = AdminClient({"bootstrap.servers": broker, "log_level": 0})
        admin.create_topics([NewTopic("rows", 3, 1)])["rows"].result()
        producer = client.Producer({"bootstrap.servers": broker, "log_level": 0})

        def fill(more: list[Row]) -> None:
            for row in more:
                out = io.BytesIO()
                fastavro.schemaless_writer(out, parsed, row)
                producer.produce("rows", out.getvalue(), partition=row["id"] % 3)
            assert producer.flush(10) == 0

        yield Well("kafka", f"kafka://{broker}/rows?value=avro&schema={folder}/row.avsc", fill)


WELLS = {
    made.__name__: made
    for made in (duckdb, sqlite, sqlalchemy, postgres, dialect, delta, iceberg, lance, datasets, kafka)
}
SERVED = ("postgres", "dialect")
