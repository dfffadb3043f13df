"""Fault 69: jobs whose source is in an object store that fails for a while: waited for, as a sink is, or told."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest

import gristmill as gm
from gristmill.errors import BadJob, BadSource, RunFailed
from gristmill.job.job import Source
from gristmill.sources import patience
from gristmill.sources.paths import changed, resolve
from s3server import KEY, SECRET, S3Server, Troubled

ROWS = 20_000


@pytest.fixture(scope="module", autouse=True)
def objects(server: S3Server) -> None:
    """A table in row groups and a compressed text, in bucket `box`."""
    fs = pafs.S3FileSystem(access_key=KEY, secret_key=SECRET, endpoint_override=server.address, scheme="http")
    rows = pa.table({"id": np.arange(ROWS), "x": np.random.default_rng(7).random(ROWS)})
    pq.write_table(rows, "box/src/a.parquet", filesystem=fs, row_group_size=2500, compression="none")
    with fs.open_output_stream("box/lines/a.jsonl.gz", compression="gzip") as out:
        out.write("".join(f'{{"id": {i}}}\n' for i in range(ROWS)).encode())
    with fs.open_output_stream("box/plain/a.jsonl") as out:
        out.write("".join(f'{{"id": {i}}}\n' for i in range(ROWS)).encode())


@pytest.fixture
def proxy(server: S3Server) -> Iterator[Troubled]:
    """In front of the server, without trouble yet."""
    started = Troubled(server.address)
    yield started
    started.close()


def double(batch: dict[str, Any]) -> dict[str, Any]:
    """Twice the number."""
    return {"twice": batch["id"] * 2}


def job(server: S3Server, proxy: Troubled, name: str, sink: Any, workers: int = 0) -> gm.Job:
    """The job over a source behind the proxy, into a folder."""
    source = gm.source(f"s3://box/{name}", storage=server.storage(proxy.address))
    return gm.Job(source, double, gm.sink(str(sink), keep=["id"]), shard_rows=2500, workers=workers)


def put(address: str, text: str) -> None:
    """An object that is as long with any text of that length."""
    fs = pafs.S3FileSystem(access_key=KEY, secret_key=SECRET, endpoint_override=address, scheme="http")
    with fs.open_output_stream("box/inrun/a.csv", compression=None) as out:
        out.write(b"id,w\n" + "".join(f"{10_000 + i},{text}\n" for i in range(2000)).encode())


def rewriting(batch: dict[str, Any]) -> dict[str, Any]:
    """A model beside which somebody writes the source, once it has seen many rows."""
    if int(batch["id"].max()) > 10_900 and batch["w"][0] == "old" * 70:
        put(os.environ["WRITE_TO"], "new" * 70)
    return double(batch)


def test_written_again_while_it_is_read(server: S3Server, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written, planned, and written again as rows are scored: these are not of one second, as the plan waits for the
    first to be over. Else rows of both are published.
    """
    monkeypatch.setenv("WRITE_TO", server.address)
    time.sleep(1.02 - time.time() % 1)
    put(server.address, "old" * 70)
    source = gm.source("s3://box/inrun/", storage=server.storage())
    sink = gm.sink(str(tmp_path / "out"), keep=["w"])
    made = gm.Job(source, rewriting, sink, workers=0, shard_rows=400, batch_rows=100, update={"key": ["id"]})
    with contextlib.suppress(RunFailed):
        assert len(set(made.run().read().to_table()["w"].to_pylist())) == 1  # all had been read before
    assert set(made.run().read().to_table()["w"].to_pylist()) == {"new" * 70}


def test_milliseconds_that_only_listings_tell(server: S3Server, tmp_path: Any) -> None:
    """As those of MinIO and R2: the object is the one that was listed, for streams, too, which read nothing twice."""
    proxy = Troubled(server.address, told=lambda data: re.sub(rb"(<LastModified>[^<.Z]*)(\.\d+)?Z", rb"\1.123Z", data))
    try:
        source = gm.source("s3://box/src/", storage=server.storage(proxy.address))
        fs, files = resolve(Source(("s3://box/src/",), storage=server.storage(proxy.address)))
        assert files[0].stamp[10:] == "123000000"
        assert changed(fs, files[0]) is None
        made = gm.Job(source, double, workers=0, shard_rows=2500)
        assert sum(table.num_rows for table in made.stream()) == ROWS
    finally:
        proxy.close()


