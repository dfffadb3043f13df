"""Deliveries as a person asks for them: in Python, job files and commands; what is refused, and what is said."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import gristmill as gm
from gristmill.cli.app import main
from gristmill.commit.publication import published
from gristmill.driver import beside
from gristmill.job.secret import Secret
from gristmill.process.interrupts import ENDING
from gristmill.stores import delivery as deliveries
from gristmill.stores import duckdb as duckdb_store
from gristmill.stores import packing
from s3server import S3Server

ROWS = 40


def doubled(batch: dict[str, Any]) -> dict[str, Any]:
    """A number for each row."""
    return {"y": batch["x"] * 2}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with rows in it and the module `fn`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    numbers = np.arange(ROWS)
    pq.write_table(pa.table({"id": numbers, "x": numbers / 4, "n": numbers % 4}), "rows.parquet")
    Path("fn.py").write_text("def doubled(batch):\n    return {'y': batch['x'] * 2}\n")
    return tmp_path


def job(**options: Any) -> gm.Job:
    """The rows, here."""
    sink = options.pop("sink", None) or gm.sink("out", keep="id")
    return gm.Job("rows.parquet", doubled, sink, workers=0, shard_rows=10, **options)


def command(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """How a command ended, and what it printed."""
    code = main([*arguments])
    said = capsys.readouterr()
    return code, said.out, said.err


def rows(file: str = "s.sqlite", table: str = "scores") -> list[tuple[Any, ...]]:
    """What is in a table of a file, as any client sees it."""
    with closing(sqlite3.connect(file)) as db:
        return db.execute(f"SELECT * FROM {table} ORDER BY id").fetchall()


def test_a_job_file_and_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    """`deliver:` in a job file, and the commands that go with it."""
    Path("job.yaml").write_text(
        "source: rows.parquet\nmodel: {call: 'fn:doubled'}\nsink: {uri: out, keep: [id]}\nengine: {workers: 0}\n"
        "deliver: [{to: 'sqlite://s.sqlite#scores', key: id}, 'lmdb://s.lmdb?key=id']\n"
    )
    code, out, _ = command(capsys, "run", "job.yaml")
    assert code == 0 and " s, sqlite:///" in out and len(rows()) == ROWS
    code, out, _ = command(capsys, "status", "out")
    assert (
        code == 0
        and out.count("store     sqlite:///") == 1
        and "s.lmdb: delivered, generation 1: 40 rows by replace" in out
    )
    assert command(capsys, "verify", "job.yaml")[0] == 0
    code, out, err = command(capsys, "lookup", "lmdb://s.lmdb", "3", "39")
    assert code == 0 and [json.loads(line) for line in out.splitlines()] == [{"id": 3, "y": 1.5}, {"id": 39, "y": 19.5}]
    code, out, err = command(capsys, "lookup", "out", "3", "77", "--key", "id")
    assert (code, json.loads(out)) == (1, {"id": 3, "y": 1.5}) and "has no row for 77" in err
    code, out, _ = command(capsys, "deliver", "out", "duckdb://s.duckdb#scores", "--mode", "upsert", "--key", "id")
    assert code == 0 and "s.duckdb#scores: 40 rows of generation 1 by upsert" in out
    code, out, _ = command(capsys, "deliver", "job.yaml", "--json")
    assert code == 0 and [json.loads(line)["rows"] for line in out.splitlines()] == [ROWS, ROWS]
    assert command(capsys, "deliver", "out")[0] == 2
    code, _, err = command(capsys, "deliver", "nowhere", "sqlite://s.sqlite#x")
    assert code == 2 and "there is no such sink" in err


def test_typed_as_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    """`--deliver`, several times; --save writes it, and the saved job is the same; `key=` is no secret for which the
    sink would not remember the job.
    """
    typed = ("apply", "rows.parquet", "out", "--fn", "fn:doubled", "--keep", "id", "--workers", "0")
    stores = ("--deliver", "sqlite://s.sqlite?mode=append&key=id#scores", "--deliver", "duckdb://s.duckdb#scores")
    assert command(capsys, *typed, *stores, "--save", "job.yaml")[0] == 0
    assert len(rows()) == ROWS
    assert "append&key=id#scores" in Path("out/_gristmill/job.yaml").read_text()
    code, out, _ = command(capsys, "run", "job.yaml")
    assert code == 0 and "nothing to do" in out
    assert len(rows()) == ROWS


def test_set_of_a_sink_that_is_a_store(capsys: pytest.CaptureFixture[str]) -> None:
    """As in a job file: its options are the delivery's, and its storage says where the folder is."""
    typed = (
        "apply",
        "rows.parquet",
        "sqlite://s.sqlite#scores",
        "--fn",
        "fn:doubled",
        "--keep",
        "id",
        "--workers",
        "0",
    )
    sets = ("--set", "sink.options.mode=append", "--set", "sink.storage.staging=here/")
    assert command(capsys, *typed, *sets)[0] == 0
    code, out, _ = command(capsys, "status", "here")
    assert code == 0 and f"{ROWS} rows by append" in out and len(rows()) == ROWS
    code, _, err = command(capsys, *typed, "--set", "sink.optoins.mode=append")
    assert code == 2 and "sink has no 'optoins': did you mean options?" in err


