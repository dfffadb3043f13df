"""What is told of deliveries: how far they are, how long they took, what they leave, and what no repeat mends."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import gristmill as gm
from gristmill.cli.app import main
from gristmill.stores import delivery as deliveries
from gristmill.stores import tables

ROWS = 40
UPSERT = "sqlite://s.sqlite?mode=upsert&key=id#scores"


def doubled(batch: dict[str, Any]) -> dict[str, Any]:
    """A number for each row."""
    return {"y": batch["x"] * 2}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with rows in it and a job file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    source(range(ROWS))
    Path("fn.py").write_text("def doubled(batch):\n    return {'y': batch['x'] * 2}\n")
    Path("job.yaml").write_text(
        "source: rows.parquet\nmodel: {call: 'fn:doubled'}\nsink: {uri: out, keep: [id]}\nengine: {workers: 0}\n"
        f"deliver: ['{UPSERT}', 'lmdb://s.lmdb?key=id']\n"
    )
    return tmp_path


def source(ids: Any) -> None:
    """Rows with these ids."""
    pq.write_table(pa.table({"id": np.array(ids), "x": np.arange(len(ids)) / 4}), "rows.parquet")


def job(**options: Any) -> gm.Job:
    """The rows, here, delivered by key."""
    sink = gm.sink("out", keep="id")
    return gm.Job("rows.parquet", doubled, sink, workers=0, deliver=[gm.to(UPSERT)], **options)


def command(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """How a command ended, and what it printed."""
    code = main([*arguments])
    said = capsys.readouterr()
    return code, said.out, said.err


def rows() -> list[tuple[Any, ...]]:
    """What is in the table, as any client sees it."""
    with closing(sqlite3.connect("s.sqlite")) as db:
        return db.execute("SELECT * FROM scores ORDER BY id").fetchall()


def test_how_far_a_delivery_is(capsys: pytest.CaptureFixture[str]) -> None:
    """A run tells of each store what it does there, with rows; so do plain lines and `gristmill deliver`."""
    code, _, err = command(capsys, "run", "job.yaml", "--progress", "json")
    events = [json.loads(line) for line in err.splitlines() if line.startswith("{")]
    told = [e["delivery"] for e in events if e["event"] == "progress" and e["phase"] == "delivering"]
    assert code == 0 and all(told)
    for store in ("scores", "s.lmdb"):
        steps = [(one["step"], one["rows"], one["of"]) for one in told if one["to"].endswith(store)]
        assert steps[0] == ("looking", 0, 0) and steps[-1] == ("switching", ROWS, ROWS)
        assert ("loading", 0, ROWS) in steps
    _, _, err = command(capsys, "run", "job.yaml", "--restart", "--progress", "lines")
    assert f"delivering: 0 of {ROWS} rows (0 %) to sqlite:///" in err
    assert f"delivering: making {ROWS} rows visible in lmdb:///" in err
    code, _, err = command(capsys, "deliver", "out", "duckdb://d.duckdb#scores")
    assert code == 0 and f"delivering: making {ROWS} rows visible in duckdb:///" in err


def test_status_tells_what_is_being_delivered(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a run is in a store's own step, and no longer once it is over."""
    seen: list[str] = []
    publish = tables.Tables.publish

    def watched(self: Any, load: Any) -> None:
        seen.append(command(capsys, "status", "out")[1])
        publish(self, load)

    monkeypatch.setattr(tables.Tables, "publish", watched)
    assert command(capsys, "run", "job.yaml")[0] == 0
    assert f"s.sqlite#scores: delivering, making {ROWS} rows visible\n" in seen[0]
    assert "s.lmdb: not delivered\n" in seen[0]
    assert "delivering" not in command(capsys, "status", "out")[1]


