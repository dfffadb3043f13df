"""Spark tables as source and sink: rows by position from one snapshot, a result that replaces a table in one step."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import places
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import gristmill as gm
import sparkjoin
from gristmill.job.delivery import staging_of
from gristmill.stores import spark as stores

pytestmark = pytest.mark.leaves_children  # Spark's own


@pytest.fixture(scope="module")
def spark() -> Iterator[Any]:
    """The session of this process."""
    from pyspark.sql import SparkSession

    with places.started("spark"):
        yield SparkSession.builder.getOrCreate()


@pytest.fixture
def shop(spark: Any) -> Iterator[str]:
    """A database with a table `sold` of 300 rows in two files, a view `cheap` and a partitioned table `by_day`."""
    spark.sql("CREATE DATABASE shop")
    where = spark.catalog.getDatabase("shop").locationUri.removeprefix("file:")
    rows = spark.range(300).selectExpr(
        "id", "id / 4 AS x", "timestamp_seconds(id + 253370764800) AS at", "id % 3 AS day"
    )
    rows.repartition(2).write.saveAsTable("shop.sold", format="parquet")
    rows.write.partitionBy("day").saveAsTable("shop.by_day", format="parquet")
    spark.sql("CREATE VIEW shop.cheap AS SELECT id, x FROM shop.sold WHERE x < 30")
    yield "shop"
    spark.sql("DROP DATABASE shop CASCADE")
    shutil.rmtree(where, ignore_errors=True)


def vectors(batch: dict[str, Any]) -> dict[str, Any]:
    """A vector of two numbers for each row."""
    return {"v": np.stack([batch["x"], -batch["x"]], axis=1).astype("float32")}


def doubled(batch: dict[str, Any], by: float = 2.0) -> dict[str, Any]:
    """A number for each row."""
    return {"y": batch["x"] * by}


def job(source: str, sink: Any, fn: Any, keep: tuple[str, ...] = ("id",), **options: Any) -> gm.Job:
    """A function over a table, in this process unless said."""
    sink = sink if isinstance(sink, gm.Sink) else gm.sink(sink, keep=list(keep))
    return gm.Job(source, fn, sink, **{"workers": 0, **options})


@pytest.mark.long
def test_from_a_table_to_a_table(spark: Any, shop: str) -> None:
    """On the Spark engine: every row once, with vectors and timestamps after 2262; then there is nothing to do."""
    made = job("spark://shop.sold", "spark://shop.scored", vectors, ("id", "at"), engine=gm.spark(), workers=2)
    report = made.run()
    assert (report.rows_ok, report.engine) == (300, "spark")
    scored = {r.id: r for r in spark.table("shop.scored").collect()}
    assert sorted(scored) == list(range(300))
    assert all(list(scored[i].v) == [i / 4, -i / 4] for i in scored)
    assert spark.sql("SELECT count(*) FROM shop.scored JOIN shop.sold USING (id, at)").first()[0] == 300
    assert made.run().state == "nothing to do"
    assert made.preview(2).num_rows == 2
    assert gm.verify(made).ok


def test_files_that_others_added_are_read(spark: Any, shop: str, tmp_path: Path) -> None:
    """To a table that this session has listed before, and what a view over it shows: as another process leaves them."""
    folder = tmp_path / "t"
    folder.mkdir()
    sinks = {name: gm.sink(str(tmp_path / name), keep=["id"]) for name in ("events", "seen")}
    for night in range(2):
        pq.write_table(pa.table({"id": np.arange(10) + 10 * night, "x": np.ones(10)}), folder / f"{night}.parquet")
        if not night:
            spark.sql(f"CREATE TABLE shop.events (id BIGINT, x DOUBLE) USING parquet LOCATION 'file://{folder}'")
            spark.sql("CREATE VIEW shop.seen AS SELECT id, x FROM shop.events WHERE id >= 0")
        for name, sink in sinks.items():
            job(f"spark://shop.{name}", sink, doubled).run(
                **({"append": True} if name == "events" else {"restart": True})
            )
            assert gm.read(sink.uri).count_rows() == 10 * (night + 1)


def test_parts_of_unequal_sizes(spark: Any, shop: str) -> None:
    """A first part of few rows, as a filter leaves it, beside full ones: each is a file of the table."""
    few = [gm.filter("id >= 95")]
    job("spark://shop.sold", "spark://shop.scored", doubled, steps=few, shard_rows=100).run()
    assert sorted(r.id for r in spark.table("shop.scored").collect()) == list(range(95, 300))


def test_replaced_in_one_step(spark: Any, shop: str) -> None:
    """A new result takes the place of the old one, whose files stay for the queries that are reading them."""
    job("spark://shop.sold", "spark://shop.scored", gm.model(doubled)).run()
    before = spark.table("shop.scored")
    files = before.inputFiles()
    job("spark://shop.sold", "spark://shop.scored", gm.model(doubled, by=3.0)).run(restart=True)
    assert before.count() == 300
    assert spark.table("shop.scored").agg({"y": "sum"}).first()[0] == sum(3 * i / 4 for i in range(300))
    assert not set(files) & set(spark.table("shop.scored").inputFiles())
    job("spark://shop.sold", "spark://shop.scored", gm.model(doubled, by=4.0)).run(restart=True)
    kept = os.path.dirname(staging_of("spark://shop.scored", {}))
    assert [n.partition("-g")[2][:4] for n in sorted(os.listdir(kept))] == ["0002", "0003", ""]


def test_runs_that_begin_anew_replace_the_table(spark: Any, shop: str) -> None:
    """Where the folder of the runs was removed, numbers begin again: a result is told by what it holds."""
    job("spark://shop.sold", "spark://shop.scored", gm.model(doubled)).run()
    shutil.rmtree(staging_of("spark://shop.scored", {}))
    for _ in range(2):
        job("spark://shop.sold", "spark://shop.scored", gm.model(doubled, by=3.0)).run()
        spark.catalog.refreshTable("shop.scored")
        assert spark.table("shop.scored").agg({"y": "sum"}).first()[0] == sum(3 * i / 4 for i in range(300))


def test_stopped_before_the_table_is_replaced(spark: Any, shop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the catalog refuses at the end, the run fails in its words, the table stays; the next run only replaces it.
    What was made stays, as nobody knows whether a table of another name is made of it.
    """
    made = job("spark://shop.sold", "spark://shop.scored", doubled)

    def down(self: stores.Table, *_: Any) -> bool:
        with self.catalog.said():
            self.catalog.spark.sql("DROP TABLE away.gone")
        return True

    with monkeypatch.context() as patched:
        patched.setattr(stores.Table, "_point_at", down)
        with pytest.raises(
            gm.RunFailed, match=r"shop.scored: Spark says: .*away.*;\nthe result is published"
        ) as failed:
            made.run()
    assert failed.value.report.state == "published, but not delivered"
    assert not spark.catalog.tableExists("shop.scored")
    assert gm.status("spark://shop.scored")["deliveries"][0]["state"] == "not delivered"
    assert made.run().state == "nothing to do"
    assert spark.table("shop.scored").count() == 300
    kept = os.path.dirname(staging_of("spark://shop.scored", {}))
    assert [n.partition("-g")[2][:4] for n in sorted(os.listdir(kept))] == ["0001", "0001", ""]


