"""What a person sees of a run: whole lines, right figures, and every dead row."""

from __future__ import annotations

import io
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import speakers
from heard import Heard

import gristmill as gm
from gristmill.observe.events import Note, Progress
from gristmill.observe.report import Counts, WorkerPace, show_report


@dataclass
class Watched:
    """An observer that keeps every snapshot."""

    seen: list[Progress] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)

    def progress(self, now: Progress) -> None:
        """Keep it."""
        self.seen.append(now)

    def note(self, note: Note) -> None:
        """Keep it."""
        self.notes.append(note)

    def close(self) -> None:
        """Nothing to close."""

    def assert_monotonic(self, total: int) -> None:
        """Rows and shares only grow, never over the total, and end there."""
        rows = [now.rows_done for now in self.seen]
        shares = [now.share for now in self.seen]
        assert rows == sorted(rows) and shares == sorted(shares), rows
        assert all(now.rows_total in (None, total) for now in self.seen), {now.rows_total for now in self.seen}
        last = self.seen[-1]
        assert (last.rows_done, last.rows_total, last.share, last.shards_done) == (total, total, 1.0, last.shards_total)
        assert max(rows) == total


# ---------------------------------------------------------------- 65


def test_fault_65_what_workers_print_is_whole_lines(tmp_path: Path) -> None:
    """Two workers flood both of their streams, from two threads each: no line is torn, whatever is left out."""
    source = _parquet(tmp_path / "in", 800)
    heard = Heard()
    steps = [gm.step(speakers.noisy, name="step")]
    job = gm.Job(source, gm.model(speakers.noisy, name="model"), str(tmp_path / "out"), steps=steps, workers=2,
                 shard_rows=100, batch_rows=20)  # fmt: skip
    assert job.run(observer=heard).rows_ok == 800
    lines = [n.text for n in heard.notes if n.level == "print"]
    torn = [line for line in lines if not re.fullmatch(r"(step|model) (out|err) \d+ x{150} ä{20} end|… \(.*\)", line)]
    assert len(lines) > 400 and not torn
    assert any(line.startswith("… (") and "lines left out" in line for line in lines)


def test_fault_65_the_last_unfinished_line_is_shown(tmp_path: Path) -> None:
    """What a worker had printed when it died, without a line's end, is shown and is evidence."""
    source = _parquet(tmp_path / "in", 20)
    heard = Heard()
    with pytest.raises(gm.RunFailed, match="its last words"):
        gm.Job(source, gm.model(speakers.Speaks), str(tmp_path / "out"), workers=1).run(observer=heard)
    assert "its last words" in [n.text for n in heard.notes if n.level == "print"]


# ---------------------------------------------------------------- 67, 79


