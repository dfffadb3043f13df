"""What every source that is a store promises: all values as they are, at one snapshot, for as long as a run takes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import wells
from scored import job
from wells import Row, Well

import gristmill as gm
from gristmill.driver import views
from gristmill.job.snapshots import SNAPSHOTS
from gristmill.snapshots.pinning import Pinning

NO_DATABASES = ("delta", "iceberg", "lance", "datasets", "kafka")  # which are asked no queries


@pytest.fixture(params=list(wells.WELLS))
def well(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Well]:
    """Each kind of store, with nothing in it."""
    server = request.getfixturevalue("postgres") if request.param in wells.SERVED else ""
    with wells.WELLS[request.param](server, tmp_path) as made:
        yield made


def read(folder: Path) -> dict[int, Row]:
    """The rows of a result by their ids, without the model's column."""
    found = gm.read(str(folder)).to_table()
    assert found["double"].to_pylist() == [2 * i for i in found["id"].to_pylist()]
    rows = found.drop_columns(["double"]).to_pylist()
    assert len(rows) == len({row["id"] for row in rows})
    return {row["id"]: _plain(row) for row in rows}


def wanted(well: Well, rows: list[Row]) -> dict[int, Row]:
    """What a run reads of these rows."""
    return {row["id"]: _plain(well.seen(row)) for row in rows}


def _plain(row: Row) -> Row:
    """JSON as its values: databases write it with other spaces."""
    names = [n for n in ("about", "tags", "vector") if isinstance(row.get(n), str)]
    return {**row, **{name: json.loads(row[name]) for name in names}}


def copies(folder: Path) -> list[str]:
    """What the sink holds of the store."""
    inputs = folder / "_gristmill" / "inputs"
    return [name for name in os.listdir(inputs) if not name.endswith(".json")] if inputs.exists() else []


@pytest.mark.few(2)
def test_values_of_every_kind_arrive_unchanged(well: Well, tmp_path: Path) -> None:
    """Nulls, unicode, numbers beyond 2^53, decimals, times with a zone, bytes, lists, structs and vectors."""
    rows = wells.rows(0, 60)
    well.fill(rows[:35])
    well.fill(rows[35:])
    report = job(well.address, str(tmp_path / "out"), well.storage).run()
    assert (report.rows_in, report.rows_ok) == (60, 60)
    assert read(tmp_path / "out") == wanted(well, rows)
    assert copies(tmp_path / "out") == []


@pytest.mark.few(2)
def test_a_second_run_finds_the_same_rows_or_says_that_they_changed(well: Well, tmp_path: Path) -> None:
    """Nothing to do for what was read already; other rows are another input."""
    well.fill(wells.rows(0, 20))
    job(well.address, str(tmp_path / "out"), well.storage).run()
    parts = sorted((tmp_path / "out").glob("*.parquet"))
    again = job(well.address, str(tmp_path / "out"), well.storage).run()
    assert again.rows_ok == 20 and sorted((tmp_path / "out").glob("*.parquet")) == parts
    well.fill(wells.rows(20, 25))
    with pytest.raises(gm.PlanChanged):
        job(well.address, str(tmp_path / "out"), well.storage).run()
    assert copies(tmp_path / "out") == []
    job(well.address, str(tmp_path / "out"), well.storage).run(restart=True)
    assert read(tmp_path / "out") == wanted(well, wells.rows(0, 25))


@pytest.mark.few(2)
def test_a_killed_run_goes_on_with_the_rows_it_began_with(well: Well, tmp_path: Path) -> None:
    """Rows that are written meanwhile are not seen, before or after."""
    well.fill(wells.rows(0, 120))
    sink = tmp_path / "out"
    about: dict[str, Any] = {"address": well.address, "sink": str(sink), "storage": well.storage, "pause": 0.1}
    code = f"import sys; sys.path[:0] = {[str(Path(__file__).parent)]!r}; import scored; scored.run(**{about!r})"
    running = subprocess.Popen([sys.executable, "-c", code])
    try:
        until = time.monotonic() + 60
        while len(list(sink.glob("_gristmill/g*/receipts/*.json"))) < 2:
            assert running.poll() is None and time.monotonic() < until
            time.sleep(0.02)
    finally:
        running.kill()
        running.wait()
    well.fill(wells.rows(120, 130))
    report = job(**about).run()
    assert report.shards_resumed > 0
    assert read(sink) == wanted(well, wells.rows(0, 120))
    with pytest.raises(gm.PlanChanged):
        job(**about).run()


