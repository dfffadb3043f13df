"""Dead rows are never silent: gates, warnings, previews; in Python, on the command line and in job files alike."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import speakers
import victims

import gristmill as gm


def _numbers(folder: Path, rows: int) -> str:
    pq.write_table(pa.table({"id": list(range(rows)), "x": [float(i) for i in range(rows)]}), folder / "in.parquet")
    return str(folder / "in.parquet")


def _picky(bad: list[int]) -> Any:
    return gm.model(speakers.picky, bad=bad)


def _command(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "gristmill", *arguments]
    env = {"PYTHONPATH": ":".join([str(Path(__file__).parent), *sys.path])}
    return subprocess.run(line, cwd=folder, capture_output=True, text=True, timeout=200, env=env)


# ---------------------------------------------------------------- 68


@pytest.mark.parametrize(
    ("rows", "dead", "gates", "holds"),
    [
        (10, 1, {}, True),  # one dead row is always allowed,
        (10, 2, {}, False),
        (200, 2, {}, True),
        (200, 3, {}, False),
        (10, 1, {"min_ok": 1}, False),  # unless every row was asked for
        (10, 5, {"min_ok": 0.5}, True),
        (1, 1, {}, False),  # nothing would be published
    ],
)
def test_fault_68_a_job_fails_below_min_ok(
    rows: int, dead: int, gates: dict[str, Any], holds: bool, tmp_path: Path
) -> None:
    """0.99 unless the job says otherwise. What fails says how to look and how to lower the gate; what is allowed warns,
    with count, share, reasons and the way to see them.
    """
    out = tmp_path / "out"
    options: dict[str, Any] = {"gates": gates} if gates else {}
    job = gm.Job(_numbers(tmp_path, rows), _picky(list(range(dead))), str(out), workers=0, **options)
    if not holds:
        with pytest.raises(gm.GateFailed, match="ValueError: ") as failed:
            job.run()
        said = str(failed.value)
        assert f"gristmill dead {out}" in said and "--accept" in said and not (out / "_SUCCESS").exists()
        assert rows == 1 or "min_ok: 0." in said
        return
    with pytest.warns(gm.GristmillWarning) as warned:
        report = job.run()
    (told,) = warned
    assert f"{dead} of {rows} rows ({dead / rows:.2%}) are dead letters (ValueError: {dead})" in str(told.message)
    assert f"gristmill dead {out}" in str(told.message) and "report.dead()" in str(told.message)
    assert told.filename == __file__ and report.dead().num_rows == dead


def test_fault_68_the_gate_that_is_advised_holds(quick: Path) -> None:
    """A run that was stopped early says how many of how many rows had failed by then, and advises a gate that holds if
    the others fail as often.
    """
    bad = list(range(0, 3000, 24))

    def job(min_ok: float) -> gm.Job:
        model, gates = gm.model(victims.scored, bad=bad), {"min_ok": min_ok}
        return gm.Job(victims.table(3000), model, str(quick / "out"), workers=0, shard_rows=100, gates=gates)

    with pytest.raises(
        gm.GateFailed, match=r"of [\d,]+ rows so far \(4\.\d%\) are dead.*at most 30 of all 3,000"
    ) as early:
        job(0.99).run()
    (advised,) = re.findall(r"--min-ok (0\.\d+)", str(early.value))
    assert 0.8 < float(advised) < 0.96
    assert job(float(advised)).run().rows_dead == len(bad)


def _lines(folder: Path, texts: list[str]) -> str:
    lines = [json.dumps({"id": i, "x": float(i), "text": text}) for i, text in enumerate(texts)]
    (folder / "in.jsonl").write_text("\n".join(lines) + "\n")
    return str(folder / "in.jsonl")


def test_a_gate_over_lines_stops_early(tmp_path: Path) -> None:
    """Where only reading tells how many rows there are, a run ends once ten times as many as are foretold are not
    enough; going on says so at once, and `accept` goes on.
    """
    source, bad = _lines(tmp_path, ["some text"] * 1000), list(range(0, 1000, 2))
    job = gm.Job(source, _picky(bad), str(tmp_path / "out"), workers=0, shard_rows=50)
    with pytest.raises(
        gm.GateFailed, match=r"min_ok 0\.99 can hardly hold any more: .*10 times the rows that there"
    ) as first:
        job.run()
    (scored,) = re.findall(r"of ([\d,]+) rows so far", str(first.value))
    assert 50 <= int(scored.replace(",", "")) < 500
    with pytest.raises(gm.GateFailed) as again:
        job.run()
    assert str(again.value) == str(first.value)
    with pytest.warns(gm.GristmillWarning, match="500 of 1000 rows"):
        assert job.run(accept=True).rows_dead == 500


def test_a_gate_over_lines_waits_for_shorter_ones(tmp_path: Path) -> None:
    """Long rows, which come first, fail, as those too long for a model do: the gate holds in the end."""
    source = _lines(tmp_path, ["long" * 5000] * 110 + ["x"] * 11_890)
    gates = {"warn_failed": 0.001}
    job = gm.Job(
        source, _picky(list(range(110))), str(tmp_path / "out"), workers=0, shard_rows=100, batch_rows=50, gates=gates
    )
    with pytest.warns(gm.GristmillWarning, match="110 of 12000 rows"):
        assert job.run().rows_ok == 11_890


@pytest.mark.parametrize("bad_shards", [1, 2])
def test_fault_68_rows_committed_before_count(quick: Path, bad_shards: int) -> None:
    """The same job again after a gate failed scores nothing at all: what is committed cannot hold it any more. With a
    gate that could hold, it goes on and counts those from before; message, report and status agree.
    """
    log = quick / "log"
    bad = [*range(10), *(range(550, 560) if bad_shards > 1 else ())]

    def job(min_ok: float) -> gm.Job:
        model = gm.model(victims.scored, bad=bad, log=str(log))
        gates = {"min_ok": min_ok}
        return gm.Job(victims.table(1000), model, str(quick / "out"), workers=0, shard_rows=100, gates=gates)

    def failed(min_ok: float, dead: int) -> gm.Report:
        with pytest.raises(gm.GateFailed) as e:
            job(min_ok).run()
        report = e.value.report
        assert report is not None and report.rows_dead == dead and report.rows_in == 100 * report.shards_done
        told = re.search(r"(\d+) of (\d+) rows so far", str(e.value))  # a shard may be committed while the run stops
        assert told is not None and int(told[1]) == dead and int(told[2]) <= report.rows_in
        return report

    failed(0.998, 10)
    log.unlink()
    again = failed(0.998, 10)
    assert again.shards_resumed == again.shards_done > 0 and again.rows_run == 0 and not log.exists()
    if bad_shards == 1:
        assert job(0.98).run().rows_dead == 10
        return
    later = failed(0.985, 20)
    assert later.shards_resumed == again.shards_done and later.rows_run == later.rows_in - again.rows_in > 0
    status = gm.status(str(quick / "out"))
    assert (status["rows_dead"], status["rows_ok"]) == (20, status["rows_done"] - 20)


@pytest.mark.long
def test_fault_68_half_of_the_rows_in_every_form(tmp_path: Path) -> None:
    """A job in a file, a command, a table without a sink, a stream: none of them publishes half of the rows."""
    source, bad = _numbers(tmp_path, 40), list(range(0, 40, 2))
    table = pq.read_table(source)
    with pytest.raises(gm.GateFailed, match=r"20 of 40 rows could not be scored"):
        gm.apply(table, fn=_picky(bad), workers=0)
    with pytest.raises(gm.GateFailed, match=r"min_ok 0\.99"):
        list(gm.Job(source, _picky(bad), workers=0).stream())
    done = _command(
        tmp_path, "apply", source, "out/", "--fn", "speakers:picky", "--arg", f"bad={bad}", "--workers", "0"
    )
    assert done.returncode == 3 and "min_ok 0.99" in done.stderr and "--min-ok 0.5" in done.stderr, done.stderr
    (tmp_path / "job.yaml").write_text(
        f"source: {source}\nmodel: {{call: 'speakers:picky', args: {{bad: {bad}}}}}\nsink: filed\n"
    )
    assert _command(tmp_path, "run", "job.yaml").returncode == 3
    assert _command(tmp_path, "run", "job.yaml", "--min-ok", "0.5").returncode == 0


def test_fault_68_what_is_allowed_is_told_in_every_form(tmp_path: Path) -> None:
    """Without a sink and in a stream, too; and where warnings are errors, after the result is published."""
    source = _numbers(tmp_path, 40)
    with pytest.warns(gm.GristmillWarning, match="1 of 40 rows could not be scored.*they are not in the table"):
        assert gm.apply(pq.read_table(source), fn=_picky([7]), keep=["id"], workers=0).num_rows == 39
    with pytest.warns(gm.GristmillWarning, match="1 of 40 rows .*are dead letters.*in none of the tables"):
        assert sum(t.num_rows for t in gm.Job(source, _picky([7]), workers=0).stream()) == 39
    job = gm.Job(source, _picky([7]), str(tmp_path / "out"), workers=0)
    with warnings.catch_warnings(), pytest.raises(gm.GristmillWarning, match="1 of 40"):
        warnings.simplefilter("error")
        job.run()
    assert gm.status(str(tmp_path / "out"))["rows_ok"] == 39


def test_fault_68_nulls_that_no_gate_allows_are_told_at_planning(tmp_path: Path) -> None:
    """Before a model is loaded: two of ten texts are null; one is no reason."""
    path = tmp_path / "in.parquet"
    takes = gm.model(speakers.picky, bad=[], takes={"x": "float64 not null", "id": "int64"})
    for nulls, refused in ((1, False), (2, True)):
        x = [None if i < nulls else float(i) for i in range(10)]
        pq.write_table(pa.table({"id": list(range(10)), "x": pa.array(x, pa.float64())}), path)
        job = gm.Job(str(path), takes, str(tmp_path / f"out{nulls}"), workers=0)
        assert bool(job.plan().problems) == refused
        if refused:
            with pytest.raises(gm.GateFailed, match=r"2 of 10 rows are null in x.*--min-ok 0\.8"):
                job.run()


# ---------------------------------------------------------------- 78


@pytest.mark.long
def test_fault_78_a_preview_in_which_all_rows_fail_fails(tmp_path: Path) -> None:
    """The error with its traceback, the rows, exit 1; from Python RunFailed."""
    source = _numbers(tmp_path, 40)
    line = ("apply", source, "out/", "--fn", "speakers:picky", "--arg", f"bad={list(range(40))}", "--preview", "5")
    done = _command(tmp_path, *line)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "none of 5 rows was scored" in done.stderr and "ValueError: row 0 is bad" in done.stderr
    assert "Traceback" in done.stderr and "speakers.py" in done.stderr
    assert "5 rows failed" in done.stdout and "in.parquet:4" in done.stdout and "row 4 is bad" in done.stdout
    with pytest.raises(gm.RunFailed, match=r"none of 5 rows was scored(.|\n)*Traceback"):
        gm.Job(source, _picky(list(range(40))), workers=0).preview(5)


@pytest.mark.long
def test_fault_78_rows_that_fail_are_listed_beside_the_others(tmp_path: Path) -> None:
    """A table of row, stage, error and message, whatever the gates; with --json on standard error; a warning in
    Python.
    """
    source = _numbers(tmp_path, 40)
    line = ("apply", source, "out/", "--fn", "speakers:picky", "--arg", "bad=[1,3]", "--preview", "5", "--min-ok", "1")
    done = _command(tmp_path, *line)
    assert done.returncode == 0, done.stderr
    assert "3 rows, nothing was written" in done.stdout and "2 rows failed" in done.stdout
    failed = done.stdout.partition("2 rows failed")[2].splitlines()
    assert failed[1].split() == ["row", "stage", "error", "message"]
    assert failed[3].split() == ["in.parquet:1", "model", "ValueError", "row", "1", "is", "bad"]
    done = _command(tmp_path, *line, "--json")
    assert done.stdout.count("\n") == 3 and "2 rows failed" in done.stderr
    with pytest.warns(gm.GristmillWarning, match="row 1 of .*ValueError: row 1 is bad"):
        assert gm.Job(source, _picky([1, 3]), workers=0).preview(5).num_rows == 3


def test_an_early_gate_waits_for_rows_that_a_map_may_repeat(tmp_path: Path) -> None:
    """Twenty bad rows come first, and the others fifty times each: no shard so far tells that."""
    import numpy as np

    def repeated(frame: Any) -> Any:
        return frame.loc[frame.index.repeat(np.where(frame["id"] >= 100, 50, 1))].reset_index(drop=True)

    def scored(batch: Any) -> Any:
        if (batch["id"] < 20).any():
            raise ValueError("bad")
        return {"y": batch["id"]}

    pq.write_table(pa.table({"id": list(range(1000))}), tmp_path / "in.parquet", row_group_size=100)
    steps = [gm.step(repeated, batch_format="pandas")]
    sink = gm.sink(tmp_path / "out", keep=["id"])
    report = gm.run(gm.Job(tmp_path / "in.parquet", scored, sink, steps=steps, workers=0, shard_rows=100))
    assert (report.rows_ok, report.rows_dead) == (80 + 900 * 50, 20)