@pytest.mark.long
@pytest.mark.parametrize("name", ["src/", "lines/a.jsonl.gz", "plain/"])
@pytest.mark.parametrize("kinds", [("500", "503"), ("cut", "lost")], ids=["refused", "cut"])
def test_fault_69_a_source_in_trouble(
    server: S3Server, proxy: Troubled, tmp_path: Any, name: str, kinds: tuple[str, ...]
) -> None:
    """Again and again five requests in a row fail, which is more than pyarrow tries by itself, from the first one on,
    in planning and in reading: every row comes once.
    """
    proxy.kinds, proxy.every = (*kinds, *kinds, kinds[0], *[""] * 12), 1
    report = job(server, proxy, name, tmp_path / "out").run()
    assert sorted(report.read().to_table()["id"].to_pylist()) == list(range(ROWS))
    assert all(proxy.troubles[kind] for kind in kinds)


@pytest.mark.long
def test_fault_69_a_store_that_is_away_is_waited_for(server: S3Server, proxy: Troubled, tmp_path: Any) -> None:
    """For 8 s from the first request on."""
    proxy.kinds, proxy.every = ("503",), 1
    back = threading.Timer(8.0, lambda: setattr(proxy, "every", 0))
    back.start()
    made = job(server, proxy, "src/", tmp_path / "out", workers=2)

    began = time.monotonic()
    report = made.run()
    assert time.monotonic() - began > 8
    assert sorted(report.read().to_table()["id"].to_pylist()) == list(range(ROWS))


