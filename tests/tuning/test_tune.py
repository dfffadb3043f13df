"""`gristmill tune` and job.tune(): measured on real rows, shown as a table and a curve, written into the job file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

import gristmill as gm
from gristmill.tuning.apply import edited, write

JOB = """\
# Embeds what people wrote.
source: {uri: "in.parquet"}
model:  {embed: "MODEL", text: text}   # the int8 file
sink:   {uri: "out", keep: [id]}
running:
  batch_rows: 64   # many short ones
  window_bytes: 8388608
"""


@pytest.fixture
def folder(tmp_path: Path, docstrings: list[str], minilm_int8: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A job file with comments, 300 texts beside it, and an empty cache."""
    monkeypatch.setenv("GRISTMILL_CACHE", str(tmp_path / "cache"))
    pq.write_table(pa.table({"id": range(300), "text": [t[:150] for t in docstrings[:300]]}), tmp_path / "in.parquet")
    (tmp_path / "job.yaml").write_text(JOB.replace("MODEL", str(minilm_int8)))
    return tmp_path


def command(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "gristmill", "tune", "job.yaml", *arguments]
    return subprocess.run(line, cwd=folder, capture_output=True, text=True, timeout=200)


@pytest.mark.long
@pytest.mark.real_model
def test_the_command_measures_draws_and_writes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table with bars and the knee, a PNG, and a job file with one line more; the next run uses the knee."""
    done = command(folder, "--budgets", "64,256,512", "--rounds", "2", "--threads", "1", "--plot", "c.png", "--write")
    assert done.returncode == 0, done.stderr
    assert "█" in done.stdout
    assert "the knee" in done.stdout
    assert (folder / "c.png").read_bytes().startswith(b"\x89PNG")
    assert not (folder / "out").exists()
    text = (folder / "job.yaml").read_text()
    knee = yaml.safe_load(text)["running"]["batch_tokens"]
    assert knee in (64, 256, 512)
    assert text.replace(f"  batch_tokens: {knee}\n", "") == JOB.replace(JOB.split('"')[3], text.split('"')[3])
    assert len(list((folder / "cache" / "budgets").iterdir())) == 1
    monkeypatch.chdir(folder)
    assert gm.run("job.yaml").details["batch"]["tokens"] == knee


@pytest.mark.long
@pytest.mark.real_model
def test_arrangements_are_compared_where_they_are_open(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One worker of all cores against a worker a core, in alternation, on the job's rows; the twin of the command."""
    monkeypatch.chdir(folder)
    found = gm.load_job("job.yaml").tune([128, 512], rounds=1)
    assert {m.budget for m in found.budgets} <= {128, 512}
    assert found.unit == "tokens"
    assert found.knee in found.rates
    splits = {(m.arrangement.workers, m.arrangement.threads) for m in found.arrangements}
    assert (found.best.workers, found.best.threads) in splits
    assert all(m.rate > 0 for m in found.arrangements)