def test_a_sink_that_is_a_store_in_a_job_file(capsys: pytest.CaptureFixture[str]) -> None:
    """Its options are those of the delivery; the commands find its folder by the store's name."""
    Path("job.yaml").write_text(
        "source: rows.parquet\nmodel: {call: 'fn:doubled'}\nengine: {workers: 0}\n"
        "sink: {uri: 'sqlite://s.sqlite#scores', keep: [id], options: {mode: append}}\n"
    )
    assert command(capsys, "run", "job.yaml")[0] == 0
    assert len(rows()) == ROWS
    code, out, _ = command(capsys, "status", "sqlite://s.sqlite#scores")
    assert code == 0 and "generation 1: 40 rows by append" in out
    assert gm.read("sqlite://s.sqlite#scores").count_rows() == ROWS
    with pytest.raises(gm.BadSource, match=r"^sqlite://gone\.sqlite#scores: no result"):
        gm.read("sqlite://gone.sqlite#scores")
    with pytest.raises(gm.BadJob, match=r"give storage: \{staging: FOLDER\}"):
        gm.Job("rows.parquet", doubled, "redis://localhost#scores?key=id")


def test_a_delivery_added_later_scores_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is outside the fingerprint: the result stands, and is delivered."""
    job().run()
    report = job(deliver="sqlite://s.sqlite#scores").run()
    assert report.state == "nothing to do" and report.rows_run == 0
    assert len(rows()) == ROWS
    assert [d["state"] for d in gm.status("out")["deliveries"]] == ["delivered"]
    assert job(deliver=None).run().deliveries == ()


def test_a_preview_and_a_plan_deliver_nothing() -> None:
    """They leave no store behind."""
    made = job(deliver="sqlite://s.sqlite#scores")
    assert made.preview(3).num_rows == 3
    assert made.plan().rows == ROWS
    assert sum(table.num_rows for table in made.stream()) == ROWS
    assert not Path("s.sqlite").exists()


@pytest.mark.parametrize(
    ("to", "told"),
    [
        ("dukdb://s.duckdb#t", "store 'dukdb': it must be one of .*; did you mean 'duckdb'"),
        ("s.duckdb", "deliver s.duckdb: give a store's address: duckdb://…"),
        ("sqlite://s.sqlite#t?key=id", r"options stand before the #: sqlite://…\?key=…#t$"),
        ("duckdb://s.duckdb", "name a table: duckdb:///.*s.duckdb#scores"),
        ("duckdb://no/such/folder/s.duckdb#t", "there is no folder /.*/no/such/folder"),
        ("lmdb://s.lmdb", "no key: name the columns that tell rows apart"),
        ("lmdb://s.lmdb?mode=append&key=id", "mode is 'append': it must be one of replace, upsert"),
        ("sqlite://s.sqlite?mode=merge#t", "mode is 'merge': it must be one of replace, append, upsert"),
        ("sqlite://s.sqlite?mode=upsert#t", "no key"),
        ("sqlite://s.sqlite?delete=true#t", "delete is for upsert, and mode is 'replace'"),
        ("sqlite://s.sqlite?key=no#t", "key names column 'no', which the result does not have: it has id, y"),
        ("lmdb://s.lmdb?key=y", "key column 'y' is double: give columns of texts or whole numbers"),
    ],
)
def test_what_is_refused_before_anything_is_scored(to: str, told: str) -> None:
    """With the way out, and nothing in the sink."""
    with pytest.raises(gm.BadJob, match=told):
        job(deliver=to).run()
    assert not list(Path("out").glob("*.parquet"))


def test_no_rows_to_deliver() -> None:
    """A sink of vectors alone has none; the same store twice is a mistake."""

    def vectors(batch: dict[str, Any]) -> dict[str, Any]:
        return {"v": np.ones((len(batch["x"]), 3), np.float32)}

    sink = gm.sink("vectors", keep="id", format="npy")
    with pytest.raises(gm.BadJob, match="the sink's format is npy"):
        gm.Job("rows.parquet", vectors, sink, workers=0, deliver="sqlite://s.sqlite#t").run()
    with pytest.raises(gm.BadJob, match=r"deliver names sqlite:///.* twice"):
        job(deliver=["sqlite://s.sqlite#t", "sqlite://./s.sqlite?mode=append#t"])


def test_a_server_that_is_not_there_is_told_before_scoring(capsys: pytest.CaptureFixture[str]) -> None:
    """In its own words, without the password, whether that is written out or from the environment. It may be there
    later, so that the run can be tried again (exit 1), also by `up`.
    """
    pytest.importorskip("psycopg")
    hidden = "hunter2-and-more"
    for address in (f"postgresql://me:{hidden}@127.0.0.1:1/db#t", f"postgresql://127.0.0.1:1/db?password={hidden}#t"):
        for to in (address, Secret("postgresql://me:${env:PW}@127.0.0.1:1/db#t", address)):
            with pytest.raises(gm.RunFailed, match=r"cannot be reached: connection failed[^\n]*run again") as told:
                job(deliver=[gm.to(to)]).run()
            assert hidden not in str(told.value) and hidden not in repr(told.value)
    typed = ("apply", "rows.parquet", "out", "--fn", "fn:doubled", "--workers", "0")
    code, out, err = command(capsys, *typed, "--deliver", f"postgresql://me:{hidden}@127.0.0.1:1/db#t")
    assert code == 1 and hidden not in out + err and "postgresql://127.0.0.1:1/db#t: cannot be reached" in err
    assert not Path("out").exists()


HELD = {
    "duckdb": "import duckdb; c = duckdb.connect('d.duckdb')",
    "sqlite": "import sqlite3; c = sqlite3.connect('d.sqlite'); c.execute('create table t (a)'); "
    "c.execute('begin exclusive')",
}


def _busy(kind: str) -> subprocess.Popen[str]:
    """A process that has the file of a store for itself until its stdin ends."""
    code = f"{HELD[kind]}; import sys; print('held', flush=True); sys.stdin.read()"
    holder = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    return holder


def test_a_store_that_is_busy_costs_no_scoring(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Somebody has the file open: the rows are scored and published, and brought there by the same command."""
    monkeypatch.setattr("gristmill.stores.duckdb.PATIENCE", 0.2)
    to = gm.to("duckdb://d.duckdb#scores")
    holder = _busy("duckdb")
    assert holder.stdin is not None
    with (
        pytest.warns(
            gm.GristmillWarning, match="close it there, and run again; the rows are scored, and brought there"
        ),
        pytest.raises(gm.RunFailed, match="the result is published, nothing is scored again"),
    ):
        job(deliver=[to]).run()
    assert gm.read("out").to_table().num_rows == ROWS
    code, _, told = command(capsys, "deliver", "out", "duckdb://d.duckdb#scores")
    assert code == 1 and "close it there" in told
    holder.stdin.close()
    assert holder.wait(10) == 0
    report = job(deliver=[to]).run()
    assert report.state == "nothing to do" and report.deliveries[0].rows == ROWS
    assert gm.lookup("duckdb://d.duckdb#scores", key="id").get(3)["y"] == 1.5