def test_how_long_a_delivery_took(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The report, the receipt and `status` tell; rows a second are those of scoring; a later look keeps the time."""
    publish = tables.Tables.publish

    def slow(self: Any, load: Any) -> None:
        deliveries.time.sleep(1)
        publish(self, load)

    monkeypatch.setattr(tables.Tables, "publish", slow)
    report = job().run()
    (receipt,) = report.deliveries
    assert 1 <= receipt.seconds <= report.delivering <= report.seconds
    assert report.rows_per_second == pytest.approx(ROWS / (report.seconds - report.delivering))
    assert "upsert in 1." in str(report)
    again = job().run()
    assert again.state == "nothing to do" and again.deliveries == report.deliveries and again.delivering < 1
    assert f"generation 1: {ROWS} rows by upsert in 1." in command(capsys, "status", "out")[1]


def test_rows_that_an_upsert_leaves(capsys: pytest.CaptureFixture[str]) -> None:
    """Those of earlier nights that are not in the result are counted; a delivery that deletes leaves none."""
    job().run()
    source(range(10, ROWS + 1))
    report = job().run(restart=True)
    told = "of earlier nights or of others (delete: true removes them)"
    assert report.deliveries[0].beyond == 10 and f"10  {told}" in str(report)
    status = command(capsys, "status", "out")[1]
    assert "31 rows by upsert in " in status and f"; 10 rows beside them: {told}" in status
    assert job().run().deliveries[0].beyond == 10
    code, out, _ = command(capsys, "deliver", "out", "sqlite://s.sqlite?mode=upsert&key=id&delete=true#scores")
    assert code == 0 and "beside" not in out
    assert [row[0] for row in rows()] == [*range(10, ROWS + 1)]
    source(range(20, ROWS))
    Path("job.yaml").write_text(Path("job.yaml").read_text().replace("mode=upsert", "mode=upsert&delete=true"))
    code, out, _ = command(capsys, "run", "job.yaml", "--restart")
    assert code == 0 and "beside" not in out and [row[0] for row in rows()] == [*range(20, ROWS)]


def test_keys_that_repeat_hold_the_result_back(capsys: pytest.CaptureFixture[str]) -> None:
    """Before publishing, exit 3, which nobody tries again: sink and store have the old rows. What was accepted is
    published and not delivered: exit 2, and each time that it is run again.
    """
    assert command(capsys, "run", "job.yaml")[0] == 0
    source([*range(10), 3])
    there = rows()
    code, _, err = command(capsys, "run", "job.yaml", "--restart")
    assert code == 3 and "1 key (id) repeats: 3 2 times" in err and "nothing new was published" in err
    assert gm.read("out").count_rows() == ROWS and rows() == there
    assert "not published: a gate did not hold" in command(capsys, "status", "out")[1]
    code, _, err = command(capsys, "run", "job.yaml", "--accept")
    assert code == 2 and "repeats: 3 2 times" in err and "the result is published" in err
    assert gm.read("out").count_rows() == 11 and rows() == there
    assert command(capsys, "run", "job.yaml")[0] == 2
    assert command(capsys, "deliver", "job.yaml")[0] == 2
    assert rows() == there


def test_keys_of_an_update_that_repeat(capsys: pytest.CaptureFixture[str]) -> None:
    """Each night is held back alike, until the source has each key once."""
    nightly = ("run", "job.yaml", "--update", "--key", "id")
    assert command(capsys, *nightly)[0] == 0
    source([*range(ROWS), 3])
    assert command(capsys, *nightly)[0] == 3 and command(capsys, *nightly)[0] == 3
    assert len(rows()) == ROWS == gm.read("out").count_rows()
    source(range(ROWS + 2))
    code, _, err = command(capsys, *nightly)
    assert code == 0, err
    assert len(rows()) == ROWS + 2 == gm.read("out").count_rows()


def unless_mended(batch: dict[str, Any]) -> dict[str, Any]:
    """Fails for the last row, until a file says that it is mended."""
    if not Path("mended").exists() and (np.asarray(batch["x"]) >= ROWS / 4).any():
        raise ValueError("not yet")
    return doubled(batch)


@pytest.mark.parametrize("twin", [3, ROWS])
def test_a_retry_with_the_key_of_another_row_of_its_night(twin: int) -> None:
    """It takes that row's place in the store, and a warning names the key; a row of a key of its own has none."""
    source([*range(ROWS), twin])
    sink, gates = gm.sink("out", keep="id"), {"min_ok": 0.0}
    night = gm.Job("rows.parquet", unless_mended, sink, workers=0, deliver=[gm.to(UPSERT)], gates=gates)
    with pytest.warns(gm.GristmillWarning, match="dead"):
        assert night.run().rows_dead == 1
    Path("mended").touch()
    if twin == ROWS:
        assert not [note for note in gm.retry_dead(night).notes if "repeat" in note] and len(rows()) == ROWS + 1
        return
    with pytest.warns(gm.GristmillWarning, match=r"\(id\) repeats: 3 2 times.* the last scored counts"):
        gm.retry_dead(night)
    assert len(rows()) == ROWS and (3, ROWS / 2) in rows()