def test_a_snapshot_is_that_of_the_moment_it_is_opened(well: Well, tmp_path: Path) -> None:
    """Rows that are committed between opening and reading are not among those read."""
    from gristmill.job.snapshots import wanted as asked

    if well.name == "duckdb":
        pytest.skip("nobody can write a DuckDB file while it is open")
    well.fill(wells.rows(0, 30))
    (what,) = asked(gm.source(well.address, storage=well.storage))
    snapshot = SNAPSHOTS.get(what.place.store).open(what, "")
    try:
        well.fill(wells.rows(30, 40))
        files = snapshot.files()
        if well.name == "kafka":
            count = sum(end - first for _, first, end, *_ in json.loads(snapshot.version))
        elif files is not None:
            import pyarrow.parquet as pq

            count = sum(pq.read_metadata(file.uri).num_rows for file in files)
        else:
            count = sum(batch.num_rows for piece in snapshot.pieces() for batch in piece())
    finally:
        snapshot.close()
    assert count == 30


def test_an_empty_table_is_a_source_of_no_rows(well: Well, tmp_path: Path) -> None:
    """Its columns are known, and a result without rows is published."""
    well.fill([])
    report = job(well.address, str(tmp_path / "out"), well.storage).run()
    assert report.rows_in == 0
    assert read(tmp_path / "out") == {}


@pytest.mark.few(1)
def test_limit_where_and_columns(well: Well, tmp_path: Path) -> None:
    """They hold for stores as for files."""
    well.fill(wells.rows(0, 60))
    source = gm.source(well.address, storage=well.storage, where="id >= 10", limit=20, columns=["id", "text"])
    found = gm.apply(source, str(tmp_path / "out"), fn=first_letter, keep=["id", "text"]).read().to_table()
    assert found.num_rows == 20 and min(found["id"].to_pylist()) >= 10
    few = gm.source(well.address, storage=well.storage, limit=7)
    assert gm.apply(few, str(tmp_path / "few"), fn=first_letter, keep=["id"]).read().to_table().num_rows == 7


def first_letter(batch: dict[str, Any]) -> dict[str, Any]:
    """Something of each row."""
    return {"letter": [str(i)[0] for i in batch["id"]]}


def test_a_query_is_a_source(well: Well, tmp_path: Path) -> None:
    """Its rows are those of one snapshot, too; a store that is no database refuses one."""
    well.fill(wells.rows(0, 40))
    query = "SELECT id, text FROM rows WHERE id < 25 ORDER BY id -- the first ones"
    if well.name in NO_DATABASES:
        with pytest.raises(gm.BadJob, match="a query, which is asked of one database"):
            job(well.address, str(tmp_path / "out"), well.storage, query=query).run()
        return
    report = job(well.database, str(tmp_path / "out"), well.storage, query=query).run()
    assert report.rows_ok == 25
    assert gm.read(str(tmp_path / "out")).to_table()["id"].to_pylist() == list(range(25))


def test_a_query_that_does_not_parse_says_so_in_the_words_of_the_database(well: Well, tmp_path: Path) -> None:
    """Before anything is scored, in one line, and without a sink."""
    well.fill(wells.rows(0, 3))
    if well.name in NO_DATABASES:
        pytest.skip("it takes no query")
    with pytest.raises(gm.BadSource, match=r"(?i)syntax error|parser error") as told:
        job(well.database, str(tmp_path / "out"), well.storage, query="SELECT id FROM FROM rows").run()
    assert "\n" not in str(told.value) and not (tmp_path / "out").exists()


def test_a_table_that_is_not_there_is_told_with_what_is(well: Well, tmp_path: Path) -> None:
    """The name that was probably meant, and no sink."""
    well.fill(wells.rows(0, 3))
    address = well.address[:-1] if well.name in ("delta", "datasets") else well.address.replace("rows", "rowz")
    with pytest.raises(gm.BadSource) as told:
        job(address if well.name != "datasets" else f"datasets://{address}", str(tmp_path / "out"), well.storage).run()
    if well.name not in ("delta", "datasets"):
        assert "did you mean 'rows'" in str(told.value)
    assert "\n" not in str(told.value) and not (tmp_path / "out").exists()


@pytest.mark.parametrize("copied", [10, 10_000])
@pytest.mark.few(2)
def test_a_preview_and_a_plan_leave_nothing(
    well: Well, copied: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They read the store as a run does; a plan counts the rows where that is less than to copy them."""
    monkeypatch.setattr(views, "COPIED", copied)
    well.fill(wells.rows(0, 40))
    asked = job(well.address, str(tmp_path / "out"), well.storage)
    assert asked.preview(5).num_rows == 5
    assert asked.plan().rows == 40
    assert not (tmp_path / "out").exists()


def test_nothing_is_held_while_rows_are_scored(well: Well, tmp_path: Path) -> None:
    """Once the rows are copied, others may write, and a server may tidy up."""
    well.fill(wells.rows(0, 10))
    pinning = Pinning(gm.source(well.address, storage=well.storage), str(tmp_path / "copies"))
    found = pinning.pinned(lambda _: None)
    well.fill(wells.rows(10, 20))
    if well.name in wells.SERVED:
        import psycopg

        with psycopg.connect(well.database.replace("sqlalchemy+postgresql+psycopg", "postgresql")) as db:
            idle = "SELECT count(*) FROM pg_stat_activity WHERE state = 'idle in transaction'"
            assert db.execute(idle).fetchall() == [(0,)]
    assert found.files