@pytest.mark.parametrize("kind", ["duckdb", "sqlite"])
def test_who_waits_for_a_busy_store_hears_signals(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C ends the wait for somebody who has the file open; a run that is to end gives it up soon."""
    job().run()
    holder, to = _busy(kind), f"{kind}://d.{kind}#scores"
    assert holder.stdin is not None
    asked = threading.Timer(0.7, os.kill, (os.getpid(), signal.SIGINT))
    began = time.monotonic()
    asked.start()
    with pytest.raises(KeyboardInterrupt):
        gm.deliver("out", to)
    monkeypatch.setattr("gristmill.process.interrupts.SOON", 0.2)
    ENDING.begin()
    try:
        with pytest.raises(gm.RunFailed, match=r"locked|[Cc]onflict"):
            gm.deliver("out", to)
    finally:
        ENDING.over()
    assert time.monotonic() - began < 8
    threading.Timer(0.3, holder.stdin.close).start()
    assert gm.deliver("out", to).rows == ROWS
    holder.wait(10)


def test_a_secret_stays_in_the_address(redis_server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in no file of the sink, no report, no status, and no note that says what was delivered."""
    pytest.importorskip("redis")
    secret = redis_server.partition("://:")[2].partition("@")[0]
    monkeypatch.setenv("REDIS_PASSWORD", secret)
    address = f"{redis_server.replace(secret, '${env:REDIS_PASSWORD}')}/4?key=id#scores"
    Path("job.yaml").write_text(
        "source: rows.parquet\nmodel: {call: 'fn:doubled'}\nsink: {uri: out, keep: [id]}\nengine: {workers: 0}\n"
        f"deliver: [{{to: '{address}'}}]\nrunning: {{log: log.jsonl}}\n"
    )
    made = gm.load_job("job.yaml")
    report = made.run()
    assert report.deliveries[0].rows == ROWS and gm.verify(made).ok
    gm.deliver("out", f"{redis_server}/4#plain", key="id")
    told = [str(report), str(gm.status("out")), str(gm.verify(made)), str(report.as_dict()), repr(made)]
    told += [path.read_bytes().decode(errors="replace") for path in Path().rglob("*") if path.is_file()]
    assert not [text for text in told if secret in text]


def test_rows_that_somebody_removed_are_told() -> None:
    """`verify` counts what is in the store; a table that is gone is delivered again."""
    made = job(deliver="sqlite://s.sqlite#scores")
    made.run()
    with closing(sqlite3.connect("s.sqlite")) as db:
        db.execute("DELETE FROM scores WHERE id < 5")
        db.commit()
    verdict = gm.verify("out")
    assert not verdict.ok and "s.sqlite#scores: holds 35 rows, but 40 were delivered" in verdict.lines[-1]
    with closing(sqlite3.connect("s.sqlite")) as db:
        db.execute("DROP TABLE scores")
        db.commit()
    assert "has no rows of this sink: deliver it again" in gm.verify("out").lines[-1]
    made.run()
    assert gm.verify("out").ok and len(rows()) == ROWS


@pytest.mark.long
def test_loaded_beside_the_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Committed parts are staged while later ones are scored, where no reader sees them."""
    monkeypatch.setattr(beside, "SOON", 0.0)
    monkeypatch.setattr(beside, "EVERY", 0.01)
    staged: list[int] = []

    def slow(batch: dict[str, Any]) -> dict[str, Any]:
        time.sleep(0.3)
        if os.path.exists("s.sqlite"):
            with closing(sqlite3.connect("s.sqlite", timeout=20)) as db:
                assert not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'scores'").fetchall()
                staged.append(db.execute("SELECT count(*) FROM gristmill_parts").fetchall()[0][0])
        return {"y": batch["x"] * 2}

    made = gm.Job(
        "rows.parquet", slow, gm.sink("out", keep="id"), workers=0, shard_rows=4, deliver="sqlite://s.sqlite#scores"
    )
    made.run()
    assert max(staged) > 1 and len(rows()) == ROWS


@pytest.mark.long
def test_two_into_one_file_beside_the_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither waits for the other, and readers get at the file while rows are scored."""
    monkeypatch.setattr(beside, "SOON", 0.0)
    monkeypatch.setattr(beside, "EVERY", 0.01)
    monkeypatch.setattr(duckdb_store, "PATIENCE", 8.0)  # which is what one waited for the other
    address, scoring, waited = "duckdb://s.duckdb#one", threading.Event(), [0.0]

    def slow(batch: dict[str, Any]) -> dict[str, Any]:
        time.sleep(0.3)
        return {"y": batch["x"] * 2}

    def read() -> None:
        while not scoring.wait(0.05):
            begun = time.monotonic()
            with suppress(gm.GristmillError), gm.lookup(address, key="id") as lookup:
                lookup.get(3)
            waited.append(time.monotonic() - begun)

    both = [gm.to(address), gm.to("duckdb://s.duckdb#two")]
    job(deliver=both).run()  # the file is there
    reader = threading.Thread(target=read)
    reader.start()
    made = gm.Job("rows.parquet", slow, gm.sink("out", keep="id"), workers=0, shard_rows=4, deliver=both)
    try:
        report = made.run(restart=True)
    finally:
        scoring.set()
        reader.join()
    assert [d.rows for d in report.deliveries] == [ROWS, ROWS]
    assert max(waited) < 6


@pytest.mark.parametrize("how", [{}, {"format": "jsonl"}, {"merge": True}, {"partition_by": ["n"]}], ids=str)
@pytest.mark.parametrize("at", ["disk", "s3"])
@pytest.mark.few(2)
def test_sinks_of_every_form(how: dict[str, Any], at: str, server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Are delivered from, also beside the run, on a disk and in an object store."""
    monkeypatch.setattr(beside, "SOON", 0.0)
    monkeypatch.setattr(beside, "EVERY", 0.01)
    place = (
        {"uri": "out"} if at == "disk" else {"uri": f"s3://box/{''.join(how) or 'plain'}", "storage": server.storage()}
    )
    made = job(sink=gm.sink(**place, keep=["id", "n"], **how), deliver="sqlite://s.sqlite?key=id#scores")
    assert made.run().deliveries[0].rows == ROWS
    with closing(sqlite3.connect("s.sqlite")) as db:
        assert db.execute("SELECT id, n, y FROM scores ORDER BY id").fetchall() == [
            (i, i % 4, i / 2) for i in range(ROWS)
        ]
    assert gm.verify(made).ok and made.run().state == "nothing to do"


KILLED = """
import sys, time
import gristmill as gm
from gristmill.commit.publication import published
from gristmill.driver import beside
beside.SOON, beside.EVERY = 0.0, 0.01
def slow(batch):
    time.sleep(float(sys.argv[1]))
    return {"y": batch["x"] * 2}
gm.Job("rows.parquet", slow, gm.sink("out", keep="id"), workers=0, shard_rows=4, deliver=["sqlite://s.sqlite#scores",
       gm.to("lmdb://s.lmdb", key="id")]).run()
"""


@pytest.mark.long
def test_a_run_that_is_killed_while_it_loads(folder: Path, until: Callable[..., Any]) -> None:
    """What is staged stays, and the same command goes on."""
    Path("killed.py").write_text(KILLED)
    process = subprocess.Popen([sys.executable, "killed.py", "0.4"])
    try:
        until(lambda: len(list(Path(".").glob(".s.lmdb.gm_*/*.arrow"))) > 1)
    finally:
        process.kill()
        process.wait()
    before = {path.name: path.stat().st_ino for path in Path(".").glob(".s.lmdb.gm_*/*.arrow")}
    assert not Path("s.lmdb").exists() and not list(Path("out").glob("*.parquet"))
    assert before
    assert subprocess.run([sys.executable, "killed.py", "0"]).returncode == 0
    assert len(rows()) == ROWS and gm.verify("out").ok
    with gm.lookup("lmdb://s.lmdb") as lookup:
        assert lookup.get(39) == {"id": 39, "y": 19.5}
    assert not list(Path(".").glob(".s.lmdb.gm_*"))


def test_looked_up_in_a_sink() -> None:
    """By the row id, or by columns that are named; a key of several columns is a tuple."""
    job(sink=gm.sink("out", keep=["id", "x"], row_id="row", key=["id", "x"])).run()
    with gm.lookup("out") as lookup:
        assert lookup.get((3, 0.75))["y"] == 1.5
        with pytest.raises(gm.BadJob, match="the key has 2 columns: id, x"):
            lookup.get(3)
    assert gm.lookup("out", key="id").get(4)["y"] == 2.0
    with pytest.raises(gm.BadJob, match=r"has no column 'idd': it has .*id.*; did you mean 'id'\?$"):
        gm.lookup("out", key="idd").get(1)
    with pytest.raises(gm.BadJob, match="column 'id' is int64, and a key is not"):
        gm.lookup("out", key="id").get("four")
    with pytest.raises(gm.BadSource, match="there is no such file"):
        gm.lookup("lmdb://nothing.lmdb").get(1)


def test_keys_of_several_columns(folder: Path) -> None:
    """In every store that is a file."""
    job(sink=gm.sink("out", keep=["id", "n"])).run()
    for to in ("lmdb://k.lmdb", "duckdb://k.duckdb#t", "sqlite://k.sqlite#t"):
        gm.deliver("out", to, key=["id", "n"])
        with gm.lookup(to) as lookup:
            assert lookup.get_many([(7, 3), (7, 2)]) == [{"id": 7, "n": 3, "y": 3.5}, None]


@pytest.mark.parametrize(
    "values", [[*range(30), 29, *range(31, ROWS)], [*range(39), None], [*range(9), 8, *range(10, ROWS)]]
)
def test_keys_that_ascend_but_for_one(values: list[int | None]) -> None:
    """One that repeats, in its file or at the edge of two, or is missing, is found among keys that ascend otherwise."""
    pq.write_table(pa.table({"id": values, "x": np.arange(ROWS) / 4}), "rows.parquet")
    job().run()
    with pytest.raises(gm.BadJob, match=r"repeats?: (29|8) 2 times|(?:have a null in their|has a null in its) key"):
        gm.deliver("out", "sqlite://s.sqlite#scores", key="id")


@pytest.mark.parametrize("backwards", [False, True])
def test_keys_in_either_order(backwards: bool) -> None:
    """Keys that ascend and keys that do not are delivered alike."""
    pq.write_table(
        pa.table({"id": np.arange(ROWS)[:: -1 if backwards else 1], "x": np.arange(ROWS) / 4}), "rows.parquet"
    )
    job().run()
    assert gm.deliver("out", "sqlite://s.sqlite#scores", key="id").rows == ROWS
    assert [row[0] for row in rows()] == [*range(ROWS)]


def test_a_new_sqlite_file_gets_its_log_with_its_rows() -> None:
    """Until then it is written once, and afterwards readers never wait; a file of others stays as it is."""
    with closing(sqlite3.connect("theirs.sqlite")) as db:
        db.execute("CREATE TABLE notes (id)")
    job().run()
    seen = {}
    for file in ("s.sqlite", "theirs.sqlite"):
        delivery, found = gm.to(f"sqlite://{file}#scores", key="id"), published("out")
        store = deliveries.opened(delivery)
        deliveries.Loading(delivery, deliveries.Result.of(found), store).stage(found.live())
        store.close()
        seen[file] = [mode(file)]
        gm.deliver("out", delivery)
        seen[file].append(mode(file))
        assert len(rows(file)) == ROWS
    assert seen == {"s.sqlite": ["delete", "wal"], "theirs.sqlite": ["delete", "delete"]}


def mode(file: str) -> str:
    """How a file of SQLite is written."""
    with closing(sqlite3.connect(file)) as db:
        return str(db.execute("PRAGMA journal_mode").fetchone()[0])


@pytest.mark.parametrize("kind", [pa.int8(), pa.uint64(), pa.float32(), pa.float64()])
def test_lists_of_numbers_as_bytes(kind: pa.DataType) -> None:
    """Those that are all as long, which are packed together, and others, are read back by any MessagePack library."""
    numbers = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    for values in (numbers, [None, *numbers], [[], *numbers], [[1, None, 3], *numbers], [[], []], []):
        packed = packing.packed_rows(pa.record_batch({"v": pa.array(values, pa.list_(kind))}))
        assert [msgpack.unpackb(row) for row in packed.to_pylist()] == [{"v": value} for value in values]