@pytest.mark.long
def test_fault_69_a_store_that_stays_away_is_named(
    server: S3Server, proxy: Troubled, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the patience is at its end: which store, what it said, and no word of a disk."""
    monkeypatch.setattr(patience.patiently, "__defaults__", (2.0,))
    proxy.kinds, proxy.every = ("503",), 1
    with pytest.raises(
        RunFailed, match=r"s3://box: the store did not answer for .*run again when the store answers"
    ) as caught:
        job(server, proxy, "src/", tmp_path / "out").run()
    assert "disk" not in str(caught.value)
    assert SECRET not in str(caught.value)


@pytest.mark.long
def test_fault_69_in_a_worker_too(
    server: S3Server, proxy: Troubled, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store goes as the first rows are read."""
    monkeypatch.setattr(patience.patiently, "__defaults__", (1.0,))

    def gone(batch: dict[str, Any]) -> dict[str, Any]:
        proxy.kinds, proxy.every = ("503",), 1
        return double(batch)

    source = gm.source("s3://box/src/", storage=server.storage(proxy.address))
    with pytest.raises(RunFailed, match="s3://box: the store did not answer") as caught:
        gm.Job(source, gone, str(tmp_path / "out"), shard_rows=2500, workers=0).run()
    assert "disk" not in str(caught.value)


def test_fault_69_what_lasts_is_told_at_once(server: S3Server, proxy: Troubled, tmp_path: Any) -> None:
    """Missing rights: exit 2, in the store's words, before a minute is lost."""
    proxy.kinds, proxy.every = ("403",), 1
    began = time.monotonic()
    with pytest.raises(BadSource, match="ACCESS_DENIED"):
        job(server, proxy, "src/", tmp_path / "out").run()
    assert time.monotonic() - began < 10


def test_folders_of_a_store_are_columns(server: S3Server, tmp_path: Any) -> None:
    """As on a disk: below a prefix and from a glob's wildcard on, percent-decoded, null under Hive's name."""
    fs = pafs.S3FileSystem(access_key=KEY, secret_key=SECRET, endpoint_override=server.address, scheme="http")
    for n, day in enumerate(["2026-01-01", "a%2Fb", "__HIVE_DEFAULT_PARTITION__"]):
        pq.write_table(pa.table({"id": [n]}), f"box/hive/k={n}/day={day}/a.parquet", filesystem=fs)
    for uri, names in (("hive/", ["day", "k"]), ("hive/k=*/day=*/*.parquet", ["day", "k"]), ("hive/k=1", ["day"])):
        sink = str(tmp_path / uri.replace("/", "_").replace("*", ""))
        source = gm.source(f"s3://box/{uri}", storage=server.storage())
        gm.Job(source, double, gm.sink(sink, keep=["id", *names]), workers=0).run()
        got = gm.read(sink).to_table().sort_by("id").to_pylist()
        wanted = [{"day": d, "k": k} for k, d in enumerate(["2026-01-01", "a/b", None])]
        wanted = wanted if "k" in names else wanted[1:2]
        assert [{n: row[n] for n in names} for row in got] == [{n: row[n] for n in names} for row in wanted]


def test_a_sink_whose_run_was_stopped_while_it_published(
    server: S3Server, proxy: Troubled, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Is read as what it has published, at the source's own endpoint, with the types of columns in folder names; who
    reads other files pays for one look at most at a folder, and none where no sink has such names.
    """
    from gristmill.driver import publishing

    table = pa.table({"id": range(300), "k": [str(i % 10) for i in range(300)]})
    into = gm.sink("s3://box/first", keep=["id", "k"], partition_by=["k"], storage=server.storage())
    first = gm.Job(table, double, into, workers=0, shard_rows=100)
    first.run()
    with monkeypatch.context() as patched:
        patched.setattr(publishing.publish, "publish", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            first.run(restart=True)
    fs = pafs.S3FileSystem(access_key=KEY, secret_key=SECRET, endpoint_override=server.address, scheme="http")
    names = [f.path for f in fs.get_file_info(pafs.FileSelector("box/first", recursive=True)) if f.is_file]
    assert sum(".g2." in name and "_gristmill" not in name for name in names) == 10, "files of both are there"
    source = gm.source("s3://box/first", storage=server.storage(proxy.address))
    sink = gm.sink(str(tmp_path / "next"), keep=["id", "k"])
    read = gm.Job(source, double, sink, workers=0).run().read().to_table().sort_by("id")
    assert read.select(["id", "k"]).equals(table)

    for name in ("part-{:07d}.g1.parquet", "other-{:07d}.parquet"):
        for n in range(6):
            pq.write_table(table.slice(n, 1).select(["id"]), f"box/{name[:4]}/{name.format(n)}", filesystem=fs)
    asked = {}
    monkeypatch.setattr("gristmill.sources.listing._GRAIN", 0)  # files that were just written are listed twice
    for name in ("part", "othe"):
        before = sum(proxy.seen.values())
        job(server, proxy, name, tmp_path / name).run()
        asked[name] = sum(proxy.seen.values()) - before
    assert asked["part"] - asked["othe"] in (1, 2)


def test_a_sink_in_its_source_is_found_behind_any_address(
    server: S3Server, proxy: Troubled, weed: Path, tmp_path: Path
) -> None:
    """Of one store, by the names of its generations: the second night, as nothing tells the first. What has its name in
    another store is another sink.
    """

    def made(source: str, sink: str) -> gm.Job:
        read = gm.source("s3://box/inside", storage=server.storage(source), columns=["id"])
        at = gm.sink("s3://box/inside/out", format="jsonl", keep=["id"], storage=server.storage(sink))
        return gm.Job(read, double, at, workers=0)

    def begin(address: str) -> None:
        fs = pafs.S3FileSystem(access_key=KEY, secret_key=SECRET, endpoint_override=address, scheme="http")
        with fs.open_output_stream("box/inside/a.jsonl") as out:
            out.write(b'{"id": 1}\n{"id": 2}\n')

    begin(server.address)
    assert made(proxy.address, server.address).run().rows_ok == 2
    for verb in ("append", "restart"):
        with pytest.raises(BadJob, match="sink s3://box/inside/out is found in the source as s3://box/inside/out"):
            made(proxy.address, server.address).run(**{verb: True})
    other = S3Server(weed, tmp_path)
    try:
        begin(other.address)
        assert made(server.address, other.address).run().rows_ok == 4
        assert made(server.address, other.address).run(append=True).state == "nothing to do"
    finally:
        other.stop()