def test_fault_73_what_a_killed_run_had_begun_to_fill_goes(spark: Any, shop: str) -> None:
    """Killed with SIGKILL as it gives the filled folder its name: the next run replaces the table and cleans up, but
    for what the table held that is gone: it may have another name.
    """
    made = job("spark://shop.sold", "spark://shop.scored", doubled)
    made.run()
    kept = Path(staging_of("spark://shop.scored", {})).parent
    spark.sql("DROP TABLE shop.scored")
    script = (
        "import os, sys\n"
        "import gristmill as gm, sparkjoin\n"
        "from gristmill.files.disk import LOCAL\n"
        "sparkjoin.join(sys.argv[1])\n"
        "LOCAL.__class__.rename = lambda *_: os.kill(os.getpid(), 9)\n"
        "gm.deliver(sys.argv[2], 'spark://shop.scored')\n"
    )
    path = os.pathsep.join(filter(None, sys.path))
    killed = subprocess.run(
        [sys.executable, "-c", script, sparkjoin.address(spark), str(kept / "run")],
        env={**os.environ, "PYTHONPATH": path},
    )
    assert killed.returncode == -9
    assert [n for n in os.listdir(kept) if n.endswith(".tmp")]
    assert made.run().state == "nothing to do"
    assert [n.partition("-g")[2][:4] for n in sorted(os.listdir(kept))] == ["0001", "0001", ""]
    assert not [n for n in os.listdir(kept) if n.endswith(".tmp")]
    assert spark.table("shop.scored").count() == 300