def test_models_without_lengths_are_measured_in_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a function budgets are rows; memory that runs out ends the sweep there, and the knee is below."""
    monkeypatch.setenv("GRISTMILL_CACHE", str(tmp_path / "cache"))
    pq.write_table(pa.table({"x": range(3000)}), tmp_path / "in.parquet")

    def score(batch):
        import time

        if len(batch["x"]) > 100:
            raise MemoryError
        time.sleep(0.01)
        return {"y": batch["x"]}

    found = gm.Job(str(tmp_path / "in.parquet"), score, str(tmp_path / "out"), workers=1).tune(
        [10, 100, 1000, 2000], rounds=1
    )
    assert found.unit == "rows"
    assert found.knee == 100
    assert [(m.budget, m.failed) for m in found.budgets] == [(10, ""), (100, ""), (1000, "memory")]
    file = tmp_path / "job.yaml"
    file.write_text("running: {batch_rows: 5}\nprofiles:\n  prod: {running: {batch_rows: 7}}\n  dev: {}\n")
    with pytest.raises(gm.BadJob, match=r"profile prod of .* has its own running\.batch_rows; put this there: running"):
        write(found, str(file), "prod")
    assert (
        write(found, str(file), "dev")["running"] == yaml.safe_load(file.read_text())["running"] == {"batch_rows": 100}
    )


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("a: 1\n", "a: 1\nrunning: {batch_tokens: 7}\n"),
        (
            "running: {batch_tokens: 5, batch_rows: 2} # x\nb: 2\n",
            "running: {batch_tokens: 7, batch_rows: 2} # x\nb: 2\n",
        ),
        ("running: {}\n", "running: {batch_tokens: 7}\n"),
        ("running:\n  # why\n  batch_tokens: 5  # five\nb: 2", "running:\n  # why\n  batch_tokens: 7  # five\nb: 2"),
        ("running:\n    log: x\n\nb: 2\n", "running:\n    batch_tokens: 7\n    log: x\n\nb: 2\n"),
    ],
)
def test_one_line_of_a_job_file_is_changed(before: str, after: str) -> None:
    """In braces, in a block, or anew: everything else stays as it was."""
    assert edited(before, "running", {"batch_tokens": 7}) == after
    assert yaml.safe_load(after)["running"]["batch_tokens"] == 7


def test_what_cannot_be_tuned_is_said(folder: Path) -> None:
    """Budgets that are no numbers, and a job without a model, are exit 2."""
    done = command(folder, "--budgets", "many")
    assert done.returncode == 2
    assert "whole numbers" in done.stderr
    (folder / "job.yaml").write_text("sink: {uri: out}\n")
    assert command(folder).returncode == 2


def slower(batch):
    """A row takes longer the more there are of them."""
    import time

    time.sleep(1e-7 * len(batch["x"]) ** 2)
    return {"y": batch["x"]}


@pytest.mark.long
def test_budgets_that_are_asked_for_are_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As given, also where smaller ones were much faster and the usual sample is smaller; or a line says why not."""
    monkeypatch.setenv("GRISTMILL_CACHE", str(tmp_path / "cache"))
    pq.write_table(pa.table({"x": range(2500)}), tmp_path / "in.parquet")
    job = gm.Job(str(tmp_path / "in.parquet"), slower, str(tmp_path / "out"), workers=1)
    found = job.tune([10, 500, 1000, 2000, 4000, 8000], rounds=1)
    assert [m.budget for m in found.budgets] == [10, 500, 1000, 2000]
    assert found.notes[-1].startswith("budget 8,000 was not tried: its call would not be full with all 2,500 rows")
    monkeypatch.setattr("gristmill.tuning.sweep.LONGEST_CALL", 0.2)
    found = job.tune([10, 1000, 2400], rounds=2)
    assert [m.budget for m in found.budgets] == [10, 1000]
    assert found.notes[-1] == "budget 2,400 was not tried: its call would take more than 0.2 s"


def constant(batch):
    """A call takes as long as any other, as one to a server does."""
    import time

    time.sleep(0.1)
    return {"y": batch["x"]}


@pytest.mark.long
def test_larger_budgets_are_tried_while_the_largest_is_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond the usual sample, as far as there are rows; never beyond the rows of a shard, which no call exceeds."""
    monkeypatch.setenv("GRISTMILL_CACHE", str(tmp_path / "cache"))
    pq.write_table(pa.table({"x": range(5000)}), tmp_path / "in.parquet")
    job = gm.Job(str(tmp_path / "in.parquet"), constant, str(tmp_path / "out"), workers=1)
    found = job.tune(rounds=1)
    assert [m.budget for m in found.budgets] == [16, 64, 256, 1024, 4096]
    assert found.knee == 4096
    assert found.notes[-1] == "4,096, the largest that was tried, is the best: --budgets tries larger ones"
    cut = gm.Job(str(tmp_path / "in.parquet"), constant, str(tmp_path / "out"), workers=1, shard_rows=500)
    found = cut.tune(rounds=1)
    assert ([m.budget for m in found.budgets], found.knee) == ([16, 64, 256, 500], 500)


def test_a_budget_of_more_rows_than_there_are_is_not_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No rate is claimed for calls that were never made; a note says how many rows there are, --write has what ran."""
    monkeypatch.setenv("GRISTMILL_CACHE", str(tmp_path / "cache"))
    pq.write_table(pa.table({"x": range(50)}), tmp_path / "in.parquet")

    def score(batch):
        import time

        time.sleep(0.002)
        return {"y": batch["x"]}

    job = gm.Job(str(tmp_path / "in.parquet"), score, str(tmp_path / "out"), workers=1)
    found = job.tune([5, 50, 60, 10_000], rounds=2)
    assert ([m.budget for m in found.budgets], found.knee) == ([5, 50], 50)
    assert found.notes == tuple(
        f"budget {n} was not tried: its call would not be full with all 50 rows that there are"
        for n in ("60", "10,000")
    )
    with pytest.raises(
        gm.BadJob, match=r"budget 60 was not tried: .* all 50 rows that there are: give smaller budgets"
    ):
        job.tune([60], rounds=1)