def _parquet(folder: Path, rows: int) -> str:
    folder.mkdir()
    for k in range(2):
        ids = range(k * rows // 2, (k + 1) * rows // 2)
        pq.write_table(pa.table({"id": list(ids), "x": [float(i) for i in ids]}), folder / f"{k}.parquet")
    return str(folder)


def _csv(folder: Path, rows: int) -> str:
    folder.mkdir()
    pa.csv.write_csv(pa.table({"id": list(range(rows)), "x": [float(i) for i in range(rows)]}), folder / "a.csv")
    return str(folder / "a.csv")


KINDS: dict[str, tuple[Any, dict[str, Any], dict[str, Any], int]] = {
    "post steps, growing batches": (_parquet, {}, {"post": [speakers.same]}, 4000),
    "flat_map": (_parquet, {}, {"steps": [gm.flat_map(speakers.thrice)], "batch_rows": 50}, 4000),
    "filters": (_parquet, {}, {"steps": [gm.filter("id % 3 = 0")], "batch_rows": 50}, 4000),
    "sample": (_parquet, {"sample": 1111}, {"batch_rows": 50}, 1111),
    "where": (_parquet, {"where": "id < 700"}, {"batch_rows": 50}, 4000),
    "csv": (_csv, {}, {"batch_rows": 50}, 4000),
    "csv with limit": (_csv, {"limit": 3001}, {"batch_rows": 50}, 3001),
    "csv with sample": (_csv, {"sample": 1500}, {"batch_rows": 50}, 1500),
}


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_fault_67_progress_grows_to_the_total(kind: str, tmp_path: Path) -> None:
    """Every kind of job: monotonic, with figures between start and end, and 100 % of source rows at the end."""
    made, source, options, total = KINDS[kind]
    uri = made(tmp_path / "in", 4000)
    watched = Watched()
    few = 0.1 if kind in ("where", "sample", "csv with sample") else 0.03  # batches; long enough to be seen at work
    model = gm.model(speakers.scored, seconds=few if "batch_rows" in options else 0.4)
    job = gm.Job(gm.source(uri, **source), model, str(tmp_path / "out"), shard_rows=1000, workers=1, **options)
    report = job.run(observer=watched)
    assert report.rows_in == total
    watched.assert_monotonic(total)
    between = [now.share for now in watched.seen if 0 < now.share < 1]
    assert len(set(between)) >= 2, [now.share for now in watched.seen]


@pytest.mark.long
def test_fault_67_a_shard_that_is_done_again_counts_once(tmp_path: Path) -> None:
    """A worker dies in the middle of shards, and rows are isolated one by one: nothing is taken back or counted
    twice; neither in the run that goes on with a part of it done.
    """
    source = _parquet(tmp_path / "in", 2000)
    watched = Watched()
    model = gm.model(speakers.dies_at, bad=[333, 1444], seconds=0.01)
    options: dict[str, Any] = {"shard_rows": 500, "batch_rows": 25, "workers": 1, "gates": {"min_ok": 0.9}}
    report = gm.Job(source, model, str(tmp_path / "out"), **options).run(observer=watched)
    assert report.rows_dead == 2
    watched.assert_monotonic(2000)


def test_fault_67_a_resumed_run_begins_where_it_stood(tmp_path: Path) -> None:
    """Shards of before count from the start, and the receipt of one that does not read back is no row more."""
    source = _parquet(tmp_path / "in", 2000)
    gate = tmp_path / "gate"
    out = tmp_path / "out"
    model = gm.model(speakers.stops_at, row=1700, unless=str(gate))
    job = gm.Job(source, model, str(out), shard_rows=250, batch_rows=25, workers=1)
    with pytest.raises(gm.RunFailed):
        job.run()
    gate.mkdir()
    done = sorted((out / "_gristmill" / "g0001").rglob("receipts/*")) or sorted(out.rglob("receipts/*"))
    assert len(done) >= 4
    done[0].write_bytes(b"torn")
    watched = Watched()
    assert job.run(observer=watched).rows_ok == 2000
    first = next(now for now in watched.seen if now.rows_done)
    assert first.rows_done >= 250 * 4
    watched.assert_monotonic(2000)


def test_fault_79_figures_are_right_or_none(tmp_path: Path) -> None:
    """Of a run that is over in a moment no share of the workers' time is told; of one that was stopped before it had
    committed anything, no counts.
    """
    report = gm.Job(_parquet(tmp_path / "in", 20), speakers.scored, str(tmp_path / "out"), workers=1).run()
    assert report.busy is None and report.held_back == {}
    shown = io.StringIO()
    show_report(report, shown)
    assert "busy" not in shown.getvalue() and "rows in" in shown.getvalue()
    model = gm.model(speakers.stops_at, row=3, unless=str(tmp_path / "never"))
    with pytest.raises(gm.RunFailed) as failed:
        gm.Job(str(tmp_path / "in"), model, str(tmp_path / "other"), workers=1, shard_rows=10, batch_rows=2).run()
    stopped = failed.value.report or replace(report, state="stopped", counts=Counts(), shards_done=0, files=0)
    shown = io.StringIO()
    show_report(stopped, shown)
    assert "rows in" not in shown.getvalue() and "committed" not in shown.getvalue()
    assert re.search(r"shards +0  of ", shown.getvalue())


@pytest.mark.long
def test_the_model_is_busy_with_the_rows_that_it_is_tried_with(tmp_path: Path) -> None:
    """All rows of a small job are scored before there is a plan: that is the model's time, too."""
    model = gm.model(speakers.scored, seconds=2.0)
    job = gm.Job(_parquet(tmp_path / "in", 8), model, str(tmp_path / "out"), steps=[gm.filter("id >= 0")], workers=1,
                 batch_rows=8)  # fmt: skip
    report = job.run()
    assert report.busy is not None and report.busy > 0.3, (report.busy, report.held_back)


def test_the_report_says_what_each_worker_did(tmp_path: Path) -> None:
    """Rows, seconds and rows a second of each, in the table and as JSON; together they are the run's."""
    model = gm.model(speakers.scored, seconds=0.05)
    job = gm.Job(_parquet(tmp_path / "in", 1000), model, str(tmp_path / "out"), workers=2, shard_rows=50, batch_rows=25)
    report = job.run()
    paces = report.as_dict()["per_worker"]
    assert sum(p["rows"] for p in paces) == 1000 and {p["worker"] for p in paces} <= {"w0", "w1"}
    assert all(p["host"] and p["rows_per_second"] == pytest.approx(p["rows"] / p["seconds"], rel=0.01) for p in paces)
    assert report.busy is not None and 0.1 < report.busy <= 1
    shown = io.StringIO()
    show_report(replace(report, per_worker=(*report.per_worker[:1], WorkerPace("w1", "h", 400, 2.0))), shown)
    assert re.search(r"  w1 +200/s  .*h, 400 rows, 2.00 s at work", shown.getvalue())