def test_appended_to(spark: Any, shop: str, tmp_path: Path) -> None:
    """The rows of a table, of those who insert there, and of each night, once; the folders before stay as they are."""
    spark.sql("CREATE TABLE shop.all_nights (id BIGINT, y DOUBLE) USING PARQUET")
    spark.sql("INSERT INTO shop.all_nights VALUES (-1, 1.0), (-2, 2.0)")
    sink = gm.sink("spark://shop.all_nights?mode=append", keep=["id"], storage={"staging": str(tmp_path / "kept")})
    for night in range(3):
        spark.sql(f"CREATE OR REPLACE VIEW shop.some AS SELECT id, x FROM shop.sold WHERE id < {50 * (night + 1)}")
        made = job("spark://shop.some", sink, doubled)
        assert made.run(restart=night > 0).deliveries[0].rows == 50 * (night + 1)
        assert made.run().state == "nothing to do"
        if night == 1:
            spark.sql("INSERT INTO shop.all_nights VALUES (-3, 3.0)")
    assert spark.table("shop.all_nights").count() == 50 + 100 + 150 + 3
    assert spark.table("shop.all_nights").where("id < 0").count() == 3
    assert gm.verify(made).ok
    assert sorted(os.listdir(tmp_path / "kept" / "shop.all_nights.gristmill"))[-1] == "run"


def test_a_table_that_grows(spark: Any, shop: str, tmp_path: Path) -> None:
    """New files are an input that has changed: refused, or appended."""
    made = job("spark://shop.sold", str(tmp_path / "out"), doubled)
    made.run()
    spark.sql("INSERT INTO shop.sold SELECT id + 1000, x, at, day FROM shop.sold WHERE id < 10")
    with pytest.raises(gm.PlanChanged, match="--append"):
        made.run()
    report = made.run(append=True)
    assert (report.rows_ok, report.rows_run) == (310, 10)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["cheap", "by_day"])
def test_what_is_more_than_its_files(spark: Any, shop: str, tmp_path: Path, name: str) -> None:
    """A view and a partitioned table are copied for a run; what changes in them is noticed."""
    made = job(f"spark://shop.{name}", str(tmp_path / "out"), doubled)
    rows = spark.table(f"shop.{name}").count()
    assert made.run().rows_ok == rows
    assert made.run().state == "nothing to do"
    assert not list((tmp_path / "out" / "_gristmill" / "inputs").glob("*/"))
    table = "sold" if name == "cheap" else "by_day"
    spark.sql(f"INSERT INTO shop.{table} SELECT id + 1000, 1.0, at, day FROM shop.{table} LIMIT 1")
    with pytest.raises(gm.PlanChanged):
        made.run()
    assert made.run(restart=True).rows_ok == rows + 1


def test_a_copy_that_is_gone(spark: Any, shop: str, tmp_path: Path) -> None:
    """A run goes on with one that is made again: it has the rows in the same order, though Spark has them in any."""

    def picky(batch: dict[str, Any]) -> dict[str, Any]:
        if 7.0 in batch["x"]:
            raise ValueError("no sevens")
        return {"y": batch["x"]}

    spark.sql("CREATE VIEW shop.shuffled AS SELECT /*+ REPARTITION(3) */ id, x FROM shop.sold WHERE x < 30")
    made = job("spark://shop.shuffled", str(tmp_path / "out"), picky, gates=gm.Gates(min_ok=1.0))
    with pytest.raises(gm.GateFailed):
        made.run()
    (copy,) = (tmp_path / "out" / "_gristmill" / "inputs").glob("*.snapshot")
    shutil.rmtree(copy)
    assert made.run(accept=True).rows_ok == 119
    assert sorted(gm.read(tmp_path / "out").to_table()["id"].to_pylist()) == [i for i in range(120) if i != 28]


@pytest.mark.parametrize("kind", ["TIMESTAMP", "TIMESTAMP_NTZ"])
def test_a_view_s_times_count_to_the_microsecond(spark: Any, shop: str, tmp_path: Path, kind: str) -> None:
    """Times that are all 250 microseconds later are another input; far and early ones are told, too."""
    made = job("spark://moments", str(tmp_path / "out"), lambda b: {"y": b["id"]}, keep=["id"])
    for late in (0, 250):
        at = f"CAST(timestamp_micros(1700000000000000 + id + {late}) AS {kind})"
        rows = spark.range(3).selectExpr(
            "id", f"named_struct('at', {at}) AS seen", f"CAST('0001-01-01' AS {kind}) AS b"
        )
        rows.selectExpr("*", f"CAST('9999-12-31 23:59:59' AS {kind}) AS e").createOrReplaceTempView("moments")
        if late == 0:
            assert made.run().rows_ok == 3
            assert made.run().state == "nothing to do"
    with pytest.raises(gm.PlanChanged):
        made.run()


def test_no_rows(spark: Any, shop: str) -> None:
    """An empty result is an empty table with the columns."""
    spark.sql("CREATE VIEW shop.none AS SELECT * FROM shop.sold WHERE id < 0")
    model = gm.model(doubled, returns={"y": "float64"})
    job("spark://shop.none", "spark://shop.scored", model, gates=gm.Gates(allow_empty=True)).run()
    assert (spark.table("shop.scored").count(), spark.table("shop.scored").columns) == (0, ["id", "y"])


def test_what_cannot_be(spark: Any, shop: str, tmp_path: Path) -> None:
    """Tables that are not there, names that are none, sinks that could not be replaced in one step: told at once."""
    with pytest.raises(gm.BadSource, match=r"no such table: shop holds by_day, cheap, sold"):
        job("spark://shop.soldd", str(tmp_path / "out"), doubled).run()
    with pytest.raises(gm.BadSource, match="it has no database 'shopp'"):
        job("spark://shopp.sold", str(tmp_path / "out"), doubled).run()
    for sink, why in {
        "shop.by_day": "partitioned", "shop.cheap": "is a view", "shop.a; DROP": "write a table", "nodb.t": "create it",
        "shop.t?mode=upsert": "no key: name the columns",
    }.items():  # fmt: skip
        with pytest.raises(gm.BadJob, match=why):
            job("spark://shop.sold", f"spark://{sink}", doubled).run()
    spark.sql("CREATE TABLE shop.other (id BIGINT, y STRING) USING PARQUET")
    with pytest.raises(gm.BadJob, match=r"column 'y' is string, which does not hold the result's double"):
        job("spark://shop.sold", "spark://shop.other", doubled).run()
    spark.sql("DROP TABLE shop.other")
    assert job("spark://shop.sold", "spark://shop.other", doubled).run().rows_ok == 300
    assert spark.table("shop.other").count() == 300


def test_an_upsert_that_would_lose_values(spark: Any, shop: str, tmp_path: Path) -> None:
    """Of a column of others, as it writes whole rows: refused before anything is scored."""
    spark.sql("CREATE TABLE shop.noted (id BIGINT, y DOUBLE, note STRING) USING PARQUET")
    spark.sql("INSERT INTO shop.noted VALUES (1, 0.0, 'by hand')")
    made = job("spark://shop.sold", "spark://shop.noted?mode=upsert&key=id", doubled)
    with pytest.raises(gm.BadJob, match=r"columns that the result lacks \(note\), whose values an upsert would lose"):
        made.run()
    assert [tuple(row) for row in spark.table("shop.noted").collect()] == [(1, 0.0, "by hand")]


def test_files_that_spark_reads_are_linked(spark: Any, shop: str, tmp_path: Path) -> None:
    """A table takes no room beside its sink, unless its columns are of other types; another format is written anew."""
    same = job("spark://shop.sold", str(tmp_path / "same"), vectors)
    same.run()
    gm.deliver(str(tmp_path / "same"), "spark://shop.same")
    (linked,) = spark.table("shop.same").inputFiles()
    assert os.stat(linked.removeprefix("file://")).st_nlink > 2
    assert [list(r.v) for r in spark.table("shop.same").where("id = 4").collect()] == [[1.0, -1.0]]
    spark.sql("CREATE TABLE shop.wider (id BIGINT, v ARRAY<DOUBLE>) USING PARQUET")
    gm.deliver(str(tmp_path / "same"), "spark://shop.wider")
    job("spark://shop.sold", gm.sink(str(tmp_path / "text"), format="jsonl", keep=["id"]), vectors).run()
    gm.deliver(str(tmp_path / "text"), "spark://shop.text")
    for table in ("wider", "text"):
        assert spark.table(f"shop.{table}").where("v[0] = id / 4").count() == 300


@pytest.mark.long
def test_in_a_session_of_its_own(tmp_path: Path) -> None:
    """From the command line: a session is started with a catalog that lasts, and with the settings of the engine."""
    (tmp_path / "double.py").write_text("def double(batch):\n    return {'y': batch['x'] * 2}\n")
    (tmp_path / "job.yaml").write_text(
        "source: spark://shop.sold\nmodel: {call: 'double:double'}\nsink: {uri: 'spark://shop.scored', keep: [id],"
        " options: {key: [id]}}\n"
        "engine: {name: spark, workers: 2, conf: {spark.sql.warehouse.dir: WAREHOUSE}}\n".replace(
            "WAREHOUSE", str(tmp_path / "houses")
        )
    )
    begun = (
        "from pyspark.sql import SparkSession\n"
        "made = SparkSession.builder.config('spark.sql.warehouse.dir', 'houses').enableHiveSupport().getOrCreate()\n"
        "made.sql('CREATE DATABASE shop')\n"
        "made.range(30).selectExpr('id', 'id / 4 AS x').write.saveAsTable('shop.sold', format='parquet')\n"
    )
    environment = {**os.environ, **places.SPARK_ENV, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}

    def command(*arguments: str) -> str:
        made = subprocess.run(
            [sys.executable, *arguments], cwd=tmp_path, env=environment, text=True, capture_output=True
        )
        assert made.returncode == 0, made.stderr
        return made.stdout

    command("-c", begun)
    command("-m", "gristmill", "run", "job.yaml")
    assert len(list((tmp_path / "houses" / "shop.db" / "scored.gristmill").glob("data-g0001-*"))) == 1
    assert "delivered" in command("-m", "gristmill", "verify", "job.yaml")
    assert '"y": 3.5' in command("-m", "gristmill", "lookup", "spark://shop.scored", "7", "--json")


def test_a_job_is_made_without_a_session(tmp_path: Path) -> None:
    """A worker imports the module that makes it, too; and a job file names the table as it was written."""
    script = (
        "import gristmill as gm, sys\n"
        "made = gm.Job('in', lambda b: b, 'spark://shop.scored')\n"
        "assert repr(made).endswith('-> spark://shop.scored)'), made\n"
        "assert 'pyspark' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
